/* tests/fsdp/position_bias_test.c: sharded attention whose mask is a parameter, under losses of
 * elements and of rows: the same bits as one process, with recompute too; bf16 trains. */
#include "tests/fsdp/matrix.h"

enum { STEPS = 3, MICRO = 4, BATCH = 2, HEADS = 2, LENGTH = 5, WIDTH = 8, DEPTH = 4 };

/* Attention with a bias for each pair of positions, over a window. */
typedef struct block {
    kn_module base;
    kn_linear qkv, out;
    kn_tensor *bias; /* [HEADS, LENGTH, LENGTH] */
} block;

typedef struct net {
    kn_module base;
    block a, b;
} net;

static kn_tensor *heads_of(kn_tensor *x) /* (B, T, C) -> (B, H, T, D) */
{
    x = kn_reshape(x, KN_SHAPE(BATCH, LENGTH, HEADS, DEPTH));
    return kn_transpose(x, 1, 2);
}

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *m = (block *)self;
    kn_tensor *part[3];
    if (!kn_chunk(kn_call(&m->qkv, x), -1, 3, part))
        return NULL;
    kn_tensor *y =
        kn_scaled_dot_product_attention(heads_of(part[0]), heads_of(part[1]), heads_of(part[2]),
                                        .mask = m->bias, .causal = true, .window = 3);
    y = kn_reshape(kn_transpose(y, 1, 2), KN_SHAPE(BATCH, LENGTH, WIDTH));
    return kn_add(x, kn_call(&m->out, y));
}

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    net *n = (net *)self;
    return kn_call(&n->b, kn_call(&n->a, x));
}

static bool block_init(block *m, kn_module *parent, const char *name)
{
    kn_module_init(&m->base, block_forward);
    kn_module_add(parent, name, &m->base);
    kn_linear_init(&m->qkv, &m->base, "qkv", WIDTH, 3 * WIDTH, .device = KN_META);
    kn_linear_init(&m->out, &m->base, "out", WIDTH, WIDTH, .device = KN_META);
    m->bias = kn_parameter(&m->base, "bias", KN_F32, KN_META, KN_NORMAL_INIT(0.5),
                           KN_SHAPE(HEADS, LENGTH, LENGTH));
    return m->bias != NULL;
}

static bool net_init(void *own)
{
    net *n = own;
    *n = (net){ 0 };
    return kn_module_init(&n->base, net_forward) && block_init(&n->a, &n->base, "a") &&
           block_init(&n->b, &n->base, "b");
}

static kn_tensor *loss(void *n, int step, int micro)
{
    uint64_t draw = (uint64_t)(step * MICRO + micro);
    int64_t classes[BATCH * LENGTH];
    for (int i = 0; i < BATCH * LENGTH; i++)
        classes[i] = (i + micro) % WIDTH;
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 4, draw, KN_SHAPE(BATCH, LENGTH, WIDTH));
    kn_tensor *t = kn_rand(KN_F32, KN_CPU, 5, draw, KN_SHAPE(BATCH, LENGTH, WIDTH));
    kn_tensor *y = kn_cast(kn_call(n, x), KN_F32);
    kn_tensor *to = kn_from(KN_I64, KN_CPU, classes, KN_SHAPE(BATCH, LENGTH));
    kn_tensor *sum = kn_binary_cross_entropy_with_logits(y, t);
    sum = kn_add(sum,
                 kn_mean(kn_cross_entropy(y, to, .reduction = KN_REDUCTION_NONE), 0, NULL, false));
    return kn_add(sum, kn_huber_loss(kn_normalize(y, .dim = -1), t));
}

KN_TEST(position_bias, same_bits_over_ranks)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        MATRIX_CHECK(.model = MATRIX_OWN, .bytes = sizeof(net), .declare = net_init, .loss = loss,
                     .natural = true, .threads = true, .recompute = ranks == 2, .ranks = ranks,
                     .rounds = MICRO / ranks, .steps = STEPS, .o.wrap_class = "linear");
}

KN_TEST(position_bias, trains_in_bf16)
{
    net n;
    KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, NULL, .param_dtype = KN_BF16, .seed = 42));
    matrix_check_learning(&n, loss, kn_adamw(&n, .lr = 0.05), 12, 0.8);
}
