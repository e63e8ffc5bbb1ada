/* fsdp/wrap.c: kn_fsdp_wrap: checks of its options, and which modules become units. */
#include "comm/comm_internal.h"
#include "fsdp/build.h"
#include "kernels/kernels_internal.h"
#include <math.h>

/* ---- checks ---------------------------------------------------------------------------------- */

static bool one_of(unsigned value, unsigned count, const char *what)
{
    return value < count ||
           kn_fail("fsdp: .%s = %u is none of its values; see fsdp/fsdp.h", what, value);
}

static bool float_or_default(kn_dtype t, const char *what)
{
    return !t || kn_dtype_is_float(t) ||
           kn_fail("fsdp: .%s is %s; it must be f32, bf16, f16 or f64", what, kn_dtype_name(t));
}

static bool check_reshard(int value, const kn_mesh *mesh)
{
    if (value < KN_RESHARD_NEVER)
        return kn_fail("fsdp: .reshard_after_forward = %d; use KN_RESHARD_NEVER, "
                       "KN_RESHARD_ALWAYS, or a number of ranks",
                       value);
    return value < 2 || mesh->shards % value == 0 ||
           kn_fail("fsdp: .reshard_after_forward = %d must divide the %d shards", value,
                   mesh->shards);
}

static bool not_negative(double value, const char *what)
{
    return (value >= 0 && isfinite(value)) ||
           kn_fail("fsdp: .%s = %g must be finite and not negative", what, value);
}

/* An ignored tensor is a parameter of top's tree that no unit holds. */
static bool check_ignored(kn_tensor *t, kn_module_impl *top)
{
    char text[128];
    if (!kn_check(t, "fsdp: .ignored_params"))
        return false;
    for (const kn_module_impl *m = top; m; m = kn_impl_next(m, top))
        for (int i = 0; i < m->params; i++) {
            const kn_bucket *b = m->param[i].unit;
            if (!m->param[i].owner || m->param[i].tensor != t)
                continue;
            return !b || kn_fail("fsdp: .ignored_params lists '%s' of '%s', which unit '%s' holds "
                                 "already; list it where that unit is wrapped",
                                 m->param[i].name, kn_module_shown(m), kn_unit_name(b->unit));
        }
    return kn_fail("fsdp: .ignored_params lists %s%s%s, which is no parameter of the tree of "
                   "'%s'; buffers are named by .ignore",
                   kn_describe(t, text, sizeof text), *kn_name(t) ? " " : "", kn_name(t),
                   top->class_name);
}

/* Lists of modules and parameters end with NULL. */
static bool check_lists(const kn_fsdp_wrap_options *o, kn_module_impl *m)
{
    for (int i = 0; o->ignored_params && o->ignored_params[i]; i++)
        if (!check_ignored(o->ignored_params[i], kn_impl_root(m)))
            return false;
    for (int i = 0; o->ignored_modules && o->ignored_modules[i]; i++)
        if (!kn_impl(o->ignored_modules[i], "fsdp: .ignored_modules"))
            return false;
    for (int i = 0; o->wrap_like && o->wrap_like[i]; i++)
        if (!kn_impl(o->wrap_like[i], "fsdp: .wrap_like"))
            return false;
    return true;
}

static bool check_options(const kn_fsdp_wrap_options *o)
{
    if (!one_of(o->layout, KN_LAYOUT_COUNT, "layout") ||
        !one_of(o->backward_prefetch, KN_PREFETCH_COUNT, "backward_prefetch") ||
        !one_of(o->cast_inputs, KN_CAST_COUNT, "cast_inputs") ||
        !one_of(o->reduce_op, KN_REDUCE_OP_COUNT, "reduce_op") ||
        !float_or_default(o->param_dtype, "param_dtype") ||
        !float_or_default(o->reduce_dtype, "reduce_dtype") ||
        !float_or_default(o->output_dtype, "output_dtype") ||
        !float_or_default(o->buffer_dtype, "buffer_dtype") ||
        !check_reshard(o->reshard_after_forward, &o->mesh) ||
        !not_negative(o->divide_factor, "divide_factor") ||
        !not_negative(o->predivide_factor, "predivide_factor") ||
        !not_negative((double)o->keep_whole_below, "keep_whole_below") ||
        !not_negative((double)o->min_params, "min_params") ||
        !not_negative(o->max_gathers, "max_gathers") ||
        !not_negative(o->max_reductions, "max_reductions") ||
        !not_negative(o->timeout_s, "timeout_s"))
        return false;
    if (o->full_precision_class && o->param_dtype_of && !o->param_dtype)
        return kn_fail("fsdp: .full_precision_class is for .param_dtype, which isn't given; set it "
                       "as well, or let .param_dtype_of choose for those parameters");
    if (o->placement && o->layout != KN_LAYOUT_PER_PARAM)
        return kn_fail("fsdp: .placement is for KN_LAYOUT_PER_PARAM; set .layout as well");
    if (!kn_device_memory(o->device)) /* this build has none, or this machine; it says which */
        return false;
    bool memory = kn_offloads_to_memory(o);
    if (o->device == KN_CPU && memory)
        return kn_fail(
            "fsdp: .offload_dir = \"memory\" is for units that compute on cuda; on the cpu "
            "masters lie in memory anyway, or name a folder (\"./memory\")");
    if (o->offload_unpinned && !memory)
        return kn_fail("fsdp: .offload_unpinned is for .offload_dir = \"memory\"; set it as well");
    if (o->device == KN_META && o->offload_dir && !memory)
        return kn_fail(
            "fsdp: .offload_dir = \"%s\" means nothing on meta, where parameters have no "
            "bytes; \"memory\" simulates it",
            o->offload_dir);
    return true;
}

