/* kernels/cpu/onednn_conv.c: convolutions through oneDNN.
 *
 * A call is cut into pieces of some samples each, by its shapes alone, and a piece is run by one
 * thread. oneDNN chooses its own order of memory for row-major images (blocks of channels), so
 * pieces are reordered into it and back; channels-last images are taken as they lie. Their weights
 * are copied to channels-last, which oneDNN reorders into its own order several times as fast as
 * rows. Gradients of weights are sums of pieces, added in order. dtypes that this CPU has no
 * instructions for, and arrays with gaps, are copied to f32 and back: computed in f32, rounded
 * once. */
#include "kernels/cpu/onednn_conv.h"

enum { PIECES = 16, PIECE_ELEMENTS = 1 << 18, PARTIAL_BYTES = 64 << 20 };

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* ---- a call as pieces ------------------------------------------------------------------------ */

typedef struct call {
    kn_conv_key key; /* of all samples */
    char *at[PARTS]; /* dense arrays */
    void *bias;
    kn_conv_cut cut;      /* into samples */
    char *weights;        /* in the primitive's order; or a gradient for each piece */
    size_t weights_bytes; /* of one */
} call;

/* Small enough for a core's cache, and enough of them to share; fewer if each has weights. */
static int64_t samples_of(const kn_conv_key *k)
{
    const int64_t N = k->x[0], sample = kn_conv_product(k->x + 1, 3) + kn_conv_product(k->y + 1, 3);
    if (k->kind == KN_CONV_WEIGHTS) {
        const int64_t room = PARTIAL_BYTES / 4 / kn_conv_product(k->w, 4);
        const int64_t most = room < 2 ? 2 : MIN(room, PIECES);
        return (N + most - 1) / most;
    }
    const int64_t fit = PIECE_ELEMENTS / sample, each = MIN(fit, (N + PIECES - 1) / PIECES);
    return each < 1 ? 1 : each;
}

/* Scratch of a thread: both images in the primitive's order, and its own scratch. */
static size_t scratch_bytes(const kn_conv_piece *v)
{
    return KN_ALIGNED(v->part[X].bytes) + KN_ALIGNED(v->part[Y].bytes) + KN_ALIGNED(v->scratch);
}

static bool run_piece(const void *ctx, int64_t i, dnnl_stream_t stream, void *room)
{
    const call *c = ctx;
    char *scratch = room;
    const kn_conv_key *k = &c->key;
    const kn_conv_piece *v = i == c->cut.pieces - 1 ? c->cut.rest : c->cut.piece;
    const int64_t first = i * c->cut.each, size = (int64_t)kn_dtype_size((kn_dtype)k->t);
    char *plain[PARTS] = { [X] = c->at[X] + first * kn_conv_product(k->x + 1, 3) * size,
                           [Y] = c->at[Y] + first * kn_conv_product(k->y + 1, 3) * size };
    void *inner[PARTS];
    const int result = kn_conv_result(k->kind);
    for (int p = 0; p < PARTS; p += Y) { /* X and Y */
        inner[p] = v->part[p].reorder ? scratch : plain[p];
        scratch += KN_ALIGNED(v->part[p].bytes);
        if (v->part[p].reorder && p != result &&
            !kn_conv_reorder(&v->part[p], false, stream, plain[p], inner[p]))
            return false;
    }
    inner[W] = c->weights + (result == W ? (size_t)i * c->weights_bytes : 0);
    if (!kn_conv_compute(v, stream, inner, c->bias, scratch))
        return false;
    return result == W || !v->part[result].reorder ||
           kn_conv_reorder(&v->part[result], true, stream, plain[result], inner[result]);
}

/* Weights into or out of the primitive's order. */
static bool reorder_one(const void *ctx, int64_t i, dnnl_stream_t stream, void *scratch)
{
    const call *c = ctx;
    (void)i, (void)scratch;
    return kn_conv_reorder(&c->cut.piece->part[W], c->key.kind == KN_CONV_WEIGHTS, stream, c->at[W],
                           c->weights);
}

static bool reorder_weights(const call *c)
{
    return kn_onednn_each(1, 1, reorder_one, c, NULL, 0);
}

