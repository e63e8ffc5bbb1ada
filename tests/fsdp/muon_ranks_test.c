/* tests/fsdp/muon_ranks_test.c: steps that see whole matrices of sharded parameters: Muon's bits in
 * every way of sharding, the rank that changes a matrix, windows, memory, errors. */
#include "nn/matrices.h"
#include "tests/fsdp/net.h"
#include "tests/fsdp/two.h"

enum { STEPS = 3, MICRO = 4 };

static bool train(net *m, kn_optim *o, kn_comm *world)
{
    int ranks = kn_comm_size(world), rank = kn_rank(world);
    for (int step = 0; step < STEPS && kn_ok(); step++) {
        for (int micro = 0; micro < MICRO / ranks; micro++)
            net_backward(m, step * MICRO + micro * ranks + rank);
        kn_scope scope = kn_scope_begin();
        kn_clip_grad_norm(m, 0.5);
        kn_step(o);
        kn_scope_end(scope);
    }
    return kn_ok();
}

/* An unsharded net beside the sharded one, on each rank. Three ranks would add other gradients, and
 * hybrid meshes would in another order (random.* has them). */
static int same_bits(kn_comm *world, void *arg)
{
    const int64_t windows[] = { 0, 1, 200 };
    if (kn_comm_size(world) == 3 || ((const way *)arg)->ranks)
        return 0;
    for (int i = 0; i < 3; i++) {
        net m, ref;
        EXPECT(net_init(&m, KN_META) && net_reference(&ref) && net_wrap(&m, world, arg), "init");
        kn_optim *a = kn_muon(&m, .lr = 0.05, .window = windows[i],
                              .ns_dtype = i == 2 ? KN_F32 : KN_BF16, .no_nesterov = i == 1);
        kn_optim *b =
            kn_muon(&ref, .lr = 0.05, .ns_dtype = i == 2 ? KN_F32 : KN_BF16, .no_nesterov = i == 1);
        EXPECT(train(&m, a, world) && train(&ref, b, NULL), "training: %s", kn_error());
        EXPECT(all_read_as(&m, &ref), "window %lld: %s", (long long)windows[i], kn_error());
        kn_optim_free(a), kn_optim_free(b);
        kn_module_free(&m), kn_module_free(&ref);
    }
    return !kn_ok();
}

KN_TEST(muon_ranks, same_bits_in_every_way_of_sharding)
{
    in_all_ways(same_bits);
}

/* ---- who changes which matrix ---------------------------------------------------------------- */

enum { MATRICES = 8, ROWS = 3, COLS = 4 };

typedef struct stack {
    kn_module base;
    kn_linear fc[MATRICES];
} stack;

static kn_tensor *stack_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(&((stack *)self)->fc[0], x);
}

typedef struct job {
    const kn_param *const *param;
    int64_t seen[MATRICES]; /* calls of whole on this rank */
    bool wrong;
} job;

/* Element e of matrix i is 100 i + e, then 1 more. */
static bool write_part(void *arg, int i, kn_tensor *part)
{
    job *j = arg;
    float *x = kn_data(part);
    for (int64_t e = 0; e < kn_numel(part); e++)
        x[e] = (float)(100 * i + j->param[i]->start + e);
    return true;
}

static bool see_whole(void *arg, int i, kn_tensor *matrix)
{
    job *j = arg;
    float *x = kn_data(matrix);
    j->wrong |= kn_numel(matrix) != ROWS * COLS;
    for (int e = 0; e < ROWS * COLS; e++) {
        j->wrong |= x[e] != (float)(100 * i + e);
        x[e] += 1;
    }
    j->seen[i]++;
    return true;
}

static bool take_part(void *arg, int i, kn_tensor *part)
{
    job *j = arg;
    const float *x = kn_data(part);
    j->wrong |= kn_numel(part) != kn_numel(j->param[i]->master);
    for (int64_t e = 0; e < kn_numel(part); e++)
        j->wrong |= x[e] != (float)(100 * i + j->param[i]->start + e + 1);
    return true;
}

