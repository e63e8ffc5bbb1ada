/* nn/param.c: parameters of modules, their initial values, and the list for optimizers and
 * files. */
#include "autograd/rows.h"
#include "kernels/kernels_internal.h"
#include "nn/edit.h"
#include "nn/means.h"
#include <string.h>

char *kn_param_path(const kn_module_impl *m, const kn_param_entry *p)
{
    size_t n = strlen(m->path) + strlen(p->name) + 2;
    char *s = kn_host_alloc(n);
    if (s)
        snprintf(s, n, "%s%s%s", m->path, *m->path ? "." : "", p->name);
    return s;
}

void kn_params_changed(kn_module_impl *m)
{
    for (kn_module_impl *below = m; below; below = kn_impl_next(below, m))
        below->list_valid = false;
    for (; m; m = m->parent) {
        m->list_valid = false;
        m->changes++;
    }
}

static kn_param_entry *add_entry(kn_module_impl *m, const char *name)
{
    if (!name || !*name || strchr(name, '.'))
        return kn_fail_null("kn_parameter: the name '%s' must not be empty or hold a dot",
                            name ? name : "");
    for (int i = 0; i < m->params; i++)
        if (strcmp(m->param[i].name, name) == 0)
            return kn_fail_null("kn_parameter: '%s' has a parameter '%s' already",
                                kn_module_shown(m), name);
    if (m->unit)
        return kn_fail_null(
            "kn_parameter: '%s' is a unit of fsdp already; declare parameters before wrapping",
            kn_module_shown(m));
    kn_param_entry *list = kn_host_realloc(m->param, (size_t)(m->params + 1) * sizeof *list);
    char *copy = kn_host_strdup(name);
    if (list)
        m->param = list;
    if (!list || !copy) {
        kn_host_free(copy);
        return NULL;
    }
    kn_param_entry *e = &m->param[m->params++];
    *e = (kn_param_entry){ .name = copy };
    kn_params_changed(m);
    return e;
}

/* ---- defaults of a tree ---------------------------------------------------------------------- */

bool kn_module_defaults_(void *module, kn_module_defaults_options o)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_module_defaults") : NULL;
    if (!m)
        return false;
    if (o.dtype && !kn_dtype_is_float(o.dtype))
        return kn_fail("kn_module_defaults: .dtype is %s; parameters are floats",
                       kn_dtype_name(o.dtype));
    if (o.device < 0 || o.device >= KN_MAX_DEVICES)
        return kn_fail("kn_module_defaults: .device is %d; there are KN_CPU, KN_META and KN_CUDA",
                       (int)o.device);
    m->dtype = o.dtype;
    m->device = o.device;
    return true;
}

kn_dtype kn_dtype_in(const kn_module_impl *m, kn_dtype given)
{
    for (; !given && m; m = m->parent)
        given = m->dtype;
    return given ? given : KN_F32;
}

kn_device kn_device_in(const kn_module_impl *m, kn_device given)
{
    for (; !given && m; m = m->parent)
        given = m->device;
    return given ? given : kn_default_device;
}

/* ---- declaring ------------------------------------------------------------------------------- */

/* Runs at the first read of a parameter that nothing has filled yet. */
static bool fill_at_first(void *module, kn_storage *s)
{
    const kn_module_impl *m = module;
    for (int i = 0; i < m->params; i++)
        if (m->param[i].declared && m->param[i].tensor->storage == s)
            return kn_param_fill_whole(m, i, kn_context_get()->rng.seed);
    return true;
}

bool kn_param_unfilled(const kn_tensor *t)
{
    return t->storage->first != NULL;
}

bool kn_param_fill_whole(const kn_module_impl *m, int i, uint64_t seed)
{
    const kn_param_entry *p = &m->param[i];
    p->tensor->storage->first = NULL;
    char *name = kn_param_path(m, p);
    bool ok = name && kn_storage_retake(p->tensor->storage) &&
              kn_init_fill(&p->init, seed, name, p->tensor, 0);
    kn_host_free(name);
    return ok;
}

