/* kernels/cpu/reference_ctc.c: connectionist temporal classification. Row n's states are its labels
 * with a blank before, between and behind them, 2 labels + 1 of them. alpha[t, s] is the log of the
 * sum over the paths of frames 0 .. t that end in state s, beta[t, s] over those of frames t .. end
 * that begin there; a path stays, moves on by one, or skips the blank between unequal labels. */
#include "kernels/cpu/reference.h"
#include "kernels/team.h"

#include <math.h>
#include <string.h>

/* One row. */
typedef struct row {
    const kn_ctc_args *a;
    int64_t n, frames, states;
    const int64_t *target;
    double *alpha, *beta; /* [frames, states]; [states] of the frame at hand */
    double *part;         /* [C]: the part of the paths at the frame */
} row;

static int64_t label_of(const row *r, int64_t s)
{
    return s % 2 ? r->target[s / 2] : r->a->blank;
}

static double log_prob(const row *r, int64_t t, int64_t label)
{
    const kn_array *x = &r->a->log_probs;
    return kn_ref_get(x, (t * x->shape[1] + r->n) * x->shape[2] + label);
}

/* Whether a path may go from state s to s + 2. */
static bool skips(const row *r, int64_t s)
{
    return s % 2 && s + 2 < r->states && r->target[s / 2] != r->target[s / 2 + 1];
}

/* log(e^a + e^b + e^c) */
static double log_sum(double a, double b, double c)
{
    const double max = fmax(a, fmax(b, c));
    if (max == -INFINITY)
        return max;
    double sum = 0;
    sum += a == max ? 1 : exp(a - max);
    sum += b == max ? 1 : exp(b - max);
    sum += c == max ? 1 : exp(c - max);
    return max + log(sum);
}

/* alpha; returns the loss. */
static double forward(const row *r)
{
    const int64_t S = r->states;
    if (r->frames == 0)
        return S == 1 ? 0 : INFINITY;
    for (int64_t t = 0; t < r->frames; t++) {
        double *now = r->alpha + t * S;
        const double *last = now - S;
        for (int64_t s = 0; s < S; s++) {
            const double p = log_prob(r, t, label_of(r, s));
            if (t == 0) {
                now[s] = s < 2 ? p : -INFINITY;
                continue;
            }
            const double one = s > 0 ? last[s - 1] : -INFINITY;
            now[s] = p + log_sum(last[s], one, s > 1 && skips(r, s - 2) ? last[s - 2] : -INFINITY);
        }
    }
    const double *end = r->alpha + (r->frames - 1) * S;
    return -log_sum(end[S - 1], S > 1 ? end[S - 2] : -INFINITY, -INFINITY);
}

/* beta of frame t from that of t + 1, in place: each state reads itself and those behind it. */
static void backward_step(const row *r, int64_t t)
{
    const int64_t S = r->states;
    double *b = r->beta;
    for (int64_t s = 0; s < S; s++) {
        const double p = log_prob(r, t, label_of(r, s));
        if (t == r->frames - 1)
            b[s] = s + 2 < S ? -INFINITY : p;
        else
            b[s] = p + log_sum(b[s], s + 1 < S ? b[s + 1] : -INFINITY,
                               skips(r, s) ? b[s + 2] : -INFINITY);
    }
}

static void gradient(const row *r, double loss)
{
    const kn_array *g = &r->a->grad;
    const int64_t T = g->shape[0], N = g->shape[1], C = g->shape[2], S = r->states;
    const bool infinite = loss == INFINITY;
    for (int64_t t = T - 1; t >= 0; t--) {
        const bool none = t >= r->frames || (infinite && r->a->zero_infinity);
        memset(r->part, 0, (size_t)C * sizeof *r->part);
        if (!none && !infinite)
            backward_step(r, t);
        for (int64_t s = 0; s < S && !none && !infinite; s++) {
            const int64_t c = label_of(r, s);
            const double both = r->alpha[t * S + s] + r->beta[s];
            if (both > -INFINITY) /* both have the frame's own */
                r->part[c] += exp(both + loss - log_prob(r, t, c));
        }
        for (int64_t c = 0; c < C; c++)
            kn_ref_set_computed(g, (t * N + r->n) * C + c,
                                none       ? 0
                                : infinite ? (double)NAN
                                           : exp(log_prob(r, t, c)) - r->part[c]);
    }
}

typedef struct call {
    const kn_ctc_args *a;
    double *beta, *part; /* of all rows; beta lies in work, behind alpha */
} call;

/* Where row n's labels begin in targets. */
static int64_t first_label(const kn_ctc_args *a, int64_t n)
{
    int64_t at = a->width < 0 ? 0 : a->width * n;
    for (int64_t i = 0; a->width < 0 && i < n; i++)
        at += ((const int64_t *)a->labels.data)[i];
    return at;
}

static void rows(const void *ctx, int64_t begin, int64_t end)
{
    const call *c = ctx;
    const kn_ctc_args *a = c->a;
    for (int64_t n = begin; n < end; n++) {
        const int64_t first = first_label(a, n), labels = ((const int64_t *)a->labels.data)[n];
        const row r = { .a = a,
                        .n = n,
                        .frames = ((const int64_t *)a->frames.data)[n],
                        .states = 2 * labels + 1,
                        .target = (const int64_t *)a->targets.data + first,
                        .alpha = (double *)a->work.data + a->log_probs.shape[0] * (2 * first + n),
                        .beta = c->beta + 2 * first + n,
                        .part = c->part + n * a->log_probs.shape[2] };
        const double loss = forward(&r);
        kn_ref_set_computed(&a->loss, n, loss == INFINITY && a->zero_infinity ? 0 : loss);
        if (a->grad.data)
            gradient(&r, loss);
    }
}

static bool labels_fit(const kn_ctc_args *a, int64_t n, int64_t first)
{
    const int64_t *target = a->targets.data, C = a->log_probs.shape[2];
    const int64_t frames = ((const int64_t *)a->frames.data)[n], T = a->log_probs.shape[0];
    const int64_t labels = ((const int64_t *)a->labels.data)[n];
    const int64_t most = a->width < 0 ? a->targets.shape[0] - first : a->width;
    if (frames < 0 || frames > T)
        return kn_fail("ctc: row %lld has %lld frames; there are %lld", (long long)n,
                       (long long)frames, (long long)T);
    if (labels < 0 || labels > most)
        return kn_fail("ctc: row %lld has %lld labels; targets have room for %lld", (long long)n,
                       (long long)labels, (long long)most);
    for (int64_t i = first; i < first + labels; i++)
        if (target[i] < 0 || target[i] >= C)
            return kn_fail("ctc: label %lld of row %lld is %lld; labels lie in [0, %lld)",
                           (long long)(i - first), (long long)n, (long long)target[i],
                           (long long)C);
    return true;
}

kn_status kn_ref_ctc(const void *args)
{
    const kn_ctc_args *a = args;
    const int64_t N = a->log_probs.shape[1], T = a->log_probs.shape[0];
    for (int64_t n = 0; n < N; n++)
        if (!labels_fit(a, n, first_label(a, n)))
            return KN_FAILED;
    const int64_t states = 2 * a->targets.shape[0] + N, parts = N * a->log_probs.shape[2];
    double *part = kn_host_alloc((size_t)(parts + 1) * sizeof *part);
    if (!part)
        return KN_FAILED;
    const call c = { a, (double *)a->work.data + T * states, part };
    kn_each_range(kn_threads_for(states * T * 64), N, rows, &c);
    kn_host_free(part);
    return KN_DONE;
}
