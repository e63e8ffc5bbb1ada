/* models/model_tensors.c: the tensors of a model in files: compared, read, written. */
#include "autograd/operations.h"
#include "kernels/error.h"
#include "kernels/memory_internal.h"
#include "models/model_tensors.h"
#include "nn/walk.h"
#include "state/load_internal.h"
#include "tensor/safetensors_format.h"

#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

/* ---- of a module ----------------------------------------------------------------------------- */

static bool add(kn_model_tensors *t, const char *name, kn_dtype dtype, int ndim,
                const int64_t *shape)
{
    if (!kn_host_grow(&t->entry, &t->room, t->count + 1, sizeof *t->entry))
        return false;
    kn_safetensors_entry *e = &t->entry[t->count++];
    *e = (kn_safetensors_entry){ .name = kn_host_strdup(name), .dtype = dtype, .ndim = ndim };
    memcpy(e->shape, shape, (size_t)ndim * sizeof *shape);
    return e->name != NULL;
}

bool kn_model_tensors_make(kn_model_tensors *t, void *module)
{
    kn_entries all;
    *t = (kn_model_tensors){ 0 };
    bool ok = kn_entries_begin(&all, module, NULL);
    all.declared = true;
    ok = ok && kn_entries_add_model(&all, NULL);
    for (int i = 0; ok && i < all.count; i++) {
        const kn_entry *e = &all.list[i];
        ok = add(t, e->name + all.below, e->dtype, e->ndim, e->shape);
    }
    return kn_entries_end(&all) && ok;
}

bool kn_model_tensors_of(kn_model_tensors *t, const kn_model_config *c)
{
    kn_module m = { 0 };
    const bool ok =
        kn_config_init(&m, c, KN_F32, KN_META) /* takes no bytes */ && kn_model_tensors_make(t, &m);
    kn_module_free(&m);
    return ok;
}

bool kn_model_tensors_add_zeros(kn_model_tensors *t, const char *name, int64_t size)
{
    return add(t, name, KN_F32, 1, &size);
}

void kn_model_tensors_free(kn_model_tensors *t)
{
    for (int i = 0; i < t->count; i++)
        kn_host_free((void *)t->entry[i].name);
    kn_host_free(t->entry);
    *t = (kn_model_tensors){ 0 };
}

/* ---- in files -------------------------------------------------------------------------------- */

/* How the tensors of s are loaded into a model. */
typedef struct names {
    kn_load_state_dict_options o;
    kn_rename rename[8];
    char except[128];
} names;

/* theirs: s has the names of the other program. head: a classifier that stays as it is; NULL: none
 * does. */
static void names_of(names *n, const kn_model_config *c, const kn_state *s, bool theirs,
                     const char *head)
{
    const kn_family *f = c->family;
    bool lacks = f->optional;
    *n = (names){ .o.renames = n->rename };
    if (theirs && kn_config_get(c, "tied", 1) != 0) /* the token embedding once more */
        n->rename[n->o.rename_count++] = (kn_rename){ "lm_head.weight", NULL };
    for (const kn_rename *r = theirs ? f->renames : NULL; r && r->from && n->o.rename_count < 8;
         r++)
        n->rename[n->o.rename_count++] = *r;
    for (int i = 0; lacks && i < kn_state_count(s); i++)
        lacks = fnmatch(f->optional, kn_state_name(s, i), 0) != 0;
    if (lacks || head)
        n->o.except = n->except;
    snprintf(n->except, sizeof n->except, "%s%s%s%s", lacks ? f->optional : "",
             lacks && head ? ", " : "", head ? head : "", head ? ".*" : "");
}

static bool fits(void *module, const kn_state *s, const names *n, const char *path,
                 const char *than)
{
    char text[KN_LOADING_TEXT];
    return kn_state_fits(module, s, &n->o, text) &&
           (!*text || kn_fail("%s holds a model of other sizes than %s: %s", path, than, text));
}

/* The same for a model that isn't made. */
static bool fits_declared(const kn_model_config *c, const kn_state *s, bool theirs,
                          const char *path, const char *than)
{
    kn_module m = { 0 };
    names n;
    names_of(&n, c, s, theirs, NULL);
    const bool ok =
        kn_config_init(&m, c, KN_F32, KN_META) /* takes no bytes */ && fits(&m, s, &n, path, than);
    kn_module_free(&m);
    return ok;
}

/* The caller frees it. */
static kn_state *state_of(kn_pieces *f)
{
    kn_state *s = kn_state_new();
    if (s && kn_state_add_pieces(s, f))
        return s;
    kn_state_free(s);
    return NULL;
}

bool kn_model_check(const kn_model_config *c, kn_pieces *f, bool theirs, const char *path,
                    const char *than)
{
    const int count = kn_pieces_count(f);
    const int64_t fewest = c->family->fewest_tensors(c->of);
    if (fewest > count)
        return kn_fail("%s holds a model of other sizes than %s: that one has at least %lld "
                       "tensors, the file %d",
                       path, than, (long long)fewest, count);
    kn_state *s = state_of(f);
    const bool ok = s && fits_declared(c, s, theirs, path, than);
    kn_state_free(s);
    return ok;
}

bool kn_model_is(const kn_model_tensors *t, const kn_model_config *c, const char *than)
{
    kn_state *s = kn_state_new();
    bool ok = s != NULL;
    for (int i = 0; ok && i < t->count; i++) {
        const kn_safetensors_entry *e = &t->entry[i];
        ok = kn_state_add_tensor(s, NULL, e->name, e->dtype, e->ndim, e->shape, NULL);
    }
    ok = ok && fits_declared(c, s, false, "the module", than);
    kn_state_free(s);
    return ok;
}