static bool check_place(kn_module_impl *m, const kn_fsdp_wrap_options *o)
{
    if (kn_ignores_module(o, m))
        return kn_fail(
            "fsdp: '%s' (%s) is to be wrapped, but .ignored_modules lists it or a module "
            "around it; take it out of one",
            kn_module_shown(m), m->class_name);
    if (m->unit)
        return kn_fail("fsdp: '%s' (%s) is a unit already; wrap each module once",
                       kn_module_shown(m), m->class_name);
    for (kn_module_impl *up = m->parent; up; up = up->parent)
        if (up->unit)
            return kn_fail("fsdp: '%s' lies inside the unit '%s'; wrap from the bottom up",
                           kn_module_shown(m), kn_module_shown(up));
    return true;
}

/* That of the first parameter that has one to compute on. */
static kn_device find_device(kn_module_impl *top)
{
    kn_device d = KN_DEVICE_DEFAULT;
    for (kn_module_impl *m = kn_impl_lowest(top); m; m = kn_impl_next_up(m, top))
        for (int i = 0; i < m->params && !d; i++) {
            d = kn_device_of(m->param[i].tensor);
            d = d == KN_META ? KN_DEVICE_DEFAULT : d;
        }
    return d;
}

static void set_defaults(kn_fsdp_wrap_options *o)
{
    o->strategy = o->strategy ? o->strategy : KN_FULL_SHARD;
    o->layout = o->layout ? o->layout : KN_LAYOUT_FLAT;
    o->backward_prefetch = o->backward_prefetch ? o->backward_prefetch : KN_PREFETCH_PRE;
    o->cast_inputs = o->cast_inputs ? o->cast_inputs : KN_CAST_ALL;
    o->reduce_op = o->reduce_op ? o->reduce_op : KN_REDUCE_AVERAGE;
    o->seed = o->seed ? o->seed : 1337;
    o->predivide_factor = o->predivide_factor == 1 ? 0 : o->predivide_factor;
    o->max_gathers = o->max_gathers ? o->max_gathers : 2;
    o->max_reductions = o->max_reductions ? o->max_reductions : 1;
}

/* A gather begins after the kernels that were launched before it (schedule.c), so on a GPU one that
 * is issued when its unit is needed never runs beside compute. PRE holds two units in backward
 * anyway: gathering early in forward adds nothing to the peak. Uploads are never free. */
static bool gathers_early(const kn_fsdp_wrap_options *o)
{
    bool gpu = o->device != KN_CPU && o->device != KN_META;
    return (gpu && o->backward_prefetch == KN_PREFETCH_PRE) || kn_offloads_to_memory(o);
}

/* Fills in defaults and checks; the mesh is resolved. */
static bool complete(kn_fsdp_wrap_options *o, kn_comm *comm)
{
    set_defaults(o);
    o->device = o->device ? o->device : kn_default_device;
    o->forward_prefetch |= gathers_early(o);
    return kn_fsdp_mesh(&o->mesh, o->strategy, comm) && check_options(o);
}

bool kn_unit_set_reshard(kn_unit *u, int value)
{
    if (!check_reshard(value, &u->options.mesh))
        return false;
    if (value > 1 && value != u->slice_ranks)
        return kn_fail("kn_fsdp_set_reshard_after_forward: groups of %d ranks must be asked for "
                       "when unit '%s' is wrapped (.reshard_after_forward)",
                       value, kn_unit_name(u));
    u->options.reshard_after_forward = value;
    return true;
}

/* ---- policy ---------------------------------------------------------------------------------- */

typedef struct wrapping {
    kn_comm *comm;
    const kn_fsdp_wrap_options *o;
    int wrapped;
} wrapping;

static bool unclaimed(kn_module_impl *m, const kn_fsdp_wrap_options *o, int64_t *elements)
{
    kn_claims c = { 0 };
    bool ok = kn_claims_collect(&c, &m, 1, o);
    *elements = c.elements;
    kn_claims_free(&c);
    return ok;
}

