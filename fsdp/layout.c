/* fsdp/layout.c: the three layouts as maps of intervals.
 *
 *   flat           | p0 ....... | p1 .. | p2 .......... | pad |     cut anywhere
 *                  |<-- rank 0 -->|<-- rank 1 -->|<-- rank 2 -->|
 *   ragged         the same, but parameters move a little so that every cut falls between two rows
 *   per parameter  each parameter is cut on its own, into ceil(rows / shards) rows a rank; a rank's
 *                  shard is its part of p0, then its part of p1, ... */
#include "fsdp/kinds.h"
#include "fsdp/layout.h"
#include <string.h>

const char *kn_layout_name(kn_layout_kind kind)
{
    static const char *const name[KN_LAYOUT_COUNT] = {
#define ROW(id, name, shown, make) [KN_LAYOUT_##id] = shown,
        KN_LAYOUTS(ROW)
#undef ROW
    };
    return name[kind];
}

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static int64_t align_up(int64_t n)
{
    return round_up(n, KN_LAYOUT_ALIGN);
}

static int64_t divide_up(int64_t n, int64_t by)
{
    return (n + by - 1) / by;
}

int64_t kn_shape_numel(int ndim, const int64_t *shape)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= shape[d];
    return n;
}

/* Elements of one row: of what may not be split. */
static int64_t row_of(const kn_layout_param *p)
{
    int64_t n = 1;
    for (int d = 1; d < p->ndim; d++)
        n *= p->shape[d];
    return n > 0 ? n : 1;
}

/* ---- flat and ragged: equal chunks of the full buffer ---------------------------------------- */

/* The contents of each chunk. */
static void cut_chunks(kn_layout *l)
{
    for (int r = 0; r < l->shards; r++)
        for (int i = 0; i < l->params; i++) {
            int64_t begin = l->offset[i], end = begin + l->numel[i];
            int64_t lo = r * l->shard, hi = lo + l->shard;
            int64_t from = begin > lo ? begin : lo, to = end < hi ? end : hi;
            kn_interval *part = &l->part[(int64_t)r * l->params + i];
            if (from < to)
                *part = (kn_interval){ from - begin, to - from, 1, to - from, from - lo };
            else /* an empty part still has a valid place */
                *part = (kn_interval){ .start = from >= end ? l->numel[i] : 0 };
        }
}

static bool make_flat(kn_layout *l, const kn_layout_param *param)
{
    int64_t at = 0;
    (void)param;
    for (int i = 0; i < l->params; i++) {
        l->offset[i] = at;
        at += align_up(l->numel[i]);
    }
    l->shard = align_up(divide_up(at, l->shards));
    l->full_numel = l->shard * l->shards;
    l->zero_copy = true;
    cut_chunks(l);
    return true;
}

/* ---- ragged: choosing the chunk -------------------------------------------------------------- */

typedef struct ragged {
    kn_layout *l;
    const int64_t *row; /* [params] elements of a row */
    int64_t total;      /* aligned elements of all parameters */
    int64_t budget;     /* placements the search may still try */
} ragged;

/* The first place from `at` on where n elements in rows of `row` can lie so that no multiple of
 * chunk falls inside a row; -1 if there is none. A parameter crosses one cut freely, by starting a
 * multiple of a row before it; it crosses several only if chunks are whole numbers of its rows. */
static int64_t place(int64_t at, int64_t n, int64_t row, int64_t chunk)
{
    for (int tries = 0; tries < 2 && n > 0; tries++) {
        int64_t cut = (at / chunk + 1) * chunk;
        if (at + n <= cut)
            return at;
        int64_t begin = cut - (cut - at) / row * row;
        if (begin + n <= cut + chunk || chunk % row == 0)
            return begin;
        at = cut + 1; /* inside the next chunk, where the parameter may cross that chunk's end */
    }
    return n > 0 ? -1 : at;
}

/* Places all parameters in order, each as early as it can be: no other order of starts ends
 * earlier. Whether they fit. */
