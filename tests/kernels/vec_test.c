/* tests/kernels/vec_test.c: the vector overlay at sizes where its chunks, threads and streaming
 * stores come into play (overlay_test.c covers the small odd ones): the same bits for any number of
 * threads and any partition. */
#include "kernels/kernels.h"
#include "tests/kn_test.h"

static float *numbers(int64_t n, uint32_t seed)
{
    float *x = malloc((size_t)n * sizeof *x);
    KN_CHECK(x != NULL);
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = ((float)(seed >> 8) - 8388608.0f) * 0x1p-22f;
    }
    return x;
}

static kn_array array(void *p, int64_t rows, int64_t cols)
{
    return kn_array_make(p, KN_F32, 2, (int64_t[]){ rows, cols });
}

static kn_stream *stream(void)
{
    return kn_compute_stream(KN_CPU);
}

/* Sums [rows, cols] to [to_rows, to_cols] on 1 to 4 threads: equal bits, near the sum in f64. */
static void check_sum(int64_t rows, int64_t cols, int64_t to_rows, int64_t to_cols)
{
    float *x = numbers(rows * cols, 1), *y[5];
    double *want = calloc((size_t)(to_rows * to_cols), sizeof *want);
    KN_CHECK(want != NULL);
    for (int64_t i = 0; i < rows * cols; i++)
        want[(to_rows == 1 ? 0 : i / cols * to_cols) + (to_cols == 1 ? 0 : i % cols)] += x[i];
    size_t bytes = (size_t)(to_rows * to_cols) * sizeof(float);
    for (int threads = 1; threads <= 4; threads++) {
        y[threads] = numbers(to_rows * to_cols, 2);
        kn_set_threads(threads);
        KN_LAUNCH(
            stream(), KN_K_REDUCE,
            (kn_reduce_args){ array(y[threads], to_rows, to_cols), array(x, rows, cols), KN_SUM });
        KN_CHECK_OK();
        KN_CHECK(memcmp(y[threads], y[1], bytes) == 0, "[%d,%d] on %d threads", (int)rows,
                 (int)cols, threads);
    }
    for (int64_t i = 0; i < to_rows * to_cols; i++)
        KN_CHECK(fabs(y[1][i] - want[i]) < 1e-3, "[%d,%d] at %d: %g, not %g", (int)rows, (int)cols,
                 (int)i, y[1][i], want[i]);
    for (int threads = 1; threads <= 4; threads++)
        free(y[threads]);
    free(want);
    free(x);
}

KN_TEST(vec, sums_do_not_depend_on_threads)
{
    check_sum(1, 300001, 1, 1);
    check_sum(3, 70003, 3, 1);
    check_sum(5000, 37, 1, 37);
    check_sum(300, 3072, 1, 3072);
    kn_set_threads(1);
}

/* What threads find and count of [300, 1000], along either dim: the first of the largest or of NaN,
 * bools that hold. */
KN_TEST(vec, places_and_counts)
{
    enum { ROWS = 300, COLS = 1000 };
    OWNED_BYTES float *x = numbers(ROWS * COLS, 1);
    OWNED_BYTES bool *holds = malloc(ROWS * COLS);
    KN_CHECK(holds != NULL);
    for (int i = 0; i < ROWS * COLS; i++) {
        x[i] = i % 5003 == 5000 ? NAN : floorf(20 * x[i]);
        holds[i] = x[i] > 3;
    }
    for (int threads = 1; threads <= 4; threads += 3)
        for (int dim = 0; dim < 2; dim++) {
            int64_t place[COLS], count[COLS];
            const int64_t lines = dim ? ROWS : COLS, n = dim ? COLS : ROWS;
            kn_array from = array(x, ROWS, COLS), to = array(place, dim ? ROWS : 1, dim ? 1 : COLS);
            to.dtype = KN_I64;
            kn_set_threads(threads);
            KN_LAUNCH(stream(), KN_K_REDUCE, (kn_reduce_args){ to, from, KN_ARGMAX });
            from.data = holds, from.dtype = KN_BOOL, to.data = count;
            KN_LAUNCH(stream(), KN_K_REDUCE, (kn_reduce_args){ to, from, KN_SUM });
            KN_CHECK_OK();
            for (int64_t l = 0; l < lines; l++) {
                int64_t first = 0, held = 0;
                for (int64_t i = 0; i < n; i++) {
                    const int64_t at = dim ? l * COLS + i : i * COLS + l;
                    const float best = x[dim ? l * COLS + first : first * COLS + l];
                    if (!isnan(best) && (isnan(x[at]) || x[at] > best))
                        first = i;
                    held += holds[at];
                }
                KN_CHECK(place[l] == first && count[l] == held,
                         "line %d of dim %d: at %d, not %d; %d, not %d", (int)l, dim, (int)place[l],
                         (int)first, (int)count[l], (int)held);
            }
        }
    kn_set_threads(1);
}

