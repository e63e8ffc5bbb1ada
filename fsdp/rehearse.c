/* fsdp/rehearse.c: a step of trees of units, rehearsed: the very schedule runs for a copy of the
 * tree on meta among simulated ranks, and its ledger says how many bytes came and went. A copy of a
 * module uses its parameters before and after its children, which it calls in order of
 * declaration. It runs on a thread of its own, whose ledger, trace and clocks nobody else sees. */
#include "autograd/rows.h"
#include "fsdp/build.h"
#include "fsdp/rehearse.h"
#include "fsdp/schedule.h"
#include "kernels/memory_internal.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct copy {
    kn_module module; /* first: the engine calls it */
    kn_module_impl *real;
    int parent;
} copy;

typedef struct param_copy {
    const kn_param_entry *real;
    kn_tensor *tensor;
    int module, dim; /* dim: along which KN_LAYOUT_PER_PARAM cuts it */
    kn_dtype dtype;  /* it computes in */
} param_copy;

typedef struct unit_copy {
    const kn_unit *real;
    kn_unit *unit;
} unit_copy;

/* Ranks of units, simulated: a world for each communicator. */
typedef struct world {
    const kn_comm *real;
    kn_comm *comm;
} world;

typedef struct rehearsal {
    copy *module; /* parents first; [0] only holds those that the step begins with */
    param_copy *param;
    unit_copy *unit;
    world *world;
    int modules, params, units, worlds;
    int64_t module_room, param_room, unit_room, world_room;
    bool overlap;
    kn_step_peaks peaks;
    char error[1024]; /* "": none */
} rehearsal;

/* ---- the list of copies, made by the caller's thread ----------------------------------------- */

static int unit_at(const rehearsal *r, const kn_unit *u)
{
    int i = r->units - 1;
    while (i >= 0 && r->unit[i].real != u)
        i--;
    return i;
}

/* The bucket of a unit of the tree that holds the parameter, or NULL. */
static const kn_bucket *bucket_of(const rehearsal *r, const kn_param_entry *e)
{
    const kn_bucket *b = e->unit;
    return b && unit_at(r, b->unit) >= 0 ? b : NULL;
}

static int cut_along(const kn_param_entry *e)
{
    const kn_bucket *b = e->unit;
    return b ? b->param[e->unit_index].dim : 0;
}

static bool list_module(rehearsal *r, kn_module_impl *real, int parent)
{
    int at = r->modules;
    kn_unit *u = real ? kn_unit_of(real) : NULL;
    if (!kn_host_grow(&r->module, &r->module_room, r->modules + 1, sizeof *r->module) ||
        !kn_host_grow(&r->unit, &r->unit_room, r->units + 1, sizeof *r->unit))
        return false;
    r->module[r->modules++] = (copy){ .real = real, .parent = parent };
    if (u && unit_at(r, u) < 0)
        r->unit[r->units++] = (unit_copy){ .real = u };
    for (int i = 0; real && i < real->params; i++) {
        if (!kn_host_grow(&r->param, &r->param_room, r->params + 1, sizeof *r->param))
            return false;
        const kn_param_entry *e = &real->param[i];
        const kn_bucket *b = e->unit;
        r->param[r->params++] = (param_copy){ .real = e,
                                              .module = at,
                                              .dim = e->owner ? cut_along(e) : 0,
                                              .dtype = b ? b->param_dtype : KN_DTYPE_DEFAULT };
    }
    for (int i = 0; real && i < real->children; i++)
        if (!list_module(r, real->child[i]->impl, at))
            return false;
    return true;
}

/* ---- what a copy computes -------------------------------------------------------------------- */

static kn_tensor *use_params(const kn_module_impl *m, kn_tensor *x)
{
    for (int i = 0; i < m->params && kn_ok(); i++)
        if (!kn_table_of(m->param[i].tensor)) /* nothing is gathered or reduced of those */
            x = kn_add(x, kn_cast(kn_sum(m->param[i].tensor, 0, NULL, false), KN_F32));
    return x;
}

/* A list of modules is never called itself. */
static kn_tensor *call_children(const kn_module_impl *m, kn_tensor *x)
{
    for (int i = 0; i < m->children && kn_ok(); i++) {
        kn_module_impl *c = m->child[i]->impl;
        x = c->is_list && !c->unit ? call_children(c, x) : kn_call(c->self, x);
    }
    return x;
}

static kn_values copy_forward(kn_module *self, kn_values in, const void *arg)
{
    (void)arg;
    kn_tensor *x = kn_exp(kn_cast(in.v[0], KN_F32)); /* saves, so recompute runs it again */
    x = use_params(self->impl, x);
    return (kn_values){ 1, { use_params(self->impl, call_children(self->impl, x)) } };
}

/* ---- the copies, made by the rehearsal's thread ---------------------------------------------- */

