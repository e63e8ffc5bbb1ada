/* tests/fsdp/ema_test.c: averages of weights: the formula, bits in every way of sharding, swapping
 * in and out, errors. */
#include "tests/failing.h"
#include "tests/fsdp/net.h"
#include "tests/fsdp/stand_in.h"
#include "tests/fsdp/two.h"
#include "tests/owned.h"

enum { STEPS = 4, MICRO = 4 };

static bool step(net *m, kn_optim *o, kn_comm *world, int number)
{
    int ranks = kn_comm_size(world), rank = kn_rank(world);
    for (int micro = 0; micro < MICRO / ranks; micro++)
        net_backward(m, number * MICRO + micro * ranks + rank);
    return kn_step(o);
}

/* The parameters and averages of the sharded net beside those of a whole one. */
static bool same(net *m, kn_ema *e, net *ref, kn_ema *want)
{
    float a[128], b[128];
    const kn_param *p, *r;
    int n = kn_params(m, &p);
    if (!all_read_as(m, ref) || kn_params(ref, &r) != n)
        return false;
    for (int i = 0; i < n; i++) {
        kn_tensor *x = kn_ema_value(e, i), *y = kn_ema_value(want, i);
        if (!x != !y || r[i].numel > 128)
            return kn_fail("'%s' has averages in one of both", p[i].name);
        if (x && (!kn_shard_read(m, i, x, a) || !kn_to_host(y, b, (size_t)r[i].numel * sizeof *b) ||
                  memcmp(a, b, (size_t)r[i].numel * sizeof *b) != 0))
            return kn_ok() && kn_fail("the average of '%s' differs", p[i].name);
    }
    return kn_ok();
}

static double loss_of(net *m)
{
    IN_SCOPE;
    WITHOUT_GRAD;
    return kn_item(net_loss(m, 3));
}

/* Trains, evaluating with the averages after each step; three ranks and hybrid meshes add
 * gradients in another order. */
RANK_TEST(ema, same_bits_in_every_way_of_sharding, IN_ALL_WAYS)
{
    OWNED_MODULE net m = { 0 }, ref = { 0 };
    if (kn_comm_size(world) == 3 || ((const way *)arg)->ranks)
        return;
    KN_CHECK(net_init(&m, KN_META) && net_reference(&ref) && net_wrap(&m, world, arg));
    OWNED_OPTIM kn_optim *a = kn_adamw(&m, .lr = 0.05), *b = kn_adamw(&ref, .lr = 0.05);
    OWNED_EMA kn_ema *e = kn_ema_new(&m, .decay = 0.75), *want = kn_ema_new(&ref, .decay = 0.75);
    for (int i = 0; i < STEPS; i++) {
        KN_CHECK(step(&m, a, world, i) && step(&ref, b, NULL, i));
        KN_CHECK(kn_ema_update(e) && kn_ema_update(want) && same(&m, e, &ref, want));
        double before = loss_of(&m);
        KN_CHECK(kn_ema_swap(e) && kn_ema_swap(want) && kn_ema_swapped(e));
        KN_CHECK(same(&m, e, &ref, want), "swapped");
        double averaged = loss_of(&m);
        KN_CHECK(averaged == loss_of(&ref) && (i == 0) == (averaged == before), "loss %g",
                 averaged);
        KN_CHECK(kn_ema_swap(e) && kn_ema_swap(want) && !kn_ema_swapped(e));
        KN_CHECK(loss_of(&m) == before, "back again");
    }
    KN_CHECK(kn_ema_updates(e) == STEPS, "updates");
}

/* Tensors that a forward saved are out of date behind a swap, and a unit that stayed gathered is
 * gathered anew. arg: NULL, or a way of sharding. */
static void stale(kn_comm *world, void *arg)
{
    OWNED_MODULE two m;
    const way *w = arg;
    KN_CHECK(two_init(&m, w ? KN_META : KN_CPU, KN_F32));
    KN_CHECK(w ? kn_fsdp_wrap(&m, world, .strategy = w->strategy, .wrap_class = "linear",
                              .offload_dir = w->offload_dir)
               : kn_materialize(&m, KN_CPU, 7));
    OWNED_EMA kn_ema *e = kn_ema_new(&m);
    kn_scope scope = kn_scope_begin();
    kn_tensor *loss = two_loss(&m, 0);
    double before = kn_item(loss), now;
    const kn_param *p;
    for (int i = 0, n = kn_params(&m, &p); i < n; i++)
        KN_CHECK(kn_fill_(kn_ema_value(e, i), 0.5));
    KN_CHECK(kn_ema_swap(e));
    if (kn_comm_size(world) == 1) { /* else the error is that of all ranks, for good */
        KN_CHECK(!kn_backward(loss) && !kn_ok(), "a backward went on with other weights");
        kn_clear_error();
    }
    kn_scope_end(scope);
    KN_CHECK(!w || kn_unshard_wait(kn_fsdp_unshard(&m)));
    KN_CHECK(two_evaluate(&m, &now) && now != before, "the averages");
    KN_CHECK(!w || kn_unshard_wait(kn_fsdp_unshard(&m)));
    KN_CHECK(kn_ema_swap(e) && two_evaluate(&m, &now) && now == before, "loss %g, was %g", now,
             before);
}