/* Of one number each: sums begin at 0, so that of -0 is 0. */
KN_TEST(vec, reductions_of_nothing)
{
    static const kn_dtype types[][2] = {
        { KN_F32, KN_F32 }, { KN_BF16, KN_BF16 }, { KN_BF16, KN_F32 }, { KN_F16, KN_F32 }
    };
    enum { N = 37 };
    for (int t = 0; t < 4; t++)
        for (int kind = KN_SUM; kind <= KN_MIN; kind++) {
            float x[N], y[N];
            kn_array from = array(x, 1, N), to = array(y, 1, N);
            from.dtype = types[t][0];
            to.dtype = kind == KN_SUM ? types[t][1] : from.dtype;
            KN_LAUNCH(stream(), KN_K_FILL, (kn_fill_args){ from, -0.0, 0 });
            KN_LAUNCH(stream(), KN_K_REDUCE, (kn_reduce_args){ to, from, (kn_reduce_kind)kind });
            KN_CHECK_OK();
            const size_t size = kn_dtype_size(to.dtype);
            for (size_t i = 1; i <= N; i++)
                KN_CHECK(((unsigned char *)y)[i * size - 1] == (kind >= KN_MAX ? 0x80 : 0),
                         "kind %d of %s", kind, kn_dtype_name(from.dtype));
        }
}

/* Rows of a few elements: threads begin within one, and inputs that repeat a row or an element of
 * each are copied. */
KN_TEST(vec, short_rows_that_repeat)
{
    static const int64_t widths[] = { 3, 7, 48, 63 };
    for (int i = 0; i < 4; i++) {
        const int64_t w = widths[i], rows = 200000 / w;
        OWNED_BYTES float *x = numbers(rows, 1), *row = numbers(w, 2), *y = numbers(rows * w, 3);
        kn_array column = array(x, rows, w), repeated = array(row, rows, w);
        column.stride[0] = 1, column.stride[1] = 0, repeated.stride[0] = 0;
        for (int threads = 1; threads <= 4; threads++) {
            memset(y, 0, (size_t)(rows * w) * sizeof *y);
            kn_set_threads(threads);
            KN_LAUNCH(stream(), KN_K_BINARY,
                      (kn_binary_args){ array(y, rows, w), column, repeated, KN_SUB });
            KN_CHECK_OK();
            for (int64_t k = 0; k < rows * w; k++)
                KN_CHECK(y[k] == x[k / w] - row[k % w], "element %d of rows of %d on %d threads",
                         (int)k, (int)w, threads);
        }
    }
    kn_set_threads(1);
}

/* Every element of a row as it is alone, NaN too: a vector with a quotient beyond 2^23 is divided
 * element by element. */
KN_TEST(vec, remainders_do_not_depend_on_their_neighbours)
{
    static const float special[] = { NAN, -NAN, INFINITY, -INFINITY, 0, -0.0f, 1e30f, -1e30f };
    static const kn_binary kinds[] = { KN_FMOD, KN_REMAINDER, KN_FLOOR_DIVIDE };
    enum { N = 1000 };
    float *a = numbers(N, 1), *b = numbers(N, 2), *row = numbers(N, 3), alone;
    for (int i = 0; i < N; i += 3)
        a[i] = special[i / 3 % 8], b[i / 2] = special[i / 5 % 8];
    for (int k = 0; k < 3; k++) {
        KN_LAUNCH(stream(), KN_K_BINARY,
                  (kn_binary_args){ array(row, 1, N), array(a, 1, N), array(b, 1, N), kinds[k] });
        for (int i = 0; i < N; i++) {
            KN_LAUNCH(stream(), KN_K_BINARY,
                      (kn_binary_args){ array(&alone, 1, 1), array(a + i, 1, 1), array(b + i, 1, 1),
                                        kinds[k] });
            KN_CHECK(memcmp(&alone, row + i, sizeof alone) == 0,
                     "%s of %g and %g: %g in a row, %g alone", kn_binary_row(kinds[k])->name, a[i],
                     b[i], row[i], alone);
        }
    }
    free(a), free(b), free(row);
}

