/* tests/fsdp/acts_sums.c: what the reference's sums are divided by, their norms, what a step may
 * take: by docs/fsdp.md, "Gradients". */
#include "tests/fsdp/acts_plain.h"

bool plain_under(const plain *s, int param, int place)
{
    return acts_under(param, place) && !(part_of(param) < ACTS_PARTS && s->gone[part_of(param)]) &&
           (place != AT_ROOT || param == ACTS_GAIN || s->merged[part_of(param)]);
}

bool plain_place_under(const plain *s, int place, int top)
{
    int k = place >= AT_LINEAR ? (place - AT_LINEAR) / 2 : place - AT_PART;
    while (place >= 0 && place != top)
        place = acts_above(place);
    return place == top && (top != AT_ROOT || k < 0 || s->merged[k]);
}

bool plain_one_tree(const plain *s, int a, int b)
{
    return a == b || (s->root && !is_plain(s, a) && !is_plain(s, b));
}

bool plain_pends(const plain *s, int place)
{
    bool any = false;
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int k = 0; plain_under(s, i, place) && k < ACTS_PARTS; k++)
            any |= s->pending[k] && plain_one_tree(s, part_of(i), k);
    return any;
}

void plain_clear(plain *s, int place)
{
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int r = 0; plain_under(s, i, place) && r < ACTS_RANKS; r++)
            s->of[i][r] = s->held[i][r] = (gradient){ 0 };
}

void plain_unclip(plain *s, int place)
{
    for (int at = 0; at < ACTS_PLACES; at++)
        if (plain_place_under(s, at, place))
            memset(s->coef[at], 0, sizeof s->coef[at]);
}

/* ---- what divides ---------------------------------------------------------------------------- */

int plain_stepped_at(const plain *s, int param)
{
    int at = acts_above(ACTS_PLACES + param);
    while (at >= 0 && (!acts_has_optim(s->p, at) || !plain_under(s, param, at)))
        at = acts_above(at);
    return at;
}

set plain_passes(const plain *s, int param, int place, int rank)
{
    int by = plain_stepped_at(s, param);
    set all = 0;
    for (int i = 0; i < ACTS_PARAMS; i++)
        if (plain_under(s, i, by < 0 ? place : by) && plain_stepped_at(s, i) == by &&
            (is_plain(s, part_of(param)) || !is_plain(s, part_of(i)))) /* as ranks agree on */
            all |= s->of[i][group_of(s, i, rank)].passes;
    return all;
}

double plain_divisor(const plain *s, int param, int place, int rank)
{
    int count = 0;
    for (set all = plain_passes(s, param, place, rank); all; all &= all - 1)
        count++;
    return count * acts_factor(s->p, part_of(param), rank);
}

/* The ranks that a norm goes over, of which rank is one: bits. */
static int ranks_of_norm(const plain *s, int place, int rank)
{
    int split = -1, ranks = 0;
    bool whole = place == AT_ROOT ||
                 s->merged[place >= AT_LINEAR ? (place - AT_LINEAR) / 2 : place - AT_PART];
    for (int k = 0; k < ACTS_PARTS; k++) {
        bool in_tree =
            whole ? s->merged[k] : plain_under(s, 4 * k, place) || plain_under(s, 4 * k + 2, place);
        if (!in_tree || is_plain(s, k) || s->gone[k])
            continue;
        split = split < 0 || split == acts_split(s->p, k) ? acts_split(s->p, k) : RANKS_ALL;
    }
    for (int r = 0; r < s->ranks && split >= 0; r++)
        ranks |= (acts_color(split, r) == acts_color(split, rank)) << r;
    return split < 0 ? 1 << rank : ranks;
}

double plain_norm(const plain *s, int place, int rank, int order)
{
    double sum = 0;
    int ranks = ranks_of_norm(s, place, rank);
    for (int i = 0; i < ACTS_PARAMS; i++) {
        bool alone = is_plain(s, part_of(i)), first = true;
        int done = 0;
        for (int r = 0; r < s->ranks; r++) {
            int g = group_of(s, i, r);
            bool counts = ranks >> r & 1 && !(done >> g & 1) && (!alone || first || order == 2);
            if (!counts || !plain_under(s, i, place) || s->frozen[i] || !s->of[i][g].passes)
                continue;
            first = false;
            done |= 1 << g;
            for (int e = 0; e < acts_numel(i); e++) {
                double x = fabs(s->of[i][g].sum[e]) / plain_divisor(s, i, place, r);
                sum = order == 2 ? fmax(sum, x) : sum + (order == 1 ? x : x * x);
            }
        }
    }
    return order == 0 ? sqrt(sum) : sum;
}

bool plain_has_gradient(const plain *s, int place)
{
    bool any = false;
    for (int i = 0; i < ACTS_PARAMS; i++)
        any |= plain_under(s, i, place) && !s->frozen[i] && s->of[i][0].passes;
    return any;
}

/* A clip of place holds where the gradients that are left have the divisors of then. */
static bool has_moved(const plain *s, int at)
{
    bool moved = false;
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int r = 0; r < s->ranks; r++)
            moved |= plain_under(s, i, at) && s->of[i][group_of(s, i, r)].passes &&
                     plain_divisor(s, i, at, r) != s->then[at][i][r];
    return s->coef[at][0] > 0 && moved;
}

bool plain_has_odd_clip(const plain *s, int place)
{
    bool odd = false;
    for (int at = 0; at < ACTS_PLACES; at++)
        odd |= (plain_place_under(s, at, place) || plain_place_under(s, place, at)) &&
               has_moved(s, at);
    return odd;
}
