/* tests/fsdp/layout_test.c: the three layouts over generated shapes. In each layout the parts of
 * all ranks hold every element of every parameter exactly once; in zero-copy layouts every place of
 * the full buffer, too; ragged never splits a row; padding stays within the stated bounds. */
#include "tests/failing.h"
#include "tests/kn_test.h"
#include "fsdp/layout.h"

enum { MAX_PARAMS = 8, MAX_SHARDS = 9, MAX_NUMEL = 1 << 16 };

typedef struct shapes {
    int params;
    kn_layout_param param[MAX_PARAMS];
    int64_t shape[MAX_PARAMS][4];
} shapes;

static uint64_t state;
static int64_t below(int64_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((state >> 33) % (uint64_t)n);
}

static int64_t numel_of(const kn_layout_param *p)
{
    int64_t n = 1;
    for (int d = 0; d < p->ndim; d++)
        n *= p->shape[d];
    return n;
}

static int64_t row_of(const kn_layout_param *p)
{
    int64_t n = 1;
    for (int d = 1; d < p->ndim; d++)
        n *= p->shape[d];
    return n > 0 ? n : 1;
}

/* Scalars, empty and one-row parameters, odd primes, multiples of 16, a few long ones. */
static void generate(shapes *s, uint64_t seed)
{
    static const int64_t size[] = { 0, 1, 1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 31, 32, 37, 48, 61, 64 };
    state = seed * 2654435761u + 1;
    memset(s, 0, sizeof *s);
    s->params = (int)below(MAX_PARAMS + 1);
    for (int i = 0; i < s->params; i++) {
        int ndim = (int)below(4);
        for (int d = 0; d < ndim; d++)
            s->shape[i][d] = size[below(sizeof size / sizeof *size)];
        if (ndim == 3 && s->shape[i][2] > 9)
            s->shape[i][2] = 3;
        s->param[i] = (kn_layout_param){ .ndim = ndim, .shape = s->shape[i] };
    }
}

/* Now and then a dim other than the first, made to divide. */
static void place_dims(shapes *s, int shards)
{
    for (int i = 0; i < s->params; i++) {
        kn_layout_param *p = &s->param[i];
        p->dim = p->ndim > 1 && below(2) ? 1 + (int)below(p->ndim - 1) : 0;
        if (p->dim)
            s->shape[i][p->dim] = (1 + below(4)) * shards;
    }
}

static int64_t aligned(int64_t n)
{
    return (n + KN_LAYOUT_ALIGN - 1) / KN_LAYOUT_ALIGN * KN_LAYOUT_ALIGN;
}

/* Fills every parameter with element numbers, cuts it for every rank, pastes it together again. */
static void check_partition(const kn_layout *l, const shapes *s)
{
    static int32_t whole[MAX_NUMEL], back[MAX_NUMEL], part[MAX_NUMEL];
    static uint8_t seen[MAX_NUMEL], taken[MAX_SHARDS * MAX_NUMEL];
    KN_CHECK(l->shard * l->shards <= (int64_t)sizeof taken, "shard %lld", (long long)l->shard);
    memset(taken, 0, (size_t)(l->shard * l->shards));
    for (int i = 0; i < l->params; i++) {
        int64_t n = numel_of(&s->param[i]);
        KN_CHECK(l->numel[i] == n && n <= MAX_NUMEL, "numel %lld", (long long)n);
        for (int64_t e = 0; e < n; e++)
            whole[e] = (int32_t)e + 1;
        memset(seen, 0, sizeof seen);
        memset(back, 0, (size_t)n * 4);
        for (int64_t r = 0, end = 0; r < l->shards; r++) {
            kn_interval v = kn_layout_part(l, i, (int)r);
            int64_t count = kn_interval_numel(v);
            KN_CHECK(s->param[i].dim > 0 || v.start >= end || n == 0,
                     "an empty part lies among others");
            end = v.start + count;
            KN_CHECK((v.blocks > 0) == (count > 0) && v.start >= 0 && v.start <= n, "part %d", i);
            KN_CHECK(v.at >= 0 && v.at + count <= l->shard, "parameter %d leaves the shard", i);
            kn_interval_cut(v, part, whole, 4);
            for (int64_t e = 0; e < count; e++) {
                int64_t b = e / v.count, at = v.start + b * v.stride + e % v.count;
                KN_CHECK(at >= 0 && at < n && !seen[at], "parameter %d element %lld is twice", i,
                         (long long)at);
                KN_CHECK(part[e] == at + 1, "cut took the wrong element");
                KN_CHECK(!taken[r * l->shard + v.at + e]++, "two elements in one place");
                seen[at] = 1;
                if (l->zero_copy)
                    KN_CHECK(l->offset[i] + at == r * l->shard + v.at + e,
                             "not the same buffer: parameter %d element %lld", i, (long long)at);
            }
            kn_interval_paste(v, back, part, 4);
        }
        for (int64_t e = 0; e < n; e++)
            KN_CHECK(seen[e], "parameter %d element %lld is nowhere", i, (long long)e);
        KN_CHECK(memcmp(whole, back, (size_t)n * 4) == 0, "cut and paste changed parameter %d", i);
    }
}