static bool run_pieces(const call *c)
{
    const bool grad = c->key.kind == KN_CONV_WEIGHTS, reorder = c->cut.piece->part[W].reorder;
    const size_t one = scratch_bytes(c->cut.piece), last = scratch_bytes(c->cut.rest);
    if ((!grad && reorder && !reorder_weights(c)) ||
        !kn_conv_cut_run(&c->cut, &c->key, run_piece, c, one > last ? one : last))
        return false;
    if (!grad)
        return true;
    kn_add_pieces((float *)(void *)c->weights, (int64_t)(c->weights_bytes / sizeof(float)),
                  c->cut.pieces);
    if (reorder)
        return reorder_weights(c);
    memcpy(c->at[W], c->weights, c->weights_bytes);
    return true;
}

/* Finds the primitives, and the place of the weights in their order. */
static kn_status run_call(call *c)
{
    c->cut.each = samples_of(&c->key);
    kn_status status = kn_conv_cut_make(&c->cut, &c->key, false);
    const kn_conv_piece *v = c->cut.piece, *rest = c->cut.rest;
    if (status == KN_DONE && v != rest &&
        !dnnl_memory_desc_equal(DESC(v->part[W].inner), DESC(rest->part[W].inner)))
        status = KN_DECLINED;
    if (status == KN_DONE) {
        const bool grad = c->key.kind == KN_CONV_WEIGHTS;
        c->weights_bytes = dnnl_memory_desc_get_size(DESC(v->part[W].inner));
        const size_t bytes = c->weights_bytes * (size_t)(grad ? c->cut.pieces : 1);
        const bool own = grad || v->part[W].reorder;
        c->weights = own ? kn_take(kn_device_memory(KN_CPU), bytes, KN_MEM_WORKSPACE) : c->at[W];
        status = c->weights && run_pieces(c) ? KN_DONE : KN_FAILED;
        if (own && c->weights)
            kn_give(kn_device_memory(KN_CPU), c->weights, bytes, KN_MEM_WORKSPACE);
    }
    kn_conv_cut_end(&c->cut);
    return status;
}

/* ---- the arrays ---------------------------------------------------------------------------- */

/* The strides of a dense image, row-major or channels-last. */
static bool has_strides(const kn_array *a, bool last)
{
    static const int orders[2][4] = { { 0, 1, 2, 3 }, { 0, 2, 3, 1 } };
    int64_t step = 1;
    for (int i = 3; i >= 0; i--) {
        const int d = orders[last][i];
        if (a->shape[d] != 1 && a->stride[d] != step)
            return false;
        step *= a->shape[d];
    }
    return true;
}

static bool is_last(const kn_array *a)
{
    return !has_strides(a, false) &&
           (has_strides(a, true) || (a->shape[1] > 1 && a->stride[1] == 1));
}

bool kn_conv_copy(const kn_array *dst, const kn_array *src)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    const kn_copy_args args = { *dst, *src };
    kn_status s = KN_DECLINED;
    for (int i = 0, n = kn_providers(KN_CPU, providers); i < n && s == KN_DECLINED; i++)
        if (providers[i]->run[KN_K_COPY])
            s = providers[i]->run[KN_K_COPY](&args);
    return s == KN_DONE;
}

/* A dense array in place of a user's one, if that isn't usable as it is. */
typedef struct stand_in {
    kn_array user, dense;
    size_t bytes; /* 0: the user's own */
} stand_in;

static bool stand_in_make(stand_in *s, const kn_array *user, kn_dtype t, bool last, bool result)
{
    *s = (stand_in){ .user = *user, .dense = *user };
    if (user->dtype == t && (user->ndim == 1 ? user->stride[0] == 1 : has_strides(user, last)))
        return true;
    s->bytes = (size_t)kn_array_numel(user) * kn_dtype_size(t);
    void *p = kn_take(kn_device_memory(KN_CPU), s->bytes, KN_MEM_WORKSPACE);
    s->dense = kn_array_make(p, t, user->ndim, user->shape);
    if (last) {
        const int64_t *n = user->shape;
        const int64_t strides[4] = { n[1] * n[2] * n[3], 1, n[3] * n[1], n[1] };
        memcpy(s->dense.stride, strides, sizeof strides);
    }
    return p && (result || kn_conv_copy(&s->dense, user));
}

