/* kernels/cpu/onednn_conv_piece.c: a piece of a convolution as primitives of oneDNN, made once and
 * kept: the convolution, and a reorder for each array that oneDNN wants in an order of its own. */
#include "kernels/cpu/onednn_conv.h"

int kn_conv_result(int64_t kind)
{
    return kind == KN_CONV_FORWARD ? Y : kind == KN_CONV_DATA ? X : W;
}

/* Weights of several groups have a dim more. Gradients of weights are f32. */
static bool plain_desc(dnnl_memory_desc_t *md, const kn_conv_key *k, int i)
{
    const kn_dtype t = i == W && k->kind == KN_CONV_WEIGHTS ? KN_F32 : (kn_dtype)k->t;
    const int64_t *s = i == X ? k->x : i == Y ? k->y : k->w, plane = s[2] * s[3];
    const int64_t rows[4] = { s[1] * plane, plane, s[3], 1 };
    const int64_t last[4] = { s[1] * plane, 1, s[3] * s[1], s[1] };
    const bool is_last[PARTS] = { k->x_last, k->w_last, k->y_last };
    if (i != W || k->groups == 1)
        return kn_onednn_desc(md, 4, s, is_last[i] ? last : rows, t);
    const int64_t grouped[5] = { k->groups, s[0] / k->groups, s[1], s[2], s[3] };
    const int64_t strides[5] = { s[0] / k->groups * rows[0], rows[0], rows[1], rows[2], rows[3] };
    return kn_onednn_desc(md, 5, grouped, strides, t);
}

static bool free_desc(dnnl_memory_desc_t *md, const kn_conv_key *k, int i)
{
    const kn_dtype t = i == W && k->kind == KN_CONV_WEIGHTS ? KN_F32 : (kn_dtype)k->t;
    const int64_t *s = i == X ? k->x : i == Y ? k->y : k->w;
    const int64_t grouped[5] = { k->groups, s[0] / k->groups, s[1], s[2], s[3] };
    return i == W && k->groups > 1 ? kn_onednn_desc(md, 5, grouped, NULL, t)
                                   : kn_onednn_desc(md, 4, s, NULL, t);
}

