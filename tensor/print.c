/* tensor/print.c: values as text: one element as a double, whole tensors as nested rows. */
#include "kernels/convert.h"
#include "kernels/error_internal.h"
#include "tensor/tensor_internal.h"
#include <errno.h>
#include <math.h>
#include <string.h>

/* ---- elements ------------------------------------------------------------------------------ */

/* Small floats: sign, ebits of exponent (biased by 2^(ebits-1)-1), mbits of mantissa. */
static double small_float(unsigned x, int ebits, int mbits)
{
    int bias = (1 << (ebits - 1)) - 1;
    int e = (int)(x >> mbits) & ((1 << ebits) - 1);
    double m = x & ((1u << mbits) - 1);
    double sign = x >> (ebits + mbits) & 1 ? -1.0 : 1.0;
    if (e == 0) /* subnormal */
        return sign * ldexp(m, 1 - bias - mbits);
    if (e == (1 << ebits) - 1)
        return m != 0 ? (double)NAN : sign * (double)INFINITY;
    return sign * ldexp(m + (double)(1 << mbits), e - bias - mbits);
}

/* E4M3 as in Micikevicius et al., arXiv:2209.05433: no infinities, S.1111.111 is NaN. */
static double e4m3(unsigned x)
{
    if ((x & 0x7f) == 0x7f)
        return NAN;
    if ((x & 0x78) == 0x78)
        return (x & 0x80 ? -1.0 : 1.0) * ldexp(8.0 + (x & 7), 5);
    return small_float(x, 4, 3);
}

#define LOAD(type)                                                                                 \
    do {                                                                                           \
        type v;                                                                                    \
        memcpy(&v, p, sizeof v);                                                                   \
        return (double)v;                                                                          \
    } while (0)

double kn_element(kn_dtype dtype, const void *p)
{
    uint16_t half;
    switch (dtype) {
    case KN_F32:
        LOAD(float);
    case KN_F64:
        LOAD(double);
    case KN_I64:
        LOAD(int64_t);
    case KN_I32:
        LOAD(int32_t);
    case KN_U8:
        LOAD(uint8_t);
    case KN_BOOL:
        return *(const uint8_t *)p != 0;
    case KN_I8:
        LOAD(int8_t);
    case KN_I16:
        LOAD(int16_t);
    case KN_U16:
        LOAD(uint16_t);
    case KN_U32:
        LOAD(uint32_t);
    case KN_U64:
        LOAD(uint64_t);
    case KN_BF16:
        memcpy(&half, p, sizeof half);
        return (double)kn_bf16_to_f32(half);
    case KN_F16:
        memcpy(&half, p, sizeof half);
        return (double)kn_f16_to_f32(half);
    case KN_F8_E4M3:
        return e4m3(*(const uint8_t *)p);
    case KN_F8_E5M2:
        return small_float(*(const uint8_t *)p, 5, 2);
    default:
        return NAN;
    }
}

/* ---- printing ------------------------------------------------------------------------------ */

/* Dims longer than SHORT show EDGE elements at each end. */
enum { SHORT = 12, EDGE = 3 };

typedef struct printer {
    FILE *out;
    kn_array a;
    int width; /* of the widest value shown */
} printer;

static void value_text(const printer *p, int64_t at, char *buf, size_t size)
{
    const char *x = (const char *)p->a.data + at * (int64_t)kn_dtype_size(p->a.dtype);
    int64_t i;
    uint64_t u;
    switch (p->a.dtype) {
    case KN_BOOL:
        snprintf(buf, size, "%s", *x ? "true" : "false");
        break;
    case KN_I64:
        memcpy(&i, x, sizeof i);
        snprintf(buf, size, "%lld", (long long)i);
        break;
    case KN_U64:
        memcpy(&u, x, sizeof u);
        snprintf(buf, size, "%llu", (unsigned long long)u);
        break;
    case KN_I32:
    case KN_U32:
    case KN_I16:
    case KN_U16:
    case KN_I8:
    case KN_U8:
        snprintf(buf, size, "%.0f", kn_element(p->a.dtype, x));
        break;
    default:
        snprintf(buf, size, "%.5g", kn_element(p->a.dtype, x));
    }
}

/* Index i of the shown ones in a dim of this size; -1 is the "..." */
static int64_t shown_at(int64_t size, int64_t i)
{
    if (size <= SHORT || i < EDGE)
        return i;
    return i == EDGE ? -1 : size - (2 * EDGE + 1) + i;
}

static int64_t shown_count(int64_t size)
{
    return size <= SHORT ? size : 2 * EDGE + 1;
}

static void measure(printer *p, int dim, int64_t at)
{
    char text[40];
    if (dim == p->a.ndim) {
        value_text(p, at, text, sizeof text);
        int n = (int)strlen(text);
        p->width = n > p->width ? n : p->width;
        return;
    }
    for (int64_t i = 0; i < shown_count(p->a.shape[dim]); i++) {
        int64_t k = shown_at(p->a.shape[dim], i);
        if (k >= 0)
            measure(p, dim + 1, at + k * p->a.stride[dim]);
    }
}

/* [a, b, ..., c] in the last dim; in others one entry a line, indented below the first. */
static void print_dim(printer *p, int dim, int64_t at)
{
    char text[40];
    if (dim == p->a.ndim) {
        value_text(p, at, text, sizeof text);
        fprintf(p->out, "%*s", p->width, text);
        return;
    }
    bool last = dim == p->a.ndim - 1;
    fputc('[', p->out);
    for (int64_t i = 0; i < shown_count(p->a.shape[dim]); i++) {
        if (i > 0 && last)
            fputs(", ", p->out);
        else if (i > 0)
            fprintf(p->out, ",\n%*s", dim + 1, "");
        int64_t k = shown_at(p->a.shape[dim], i);
        if (k < 0)
            fputs("...", p->out);
        else
            print_dim(p, dim + 1, at + k * p->a.stride[dim]);
    }
    fputc(']', p->out);
}

static bool print_array(FILE *out, const kn_array *a)
{
    printer p = { .out = out, .a = *a };
    if (kn_array_numel(a) > 0) {
        measure(&p, 0, 0);
        print_dim(&p, 0, 0);
        fputc('\n', out);
    }
    return true;
}

/* Dtype, shape and name on the first line, then the values; on meta the first line is all. */
bool kn_print(FILE *out, const kn_tensor *t)
{
    if (!kn_ok() || !kn_check(t, "print") || !kn_given(out, "kn_print", "the file to print to"))
        return false;
    kn_device d = t->storage->device;
    kn_array a = kn_array_of(t);
    if (!a.data || !kn_stream_sync(kn_compute_stream(d)))
        return false;
    fprintf(out, "%s%s%s%s%s\n", KN_SHOWN(t), t->name ? " " : "", t->name ? t->name : "",
            d == KN_CPU ? "" : " on ", d == KN_CPU ? "" : kn_device_name(d));
    if (d == KN_CPU) {
        print_array(out, &a);
    } else if (d != KN_META) {
        size_t bytes = (size_t)kn_numel(t) * kn_dtype_size(t->dtype);
        void *host = kn_host_alloc(bytes ? bytes : 1);
        if (host && kn_to_host(t, host, bytes)) {
            a = kn_array_make(host, t->dtype, t->ndim, t->shape);
            print_array(out, &a);
        }
        kn_host_free(host);
    }
    if (ferror(out))
        return kn_fail_system("print: cannot write: %m");
    return kn_ok();
}
