/* tests/kernels/products_test.c: products of f32 whose factors may be rounded
 * (kn_set_f32_products): what a device takes, and the bits and the error of products of factors
 * rounded to bf16, where the CPU has those; elsewhere the setting changes no bit. */
#include "kernels/convert.h"
#include "kernels/cpu/cpu_internal.h"
#include "kernels/device.h"
#include "kernels/kernels.h"
#include "tests/kn_test.h"

#include <float.h>

typedef struct product {
    int64_t batch, M, N, K;
    bool exact; /* few rows, or many small ones */
    bool a_columns, b_columns, c_columns, bias, add, gram;
} product;

static uint32_t state = 1;

static kn_array matrix(int64_t batch, int64_t rows, int64_t columns, bool by_columns)
{
    kn_array x = kn_array_make(NULL, KN_F32, 3, (int64_t[]){ batch, rows, columns });
    if (by_columns)
        x.stride[1] = 1, x.stride[2] = rows;
    x.data = calloc((size_t)(batch * rows * columns), sizeof(float));
    KN_CHECK(x.data != NULL);
    for (int64_t i = 0; i < batch * rows * columns; i++) {
        state = state * 1664525u + 1013904223u;
        ((float *)x.data)[i] = (float)(int32_t)state * 0x1p-31f;
    }
    return x;
}

static kn_matmul_args build(product p)
{
    kn_matmul_args x = { .dst = matrix(p.batch, p.M, p.N, p.c_columns),
                         .a = matrix(p.batch, p.M, p.K, p.a_columns),
                         .b = matrix(p.batch, p.K, p.N, p.b_columns),
                         .add = p.add };
    if (p.bias) {
        x.bias = matrix(1, 1, p.N, false);
        x.bias.ndim = 1, x.bias.shape[0] = p.N, x.bias.stride[0] = 1;
    }
    if (p.gram) { /* b: the transpose of a, in its memory */
        free(x.b.data);
        x.b.data = x.a.data;
        x.b.stride[1] = x.a.stride[2], x.b.stride[2] = x.a.stride[1];
    }
    return x;
}

static void drop(kn_matmul_args *x)
{
    free(x->dst.data);
    free(x->a.data);
    free(x->b.data != x->a.data ? x->b.data : NULL);
    free(x->bias.data);
}

/* The result with such products, instead of the one before; the caller frees it. */
static float *result(const kn_matmul_args *x, kn_products most)
{
    const size_t bytes = (size_t)kn_array_numel(&x->dst) * sizeof(float);
    kn_matmul_args own = *x;
    own.dst.data = malloc(bytes);
    KN_CHECK(own.dst.data != NULL);
    memcpy(own.dst.data, x->dst.data, bytes);
    kn_set_f32_products(most);
    KN_CHECK(kn_launch(kn_compute_stream(KN_CPU), KN_K_MATMUL, &own, sizeof own));
    kn_set_f32_products(KN_PRODUCTS_EXACT);
    return own.dst.data;
}

static bool same(float *found, float *want, int64_t n)
{
    const bool is = memcmp(found, want, (size_t)n * sizeof *found) == 0;
    free(found);
    free(want);
    return is;
}

static void round_factors(kn_array *x)
{
    float *v = x->data;
    for (int64_t i = 0; i < kn_array_numel(x); i++)
        v[i] = kn_bf16_to_f32(kn_f32_to_bf16(v[i]));
}

KN_TEST(products, a_device_takes_what_it_has)
{
    const kn_products fast = kn_cpu_multiplies_pairs() ? KN_PRODUCTS_BF16 : KN_PRODUCTS_EXACT;
    kn_set_f32_products(KN_PRODUCTS_BF16);
    KN_CHECK(kn_f32_products(KN_CPU) == fast && kn_f32_products(KN_META) == KN_PRODUCTS_EXACT);
    kn_set_f32_products(KN_PRODUCTS_TF32);
    KN_CHECK(kn_f32_products(KN_CPU) == KN_PRODUCTS_EXACT);
    REFUSED(kn_set_f32_products((kn_products)3), "KN_PRODUCTS_");
    kn_set_f32_products(KN_PRODUCTS_EXACT);
    KN_CHECK(kn_f32_products(KN_CPU) == KN_PRODUCTS_EXACT);
    KN_CHECK(strcmp(kn_products_name(fast), fast ? "bf16" : "exact") == 0);
}

/* Sums of up to 256 terms have the bits of an exact product of factors that are rounded before,
 * from any number of threads. */