KN_TEST(ema, what_used_the_weights_of_before_is_out_of_date)
{
    static const way kinds[] = { { .strategy = KN_FULL_SHARD },
                                 { .strategy = KN_SHARD_GRAD_OP },
                                 { .strategy = KN_NO_SHARD },
                                 { .strategy = KN_SHARD_GRAD_OP, .offload_dir = "/tmp" } };
    stale(NULL, NULL);
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int i = 0; i < 4; i++)
            KN_CHECK(spawn_threads(ranks, stale, (void *)&kinds[i]) == 0, "%d ranks, way %d", ranks,
                     i);
}

/* Averages lie where the state of optimizers does, and count as it. */
static void where(kn_comm *world, void *arg)
{
    const kn_param *p;
    NET_IN_WAY(m, world, arg);
    OWNED_EMA kn_ema *e = kn_ema_new(&m);
    for (int i = 0, n = kn_params(&m, &p); i < n; i++) {
        const kn_tensor *t = kn_ema_value(e, i);
        bool store = kn_memory_is_store(p[i].state_memory);
        KN_CHECK(!t || (kn_memory_is_store(t->storage->memory) == store &&
                        t->storage->category == (store ? KN_MEM_STORE : KN_MEM_OPTIM)),
                 "'%s'", p[i].name);
    }
}

KN_TEST(ema, lie_where_optimizer_state_does)
{
    for (int i = 0; i < WAYS; i++)
        if (!ways[i].ranks)
            KN_CHECK(spawn_threads(2, where, (void *)&ways[i]) == 0, "way %d", i);
}

/* The first update takes the values; with a warm-up the decay is min(decay, (1 + n) / (w + n)). */
KN_TEST(ema, formula)
{
    OWNED_MODULE two m;
    const kn_param *p;
    KN_CHECK(two_init(&m, KN_CPU, KN_F64) && kn_materialize(&m, KN_CPU, 7));
    kn_params(&m, &p);
    OWNED_EMA kn_ema *e = kn_ema_new(&m, .decay = 0.5, .warmup = 10);
    double want = 0, *value = kn_data(p[0].master);
    for (int n = 0; n < 12; n++) {
        double decay = n == 0 ? 0 : fmin(0.5, (1.0 + n) / (10 + n));
        KN_CHECK(kn_fill_(p[0].master, 1 + n * n) && kn_ema_update(e));
        want = decay * want + (1 - decay) * (1 + n * n);
        KN_CHECK(fabs(((double *)kn_data(kn_ema_value(e, 0)))[3] - want) < 1e-12 * want);
        KN_CHECK(value[3] == 1 + n * n);
    }
}

/* Buffers have averages where they are asked for (AveragedModel with use_buffers), and change
 * places with the parameters'; what is no float is copied. */
