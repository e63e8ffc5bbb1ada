/* kernels/cuda/kernels/optim.cu: AdamW and SGD over all pieces of all parameters in one launch, and
 * the clip factor. Every operation is rounded to f32 (f64) by itself as in the reference, so both
 * give one result.
 *
 * Floor: AdamW moves 28 bytes an f32 parameter with an f32 gradient (p, m, v twice, g once), 14 a
 * bf16 one with a bf16 gradient, 16 bytes an access. A block takes one chunk of one piece, found by
 * bisection in the table of pieces. */
#include "kernels/memory.h"
#include "kernels/philox.h"
#include "kernels/step_numbers.h"
#include "kernels/cuda/kernels/elements.cuh"

#include <math.h>
#include <stdlib.h>

namespace
{
enum { BLOCK = 256, CHUNK = 4096 };

/* ---- the table of pieces --------------------------------------------------------------------- */

struct entry {
    kn_opt_piece piece;
    int64_t chunks_before; /* in this table */
    bool aligned;
};

/* The pieces whose masters have one dtype, copied for the device. */
struct piece_table {
    const entry *at;
    int n;
    int64_t chunks;
};

bool is_aligned(const void *p, size_t bytes)
{
    return (uintptr_t)p % bytes == 0;
}

/* False with an error. */
bool table_make(piece_table &r, const kn_opt_piece *piece, int pieces, kn_dtype dtype)
{
    r = {};
    entry *host = (entry *)kn_host_calloc((size_t)pieces, sizeof *host);
    if (!host)
        return false;
    for (int i = 0; i < pieces; i++) {
        const kn_opt_piece &p = piece[i];
        if (p.param_dtype != dtype || p.count == 0)
            continue;
        size_t v = 16 / kn_dtype_size(dtype), g = v * kn_dtype_size(p.grad_dtype);
        size_t o = p.out ? v * kn_dtype_size(p.out_dtype) : 16;
        bool aligned = is_aligned(p.param, 16) && is_aligned(p.out, o < 16 ? o : 16) &&
                       is_aligned(p.m, 16) && is_aligned(p.v, 16) &&
                       is_aligned(p.grad, g < 16 ? g : 16);
        host[r.n++] = { p, r.chunks, aligned };
        r.chunks += (p.count + CHUNK - 1) / CHUNK;
    }
    r.at = r.n ? (const entry *)kn_cuda_table(host, (size_t)r.n * sizeof *host) : nullptr;
    kn_host_free(host);
    return r.n == 0 || r.at;
}

/* The piece that chunk belongs to: the last one with chunks_before <= chunk. */
static __device__ const entry *entry_of(const piece_table &r, int64_t chunk)
{
    int low = 0, high = r.n;
    while (high - low > 1) {
        int mid = (low + high) / 2;
        bool before = r.at[mid].chunks_before <= chunk;
        low = before ? mid : low;
        high = before ? high : mid;
    }
    return r.at + low;
}

/* What the steps of all optimizers begin with. */
struct numbers {
    const double *lr, *grad_scale, *step, *skip, *limit;
    const uint64_t *seed;
};

numbers numbers_of(const kn_opt_step &s)
{
    return { s.lr, s.grad_scale, s.step, s.skip, s.limit, s.seed };
}

/* A piece's share of them. */
template <typename A> struct piece_numbers {
    A lr, wd, scale, limit;
    uint64_t key; /* of rounding at random */
    bool at_random;
    __device__ piece_numbers(const numbers &x, const kn_opt_piece &p)
        : lr(kn_mul_rn((A)*x.lr, (A)p.lr_mul)), wd((A)p.weight_decay), scale((A)*x.grad_scale),
          limit(x.limit ? (A)*x.limit : (A)INFINITY),
          key(x.seed ? kn_step_key(*x.seed, *x.step) : 0), at_random(x.seed != nullptr)
    {
    }
};

/* Scaled and then clamped; NaN stays. */
template <typename A> static __device__ A mean_of(A sum, const piece_numbers<A> &c)
{
    A g = kn_mul_rn(sum, c.scale);
    return g > c.limit ? c.limit : g < -c.limit ? -c.limit : g;
}

template <int V, typename A>
__device__ void load_grad(const kn_opt_piece &p, int64_t i, const piece_numbers<A> &c, A (&g)[V])
{
    if (p.grad_dtype == KN_F64) {
        double x[V];
        kn_load_wide<V>((const double *)p.grad + i, false, x);
        for (int v = 0; v < V; v++) {
            A most = c.limit, y = (A)kn_mul_rn(x[v], (double)c.scale);
            g[v] = y > most ? most : y < -most ? -most : y;
        }
        return;
    }
    float x[V];
    if (p.grad_dtype == KN_F32)
        kn_load_wide<V>((const float *)p.grad + i, false, x);
    else if (p.grad_dtype == KN_BF16)
        kn_load_wide<V>((const kn_bf16 *)p.grad + i, false, x);
    else
        kn_load_wide<V>((const kn_f16 *)p.grad + i, false, x);
    for (int v = 0; v < V; v++)
        g[v] = mean_of((A)x[v], c);
}

template <int V, typename T, typename A>
__device__ void save_rounded(void *out, int64_t i, const A (&p)[V])
{
    kn_pack<T, V> r;
#pragma unroll
    for (int v = 0; v < V; v++)
        kn_store(r.x[v], (double)p[v]);
    kn_save<V>((T *)out + i, r);
}

/* The tensors of a piece, as streams of rounding number them. */
enum { PARAM, M, SQUARES };

/* x as T keeps it, from element i of the piece. */
template <typename T, int V, typename A>
__device__ void round_to(const kn_opt_piece &o, const piece_numbers<A> &c, int which, int64_t i,
                         A (&x)[V])
{
    const kn_dtype t = sizeof(T) == 2 ? o.param_dtype : KN_F32;
    if (sizeof(T) != 2 || !c.at_random)
        return;
    const kn_opt_place &at = o.place;
    const uint64_t stream = at.stream + (uint64_t)which;
    uint64_t have = ~(uint64_t)0; /* block of words */
    kn_philox4 words = {};
    for (int v = 0; v < V; v++) {
        int64_t k = i + v, e = at.start + (at.run > 0 ? k / at.run * at.step + k % at.run : k);
        if ((uint64_t)e / 4 != have) {
            have = (uint64_t)e / 4;
            words = kn_philox(c.key, stream, have);
        }
        x[v] = (A)kn_rounded_at_random(t, (float)x[v], kn_philox_word(words, e));
    }
}

template <typename T, int V, typename A>
__device__ void save_state(const kn_opt_piece &o, const piece_numbers<A> &c, int which, int64_t i,
                           A (&x)[V])
{
    round_to<T>(o, c, which, i, x);
    kn_save_wide<V>((T *)(which == M ? o.m : o.v) + i, x);
}

/* The updated masters, and where they are wanted rounded: once, as a copy rounds. */
template <typename T, int V, typename A>
__device__ void save_param(const kn_opt_piece &o, const piece_numbers<A> &c, int64_t i, A (&p)[V])
{
    round_to<T>(o, c, PARAM, i, p);
    kn_save_wide<V>((T *)o.param + i, p);
    if (!o.out)
        return;
    if (sizeof(T) == 2)
        kn_load_wide<V>((const T *)o.param + i, false, p);
    if (o.out_dtype == KN_BF16)
        save_rounded<V, kn_bf16>(o.out, i, p);
    else if (o.out_dtype == KN_F16)
        save_rounded<V, kn_f16>(o.out, i, p);
    else if (o.out_dtype == KN_F32)
        save_rounded<V, float>(o.out, i, p);
    else
        save_rounded<V, double>(o.out, i, p);
}

/* Calls step.run<V>(piece, i) for every element of every piece. */
template <typename T, typename Step>
KN_KERNEL(BLOCK, pieces_kernel, const piece_table r, const Step step)
{
    const int V = 16 / sizeof(T);
    if (step.n.skip && *step.n.skip != 0)
        return;
    for (int64_t chunk = blockIdx.x; chunk < r.chunks; chunk += gridDim.x) {
        const entry *at = entry_of(r, chunk);
        kn_opt_piece p = at->piece;
        p.param = kn_global(p.param), p.out = kn_global(p.out), p.m = kn_global(p.m);
        p.v = kn_global(p.v), p.grad = kn_global(p.grad);
        int64_t from = (chunk - at->chunks_before) * CHUNK;
        int64_t to = from + CHUNK < p.count ? from + CHUNK : p.count, i = from;
        const piece_numbers<typename Step::number> c(step.n, p);
        if (at->aligned) {
            for (i = from + threadIdx.x * V; i + V <= to; i += BLOCK * V)
                step.template run<T, V>(p, c, i);
            i = to - (to - from) % V; /* elements that vectors leave over */
        }
        for (i += threadIdx.x; i < to; i += BLOCK)
            step.template run<T, 1>(p, c, i);
    }
}

template <typename T, typename Step>
kn_status run_pieces(const kn_opt_step &s, kn_dtype dtype, const Step &step)
{
    piece_table r;
    if (!table_make(r, s.piece, s.pieces, dtype))
        return KN_FAILED;
    if (r.n == 0)
        return KN_DONE;
    unsigned grid = (unsigned)(r.chunks < INT32_MAX ? r.chunks : INT32_MAX);
    return KN_RUN_FLAT((pieces_kernel<T, Step>), grid, BLOCK, r, step);
}

/* Runs the step that make(A) gives for pieces of each dtype that there is: f64 computes in double,
 * the others in float. */
template <template <typename> class Step, typename Args>
kn_status run_dtypes(const kn_opt_step &s, const Args &args)
{
    bool has[KN_DTYPE_COUNT] = {};
    for (int i = 0; i < s.pieces; i++)
        has[s.piece[i].param_dtype] = true;
    kn_status done = KN_DONE;
    if (has[KN_F32])
        done = run_pieces<float>(s, KN_F32, Step<float>(args));
    if (done == KN_DONE && has[KN_BF16])
        done = run_pieces<kn_bf16>(s, KN_BF16, Step<float>(args));
    if (done == KN_DONE && has[KN_F16])
        done = run_pieces<kn_f16>(s, KN_F16, Step<float>(args));
    if (done == KN_DONE && has[KN_F64])
        done = run_pieces<double>(s, KN_F64, Step<double>(args));
    return done;
}

template <typename A> static __device__ A average(kn_average a, A old, A fresh)
{
    const A from = a.from_fresh ? fresh : old, to = a.from_fresh ? old : fresh;
    return kn_add_rn(from, kn_mul_rn((A)a.step, kn_add_rn(to, -from)));
}

/* ---- AdamW ----------------------------------------------------------------------------------- */

/* 1 - beta1^t and 1 - beta2^t: the bias of zero starts. */
struct corrections {
    double c1, c2;
};

KN_KERNEL(1, corrections_kernel, corrections *out, const double *step, double beta1, double beta2)
{
    out->c1 = 1 - pow(beta1, (double)*step);
    out->c2 = 1 - pow(beta2, (double)*step);
}

struct adamw_call {
    const kn_adamw_args *a;
    const corrections *corrected;
};

template <typename A> struct adamw_step {
    typedef A number;
    numbers n;
    const corrections *corrected;
    kn_average b1, b2;
    A eps;

    explicit adamw_step(const adamw_call &x)
        : n(numbers_of(x.a->s)), corrected(x.corrected), b1(kn_average_of(x.a->beta1)),
          b2(kn_average_of(x.a->beta2)), eps((A)x.a->eps)
    {
    }
    template <typename T, int V>
    __device__ void run(const kn_opt_piece &o, const piece_numbers<A> &c, int64_t i) const
    {
        A g[V], p[V], m[V], s[V], c1 = (A)corrected->c1, c2 = (A)corrected->c2;
        load_grad<V>(o, i, c, g);
        kn_load_wide<V>((const T *)o.param + i, false, p);
        kn_load_wide<V>((const T *)o.m + i, false, m);
        kn_load_wide<V>((const T *)o.v + i, false, s);
#pragma unroll
        for (int v = 0; v < V; v++) {
            m[v] = average(b1, m[v], g[v]);
            s[v] = average(b2, s[v], kn_mul_rn(g[v], g[v]));
            A root = sqrt(s[v] / c2);
            A move = (m[v] / c1) / kn_add_rn(root, eps);
            p[v] = kn_add_rn(p[v], -kn_mul_rn(c.lr, kn_add_rn(move, kn_mul_rn(c.wd, p[v]))));
        }
        save_state<T>(o, c, M, i, m);
        save_state<T>(o, c, SQUARES, i, s);
        save_param<T>(o, c, i, p);
    }
};

/* ---- SGD ------------------------------------------------------------------------------------- */

template <typename A> struct sgd_step {
    typedef A number;
    numbers n;
    A momentum, fresh; /* fresh = 1 - dampening */
    bool nesterov;

    explicit sgd_step(const kn_sgd_args &a)
        : n(numbers_of(a.s)), momentum((A)a.momentum), fresh((A)(1 - a.dampening)),
          nesterov(a.nesterov)
    {
    }
    template <typename T, int V>
    __device__ void run(const kn_opt_piece &o, const piece_numbers<A> &c, int64_t i) const
    {
        A g[V], p[V], m[V] = {};
        bool first = *n.step == 1;
        load_grad<V>(o, i, c, g);
        kn_load_wide<V>((const T *)o.param + i, false, p);
        if (o.m && !first)
            kn_load_wide<V>((const T *)o.m + i, false, m);
#pragma unroll
        for (int v = 0; v < V; v++) {
            g[v] = kn_add_rn(g[v], kn_mul_rn(c.wd, p[v]));
            if (o.m) {
                m[v] = first ? g[v] : kn_add_rn(kn_mul_rn(momentum, m[v]), kn_mul_rn(fresh, g[v]));
                g[v] = nesterov ? kn_add_rn(g[v], kn_mul_rn(momentum, m[v])) : m[v];
            }
            p[v] = kn_add_rn(p[v], -kn_mul_rn(c.lr, g[v]));
        }
        if (o.m)
            save_state<T>(o, c, M, i, m);
        save_param<T>(o, c, i, p);
    }
};

/* ---- Lion ------------------------------------------------------------------------------------ */

template <typename A> struct lion_step {
    typedef A number;
    numbers n;
    kn_average b1, b2;

    explicit lion_step(const kn_lion_args &a)
        : n(numbers_of(a.s)), b1(kn_average_of(a.beta1)), b2(kn_average_of(a.beta2))
    {
    }
    template <typename T, int V>
    __device__ void run(const kn_opt_piece &o, const piece_numbers<A> &c, int64_t i) const
    {
        A g[V], p[V], m[V];
        load_grad<V>(o, i, c, g);
        kn_load_wide<V>((const T *)o.param + i, false, p);
        kn_load_wide<V>((const T *)o.m + i, false, m);
#pragma unroll
        for (int v = 0; v < V; v++) {
            A sign = average(b1, m[v], g[v]);
            sign = sign > 0 ? (A)1 : sign < 0 ? (A)-1 : sign;
            m[v] = average(b2, m[v], g[v]);
            p[v] = kn_add_rn(p[v], -kn_mul_rn(c.lr, kn_add_rn(sign, kn_mul_rn(c.wd, p[v]))));
        }
        save_state<T>(o, c, M, i, m);
        save_param<T>(o, c, i, p);
    }
};

/* ---- clipping, loss scaling ------------------------------------------------------------------ */

KN_KERNEL(1, clip_kernel, const kn_clip_args a)
{
    kn_clip_numbers(&a);
}

KN_KERNEL(1, loss_scale_kernel, const kn_loss_scale_args a)
{
    kn_loss_scale_numbers(&a);
}
} // namespace

