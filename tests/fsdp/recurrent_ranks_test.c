/* tests/fsdp/recurrent_ranks_test.c: recurrent layers and CTC over ranks: the bits of one process
 * in each layout and in a recompute; units of bf16; predictions on meta. */
#include "tests/fsdp/matrix.h"
#include "tests/kn_test.h"
#include "tests/owned.h"

enum { FRAMES = 7, BATCH = 3, IN = 4, HIDDEN = 5, CLASSES = 4, LABELS = 2, MICRO = 4 };

typedef struct net {
    kn_module base;
    kn_lstm lstm;
    kn_gru gru;
    kn_linear head;
} net;

/* x, lengths -> logits; the GRU begins with the LSTM's last states. */
static kn_values net_forward(kn_module *self, kn_values in, const void *arg)
{
    net *n = (net *)self;
    (void)arg;
    const kn_values v = kn_call_n(&n->lstm, KN_VALUES(in.v[0], NULL, NULL, in.v[1]), NULL, 0);
    if (v.n != 3)
        return (kn_values){ 0 };
    kn_tensor *h = kn_add(v.v[1], v.v[2]); /* [2 ways, B, H]: as many as the GRU has layers */
    return KN_VALUES(
        kn_call(&n->head, kn_call_n(&n->gru, KN_VALUES(v.v[0], h, in.v[1]), NULL, 0).v[0]));
}

static bool net_init(void *own)
{
    net *n = own;
    *n = (net){ 0 };
    return kn_module_init_n(&n->base, net_forward) && kn_module_defaults(n, .device = KN_META) &&
           kn_lstm_init(&n->lstm, &n->base, "a", IN, HIDDEN, .bidirectional = true) &&
           kn_gru_init(&n->gru, &n->base, "b", 2 * HIDDEN, HIDDEN, .layers = 2, .dropout = 0.2) &&
           kn_linear_init(&n->head, &n->base, "head", HIDDEN, CLASSES);
}

static kn_tensor *loss_on(void *n, kn_device d, int step, int micro)
{
    const int64_t frames[BATCH] = { 7, 4 + micro % 3, 5 }, labels[BATCH] = { 2, 1, 2 };
    const int64_t target[BATCH * LABELS] = { 1, 2, 3, 1, 2, 2 };
    const uint64_t draw = (uint64_t)(step * MICRO + micro);
    kn_tensor *x = d == KN_META ? kn_zeros(KN_F32, d, KN_SHAPE(FRAMES, BATCH, IN))
                                : kn_randn(KN_F32, d, 4, draw, KN_SHAPE(FRAMES, BATCH, IN));
    kn_tensor *length = d == KN_META ? kn_zeros(KN_I64, d, KN_SHAPE(BATCH))
                                     : kn_from(KN_I64, d, frames, KN_SHAPE(BATCH));
    kn_tensor *count = d == KN_META ? length : kn_from(KN_I64, d, labels, KN_SHAPE(BATCH));
    kn_tensor *targets = d == KN_META ? kn_zeros(KN_I64, d, KN_SHAPE(BATCH, LABELS))
                                      : kn_from(KN_I64, d, target, KN_SHAPE(BATCH, LABELS));
    kn_tensor *y = kn_log_softmax(kn_cast(kn_call_with(n, x, length), KN_F32));
    return kn_ctc_loss(y, targets, length, count);
}

static kn_tensor *loss(void *n, int step, int micro)
{
    return loss_on(n, KN_CPU, step, micro);
}

KN_TEST(recurrent_ranks, same_bits)
{
    MATRIX_CHECK_OWN(.bytes = sizeof(net), .declare = net_init, .loss = loss, .steps = 3,
                     .o.wrap_class = "lstm,gru");
}

KN_TEST(recurrent_ranks, learns_in_units_of_bf16)
{
    net n;
    KN_CHECK(net_init(&n) &&
             kn_fsdp_wrap(&n, NULL, .wrap_class = "lstm,gru", .seed = 42, .param_dtype = KN_BF16));
    matrix_check_learning(&n, loss, kn_adamw(&n, .lr = 0.05), 40, 0.7);
}

KN_TEST(recurrent_ranks, walk_on_meta_among_simulated_ranks)
{
    net n;
    OWNED_SIMULATED kn_comm *world = kn_comm_simulated(16, 0, 0);
    KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, world, .wrap_class = "lstm,gru", .device = KN_META));
    kn_recompute(&n.lstm, true);
    for (int step = 0; step < 2; step++) {
        IN_SCOPE;
        KN_CHECK(kn_backward(loss_on(&n, KN_META, step, 0)));
        kn_zero_grad(&n);
    }
    kn_module_free(&n);
}