static bool stand_in_end(stand_in *s, bool result, bool good)
{
    if (s->bytes == 0)
        return good;
    good = good && (!result || kn_conv_copy(&s->user, &s->dense));
    if (s->dense.data)
        kn_give(kn_device_memory(KN_CPU), s->dense.data, s->bytes, KN_MEM_WORKSPACE);
    return good;
}

static kn_status run_with(kn_conv_key k, const kn_array *array[PARTS], const kn_array *bias,
                          kn_dtype t)
{
    stand_in s[PARTS + 1] = { 0 };
    call c = { .key = k };
    const int result = kn_conv_result(k.kind);
    bool good = true;
    c.key.t = t;
    for (int i = 0; i < PARTS && good; i++) {
        const kn_dtype want = i == W && k.kind == KN_CONV_WEIGHTS ? KN_F32 : t;
        const bool last = i == X ? k.x_last : i == Y ? k.y_last : k.w_last;
        good = stand_in_make(&s[i], array[i], want, last, i == result);
        c.at[i] = s[i].dense.data;
    }
    if (good && bias->data)
        good = stand_in_make(&s[PARTS], bias, KN_F32, false, false);
    c.bias = s[PARTS].dense.data;
    kn_status status = good ? KN_DECLINED : KN_FAILED;
    if (good && k.kind == KN_CONV_WEIGHTS)
        status = kn_conv_weights_product(&c.key, c.at);
    if (status == KN_DECLINED && k.kind == KN_CONV_WEIGHTS)
        status = kn_conv_weights_by_channels(&c.key, c.at);
    if (status == KN_DECLINED)
        status = run_call(&c);
    for (int i = 0; i <= PARTS; i++)
        if (!stand_in_end(&s[i], i == result, status == KN_DONE) && status == KN_DONE)
            status = KN_FAILED;
    return status;
}

static bool dtypes_fit(const kn_array *array[PARTS], const kn_array *bias, int64_t kind)
{
    const kn_dtype t = array[kind == KN_CONV_WEIGHTS ? X : W]->dtype;
    bool fit = t == KN_F32 || t == KN_BF16 || t == KN_F16;
    for (int i = 0; i < PARTS; i++)
        fit = fit && (array[i]->dtype == t ||
                      (i == W && kind == KN_CONV_WEIGHTS && array[i]->dtype == KN_F32));
    return fit && (!bias->data || bias->dtype == t || bias->dtype == KN_F32);
}

/* Shapes that fit, with elements everywhere, and pads as oneDNN counts them. */
static bool key_make(kn_conv_key *k, const kn_array *array[PARTS], const kn_array *bias)
{
    const kn_array *x = array[X], *w = array[W], *y = array[Y];
    if (kn_array_numel(x) == 0 || kn_array_numel(w) == 0 || kn_array_numel(y) == 0)
        return false;
    memcpy(k->x, x->shape, sizeof k->x);
    memcpy(k->w, w->shape, sizeof k->w);
    memcpy(k->y, y->shape, sizeof k->y);
    k->x_last = is_last(x), k->y_last = is_last(y), k->bias = bias->data != NULL;
    k->w_last = k->x_last && k->kind == KN_CONV_FORWARD && k->groups == 1 && k->w[2] * k->w[3] > 1;
    for (int d = 0; d < 2; d++) {
        if (k->pad[d] < 0)
            return false;
        const int64_t reach = (k->w[2 + d] - 1) * k->dilation[d] + 1;
        k->pad_after[d] = (k->y[2 + d] - 1) * k->stride[d] + reach - k->x[2 + d] - k->pad[d];
        if (k->pad_after[d] <= -k->stride[d])
            return false;
    }
    return true;
}