/* Whether a class computes in full precision. */
static bool full_precision(const kn_module_impl *m, const kn_fsdp_wrap_options *o)
{
    return o->param_dtype &&
           (kn_listed("batch_norm,batchnorm,batchnorm1d,batchnorm2d", m->class_name) ||
            kn_listed(o->full_precision_class, m->class_name));
}

/* o becomes the options of a unit of full precision: the dtypes as its modules declare them, f32
 * where they declare none. Outputs get the dtype around it, if not .output_dtype. Gradients
 * are not reduced in less than that. */
static bool set_full_precision(kn_module_impl *const *module, int modules, kn_fsdp_wrap_options *o)
{
    kn_claims c = { 0 };
    if (!kn_claims_collect(&c, module, modules, o)) {
        kn_claims_free(&c);
        return false;
    }
    bool f64 = false;
    for (int i = 0; i < c.count; i++)
        f64 |= kn_dtype_of(c.list[i].module->param[c.list[i].index].tensor) == KN_F64;
    o->output_dtype = o->output_dtype ? o->output_dtype : o->param_dtype;
    o->param_dtype = c.count > 0 ? KN_DTYPE_DEFAULT : KN_F32;
    o->param_dtype_of = NULL;
    o->reduce_dtype = o->reduce_dtype == KN_F32 && !f64 ? KN_F32 : KN_DTYPE_DEFAULT;
    kn_claims_free(&c);
    o->buffer_dtype = KN_DTYPE_DEFAULT;
    o->keep_low_precision_grads = false;
    o->cast_inputs = KN_CAST_ALL;
    return true;
}

/* Makes the unit; one of full precision casts its inputs to what its parameters are declared in. */
static bool build(kn_module_impl *const *module, int modules, kn_fsdp_wrap_options *o,
                  kn_comm *comm)
{
    bool full = full_precision(module[0], o);
    for (int i = 1; i < modules; i++)
        if (full_precision(module[i], o) != full)
            return kn_fail(
                "fsdp: of '%s' (%s) and '%s' (%s), which are to be one unit, one computes in "
                "full precision and one does not; wrap them apart",
                kn_module_shown(module[0]), module[0]->class_name, kn_module_shown(module[i]),
                module[i]->class_name);
    if (full && !set_full_precision(module, modules, o))
        return false;
    if (!complete(o, comm) || !kn_unit_build(module, modules, comm, o))
        return false;
    kn_unit_of(module[0])->cast |= full;
    return true;
}

/* Of the same class: their calls run the same function. */
static bool alike(const kn_module_impl *m, const kn_fsdp_wrap_options *o)
{
    for (int i = 0; o->wrap_like && o->wrap_like[i]; i++) {
        const kn_module_impl *one = o->wrap_like[i]->impl;
        if (m->forward.f1 == one->forward.f1 && m->forward.fn == one->forward.fn)
            return true;
    }
    return false;
}

static bool chosen(kn_module_impl *m, kn_fsdp_wrap_options *o, bool *yes)
{
    int64_t n = 0;
    if (!unclaimed(m, o, &n))
        return false;
    *yes = kn_listed(o->wrap_class, m->class_name) || alike(m, o) ||
           (o->min_params > 0 && n >= o->min_params && !m->is_list) ||
           (o->policy && o->policy(m->self, false, n, o, o->policy_arg));
    return kn_ok();
}

static bool wrap_below(kn_module_impl *m, wrapping *w)
{
    for (int i = 0; i < m->children; i++) {
        kn_module_impl *child = m->child[i]->impl;
        kn_fsdp_wrap_options o = *w->o;
        int64_t n = 0;
        bool yes = true;
        if (child->unit || kn_ignores_module(&o, child))
            continue;
        if (o.policy) {
            if (!unclaimed(child, &o, &n))
                return false;
            yes = o.policy(child->self, true, n, &o, o.policy_arg);
            o = *w->o;
        }
        if (yes && !wrap_below(child, w))
            return false;
        bool full = full_precision(child, &o);
        if (!full && !chosen(child, &o, &yes))
            return false;
        if (!full && !yes)
            continue;
        if (full) /* that is for what leaves the units around it */
            o.output_dtype = KN_DTYPE_DEFAULT;
        if (!build(&child, 1, &o, w->comm))
            return false;
        w->wrapped += !full || kn_listed(o.wrap_class, child->class_name) || alike(child, &o);
    }
    return true;
}

/* The policy may have meant m, a unit. */
static bool is_meant(const kn_module_impl *m, const kn_fsdp_wrap_options *o)
{
    return o->wrap_class || o->wrap_like ? kn_listed(o->wrap_class, m->class_name) || alike(m, o)
                                         : !full_precision(m, o);
}

