/* autograd/ops_linear_loss.c: linear and cross-entropy in one, for the head of a language model,
 * whose logits [N, V] would be the largest tensor of a step. A chunk of rows has logits at a time:
 *
 *   z = x W^T + b,   loss += sum_n w_n (lse(z) - z[target]),   z = dz = w_n (softmax(z) - onehot)
 *
 * N rows of one chunk keep dz for backward, which makes the products as kn_linear does, straight
 * into the places of the gradients. More rows make them chunk by chunk in the forward,
 *
 *   dx = dz W,   dW += dz^T x,   db += sum_n dz,
 *
 * where dW and db grow in f32 (f64). All are gradients of the sum of the losses: their size doesn't
 * depend on the count, so f16 holds them. Backward multiplies by dloss / count. */
#include "autograd/losses.h"
#include <math.h>
#include <string.h>

enum {
    CHUNK_ROWS = 1024, /* at least: so dW, which each chunk reads and writes, is seldom moved */
    CHUNKS = 8,        /* at most, about */
    WHOLE = 128,       /* rows of a chunk are a multiple of it, and so is the distance of rows of
                        * logits, in elements: an odd one, such as 50257, is slow on GPUs */
    SLICES = 8,        /* where a product with a number goes through another dtype */
};

typedef struct head_attr {
    bool in_out, sum;
    bool want[3]; /* gradients of x, w, bias */
    int64_t ignore_index;
    double smoothing;
} head_attr;

enum { X, W, BIAS, TARGETS };                          /* inputs */
enum { LOSS, COUNT, DZ, DX = DZ, DW, DBIAS, OUTPUTS }; /* DZ: of one chunk; the others of more */

static int64_t up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

/* Rows of a chunk: of the shape alone, so the number of ranks or threads changes no bit. */
static int64_t chunk_rows(int64_t rows)
{
    const int64_t part = up((rows + CHUNKS - 1) / CHUNKS, WHOLE);
    return part > CHUNK_ROWS ? part : CHUNK_ROWS;
}

/* Elements [begin, begin + n) of dim 0. */
static kn_array rows_from(kn_array a, int64_t begin, int64_t n)
{
    a.data = (char *)a.data + begin * a.stride[0] * (int64_t)kn_dtype_size(a.dtype);
    a.shape[0] = n;
    return a;
}

/* Element i of t as a scalar. */
static kn_array scalar(const kn_tensor *t, int64_t i)
{
    return kn_array_make((char *)kn_array_of(t).data + i * (int64_t)kn_dtype_size(t->dtype),
                         t->dtype, 0, NULL);
}

static bool multiply(kn_tensor *on, kn_array dst, kn_array a, kn_array b, bool add)
{
    return KN_RUN(on, KN_K_MATMUL, ((kn_matmul_args){ .dst = dst, .a = a, .b = b, .add = add }));
}

/* w as [C, V], the right operand of logits. */
static kn_array columns_of(const kn_tensor *w, bool in_out)
{
    return in_out ? kn_array_of(w) : kn_transposed(kn_array_of(w));
}

/* ---- factors --------------------------------------------------------------------------------- */

static bool times(kn_tensor *on, kn_array dst, kn_array a, const kn_tensor *factor)
{
    const kn_array f = kn_array_expand(kn_array_of(factor), dst.ndim, dst.shape);
    return KN_RUN(on, KN_K_BINARY, ((kn_binary_args){ dst, a, f, KN_MUL }));
}

/* dst = src factor; other dtypes than the factor's go through it, some rows at a time. */
static bool scale(kn_tensor *on, kn_array dst, kn_array src, kn_tensor *factor)
{
    const kn_dtype wide = factor->dtype;
    if (dst.dtype == wide && src.dtype == wide)
        return times(on, dst, src, factor);
    const int64_t rows = dst.shape[0], most = up(rows, SLICES) / SLICES;
    int64_t shape[KN_MAX_DIMS];
    memcpy(shape, dst.shape, sizeof shape);
    shape[0] = most;
    kn_tensor *room = kn_empty(wide, kn_device_of(on), dst.ndim, shape);
    bool ok = room != NULL;
    for (int64_t at = 0; ok && at < rows; at += most) {
        const int64_t n = rows - at < most ? rows - at : most;
        const kn_array t = rows_from(kn_array_of(room), 0, n), from = rows_from(src, at, n);
        ok = kn_array_copy(on, t, from) && times(on, t, t, factor) &&
             kn_array_copy(on, rows_from(dst, at, n), t);
    }
    return ok;
}

/* dloss / count; its other factor is 0 where count is 0. */
static kn_tensor *factor_of(const kn_op_grad *g)
{
    const head_attr *a = g->attr;
    return a->sum ? g->dout[LOSS] : kn_div(g->dout[LOSS], kn_clamp(g->out[COUNT], 1, INFINITY));
}

