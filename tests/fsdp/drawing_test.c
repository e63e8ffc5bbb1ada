/* tests/fsdp/drawing_test.c: keyed draws, einsum and parameters whose elements are moved
 * (autograd/operations.h) in sharded models: the same bits as one process, also under recompute;
 * gradients in f32 of units that compute in bf16. */
#include "tests/fsdp/matrix.h"
#include "tests/fsdp/ranks.h"

enum { STEPS = 3, MICRO = 4, BATCH = 3, WIDTH = 12 };

/* y = x + noise that the parameters shape. */
typedef struct noisy {
    kn_module base;
    kn_tensor *mix, *line, *frame; /* [WIDTH, WIDTH], [WIDTH + 2], [WIDTH - 3] */
} noisy;
typedef struct net {
    kn_module base;
    noisy a, b;
} net;

/* The leaves' own gradients come from einsum, diagonal, flip, roll, windows and pad. */
static kn_tensor *noisy_forward(kn_module *self, kn_tensor *x)
{
    noisy *m = (noisy *)self;
    kn_tensor *part[2], *noise = kn_randn_like(x);
    kn_tensor *some = kn_mul(kn_bernoulli(kn_full_like(x, 0.75)), kn_rand_like(x));
    kn_tensor *pick = kn_multinomial(kn_full_like(x, 1), WIDTH / 2, false); /* [BATCH, WIDTH/2] */
    kn_tensor *order = kn_randint_like(x, 1, 5);
    kn_tensor *y = kn_einsum("bi,bi,ji->bj", 3, (kn_tensor *[]){ x, noise, m->mix });
    kn_tensor *windows = kn_sum(kn_unfold(m->line, 0, 3, 1), 1, (int64_t[]){ 1 }, false);
    kn_tensor *framed = kn_pad(m->frame, KN_PAD_CONSTANT, 0.5, KN_SHAPE(2, 1));
    kn_tensor *turned = kn_roll(kn_flip(m->line, KN_SHAPE(0)), 1, (int64_t[]){ 3 }, NULL);
    if (!kn_split(turned, 0, 2, (int64_t[]){ WIDTH, 2 }, part))
        return NULL;
    y = kn_add(kn_add(y, kn_mul(some, windows)), kn_mul(order, framed));
    y = kn_add(y, kn_add(kn_diagonal(m->mix, 0, 0, 1), part[0]));
    return kn_add(x, kn_scatter_add(y, 1, pick, kn_slice(noise, 1, 0, WIDTH / 2)));
}

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    net *n = (net *)self;
    return kn_call(&n->b, kn_call(&n->a, x));
}

static bool noisy_init(noisy *m, kn_module *parent, const char *name)
{
    kn_module_init(&m->base, noisy_forward);
    kn_module_add(parent, name, &m->base);
    m->mix =
        kn_parameter(&m->base, "mix", KN_F32, KN_META, KN_NORMAL_INIT(0.4), KN_SHAPE(WIDTH, WIDTH));
    m->line =
        kn_parameter(&m->base, "line", KN_F32, KN_META, KN_NORMAL_INIT(0.4), KN_SHAPE(WIDTH + 2));
    m->frame =
        kn_parameter(&m->base, "frame", KN_F32, KN_META, KN_NORMAL_INIT(0.4), KN_SHAPE(WIDTH - 3));
    return m->frame != NULL;
}

static bool net_init(void *own)
{
    net *n = own;
    *n = (net){ 0 };
    return kn_module_init(&n->base, net_forward) && noisy_init(&n->a, &n->base, "a") &&
           noisy_init(&n->b, &n->base, "b");
}

static kn_tensor *net_loss(void *n, int step, int micro)
{
    const uint64_t stream = (uint64_t)(step * MICRO + micro);
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 4, stream, KN_SHAPE(BATCH, WIDTH));
    kn_tensor *y = kn_cast(kn_call(n, x), KN_F32);
    return kn_mean(kn_mul(y, y), 0, NULL, false);
}

KN_TEST(drawing, same_bits_over_ranks)
{
    MATRIX_CHECK_OWN(.bytes = sizeof(net), .declare = net_init, .loss = net_loss, .steps = STEPS,
                     .o.wrap_class = "noisy");
}

/* A program that never calls kn_set_step draws as one that begins with step 0. */
RANK_TEST(drawing, the_first_step_draws_by_rank, .threads = "4")
{
    KN_CHECK(kn_comm_size(world) == 4);
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(8));
    kn_tensor *first = kn_rand_like(x);
    kn_set_step(0);
    kn_tensor *again = kn_rand_like(x);
    KN_CHECK(first && again && memcmp(kn_data(first), kn_data(again), 8 * sizeof(float)) == 0);
}

/* Recompute draws again what forward drew: the gradients are those without it. */
KN_TEST(drawing, recompute_changes_nothing)
{
    double norm[2];
    for (int again = 0; again < 2; again++) {
        OWNED_MODULE net n;
        KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, NULL, .wrap_class = "noisy", .seed = 42));
        KN_CHECK(!again || (kn_recompute(&n.a, true) && kn_recompute(&n.b, true)));
        OWNED_OPTIM kn_optim *o = kn_sgd(&n, .lr = 0.05);
        kn_set_step(5);
        KN_CHECK(kn_backward(net_loss(&n, 0, 0)));
        norm[again] = kn_item(kn_clip_grad_norm(&n, 1e9));
        KN_CHECK(norm[again] > 0);
    }
    KN_CHECK(norm[0] == norm[1], "%.17g, recomputed %.17g", norm[0], norm[1]);
}

KN_TEST(drawing, gradients_of_bf16_units_in_f32)
{
    net n;
    KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, NULL, .wrap_class = "noisy", .seed = 42,
                                          .param_dtype = KN_BF16, .reduce_dtype = KN_F32));
    kn_optim *o = kn_sgd(&n, .lr = 0.01);
    matrix_check_learning(&n, net_loss, o, 10, 0.9);
}
