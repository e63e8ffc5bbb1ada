/* tests/kernels/reference_test.c: the reference provider against known values, against formulas
 * written another way. The other providers are then held to the reference by overlay_test.c; the
 * reference's derivatives to differences by the rows of tests/autograd/every.h, in f64. */
#include "kernels/convert.h"
#include "kernels/philox.h"
#include "tests/kernels/reference.h"

static kn_array transposed(kn_array a)
{
    int i = a.ndim - 2, j = a.ndim - 1;
    int64_t n = a.shape[i], s = a.stride[i];
    a.shape[i] = a.shape[j];
    a.stride[i] = a.stride[j];
    a.shape[j] = n;
    a.stride[j] = s;
    return a;
}

/* ---- elementwise --------------------------------------------------------------------------- */

KN_TEST(reference, copy_converts)
{
    double x[8] = { 1.9, -1.9, 300, -5, NAN, INFINITY, -1e30, 0 };
    int32_t i[8];
    uint8_t u[8], b[8];
    RUN(KN_K_COPY, (kn_copy_args){ ARRAY(i, KN_I32, 8), F64(x, 8) });
    RUN(KN_K_COPY, (kn_copy_args){ ARRAY(u, KN_U8, 8), F64(x, 8) });
    RUN(KN_K_COPY, (kn_copy_args){ ARRAY(b, KN_BOOL, 8), F64(x, 8) });
    int32_t want_i[8] = { 1, -1, 300, -5, 0, INT32_MAX, INT32_MIN, 0 };
    uint8_t want_u[8] = { 1, 0, 255, 0, 0, 255, 0, 0 }, want_b[8] = { 1, 1, 1, 1, 1, 1, 1, 0 };
    KN_CHECK(memcmp(i, want_i, sizeof i) == 0, "to i32");
    KN_CHECK(memcmp(u, want_u, sizeof u) == 0, "to u8");
    KN_CHECK(memcmp(b, want_b, sizeof b) == 0, "to bool");
    /* 2^60 + 2^36 is the middle of two floats; the 1 makes it round up. */
    int64_t big[3] = { (1LL << 60) + (1LL << 36) + 1, -(1LL << 60) - (1LL << 36) - 1, 1LL << 62 };
    float f[3];
    RUN(KN_K_COPY, (kn_copy_args){ F32(f, 3), I64(big, 3) });
    KN_CHECK(f[0] == 0x1p60f + 0x1p37f && f[1] == -f[0] && f[2] == 0x1p62f, "%a", (double)f[0]);
    kn_copy_args bad = { ARRAY(u, KN_F8_E4M3, 8), F64(x, 8) };
    KN_CHECK(!reference(KN_K_COPY, &bad), "f64 to f8");
    KN_CHECK_ERROR("storage-only");
}

KN_TEST(reference, copy_transposes_and_broadcasts)
{
    float x[6] = { 0, 1, 2, 3, 4, 5 }, y[6];
    kn_array src = F32(x, 2, 3);
    RUN(KN_K_COPY, (kn_copy_args){ F32(y, 3, 2), transposed(src) });
    float want[6] = { 0, 3, 1, 4, 2, 5 };
    KN_CHECK(memcmp(y, want, sizeof y) == 0, "transposed");
    src.stride[0] = 0;
    RUN(KN_K_COPY, (kn_copy_args){ F32(y, 2, 3), src });
    KN_CHECK(y[3] == 0 && y[5] == 2, "broadcast row");
    RUN(KN_K_COPY, (kn_copy_args){ F32(NULL, 2, 0, 3), F32(NULL, 2, 0, 3) });
}

KN_TEST(reference, fill_counts)
{
    int64_t a[6];
    RUN(KN_K_FILL, (kn_fill_args){ transposed(I64(a, 3, 2)), 10, -3 });
    int64_t want[6] = { 10, 1, 7, -2, 4, -5 };
    KN_CHECK(memcmp(a, want, sizeof a) == 0, "arange into a transposed view");
}

