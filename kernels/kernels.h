/* kernels/kernels.h: the table of everything a device can compute.
 *
 * A kernel is an entry of enum kn_kernel and a struct of arguments; kn_launch() copies the struct
 * to a stream. A device is a stack of providers (vector overlay, oneDNN, plain reference on the
 * CPU); a provider may decline a case, the next one takes it, the reference takes all. The trace
 * names the provider. Arguments are raw arrays; the caller keeps their bytes alive until the stream
 * is past them.
 *
 * Rules for every entry unless its comment says otherwise:
 *  - floats of one call have one dtype T in {f32, bf16, f16, f64}, but a gradient may have another,
 *    that of the place where a leaf keeps it; bf16 and f16 are computed in f32 and rounded once at
 *    the store; f64 is computed in f64;
 *  - arrays may have any strides (0 = broadcast) on inputs; outputs never overlap themselves;
 *  - an output may be the very same array as an input where the entry says "in place";
 *  - sizes of 0 are fine and do nothing (reductions over nothing give the neutral element);
 *  - results do not depend on the number of threads, nor on the place of an element in a larger
 *    array (body and tail of a vector loop compute the same bits). */
#ifndef KNAP_KERNELS_KERNELS_H
#define KNAP_KERNELS_KERNELS_H

#include "kernels/image_args.h"
#include "kernels/index_args.h"
#include "kernels/kinds.h"
#include "kernels/optim_args.h"
#include "kernels/sequence_args.h"
#include "kernels/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every kernel is one row: kn_kernel, the providers' tables, messages and costs are made of them.
 *   ROW(entry, name, arrays, vectors, flops, bytes)
 *   name     its arguments are a kn_<name>_args; its functions are kn_ref_<name> (the reference),
 *            kn_cuda_<name> and vec_<name> (the vector provider)
 *   arrays   the arrays that its arguments begin with: a name; '?' if it may be absent (data NULL);
 *            ':' and its dtype, float, number (one with arithmetic), index (i64 or i32), another
 *            array for that one's, or a dtype; its dims, of one size where they have one letter. A
 *            star is any number of dims, the same in all arrays. kn_launch checks this
 *            (kernels/signature.c), and the rest of what must fit (kernels/checks.c)
 *   vectors  VEC if the vector provider has it, else NO_VEC
 *   flops, bytes  the cost of a call with arguments *a, in functions of kernels/cost.c; all: the
 *            bytes of the arrays */
