/* kernels/cuda/kernels/cross_entropy.cu: cross-entropy of logits [N, V], probabilities never
 * stored.
 *
 * Floor: the forward reads the logits once (online maximum and sum), the backward reads and writes
 * them once; everything else is [N]. The rows' losses are added by one block, in f64. A forward
 * that also makes the gradient finds the row in the L2 cache. */
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/exponentials.cuh"
#include "kernels/cuda/kernels/rows.cuh"

/* The numbers of a row's target for forward and backward. */
struct ce_targets {
    const void *data;
    int64_t stride, ignore, classes, first; /* first: the number of row 0 in messages */
    bool wide;                              /* i64, else i32 */
    kn_cuda_flag *flag;
};

static ce_targets ce_targets_make(const kn_array *t, int64_t ignore, int64_t classes, int64_t first)
{
    return { t->data, t->stride[0], ignore, classes, first, t->dtype == KN_I64, kn_cuda_flags() };
}

/* The class of row n, or -1 where the row doesn't count; a bad one is reported by `reports`. */
static __device__ inline int64_t ce_target(const ce_targets &t, int64_t n, bool reports)
{
    int64_t v = t.wide ? ((const int64_t *)t.data)[n * t.stride]
                       : (int64_t)((const int32_t *)t.data)[n * t.stride];
    if (v == t.ignore)
        return -1;
    if (v >= 0 && v < t.classes)
        return v;
    if (reports &&
        atomicCAS(&t.flag->what, (int)KN_FLAG_NONE, (int)KN_FLAG_TARGET) == KN_FLAG_NONE) {
        t.flag->where = t.first + n;
        t.flag->value = v;
    }
    return -1;
}

/* dx = each (exp(x - lse) - (1 - s) [class is the target] - s / V), 0 where target < 0; in
 * place. */
template <typename T, bool VEC>
static __device__ inline void ce_grad_row(const row_group &g, T *dx, int64_t sd, const T *x,
                                          int64_t sx, int64_t classes, int64_t target,
                                          typename kn_compute<T>::type lse,
                                          typename kn_compute<T>::type each, double smoothing)
{
    typedef typename kn_compute<T>::type A;
    const int N = row_unit<T>::size;
    A rest = 1 - (A)smoothing, share = (A)(smoothing / (double)classes);
    row_each_of_any_length<VEC, N>(g, x, sx, classes, [&](int64_t u, int n, A(&v)[N]) {
        for (int i = 0; i < N; i++) {
            A hit = u * N + i == target ? rest : (A)0;
            v[i] = target >= 0 ? each * (kn_exp(v[i] - lse) - hit - share) : (A)0;
        }
        if (n == N)
            row_store<VEC, N>(dx, sd, u, n, v);
        else
            row_store<false, N>(dx, sd, u, n, v);
    });
}

/* ---- forward --------------------------------------------------------------------------------- */

template <typename T> struct ce_call {
    typedef typename kn_compute<T>::type A;
    const T *x;
    T *dx; /* NULL: not wanted */
    int64_t row, sx, dx_row, sd, rows, classes;
    A *lse, *loss; /* loss: scratch [N], what each row adds */
    ce_targets targets;
    double smoothing;
};

/* The running maximum and the sum of exp(x - maximum), with room for one more unit. */
template <typename A, int N>
static __device__ inline void ce_online(A &max, A &sum, const A (&x)[N], int n)
{
    A top = max;
    for (int i = 0; i < N; i++)
        top = i < n && (x[i] > top || x[i] != x[i]) ? x[i] : top;
    if (top == -row_infinity<A>())
        return;
    if (top != max)
        sum *= kn_exp_term(max - top);
    max = top;
    for (int i = 0; i < N; i++)
        sum += i < n ? kn_exp_term(x[i] - top) : 0;
}

template <typename T, bool VEC>
KN_KERNEL_RESIDENT(ROW_MOST, 2, cross_entropy_kernel, ce_call<T> a, int mode)
{
    typedef typename kn_compute<T>::type A;
    KN_SHARED A buffer[33];
    row_group g(mode);
    const int N = row_unit<T>::size;
    A s = (A)a.smoothing, share = 1 / (A)a.classes;
    for (int64_t r = g.first; r < a.rows; r += g.step) {
        const T *px = a.x + r * a.row;
        A max = -row_infinity<A>(), sum = 0, all = 0;
        row_each_of_any_length<VEC, N>(g, px, a.sx, a.classes, [&](int64_t, int n, A(&x)[N]) {
            ce_online(max, sum, x, n);
            for (int i = 0; s > 0 && i < N; i++)
                all += x[i] * share;
        });
        A top = row_max(g, max, buffer);
        if (max != -row_infinity<A>())
            sum *= kn_exp_term(max - top);
        sum = row_sum(g, sum, buffer);
        if (s > 0)
            all = row_sum(g, all, buffer);
        A lse = top == -row_infinity<A>() && a.classes > 0 ? top - top : top + row_log(sum);
        int64_t target = ce_target(a.targets, r, g.lane == 0);
        if (g.lane == 0)
            a.lse[r] = lse;
        /* the loss: by the thread that has the target's unit, over which no other writes dx */
        if (target < 0 && g.lane == 0)
            a.loss[r] = 0;
        if (target >= 0 && g.lane == target / N % g.lanes)
            a.loss[r] =
                (1 - s) * (lse - kn_get(px + target * a.sx)) + (s > 0 ? s * (lse - all) : 0);
        if (a.dx)
            ce_grad_row<T, VEC>(g, a.dx + r * a.dx_row, a.sd, px, a.sx, a.classes, target, lse,
                                (A)1, a.smoothing);
    }
}

