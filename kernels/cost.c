/* kernels/cost.c: the flops and bytes of one call, from its arguments alone: the meta device, which
 * has no bytes behind its arrays, asks too. */
#include "kernels/kernels.h"

/* Bytes of the distinct elements of an array: broadcast dims count once, unset arrays nothing. */
static double bytes_of(const kn_array *a)
{
    double n = (double)kn_dtype_size(a->dtype);
    for (int d = 0; d < a->ndim; d++)
        n *= a->stride[d] == 0 && a->shape[d] > 0 ? 1 : (double)a->shape[d];
    return n;
}

static double elements(const kn_array *a)
{
    return (double)kn_array_numel(a);
}

static double dim(const kn_array *a, int from_last)
{
    return from_last < a->ndim ? (double)a->shape[a->ndim - 1 - from_last] : 1;
}

/* The bytes of all arrays listed. */
#define MOVED(...) moved((const kn_array *[]){ __VA_ARGS__, NULL })
static double moved(const kn_array *const *list)
{
    double sum = 0;
    for (; *list; list++)
        sum += bytes_of(*list);
    return sum;
}

/* sum over t < T of max(0, first + t) */
static double sum_of_rising(double T, double first)
{
    double last = first + T - 1;
    if (first >= 0)
        return T * (first + last) / 2;
    return last > 0 ? last * (last + 1) / 2 : 0;
}

/* Pairs of query and key: all T S, or only the visible ones under the causal mask. */
static double attention_pairs(const kn_array *q, const kn_array *k, bool causal, int64_t window)
{
    double T = dim(q, 1), S = dim(k, 1), all = T * S;
    if (causal) { /* row t sees max(0, t + 1 + S - T) keys, at most window of them */
        all = sum_of_rising(T, S - T + 1);
        if (window > 0)
            all -= sum_of_rising(T, S - T + 1 - (double)window);
    }
    return dim(q, 3) * dim(q, 2) * all;
}

static kn_cost attention_cost(const void *args)
{
    const kn_attention_args *a = args; /* two products of 2 D a pair, 5 for the softmax */
    return (kn_cost){ attention_pairs(&a->q, &a->k, a->causal, a->window) * (4 * dim(&a->q, 0) + 5),
                      MOVED(&a->o, &a->lse, &a->q, &a->k, &a->v, &a->mask) };
}

static kn_cost attention_grad_cost(const void *args)
{
    const kn_attention_grad_args *a = args; /* five products of 2 D a pair */
    return (kn_cost){ attention_pairs(&a->q, &a->k, a->causal, a->window) *
                          (10 * dim(&a->q, 0) + 8),
                      MOVED(&a->dq, &a->dk, &a->dv, &a->dout, &a->o, &a->lse, &a->q, &a->k, &a->v,
                            &a->mask, &a->dmask) };
}

/* An optimizer's pieces. flops: per element; state: reads and writes of arrays of the parameter's
 * size, the gradient not counted. */
static kn_cost pieces_cost(const kn_opt_piece *piece, int pieces, double flops, double state)
{
    kn_cost c = { 0 };
    for (int i = 0; i < pieces; i++) {
        double n = (double)piece[i].count;
        c.flops += flops * n;
        c.bytes += n * ((double)kn_dtype_size(piece[i].param_dtype) * state +
                        (double)kn_dtype_size(piece[i].grad_dtype) +
                        (piece[i].out ? (double)kn_dtype_size(piece[i].out_dtype) : 0));
    }
    return c;
}

static kn_cost runs_cost(const kn_run *run, int runs, double flops)
{
    kn_cost c = { 0 };
    for (int i = 0; i < runs; i++) {
        c.flops += flops * (double)run[i].count;
        c.bytes += (double)run[i].count * (double)kn_dtype_size(run[i].dtype);
    }
    return c;
}