extern "C" kn_status kn_cuda_adamw(const void *args)
{
    const kn_adamw_args *a = (const kn_adamw_args *)args;
    if (a->s.pieces == 0)
        return KN_DONE;
    corrections *c = (corrections *)kn_cuda_scratch(sizeof *c);
    if (!c || KN_RUN_FLAT(corrections_kernel, 1, 1, c, a->s.step, a->beta1, a->beta2) != KN_DONE)
        return KN_FAILED;
    return run_dtypes<adamw_step>(a->s, adamw_call{ a, c });
}

extern "C" kn_status kn_cuda_sgd(const void *args)
{
    const kn_sgd_args *a = (const kn_sgd_args *)args;
    if (a->s.pieces == 0)
        return KN_DONE;
    return run_dtypes<sgd_step>(a->s, *a);
}

extern "C" kn_status kn_cuda_lion(const void *args)
{
    const kn_lion_args *a = (const kn_lion_args *)args;
    if (a->s.pieces == 0)
        return KN_DONE;
    return run_dtypes<lion_step>(a->s, *a);
}

extern "C" kn_status kn_cuda_clip(const void *args)
{
    return KN_RUN_FLAT(clip_kernel, 1, 1, *(const kn_clip_args *)args);
}

extern "C" kn_status kn_cuda_loss_scale(const void *args)
{
    return KN_RUN_FLAT(loss_scale_kernel, 1, 1, *(const kn_loss_scale_args *)args);
}