KN_TEST(ema, buffers)
{
    for (int use = 0; use < 2; use++) {
        OWNED_MODULE two m;
        KN_CHECK(two_init(&m, KN_CPU, KN_F64));
        kn_tensor *mean =
                      kn_declare_buffer(&m, "mean", KN_F64, KN_CPU, KN_ZEROS_INIT, KN_SHAPE(2, 3)),
                  *seen = kn_declare_buffer(&m, "seen", KN_I64, KN_CPU, KN_ZEROS_INIT, KN_SCALAR);
        KN_CHECK(mean && seen && kn_materialize(&m, KN_CPU, 7));
        OWNED_EMA kn_ema *e = kn_ema_new(&m, .decay = 0.5, .use_buffers = use);
        static const double want[] = { 1, 1.5, 3.25, 6.625 }; /* torch 2.15, of 1, 2, 5, 10 */
        KN_CHECK(!kn_ema_buffer(e, mean) == !use && !kn_ema_buffer(e, kn_ema_value(e, 0)));
        for (int n = 0; n < 4; n++) {
            KN_CHECK(kn_fill_(mean, 1 + n * n) && kn_fill_(seen, n) && kn_ema_update(e));
            for (int swap = 0; swap < 2; swap++) {
                const double *own = kn_data(mean), now = swap && use ? want[n] : 1 + n * n;
                KN_CHECK(own[0] == now && own[5] == now, "step %d: %g", n, own[0]);
                KN_CHECK(((int64_t *)kn_data(seen))[0] == n);
                if (use) {
                    const double *other = kn_data(kn_ema_buffer(e, mean));
                    KN_CHECK(other[5] == (swap ? 1 + n * n : want[n]), "step %d: %g", n, other[5]);
                }
                KN_CHECK(kn_ema_swap(e));
            }
        }
        KN_CHECK(kn_declare_buffer(&m, "late", KN_F64, KN_CPU, KN_ZEROS_INIT, KN_SCALAR));
        KN_CHECK(kn_ema_update(e) == !use);
        KN_CHECK(!use || error_has("kn_ema_update: the module has other buffers", "anew"));
    }
}

static double first_of(kn_tensor *t)
{
    float x[64];
    return kn_numel(t) <= 64 && kn_to_host(t, x, (size_t)kn_numel(t) * sizeof *x) ? (double)x[0]
                                                                                  : 0;
}

/* Also on one that the program registered, whose number is the largest. */
KN_TEST(ema, are_swapped_on_any_device)
{
    two m;
    const kn_param *p;
    stand_in_begin((stand_in){ .inline_streams = true });
    KN_CHECK(two_init(&m, KN_META, KN_F32) && kn_materialize(&m, STAND_IN, 7));
    kn_params(&m, &p);
    kn_ema *e = kn_ema_new(&m, .decay = 0.5);
    for (int i = 1; i <= 3; i += 2)
        KN_CHECK(kn_fill_(p[0].master, i) && kn_ema_update(e));
    for (int swapped = 1; swapped >= 0; swapped--) {
        KN_CHECK(kn_ema_swap(e));
        KN_CHECK(first_of(p[0].master) == 3 - swapped, "%g", first_of(p[0].master));
        KN_CHECK(first_of(kn_ema_value(e, 0)) == 2 + swapped, "%g", first_of(kn_ema_value(e, 0)));
    }
    kn_ema_free(e);
    kn_module_free(&m);
    stand_in_end();
}

/* Frozen parameters have no averages, and stay. */
KN_TEST(ema, frozen_parameters_stay)
{
    const kn_param *p;
    NET_WHOLE(m);
    OWNED_EMA kn_ema *e = kn_ema_new(&m);
    int n = kn_params(&m, &p), frozen = 0;
    for (int i = 0; i < n; i++) {
        KN_CHECK(!kn_ema_value(e, i) == !p[i].trainable);
        frozen += !p[i].trainable;
    }
    KN_CHECK(frozen == 1);
    REFUSED(kn_ema_value(e, -1), "kn_ema_value: parameter number -1", "the module");
    REFUSED(kn_ema_value(e, n), "kn_ema_value: parameter number", "doesn't exist");
    KN_CHECK(kn_ema_module(e) == &m.base && kn_ema_swap(e) && kn_ema_swap(e));
}

/* Without memory nothing is exchanged: each of the allocations fails in turn. It takes as much as
 * the largest parameter. */
KN_TEST(ema, a_swap_that_fails_exchanges_nothing)
{
    OWNED_MODULE net m = { 0 }, ref = { 0 };
    float a[128], b[128];
    const kn_param *p, *q;
    KN_CHECK(net_reference(&m) && net_reference(&ref));
    OWNED_EMA kn_ema *e = kn_ema_new(&m);
    int n = kn_params(&m, &p);
    kn_params(&ref, &q);
    int64_t largest = 0;
    for (int i = 0; i < n; i++) {
        KN_CHECK(!p[i].trainable || kn_fill_(kn_ema_value(e, i), 5));
        largest = p[i].trainable && p[i].numel > largest ? p[i].numel : largest;
    }
    kn_ledger_reset_peaks();
    const int64_t live = kn_ledger_read().live_total;
    for (int64_t fail = 1;; fail++) {
        if (WITH_FAILING(fail, kn_ema_swap(e)))
            break;
        KN_CHECK(fail < 50 && !kn_ema_swapped(e));
        for (int i = 0; i < n; i++) {
            size_t bytes = (size_t)p[i].numel * sizeof *a;
            KN_CHECK(kn_to_host(p[i].master, a, bytes) && kn_to_host(q[i].master, b, bytes));
            KN_CHECK(memcmp(a, b, bytes) == 0, "allocation %lld: '%s'", (long long)fail, p[i].name);
        }
    }
    KN_CHECK(kn_ema_swapped(e));
    const int64_t took = kn_ledger_read().peak_total - live;
    KN_CHECK(took == KN_ALIGNED(largest * (int64_t)sizeof *a), "it took %lld bytes",
             (long long)took);
    for (int i = 0; i < n; i++)
        KN_CHECK(!p[i].trainable ||
                 (kn_to_host(p[i].master, a, (size_t)p[i].numel * sizeof *a) && a[0] == 5));
}