static bool make_modules(rehearsal *r)
{
    char name[16];
    for (int i = 0; i < r->modules && kn_ok(); i++) {
        copy *c = &r->module[i];
        if (!kn_module_init_(&c->module, NULL, copy_forward, "copy"))
            return false;
        snprintf(name, sizeof name, "%d", i);
        if (i > 0 && !kn_module_add(&r->module[c->parent].module, name, &c->module)) {
            kn_module_free(&c->module);
            return false;
        }
        c->module.impl->is_list = c->real && c->real->is_list;
        c->module.impl->recompute = c->real && c->real->recompute;
    }
    return kn_ok();
}

/* Parameters are named by their index. Those that no unit holds are copied as ignored ones. */
static bool make_params(rehearsal *r)
{
    char name[16];
    for (int i = 0; i < r->params && kn_ok(); i++) {
        param_copy *p = &r->param[i];
        const kn_bucket *b = bucket_of(r, p->real);
        const kn_tensor *t = p->real->tensor;
        if (!p->real->owner)
            continue;
        snprintf(name, sizeof name, "%d", i);
        kn_module *m = &r->module[p->module].module;
        p->tensor = kn_parameter(m, name, b ? b->master_dtype : t->dtype, KN_META, p->real->init,
                                 b ? b->param[p->real->unit_index].ndim : t->ndim,
                                 b ? b->param[p->real->unit_index].shape : t->shape);
        if (!p->tensor)
            return false;
        m->impl->param[m->impl->params - 1].ignored = !b;
        if (kn_table_of(t) && !kn_keep_rows(p->tensor))
            return false;
        p->tensor->requires_grad = b ? b->trainable : t->requires_grad;
        if (!b && !kn_param_fill_whole(m->impl, m->impl->params - 1, 1))
            return false;
    }
    for (int i = 0; i < r->params && kn_ok(); i++)
        for (int k = 0; k < r->params && !r->param[i].real->owner; k++) {
            if (!r->param[k].tensor || r->param[k].real->tensor != r->param[i].real->tensor)
                continue;
            snprintf(name, sizeof name, "%d", i);
            if (!kn_share_parameter(&r->module[r->param[i].module].module, name,
                                    r->param[k].tensor))
                return false;
            break;
        }
    return kn_ok();
}

static const param_copy *named(const rehearsal *r, const char *name)
{
    const char *index = strrchr(name, '.');
    return &r->param[atoi(index ? index + 1 : name)];
}

static int same_dim(const char *name, int ndim, const int64_t *shape, void *arg)
{
    (void)ndim;
    (void)shape;
    return named(arg, name)->dim;
}

static kn_dtype same_dtype(const char *name, int ndim, const int64_t *shape, void *arg)
{
    (void)ndim;
    (void)shape;
    return named(arg, name)->dtype;
}

/* Where masters lie in a file, the whole parameters have bytes of their own. */
static bool apart_from_master(kn_bucket *b)
{
    kn_storage *full = kn_storage_create_released(
        kn_device_memory(KN_META), (size_t)b->layout.full_numel * kn_dtype_size(b->param_dtype),
        KN_MEM_GATHERED, kn_unit_name(b->unit));
    if (!full)
        return false;
    b->full = full;
    for (int i = 0; i < b->params; i++) {
        kn_location whole = { kn_storage_ref(full), b->layout.offset[i], b->full_dtype };
        kn_storage_unref(kn_turn_to(b->param[i].tensor, whole).storage);
    }
    return true;
}

static kn_comm *world_of(rehearsal *r, const kn_unit *real)
{
    for (int i = 0; i < r->worlds; i++)
        if (r->world[i].real == real->comm)
            return r->world[i].comm;
    kn_comm *comm = kn_host_grow(&r->world, &r->world_room, r->worlds + 1, sizeof *r->world)
                        ? kn_comm_simulated(real->size, 0, 0)
                        : NULL;
    if (comm)
        r->world[r->worlds++] = (world){ real->comm, comm };
    return comm;
}

