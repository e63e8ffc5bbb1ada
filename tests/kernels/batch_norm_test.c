/* tests/kernels/batch_norm_test.c: what batch norm over several ranks is made of, by the reference:
 * parts that are joined, statistics alone, and gradients of a part of the batch. (Batch norm
 * itself: tests/autograd/image_test.c; the other providers: overlay_image_test.c.) */
#include "tests/kernels/reference.h"

enum { ROWS = 13, CHANNELS = 3, EACH = 4 };

/* Moments of rows of EACH values, joined, against those of all values by their definition. */
KN_TEST(batch_norm, moments_join)
{
    double x[ROWS][EACH][CHANNELS], a[ROWS][CHANNELS], b[ROWS][CHANNELS];
    double mean[CHANNELS], var[CHANNELS], count[1];
    double running_mean[CHANNELS] = { 1, 2, 3 }, running_var[CHANNELS] = { 4, 5, 6 };
    randomize(&x[0][0][0], ROWS * EACH * CHANNELS, 1);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < CHANNELS; c++) {
            a[r][c] = b[r][c] = 0;
            for (int i = 0; i < EACH; i++)
                a[r][c] += x[r][i][c] / EACH;
            for (int i = 0; i < EACH; i++)
                b[r][c] += (x[r][i][c] - a[r][c]) * (x[r][i][c] - a[r][c]) / (EACH - 1);
        }
    RUN(KN_K_BATCH_NORM_JOIN,
        (kn_batch_norm_join_args){ .a = F64(mean, CHANNELS),
                                   .b = F64(var, CHANNELS),
                                   .count = F64(count, 1),
                                   .from_a = F64(a, ROWS, CHANNELS),
                                   .from_b = F64(b, ROWS, CHANNELS),
                                   .running_mean = F64(running_mean, CHANNELS),
                                   .running_var = F64(running_var, CHANNELS),
                                   .each = EACH,
                                   .scale = EACH - 1,
                                   .momentum = 0.25,
                                   .moments = true,
                                   .finish = true });
    const double M = ROWS * EACH;
    KN_CHECK(count[0] == M, "%g values", count[0]);
    for (int c = 0; c < CHANNELS; c++) {
        double m = 0, v = 0;
        for (int i = 0; i < ROWS * EACH; i++)
            m += x[i / EACH][i % EACH][c] / M;
        for (int i = 0; i < ROWS * EACH; i++)
            v += (x[i / EACH][i % EACH][c] - m) * (x[i / EACH][i % EACH][c] - m) / M;
        KN_CHECK(near(mean[c], m, 1e-14) && near(var[c], v, 1e-14), "%g, %g", mean[c], var[c]);
        KN_CHECK(near(running_mean[c], 0.75 * (1 + c) + 0.25 * m, 1e-14) &&
                     near(running_var[c], 0.75 * (4 + c) + 0.25 * v * M / (M - 1), 1e-14),
                 "running %g, %g", running_mean[c], running_var[c]);
    }
}

/* Joins rows [begin, end) of from, with their counts where there are some. */
static void join(const kn_batch_norm_join_args *all, int begin, int end, double *to)
{
    kn_batch_norm_join_args some = *all;
    some.from_a.data = (double *)all->from_a.data + begin * CHANNELS;
    some.from_b.data = (double *)all->from_b.data + begin * CHANNELS;
    some.from_a.shape[0] = some.from_b.shape[0] = end - begin;
    if (all->from_count.data) {
        some.from_count.data = (double *)all->from_count.data + begin;
        some.from_count.shape[0] = end - begin;
    }
    some.a = F64(to, CHANNELS);
    some.b = F64(to + CHANNELS, CHANNELS);
    some.count = F64(to + 2 * CHANNELS, 1);
    RUN(KN_K_BATCH_NORM_JOIN, some);
}

