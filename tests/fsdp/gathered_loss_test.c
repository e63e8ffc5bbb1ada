/* tests/fsdp/gathered_loss_test.c: collectives on tensors (autograd/collectives.h) in and around
 * sharded modules. Two towers learn by a contrastive loss over the batches of all ranks; their
 * blocks take off the mean over those batches. Operations speak to other ranks, or functions of the
 * test's own, or batch norms. N ranks equal one process with the whole batch closely, and have the
 * same bits however they shard, recompute, and whatever else they call. */
#include "tests/fsdp/ranks.h"
#include "autograd/collectives.h"
#include "fsdp/fsdp.h"
#include "nn/layers.h"

enum { ALL = 12, IN = 6, HIDDEN = 8, OUT = 4, STEPS = 4 };

/* Ranks meet in operations, in those of the test's own, or in batch norms. */
typedef enum meets { BY_PARTS, BY_FUNCTION, BY_NORM } meets;

typedef struct block {
    kn_module base;
    kn_linear fc;
    kn_comm *comm; /* whose batches are one */
    meets by;
} block;

typedef struct tower {
    kn_module base;
    block a, b;
} tower;

typedef struct pair {
    kn_module base;
    tower image, text;
    kn_linear spare; /* a unit that not every rank's loss reaches */
    kn_linear last;  /* one that runs behind the loss */
    bool detaches, behind;
} pair;

static kn_tensor *centred(kn_comm *ranks, kn_tensor *x)
{
    kn_tensor *mean = kn_mean(x, 1, (int64_t[]){ 0 }, false);
    return mean ? kn_sub(x, kn_mean_tensor(ranks, mean)) : NULL;
}

static kn_values centre_forward(kn_function_run *run, kn_values in)
{
    return KN_VALUES(centred(*(kn_comm *const *)run->arg, in.v[0]));
}

static kn_values centre_backward(kn_function_run *run, kn_values dout)
{
    return KN_VALUES(centred(*(kn_comm *const *)run->arg, dout.v[0]));
}

static const kn_function centre = { .name = "centre",
                                    .forward = centre_forward,
                                    .backward = centre_backward };

static kn_values gather_forward(kn_function_run *run, kn_values in)
{
    return KN_VALUES(kn_all_gather_tensor(*(kn_comm *const *)run->arg, in.v[0], 0));
}

/* By a call of comm/comm.h. */
static kn_values gather_backward(kn_function_run *run, kn_values dout)
{
    kn_tensor *dy = kn_contiguous(dout.v[0]),
              *dx = kn_empty(run->dtype[0], KN_CPU, run->ndim[0], run->shape[0]);
    return dy && dx &&
                   kn_reduce_scatter(*(kn_comm *const *)run->arg, kn_data(dx), NULL, kn_data(dy),
                                     kn_numel(dx), KN_F32, KN_F32, kn_compute_stream(KN_CPU),
                                     "gather")
               ? KN_VALUES(dx)
               : KN_VALUES(NULL);
}

static const kn_function gather = { .name = "gather",
                                    .forward = gather_forward,
                                    .backward = gather_backward };

static kn_tensor *normed(kn_comm *ranks, kn_tensor *x)
{
    return kn_batch_norm(x, NULL, NULL, NULL, NULL, .training = true, .sync = ranks);
}

static kn_tensor *call(const kn_function *f, kn_comm *ranks, kn_tensor *x)
{
    return kn_function_call_n(f, KN_VALUES(x), &ranks, sizeof ranks).v[0];
}

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *m = (block *)self;
    kn_tensor *y = kn_call(&m->fc, x);
    return kn_tanh(m->by == BY_NORM       ? normed(m->comm, y)
                   : m->by == BY_FUNCTION ? call(&centre, m->comm, y)
                                          : centred(m->comm, y));
}

static kn_tensor *tower_forward(kn_module *self, kn_tensor *x)
{
    tower *m = (tower *)self;
    return kn_call(&m->b, kn_call(&m->a, x));
}

