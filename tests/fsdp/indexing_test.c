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

static bool net_init(net *n)
{
    *n = (net){ 0 };
    return kn_module_init(&n->base, net_forward) && mixture_init(&n->a, &n->base, "a") &&
           mixture_init(&n->b, &n->base, "b");
}

static kn_tensor *net_loss(net *n, int step, int micro)
{
    const uint64_t stream = (uint64_t)(step * MICRO + micro);
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 4, stream, KN_SHAPE(BATCH, WIDTH));
    kn_tensor *y = kn_cast(kn_call(n, x), KN_F32);
    return kn_mean(kn_logsumexp(kn_mul(y, y), 1, (int64_t[]){ -1 }, false), 0, NULL, false);
}

static bool declare(matrix_net *n)
{
    net *own = n->own = calloc(1, sizeof *own);
    n->root = own ? &own->base : NULL;
    return own && net_init(own);
}

static bool declare_recomputing(matrix_net *n)
{
    return declare(n) && kn_recompute(&((net *)n->own)->a, true);
}

static kn_tensor *loss(matrix_net *n, int step, int micro)
{
    return net_loss(n->own, step, micro);
}

#define SAME_BITS(n, ...)                                                                          \
    MATRIX_CHECK(.model = MATRIX_OWN, .loss = loss, .natural = true, .threads = true,              \
                 .ranks = (n), .rounds = MICRO / (n), .steps = STEPS, .o.wrap_class = "mixture",   \
                 __VA_ARGS__)

KN_TEST(indexing, same_bits_over_ranks)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        SAME_BITS(ranks, .declare = declare);
        SAME_BITS(ranks, .declare = declare_recomputing, .o.layout = KN_LAYOUT_PER_PARAM);
        SAME_BITS(ranks, .declare = declare, .o.strategy = KN_SHARD_GRAD_OP, .workers = true);
    }
}

KN_TEST(indexing, gradients_of_bf16_units_in_f32)
{
    net n;
    KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, NULL, .wrap_class = "mixture", .seed = 42,
                                          .param_dtype = KN_BF16, .reduce_dtype = KN_F32),
             "%s", kn_error());
    kn_optim *o = kn_sgd(&n, .lr = 0.05);
    double first = 0, last = 0;
    for (int step = 0; step < 10; step++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *l = net_loss(&n, 0, 0);
        last = kn_item(l);
        first = step ? first : last;
        KN_CHECK(kn_backward(l) && kn_step(o), "%s", kn_error());
        kn_scope_end(scope);
    }
    KN_CHECK(last < 0.9 * first, "%g, then %g", first, last);
    kn_optim_free(o);
    kn_module_free(&n);
}
