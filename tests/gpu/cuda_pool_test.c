/* tests/gpu/cuda_pool_test.c: the caching allocator of the CUDA device over a fake source of memory
 * that only counts. */
#include "kernels/error.h"
#include "kernels/memory.h"
#include "kernels/cuda/runtime/pool.h"
#include "tests/kn_test.h"

/* Segments at made-up addresses that are never read, up to a limit. */
typedef struct source {
    size_t live, limit;
    uintptr_t next;
    int gets, puts;
} source;

static void *get(void *arg, size_t bytes)
{
    source *s = arg;
    if (s->live + bytes > s->limit)
        return NULL;
    s->live += bytes;
    s->gets++;
    s->next += bytes + ((uintptr_t)4 << 20);
    return (void *)(s->next - bytes);
}

static void put(void *arg, void *p, size_t bytes)
{
    source *s = arg;
    (void)p;
    s->live -= bytes;
    s->puts++;
}

static kn_gpu_pool *make(source *s, size_t limit)
{
    *s = (source){ .limit = limit, .next = (uintptr_t)1 << 40 };
    return kn_gpu_pool_create((kn_gpu_pool_source){ get, put, s });
}

typedef struct piece {
    char *at;
    size_t size;
} piece;

static uint64_t draw(uint64_t *seed)
{
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *seed >> 33;
}

/* Mostly small ones, some of many MiB, as a training step has. */
static size_t draw_size(uint64_t *seed)
{
    uint64_t kind = draw(seed) % 10;
    size_t most = kind < 6 ? 4096 : kind < 9 ? (size_t)3 << 20 : (size_t)40 << 20;
    return 1 + (size_t)draw(seed) * 64 % most;
}

static bool overlap(const piece *p, int n, piece q)
{
    for (int i = 0; i < n; i++)
        if (p[i].at && q.at < p[i].at + p[i].size && p[i].at < q.at + q.size)
            return true;
    return false;
}

enum { PIECES = 200, CALLS = 4000 };

/* Random allocations; returns the peak of the reserved bytes. */
static int64_t play(uint64_t seed, bool check)
{
    static piece p[PIECES];
    source s;
    kn_gpu_pool *pool = make(&s, (size_t)1 << 40);
    KN_CHECK(pool != NULL);
    memset(p, 0, sizeof p);
    for (int i = 0; i < CALLS; i++) {
        int at = (int)(draw(&seed) % PIECES);
        if (p[at].at) {
            kn_gpu_pool_give(pool, p[at].at);
            p[at].at = NULL;
        } else {
            piece q = { .size = draw_size(&seed) };
            q.at = kn_gpu_pool_take(pool, q.size);
            KN_CHECK(q.at && (uintptr_t)q.at % 512 == 0);
            KN_CHECK(!check || !overlap(p, PIECES, q), "a block of %zu bytes overlaps", q.size);
            p[at] = q;
        }
        if (check && i % 16 == 0)
            KN_CHECK(kn_gpu_pool_check(pool));
    }
    for (int i = 0; i < PIECES; i++)
        if (p[i].at)
            kn_gpu_pool_give(pool, p[i].at);
    KN_CHECK(kn_gpu_pool_check(pool));
    kn_gpu_pool_stats t = kn_gpu_pool_read(pool);
    KN_CHECK(t.live == 0 && t.blocks_out == 0 && t.blocks_free == t.segments,
             "all blocks merge back to whole segments");
    KN_CHECK(t.reserved == (int64_t)s.live);
    kn_gpu_pool_trim(pool);
    KN_CHECK(s.live == 0 && s.gets == s.puts && kn_gpu_pool_read(pool).reserved == 0);
    kn_gpu_pool_destroy(pool);
    KN_CHECK_OK();
    return t.peak_reserved;
}

KN_TEST(cuda_pool, random_takes_and_gives)
{
    for (uint64_t seed = 1; seed <= 5; seed++)
        play(seed, true);
}

KN_TEST(cuda_pool, same_calls_same_peak)
{
    int64_t first = play(7, false);
    KN_CHECK(first > 0 && play(7, false) == first && play(7, false) == first);
}

KN_TEST(cuda_pool, segments_by_size)
{
    source s;
    kn_gpu_pool *p = make(&s, (size_t)1 << 40);
    void *a = kn_gpu_pool_take(p, 1), *b = kn_gpu_pool_take(p, 1 << 20);
    KN_CHECK(a && b && s.live == (size_t)2 << 20, "small ones share 2 MiB");
    void *c = kn_gpu_pool_take(p, (1 << 20) + 1);
    KN_CHECK(c && s.live == (size_t)22 << 20, "larger ones are cut from 20 MiB");
    void *d = kn_gpu_pool_take(p, (size_t)25 << 20);
    KN_CHECK(d && s.live == (size_t)48 << 20, "25 MiB gets 26");
    void *e = kn_gpu_pool_take(p, (size_t)19 << 20);
    KN_CHECK(e && s.live == (size_t)68 << 20, "19 MiB doesn't fit what is left of the 20");
    kn_gpu_pool_give(p, c);
    KN_CHECK(kn_gpu_pool_take(p, (size_t)20 << 20) && s.live == (size_t)68 << 20, "it merged back");
    kn_gpu_pool_destroy(p);
    KN_CHECK(s.live == 0);
    KN_CHECK_OK();
}

KN_TEST(cuda_pool, best_fit_leaves_large_blocks_whole)
{
    source s;
    kn_gpu_pool *p = make(&s, (size_t)1 << 40);
    char *a = kn_gpu_pool_take(p, (size_t)64 << 20), *b = kn_gpu_pool_take(p, (size_t)32 << 20);
    kn_gpu_pool_give(p, a);
    kn_gpu_pool_give(p, b);
    KN_CHECK(kn_gpu_pool_take(p, (size_t)30 << 20) == b, "the smaller of the two that fit");
    KN_CHECK(kn_gpu_pool_take(p, (size_t)64 << 20) == a);
    KN_CHECK(s.live == (size_t)96 << 20);
    kn_gpu_pool_destroy(p);
}

KN_TEST(cuda_pool, no_bytes_left)
{
    source s;
    kn_gpu_pool *p = make(&s, (size_t)64 << 20);
    char *a = kn_gpu_pool_take(p, (size_t)40 << 20);
    KN_CHECK(a && !kn_gpu_pool_take(p, (size_t)40 << 20),
             "no error, NULL: kn_take has the sentence");
    KN_CHECK_OK();
    kn_gpu_pool_give(p, a);
    KN_CHECK(kn_gpu_pool_take(p, (size_t)60 << 20), "idle segments go back to make room");
    KN_CHECK(kn_gpu_pool_check(p));
    kn_gpu_pool_destroy(p);
}

KN_TEST(cuda_pool, given_twice)
{
    source s;
    kn_gpu_pool *p = make(&s, (size_t)64 << 20);
    char *a = kn_gpu_pool_take(p, 1000);
    kn_gpu_pool_give(p, a);
    kn_gpu_pool_give(p, a);
    KN_CHECK_ERROR("has not handed out");
    KN_CHECK(kn_gpu_pool_check(p));
    kn_gpu_pool_destroy(p);
}