KN_TEST(reference, unary_values)
{
    static const struct {
        kn_unary kind;
        double x, y, p0, p1;
    } known[] = {
        { KN_RELU, -2, 0, 0, 0 },
        { KN_RELU, NAN, NAN, 0, 0 },
        { KN_GELU_TANH, 1, 0.84119199060827, 0, 0 },
        { KN_GELU, 1, 0.84134474606854, 0, 0 },
        { KN_GELU, -20, 0, 0, 0 },
        { KN_SILU, 2, 1.76159415595576, 0, 0 },
        { KN_SIGMOID, -1000, 0, 0, 0 },
        { KN_SIGMOID, 1000, 1, 0, 0 },
        { KN_RSQRT, 4, 0.5, 0, 0 },
        { KN_AFFINE, 3, 7, 2, 1 },
        { KN_POW, 2, 8, 3, 0 },
        { KN_CLAMP, 9, 4, -4, 4 },
        { KN_CLAMP, NAN, NAN, -4, 4 },
        { KN_ABS, -0.0, 0, 0, 0 },
        { KN_SIGN, -3, -1, 0, 0 },
        { KN_SIGN, -0.0, 0, 0, 0 },
        { KN_SIGN, NAN, NAN, 0, 0 },
        { KN_FLOOR, -1.5, -2, 0, 0 },
        { KN_CEIL, -1.5, -1, 0, 0 },
        { KN_ROUND, 2.5, 2, 0, 0 },
        { KN_ROUND, 3.5, 4, 0, 0 },
        { KN_ROUND, -0.5, 0, 0, 0 },
        { KN_SQUARE, -3, 9, 0, 0 },
        { KN_EXPM1, 1e-10, 1.00000000005e-10, 0, 0 },
        { KN_LOG1P, 1e-10, 9.9999999995e-11, 0, 0 },
        { KN_LOG1P, -1, -INFINITY, 0, 0 },
        { KN_LOG2, 8, 3, 0, 0 },
        { KN_TAN, 1, 1.5574077246549, 0, 0 },
        { KN_TRUNC, -1.5, -1, 0, 0 },
        { KN_FRAC, -1.25, -0.25, 0, 0 },
        { KN_EXP2, 3, 8, 0, 0 },
        { KN_LOG10, 1000, 3, 0, 0 },
        { KN_ASIN, 0.5, 0.523598775598299, 0, 0 },
        { KN_ACOS, 0.5, 1.0471975511966, 0, 0 },
        { KN_SINH, 1, 1.1752011936438, 0, 0 },
        { KN_COSH, 1, 1.54308063481524, 0, 0 },
        { KN_ASINH, 1, 0.881373587019543, 0, 0 },
        { KN_ACOSH, 2, 1.31695789692482, 0, 0 },
        { KN_ATANH, 0.5, 0.549306144334055, 0, 0 },
        { KN_ERFC, 3, 2.20904969985854e-05, 0, 0 },
        { KN_ERFINV, 0.5, 0.476936276204470, 0, 0 },
        { KN_ERFINV, -0.999999, -3.45891073727550, 0, 0 },
        { KN_ERFINV, 1e-300, 0.886226925452758e-300, 0, 0 },
        { KN_ERFINV, 1, INFINITY, 0, 0 },
        { KN_ERFINV, 1.5, NAN, 0, 0 },
        { KN_LGAMMA, 0.5, 0.572364942924700, 0, 0 },
        { KN_DIGAMMA, 1, -0.577215664901533, 0, 0 },
        { KN_DIGAMMA, -1.5, 0.703156640645243, 0, 0 },
        { KN_DIGAMMA, -2, NAN, 0, 0 },
        { KN_SELU, -1, -1.11133073781256, 0, 0 },
        { KN_SOFTSIGN, -3, -0.75, 0, 0 },
        { KN_TANHSHRINK, 1, 0.238405844044235, 0, 0 },
        { KN_CELU, -1, -0.786938680574733, 2, 0 },
        { KN_HARDSHRINK, -0.5, 0, 0.5, 0 },
        { KN_HARDSHRINK, -0.75, -0.75, 0.5, 0 },
        { KN_HARDSHRINK, NAN, NAN, 0.5, 0 },
        { KN_SOFTSHRINK, -0.75, -0.25, 0.5, 0 },
        { KN_ATAN, 1, 0.785398163397448, 0, 0 },
        { KN_ERF, 1, 0.842700792949715, 0, 0 },
        { KN_LOGSIGMOID, -1000, -1000, 0, 0 },
        { KN_LOGSIGMOID, 0, -0.693147180559945, 0, 0 },
        { KN_MISH, 1, 0.86509838826731, 0, 0 },
        { KN_HARDSIGMOID, 1.5, 0.75, 0, 0 },
        { KN_HARDSWISH, 1.5, 1.125, 0, 0 },
        { KN_HARDSWISH, -4, 0, 0, 0 },
        { KN_LEAKY_RELU, -3, -0.3, 0.1, 0 },
        { KN_LEAKY_RELU, 3, 3, 0.1, 0 },
        { KN_ELU, -1, -1.26424111765712, 2, 0 },
        { KN_SOFTPLUS, 0, 0.346573590279973, 2, 20 },
        { KN_SOFTPLUS, 2, 2, 2, 3 },
        { KN_SOFTPLUS, 1000, 1000, 1, 2000 },
        { KN_HARDTANH, 9, 4, -4, 4 },
        { KN_HARDTANH, NAN, NAN, -4, 4 },
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        double x = known[i].x, y;
        RUN(KN_K_UNARY,
            (kn_unary_args){ F64(&y, 1), F64(&x, 1), known[i].kind, known[i].p0, known[i].p1 });
        KN_CHECK(near(y, known[i].y, 1e-13), "kind %d of %g: %.15g", known[i].kind, x, y);
    }
}

