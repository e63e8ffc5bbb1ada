/* models/model_tensors.c: the tensors of a model in files: compared, read, written. */
#include "autograd/functional.h"
#include "autograd/operations.h"
#include "kernels/error.h"
#include "kernels/memory_internal.h"
#include "models/model_tensors.h"
#include "nn/walk.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- of a module ----------------------------------------------------------------------------- */

static bool add(kn_model_tensors *t, const char *name, kn_dtype dtype, const kn_tensor *whole,
                kn_tensor *buffer)
{
    kn_safetensors_entry *e = &t->entry[t->count];
    *e = (kn_safetensors_entry){ .name = kn_host_strdup(name),
                                 .dtype = dtype,
                                 .ndim = kn_ndim(whole) };
    memcpy(e->shape, kn_shape(whole), (size_t)e->ndim * sizeof *e->shape);
    t->buffer[t->count++] = buffer ? kn_keep(buffer) : NULL;
    return e->name != NULL;
}

bool kn_model_tensors_make(kn_model_tensors *t, void *module)
{
    const kn_param *p;
    const int params = kn_params(module, &p);
    int count = params;
    *t = (kn_model_tensors){ 0 };
    for (kn_walk w = kn_walk_begin(module); kn_next_buffer(&w);)
        count++;
    bool ok = kn_ok() && kn_host_grow(&t->entry, &t->entry_room, count + 1, sizeof *t->entry) &&
              kn_host_grow(&t->buffer, &t->buffer_room, count + 1, sizeof *t->buffer);
    for (int i = 0; ok && i < params; i++)
        ok = add(t, p[i].name, p[i].master ? kn_dtype_of(p[i].master) : kn_dtype_of(p[i].tensor),
                 p[i].tensor, NULL);
    for (kn_walk w = kn_walk_begin(module); ok && kn_next_buffer(&w);)
        ok = add(t, w.name, kn_dtype_of(w.tensor), w.tensor, w.tensor);
    return ok && kn_ok();
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
    kn_scope scope = kn_scope_begin();
    kn_tensor *zeros = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(size));
    bool ok = zeros && kn_host_grow(&t->entry, &t->entry_room, t->count + 1, sizeof *t->entry) &&
              kn_host_grow(&t->buffer, &t->buffer_room, t->count + 1, sizeof *t->buffer) &&
              add(t, name, KN_F32, zeros, zeros);
    kn_scope_end(scope);
    return ok;
}

void kn_model_tensors_free(kn_model_tensors *t)
{
    for (int i = 0; i < t->count; i++) {
        kn_host_free((void *)t->entry[i].name);
        kn_tensor_free(t->buffer[i]);
    }
    kn_host_free(t->entry);
    kn_host_free(t->buffer);
    *t = (kn_model_tensors){ 0 };
}

/* ---- comparing ------------------------------------------------------------------------------- */

/* Names in a sentence: the first three, and the number of the others. */
typedef struct word_list {
    char text[600];
    int count;
} word_list;

static void list_add(word_list *l, const char *word)
{
    enum { SHOWN = 3 };
    const size_t n = strlen(l->text);
    if (l->count++ < SHOWN)
        snprintf(l->text + n, sizeof l->text - n, "%s'%.64s'", n ? ", " : "", word);
}

static const char *list_end(word_list *l, const char *before, char *buf, size_t size)
{
    char more[32] = "";
    if (l->count > 3)
        snprintf(more, sizeof more, " and %d more", l->count - 3);
    snprintf(buf, size, "%s%s%s", l->count ? before : "", l->text, more);
    return buf;
}

static bool in_head(const char *name, const char *head)
{
    const size_t n = head ? strlen(head) : 0;
    return n > 0 && strncmp(name, head, n) == 0 && name[n] == '.';
}