/* Each matrix is seen once over all ranks; the ranks have equal work, replicas' ranks too. */
static int dealt(kn_comm *world, void *arg)
{
    const way *w = arg;
    char name[8];
    stack m = { 0 };
    const kn_param *p, *matrix[MATRICES];
    double cost[MATRICES];
    job j = { .param = matrix };
    kn_module_init(&m.base, stack_forward);
    for (int i = 0; i < MATRICES; i++) {
        snprintf(name, sizeof name, "fc%d", i);
        EXPECT(kn_linear_init(&m.fc[i], &m.base, name, COLS, ROWS, .device = KN_META), "init");
    }
    EXPECT(kn_fsdp_wrap(&m, world, .strategy = w->strategy, .layout = w->layout, .mesh = w->mesh,
                        .keep_whole_below = w->keep_whole_below, .offload_dir = w->offload_dir),
           "wrap");
    int n = kn_params(&m, &p), count = 0;
    for (int i = 0; i < n; i++)
        if (kn_ndim(p[i].tensor) == 2) {
            cost[count] = 10;
            matrix[count++] = &p[i];
        }
    kn_matrix_step s = { .param = matrix,
                         .cost = cost,
                         .count = count,
                         .dtype = KN_F32,
                         .window = 1 << 20,
                         .begin = write_part,
                         .whole = see_whole,
                         .end = take_part,
                         .arg = &j };
    EXPECT(kn_schedule_of(kn_unit_of(m.base.impl)), "the ranks' communicators");
    EXPECT(count == MATRICES && matrix[0]->source->matrices(&s), "step: %s", kn_error());
    EXPECT(!j.wrong, "values");
    int64_t mine = 0;
    for (int i = 0; i < MATRICES; i++)
        mine += j.seen[i];
    EXPECT(kn_all_reduce_i64(world, j.seen, MATRICES, kn_compute_stream(KN_CPU), "seen"), "sum");
    for (int i = 0; i < MATRICES; i++)
        EXPECT(j.seen[i] == 1, "matrix %d was changed %lld times", i, (long long)j.seen[i]);
    int ranks = kn_comm_size(world);
    EXPECT(mine >= MATRICES / ranks && mine <= (MATRICES + ranks - 1) / ranks, "%lld of %d here",
           (long long)mine, MATRICES);
    kn_module_free(&m);
    return !kn_ok();
}

KN_TEST(muon_ranks, each_matrix_goes_to_one_rank)
{
    in_all_ways(dealt);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* The ledger's optimizer bytes are the formula's: one state of a matrix, two of the others. */
static int counted(kn_comm *world, void *arg)
{
    net m;
    kn_ledger before = kn_ledger_read();
    EXPECT(net_init(&m, KN_META) && net_wrap(&m, world, arg), "init");
    kn_optim *o = kn_muon(&m, .lr = 0.05);
    int64_t want = kn_fsdp_predict_optim(o).optim, adamw = kn_fsdp_predict(&m).optim;
    EXPECT(train(&m, o, world), "training");
    int64_t have = kn_ledger_read().live[KN_MEM_OPTIM] - before.live[KN_MEM_OPTIM];
    EXPECT(have == want, "%lld bytes, predicted %lld", (long long)have, (long long)want);
    EXPECT(want <= adamw, "%lld bytes, AdamW's %lld", (long long)want, (long long)adamw);
    EXPECT(kn_ledger_read().live[KN_MEM_GATHERED] == before.live[KN_MEM_GATHERED], "a stage stays");
    kn_optim_free(o);
    kn_module_free(&m);
    return !kn_ok();
}

KN_TEST(muon_ranks, memory_equals_the_formula)
{
    in_all_ways(counted);
}

/* ---- errors ---------------------------------------------------------------------------------- */

/* A failing rank ends the step on all. */
static bool fails(void *arg, int i, kn_tensor *matrix)
{
    (void)arg, (void)i, (void)matrix;
    return kn_fail("the matrix is cursed");
}

static int one_fails(kn_comm *world, void *arg)
{
    two m;
    const kn_param *p;
    job j = { 0 };
    double cost = 1;
    EXPECT(two_init(&m, KN_META, KN_F32) && kn_fsdp_wrap(&m, world), "init");
    EXPECT(kn_schedule_of(kn_unit_of(m.base.impl)), "the ranks' communicators");
    kn_params(&m, &p);
    const kn_param *first = &p[0];
    j.param = &first;
    kn_matrix_step s = { .param = &first,
                         .cost = &cost,
                         .count = 1,
                         .dtype = KN_F32,
                         .window = 1,
                         .begin = write_part,
                         .whole = fails,
                         .end = take_part,
                         .arg = &j };
    EXPECT(!first->source->matrices(&s), "no error");
    EXPECT(error_has("the matrix is cursed", ""), "another error");
    kn_module_free(&m);
    (void)arg;
    return 0;
}

KN_TEST(muon_ranks, an_error_of_one_rank_ends_the_step_of_all)
{
    KN_CHECK(kn_spawn(2, one_fails, NULL) == 0);
}
