/* autograd/ops_elementwise.c: operations on each element: unary, binary, where. The kinds of the
 * first two are the rows of kernels/kinds.h: one operation and, where the row says PLAIN, one
 * function kn_<name>() is made of each. */
#include "autograd/ops.h"
#include <string.h>

/* ---- unary: y = f(x), dx = dy f'(x) ---------------------------------------------------------- */

typedef struct unary_attr {
    kn_unary kind;
    double p0, p1;
} unary_attr;

static bool unary_shape(kn_op_call *c)
{
    const unary_attr *a = c->attr;
    if (!kn_dtype_is_float(c->in[0]->dtype) && kn_unary_row(a->kind)->dtypes != KN_NUMBERS)
        return kn_fail("%s: needs a float tensor, got %s; kn_cast it first", c->op->name,
                       kn_dtype_name(c->in[0]->dtype));
    c->spec[0] = kn_spec_like(c->in[0]);
    c->spec[0].order = kn_order_of(c->in[0]);
    return true;
}

static bool unary_forward(kn_op_call *c)
{
    const unary_attr *a = c->attr;
    return KN_RUN(
        c->out[0], KN_K_UNARY,
        ((kn_unary_args){ kn_array_of(c->out[0]), kn_array_of(c->in[0]), a->kind, a->p0, a->p1 }));
}

static bool unary_backward(kn_op_grad *g)
{
    const unary_attr *a = g->attr;
    kn_unary_grad_args args = { .kind = a->kind, .p0 = a->p0, .p1 = a->p1 };
    kn_tensor *dx = kn_empty_as(g->dout[0]);
    if (!dx)
        return false;
    args.dx = kn_array_of(dx);
    args.dy = kn_array_of(g->dout[0]);
    if (g->in[0])
        args.x = kn_array_of(g->in[0]);
    if (g->out[0])
        args.y = kn_array_of(g->out[0]);
    g->din[0] = dx;
    return KN_RUN(dx, KN_K_UNARY_GRAD, args);
}

