/* fsdp/wrap.c: kn_fsdp_wrap: which modules become units, and how a unit takes over its parameters. */
#include "fsdp/unit.h"
#include <string.h>

/* ---- collecting what a unit claims ------------------------------------------------------------------------ */

typedef struct claim {
    kn_module_impl *module;
    int index;
} claim;

typedef struct claims {
    claim *list;
    int count;
    int64_t elements;
    bool counting_only;
} claims;

static bool claim_module(kn_module *self, void *arg)
{
    claims *c = arg;
    kn_module_impl *m = self->impl;
    for (int i = 0; i < m->params; i++) {
        if (!m->param[i].owner || m->param[i].source)
            continue;
        c->elements += kn_numel(m->param[i].tensor);
        if (!c->counting_only) {
            claim *list = kn_realloc(c->list, (size_t)(c->count + 1) * sizeof *list);
            if (!list)
                return false;
            c->list = list;
            c->list[c->count] = (claim){ m, i };
        }
        c->count++;
    }
    return true;
}

/* ---- building a unit ---------------------------------------------------------------------------------------- */

static kn_tensor *unit_grad(const kn_param *p)
{
    const kn_unit *u = (const kn_unit *)p->source;
    return u->has_grad && !u->gshard->released ? u->param[p->index].gpart : NULL;
}

static void unit_clear(const kn_param *p)
{
    ((kn_unit *)p->source)->has_grad = false;
}

static void unit_round(void *unit)
{
    kn_unit *u = unit;
    kn_module_round(u->module, u->ranks);
}

static bool one_dtype(const claims *c, kn_dtype *dtype)
{
    *dtype = KN_F32;
    for (int i = 0; i < c->count; i++) {
        kn_param_entry *p = &c->list[i].module->param[c->list[i].index];
        if (i == 0)
            *dtype = p->tensor->dtype;
        else if (p->tensor->dtype != *dtype)
            return kn_fail("fsdp: '%s.%s' is %s but others of its unit are %s; a unit holds one "
                           "dtype, so wrap "
                           "them apart",
                           c->list[i].module->path, p->name, kn_dtype_name(p->tensor->dtype),
                           kn_dtype_name(*dtype));
    }
    return true;
}

static bool make_buffers(kn_unit *u)
{
    size_t master = (size_t)u->layout.shard * kn_dtype_size(u->master_dtype);
    size_t full = (size_t)u->layout.total * kn_dtype_size(u->param_dtype);
    size_t grad = (size_t)u->layout.total * kn_dtype_size(u->reduce_dtype);
    kn_memory *memory = u->ranks > 1 ? kn_comm_memory(u->comm) : kn_device_memory(KN_CPU);
    u->master = kn_storage_create(memory, master, KN_MEM_PARAM, u->module->path);
    if (!u->master)
        return false;
    memset(u->master->data, 0, master);
    bool same = u->shards == 1 && u->param_dtype == u->master_dtype;
    u->full = same ? u->master
                   : kn_storage_create_released(memory, full, KN_MEM_GATHERED, u->module->path);
    u->grad = kn_storage_create_released(memory, grad, KN_MEM_UNREDUCED, u->module->path);
    u->gshard = kn_storage_create_released(memory, master, KN_MEM_GRAD, u->module->path);
    u->gathered = kn_event_create(KN_CPU);
    u->computed = kn_event_create(KN_CPU);
    u->reduced = kn_event_create(KN_CPU);
    return u->full && u->grad && u->gshard && u->gathered && u->computed && u->reduced;
}

/* This rank's part gets its values: from (seed, name) for a parameter on meta, else from the tensor. */
static bool fill_part(kn_unit *u, kn_unit_param *p, const kn_param_entry *e)
{
    if (p->part.count == 0)
        return true;
    if (kn_device_of(e->tensor) == KN_META)
        return kn_init_fill(&e->init, u->options.seed, p->name, p->master, p->part.start);
    kn_tensor *part =
        kn_tensor_alias(e->tensor, p->part.start, 1, &p->part.count, (int64_t[]){ 1 });
    return part && kn_copy_(p->master, part);
}

static bool take_param(kn_unit *u, int i, claim c)
{
    kn_param_entry *e = &c.module->param[c.index];
    kn_unit_param *p = &u->param[i];
    kn_tensor *t = e->tensor;
    p->tensor = kn_tensor_ref(t);
    p->part = kn_layout_part(&u->layout, i, u->shard);
    p->name = kn_param_path(c.module, e);
    p->master =
        kn_tensor_on(u->master, p->part.at, u->master_dtype, 1, &p->part.count, NULL, false);
    p->gpart = kn_tensor_on(u->gshard, p->part.at, u->master_dtype, 1, &p->part.count, NULL, false);
    p->grad =
        kn_tensor_on(u->grad, u->layout.offset[i], u->reduce_dtype, t->ndim, t->shape, NULL, false);
    if (!p->name || !p->master || !p->gpart || !p->grad || !fill_part(u, p, e))
        return false;
    /* the module's handle now looks into the gathered buffer */
    kn_storage *old = t->storage;
    t->storage = kn_storage_ref(u->full);
    kn_storage_unref(old);
    t->offset = u->layout.offset[i];
    t->dtype = u->param_dtype;
    kn_set_name(t, p->name);
    if (!kn_leaf_of(t))
        return false;
    t->leaf->dest = kn_unit_grad_dest;
    t->leaf->dest_arg = u;
    t->leaf->group = &u->group;
    t->leaf->on_round = unit_round;
    t->leaf->on_round_arg = u;
    e->source = &u->source;
    e->unit = u;
    e->unit_index = i;
    e->master = p->master;
    e->start = p->part.start;
    e->replicated = u->shards == 1;
    return true;
}

