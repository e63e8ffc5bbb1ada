/* tests/fsdp/linear_loss_ranks_test.c: a head by kn_linear_cross_entropy, tied to the embedding,
 * with a bias, whose rows have several chunks: the same bits sharded as in one process. */
#include "tests/fsdp/matrix.h"

enum { STEPS = 3, VOCAB = 13, WIDTH = 7, ROWS = 2, LEN = 550 };

typedef struct middle {
    kn_module base;
    kn_linear fc;
} middle;
typedef struct net {
    kn_module base;
    kn_embedding embed;
    middle a, b;
    kn_tensor *bias; /* [VOCAB] */
} net;

static kn_tensor *middle_forward(kn_module *self, kn_tensor *x)
{
    middle *m = (middle *)self;
    return kn_add(x, kn_tanh(kn_call(&m->fc, x)));
}

static kn_values net_forward(kn_module *self, kn_values in, const void *arg)
{
    net *n = (net *)self;
    kn_tensor *x = kn_call(&n->b, kn_call(&n->a, kn_call(&n->embed, in.v[0])));
    return KN_VALUES(kn_linear_cross_entropy(x, kn_module_param(&n->embed, "weight"), in.v[1],
                                             .bias = n->bias, .smoothing = 0.1));
}

static bool middle_init(middle *m, kn_module *parent, const char *name)
{
    return kn_module_init(&m->base, middle_forward) && kn_module_add(parent, name, &m->base) &&
           kn_linear_init(&m->fc, &m->base, "fc", WIDTH, WIDTH, .device = KN_META);
}

static bool net_init(void *own)
{
    net *n = own;
    *n = (net){ 0 };
    bool ok = kn_module_init_n(&n->base, net_forward) &&
              kn_embedding_init(&n->embed, &n->base, "embed", VOCAB, WIDTH, .device = KN_META) &&
              middle_init(&n->a, &n->base, "a") && middle_init(&n->b, &n->base, "b");
    n->bias = kn_parameter(&n->base, "bias", KN_F32, KN_META, KN_NORMAL_INIT(0.5), KN_SHAPE(VOCAB));
    return ok && n->bias &&
           kn_share_parameter(&n->base, "head", kn_module_param(&n->embed, "weight"));
}

static kn_tensor *net_loss(void *own, int step, int micro)
{
    int64_t x[ROWS * LEN], y[ROWS * LEN];
    for (int i = 0; i < ROWS * LEN; i++) {
        x[i] = (i * 5 + step * 3 + micro) % VOCAB;
        y[i] = i % 9 == micro % 9 ? -100 : (x[i] * 3 + 1) % VOCAB;
    }
    kn_values in = KN_VALUES(kn_from(KN_I64, KN_CPU, x, KN_SHAPE(ROWS, LEN)),
                             kn_from(KN_I64, KN_CPU, y, KN_SHAPE(ROWS, LEN)));
    return kn_call_n(own, in, NULL, 0).v[0];
}

KN_TEST(linear_loss_ranks, same_bits)
{
    MATRIX_CHECK_OWN(.bytes = sizeof(net), .declare = net_init, .loss = net_loss, .steps = STEPS,
                     .o.wrap_class = "middle");
}
