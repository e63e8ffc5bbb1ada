/* kernels/cpu/onednn_conv.c: convolutions through oneDNN.
 *
 * A call is cut into pieces of some samples each, by its shapes alone, and a piece is run by one
 * thread. oneDNN chooses its own order of memory for row-major images (blocks of channels), so
 * pieces are reordered into it and back; channels-last images are taken as they lie. Gradients of
 * weights are sums of pieces, added in order. dtypes that this CPU has no instructions for, and
 * arrays with gaps, are copied to f32 and back: computed in f32, rounded once. */
#include "kernels/cpu/onednn.h"

enum { X = 0, W, Y, PARTS, PIECES = 16, PIECE_ELEMENTS = 1 << 18, PARTIAL_BYTES = 64 << 20 };

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* A piece. Compared as bytes. */
typedef struct conv_key {
    int64_t kind, t, bias, groups;
    int64_t x[4], w[4], y[4];
    int64_t x_last, y_last; /* channels-last */
    int64_t stride[2], pad[2], pad_after[2], dilation[2];
} conv_key;

/* One of the three arrays: in its own order, and in the primitive's. */
typedef struct part {
    dnnl_memory_desc_t plain, inner;
    dnnl_primitive_t reorder; /* NULL: they are the same */
    size_t bytes;             /* of inner if it differs */
} part;

typedef struct conv {
    kn_onednn_item item;
    conv_key key;
    dnnl_primitive_t primitive; /* NULL: oneDNN has no kernel for it worth calling */
    part part[PARTS];
    dnnl_memory_desc_t bias, scratch_desc;
    size_t scratch;
} conv;

/* ---- a piece as primitives ------------------------------------------------------------------- */

static int result_of(int64_t kind)
{
    return kind == KN_CONV_FORWARD ? Y : kind == KN_CONV_DATA ? X : W;
}

/* Weights of several groups have a dim more. Gradients of weights are f32. */
static bool plain_desc(dnnl_memory_desc_t *md, const conv_key *k, int i)
{
    const kn_dtype t = i == W && k->kind == KN_CONV_WEIGHTS ? KN_F32 : (kn_dtype)k->t;
    const int64_t *s = i == X ? k->x : i == Y ? k->y : k->w, plane = s[2] * s[3];
    const int64_t rows[4] = { s[1] * plane, plane, s[3], 1 };
    const int64_t last[4] = { s[1] * plane, 1, s[3] * s[1], s[1] };
    if (i != W)
        return kn_onednn_desc(md, 4, s, (i == X ? k->x_last : k->y_last) ? last : rows, t);
    const int64_t grouped[5] = { k->groups, s[0] / k->groups, s[1], s[2], s[3] };
    const int64_t strides[5] = { s[0] / k->groups * rows[0], rows[0], rows[1], rows[2], rows[3] };
    return k->groups > 1 ? kn_onednn_desc(md, 5, grouped, strides, t)
                         : kn_onednn_desc(md, 4, s, rows, t);
}

static bool free_desc(dnnl_memory_desc_t *md, const conv_key *k, int i)
{
    const kn_dtype t = i == W && k->kind == KN_CONV_WEIGHTS ? KN_F32 : (kn_dtype)k->t;
    const int64_t *s = i == X ? k->x : i == Y ? k->y : k->w;
    const int64_t grouped[5] = { k->groups, s[0] / k->groups, s[1], s[2], s[3] };
    return i == W && k->groups > 1 ? kn_onednn_desc(md, 5, grouped, NULL, t)
                                   : kn_onednn_desc(md, 4, s, NULL, t);
}

