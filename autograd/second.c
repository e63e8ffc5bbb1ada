/* autograd/second.c: gradients with a graph, of operations whose backward is a kernel (second.h).
 *
 * The gradients that such a backward gives become results of a node of its own: it knows the node
 * whose gradients they are, and its inputs are the gradients dy and what forward had saved. */
#include "autograd/second.h"
#include "autograd/engine.h"
#include "autograd/ops.h"
#include <string.h>

kn_tensor *kn_on_tape_view(kn_tensor *t)
{
    const bool mode = kn_set_grad_mode(true);
    kn_tensor *view = kn_view(t, t->ndim, t->shape);
    kn_set_grad_mode(mode);
    return view;
}

/* ---- the gradients of a node as results of another ------------------------------------------- */

/* Where the node's inputs and outputs hold what; -1: nowhere. */
typedef struct adjoint {
    kn_node *of; /* a reference */
    bool bilinear;
    signed char dout[KN_MAX_OUT], in[KN_MAX_IN]; /* among the inputs */
    signed char din[KN_MAX_IN];                  /* among the outputs */
} adjoint;

static void drop_adjoint(void *attr)
{
    kn_node_unref(((adjoint *)attr)->of);
}

static bool adjoint_backward(kn_op_grad *g);
#define ADJOINT(...)                                                                               \
    {                                                                                              \
        .name = "gradient", .backward = adjoint_backward, .on_tape = adjoint_backward, __VA_ARGS__ \
    }
static const kn_op adjoint_op = ADJOINT(.collective = false),
                   adjoint_of_ranks = ADJOINT(.collective = true);

/* g->din by the kernels of of's backward, as tensors without graph. */
static bool compute(kn_node *of, kn_op_grad *g)
{
    kn_edge none[KN_MAX_IN] = { { 0 } };
    kn_node alone = { .op = of->op,
                      .attr = of->attr,
                      .nin = of->nin,
                      .nout = of->nout,
                      .edge = none,
                      .in_spec = of->in_spec,
                      .out_spec = of->out_spec };
    g->node = &alone;
    g->attr = of->attr;
    g->nin = of->nin;
    g->nout = of->nout;
    g->in_spec = of->in_spec;
    g->out_spec = of->out_spec;
    g->alone = true;
    const bool mode = kn_set_grad_mode(false);
    bool ok = of->op->backward(g);
    for (int i = 0; i < g->nin && ok; i++)
        if (g->want[i] && g->din[i])
            ok = (g->din[i] = kn_detach(g->din[i])) != NULL;
    kn_set_grad_mode(mode);
    return ok;
}

static bool add_input(kn_node *n, signed char *at, kn_tensor *t, bool save)
{
    *at = -1;
    if (!t)
        return true;
    if (n->nin == KN_MAX_IN)
        return kn_fail("gradient: it depends on more than %d tensors", KN_MAX_IN);
    const int i = n->nin++;
    *at = (signed char)i;
    return kn_node_set_input(n, i, t) && (!save || kn_save(&n->saved_in[i], t));
}

/* The node of the gradients that g has. */
static bool record(kn_node *of, bool bilinear, kn_op_grad *g)
{
    kn_node *n =
        kn_node_new(of->op->collective ? &adjoint_of_ranks : &adjoint_op, KN_MAX_IN, KN_MAX_OUT);
    adjoint *a = n ? kn_host_calloc(1, sizeof *a) : NULL;
    if (!a) {
        kn_node_unref(n);
        return false;
    }
    *a = (adjoint){ .of = of, .bilinear = bilinear };
    of->refs++;
    n->attr = a;
    n->free_attr = drop_adjoint;
    n->nin = n->nout = 0;
    bool ok = true;
    for (int k = 0; k < KN_MAX_OUT && ok; k++)
        ok = add_input(n, &a->dout[k], g->dout[k], bilinear);
    for (int i = 0; i < KN_MAX_IN && ok; i++)
        ok = add_input(n, &a->in[i], g->in[i], true);
    for (int i = 0; i < KN_MAX_IN && ok; i++) {
        a->din[i] = -1;
        if (i < g->nin && g->want[i] && g->din[i]) {
            a->din[i] = (signed char)n->nout;
            kn_node_set_output(n, n->nout++, g->din[i]);
        }
    }
    kn_node_unref(n); /* the outputs hold it now */
    return ok;
}