/* clang-format off */
#define KN_KERNELS(ROW)                                                                           \
    ROW(COPY, copy, "dst[*] src[*]", VEC, 0, all)                                                 \
    ROW(FILL, fill, "dst:number", VEC, 0, all)                                                    \
    ROW(UNARY, unary, "dst[*] src[*]", VEC, elements(&a->dst), all)                               \
    ROW(UNARY_GRAD, unary_grad, "dx:float[*] dy[*] x?[*] y?[*]", VEC, 2 * elements(&a->dx), all)  \
    ROW(BINARY, binary, "dst[*] a[*] b[*]", VEC, elements(&a->dst), all)                          \
    ROW(WHERE, where, "dst[*] cond:bool[*] a:dst[*] b:dst[*]", VEC, 0, all)                       \
    ROW(REDUCE, reduce, "dst:number src:number", VEC, elements(&a->src), all)                     \
    /* a product and a sum for each of M N K; the few of a bias or an epilogue aren't counted */  \
    ROW(MATMUL, matmul, "dst:float[*,M,N] a:float[*,M,K] b:float[*,K,N] bias?[N] sum? x?", VEC,   \
        2 * elements(&a->dst) * dim(&a->a, 0), all + (a->add ? bytes_of(&a->dst) : 0))            \
    ROW(SOFTMAX, softmax, "y:float[*] x:float[*]", VEC, 4 * elements(&a->x), all)                 \
    ROW(SOFTMAX_GRAD, softmax_grad, "dx:float[*] dy[*] y[*]", VEC, 4 * elements(&a->y), all)      \
    ROW(CROSS_ENTROPY, cross_entropy,                                                             \
        "loss count lse:float[N] logits:float[N,V] targets:index[N] dlogits?[N,V]", VEC,          \
        (a->dlogits.data ? 8 : 4) * elements(&a->logits), all)                                    \
    ROW(CROSS_ENTROPY_GRAD, cross_entropy_grad,                                                   \
        "dlogits[N,V] logits:float[N,V] targets:index[N] lse:float[N] count dloss", VEC,          \
        4 * elements(&a->logits), all)                                                            \
    ROW(NORM, norm,                                                                               \
        "y[*,C] x:float[*,C] w?:float[C] b?:float[C] mean? rstd add?:x[*,C] sum?:x[*,C]", VEC,    \
        (a->add.dtype ? 8 : 7) * elements(&a->x), all)                                            \
    ROW(NORM_GRAD, norm_grad,                                                                     \
        "dx?[*,C] dw?:float[C] db?:float[C] dy[*,C] x:float[*,C] w?:float[C] mean? rstd "         \
        "more?:x[*,C]", VEC,                                                                      \
        (a->more.dtype ? 13 : 12) * elements(&a->x), all)                                         \
    /* picking reads the picked elements, not all that there are */                               \
    ROW(INDEX_SELECT, index_select, "dst src:dst index:index[I]", VEC,                            \
        0, picked(&a->dst, 2, &a->index))                                                         \
    ROW(INDEX_ADD, index_add, "dst:number src:number index:index[I]", VEC,                        \
        elements(&a->src), bytes_of(&a->src) + picked(&a->src, 2, &a->index))                     \
    ROW(GATHER, gather, "dst src:dst index:index", VEC, 0, picked(&a->dst, 2, &a->index))         \
    ROW(SCATTER, scatter, "dst src index:index", VEC,                                             \
        a->join ? elements(&a->index) : 0,                                                        \
        bytes_of(&a->src) + picked(&a->src, a->join ? 2 : 1, &a->index))                          \
    /* about 16 comparisons an element */                                                         \
    ROW(SORT, sort, "values:number[*] indices:i64[*] src:values", VEC,                         \
        16 * elements(&a->src), all)                                                              \
    ROW(CUMSUM, cumsum, "y[*] x[*]", VEC, elements(&a->x), all)                                \
    ROW(DROPOUT, dropout, "y:float[*] x[*]", VEC, elements(&a->y), all)                           \
    /* two products of 2 D a pair, 5 for the softmax; backward five products */                   \
    ROW(ATTENTION, attention,                                                                     \
        "o[B,H,T,D] lse:float[B,H,T] q:float[B,H,T,D] k:float[B,G,S,D] v:float[B,G,S,D] "         \
        "mask?[B,H,T,S]", VEC,                                                                    \
        pairs(&a->q, &a->k, a->causal, a->window) * (4 * dim(&a->q, 0) + 5), all)                 \
    ROW(ATTENTION_GRAD, attention_grad,                                                           \
        "dq[B,H,T,D] dk[B,G,S,D] dv[B,G,S,D] dout[B,H,T,D] o[B,H,T,D] lse:float[B,H,T] "          \
        "q:float[B,H,T,D] k:float[B,G,S,D] v:float[B,G,S,D] mask?[B,H,T,S] dmask?:q[B,H,T,S]",    \
        VEC, pairs(&a->q, &a->k, a->causal, a->window) * (10 * dim(&a->q, 0) + 8), all)           \
    /* a product of the state with w a step; backward as many */                                  \
    ROW(RECURRENT, recurrent,                                                                     \
        "y:float[T,N,H] gates:y[T,N,G] kept?:float[T,N,H] h:y[N,H] c0?:y[N,H] cn?:y[N,H] "        \
        "w:y[G,H] bias?:float[G] lengths?:i64[N] work?:float[N,G]", VEC,                          \
        (2 * dim(&a->y, 0) + 8) * elements(&a->gates), all + dim(&a->y, 2) * bytes_of(&a->w))     \
    ROW(RECURRENT_GRAD, recurrent_grad,                                                           \
        "dgates:float[T,N,G] dq?:dgates[T,N,G] dh:float[N,H] dc?:dh[N,H] work:dgates[N,G] "       \
        "dy?:dgates[T,N,H] y:dgates[T,N,H] gates:dgates[T,N,G] kept?:dh[T,N,H] h0?:dgates[N,H] "  \
        "c0?:dgates[N,H] w:dgates[G,H] lengths?:i64[N]", VEC,                                     \
        (2 * dim(&a->y, 0) + 16) * elements(&a->gates), all + dim(&a->y, 2) * bytes_of(&a->w))    \
    /* about 60 for each of three sums of exponentials */                                         \
    ROW(CTC, ctc,                                                                                 \
        "loss:float[N] grad?:loss[T,N,C] work:f64[W] log_probs:loss[T,N,C] targets:i64[S] "       \
        "frames:i64[N] labels:i64[N]", NO_VEC,                                                    \
        60 * elements(&a->work), all)                                                             \
    ROW(ROPE, rope, "y:float[B,H,T,D] x:float[B,H,T,D]", VEC, 3 * elements(&a->x), all)           \
    ROW(RANDOM, random, "dst:float", VEC, 0, all)                                                 \
    ROW(SUM_N, sum_n, "", VEC,                                                                    \
        (double)a->count * (a->n - !a->acc),                                                      \
        (double)a->count * (a->n * size(a->src_dtype) + (a->acc ? 2 : 1) * size(a->dst_dtype)))   \
    /* p, m and v are read and written */                                                         \
    ROW(ADAMW, adamw, "", VEC, 16 * in_pieces(&a->s), piece_bytes(&a->s, 6))                      \
    ROW(SGD, sgd, "", VEC, 8 * in_pieces(&a->s), piece_bytes(&a->s, a->momentum != 0 ? 4 : 2))    \
    ROW(LION, lion, "", VEC, 11 * in_pieces(&a->s), piece_bytes(&a->s, 4))                        \
    ROW(ABSMAX, absmax, "", VEC, in_runs(a->run, a->runs), run_bytes(a->run, a->runs))            \
    ROW(SQSUM, sqsum, "", VEC, 3 * in_runs(a->run, a->runs), run_bytes(a->run, a->runs))          \
    /* a power counts as 20 */                                                                    \
    ROW(POWSUM, powsum, "", NO_VEC, 22 * in_runs(a->run, a->runs), run_bytes(a->run, a->runs))    \
    ROW(CLIP, clip, "", NO_VEC, 8, KN_SQSUM_LIMBS * 8 + 12)                                       \
    ROW(LOSS_SCALE, loss_scale, "", NO_VEC,                                                       \
        8, sizeof(kn_loss_scale_state) + sizeof(kn_step_scalars) + 8)                             \
    ROW(CONV, conv, "y:float[N,O,P,Q] x:float[N,C,H,W] w:float[O,E,R,S] bias?[O]", VEC,           \
        products(&a->y, &a->w), all)                                                              \
    ROW(CONV_GRAD_X, conv_grad_x, "dx:float[N,C,H,W] dy:float[N,O,P,Q] w:float[O,E,R,S]", VEC,    \
        products(&a->dy, &a->w), all)                                                             \
    ROW(CONV_GRAD_W, conv_grad_w, "dw:float[O,E,R,S] dy:float[N,O,P,Q] x:float[N,C,H,W]", VEC,    \
        products(&a->dy, &a->dw), all)                                                            \
    ROW(BATCH_NORM, batch_norm,                                                                   \
        "y?[N,C,*] x:float[N,C,*] w?:float[C] b?:float[C] mean:float[C] rstd:float[C] "           \
        "running_mean?:float[C] running_var?:float[C] add?[N,C,*]", VEC,                          \
        (a->training ? 8 : 4) * elements(&a->x), all)                                             \
    ROW(BATCH_NORM_GRAD, batch_norm_grad,                                                         \
        "dx?[N,C,*] dw?:float[C] db?:float[C] dadd?[N,C,*] dy[N,C,*] x:float[N,C,*] y?[N,C,*] "   \
        "w?:float[C] b?:float[C] mean:float[C] rstd:float[C] mean_dw?:float[C] mean_db?:float[C]",\
        VEC, 12 * elements(&a->x), all)                                                           \
    ROW(BATCH_NORM_JOIN, batch_norm_join,                                                         \
        "a:float[C] b:float[C] count? from_a:float[n,C] from_b:float[n,C] from_count? "           \
        "running_mean?:float[C] running_var?:float[C]", NO_VEC,                                   \
        8 * elements(&a->from_a), all)                                                            \
    ROW(POOL, pool, "y:float[N,C,P,Q] index?:i32[N,C,P,Q] x:float[N,C,H,W]", VEC,                 \
        elements(&a->y) * window_size(&a->window, &a->x, &a->y), all)                             \
    ROW(POOL_GRAD, pool_grad, "dx:float[N,C,H,W] dy:float[N,C,P,Q] index?:i32[N,C,P,Q]", VEC,     \
        elements(&a->dy) * window_size(&a->window, &a->dx, &a->dy), all)                          \
    ROW(INTERPOLATE, interpolate, "y:float[N,C,P,Q] x:float[N,C,H,W]", VEC,                       \
        a->linear ? 8 * elements(&a->y) : 0, all)                                                 \
    ROW(INTERPOLATE_GRAD, interpolate_grad, "dx:float[N,C,H,W] dy:float[N,C,P,Q]", VEC,           \
        (a->linear ? 8 : 1) * elements(&a->dy), all)                                              \
    ROW(ROUND, round, "dst[R,n] src:float[R,n]", NO_VEC, elements(&a->dst), all)