/* as_they_lie: channels-last images are not reordered. */
static dnnl_primitive_desc_t describe(conv *v, bool as_they_lie, dnnl_primitive_attr_t attr)
{
    const conv_key *k = &v->key;
    const bool fixed[PARTS] = { as_they_lie && k->x_last, false, as_they_lie && k->y_last };
    dnnl_memory_desc_t wish[PARTS] = { 0 };
    dnnl_primitive_desc_t pd = NULL;
    bool good = true;
    for (int i = 0; i < PARTS && good; i++)
        good = fixed[i] ? plain_desc(&wish[i], k, i) : free_desc(&wish[i], k, i);
    good = good && kn_onednn_conv_desc(&pd, (kn_onednn_conv_kind)k->kind, &wish[X], &wish[W],
                                       k->bias ? &v->bias : NULL, &wish[Y], k->stride, k->dilation,
                                       k->pad, k->pad_after, attr);
    if (good && !kn_onednn_worth_calling(pd)) {
        dnnl_primitive_desc_destroy(pd);
        pd = NULL;
    }
    for (int i = 0; i < PARTS; i++)
        kn_onednn_desc_free(&wish[i]);
    return good ? pd : NULL;
}

static bool part_make(conv *v, int i, dnnl_primitive_desc_t pd)
{
    static const dnnl_query_t in[] = { dnnl_query_src_md, dnnl_query_weights_md,
                                       dnnl_query_dst_md };
    static const dnnl_query_t grad[] = { dnnl_query_diff_src_md, dnnl_query_diff_weights_md,
                                         dnnl_query_diff_dst_md };
    part *p = &v->part[i];
    const bool result = i == result_of(v->key.kind);
    const bool is_grad = v->key.kind != KN_CONV_FORWARD && (result || i == Y);
    if (!plain_desc(&p->plain, &v->key, i) ||
        !kn_onednn_desc_copy(&p->inner,
                             dnnl_primitive_desc_query_md(pd, (is_grad ? grad : in)[i], 0)))
        return false;
    if (dnnl_memory_desc_equal(DESC(p->plain), DESC(p->inner)))
        return true;
    dnnl_memory_desc_t *from = result ? &p->inner : &p->plain, *to = result ? &p->plain : &p->inner;
    dnnl_engine_t engine = kn_onednn_engine();
    dnnl_primitive_desc_t reorder = NULL;
    p->bytes = dnnl_memory_desc_get_size(DESC(p->inner));
    if (dnnl_reorder_primitive_desc_create(&reorder, DESC(*from), engine, DESC(*to), engine,
                                           NULL) != dnnl_success)
        return false;
    bool good = dnnl_primitive_create(&p->reorder, reorder) == dnnl_success;
    dnnl_primitive_desc_destroy(reorder);
    return good;
}

static void conv_make_primitive(conv *v)
{
    dnnl_primitive_attr_t attr = kn_onednn_attr();
    dnnl_primitive_desc_t pd = NULL;
    if (attr &&
        (!v->key.bias || kn_onednn_desc(&v->bias, 1, v->key.y + 1, (int64_t[]){ 1 }, KN_F32)))
        pd = describe(v, true, attr);
    if (attr && !pd)
        pd = describe(v, false, attr);
    bool good = pd != NULL;
    for (int i = 0; i < PARTS && good; i++)
        good = part_make(v, i, pd);
    good =
        good && kn_onednn_desc_copy(&v->scratch_desc,
                                    dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0));
    if (good)
        v->scratch = dnnl_memory_desc_get_size(DESC(v->scratch_desc));
    if (!good || dnnl_primitive_create(&v->primitive, pd) != dnnl_success)
        v->primitive = NULL;
    if (pd)
        dnnl_primitive_desc_destroy(pd);
    if (attr)
        dnnl_primitive_attr_destroy(attr);
}

static void conv_destroy(kn_onednn_item *item)
{
    conv *v = (conv *)item;
    if (v->primitive)
        dnnl_primitive_destroy(v->primitive);
    for (int i = 0; i < PARTS; i++) {
        if (v->part[i].reorder)
            dnnl_primitive_destroy(v->part[i].reorder);
        kn_onednn_desc_free(&v->part[i].plain);
        kn_onednn_desc_free(&v->part[i].inner);
    }
    kn_onednn_desc_free(&v->bias);
    kn_onednn_desc_free(&v->scratch_desc);
    kn_host_free(v);
}

