/* autograd/ops_sync_batch_norm.c: batch norm over the batches of several ranks as over one batch.
 *
 * A rank's samples give a mean and a sum of squares each, which are joined in pairs, and so are the
 * ranks' own (KN_K_BATCH_NORM_JOIN); so are the sums of backward. Ranks with equal batches of 2^k
 * samples get the bits of one rank with all of them. One gather of 2 C + 1 numbers in forward, one
 * of 2 C in backward, on the compute stream. */
#include "autograd/engine.h"
#include "autograd/ops.h"
#include "comm/comm.h"

typedef struct sync_attr {
    double eps, momentum;
    bool relu;
    kn_comm *comm;
} sync_attr;

/* Outputs y, mean, rstd and the number of values of a channel over all ranks. */
static bool sync_shape(kn_op_call *c)
{
    if (!kn_batch_norm_shape(c, true))
        return false;
    c->spec[3] = (kn_spec){ .dtype = KN_F64, .ndim = 1, .shape = { 1 } };
    return true;
}

/* ---- samples --------------------------------------------------------------------------------- */

/* x, which is row-major, as one sample that has a channel for each channel of each of its. */
static kn_array samples_of(const kn_tensor *x)
{
    const int64_t rows = x->shape[0] * x->shape[1];
    return kn_array_make(kn_array_of(x).data, x->dtype, 3,
                         (int64_t[]){ 1, rows, rows ? kn_numel(x) / rows : 0 });
}

/* A tensor of the current scope. */
static kn_tensor *room(kn_dtype dtype, const kn_tensor *like, int64_t rows, int64_t columns)
{
    return kn_empty(dtype, kn_device_of(like), KN_SHAPE(rows, columns));
}

/* Elements from column on of row i of t[rows, columns]: shape [n]. */
static kn_array part_of_row(const kn_tensor *t, int64_t i, int64_t column, int64_t n)
{
    return kn_array_make(kn_storage_at(t->storage, i * t->shape[1] + column, t->dtype), t->dtype, 1,
                         &n);
}

/* Row i of t[rows, N C] as [N,C]. */
static kn_array row_as_samples(const kn_tensor *t, int64_t i, const kn_tensor *x)
{
    return kn_array_make(kn_storage_at(t->storage, i * t->shape[1], t->dtype), t->dtype, 2,
                         x->shape);
}

/* Columns [column, column + n) of t[rows, columns], as [rows, n]. */
static kn_array columns_of(const kn_tensor *t, int64_t column, int64_t n)
{
    kn_array a = kn_array_make(kn_storage_at(t->storage, column, t->dtype), t->dtype, 2,
                               (int64_t[]){ t->shape[0], n });
    a.stride[0] = t->shape[1];
    return a;
}

/* ---- forward --------------------------------------------------------------------------------- */

/* Mean, sum of squares around it and number of values of this rank's samples, to row r of all. */
static bool own_moments(const kn_tensor *x, double eps, const kn_tensor *all, int r)
{
    const int64_t C = x->shape[1], rows = x->shape[0] * C, each = rows ? kn_numel(x) / rows : 0;
    kn_tensor *of = room(kn_wide_dtype(x->dtype), x, 3, each ? rows : 0); /* mean, rstd, variance */
    if (!of)
        return false;
    if (each) {
        kn_batch_norm_args moments = { .x = samples_of(x),
                                       .mean = part_of_row(of, 0, 0, rows),
                                       .rstd = part_of_row(of, 1, 0, rows),
                                       .running_var = part_of_row(of, 2, 0, rows),
                                       .eps = eps,
                                       .momentum = 1,
                                       .training = true };
        if (!kn_array_fill(x, moments.running_var, 0, 0) || !KN_RUN(x, KN_K_BATCH_NORM, moments))
            return false;
    }
    kn_batch_norm_join_args join = { .a = part_of_row(all, r, 0, C),
                                     .b = part_of_row(all, r, C, C),
                                     .count = part_of_row(all, r, 2 * C, 1),
                                     .from_a = row_as_samples(of, 0, x),
                                     .from_b = row_as_samples(of, 2, x),
                                     .each = (double)each,
                                     .scale = (double)each - 1,
                                     .moments = true };
    if (!each)
        join.from_a.shape[0] = join.from_b.shape[0] = 0;
    return KN_RUN(x, KN_K_BATCH_NORM_JOIN, join);
}

/* On the CPU the number is there; elsewhere nobody waits for it. */
static bool enough(const kn_tensor *count, const kn_comm *comm)
{
    if (kn_device_of(count) != KN_CPU)
        return true;
    const double n = *(const double *)kn_array_of(count).data;
    return n > 1 || kn_fail("batch_norm: %g values a channel over all %d ranks have no variance to "
                            "train with; give more samples, or switch to evaluation with "
                            "kn_train(m, false)",
                            n, kn_comm_size(comm));
}

static const char *label(const kn_frame *f)
{
    return f && f->path[0] ? f->path : "batch_norm";
}