/* Parameters don't overlap in the full buffer and follow each other. */
static void check_full(const kn_layout *l)
{
    int64_t end = 0;
    for (int i = 0; i < l->params; i++) {
        KN_CHECK(l->offset[i] >= end, "parameter %d overlaps the one before", i);
        end = l->offset[i] + l->numel[i];
    }
    KN_CHECK(end <= l->full_numel && l->full_numel % l->shards == 0, "full_numel");
    if (l->zero_copy)
        KN_CHECK(l->full_numel == l->shards * l->shard, "chunks don't make up the full buffer");
}

static int64_t sum_aligned(const shapes *s)
{
    int64_t total = 0;
    for (int i = 0; i < s->params; i++)
        total += aligned(numel_of(&s->param[i]));
    return total;
}

KN_TEST(layout, flat_partitions_with_little_padding)
{
    for (uint64_t seed = 0; seed < 120; seed++)
        for (int shards = 1; shards <= MAX_SHARDS; shards++) {
            shapes s;
            kn_layout l;
            generate(&s, seed);
            KN_CHECK(kn_layout_make(&l, KN_LAYOUT_FLAT, s.param, s.params, shards));
            check_partition(&l, &s);
            check_full(&l);
            KN_CHECK(l.zero_copy);
            int64_t exact = 0;
            for (int i = 0; i < s.params; i++) {
                exact += l.numel[i];
                KN_CHECK(l.offset[i] % KN_LAYOUT_ALIGN == 0);
            }
            KN_CHECK(l.full_numel - exact <= (s.params + shards) * KN_LAYOUT_ALIGN,
                     "%lld of padding", (long long)(l.full_numel - exact));
            kn_layout_free(&l);
        }
}

KN_TEST(layout, per_param_partitions_by_rows_and_dims)
{
    for (uint64_t seed = 0; seed < 120; seed++)
        for (int shards = 1; shards <= MAX_SHARDS; shards++) {
            shapes s;
            kn_layout l;
            generate(&s, seed + 1000);
            place_dims(&s, shards);
            KN_CHECK(kn_layout_make(&l, KN_LAYOUT_PER_PARAM, s.param, s.params, shards));
            check_partition(&l, &s);
            check_full(&l);
            KN_CHECK(l.zero_copy == (shards == 1));
            int64_t bound = 0; /* a shard is the first rank's parts, aligned */
            for (int i = 0; i < s.params; i++) {
                const kn_layout_param *p = &s.param[i];
                int64_t rows = p->ndim ? p->shape[p->dim] : 1;
                int64_t each = rows ? l.numel[i] / rows * ((rows + shards - 1) / shards) : 0;
                bound += aligned(each);
            }
            KN_CHECK(l.shard == bound, "shard %lld, %lld expected", (long long)l.shard,
                     (long long)bound);
            kn_layout_free(&l);
        }
}