/* A tensor without bytes, in the ledger too. kn_materialize or sharding allocates them; so does the
 * first read, except on meta. */
static kn_tensor *declared(kn_module_impl *m, kn_dtype dtype, kn_device device, int ndim,
                           const int64_t *shape)
{
    int64_t n = 1;
    for (int d = 0; d < ndim && d < KN_MAX_DIMS; d++)
        if (shape[d] < 0 || __builtin_mul_overflow(n, shape[d], &n) || n > INT64_MAX / 8)
            return kn_fail_null(
                "kn_parameter: a shape with %lld elements in dim %d is negative or too large",
                (long long)shape[d], d);
    kn_storage *s = kn_storage_create_released(
        kn_device_memory(device), (size_t)n * kn_dtype_size(dtype), KN_MEM_PARAM, NULL);
    kn_tensor *t = s ? kn_tensor_on(s, 0, dtype, ndim, shape, NULL, false) : NULL;
    kn_storage_unref(s);
    if (t && device != KN_META) {
        s->first = fill_at_first;
        s->first_arg = m;
    }
    return t;
}

kn_tensor *kn_parameter(void *module, const char *name, kn_dtype dtype, kn_device device,
                        kn_initializer init, int ndim, const int64_t *shape)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_parameter") : NULL;
    if (!m)
        return NULL;
    dtype = kn_dtype_in(m, dtype);
    device = kn_device_in(m, device);
    if (!kn_dtype_is_float(dtype))
        return kn_fail_null("kn_parameter: '%s' is %s; parameters are floats", name,
                            kn_dtype_name(dtype));
    if (!kn_init_resolve(&init, name, ndim, shape))
        return NULL;
    kn_tensor *t = declared(m, dtype, device, ndim, shape);
    if (t && kn_require_grad(t, true))
        kn_set_name(t, name);
    kn_param_entry *e = kn_ok() ? add_entry(m, name) : NULL;
    if (!e) {
        kn_tensor_free(t);
        return NULL;
    }
    e->tensor = t;
    e->declared = e->owner = true;
    e->init = init;
    return t;
}

bool kn_share_parameter(void *module, const char *name, kn_tensor *param)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_share_parameter") : NULL;
    if (!m || !kn_check(param, "kn_share_parameter") || !kn_leaf_of(param))
        return false;
    kn_param_entry *e = add_entry(m, name);
    if (!e)
        return false;
    e->tensor = kn_keep(param);
    kn_root_of(m)->ties = true;
    kn_owners_settle(m);
    return true;
}

kn_module_impl *kn_module_holding(const void *module, const char **name, const char *what)
{
    kn_module_impl *m = kn_impl(module, what);
    const char *dot = strrchr(*name, '.');
    char *path = m && dot ? kn_host_strdup(*name) : NULL;
    if (!path)
        return dot ? NULL : m;
    path[dot - *name] = 0;
    kn_module *sub = kn_module_find((void *)module, path);
    kn_host_free(path);
    *name = dot + 1;
    return sub ? sub->impl : NULL;
}

/* ---- filling --------------------------------------------------------------------------------- */

/* m's parameter i was declared in another tree, whose it is to give it its values. */
static bool filled_elsewhere(const kn_module_impl *m, int i, kn_device d)
{
    kn_tensor *t = m->param[i].tensor;
    return (kn_device_of(t) == d && kn_storage_settle(t->storage)) ||
           (kn_ok() &&
            kn_fail("kn_materialize: '%s' of '%s' lies on %s, and a module of another tree "
                    "declared it; materialize that one on %s before",
                    m->param[i].name, kn_module_shown(m), kn_device_name(kn_device_of(t)),
                    kn_device_name(d)));
}

