/* tests/comm/rank_step.c: models a step of sharded training: every collective, staged and from
 * shared memory, on worker streams and inline, over several communicators, a batch norm of all
 * ranks, each collective on tensors, and a net with a table of rows. Its result is one
 * number a rank, equal for every back end, number of threads and launcher. */
#include "comm/comm_internal.h"
#include "knap.h"
#include <stdlib.h>
#include <string.h>

enum { N = 30011, BYTES = 70001 };

typedef struct step {
    kn_comm *w, *gather, *reduce, *half;
    kn_stream *gathers, *reduces;
    float *mine, *all, *grad, *sum, *part;
    uint16_t *low;
    unsigned char *bytes;
    uint64_t hash;
} step;

static void add(step *t, const void *data, size_t size)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < size; i++)
        t->hash = (t->hash ^ p[i]) * UINT64_C(0x100000001b3);
}

/* Terms whose sum depends on their order. */
static float value(int rank, int64_t i)
{
    int64_t x = (i * 7919 + rank * 104729) % 10007 - 5000;
    return (float)x * (1.0f / (float)(1 << (i + rank) % 17));
}

static uint16_t low(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static bool begin(step *t, kn_comm *w)
{
    size_t n = (size_t)kn_comm_size(w);
    int rank = kn_rank(w);
    *t = (step){ .w = w, .hash = UINT64_C(0xcbf29ce484222325) };
    t->gather = kn_comm_dup(w, "gather");
    t->reduce = kn_comm_dup(w, "reduce");
    t->half = kn_comm_split(w, rank % 2, rank, "half");
    t->gathers = kn_stream_create(KN_CPU, "gather", KN_STREAM_WORKER);
    t->reduces = kn_stream_create(KN_CPU, "reduce", KN_STREAM_WORKER);
    t->mine = malloc(N * sizeof *t->mine);
    t->all = kn_take(kn_comm_memory(w), n * N * sizeof *t->all, KN_MEM_GATHERED);
    t->grad = kn_take(kn_comm_memory(w), n * N * sizeof *t->grad, KN_MEM_UNREDUCED);
    t->sum = malloc(N * sizeof *t->sum);
    t->part = malloc(N * sizeof *t->part);
    t->low = malloc(n * N * sizeof *t->low);
    t->bytes = malloc(BYTES);
    if (!kn_ok() || !t->mine || !t->sum || !t->part || !t->low || !t->bytes)
        return false;
    for (int64_t i = 0; i < (int64_t)n * N; i++)
        t->low[i] = low(t->grad[i] = value(rank, i));
    for (int64_t i = 0; i < N; i++)
        t->mine[i] = t->sum[i] = value(rank, 3 * i);
    memset(t->bytes, rank + 1, BYTES);
    return true;
}

static bool collectives(step *t)
{
    int n = kn_comm_size(t->w);
    kn_stream *s = kn_compute_stream(KN_CPU);
    int64_t count[3] = { kn_rank(t->w), 7, -3 };
    float most[2] = { value(kn_rank(t->w), 5), -1 };
    kn_all_gather(t->gather, t->all, t->mine, N, KN_F32, t->gathers, "block.0");
    kn_reduce_scatter(t->reduce, t->sum, t->sum, t->grad, N, KN_F32, KN_F32, t->reduces, "block.1");
    kn_reduce_scatter(t->reduce, t->part, NULL, t->low, N, KN_F32, KN_BF16, t->reduces, "block.0");
    if (!kn_stream_sync(t->gathers) || !kn_stream_sync(t->reduces))
        return false;
    add(t, t->all, (size_t)n * N * sizeof *t->all);
    add(t, t->sum, N * sizeof *t->sum);
    add(t, t->part, N * sizeof *t->part);
    kn_all_reduce(t->w, t->grad, NULL, t->grad, N, KN_F32, KN_F32, s, "head");
    kn_comm_piece both[] = { { t->part, t->sum, t->grad, 700, KN_F32, KN_F32 },
                             { t->mine, NULL, t->low, N / 2, KN_F32, KN_BF16 } };
    kn_comm_piece few[] = { { t->part, NULL, t->sum, 100, KN_F32, KN_F32 }, both[1] };
    kn_comm_piece given[] = { { t->all, NULL, t->part, 701, KN_F32, KN_F32 },
                              { t->all + n * 701, NULL, t->low, 20001, KN_BF16, KN_BF16 } };
    kn_reduce_scatter_pieces(t->w, both, 2, s, "block.2");
    add(t, t->part, 700 * sizeof *t->part);
    add(t, t->mine, N / 2 * sizeof *t->mine);
    kn_all_reduce_pieces(t->w, few, 2, s, "block.2");
    add(t, t->part, 100 * sizeof *t->part);
    add(t, t->mine, N / 2 * sizeof *t->mine);
    kn_all_gather_pieces(t->w, given, 2, s, "block.2");
    add(t, t->all, (size_t)n * 701 * sizeof *t->all + (size_t)n * 20001 * sizeof *t->low);
    kn_all_reduce(t->half, t->low, NULL, t->low, N, KN_BF16, KN_BF16, s, "replicas");
    kn_all_reduce(t->w, t->sum, t->all, t->mine, 5, KN_F32, KN_F32, s, "norm");
    kn_all_reduce_i64(t->w, count, 3, s, "clip");
    kn_all_reduce_max(t->w, most, 2, s, "clip");
    kn_broadcast(t->w, t->bytes, BYTES, n - 1, s, "state");
    kn_barrier(t->w, s, "end of step");
    if (!kn_agree(t->w, true))
        return false;
    add(t, t->grad, N * sizeof *t->grad);
    add(t, t->low, N * sizeof *t->low);
    add(t, t->sum, 5 * sizeof *t->sum);
    add(t, count, sizeof count);
    add(t, most, sizeof most);
    add(t, t->bytes, BYTES);
    return kn_ok();
}

/* Batch norm over the batches of all ranks, whose sizes differ; one is empty. */
static bool batch_norm(step *t)
{
    kn_comm *c = kn_comm_dup(t->w, "norm");
    const int64_t samples = kn_rank(t->w) == 1 ? 0 : 2 + kn_rank(t->w);
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, (uint64_t)kn_rank(t->w), KN_SHAPE(samples, 3, 5));
    x = kn_require_grad(x, true);
    kn_tensor *y = kn_batch_norm(x, NULL, NULL, NULL, NULL, .training = true, .sync = c);
    const bool ok = y && kn_backward(kn_sum(kn_mul(y, kn_mul(y, y)), 0, NULL, false));
    if (ok) {
        add(t, kn_data(y), (size_t)kn_numel(y) * sizeof(float));
        add(t, kn_data(kn_grad(x)), (size_t)kn_numel(x) * sizeof(float));
    }
    kn_scope_end(scope);
    return ok;
}