/* The operation of a kind: what its derivative reads is saved. */
#define UNARY_OP(id, text, function, reads, ...)                                                   \
    [KN_##id] = { .name = #text,                                                                   \
                  .attr_size = sizeof(unary_attr),                                                 \
                  .save_in = KN_READS_##reads & KN_READS_X ? 1 : 0,                                \
                  .save_out = KN_READS_##reads & KN_READS_Y ? 1 : 0,                               \
                  .shape = unary_shape,                                                            \
                  .forward = unary_forward,                                                        \
                  .backward = KN_READS_##reads == KN_READS_NO_GRAD ? NULL : unary_backward },
KN_OPS(unary_ops, KN_UNARY_KINDS(UNARY_OP));

static kn_tensor *unary(kn_tensor *x, kn_unary kind, double p0, double p1)
{
    unary_attr a = { kind, p0, p1 };
    return kn_apply1(&unary_ops[kind], 1, &x, 0, &a);
}

#define UNARY_FUNCTION(id, name, function, ...) UNARY_##function(id, name)
#define UNARY_PLAIN(id, name)                                                                      \
    kn_tensor *kn_##name(kn_tensor *x)                                                             \
    {                                                                                              \
        return unary(x, KN_##id, 0, 0);                                                            \
    }
#define UNARY_PARAMS(id, name) /* below */
#define UNARY_NONE(id, name)
KN_UNARY_KINDS(UNARY_FUNCTION)

kn_tensor *kn_scale(kn_tensor *x, double f)
{
    return unary(x, KN_AFFINE, f, 0);
}
kn_tensor *kn_add_scalar(kn_tensor *x, double o)
{
    return unary(x, KN_AFFINE, 1, o);
}
kn_tensor *kn_pow(kn_tensor *x, double e)
{
    return unary(x, KN_POW, e, 0);
}
kn_tensor *kn_clamp(kn_tensor *x, double lo, double hi)
{
    return unary(x, KN_CLAMP, lo, hi);
}

/* ---- binary: y = a op b, broadcast ----------------------------------------------------------- */

typedef struct binary_attr {
    kn_binary kind;
} binary_attr;

/* The order of the operand that is as large as the result. */
static const int *order_of_both(const kn_spec *s, const kn_tensor *a, const kn_tensor *b)
{
    const bool first =
        a->ndim == s->ndim && memcmp(a->shape, s->shape, (size_t)s->ndim * sizeof *s->shape) == 0;
    return b->ndim == s->ndim || first ? kn_order_of(first ? a : b) : NULL;
}

static bool binary_shape(kn_op_call *c)
{
    const binary_attr *k = c->attr;
    const kn_tensor *a = c->in[0], *b = c->in[1];
    char da[128], db[128];
    if (a->dtype != b->dtype)
        return kn_fail("%s: dtypes differ: a is %s, b is %s; kn_cast one of them", c->op->name,
                       kn_describe(a, da, sizeof da), kn_describe(b, db, sizeof db));
    kn_spec *s = &c->spec[0];
    *s = kn_spec_like(a);
    s->dtype = k->kind >= KN_EQ ? KN_BOOL : a->dtype;
    if (!kn_broadcast_shape(a->ndim, a->shape, b->ndim, b->shape, &s->ndim, s->shape))
        return kn_fail(
            "%s: shapes don't broadcast: a is %s, b is %s (aligned at the last dim, sizes must "
            "be equal or 1)",
            c->op->name, kn_describe(a, da, sizeof da), kn_describe(b, db, sizeof db));
    s->order = order_of_both(s, a, b);
    return true;
}

static bool binary_launch(kn_tensor *out, kn_tensor *a, kn_tensor *b, kn_binary kind)
{
    kn_array o = kn_array_of(out);
    return KN_RUN(out, KN_K_BINARY,
                  ((kn_binary_args){ o, kn_array_expand(kn_array_of(a), o.ndim, o.shape),
                                     kn_array_expand(kn_array_of(b), o.ndim, o.shape), kind }));
}

static bool binary_forward(kn_op_call *c)
{
    const binary_attr *k = c->attr;
    return binary_launch(c->out[0], c->in[0], c->in[1], k->kind);
}

static kn_tensor *raw_binary(kn_tensor *a, kn_tensor *b, kn_binary kind)
{
    kn_tensor *o = a ? kn_empty_as(a) : NULL;
    return o && b && binary_launch(o, a, b, kind) ? o : NULL;
}

static kn_tensor *raw_affine(kn_tensor *x, double p0, double p1)
{
    kn_tensor *o = x ? kn_empty_as(x) : NULL;
    if (!o || !KN_RUN(o, KN_K_UNARY,
                      ((kn_unary_args){ kn_array_of(o), kn_array_of(x), KN_AFFINE, p0, p1 })))
        return NULL;
    return o;
}

static bool add_backward(kn_op_grad *g)
{
    const binary_attr *k = g->attr;
    if (g->want[0])
        g->din[0] = kn_grad_unbroadcast(g, 0, g->dout[0]);
    if (g->want[1] && k->kind == KN_SUB)
        g->din[1] = kn_grad_unbroadcast(g, 1, raw_affine(g->dout[0], -1, 0));
    else if (g->want[1])
        g->din[1] = kn_grad_unbroadcast(g, 1, g->dout[0]);
    return kn_ok();
}

static bool mul_backward(kn_op_grad *g)
{
    kn_tensor *dy = g->dout[0];
    for (int i = 0; i < 2; i++)
        if (g->want[i])
            g->din[i] = kn_grad_unbroadcast(g, i, raw_binary(dy, g->in[1 - i], KN_MUL));
    return kn_ok();
}

/* d(a/b) = da / b - (a/b) db / b */
static bool div_backward(kn_op_grad *g)
{
    kn_tensor *q = raw_binary(g->dout[0], g->in[1], KN_DIV);
    if (g->want[0])
        g->din[0] = kn_grad_unbroadcast(g, 0, q);
    if (g->want[1])
        g->din[1] = kn_grad_unbroadcast(g, 1, raw_affine(raw_binary(q, g->out[0], KN_MUL), -1, 0));
    return kn_ok();
}

/* The larger (smaller) input gets the gradient; equal ones half each. */
static bool extremum_backward(kn_op_grad *g)
{
    const binary_attr *k = g->attr;
    kn_tensor *dy = g->dout[0];
    for (int i = 0; i < 2; i++) {
        if (!g->want[i])
            continue;
        kn_tensor *won = kn_empty(KN_BOOL, kn_device_of(dy), dy->ndim, dy->shape);
        kn_tensor *tie = kn_empty(KN_BOOL, kn_device_of(dy), dy->ndim, dy->shape);
        kn_tensor *half = raw_affine(dy, 0.5, 0), *zero = raw_affine(dy, 0, 0);
        kn_tensor *part = kn_empty_as(dy);
        if (!won || !tie || !half || !zero || !part)
            return false;
        if (!binary_launch(won, g->in[i], g->in[1 - i], k->kind == KN_MAXIMUM ? KN_GT : KN_LT) ||
            !binary_launch(tie, g->in[0], g->in[1], KN_EQ))
            return false;
        kn_where_args inner = { kn_array_of(part), kn_array_of(tie), kn_array_of(half),
                                kn_array_of(zero) };
        kn_where_args outer = { kn_array_of(part), kn_array_of(won), kn_array_of(dy),
                                kn_array_of(part) };
        if (!KN_RUN(part, KN_K_WHERE, inner) || !KN_RUN(part, KN_K_WHERE, outer))
            return false;
        g->din[i] = kn_grad_unbroadcast(g, i, part);
    }
    return kn_ok();
}

static bool binary_grad(kn_op_grad *g)
{
    const binary_attr *k = g->attr;
    switch (k->kind) {
    case KN_ADD:
    case KN_SUB:
        return add_backward(g);
    case KN_MUL:
        return mul_backward(g);
    case KN_DIV:
        return div_backward(g);
    case KN_MAXIMUM:
    case KN_MINIMUM:
        return extremum_backward(g);
    case KN_POWER:
    case KN_EQ:
    case KN_NE:
    case KN_LT:
    case KN_LE:
    case KN_GT:
    case KN_GE:
    case KN_AND:
    case KN_OR:
    case KN_BINARY_COUNT:
        break;
    }
    return kn_fail("%s: has no derivative", kn_binary_row(k->kind)->name);
}

#define BINARY_OP(id, text, function, reads, ...)                                                  \
    [KN_##id] = { .name = #text,                                                                   \
                  .attr_size = sizeof(binary_attr),                                                \
                  .save_in = KN_READS_##reads & KN_READS_AB,                                       \
                  .save_out = KN_READS_##reads & KN_READS_OUT ? 1 : 0,                             \
                  .shape = binary_shape,                                                           \
                  .forward = binary_forward,                                                       \
                  .backward = KN_READS_##reads == KN_READS_NO_GRAD ? NULL : binary_grad },
KN_OPS(binary_ops, KN_BINARY_KINDS(BINARY_OP));

#define BINARY_FUNCTION(id, name, function, ...) BINARY_##function(id, name)
#define BINARY_PLAIN(id, name)                                                                     \
    kn_tensor *kn_##name(kn_tensor *a, kn_tensor *b)                                               \
    {                                                                                              \
        binary_attr k = { KN_##id };                                                               \
        return kn_apply1(&binary_ops[KN_##id], 2, (kn_tensor *[]){ a, b }, 0, &k);                 \
    }
#define BINARY_NONE(id, name)
KN_BINARY_KINDS(BINARY_FUNCTION)

/* ---- where: y = cond ? a : b ----------------------------------------------------------------- */

static bool where_shape(kn_op_call *c)
{
    char d[3][128];
    const kn_tensor *k = c->in[0], *a = c->in[1], *b = c->in[2];
    kn_spec *s = &c->spec[0];
    *s = kn_spec_like(a);
    if (k->dtype == KN_BOOL && a->dtype == b->dtype &&
        kn_broadcast_shape(a->ndim, a->shape, b->ndim, b->shape, &s->ndim, s->shape) &&
        kn_broadcast_shape(s->ndim, s->shape, k->ndim, k->shape, &s->ndim, s->shape)) {
        s->order = order_of_both(s, a, b);
        return true;
    }
    return kn_fail(
        "where: needs a bool condition, two tensors of one dtype, and shapes that broadcast; got "
        "%s, %s, %s",
        kn_describe(k, d[0], 128), kn_describe(a, d[1], 128), kn_describe(b, d[2], 128));
}

static bool where_launch(kn_tensor *o, kn_tensor *k, kn_tensor *a, kn_tensor *b)
{
    kn_array y = kn_array_of(o);
    return KN_RUN(o, KN_K_WHERE,
                  ((kn_where_args){ y, kn_array_expand(kn_array_of(k), y.ndim, y.shape),
                                    kn_array_expand(kn_array_of(a), y.ndim, y.shape),
                                    kn_array_expand(kn_array_of(b), y.ndim, y.shape) }));
}

static bool where_forward(kn_op_call *c)
{
    return where_launch(c->out[0], c->in[0], c->in[1], c->in[2]);
}

static bool where_backward(kn_op_grad *g)
{
    kn_tensor *dy = g->dout[0], *zero = kn_zeros(dy->dtype, kn_device_of(dy), KN_SCALAR);
    for (int i = 1; i < 3 && zero; i++) {
        if (!g->want[i])
            continue;
        kn_tensor *part = kn_empty_as(dy);
        if (!part || !where_launch(part, g->in[0], i == 1 ? dy : zero, i == 1 ? zero : dy))
            return false;
        g->din[i] = kn_grad_unbroadcast(g, i, part);
    }
    return kn_ok();
}

KN_OP(kn_op_where, .name = "where", .save_in = 1, .const_in = 1, .shape = where_shape,
      .forward = where_forward, .backward = where_backward);

kn_tensor *kn_where(kn_tensor *cond, kn_tensor *a, kn_tensor *b)
{
    return kn_apply1(&kn_op_where, 3, (kn_tensor *[]){ cond, a, b }, 0, NULL);
}