static kn_onednn_item *conv_make(const void *key)
{
    conv *v = kn_host_calloc(1, sizeof *v);
    if (!v)
        return NULL;
    v->key = *(const conv_key *)key;
    v->item = (kn_onednn_item){ .key = &v->key, .size = sizeof v->key, .destroy = conv_destroy };
    const int threads = kn_onednn_threads_one();
    conv_make_primitive(v);
    kn_onednn_threads_restore(threads);
    return &v->item;
}

/* Runs a primitive on its arguments and lets go of them. */
static bool execute(dnnl_primitive_t p, dnnl_stream_t stream, int n, dnnl_exec_arg_t *arg,
                    bool good)
{
    good = good && dnnl_primitive_execute(p, stream, n, arg) == dnnl_success &&
           dnnl_stream_wait(stream) == dnnl_success;
    while (n-- > 0)
        if (arg[n].memory)
            dnnl_memory_destroy(arg[n].memory);
    return good;
}

static bool reorder(const part *p, bool out, dnnl_stream_t stream, void *plain, void *inner)
{
    dnnl_exec_arg_t arg[2] = { 0 };
    bool good =
        kn_onednn_arg(&arg[0], DNNL_ARG_FROM, out ? &p->inner : &p->plain, out ? inner : plain) &&
        kn_onednn_arg(&arg[1], DNNL_ARG_TO, out ? &p->plain : &p->inner, out ? plain : inner);
    return execute(p->reorder, stream, 2, arg, good);
}

/* at[i]: part i in the primitive's order. */
static bool compute(const conv *v, dnnl_stream_t stream, void *const at[PARTS], void *bias,
                    void *scratch)
{
    static const int in[] = { DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST };
    static const int grad[] = { DNNL_ARG_DIFF_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST };
    const int64_t kind = v->key.kind;
    dnnl_exec_arg_t arg[PARTS + 2] = { 0 };
    int n = 0;
    bool good = true;
    for (int i = 0; i < PARTS; i++) {
        const bool is_grad = kind != KN_CONV_FORWARD && (i == result_of(kind) || i == Y);
        good = kn_onednn_arg(&arg[n++], (is_grad ? grad : in)[i], &v->part[i].inner, at[i]) && good;
    }
    if (v->key.bias)
        good = kn_onednn_arg(&arg[n++], DNNL_ARG_BIAS, &v->bias, bias) && good;
    if (v->scratch)
        good = kn_onednn_arg(&arg[n++], DNNL_ARG_SCRATCHPAD, &v->scratch_desc, scratch) && good;
    return execute(v->primitive, stream, n, arg, good);
}

/* ---- a call as pieces ------------------------------------------------------------------------ */

typedef struct call {
    conv_key key;    /* of all samples */
    char *at[PARTS]; /* dense arrays */
    void *bias;
    int64_t pieces, each; /* samples */
    conv *piece, *rest;   /* the last one may be shorter */
    char *weights;        /* in the primitive's order; or a gradient for each piece */
    size_t weights_bytes; /* of one */
} call;

static size_t aligned(size_t bytes)
{
    return (bytes + KN_ALIGN - 1) / KN_ALIGN * KN_ALIGN;
}

static int64_t product_of(const int64_t *s, int n)
{
    int64_t product = 1;
    for (int i = 0; i < n; i++)
        product *= s[i];
    return product;
}