/* The same kind of numbers and shape; of a head's tensor the first size may differ. */
static bool same(const kn_safetensors_entry *e, const kn_piece *a, bool head)
{
    if (a->ndim != e->ndim || kn_dtype_is_float(a->dtype) != kn_dtype_is_float(e->dtype))
        return false;
    if (!kn_dtype_is_float(e->dtype) && a->dtype != e->dtype)
        return false;
    const int first = head ? 1 : 0;
    return memcmp(a->shape + first, e->shape + first,
                  (size_t)(e->ndim > first ? e->ndim - first : 0) * sizeof *e->shape) == 0;
}

static void describe(word_list *l, const kn_safetensors_entry *e, const kn_piece *a)
{
    char got[96], want[96];
    kn_array ours = kn_array_make(NULL, e->dtype, e->ndim, e->shape),
             theirs = kn_array_make(NULL, a->dtype, a->ndim, a->shape);
    const size_t n = strlen(l->text);
    if (l->count++ == 0)
        snprintf(l->text + n, sizeof l->text - n, "'%.100s' is %s, should be %s", e->name,
                 kn_array_describe(&theirs, got, sizeof got),
                 kn_array_describe(&ours, want, sizeof want));
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The files' tensors that aren't in t, where found of t's are in them. */
static bool list_others(const kn_model_tensors *t, const kn_pieces *f, int found, word_list *other)
{
    const int count = kn_pieces_count(f);
    if (found == count)
        return true;
    const char **name = kn_host_calloc((size_t)t->count + 1, sizeof *name);
    for (int i = 0; name && i < t->count; i++)
        name[i] = t->entry[i].name;
    if (name)
        qsort(name, (size_t)t->count, sizeof *name, by_name);
    for (int i = 0; name && i < count; i++) {
        const char *theirs = kn_pieces_tensor(f, i)->name;
        if (!bsearch(&theirs, name, (size_t)t->count, sizeof *name, by_name))
            list_add(other, theirs);
    }
    kn_host_free(name);
    return name != NULL;
}

int kn_model_find(const kn_family *family, const kn_pieces *f, const char *name)
{
    const char *prefix = family->optional_prefix;
    const size_t n = prefix ? strlen(prefix) : 0;
    const int i = kn_pieces_find(f, name);
    return i < 0 && n > 0 && strncmp(name, prefix, n) == 0 ? kn_pieces_find(f, name + n) : i;
}

bool kn_model_match(const kn_model_tensors *t, const kn_family *family, const kn_pieces *f,
                    const char *path, const char *than, kn_model_lax lax)
{
    const char *head = lax == KN_MODEL_NEW_HEAD ? family->classifier : NULL;
    word_list missing = { 0 }, other = { 0 }, differs = { 0 };
    char a[700], b[700];
    int found = 0;
    for (int i = 0; i < t->count; i++) {
        const kn_safetensors_entry *e = &t->entry[i];
        const int at = kn_model_find(family, f, e->name);
        found += at >= 0;
        if (at < 0 && (!family->optional || fnmatch(family->optional, e->name, 0) != 0))
            list_add(&missing, e->name);
        if (at >= 0 && !same(e, kn_pieces_tensor(f, at), in_head(e->name, head)))
            describe(&differs, e, kn_pieces_tensor(f, at));
    }
    if (lax != KN_MODEL_OTHERS && !list_others(t, f, found, &other))
        return false;
    if (missing.count + other.count + differs.count == 0)
        return true;
    return kn_fail("%s holds a model of other sizes than %s%s%s%s%s", path, than,
                   differs.count ? ": " : "", differs.text,
                   list_end(&missing, "; it lacks ", a, sizeof a),
                   list_end(&other, "; not of the model: ", b, sizeof b));
}

bool kn_model_check(const kn_model_config *c, const kn_pieces *f, const char *path,
                    const char *than, kn_model_lax lax)
{
    kn_model_tensors t = { 0 };
    const int count = kn_pieces_count(f);
    const int64_t fewest = c->family->fewest_tensors(c->of);
    if (fewest > count)
        return kn_fail("%s holds a model of other sizes than %s: that one has at least %lld "
                       "tensors, the file %d",
                       path, than, (long long)fewest, count);
    bool ok = kn_model_tensors_of(&t, c) && kn_model_match(&t, c->family, f, path, than, lax);
    kn_model_tensors_free(&t);
    return ok;
}

/* ---- values ---------------------------------------------------------------------------------- */

static bool is_finite(kn_tensor *t)
{
    return !kn_dtype_is_float(kn_dtype_of(t)) || kn_numel(t) == 0 ||
           kn_item(kn_all(kn_isfinite(t), 0, NULL, false)) != 0;
}

/* From tensor number at of f. */
static bool fill_one(const kn_model_tensors *t, int i, void *module, kn_pieces *f, int at,
                     const char *path)
{
    const kn_safetensors_entry *e = &t->entry[i];
    kn_tensor *x = kn_pieces_get(f, at);
    if (!x || (!is_finite(x) && kn_ok()))
        return x && kn_fail("%s: '%s' holds a value that isn't finite; the model is damaged", path,
                            e->name);
    x = kn_dtype_of(x) == e->dtype ? x : kn_cast(x, e->dtype);
    if (t->buffer[i])
        return x && kn_copy_(t->buffer[i], x);
    return x && kn_param_write(module, i, kn_data(x));
}

bool kn_model_fill(const kn_model_tensors *t, void *module, kn_pieces *f, const char *path,
                   const char *head)
{
    bool ok = true, mode = kn_set_grad_mode(false);
    for (int i = 0; ok && i < t->count; i++) {
        const kn_safetensors_entry *e = &t->entry[i];
        const int at = kn_pieces_find(f, e->name);
        if (at < 0) /* an optional one */
            continue;
        kn_scope scope = kn_scope_begin();
        ok = (in_head(e->name, head) && !same(e, kn_pieces_tensor(f, at), false)) ||
             fill_one(t, i, module, f, at, path);
        kn_scope_end(scope);
    }
    kn_set_grad_mode(mode);
    return ok && kn_ok();
}

static size_t elements(const kn_safetensors_entry *e)
{
    size_t n = 1;
    for (int d = 0; d < e->ndim; d++)
        n *= (size_t)e->shape[d];
    return n;
}

/* The whole tensor, on every rank. */
static bool read_one(const kn_model_tensors *t, int i, void *module, const kn_ema *ema,
                     kn_comm *comm, void *host)
{
    const size_t bytes = elements(&t->entry[i]) * kn_dtype_size(t->entry[i].dtype);
    if (!t->buffer[i]) {
        kn_tensor *average = ema && !kn_ema_swapped(ema) ? kn_ema_value(ema, i) : NULL;
        return average ? kn_shard_read(module, i, average, host) : kn_param_read(module, i, host);
    }
    kn_tensor *average = ema && !kn_ema_swapped(ema) ? kn_ema_buffer(ema, t->buffer[i]) : NULL;
    return (kn_rank(comm) != 0 || kn_to_host(average ? average : t->buffer[i], host, bytes)) &&
           (kn_comm_size(comm) < 2 || kn_broadcast(comm, host, (int64_t)bytes, 0,
                                                   kn_compute_stream(KN_CPU), "buffer of a model"));
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
    size_t most = 0;
    for (int i = 0; i < t->count; i++) {
        const size_t bytes = elements(&t->entry[i]) * kn_dtype_size(t->entry[i].dtype);
        most = bytes > most ? bytes : most;
    }
    void *host = kn_host_alloc(most + 1);
    bool ok = host != NULL, mode = kn_set_grad_mode(false);
    for (int k = 0; ok && k < t->count; k++) {
        const int i = order ? order[k] : k;
        kn_scope scope = kn_scope_begin();
        ok = read_one(t, i, module, ema, comm, host) && put_one(t, i, host, as[i], put, to);
        kn_scope_end(scope);
    }
    kn_set_grad_mode(mode);
    kn_host_free(host);
    return ok && kn_ok();
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