static bool build_unit(rehearsal *r, unit_copy *c)
{
    const kn_unit *real = c->real;
    kn_fsdp_wrap_options o = real->options;
    kn_module_impl **module = kn_host_calloc((size_t)real->modules, sizeof(kn_module_impl *));
    int n = 0;
    bool offloaded = false;
    for (int i = 0; module && i < real->modules; i++)
        for (int k = 1; k < r->modules; k++)
            if (r->module[k].real == real->module[i])
                module[n++] = r->module[k].module.impl;
    for (int i = 0; i < real->buckets; i++)
        offloaded |= real->bucket[i]->offloaded;
    o.device = KN_META;
    o.offload_dir = offloaded ? "memory" : NULL;
    o.placement = o.placement ? same_dim : NULL;
    o.placement_arg = r;
    o.param_dtype_of = same_dtype;
    o.param_dtype_of_arg = r;
    o.sync_from_rank0 = false;
    o.fill = NULL;
    o.fill_module = NULL;
    o.buffer_dtype = KN_DTYPE_DEFAULT;
    o.reshard_after_forward = real->slice_ranks ? real->slice_ranks : o.reshard_after_forward;
    kn_comm *comm = module ? world_of(r, real) : NULL;
    bool ok = comm && kn_unit_build(module, n, comm, &o);
    c->unit = ok ? kn_unit_of(module[0]) : NULL;
    kn_host_free(module);
    for (int i = 0; ok && i < c->unit->buckets && i < real->buckets; i++)
        if (c->unit->bucket[i]->full == c->unit->bucket[i]->master &&
            real->bucket[i]->full != real->bucket[i]->master)
            ok = apart_from_master(c->unit->bucket[i]);
    return ok;
}

static bool same_list(const rehearsal *r, kn_unit_list *to, const kn_unit_list *real)
{
    bool ok = true;
    for (int i = 0; ok && i < real->count; i++) {
        int at = unit_at(r, real->list[i]);
        ok = at < 0 || kn_units_add(to, r->unit[at].unit);
    }
    return ok;
}

static bool make_units(rehearsal *r)
{
    for (int i = r->units - 1; i >= 0; i--) /* children first */
        if (!build_unit(r, &r->unit[i]))
            return false;
    for (int i = 0; i < r->units; i++) {
        const kn_unit *real = r->unit[i].real;
        kn_unit *u = r->unit[i].unit;
        u->cast = real->cast;
        u->options.reshard_after_forward = real->options.reshard_after_forward;
        u->set.reshard_after_backward = real->set.reshard_after_backward;
        u->set.unshard_in_backward = real->set.unshard_in_backward;
        u->set.reduce_unused = real->set.reduce_unused;
        u->set.is_last_backward = real->set.is_last_backward;
        if (!same_list(r, &u->next_forward, &real->next_forward) ||
            !same_list(r, &u->next_backward, &real->next_backward))
            return false;
    }
    for (int i = 0; i < r->params; i++)
        if (r->param[i].tensor)
            r->param[i].tensor->requires_grad = r->param[i].real->tensor->requires_grad;
    for (int i = 0; i < r->units; i++) {
        kn_schedule_state *s = kn_schedule_of(r->unit[i].unit);
        if (!s)
            return false;
        s->inline_reduce = !r->overlap; /* streams of meta never are */
    }
    return true;
}

/* ---- the step -------------------------------------------------------------------------------- */

static void run_round(rehearsal *r)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_sum(kn_zeros(KN_F32, KN_META, KN_SHAPE(1)), 0, NULL, false);
    for (int i = 1; i < r->modules && kn_ok(); i++)
        if (r->module[i].parent == 0)
            x = kn_call(&r->module[i].module, x);
    if (kn_ok() && kn_requires_grad(x))
        kn_backward(x);
    kn_scope_end(scope);
}

/* The second round knows the order of the first, and adds to what that accumulated. */
static void *run(void *arg)
{
    rehearsal *r = arg;
    kn_context_get()->memory_limit = 0; /* bytes on meta are none */
    if (make_modules(r) && make_params(r) && make_units(r)) {
        run_round(r);
        run_round(r);
    }
    kn_ledger l = kn_ledger_read();
    r->peaks = (kn_step_peaks){ l.peak[KN_MEM_GATHERED], l.peak[KN_MEM_UNREDUCED] };
    snprintf(r->error, sizeof r->error, "%s", kn_error() ? kn_error() : "");
    kn_clear_error();
    if (r->module[0].module.impl)
        kn_module_free(&r->module[0].module);
    for (int i = 0; i < r->worlds; i++)
        kn_comm_simulated_free(r->world[i].comm);
    kn_context_end();
    return NULL;
}

bool kn_rehearse_step(kn_module_impl *const *module, int n, bool overlap, kn_step_peaks *peaks)
{
    rehearsal r = { .overlap = overlap };
    bool ok = list_module(&r, NULL, -1);
    for (int i = 0; ok && i < n; i++)
        ok = list_module(&r, module[i], 0);
    pthread_t thread;
    int error = ok ? pthread_create(&thread, NULL, run, &r) : 0;
    if (error)
        ok = kn_fail("fsdp: no thread to rehearse a step on: %s", strerror(error));
    if (ok) {
        pthread_join(thread, NULL);
        ok = !*r.error || kn_fail("fsdp: rehearsing a step failed: %s", r.error);
    }
    *peaks = r.peaks;
    kn_host_free(r.module);
    kn_host_free(r.param);
    kn_host_free(r.unit);
    kn_host_free(r.world);
    return ok;
}
