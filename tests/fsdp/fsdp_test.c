/* tests/fsdp/fsdp_test.c: units against one process. The same model is trained by N ranks and by one rank
 * that accumulates the same micro-batches; losses, gradient norms and final parameters must be equal bit for
 * bit (docs/architecture.md, idea 9). Rank functions return a status and never assert. */
#include "kernels/faults.h"
#include "tests/comm/comm_test.h"
#include "knap.h"
#include <sys/mman.h>

enum { STEPS = 4, MICRO = 4, DIM = 24, VOCAB = 37, LEN = 8, BATCH = 3, MAX_ELEMENTS = 40000 };

typedef struct setting {
    kn_strategy strategy;
    kn_backward_prefetch prefetch;
    bool plain; /* no fsdp at all */
    bool recompute, keep;
    bool side_streams;
    int layers;
} setting;

typedef struct outcome {
    float loss[STEPS][MICRO], norm[STEPS];
    int64_t elements;
    float param[MAX_ELEMENTS];
} outcome;

typedef struct job {
    setting s;
    outcome *out; /* shared memory: rank 0 writes */
} job;

static bool train_step(kn_gpt *g, kn_optim *opt, kn_comm *world, int step, outcome *o)
{
    int n = kn_comm_size(world), rank = kn_rank(world);
    float mine[MICRO], all[MICRO];
    for (int a = 0; a < MICRO / n; a++) {
        int micro = a * n + rank;
        kn_scope scope = kn_scope_begin();
        int64_t ids[BATCH * LEN], targets[BATCH * LEN];
        for (int i = 0; i < BATCH * LEN; i++) {
            ids[i] = (i * 7 + micro * 5 + step * 3) % VOCAB;
            targets[i] = (ids[i] * 3 + 1) % VOCAB;
        }
        kn_tensor *x = kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(BATCH, LEN));
        kn_tensor *y = kn_from(KN_I64, KN_CPU, targets, KN_SHAPE(BATCH, LEN));
        kn_tensor *loss = kn_gpt_loss(g, x, y);
        mine[a] = (float)kn_item(loss);
        kn_backward(loss);
        kn_scope_end(scope);
    }
    memcpy(all, mine, sizeof all);
    if (world)
        kn_all_gather(world, all, mine, MICRO / n, KN_F32, kn_compute_stream(KN_CPU), "losses");
    for (int r = 0; r < n; r++)
        for (int a = 0; a < MICRO / n; a++)
            o->loss[step][a * n + r] = all[r * (MICRO / n) + a];
    o->norm[step] = (float)kn_item(kn_clip_grad_norm(g, 0.5));
    return kn_step(opt);
}

static int train(kn_comm *world, void *arg)
{
    job *j = arg;
    outcome *mine = calloc(1, sizeof *mine);
    kn_gpt g = { 0 };
    kn_gpt_config c = { .layers = j->s.layers ? j->s.layers : 3,
                        .heads = 4,
                        .embd = DIM,
                        .ctx = LEN,
                        .vocab = VOCAB,
                        .dropout = 0.1 };
    kn_set_threads(1);
    kn_set_free_cores(j->s.side_streams ? 2 : 0);
    kn_seed(7);
    kn_set_step(0);
    kn_gpt_init(&g, c, KN_F32, KN_META);
    kn_gpt_recompute(&g, j->s.recompute);
    if (j->s.plain)
        kn_materialize(&g, KN_CPU, 42);
    else
        kn_fsdp_wrap(&g, world, .strategy = j->s.strategy, .backward_prefetch = j->s.prefetch,
                     .wrap_class = "gpt_block", .seed = 42,
                     .reshard_after_forward = j->s.keep ? KN_RESHARD_NEVER : 0);
    kn_optim *opt = kn_adamw(&g, .lr = 1e-2, .weight_decay = 0.1);
    bool ok = opt != NULL;
    for (int i = 0; i < STEPS && ok; i++)
        ok = train_step(&g, opt, world, i, mine);
    const kn_param *p;
    int n = kn_params(&g, &p);
    for (int i = 0; i < n && ok && mine->elements + p[i].numel <= MAX_ELEMENTS; i++) {
        ok = kn_param_read(&g, i, mine->param + mine->elements);
        mine->elements += p[i].numel;
    }
    if (!kn_ok())
        fprintf(stderr, "rank %d: %s\n", kn_rank(world), kn_error());
    if (ok && kn_rank(world) == 0)
        *j->out = *mine;
    kn_optim_free(opt);
    kn_module_free(&g);
    free(mine);
    return ok && kn_ok() ? 0 : 1;
}

