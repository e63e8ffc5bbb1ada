/* tests/fsdp/indexing_test.c: parameters that are gathered from, sorted, scattered and summed along
 * (autograd/operations.h) in sharded models: the same bits as one process, and gradients in f32 of
 * units that compute in bf16. */
#include "tests/fsdp/matrix.h"

enum { STEPS = 3, MICRO = 4, BATCH = 3, WIDTH = 8, EXPERTS = 7, BEST = 2 };

/* y = x + the two experts that x likes best, mixed by their shares. */
typedef struct mixture {
    kn_module base;
    kn_tensor *router, *experts; /* [EXPERTS, WIDTH] */
    kn_tensor *bias, *steps;     /* [EXPERTS], [WIDTH] */
} mixture;
typedef struct net {
    kn_module base;
    mixture a, b;
} net;

/* The leaves' own gradients come from gather (of repeated places), sort, scatter_add and std. */
static kn_tensor *mixture_forward(kn_module *self, kn_tensor *x)
{
    static const int64_t place[WIDTH] = { 1, 4, 1, 0, 5, 1, 7, 4 };
    mixture *m = (mixture *)self;
    const kn_dtype t = kn_dtype_of(x);
    const kn_device d = kn_device_of(x);
    kn_tensor *at = kn_from(KN_I64, d, place, KN_SHAPE(WIDTH)), *best;
    kn_tensor *like = kn_linear(x, m->router, m->bias, false); /* [BATCH, EXPERTS] */
    kn_tensor *share = kn_softmax(kn_topk(like, BEST, -1, .indices = &best), -1);
    kn_tensor *mix = kn_scatter(kn_zeros(t, d, KN_SHAPE(BATCH, EXPERTS)), 1, best, share);
    kn_tensor *bent = kn_cumsum(kn_mul(kn_sort(m->steps, 0), kn_gather(m->steps, 0, at)), 0);
    bent = kn_scatter_add(bent, 0, at, m->steps);
    kn_tensor *spread = kn_std(m->experts, 1, (int64_t[]){ 0 });
    return kn_add(kn_add(x, kn_matmul(mix, m->experts)), kn_add(bent, spread));
}

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    net *n = (net *)self;
    return kn_call(&n->b, kn_call(&n->a, x));
}

static bool mixture_init(mixture *m, kn_module *parent, const char *name)
{
    kn_module_init(&m->base, mixture_forward);
    kn_module_add(parent, name, &m->base);
    m->router = kn_parameter(&m->base, "router", KN_F32, KN_META, KN_NORMAL_INIT(0.7),
                             KN_SHAPE(EXPERTS, WIDTH));
    m->experts = kn_parameter(&m->base, "experts", KN_F32, KN_META, KN_NORMAL_INIT(0.7),
                              KN_SHAPE(EXPERTS, WIDTH));
    m->bias = kn_parameter(&m->base, "bias", KN_F32, KN_META, KN_ZEROS_INIT, KN_SHAPE(EXPERTS));
    m->steps =
        kn_parameter(&m->base, "steps", KN_F32, KN_META, KN_NORMAL_INIT(0.5), KN_SHAPE(WIDTH));
    return m->steps != NULL;
}

static bool net_init(void *own)
{
    net *n = own;
    *n = (net){ 0 };
    return kn_module_init(&n->base, net_forward) && mixture_init(&n->a, &n->base, "a") &&
           mixture_init(&n->b, &n->base, "b");
}

static kn_tensor *net_loss(void *n, int step, int micro)
{
    const uint64_t stream = (uint64_t)(step * MICRO + micro);
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 4, stream, KN_SHAPE(BATCH, WIDTH));
    kn_tensor *y = kn_cast(kn_call(n, x), KN_F32);
    return kn_mean(kn_logsumexp(kn_mul(y, y), 1, (int64_t[]){ -1 }, false), 0, NULL, false);
}

KN_TEST(indexing, same_bits_over_ranks)
{
    MATRIX_CHECK_OWN(.bytes = sizeof(net), .declare = net_init, .loss = net_loss, .steps = STEPS,
                     .o.wrap_class = "mixture");
}

KN_TEST(indexing, gradients_of_bf16_units_in_f32)
{
    net n;
    KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, NULL, .wrap_class = "mixture", .seed = 42,
                                          .param_dtype = KN_BF16, .reduce_dtype = KN_F32));
    kn_optim *o = kn_sgd(&n, .lr = 0.05);
    matrix_check_learning(&n, net_loss, o, 10, 0.9);
}