static kn_cost elementwise_cost(kn_kernel k, const void *args)
{
    switch (k) {
    case KN_K_COPY: {
        const kn_copy_args *a = args;
        return (kn_cost){ 0, MOVED(&a->dst, &a->src) };
    }
    case KN_K_FILL: {
        const kn_fill_args *a = args;
        return (kn_cost){ 0, bytes_of(&a->dst) };
    }
    case KN_K_UNARY: {
        const kn_unary_args *a = args;
        return (kn_cost){ elements(&a->dst), MOVED(&a->dst, &a->src) };
    }
    case KN_K_UNARY_GRAD: {
        const kn_unary_grad_args *a = args;
        const int reads = kn_unary_row(a->kind)->reads;
        double saved =
            (reads & KN_READS_X ? bytes_of(&a->x) : 0) + (reads & KN_READS_Y ? bytes_of(&a->y) : 0);
        return (kn_cost){ 2 * elements(&a->dx), MOVED(&a->dx, &a->dy) + saved };
    }
    case KN_K_BINARY: {
        const kn_binary_args *a = args;
        return (kn_cost){ elements(&a->dst), MOVED(&a->dst, &a->a, &a->b) };
    }
    case KN_K_WHERE: {
        const kn_where_args *a = args;
        return (kn_cost){ 0, MOVED(&a->dst, &a->cond, &a->a, &a->b) };
    }
    case KN_K_REDUCE: {
        const kn_reduce_args *a = args;
        return (kn_cost){ elements(&a->src), MOVED(&a->dst, &a->src) };
    }
    case KN_K_ROUND: {
        const kn_round_args *a = args;
        return (kn_cost){ elements(&a->dst), MOVED(&a->dst, &a->src) };
    }
    case KN_K_RANDOM: {
        const kn_random_args *a = args;
        return (kn_cost){ 0, bytes_of(&a->dst) };
    }
    default: { /* KN_K_DROPOUT */
        const kn_dropout_args *a = args;
        return (kn_cost){ elements(&a->y), MOVED(&a->y, &a->x) };
    }
    }
}

static kn_cost rows_cost(kn_kernel k, const void *args)
{
    switch (k) {
    case KN_K_MATMUL: { /* one multiplication and one addition for each of M N K; the few of a bias
                           or an epilogue aren't counted */
        const kn_matmul_args *a = args;
        double bias = a->bias.ndim > 0 ? bytes_of(&a->bias) : 0;
        double before = a->add ? bytes_of(&a->dst) : 0;
        return (kn_cost){ 2 * elements(&a->dst) * dim(&a->a, 0),
                          MOVED(&a->dst, &a->a, &a->b, &a->sum, &a->x) + bias + before };
    }
    case KN_K_SOFTMAX: {
        const kn_softmax_args *a = args;
        return (kn_cost){ 4 * elements(&a->x), MOVED(&a->y, &a->x) };
    }
    case KN_K_SOFTMAX_GRAD: {
        const kn_softmax_grad_args *a = args;
        return (kn_cost){ 4 * elements(&a->y), MOVED(&a->dx, &a->dy, &a->y) };
    }
    case KN_K_CROSS_ENTROPY: {
        const kn_cross_entropy_args *a = args;
        const double passes = a->dlogits.data ? 2 : 1;
        return (kn_cost){ 4 * passes * elements(&a->logits),
                          MOVED(&a->logits, &a->targets, &a->lse, &a->dlogits) };
    }
    case KN_K_CROSS_ENTROPY_GRAD: {
        const kn_cross_entropy_grad_args *a = args;
        return (kn_cost){ 4 * elements(&a->logits),
                          MOVED(&a->dlogits, &a->logits, &a->targets, &a->lse) };
    }
    case KN_K_NORM: {
        const kn_norm_args *a = args;
        return (kn_cost){ (a->add.dtype ? 8 : 7) * elements(&a->x),
                          MOVED(&a->y, &a->x, &a->w, &a->b, &a->mean, &a->rstd, &a->add, &a->sum) };
    }
    case KN_K_NORM_GRAD: {
        const kn_norm_grad_args *a = args;
        return (kn_cost){ (a->more.dtype ? 13 : 12) * elements(&a->x),
                          MOVED(&a->dx, &a->dw, &a->db, &a->dy, &a->x, &a->w, &a->mean, &a->rstd,
                                &a->more) };
    }
    default: { /* KN_K_ROPE */
        const kn_rope_args *a = args;
        return (kn_cost){ 3 * elements(&a->x), MOVED(&a->y, &a->x) };
    }
    }
}