KN_TEST(products, bits_are_those_of_rounded_factors)
{
    static const product list[] = {
        { 1, 5, 5, 1 },
        { 1, 13, 33, 31, .b_columns = true },
        { 1, 25, 70, 33, .a_columns = true },
        { 1, 270, 130, 256, .bias = true },
        { 1, 64, 96, 128, .a_columns = true, .b_columns = true, .add = true },
        { 1, 40, 50, 95, .c_columns = true },
        { 3, 40, 70, 64, .b_columns = true },
        { 9, 50, 40, 65, .bias = true, .add = true },
        { 1, 100, 100, 77, .gram = true },
        { 1, 4, 300, 200, .exact = true },
        { 3, 30, 20, 30, .exact = true },
    };
    const int before = kn_threads();
    char only[32];
    snprintf(only, sizeof only, "%s,reference", kn_cpu_isa());
    kn_providers_only(only);
    for (int i = 0; i < 4 * (int)(sizeof list / sizeof *list); i++) {
        const product p = list[i / 4];
        kn_matmul_args x = build(p);
        kn_set_threads(1 + i % 4);
        float *exact = result(&x, KN_PRODUCTS_EXACT), *rounded = result(&x, KN_PRODUCTS_BF16);
        KN_CHECK(same(result(&x, KN_PRODUCTS_TF32), exact, p.batch * p.M * p.N), "case %d", i);
        if (!p.exact && kn_cpu_multiplies_pairs()) {
            round_factors(&x.a);
            if (!p.gram)
                round_factors(&x.b);
        }
        KN_CHECK(same(rounded, result(&x, KN_PRODUCTS_EXACT), p.batch * p.M * p.N), "case %d", i);
        drop(&x);
    }
    kn_set_threads(before);
    kn_providers_only(NULL);
}

/* |c - sum| <= (2 u + u^2 + (K + 2) 2^-24) sum |a| |b| with u = 2^-8, and beyond an exact one's. */
KN_TEST(products, error_is_in_bounds)
{
    const double u = kn_cpu_multiplies_pairs() ? 0x1p-8 : 0;
    const product p = { 1, 37, 50, 1500, .b_columns = true };
    kn_matmul_args x = build(p);
    float *c = result(&x, KN_PRODUCTS_BF16);
    const float *a = x.a.data, *b = x.b.data;
    int beyond = 0;
    for (int64_t i = 0; i < p.M * p.N; i++) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < p.K; k++) {
            const double term = (double)a[i / p.N * p.K + k] * b[i % p.N * p.K + k];
            sum += term;
            size += fabs(term);
        }
        const double error = fabs(c[i] - sum), f32 = (double)(p.K + 2) * 0x1p-24 * size;
        KN_CHECK(error <= (2 * u + u * u) * size + f32, "%g of %g", error, size);
        beyond += error > f32;
    }
    KN_CHECK((beyond > 0) == (u > 0));
    free(c);
    drop(&x);
}

/* first * 1, computed as an element of a product: the other terms are 0. */
static float product_of_one(float first)
{
    kn_matmul_args x = build((product){ 1, 8, 8, 8 });
    for (int i = 0; i < 64; i++) {
        ((float *)x.a.data)[i] = i ? 0 : first;
        ((float *)x.b.data)[i] = 1;
    }
    float *c = result(&x, KN_PRODUCTS_BF16);
    const float value = c[7];
    free(c);
    drop(&x);
    return value;
}

KN_TEST(products, numbers_at_the_ends)
{
    const bool rounds = kn_cpu_multiplies_pairs();
    KN_CHECK(isnan(product_of_one(NAN)) && product_of_one(-INFINITY) == -INFINITY);
    KN_CHECK(product_of_one(FLT_MAX) == (rounds ? INFINITY : FLT_MAX));
    KN_CHECK(product_of_one(0x1.fefffep127f) == (rounds ? 0x1.fep127f : 0x1.fefffep127f));
    KN_CHECK(product_of_one(FLT_MIN) == FLT_MIN);
    KN_CHECK(product_of_one(-0x1.fffffcp-127f) == (rounds ? 0 : -0x1.fffffcp-127f));
    const float halves[] = { 1 + 0x1p-8f, 1 + 0x3p-8f, 1 + 0x1p-8f + 0x1p-23f };
    const float even[] = { 1, 1 + 0x1p-6f, 1 + 0x1p-7f };
    for (int i = 0; i < 3; i++)
        KN_CHECK(product_of_one(halves[i]) == (rounds ? even[i] : halves[i]), "%d", i);
}
