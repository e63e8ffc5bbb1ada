/* data/fill.c: fills rows of a batch by the user's function. */
#include "data/data.h"
#include "data/loader_internal.h"

#include <string.h>

#define MOST_SKIPPED 1000 /* in a row: beyond, the data or the function is at fault */

static kn_data_sample sample_of(const kn_loader *l, const kn_slot *slot, int64_t row, int worker)
{
    kn_data_sample s = { .worker = worker, .seed = l->seed };
    for (int f = 0; f < l->fields; f++)
        s.field[f] = slot->data[f] + (size_t)row * l->row_bytes[f];
    return s;
}

static int call(const kn_loader *l, kn_data_sample *s, int64_t epoch, int64_t index)
{
    kn_data_sample one = *s; /* the function may change its own */
    for (int f = 0; f < l->fields; f++)
        memset(one.field[f], 0, l->row_bytes[f]);
    one.epoch = epoch;
    one.index = index;
    one.stream = kn_sample_stream(epoch, index);
    kn_scope scope = kn_scope_begin();
    int answer = l->fill(&one, l->arg);
    kn_scope_end(scope);
    return kn_ok() ? answer : false;
}

/* A sample for the row; *skipped becomes true if its own was skipped. The answer is true, false or
 * KN_SAMPLE_END. */
static int fill_row(const kn_loader *l, kn_data_sample *s, kn_row row, bool *skipped)
{
    int64_t index = row.index;
    for (int64_t tries = 0; tries <= MOST_SKIPPED; tries++) {
        int answer = call(l, s, row.epoch, index);
        if (answer == true)
            return true;
        if (answer == KN_SAMPLE_END && l->samples == 0 && tries == 0)
            return KN_SAMPLE_END;
        if (answer == KN_SAMPLE_END && l->samples == 0 && index > 0) {
            index = 0; /* the first one follows the last */
            continue;
        }
        if (answer == KN_SAMPLE_END)
            return kn_fail(
                "%s: the function that fills samples returns KN_SAMPLE_END for sample %lld of "
                "%lld",
                l->caller, (long long)index, (long long)l->samples);
        if (answer != KN_SAMPLE_SKIP)
            return kn_fail("%s: the function that fills samples returns %d for sample %lld%s",
                           l->caller, answer, (long long)index,
                           answer ? "; true, false, KN_SAMPLE_SKIP and KN_SAMPLE_END are answers"
                                  : " without a kn_fail that says why");
        *skipped = true;
        index = l->samples && index + 1 == l->samples ? 0 : index + 1;
        if (l->samples && tries + 1 >= l->samples)
            break;
    }
    return kn_fail("%s: sample %lld and all that follow it are skipped", l->caller,
                   (long long)row.index);
}

/* Rows begin, which is even, to end in pairs. */
static void mix_rows(const kn_loader *l, const kn_slot *slot, int64_t begin, int64_t end,
                     int worker)
{
    for (int64_t r = begin; r + 1 < end; r += 2) {
        kn_data_sample a = sample_of(l, slot, r, worker), b = sample_of(l, slot, r + 1, worker);
        a.stream = kn_random_stream("data.pair", kn_loader_place(l, slot->round, r) / 2, 0);
        l->mix(&a, &b, l->arg);
    }
}

void kn_loader_fill(const kn_loader *l, const kn_slot *slot, int64_t begin, int64_t end, int worker,
                    kn_filled *out)
{
    for (int64_t r = begin; r < end; r++) {
        kn_data_sample s = sample_of(l, slot, r, worker);
        kn_row row = kn_loader_row(l, slot->round, r);
        bool skipped = false;
        int answer = fill_row(l, &s, row, &skipped);
        out->replaced += skipped;
        if (answer == true)
            continue;
        if (answer == KN_SAMPLE_END && r < out->end_row) {
            out->end_row = r;
            out->end = row.index;
        } else if (answer == false && r < out->bad_row) {
            out->bad_row = r;
            snprintf(out->error, sizeof out->error, "%s", kn_error() ? kn_error() : "");
        }
        return;
    }
    if (l->mix)
        mix_rows(l, slot, begin, end, worker);
}