/* clang-format on */

#define KN_KERNEL_ENTRY(entry, ...) KN_K_##entry,
typedef enum kn_kernel { KN_KERNELS(KN_KERNEL_ENTRY) KN_K_COUNT } kn_kernel;
#undef KN_KERNEL_ENTRY

KN_API const char *kn_kernel_name(kn_kernel k);

/* ---- elementwise --------------------------------------------------------------------------- */

/* dst = src, same shape, converting between any two arithmetic dtypes (floats round to nearest
 * even; float to integer truncates toward zero and saturates; to bool: != 0). Storage-only dtypes
 * copy to the same dtype only. Any strides on both sides. */
typedef struct kn_copy_args {
    kn_array dst, src;
} kn_copy_args;

/* dst[i] = value + i * step, i the row-major index; value itself, also -0, where step is 0. Any
 * dtype with arithmetic. */
typedef struct kn_fill_args {
    kn_array dst;
    double value, step;
} kn_fill_args;

/* dst = f(src), same shape and dtype, one of those in the kind's row (kernels/kinds.h); in
 * place. */
typedef struct kn_unary_args {
    kn_array dst, src;
    kn_unary kind;
    double p0, p1;
} kn_unary_args;

/* dx = dy * f'(x); x is f's input, y its output (each may be unset, data NULL, where the
 * derivative doesn't read it: kn_unary_row). In place on dy. Float kinds only. */
