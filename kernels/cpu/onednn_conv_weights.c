/* kernels/cpu/onednn_conv_weights.c: gradients of a convolution's weights without sums of pieces.
 *
 * A piece of some samples makes a gradient of all weights, so small images with many channels would
 * spend their time on adding those up. Here a piece is some output channels of all samples: it
 * writes its own weights. Where the kernel is 1 x 1 and images are channels-last, the gradient is
 * a matrix product of bf16 or f16. */
#include "kernels/cpu/onednn_conv.h"

enum {
    ENOUGH_POSITIONS = 784, /* of y in a piece: its products cost more than adding weights up */
    CHANNELS = 64,          /* of a piece, and multiples of it */
    PIECES = 8,
    ENOUGH_PIECES = 4,
    ENOUGH_TILES = 8, /* of a product */
};

/* ---- pieces of output channels --------------------------------------------------------------- */

typedef struct slices {
    kn_conv_key key;
    char *const *at;
    kn_conv_cut cut; /* into channels */
} slices;

static int64_t positions(const kn_conv_key *k)
{
    return k->y[0] * k->y[2] * k->y[3];
}

/* By the shapes alone: pieces of samples would be too few, or too small. */
static bool worth_slicing(const kn_conv_key *k)
{
    const int64_t plane = k->y[2] * k->y[3];
    const int64_t samples = (ENOUGH_POSITIONS + plane - 1) / plane;
    return k->groups == 1 && samples > 1 && k->y[0] / samples < ENOUGH_PIECES &&
           k->w[0] >= 2 * CHANNELS;
}

/* Both images and the weights in the primitive's order, y's channels, its own scratch. */
static size_t slice_bytes(const slices *s, const kn_conv_piece *v)
{
    const int64_t y = positions(&s->key) * s->cut.each * (int64_t)kn_dtype_size((kn_dtype)s->key.t);
    size_t bytes = KN_ALIGNED((size_t)y) + KN_ALIGNED(v->scratch);
    for (int p = 0; p < PARTS; p++)
        bytes += KN_ALIGNED(v->part[p].bytes);
    return bytes;
}

/* Channels [first, first + n) of y, dense. */
static void take_channels(const slices *s, char *to, int64_t first, int64_t n)
{
    const kn_conv_key *k = &s->key;
    const int64_t size = (int64_t)kn_dtype_size((kn_dtype)k->t), plane = k->y[2] * k->y[3];
    const int64_t runs = k->y_last ? positions(k) : k->y[0], unit = k->y_last ? 1 : plane;
    const char *from = s->at[Y] + first * unit * size;
    const size_t run = (size_t)(n * unit * size), step = (size_t)(k->y[1] * unit * size);
    for (int64_t i = 0; i < runs; i++)
        memcpy(to + (size_t)i * run, from + (size_t)i * step, run);
}

static bool run_slice(const void *ctx, int64_t i, dnnl_stream_t stream, void *room)
{
    const slices *s = ctx;
    char *scratch = room;
    const kn_conv_piece *v = i == s->cut.pieces - 1 ? s->cut.rest : s->cut.piece;
    const int64_t channels = v->key.w[0], first = i * s->cut.each;
    char *weights = s->at[W] + first * kn_conv_product(s->key.w + 1, 3) * (int64_t)sizeof(float);
    char *plain[PARTS] = { [X] = s->at[X], [W] = weights, [Y] = scratch };
    void *inner[PARTS];
    take_channels(s, scratch, first, channels);
    scratch +=
        KN_ALIGNED((size_t)(positions(&s->key) * s->cut.each) * kn_dtype_size((kn_dtype)s->key.t));
    for (int p = 0; p < PARTS; p++) {
        inner[p] = v->part[p].reorder ? scratch : plain[p];
        scratch += KN_ALIGNED(v->part[p].bytes);
        if (p != W && v->part[p].reorder &&
            !kn_conv_reorder(&v->part[p], false, stream, plain[p], inner[p]))
            return false;
    }
    return kn_conv_compute(v, stream, inner, NULL, scratch) &&
           (!v->part[W].reorder || kn_conv_reorder(&v->part[W], true, stream, plain[W], inner[W]));
}