/* Large enough for stores that bypass the cache, at an odd address, with a tail. */
KN_TEST(vec, sum_n_streams)
{
    int64_t n = (5 << 20) + 5;
    OWNED_BYTES float *a = numbers(n, 1), *b = numbers(n, 2), *c = numbers(n, 3),
                      *dst = numbers(n + 8, 4);
    for (int threads = 1; threads <= 3; threads++) {
        memset(dst, 0, (size_t)(n + 8) * sizeof *dst);
        kn_set_threads(threads);
        KN_LAUNCH(stream(), KN_K_SUM_N,
                  (kn_sum_n_args){ .dst = dst + 3,
                                   .src = { a, b, c },
                                   .n = 3,
                                   .count = n,
                                   .dst_dtype = KN_F32,
                                   .src_dtype = KN_F32 });
        KN_CHECK_OK();
        for (int64_t i = 0; i < n; i++)
            KN_CHECK(dst[3 + i] == (a[i] + b[i]) + c[i], "element %d", (int)i);
        KN_CHECK(dst[2] == 0 && dst[n + 3] == 0);
    }
    kn_set_threads(1);
}

/* One piece, or the same elements cut into three at odd places and on other threads. */
KN_TEST(vec, adamw_and_norm_do_not_depend_on_the_partition)
{
    enum { N = 200001 };
    const int64_t cut[4] = { 0, 17, 70001, N };
    float *g = numbers(N, 5), *state[2][3];
    double lr = 1e-2, scale = 0.5, step = 3;
    for (int way = 0; way < 2; way++) {
        for (int k = 0; k < 3; k++)
            state[way][k] = numbers(N, (uint32_t)k);
        for (int i = 0; i < N; i++)
            state[way][2][i] = fabsf(state[way][2][i]);
        kn_opt_piece piece[3];
        for (int k = 0; k < 3; k++) {
            int64_t at = way ? cut[k] : 0, end = way ? cut[k + 1] : N;
            piece[k] = (kn_opt_piece){ .param = state[way][0] + at,
                                       .grad = g + at,
                                       .m = state[way][1] + at,
                                       .v = state[way][2] + at,
                                       .count = end - at,
                                       .lr_mul = 1,
                                       .weight_decay = 0.1f,
                                       .param_dtype = KN_F32,
                                       .grad_dtype = KN_F32 };
        }
        kn_set_threads(way ? 3 : 1);
        KN_LAUNCH(
            stream(), KN_K_ADAMW,
            (kn_adamw_args){ { piece, way ? 3 : 1, &lr, &scale, &step, NULL }, 0.9, 0.95, 1e-8 });
        KN_CHECK_OK();
    }
    for (int k = 0; k < 3; k++)
        KN_CHECK(memcmp(state[0][k], state[1][k], N * sizeof(float)) == 0, "array %d", k);
    int64_t limbs[2][KN_SQSUM_LIMBS];
    float absmax[2];
    for (int way = 0; way < 2; way++) {
        kn_run run[3] = { { g, way ? cut[1] : N, KN_F32 },
                          { g + cut[1], cut[2] - cut[1], KN_F32 },
                          { g + cut[2], cut[3] - cut[2], KN_F32 } };
        kn_set_threads(way ? 3 : 1);
        KN_LAUNCH(stream(), KN_K_ABSMAX, (kn_absmax_args){ run, way ? 3 : 1, &absmax[way] });
        KN_LAUNCH(stream(), KN_K_SQSUM,
                  (kn_sqsum_args){ run, way ? 3 : 1, &absmax[way], limbs[way] });
        KN_CHECK_OK();
    }
    kn_set_threads(1);
    KN_CHECK(absmax[0] == absmax[1] && memcmp(limbs[0], limbs[1], sizeof limbs[0]) == 0);
    double sum = 0, fixed = 0;
    int e;
    frexp(absmax[0], &e);
    for (int i = 0; i < N; i++)
        sum += (double)g[i] * g[i];
    for (int k = KN_SQSUM_LIMBS - 1; k >= 0; k--)
        fixed = fixed * 0x1p40 + (double)limbs[0][k];
    KN_CHECK(fabs(ldexp(fixed, 2 * e - 60) / sum - 1) < 1e-9);
    for (int way = 0; way < 2; way++)
        for (int k = 0; k < 3; k++)
            free(state[way][k]);
    free(g);
}

