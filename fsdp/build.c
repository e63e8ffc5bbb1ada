/* fsdp/build.c: making one unit: which parameters it claims, how they are dealt to buckets, and the
 * buffers of a bucket. */
#include "autograd/rows.h"
#include "fsdp/build.h"
#include "fsdp/schedule.h"

static kn_param_entry *entry(const kn_claim *c)
{
    return &c->module->param[c->index];
}

/* ---- a bucket -------------------------------------------------------------------------------- */

/* The first claim not taken yet decides what the next bucket holds. */
typedef struct kind {
    kn_dtype dtype, param_dtype;
    bool trainable, whole;
    const kn_tensor *table; /* whose gradient stays rows; it has a bucket of its own */
} kind;

static kind kind_of(const kn_claim *c, const kn_fsdp_wrap_options *o)
{
    const kn_tensor *t = entry(c)->tensor;
    const bool table = kn_table_of(t) != NULL;
    return (kind){ t->dtype, c->param_dtype, t->requires_grad,
                   kn_numel(t) < o->keep_whole_below && !table, table ? t : NULL };
}

static bool same_kind(kind a, kind b)
{
    return a.dtype == b.dtype && a.param_dtype == b.param_dtype && a.trainable == b.trainable &&
           a.whole == b.whole && a.table == b.table;
}

/* The dtype that each claimed parameter computes in. */
static bool choose_dtypes(kn_claims *c, const kn_fsdp_wrap_options *o)
{
    for (int i = 0; i < c->count; i++) {
        const kn_tensor *t = entry(&c->list[i])->tensor;
        kn_dtype *chosen = &c->list[i].param_dtype;
        char *name =
            o->param_dtype_of ? kn_param_path(c->list[i].module, entry(&c->list[i])) : NULL;
        if (name)
            *chosen = o->param_dtype_of(name, t->ndim, t->shape, o->param_dtype_of_arg);
        if (*chosen && !kn_dtype_is_float(*chosen))
            kn_fail("fsdp: .param_dtype_of chose %s for '%s'; it must be f32, bf16, f16 or f64",
                    kn_dtype_name(*chosen), name);
        kn_host_free(name);
        if (!kn_ok())
            return false;
        if (!*chosen)
            *chosen = o->param_dtype ? o->param_dtype : t->dtype;
    }
    return true;
}

static bool make_layout(kn_bucket *b, const kn_claim *const *claim)
{
    const kn_fsdp_wrap_options *o = &b->unit->options;
    kn_layout_param *p = kn_host_calloc((size_t)b->params + 1, sizeof *p);
    bool ok = p != NULL;
    for (int i = 0; ok && i < b->params; i++) {
        const kn_tensor *t = entry(claim[i])->tensor;
        p[i] = (kn_layout_param){ .ndim = t->ndim, .shape = t->shape };
        if (o->layout == KN_LAYOUT_PER_PARAM && o->placement && !b->rows)
            p[i].dim = o->placement(b->param[i].name, t->ndim, t->shape, o->placement_arg);
        b->param[i].dim = p[i].dim;
        if (p[i].dim < 0 || (p[i].dim > 0 && p[i].dim >= t->ndim) ||
            (p[i].dim > 0 && t->shape[p[i].dim] % b->shards != 0))
            ok =
                kn_fail("fsdp: .placement cuts '%s' along dim %d, which must be one of its %d dims "
                        "and, other than 0, divide by the %d shards",
                        b->param[i].name, p[i].dim, t->ndim, b->shards);
    }
    ok = ok && kn_layout_make(&b->layout, b->rows ? KN_LAYOUT_PER_PARAM : o->layout, p, b->params,
                              b->shards);
    kn_host_free(p);
    return ok;
}