KN_TEST(reference, binary_values)
{
    int32_t a[4] = { 7, -7, 5, INT32_MIN }, b[4] = { 2, 2, 0, -1 }, c[4];
    RUN(KN_K_BINARY,
        (kn_binary_args){ ARRAY(c, KN_I32, 4), ARRAY(a, KN_I32, 4), ARRAY(b, KN_I32, 4), KN_DIV });
    KN_CHECK(c[0] == 3 && c[1] == -3 && c[2] == 0 && c[3] == INT32_MIN, "integer division");
    static const struct {
        kn_binary kind;
        int32_t want[4];
        double of_floats; /* of -7.5 and 2 */
    } rests[] = { { KN_FLOOR_DIVIDE, { 3, -4, 0, INT32_MIN }, -4 },
                  { KN_REMAINDER, { 1, 1, 0, 0 }, 0.5 },
                  { KN_FMOD, { 1, -1, 0, 0 }, -1.5 },
                  { KN_ATAN2, { 0 }, -1.31019393504756 },
                  { KN_LOGADDEXP, { 0 }, 2.00007484902863 } };
    for (size_t i = 0; i < sizeof rests / sizeof *rests; i++) {
        double p = -7.5, q = 2, r;
        RUN(KN_K_BINARY, (kn_binary_args){ F64(&r, 1), F64(&p, 1), F64(&q, 1), rests[i].kind });
        KN_CHECK(near(r, rests[i].of_floats, 1e-13), "kind %d: %.15g", rests[i].kind, r);
        if (kn_binary_row(rests[i].kind)->dtypes == KN_FLOATS)
            continue;
        RUN(KN_K_BINARY, (kn_binary_args){ ARRAY(c, KN_I32, 4), ARRAY(a, KN_I32, 4),
                                           ARRAY(b, KN_I32, 4), rests[i].kind });
        KN_CHECK(memcmp(c, rests[i].want, sizeof c) == 0, "kind %d: %d %d %d %d", rests[i].kind,
                 c[0], c[1], c[2], c[3]);
    }
    float x[3] = { 1, NAN, 3 }, y[3] = { 2, 2, NAN }, z[3];
    uint8_t less[3];
    RUN(KN_K_BINARY, (kn_binary_args){ F32(z, 3), F32(x, 3), F32(y, 3), KN_MAXIMUM });
    KN_CHECK(z[0] == 2 && isnan(z[1]) && isnan(z[2]), "maximum keeps NaN");
    RUN(KN_K_BINARY, (kn_binary_args){ ARRAY(less, KN_BOOL, 3), F32(x, 3), F32(y, 3), KN_LT });
    KN_CHECK(less[0] == 1 && less[1] == 0 && less[2] == 0, "comparison with NaN");
    RUN(KN_K_WHERE, (kn_where_args){ F32(z, 3), ARRAY(less, KN_BOOL, 3), F32(x, 3), F32(y, 3) });
    KN_CHECK(z[0] == 1 && z[1] == 2 && isnan(z[2]), "where");
    kn_binary_args bad = { F32(z, 3), F32(x, 3), F32(y, 3), KN_LT };
    KN_CHECK(!reference(KN_K_BINARY, &bad), "comparison into f32");
    KN_CHECK_ERROR("binary: lt of f32");
    kn_binary_args worse = { F32(z, 3), F32(x, 2), F32(y, 3), KN_ADD };
    KN_CHECK(!reference(KN_K_BINARY, &worse), "shapes");
    KN_CHECK_ERROR("f32[2]");
}

