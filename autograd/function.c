/* autograd/function.c: operations of the user's own (function.h). Each call has a state, which
 * holds the kn_function_run that the user sees and a kn_op of its own; the node on the tape owns
 * it. While forward or backward runs, the context points at the run, so that errors of operations
 * inside name the function, and kn_save_for_backward knows whether its time has come. */
#include "autograd/function.h"
#include "autograd/autograd_internal.h"
#include "autograd/check.h"
#include "autograd/engine.h"
#include "autograd/hooks.h"
#include "autograd/record.h"
#include "kernels/graph_internal.h"
#include "kernels/trace.h"
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

_Static_assert(KN_MAX_VALUES <= KN_MAX_IN && KN_MAX_VALUES <= KN_MAX_OUT, "values fit into a node");

enum { NO_SOURCE = 100 };

typedef struct state {
    kn_function_run run; /* comes first: the context points at it */
    kn_function_run *outer;
    kn_function f;
    kn_op op;
    char name[64];
    kn_place place;                    /* of the call */
    bool backward;                     /* is running, not forward */
    bool ghost;                        /* the shape rule stands in: tensors are on meta */
    kn_values keep;                    /* forward: references to what is to be saved */
    signed char source[KN_MAX_VALUES]; /* of what was saved: input i, result -1 - i, or NO_SOURCE */
    kn_cost cost;
    _Alignas(max_align_t) char arg[];
} state;

/* ---- errors ---------------------------------------------------------------------------------- */

const char *kn_function_path(const kn_context *c, const char *module)
{
    static _Thread_local char text[512];
    const state *s = (const state *)c->function;
    if (!s && !c->hook)
        return module;
    size_t n = (size_t)snprintf(text, 256, "%.250s", module);
    if (s)
        n += (size_t)snprintf(text + n, 100, "%s%s of '%s'", n ? ", " : "",
                              s->backward ? "backward" : "forward", s->name);
    if (s && s->backward && s->place.file)
        n += (size_t)snprintf(text + n, sizeof text - n, " called at %s:%d", s->place.file,
                              s->place.line);
    if (c->hook && n < sizeof text)
        snprintf(text + n, sizeof text - n, "%s%s", n ? ", " : "", c->hook->text);
    return text;
}

/* "forward of 'swish': ..." */
__attribute__((format(printf, 2, 3))) static bool fail(const state *s, const char *fmt, ...)
{
    char text[512], at[256] = "";
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (s->backward && s->place.file)
        snprintf(at, sizeof at, " called at %s:%d", s->place.file, s->place.line);
    return kn_fail("%s of '%s'%s: %s", s->backward ? "backward" : "forward", s->name, at, text);
}

/* ---- running --------------------------------------------------------------------------------- */

static void enter(state *s, bool backward)
{
    kn_context *c = kn_context_get();
    s->backward = backward;
    s->outer = c->function;
    c->function = &s->run;
}

static void leave(state *s)
{
    kn_context_get()->function = s->outer;
}

/* The calls since begin count as one of name's; backward twice. */
static void account(const state *s, kn_device d, double begin)
{
    char what[80];
    const double times = s->backward ? 2 : 1;
    const kn_cost cost = { times * s->cost.flops, times * s->cost.bytes };
    snprintf(what, sizeof what, "%s%s", s->name, s->backward ? "_grad" : "");
    if (d == KN_META && (s->ghost || s->f.flops))
        kn_meta_compute(kn_compute_stream(d), what, cost);
    else if (d == KN_CPU && kn_tracing())
        kn_trace_add(what, "function", kn_compute_stream(d), begin, kn_now(), cost.flops,
                     cost.bytes);
}

static double bytes_of(kn_values t)
{
    double sum = 0;
    for (int i = 0; i < t.n; i++)
        if (t.v[i])
            sum += (double)kn_numel(t.v[i]) * (double)kn_dtype_size(t.v[i]->dtype);
    return sum;
}

static kn_tensor *first_of(kn_values t)
{
    for (int i = 0; i < t.n; i++)
        if (t.v[i])
            return t.v[i];
    return NULL;
}

/* ---- forward --------------------------------------------------------------------------------- */

static bool backward(kn_op_grad *g);

static bool check_call(const kn_function *f, kn_values in)
{
    if (!f || !f->name || !f->forward)
        return kn_fail("kn_function_call: a function has a .name and a .forward");
    if (in.n < 1 || in.n > KN_MAX_VALUES)
        return kn_fail("%s: takes 1 to %d tensors, got %d", f->name, KN_MAX_VALUES, in.n);
    for (int i = 0; i < in.n; i++) {
        if (!in.v[i] && !(f->optional >> i & 1))
            return kn_fail("%s: input %d is NULL although no error stands; .optional lists the "
                           "inputs that may be",
                           f->name, i + 1);
        if (in.v[i] && !kn_check(in.v[i], f->name))
            return false;
    }
    return first_of(in) || kn_fail("%s: all inputs are NULL", f->name);
}