/* of's gradients that g->want lists, from g->dout and g->in. */
static bool apply(kn_node *of, bool bilinear, kn_op_grad *g)
{
    bool graph = false;
    for (int k = 0; k < KN_MAX_OUT; k++)
        graph |= g->dout[k] && g->dout[k]->requires_grad;
    for (int i = 0; i < KN_MAX_IN; i++)
        graph |= g->in[i] && g->in[i]->requires_grad;
    return compute(of, g) && (!graph || !kn_grad_mode() || record(of, bilinear, g));
}

static bool on_tape(kn_op_grad *g, bool bilinear)
{
    kn_op_grad of = *g;
    if (!apply(g->node, bilinear, &of))
        return false;
    memcpy(g->din, of.din, sizeof g->din);
    return true;
}

bool kn_linear_on_tape(kn_op_grad *g)
{
    return on_tape(g, false);
}

bool kn_bilinear_on_tape(kn_op_grad *g)
{
    return on_tape(g, true);
}

/* ---- their gradients ------------------------------------------------------------------------- */

static bool forward(const kn_node *of, kn_tensor *const *in, kn_tensor **y)
{
    return kn_apply(of->op, of->nin, in, UINT32_MAX, of->attr, of->nout, y);
}

static kn_tensor *zeros_of(const kn_spec *s)
{
    return s->dtype == KN_DTYPE_DEFAULT ? NULL : kn_zeros(s->dtype, s->device, s->ndim, s->shape);
}

/* y = op(p), of all inputs at once. */
static bool linear_forward(const kn_node *of, kn_tensor *const *p, kn_tensor *const *in,
                           kn_tensor **y)
{
    kn_tensor *x[KN_MAX_IN];
    for (int i = 0; i < of->nin; i++) {
        x[i] = of->op->const_in >> i & 1 ? in[i] : p[i] ? p[i] : zeros_of(&of->in_spec[i]);
        if (!kn_ok())
            return false;
    }
    return forward(of, x, y);
}

/* y = B(p, b) + B(a, q) + r */
static bool bilinear_forward(const kn_node *of, kn_tensor *const *p, kn_tensor *const *in,
                             kn_tensor **y)
{
    kn_tensor *first = NULL;
    if (p[0] || !p[1]) {
        kn_tensor *a = p[0] ? p[0] : zeros_of(&of->in_spec[0]);
        if (!a || !forward(of, (kn_tensor *[]){ a, in[1], p[2] }, &first))
            return false;
    }
    if (p[1] && !forward(of, (kn_tensor *[]){ in[0], p[1], first ? NULL : p[2] }, y))
        return false;
    *y = !p[1] ? first : first ? kn_add(first, *y) : *y;
    return *y != NULL;
}

/* The gradient of a (i = 0) or b from dy and the other one's p. */
static kn_tensor *bilinear_grad(kn_node *of, int i, kn_tensor *dy, kn_tensor *const *p,
                                kn_tensor *const *in)
{
    kn_op_grad g = { .dout = { dy }, .want = { i == 0, i == 1 } };
    g.in[i] = kn_detach(in[i]); /* for its shape */
    g.in[1 - i] = p[1 - i];
    return g.in[i] && apply(of, true, &g) ? g.din[i] : NULL;
}