/* A draw in one call, or in parts that start anywhere. */
KN_TEST(vec, draws_do_not_depend_on_the_partition)
{
    enum { N = 100003 };
    const int64_t cut[4] = { 0, 7, 50001, N };
    OWNED_BYTES float *whole = numbers(N, 1), *parts = numbers(N, 2);
    for (int kind = KN_UNIFORM; kind <= KN_NORMAL; kind++) {
        const uint64_t seed = 42;
        kn_random_args a = {
            kn_array_make(whole, KN_F32, 1, (int64_t[]){ N }), kind, seed, 7, 0, 0, 1, NULL
        };
        kn_set_threads(1);
        KN_LAUNCH(stream(), KN_K_RANDOM, a);
        kn_set_threads(3);
        a.seed = 0;
        a.seed_at = &seed;
        for (int k = 0; k < 3; k++) {
            int64_t n = cut[k + 1] - cut[k];
            a.dst = kn_array_make(parts + cut[k], KN_F32, 1, &n);
            a.start = cut[k];
            KN_LAUNCH(stream(), KN_K_RANDOM, a);
        }
        KN_CHECK_OK();
        KN_CHECK(memcmp(whole, parts, N * sizeof(float)) == 0, "kind %d", kind);
    }
    kn_set_threads(1);
}

/* Tiles with ragged edges, two planes. */
KN_TEST(vec, transposes)
{
    enum { P = 2, R = 301, C = 517 };
    OWNED_BYTES float *x = numbers(P * R * C, 1), *y = numbers(P * R * C, 2);
    kn_copy_args a = { kn_array_make(y, KN_F32, 3, (int64_t[]){ P, R, C }),
                       kn_array_make(x, KN_F32, 3, (int64_t[]){ P, R, C }) };
    a.src.stride[1] = 1; /* x is [P, C, R] in memory */
    a.src.stride[2] = R;
    kn_set_threads(2);
    KN_LAUNCH(stream(), KN_K_COPY, a);
    kn_set_threads(1);
    KN_CHECK_OK();
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++)
                KN_CHECK(y[(p * R + r) * C + c] == x[(p * C + c) * R + r], "[%d,%d,%d]", p, r, c);
}

/* The rounded copies that optimizers write equal, bit for bit, a copy of the updated masters: on
 * every provider, for masters of f32 and f64, for all special values. */
static void check_rounded(kn_dtype master, kn_dtype to, bool sgd)
{
    enum { N = 70003 };
    static double p[N], m[N], v[N], out[N], want[N]; /* room for the largest dtype */
    const float special[] = { 0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-40f, 3e38f, 65520.0f };
    OWNED_BYTES float *g = numbers(N, 3);
    double lr = 1e-2, scale = 0.5, step = 2;
    int64_t n = N;
    kn_array values = kn_array_make(p, master, 1, &n), start = kn_array_make(g, KN_F32, 1, &n);
    KN_LAUNCH(stream(), KN_K_COPY, (kn_copy_args){ values, start });
    for (int i = 0; i < 8; i++) {
        if (master == KN_F32)
            ((float *)p)[9 * i] = special[i];
        else
            p[9 * i] = special[i];
    }
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    kn_opt_piece piece = { .param = p,
                           .grad = g,
                           .m = m,
                           .v = sgd ? NULL : v,
                           .count = N,
                           .lr_mul = 1,
                           .weight_decay = 0.1f,
                           .param_dtype = master,
                           .grad_dtype = KN_F32,
                           .out = out,
                           .out_dtype = to };
    if (sgd)
        KN_LAUNCH(stream(), KN_K_SGD,
                  (kn_sgd_args){ { &piece, 1, &lr, &scale, &step, NULL }, 0.9, 0, false });
    else
        KN_LAUNCH(stream(), KN_K_ADAMW,
                  (kn_adamw_args){ { &piece, 1, &lr, &scale, &step, NULL }, 0.9, 0.95, 1e-8 });
    KN_LAUNCH(stream(), KN_K_COPY, (kn_copy_args){ kn_array_make(want, to, 1, &n), values });
    KN_CHECK_OK();
    KN_CHECK(memcmp(out, want, N * kn_dtype_size(to)) == 0, "%s from %s, %s", kn_dtype_name(to),
             kn_dtype_name(master), sgd ? "sgd" : "adamw");
}

KN_TEST(vec, optimizers_round_as_a_copy_does)
{
    static const kn_dtype to[] = { KN_BF16, KN_F16, KN_F32, KN_F64 };
    static const char *const providers[] = { NULL, "reference" };
    for (int l = 0; l < 2; l++) {
        kn_providers_only(providers[l]);
        for (int i = 0; i < 16; i++)
            check_rounded(i & 8 ? KN_F64 : KN_F32, to[i & 3], i & 4);
    }
    kn_providers_only(NULL);
}

/* ---- seeds that lie in memory ---------------------------------------------------------------- */