static bool materialize(kn_module_impl *m, kn_device device, uint64_t seed)
{
    for (int i = 0; i < m->params; i++) {
        kn_param_entry *p = &m->param[i];
        if (!p->owner || p->source)
            continue;
        kn_tensor *t = p->tensor;
        if (!p->declared && !p->has_init) {
            if (!filled_elsewhere(m, i, device))
                return false;
            continue;
        }
        if (kn_device_of(t) != device) {
            kn_storage *s =
                kn_storage_create(kn_device_memory(device), t->storage->bytes, KN_MEM_PARAM, NULL);
            if (!s)
                return false;
            kn_storage_unref(t->storage);
            t->storage = s;
            kn_params_changed(m); /* masters in the list are views of the old storage */
        }
        if (!kn_param_fill_whole(m, i, seed))
            return false;
        t->storage->version++;
    }
    for (int i = 0; i < m->buffers; i++)
        if (m->buffer[i].declared && !kn_buffer_settle(&m->buffer[i], device, seed, true))
            return false;
    return true;
}

bool kn_materialize(void *root, kn_device device, uint64_t seed)
{
    kn_module_impl *top = kn_ok() ? kn_impl(root, "kn_materialize") : NULL;
    bool ok = top != NULL;
    for (kn_module_impl *m = kn_impl_lowest(top); ok && m; m = kn_impl_next_up(m, top))
        ok = materialize(m, device ? device : kn_default_device, seed);
    return ok;
}

/* ---- the list -------------------------------------------------------------------------------- */

int64_t kn_param_row(const kn_param *p)
{
    return kn_table_of(p->tensor) ? p->tensor->shape[1] : 0;
}

kn_tensor *kn_table_grad(const kn_param *p)
{
    kn_tensor *g = kn_grad_values(p->tensor);
    const int64_t n = g ? kn_numel(g) : 0;
    return g ? kn_tensor_alias(g, 0, 1, &n, (int64_t[]){ 1 }) : NULL;
}

kn_tensor *kn_table_row_ids(const kn_param *p)
{
    return kn_param_row(p) ? kn_grad_rows(p->tensor) : NULL;
}

static kn_tensor *leaf_grad(const kn_param *p)
{
    if (kn_param_row(p))
        return kn_table_grad(p);
    kn_tensor *g = kn_grad(p->tensor);
    return g ? kn_tensor_alias(g, 0, 1, &p->numel, (int64_t[]){ 1 }) : NULL;
}

static void leaf_clear(const kn_param *p)
{
    kn_clear_grad(p->tensor);
}

static void leaf_written(const kn_param *p)
{
    kn_written(p->master);
}

static bool leaf_waits(const kn_param *p)
{
    return p->tensor->leaf && (p->tensor->leaf->grad || kn_rows_any(p->tensor->leaf));
}

static bool leaf_passes(const kn_param *p, kn_passes *all)
{
    return !p->tensor->leaf || kn_passes_join(all, &p->tensor->leaf->passes);
}

static const char *leaf_held_back(const kn_param *p)
{
    const kn_leaf *leaf = p->tensor->leaf;
    return leaf && leaf->accum == KN_ACCUM_SPOILED ? KN_SPOILED_GRAD : NULL;
}

static const kn_param_source leaf_source = {
    .grad = leaf_grad,
    .clear = leaf_clear,
    .held_back = leaf_held_back,
    .waits = leaf_waits,
    .passes = leaf_passes,
    .row_ids = kn_table_row_ids,
    .written = leaf_written,
};

static void drop_list(kn_module_impl *root)
{
    for (int i = 0; i < root->list_count; i++) {
        kn_host_free((void *)root->list[i].name);
        if (root->list[i].source == &leaf_source)
            kn_tensor_free(root->list[i].master);
    }
    kn_host_free(root->list);
    root->list = NULL;
    root->list_count = 0;
}

static bool is_listed(const kn_module_impl *root, const kn_tensor *t)
{
    bool found = false;
    for (int i = 0; i < root->list_count && !found; i++)
        found = root->list[i].tensor == t;
    return found;
}