/* Each collective on tensors, one behind the other, and the gradients through all of them. */
static bool tensors(step *t)
{
    const int n = kn_comm_size(t->w), me = kn_rank(t->w);
    int64_t rows[256] = { 0 }, received[256];
    const kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 2, (uint64_t)me, KN_SHAPE(2 * n, 3));
    x = kn_require_grad(x, true);
    kn_tensor *y = kn_all_gather_tensor(t->w, x, 1), *mean = kn_mean_tensor(t->w, x);
    y = kn_all_to_all_tensor(t->w, kn_reduce_scatter_tensor(t->w, kn_mul(y, y), 1), NULL, NULL);
    y = kn_mul(kn_all_reduce_tensor(t->w, y), kn_broadcast_tensor(t->w, kn_sub(x, mean), n - 1));
    rows[(me + 1) % n] = me;
    rows[me] += 2 * n - me;
    y = kn_all_to_all_tensor(t->w, y, rows, received);
    const bool ok = y && kn_backward(kn_sum(kn_mul(y, y), 0, NULL, false));
    if (ok) {
        add(t, kn_data(y), (size_t)kn_numel(y) * sizeof(float));
        add(t, kn_data(kn_grad(x)), (size_t)kn_numel(x) * sizeof(float));
    }
    kn_scope_end(scope);
    return ok;
}

enum { WORDS = 11, DIM = 3 };

typedef struct words {
    kn_module base;
    kn_embedding table;
    kn_linear fc;
} words;

/* The table is used twice. */
static kn_tensor *words_forward(kn_module *self, kn_tensor *ids)
{
    words *m = (words *)self;
    kn_tensor *x = kn_call(&m->table, ids);
    return kn_mul(kn_call(&m->fc, x), kn_call(&m->table, kn_maximum(ids, kn_ones_like(ids))));
}

/* A step of a table of rows that lies on all ranks, beside a sharded layer. */
static bool table(step *t)
{
    words m = { 0 };
    float weight[WORDS * DIM];
    bool ok = kn_module_init(&m.base, words_forward) && kn_module_defaults(&m, .device = KN_META) &&
              kn_embedding_init(&m.table, &m.base, "table", WORDS, DIM, .sparse = true) &&
              kn_linear_init(&m.fc, &m.base, "fc", DIM, DIM) &&
              kn_fsdp_wrap(&m, t->w, .wrap_class = "linear", .seed = 3);
    kn_optim *o = ok ? kn_adamw(&m, .lr = 0.1) : NULL;
    const int64_t id[4] = { 0, 2, kn_rank(t->w), WORDS - 1 };
    const kn_scope scope = kn_scope_begin();
    kn_tensor *y = ok ? kn_call(&m, kn_from(KN_I64, KN_CPU, id, KN_SHAPE(4))) : NULL;
    ok = o && y && kn_backward(kn_sum(kn_mul(y, y), 0, NULL, false)) && kn_clip_grad_norm(&m, 1) &&
         kn_step(o);
    kn_scope_end(scope);
    ok = ok && kn_param_read(&m, 0, weight);
    add(t, weight, ok ? sizeof weight : 0);
    kn_optim_free(o);
    kn_module_free(&m);
    return ok;
}

bool rank_step(kn_comm *w, uint64_t *hash);

bool rank_step(kn_comm *w, uint64_t *hash)
{
    step t;
    size_t n = (size_t)kn_comm_size(w);
    bool ok = begin(&t, w) && collectives(&t) && batch_norm(&t) && tensors(&t) && table(&t);
    kn_stream_destroy(t.gathers);
    kn_stream_destroy(t.reduces);
    if (t.all)
        kn_give(kn_comm_memory(w), t.all, n * N * sizeof *t.all, KN_MEM_GATHERED);
    if (t.grad)
        kn_give(kn_comm_memory(w), t.grad, n * N * sizeof *t.grad, KN_MEM_UNREDUCED);
    free(t.mine);
    free(t.sum);
    free(t.part);
    free(t.low);
    free(t.bytes);
    *hash = t.hash;
    return ok;
}