static bool fits(ragged *g, int64_t chunk)
{
    kn_layout *l = g->l;
    int64_t at = 0, left = g->total;
    for (int i = 0; i < l->params; i++) {
        g->budget--;
        int64_t begin = chunk ? place(at, l->numel[i], g->row[i], chunk) : 0;
        if (begin < 0 || begin + left > l->shards * chunk + KN_LAYOUT_ALIGN)
            return false;
        l->offset[i] = begin;
        at = align_up(begin + l->numel[i]);
        left -= align_up(l->numel[i]);
        if (begin + l->numel[i] > l->shards * chunk)
            return false;
    }
    return true;
}

static int64_t lcm(int64_t a, int64_t b, int64_t max)
{
    int64_t x = a, y = b;
    while (y) {
        int64_t t = x % y;
        x = y;
        y = t;
    }
    return a / x > max / b ? max : a / x * b;
}

/* The least common multiple of the rows of parameters longer than `longer`, at most max. */
static int64_t common_row(const ragged *g, int64_t longer, int64_t max)
{
    int64_t step = KN_LAYOUT_ALIGN;
    for (int i = 0; i < g->l->params; i++)
        if (g->l->numel[i] > longer)
            step = lcm(step, g->row[i], max);
    return step;
}

/* A chunk that is certain to do, the smaller of two:
 * - a multiple of the rows of all parameters that don't fit into one chunk, with room for moving
 *   one parameter by less than a row at each cut;
 * - one into which the longest parameter fits: no parameter is cut; two chunks that follow each
 *   other are together more than full, so (shards + 1) / 2 chunks' worth of elements fit. */
static int64_t certain_chunk(const ragged *g)
{
    int64_t shards = g->l->shards, widest = 1, longest = 0;
    for (int i = 0; i < g->l->params; i++) {
        widest = g->row[i] > widest ? g->row[i] : widest;
        longest = g->l->numel[i] > longest ? g->l->numel[i] : longest;
    }
    int64_t half = divide_up(g->total, (shards + 1) / 2);
    int64_t whole = align_up(longest > half ? longest : half);
    int64_t moved = g->total + (shards - 1) * (widest + KN_LAYOUT_ALIGN);
    int64_t step = common_row(g, g->total / shards, whole);
    int64_t rows = round_up(divide_up(moved, shards), step);
    return step < whole && rows < whole ? rows : whole;
}

/* The next size from c on that can do: a parameter longer than two chunks crosses two cuts and so
 * only allows multiples of its row, until chunks are long enough to cut it once. */
static int64_t next_chunk(const ragged *g, int64_t c, int64_t max)
{
    int64_t next = round_up(c, common_row(g, 2 * c, max));
    for (int i = 0; i < g->l->params; i++) {
        int64_t half = align_up(divide_up(g->l->numel[i], 2));
        if (half > c && half < next)
            next = half;
    }
    return next;
}

/* The smallest chunk (a multiple of the alignment) that does: sizes are tried upwards from no
 * padding. Where there are too many to try, some are skipped. */
static void search_chunk(ragged *g)
{
    kn_layout *l = g->l;
    int64_t low = align_up(divide_up(g->total, l->shards)), high = certain_chunk(g);
    int64_t stride = (high - low) / (g->budget / (2 * l->params + 1) + 1);
    stride = align_up(stride > 1 ? stride : 1);
    for (int64_t c = low; c < high && g->budget > 0; c += stride) {
        c = next_chunk(g, c, high);
        g->budget -= l->params;
        if (c < high && fits(g, c)) {
            l->shard = c;
            return;
        }
    }
    l->shard = high;
    fits(g, high);
}

static bool make_ragged(kn_layout *l, const kn_layout_param *param)
{
    int64_t *row = kn_host_calloc((size_t)l->params + 1, sizeof *row);
    if (!row)
        return false;
    ragged g = { .l = l, .row = row, .budget = 200000 };
    for (int i = 0; i < l->params; i++) {
        row[i] = row_of(&param[i]);
        g.total += align_up(l->numel[i]);
    }
    search_chunk(&g);
    kn_host_free(row);
    l->full_numel = l->shard * l->shards;
    l->zero_copy = true;
    cut_chunks(l);
    return true;
}

/* ---- per parameter --------------------------------------------------------------------------- */