/* One block: the mean of the rows' losses, or their sum, and how many rows count. */
template <typename A>
KN_KERNEL(1024, ce_total_kernel, const A *row_loss, ce_targets targets, int64_t rows, bool mean,
          A *loss, A *count)
{
    KN_SHARED double buffer[33];
    double total = 0, counted = 0;
    for (int64_t r = threadIdx.x; r < rows; r += blockDim.x) {
        bool counts = ce_target(targets, r, false) >= 0;
        total += counts ? (double)row_loss[r] : 0;
        counted += counts;
    }
    total = kn_block_sum(total, buffer);
    counted = kn_block_sum(counted, buffer);
    if (threadIdx.x == 0) {
        *count = (A)counted;
        *loss = (A)(mean && counted > 0 ? total / counted : total);
    }
}

template <typename T> static kn_status ce_launch(const ce_call<T> &c, bool vec)
{
    row_plan p = row_plan_make(c.rows, c.classes, sizeof(T), 0);
    ROW_RUN(cross_entropy_kernel, T, vec, p, c);
}

template <typename T> static kn_status ce_run(const kn_cross_entropy_args *a)
{
    typedef typename kn_compute<T>::type A;
    const kn_array *x = &a->logits, *dx = &a->dlogits;
    int64_t rows = x->shape[0], classes = x->shape[1];
    A *room = (A *)kn_cuda_scratch((size_t)(rows + 1) * sizeof(A));
    if (!room)
        return KN_FAILED;
    ce_call<T> c = { (const T *)x->data,
                     (T *)dx->data,
                     x->stride[0],
                     x->stride[1],
                     dx->data ? dx->stride[0] : 0,
                     dx->data ? dx->stride[1] : 0,
                     rows,
                     classes,
                     (A *)a->lse.data,
                     room,
                     ce_targets_make(&a->targets, a->ignore_index, classes, a->first_row),
                     a->smoothing };
    bool vec = row_begins_aligned(x) && (!dx->data || row_begins_aligned(dx));
    if (rows > 0 && ce_launch(c, vec) != KN_DONE)
        return KN_FAILED;
    unsigned block = rows > 256 ? 1024 : 128;
    return KN_RUN(ce_total_kernel<A>, 1, block, 0, (const A *)room, c.targets, rows, !a->part,
                  (A *)a->loss.data, (A *)a->count.data);
}

static bool ce_takes(const kn_array *logits, const kn_array *lse)
{
    return lse->dtype == (logits->dtype == KN_F64 ? KN_F64 : KN_F32) && kn_array_contiguous(lse);
}

extern "C" kn_status kn_cuda_cross_entropy(const void *args)
{
    const kn_cross_entropy_args *a = (const kn_cross_entropy_args *)args;
    if (!ce_takes(&a->logits, &a->lse) || a->loss.dtype != a->lse.dtype ||
        a->count.dtype != a->lse.dtype || (a->dlogits.data && a->dlogits.dtype != a->logits.dtype))
        return KN_DECLINED;
    KN_FLOATS(a->logits.dtype, ce_run, a);
}

/* ---- backward -------------------------------------------------------------------------------- */

template <typename T> struct ce_grad_call {
    typedef typename kn_compute<T>::type A;
    T *dx;
    const T *x;
    int64_t dx_row, sd, x_row, sx, rows, classes;
    const A *lse, *count, *dloss;
    ce_targets targets;
    double smoothing;
};

template <typename T, bool VEC>
KN_KERNEL(ROW_MOST, cross_entropy_grad_kernel, ce_grad_call<T> a, int mode)
{
    typedef typename kn_compute<T>::type A;
    row_group g(mode);
    A each = *a.count > 0 ? *a.dloss / *a.count : 0;
    for (int64_t r = g.first; r < a.rows; r += g.step)
        ce_grad_row<T, VEC>(g, a.dx + r * a.dx_row, a.sd, a.x + r * a.x_row, a.sx, a.classes,
                            ce_target(a.targets, r, g.lane == 0), a.lse[r], each, a.smoothing);
}

template <typename T> static kn_status ce_grad_run(const kn_cross_entropy_grad_args *a)
{
    typedef typename kn_compute<T>::type A;
    const kn_array *x = &a->logits, *dx = &a->dlogits;
    int64_t rows = x->shape[0], classes = x->shape[1];
    if (rows == 0 || classes == 0)
        return KN_DONE;
    ce_grad_call<T> c = { (T *)dx->data,
                          (const T *)x->data,
                          dx->stride[0],
                          dx->stride[1],
                          x->stride[0],
                          x->stride[1],
                          rows,
                          classes,
                          (const A *)a->lse.data,
                          (const A *)a->count.data,
                          (const A *)a->dloss.data,
                          ce_targets_make(&a->targets, a->ignore_index, classes, 0),
                          a->smoothing };
    bool vec = row_begins_aligned(x) && row_begins_aligned(dx);
    row_plan p = row_plan_make(rows, classes, sizeof(T), 0);
    ROW_RUN(cross_entropy_grad_kernel, T, vec, p, c);
}

extern "C" kn_status kn_cuda_cross_entropy_grad(const void *args)
{
    const kn_cross_entropy_grad_args *a = (const kn_cross_entropy_grad_args *)args;
    if (!ce_takes(&a->logits, &a->lse) || a->dlogits.dtype != a->logits.dtype ||
        a->count.dtype != a->lse.dtype || a->dloss.dtype != a->lse.dtype)
        return KN_DECLINED;
    KN_FLOATS(a->logits.dtype, ce_grad_run, a);
}