static outcome *run(int ranks, setting s)
{
    outcome *o = mmap(NULL, sizeof *o, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    job j = { s, o };
    int failed = THREADS_ONLY ? kn_spawn_threads(ranks, train, &j) : kn_spawn(ranks, train, &j);
    KN_CHECK_OK();
    KN_CHECK(failed == 0, "%d of %d ranks failed", failed, ranks);
    return o;
}

static void check_same(const char *what, const outcome *a, const outcome *b)
{
    KN_CHECK(a->elements > 1000 && a->elements == b->elements, "%s: %lld and %lld elements", what,
             (long long)a->elements, (long long)b->elements);
    for (int i = 0; i < STEPS; i++) {
        for (int m = 0; m < MICRO; m++)
            KN_CHECK(memcmp(&a->loss[i][m], &b->loss[i][m], 4) == 0,
                     "%s: step %d micro %d: loss %.9g != %.9g", what, i, m, (double)a->loss[i][m],
                     (double)b->loss[i][m]);
        KN_CHECK(memcmp(&a->norm[i], &b->norm[i], 4) == 0, "%s: step %d: norm %.9g != %.9g", what,
                 i, (double)a->norm[i], (double)b->norm[i]);
    }
    for (int64_t i = 0; i < a->elements; i++)
        KN_CHECK(memcmp(&a->param[i], &b->param[i], 4) == 0,
                 "%s: parameter element %lld: %.9g != %.9g", what, (long long)i,
                 (double)a->param[i], (double)b->param[i]);
}

KN_TEST(fsdp, same_bits_over_ranks_and_strategies)
{
    outcome *plain = run(1, (setting){ .plain = true });
    KN_CHECK(plain->loss[STEPS - 1][0] < plain->loss[0][0], "the loss doesn't fall: %g to %g",
             (double)plain->loss[0][0], (double)plain->loss[STEPS - 1][0]);
    KN_CHECK(plain->norm[0] > 0.5f, "clipping never acts: norm %g", (double)plain->norm[0]);
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int strategy = KN_FULL_SHARD; strategy <= KN_NO_SHARD; strategy++)
            for (int prefetch = KN_PREFETCH_PRE; prefetch <= KN_PREFETCH_NONE; prefetch++) {
                char what[64];
                snprintf(what, sizeof what, "%d ranks, strategy %d, prefetch %d", ranks, strategy,
                         prefetch);
                check_same(what, plain,
                           run(ranks, (setting){ .strategy = strategy, .prefetch = prefetch }));
            }
}

KN_TEST(fsdp, same_bits_recompute_and_keep)
{
    outcome *plain = run(1, (setting){ .plain = true });
    check_same("plain, recompute", plain, run(1, (setting){ .plain = true, .recompute = true }));
    check_same("2 ranks, recompute", plain, run(2, (setting){ .recompute = true }));
    check_same("2 ranks, kept after forward", plain, run(2, (setting){ .keep = true }));
}

KN_TEST(fsdp, same_bits_side_streams)
{
    outcome *plain = run(1, (setting){ .plain = true });
    check_same("2 ranks on worker streams", plain, run(2, (setting){ .side_streams = true }));
    check_same("2 ranks on worker streams, post", plain,
               run(2, (setting){ .side_streams = true, .prefetch = KN_PREFETCH_POST }));
}