/* Parts of 2^k rows, the last maybe shorter, that are joined by themselves give the bits of all. */
KN_TEST(batch_norm, parts_join_to_the_same_bits)
{
    double a[ROWS][CHANNELS], b[ROWS][CHANNELS], count[ROWS];
    double whole[2 * CHANNELS + 1], part[2 * CHANNELS + 1], again[2 * CHANNELS + 1];
    randomize(&a[0][0], ROWS * CHANNELS, 1);
    randomize(&b[0][0], ROWS * CHANNELS, 2);
    for (int i = 0; i < ROWS; i++)
        count[i] = i % 3; /* some hold nothing */
    for (int moments = 0; moments < 2; moments++)
        for (int size = 1; size <= 16; size *= 2) {
            kn_batch_norm_join_args rows = { .from_a = F64(a, ROWS, CHANNELS),
                                             .from_b = F64(b, ROWS, CHANNELS),
                                             .moments = moments,
                                             .scale = 1 };
            if (moments)
                rows.from_count = F64(count, ROWS);
            double pa[ROWS][CHANNELS], pb[ROWS][CHANNELS], pc[ROWS];
            int parts = 0;
            join(&rows, 0, ROWS, whole);
            for (int begin = 0; begin < ROWS; begin += size, parts++) {
                join(&rows, begin, begin + size < ROWS ? begin + size : ROWS, part);
                memcpy(pa[parts], part, sizeof pa[parts]);
                memcpy(pb[parts], part + CHANNELS, sizeof pb[parts]);
                pc[parts] = part[2 * CHANNELS];
            }
            rows.from_a = F64(pa, parts, CHANNELS);
            rows.from_b = F64(pb, parts, CHANNELS);
            rows.from_count = moments ? F64(pc, parts) : (kn_array){ 0 };
            join(&rows, 0, parts, again);
            KN_CHECK(memcmp(whole, again, sizeof whole) == 0, "parts of %d rows", size);
        }
}

KN_TEST(batch_norm, nothing_joins_to_nothing)
{
    double to[2] = { 5, 5 }, count[1] = { 5 }, mean[1] = { 7 };
    kn_batch_norm_join_args none = { .a = F64(to, 1),
                                     .b = F64(to + 1, 1),
                                     .count = F64(count, 1),
                                     .from_a = F64(NULL, 0, 1),
                                     .from_b = F64(NULL, 0, 1),
                                     .running_mean = F64(mean, 1),
                                     .momentum = 1,
                                     .moments = true,
                                     .finish = true };
    RUN(KN_K_BATCH_NORM_JOIN, none);
    KN_CHECK(to[0] == 0 && to[1] == 0 && count[0] == 0 && mean[0] == 7);
    none.a = F64(to, 2);
    REFUSED(reference(KN_K_BATCH_NORM_JOIN, &none), "batch_norm_join: b f64[1] does not fit");
}

/* Without y the statistics are the same; a half of the batch with the means of the whole batch's
 * gradient gets that half of dx. */
KN_TEST(batch_norm, a_part_of_the_batch)
{
    enum { N = 6, S = 5, ALL = N * CHANNELS * S, HALF = ALL / 2 };
    double x[ALL], dy[ALL], y[ALL], dx[ALL], half[HALF], dw[CHANNELS], db[CHANNELS];
    double mean[2][CHANNELS], rstd[2][CHANNELS], w[CHANNELS] = { 1, -2, 0.5 };
    randomize(x, ALL, 1);
    randomize(dy, ALL, 2);
    for (int i = 0; i < 2; i++)
        RUN(KN_K_BATCH_NORM,
            (kn_batch_norm_args){ .y = i ? (kn_array){ 0 } : F64(y, N, CHANNELS, S),
                                  .x = F64(x, N, CHANNELS, S),
                                  .mean = F64(mean[i], CHANNELS),
                                  .rstd = F64(rstd[i], CHANNELS),
                                  .eps = 1e-5,
                                  .training = true });
    KN_CHECK(memcmp(mean[0], mean[1], sizeof mean[0]) == 0 &&
             memcmp(rstd[0], rstd[1], sizeof rstd[0]) == 0);
    kn_batch_norm_grad_args a = { .dx = F64(dx, N, CHANNELS, S),
                                  .dw = F64(dw, CHANNELS),
                                  .db = F64(db, CHANNELS),
                                  .dy = F64(dy, N, CHANNELS, S),
                                  .x = F64(x, N, CHANNELS, S),
                                  .w = F64(w, CHANNELS),
                                  .mean = F64(mean[0], CHANNELS),
                                  .rstd = F64(rstd[0], CHANNELS),
                                  .training = true };
    RUN(KN_K_BATCH_NORM_GRAD, a);
    for (int c = 0; c < CHANNELS; c++)
        dw[c] /= N * S, db[c] /= N * S;
    a.mean_dw = a.dw;
    a.mean_db = a.db;
    a.dw = a.db = (kn_array){ 0 };
    a.dx = F64(half, N / 2, CHANNELS, S);
    a.dy = F64(dy + HALF, N / 2, CHANNELS, S);
    a.x = F64(x + HALF, N / 2, CHANNELS, S);
    RUN(KN_K_BATCH_NORM_GRAD, a);
    for (int i = 0; i < HALF; i++)
        KN_CHECK(near(half[i], dx[HALF + i], 1e-13), "%g, not %g", half[i], dx[HALF + i]);
}
