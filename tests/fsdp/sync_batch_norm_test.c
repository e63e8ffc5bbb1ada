/* tests/fsdp/sync_batch_norm_test.c: batch norm over the batches of all ranks equals one rank with
 * the whole batch: in bits where ranks have equal batches of 2^k samples, closely else. (As a part
 * of a sharded net: sync_resnet_test.c.) */
#include "tests/fsdp/ranks.h"
#include "tests/fsdp/apart.h"
#include "kernels/context.h"
#include "kernels/device.h"
#include "nn/layers.h"
#include "nn/nn_internal.h"

enum { MOST = 4096, CHANNELS = 5, RUNNING = 2 * CHANNELS };

/* The results of a pass, as f64: y and dx of each value, and dw, db and the running statistics. */
typedef struct pass {
    double y[MOST], dx[MOST], dw[CHANNELS], db[CHANNELS], running[RUNNING];
} pass;

/* The whole batch, and the samples of it that each rank has. */
typedef struct batch {
    kn_dtype dtype;
    int ndim;
    int64_t shape[4];
    bool last;        /* channels-last */
    int share[4];     /* samples of each rank */
    double tolerance; /* 0: the same bits */
    pass whole;
    double dw[4][CHANNELS], db[4][CHANNELS]; /* of each rank */
} batch;

static bool copy_out(kn_tensor *t, double *to)
{
    const double *v = t ? kn_read_data(kn_cast(t, KN_F64), KN_F64) : NULL;
    if (v)
        memcpy(to, v, (size_t)kn_numel(t) * sizeof *v);
    return v || kn_numel(t) == 0;
}

/* Samples [begin, end) of the whole batch; dy with another seed. */
static kn_tensor *some(const batch *b, uint64_t seed, int64_t begin, int64_t end)
{
    kn_tensor *x = kn_randn(KN_F64, KN_CPU, seed, 3, b->ndim, b->shape);
    x = kn_cast(kn_add_scalar(kn_scale(x, 1.5), seed == 1 ? 2.5 : 0.25), b->dtype);
    x = kn_contiguous(kn_slice(x, 0, begin, end));
    return b->last ? kn_channels_last(x) : x;
}

/* A pass over these samples; comm NULL: plain batch norm. */
static bool pass_over(const batch *b, kn_comm *comm, int64_t begin, int64_t end, pass *p)
{
    IN_SCOPE;
    const kn_dtype stat = b->dtype == KN_F64 ? KN_F64 : KN_F32;
    kn_tensor *x = kn_require_grad(some(b, 1, begin, end), true), *dy = some(b, 2, begin, end);
    kn_tensor *w = kn_require_grad(kn_randn(stat, KN_CPU, 5, 1, KN_SHAPE(CHANNELS)), true);
    kn_tensor *bias = kn_require_grad(kn_randn(stat, KN_CPU, 5, 2, KN_SHAPE(CHANNELS)), true);
    kn_tensor *mean = kn_randn(stat, KN_CPU, 5, 3, KN_SHAPE(CHANNELS));
    kn_tensor *var = kn_ones(stat, KN_CPU, KN_SHAPE(CHANNELS));
    kn_tensor *y = kn_batch_norm(x, w, bias, mean, var, .training = true, .sync = comm);
    bool ok = y && kn_backward(sum_of(kn_cast(kn_mul(y, dy), stat))) && copy_out(y, p->y) &&
              copy_out(kn_grad(x), p->dx) && copy_out(kn_grad(w), p->dw) &&
              copy_out(kn_grad(bias), p->db) && copy_out(mean, p->running) &&
              copy_out(var, p->running + CHANNELS);
    ok = ok && kn_order_of(y) == kn_order_of(x);
    return ok && kn_ok();
}

static int64_t sample_size(const batch *b)
{
    int64_t n = 1;
    for (int d = 1; d < b->ndim; d++)
        n *= b->shape[d];
    return n;
}