/* bf16 arithmetic rounds to f32, then to bf16: 1 + 2^-8 + 2^-40 is 1 + 2^-8 in f32, then a tie. */
KN_TEST(reference, halves_are_computed_in_f32)
{
    uint16_t x = kn_f32_to_bf16(1), y;
    kn_unary_args a = { ARRAY(&y, KN_BF16, 1), ARRAY(&x, KN_BF16, 1), KN_AFFINE, 1,
                        0x1p-8 + 0x1p-40 };
    RUN(KN_K_UNARY, a);
    KN_CHECK(kn_bf16_to_f32(y) == 1.0f, "%a", (double)kn_bf16_to_f32(y));
}

/* ---- reductions ---------------------------------------------------------------------------- */

static double reduced(kn_reduce_kind kind, const double *x, int n)
{
    double y = -777;
    RUN(KN_K_REDUCE, (kn_reduce_args){ F64(&y, 1), F64((double *)(uintptr_t)x, n), kind });
    return y;
}

KN_TEST(reference, reduce)
{
    double x[6] = { 1, 2, 3, 4, 5, 6 }, rows[2], columns[3];
    RUN(KN_K_REDUCE, (kn_reduce_args){ F64(rows, 2, 1), F64(x, 2, 3), KN_SUM });
    RUN(KN_K_REDUCE, (kn_reduce_args){ F64(columns, 1, 3), F64(x, 2, 3), KN_MEAN });
    KN_CHECK(rows[0] == 6 && rows[1] == 15 && columns[0] == 2.5 && columns[2] == 4.5);
    RUN(KN_K_REDUCE, (kn_reduce_args){ F64(columns, 3, 1), transposed(F64(x, 2, 3)), KN_MAX });
    KN_CHECK(columns[0] == 4 && columns[2] == 6);
    double odd[4] = { 1, NAN, 7, NAN };
    KN_CHECK(isnan(reduced(KN_MAX, odd, 4)) && isnan(reduced(KN_MIN, odd, 4)));
    KN_CHECK(reduced(KN_MAX, odd, 0) == -INFINITY && reduced(KN_MIN, odd, 0) == INFINITY);
    KN_CHECK(reduced(KN_SUM, odd, 0) == 0 && isnan(reduced(KN_MEAN, odd, 0)));
    int64_t at;
    double ties[5] = { 1, 4, 2, 4, 3 };
    RUN(KN_K_REDUCE, (kn_reduce_args){ I64(&at, 1), F64(ties, 5), KN_ARGMAX });
    KN_CHECK(at == 1, "first of equals: %lld", (long long)at);
    uint8_t bools[4] = { 1, 0, 1, 1 };
    RUN(KN_K_REDUCE, (kn_reduce_args){ I64(&at, 1), ARRAY(bools, KN_BOOL, 4), KN_SUM });
    KN_CHECK(at == 3);
    /* 4096 ones and 2^24 in f32: a running f32 sum would stay at 2^24. */
    static float big[4097];
    for (int i = 0; i < 4097; i++)
        big[i] = i == 0 ? 0x1p24f : 1;
    float sum;
    RUN(KN_K_REDUCE, (kn_reduce_args){ F32(&sum, 1), F32(big, 4097), KN_SUM });
    KN_CHECK(sum == 0x1p24f + 4096);
}

