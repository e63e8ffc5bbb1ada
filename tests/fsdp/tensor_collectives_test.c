/* tests/fsdp/tensor_collectives_test.c: collectives on tensors (autograd/collectives.h): values and
 * gradients of each against operations of one process over all ranks' tensors, dtypes, numbers of
 * rows, meta, and ranks that go wrong. (In sharded nets: gathered_loss_test.c.) */
#include "tests/fsdp/ranks.h"
#include "tests/fsdp/apart.h"
#include "autograd/autograd.h"
#include "autograd/collectives.h"
#include "autograd/function.h"
#include "kernels/device.h"

enum { MOST_RANKS = 4, MOST = 4096 };

static bool values_of(kn_tensor *t, double *to)
{
    const int64_t n = t ? kn_numel(t) : MOST + 1;
    return n == 0 || (n <= MOST && kn_to_host(kn_cast(t, KN_F64), to, (size_t)n * sizeof *to));
}

/* ---- against one process --------------------------------------------------------------------- */

typedef enum kind { GATHER, SCATTER, SUM, MEAN, BROADCAST, TO_ALL, KINDS } kind;
static const char *const kinds[] = { "gather", "scatter", "sum", "mean", "broadcast", "to all" };

typedef struct form {
    kn_dtype dtype;
    int ndim;
    int64_t shape[3]; /* of a rank's x, but that a 0 becomes twice as many as there are ranks */
    int dim;
    bool turned; /* x isn't contiguous */
} form;

static const form forms[] = {
    { KN_F64, 2, { 0, 3 }, 0, false },     { KN_F64, 3, { 12, 0, 3 }, 1, true },
    { KN_F32, 3, { 0, 4, 0 }, -1, false }, { KN_F32, 2, { 0, 0 }, 1, true },
    { KN_BF16, 3, { 0, 0, 5 }, 1, false }, { KN_F16, 1, { 0 }, 0, false },
    { KN_F32, 2, { 0, 40 }, 0, true },
};

static kn_tensor *in_form(const form *f, int ranks, uint64_t seed, int rank)
{
    int64_t shape[3];
    for (int d = 0; d < f->ndim; d++)
        shape[d] = f->shape[d] ? f->shape[d] : 2 * ranks;
    kn_tensor *x = kn_randn(KN_F64, KN_CPU, seed, (uint64_t)rank, f->ndim, shape);
    if (f->turned) { /* the same values in another order of memory */
        kn_tensor *t = kn_contiguous(kn_transpose(x, 0, f->ndim - 1));
        x = kn_transpose(t, 0, f->ndim - 1);
    }
    return kn_cast(x, f->dtype);
}

static kn_tensor *of_ranks(kn_comm *c, kind k, const form *f, kn_tensor *x)
{
    return k == GATHER      ? kn_all_gather_tensor(c, x, f->dim)
           : k == SCATTER   ? kn_reduce_scatter_tensor(c, x, f->dim)
           : k == SUM       ? kn_all_reduce_tensor(c, x)
           : k == MEAN      ? kn_mean_tensor(c, x)
           : k == BROADCAST ? kn_broadcast_tensor(c, x, kn_comm_size(c) - 1)
                            : kn_all_to_all_tensor(c, x, NULL, NULL);
}

static bool same_shape(const kn_tensor *a, const kn_tensor *b)
{
    bool same = kn_ndim(a) == kn_ndim(b);
    for (int d = 0; d < kn_ndim(a) && same; d++)
        same = kn_size(a, d) == kn_size(b, d);
    return same;
}

static kn_tensor *part(kn_tensor *x, int dim, int i, int n)
{
    const int d = dim < 0 ? dim + kn_ndim(x) : dim;
    const int64_t size = kn_size(x, d) / n;
    return kn_slice(x, d, i * size, (i + 1) * size);
}