/* Rank r's part, without its place. */
static kn_interval cut_param(const kn_layout_param *p, int64_t numel, int shards, int r)
{
    int64_t rows = p->ndim ? p->shape[p->dim] : 1;
    int64_t inner = 1, outer = 1;
    for (int d = 0; d < p->dim; d++)
        outer *= p->shape[d];
    for (int d = p->dim + 1; d < p->ndim; d++)
        inner *= p->shape[d];
    int64_t some = divide_up(rows, shards);
    int64_t from = some * r < rows ? some * r : rows;
    int64_t to = from + some < rows ? from + some : rows;
    if (from == to || numel == 0)
        return (kn_interval){ .start = p->dim == 0 ? from * inner : 0 };
    if (to - from == rows) /* all of it: one run */
        return (kn_interval){ 0, numel, 1, numel, 0 };
    int64_t count = (to - from) * inner;
    return (kn_interval){ from * inner, count, outer, outer > 1 ? rows * inner : count, 0 };
}

static bool make_per_param(kn_layout *l, const kn_layout_param *param)
{
    int64_t full = 0;
    for (int i = 0; i < l->params; i++) {
        int64_t room = 0; /* the first rank's part is the largest */
        for (int r = 0; r < l->shards; r++) {
            kn_interval part = cut_param(&param[i], l->numel[i], l->shards, r);
            if (r == 0)
                room = kn_interval_numel(part);
            part.at = part.blocks ? l->shard : 0;
            l->part[(int64_t)r * l->params + i] = part;
        }
        l->shard += align_up(room);
        l->offset[i] = full;
        full += align_up(l->numel[i]);
    }
    l->full_numel = round_up(full, l->shards);
    l->zero_copy = l->shards == 1;
    return true;
}

/* ---- the interface --------------------------------------------------------------------------- */

static bool (*const make[KN_LAYOUT_COUNT])(kn_layout *l, const kn_layout_param *param) = {
#define ROW(id, name, shown, make) [KN_LAYOUT_##id] = make,
    KN_LAYOUTS(ROW)
#undef ROW
};

bool kn_layout_make(kn_layout *l, kn_layout_kind kind, const kn_layout_param *param, int params,
                    int shards)
{
    *l = (kn_layout){ .kind = kind == KN_LAYOUT_DEFAULT ? KN_LAYOUT_FLAT : kind,
                      .params = params,
                      .shards = shards };
    l->numel = kn_host_calloc((size_t)params + 1, sizeof *l->numel);
    l->offset = kn_host_calloc((size_t)params + 1, sizeof *l->offset);
    l->part = kn_host_calloc((size_t)params * (size_t)shards + 1, sizeof *l->part);
    if (!l->numel || !l->offset || !l->part)
        goto fail;
    for (int i = 0; i < params; i++)
        l->numel[i] = kn_shape_numel(param[i].ndim, param[i].shape);
    if (make[l->kind](l, param))
        return true;

fail:
    kn_layout_free(l);
    return false;
}

void kn_layout_free(kn_layout *l)
{
    kn_host_free(l->numel);
    kn_host_free(l->offset);
    kn_host_free(l->part);
    *l = (kn_layout){ 0 };
}

kn_interval kn_layout_part(const kn_layout *l, int param, int shard)
{
    return l->part[(int64_t)shard * l->params + param];
}

kn_interval kn_interval_whole(int64_t numel)
{
    return (kn_interval){ .count = numel, .blocks = numel > 0, .stride = numel };
}

int64_t kn_interval_numel(kn_interval i)
{
    return i.blocks * i.count;
}

kn_interval kn_interval_of_rows(kn_interval i, int64_t row)
{
    return (kn_interval){ i.start / row, i.count / row, i.blocks, i.stride / row, i.at / row };
}

void kn_interval_cut(kn_interval i, void *part, const void *whole, size_t bytes)
{
    size_t run = (size_t)i.count * bytes;
    for (int64_t b = 0; b < i.blocks && run; b++)
        memcpy((char *)part + (size_t)b * run,
               (const char *)whole + (size_t)(i.start + b * i.stride) * bytes, run);
}

void kn_interval_paste(kn_interval i, void *whole, const void *part, size_t bytes)
{
    size_t run = (size_t)i.count * bytes;
    for (int64_t b = 0; b < i.blocks && run; b++)
        memcpy((char *)whole + (size_t)(i.start + b * i.stride) * bytes,
               (const char *)part + (size_t)b * run, run);
}