/* The tree of p's owner has what fsdp keeps for it: another one can't train it. */
static bool is_here(const kn_module_impl *m, const kn_param_entry *p, const kn_param_entry *owner)
{
    const kn_leaf *leaf = p->tensor->leaf;
    return owner->source || !leaf || !leaf->dest ||
           kn_fail("parameters of '%s': '%s' is sharded with another tree that holds it; use it "
                   "there, or add this module to that tree before kn_fsdp_wrap",
                   kn_module_shown(m), p->name);
}

static bool list_module(kn_module_impl *m, kn_module_impl *root)
{
    for (int i = 0; i < m->params; i++) {
        const kn_module_impl *holds;
        const kn_param_entry *p = &m->param[i], *owner;
        if (!p->owner && (!kn_stands_in(m, p, root) || is_listed(root, p->tensor)))
            continue;
        owner = kn_owner_of(m, p, &holds);
        if (!is_here(m, p, owner))
            return false;
        kn_param *list = kn_host_realloc(root->list, (size_t)(root->list_count + 1) * sizeof *list);
        char *name = kn_param_path(m, p);
        if (list)
            root->list = list;
        if (!list || !name) {
            kn_host_free(name);
            return false;
        }
        kn_param *e = &root->list[root->list_count++];
        *e = (kn_param){
            .name = name,
            .tensor = p->tensor,
            .numel = kn_numel(p->tensor),
            .index = owner->unit_index,
            .owner = m,
        };
        e->source = owner->source ? owner->source : &leaf_source;
        e->elsewhere = owner->elsewhere;
        e->state_memory = owner->state_memory;
        e->start = owner->start;
        e->master = owner->source ? owner->master
                                  : kn_tensor_on(p->tensor->storage, p->tensor->offset,
                                                 p->tensor->dtype, 1, &e->numel, NULL, false);
        if (!e->master)
            return false;
    }
    for (int i = 0; i < m->children; i++)
        if (!list_module(m->child[i]->impl, root))
            return false;
    return true;
}

/* A kn_materialize of another tree may have moved what both hold. */
static bool masters_are_there(const kn_module_impl *m)
{
    bool yes = true;
    for (int i = 0; i < m->list_count && yes; i++)
        yes = m->list[i].source != &leaf_source ||
              (m->list[i].master->storage == m->list[i].tensor->storage);
    return yes;
}

int kn_params(void *root, const kn_param **list)
{
    if (!kn_given(list, "kn_params", "the place for the list"))
        return 0;
    kn_module_impl *m = kn_impl(root, "kn_params");
    *list = NULL;
    if (!m)
        return 0;
    if (!m->list_valid || !masters_are_there(m)) {
        drop_list(m);
        if (!list_module(m, m))
            return 0;
        m->list_valid = true;
    }
    for (int i = 0; i < m->list_count; i++) /* kn_require_grad may have changed it since */
        m->list[i].trainable = m->list[i].tensor->requires_grad;
    *list = m->list;
    return m->list_count;
}

void kn_params_free(kn_module_impl *m)
{
    drop_list(m);
}

kn_tensor *kn_param_state_new(const kn_param *p)
{
    return kn_tensor_new(p->master->dtype, kn_device_of(p->master), p->state_memory,
                         kn_memory_is_store(p->state_memory) ? KN_MEM_STORE : KN_MEM_OPTIM, 1,
                         p->master->shape, NULL, false);
}

kn_tensor *kn_param_grad(const kn_param *p)
{
    if (!kn_given(p, "kn_param_grad", "the parameter"))
        return NULL;
    return !p->source->sync_host || p->source->sync_host(p) ? p->source->grad(p) : NULL;
}

int64_t kn_param_count(void *root)
{
    const kn_param *p;
    int n = kn_params(root, &p);
    int64_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += p[i].numel;
    return sum;
}
