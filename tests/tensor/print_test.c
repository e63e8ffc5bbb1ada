/* tests/tensor/print_test.c: elements of every dtype as numbers, and whole tensors as text. */
#include "kernels/convert.h"
#include "tensor/tensor_internal.h"
#include "tests/kn_test.h"

static bool same(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

/* Every bit pattern of the half types, against the kernels' own conversion. */
KN_TEST(print, element_halves)
{
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t h = (uint16_t)i;
        KN_CHECK(same(kn_element(KN_BF16, &h), kn_bf16_to_f32(h)), "bf16 %04x", i);
        KN_CHECK(same(kn_element(KN_F16, &h), kn_f16_to_f32(h)), "f16 %04x", i);
    }
}

/* Values of arXiv:2209.05433, table 1. */
KN_TEST(print, element_float8)
{
    struct {
        kn_dtype t;
        uint8_t bits;
        double value;
    } known[] = {
        { KN_F8_E4M3, 0x7e, 448 },
        { KN_F8_E4M3, 0x08, 0x1p-6 },
        { KN_F8_E4M3, 0x07, 0.875 * 0x1p-6 },
        { KN_F8_E4M3, 0x01, 0x1p-9 },
        { KN_F8_E4M3, 0x78, 256 },
        { KN_F8_E4M3, 0xfe, -448 },
        { KN_F8_E4M3, 0x7f, NAN },
        { KN_F8_E4M3, 0xff, NAN },
        { KN_F8_E4M3, 0x38, 1 },
        { KN_F8_E4M3, 0x80, -0.0 },
        { KN_F8_E5M2, 0x7b, 57344 },
        { KN_F8_E5M2, 0x04, 0x1p-14 },
        { KN_F8_E5M2, 0x03, 0.75 * 0x1p-14 },
        { KN_F8_E5M2, 0x01, 0x1p-16 },
        { KN_F8_E5M2, 0x7c, INFINITY },
        { KN_F8_E5M2, 0xfc, -INFINITY },
        { KN_F8_E5M2, 0x7d, NAN },
        { KN_F8_E5M2, 0x3c, 1 },
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        KN_CHECK(same(kn_element(known[i].t, &known[i].bits), known[i].value), "%s %02x is %g",
                 kn_dtype_name(known[i].t), known[i].bits, kn_element(known[i].t, &known[i].bits));
}

KN_TEST(print, element_integers)
{
    int64_t i64 = -(1LL << 40);
    uint64_t u64 = 1ULL << 63;
    int8_t i8 = -128;
    uint32_t u32 = 4000000000u;
    KN_CHECK(kn_element(KN_I64, &i64) == -0x1p40 && kn_element(KN_U64, &u64) == 0x1p63);
    KN_CHECK(kn_element(KN_I8, &i8) == -128 && kn_element(KN_U8, &i8) == 128);
    KN_CHECK(kn_element(KN_U32, &u32) == 4e9 && kn_element(KN_I16, &i64) == 0);
    KN_CHECK(isnan(kn_element(KN_DTYPE_DEFAULT, &i64)));
}

static void prints(const kn_tensor *t, const char *want)
{
    OWNED_BYTES char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    KN_CHECK(kn_print(out, t));
    fclose(out);
    KN_CHECK(strcmp(text, want) == 0, "printed:\n%s\nwanted:\n%s", text, want);
}

KN_TEST(print, values)
{
    float v[6] = { 1, -2.5f, 0.001f, 1e10f, INFINITY, 3 };
    uint8_t flag[2] = { 1, 0 };
    int64_t big[2] = { INT64_MAX, -1 }, shape[2] = { 3, 2 }, stride[2] = { 1, 3 };
    kn_tensor *t = kn_from(KN_F32, KN_CPU, v, KN_SHAPE(2, 3));
    kn_set_name(t, "w");
    prints(t, "f32[2,3] w\n[[    1,  -2.5, 0.001],\n [1e+10,   inf,     3]]\n");
    prints(kn_tensor_alias(t, 0, 2, shape, stride),
           "f32[3,2]\n[[    1, 1e+10],\n [ -2.5,   inf],\n [0.001,     3]]\n");
    prints(kn_from(KN_BOOL, KN_CPU, flag, KN_SHAPE(2)), "bool[2]\n[ true, false]\n");
    prints(kn_from(KN_I64, KN_CPU, big, KN_SHAPE(2)),
           "i64[2]\n[9223372036854775807,                  -1]\n");
    prints(kn_full(KN_BF16, KN_CPU, 0.5, KN_SCALAR), "bf16[]\n0.5\n");
    prints(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 0)), "f32[2,0]\n");
    prints(kn_arange(KN_I32, KN_CPU, 100), "i32[100]\n[ 0,  1,  2, ..., 97, 98, 99]\n");
    prints(kn_arange(KN_I32, KN_CPU, 12),
           "i32[12]\n[ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11]\n");
    prints(kn_zeros(KN_F32, KN_META, KN_SHAPE(2)), "f32[2] on meta\n");
}

KN_TEST(print, long_dims)
{
    prints(kn_zeros(KN_U8, KN_CPU, KN_SHAPE(13, 1)),
           "u8[13,1]\n[[0],\n [0],\n [0],\n ...,\n [0],\n [0],\n [0]]\n");
}

KN_TEST(print, refuses)
{
    kn_tensor *t = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2));
    FILE *closed = fopen("/dev/full", "w");
    REFUSED(kn_print(stderr, NULL), "print");
    if (!closed)
        return;
    setvbuf(closed, NULL, _IONBF, 0);
    REFUSED(kn_print(closed, t), "cannot write");
    fclose(closed);
}

KN_TEST(print, describe)
{
    char buf[64], tiny[4];
    kn_tensor *t = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 3));
    KN_CHECK(strcmp(kn_describe(t, buf, sizeof buf), "f32[2,3]") == 0, "%s", buf);
    KN_CHECK(strcmp(kn_describe(t, tiny, sizeof tiny), "f32") == 0, "%s", tiny);
    KN_CHECK(strcmp(kn_describe(NULL, buf, sizeof buf), "NULL") == 0);
    KN_CHECK(*kn_name(t) == '\0');
    kn_set_name(t, "a");
    kn_set_name(t, "b");
    KN_CHECK(strcmp(kn_name(t), "b") == 0);
}
