/* tests/fsdp/matrix_check.c: runs settings and their references, and compares the outcomes. */
#include "tests/fsdp/matrix.h"
#include <sys/mman.h>

static matrix_spec complete(const matrix_spec *spec)
{
    matrix_spec s = *spec;
    s.ranks = s.ranks ? s.ranks : 2;
    s.rounds = s.rounds ? s.rounds : 2;
    s.steps = s.steps ? s.steps : 3;
    s.o.strategy = s.o.strategy ? s.o.strategy : KN_FULL_SHARD;
    return s;
}

/* Outcomes of all ranks in shared memory, or NULL where a rank failed. */
static matrix_outcome *run_ranks(const matrix_spec *s, int n, kn_rank_fn fn, bool threads)
{
    size_t bytes = (size_t)n * sizeof(matrix_outcome);
    matrix_outcome *o = shared_bytes(bytes);
    KN_CHECK(o != MAP_FAILED, "mmap");
    matrix_job j = { *s, o };
    int failed = s->hosts  ? spawn_hosts(n, fn, &j)
                 : threads ? kn_spawn_threads(n, fn, &j)
                           : spawn(n, fn, &j);
    KN_CHECK_OK();
    if (failed == 0)
        return o;
    munmap(o, bytes);
    return NULL;
}

static void drop(matrix_outcome *o, int n)
{
    munmap(o, (size_t)n * sizeof *o);
}

/* The gradient of an activation that several calls use is the sum of their contributions. A
 * recomputed call contributes one sum of its own: another grouping if the activation is used
 * outside of the call, too. Only in this case the reference recomputes. */
bool matrix_recompute_regroups(const matrix_spec *s)
{
    return s->recompute && s->model == MATRIX_TURN && s->only_turn == 1 + TURN_NESTED;
}

/* The same reference serves many settings. */
static const matrix_outcome *reference_of(const matrix_spec *spec)
{
    enum { KEPT = 24 };
    static struct {
        matrix_spec s;
        matrix_outcome *o;
    } kept[KEPT];
    static int count;
    matrix_spec s;
    memset(&s, 0, sizeof s); /* clears padding, which is compared, too */
    s.model = spec->model;
    s.ranks = spec->ranks;
    s.rounds = spec->rounds;
    s.steps = spec->steps;
    s.optimizer = spec->optimizer;
    s.spare = spec->spare;
    s.by_data = spec->by_data;
    s.recompute = matrix_recompute_regroups(spec);
    s.only_turn = spec->only_turn;
    s.evaluate = spec->evaluate;
    s.bytes = spec->bytes;
    s.declare = spec->declare;
    s.loss = spec->loss;
    if (s.model != MATRIX_TURN || s.only_turn) { /* for any number of ranks */
        s.rounds *= s.ranks;
        s.ranks = 1;
    }
    for (int i = 0; i < count; i++)
        if (memcmp(&kept[i].s, &s, sizeof s) == 0)
            return kept[i].o;
    matrix_outcome *o = run_ranks(&s, 1, matrix_reference, false);
    KN_CHECK(o, "the reference failed");
    if (count == KEPT)
        drop(kept[--count].o, 1);
    memcpy(&kept[count].s, &s, sizeof s);
    kept[count++].o = o;
    return o;
}