/* ---- products ------------------------------------------------------------------------------ */

KN_TEST(reference, matmul)
{
    double a[6] = { 1, 2, 3, 4, 5, 6 }, b[6] = { 1, 0, 2, 1, 0, 1 }, bias[2] = { 10, 20 }, c[8];
    RUN(KN_K_MATMUL, (kn_matmul_args){ F64(c, 2, 2), F64(a, 2, 3), F64(b, 3, 2), F64(bias, 2) });
    KN_CHECK(c[0] == 15 && c[1] == 25 && c[2] == 24 && c[3] == 31, "a b + bias");
    RUN(KN_K_MATMUL, (kn_matmul_args){ F64(c, 2, 2), F64(a, 2, 3), transposed(F64(b, 2, 3)) });
    KN_CHECK(c[0] == 7 && c[1] == 4 && c[2] == 16 && c[3] == 10, "a b^T");
    RUN(KN_K_MATMUL,
        (kn_matmul_args){
            .dst = F64(c, 2, 2), .a = F64(a, 2, 3), .b = transposed(F64(b, 2, 3)), .add = true });
    KN_CHECK(c[0] == 14 && c[1] == 8 && c[2] == 32 && c[3] == 20, "a b^T added");
    kn_array batch = F64(a, 2, 1, 3), shared = F64(b, 2, 3, 2);
    shared.stride[0] = 0;
    RUN(KN_K_MATMUL, (kn_matmul_args){ F64(c, 2, 1, 2), batch, shared });
    KN_CHECK(c[0] == 5 && c[1] == 5 && c[2] == 14 && c[3] == 11, "b for the whole batch");
    RUN(KN_K_MATMUL, (kn_matmul_args){ F64(c, 2, 2), F64(a, 2, 0), F64(b, 0, 2), F64(bias, 2) });
    KN_CHECK(c[0] == 10 && c[3] == 20, "K = 0 gives the bias");
    kn_matmul_args bad = { F64(c, 2, 2), F64(a, 2, 3), F64(b, 2, 3) };
    KN_CHECK(!reference(KN_K_MATMUL, &bad), "inner dims");
    KN_CHECK_ERROR("a f64[2,3], b f64[2,3]");
}

/* ---- rows ---------------------------------------------------------------------------------- */

KN_TEST(reference, softmax)
{
    double x[6] = { 1000, 1001, 1002, -5, 0, -INFINITY }, y[6];
    RUN(KN_K_SOFTMAX, (kn_softmax_args){ F64(y, 2, 3), F64(x, 2, 3), false });
    KN_CHECK(near(y[0], 0.0900305731703805, 1e-12) && near(y[2], 0.665240955774822, 1e-12));
    KN_CHECK(near(y[4], 1 / (1 + exp(-5)), 1e-14) && y[5] == 0);
}