static bool is_finite(kn_tensor *t)
{
    return !kn_dtype_is_float(kn_dtype_of(t)) || kn_numel(t) == 0 ||
           kn_item(kn_all(kn_isfinite(t), 0, NULL, false)) != 0;
}

static bool all_finite(kn_pieces *f, const char *path)
{
    bool ok = true, mode = kn_set_grad_mode(false);
    for (int i = 0; ok && i < kn_pieces_count(f); i++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *x = kn_pieces_get(f, i);
        ok = x && (is_finite(x) || !kn_ok() ||
                   kn_fail("%s: '%s' holds a value that isn't finite; the model is damaged", path,
                           kn_pieces_tensor(f, i)->name));
        kn_scope_end(scope);
    }
    kn_set_grad_mode(mode);
    return ok && kn_ok();
}

/* Whether module's classifier is of another number of classes than that of s. */
static bool other_head(void *module, const kn_state *s, const char *head)
{
    char name[64];
    snprintf(name, sizeof name, "%s.weight", head);
    const kn_state_item *there = kn_state_find(s, name);
    const kn_tensor *here = kn_look_param(module, name);
    return there && here && there->shape[0] != kn_size(here, 0);
}

bool kn_model_load(const kn_model_config *c, void *module, kn_pieces *f, const char *path,
                   bool new_head, kn_comm *comm)
{
    const char *head = c->family->classifier;
    names n;
    kn_state *s = state_of(f);
    bool ok = s != NULL;
    if (ok) {
        const bool theirs = c->family->kind == KN_LANGUAGE_MODELS;
        names_of(&n, c, s, theirs, new_head && other_head(module, s, head) ? head : NULL);
        n.o.comm = comm;
        ok = fits(module, s, &n, path, "the module has") && (theirs || all_finite(f, path));
    }
    ok = kn_agree(comm, ok) && kn_load_state_dict_(module, s, n.o);
    kn_state_free(s);
    return ok;
}

/* ---- values ---------------------------------------------------------------------------------- */

static size_t bytes_of(const kn_safetensors_entry *e)
{
    int64_t bytes = 0; /* a tensor that is there has as many as can be counted */
    kn_safetensors_bytes(e->dtype, e->ndim, e->shape, &bytes);
    return (size_t)bytes;
}

static bool put_one(const kn_model_tensors *t, int i, const void *host, kn_dtype dtype,
                    kn_model_put put, void *to)
{
    const kn_safetensors_entry *e = &t->entry[i];
    kn_tensor *x = kn_from(e->dtype, KN_CPU, host, e->ndim, e->shape);
    bool finite = x && is_finite(x);
    kn_tensor *y = x && kn_dtype_is_float(e->dtype) ? kn_cast(x, dtype) : x;
    if (!y || !kn_ok())
        return false;
    if (!is_finite(y))
        return kn_fail("'%s' holds a value that isn't %s%s; nothing is saved", e->name,
                       finite ? "a number in " : "finite", finite ? kn_dtype_name(dtype) : "");
    return put(to, i, y);
}

bool kn_model_each(const kn_model_tensors *t, void *module, const kn_ema *ema, kn_comm *comm,
                   const kn_dtype *as, const int *order, kn_model_put put, void *to)
{
    kn_entries all;
    size_t most = 0;
    for (int i = 0; i < t->count; i++)
        most = bytes_of(&t->entry[i]) > most ? bytes_of(&t->entry[i]) : most;
    void *host = kn_host_alloc(most + 1);
    bool ok = kn_entries_begin(&all, module, comm) && kn_entries_add_model(&all, ema) && host,
         mode = kn_set_grad_mode(false);
    for (int k = 0; ok && k < t->count; k++) {
        const int i = order ? order[k] : k;
        kn_scope scope = kn_scope_begin();
        if (i >= all.count)
            memset(host, 0, bytes_of(&t->entry[i]));
        ok = (i >= all.count || kn_entry_gather(&all.list[i], &all, host)) &&
             put_one(t, i, host, as[i], put, to);
        kn_scope_end(scope);
    }
    kn_set_grad_mode(mode);
    kn_host_free(host);
    return kn_entries_end(&all) && ok;
}

static bool put_safetensors(void *to, int i, kn_tensor *x)
{
    (void)i;
    return !to || kn_safetensors_append(to, kn_data(x),
                                        (size_t)kn_numel(x) * kn_dtype_size(kn_dtype_of(x)));
}

bool kn_model_write(const kn_model_tensors *t, void *module, const kn_ema *ema, kn_comm *comm,
                    kn_dtype dtype, const char *path)
{
    static const kn_safetensors_pair meta[] = { { "format", "pt" } };
    kn_safetensors_entry *entry = kn_host_calloc((size_t)t->count + 1, sizeof *entry);
    kn_dtype *as = kn_host_calloc((size_t)t->count + 1, sizeof *as);
    for (int i = 0; entry && as && i < t->count; i++) {
        entry[i] = t->entry[i];
        if (kn_dtype_is_float(entry[i].dtype))
            entry[i].dtype = dtype;
        as[i] = entry[i].dtype;
    }
    const bool writes = kn_rank(comm) == 0;
    kn_safetensors_writer *w =
        entry && as && writes ? kn_safetensors_create(path, entry, t->count, meta, 1) : NULL;
    bool ok = entry && as && (w || !writes) &&
              kn_model_each(t, module, ema, comm, as, NULL, put_safetensors, w);
    if (w && ok)
        ok = kn_safetensors_commit(w);
    else if (w)
        kn_safetensors_abandon(w);
    kn_host_free(entry);
    kn_host_free(as);
    return ok;
}