/* The towers' results, and one of the spare unit, which runs between them. */
static kn_values pair_forward(kn_module *self, kn_values in, const void *arg)
{
    (void)arg;
    pair *m = (pair *)self;
    kn_tensor *a = kn_call(&m->image, in.v[0]);
    kn_tensor *b = m->behind ? kn_call(&m->text, in.v[1]) : NULL;
    kn_tensor *more = kn_call(&m->spare, m->detaches ? kn_detach(a) : a);
    b = b ? b : kn_call(&m->text, in.v[1]);
    return KN_VALUES(a, b, m->detaches ? kn_detach(more) : more);
}

static bool block_init(block *m, tower *of, const char *name, int64_t in, int64_t out)
{
    return kn_module_init(&m->base, block_forward) && kn_module_add(&of->base, name, &m->base) &&
           kn_linear_init(&m->fc, &m->base, "fc", in, out);
}

static bool tower_init(tower *m, pair *of, const char *name, kn_comm *c, meets by)
{
    m->a.comm = m->b.comm = c;
    m->a.by = m->b.by = by;
    return kn_module_init(&m->base, tower_forward) && kn_module_add(&of->base, name, &m->base) &&
           block_init(&m->a, m, "a", IN, HIDDEN) && block_init(&m->b, m, "b", HIDDEN, OUT);
}

static kn_tensor *rows(uint64_t seed, int step, kn_comm *c)
{
    const int64_t each = ALL / kn_comm_size(c), first = each * kn_rank(c);
    kn_tensor *all = kn_randn(KN_F32, KN_CPU, seed, (uint64_t)step, KN_SHAPE(ALL, IN));
    return kn_slice(all, 0, first, first + each);
}

/* This rank's rows against those of all ranks, both ways; or as they vary together. */
static kn_tensor *contrast(kn_tensor *a, kn_tensor *b, kn_comm *c, meets by)
{
    const int64_t each = ALL / kn_comm_size(c);
    kn_tensor *at = kn_add_scalar(kn_arange(KN_I64, KN_CPU, each), (double)(each * kn_rank(c)));
    a = kn_cast(a, KN_F32), b = kn_cast(b, KN_F32);
    if (by == BY_NORM)
        return kn_neg(mean_of(kn_mul(normed(c, a), normed(c, b))));
    kn_tensor *all_a = by ? call(&gather, c, a) : kn_all_gather_tensor(c, a, 0),
              *all_b = by ? call(&gather, c, b) : kn_all_gather_tensor(c, b, 0);
    if (!all_a || !all_b)
        return NULL;
    return kn_add(kn_cross_entropy(kn_matmul(a, kn_transpose(all_b, 0, 1)), at),
                  kn_cross_entropy(kn_matmul(b, kn_transpose(all_a, 0, 1)), at));
}

typedef struct how {
    kn_strategy strategy;
    kn_layout_kind layout;
    bool recompute, around; /* blocks; towers */
    bool frozen;            /* the text's tower */
    bool evaluates;         /* before each step */
    bool branches;          /* rank 0's loss alone reaches the spare unit, */
    bool late;              /* which runs once more behind the loss */
    bool behind;            /* the texts' tower, and another unit runs behind the loss */
    meets by;
    kn_dtype dtype;
} how;

static bool prepare(pair *p, kn_comm *c, const how *h)
{
    const bool alone = kn_comm_size(c) == 1;
    *p = (pair){ .detaches = h->branches && kn_rank(c) > 0, .behind = h->behind };
    bool ok = kn_module_init_n(&p->base, pair_forward) &&
              tower_init(&p->image, p, "image", c, h->by) &&
              tower_init(&p->text, p, "text", c, h->by) &&
              kn_linear_init(&p->spare, &p->base, "spare", OUT, OUT) &&
              kn_linear_init(&p->last, &p->base, "last", OUT, OUT);
    if (h->frozen)
        kn_freeze(&p->text, true);
    if (h->recompute)
        ok = ok && kn_recompute(&p->image.a, true) && kn_recompute(&p->text.b, true);
    if (h->around)
        ok = ok && kn_recompute(&p->image, true);
    return ok &&
           (alone ? kn_materialize(p, KN_CPU, 7)
                  : kn_fsdp_wrap(p, c, .strategy = h->strategy, .layout = h->layout,
                                 .wrap_class = "block,linear", .param_dtype = h->dtype, .seed = 7));
}

