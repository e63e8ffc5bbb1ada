/* tests/kernels/kinds_test.c: calls every provider with every kind of a kernel, also before the
 * first and past the last: it writes the reference's values or leaves the result unchanged. */
#include "kernels/checks.h"
#include "tests/kernels/overlay.h"

#include <math.h>
#include <string.h>

/* In C++ an enum can hold only values within its enumerators' bits: there the last is one past the
 * last kind. */
#ifdef KN_TEST_CUDA
enum { N = 70, BEFORE = 0, BEYOND = 1 };
#else
enum { N = 70, BEFORE = 3, BEYOND = 3 };
#endif

static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16, KN_F64, KN_I64, KN_I32, KN_U8, KN_BOOL };
enum { TYPES = sizeof types / sizeof *types };

typedef union bytes {
    char c[N * 8];
    double d[N];
} bytes;

static bytes dst, in[2], index_bytes;

typedef struct question {
    kn_kernel kernel;
    int kind;
    kn_array out;
    const void *args;
} question;

/* Positive numbers above and below 1: few kinds give NaN. */
static kn_array input(int i, kn_dtype t)
{
    const int64_t n = N;
    kn_array a = kn_array_make(&in[i], t, 1, &n);
    for (int64_t k = 0; k < N; k++) {
        const double whole = t == KN_BOOL ? (double)((k + i) % 2) : (double)(k % 5 + i);
        case_set(&a, k, kn_dtype_is_float(t) ? 0.3 + 0.03 * (double)((k * 7 + i) % N) : whole);
    }
    return a;
}

static kn_array output(kn_dtype t)
{
    const int64_t n = N;
    memset(&dst, 0x5a, sizeof dst);
    return kn_array_make(&dst, t, 1, &n);
}

static bool untouched(void)
{
    for (size_t i = 0; i < sizeof dst; i++)
        if (dst.c[i] != 0x5a)
            return false;
    return true;
}

static double unit_of(kn_dtype t)
{
    return t == KN_BF16  ? 0x1p-7
           : t == KN_F16 ? 0x1p-10
           : t == KN_F32 ? 1e-5
           : t == KN_F64 ? 1e-12
                         : 0;
}

/* Returns the number of providers that took the case, the reference last. */
static int ask(const question *q)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    const int n = overlay_all_layers(providers);
    const int64_t numel = kn_array_numel(&q->out);
    double want[N];
    int took = 0;
    memset(&dst, 0x5a, sizeof dst);
    const bool known = kn_kernel_fits(q->kernel, q->args);
    if (!known) { /* no provider sees it */
        kn_clear_error();
        return 0;
    }
    KN_CHECK(providers[n - 1]->run[q->kernel](q->args) == KN_DONE, "%s kind %d",
             kn_kernel_name(q->kernel), q->kind);
    for (int64_t k = 0; k < numel; k++)
        want[k] = case_get(&q->out, k);
    for (int i = 0; i < n - 1; i++) {
        kn_clear_error();
        memset(&dst, 0x5a, sizeof dst);
        const kn_kernel_fn run = providers[i]->run[q->kernel];
        const kn_status s = run ? run(q->args) : KN_DECLINED;
        const char *t = kn_dtype_name(q->out.dtype);
        KN_CHECK(s == KN_DONE || untouched(), "%s of %s: %s kind %d: declined, but written",
                 kn_kernel_name(q->kernel), providers[i]->name, t, q->kind);
        for (int64_t k = 0; s == KN_DONE && k < numel; k++) {
            const double x = case_get(&q->out, k), unit = unit_of(q->out.dtype);
            KN_CHECK(fabs(x - want[k]) <= unit * (1 + fabs(want[k])) ||
                         (isnan(x) && isnan(want[k])),
                     "%s of %s: %s kind %d: %g for %g", kn_kernel_name(q->kernel),
                     providers[i]->name, t, q->kind, x, want[k]);
        }
        took += s == KN_DONE;
    }
    kn_clear_error();
    return took + 1;
}

/* True if a kind is defined for t, by its row and by the reference. */
static bool row_has(const kn_kind_row *row, kn_dtype t)
{
    if (strcmp(row->name, "unknown") == 0)
        return false;
    return row->dtypes == KN_BOOLS     ? t == KN_BOOL
           : row->dtypes == KN_NUMBERS ? true
                                       : kn_dtype_is_float(t);
}

KN_TEST(kinds, unary)
{
    for (int kind = -BEFORE; kind < KN_UNARY_COUNT + BEYOND; kind++) {
        int took = 0;
        for (int t = 0; t < TYPES; t++) {
            kn_unary_args a = { output(types[t]), input(0, types[t]), (kn_unary)kind, 2, 3 };
            const int takers = ask(&(question){ KN_K_UNARY, kind, a.dst, &a });
            KN_CHECK((takers > 0) == row_has(kn_unary_row(a.kind), types[t]),
                     "%s of %s: %d providers take it, against its row", kn_unary_row(a.kind)->name,
                     kn_dtype_name(types[t]), takers);
            took += takers;
        }
        const bool known = kind >= 0 && kind < KN_UNARY_COUNT;
        KN_CHECK((took > 0) == known, "kind %d: %d providers take it", kind, took);
    }
}

