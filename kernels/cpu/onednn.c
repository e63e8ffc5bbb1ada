/* kernels/cpu/onednn.c: oneDNN (versions 2 and 3) as a provider of the CPU: the differences of its
 * major versions, and the primitives that are kept. */
#include "kernels/cpu/onednn.h"

enum {
    CACHE = 256, /* primitives kept */
    WAYS = 4,    /* places that a key may have */
};

const kn_provider kn_cpu_onednn = {
    .name = "onednn",
    .run = { [KN_K_MATMUL] = kn_onednn_matmul,
             [KN_K_CONV] = kn_onednn_conv,
             [KN_K_CONV_GRAD_X] = kn_onednn_conv_grad_x,
             [KN_K_CONV_GRAD_W] = kn_onednn_conv_grad_w },
};

static dnnl_engine_t engine; /* never destroyed */
static pthread_once_t engine_once = PTHREAD_ONCE_INIT;

static void engine_make(void)
{
    if (dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success)
        engine = NULL;
}

dnnl_engine_t kn_onednn_engine(void)
{
    pthread_once(&engine_once, engine_make);
    return engine;
}

static dnnl_data_type_t onednn_dtype(kn_dtype t)
{
    return t == KN_F32    ? dnnl_f32
           : t == KN_BF16 ? dnnl_bf16
           : t == KN_F16  ? dnnl_f16
                          : dnnl_data_type_undef;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

typedef struct conv_numbers {
    dnnl_dims_t stride, dilation, pad, pad_after; /* dilation counts from 0 */
} conv_numbers;

#if DNNL_VERSION_MAJOR >= 3
bool kn_onednn_desc(dnnl_memory_desc_t *md, int ndim, const int64_t *dims, const int64_t *strides,
                    kn_dtype t)
{
    dnnl_data_type_t dt = onednn_dtype(t);
    return (strides ? dnnl_memory_desc_create_with_strides(md, ndim, dims, dt, strides)
                    : dnnl_memory_desc_create_with_tag(md, ndim, dims, dt, dnnl_format_tag_any)) ==
           dnnl_success;
}

bool kn_onednn_desc_copy(dnnl_memory_desc_t *to, kn_onednn_lent_desc from)
{
    return from && dnnl_memory_desc_clone(to, from) == dnnl_success;
}

void kn_onednn_desc_free(dnnl_memory_desc_t *md)
{
    if (*md)
        dnnl_memory_desc_destroy(*md);
    *md = NULL;
}

bool kn_onednn_matmul_desc(dnnl_primitive_desc_t *pd, dnnl_memory_desc_t *a, dnnl_memory_desc_t *b,
                           dnnl_memory_desc_t *bias, dnnl_memory_desc_t *c,
                           const_dnnl_primitive_attr_t attr)
{
    return dnnl_matmul_primitive_desc_create(pd, engine, *a, *b, bias ? *bias : NULL, *c, attr) ==
           dnnl_success;
}

static bool conv_desc(dnnl_primitive_desc_t *pd, kn_onednn_conv_kind kind, dnnl_memory_desc_t *x,
                      dnnl_memory_desc_t *w, dnnl_memory_desc_t *bias, dnnl_memory_desc_t *y,
                      const conv_numbers *n, const_dnnl_primitive_desc_t hint,
                      const_dnnl_primitive_attr_t attr)
{
    const dnnl_alg_kind_t direct = dnnl_convolution_direct;
    dnnl_status_t s =
        kind == KN_CONV_FORWARD
            ? dnnl_convolution_forward_primitive_desc_create(
                  pd, engine, dnnl_forward_training, direct, *x, *w, bias ? *bias : NULL, *y,
                  n->stride, n->dilation, n->pad, n->pad_after, attr)
        : kind == KN_CONV_DATA
            ? dnnl_convolution_backward_data_primitive_desc_create(pd, engine, direct, *x, *w, *y,
                                                                   n->stride, n->dilation, n->pad,
                                                                   n->pad_after, hint, attr)
            : dnnl_convolution_backward_weights_primitive_desc_create(
                  pd, engine, direct, *x, *w, NULL, *y, n->stride, n->dilation, n->pad,
                  n->pad_after, hint, attr);
    return s == dnnl_success;
}
#else
bool kn_onednn_desc(dnnl_memory_desc_t *md, int ndim, const int64_t *dims, const int64_t *strides,
                    kn_dtype t)
{
    dnnl_data_type_t dt = onednn_dtype(t);
    return (strides ? dnnl_memory_desc_init_by_strides(md, ndim, dims, dt, strides)
                    : dnnl_memory_desc_init_by_tag(md, ndim, dims, dt, dnnl_format_tag_any)) ==
           dnnl_success;
}

bool kn_onednn_desc_copy(dnnl_memory_desc_t *to, kn_onednn_lent_desc from)
{
    if (from)
        *to = *from;
    return from != NULL;
}

void kn_onednn_desc_free(dnnl_memory_desc_t *md)
{
    (void)md;
}

bool kn_onednn_matmul_desc(dnnl_primitive_desc_t *pd, dnnl_memory_desc_t *a, dnnl_memory_desc_t *b,
                           dnnl_memory_desc_t *bias, dnnl_memory_desc_t *c,
                           const_dnnl_primitive_attr_t attr)
{
    dnnl_matmul_desc_t d;
    return dnnl_matmul_desc_init(&d, a, b, bias, c) == dnnl_success &&
           dnnl_primitive_desc_create(pd, &d, attr, engine, NULL) == dnnl_success;
}

static bool conv_desc(dnnl_primitive_desc_t *pd, kn_onednn_conv_kind kind, dnnl_memory_desc_t *x,
                      dnnl_memory_desc_t *w, dnnl_memory_desc_t *bias, dnnl_memory_desc_t *y,
                      const conv_numbers *n, const_dnnl_primitive_desc_t hint,
                      const_dnnl_primitive_attr_t attr)
{
    const dnnl_alg_kind_t direct = dnnl_convolution_direct;
    dnnl_convolution_desc_t d;
    dnnl_status_t s =
        kind == KN_CONV_FORWARD
            ? dnnl_dilated_convolution_forward_desc_init(&d, dnnl_forward_training, direct, x, w,
                                                         bias, y, n->stride, n->dilation, n->pad,
                                                         n->pad_after)
        : kind == KN_CONV_DATA
            ? dnnl_dilated_convolution_backward_data_desc_init(&d, direct, x, w, y, n->stride,
                                                               n->dilation, n->pad, n->pad_after)
            : dnnl_dilated_convolution_backward_weights_desc_init(
                  &d, direct, x, w, NULL, y, n->stride, n->dilation, n->pad, n->pad_after);
    return s == dnnl_success &&
           dnnl_primitive_desc_create(pd, &d, attr, engine, hint) == dnnl_success;
}
#endif

bool kn_onednn_conv_desc(dnnl_primitive_desc_t *pd, kn_onednn_conv_kind kind, dnnl_memory_desc_t *x,
                         dnnl_memory_desc_t *w, dnnl_memory_desc_t *bias, dnnl_memory_desc_t *y,
                         const int64_t stride[2], const int64_t dilation[2], const int64_t pad[2],
                         const int64_t pad_after[2], const_dnnl_primitive_attr_t attr)
{
    const conv_numbers n = { .stride = { stride[0], stride[1] },
                             .dilation = { dilation[0] - 1, dilation[1] - 1 },
                             .pad = { pad[0], pad[1] },
                             .pad_after = { pad_after[0], pad_after[1] } };
    dnnl_primitive_desc_t hint = NULL;
    if (kind != KN_CONV_FORWARD &&
        !conv_desc(&hint, KN_CONV_FORWARD, x, w, NULL, y, &n, NULL, attr))
        hint = NULL; /* f32 weights of narrower images have a gradient but no forward */
    bool made = conv_desc(pd, kind, x, w, bias, y, &n, hint, attr);
    if (hint)
        dnnl_primitive_desc_destroy(hint);
    return made;
}

bool kn_onednn_worth_calling(const_dnnl_primitive_desc_t pd)
{
    const char *info = NULL;
    return dnnl_primitive_desc_query(pd, dnnl_query_impl_info_str, 0, (void *)&info) ==
               dnnl_success &&
           info && strncmp(info, "ref", 3) != 0;
}

dnnl_primitive_attr_t kn_onednn_attr(void)
{
    dnnl_primitive_attr_t attr = NULL;
    if (dnnl_primitive_attr_create(&attr) != dnnl_success)
        return NULL;
    if (dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user) == dnnl_success)
        return attr;
    dnnl_primitive_attr_destroy(attr);
    return NULL;
}