KN_TEST(layout, per_param_gives_trailing_ranks_less)
{
    static const int64_t rows[8] = { 2, 2, 2, 2, 1, 0, 0, 0 };
    int64_t shape[2] = { 9, 5 }, other[3] = { 3, 16, 2 };
    kn_layout_param p[2] = { { 2, shape, 0 }, { 3, other, 1 } };
    kn_layout l;
    KN_CHECK(kn_layout_make(&l, KN_LAYOUT_PER_PARAM, p, 2, 8));
    for (int r = 0; r < 8; r++) {
        kn_interval a = kn_layout_part(&l, 0, r), b = kn_layout_part(&l, 1, r);
        KN_CHECK(kn_interval_numel(a) == rows[r] * 5, "rank %d has %lld elements", r,
                 (long long)kn_interval_numel(a));
        KN_CHECK(b.blocks == 3 && b.count == 4 && b.stride == 32 && b.start == r * 4,
                 "rank %d: %lld runs of %lld", r, (long long)b.blocks, (long long)b.count);
    }
    kn_layout_free(&l);
}

/* ---- ragged ---------------------------------------------------------------------------------- */

/* True if the parameters fit into chunks of this size, by trying every start. */
static bool fits_by_trial(const shapes *s, int64_t chunk, int shards)
{
    int64_t at = 0;
    for (int i = 0; i < s->params; i++) {
        int64_t n = numel_of(&s->param[i]), row = row_of(&s->param[i]), begin = aligned(at);
        for (;; begin++) {
            bool good = true;
            if (begin + n > shards * chunk)
                return false;
            for (int64_t cut = (begin / chunk + 1) * chunk; cut < begin + n && good; cut += chunk)
                good = (cut - begin) % row == 0;
            if (good)
                break;
        }
        at = begin + n;
    }
    return true;
}

static int64_t gcd(int64_t a, int64_t b)
{
    return b ? gcd(b, a % b) : a;
}

/* The bound on a shard of fsdp/layout.c: the better of two ways that always work. */
static int64_t ragged_bound(const shapes *s, int shards)
{
    int64_t total = sum_aligned(s), widest = 1, longest = 0, step = KN_LAYOUT_ALIGN;
    for (int i = 0; i < s->params; i++) {
        int64_t n = numel_of(&s->param[i]), row = row_of(&s->param[i]);
        widest = row > widest ? row : widest;
        longest = n > longest ? n : longest;
        if (n > total / shards)
            step = step / gcd(step, row) * row;
    }
    int64_t half = (total + (shards + 1) / 2 - 1) / ((shards + 1) / 2);
    int64_t uncut = aligned(longest > half ? longest : half);
    int64_t moved = (total + (shards - 1) * (widest + KN_LAYOUT_ALIGN)) / shards + step;
    return uncut < moved ? uncut : moved;
}

KN_TEST(layout, ragged_never_splits_a_row)
{
    int64_t padded = 0, useful = 0;
    for (uint64_t seed = 0; seed < 120; seed++)
        for (int shards = 1; shards <= MAX_SHARDS; shards++) {
            shapes s;
            kn_layout l;
            generate(&s, seed + 2000);
            KN_CHECK(kn_layout_make(&l, KN_LAYOUT_RAGGED, s.param, s.params, shards));
            check_partition(&l, &s);
            check_full(&l);
            KN_CHECK(l.zero_copy && l.shard % KN_LAYOUT_ALIGN == 0);
            for (int i = 0; i < s.params; i++)
                for (int r = 0; r < shards; r++) {
                    kn_interval v = kn_layout_part(&l, i, r);
                    int64_t row = row_of(&s.param[i]);
                    KN_CHECK(v.count % row == 0 && (!v.count || v.start % row == 0),
                             "seed %d: rank %d of %d has part of a row", (int)seed, r, shards);
                }
            KN_CHECK(l.shard <= ragged_bound(&s, shards), "seed %d, %d shards: %lld > %lld",
                     (int)seed, shards, (long long)l.shard, (long long)ragged_bound(&s, shards));
            padded += l.full_numel - sum_aligned(&s);
            useful += sum_aligned(&s);
            kn_layout_free(&l);
        }
    KN_CHECK(padded < useful, "%lld elements of padding for %lld", (long long)padded,
             (long long)useful);
}