KN_TEST(kinds, unary_grad)
{
    for (int kind = -BEFORE; kind < KN_UNARY_COUNT + BEYOND; kind++) {
        int took = 0;
        for (int t = 0; t < 4; t++) {
            kn_unary_grad_args a = { .dx = output(types[t]),
                                     .dy = input(0, types[t]),
                                     .kind = (kn_unary)kind,
                                     .p0 = 2,
                                     .p1 = 3 };
            a.x = a.y = input(1, types[t]);
            took += ask(&(question){ KN_K_UNARY_GRAD, kind, a.dx, &a });
        }
        const bool known = kn_unary_row((kn_unary)kind)->reads != KN_READS_NO_GRAD && kind >= 0 &&
                           kind < KN_UNARY_COUNT;
        KN_CHECK((took > 0) == known, "kind %d: %d providers take it", kind, took);
    }
}

KN_TEST(kinds, binary)
{
    for (int kind = -BEFORE; kind < KN_BINARY_COUNT + BEYOND; kind++) {
        int took = 0;
        for (int t = 0; t < TYPES; t++) {
            int takers = 0;
            for (int to = 0; to < TYPES; to++) {
                kn_binary_args a = { output(types[to]), input(0, types[t]), input(1, types[t]),
                                     (kn_binary)kind, 0.25 };
                takers += ask(&(question){ KN_K_BINARY, kind, a.dst, &a });
            }
            const kn_kind_row *row = kn_binary_row((kn_binary)kind);
            KN_CHECK((takers > 0) == row_has(row, types[t]),
                     "%s of %s: %d providers take it, against its row", row->name,
                     kn_dtype_name(types[t]), takers);
            took += takers;
        }
        const bool known = kind >= 0 && kind < KN_BINARY_COUNT;
        KN_CHECK((took > 0) == known, "kind %d: %d providers take it", kind, took);
    }
}

KN_TEST(kinds, reduce)
{
    for (int kind = -BEFORE; kind < KN_REDUCE_COUNT + BEYOND; kind++) {
        int took = 0;
        for (int t = 0; t < TYPES; t++) {
            const kn_dtype to =
                kn_dtype_is_float(types[t]) && kind != KN_ARGMAX ? types[t] : KN_I64;
            kn_reduce_args a = { output(to), input(0, types[t]), (kn_reduce_kind)kind };
            a.dst.shape[0] = 1;
            took += ask(&(question){ KN_K_REDUCE, kind, a.dst, &a });
        }
        const bool known = kind >= 0 && kind < KN_REDUCE_COUNT;
        KN_CHECK((took > 0) == known, "kind %d: %d providers take it", kind, took);
    }
}

KN_TEST(kinds, random)
{
    for (int kind = -BEFORE; kind < KN_RANDOM_COUNT + BEYOND; kind++) {
        int took = 0;
        for (int t = 0; t < 4; t++) {
            kn_random_args a = { output(types[t]), (kn_random)kind, 1, 2, 0, 0, 1 };
            took += ask(&(question){ KN_K_RANDOM, kind, a.dst, &a });
        }
        const bool known = kind >= 0 && kind < KN_RANDOM_COUNT;
        KN_CHECK((took > 0) == known, "kind %d: %d providers take it", kind, took);
    }
}

/* The 64 first elements as an image of 8 x 8, its pools 4 x 4; the gradient the other way round. */
KN_TEST(kinds, pool)
{
    static const int64_t image[4] = { 1, 1, 8, 8 }, pools[4] = { 1, 1, 4, 4 };
    for (int kind = -BEFORE; kind < KN_POOL_COUNT + BEYOND; kind++)
        for (int grad = 0; grad < 2; grad++) {
            int took = 0;
            for (int t = 0; t < 4; t++) {
                const kn_window w = { .kernel = { 2, 2 },
                                      .stride = { 2, 2 },
                                      .dilation = { 1, 1 } };
                input(0, types[t]);
                kn_array in_array = kn_array_make(&in[0], types[t], 4, grad ? pools : image);
                kn_array out = kn_array_make(&dst, types[t], 4, grad ? image : pools);
                kn_array at = kn_array_make(&index_bytes, KN_I32, 4, pools);
                for (int k = 0; k < 16; k++)
                    ((int32_t *)(void *)&index_bytes)[k] = k / 4 * 16 + k % 4 * 2;
                kn_pool_args a = { .y = out, .x = in_array, .window = w, .kind = (kn_pool)kind };
                kn_pool_grad_args g = {
                    .dx = out, .dy = in_array, .index = at, .window = w, .kind = (kn_pool)kind
                };
                took += ask(&(question){ grad ? KN_K_POOL_GRAD : KN_K_POOL, kind, out,
                                         grad ? (const void *)&g : (const void *)&a });
            }
            const bool known = kind >= 0 && kind < KN_POOL_COUNT;
            KN_CHECK((took > 0) == known, "kind %d: %d providers take it", kind, took);
        }
}
