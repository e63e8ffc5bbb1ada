/* models/programs/facts_memory.c: the peak of a rank's memory and who owned it. A give may name no
 * owner: then the bytes are those of the last take of their size and category. */
#include "kernels/memory.h"
#include "models/programs/facts.h"
#include "models/programs/sums.h"

#include <string.h>

typedef struct peak {
    double bytes;
    int64_t event; /* -1: nothing was recorded */
    int32_t during;
} peak;

static bool counts(const recording *r, int32_t category)
{
    const char *name = name_of(r, category);
    return strcmp(name, "host") != 0 && strcmp(name, "offloaded") != 0 &&
           strcmp(name, "pinned") != 0;
}

/* The path of the call that took them stands for a tensor without a name. */
static int32_t owner_of(const event *e)
{
    return e->w ? e->w : e->m;
}

static void find_peaks(const recording *r, peak *of)
{
    for (int k = 0; k < r->ranks; k++)
        of[k] = (peak){ 0, -1, 0 };
    for (int64_t i = 0; i < r->events; i++) {
        const event *e = &r->event[i];
        if (e->l > of[e->r].bytes && counts(r, e->c))
            of[e->r] = (peak){ e->l, i, owner_of(e) };
    }
}

/* The last take of the list that these bytes may come from: of their size and category, and of
 * their owner where the event names one. -1: they were live before the recording. */
static int64_t taken_by(const recording *r, const int64_t *take, int64_t takes, const event *give)
{
    int64_t i = takes - 1;
    for (; i >= 0; i--) {
        const event *e = &r->event[take[i]];
        if (e->c == give->c && e->b == give->b && (!give->w || e->w == give->w))
            break;
    }
    return i;
}

static void add_bytes(sums *s, int32_t category, int32_t owner, double bytes)
{
    sum *of = sums_at(s, category, owner);
    if (of)
        of->bytes += bytes;
}

/* What lives on a rank after that event, by category and owner. */
static bool live_at(recording *r, int32_t rank, int64_t last, sums *live)
{
    const json_t *start = json_array_get(json_object_get(r->head, "live"), (size_t)rank);
    const int32_t before = names_add(&r->names, "from before the recording");
    const char *category;
    json_t *bytes;
    json_object_foreach((json_t *)start, category, bytes)
    {
        const int32_t name = names_add(&r->names, category);
        if (name >= 0 && counts(r, name))
            add_bytes(live, name, before, json_number_value(bytes));
    }
    int64_t *take = kn_host_alloc((size_t)(last + 1) * sizeof *take), takes = 0;
    for (int64_t i = 0; take && i <= last && kn_ok(); i++) {
        const event *e = &r->event[i];
        if (e->r != rank || !counts(r, e->c))
            continue;
        if (e->k == TAKE) {
            take[takes++] = i;
            add_bytes(live, e->c, owner_of(e), e->b);
        } else if (e->k == GIVE) {
            const int64_t at = taken_by(r, take, takes, e);
            add_bytes(live, e->c, at < 0 ? before : owner_of(&r->event[take[at]]), -e->b);
            if (at >= 0)
                memmove(take + at, take + at + 1, (size_t)(--takes - at) * sizeof *take);
        }
    }
    kn_host_free(take);
    return kn_ok();
}

static const char *owner_name(const recording *r, int32_t owner)
{
    return owner ? name_of(r, owner) : "outside of modules";
}

static bool write_peaks(sheet *s, const recording *r, const peak *of, double most)
{
    sheet_table(s, "Peaks", COLUMNS("rank", "#peak, bytes", "#at, us", "as bytes were taken for"));
    for (int k = 0; k < r->ranks; k++) {
        if (of[k].event < 0)
            continue;
        sheet_cell(s, "%d", k);
        sheet_cell(s, "%.0f", of[k].bytes);
        sheet_cell(s, "%.1f", r->event[of[k].event].t);
        sheet_cell(s, "%s", owner_name(r, of[k].during));
        sheet_row(s, share(of[k].bytes, most));
    }
    return sheet_table_end(s, "peaks");
}

static bool write_owners(sheet *s, recording *r, int32_t rank, const peak *p)
{
    sums live = { 0 }, category = { 0 };
    double total = 0;
    char above[64];
    bool ok = live_at(r, rank, p->event, &live);
    int64_t count = ok ? sums_sort_by_bytes(&live) : 0;
    for (int64_t i = 0; ok && i < count; i++) {
        sum *of = sums_at(&category, live.sum[i].a, 0);
        if ((ok = of != NULL))
            of->bytes += live.sum[i].bytes;
        total += live.sum[i].bytes;
    }
    snprintf(above, sizeof above, "The peak of rank %d by category", rank);
    sheet_table(s, above, COLUMNS("category", "#bytes", "#%"));
    const int64_t categories = sums_sort_by_bytes(&category);
    for (int64_t i = 0; ok && i < categories; i++) {
        if (category.sum[i].bytes == 0)
            continue;
        sheet_cell(s, "%s", name_of(r, category.sum[i].a));
        sheet_cell(s, "%.0f", category.sum[i].bytes);
        sheet_cell(s, "%.1f", 100 * share(category.sum[i].bytes, total));
        sheet_row(s, share(category.sum[i].bytes, total));
    }
    ok = sheet_table_end(s, "categories") && ok;
    if (ok && total != p->bytes)
        sheet_sentence(s,
                       "They sum up to %.0f bytes, not to the peak of %.0f: the recording lacks "
                       "some of the bytes that were live as it began.",
                       total, p->bytes);
    snprintf(above, sizeof above, "Its largest owners");
    sheet_table(s, above, COLUMNS("owner", "category", "#bytes", "#%"));
    for (int64_t i = 0; ok && i < count && i < MOST_ROWS && live.sum[i].bytes > 0; i++) {
        sheet_cell(s, "%s", owner_name(r, live.sum[i].b));
        sheet_cell(s, "%s", name_of(r, live.sum[i].a));
        sheet_cell(s, "%.0f", live.sum[i].bytes);
        sheet_cell(s, "%.1f", 100 * share(live.sum[i].bytes, total));
        sheet_row(s, share(live.sum[i].bytes, total));
    }
    sums_free(&live);
    sums_free(&category);
    return sheet_table_end(s, "owners") && ok;
}

bool facts_of_memory(sheet *s, recording *r)
{
    int32_t largest = 0;
    peak *of = kn_host_calloc((size_t)r->ranks, sizeof *of);
    if (!of)
        return false;
    find_peaks(r, of);
    for (int32_t k = 0; k < r->ranks; k++)
        largest = of[k].bytes > of[largest].bytes ? k : largest;
    if (of[largest].event < 0)
        sheet_sentence(s, "No bytes were taken while it was recorded.");
    else if (write_peaks(s, r, of, of[largest].bytes))
        write_owners(s, r, largest, &of[largest]);
    kn_host_free(of);
    return kn_ok();
}
