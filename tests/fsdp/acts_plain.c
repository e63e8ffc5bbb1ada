/* tests/fsdp/acts_plain.c: the reference of a program of acts: each act by its definition, in
 * arrays (acts_plain.h). */
#include "tests/fsdp/acts_plain.h"
#include <float.h>

/* ---- backwards ------------------------------------------------------------------------------- */

static void load(plain *s, int rank)
{
    const kn_param *p;
    for (int k = -1; k < ACTS_PARTS; k++)
        for (int j = 0, n = kn_params(k < 0 ? (void *)&s->net : s->net.part[k], &p); j < n; j++) {
            int i = acts_param(&p[j], k);
            memcpy(kn_data(p[j].tensor), s->value[group_of(s, i, rank)].of[i],
                   (size_t)p[j].numel * sizeof(float));
        }
}

/* param gets a gradient in the backward of the loss that uses these parts. */
static bool reached(const plain *s, int param, int uses, bool by_root)
{
    return !s->frozen[param] &&
           (param == ACTS_GAIN ? by_root && s->root : uses >> part_of(param) & 1);
}

static bool loss(plain *s, const act *a, int rank, uint64_t micro, bool adds, set pass, double *out)
{
    kn_tensor *in[ACTS_PARAMS], *g[ACTS_PARAMS];
    int n = 0, param[ACTS_PARAMS];
    kn_scope scope = kn_scope_begin();
    s->net.uses = s->net.calls = acts_uses(a, rank);
    s->net.gains = a->arg[2] && s->root;
    s->net.reverse = a->kind == ACT_EVALUATE && a->arg[4] & 1;
    load(s, rank);
    kn_tensor *y = acts_loss(&s->net, micro, a->arg[2]);
    for (int i = 0; i < ACTS_PARAMS; i++)
        if (adds && reached(s, i, s->net.uses, a->arg[2]))
            in[n] = acts_tensor(&s->net, i), param[n++] = i;
    bool ok = y && (n == 0 || kn_grad_of(y, in, n, g));
    *out = ok ? kn_item(y) : NAN;
    for (int j = 0; ok && j < n; j++) {
        bool alone = is_plain(s, part_of(param[j]));
        gradient *to = alone ? &s->of[param[j]][rank] : &s->held[param[j]][rank];
        to->passes |= pass;
        for (int e = 0; e < acts_numel(param[j]); e++)
            to->sum[e] += (double)((const float *)kn_data(g[j]))[e];
    }
    kn_scope_end(scope);
    return ok;
}

/* The waiting gradients of part k, or of the gain, are reduced. */
static void reduce(plain *s, int k)
{
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int r = 0; part_of(i) == k && !is_plain(s, k) && r < s->ranks; r++) {
            gradient *to = &s->of[i][group_of(s, i, r)], *from = &s->held[i][r];
            for (int e = 0; e < acts_numel(i); e++)
                to->sum[e] += from->sum[e];
            to->passes |= from->passes;
            *from = (gradient){ 0 };
        }
    if (k < ACTS_PARTS)
        s->pending[k] = false;
}

static bool may_use(const plain *s, const act *a)
{
    int parts = a->arg[0];
    for (int k = 0; k < ACTS_PARTS; k++)
        if (parts >> k & 1 && ((a->arg[2] && !s->merged[k]) || s->gone[k]))
            return false;
    return parts != 0;
}

/* A tree is reached where a part of it has a gradient, or lets one through. */
static int trees_reached(const plain *s, const act *a, int rank)
{
    int uses = acts_uses(a, rank), trees = 0;
    bool flows = false;
    for (int k = 0; k < ACTS_PARTS; k++) {
        for (int i = 4 * k; i < 4 * k + 4; i++)
            flows |= reached(s, i, uses, a->arg[2]);
        trees |= (flows && uses >> k & 1) << k;
    }
    if (reached(s, ACTS_GAIN, uses, a->arg[2]))
        trees |= 1 << ACTS_PARTS;
    for (int k = 0; k < ACTS_PARTS && s->root; k++)
        trees = trees ? (2 << ACTS_PARTS) - 1 : 0;
    return trees;
}

static void freeze(plain *s, int place, bool frozen)
{
    for (int i = 0; i < ACTS_PARAMS; i++)
        if (plain_under(s, i, place))
            s->frozen[i] = frozen;
}