static bool step(pair *p, kn_optim *opt, kn_comm *c, const how *h, int number, double *loss)
{
    IN_SCOPE;
    kn_values in = KN_VALUES(rows(1, number, c), rows(2, number, c));
    if (h->evaluates) {
        WITHOUT_GRAD;
        kn_values out = kn_call_n(p, in, NULL, 0);
        if (out.n != 3 || !contrast(out.v[0], out.v[1], c, h->by))
            return false;
    }
    kn_values out = kn_call_n(p, in, NULL, 0);
    kn_tensor *own = out.n == 3 ? contrast(out.v[0], out.v[1], c, h->by) : NULL;
    if (h->behind)
        out.v[2] = kn_add(out.v[2], kn_call(&p->last, kn_detach(out.v[0])));
    if (h->late) {
        kn_tensor *more = kn_call(&p->spare, kn_detach(out.v[0]));
        out.v[2] = kn_add(out.v[2], p->detaches ? kn_detach(more) : more);
    }
    if (!own || !kn_backward(kn_add(own, kn_cast(mean_square(out.v[2]), KN_F32))) || !kn_step(opt))
        return false;
    *loss = kn_mean_over_ranks(c, kn_item(own));
    return kn_ok();
}

static void train(kn_comm *c, const how *h, double *loss)
{
    OWNED_MODULE pair p;
    KN_CHECK(prepare(&p, c, h), "prepare");
    OWNED_OPTIM kn_optim *opt = kn_sgd(&p, .lr = 0.5);
    for (int i = 0; i < STEPS; i++)
        KN_CHECK(step(&p, opt, c, h, i, &loss[i]), "step %d", i);
}

static const how hows[] = {
    { .strategy = KN_FULL_SHARD },
    { .strategy = KN_SHARD_GRAD_OP, .recompute = true },
    { .strategy = KN_NO_SHARD, .evaluates = true },
    { .layout = KN_LAYOUT_PER_PARAM, .around = true },
    { .layout = KN_LAYOUT_RAGGED, .recompute = true, .around = true },
};
static const how others[] = {
    { .frozen = true },
    { .frozen = true, .recompute = true, .around = true },
    { .branches = true },
    { .branches = true, .around = true, .strategy = KN_NO_SHARD },
    { .branches = true, .late = true },
    { .branches = true, .behind = true },
    { .branches = true, .late = true, .recompute = true },
};

static void check(kn_comm *world, const how *h, const double *want, double close)
{
    double loss[STEPS];
    train(world, h, loss);
    for (int i = 0; i < STEPS; i++)
        KN_CHECK(fabs(loss[i] - want[i]) <= close, "step %d: %.9g, not %.9g", i, loss[i], want[i]);
}

RANK_TEST(gathered_loss, is_that_of_the_whole_batch, .threads = "234")
{
    double alone[STEPS], plain[STEPS], narrow[STEPS];
    train(kn_comm_self(), &hows[0], alone);
    check(world, &hows[0], alone, 1e-6);
    train(world, &hows[0], plain);
    for (size_t i = 1; i < sizeof hows / sizeof *hows; i++)
        check(world, &hows[i], plain, 0);
    train(world, &(how){ .dtype = KN_BF16 }, narrow);
    check(world, &(how){ .dtype = KN_BF16, .recompute = true }, narrow, 0);
    check(world, &(how){ .dtype = KN_BF16 }, alone, 0.05);
}

RANK_TEST(gathered_loss, where_parts_are_frozen_or_not_reached, .threads = "24", ROWS(others))
{
    how h = *(const how *)arg;
    for (h.by = BY_PARTS; h.by <= BY_NORM; h.by++) {
        double alone[STEPS];
        train(kn_comm_self(), &h, alone);
        check(world, &h, alone, h.branches ? 1 : h.by == BY_NORM ? 1e-5 : 1e-6);
    }
}