KN_TEST(reference, cross_entropy)
{
    enum { N = 4, V = 5 };
    double x[N * V], loss, count, lse[N];
    int64_t targets[N] = { 2, -100, 0, 4 };
    randomize(x, N * V, 9);
    kn_cross_entropy_args f = { .loss = F64(&loss, 1),
                                .count = F64(&count, 1),
                                .lse = F64(lse, N),
                                .logits = F64(x, N, V),
                                .targets = I64(targets, N),
                                .ignore_index = -100 };
    double want = 0;
    RUN(KN_K_CROSS_ENTROPY, f);
    for (int n = 0; n < N; n++) {
        double sum = 0;
        for (int v = 0; v < V; v++)
            sum += exp(x[n * V + v]);
        want += targets[n] < 0 ? 0 : (log(sum) - x[n * V + targets[n]]) / 3;
        KN_CHECK(near(lse[n], log(sum), 1e-13));
    }
    KN_CHECK(count == 3 && near(loss, want, 1e-13), "loss %.15g, not %.15g", loss, want);
    f.part = true;
    RUN(KN_K_CROSS_ENTROPY, f);
    KN_CHECK(near(loss, 3 * want, 1e-13), "a sum of %.15g, not %.15g", loss, 3 * want);
    f.part = false;
    for (int n = 0; n < N; n++)
        targets[n] = -100;
    RUN(KN_K_CROSS_ENTROPY, f);
    KN_CHECK(loss == 0 && count == 0, "every row ignored");
    targets[2] = V;
    KN_CHECK(!reference(KN_K_CROSS_ENTROPY, &f), "target out of range");
    KN_CHECK_ERROR("target 5 in row 2");
}

KN_TEST(reference, norms)
{
    enum { R = 3, C = 5 };
    double x[R * C], y[R * C], w[C], b[C], mean[R], rstd[R], add[R * C], sum[R * C];
    for (int rms = 0; rms < 2; rms++) {
        randomize(x, R * C, 20);
        randomize(w, C, 21);
        randomize(b, C, 22);
        randomize(add, R * C, 23);
        kn_norm_args f = { F64(y, R, C), F64(x, R, C),   F64(w, C),      F64(b, C), F64(mean, R),
                           F64(rstd, R), F64(add, R, C), F64(sum, R, C), 1e-5,      rms };
        if (rms)
            f.b = (kn_array){ 0 };
        RUN(KN_K_NORM, f);
        double square = 0;
        for (int j = 0; j < C; j++) { /* undo weight and bias: mean square is about 1 */
            double h = (y[j] - (rms ? 0 : b[j])) / w[j];
            square += h * h / C;
        }
        KN_CHECK(near(square, 1, 1e-3), "normalised mean square %g", square);
        f.sum = (kn_array){ 0 };
        KN_CHECK(!reference(KN_K_NORM, &f), "no place for the sum");
        KN_CHECK_ERROR("norm: add is given without sum");
    }
}

/* ---- indexing ------------------------------------------------------------------------------ */

/* 300 times 0.0123 in one row: bf16 would stay at 4 if each addition were rounded. */
static void index_add_rounds_once(void)
{
    enum { TIMES = 300 };
    static float x[TIMES], sum[1];
    static uint16_t narrow[TIMES], rounded[1];
    int64_t rows[TIMES] = { 0 };
    for (int i = 0; i < TIMES; i++) {
        narrow[i] = kn_f32_to_bf16(0.0123f);
        x[i] = kn_bf16_to_f32(narrow[i]);
    }
    RUN(KN_K_INDEX_ADD,
        (kn_index_add_args){ F32(sum, 1, 1), F32(x, TIMES, 1), I64(rows, TIMES), 0 });
    kn_array dst = kn_array_make(rounded, KN_BF16, 2, (int64_t[]){ 1, 1 });
    kn_array src = kn_array_make(narrow, KN_BF16, 2, (int64_t[]){ TIMES, 1 });
    RUN(KN_K_INDEX_ADD, (kn_index_add_args){ dst, src, I64(rows, TIMES), 0 });
    KN_CHECK(rounded[0] == kn_f32_to_bf16(sum[0]), "%g, should be %g",
             (double)kn_bf16_to_f32(rounded[0]), (double)sum[0]);
}