/* The rows of all[ranks, n] (f64), of which this rank has its own; alone it has them all. */
static bool gather_rows(kn_comm *comm, const kn_tensor *all, int64_t n, const kn_frame *frame)
{
    return kn_comm_size(comm) == 1 ||
           (kn_collective_begins() &&
            kn_all_gather(comm, kn_array_of(all).data, part_of_row(all, kn_rank(comm), 0, 1).data,
                          n, KN_F64, kn_compute_stream(kn_device_of(all)), label(frame)));
}

/* Mean and variance over all ranks, to the rows of total. */
static bool whole_moments(kn_op_call *c, const kn_tensor *x, const kn_tensor *total)
{
    const sync_attr *a = c->attr;
    const int64_t C = x->shape[1];
    const int rank = kn_rank(a->comm);
    kn_tensor *all = room(KN_F64, x, kn_comm_size(a->comm), 2 * C + 1);
    if (!all || !own_moments(x, a->eps, all, rank) ||
        !gather_rows(a->comm, all, 2 * C + 1, kn_context_get()->frame))
        return false;
    kn_batch_norm_join_args join = { .a = part_of_row(total, 0, 0, C),
                                     .b = part_of_row(total, 1, 0, C),
                                     .count = kn_array_of(c->out[3]),
                                     .from_a = columns_of(all, 0, C),
                                     .from_b = columns_of(all, C, C),
                                     .from_count =
                                         part_of_row(all, 0, 2 * C, kn_comm_size(a->comm)),
                                     .momentum = a->momentum,
                                     .scale = 1,
                                     .moments = true,
                                     .finish = true };
    join.from_count.stride[0] = 2 * C + 1;
    kn_array *const running[] = { &join.running_mean, &join.running_var };
    for (int i = 3; i < 5; i++) {
        if (!c->in[i])
            continue;
        *running[i - 3] = kn_array_of(c->in[i]);
        kn_written(c->in[i]);
    }
    return KN_RUN(x, KN_K_BATCH_NORM_JOIN, join) && enough(c->out[3], a->comm);
}