bool kn_onednn_attr_add(dnnl_primitive_attr_t attr)
{
    dnnl_post_ops_t ops = NULL;
    if (dnnl_post_ops_create(&ops) != dnnl_success)
        return false;
#if DNNL_VERSION_MAJOR >= 3
    dnnl_status_t s = dnnl_post_ops_append_sum(ops, 1, 0, dnnl_data_type_undef);
#else
    dnnl_status_t s = dnnl_post_ops_append_sum(ops, 1);
#endif
    if (s == dnnl_success)
        s = dnnl_primitive_attr_set_post_ops(attr, ops);
    dnnl_post_ops_destroy(ops);
    return s == dnnl_success;
}

void kn_onednn_make(dnnl_primitive_t *p, dnnl_memory_desc_t *scratch, size_t *bytes,
                    const_dnnl_primitive_desc_t pd)
{
    bool good =
        kn_onednn_desc_copy(scratch, dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0));
    if (good)
        *bytes = dnnl_memory_desc_get_size(DESC(*scratch));
    if (!good || dnnl_primitive_create(p, pd) != dnnl_success)
        *p = NULL;
}

bool kn_onednn_arg(dnnl_exec_arg_t *arg, int index, const dnnl_memory_desc_t *desc, void *p)
{
    arg->arg = index;
    arg->memory = NULL;
    return dnnl_memory_create(&arg->memory, DESC(*desc), engine, p) == dnnl_success;
}