KN_TEST(layout, ragged_finds_the_smallest_chunk)
{
    for (uint64_t seed = 0; seed < 60; seed++)
        for (int shards = 1; shards <= 5; shards++) {
            shapes s;
            kn_layout l;
            generate(&s, seed + 3000);
            s.params = s.params > 4 ? 4 : s.params;
            KN_CHECK(kn_layout_make(&l, KN_LAYOUT_RAGGED, s.param, s.params, shards));
            int64_t best = sum_aligned(&s) ? KN_LAYOUT_ALIGN : 0;
            while (best && !fits_by_trial(&s, best, shards))
                best += KN_LAYOUT_ALIGN;
            KN_CHECK(l.shard == best, "seed %d, %d shards: chunk %lld, %lld would do", (int)seed,
                     shards, (long long)l.shard, (long long)best);
            kn_layout_free(&l);
        }
}

/* GPT-2 XL: a block, and the root with its embeddings; also the whole model as one unit. */
KN_TEST(layout, ragged_of_gpt2_xl_is_quick_and_tight)
{
    enum { D = 1600, BLOCK = 12, ALL = 48 * BLOCK + 4 };
    static const int64_t block[BLOCK][2] = {
        { D, 0 }, { D, 0 }, { 3 * D, D }, { 3 * D, 0 }, { D, D },     { D, 0 },
        { D, 0 }, { D, 0 }, { 4 * D, D }, { 4 * D, 0 }, { D, 4 * D }, { D, 0 },
    };
    static const int64_t root[4][2] = { { 50257, D }, { 1024, D }, { D, 0 }, { D, 0 } };
    static kn_layout_param p[ALL];
    for (int i = 0; i < ALL; i++) {
        const int64_t *shape = i < 4 ? root[i] : block[(i - 4) % BLOCK];
        p[i] = (kn_layout_param){ .ndim = shape[1] ? 2 : 1, .shape = shape };
    }
    static const int from[3] = { 0, 4, 0 }, count[3] = { 4, BLOCK, ALL };
    for (int shards = 1; shards <= 1024; shards = shards < 9 ? shards + 1 : shards * 2)
        for (int u = 0; u < 3; u++) {
            kn_layout l;
            KN_CHECK(kn_layout_make(&l, KN_LAYOUT_RAGGED, p + from[u], count[u], shards));
            int64_t exact = 0;
            for (int i = 0; i < count[u]; i++)
                exact += l.numel[i];
            double padding = (double)(l.full_numel - exact) / (double)exact;
            if (getenv("KNAP_TEST_VERBOSE"))
                printf("unit %d, %4d shards: %.3f %% padding\n", u, shards, 100 * padding);
            KN_CHECK(padding < (shards <= 64 ? 0.03 : 0.5), "unit %d, %d shards: %g", u, shards,
                     padding);
            kn_layout_free(&l);
        }
}

KN_TEST(layout, every_allocation_failing_is_an_error)
{
    int64_t shape[2] = { 9, 5 };
    kn_layout_param p = { 2, shape, 0 };
    for (int kind = KN_LAYOUT_FLAT; kind < KN_LAYOUT_COUNT; kind++)
        for (int64_t n = 1;; n++) {
            kn_layout l;
            if (WITH_FAILING(n, kn_layout_make(&l, (kn_layout_kind)kind, &p, 1, 2))) {
                KN_CHECK(n > 3, "only %d allocations failed", (int)n - 1);
                kn_layout_free(&l);
                break;
            }
        }
}