/* as_they_lie: channels-last images are not reordered. */
static dnnl_primitive_desc_t describe(kn_conv_piece *v, bool as_they_lie,
                                      dnnl_primitive_attr_t attr)
{
    const kn_conv_key *k = &v->key;
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

static bool part_make(kn_conv_piece *v, int i, dnnl_primitive_desc_t pd)
{
    static const dnnl_query_t in[] = { dnnl_query_src_md, dnnl_query_weights_md,
                                       dnnl_query_dst_md };
    static const dnnl_query_t grad[] = { dnnl_query_diff_src_md, dnnl_query_diff_weights_md,
                                         dnnl_query_diff_dst_md };
    kn_conv_part *p = &v->part[i];
    const bool result = i == kn_conv_result(v->key.kind);
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

static void conv_make_primitive(kn_conv_piece *v)
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
    if (good)
        kn_onednn_make(&v->primitive, &v->scratch_desc, &v->scratch, pd);
    if (pd)
        dnnl_primitive_desc_destroy(pd);
    if (attr)
        dnnl_primitive_attr_destroy(attr);
}

static void conv_destroy(kn_onednn_item *item)
{
    kn_conv_piece *v = (kn_conv_piece *)item;
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
    kn_conv_piece *v = kn_host_calloc(1, sizeof *v);
    if (!v)
        return NULL;
    v->key = *(const kn_conv_key *)key;
    v->item = (kn_onednn_item){ .key = &v->key, .size = sizeof v->key, .destroy = conv_destroy };
    const int threads = kn_onednn_threads_one();
    conv_make_primitive(v);
    kn_onednn_threads_restore(threads);
    return &v->item;
}

/* ---- a call as pieces ------------------------------------------------------------------------ */

int64_t kn_conv_product(const int64_t *s, int n)
{
    int64_t product = 1;
    for (int i = 0; i < n; i++)
        product *= s[i];
    return product;
}

static kn_conv_piece *piece_get(const kn_conv_key *key, int64_t n, bool channels)
{
    kn_conv_key k = *key;
    if (channels)
        k.w[0] = k.y[1] = n;
    else
        k.x[0] = k.y[0] = n;
    return (kn_conv_piece *)kn_onednn_get(&k, sizeof k, conv_make);
}

kn_status kn_conv_cut_make(kn_conv_cut *c, const kn_conv_key *k, bool channels)
{
    const int64_t all = channels ? k->w[0] : k->x[0];
    c->pieces = (all + c->each - 1) / c->each;
    const int64_t left = all - (c->pieces - 1) * c->each;
    c->rest = piece_get(k, left, channels);
    c->piece = c->pieces > 1 && left != c->each ? piece_get(k, c->each, channels) : c->rest;
    if (!c->piece || !c->rest)
        return KN_FAILED;
    return c->piece->primitive && c->rest->primitive ? KN_DONE : KN_DECLINED;
}

void kn_conv_cut_end(kn_conv_cut *c)
{
    if (c->piece && c->piece != c->rest)
        kn_onednn_release(&c->piece->item);
    if (c->rest)
        kn_onednn_release(&c->rest->item);
}

bool kn_conv_cut_run(const kn_conv_cut *c, const kn_conv_key *k, kn_onednn_fn fn, const void *ctx,
                     size_t bytes)
{
    const int64_t wanted = kn_onednn_threads(2.0 * (double)kn_conv_product(k->y, 4) *
                                             (double)kn_conv_product(k->w + 1, 3));
    const int64_t threads = wanted < c->pieces ? wanted : c->pieces;
    const size_t all = bytes * (size_t)threads;
    char *scratch = kn_take(kn_device_memory(KN_CPU), all, KN_MEM_WORKSPACE);
    if (!scratch)
        return false;
    const bool good = kn_onednn_each(threads, c->pieces, fn, ctx, scratch, bytes);
    kn_give(kn_device_memory(KN_CPU), scratch, all, KN_MEM_WORKSPACE);
    return good || kn_fail("conv: oneDNN could not run a convolution that it accepted");
}

bool kn_conv_reorder(const kn_conv_part *p, bool out, dnnl_stream_t stream, void *plain,
                     void *inner)
{
    dnnl_exec_arg_t arg[2] = { 0 };
    bool good =
        kn_onednn_arg(&arg[0], DNNL_ARG_FROM, out ? &p->inner : &p->plain, out ? inner : plain) &&
        kn_onednn_arg(&arg[1], DNNL_ARG_TO, out ? &p->plain : &p->inner, out ? plain : inner);
    return kn_onednn_execute(p->reorder, stream, 2, arg, good);
}

bool kn_conv_compute(const kn_conv_piece *v, dnnl_stream_t stream, void *const at[PARTS],
                     void *bias, void *scratch)
{
    static const int in[] = { DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST };
    static const int grad[] = { DNNL_ARG_DIFF_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST };
    const int64_t kind = v->key.kind;
    dnnl_exec_arg_t arg[PARTS + 2] = { 0 };
    int n = 0;
    bool good = true;
    for (int i = 0; i < PARTS; i++) {
        const bool is_grad = kind != KN_CONV_FORWARD && (i == kn_conv_result(kind) || i == Y);
        good = kn_onednn_arg(&arg[n++], (is_grad ? grad : in)[i], &v->part[i].inner, at[i]) && good;
    }
    if (v->key.bias)
        good = kn_onednn_arg(&arg[n++], DNNL_ARG_BIAS, &v->bias, bias) && good;
    if (v->scratch)
        good = kn_onednn_arg(&arg[n++], DNNL_ARG_SCRATCHPAD, &v->scratch_desc, scratch) && good;
    return kn_onednn_execute(v->primitive, stream, n, arg, good);
}
