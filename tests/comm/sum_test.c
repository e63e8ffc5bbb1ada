/* tests/comm/sum_test.c: sums over more ranks than one kernel call adds, against the same additions
 * one by one. */
#include "comm/comm_internal.h"
#include "kernels/convert.h"
#include "tests/kn_test.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 1100, COUNT = 2500 }; /* of ranks; of elements: more than one block */

static uint16_t narrow(kn_dtype t, float x)
{
    return t == KN_BF16 ? kn_f32_to_bf16(x) : kn_f32_to_f16(x);
}

static float widened(kn_dtype t, uint16_t x)
{
    return t == KN_BF16 ? kn_bf16_to_f32(x) : kn_f16_to_f32(x);
}

static float term(int rank, int64_t i)
{
    return (float)((rank * 37 + i * 11) % 101 - 50) / 64;
}

static void put(void *p, kn_dtype t, int64_t i, float x)
{
    if (t == KN_F32)
        ((float *)p)[i] = x;
    else
        ((uint16_t *)p)[i] = narrow(t, x);
}

static float get(const void *p, kn_dtype t, int64_t i)
{
    return t == KN_F32 ? ((const float *)p)[i] : widened(t, ((const uint16_t *)p)[i]);
}

/* In rank order in f32, rounded once. */
static bool adds_up(int ranks, kn_dtype to, kn_dtype from, bool onto, int64_t count)
{
    static float dst[COUNT], acc[COUNT], *src[MOST];
    kn_stream *s = kn_compute_stream(KN_CPU);
    bool same = true;
    for (int j = 0; j < ranks; j++) {
        src[j] = malloc(COUNT * sizeof *src[j]);
        for (int64_t i = 0; src[j] && i < count; i++)
            put(src[j], from, i, term(j, i));
    }
    for (int64_t i = 0; i < count; i++)
        put(acc, to, i, term(MOST, i));
    memset(dst, 0x5a, sizeof dst);
    KN_CHECK(
        kn_comm_sum(s, dst, onto ? acc : NULL, (const void *const *)src, ranks, count, to, from),
        "%d ranks", ranks);
    for (int64_t i = 0; i < count && same; i++) {
        float sum = onto ? get(acc, to, i) : get(src[0], from, i);
        for (int j = onto ? 0 : 1; j < ranks; j++)
            sum += get(src[j], from, i);
        float rounded;
        put(&rounded, to, 0, sum);
        same = get(dst, to, i) == get(&rounded, to, 0);
    }
    for (int j = 0; j < ranks; j++)
        free(src[j]);
    return same;
}

KN_TEST(sum, any_number_of_ranks)
{
    static const int ranks[] = { 1, 2, 63, 64, 65, 128, 255, 256, 257, 300, 1000, MOST };
    static const kn_dtype pairs[][2] = {
        { KN_F32, KN_F32 }, { KN_F32, KN_BF16 }, { KN_BF16, KN_BF16 }, { KN_F16, KN_F16 }
    };
    for (size_t n = 0; n < sizeof ranks / sizeof *ranks; n++)
        for (int p = 0; p < 4; p++)
            for (int onto = 0; onto < 2; onto++)
                for (int k = 0; k < 2; k++)
                    KN_CHECK(adds_up(ranks[n], pairs[p][0], pairs[p][1], onto, k ? COUNT : 3),
                             "%d ranks, %s of %s%s", ranks[n], kn_dtype_name(pairs[p][0]),
                             kn_dtype_name(pairs[p][1]), onto ? ", onto a sum" : "");
}