int kn_onednn_threads_one(void)
{
#ifdef _OPENMP
    const int before = omp_get_max_threads();
    omp_set_num_threads(1);
    return before;
#else
    return 1;
#endif
}

void kn_onednn_threads_restore(int before)
{
#ifdef _OPENMP
    omp_set_num_threads(before);
#else
    (void)before;
#endif
}

/* ---- running --------------------------------------------------------------------------------- */

bool kn_onednn_execute(dnnl_primitive_t p, dnnl_stream_t stream, int n, dnnl_exec_arg_t *arg,
                       bool good)
{
    good = good && dnnl_primitive_execute(p, stream, n, arg) == dnnl_success &&
           dnnl_stream_wait(stream) == dnnl_success;
    while (n-- > 0)
        if (arg[n].memory)
            dnnl_memory_destroy(arg[n].memory);
    return good;
}

int kn_onednn_threads(double flops)
{
    const double work = flops / 16;
    return kn_threads_for(work < 0x1p60 ? (int64_t)work : (int64_t)1 << 60);
}

typedef struct each_call {
    kn_onednn_fn fn;
    const void *ctx;
    char *scratch; /* `each` bytes a part */
    size_t each;
    kn_claims *claims;
    _Atomic bool *bad;
} each_call;

static void each_part(const void *call, int64_t part)
{
    const each_call *c = call;
    dnnl_stream_t stream = NULL;
    bool good = dnnl_stream_create(&stream, engine, dnnl_stream_default_flags) == dnnl_success;
    const int threads = kn_onednn_threads_one();
    for (int64_t i; good && (i = kn_claim(c->claims, part)) >= 0;)
        good = c->fn(c->ctx, i, stream, c->scratch + (size_t)part * c->each);
    kn_onednn_threads_restore(threads);
    if (stream)
        dnnl_stream_destroy(stream);
    if (!good)
        *c->bad = true;
}

bool kn_onednn_each(int64_t threads, int64_t count, kn_onednn_fn fn, const void *ctx, void *scratch,
                    size_t each)
{
    const int64_t parts = threads < count ? threads : count;
    _Atomic bool bad = false;
    kn_claims claims = { .n = count, .parts = parts };
    kn_each_part(parts, each_part, &(each_call){ fn, ctx, scratch, each, &claims, &bad });
    return !bad;
}

/* ---- the cache ------------------------------------------------------------------------------ */

/* A key lives in one of WAYS places; a newcomer replaces the one used longest ago. */
static struct {
    pthread_mutex_t lock;
    kn_onednn_item *place[CACHE];
    uint64_t used[CACHE], clock;
} cache = { .lock = PTHREAD_MUTEX_INITIALIZER };

static uint64_t key_hash(const int64_t *words, size_t size)
{
    uint64_t h = 0xcbf29ce484222325u; /* Fowler, Noll, Vo */
    for (size_t i = 0; i < size / sizeof *words; i++)
        h = (h ^ (uint64_t)words[i]) * 0x100000001b3u;
    return h ^ h >> 29;
}

/* With the lock: the item of this key, or NULL. */
static kn_onednn_item *cache_find(const void *key, size_t size, uint64_t first)
{
    for (int i = 0; i < WAYS; i++) {
        const uint64_t at = (first + (uint64_t)i) % CACHE;
        kn_onednn_item *item = cache.place[at];
        if (item && item->size == size && memcmp(item->key, key, size) == 0) {
            cache.used[at] = ++cache.clock;
            return item;
        }
    }
    return NULL;
}

/* With the lock: puts it in, or leaves it out if all its places are in use. */
static void cache_put(kn_onednn_item *item, uint64_t first)
{
    int64_t best = -1;
    for (int i = 0; i < WAYS; i++) {
        const int64_t at = (int64_t)((first + (uint64_t)i) % CACHE);
        if (cache.place[at] && cache.place[at]->users > 0)
            continue;
        if (best < 0 ||
            (cache.place[best] && (!cache.place[at] || cache.used[at] < cache.used[best])))
            best = at;
    }
    if (best < 0)
        return;
    if (cache.place[best])
        cache.place[best]->destroy(cache.place[best]);
    cache.place[best] = item;
    cache.used[best] = ++cache.clock;
    item->kept = true;
}

kn_onednn_item *kn_onednn_get(const void *key, size_t size,
                              kn_onednn_item *(*make)(const void *key))
{
    const uint64_t first = key_hash(key, size);
    pthread_mutex_lock(&cache.lock);
    kn_onednn_item *item = cache_find(key, size, first);
    if (!item) {
        item = make(key);
        if (item)
            cache_put(item, first);
    }
    if (item)
        item->users++;
    pthread_mutex_unlock(&cache.lock);
    return item;
}

void kn_onednn_release(kn_onednn_item *item)
{
    pthread_mutex_lock(&cache.lock);
    const bool last = --item->users == 0 && !item->kept;
    pthread_mutex_unlock(&cache.lock);
    if (last)
        item->destroy(item);
}