/* ---- forward --------------------------------------------------------------------------------- */

static bool head_shape(kn_op_call *c)
{
    const head_attr *a = c->attr;
    const kn_tensor *x = c->in[X], *w = c->in[W], *t = c->in[TARGETS];
    if (!kn_linear_fits(c->op->name, x, w, c->in[BIAS], a->in_out))
        return false;
    bool match =
        (t->dtype == KN_I64 || t->dtype == KN_I32) && kn_has_shape(t, x->ndim - 1, x->shape);
    if (!match)
        return kn_fail("%s: x %s needs i64 or i32 targets of its shape without the last dim, got "
                       "%s",
                       c->op->name, KN_SHOWN(x), KN_SHOWN(t));
    if (w->shape[a->in_out ? 1 : 0] == 0 && kn_numel(t) > 0)
        return kn_fail("%s: weight %s has no classes", c->op->name, KN_SHOWN(w));
    c->spec[LOSS] = c->spec[COUNT] = (kn_spec){ .dtype = kn_wide_dtype(x->dtype) };
    return true;
}

/* Logits of rows [at, at + n) in z, their losses, and in z's place their gradient where wanted. */
static bool chunk(kn_op_call *c, kn_array z, int64_t at, kn_array loss, kn_array count,
                  kn_tensor *lse, bool grad)
{
    const head_attr *a = c->attr;
    const int64_t n = z.shape[0];
    kn_matmul_args product = { .dst = z,
                               .a = rows_from(kn_rows_of(c->in[X]), at, n),
                               .b = columns_of(c->in[W], a->in_out),
                               .bias = kn_array_or_none(c->in[BIAS]) };
    kn_cross_entropy_args losses = { .loss = loss,
                                     .count = count,
                                     .lse = rows_from(kn_flat(lse), 0, n),
                                     .logits = z,
                                     .targets = rows_from(kn_flat(c->in[TARGETS]), at, n),
                                     .ignore_index = a->ignore_index,
                                     .smoothing = a->smoothing,
                                     .part = true,
                                     .first_row = at };
    if (grad)
        losses.dlogits = z;
    return KN_RUN(c->out[LOSS], KN_K_MATMUL, product) &&
           KN_RUN(c->out[LOSS], KN_K_CROSS_ENTROPY, losses);
}

/* loss = loss / count where that is the reduction; 0 / 0 is 0. */
static bool reduce(kn_op_call *c)
{
    const head_attr *a = c->attr;
    kn_tensor *loss = c->out[LOSS];
    if (a->sum)
        return true;
    kn_tensor *divisor = kn_empty_like(loss);
    return divisor &&
           KN_RUN(loss, KN_K_UNARY,
                  ((kn_unary_args){ kn_array_of(divisor), kn_array_of(c->out[COUNT]), KN_CLAMP, 1,
                                    INFINITY })) &&
           KN_RUN(loss, KN_K_BINARY,
                  ((kn_binary_args){ kn_array_of(loss), kn_array_of(loss), kn_array_of(divisor),
                                     KN_DIV }));
}

/* A tensor of rows of logits, whose distance is padded, and n of its rows without the padding. */
static int64_t padded(const kn_op_call *c)
{
    const head_attr *a = c->attr;
    return up(c->in[W]->shape[a->in_out ? 1 : 0], WHOLE);
}

static kn_array logits_of(const kn_tensor *z, int64_t n, int64_t classes)
{
    kn_array a = rows_from(kn_array_of(z), 0, n);
    a.shape[1] = classes;
    return a;
}

static bool wanted(const head_attr *a)
{
    return a->want[X] || a->want[W] || a->want[BIAS];
}

/* ---- one chunk: backward has dz -------------------------------------------------------------- */

static bool one_shape(kn_op_call *c)
{
    if (!head_shape(c))
        return false;
    c->spec[DZ] = (kn_spec){ .dtype = c->in[X]->dtype,
                             .ndim = 2,
                             .shape = { kn_numel(c->in[TARGETS]), padded(c) } };
    return true;
}

static bool one_forward(kn_op_call *c)
{
    const head_attr *a = c->attr;
    const int64_t rows = kn_numel(c->in[TARGETS]), V = c->in[W]->shape[a->in_out ? 1 : 0];
    kn_tensor *lse = kn_empty(c->out[LOSS]->dtype, kn_device_of(c->in[X]), 1, &rows);
    kn_array rest = kn_part(c->out[DZ], 1, V, padded(c) - V); /* a result has no undefined values */
    return lse && kn_array_fill(c->out[DZ], rest, 0, 0) &&
           chunk(c, logits_of(c->out[DZ], rows, V), 0, kn_array_of(c->out[LOSS]),
                 kn_array_of(c->out[COUNT]), lse, wanted(a)) &&
           reduce(c);
}

