/* autograd/sequences.h: operations of sequences in time: recurrent layers, CTC. They keep to the
 * rules of autograd/functional.h. */
#ifndef KNAP_AUTOGRAD_SEQUENCES_H
#define KNAP_AUTOGRAD_SEQUENCES_H

#include "autograd/functional.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_recurrent_options {
    KN_BEGIN_OPTIONS;
    kn_cell cell;           /* LSTM; kn_lstm, kn_gru and kn_rnn are layers of these */
    bool reverse;           /* from the last step to the first */
    kn_tensor *b_ih, *b_hh; /* biases [G], or NULL */
    kn_tensor *h0, *c0;     /* first states [N,H], c0 of LSTM; NULL: zeros */
    kn_tensor *lengths;     /* steps of each row, i64[N] in [1,T]; NULL: T */
    kn_tensor **last;       /* not NULL: the last states go there: h [N,H], and c of LSTM */
} kn_recurrent_options;
/* One direction of a recurrent layer over x[T,N,in]: the states y[T,N,H] of h = cell(p, q, h, c),
 * p = w_ih x[t] + b_ih and q = w_hh h + b_hh, where w_ih [G,in] and w_hh [G,H] have the rows of the
 * cell's gates one after the other: LSTM, G = 4 H: i, f, o = sigmoid(p + q), g = tanh(p + q), c = f
 * c + i g, h = o tanh(c), rows in the order i, f, g, o; GRU, 3 H: r, z = sigmoid(p + q), n = tanh(p
 * + r q), h = (1 - z) n + z h; TANH, RELU: h = tanh(p + q), max(p + q, 0). Row n ends after
 * lengths[n] steps, where reverse begins; y is 0 behind them. One dtype. */
KN_API kn_tensor *kn_recurrent_(kn_tensor *x, kn_tensor *w_ih, kn_tensor *w_hh,
                                kn_recurrent_options o);
#define kn_recurrent(x, w_ih, w_hh, ...)                                                           \
    kn_recurrent_(x, w_ih, w_hh, KN_OPTIONS(kn_recurrent_options, __VA_ARGS__))

typedef struct kn_ctc_loss_options {
    KN_BEGIN_OPTIONS;
    int64_t blank;               /* the class that is no label */
    kn_loss_reduction reduction; /* NONE: a value a row */
    bool zero_infinity;          /* infinite losses, of rows too short for their targets, are 0 */
} kn_ctc_loss_options;
/* -log of the probability that frames t < input_lengths[n] of log_probs[T,N,C], which a
 * kn_log_softmax made, spell out row n's target: the sum over all ways to give each frame a label
 * or blank such that the target is left once repetitions and then blanks are taken out (Graves et
 * al., 2006). targets (i64 or i32) are [N,S], whose first target_lengths[n] count, or all rows' one
 * after the other. Lengths are i64[N] on log_probs' device. The mean is of each row's loss divided
 * by its number of labels. As in torch, the gradient is that by log_softmax's input, which its
 * backward leaves as it is. f64 inside. Labels and lengths out of range are errors. */
KN_API kn_tensor *kn_ctc_loss_(kn_tensor *log_probs, kn_tensor *targets, kn_tensor *input_lengths,
                               kn_tensor *target_lengths, kn_ctc_loss_options o);
#define kn_ctc_loss(log_probs, targets, input_lengths, target_lengths, ...)                        \
    kn_ctc_loss_(log_probs, targets, input_lengths, target_lengths,                                \
                 KN_OPTIONS(kn_ctc_loss_options, __VA_ARGS__))

#ifdef __cplusplus
}
#endif
#endif
