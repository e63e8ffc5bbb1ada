/* fsdp/access.c: looking at a sharded model: whole parameters, units, the tree, predicted memory, and
 * the scalar reductions that clipping needs. */
#include "fsdp/unit.h"
#include <string.h>

/* ---- whole parameters --------------------------------------------------------------------------------- */

static const kn_param *param_at(void *root, int index)
{
    const kn_param *p;
    int n = kn_params(root, &p);
    if (index >= 0 && index < n)
        return &p[index];
    if (kn_ok())
        kn_fail("fsdp: parameter number %d doesn't exist; the module has %d", index, n);
    return NULL;
}

/* The unit that holds p, or NULL for a parameter of its own. */
static kn_unit *holder(const kn_param *p)
{
    const kn_leaf *leaf = p->tensor->leaf;
    return leaf && leaf->dest == kn_unit_grad_dest ? leaf->dest_arg : NULL;
}

bool kn_shard_read(void *root, int index, kn_tensor *shard, void *host)
{
    const kn_param *p = kn_ok() ? param_at(root, index) : NULL;
    if (!p || !kn_check(shard, "kn_shard_read"))
        return false;
    kn_unit *u = holder(p);
    size_t size = kn_dtype_size(shard->dtype);
    int64_t part = kn_numel(shard);
    if (part && !kn_to(shard, (char *)host + (size_t)p->start * size, (size_t)part * size))
        return false;
    for (int r = 0; u && u->shards > 1 && r < u->shards; r++) {
        kn_interval i = kn_layout_part(&u->layout, p->index, r);
        if (i.count &&
            !kn_broadcast(u->comm, (char *)host + (size_t)i.start * size, i.count * (int64_t)size,
                          r, kn_compute_stream(KN_CPU), p->name))
            return false;
    }
    return kn_ok();
}

bool kn_shard_write(void *root, int index, kn_tensor *shard, const void *host)
{
    const kn_param *p = kn_ok() ? param_at(root, index) : NULL;
    if (!p || !kn_check(shard, "kn_shard_write"))
        return false;
    int64_t n = kn_numel(shard);
    if (n == 0)
        return true;
    memcpy(kn_array_of(shard).data,
           (const char *)host + (size_t)p->start * kn_dtype_size(shard->dtype),
           (size_t)n * kn_dtype_size(shard->dtype));
    shard->storage->version++;
    return kn_ok();
}

bool kn_param_read(void *root, int index, void *host)
{
    const kn_param *p = param_at(root, index);
    return p && kn_shard_read(root, index, p->master, host);
}

bool kn_param_write(void *root, int index, const void *host)
{
    const kn_param *p = param_at(root, index);
    return p && kn_shard_write(root, index, p->master, host);
}

/* ---- units ------------------------------------------------------------------------------------------------ */

bool kn_fsdp_is_unit(const void *module)
{
    kn_module_impl *m = kn_impl(module, "kn_fsdp_is_unit");
    return m && m->unit;
}

typedef struct unit_list {
    kn_module **list;
    int count, max;
} unit_list;

static bool list_unit(kn_module *m, void *arg)
{
    unit_list *l = arg;
    if (!m->impl->unit)
        return true;
    if (l->count < l->max)
        l->list[l->count] = m;
    l->count++;
    return true;
}

int kn_fsdp_units(void *root, kn_module **list, int max)
{
    unit_list l = { list, 0, max };
    kn_apply_modules(root, list_unit, &l);
    return l.count;
}