static void of_a_part(kn_comm *world, void *arg)
{
    batch *b = arg;
    const int rank = kn_rank(world);
    int64_t begin = 0;
    for (int r = 0; r < rank; r++)
        begin += b->share[r];
    pass *p = calloc(1, sizeof *p);
    KN_CHECK(p && pass_over(b, kn_comm_dup(world, "norm"), begin, begin + b->share[rank], p));
    const int64_t each = sample_size(b), at = begin * each, n = b->share[rank] * each;
    const double y = apart(p->y, b->whole.y + at, n), dx = apart(p->dx, b->whole.dx + at, n),
                 running = apart(p->running, b->whole.running, RUNNING);
    memcpy(b->dw[rank], p->dw, sizeof p->dw);
    memcpy(b->db[rank], p->db, sizeof p->db);
    free(p);
    KN_CHECK(y <= b->tolerance && dx <= b->tolerance && running <= b->tolerance,
             "y %g, dx %g, running %g apart", y, dx, running);
}

static void check_parts(batch *b, int ranks)
{
    int64_t n = 0;
    for (int r = 0; r < ranks; r++)
        n += b->share[r];
    b->shape[0] = n;
    b->shape[1] = CHANNELS;
    KN_CHECK(n * sample_size(b) <= MOST && pass_over(b, kn_comm_self(), 0, n, &b->whole));
    KN_CHECK(spawn_threads(ranks, of_a_part, b) == 0);
    double dw[CHANNELS] = { 0 }, db[CHANNELS] = { 0 };
    for (int r = 0; r < ranks; r++)
        for (int c = 0; c < CHANNELS; c++)
            dw[c] += b->dw[r][c], db[c] += b->db[r][c];
    const double close = b->dtype == KN_F64 ? 1e-12 : 2e-6;
    KN_CHECK(apart(dw, b->whole.dw, CHANNELS) <= close && apart(db, b->whole.db, CHANNELS) <= close,
             "dw %g, db %g apart", apart(dw, b->whole.dw, CHANNELS),
             apart(db, b->whole.db, CHANNELS));
}

static const batch kinds[] = {
    { .dtype = KN_F32, .ndim = 4, .shape = { 0, 0, 5, 4 } },
    { .dtype = KN_F32, .ndim = 4, .shape = { 0, 0, 3, 6 }, .last = true },
    { .dtype = KN_F64, .ndim = 3, .shape = { 0, 0, 7 } },
    { .dtype = KN_F64, .ndim = 2 },
    { .dtype = KN_F32, .ndim = 2 },
    { .dtype = KN_BF16, .ndim = 4, .shape = { 0, 0, 2, 9 } },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

KN_TEST(sync_batch_norm, same_bits_over_ranks)
{
    static const int ranks[] = { 1, 2, 4, 3 }, each[] = { 16, 8, 4, 2 };
    for (int i = 0; i < KINDS; i++)
        for (int k = 0; k < 4; k++) {
            batch b = kinds[i];
            for (int r = 0; r < ranks[k]; r++)
                b.share[r] = each[k];
            check_parts(&b, ranks[k]);
        }
}

KN_TEST(sync_batch_norm, batches_of_any_size)
{
    static const int share[][4] = { { 5, 0, 2 }, { 1, 1 }, { 0, 0, 3, 1 }, { 0, 6 }, { 1, 7, 3 } };
    static const int ranks[] = { 3, 2, 4, 2, 3 };
    for (int i = 0; i < KINDS; i++)
        for (int k = 0; k < 5; k++) {
            batch b = kinds[i];
            b.tolerance = b.dtype == KN_F64 ? 1e-11 : b.dtype == KN_F32 ? 1e-5 : 0.02;
            memcpy(b.share, share[k], sizeof b.share);
            check_parts(&b, ranks[k]);
        }
}

/* One rank: as plain batch norm, but for the order of additions. */
KN_TEST(sync_batch_norm, as_plain_batch_norm)
{
    for (int i = 0; i < KINDS; i++) {
        static pass plain, synced;
        batch b = kinds[i];
        b.shape[0] = 11;
        b.shape[1] = CHANNELS;
        KN_CHECK(pass_over(&b, NULL, 0, 11, &plain) &&
                 pass_over(&b, kn_comm_self(), 0, 11, &synced));
        const double close = b.dtype == KN_F64 ? 1e-12 : b.dtype == KN_F32 ? 3e-6 : 0.01;
        const int64_t n = 11 * sample_size(&b);
        KN_CHECK(apart(synced.y, plain.y, n) <= close && apart(synced.dx, plain.dx, n) <= close &&
                     apart(synced.dw, plain.dw, CHANNELS) <= 1e-5 &&
                     apart(synced.db, plain.db, CHANNELS) <= 1e-5 &&
                     apart(synced.running, plain.running, RUNNING) <= 1e-6,
                 "kind %d: y %g, dx %g, dw %g, db %g, running %g apart", i,
                 apart(synced.y, plain.y, n), apart(synced.dx, plain.dx, n),
                 apart(synced.dw, plain.dw, CHANNELS), apart(synced.db, plain.db, CHANNELS),
                 apart(synced.running, plain.running, RUNNING));
    }
}

/* ---- ranks that fail ------------------------------------------------------------------------- */

/* Each rank has one sample of one value, or none: together too few. */
RANK_TEST(sync_batch_norm, too_few_values, .threads = "2", .cases = 2)
{
    const int64_t n = kn_rank(world) < *(const int *)arg;
    kn_tensor *mean = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2)), *var = kn_ones_like(mean);
    kn_comm *c = kn_comm_dup(world, "norm");
    KN_CHECK(!kn_batch_norm(kn_ones(KN_F32, KN_CPU, KN_SHAPE(n, 2)), NULL, NULL, mean, var,
                            .training = true, .sync = c),
             "went well");
    KN_CHECK(strstr(kn_error(), "values a channel over all 2 ranks have no variance") ||
                 strstr(kn_error(), "rank"),
             "another error");
    kn_clear_error();
    const float *m = kn_data(mean), *v = kn_data(var);
    KN_CHECK(m && v && m[0] == 0 && v[1] == 1, "they moved");
}