/* One convolution: as many sums as out has elements, each over the terms of one filter of w. */
static kn_cost conv_cost(const kn_array *out, const kn_array *w, double bytes)
{
    return (kn_cost){ 2 * elements(out) * dim(w, 0) * dim(w, 1) * dim(w, 2), bytes };
}

/* An adaptive window has about as many elements as x to each of y. */
static double window_size(const kn_window *w, const kn_array *x, const kn_array *y)
{
    double each = elements(y) > 0 ? elements(x) / elements(y) : 0;
    return w->adaptive ? each : (double)w->kernel[0] * (double)w->kernel[1];
}

static kn_cost image_cost(kn_kernel k, const void *args)
{
    switch (k) {
    case KN_K_CONV: {
        const kn_conv_args *a = args;
        return conv_cost(&a->y, &a->w, MOVED(&a->y, &a->x, &a->w, &a->bias));
    }
    case KN_K_CONV_GRAD_X: {
        const kn_conv_grad_x_args *a = args;
        return conv_cost(&a->dy, &a->w, MOVED(&a->dx, &a->dy, &a->w));
    }
    case KN_K_CONV_GRAD_W: {
        const kn_conv_grad_w_args *a = args;
        return conv_cost(&a->dy, &a->dw, MOVED(&a->dw, &a->dy, &a->x));
    }
    case KN_K_BATCH_NORM: {
        const kn_batch_norm_args *a = args;
        return (kn_cost){ (a->training ? 8 : 4) * elements(&a->x), MOVED(&a->y, &a->x, &a->add) };
    }
    case KN_K_BATCH_NORM_GRAD: {
        const kn_batch_norm_grad_args *a = args;
        return (kn_cost){ 12 * elements(&a->x), MOVED(&a->dx, &a->dadd, &a->dy, &a->x, &a->y) };
    }
    case KN_K_BATCH_NORM_JOIN: {
        const kn_batch_norm_join_args *a = args;
        return (kn_cost){ 8 * elements(&a->from_a), MOVED(&a->a, &a->b, &a->from_a, &a->from_b) };
    }
    case KN_K_POOL: {
        const kn_pool_args *a = args;
        return (kn_cost){ elements(&a->y) * window_size(&a->window, &a->x, &a->y),
                          MOVED(&a->y, &a->index, &a->x) };
    }
    case KN_K_POOL_GRAD: {
        const kn_pool_grad_args *a = args;
        return (kn_cost){ elements(&a->dy) * window_size(&a->window, &a->dx, &a->dy),
                          MOVED(&a->dx, &a->dy, &a->index) };
    }
    case KN_K_INTERPOLATE: {
        const kn_interpolate_args *a = args;
        return (kn_cost){ a->linear ? 8 * elements(&a->y) : 0, MOVED(&a->y, &a->x) };
    }
    default: { /* KN_K_INTERPOLATE_GRAD */
        const kn_interpolate_grad_args *a = args;
        return (kn_cost){ (a->linear ? 8 : 1) * elements(&a->dy), MOVED(&a->dx, &a->dy) };
    }
    }
}

static kn_cost sharding_cost(kn_kernel k, const void *args)
{
    switch (k) {
    case KN_K_SUM_N: {
        const kn_sum_n_args *a = args;
        double n = (double)a->count, src = (double)kn_dtype_size(a->src_dtype);
        return (
            kn_cost){ n * (a->n - (a->acc ? 0 : 1)),
                      n * (a->n * src + (double)kn_dtype_size(a->dst_dtype) * (a->acc ? 2 : 1)) };
    }
    case KN_K_ADAMW: { /* p, m and v are read and written */
        const kn_adamw_args *a = args;
        return pieces_cost(a->s.piece, a->s.pieces, 16, 6);
    }
    case KN_K_SGD: {
        const kn_sgd_args *a = args;
        return pieces_cost(a->s.piece, a->s.pieces, 8, a->momentum != 0 ? 4 : 2);
    }
    case KN_K_LION: {
        const kn_lion_args *a = args;
        return pieces_cost(a->s.piece, a->s.pieces, 11, 4);
    }
    case KN_K_ABSMAX: {
        const kn_absmax_args *a = args;
        return runs_cost(a->run, a->runs, 1);
    }
    case KN_K_POWSUM: { /* a power counts as 20 */
        const kn_powsum_args *a = args;
        return runs_cost(a->run, a->runs, 22);
    }
    default: { /* KN_K_SQSUM */
        const kn_sqsum_args *a = args;
        return runs_cost(a->run, a->runs, 3);
    }
    }
}