/* A policy that matches nothing is a slip, unless what it names was wrapped by hand before. */
static bool check_wrapped(kn_module_impl *const *module, int n, const wrapping *w)
{
    const kn_fsdp_wrap_options *o = w->o;
    bool meant =
        w->wrapped > 0 || !(o->wrap_class || o->wrap_like || o->min_params > 0 || o->policy);
    for (int i = 0; i < n; i++)
        for (kn_module_impl *m = module[i]; m && !meant; m = kn_impl_next(m, module[i]))
            meant = m->unit && is_meant(m, o);
    return meant ||
           kn_fail("fsdp: the policy wraps nothing below '%s'%s%s%s%s%s%s; kn_module_print "
                   "shows the classes",
                   module[0]->class_name, o->wrap_class ? ": no module is of class '" : "",
                   o->wrap_class ? o->wrap_class : "", o->wrap_class ? "'" : "",
                   o->wrap_like ? ": none is like those of .wrap_like" : "",
                   o->min_params > 0 ? ": no module has .min_params elements left" : "",
                   o->policy ? ": .policy chose no module" : "");
}

static bool wrap(kn_module_impl **module, int n, kn_comm *comm, kn_fsdp_wrap_options *o)
{
    if (!check_lists(o, module[0]) || (!comm && !kn_comm_default(&comm, "kn_fsdp_wrap")))
        return false;
    for (int i = 0; i < n; i++)
        if (!check_place(module[i], o) || !kn_classes_known(o, module[i]) ||
            !kn_ranks_join(module[i], comm))
            return false;
    set_defaults(o);
    kn_mesh asked = o->mesh;
    for (int i = 0; i < n && !o->device; i++)
        o->device = find_device(module[i]);
    if (!kn_wrap_agrees(module, n, o, comm))
        return false;
    if (o->sync_from_rank0 && /* the others may have declared on meta */
        !kn_hosts_broadcast(comm, &o->device, sizeof o->device, 0, "device"))
        return false;
    if (!complete(o, comm))
        return false;
    const double timeout = comm ? comm->timeout : 0;
    if (o->timeout_s > 0 && comm)
        kn_comm_set_timeout(comm, o->timeout_s);
    kn_fsdp_wrap_options below = *o;
    below.mesh = asked; /* an override may choose another strategy */
    kn_scope scope = kn_scope_begin();
    wrapping w = { comm, &below, 0 };
    kn_undo *undo = kn_undo_begin(module, n);
    bool mode = kn_set_grad_mode(false), ok = undo != NULL;
    for (int i = 0; i < n && ok; i++)
        ok = wrap_below(module[i], &w);
    ok = ok && check_wrapped(module, n, &w) && build(module, n, o, comm);
    ok = ok &&
         (!(o->policy || o->placement || o->param_dtype_of) || kn_units_agree(module, n, comm));
    for (int i = 0; i < n && ok; i++)
        ok = kn_choose_recompute(&below, module[i]);
    kn_undo_end(undo, ok);
    if (!ok && comm)
        kn_comm_set_timeout(comm, timeout);
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    return ok;
}

bool kn_fsdp_wrap_(void *module, kn_comm *comm, kn_fsdp_wrap_options o)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_fsdp_wrap") : NULL;
    return m && wrap(&m, 1, comm, &o);
}

bool kn_fsdp_wrap_group_(kn_module *const *modules, int n, kn_comm *comm, kn_fsdp_wrap_options o)
{
    if (!kn_ok())
        return false;
    if (!modules || n < 1)
        return kn_fail("kn_fsdp_wrap_group: there are no modules to wrap");
    kn_module_impl **list = kn_host_calloc((size_t)n, sizeof(kn_module_impl *));
    bool ok = list != NULL;
    for (int i = 0; i < n && ok; i++)
        ok =
            (list[i] = kn_impl(modules[i], "kn_fsdp_wrap_group")) != NULL &&
            (kn_impl_root(list[i]) == kn_impl_root(list[0]) ||
             kn_fail(
                 "kn_fsdp_wrap_group: module %d ('%s', %s) belongs to another model than the first "
                 "('%s', %s); a group's modules need a common ancestor: kn_module_add them",
                 i + 1, kn_module_shown(list[i]), list[i]->class_name, kn_module_shown(list[0]),
                 list[0]->class_name));
    for (int i = 0; i < n && ok; i++)
        for (int k = 0; k < n && ok; k++)
            ok = k == i || !kn_module_inside(list[k], &list[i], 1) ||
                 kn_fail("kn_fsdp_wrap_group: '%s' lies in '%s', which is in the group as "
                         "well; name each module once, and none inside another",
                         kn_module_shown(list[k]), kn_module_shown(list[i]));
    ok = ok && wrap(list, n, comm, &o);
    kn_host_free(list);
    return ok;
}
