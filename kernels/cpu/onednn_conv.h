/* kernels/cpu/onednn_conv.h (private): a piece of a convolution, some samples of a call, as
 * primitives of oneDNN. */
#ifndef KNAP_KERNELS_CPU_ONEDNN_CONV_H
#define KNAP_KERNELS_CPU_ONEDNN_CONV_H

#include "kernels/cpu/onednn.h"
#include "kernels/cpu/pieces.h"

enum { X = 0, W, Y, PARTS };

/* A piece. Compared as bytes. */
typedef struct kn_conv_key {
    int64_t kind, t, bias, groups;
    int64_t x[4], w[4], y[4];
    int64_t x_last, w_last, y_last; /* channels-last */
    int64_t stride[2], pad[2], pad_after[2], dilation[2];
} kn_conv_key;

/* One of the three arrays: in its own order, and in the primitive's. */
typedef struct kn_conv_part {
    dnnl_memory_desc_t plain, inner;
    dnnl_primitive_t reorder; /* NULL: they are the same */
    size_t bytes;             /* of inner if it differs */
} kn_conv_part;

typedef struct kn_conv_piece {
    kn_onednn_item item;
    kn_conv_key key;
    dnnl_primitive_t primitive; /* NULL: oneDNN has no kernel for it worth calling */
    kn_conv_part part[PARTS];
    dnnl_memory_desc_t bias, scratch_desc;
    size_t scratch;
} kn_conv_piece;

/* Which of the three arrays a kn_onednn_conv_kind writes. */
int kn_conv_result(int64_t kind);
/* A call as pieces of `each` samples, or of `each` output channels; the last may have fewer. */
typedef struct kn_conv_cut {
    int64_t each, pieces;
    kn_conv_piece *piece, *rest; /* rest: the last */
} kn_conv_cut;

/* Finds the primitives of a call's pieces; KN_DECLINED: oneDNN has none. End it in any case. */
kn_status kn_conv_cut_make(kn_conv_cut *c, const kn_conv_key *k, bool channels);
void kn_conv_cut_end(kn_conv_cut *c);
/* fn for each piece, on threads with `bytes` of scratch each. */
bool kn_conv_cut_run(const kn_conv_cut *c, const kn_conv_key *k, kn_onednn_fn fn, const void *ctx,
                     size_t bytes);
int64_t kn_conv_product(const int64_t *s, int n);

/* Copies an array into the primitive's order; out: back. */
bool kn_conv_reorder(const kn_conv_part *p, bool out, dnnl_stream_t stream, void *plain,
                     void *inner);
/* at[i]: array i in the primitive's order. */
bool kn_conv_compute(const kn_conv_piece *v, dnnl_stream_t stream, void *const at[PARTS],
                     void *bias, void *scratch);

/* ---- gradients of weights without sums of pieces (onednn_conv_weights.c) --------------------- */

/* dw, f32, at at[W], of dense images; KN_DECLINED: not of this kind. */
kn_status kn_conv_weights_product(const kn_conv_key *k, char *const at[PARTS]);
kn_status kn_conv_weights_by_channels(const kn_conv_key *k, char *const at[PARTS]);
/* dst = src by the first provider that takes it. */
bool kn_conv_copy(const kn_array *dst, const kn_array *src);

#endif