static bool backward(plain *s, act *a, int number, act_outcome *want)
{
    if (!s->root)
        a->arg[3] = 0;
    for (int r = 0; r < s->ranks; r++)
        if (!may_use(s, a) || trees_reached(s, a, r) == 0)
            return false;
    int trees = trees_reached(s, a, 0);
    want->scaled = s->p->scaler && a->arg[6] != 1;
    if (want->scaled)
        plain_scale_loss(s, number);
    plain_unclip(s, AT_ROOT);
    for (int k = 0; k < ACTS_PARTS; k++)
        plain_unclip(s, AT_PART + k);
    for (int r = 0; r < s->ranks; r++)
        if (!loss(s, a, r, (uint64_t)(number * ACTS_RANKS + r), true, (set)1 << number,
                  &want->loss[r]))
            return true;
    for (int k = 0; k <= ACTS_PARTS; k++)
        if (trees >> k & 1 && a->arg[1] == MODE_SYNC)
            reduce(s, k);
        else if (trees >> k & 1 && k < ACTS_PARTS && !is_plain(s, k))
            s->pending[k] = true;
    if (a->arg[4] == BETWEEN_FREEZE || a->arg[4] == BETWEEN_UNFREEZE)
        freeze(s, a->arg[5], a->arg[4] == BETWEEN_FREEZE);
    return true;
}

/* ---- the other acts -------------------------------------------------------------------------- */

static bool step(plain *s, const act *a, act_outcome *want)
{
    int place = a->arg[0], clipped;
    for (int n = 0; n < ACTS_PLACES && !acts_has_optim(s->p, place); n++)
        place = (place + 1) % ACTS_PLACES;
    want->place = clipped = place;
    int scale = plain_scale(s, place);
    if (plain_pends(s, place) || !plain_has_gradient(s, place) || plain_has_odd_clip(s, place) ||
        scale < 0)
        return false;
    want->scaled = scale > 0 && a->arg[1] != 1;
    want->bare = scale == 0 && !s->scaler.turned[place];
    if (want->scaled && !plain_may_scaler_step(s, place, scale))
        return false;
    while (clipped >= 0 && (s->coef[clipped][0] == 0 || !plain_place_under(s, place, clipped)))
        clipped = acts_above(clipped);
    for (int at = 0; at < ACTS_PLACES && clipped < 0; at++)
        if (at != place && plain_place_under(s, at, place) && s->coef[at][0] > 0)
            return false; /* refused: the clip was for less */
    bool skip = scale > 0 && !isfinite(plain_norm(s, clipped < 0 ? place : clipped, 0, 2));
    want->skipped = skip;
    if (skip && !want->scaled)
        return false;
    double by[ACTS_PARAMS][ACTS_RANKS];
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int r = 0; r < s->ranks; r++)
            by[i][r] = plain_divisor(s, i, place, r);
    for (int i = 0; i < ACTS_PARAMS && !skip; i++)
        for (int r = 0, done = 0; r < s->ranks; r++) {
            int g = group_of(s, i, r);
            double coef = clipped < 0 ? 1 : s->coef[clipped][r];
            bool now =
                !(done >> g & 1) && plain_under(s, i, place) && !s->frozen[i] && s->of[i][g].passes;
            done |= 1 << g;
            for (int e = 0; now && e < acts_numel(i); e++)
                s->value[g].of[i][e] -= (float)(0.0625 * s->of[i][g].sum[e] * coef / by[i][r]);
        }
    plain_clear(s, place);
    if (want->scaled)
        plain_scaler_stepped(s, place, skip);
    return true;
}