/* A step would be lost with the next swap: none is taken, wherever in the tree the averages lie. */
KN_TEST(ema, no_step_on_averages)
{
    for (int of_part = 0; of_part < 2; of_part++)
        for (int step_part = 0; step_part < 2; step_part++) {
            OWNED_MODULE two m;
            KN_CHECK(two_init(&m, KN_CPU, KN_F32) && kn_materialize(&m, KN_CPU, 7));
            kn_ema *e = of_part ? kn_ema_new(&m.a) : kn_ema_new(&m);
            OWNED_OPTIM kn_optim *o = step_part ? kn_sgd(&m.a, .lr = 0.1) : kn_sgd(&m, .lr = 0.1),
                                 *other = kn_sgd(&m.b, .lr = 0.1);
            KN_CHECK(two_backward(&m, 0) && kn_ema_swap(e));
            REFUSED(kn_step(o), "kn_step: '", "holds the averages of its weights");
            KN_CHECK(!of_part || kn_step(other), "another part");
            KN_CHECK(kn_ema_swap(e) && kn_step(o));
            KN_CHECK(two_backward(&m, 0) && kn_ema_swap(e));
            kn_ema_free(e); /* the module keeps them */
            KN_CHECK(kn_step(o));
        }
}

KN_TEST(ema, calls_after_the_end_are_errors)
{
    two m;
    KN_CHECK(two_init(&m, KN_CPU, KN_F32) && kn_materialize(&m, KN_CPU, 7));
    kn_ema *gone = kn_ema_new(&m), *alone = kn_ema_new(&m);
    kn_ema_free(gone);
    REFUSED(kn_ema_update(gone), "kn_ema_update: the kn_ema was freed", "a new kn_ema");
    kn_ema_free(gone);
    KN_CHECK(error_has("kn_ema_free", "freed already"));
    kn_module_free(&m);
    REFUSED(kn_ema_update(alone), "module of the kn_ema was freed");
    REFUSED(kn_ema_swap(alone), "module of the kn_ema was freed");
    REFUSED(kn_ema_module(alone), "kn_ema_module", "freed");
    REFUSED(kn_ema_value(alone, 0), "kn_ema_value", "freed");
    kn_ema_free(alone);
    KN_CHECK_OK();
}

KN_TEST(ema, refuses)
{
    OWNED_MODULE two m;
    KN_CHECK(two_init(&m, KN_CPU, KN_F32) && kn_materialize(&m, KN_CPU, 7));
    REFUSED(kn_ema_new(&m, .decay = 1), ".decay is 1", "[0, 1)");
    REFUSED(kn_ema_new(&m, .decay = NAN), ".decay", "[0, 1)");
    REFUSED(kn_ema_new(&m, .warmup = -1), ".warmup -1");
    REFUSED(kn_ema_new(NULL), "kn_ema_new");
    kn_ema *e = kn_ema_new(&m);
    kn_ema_set_updates(e, -1);
    KN_CHECK(error_has("-1 updates", ""));
    KN_CHECK(kn_ema_swap(e) && !kn_ema_update(e) && error_has("holds the averages", "kn_ema_swap"));
    KN_CHECK(kn_ema_swap(e));
    KN_CHECK(kn_fsdp_wrap(&m, kn_comm_self()));
    REFUSED(kn_ema_update(e), "after kn_fsdp_wrap");
    REFUSED(kn_ema_swap(e), "after kn_fsdp_wrap");
    REFUSED(kn_ema_update(NULL), "NULL");
    kn_ema_free(e);
    e = kn_ema_new(&m);
    kn_summon_scope s = kn_summon(&m);
    REFUSED(kn_ema_swap(e), "summoned", "end the scope");
    KN_CHECK(kn_summon_end(s));
    kn_ema_free(e);
    kn_ema_free(NULL);
}