static bool same_float(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

/* Describes the first difference of b from a; false if there is one. */
static bool same_step(const matrix_spec *s, const matrix_outcome *a, const matrix_outcome *b,
                      int step, bool params, char *where, size_t size)
{
    for (int m = 0; m < s->rounds * s->ranks; m++)
        if (!same_float(a->loss[step][m], b->loss[step][m])) {
            snprintf(where, size, "step %d: loss of micro-batch %d: %.9g != %.9g", step, m,
                     (double)b->loss[step][m], (double)a->loss[step][m]);
            return false;
        }
    if (!same_float(a->norm[step], b->norm[step])) {
        snprintf(where, size, "step %d: norm %.9g != %.9g", step, (double)b->norm[step],
                 (double)a->norm[step]);
        return false;
    }
    for (int i = 0; params && i < a->params; i++)
        for (int64_t k = a->begin[i]; k < a->begin[i + 1]; k++)
            if (!same_float(a->param[step][k], b->param[step][k])) {
                snprintf(where, size, "step %d: %s[%lld]: %.9g != %.9g", step, a->name[i],
                         (long long)(k - a->begin[i]), (double)b->param[step][k],
                         (double)a->param[step][k]);
                return false;
            }
    return true;
}

static bool same(const matrix_spec *s, const matrix_outcome *a, const matrix_outcome *b,
                 char *where, size_t size)
{
    if (a->params != b->params || a->begin[a->params] != b->begin[b->params]) {
        snprintf(where, size, "%d parameters with %lld elements, not %d with %lld", b->params,
                 (long long)b->begin[b->params], a->params, (long long)a->begin[a->params]);
        return false;
    }
    for (int step = 0; step < s->steps; step++)
        if (!same_step(s, a, b, step, s->history || step == s->steps - 1, where, size))
            return false;
    return true;
}

/* All ranks against want; where they differ, once more with the parameters of each step. */
static void check_ranks(const matrix_spec *s, const matrix_outcome *want, const char *what)
{
    char line[512], where[256] = "";
    matrix_describe(s, line, sizeof line);
    matrix_outcome *o = run_ranks(s, s->ranks, matrix_train, s->threads);
    KN_CHECK(o, "%s: a rank failed: %s", what, line);
    int bad = -1;
    for (int r = 0; r < s->ranks && bad < 0; r++)
        bad = same(s, want, &o[r], where, sizeof where) ? -1 : r;
    drop(o, s->ranks);
    if (bad >= 0 && !s->history) {
        matrix_spec again = *s;
        again.history = true;
        o = run_ranks(&again, s->ranks, matrix_train, s->threads);
        if (o) {
            char first[256] = "";
            if (!same(&again, want, &o[bad], first, sizeof first))
                snprintf(where, sizeof where, "%s", first);
            drop(o, s->ranks);
        }
    }
    KN_CHECK(bad < 0, "%s: rank %d, %s: %s", what, bad, where, line);
}

void matrix_check(const matrix_spec *spec)
{
    matrix_spec s = complete(spec);
    const matrix_outcome *want = reference_of(&s);
    KN_CHECK(want->begin[want->params] > 200, "the model is empty");
    check_ranks(&s, want, "not the reference's bits");
}

void matrix_check_own(const matrix_spec *spec)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        matrix_spec s = *spec;
        s.threads = true;
        s.ranks = ranks;
        s.rounds = 4 / ranks;
        matrix_check(&s);
        matrix_spec again = s, workers = s;
        again.recompute = true;
        again.o.layout = KN_LAYOUT_PER_PARAM;
        matrix_check(&again);
        workers.workers = true;
        workers.o.strategy = KN_SHARD_GRAD_OP;
        matrix_check(&workers);
    }
}

void matrix_check_learning(void *own, kn_tensor *(*loss)(void *own, int step, int micro),
                           kn_optim *o, int steps, double part)
{
    double first = 0, last = 0;
    for (int step = 0; step < steps; step++) {
        kn_scope scope = kn_scope_begin();
        kn_set_step(0); /* draws the same */
        kn_tensor *l = loss(own, 0, 0);
        KN_CHECK(l && kn_backward(l) && kn_step(o));
        last = kn_item(l);
        first = step ? first : last;
        kn_scope_end(scope);
    }
    KN_CHECK(last < part * first, "the loss is %g after %g", last, first);
    kn_optim_free(o);
    kn_module_free(own);
}

void matrix_check_equal(const matrix_spec *a, const matrix_spec *b)
{
    matrix_spec one = complete(a), two = complete(b);
    char line[512];
    one.history = true;
    matrix_outcome *want = run_ranks(&one, one.ranks, matrix_train, one.threads);
    KN_CHECK(want, "a rank failed: %s", matrix_describe(&one, line, sizeof line));
    const float norm = want->norm[one.steps - 1]; /* not NaN, which is equal to itself here */
    KN_CHECK(norm > 0 && norm < INFINITY, "the gradient's norm is %g", (double)norm);
    check_ranks(&two, want, matrix_describe(&one, line, sizeof line));
    drop(want, one.ranks);
}

void matrix_check_16_bits(matrix_spec a, kn_dtype t, const char *recompute_class)
{
    a.o.param_dtype = t;
    a.o.reduce_dtype = KN_F32;
    for (int s = KN_SHARD_GRAD_OP; s <= KN_NO_SHARD; s++) {
        matrix_spec b = a;
        b.o.strategy = s;
        b.o.layout = KN_LAYOUT_PER_PARAM + s % 2;
        b.o.forward_prefetch = true;
        b.offload = s == KN_NO_SHARD;
        b.o.recompute_class = b.offload ? NULL : recompute_class;
        matrix_check_equal(&a, &b);
    }
}