static bool clip(plain *s, const act *a, act_outcome *want)
{
    static const double fraction[] = { 0.5, 0.01, 3 };
    int place = a->arg[0];
    int carried = plain_scale(s, place);
    if (plain_pends(s, place) || !plain_has_gradient(s, place) || carried < 0)
        return false;
    for (int i = 0; i < ACTS_PARAMS; i++) /* kn_grad_scale may count too many until then */
        if (plain_under(s, i, place) && plain_stepped_at(s, i) >= 0 &&
            plain_pends(s, plain_stepped_at(s, i)))
            return false;
    if (a->kind == ACT_CLIP)
        plain_unclip(s, place);
    for (int r = 0; r < s->ranks; r++) {
        double x = want->norm[r] = plain_norm(s, place, r, a->arg[1]), most = fraction[a->arg[2]];
        if (a->kind == ACT_CLIP)
            s->coef[place][r] = x > most ? fmax(most / x, DBL_MIN) : 1;
        for (int i = 0; i < ACTS_PARAMS && a->kind == ACT_CLIP; i++)
            s->then[place][i][r] = plain_divisor(s, i, place, r);
    }
    for (int r = 0; r < s->ranks && a->kind == ACT_MEASURE; r++) {
        double one = 0;
        for (int i = 0; i < ACTS_PARAMS; i++) {
            if (!plain_under(s, i, place) || !s->of[i][group_of(s, i, r)].passes)
                continue;
            double by = plain_divisor(s, i, place, r);
            one = one == 0 || one == by ? by : -1;
        }
        want->scale[r] = one > 0 ? 1 / (one * s->scaler.of[carried]) : 0;
    }
    return true;
}

/* A scaler's step is to come that measures the parameter's gradient anew. */
static bool would_skip(const plain *s, int param)
{
    int by = plain_stepped_at(s, param);
    bool clipped = false;
    for (int at = 0; at < ACTS_PLACES; at++)
        clipped |= plain_under(s, param, at) && s->coef[at][0] > 0;
    return !clipped && by >= 0 && plain_scale(s, by) > 0;
}

static bool edit(plain *s, act *a)
{
    int i = a->arg[0], place = acts_above(ACTS_PLACES + i);
    if (a->arg[2]) /* all of it is summoned */
        place = acts_above(place) < 0 ? place : acts_above(place);
    if (plain_pends(s, place) || s->frozen[i] || !s->of[i][0].passes)
        return false;
    if (a->arg[1] == 2 && !would_skip(s, i))
        a->arg[1] = 0;
    for (int r = 0; r < ACTS_RANKS; r++)
        for (int e = 0; e < ACTS_NUMEL; e++)
            s->of[i][r].sum[e] =
                a->arg[1] == 2 ? INFINITY : s->of[i][r].sum[e] * (a->arg[1] ? 0.5 : 4);
    return true;
}

static bool reduces(plain *s, act *a)
{
    int trees = 0, place = s->root ? AT_ROOT : a->arg[0]; /* a tree is named by its root */
    a->arg[0] = place;
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int k = 0; k <= ACTS_PARTS && place < AT_LINEAR && plain_under(s, i, place); k++)
            trees |=
                (!is_plain(s, k) && (k < ACTS_PARTS || s->root) && plain_one_tree(s, part_of(i), k))
                << k;
    for (int k = 0; k <= ACTS_PARTS; k++)
        if (trees >> k & 1)
            reduce(s, k);
    return trees != 0;
}

static void new_optims(plain *s)
{
    memset(s->scaler.turned, 0, sizeof s->scaler.turned);
}

static bool wrap_root(plain *s)
{
    bool can = s->p->root == ROOT_LATE && !s->root;
    for (int k = 0; k < ACTS_PARTS; k++)
        can = can && (s->gone[k] || (s->merged[k] && !is_plain(s, k)));
    s->root = s->root || can;
    if (can)
        new_optims(s);
    return can;
}

/* A set of the backwards in the gradients of a tree. */
static set passes(const plain *s, int place)
{
    set all = 0;
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int r = 0; r < s->ranks; r++)
            if (plain_under(s, i, place))
                all |= s->of[i][r].passes | s->held[i][r].passes;
    return all;
}

static bool merge(plain *s, const act *a, act_outcome *want)
{
    int k = a->arg[0], place = AT_PART + k;
    if (s->merged[k] || s->root || s->gone[k])
        return false;
    bool waits = plain_pends(s, AT_ROOT) || plain_pends(s, place);
    want->zero_first = waits || passes(s, AT_ROOT) != passes(s, place);
    if (want->zero_first)
        plain_clear(s, place);
    plain_unclip(s, AT_ROOT); /* what comes wasn't clipped with the others */
    plain_unclip(s, place);
    s->merged[k] = true;
    return true;
}