typedef struct kn_unary_grad_args {
    kn_array dx, dy, x, y;
    kn_unary kind;
    double p0, p1;
} kn_unary_grad_args;

/* The array that the derivative reads, x or y; dy, which is there anyway, if it reads neither. */
KN_API const kn_array *kn_unary_grad_input(const kn_unary_grad_args *a);

/* dst = a op b; a and b already expanded to dst's shape (stride 0); in place on a or b. The dtypes
 * are those in the kind's row (kernels/kinds.h); DIV of integers truncates, and division by zero
 * gives 0 there. */
typedef struct kn_binary_args {
    kn_array dst, a, b;
    kn_binary kind;
    double p0; /* of ADD_SCALED and LERP */
} kn_binary_args;

/* dst = cond ? a : b; cond bool; all expanded to dst's shape. Any dtype. */
typedef struct kn_where_args {
    kn_array dst, cond, a, b;
} kn_where_args;

/* ---- reductions ---------------------------------------------------------------------------- */

typedef enum kn_reduce_kind {
    KN_SUM = 0,
    KN_MEAN,
    KN_MAX,
    KN_MIN,
    KN_ARGMAX,
    KN_REDUCE_COUNT
} kn_reduce_kind;

/* dst has src's ndim, with shape 1 in every reduced dim. SUM and MEAN add in f32 pairwise or in
 * f64 (f64 stays f64; i32, i64, bool sum to an i64 dst). SUM's dst may be f32 for bf16/f16 src.
 * MAX and MIN propagate NaN; over nothing they are -inf/+inf. ARGMAX: exactly one reduced dim,
 * dst i64, the first of equals. */
