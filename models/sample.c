/* models/sample.c: choosing tokens from logits. Computed on the host in double, so that equal
 * logits give equal text everywhere. */
#include "models/sample.h"
#include "kernels/error_internal.h"

#include "data/data.h"
#include <math.h>

typedef struct candidate {
    double weight; /* exp((logit - max) / temperature) */
    int64_t id;
} candidate;

/* Likeliest first, equal ones by id: a unique order. */
static bool comes_before(const candidate *x, const candidate *y)
{
    return x->weight > y->weight || (x->weight == y->weight && x->id < y->id);
}

/* c[i] and what lies below it become a heap, whose first comes before all others. */
static void sink(candidate *c, int64_t n, int64_t i)
{
    const candidate x = c[i];
    for (int64_t k; (k = 2 * i + 1) < n; i = k) {
        k += k + 1 < n && comes_before(&c[k + 1], &c[k]);
        if (comes_before(&x, &c[k]))
            break;
        c[i] = c[k];
    }
    c[i] = x;
}

/* Candidates in their order, as far as they were asked for: of a vocabulary few are, so sorting all
 * of it would be the most of kn_sample's time. */
typedef struct ranking {
    candidate *c; /* a heap of those not yet asked for, then the others, the first one last */
    int64_t count, taken;
} ranking;

static const candidate *ranked(ranking *r, int64_t place)
{
    for (; r->taken <= place; r->taken++) {
        const int64_t last = r->count - 1 - r->taken;
        const candidate first = r->c[0];
        r->c[0] = r->c[last];
        sink(r->c, last, 0);
        r->c[last] = first;
    }
    return &r->c[r->count - 1 - place];
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
    candidate *c = kn_host_alloc((size_t)vocab * sizeof *c);
    if (!c)
        return -1;
    double all = 0;
    for (int64_t i = 0; i < vocab; i++) {
        const double z = ((double)logits[i] - logits[best]) / o->temperature;
        c[i] = (candidate){ isfinite(logits[i]) ? exp(z) : 0, i };
        all += c[i].weight;
    }
    for (int64_t i = vocab / 2 - 1; i >= 0; i--)
        sink(c, vocab, i);
    const int64_t id = draw(&(ranking){ c, vocab, 0 }, all, o, index);
    kn_host_free(c);
    return id;
}