/* Small enough for a core's cache, and enough of them to share; fewer if each has weights. */
static void cut(call *c)
{
    const conv_key *k = &c->key;
    const int64_t N = k->x[0], sample = product_of(k->x + 1, 3) + product_of(k->y + 1, 3);
    if (k->kind == KN_CONV_WEIGHTS) {
        const int64_t room = PARTIAL_BYTES / 4 / product_of(k->w, 4);
        const int64_t most = room < 2 ? 2 : MIN(room, PIECES);
        c->each = (N + most - 1) / most;
    } else {
        const int64_t fit = PIECE_ELEMENTS / sample;
        c->each = MIN(fit, (N + PIECES - 1) / PIECES);
    }
    c->each = c->each < 1 ? 1 : c->each;
    c->pieces = (N + c->each - 1) / c->each;
}

static conv *piece_get(const call *c, int64_t samples)
{
    conv_key k = c->key;
    k.x[0] = k.y[0] = samples;
    return (conv *)kn_onednn_get(&k, sizeof k, conv_make);
}

/* Scratch of a thread: both images in the primitive's order, and its own scratch. */
static size_t scratch_bytes(const conv *v)
{
    return aligned(v->part[X].bytes) + aligned(v->part[Y].bytes) + aligned(v->scratch);
}

static bool run_piece(const call *c, int64_t i, dnnl_stream_t stream, char *scratch)
{
    const conv_key *k = &c->key;
    const conv *v = i == c->pieces - 1 ? c->rest : c->piece;
    const int64_t first = i * c->each, size = (int64_t)kn_dtype_size((kn_dtype)k->t);
    char *plain[PARTS] = { [X] = c->at[X] + first * product_of(k->x + 1, 3) * size,
                           [Y] = c->at[Y] + first * product_of(k->y + 1, 3) * size };
    void *inner[PARTS];
    const int result = result_of(k->kind);
    for (int p = 0; p < PARTS; p += Y) { /* X and Y */
        inner[p] = v->part[p].reorder ? scratch : plain[p];
        scratch += aligned(v->part[p].bytes);
        if (v->part[p].reorder && p != result &&
            !reorder(&v->part[p], false, stream, plain[p], inner[p]))
            return false;
    }
    inner[W] = c->weights + (result == W ? (size_t)i * c->weights_bytes : 0);
    if (!compute(v, stream, inner, c->bias, scratch))
        return false;
    return result == W || !v->part[result].reorder ||
           reorder(&v->part[result], true, stream, plain[result], inner[result]);
}

/* Pieces i, i + step, ... */
static bool run_share(const call *c, int64_t i, int64_t step, char *scratch)
{
    dnnl_stream_t stream = NULL;
    if (dnnl_stream_create(&stream, kn_onednn_engine(), dnnl_stream_default_flags) != dnnl_success)
        return false;
    bool good = true;
    const int threads = kn_onednn_threads_one();
    for (; good && i < c->pieces; i += step)
        good = run_piece(c, i, stream, scratch);
    kn_onednn_threads_restore(threads);
    dnnl_stream_destroy(stream);
    return good;
}

/* Weights into or out of the primitive's order. */
static bool reorder_weights(const call *c)
{
    dnnl_stream_t stream = NULL;
    if (dnnl_stream_create(&stream, kn_onednn_engine(), dnnl_stream_default_flags) != dnnl_success)
        return false;
    const int threads = kn_onednn_threads_one();
    bool good =
        reorder(&c->piece->part[W], c->key.kind == KN_CONV_WEIGHTS, stream, c->at[W], c->weights);
    kn_onednn_threads_restore(threads);
    dnnl_stream_destroy(stream);
    return good;
}

static int64_t weights_count(const call *c)
{
    return (int64_t)(c->weights_bytes / sizeof(float));
}

/* The gradients of all pieces into the first one's, in order: blocks [begin, end) of 1024
 * weights. */
static void add_pieces(const void *ctx, int64_t begin, int64_t end)
{
    const call *c = ctx;
    const int64_t n = weights_count(c);
    float *sum = (float *)(void *)c->weights;
    for (int64_t block = begin; block < end; block++)
        for (int64_t p = 1; p < c->pieces; p++)
            for (int64_t j = block * 1024; j < MIN(n, (block + 1) * 1024); j++)
                sum[j] += sum[p * n + j];
}