/* What rank r gets of all ranks' x, by operations of one process. */
static kn_tensor *of_one(kind k, const form *f, kn_tensor **x, int n, int r)
{
    kn_tensor *sum = x[0], *parts[MOST_RANKS];
    for (int i = 1; i < n; i++)
        sum = kn_add(sum, x[i]);
    for (int i = 0; i < n; i++)
        parts[i] = k == GATHER ? x[i] : k == TO_ALL ? part(x[i], 0, r, n) : NULL;
    return k == GATHER    ? kn_cat(parts, n, f->dim)
           : k == TO_ALL  ? kn_cat(parts, n, 0)
           : k == SCATTER ? part(sum, f->dim, r, n)
           : k == SUM     ? sum
           : k == MEAN    ? kn_scale(sum, 1.0 / n)
                          : x[n - 1];
}

/* sum of y w; w is a function of the rank. */
static kn_tensor *loss_of(kn_tensor *y, int r)
{
    kn_tensor *w = y ? kn_randn(KN_F64, KN_CPU, 9, (uint64_t)r, kn_ndim(y), kn_shape(y)) : NULL;
    return sum_of(kn_mul(kn_cast(y, KN_F64), kn_cast(kn_cast(w, kn_dtype_of(y)), KN_F64)));
}

/* y and dx are those of one process that has all ranks' x, in f64, and closely in other floats; the
 * sums of f32 and f64 have its bits. */
static void check_form(kn_comm *world, kind k, const form *f)
{
    IN_SCOPE;
    static _Thread_local double y[2][MOST], dx[2][MOST];
    const int n = kn_comm_size(world), me = kn_rank(world);
    const double close = f->dtype == KN_F64 ? 1e-14 : f->dtype == KN_F32 ? 1e-6 : 0.02;
    form exact = *f;
    kn_tensor *all[MOST_RANKS], *loss = NULL;
    kn_tensor *x = kn_require_grad(in_form(f, n, 5, me), true), *mine = of_ranks(world, k, f, x);
    KN_CHECK(values_of(mine, y[0]) && kn_backward(loss_of(mine, me)) &&
                 values_of(kn_grad(x), dx[0]),
             "%s", kinds[k]);
    if (kn_dtype_size(f->dtype) == 2)
        exact.dtype = KN_F32;
    for (int i = 0; i < n; i++)
        all[i] = kn_require_grad(kn_cast(in_form(f, n, 5, i), exact.dtype), true);
    for (int i = 0; i < n; i++) {
        kn_tensor *theirs = of_one(k, &exact, all, n, i), *part = loss_of(theirs, i);
        if (i == me)
            KN_CHECK(values_of(theirs, y[1]) && same_shape(mine, theirs), "%s", kinds[k]);
        loss = loss ? kn_add(loss, part) : part;
    }
    KN_CHECK(kn_backward(loss), "%s", kinds[k]);
    memset(dx[1], 0, sizeof dx[1]); /* of what nobody got */
    KN_CHECK(!kn_grad(all[me]) || values_of(kn_grad(all[me]), dx[1]), "%s", kinds[k]);
    const double apart_y = apart(y[0], y[1], kn_numel(mine)),
                 apart_dx = apart(dx[0], dx[1], kn_numel(x));
    KN_CHECK(apart_y <= (exact.dtype == f->dtype ? 0 : close) && apart_dx <= close,
             "%s of %s: y %g, dx %g apart", kinds[k], kn_dtype_name(f->dtype), apart_y, apart_dx);
}

RANK_TEST(tensor_collectives, are_operations_over_all_ranks, .threads = "1234", .processes = "2",
          .hosts = "3", .cases = KINDS)
{
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        check_form(world, (kind) * (const int *)arg, &forms[i]);
}

/* ---- numbers that aren't floats -------------------------------------------------------------- */