/* Rank 1 gives x of other channels, or of one channel less, or leaves out the backward: all ranks
 * end with an error. */
RANK_TEST(sync_batch_norm, a_rank_that_goes_wrong, .threads = "3", .cases = 3)
{
    const int kind = *(int *)arg;
    kn_comm *c = kn_comm_dup(world, "norm");
    const bool wrong = kn_rank(world) == 1;
    kn_tensor *w = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(3)), true);
    const int64_t C = wrong && kind < 2 ? 2 : 3;
    kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(4, C)), true);
    kn_tensor *y =
        kn_batch_norm(x, kind == 1 ? NULL : w, NULL, NULL, NULL, .training = true, .sync = c);
    if (kind == 2) {
        KN_CHECK(y);
        if (!wrong)
            kn_backward(sum_of(kn_mul(y, y)));
        kn_barrier(world, kn_compute_stream(KN_CPU), "end of step");
    }
    KN_CHECK(!kn_ok(), "went well");
    KN_CHECK(kind != 0 || strstr(kn_error(), "it should be [2]"), "another error");
    KN_CHECK(kind == 0 || strstr(kn_error(), "match"), "another error");
    kn_clear_error();
}

/* ---- modules --------------------------------------------------------------------------------- */

typedef struct norms {
    kn_module base;
    kn_batch_norm a, b;
} norms;

static kn_tensor *norms_forward(kn_module *self, kn_tensor *x)
{
    norms *n = (norms *)self;
    return kn_call(&n->b, kn_relu(kn_call(&n->a, x)));
}

static bool norms_init(norms *n, bool cumulative)
{
    *n = (norms){ 0 };
    return kn_module_init(&n->base, norms_forward) &&
           kn_batch_norm_init(&n->a, &n->base, "a", CHANNELS, .cumulative = cumulative) &&
           kn_batch_norm_init(&n->b, &n->base, "b", CHANNELS, .no_affine = true);
}

static double statistic(norms *n, const char *name, int i)
{
    const kn_tensor *t = kn_module_buffer(n, name);
    return t ? (double)((const float *)kn_data(t))[i] : NAN;
}

