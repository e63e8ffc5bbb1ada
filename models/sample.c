/* models/sample.c: choosing tokens from logits. Computed on the host in double, so that equal
 * logits give equal text everywhere. */
#include "models/sample.h"
#include "data/data.h"
#include "kernels/error_internal.h"
#include "models/tokens/tokens.h"

#include <math.h>
#include <string.h>

typedef struct candidate {
    double weight; /* exp((logit - max) / temperature) */
    int64_t id;
} candidate;

/* Candidates in their order, as far as they were asked for: the likeliest first, equal ones by id.
 * Of a vocabulary few are asked for, so sorting all of it would be the most of kn_sample's time. */
typedef struct ranking {
    kn_heap heap; /* of those not yet asked for */
    candidate *c; /* [count]: the others, in their order, are the first `taken` */
    int64_t count, taken;
} ranking;

static const candidate *ranked(ranking *r, int64_t place)
{
    for (; r->taken <= place; r->taken++) {
        const struct kn_waiting first = kn_heap_pop(&r->heap);
        const uint64_t bits = ~first.key;
        r->c[r->taken].id = (int64_t)first.place;
        memcpy(&r->c[r->taken].weight, &bits, sizeof bits);
    }
    return &r->c[place];
}

/* Of numbers of at least 0 the larger has the larger bits. */
static bool add_candidate(ranking *r, double weight, int64_t id)
{
    uint64_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return kn_heap_push(&r->heap, (struct kn_waiting){ ~bits, (uint64_t)id, NULL });
}

/* A logit of -infinity has no chance. */
static int64_t likeliest(const float *logits, int64_t vocab)
{
    int64_t best = -1;
    for (int64_t i = 0; i < vocab; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY) {
            kn_fail("sampling: logit %lld of %lld is %g; the weights are damaged or training "
                    "diverged",
                    (long long)i, (long long)vocab, logits[i]);
            return -1;
        }
        if (isfinite(logits[i]) && (best < 0 || logits[i] > logits[best]))
            best = i;
    }
    if (best < 0)
        kn_fail("sampling: none of %lld logits is finite; the weights are damaged or training "
                "diverged",
                (long long)vocab);
    return best;
}

static bool check_options(const kn_sample_options *o)
{
    if (!(o->temperature >= 0 && isfinite(o->temperature)))
        return kn_fail("kn_sample: .temperature is %g; it must be at least 0", o->temperature);
    if (!(o->top_p >= 0 && o->top_p <= 1))
        return kn_fail("kn_sample: .top_p is %g; it must lie between 0 and 1", o->top_p);
    return o->top_k >= 0 ||
           kn_fail("kn_sample: .top_k is %lld; it must be at least 0", (long long)o->top_k);
}

/* Draws one of candidates whose weights sum to `all`. */
static int64_t draw(ranking *r, double all, const kn_sample_options *o, int64_t index)
{
    const int64_t steps = (int64_t)1 << 53;
    int64_t count = o->top_k > 0 && o->top_k < r->count ? o->top_k : r->count, pick = 0;
    double sum = count < r->count ? 0 : all, reached = 0;
    for (int64_t i = 0; count < r->count && i < count; i++)
        sum += ranked(r, i)->weight;
    if (o->top_p > 0 && o->top_p < 1) {
        int64_t kept = 0;
        while (kept < count && reached < o->top_p * sum)
            reached += ranked(r, kept++)->weight;
        count = kept;
        sum = reached;
    }
    const uint64_t stream = kn_random_stream("sample", index, 0);
    const double u = (double)kn_random_below(o->seed, stream, 0, steps) / (double)steps * sum;
    double at = ranked(r, 0)->weight;
    while (pick + 1 < count && u >= at && ranked(r, pick + 1)->weight > 0)
        at += ranked(r, ++pick)->weight;
    return ranked(r, pick)->id;
}

int64_t kn_sample(const float *logits, int64_t vocab, const kn_sample_options *o, int64_t index)
{
    if (!kn_given(logits, "kn_sample", "the array of logits") ||
        !kn_given(o, "kn_sample", "the options' struct"))
        return 0;
    if (!check_options(o))
        return -1;
    int64_t best = likeliest(logits, vocab);
    if (best < 0 || o->temperature <= 0)
        return best;
    ranking r = { .c = kn_host_alloc((size_t)vocab * sizeof *r.c), .count = vocab };
    double all = 0;
    bool ok = r.c != NULL;
    for (int64_t i = 0; ok && i < vocab; i++) {
        const double z = ((double)logits[i] - logits[best]) / o->temperature,
                     weight = isfinite(logits[i]) ? exp(z) : 0;
        ok = add_candidate(&r, weight, i);
        all += weight;
    }
    const int64_t id = ok ? draw(&r, all, o, index) : -1;
    kn_host_free(r.heap.list);
    kn_host_free(r.c);
    return id;
}
