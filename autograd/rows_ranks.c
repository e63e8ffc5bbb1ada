/* autograd/rows_ranks.c: a table that ranks share by rows: numbers go to the owners of their rows,
 * rows come back, and gradients go the way of the numbers. Rising numbers are those of rank 0, then
 * those of rank 1, and so on, so a list is cut at ranks - 1 places. */
#include "autograd/engine.h"
#include "autograd/ops.h"
#include "autograd/rows.h"
#include <stdio.h>
#include <string.h>

static const char label[] = "rows of a table";

/* bound[r]: the first of ids[count], which rise, that rank r owns. */
static bool cut(kn_routes *x, kn_tensor *ids, int64_t count)
{
    const kn_rows *r = x->rows;
    if (kn_device_of(ids) == KN_META) { /* as if all had as many */
        for (int s = 0; s <= r->ranks; s++)
            x->bound[s] = count * s / r->ranks;
        return true;
    }
    int64_t *id = kn_host_alloc((size_t)(count + 1) * sizeof *id);
    bool ok = id && (count == 0 || kn_to_host(ids, id, (size_t)count * sizeof *id));
    if (ok && count > 0 && (id[0] < 0 || id[count - 1] >= r->all))
        ok = kn_fail("embedding: index %lld is out of range: the table has %lld rows",
                     (long long)(id[0] < 0 ? id[0] : id[count - 1]), (long long)r->all);
    for (int64_t s = 0, i = 0; ok && s <= r->ranks; s++) {
        while (i < count && id[i] < s * r->each)
            i++;
        x->bound[s] = s == r->ranks ? count : i;
    }
    kn_host_free(id);
    return ok;
}

bool kn_routes_find(kn_routes *x, const kn_tensor *w, const char *what, kn_tensor *ids,
                    int64_t count)
{
    const kn_rows *rows = kn_table_of(w);
    const int n = rows->ranks, me = kn_rank(rows->comm);
    char text[192];
    const bool meta = kn_device_of(ids) == KN_META;
    *x = (kn_routes){ .rows = rows,
                      .bound = kn_host_calloc((size_t)n + 1, sizeof(int64_t)),
                      .asked = kn_host_calloc((size_t)n, sizeof(int64_t)) };
    snprintf(text, sizeof text, "%s of '%s'", what, kn_name(w));
    int64_t *sent = kn_host_calloc((size_t)n, sizeof *sent);
    int64_t *all = kn_host_calloc((size_t)n * (size_t)n, sizeof *all);
    bool ok = x->bound && x->asked && sent && all && cut(x, ids, count);
    for (int r = 0; ok && r < n; r++)
        sent[r] = x->bound[r + 1] - x->bound[r];
    for (int r = 0; ok && meta && r < n; r++)
        memcpy(&all[r * n], sent, (size_t)n * sizeof *sent);
    ok = ok && kn_collective_begins() &&
         (meta || kn_all_gather(rows->comm, all, sent, n, KN_I64, kn_compute_stream(KN_CPU), text));
    for (int s = 0; ok && s < n; s++) {
        x->asked[s] = all[s * n + me];
        x->come += x->asked[s];
        for (int r = 0; r < n; r++)
            x->most = all[s * n + r] > x->most ? all[s * n + r] : x->most;
    }
    kn_host_free(sent);
    kn_host_free(all);
    return ok;
}

void kn_routes_free(kn_routes *x)
{
    kn_host_free(x->bound);
    kn_host_free(x->asked);
    x->bound = x->asked = NULL;
}

/* Rows [from, from + n) of t[rows, width] as a view. */
static kn_tensor *run(kn_tensor *t, int64_t from, int64_t n, int64_t width)
{
    return kn_tensor_alias(t, from * width, KN_SHAPE(n, width), (int64_t[]){ width, 1 });
}

/* Runs of list, counts[r] rows for rank r one after another, change places with those of others:
 * come[s] rows from rank s. Each is filled up to x->most. */
static kn_tensor *exchange(const kn_routes *x, kn_tensor *list, const int64_t *counts,
                           const int64_t *come)
{
    const int n = x->rows->ranks;
    const int64_t width = list->ndim > 1 ? list->shape[1] : 1, block = x->most * width;
    const kn_device d = kn_device_of(list);
    int64_t total = 0, shape[2] = { 0, width };
    for (int s = 0; s < n; s++)
        total += come[s];
    shape[0] = total;
    kn_tensor *out = kn_empty(list->dtype, d, KN_SHAPE(n * x->most, width));
    kn_tensor *in = kn_empty(list->dtype, d, KN_SHAPE(n * x->most, width));
    kn_tensor *result = kn_empty(list->dtype, d, list->ndim, shape);
    bool ok = out && in && result && kn_fill_(out, 0);
    for (int64_t r = 0, at = 0; ok && r < n; at += counts[r++])
        ok = counts[r] == 0 ||
             kn_copy_(run(out, r * x->most, counts[r], width), run(list, at, counts[r], width));
    ok = ok &&
         (block == 0 || kn_all_to_all(x->rows->comm, kn_array_of(in).data, kn_array_of(out).data,
                                      block, list->dtype, kn_compute_stream(d), label));
    for (int64_t s = 0, at = 0; ok && s < n; at += come[s++])
        ok = come[s] == 0 ||
             kn_copy_(run(result, at, come[s], width), run(in, s * x->most, come[s], width));
    return ok ? result : NULL;
}

static kn_tensor *move(const kn_routes *x, kn_tensor *list, bool send)
{
    int64_t *mine = kn_host_calloc((size_t)x->rows->ranks, sizeof *mine);
    if (!mine)
        return NULL;
    for (int r = 0; r < x->rows->ranks; r++)
        mine[r] = x->bound[r + 1] - x->bound[r];
    kn_tensor *came = send ? exchange(x, list, mine, x->asked) : exchange(x, list, x->asked, mine);
    kn_host_free(mine);
    return came;
}

kn_tensor *kn_routes_send(const kn_routes *x, kn_tensor *list)
{
    return move(x, list, true);
}

kn_tensor *kn_routes_answer(const kn_routes *x, kn_tensor *list)
{
    return move(x, list, false);
}
