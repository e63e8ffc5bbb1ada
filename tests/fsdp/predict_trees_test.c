/* tests/fsdp/predict_trees_test.c: kn_fsdp_predict of a module that calls trees of units one after
 * the other, of all ranks, of groups of them, and of one: the ledger's bytes. */
#include "tests/fsdp/two.h"

enum { PARTS = 4, WIDE = 32 };

/* Two layers, each a unit, and a gain that its tree's root holds. */
typedef struct part {
    kn_module base;
    kn_linear fc[2];
    kn_tensor *gain;
} part;

static kn_tensor *part_forward(kn_module *self, kn_tensor *x)
{
    part *m = (part *)self;
    return kn_mul(kn_call(&m->fc[1], kn_call(&m->fc[0], x)), m->gain);
}

typedef struct row {
    kn_sequential base;
    part part[PARTS]; /* the last is no unit */
} row;

static bool part_init(row *m, int k)
{
    char name[2] = { (char)('a' + k), 0 };
    part *p = &m->part[k];
    kn_device d = k == PARTS - 1 ? KN_CPU : KN_META;
    bool ok = kn_module_init(&p->base, part_forward) &&
              (p->gain = kn_parameter(&p->base, "gain", KN_F32, d, KN_ONES_INIT, KN_SHAPE(WIDE)));
    for (int i = 0; ok && i < 2; i++)
        ok = kn_linear_init(&p->fc[i], &p->base, i ? "1" : "0", WIDE, WIDE, .device = d);
    return ok && kn_module_add(&m->base.base, name, &p->base);
}

static bool begin(row *m, kn_comm *world, kn_strategy strategy)
{
    int r = kn_rank(world);
    kn_comm *comm[PARTS - 1] = { kn_comm_split(world, r / 2, r, "pair"), world,
                                 kn_comm_split(world, r, r, "alone") };
    bool ok = kn_sequential_init(&m->base, NULL, "");
    for (int k = 0; ok && k < PARTS; k++)
        ok = part_init(m, k);
    ok = ok && kn_materialize(&m->part[PARTS - 1], KN_CPU, 1);
    kn_ledger_reset_peaks();
    for (int k = 0; ok && k < PARTS - 1; k++)
        ok = comm[k] &&
             kn_fsdp_wrap(&m->part[k], comm[k], .wrap_class = "linear", .strategy = strategy,
                          .layout = k == 1 ? KN_LAYOUT_PER_PARAM : 0);
    return ok;
}

RANK_TEST(predict_trees, of_all_ranks_of_groups_and_of_one, .threads = "4")
{
    static const kn_strategy strategy[] = { KN_FULL_SHARD, KN_SHARD_GRAD_OP, KN_NO_SHARD };
    kn_set_threads(1);
    kn_set_free_cores(0);
    for (int i = 0; i < 3; i++) {
        OWNED_MODULE row m;
        memset(&m, 0, sizeof m);
        int64_t before = kn_ledger_read().live[KN_MEM_PARAM];
        KN_CHECK(begin(&m, world, strategy[i]));
        OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.1);
        kn_fsdp_memory want = kn_fsdp_predict(&m);
        for (int step = 0; step < 2; step++) {
            IN_SCOPE;
            kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, 1, KN_SHAPE(2, WIDE));
            KN_CHECK(kn_backward(mean_of(kn_call(&m, x))) && kn_step(o));
        }
        kn_ledger l = kn_ledger_read();
        const struct {
            kn_mem_category of;
            int64_t want, more;
        } all[] = { { KN_MEM_PARAM, want.param, before },
                    { KN_MEM_GRAD, want.grad, 0 },
                    { KN_MEM_OPTIM, want.optim, 0 },
                    { KN_MEM_GATHERED, want.gathered, 0 },
                    { KN_MEM_UNREDUCED, want.unreduced, 0 } };
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            KN_CHECK(l.peak[all[k].of] == all[k].want + all[k].more, "way %d, %s: %lld, not %lld",
                     i, kn_mem_name(all[k].of), (long long)l.peak[all[k].of],
                     (long long)(all[k].want + all[k].more));
    }
}
