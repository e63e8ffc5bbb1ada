/* kernels/probes/asan_alignment.c: a program that meson.build runs, not a part of the library.
 *
 * gcc before 13 (bug 110027) lets AddressSanitizer place a function's arrays on its fake stack,
 * which finds uses after return, with 32 bytes of alignment, and takes them as aligned to 64 if the
 * function also has 64-byte vectors. The aligned store below then faults. */
#include <string.h>

typedef float vector __attribute__((vector_size(64)));

const char *__asan_default_options(void); /* called by AddressSanitizer */
const char *__asan_default_options(void)
{
    return "detect_stack_use_after_return=1";
}

__attribute__((noinline)) static void touch(void *p)
{
    __asm__ volatile("" : : "r"(p) : "memory");
}

__attribute__((noinline, target("avx512f"))) static float sum(const float *p, int n)
{
    vector v;
    float t[16], other[16] = { 0 };
    memcpy(&v, p, sizeof v);
    v += v;
    touch(other);
    memcpy(t, &v, sizeof v);
    for (int half = n / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            t[i] += t[i + half];
    return t[0];
}

/* 0: the compiler is right, or this CPU can't show the fault because it doesn't have such
 * vectors. */
int main(void)
{
    const float one[16] = { 1 };
    return __builtin_cpu_supports("avx512f") && sum(one, 16) != 2;
}