/* The same with ranks as threads of one process: what ThreadSanitizer watches. */
KN_TEST(fsdp, same_bits_thread_ranks)
{
    outcome *plain = run(1, (setting){ .plain = true });
    for (int side = 0; side < 2; side++) {
        outcome *o =
            mmap(NULL, sizeof *o, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        job j = { (setting){ .side_streams = side }, o };
        int failed = kn_spawn_threads(2, train, &j);
        KN_CHECK(failed == 0, "%d of 2 ranks failed", failed);
        check_same("2 ranks as threads", plain, o);
    }
}

/* ---- allocations that fail ----------------------------------------------------------------------------------- */

static bool whole_run(void)
{
    outcome o;
    kn_gpt g = { 0 };
    kn_gpt_config c = {
        .layers = 1, .heads = 2, .embd = 8, .ctx = LEN, .vocab = VOCAB, .dropout = 0.1
    };
    kn_optim *opt = NULL;
    bool ok = kn_gpt_init(&g, c, KN_F32, KN_META) &&
              kn_fsdp_wrap(&g, NULL, .wrap_class = "gpt_block", .param_dtype = KN_BF16,
                           .reduce_dtype = KN_F32);
    ok = ok && (opt = kn_adamw(&g, .lr = 1e-2)) != NULL;
    ok = ok && train_step(&g, opt, NULL, 0, &o);
    kn_optim_free(opt);
    kn_module_free(&g);
    return ok && kn_ok();
}

KN_TEST(fsdp, every_allocation_failing_is_an_error)
{
    kn_set_threads(1);
    KN_CHECK(whole_run(), "%s", kn_error());
    int64_t live = kn_live_tensors();
    int failures = 0;
    for (int64_t n = 1;; n++) {
        kn_scope scope = kn_scope_begin();
        kn_fail_alloc(n);
        bool ok = whole_run();
        int64_t made = kn_fail_alloc(0);
        kn_scope_end(scope);
        if (ok) {
            KN_CHECK(made < n || n > 500, "allocation %lld failed without an error", (long long)n);
            break;
        }
        KN_CHECK(!kn_ok(), "allocation %lld: a failure without a sentence", (long long)n);
        kn_clear_error();
        failures++;
        KN_CHECK(kn_live_tensors() == live, "allocation %lld: %lld tensors leak", (long long)n,
                 (long long)(kn_live_tensors() - live));
    }
    KN_CHECK(failures > 500, "only %d allocations were tried", failures);
}

/* ---- memory is a formula -------------------------------------------------------------------------------- */

static int measure(kn_comm *world, void *arg)
{
    setting *s = arg;
    outcome o;
    kn_gpt g = { 0 };
    kn_gpt_config c = { .layers = 5, .heads = 4, .embd = DIM, .ctx = LEN, .vocab = VOCAB };
    kn_set_free_cores(0);
    kn_gpt_init(&g, c, KN_F32, KN_META);
    kn_fsdp_wrap(&g, world, .strategy = s->strategy, .backward_prefetch = s->prefetch,
                 .wrap_class = "gpt_block");
    kn_optim *opt = kn_adamw(&g, .lr = 1e-2);
    for (int i = 0; i < 2 && kn_ok(); i++)
        train_step(&g, opt, world, i, &o);
    kn_fsdp_memory want = kn_fsdp_predict(&g);
    kn_ledger l = kn_ledger_read();
    int64_t have[5] = { l.peak[KN_MEM_PARAM], l.peak[KN_MEM_GRAD], l.peak[KN_MEM_OPTIM],
                        l.peak[KN_MEM_GATHERED], l.peak[KN_MEM_UNREDUCED] };
    int64_t wanted[5] = { want.param, want.grad, want.optim, want.gathered, want.unreduced };
    const char *name[5] = { "param", "grad", "optim", "gathered", "unreduced" };
    int bad = !kn_ok();
    if (!kn_ok())
        fprintf(stderr, "%s\n", kn_error());
    for (int i = 0; i < 5; i++)
        if (have[i] != wanted[i]) {
            fprintf(stderr, "rank %d: %s: ledger %lld, formula %lld\n", kn_rank(world), name[i],
                    (long long)have[i], (long long)wanted[i]);
            bad = 1;
        }
    kn_optim_free(opt);
    kn_module_free(&g);
    return bad;
}

KN_TEST(fsdp, memory_equals_the_formula)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int strategy = KN_FULL_SHARD; strategy <= KN_NO_SHARD; strategy++)
            for (int prefetch = KN_PREFETCH_PRE; prefetch <= KN_PREFETCH_NONE; prefetch++) {
                setting s = { .strategy = strategy, .prefetch = prefetch };
                int failed = kn_spawn(ranks, measure, &s);
                KN_CHECK(failed == 0, "%d ranks, strategy %d, prefetch %d", ranks, strategy,
                         prefetch);
            }
}

/* ---- wrong use ------------------------------------------------------------------------------------------- */

static void tiny(kn_gpt *g)
{
    kn_gpt_config c = { .layers = 2, .heads = 4, .embd = DIM, .ctx = LEN, .vocab = VOCAB };
    kn_gpt_init(g, c, KN_F32, KN_META);
}

KN_TEST(fsdp, wrong_use_is_a_sentence)
{
    kn_gpt g = { 0 };
    tiny(&g);
    kn_fsdp_wrap(&g, NULL, .wrap_class = "no_such_class");
    KN_CHECK_ERROR("wraps nothing");
    kn_fsdp_wrap(&g, NULL, .wrap_class = "gpt_block", .param_dtype = KN_BF16);
    KN_CHECK_OK();
    kn_fsdp_wrap(&g, NULL);
    KN_CHECK_ERROR("unit already");
    kn_module *block = kn_module_find(&g, "transformer.h.0");
    kn_call(block, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1, 2, DIM)));
    KN_CHECK_ERROR("outside the wrapped root");
    kn_tensor *w = kn_module_param(&g, "transformer.h.0.mlp.c_fc.weight");
    kn_sum(w, 0, NULL, false);
    KN_CHECK_ERROR("transformer.h.0.mlp.c_fc.weight");
    kn_module_free(&g);
}

KN_TEST(fsdp, units_and_policy_by_size)
{
    kn_gpt g = { 0 };
    tiny(&g);
    kn_fsdp_wrap(&g, NULL, .min_params = 5000);
    KN_CHECK_OK();
    kn_module *unit[8];
    int n = kn_fsdp_units(&g, unit, 8);
    KN_CHECK(n == 3, "%d units", n);
    KN_CHECK(strcmp(kn_module_class(unit[0]), "gpt_block") == 0, "%s", kn_module_class(unit[0]));
    KN_CHECK(kn_fsdp_is_unit(&g), "the root is a unit");
    kn_module_free(&g);
}