/* Whether a weight's row or column meets x at no position: its gradient is 0. */
static bool weight_meets_nothing(const kn_conv_key *k)
{
    for (int d = 0; d < 2; d++)
        for (int64_t r = 0; r < k->w[2 + d]; r++) {
            bool meets = false;
            for (int64_t p = 0; p < k->y[2 + d] && !meets; p++) {
                const int64_t h = p * k->stride[d] - k->pad[d] + r * k->dilation[d];
                meets = h >= 0 && h < k->x[2 + d];
            }
            if (!meets)
                return true;
        }
    return false;
}

/* Whether oneDNN 2.6 gets such a call wrong in bf16, with AVX-512 or AMX. Gradients of weights come
 * of memory that nothing wrote, some of it beyond the scratch, where a weight meets nothing, where
 * y is one column and a stride leaves out others, and of channels-last images where the kernel's
 * rows lie apart and the channels fill no vector. Gradients of channels-last images by a kernel of
 * 1 x 1 are wrong where y's channels are odd in number. */
static bool is_wrong_in_bf16(const kn_conv_key *k)
{
    const bool last = k->x_last || k->y_last;
    if (k->kind == KN_CONV_DATA)
        return last && k->w[2] * k->w[3] == 1 && k->w[0] / k->groups % 2 == 1;
    return k->kind == KN_CONV_WEIGHTS &&
           (weight_meets_nothing(k) || (k->y[3] == 1 && k->stride[1] > 1) ||
            (last && k->dilation[0] > 1 && k->w[1] % 16 != 0));
}

/* Weights of 1 x 1 with a stride, of images whose channels lie together and fill no vector. oneDNN
 * 2.6 with AVX2 gathers the positions that count into scratch as if there were 8 channels, and asks
 * for scratch of as many as there are. */
static bool outgrows_scratch(const kn_conv_key *k)
{
    return k->kind == KN_CONV_WEIGHTS && k->x_last && k->w[2] == 1 && k->w[3] == 1 &&
           (k->stride[0] > 1 || k->stride[1] > 1) && k->w[1] % 8 != 0;
}

static kn_status run(kn_conv_key k, const kn_array *x, const kn_array *w, const kn_array *y,
                     const kn_array *bias)
{
    const kn_array *array[PARTS] = { x, w, y };
    if (!kn_onednn_engine() || !dtypes_fit(array, bias, k.kind) || !key_make(&k, array, bias))
        return KN_DECLINED;
    if (outgrows_scratch(&k))
        k.x_last = k.y_last = false; /* row-major, which it reorders into blocks of channels */
    const kn_dtype t = array[k.kind == KN_CONV_WEIGHTS ? X : W]->dtype;
    kn_status status = KN_DECLINED;
    if (t == KN_F32 || (kn_onednn_fast(t) && !is_wrong_in_bf16(&k)))
        status = run_with(k, array, bias, t);
    return status == KN_DECLINED && t != KN_F32 ? run_with(k, array, bias, KN_F32) : status;
}

/* ---- the entries ----------------------------------------------------------------------------- */

#define KEY_OF(which, a)                                                                           \
    {                                                                                              \
        .kind = (which), .groups = (a)->groups, .stride = { (a)->stride[0], (a)->stride[1] },      \
        .pad = { (a)->pad[0], (a)->pad[1] }, .dilation = {                                         \
            (a)->dilation[0],                                                                      \
            (a)->dilation[1]                                                                       \
        }                                                                                          \
    }

static const kn_array none;

kn_status kn_onednn_conv(const void *args)
{
    const kn_conv_args *a = args;
    return run((kn_conv_key)KEY_OF(KN_CONV_FORWARD, a), &a->x, &a->w, &a->y, &a->bias);
}

kn_status kn_onednn_conv_grad_x(const void *args)
{
    const kn_conv_grad_x_args *a = args;
    return run((kn_conv_key)KEY_OF(KN_CONV_DATA, a), &a->dx, &a->w, &a->dy, &none);
}

kn_status kn_onednn_conv_grad_w(const void *args)
{
    const kn_conv_grad_w_args *a = args;
    return run((kn_conv_key)KEY_OF(KN_CONV_WEIGHTS, a), &a->x, &a->dw, &a->dy, &none);
}