/* dx = factor (dz W),  dW = dz^T (factor x),  db = factor (sum of dz). */
static bool one_backward(kn_op_grad *g)
{
    const head_attr *a = g->attr;
    kn_tensor *x = g->in[X], *w = g->in[W], *factor = factor_of(g);
    if (!factor)
        return false;
    const int64_t V = w->shape[a->in_out ? 1 : 0], rows = g->out_spec[DZ].shape[0];
    const kn_array dz = logits_of(g->out[DZ], rows, V);
    if (g->want[X]) {
        kn_tensor *dx = kn_grad_out(g, X);
        if (!dx ||
            !multiply(dx, kn_rows_of(dx), dz, kn_transposed(columns_of(w, a->in_out)), false) ||
            !scale(dx, kn_rows_of(dx), kn_rows_of(dx), factor))
            return false;
    }
    if (g->want[W]) {
        kn_tensor *dw = kn_grad_out(g, W), *part = kn_empty_like(x);
        if (!dw || !part || !scale(part, kn_rows_of(part), kn_rows_of(x), factor))
            return false;
        const kn_array by_class = a->in_out ? kn_transposed(kn_array_of(dw)) : kn_array_of(dw);
        if (!multiply(dw, by_class, kn_transposed(dz), kn_rows_of(part), false))
            return false;
    }
    if (g->want[BIAS]) {
        kn_tensor *db = kn_grad_out(g, BIAS);
        kn_tensor *sum = kn_empty(factor->dtype, kn_device_of(factor), KN_SHAPE(1, V));
        if (!db || !sum ||
            !KN_RUN(db, KN_K_REDUCE, ((kn_reduce_args){ kn_array_of(sum), dz, KN_SUM })) ||
            !scale(db, kn_flat(db), kn_flat(sum), factor))
            return false;
    }
    return true;
}

KN_OP(kn_op_linear_cross_entropy, .name = "linear_cross_entropy", .makes = true,
      .attr_size = sizeof(head_attr), .save_in = 1 << X | 1 << W, .save_out = 1 << COUNT | 1 << DZ,
      .const_in = 1 << TARGETS, .shape = one_shape, .forward = one_forward,
      .backward = one_backward);

/* ---- more chunks: backward has the gradients ------------------------------------------------- */

static bool more_shape(kn_op_call *c)
{
    const head_attr *a = c->attr;
    if (!head_shape(c))
        return false;
    const kn_tensor *x = c->in[X], *w = c->in[W];
    const kn_spec none = { .dtype = x->dtype, .ndim = 1, .shape = { 0 } };
    c->spec[DX] = a->want[X] ? kn_spec_like(x) : none;
    c->spec[DW] = a->want[W] ? kn_spec_like(w) : none;
    c->spec[DBIAS] = a->want[BIAS] ? kn_spec_like(c->in[BIAS]) : none;
    c->spec[DW].dtype = c->spec[DBIAS].dtype = kn_wide_dtype(x->dtype);
    return true;
}

/* The gradients of one chunk, the first of which begins the sums. */
static bool chunk_grads(kn_op_call *c, kn_array dz, int64_t at, kn_tensor *sum)
{
    const head_attr *a = c->attr;
    const int64_t n = dz.shape[0];
    kn_tensor *dx = c->out[DX], *dw = c->out[DW], *db = c->out[DBIAS];
    if (a->want[X] && !multiply(dx, rows_from(kn_rows_of(dx), at, n), dz,
                                kn_transposed(columns_of(c->in[W], a->in_out)), false))
        return false;
    const kn_array x = rows_from(kn_rows_of(c->in[X]), at, n);
    if (a->want[W] && !(a->in_out ? multiply(dw, kn_array_of(dw), kn_transposed(x), dz, at > 0)
                                  : multiply(dw, kn_array_of(dw), kn_transposed(dz), x, at > 0)))
        return false;
    if (!a->want[BIAS])
        return true;
    const kn_array to = kn_flat(db);
    kn_array part = kn_array_make(at > 0 ? kn_array_of(sum).data : to.data, to.dtype, 2,
                                  (int64_t[]){ 1, to.shape[0] });
    return KN_RUN(db, KN_K_REDUCE, ((kn_reduce_args){ part, dz, KN_SUM })) &&
           (at == 0 || KN_RUN(db, KN_K_BINARY, ((kn_binary_args){ to, to, kn_flat(sum), KN_ADD })));
}

static bool add_up(kn_tensor *dst, const kn_tensor *parts)
{
    const kn_array to = kn_flat(dst);
    return KN_RUN(dst, KN_K_REDUCE, ((kn_reduce_args){ to, kn_flat(parts), KN_SUM }));
}

