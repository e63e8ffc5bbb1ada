/* models/loader.c: the base of all loaders: counts rounds, computes the micro-batch of a rank, and
 * makes random choices. */
#include "models/loader_internal.h"
#include "kernels/error_internal.h"

#include "kernels/philox.h"

bool kn_loader_init(kn_loader *l, const char *caller, const kn_comm *world, int64_t batch,
                    int64_t samples, kn_batch (*fill)(kn_loader *, int64_t),
                    void (*release)(kn_loader *))
{
    if (batch < 1 || batch > samples)
        return kn_fail("%s: .batch must lie between 1 and the %lld samples there are, not %lld",
                       caller, (long long)samples, (long long)batch);
    l->fill = fill;
    l->release = release;
    l->round = 0;
    l->rank = kn_rank(world);
    l->ranks = kn_comm_size(world);
    l->rounds = samples / (batch * l->ranks);
    l->rounds = l->rounds > 0 ? l->rounds : 1;
    return true;
}

kn_batch kn_next(kn_loader *l)
{
    if (!l || !kn_ok()) {
        if (!l)
            kn_fail("kn_next: the loader is NULL");
        return (kn_batch){ 0 };
    }
    kn_batch b = l->fill(l, l->round * l->ranks + l->rank);
    if (!b.x || !b.y)
        return (kn_batch){ 0 };
    l->round++;
    return b;
}

int64_t kn_loader_round(const kn_loader *l)
{
    if (!kn_given(l, "kn_loader_round", "the loader"))
        return 0;
    return l->round;
}

void kn_loader_seek(kn_loader *l, int64_t round)
{
    if (!kn_given(l, "kn_loader_seek", "the loader"))
        return;
    l->round = round > 0 ? round : 0;
}

int64_t kn_loader_rounds(const kn_loader *l)
{
    if (!kn_given(l, "kn_loader_rounds", "the loader"))
        return 0;
    return l->rounds;
}

void kn_loader_free(kn_loader *l)
{
    if (l)
        l->release(l);
    kn_host_free(l);
}

/* ---- random choices ------------------------------------------------------------------------ */

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

int64_t kn_random_below(uint64_t seed, uint64_t stream, uint64_t i, int64_t n)
{
    if (n < 1) {
        kn_fail("kn_random_below: n is %lld, should be at least 1", (long long)n);
        return 0;
    }
    kn_philox4 r = kn_philox(seed, stream, i);
    uint64_t u = (uint64_t)r.word[0] << 32 | r.word[1];
    return (int64_t)((unsigned __int128)u * (uint64_t)n >> 64); /* floor(u / 2^64 * n) */
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