static bool adjoint_backward(kn_op_grad *g)
{
    const adjoint *a = g->attr;
    kn_tensor *p[KN_MAX_IN] = { NULL }, *in[KN_MAX_IN], *y[KN_MAX_OUT] = { NULL };
    bool wants_dout = false;
    for (int i = 0; i < KN_MAX_IN; i++) {
        in[i] = a->in[i] >= 0 ? g->in[a->in[i]] : NULL;
        kn_tensor *given = a->din[i] >= 0 ? g->dout[a->din[i]] : NULL;
        if (given && !(p[i] = in[i] && in[i]->ndim == given->ndim ? kn_in_order_of(given, in[i])
                                                                  : kn_contiguous(given)))
            return false;
    }
    for (int k = 0; k < KN_MAX_OUT; k++)
        wants_dout |= a->dout[k] >= 0 && g->want[a->dout[k]];
    if (wants_dout && !(a->bilinear ? bilinear_forward : linear_forward)(a->of, p, in, y))
        return false;
    for (int k = 0; k < KN_MAX_OUT; k++)
        if (a->dout[k] >= 0 && g->want[a->dout[k]])
            g->din[a->dout[k]] = y[k];
    for (int i = 0; i < 2 && a->bilinear; i++)
        if (g->want[a->in[i]] && p[1 - i] &&
            !(g->din[a->in[i]] = bilinear_grad(a->of, i, g->in[a->dout[0]], p, in)))
            return false;
    return kn_ok();
}

bool kn_engine_has_graphs(const kn_engine *e)
{
    for (int64_t i = 0; i < e->nodes; i++) {
        const kn_node *n = e->node[i];
        const char *name = n->op->name;
        if (n->leads && !n->op->on_tape)
            return kn_fail(
                "grad_of: '%s' has a first derivative only; with .create_graph make that "
                "part of other operations, or take its result by kn_detach",
                name);
        for (const kn_frame *f = n->leads ? n->frame : NULL; f; f = f->parent)
            if (f->record)
                return kn_fail("grad_of: .create_graph comes to '%s' in a call of '%s' that "
                               "recomputes, whose values aren't kept; switch that off for it "
                               "(kn_recompute)",
                               name, f->path);
    }
    return true;
}

/* ---- a forward made of operations ------------------------------------------------------------ */

/* A view of input i, at which a pass ends; where forward hadn't saved it, its values don't count:
 * zeros. */
static kn_tensor *stand_in(kn_op_grad *g, int i)
{
    kn_tensor *t = g->in[i];
    if (!t && (t = zeros_of(&g->in_spec[i])))
        kn_require_grad(t, true);
    return t ? kn_on_tape_view(t) : NULL;
}

bool kn_composed_on_tape(kn_op_grad *g)
{
    kn_op_grad c = *g;
    kn_catch caught[KN_MAX_IN] = { { 0 } };
    kn_node *root[KN_MAX_OUT];
    kn_tensor *grad[KN_MAX_OUT], *y[KN_MAX_OUT] = { NULL };
    int index[KN_MAX_OUT], roots = 0;
    for (int i = 0; i < g->nin; i++) {
        if (g->want[i] && !(c.in[i] = stand_in(g, i)))
            return false;
        caught[i].input = g->want[i] ? c.in[i] : NULL;
    }
    kn_engine e = { .retain = true,
                    .graph = kn_grad_mode(),
                    .after = kn_context_get()->node_seq,
                    .caught = caught,
                    .catches = g->nin };
    if (!g->node->op->composed(&c, y))
        return false;
    for (int k = 0; k < g->nout; k++) {
        if (!g->dout[k] || !y[k] || !y[k]->node)
            continue;
        root[roots] = y[k]->node;
        index[roots] = y[k]->out_index;
        grad[roots++] = g->dout[k];
    }
    const bool ok = kn_ok() && (roots == 0 || kn_engine_run(&e, root, index, grad, roots));
    for (int i = 0; i < g->nin; i++)
        if (caught[i].grad)
            g->din[i] = kn_scope_adopt(caught[i].grad);
    return ok;
}
