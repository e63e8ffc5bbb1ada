/* data/random.c: random choices as functions of their purpose (docs/architecture.md, idea 7). */
#include "data/data.h"
#include "data/loader_internal.h"
#include "kernels/error_internal.h"
#include "kernels/philox.h"

uint64_t kn_random_stream(const char *purpose, int64_t a, int64_t b)
{
    if (!kn_given(purpose, "kn_random_stream", "the purpose"))
        return 0;
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (const char *p = purpose; *p; p++)
        hash = (hash ^ (unsigned char)*p) * 0x100000001b3u;
    kn_philox4 r = kn_philox(hash, (uint64_t)a, (uint64_t)b);
    return (uint64_t)r.word[0] << 32 | r.word[1];
}

static int64_t below(const char *what, uint64_t seed, uint64_t stream, uint64_t i, int64_t n)
{
    if (n < 1) {
        kn_fail("%s: n is %lld; it must be at least 1", what, (long long)n);
        return 0;
    }
    kn_philox4 r = kn_philox(seed, stream, i);
    uint64_t u = (uint64_t)r.word[0] << 32 | r.word[1];
    return (int64_t)((unsigned __int128)u * (uint64_t)n >> 64); /* floor(u / 2^64 * n) */
}

int64_t kn_random_below(uint64_t seed, uint64_t stream, uint64_t i, int64_t n)
{
    return below("kn_random_below", seed, stream, i, n);
}

#define FEISTEL_ROUNDS 8

int64_t kn_shuffle(uint64_t seed, int64_t epoch, int64_t n, int64_t i)
{
    if (n < 1 || i < 0 || i >= n) {
        kn_fail("kn_shuffle: index %lld is outside [0, %lld)", (long long)i, (long long)n);
        return 0;
    }
    int half = 1; /* bits in each half of a number below 4^half >= n */
    while (half < 32 && (uint64_t)1 << 2 * half < (uint64_t)n)
        half++;
    uint64_t mask = ((uint64_t)1 << half) - 1, stream = kn_random_stream("data.shuffle", epoch, n);
    uint64_t x = (uint64_t)i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < FEISTEL_ROUNDS; round++) {
            uint64_t f = kn_philox(seed, stream, round << 32 | right).word[0] & mask;
            uint64_t mixed = left ^ f;
            left = right;
            right = mixed;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

/* ---- of a sample --------------------------------------------------------------------------- */

uint64_t kn_sample_stream(int64_t epoch, int64_t index)
{
    return kn_random_stream("data.sample", epoch, index);
}

double kn_draw_uniform(kn_data_sample *s)
{
    if (!kn_given(s, "kn_draw_uniform", "the sample"))
        return 0;
    return (double)kn_uniform01(kn_philox_at(s->seed, s->stream, s->draws++));
}

double kn_draw_normal(kn_data_sample *s)
{
    if (!kn_given(s, "kn_draw_normal", "the sample"))
        return 0;
    return (double)kn_normal(kn_philox_at(s->seed, s->stream, s->draws++));
}

int64_t kn_draw_below(kn_data_sample *s, int64_t n)
{
    return kn_given(s, "kn_draw_below", "the sample")
               ? below("kn_draw_below", s->seed, ~s->stream, s->draws++, n)
               : 0;
}
