/* tests/fsdp/penalty_test.c: a penalty on the gradient of the input (kn_grad_of with .create_graph)
 * of sharded models: its backward goes through forward and the first backward, whose parameters are
 * gathered once more, with the bits of one process. */
#include "tests/fsdp/matrix.h"
#include "tests/fsdp/ranks.h"
#include "tests/owned.h"

enum { STEPS = 3, MICRO = 4, BATCH = 3, IN = 6, HIDDEN = 20 };

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
    return kn_add(mean_of(kn_cast(y, KN_F32)),
                  kn_scale(mean_of(kn_square(kn_add_scalar(norm, -1))), 5));
}

static kn_tensor *loss(void *n, int step, int micro)
{
    return penalized(n, KN_CPU, step, micro);
}

#define SPEC                                                                                       \
    .model = MATRIX_OWN, .bytes = sizeof(net), .declare = net_init, .loss = loss, .steps = STEPS

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

KN_TEST(penalty, learns_in_a_unit_of_bf16)
{
    net n;
    KN_CHECK(net_init(&n) &&
             kn_fsdp_wrap(&n, NULL, .wrap_class = "block", .seed = 42, .param_dtype = KN_BF16));
    matrix_check_learning(&n, loss, kn_sgd(&n, .lr = 0.05), 20, 0.9);
}

KN_TEST(penalty, walks_on_meta_among_simulated_ranks)
{
    net n;
    OWNED_SIMULATED kn_comm *world = kn_comm_simulated(64, 0, 0);
    KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, world, .wrap_class = "block", .device = KN_META));
    for (int step = 0; step < 2; step++) {
        IN_SCOPE;
        KN_CHECK(kn_backward(penalized(&n, KN_META, step, 0)));
        kn_zero_grad(&n);
    }
    kn_module_free(&n);
}

KN_TEST(penalty, through_a_unit_that_recomputes_is_refused)
{
    OWNED_MODULE net n;
    KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, NULL, .wrap_class = "block", .seed = 42));
    kn_recompute(&n.b, true);
    REFUSED(loss(&n, 0, 0), "in a call of 'b' that recomputes, whose values aren't kept");
    kn_recompute(&n.b, false);
    KN_CHECK(kn_backward(loss(&n, 0, 0)));
}

/* ---- a step of descent inside of forward ----------------------------------------------------- */

typedef struct stepped {
    kn_module base;
    block inner;
    kn_tensor *w;
    bool through; /* the gradient goes through the block's call */
} stepped;

static kn_tensor *stepped_forward(kn_module *self, kn_tensor *x)
{
    stepped *m = (stepped *)self;
    kn_tensor *w = kn_scale(m->w, 1), *g;
    kn_tensor *y = kn_tanh(kn_linear(x, w, NULL, false));
    kn_tensor *first = mean_of(kn_square(m->through ? kn_call(&m->inner, y) : y));
    if (!kn_grad_of(first, &w, 1, &g, .create_graph = true))
        return NULL;
    y = kn_linear(x, kn_add_scaled(w, g, -1), NULL, false);
    return mean_of(kn_square(kn_call(&m->inner, y)));
}

static bool stepped_init(void *own)
{
    stepped *m = own;
    *m = (stepped){ 0 };
    kn_module_init(&m->base, stepped_forward);
    m->w = kn_parameter(&m->base, "w", KN_F32, KN_META, KN_NORMAL_INIT(0.5), KN_SHAPE(IN, IN));
    return block_init(&m->inner, &m->base, "inner", IN);
}

static kn_tensor *stepped_loss(void *m, int step, int micro)
{
    return kn_call(
        m, kn_randn(KN_F32, KN_CPU, 4, (uint64_t)(step * MICRO + micro), KN_SHAPE(BATCH, IN)));
}

KN_TEST(penalty, a_step_inside_of_forward)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        MATRIX_CHECK(.model = MATRIX_OWN, .bytes = sizeof(stepped), .declare = stepped_init,
                     .loss = stepped_loss, .steps = STEPS, .ranks = ranks, .rounds = MICRO / ranks,
                     .threads = true, .o.wrap_class = "block");
    OWNED_MODULE stepped m;
    KN_CHECK(stepped_init(&m) && kn_fsdp_wrap(&m, NULL, .wrap_class = "block", .seed = 42));
    m.through = true;
    REFUSED(stepped_loss(&m, 0, 0), "is in forward, so a backward cannot happen now");
    m.through = false;
    KN_CHECK(kn_backward(stepped_loss(&m, 0, 0)));
}

/* Each rank's loss is S^2, S the sum of all ranks' x: by each x the sum of n losses has 2 n S, and
 * the sum of n of those 2 n^2. */
RANK_TEST(penalty, goes_through_collectives, .threads = "124")
{
    const double n = kn_comm_size(world), S = n * (n + 1) / 2;
    kn_tensor *x = kn_require_grad(kn_full(KN_F64, KN_CPU, kn_rank(world) + 1, KN_SCALAR), true);
    kn_tensor *g, *gg;
    KN_CHECK(
        kn_grad_of(kn_square(kn_all_reduce_tensor(world, x)), &x, 1, &g, .create_graph = true));
    KN_CHECK(kn_grad_of(g, &x, 1, &gg));
    KN_CHECK(kn_item(g) == 2 * n * S && kn_item(gg) == 2 * n * n, "%g, %g", kn_item(g),
             kn_item(gg));
}

/* Two blocks of which rank 0's loss alone reaches the second. */
typedef struct branches {
    kn_module base;
    block a, b;
    bool leaves_out;
} branches;

static kn_tensor *branches_forward(kn_module *self, kn_tensor *x)
{
    branches *m = (branches *)self;
    kn_tensor *y = kn_call(&m->a, x), *more = kn_call(&m->b, kn_detach(x));
    return kn_add(y, m->leaves_out ? kn_detach(more) : more);
}

/* The first backward's collective has its place before the units that a rank doesn't reach. */
RANK_TEST(penalty, collectives_keep_their_place, .threads = "23")
{
    OWNED_MODULE branches m = { .leaves_out = kn_rank(world) > 0 };
    KN_CHECK(kn_module_init(&m.base, branches_forward) && block_init(&m.a, &m.base, "a", IN) &&
             block_init(&m.b, &m.base, "b", IN) &&
             kn_fsdp_wrap(&m, world, .wrap_class = "block", .seed = 42));
    kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(BATCH, IN)), true), *g;
    kn_tensor *sum = kn_all_reduce_tensor(world, kn_tanh(x)), *y = kn_call(&m, kn_detach(x));
    KN_CHECK(kn_grad_of(sum, &x, 1, &g, .grad = kn_square(sum), .create_graph = true));
    KN_CHECK(kn_backward(kn_add(mean_square(y), mean_square(g))));
}