kn_status kn_conv_weights_by_channels(const kn_conv_key *k, char *const at[PARTS])
{
    if (!worth_slicing(k))
        return KN_DECLINED;
    slices s = { .key = *k, .at = at };
    s.cut.each = (k->w[0] / PIECES + CHANNELS - 1) / CHANNELS * CHANNELS;
    s.cut.each = s.cut.each < CHANNELS ? CHANNELS : s.cut.each;
    kn_status status = kn_conv_cut_make(&s.cut, k, true);
    if (status == KN_DONE) {
        const size_t one = slice_bytes(&s, s.cut.piece), last = slice_bytes(&s, s.cut.rest);
        if (!kn_conv_cut_run(&s.cut, k, run_slice, &s, one > last ? one : last))
            status = KN_FAILED;
    }
    kn_conv_cut_end(&s.cut);
    return status;
}

/* ---- 1 x 1: dw[O,C] = dy^T x ----------------------------------------------------------------- */

/* The batch of x's positions that y has, one after another; takes them out where there is a
 * stride. */
static char *positions_of_x(const kn_conv_key *k, char *x, size_t *bytes)
{
    *bytes = 0;
    if (k->stride[0] == 1 && k->stride[1] == 1)
        return x;
    const int64_t C = k->x[1], row = k->x[3] * C, size = (int64_t)kn_dtype_size((kn_dtype)k->t);
    *bytes = (size_t)(positions(k) * C * size);
    char *room = kn_take(kn_device_memory(KN_CPU), *bytes, KN_MEM_WORKSPACE);
    if (!room)
        return NULL;
    kn_array from =
        kn_array_make(x, (kn_dtype)k->t, 4, (int64_t[]){ k->y[0], k->y[2], k->y[3], C });
    const int64_t steps[4] = { k->x[2] * row, k->stride[0] * row, k->stride[1] * C, 1 };
    memcpy(from.stride, steps, sizeof steps);
    const kn_array to = kn_array_make(room, (kn_dtype)k->t, 4, from.shape);
    if (kn_conv_copy(&to, &from))
        return room;
    kn_give(kn_device_memory(KN_CPU), room, *bytes, KN_MEM_WORKSPACE);
    return NULL;
}

/* The largest divisor of N that is at most `most`. */
static int64_t divisor(int64_t N, int64_t most)
{
    int64_t d = N < most ? N : most;
    while (d > 1 && N % d != 0)
        d--;
    return d < 1 ? 1 : d;
}

/* dw, or one for each of `parts` groups of samples. */
static kn_status products(const kn_conv_key *k, char *x, char *dy, void *dw, int64_t parts)
{
    const int64_t O = k->w[0], C = k->w[1], K = positions(k) / parts;
    kn_array a = kn_array_make(dy, (kn_dtype)k->t, 3, (int64_t[]){ parts, O, K });
    a.stride[1] = 1, a.stride[2] = O;
    const kn_array b = kn_array_make(x, (kn_dtype)k->t, 3, (int64_t[]){ parts, K, C });
    const kn_array c = kn_array_make(dw, KN_F32, 3, (int64_t[]){ parts, O, C });
    return kn_onednn_matmul(&(kn_matmul_args){ .dst = c, .a = a, .b = b });
}

kn_status kn_conv_weights_product(const kn_conv_key *k, char *const at[PARTS])
{
    if (k->groups != 1 || k->w[2] != 1 || k->w[3] != 1 || k->pad[0] != 0 || k->pad[1] != 0 ||
        !k->x_last || !k->y_last || k->t == KN_F32)
        return KN_DECLINED;
    const int64_t O = k->w[0], C = k->w[1], tiles = (O + 127) / 128 * ((C + 255) / 256);
    const int64_t parts = tiles >= ENOUGH_TILES ? 1 : divisor(k->y[0], 2 * ENOUGH_TILES / tiles);
    const size_t sums = parts > 1 ? (size_t)(parts * O * C) * sizeof(float) : 0;
    size_t bytes;
    char *x = positions_of_x(k, at[X], &bytes);
    char *dw = x && sums ? kn_take(kn_device_memory(KN_CPU), sums, KN_MEM_WORKSPACE) : at[W];
    kn_status status = x && dw ? products(k, x, at[Y], dw, parts) : KN_FAILED;
    if (status == KN_DONE && sums) {
        kn_add_pieces((float *)(void *)dw, O * C, parts);
        memcpy(at[W], dw, (size_t)(O * C) * sizeof(float));
    }
    if (sums && x && dw)
        kn_give(kn_device_memory(KN_CPU), dw, sums, KN_MEM_WORKSPACE);
    if (bytes && x)
        kn_give(kn_device_memory(KN_CPU), x, bytes, KN_MEM_WORKSPACE);
    return status;
}