RANK_TEST(tensor_collectives, move_any_dtype, .threads = "23", .processes = "2", .hosts = "2")
{
    static const kn_dtype dtypes[] = { KN_I64, KN_I32, KN_U8, KN_BOOL };
    const int n = kn_comm_size(world), me = kn_rank(world);
    for (int t = 0; t < 4; t++) {
        kn_tensor *x = kn_full(dtypes[t], KN_CPU, me == 1, KN_SHAPE(2, n));
        double y[MOST];
        KN_CHECK(values_of(kn_all_gather_tensor(world, x, 1), y) && y[n] == 1 && y[0] == 0 &&
                 y[2 * n * n - 1] == (n == 2) && !kn_requires_grad(x));
        KN_CHECK(values_of(kn_broadcast_tensor(world, x, 1), y) && y[0] == 1 && y[2 * n - 1] == 1);
        KN_CHECK(values_of(kn_all_to_all_tensor(world, kn_transpose(x, 0, 1), NULL, NULL), y) &&
                 y[0] == 0 && y[2] == 1 && y[3] == 1);
    }
    kn_tensor *many = kn_full(KN_I64, KN_CPU, (double)(INT64_C(1) << 40) * (me + 1), KN_SHAPE(3));
    kn_tensor *sum = kn_all_reduce_tensor(world, many);
    int64_t sums[3];
    KN_CHECK(sum && kn_to_host(sum, sums, sizeof sums) &&
             sums[2] == (INT64_C(1) << 40) * n * (n + 1) / 2);
    kn_tensor *large = kn_mean_tensor(world, kn_full(KN_F16, KN_CPU, 60000, KN_SCALAR));
    KN_CHECK(fabs(kn_item(large) - 60000) < 32, "%g", kn_item(large));
}

/* ---- numbers of rows ------------------------------------------------------------------------- */

/* Rank r has numbers(r, q) rows for rank q, whose values tell whose they are. */
static int64_t numbers(int how, int r, int q)
{
    return how == 0 ? (r * 3 + q * 2) % 4 : how == 1 ? (r == 1 ? q : 0) : how == 2 ? 2 : 0;
}

RANK_TEST(tensor_collectives, send_any_number_of_rows, .threads = "1234", .processes = "3",
          .hosts = "2", .cases = 4)
{
    const int n = kn_comm_size(world), me = kn_rank(world), how = *(const int *)arg;
    int64_t rows[MOST_RANKS], received[MOST_RANKS], back[MOST_RANKS], all = 0, got = 0;
    double v[MOST] = { 0 }, y[MOST];
    for (int q = 0; q < n; q++)
        for (int64_t i = rows[q] = numbers(how, me, q); i > 0; i--, all++)
            v[2 * all] = 10 * me + q, v[2 * all + 1] = (double)i;
    kn_tensor *x = kn_require_grad(kn_from(KN_F64, KN_CPU, v, KN_SHAPE(all, 2)), true);
    kn_tensor *there = kn_all_to_all_tensor(world, x, rows, received);
    KN_CHECK(there && values_of(there, y));
    for (int r = 0; r < n; r++) {
        KN_CHECK(received[r] == numbers(how, r, me), "%lld from %d", (long long)received[r], r);
        for (int64_t i = received[r]; i > 0; i--, got++)
            KN_CHECK(y[2 * got] == 10 * r + me && y[2 * got + 1] == (double)i, "row %lld",
                     (long long)got);
    }
    KN_CHECK(kn_size(there, 0) == got);
    kn_tensor *home = kn_all_to_all_tensor(world, kn_scale(there, me + 2), received, back);
    KN_CHECK(home && values_of(home, y) && memcmp(back, rows, (size_t)n * sizeof *rows) == 0);
    KN_CHECK(kn_backward(sum_of(home)) && kn_grad(x) && values_of(kn_grad(x), y + MOST / 2));
    all = 0;
    for (int q = 0; q < n; q++)
        for (int64_t i = 0; i < rows[q]; i++, all++)
            KN_CHECK(y[2 * all] == v[2 * all] * (q + 2) && y[MOST / 2 + 2 * all] == q + 2,
                     "row %lld", (long long)all);
}

/* ---- inside an operation of one's own -------------------------------------------------------- */