/* Buffers that come and go; NULL stays where one is never needed. */
static bool make_buffers(kn_bucket *b)
{
    kn_unit *u = b->unit;
    const kn_layout *l = &b->layout;
    const char *name = kn_unit_name(u);
    int keep = u->options.reshard_after_forward;
    kn_memory *shared = kn_bucket_comm_memory(b);
    if (!shared || !kn_bucket_choose_memory(b, shared))
        return false;
    int64_t n = l->shard, all = l->full_numel, chunks = l->shard * b->shards;
    size_t m = kn_dtype_size(b->master_dtype), p = kn_dtype_size(b->param_dtype),
           r = kn_dtype_size(b->reduce_dtype), g = kn_dtype_size(b->grad_dtype);
    b->master =
        kn_storage_create(b->memory, (size_t)n * m, b->stored ? KN_MEM_STORE : KN_MEM_PARAM, name);
    if (!b->master ||
        !kn_fill_run(kn_compute_stream(b->memory->device), b->master->data, b->master_dtype, n, 0))
        return false;
    bool same = b->shards == 1 && b->param_dtype == b->master_dtype && !b->stored && !b->offloaded;
#define RELEASED(count, size, memory, category)                                                    \
    kn_storage_create_released((memory), (size_t)(count) * (size), (category), name)
    b->full = same ? b->master : RELEASED(all, p, shared, KN_MEM_GATHERED);
    b->grad = RELEASED(all, r, shared, KN_MEM_UNREDUCED);
    b->unsynced = RELEASED(all, r, shared, KN_MEM_UNREDUCED);
    b->grad_shard = RELEASED(n, g, b->memory, b->stored ? KN_MEM_STORE : KN_MEM_GRAD);
    b->gather_stage = l->zero_copy ? NULL : RELEASED(chunks, p, shared, KN_MEM_GATHERED);
    b->reduce_stage = l->zero_copy ? NULL : RELEASED(chunks, r, shared, KN_MEM_UNREDUCED);
    b->partial = b->replicas > 1 ? RELEASED(n, g, shared, KN_MEM_UNREDUCED) : NULL;
    if (b->offloaded && kn_bucket_create_cast_master(b))
        b->away.grad_transfer = RELEASED(n, g, shared, KN_MEM_UNREDUCED);
    if (keep > 1 && b->shards > 1)
        b->slice = RELEASED(all / keep, p, shared, KN_MEM_GATHERED);
#undef RELEASED
    b->gathered = kn_event_create(u->options.device);
    b->computed = kn_event_create(u->options.device);
    b->reduced = kn_event_create(u->options.device);
    return kn_ok() && kn_storage_divide(b->full, l->offset, l->params);
}

/* Sums of f64 stay f64, and nothing else becomes f64 in a reduction. */
static bool one_width(const kn_bucket *b)
{
    return (b->grad_dtype == KN_F64) == (b->reduce_dtype == KN_F64) ||
           kn_fail(
               "fsdp: unit '%s' holds %s parameters but reduces gradients in %s; f64 adds to f64 "
               "only: choose another .reduce_dtype",
               kn_unit_name(b->unit), kn_dtype_name(b->master_dtype),
               kn_dtype_name(b->reduce_dtype));
}

/* Rows are picked where the unit computes. */
static bool stays_here(const kn_bucket *b)
{
    return !b->rows || !b->unit->options.offload_dir ||
           kn_fail("fsdp: unit '%s' is offloaded (.offload_dir) and has a table whose gradient "
                   "stays rows (.sparse), which can't be; name the table in .ignore, or wrap it "
                   "without .offload_dir",
                   kn_unit_name(b->unit));
}

/* One more bucket, of what the claim `first` begins; claims it takes get to know it. */
static bool add_bucket(kn_unit *u, kn_claims *c, int first)
{
    const kn_fsdp_wrap_options *o = &u->options;
    kind k = kind_of(&c->list[first], o);
    const kn_claim **claim = kn_host_calloc((size_t)c->count, sizeof *claim);
    kn_bucket **list = kn_host_realloc(u->bucket, (size_t)(u->buckets + 1) * sizeof *list);
    kn_bucket *b = list ? kn_host_calloc(1, sizeof *b) : NULL;
    if (list)
        u->bucket = list;
    bool ok = claim && b;
    if (b)
        list[u->buckets++] = b;
    int count = 0;
    for (int i = first; ok && i < c->count; i++)
        if (!c->list[i].bucket && same_kind(k, kind_of(&c->list[i], o))) {
            c->list[i].bucket = b;
            c->list[i].at = count;
            claim[count++] = &c->list[i];
        }
    if (ok) {
        b->unit = u;
        b->device = o->device;
        b->trainable = k.trainable;
        b->master_dtype = k.dtype;
        b->param_dtype = b->full_dtype = k.param_dtype;
        b->reduce_dtype = o->reduce_dtype ? o->reduce_dtype : b->param_dtype;
        b->grad_dtype = o->keep_low_precision_grads ? b->reduce_dtype : b->master_dtype;
        b->rows = k.table != NULL;
        b->shards = k.whole ? 1 : b->rows ? u->size : o->mesh.shards;
        b->replicas = u->size / b->shards;
        b->shard = u->rank % b->shards;
        b->params = count;
        b->param = kn_host_calloc((size_t)count, sizeof *b->param);
        ok = b->param && one_width(b) && stays_here(b);
    }
    for (int i = 0; ok && i < count; i++)
        ok = (b->param[i].name = kn_param_path(claim[i]->module, entry(claim[i]))) != NULL;
    ok = ok && make_layout(b, claim) && make_buffers(b);
    for (int i = 0; ok && i < count; i++)
        ok = kn_bucket_prepare_param(b, i, entry(claim[i]));
    kn_host_free(claim);
    return ok;
}

