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
        IN_SCOPE;
        kn_clip_grad_norm(m, 0.5);
        kn_step(o);
    }
    return kn_ok();
}

/* An unsharded net beside the sharded one, on each rank. Three ranks would add other gradients, and
 * hybrid meshes would in another order (random.* has them). */
RANK_TEST(muon_ranks, same_bits_in_every_way_of_sharding, IN_ALL_WAYS)
{
    const int64_t windows[] = { 0, 1, 200 };
    if (kn_comm_size(world) == 3 || ((const way *)arg)->ranks)
        return;
    for (int i = 0; i < 3; i++) {
        NET(m);
        NET_WHOLE(ref);
        KN_CHECK(net_wrap(&m, world, arg));
        OWNED_OPTIM kn_optim *a =
            kn_muon(&m, .lr = 0.05, .window = windows[i], .ns_dtype = i == 2 ? KN_F32 : KN_BF16,
                    .no_nesterov = i == 1);
        OWNED_OPTIM kn_optim *b =
            kn_muon(&ref, .lr = 0.05, .ns_dtype = i == 2 ? KN_F32 : KN_BF16, .no_nesterov = i == 1);
        KN_CHECK(train(&m, a, world) && train(&ref, b, NULL));
        KN_CHECK(all_read_as(&m, &ref), "window %lld", (long long)windows[i]);
    }
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
    int64_t seen[MATRICES];    /* calls of whole on this rank */
    int windows, of[MATRICES]; /* the window of each matrix */
    size_t stage[MATRICES];    /* bytes of each window's stage */
    bool ends, wrong;
} job;

/* Element e of matrix i is 100 i + e, then 1 more. */
static bool write_part(void *arg, int i, kn_tensor *part)
{
    job *j = arg;
    float *x = kn_data(part);
    j->windows += j->ends || j->windows == 0; /* the ends of one come before the next begins */
    j->ends = false;
    j->of[i] = j->windows - 1;
    j->stage[j->of[i]] = part->storage->bytes;
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
    j->ends = true;
    j->wrong |= kn_numel(part) != kn_numel(j->param[i]->master);
    for (int64_t e = 0; e < kn_numel(part); e++)
        j->wrong |= x[e] != (float)(100 * i + j->param[i]->start + e + 1);
    return true;
}

/* The last matrix is as much work as the others together. */
enum { HEAVY = MATRICES - 1 };

/* In each window no rank has more work than it must have; the stage of more than one matrix keeps
 * to the size of a window. */
static bool balanced(const job *j, int64_t window, int ranks)
{
    for (int w = 0; w < j->windows; w++) {
        int count = 0, all = 0, mine = 0;
        for (int i = 0; i < MATRICES; i++) {
            const int work = j->of[i] == w ? (i == HEAVY ? HEAVY : 1) : 0;
            count += j->of[i] == w;
            all += work;
            mine += j->seen[i] ? work : 0;
        }
        const int share = (all + ranks - 1) / ranks;
        if (mine > share && (mine > HEAVY || j->of[HEAVY] != w))
            return kn_fail("window %d: this rank has %d of %d to do", w, mine, all);
        if (count > 1 && (int64_t)j->stage[w] > window)
            return kn_fail("a stage of %zu bytes, window %lld", j->stage[w], (long long)window);
    }
    return j->windows > 0;
}

/* A matrix in a window of its own goes to a rank that has the most of it. */
static bool stay(const job *j, kn_comm *world)
{
    float most[MATRICES];
    for (int i = 0; i < MATRICES; i++)
        most[i] = (float)kn_numel(j->param[i]->master);
    if (!kn_all_reduce_max(world, most, MATRICES, kn_compute_stream(KN_CPU), "most"))
        return false;
    for (int i = 0; i < MATRICES; i++)
        if (j->seen[i] && (float)kn_numel(j->param[i]->master) < most[i])
            return kn_fail("matrix %d goes to a rank that has less of it than another", i);
    return j->windows == MATRICES;
}

/* Each matrix is seen once over all ranks; the ranks share the work, replicas' ranks too. arg: a
 * way of sharding; NULL: each other matrix is a unit of its own, whole on all ranks. */