static state *make_state(const kn_function *f, kn_values in, const void *arg, size_t arg_size)
{
    if (arg_size && !arg)
        return kn_fail_null("%s: arg is NULL, of %zu bytes", f->name, arg_size);
    state *s = kn_host_calloc(1, sizeof *s + arg_size);
    if (!s)
        return NULL;
    const kn_context *c = kn_context_get();
    s->f = *f;
    s->place = (kn_place){ c->user_file, c->user_line };
    snprintf(s->name, sizeof s->name, "%s", f->name);
    s->op = (kn_op){ .name = s->name,
                     .collective = true,
                     .backward = backward,
                     .on_tape = f->second_order ? backward : NULL };
    s->run.inputs = in.n;
    if (arg_size)
        s->run.arg = memcpy(s->arg, arg, arg_size);
    for (int i = 0; i < in.n; i++) {
        const kn_tensor *t = in.v[i];
        if (!t)
            continue;
        const bool wants = kn_record_read(t);
        s->run.dtype[i] = t->dtype;
        s->run.ndim[i] = t->ndim;
        memcpy(s->run.shape[i], t->shape, sizeof t->shape);
        s->run.needs[i] = wants && f->backward && kn_grad_mode();
        s->ghost = s->ghost || (kn_device_of(t) == KN_META && f->shape);
    }
    s->cost = (kn_cost){ f->flops ? f->flops(in) : 0, bytes_of(in) };
    return s;
}

static bool needs_any(const kn_function_run *r)
{
    bool any = false;
    for (int i = 0; i < r->inputs; i++)
        any = any || r->needs[i];
    return any;
}

static bool check_results(const state *s, kn_values in, kn_values out, const uint32_t *version)
{
    if (!kn_ok())
        return false;
    if (out.n < 1 || out.n > KN_MAX_VALUES)
        return fail(s, "returned %d results, not 1 to %d", out.n, KN_MAX_VALUES);
    for (int i = 0; i < out.n; i++)
        if (!out.v[i])
            return fail(s, "returned NULL as result %d although no error stands", i + 1);
        else if (!kn_check(out.v[i], s->name))
            return false;
    for (int i = 0; i < in.n; i++)
        if (s->run.needs[i] && kn_version_of(in.v[i]) != version[i])
            return fail(s, "wrote in place to input %d, which needs a gradient; write to a copy",
                        i + 1);
    return true;
}

static kn_values run_forward(state *s, kn_values in)
{
    kn_values out = { 0 };
    uint32_t version[KN_MAX_VALUES] = { 0 };
    if (!kn_ok())
        return out;
    for (int i = 0; i < in.n; i++)
        version[i] = in.v[i] ? kn_version_of(in.v[i]) : 0;
    kn_context *c = kn_context_get();
    const bool mode = kn_set_grad_mode(false), trains = c->trains;
    const double begin = kn_tracing() ? kn_now() : 0;
    c->trains |= mode;
    enter(s, false);
    out = s->ghost ? s->f.shape(&s->run, in) : s->f.forward(&s->run, in);
    leave(s);
    c->trains = trains;
    kn_set_grad_mode(mode);
    if (!check_results(s, in, out, version))
        return (kn_values){ 0 };
    s->cost.bytes += bytes_of(out);
    account(s, kn_device_of(first_of(in)), begin);
    if (kn_checking() && !kn_check_results(s->name, false, in.v, in.n, out.v, out.n))
        return (kn_values){ 0 };
    for (int i = 0; i < out.n; i++) /* it may be an input, a parameter, or another result too */
        if (!(out.v[i] = kn_detach(out.v[i])))
            return (kn_values){ 0 };
    return out;
}

static void drop_keep(state *s)
{
    for (int i = 0; i < s->keep.n; i++)
        kn_tensor_free(s->keep.v[i]);
    s->keep = (kn_values){ 0 };
}

static void free_state(state *s) /* NULL is fine */
{
    if (s)
        drop_keep(s);
    kn_host_free(s);
}

static bool same_place(const kn_tensor *a, const kn_tensor *b)
{
    return b && a->storage == b->storage && a->offset == b->offset && a->dtype == b->dtype &&
           kn_has_shape(a, b->ndim, b->shape);
}

