/* kernels/sequence_args.h: arguments of the kernels of sequences in time: rotary embedding,
 * recurrent layers, CTC (kernels.h has the rules of all entries). */
#ifndef KNAP_KERNELS_SEQUENCE_ARGS_H
#define KNAP_KERNELS_SEQUENCE_ARGS_H

#include "kernels/types.h"

/* Rotary embedding on x[B,H,T,D], D even, position = start + t: pairs (i, i + D/2) rotate by
 * position * kn_rope_speed(base, scaling, i, D/2) (kernels/rope.h; the "half" convention of
 * GPT-NeoX and Llama checkpoints). scaling has no zeros but a factor of 0. inverse rotates back
 * (the backward). In place. */
typedef struct kn_rope_args {
    kn_array y, x;
    double base;
    int64_t start;
    bool inverse;
    kn_rope_scaling scaling;
} kn_rope_args;

/* Gates of a cell: i, f, g, o of LSTM; r, z, n of GRU; of the others h itself. */
static inline int64_t kn_cell_gates(kn_cell c)
{
    return c == KN_CELL_LSTM ? 4 : c == KN_CELL_GRU ? 3 : 1;
}

/* A provider's product, for the steps that another one computes; NULL: that one's own. False with
 * an error. */
struct kn_matmul_args;
typedef bool kn_product_fn(const struct kn_matmul_args *p);

/* One direction of a recurrent layer over T steps of N rows, G = H gates of the cell. Row n has
 * lengths[n] steps, in [1, T] (data NULL: T); its step s is at time t = s, or lengths[n] - 1 - s if
 * reverse. At each step, with the sums of inputs p in gates[t] (biases included),
 *   q = w h + bias,  h = cell(p, q, h, c)  (kernels/cells.h),  y[t] = h
 * and gates[t] becomes the values of the gates. h [N,H] holds the initial state and then the last
 * one. LSTM: kept[t] = c, from c0 (data NULL: zeros) on, whose last is cn; GRU: kept[t] = q of its
 * gate n. Elsewhere kept, c0, cn aren't there. Times past a row's end have y = kept = 0. All arrays
 * are contiguous; h is rounded to T at each step, c isn't. work: scratch of
 * kept's dtype. */
typedef struct kn_recurrent_args {
    kn_array y, gates, kept, h, c0, cn, w, bias, lengths, work;
    kn_cell cell;
    bool reverse;
    kn_product_fn *product;
} kn_recurrent_args;

/* The gradients: dgates of p, dq of q (GRU; elsewhere they are one, and dq isn't there), 0 past a
 * row's end. dh and dc (LSTM) [N,H] hold the gradients of the last h and c, then of the first ones.
 * dy (data NULL: zeros) is y's. work [N,G] becomes the gradients of q at each row's first step. */
typedef struct kn_recurrent_grad_args {
    kn_array dgates, dq, dh, dc, work, dy, y, gates, kept, h0, c0, w, lengths;
    kn_cell cell;
    bool reverse;
    kn_product_fn *product;
} kn_recurrent_grad_args;

/* The time of a row's step s; its length. */
#ifdef __CUDACC__
#define KN_ON_BOTH __host__ __device__
#else
#define KN_ON_BOTH
#endif
static inline KN_ON_BOTH int64_t kn_step_time(int64_t s, int64_t length, bool reverse)
{
    return reverse ? length - 1 - s : s;
}
static inline KN_ON_BOTH int64_t kn_row_length(const int64_t *lengths, int64_t n, int64_t steps)
{
    return lengths ? lengths[n] : steps;
}

/* The loss of connectionist temporal classification of each of N sequences of frames (Graves et
 * al., 2006): loss[n] = -log of the sum over all paths of labels and blanks, of one label a frame,
 * that become the target once repeated labels and then blanks are taken out, of exp of the sum of
 * the path's log_probs[t,n,label], t < frames[n]. Row n's target is labels[n] elements of targets
 * from n * width on, or, if width is -1, from the sum of the labels before n on. Targets in [0, C),
 * frames in [0, T], else an error. infinity is 0 if zero_infinity.
 * grad (data NULL: not wanted): as PyTorch has it, for log_probs that a log_softmax made:
 *   exp(log_probs[t,n,c]) - (the part of the paths that have label c at t), 0 for t >= frames[n],
 * NaN of a row whose loss is infinite, or 0 if zero_infinity. work: f64, (T + 1) (2 targets + N)
 * elements of scratch. All arrays are contiguous and computed in f64. */
typedef struct kn_ctc_args {
    kn_array loss, grad, work, log_probs, targets, frames, labels;
    int64_t blank, width;
    bool zero_infinity;
} kn_ctc_args;

#endif