static bool replace(plain *s, const act *a, int number)
{
    int k = a->arg[0], place = AT_PART + k;
    if (!is_plain(s, k) || !s->merged[k] || s->root || s->gone[k])
        return false;
    plain_clear(s, place);
    plain_unclip(s, place);
    freeze(s, place, false);
    new_optims(s);
    for (int g = 0; g < ACTS_RANKS; g++)
        acts_fill(&s->value[g], k, (uint64_t)number);
    return true;
}

/* Not the last one. */
static bool free_part(plain *s, const act *a)
{
    int k = a->arg[0], place = AT_PART + k, left = 0;
    for (int i = 0; i < ACTS_PARTS; i++)
        left += i != k && !s->gone[i];
    if (s->gone[k] || left == 0)
        return false;
    plain_clear(s, place);
    plain_unclip(s, AT_ROOT);
    plain_unclip(s, place);
    s->pending[k] = false;
    new_optims(s);
    s->gone[k] = true;
    return true;
}

static bool is_gone(const plain *s, int place)
{
    int k = acts_part_of(place);
    return k >= 0 && s->gone[k];
}

static bool run(plain *s, act *a, int number, act_outcome *want)
{
    bool there = true, placed = a->kind == ACT_CLIP || a->kind == ACT_MEASURE ||
                                a->kind == ACT_FREEZE || a->kind == ACT_ZERO;
    if (placed && is_gone(s, a->arg[0]))
        return false;
    switch (a->kind) {
    case ACT_BACKWARD:
        return backward(s, a, number, want);
    case ACT_STEP:
        return step(s, a, want);
    case ACT_CLIP:
    case ACT_MEASURE:
        return clip(s, a, want);
    case ACT_FREEZE:
        freeze(s, a->arg[0], !a->arg[1]);
        return true;
    case ACT_ZERO:
        plain_clear(s, a->arg[0]);
        return true;
    case ACT_EDIT:
        return edit(s, a);
    case ACT_REDUCE:
        return reduces(s, a);
    case ACT_ROOT:
        return wrap_root(s);
    case ACT_MERGE:
        return merge(s, a, want);
    case ACT_REPLACE:
        return replace(s, a, number);
    case ACT_FREE:
        return free_part(s, a);
    case ACT_UPDATE:
        return plain_scaler_update(s);
    case ACT_EVALUATE:
        a->arg[3] = 0;
        for (int r = 0; r < s->ranks && (there = there && may_use(s, a)); r++)
            loss(s, a, r, (uint64_t)(number * ACTS_RANKS + r), false, 0, &want->loss[r]);
        return there;
    default:
        return a->kind == ACT_SAMPLE;
    }
}

int acts_plain(kn_comm *world, void *arg)
{
    acts_job *job = arg;
    plain *s = calloc(1, sizeof *s);
    kn_set_threads(1);
    *s = (plain){ .p = &job->p,
                  .ranks = job->p.ranks + 1,
                  .root = job->p.root == ROOT_FIRST,
                  .scaler = { ACTS_FIRST_SCALE, { 1 }, .moved = true } };
    bool ok = acts_net_init(&s->net, s->p, true) && kn_materialize(&s->net, KN_CPU, 5);
    for (int k = 0; k <= ACTS_PARTS; k++) {
        acts_fill(&job->begin, k, 77);
        if (k < ACTS_PARTS) {
            s->merged[k] = !s->p->part[k].apart;
            ok = ok && kn_materialize(s->net.part[k], KN_CPU, 5);
        }
    }
    for (int g = 0; g < ACTS_RANKS; g++)
        s->value[g] = job->begin;
    freeze(s, AT_PART + 2, s->p->cold);
    for (int i = 0; i < ACTS_MOST && ok && kn_ok(); i++) {
        act_outcome *want = &job->want[i];
        want->run = run(s, &job->p.act[i], i, want);
        want->loss_scale = s->scaler.scale;
        for (int r = 0; r < s->ranks; r++)
            for (int j = 0; j < ACTS_PARAMS; j++)
                memcpy(want->values[r].of[j], s->value[group_of(s, j, r)].of[j],
                       sizeof want->values[r].of[j]);
    }
    if (!kn_ok())
        snprintf(job->where, sizeof job->where, "the reference: %s", kn_error());
    for (int k = 0; k < ACTS_PARTS; k++)
        if (s->p->part[k].apart)
            kn_module_free(s->net.part[k]);
    kn_module_free(&s->net);
    free(s);
    return *job->where != 0;
}