static kn_tensor *centred(kn_comm *ranks, kn_tensor *x)
{
    return kn_sub(x, kn_mean_tensor(ranks, kn_mean(x, 1, (int64_t[]){ 0 }, false)));
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

/* As docs/own-operation.md has it: the same gradient as that of its parts. */
RANK_TEST(tensor_collectives, inside_an_operation_of_ones_own, .threads = "23", .processes = "2")
{
    double dx[2][6];
    for (int own = 0; own < 2; own++) {
        kn_tensor *x = kn_randn(KN_F64, KN_CPU, 3, (uint64_t)kn_rank(world), KN_SHAPE(2, 3)), *y;
        kn_require_grad(x, true);
        y = own ? kn_function_call_n(&centre, KN_VALUES(x), &world, sizeof world).v[0]
                : centred(world, x);
        KN_CHECK(kn_backward(loss_of(kn_mul(y, y), kn_rank(world))) &&
                 values_of(kn_grad(x), dx[own]));
    }
    KN_CHECK(apart(dx[0], dx[1], 6) < 1e-14, "%g apart", apart(dx[0], dx[1], 6));
}

/* ---- without values -------------------------------------------------------------------------- */

/* Among ranks that don't exist a step takes the time of its bytes and the memory of its results. */
KN_TEST(tensor_collectives, take_time_and_memory_on_meta)
{
    IN_SCOPE;
    const double second = 1, rate = 1e6;
    OWNED_SIMULATED kn_comm *ranks = kn_comm_simulated(8, second, rate);
    kn_stream *s = kn_compute_stream(KN_META);
    kn_tensor *x = kn_require_grad(kn_empty(KN_BF16, KN_META, KN_SHAPE(1000, 50)), true);
    const double before = kn_meta_clock(s), bytes = 2 * 1000 * 50 * 8 * 2;
    const int64_t live = kn_ledger_read().live[KN_MEM_ACTIVATION];
    kn_tensor *all = kn_all_gather_tensor(ranks, x, 0);
    KN_CHECK(all && kn_size(all, 0) == 8000);
    KN_CHECK(fabs(kn_meta_clock(s) - before - second - bytes / rate) < 1e-3, "%g s, not %g",
             kn_meta_clock(s) - before, second + bytes / rate);
    KN_CHECK(kn_ledger_read().live[KN_MEM_ACTIVATION] - live == 2 * 8000 * 50, "of memory");
    kn_tensor *each = kn_all_to_all_tensor(ranks, all, NULL, NULL);
    KN_CHECK(each && kn_backward(sum_of(kn_cast(each, KN_F32))) && kn_grad(x));
    KN_CHECK(kn_meta_clock(s) - before > 4 * second, "backward takes time");
    int64_t rows[8] = { 3, 1, 4, 1, 5, 9, 2, 975 }, received[8];
    kn_tensor *y = kn_all_to_all_tensor(ranks, x, rows, received);
    KN_CHECK(y && kn_size(y, 0) == 1000 && received[5] == 9);
    KN_CHECK(kn_mean_tensor(ranks, kn_broadcast_tensor(ranks, kn_all_reduce_tensor(ranks, x), 3)));
}

/* ---- ranks that go wrong --------------------------------------------------------------------- */

typedef struct wrong_call {
    const char *says;
    kn_tensor *(*make)(kn_comm *c, bool wrong); /* on each rank; wrong on rank 1 */
} wrong_call;

static kn_tensor *ones(int64_t a, int64_t b, bool grad)
{
    return kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(a, b)), grad);
}

static kn_tensor *other_shape(kn_comm *c, bool wrong)
{
    return kn_all_reduce_tensor(c, wrong ? ones(3, 2, false) : ones(2, 3, false));
}

static kn_tensor *other_dim(kn_comm *c, bool wrong)
{
    return kn_all_gather_tensor(c, ones(2, 2, false), wrong);
}

static kn_tensor *frozen_on_one(kn_comm *c, bool wrong)
{
    return kn_mean_tensor(c, ones(2, 3, !wrong));
}

static kn_tensor *other_root(kn_comm *c, bool wrong)
{
    return kn_broadcast_tensor(c, ones(2, 3, true), wrong);
}

/* Rank 1's loss doesn't depend on the result. */
static kn_tensor *no_backward(kn_comm *c, bool wrong)
{
    kn_tensor *x = ones(2, 3, true), *y = kn_all_gather_tensor(c, x, 0);
    kn_backward(sum_of(wrong ? x : y));
    return kn_all_reduce_tensor(c, ones(1, 1, false));
}

static kn_tensor *fails(kn_comm *c, bool wrong)
{
    kn_tensor *x = ones(2, 3, true), *y = kn_all_gather_tensor(c, x, 0);
    if (wrong)
        kn_fail("data: file is empty");
    return kn_backward(sum_of(y)) ? y : NULL;
}

