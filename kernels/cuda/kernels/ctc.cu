/* kernels/cuda/kernels/ctc.cu: connectionist temporal classification (kernels/cpu/reference_ctc.c
 * has the formulas). A block a row, a thread a state in turn; the frames follow each other. alpha
 * of all frames lies in work; on the way back beta takes its place.
 *
 * Floor: the frames' latency, some microseconds each way; rows run side by side. */
#include "kernels/cuda/kernels/index.cuh"

namespace
{
enum { STATES = 256 };

template <typename T> struct ctc_call {
    T *loss, *grad;
    const T *log_probs;
    double *work;
    const int64_t *target, *frames, *labels;
    kn_indices flagged;
    int64_t frames_most, N, C, targets, blank, width;
    bool zero_infinity;
};

/* One row; numbers out of range are recorded, and others taken. */
template <typename T> struct ctc_row {
    int64_t n, frames, S; /* states */
    const int64_t *target;
    double *alpha;
};

template <typename T>
static inline __device__ int64_t bounded(const ctc_call<T> &c, int64_t at, int64_t x, int64_t most)
{
    if (x >= 0 && x <= most)
        return x;
    kn_index_flag(c.flagged, at, x);
    return x < 0 ? 0 : most;
}

template <typename T> static inline __device__ ctc_row<T> row_of(const ctc_call<T> &c, int64_t n)
{
    int64_t first = c.width < 0 ? 0 : n * c.width;
    for (int64_t i = 0; c.width < 0 && i < n; i++)
        first += bounded(c, i, c.labels[i], c.targets - first);
    int64_t labels = bounded(c, n, c.labels[n], c.width < 0 ? c.targets - first : c.width);
    return { n, bounded(c, n, c.frames[n], c.frames_most), 2 * labels + 1, c.target + first,
             c.work + c.frames_most * (2 * first + n) };
}

template <typename T>
static inline __device__ int64_t label_of(const ctc_call<T> &c, const ctc_row<T> &r, int64_t s)
{
    return s % 2 ? bounded(c, r.target + s / 2 - c.target, r.target[s / 2], c.C - 1) : c.blank;
}

template <typename T>
static inline __device__ double log_prob(const ctc_call<T> &c, const ctc_row<T> &r, int64_t t,
                                         int64_t label)
{
    return (double)c.log_probs[(t * c.N + r.n) * c.C + label];
}

/* Whether a path may go from state s to s + 2. */
template <typename T> static inline __device__ bool skips(const ctc_row<T> &r, int64_t s)
{
    return s % 2 && s + 2 < r.S && r.target[s / 2] != r.target[s / 2 + 1];
}

static inline __device__ double log_sum(double a, double b, double c)
{
    double most = fmax(a, fmax(b, c));
    if (most == -INFINITY)
        return most;
    return most + log(exp(a - most) + exp(b - most) + exp(c - most));
}

template <typename T>
static inline __device__ double forward(const ctc_call<T> &c, const ctc_row<T> &r)
{
    if (r.frames == 0)
        return r.S == 1 ? 0 : (double)INFINITY;
    for (int64_t t = 0; t < r.frames; t++) {
        double *now = r.alpha + t * r.S;
        const double *last = now - r.S;
        for (int64_t s = threadIdx.x; s < r.S; s += STATES) {
            double p = log_prob(c, r, t, label_of(c, r, s));
            if (t == 0) {
                now[s] = s < 2 ? p : (double)-INFINITY;
                continue;
            }
            double one = s > 0 ? last[s - 1] : (double)-INFINITY;
            double two = s > 1 && skips(r, s - 2) ? last[s - 2] : (double)-INFINITY;
            now[s] = p + log_sum(last[s], one, two);
        }
        __syncthreads();
    }
    const double *end = r.alpha + (r.frames - 1) * r.S;
    return -log_sum(end[r.S - 1], r.S > 1 ? end[r.S - 2] : (double)-INFINITY, (double)-INFINITY);
}

/* The part of the paths in state s at frame t; beta takes alpha's place. */
template <typename T>
static inline __device__ double part_of(const ctc_call<T> &c, const ctc_row<T> &r, int64_t t,
                                        int64_t s, double loss)
{
    double *now = r.alpha + t * r.S, *next = now + r.S;
    double p = log_prob(c, r, t, label_of(c, r, s)), beta = s + 2 < r.S ? (double)-INFINITY : p;
    if (t < r.frames - 1)
        beta = p + log_sum(next[s], s + 1 < r.S ? next[s + 1] : (double)-INFINITY,
                           skips(r, s) ? next[s + 2] : (double)-INFINITY);
    double both = now[s] + beta;
    now[s] = beta;
    return both > (double)-INFINITY ? exp(both + loss - p) : 0;
}

/* A class's gradient takes the parts of its states: the blank's as a sum over the block; another's
 * by the thread of its first state, which reads those of the later ones in `part`. */
template <typename T>
static inline __device__ void gradient(const ctc_call<T> &c, const ctc_row<T> &r, double loss,
                                       double *part, double *buffer)
{
    bool infinite = loss == (double)INFINITY;
    for (int64_t t = c.frames_most - 1; t >= 0; t--) {
        bool none = t >= r.frames || (infinite && c.zero_infinity);
        T *grad = c.grad + (t * c.N + r.n) * c.C;
        double blanks = 0;
        for (int64_t s = threadIdx.x; s < r.S && !none && !infinite; s += STATES) {
            double x = part_of(c, r, t, s, loss);
            if (label_of(c, r, s) == c.blank)
                blanks += x;
            part[s] = x;
        }
        blanks = kn_block_sum(blanks, buffer);
        for (int64_t k = threadIdx.x; k < c.C; k += STATES) {
            double g = none ? 0 : infinite ? (double)NAN : exp(log_prob(c, r, t, k));
            grad[k] = (T)(k == c.blank && !none && !infinite ? g - blanks : g);
        }
        __syncthreads();
        for (int64_t s = 2 * threadIdx.x + 1; s < r.S && !none && !infinite; s += 2 * STATES) {
            int64_t label = label_of(c, r, s);
            bool first = label != c.blank;
            for (int64_t i = 1; i < s && first; i += 2)
                first = label_of(c, r, i) != label;
            double sum = 0;
            for (int64_t i = s; i < r.S && first; i += 2)
                sum += label_of(c, r, i) == label ? part[i] : 0;
            if (first)
                grad[label] = (T)(exp(log_prob(c, r, t, label)) - sum);
        }
        __syncthreads();
    }
}

template <typename T> KN_KERNEL_RESIDENT(STATES, 1, ctc_kernel, const ctc_call<T> c)
{
    KN_SHARED double buffer[STATES / 32 + 1];
    for (int64_t n = blockIdx.x; n < c.N; n += gridDim.x) {
        ctc_row<T> r = row_of(c, n);
        double loss = forward(c, r);
        if (threadIdx.x == 0)
            c.loss[n] = (T)(loss == (double)INFINITY && c.zero_infinity ? 0 : loss);
        /* behind the frames of all rows is room for a frame of each */
        double *part = c.work + c.frames_most * (2 * c.targets + c.N) +
                       (2 * (r.target - c.target) + n);
        __syncthreads();
        if (c.grad)
            gradient(c, r, loss, part, buffer);
    }
}

template <typename T> kn_status ctc(const kn_ctc_args *a)
{
    ctc_call<T> c = { (T *)a->loss.data,
                      (T *)a->grad.data,
                      (const T *)a->log_probs.data,
                      (double *)a->work.data,
                      (const int64_t *)a->targets.data,
                      (const int64_t *)a->frames.data,
                      (const int64_t *)a->labels.data,
                      { a->labels.data, 1, true, kn_cuda_flags() },
                      a->log_probs.shape[0],
                      a->log_probs.shape[1],
                      a->log_probs.shape[2],
                      a->targets.shape[0],
                      a->blank,
                      a->width,
                      a->zero_infinity };
    if (c.N == 0)
        return KN_DONE;
    return KN_RUN(ctc_kernel<T>, kn_blocks(c.N, 1, 1), STATES, 0, c);
}
} // namespace

extern "C" kn_status kn_cuda_ctc(const void *args)
{
    const kn_ctc_args *a = (const kn_ctc_args *)args;
    if (a->log_probs.dtype == KN_F64)
        return ctc<double>(a);
    return a->log_probs.dtype == KN_F32 ? ctc<float>(a) : KN_DECLINED;
}
