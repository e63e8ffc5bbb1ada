/* tests/kernels/convert_test.c: the conversions of kernels/convert.h against exact rounding. */
#include "kernels/convert.h"
#include "tests/kn_test.h"

static double half_value(uint16_t h, int exponent_bits)
{
    int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    int e = (h & 0x7fff) >> fraction_bits, f = h & ((1 << fraction_bits) - 1);
    double v = e == 0 ? ldexp(f, 1 - bias - fraction_bits)
                      : ldexp(f + (1 << fraction_bits), e - bias - fraction_bits);
    if (e == (1 << exponent_bits) - 1)
        v = f ? NAN : INFINITY;
    return h & 0x8000 ? -v : v;
}

static bool same(double a, double b)
{
    return isnan(a) ? isnan(b) : a == b && signbit(a) == signbit(b);
}

KN_TEST(convert, every_half_widens_and_comes_back)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float b = kn_bf16_to_f32((uint16_t)h), f = kn_f16_to_f32((uint16_t)h);
        KN_CHECK(same(b, half_value((uint16_t)h, 8)), "bf16 %04x: %g", h, b);
        KN_CHECK(same(f, half_value((uint16_t)h, 5)), "f16 %04x: %g", h, f);
        KN_CHECK(isnan(b) ? isnan(kn_bf16_to_f32(kn_f32_to_bf16(b))) : kn_f32_to_bf16(b) == h);
        KN_CHECK(isnan(f) ? isnan(kn_f16_to_f32(kn_f32_to_f16(f))) : kn_f32_to_f16(f) == h);
    }
}

/* Between neighbours h and h + 1: just below the middle goes down, the middle to the even one, just
 * above goes up. From f64 the steps are far finer than those of f32. */
KN_TEST(convert, ties_to_even)
{
    for (int kind = 0; kind < 2; kind++) {
        int bits = kind ? 5 : 8;
        uint16_t (*narrow)(double) = kind ? kn_f64_to_f16 : kn_f64_to_bf16;
        uint16_t (*narrow32)(float) = kind ? kn_f32_to_f16 : kn_f32_to_bf16;
        uint16_t infinity = kind ? 0x7c00 : 0x7f80;
        for (uint16_t h = 0; h + 1 < infinity; h++) {
            double lo = half_value(h, bits), hi = half_value((uint16_t)(h + 1), bits);
            double middle = (lo + hi) / 2;
            uint16_t even = (uint16_t)(h & 1 ? h + 1 : h);
            KN_CHECK(narrow(middle) == even && narrow(-middle) == (even | 0x8000), "%04x", h);
            KN_CHECK(narrow(nextafter(middle, 0)) == h, "%04x", h);
            KN_CHECK(narrow(nextafter(middle, INFINITY)) == h + 1, "%04x", h);
            if ((double)(float)middle == middle)
                KN_CHECK(narrow32((float)middle) == even, "%04x", h);
            KN_CHECK(narrow32(nextafterf((float)lo, INFINITY)) == h || lo == 0, "%04x", h);
        }
        KN_CHECK(narrow(1e300) == infinity && narrow(-1e300) == (infinity | 0x8000));
        KN_CHECK(narrow(INFINITY) == infinity && narrow(1e-300) == 0);
        KN_CHECK(isnan(half_value(narrow(NAN), bits)) && isnan(half_value(narrow32(NAN), bits)));
        /* A NaN whose fraction lies in the low bits only must not become infinity. */
        KN_CHECK(isnan(half_value(narrow32(kn_f32_from_bits(0x7f800001)), bits)));
        KN_CHECK(isnan(half_value(narrow32(kn_f32_from_bits(0xffffffff)), bits)));
    }
    KN_CHECK(kn_f32_to_f16(65519.0f) == 0x7bff && kn_f32_to_f16(65520.0f) == 0x7c00);
}