/* ---- a unit ---------------------------------------------------------------------------------- */

/* Schedules of the trees that now lie inside top go. */
static void drop_schedules(kn_module_impl *top)
{
    for (kn_module_impl *m = kn_impl_lowest(top); m; m = kn_impl_next_up(m, top))
        if (m->unit)
            kn_schedule_free(kn_unit_of(m)->schedule);
}

static kn_unit *new_unit(kn_module_impl *const *module, int modules, kn_comm *comm,
                         const kn_fsdp_wrap_options *o)
{
    kn_unit *u = kn_host_calloc(1, sizeof *u);
    kn_module_impl **list = kn_host_calloc((size_t)modules, sizeof(kn_module_impl *));
    kn_group *group = kn_group_new(kn_turns_complete, u);
    if (!u || !list || !group) {
        kn_group_unref(group);
        kn_host_free(u);
        kn_host_free(list);
        return NULL;
    }
    for (int i = 0; i < modules; i++)
        list[i] = module[i];
    kn_live_begin(&u->live, module[0]);
    group->before_collective = kn_turns_before_collective;
    u->group = group;
    u->module = list;
    u->modules = modules;
    u->comm = comm;
    u->options = *o;
    u->options.seed = o->seed == (uint64_t)KN_ZERO ? 0 : o->seed;
    u->rank = kn_rank(comm);
    u->size = kn_comm_size(comm);
    u->set.sync = u->set.all_reduce = u->set.reshard_after_backward = true;
    u->set.unshard_in_backward = u->set.is_last_backward = true;
    u->cast = o->param_dtype != KN_DTYPE_DEFAULT;
    u->fresh = true;
    u->enter_at = u->leave_at = -1;
    u->slice_ranks = o->reshard_after_forward > 1 ? o->reshard_after_forward : 0;
    return u;
}

/* The options' strings and lists are the caller's. */
static void forget_borrowed(kn_unit *u)
{
    u->options.wrap_class = NULL;
    u->options.wrap_like = NULL;
    u->options.recompute_class = NULL;
    u->options.ignore = NULL;
    u->options.ignored_modules = NULL;
    u->options.ignored_params = NULL;
    u->options.full_precision_class = NULL;
    u->options.offload_dir = NULL;
    u->options.placement_arg = NULL; /* asked once, and so are the others */
    u->options.param_dtype_of_arg = u->options.fill_arg = u->options.fill_module_arg = NULL;
    u->options.policy_arg = u->options.recompute_policy_arg = NULL;
}

/* Everything that can fail comes first, and only then do the modules' handles turn to the unit:
 * where making it fails, the modules have their parameters as before (buffers: undo.c). */
bool kn_unit_build(kn_module_impl *const *module, int modules, kn_comm *comm,
                   const kn_fsdp_wrap_options *o)
{
    kn_claims c = { 0 };
    bool ok = false;
    int hooked = 0;
    kn_unit *u = new_unit(module, modules, comm, o);
    if (!u || !kn_claims_collect(&c, module, modules, o))
        goto done;
    ok = choose_dtypes(&c, o);
    for (int i = 0; ok && i < c.count; i++)
        ok = c.list[i].bucket || add_bucket(u, &c, i);
    ok = ok && kn_unit_begin_params(u, &c);
    for (int i = 0; ok && i < c.ignores; i++)
        if (kn_param_unfilled(entry(&c.ignored[i])->tensor))
            ok = kn_param_fill_whole(c.ignored[i].module, c.ignored[i].index, u->options.seed);
    ok = ok && kn_unit_begin_buffers(u);
    for (; ok && hooked < modules; hooked++)
        ok = (module[hooked]->unit = kn_unit_hooks_new(u)) != NULL;
    if (!ok)
        goto done;
    for (int i = 0; i < c.count; i++)
        kn_bucket_take_param(c.list[i].bucket, c.list[i].at, entry(&c.list[i]));
    for (int i = 0; i < c.ignores; i++)
        entry(&c.ignored[i])->ignored = true;
    for (int i = 0; i < modules; i++) {
        drop_schedules(module[i]);
        kn_params_changed(module[i]);
    }
    kn_root_joins_ranks(kn_root_of(module[0]));
    forget_borrowed(u);
done:
    if (!ok && u) {
        for (int i = 0; i < modules; i++) {
            kn_host_free(module[i]->unit);
            module[i]->unit = NULL;
        }
        kn_unit_free(u);
    }
    kn_claims_free(&c);
    return ok;
}