/* Which input or result the saved tensor t is. */
static signed char source_of(const kn_tensor *t, kn_values in, kn_values out)
{
    for (int i = 0; i < in.n; i++)
        if (t == in.v[i])
            return (signed char)i;
    for (int i = 0; i < out.n; i++)
        if (same_place(t, out.v[i]))
            return (signed char)(-1 - i);
    return NO_SOURCE;
}

/* The node takes over s. */
static bool record(state *s, kn_values in, kn_values out)
{
    kn_node *n = kn_node_new(&s->op, in.n, out.n);
    if (!n) {
        free_state(s);
        return false;
    }
    n->attr = s;
    bool ok = true;
    for (int i = 0; i < in.n && ok; i++)
        ok = kn_node_set_input(n, i, in.v[i]);
    for (int i = 0; i < s->keep.n && ok; i++)
        if (s->keep.v[i]) {
            s->source[i] = source_of(s->keep.v[i], in, out);
            ok = kn_save(&n->kept[i], s->keep.v[i]);
        }
    for (int i = 0; i < out.n && ok; i++)
        if (kn_dtype_is_float(out.v[i]->dtype) && !(s->f.no_grad >> i & 1))
            kn_node_set_output(n, i, out.v[i]);
    s->run.saved.n = s->keep.n;
    drop_keep(s);
    kn_node_unref(n); /* the outputs hold it now */
    return ok;
}

kn_values kn_function_call_n(const kn_function *f, kn_values in, const void *arg, size_t arg_size)
{
    if (!kn_ok() || !check_call(f, in))
        return (kn_values){ 0 };
    state *s = make_state(f, in, arg, arg_size);
    if (!s || !kn_nest_begin(s->name)) {
        free_state(s);
        return (kn_values){ 0 };
    }
    kn_scope scope = kn_scope_begin();
    kn_values out = run_forward(s, in);
    if (out.n > 0 && needs_any(&s->run)) {
        if (!record(s, in, out))
            out = (kn_values){ 0 };
    } else {
        free_state(s);
    }
    kn_scope_end_except(scope, out.v, out.n);
    kn_nest_end();
    return out;
}

kn_tensor *kn_function_call_(const kn_function *f, kn_values in)
{
    kn_values out = kn_function_call_n(f, in, NULL, 0);
    if (out.n > 1)
        kn_fail("%s: has %d results; use kn_function_call_n", f->name, out.n);
    return out.n == 1 ? out.v[0] : NULL;
}