static bool more_forward(kn_op_call *c)
{
    const head_attr *a = c->attr;
    const kn_device on = kn_device_of(c->in[X]);
    const kn_dtype wide = c->out[LOSS]->dtype;
    const int64_t rows = kn_numel(c->in[TARGETS]), most = chunk_rows(rows);
    const int64_t V = c->in[W]->shape[a->in_out ? 1 : 0], chunks = (rows + most - 1) / most;
    kn_tensor *z = kn_empty(c->in[X]->dtype, on, KN_SHAPE(most, padded(c)));
    kn_tensor *lse = kn_empty(wide, on, 1, &most), *sum = kn_empty_like(c->out[DBIAS]);
    kn_tensor *loss = kn_empty(wide, on, 1, &chunks), *count = kn_empty(wide, on, 1, &chunks);
    bool ok = z && lse && sum && loss && count;
    for (int64_t i = 0; ok && i < chunks; i++) {
        const int64_t at = i * most, n = rows - at < most ? rows - at : most;
        const kn_array part = logits_of(z, n, V);
        ok = chunk(c, part, at, scalar(loss, i), scalar(count, i), lse, wanted(a)) &&
             (!wanted(a) || chunk_grads(c, part, at, sum));
    }
    return ok && add_up(c->out[LOSS], loss) && add_up(c->out[COUNT], count) && reduce(c);
}

static bool more_backward(kn_op_grad *g)
{
    kn_tensor *factor = factor_of(g);
    if (!factor)
        return false;
    for (int i = X; i <= BIAS; i++) {
        if (!g->want[i])
            continue;
        kn_tensor *d = kn_grad_out(g, i), *saved = g->out[DX + i];
        if (!d || !scale(d, i == X ? kn_rows_of(d) : kn_array_of(d),
                         i == X ? kn_rows_of(saved) : kn_array_of(saved), factor))
            return false;
    }
    return true;
}

KN_OP(kn_op_linear_cross_entropy_chunks, .name = "linear_cross_entropy_chunks", .makes = true,
      .attr_size = sizeof(head_attr), .save_out = 1 << COUNT | 1 << DX | 1 << DW | 1 << DBIAS,
      .const_in = 1 << TARGETS, .shape = more_shape, .forward = more_forward,
      .backward = more_backward);

/* ---- the function ---------------------------------------------------------------------------- */

/* What no chunk computes: of all logits. */
static kn_tensor *with_logits(const char *op, kn_tensor *x, kn_tensor *w, kn_tensor *targets,
                              const kn_linear_cross_entropy_options *o)
{
    if (!kn_linear_fits(op, x, w, o->bias, o->in_out))
        return NULL;
    kn_scope s = kn_scope_begin();
    kn_tensor *logits = kn_linear_(x, w, o->bias, o->in_out);
    return kn_scope_result(s, kn_cross_entropy(logits, targets, .ignore_index = o->ignore_index,
                                               .smoothing = o->smoothing, .weight = o->weight,
                                               .reduction = o->reduction));
}

kn_tensor *kn_linear_cross_entropy_(kn_tensor *x, kn_tensor *w, kn_tensor *targets,
                                    kn_linear_cross_entropy_options o)
{
    const char *op = "linear_cross_entropy";
    if (!kn_ok() || !kn_check(x, op) || !kn_check(w, op) || !kn_check(targets, op) ||
        !kn_loss_reduction_is_one(op, o.reduction))
        return NULL;
    if (o.weight || o.reduction == KN_REDUCTION_NONE || kn_dtype_is_float(targets->dtype))
        return with_logits(op, x, w, targets, &o);
    if (!(o.smoothing >= 0 && o.smoothing < 1))
        return kn_fail_null("%s: smoothing is %g, should lie in [0, 1)", op, o.smoothing);
    const bool grad = kn_grad_mode();
    const head_attr a = { .in_out = o.in_out,
                          .sum = o.reduction == KN_REDUCTION_SUM,
                          .want = { grad && x->requires_grad, grad && w->requires_grad,
                                    grad && o.bias && o.bias->requires_grad },
                          .ignore_index = kn_loss_ignored(o.ignore_index),
                          .smoothing = o.smoothing };
    const bool one = kn_numel(targets) <= chunk_rows(kn_numel(targets));
    kn_scope s = kn_scope_begin(); /* outputs but the loss live as long as backward needs them */
    kn_tensor *in[4] = { kn_contiguous(x), w, o.bias, kn_contiguous(targets) };
    kn_tensor *out[OUTPUTS] = { 0 };
    if (in[X] && in[TARGETS])
        kn_apply(one ? &kn_op_linear_cross_entropy : &kn_op_linear_cross_entropy_chunks, 4, in,
                 1 << BIAS, &a, one ? DZ + 1 : OUTPUTS, out);
    kn_scope_end_except(s, out, 1);
    return kn_ok() ? out[LOSS] : NULL;
}