/* All ranks' buffers equal rank 0's. */
static bool equal_buffers(norms *n, kn_comm *world)
{
    static const char *const names[] = { "a.running_mean", "a.running_var", "b.running_mean",
                                         "b.running_var" };
    bool equal = true;
    for (int i = 0; i < 4; i++) {
        size_t size = CHANNELS * sizeof(float);
        const void *mine = kn_data(kn_module_buffer(n, names[i]));
        OWNED_HOST void *first = kn_broadcast_bytes(world, mine, &size, 0);
        equal = first && memcmp(first, mine, size) == 0 && equal;
    }
    return equal;
}

static kn_tensor *own_input(kn_comm *world, int step)
{
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 40 + (uint64_t)step, (uint64_t)kn_rank(world),
                            KN_SHAPE(2, CHANNELS, 3));
    return kn_add_scalar(x, kn_rank(world) - 1);
}

/* Recompute, no_grad and evaluation: statistics move once a call while training, alike on all
 * ranks; evaluation reads them, without a word to other ranks. */
static void modes_of_a_module(kn_comm *world, void *arg)
{
    norms n;
    double mean[2];
    for (int again = 0; again < 2; again++) {
        IN_SCOPE;
        KN_CHECK(norms_init(&n, false) && kn_sync_batch_norm(&n, world) == 2);
        KN_CHECK(kn_recompute(&n, again));
        kn_tensor *x = kn_require_grad(own_input(world, 1), true), *y = kn_call(&n, x);
        KN_CHECK(kn_backward(mean_square(y)));
        KN_CHECK(kn_item(kn_module_buffer(&n, "b.num_batches_tracked")) == 1, "counted");
        KN_CHECK(equal_buffers(&n, world), "buffers differ");
        mean[again] = statistic(&n, "b.running_mean", 2);
        const bool mode = kn_set_grad_mode(false);
        KN_CHECK(kn_call(&n, own_input(world, 2)) && equal_buffers(&n, world), "without grad");
        KN_CHECK(statistic(&n, "b.running_mean", 2) != mean[again], "it didn't move");
        kn_set_grad_mode(mode);
        kn_train(&n, false);
        mean[again] += statistic(&n, "b.running_mean", 2);
        if (kn_rank(world) == 1) /* alone */
            KN_CHECK(kn_call(&n, own_input(world, 3)), "evaluation");
        KN_CHECK(mean[again] != 2 * statistic(&n, "b.running_mean", 2) && equal_buffers(&n, world),
                 "evaluation moved them");
        kn_module_free(&n);
    }
    KN_CHECK(mean[0] == mean[1], "%g, recomputed %g", mean[0], mean[1]);
}

KN_TEST(sync_batch_norm, modes_of_a_module)
{
    by_threads("124", modes_of_a_module, NULL);
    KN_CHECK(THREADS_ONLY || spawn_processes(2, modes_of_a_module, NULL) == 0);
}

/* A program that is no rank; and on meta, among ranks that don't exist, whose collectives take
 * time. */
KN_TEST(sync_batch_norm, alone_and_on_meta)
{
    norms n;
    kn_scope s = kn_scope_begin();
    KN_CHECK(norms_init(&n, false) && kn_sync_batch_norm(&n, NULL) == 2);
    KN_CHECK(kn_call(&n, kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(4, CHANNELS))));
    KN_CHECK(statistic(&n, "b.running_mean", 1) != 0);
    kn_module_free(&n);
    OWNED_SIMULATED kn_comm *thousand = kn_comm_simulated(1000, 0.5, 1e9);
    n = (norms){ 0 };
    KN_CHECK(kn_module_init(&n.base, norms_forward) && kn_module_defaults(&n, .device = KN_META) &&
             kn_batch_norm_init(&n.a, &n.base, "a", CHANNELS, .cumulative = true) &&
             kn_batch_norm_init(&n.b, &n.base, "b", CHANNELS) && kn_materialize(&n, KN_META, 1) &&
             kn_sync_batch_norm(&n, thousand) == 2);
    kn_stream *stream = kn_compute_stream(KN_META);
    const double begin = kn_meta_clock(stream);
    kn_tensor *y =
        kn_call(&n, kn_require_grad(kn_empty(KN_BF16, KN_META, KN_SHAPE(4, CHANNELS, 3)), true));
    KN_CHECK(y && kn_backward(sum_of(y)));
    KN_CHECK(kn_meta_clock(stream) - begin > 4 * 0.5, "%g s", kn_meta_clock(stream) - begin);
    kn_scope_end(s);
    kn_module_free(&n);
}