static void print_module(FILE *out, kn_module_impl *m, int depth)
{
    kn_unit *u = kn_unit_of(m);
    if (u) {
        fprintf(out, "%*s%s%s%s: %d parameters, %lld elements, shard %d of %d with %lld, %s\n",
                2 * depth, "", m->path, *m->path ? " " : "", m->class_name, u->params,
                (long long)u->layout.total, u->shard, u->shards, (long long)u->layout.shard,
                u->unsharded ? "gathered" : "sharded");
        for (int i = 0; i < u->params; i++)
            fprintf(out, "%*s%s: %lld of %lld here\n", 2 * depth + 4, "", u->param[i].name,
                    (long long)u->param[i].part.count, (long long)u->layout.numel[i]);
    }
    for (int i = 0; i < m->children; i++)
        print_module(out, m->child[i]->impl, depth + (u != NULL));
}

bool kn_fsdp_print(FILE *out, void *root)
{
    kn_module_impl *m = kn_impl(root, "kn_fsdp_print");
    if (m)
        print_module(out, m, 0);
    return m != NULL;
}

/* ---- memory by formula (docs/fsdp.md) ----------------------------------------------------------------------- */

static int64_t aligned(int64_t bytes)
{
    return (bytes + KN_ALIGN - 1) / KN_ALIGN * KN_ALIGN;
}

typedef struct prediction {
    kn_fsdp_memory sum;
    kn_unit *root;
    int64_t last_full, pair_full, one_full, one_grad, pair_grad, last_grad;
} prediction;

static bool predict_unit(kn_module *m, void *arg)
{
    prediction *p = arg;
    kn_unit *u = kn_unit_of(m->impl);
    if (!u)
        return true;
    int64_t shard = aligned(u->layout.shard * (int64_t)kn_dtype_size(u->master_dtype));
    int64_t full = u->full == u->master
                       ? 0
                       : aligned(u->layout.total * (int64_t)kn_dtype_size(u->param_dtype));
    int64_t grad = aligned(u->layout.total * (int64_t)kn_dtype_size(u->reduce_dtype));
    p->sum.param += shard;
    p->sum.grad += shard;
    for (int i = 0; i < u->params; i++)
        p->sum.optim +=
            2 * aligned(u->param[i].part.count * (int64_t)kn_dtype_size(u->master_dtype));
    if (m->impl == p->root->module) {
        p->sum.gathered += full;
        p->sum.unreduced += grad;
        return true;
    }
    if (p->last_full + full > p->pair_full)
        p->pair_full = p->last_full + full;
    if (full > p->one_full)
        p->one_full = full;
    if (grad > p->one_grad)
        p->one_grad = grad;
    if (p->last_grad + grad > p->pair_grad)
        p->pair_grad = p->last_grad + grad;
    p->last_full = full;
    p->last_grad = grad;
    return true;
}

kn_fsdp_memory kn_fsdp_predict(void *root)
{
    kn_module_impl *m = kn_impl(root, "kn_fsdp_predict");
    kn_unit *u = kn_unit_of(m);
    prediction p = { .root = u };
    if (!u) {
        if (m)
            kn_fail("kn_fsdp_predict: '%s' is not a unit; wrap it first", m->class_name);
        return p.sum;
    }
    kn_apply_modules(root, predict_unit, &p);
    bool overlap = u->schedule && !kn_stream_is_inline(u->schedule->reduce);
    p.sum.optim += aligned(3 * (int64_t)sizeof(float)); /* lr, gradient scale, step */
    p.sum.gathered += u->options.prefetch == KN_PREFETCH_PRE ? p.pair_full : p.one_full;
    p.sum.unreduced += overlap ? p.pair_grad : p.one_grad;
    return p.sum;
}

/* ---- scalars over ranks ------------------------------------------------------------------------------------- */

bool kn_unit_scalar_reduce(void *unit, int64_t *sum, int sums, float *max)
{
    kn_unit *u = unit;
    kn_stream *s = kn_compute_stream(KN_CPU);
    if (u->ranks == 1)
        return true;
    return (!max || kn_all_reduce_max(u->comm, max, 1, s, "gradient norm")) &&
           (!sum || u->shards == 1 || kn_all_reduce_i64(u->comm, sum, sums, s, "gradient norm"));
}