KN_TEST(reference, index)
{
    float x[6] = { 0, 1, 2, 3, 4, 5 }, y[6], sum[6] = { 0 };
    int64_t rows[2] = { 2, 2 }, columns[3] = { 1, 0, 1 };
    RUN(KN_K_INDEX_SELECT, (kn_index_select_args){ F32(y, 2, 2), F32(x, 3, 2), I64(rows, 2), 0 });
    KN_CHECK(y[0] == 4 && y[1] == 5 && y[2] == 4 && y[3] == 5, "rows");
    RUN(KN_K_INDEX_SELECT,
        (kn_index_select_args){ F32(y, 2, 3), F32(x, 2, 3), I64(columns, 3), 1 });
    KN_CHECK(y[0] == 1 && y[1] == 0 && y[2] == 1 && y[3] == 4 && y[4] == 3, "columns");
    RUN(KN_K_INDEX_ADD, (kn_index_add_args){ F32(sum, 3, 2), F32(x, 2, 2), I64(rows, 2), 0 });
    KN_CHECK(sum[0] == 0 && sum[4] == 2 && sum[5] == 4, "twice the same row");
    index_add_rounds_once();
    rows[1] = 3;
    kn_index_select_args bad = { F32(y, 2, 2), F32(x, 3, 2), I64(rows, 2), 0 };
    KN_CHECK(!reference(KN_K_INDEX_SELECT, &bad), "out of range");
    KN_CHECK_ERROR("index 3 at position 1 is outside [0, 3)");
    rows[0] = -1;
    kn_index_add_args worse = { F32(sum, 3, 2), F32(x, 2, 2), I64(rows, 2), 0 };
    KN_CHECK(!reference(KN_K_INDEX_ADD, &worse), "negative");
    KN_CHECK_ERROR("index -1 at position 0");
}

/* ---- random -------------------------------------------------------------------------------- */

KN_TEST(reference, random_is_a_function_of_the_index)
{
    float whole[37], part[20];
    const uint64_t seed = 8;
    kn_random_args a = { F32(whole, 37), KN_NORMAL, seed, 1ULL << 40, 0, 2, 0.5, NULL };
    RUN(KN_K_RANDOM, a);
    a.dst = F32(part, 20);
    a.start = 11;
    a.seed = 0;
    a.seed_at = &seed;
    RUN(KN_K_RANDOM, a);
    KN_CHECK(memcmp(part, whole + 11, sizeof part) == 0, "start");
    KN_CHECK(whole[5] == fmaf(0.5f, kn_normal(kn_philox_at(8, 1ULL << 40, 5)), 2), "formula");
    double wide[20];
    a.dst = F64(wide, 20);
    RUN(KN_K_RANDOM, a);
    for (int i = 0; i < 20; i++)
        KN_CHECK((float)wide[i] == part[i], "f64 sees the same draw");
}

KN_TEST(reference, dropout)
{
    enum { N = 40000 };
    static float x[N], y[N], back[N];
    for (int i = 0; i < N; i++)
        x[i] = 1;
    kn_dropout_args a = { F32(y, N), F32(x, N), 0.25, 1, 2 };
    RUN(KN_K_DROPOUT, a);
    int kept = 0;
    for (int i = 0; i < N; i++) {
        bool keep = kn_uniform01(kn_philox_at(1, 2, (uint64_t)i)) >= 0.25f;
        KN_CHECK(y[i] == (keep ? 1.0f / 0.75f : 0.0f), "element %d is %g", i, (double)y[i]);
        kept += keep;
    }
    KN_CHECK(fabs(kept / (double)N - 0.75) < 5 * 0.433 / 200, "%d kept", kept);
    a.y = a.x = F32(x, N);
    RUN(KN_K_DROPOUT, a);
    KN_CHECK(memcmp(x, y, sizeof x) == 0, "in place");
    a = (kn_dropout_args){ F32(back, N), F32(y, N), 1, 1, 2 };
    RUN(KN_K_DROPOUT, a);
    KN_CHECK(back[0] == 0 && back[N - 1] == 0, "p = 1 drops all");
}