static void dealt(kn_comm *world, void *arg)
{
    const int64_t windows[] = { 1 << 20, 200, 1 };
    const way plain = { 0 }, *w = arg ? arg : &plain;
    char name[8];
    OWNED_MODULE stack m = { 0 };
    const kn_param *p, *matrix[MATRICES];
    double cost[MATRICES];
    kn_module_init(&m.base, stack_forward);
    for (int i = 0; i < MATRICES; i++) {
        snprintf(name, sizeof name, "fc%d", i);
        KN_CHECK(kn_linear_init(&m.fc[i], &m.base, name, COLS, ROWS, .device = KN_META));
    }
    for (int i = 0; !arg && i < MATRICES; i += 2)
        KN_CHECK(kn_fsdp_wrap(&m.fc[i], world, .strategy = KN_NO_SHARD), "wrap fc%d", i);
    KN_CHECK(kn_fsdp_wrap(&m, world, WAY_OPTIONS(w)));
    int n = kn_params(&m, &p), count = 0;
    for (int i = 0; i < n; i++)
        if (kn_ndim(p[i].tensor) == 2) {
            cost[count] = count == HEAVY ? HEAVY : 1;
            matrix[count++] = &p[i];
        }
    KN_CHECK(kn_schedule_of(kn_unit_of(m.base.impl)), "the ranks' communicators");
    for (int k = 0; k < 3; k++) {
        job j = { .param = matrix };
        kn_matrix_step s = { .param = matrix,
                             .cost = cost,
                             .count = count,
                             .dtype = KN_F32,
                             .window = windows[k],
                             .begin = write_part,
                             .whole = see_whole,
                             .end = take_part,
                             .arg = &j };
        KN_CHECK(count == MATRICES && matrix[0]->source->matrices(&s));
        KN_CHECK(!j.wrong);
        KN_CHECK(balanced(&j, windows[k], kn_comm_size(world)));
        KN_CHECK(windows[k] > 1 || stay(&j, world));
        KN_CHECK(kn_all_reduce_i64(world, j.seen, MATRICES, kn_compute_stream(KN_CPU), "seen"));
        for (int i = 0; i < MATRICES; i++)
            KN_CHECK(j.seen[i] == 1, "matrix %d was changed %lld times", i, (long long)j.seen[i]);
    }
}

KN_TEST(muon_ranks, each_matrix_goes_to_one_rank)
{
    in_all_ways(dealt);
    by_threads("124", dealt, NULL);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* The ledger's optimizer bytes are the formula's: one state of a matrix, two of the others. */
RANK_TEST(muon_ranks, memory_equals_the_formula, IN_ALL_WAYS)
{
    kn_ledger before = kn_ledger_read();
    NET_IN_WAY(m, world, arg);
    OWNED_OPTIM kn_optim *o = kn_muon(&m, .lr = 0.05);
    int64_t want = kn_fsdp_predict_optim(o).optim, adamw = kn_fsdp_predict(&m).optim;
    KN_CHECK(train(&m, o, world));
    int64_t have = kn_ledger_read().live[KN_MEM_OPTIM] - before.live[KN_MEM_OPTIM];
    KN_CHECK(have == want, "%lld bytes, predicted %lld", (long long)have, (long long)want);
    KN_CHECK(want <= adamw, "%lld bytes, AdamW's %lld", (long long)want, (long long)adamw);
    KN_CHECK(kn_ledger_read().live[KN_MEM_GATHERED] == before.live[KN_MEM_GATHERED],
             "a stage stays");
}

/* ---- errors ---------------------------------------------------------------------------------- */

/* A failing rank ends the step on all. */
static bool fails(void *arg, int i, kn_tensor *matrix)
{
    return kn_fail("the matrix is cursed");
}

RANK_TEST(muon_ranks, an_error_of_one_rank_ends_the_step_of_all, .processes = "2")
{
    const kn_param *p;
    job j = { 0 };
    double cost = 1;
    TWO_WRAPPED(m, world);
    KN_CHECK(kn_schedule_of(kn_unit_of(m.base.impl)), "the ranks' communicators");
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
    KN_CHECK(!first->source->matrices(&s), "no error");
    KN_CHECK(error_has("the matrix is cursed", ""), "another error");
}