static kn_tensor *rows_of_another_size(kn_comm *c, bool wrong)
{
    int64_t rows[4] = { 1, 2 };
    return kn_all_to_all_tensor(c, ones(3, wrong ? 3 : 2, false), rows, NULL);
}

static const wrong_call wrongs[] = {
    { "all_reduce_tensor of f32[2,3], dim 0, without a gradient", other_shape },
    { "all_gather_tensor of f32[2,2], dim 1, without a gradient", other_dim },
    { "mean_tensor of f32[2,3], dim 0, without a gradient", frozen_on_one },
    { "from rank 1", other_root },
    { "all_gather_tensor of f32[4,3], dim 0, in backward", no_backward },
    { "data: file is empty", fails },
    { "all_to_all_tensor of f32", rows_of_another_size },
};

RANK_TEST(tensor_collectives, a_rank_that_goes_wrong_is_named, .threads = "2", .processes = "2",
          .hosts = "2", ROWS(wrongs))
{
    const wrong_call *w = arg;
    KN_CHECK(!w->make(world, kn_rank(world) == 1), "went well");
    KN_CHECK(strstr(kn_error(), w->says), "not '%s'", w->says);
    KN_CHECK(w->make == fails && kn_rank(world) == 1 ? true : strstr(kn_error(), "rank 1") != NULL,
             "who?");
    kn_clear_error();
}

KN_TEST(tensor_collectives, wrong_use)
{
    IN_SCOPE;
    kn_comm *four = kn_comm_simulated(4, 0, 0);
    kn_tensor *x = kn_ones(KN_F32, KN_META, KN_SHAPE(6, 3)), *b = kn_gt(x, x);
    kn_tensor *i = kn_zeros(KN_I32, KN_META, KN_SHAPE(4)),
              *none = kn_zeros(KN_F32, KN_META, KN_SCALAR);
    REFUSED(kn_all_gather_tensor(four, x, 2), "all_gather_tensor: dim 2");
    REFUSED(kn_all_gather_tensor(four, NULL, 0), "all_gather_tensor");
    REFUSED(kn_all_gather_tensor(four, none, 0), "all_gather_tensor: dim 0");
    REFUSED(kn_reduce_scatter_tensor(four, x, 0),
            "reduce_scatter_tensor: dim 0 of f32[6,3] doesn't divide by the 4 ranks");
    REFUSED(kn_reduce_scatter_tensor(four, i, 0), "adds floats, got i32[4]; kn_cast it");
    REFUSED(kn_all_reduce_tensor(four, b), "all_reduce_tensor: adds floats and i64, got bool[6,3]");
    REFUSED(kn_mean_tensor(four, i), "mean_tensor: adds floats, got i32[4]");
    REFUSED(kn_broadcast_tensor(four, x, 4),
            "broadcast_tensor: root is 4, must be a rank from 0 to 3");
    REFUSED(kn_broadcast_tensor(four, x, -1), "root is -1");
    REFUSED(kn_all_to_all_tensor(four, x, NULL, NULL), "dim 0 of f32[6,3] doesn't divide by the 4");
    REFUSED(kn_all_to_all_tensor(four, none, NULL, NULL), "sends rows of a tensor, got f32[]");
    REFUSED(kn_all_to_all_tensor(four, x, (int64_t[]){ 1, 2, -1, 4 }, NULL),
            "-1 rows for rank 2 after 3");
    REFUSED(kn_all_to_all_tensor(four, x, (int64_t[]){ 1, 2, 4, 0 }, NULL),
            "4 rows for rank 2 after 3, of f32[6,3]");
    REFUSED(kn_all_to_all_tensor(four, x, (int64_t[]){ 1, 2, 2, 0 }, NULL),
            "add up to 5, of f32[6,3]");
    kn_comm_simulated_free(four);
    REFUSED(kn_all_reduce_tensor(four, x), "all_reduce_tensor: the communicator has ended");
    KN_CHECK(kn_all_reduce_tensor(NULL, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2))), "alone");
}