bool kn_save_for_backward_(kn_function_run *run, kn_values t)
{
    kn_function_run *r = kn_context_get()->function;
    if (!kn_ok())
        return false;
    while (r && r != run)
        r = ((state *)r)->outer;
    state *s = (state *)r;
    if (!s || s->backward)
        return kn_fail("kn_save_for_backward: belongs into the forward of the run that it is "
                       "given, and that isn't running");
    if (t.n < 0 || t.n > KN_MAX_VALUES - s->keep.n)
        return kn_fail("kn_save_for_backward: %d tensors after %d, at most %d are saved", t.n,
                       s->keep.n, KN_MAX_VALUES);
    for (int i = 0; i < t.n; i++)
        if (t.v[i] && !kn_check(t.v[i], "kn_save_for_backward"))
            return false;
    for (int i = 0; i < t.n && needs_any(&s->run); i++)
        s->keep.v[s->keep.n++] = t.v[i] ? kn_tensor_ref(t.v[i]) : NULL;
    return true;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dx has the shape, dtype and device of input i and no graph. */
static bool check_gradient(const state *s, const kn_op_grad *g, int i, const kn_tensor *dx)
{
    const kn_spec *want = &g->in_spec[i];
    char shape[128];
    if (!kn_check(dx, s->name))
        return false;
    kn_spec_describe(want, shape, sizeof shape);
    if (dx->dtype != want->dtype || !kn_has_shape(dx, want->ndim, want->shape))
        return fail(s, "the gradient of input %d is %s, the input was %s", i + 1, KN_SHOWN(dx),
                    shape);
    if (kn_device_of(dx) != want->device)
        return fail(s, "the gradient of input %d is on %s, the input was on %s", i + 1,
                    kn_device_name(kn_device_of(dx)), kn_device_name(want->device));
    return !dx->requires_grad || kn_grad_mode() ||
           fail(s,
                "the gradient of input %d has a graph, which only .create_graph asks for; leave "
                "grad mode off, or return kn_detach of it",
                i + 1);
}

static kn_values gradients_of_results(const kn_op_grad *g)
{
    kn_values dout = { .n = g->nout };
    for (int i = 0; i < g->nout; i++) {
        const kn_spec *s = &g->out_spec[i];
        dout.v[i] = g->dout[i];
        if (!g->dout[i] && s->dtype != KN_DTYPE_DEFAULT)
            dout.v[i] = kn_zeros(s->dtype, s->device, s->ndim, s->shape);
    }
    return dout;
}

static kn_values gradients_on_meta(const kn_op_grad *g)
{
    kn_values din = { .n = g->nin };
    for (int i = 0; i < g->nin; i++)
        if (g->want[i])
            din.v[i] = kn_empty(g->in_spec[i].dtype, g->in_spec[i].device, g->in_spec[i].ndim,
                                g->in_spec[i].shape);
    return din;
}

/* What was saved, with its graph where the gradients are to have one. */
static bool saved_of(const state *s, kn_op_grad *g, kn_tensor **saved)
{
    kn_node *n = g->node;
    memcpy(saved, g->kept, sizeof g->kept);
    for (int i = 0; i < s->run.saved.n && kn_grad_mode(); i++) {
        const int from = s->source[i];
        if (saved[i] && from == NO_SOURCE && kn_dtype_is_float(saved[i]->dtype))
            return fail(s,
                        "saved tensor %d is neither an input nor a result, so its part of the "
                        "second derivative would be lost (.second_order)",
                        i + 1);
        if (!saved[i] || from == NO_SOURCE)
            continue;
        const kn_edge *edge = from >= 0 ? &n->edge[from] : NULL;
        if (!kn_with_graph(&saved[i], edge ? edge->node : n, edge ? edge->out_index : -1 - from,
                           edge ? edge->leaf : NULL))
            return false;
    }
    return true;
}

static kn_values run_backward(state *s, kn_op_grad *g)
{
    const bool mode = kn_grad_mode();
    const double begin = kn_tracing() ? kn_now() : 0;
    kn_values dout = gradients_of_results(g);
    uint32_t version[KN_MAX_VALUES] = { 0 };
    for (int i = 0; i < dout.n; i++)
        version[i] = dout.v[i] ? kn_version_of(dout.v[i]) : 0;
    enter(s, true);
    kn_values din = !saved_of(s, g, s->run.saved.v) || !kn_collective_begins() ? (kn_values){ 0 }
                    : s->ghost ? gradients_on_meta(g)
                               : s->f.backward(&s->run, dout);
    leave(s);
    memset(s->run.saved.v, 0, sizeof s->run.saved.v);
    kn_set_grad_mode(mode);
    for (int i = 0; i < dout.n && kn_ok(); i++) /* another node may have it too */
        if (dout.v[i] && kn_version_of(dout.v[i]) != version[i])
            fail(s, "wrote in place to the gradient of result %d; write to a copy", i + 1);
    account(s, first_of(dout) ? kn_device_of(first_of(dout)) : KN_CPU, begin);
    return din;
}

static bool backward(kn_op_grad *g)
{
    state *s = g->node->attr;
    kn_values din = run_backward(s, g);
    if (!kn_ok())
        return false;
    if (din.n != g->nin)
        return fail(s, "returned %d gradients for %d inputs; those that need none get NULL", din.n,
                    g->nin);
    for (int i = 0; i < g->nin; i++) {
        if (!g->want[i] || !din.v[i])
            continue;
        if (!check_gradient(s, g, i, din.v[i]))
            return false;
        g->din[i] = din.v[i];
    }
    return true;
}

/* ---- raw data -------------------------------------------------------------------------------- */

static bool check_data(const kn_tensor *t, kn_dtype dtype, const char *what)
{
    if (!kn_check(t, what))
        return false;
    if (kn_device_of(t) == KN_META)
        return kn_fail("%s: %s is on meta and has no values; a function that reads them needs a "
                       ".shape",
                       what, KN_SHOWN(t));
    if (kn_unrecordable(KN_DEVICE_DEFAULT, "%s: the host reads or writes values", what))
        return false;
    return t->dtype == dtype ||
           kn_fail("%s: is for %s, got %s; kn_cast it", what, kn_dtype_name(dtype), KN_SHOWN(t));
}

const void *kn_read_data(kn_tensor *t, kn_dtype dtype)
{
    if (!check_data(t, dtype, "kn_read_data"))
        return NULL;
    const bool mode = kn_set_grad_mode(false);
    kn_tensor *c = kn_contiguous(t);
    kn_set_grad_mode(mode);
    return c ? kn_data(c) : NULL;
}

void *kn_write_data(kn_tensor *t, kn_dtype dtype)
{
    if (!check_data(t, dtype, "kn_write_data"))
        return NULL;
    void *p = kn_data(t);
    if (p && kn_tensor_before_write(t, "kn_write_data"))
        kn_written(t);
    return kn_ok() ? p : NULL; /* this leaf may not be written, or an error stood before */
}
