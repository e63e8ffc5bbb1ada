/* tests/fsdp/penalty_test.c: a penalty on the gradient of the input (kn_grad_of with .create_graph)
 * of sharded models: its backward goes through forward and the first backward, whose parameters are
 * gathered once more, with the bits of one process. */
#include "tests/fsdp/matrix.h"
#include "tests/owned.h"

enum { STEPS = 3, MICRO = 4, BATCH = 3, IN = 6, HIDDEN = 10 };

typedef struct block {
    kn_module base;
    kn_linear fc;
    kn_layer_norm norm;
} block;

typedef struct net {
    kn_module base;
    block a, b;
    kn_linear head;
} net;

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *m = (block *)self;
    return kn_silu(kn_call(&m->norm, kn_call(&m->fc, x)));
}

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    net *n = (net *)self;
    return kn_call(&n->head, kn_call(&n->b, kn_call(&n->a, x)));
}

static bool block_init(block *m, kn_module *parent, const char *name, int64_t in)
{
    kn_module_init(&m->base, block_forward);
    kn_module_add(parent, name, &m->base);
    return kn_linear_init(&m->fc, &m->base, "fc", in, HIDDEN, .device = KN_META) &&
           kn_layer_norm_init(&m->norm, &m->base, "norm", HIDDEN, .device = KN_META);
}

static bool net_init(void *own)
{
    net *n = own;
    *n = (net){ 0 };
    return kn_module_init(&n->base, net_forward) && block_init(&n->a, &n->base, "a", IN) &&
           block_init(&n->b, &n->base, "b", HIDDEN) &&
           kn_linear_init(&n->head, &n->base, "head", HIDDEN, 1, .device = KN_META);
}

/* mean y + 5 (|dy/dx| - 1)^2 */
static kn_tensor *penalized(void *n, kn_device d, int step, int micro)
{
    kn_tensor *x = d == KN_META ? kn_zeros(KN_F32, d, KN_SHAPE(BATCH, IN))
                                : kn_randn(KN_F32, d, 4, (uint64_t)(step * MICRO + micro),
                                           KN_SHAPE(BATCH, IN));
    kn_tensor *g = NULL, *y = kn_call(n, kn_require_grad(x, true));
    if (!kn_grad_of(y, &x, 1, &g, .grad = kn_ones_like(y), .create_graph = true))
        return NULL;
    kn_tensor *norm = kn_sqrt(kn_sum(kn_square(g), KN_SHAPE(1), false));
    return kn_add(mean_of(y), kn_scale(mean_of(kn_square(kn_add_scalar(norm, -1))), 5));
}

static kn_tensor *loss(void *n, int step, int micro)
{
    return penalized(n, KN_CPU, step, micro);
}

#define SPEC                                                                                       \
    .model = MATRIX_OWN, .natural = true, .bytes = sizeof(net), .declare = net_init, .loss = loss, \
    .steps = STEPS

KN_TEST(penalty, same_bits_over_ranks)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        const int rounds = MICRO / ranks;
        MATRIX_CHECK(SPEC, .ranks = ranks, .rounds = rounds, .threads = true,
                     .o.wrap_class = "block");
        MATRIX_CHECK(SPEC, .ranks = ranks, .rounds = rounds, .threads = true, .whole = true);
        MATRIX_CHECK(SPEC, .ranks = ranks, .rounds = rounds, .threads = true,
                     .o.wrap_class = "block,linear", .o.strategy = KN_SHARD_GRAD_OP);
        MATRIX_CHECK(SPEC, .ranks = ranks, .rounds = rounds, .threads = true, .workers = true,
                     .o.wrap_class = "block,linear,layer_norm",
                     .o.reshard_after_forward = KN_RESHARD_ALWAYS);
    }
}