typedef struct kn_reduce_args {
    kn_array dst, src;
    kn_reduce_kind kind;
} kn_reduce_args;

/* ---- matrix products ------------------------------------------------------------------------ */

/* dst[..., M, N] = a[..., M, K] @ b[..., K, N] (+ bias[N]); leading dims equal (stride 0 where
 * broadcast), at least 2 dims. Transposes are strides. dst may be f32 while a and b are bf16/f16
 * (gradients in the reduce dtype). K == 0 gives bias or 0. bias.data NULL: none; bias has a's
 * dtype or f32. add: the product is added to dst, in f32 (f64 for f64), and rounded once.
 *
 * An epilogue, what backward computes right after a product of 2-d arrays, is one of these:
 *   sum  [M] = sum over K of a, or (sum_of_b) [N] = of b: the gradient of a bias beside that of its
 *        weight; SUM's dtypes
 *   x    dst = product * f'(x), f of kind grad_of, whose derivative reads x alone (KN_READS_X) and
 *        which has no parameters: the gradient goes on through y = f(x); dst's shape and dtype, no
 *        bias, not with add
 * A provider that computes it along with the product sets kn_provider.epilogues; where none takes
 * it, the product runs without it, then KN_K_UNARY_GRAD (in place) or KN_K_REDUCE. */
typedef struct kn_matmul_args {
    kn_array dst, a, b, bias, sum, x; /* sum, x: data NULL: none */
    bool add, sum_of_b;
    kn_unary grad_of;
} kn_matmul_args;