/* Batches apart, then kn_mean_buffers; or rank 1's. */
RANK_TEST(sync_batch_norm, buffers_become_equal, .threads = "24", .cases = 2)
{
    OWNED_MODULE norms n;
    const int ranks = kn_comm_size(world);
    KN_CHECK(norms_init(&n, false) && kn_call(&n, own_input(world, 1)));
    KN_CHECK(!equal_buffers(&n, world) || kn_rank(world) == 0, "batches that ranks took apart");
    const double own = statistic(&n, "a.running_var", 3);
    const double mean = kn_mean_over_ranks(world, own);
    if (*(int *)arg) {
        size_t size = sizeof own;
        OWNED_HOST double *last = kn_broadcast_bytes(world, &own, &size, ranks - 1);
        KN_CHECK(kn_broadcast_buffers(&n, world, ranks - 1));
        KN_CHECK(last && statistic(&n, "a.running_var", 3) == *last, "not rank %d's", ranks - 1);
    } else {
        KN_CHECK(kn_mean_buffers(&n, world));
        KN_CHECK(statistic(&n, "a.running_var", 3) == (double)(float)mean, "%g, not %g",
                 statistic(&n, "a.running_var", 3), mean);
    }
    KN_CHECK(equal_buffers(&n, world), "they differ");
    KN_CHECK(kn_item(kn_module_buffer(&n, "a.num_batches_tracked")) == 1, "counted");
}

/* .cumulative: the running statistics are the mean over batches, of one rank and of several. */
RANK_TEST(sync_batch_norm, cumulative_averages, .threads = "2", .cases = 2)
{
    OWNED_MODULE norms n;
    double sum = 0;
    KN_CHECK(norms_init(&n, true));
    KN_CHECK(!*(int *)arg || kn_sync_batch_norm(&n, world) == 2);
    for (int step = 0; step < 3; step++) {
        kn_tensor *x = own_input(world, step);
        kn_tensor *mean = mean_of(kn_slice(x, 1, 2, 3));
        sum += *(int *)arg ? kn_mean_over_ranks(world, kn_item(mean)) : kn_item(mean);
        KN_CHECK(kn_call(&n, x));
        KN_CHECK(fabs(statistic(&n, "a.running_mean", 2) - sum / (step + 1)) < 1e-6,
                 "step %d: %g, %g", step, statistic(&n, "a.running_mean", 2), sum / (step + 1));
    }
}

KN_TEST(sync_batch_norm, a_step_is_recorded_anew)
{
    OWNED_MODULE norms n;
    KN_CHECK(norms_init(&n, false));
    const uint64_t before = kn_context_get()->graph.changes;
    KN_CHECK(kn_sync_batch_norm(&n, NULL) == 2 && kn_context_get()->graph.changes != before);
}

KN_TEST(sync_batch_norm, wrong_use)
{
    OWNED_MODULE kn_linear l;
    kn_batch_norm b;
    KN_CHECK(kn_linear_init(&l, NULL, "", 2, 2) && kn_sync_batch_norm(&l, NULL) == 0);
    KN_CHECK_ERROR("there is no batch norm at or below 'linear'");
    REFUSED(kn_broadcast_buffers(&l, NULL, 1), "root is 1, must be a rank from 0 to 0");
    REFUSED(kn_broadcast_buffers(&l, NULL, -1), "root is -1, must be a rank from 0");
    KN_CHECK(kn_mean_buffers(&l, NULL) && kn_broadcast_buffers(&l, NULL, 0));
    REFUSED(kn_batch_norm_init(&b, NULL, "", 2, .cumulative = true, .momentum = 0.5),
            "is .cumulative, which is without .momentum");
}