enum { HEADS = 2, ROWS = 5, DEPTH = 4, ELEMENTS = HEADS * ROWS * DEPTH };

/* Dropout, and attention with its gradients: 5 arrays of ELEMENTS. */
static void draw_all(uint64_t seed, const uint64_t *at, float out[5][ELEMENTS])
{
    float x[ELEMENTS], lse[HEADS * ROWS];
    int64_t shape[4] = { 1, HEADS, ROWS, DEPTH };
    for (int i = 0; i < ELEMENTS; i++)
        x[i] = (float)(i % 7) - 2.5f;
    kn_array a = kn_array_make(x, KN_F32, 4, shape), y[5];
    for (int i = 0; i < 5; i++)
        y[i] = kn_array_make(out[i], KN_F32, 4, shape);
    kn_array l = kn_array_make(lse, KN_F32, 3, shape);
    kn_dropout_args d = { y[0], a, 0.4, seed, 3, at };
    kn_attention_args f = { y[1], l, a, a, a, { 0 }, 0.5, true, 0.4, seed, 3, at };
    kn_attention_grad_args g = { y[2],  y[3],  y[4], a,    y[1], l,    a, a, a,
                                 { 0 }, { 0 }, 0.5,  true, 0.4,  seed, 3, at };
    kn_stream *s = kn_compute_stream(KN_CPU);
    KN_CHECK(KN_LAUNCH(s, KN_K_DROPOUT, d) && KN_LAUNCH(s, KN_K_ATTENTION, f) &&
             KN_LAUNCH(s, KN_K_ATTENTION_GRAD, g));
}

KN_TEST(vec, seeds_in_memory)
{
    static const char *const providers[] = { NULL, "reference" };
    for (int i = 0; i < 2; i++) {
        float value[5][ELEMENTS], place[5][ELEMENTS], other[5][ELEMENTS];
        uint64_t seed = 11;
        kn_providers_only(providers[i]);
        draw_all(seed, NULL, value);
        draw_all(5, &seed, place);
        draw_all(5, NULL, other);
        for (int k = 0; k < 5; k++) {
            KN_CHECK(memcmp(value[k], place[k], sizeof value[k]) == 0, "array %d", k);
            KN_CHECK(memcmp(value[k], other[k], sizeof value[k]) != 0, "array %d: the seed", k);
        }
    }
    kn_providers_only(NULL);
}

/* Interpolation gives the reference's bits with any number of threads. */
KN_TEST(vec, interpolation_is_the_references)
{
    enum { N = 2, C = 3, H = 37, W = 41, MOST = 2 * 3 * 90 * 90 };
    static const int64_t to[4][2] = { { 74, 82 }, { 13, 90 }, { 37, 41 }, { 1, 7 } };
    float *x = numbers(MOST, 1), *got = numbers(MOST, 2), *want = numbers(MOST, 3);
    for (int i = 0; i < 16; i++) {
        const int64_t *size = to[i % 4], xs[4] = { N, C, H, W }, ys[4] = { N, C, size[0], size[1] };
        const kn_grid g = { { H, W }, { (double)size[0], (double)size[1] }, i & 8 ? 0.5 : 0 };
        kn_interpolate_args made = { kn_array_make(want, KN_F32, 4, ys),
                                     kn_array_make(x, KN_F32, 4, xs), g, i & 4 };
        kn_interpolate_grad_args grad = { kn_array_make(want, KN_F32, 4, xs),
                                          kn_array_make(x, KN_F32, 4, ys), g, i & 4 };
        for (int threads = 1; threads <= 3; threads += 2) {
            kn_set_threads(threads);
            for (int way = 0; way < 2; way++) {
                made.y.data = way ? got : want;
                kn_providers_only(way ? NULL : "reference");
                KN_LAUNCH(stream(), KN_K_INTERPOLATE, made);
                if (way) {
                    size_t bytes = (size_t)(N * C * size[0] * size[1]) * sizeof *x;
                    KN_CHECK(kn_ok() && memcmp(got, want, bytes) == 0, "%d: other bits", i);
                }
            }
            for (int way = 0; way < 2; way++) {
                grad.dx.data = way ? got : want;
                kn_providers_only(way ? NULL : "reference");
                KN_LAUNCH(stream(), KN_K_INTERPOLATE_GRAD, grad);
            }
            KN_CHECK(kn_ok() && memcmp(got, want, N * C * H * W * sizeof *x) == 0,
                     "%d: other bits in the gradient", i);
        }
    }
    kn_set_threads(0);
    free(x), free(got), free(want);
}