/* Picking reads the picked elements, not all that there are. */
static kn_cost index_cost(kn_kernel k, const void *args)
{
    switch (k) {
    case KN_K_INDEX_SELECT: {
        const kn_index_select_args *a = args;
        return (kn_cost){ 0, 2 * bytes_of(&a->dst) + bytes_of(&a->index) };
    }
    case KN_K_INDEX_ADD: {
        const kn_index_add_args *a = args;
        double n = elements(&a->src);
        return (kn_cost){ n,
                          n * 2 * (double)kn_dtype_size(a->dst.dtype) + MOVED(&a->src, &a->index) };
    }
    case KN_K_GATHER: {
        const kn_gather_args *a = args;
        return (kn_cost){ 0, 2 * bytes_of(&a->dst) + bytes_of(&a->index) };
    }
    case KN_K_SCATTER: {
        const kn_scatter_args *a = args;
        double n = elements(&a->index), size = (double)kn_dtype_size(a->dst.dtype);
        return (kn_cost){ a->add ? n : 0, n * size * (a->add ? 2 : 1) + MOVED(&a->src, &a->index) };
    }
    case KN_K_SORT: { /* about 16 comparisons an element */
        const kn_sort_args *a = args;
        return (kn_cost){ 16 * elements(&a->src), MOVED(&a->values, &a->indices, &a->src) };
    }
    default: { /* KN_K_CUMSUM */
        const kn_cumsum_args *a = args;
        return (kn_cost){ elements(&a->x), MOVED(&a->y, &a->x) };
    }
    }
}

kn_cost kn_kernel_cost(kn_kernel k, const void *args)
{
    switch (k) {
    case KN_K_COPY:
    case KN_K_FILL:
    case KN_K_UNARY:
    case KN_K_UNARY_GRAD:
    case KN_K_BINARY:
    case KN_K_WHERE:
    case KN_K_REDUCE:
    case KN_K_ROUND:
    case KN_K_RANDOM:
    case KN_K_DROPOUT:
        return elementwise_cost(k, args);
    case KN_K_INDEX_SELECT:
    case KN_K_INDEX_ADD:
    case KN_K_GATHER:
    case KN_K_SCATTER:
    case KN_K_SORT:
    case KN_K_CUMSUM:
        return index_cost(k, args);
    case KN_K_ATTENTION:
        return attention_cost(args);
    case KN_K_ATTENTION_GRAD:
        return attention_grad_cost(args);
    case KN_K_SUM_N:
    case KN_K_ADAMW:
    case KN_K_SGD:
    case KN_K_LION:
    case KN_K_ABSMAX:
    case KN_K_SQSUM:
    case KN_K_POWSUM:
        return sharding_cost(k, args);
    case KN_K_CONV:
    case KN_K_CONV_GRAD_X:
    case KN_K_CONV_GRAD_W:
    case KN_K_BATCH_NORM:
    case KN_K_BATCH_NORM_GRAD:
    case KN_K_BATCH_NORM_JOIN:
    case KN_K_POOL:
    case KN_K_POOL_GRAD:
    case KN_K_INTERPOLATE:
    case KN_K_INTERPOLATE_GRAD:
        return image_cost(k, args);
    case KN_K_CLIP:
        return (kn_cost){ 8, KN_SQSUM_LIMBS * 8 + 12 };
    case KN_K_LOSS_SCALE:
        return (kn_cost){ 8, sizeof(kn_loss_scale_state) + sizeof(kn_step_scalars) + 8 };
    default:
        return rows_cost(k, args);
    }
}