typedef struct pieces_call {
    const call *c;
    int64_t parts;
    char *scratch; /* `each` bytes a part */
    size_t each;
    _Atomic bool *bad;
} pieces_call;

static void pieces_part(const void *ctx, int64_t i)
{
    const pieces_call *r = ctx;
    if (!run_share(r->c, i, r->parts, r->scratch + (size_t)i * r->each))
        *r->bad = true;
}

static bool run_pieces(const call *c)
{
    const conv_key *k = &c->key;
    const double work = 2.0 * (double)product_of(k->y, 4) * (double)product_of(k->w + 1, 3) / 16;
    const int wanted = kn_threads_for(work < 0x1p60 ? (int64_t)work : (int64_t)1 << 60);
    const int64_t threads = MIN(wanted, c->pieces);
    const size_t one = scratch_bytes(c->piece), last = scratch_bytes(c->rest);
    const size_t each = one > last ? one : last, bytes = each * (size_t)threads;
    char *scratch = kn_take(kn_device_memory(KN_CPU), bytes, KN_MEM_WORKSPACE);
    if (!scratch)
        return false;
    bool good = k->kind == KN_CONV_WEIGHTS || !c->piece->part[W].reorder || reorder_weights(c);
    _Atomic bool bad = !good;
    if (good)
        kn_each_part(threads, pieces_part, &(pieces_call){ c, threads, scratch, each, &bad });
    good = !bad;
    kn_give(kn_device_memory(KN_CPU), scratch, bytes, KN_MEM_WORKSPACE);
    if (good && k->kind == KN_CONV_WEIGHTS) {
        kn_each_range(wanted, (weights_count(c) + 1023) / 1024, add_pieces, c);
        if (c->piece->part[W].reorder)
            good = reorder_weights(c);
        else
            memcpy(c->at[W], c->weights, c->weights_bytes);
    }
    return good || kn_fail("conv: oneDNN could not run a convolution that it accepted");
}

/* Finds the primitives, and the place of the weights in their order. */
static kn_status run_call(call *c)
{
    cut(c);
    const int64_t left = c->key.x[0] - (c->pieces - 1) * c->each;
    kn_status status = KN_FAILED;
    c->rest = piece_get(c, left);
    c->piece = c->pieces > 1 && left != c->each ? piece_get(c, c->each) : c->rest;
    if (c->piece && c->rest) {
        const conv *v = c->piece;
        bool same = c->rest == v ||
                    dnnl_memory_desc_equal(DESC(v->part[W].inner), DESC(c->rest->part[W].inner));
        status = v->primitive && c->rest->primitive && same ? KN_DONE : KN_DECLINED;
    }
    if (status == KN_DONE) {
        const bool grad = c->key.kind == KN_CONV_WEIGHTS;
        c->weights_bytes = dnnl_memory_desc_get_size(DESC(c->piece->part[W].inner));
        const size_t bytes = c->weights_bytes * (size_t)(grad ? c->pieces : 1);
        const bool own = grad || c->piece->part[W].reorder;
        c->weights = own ? kn_take(kn_device_memory(KN_CPU), bytes, KN_MEM_WORKSPACE) : c->at[W];
        status = c->weights && run_pieces(c) ? KN_DONE : KN_FAILED;
        if (own && c->weights)
            kn_give(kn_device_memory(KN_CPU), c->weights, bytes, KN_MEM_WORKSPACE);
    }
    if (c->piece && c->piece != c->rest)
        kn_onednn_release(&c->piece->item);
    if (c->rest)
        kn_onednn_release(&c->rest->item);
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

static bool copy(const kn_array *dst, const kn_array *src)
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
    return p && (result || copy(&s->dense, user));
}

