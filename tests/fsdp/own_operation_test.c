/* tests/fsdp/own_operation_test.c: operations of one's own (autograd/function.h) in sharded models:
 * the same bits as one process, precision of units, meta among simulated ranks. One is made of
 * operations, with a parameter that it saves; the other reads raw data. */
#include "tests/fsdp/matrix.h"
#include "tests/owned.h"

enum { STEPS = 3, MICRO = 4, BATCH = 3, IN = 14, HIDDEN = 15, CLASSES = 3 };

/* y = x sigmoid(b x), b a scalar */
static kn_values swish_forward(kn_function_run *run, kn_values in)
{
    kn_save_for_backward(run, in.v[0], in.v[1]);
    return KN_VALUES(kn_mul(in.v[0], kn_sigmoid(kn_mul(in.v[0], in.v[1]))));
}

static kn_values swish_backward(kn_function_run *run, kn_values dout)
{
    kn_tensor *x = run->saved.v[0], *b = run->saved.v[1], *dy = dout.v[0];
    kn_tensor *s = kn_sigmoid(kn_mul(x, b)), *slope = kn_mul(kn_sub(s, kn_mul(s, s)), x);
    return KN_VALUES(kn_mul(dy, kn_add(s, kn_mul(slope, b))), sum_of(kn_mul(dy, kn_mul(slope, x))));
}

static const kn_function swish = { .name = "swish",
                                   .forward = swish_forward,
                                   .backward = swish_backward };

/* y = w rounded to quarters; the gradient goes straight through */
static kn_values quarters_forward(kn_function_run *run, kn_values in)
{
    kn_tensor *y = kn_empty_like(in.v[0]);
    const float *w = kn_read_data(in.v[0], KN_F32);
    float *out = kn_write_data(y, KN_F32);
    for (int64_t i = 0; kn_ok() && i < kn_numel(y); i++)
        out[i] = rintf(4 * w[i]) / 4;
    return KN_VALUES(y);
}

static kn_values quarters_backward(kn_function_run *run, kn_values dout)
{
    return KN_VALUES(dout.v[0]);
}

static kn_values quarters_shape(kn_function_run *run, kn_values in)
{
    return KN_VALUES(kn_empty_like(in.v[0]));
}

static const kn_function quarters = { .name = "quarters",
                                      .forward = quarters_forward,
                                      .backward = quarters_backward,
                                      .shape = quarters_shape };

/* ---- a model of both ------------------------------------------------------------------------- */

typedef struct coarse {
    kn_module base;
    kn_tensor *weight, *beta; /* [out, in], [] */
} coarse;

typedef struct net {
    kn_module base;
    coarse a, b;
} net;

static kn_tensor *coarse_forward(kn_module *self, kn_tensor *x) /* (B, in) -> (B, out) */
{
    coarse *m = (coarse *)self;
    kn_tensor *w = kn_cast(m->weight, KN_F32);
    w = kn_cast(kn_function_call(&quarters, w), kn_dtype_of(x));
    return kn_function_call(&swish, kn_linear(x, w, NULL, false), m->beta);
}

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    net *n = (net *)self;
    return kn_call(&n->b, kn_call(&n->a, x));
}

static bool coarse_init(coarse *m, kn_module *parent, const char *name, int64_t in, int64_t out)
{
    kn_module_init(&m->base, coarse_forward);
    kn_module_add(parent, name, &m->base);
    m->weight =
        kn_parameter(&m->base, "weight", KN_F32, KN_META, KN_NORMAL_INIT(0.7), KN_SHAPE(out, in));
    m->beta = kn_parameter(&m->base, "beta", KN_F32, KN_META, KN_ONES_INIT, KN_SCALAR);
    return m->beta != NULL;
}

static bool net_init(void *own)
{
    net *n = own;
    *n = (net){ 0 };
    return kn_module_init(&n->base, net_forward) && coarse_init(&n->a, &n->base, "a", IN, HIDDEN) &&
           coarse_init(&n->b, &n->base, "b", HIDDEN, CLASSES);
}

static kn_tensor *net_loss(void *n, kn_device d, int step, int micro)
{
    if (d == KN_META)
        return mean_of(kn_call(n, kn_zeros(KN_F32, d, KN_SHAPE(BATCH, IN))));
    int64_t targets[BATCH];
    for (int i = 0; i < BATCH; i++)
        targets[i] = (i + micro + step) % CLASSES;
    kn_tensor *x = kn_randn(KN_F32, d, 4, (uint64_t)(step * MICRO + micro), KN_SHAPE(BATCH, IN));
    kn_tensor *y = kn_from(KN_I64, d, targets, KN_SHAPE(BATCH));
    return kn_cross_entropy(kn_cast(kn_call(n, x), KN_F32), y);
}

/* ---- over ranks ------------------------------------------------------------------------------ */

static kn_tensor *loss(void *n, int step, int micro)
{
    return net_loss(n, KN_CPU, step, micro);
}

KN_TEST(own_operation, same_bits_over_ranks)
{
    MATRIX_CHECK_OWN(.bytes = sizeof(net), .declare = net_init, .loss = loss, .steps = STEPS,
                     .o.wrap_class = "coarse");
}

/* ---- precision, meta, wrong use -------------------------------------------------------------- */

/* In a unit of bf16 the operation sees bf16, and gradients arrive in f32. */
KN_TEST(own_operation, computes_in_the_dtype_of_its_unit)
{
    net n;
    KN_CHECK(net_init(&n) &&
             kn_fsdp_wrap(&n, NULL, .wrap_class = "coarse", .seed = 42, .param_dtype = KN_BF16));
    kn_optim *o = kn_sgd(&n, .lr = 0.1);
    matrix_check_learning(&n, loss, o, 20, 0.9);
}

KN_TEST(own_operation, walks_on_meta_among_simulated_ranks)
{
    net n;
    OWNED_SIMULATED kn_comm *world = kn_comm_simulated(64, 0, 0);
    KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, world, .wrap_class = "coarse", .device = KN_META));
    for (int step = 0; step < 2; step++) {
        kn_scope scope = kn_scope_begin();
        KN_CHECK(kn_backward(net_loss(&n, KN_META, step, 0)));
        kn_scope_end(scope);
        kn_zero_grad(&n);
    }
    kn_module_free(&n);
}

/* The saved tensor is a unit's: it is gathered again before backward, and a parameter that was
 * written between is noticed. */
KN_TEST(own_operation, a_parameter_that_was_saved_is_versioned)
{
    OWNED_MODULE net n;
    KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, NULL, .wrap_class = "coarse", .seed = 42,
                                          .reshard_after_forward = KN_RESHARD_NEVER));
    kn_tensor *l = net_loss(&n, KN_CPU, 0, 0);
    bool mode = kn_set_grad_mode(false);
    KN_CHECK(kn_fill_(n.b.beta, 2));
    kn_set_grad_mode(mode);
    REFUSED(kn_backward(l), "backward of 'swish': its saved tensor 2 was written in place");
}