static bool sync_forward(kn_op_call *c)
{
    const sync_attr *a = c->attr;
    const kn_tensor *x = kn_contiguous(c->in[0]);
    kn_tensor *total = x ? room(kn_wide_dtype(x->dtype), x, 2, x->shape[1]) : NULL;
    if (!total || !whole_moments(c, x, total))
        return false;
    kn_batch_norm_args args = { .y = kn_array_of(c->out[0]),
                                .x = kn_array_of(c->in[0]),
                                .mean = kn_array_of(c->out[1]),
                                .rstd = kn_array_of(c->out[2]),
                                .running_mean = part_of_row(total, 0, 0, x->shape[1]),
                                .running_var = part_of_row(total, 1, 0, x->shape[1]),
                                .w = kn_array_or_none(c->in[1]),
                                .b = kn_array_or_none(c->in[2]),
                                .add = kn_array_or_none(c->in[5]),
                                .eps = a->eps,
                                .relu = a->relu };
    return KN_RUN(x, KN_K_BATCH_NORM, args);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* sum dy h and sum dy of this rank's samples, to row r of all. */
static bool own_sums(const kn_op_grad *g, const kn_tensor *x, const kn_tensor *dy,
                     const kn_tensor *all, int r)
{
    const int64_t C = x->shape[1], rows = x->shape[0] * C;
    const bool any = kn_numel(x) > 0;
    kn_tensor *of = room(kn_wide_dtype(x->dtype), x, 4, any ? rows : 0); /* mean, rstd, dw, db */
    if (!of)
        return false;
    if (any) {
        for (int i = 0; i < 2; i++) {
            const kn_array from = kn_array_expand(kn_array_of(g->out[1 + i]), 2, x->shape);
            if (!kn_array_copy(x, row_as_samples(of, i, x), from))
                return false;
        }
        kn_batch_norm_grad_args sums = { .dw = part_of_row(of, 2, 0, rows),
                                         .db = part_of_row(of, 3, 0, rows),
                                         .dy = samples_of(dy),
                                         .x = samples_of(x),
                                         .mean = part_of_row(of, 0, 0, rows),
                                         .rstd = part_of_row(of, 1, 0, rows) };
        if (!KN_RUN(x, KN_K_BATCH_NORM_GRAD, sums))
            return false;
    }
    kn_batch_norm_join_args join = { .a = part_of_row(all, r, 0, C),
                                     .b = part_of_row(all, r, C, C),
                                     .from_a = row_as_samples(of, 2, x),
                                     .from_b = row_as_samples(of, 3, x) };
    if (!any)
        join.from_a.shape[0] = join.from_b.shape[0] = 0;
    return KN_RUN(x, KN_K_BATCH_NORM_JOIN, join);
}

/* The gradients of weight and bias are this rank's own: its caller adds those of all ranks, as it
 * does for other parameters. */
static bool give_own(kn_op_grad *g, const kn_tensor *all, int r, int64_t C)
{
    for (int i = 1; i < 3; i++) {
        if (!g->want[i])
            continue;
        const kn_tensor *d = kn_grad_out(g, i);
        if (!d || !kn_array_copy(d, kn_array_of(d), part_of_row(all, r, (i - 1) * C, C)))
            return false;
    }
    return true;
}

/* dx = w rstd (dy - (db + h dw) / M) with the sums and the M of all ranks. */
static bool give_dx(kn_op_grad *g, kn_tensor *dy, const kn_tensor *all)
{
    const sync_attr *a = g->attr;
    kn_tensor *x = g->in[0];
    const int64_t C = x->shape[1];
    kn_tensor *mean = room(kn_wide_dtype(x->dtype), x, 2, C);
    if (!mean || !gather_rows(a->comm, all, 2 * C, g->node->frame))
        return false;
    kn_batch_norm_join_args join = { .a = part_of_row(mean, 0, 0, C),
                                     .b = part_of_row(mean, 1, 0, C),
                                     .from_a = columns_of(all, 0, C),
                                     .from_b = columns_of(all, C, C),
                                     .from_count = kn_array_of(g->out[3]),
                                     .finish = true };
    dy = kn_order_of(x) ? kn_channels_last(dy) : kn_contiguous(dy); /* fast in x's order */
    if (!dy || !KN_RUN(x, KN_K_BATCH_NORM_JOIN, join))
        return false;
    kn_batch_norm_grad_args args = { .dx = kn_array_of(g->din[0]),
                                     .dy = kn_array_of(dy),
                                     .x = kn_array_of(x),
                                     .mean = kn_array_of(g->out[1]),
                                     .rstd = kn_array_of(g->out[2]),
                                     .mean_dw = join.a,
                                     .mean_db = join.b,
                                     .w = kn_array_or_none(g->in[1]),
                                     .training = true };
    return KN_RUN(dy, KN_K_BATCH_NORM_GRAD, args);
}

/* The gradient of what relu took, in x's order: that of the residual, too. */
static kn_tensor *before_relu(const kn_op_grad *g)
{
    const sync_attr *a = g->attr;
    kn_tensor *x = g->in[0], *dy = kn_in_order_of(g->dout[0], x);
    if (!a->relu || !dy)
        return dy;
    kn_tensor *masked = g->din[5] ? g->din[5] : kn_empty_as(x);
    if (!masked)
        return NULL;
    kn_batch_norm_grad_args args = { .dadd = kn_array_of(masked),
                                     .dy = kn_array_of(dy),
                                     .x = kn_array_of(x),
                                     .mean = kn_array_of(g->out[1]),
                                     .rstd = kn_array_of(g->out[2]),
                                     .y = kn_array_or_none(g->out[0]),
                                     .w = kn_array_or_none(g->in[1]),
                                     .b = kn_array_or_none(g->in[2]),
                                     .relu = true };
    return KN_RUN(x, KN_K_BATCH_NORM_GRAD, args) ? masked : NULL;
}

static bool sync_backward(kn_op_grad *g)
{
    const sync_attr *a = g->attr;
    if (!g->dout[0])
        return true; /* the statistics have no gradient of their own */
    for (int i = 0; i < 6; i += 5)
        if (g->want[i] && !kn_grad_as(g, i, g->in[0]))
            return false;
    kn_tensor *masked = before_relu(g);
    const kn_tensor *x = kn_contiguous(g->in[0]), *dy = kn_contiguous(masked);
    kn_tensor *all = dy ? room(KN_F64, x, kn_comm_size(a->comm), 2 * x->shape[1]) : NULL;
    return all && own_sums(g, x, dy, all, kn_rank(a->comm)) &&
           give_own(g, all, kn_rank(a->comm), x->shape[1]) &&
           (!g->want[0] || give_dx(g, masked, all));
}

#define SYNC_OP(id, text, in, out)                                                                 \
    KN_OP(id, .name = (text), .attr_size = sizeof(sync_attr), .save_in = (in), .save_out = (out),  \
          .const_in = 8 | 16, .collective = true, .makes = true, .shape = sync_shape,              \
          .forward = sync_forward, .backward = sync_backward)
SYNC_OP(kn_op_sync_batch_norm, "sync_batch_norm", 1 | 2, 2 | 4 | 8);
SYNC_OP(kn_op_sync_batch_norm_relu, "sync_batch_norm_relu", 1 | 2 | 4, 2 | 4 | 8);
SYNC_OP(kn_op_sync_batch_norm_add_relu, "sync_batch_norm_add_relu", 1 | 2, 1 | 2 | 4 | 8);

kn_tensor *kn_sync_batch_norm_apply(kn_tensor *const in[6], double eps, double momentum, bool relu,
                                    kn_comm *comm)
{
    sync_attr a = { eps, momentum, relu, comm };
    kn_tensor *out[4];
    const kn_op *op = !relu    ? &kn_op_sync_batch_norm
                      : !in[5] ? &kn_op_sync_batch_norm_relu
                               : &kn_op_sync_batch_norm_add_relu;
    return kn_apply(op, 6, in, 2 | 4 | 8 | 16 | 32, &a, 4, out) ? out[0] : NULL;
}