static bool stand_in_end(stand_in *s, bool result, bool good)
{
    if (s->bytes == 0)
        return good;
    good = good && (!result || copy(&s->user, &s->dense));
    if (s->dense.data)
        kn_give(kn_device_memory(KN_CPU), s->dense.data, s->bytes, KN_MEM_WORKSPACE);
    return good;
}

static kn_status run_with(conv_key k, const kn_array *array[PARTS], const kn_array *bias,
                          kn_dtype t)
{
    stand_in s[PARTS + 1] = { 0 };
    call c = { .key = k };
    const int result = result_of(k.kind);
    bool good = true;
    c.key.t = t;
    for (int i = 0; i < PARTS && good; i++) {
        const kn_dtype want = i == W && k.kind == KN_CONV_WEIGHTS ? KN_F32 : t;
        const bool last = (i == X && k.x_last) || (i == Y && k.y_last);
        good = stand_in_make(&s[i], array[i], want, last, i == result);
        c.at[i] = s[i].dense.data;
    }
    if (good && bias->data)
        good = stand_in_make(&s[PARTS], bias, KN_F32, false, false);
    c.bias = s[PARTS].dense.data;
    kn_status status = good ? run_call(&c) : KN_FAILED;
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
static bool key_make(conv_key *k, const kn_array *array[PARTS], const kn_array *bias)
{
    const kn_array *x = array[X], *w = array[W], *y = array[Y];
    const int64_t G = k->groups;
    if (x->ndim != 4 || w->ndim != 4 || y->ndim != 4 || G < 1 || y->shape[0] != x->shape[0] ||
        y->shape[1] != w->shape[0] || w->shape[1] * G != x->shape[1] || w->shape[0] % G != 0 ||
        (bias->data && (bias->ndim != 1 || bias->shape[0] != y->shape[1])))
        return false;
    if (kn_array_numel(x) == 0 || kn_array_numel(w) == 0 || kn_array_numel(y) == 0)
        return false;
    memcpy(k->x, x->shape, sizeof k->x);
    memcpy(k->w, w->shape, sizeof k->w);
    memcpy(k->y, y->shape, sizeof k->y);
    k->x_last = is_last(x), k->y_last = is_last(y), k->bias = bias->data != NULL;
    for (int d = 0; d < 2; d++) {
        if (k->stride[d] < 1 || k->dilation[d] < 1 || k->pad[d] < 0)
            return false;
        const int64_t reach = (k->w[2 + d] - 1) * k->dilation[d] + 1;
        k->pad_after[d] = (k->y[2 + d] - 1) * k->stride[d] + reach - k->x[2 + d] - k->pad[d];
        if (k->pad_after[d] <= -k->stride[d])
            return false;
    }
    return true;
}

static kn_status run(conv_key k, const kn_array *x, const kn_array *w, const kn_array *y,
                     const kn_array *bias)
{
    const kn_array *array[PARTS] = { x, w, y };
    if (!kn_onednn_engine() || !dtypes_fit(array, bias, k.kind) || !key_make(&k, array, bias))
        return KN_DECLINED;
    const kn_dtype t = array[k.kind == KN_CONV_WEIGHTS ? X : W]->dtype;
    kn_status status = KN_DECLINED;
    if (t == KN_F32 || kn_onednn_fast(t))
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
    return run((conv_key)KEY_OF(KN_CONV_FORWARD, a), &a->x, &a->w, &a->y, &a->bias);
}

kn_status kn_onednn_conv_grad_x(const void *args)
{
    const kn_conv_grad_x_args *a = args;
    return run((conv_key)KEY_OF(KN_CONV_DATA, a), &a->dx, &a->w, &a->dy, &none);
}

kn_status kn_onednn_conv_grad_w(const void *args)
{
    const kn_conv_grad_w_args *a = args;
    return run((conv_key)KEY_OF(KN_CONV_WEIGHTS, a), &a->x, &a->dw, &a->dy, &none);
}