static bool make_unit(kn_module_impl *m, kn_comm *comm, const kn_fsdp_options *o)
{
    claims c = { 0 };
    int64_t *numel = NULL;
    kn_unit *u = kn_calloc(1, sizeof *u);
    if (!u || !kn_apply_modules(m->self, claim_module, &c) || !one_dtype(&c, &u->master_dtype))
        goto fail;
    u->source = (kn_param_source){ unit_grad, unit_clear };
    u->module = m;
    u->comm = comm;
    u->options = *o;
    u->rank = kn_rank(comm);
    u->ranks = kn_comm_size(comm);
    u->shards = o->strategy == KN_NO_SHARD ? 1 : u->ranks;
    u->shard = u->shards == 1 ? 0 : u->rank;
    u->param_dtype = o->param_dtype ? o->param_dtype : u->master_dtype;
    u->reduce_dtype = o->reduce_dtype ? o->reduce_dtype : u->param_dtype;
    u->group = (kn_group){ .complete = kn_unit_complete, .arg = u };
    u->order = -1;
    numel = kn_calloc((size_t)c.count + 1, sizeof *numel);
    u->param = kn_calloc((size_t)c.count + 1, sizeof *u->param);
    if (!numel || !u->param)
        goto fail;
    for (int i = 0; i < c.count; i++)
        numel[i] = kn_numel(c.list[i].module->param[c.list[i].index].tensor);
    if (!kn_layout_flat(&u->layout, numel, c.count, u->shards) || !make_buffers(u))
        goto fail;
    u->params = c.count;
    for (int i = 0; i < c.count; i++)
        if (!take_param(u, i, c.list[i]))
            goto fail;
    m->unit = kn_unit_hooks_new(u);
    if (!m->unit)
        goto fail;
    kn_params_changed(m);
    kn_impl_root(m)->scalar_reduce = kn_unit_scalar_reduce;
    kn_impl_root(m)->scalar_reduce_arg = u;
    kn_free_host(numel);
    kn_free_host(c.list);
    return true;
fail:
    kn_unit_free(u);
    kn_free_host(numel);
    kn_free_host(c.list);
    return false;
}

/* ---- policy ------------------------------------------------------------------------------------------------- */

static bool class_listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *p = list; p && *p; p += strcspn(p, ","), p += *p == ',')
        if (strcspn(p, ",") == n && strncmp(p, name, n) == 0)
            return true;
    return false;
}

static bool matches(kn_module_impl *m, const kn_fsdp_options *o)
{
    if (o->wrap_class && class_listed(o->wrap_class, m->class_name))
        return true;
    if (o->min_params <= 0)
        return false;
    claims c = { .counting_only = true };
    return kn_apply_modules(m->self, claim_module, &c) && c.elements >= o->min_params;
}

static bool wrap_below(kn_module_impl *m, kn_comm *comm, const kn_fsdp_options *o, int *wrapped)
{
    for (int i = 0; i < m->children; i++) {
        kn_module_impl *child = m->child[i]->impl;
        if (!wrap_below(child, comm, o, wrapped))
            return false;
        if (child->unit || !matches(child, o))
            continue;
        if (!make_unit(child, comm, o))
            return false;
        ++*wrapped;
    }
    return true;
}

static bool check_options(kn_module_impl *m, const kn_fsdp_options *o)
{
    if (m->unit)
        return kn_fail("fsdp: '%s' (%s) is a unit already; wrap each module once", m->path,
                       m->class_name);
    for (kn_module_impl *up = m->parent; up; up = up->parent)
        if (up->unit)
            return kn_fail("fsdp: '%s' lies inside the unit '%s'; wrap from the bottom up", m->path,
                           up->path);
    if ((unsigned)o->strategy > KN_NO_SHARD)
        return kn_fail("fsdp: unknown strategy %d; KN_FULL_SHARD and KN_NO_SHARD exist",
                       (int)o->strategy);
    if ((unsigned)o->prefetch > KN_PREFETCH_NONE)
        return kn_fail("fsdp: unknown backward prefetch %d; use KN_PREFETCH_PRE, _POST or _NONE",
                       (int)o->prefetch);
    if (o->device != KN_CPU)
        return kn_fail("fsdp: device %s is not supported; units compute on the cpu",
                       kn_device_name(o->device));
    if ((o->param_dtype && !kn_dtype_is_float(o->param_dtype)) ||
        (o->reduce_dtype && !kn_dtype_is_float(o->reduce_dtype)))
        return kn_fail("fsdp: param_dtype and reduce_dtype must be f32, bf16, f16 or f64");
    return true;
}

bool kn_fsdp_wrap_(void *module, kn_comm *comm, kn_fsdp_options o)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_fsdp_wrap") : NULL;
    if (!m)
        return false;
    o.strategy = o.strategy ? o.strategy : KN_FULL_SHARD;
    o.prefetch = o.prefetch ? o.prefetch : KN_PREFETCH_PRE;
    o.seed = o.seed ? o.seed : 1337;
    o.device = o.device ? o.device : KN_CPU;
    if (!check_options(m, &o))
        return false;
    kn_scope scope = kn_scope_begin();
    bool mode = kn_set_grad_mode(false);
    int wrapped = 0;
    bool ok = wrap_below(m, comm, &o, &wrapped);
    if (ok && wrapped == 0 && (o.wrap_class || o.min_params > 0))
        ok = kn_fail("fsdp: the policy wraps nothing below '%s': no module is of class '%s'%s; "
                     "kn_module_print "
                     "shows the classes",
                     m->class_name, o.wrap_class ? o.wrap_class : "",
                     o.min_params > 0 ? " or has that many parameters" : "");
    o.wrap_class = NULL; /* borrowed from the caller */
    ok = ok && make_unit(m, comm, &o);
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    return ok;
}