/* Whether there is an epilogue. */
static inline bool kn_matmul_has_epilogue(const kn_matmul_args *p)
{
    return p->sum.data || p->x.data;
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* y = softmax(x) or log_softmax(x) over the last dim. In place. */
typedef struct kn_softmax_args {
    kn_array y, x;
    bool log;
} kn_softmax_args;

/* dx from dy and y: y * (dy - sum(dy * y)), or for log: dy - exp(y) * sum(dy). In place on dy. */
typedef struct kn_softmax_grad_args {
    kn_array dx, dy, y;
    bool log;
} kn_softmax_grad_args;

/* Cross-entropy of logits[N, V] against targets[N] (i64 or i32), never storing probabilities:
 *   lse[n] = log sum_v exp(logits[n,v])                      (f32, or f64 for f64 logits)
 *   loss   = sum_n w_n ((1-s) (lse - logit[target]) + s (lse - mean_v logit)) / sum_n w_n
 * w_n = 0 where target == ignore_index, else 1; s = smoothing. loss is a scalar array of lse's
 * dtype, count an f32/f64 scalar with sum w_n; loss is 0 where count is 0. Targets outside
 * [0, V) other than ignore_index are an error that names row and value.
 * part: these are the rows from first_row on of more. loss is the sum, not divided; dlogits (data
 * NULL: not wanted; in place on logits) its gradient, w_n (softmax - (1-s) onehot - s / V). */
typedef struct kn_cross_entropy_args {
    kn_array loss, count, lse, logits, targets, dlogits;
    int64_t ignore_index;
    double smoothing;
    bool part;
    int64_t first_row;
} kn_cross_entropy_args;

/* dlogits = dloss / count * w_n * (softmax - (1-s) onehot - s / V). In place on logits. */
typedef struct kn_cross_entropy_grad_args {
    kn_array dlogits, logits, targets, lse, count, dloss;
    int64_t ignore_index;
    double smoothing;
} kn_cross_entropy_grad_args;

/* layer_norm: y = (x - mean) * rstd * w + b over the last dim C; rms: y = x * rstd * w with
 * rstd = 1/sqrt(mean(x^2) + eps). w, b: [C], x's dtype or f32; data NULL: absent. mean, rstd:
 * [rows], f32 (f64 for f64 x), row-major over the leading dims; mean unused for rms.
 * add and sum, both or neither (data NULL), of x's shape and dtype: sum = x + add, rounded, and y,
 * mean and rstd are those of sum, with the bits that they have as a call of their own on it. sum
 * may be x or add. */
typedef struct kn_norm_args {
    kn_array y, x, w, b, mean, rstd, add, sum;
    double eps;
    bool rms;
} kn_norm_args;

/* dx (data NULL: not wanted), dw, db (likewise; x's dtype or f32, overwritten). Row sums for dw
 * and db are added in an order that depends only on the shape. more (data NULL: none), of x's shape
 * and dtype, is added to dx before it is rounded: another gradient of x. dx may be more. */
typedef struct kn_norm_grad_args {
    kn_array dx, dw, db, dy, x, w, mean, rstd, more;
    bool rms;
} kn_norm_grad_args;

/* ---- random --------------------------------------------------------------------------------- */

/* Philox4x32-10 (kernels/philox.h): element i of the draw (seed, stream) is a function of
 * (seed, stream, start + i) alone, i the row-major index. */
typedef enum kn_random { KN_UNIFORM = 0, KN_NORMAL, KN_RANDOM_COUNT } kn_random;

/* UNIFORM in [p0, p1); NORMAL with mean p0 and standard deviation p1. Float dtypes. If seed_at is
 * given, the kernel reads the seed from there, in device memory, when it runs: so a recorded step
 * can be replayed with other seeds. */
typedef struct kn_random_args {
    kn_array dst; /* contiguous */
    kn_random kind;
    uint64_t seed, stream;
    int64_t start;
    double p0, p1;
    const uint64_t *seed_at;
} kn_random_args;

/* y = keep(i) ? x / (1-p) : 0, keep(i) = uniform(seed, stream, i) >= p. The backward is the same
 * call on dy. In place. seed_at as in kn_random_args. */
typedef struct kn_dropout_args {
    kn_array y, x;
    double p;
    uint64_t seed, stream;
    const uint64_t *seed_at;
} kn_dropout_args;

/* dst = src rounded to bf16 or f16 at random: to the upper of the two neighbours of x with
 * probability (x - lower) / (upper - lower); infinity and NaN stay. Both are [rows, n], contiguous;
 * element j of row i takes its word from (seed, stream, start + i step + j), as above; where
 * seed_at isn't NULL, seed is kn_step_key(*seed_at, *step_at) instead. src: any float. */
typedef struct kn_round_args {
    kn_array dst, src;
    uint64_t seed, stream;
    int64_t start, step;
    const uint64_t *seed_at; /* this and step_at lie in device memory */
    const double *step_at;
} kn_round_args;

/* ---- attention ------------------------------------------------------------------------------ */

/* o[B,H,T,D] = softmax(scale * q k^T + mask) v with q[B,H,T,D], k[B,G,S,D], v[B,G,S,D], G divides H
 * (grouped heads: head h uses group h / (H/G)); any strides with stride 1 in the last dim. causal:
 * query t sees keys s <= t + (S - T), and with a window > 0 (causal only) the last `window` of
 * them. mask [B,H,T,S] of any strides, data NULL: none; bool: a key is seen where it is true; of
 * q's dtype: added, where -infinity hides a key. lse[B,H,T] = log of the row sums (f32, f64 for
 * f64), contiguous. Memory is linear in T. dropout_p > 0 drops probabilities, element index ((b*H +
 * h)*T + t)*S + s, and scales by 1/(1-p); seed_at as in kn_random_args. A row that sees no key
 * gives o = 0 and lse = -infinity. cuDNN drops by a generator of its own (cudnn_attention.c). */
typedef struct kn_attention_args {
    kn_array o, lse, q, k, v, mask;
    double scale;
    bool causal;
    double dropout_p;
    uint64_t seed, stream;
    const uint64_t *seed_at;
    int64_t window;
} kn_attention_args;

/* dmask [B,H,T,S] of q's dtype and stride 1 in the last dim, data NULL: none: the gradient by
 * scores is written where a query sees a key, so the caller fills it with 0. */
typedef struct kn_attention_grad_args {
    kn_array dq, dk, dv; /* overwritten; same shapes as q, k, v */
    kn_array dout, o, lse, q, k, v, mask, dmask;
    double scale;
    bool causal;
    double dropout_p;
    uint64_t seed, stream;
    const uint64_t *seed_at;
    int64_t window;
} kn_attention_grad_args;

/* ---- providers and launching ----------------------------------------------------------------- */

typedef enum kn_status { KN_DONE = 0, KN_DECLINED, KN_FAILED } kn_status;

/* args points at the entry's struct. */
typedef kn_status (*kn_kernel_fn)(const void *args);

/* One provider of a device. Empty entries decline. */
typedef struct kn_provider {
    const char *name;
    kn_kernel_fn run[KN_K_COUNT];
    bool epilogues; /* its matmul is called for products with an epilogue, too */
} kn_provider;

#define KN_MAX_PROVIDERS 6

/* The providers of a device, first tried first; the last is the reference and takes every case.
 * Read-only after start. */
KN_API int kn_providers(kn_device d, const kn_provider *providers[KN_MAX_PROVIDERS]);
/* Test and bench hook: only providers whose name is in this comma-separated list ("reference",
 * "avx2", "onednn,reference") run from now on; NULL for all. Also KNAP_PROVIDERS in the
 * environment. */
KN_API void kn_providers_only(const char *names);
/* "avx512", "avx2" or "base": the vector overlay chosen on this machine. */
KN_API const char *kn_cpu_isa(void);
/* "oneDNN 2.6.3", or "none". */
KN_API const char *kn_cpu_libraries(void);
/* How the CPU's f32 products are given to oneDNN or Knap's own kernels, where it was timed: "12
 * timed before: FILE", or "timed when first met, 12 so far: FILE" (KNAP_TUNE=1). It says too where
 * the file is damaged or can't be written. NULL where nothing was timed (Knap's compute then), and
 * without oneDNN. Valid until the thread's next call. */
KN_API const char *kn_cpu_choices(void);

/* Runs kernel k with a copy of args on s (NULL: error). size must be sizeof the entry's struct.
 * Returns false if it failed or an error stands. */
KN_API bool kn_launch(kn_stream *s, kn_kernel k, const void *args, size_t size);
#define KN_LAUNCH(stream, kernel, ...)                                                             \
    kn_launch((stream), (kernel), &(__VA_ARGS__), sizeof(__VA_ARGS__))

/* dst = src in dst's dtype, dst = value: of n elements that lie one after the other. */
bool kn_copy_run(kn_stream *s, void *dst, kn_dtype to, const void *src, kn_dtype from, int64_t n);
bool kn_fill_run(kn_stream *s, void *dst, kn_dtype t, int64_t n, double value);

/* The cost of a call: floating point operations and bytes that must move. */
typedef struct kn_cost {
    double flops, bytes;
} kn_cost;
KN_API kn_cost kn_kernel_cost(kn_kernel k, const void *args);
/* Something of that cost, which is no kernel, is computed on a stream of meta. */
void kn_meta_compute(kn_stream *s, const char *what, kn_cost cost);

#ifdef __cplusplus
}
#endif
#endif
