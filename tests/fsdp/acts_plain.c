/* tests/fsdp/acts_plain.c: the reference of a program of acts: arrays of sums and sets of backwards
 * for each parameter and each group of ranks that shares it, by docs/fsdp.md, "Gradients". */
#include "tests/fsdp/acts.h"

typedef uint32_t set; /* of backwards: the numbers of their acts */

typedef struct gradient {
    double sum[ACTS_NUMEL];
    set passes;
} gradient;

typedef struct plain {
    const acts_program *p;
    acts_net net;
    int ranks;
    acts_values value[ACTS_RANKS];                 /* of each group */
    gradient of[ACTS_PARAMS][ACTS_RANKS];          /* reduced: of each group */
    gradient held[ACTS_PARAMS][ACTS_RANKS];        /* of each rank */
    bool frozen[ACTS_PARAMS], pending[ACTS_PARTS]; /* a part's tree waits for a reduction */
    bool merged[ACTS_PARTS], root;                 /* the root is wrapped */
    double coef[ACTS_PLACES][ACTS_RANKS];          /* of a clip; 0: none */
} plain;

static int part_of(int param)
{
    return param / 4;
}

static bool is_plain(const plain *s, int k)
{
    return k < ACTS_PARTS && s->p->part[k].style == STYLE_PLAIN;
}

static int group_of(const plain *s, int param, int rank)
{
    return acts_group(s->p, part_of(param), rank);
}

/* param lies in the tree at and below place. */
static bool under(const plain *s, int param, int place)
{
    return acts_under(param, place) &&
           (place != AT_ROOT || param == ACTS_GAIN || s->merged[part_of(param)]);
}

static bool place_under(const plain *s, int place, int top)
{
    int k = place >= AT_LINEAR ? (place - AT_LINEAR) / 2 : place - AT_PART;
    while (place >= 0 && place != top)
        place = acts_above(place);
    return place == top && (top != AT_ROOT || k < 0 || s->merged[k]);
}

/* Two parts, or a part and the gain, are in one tree of units. */
static bool one_tree(const plain *s, int a, int b)
{
    return a == b || (s->root && !is_plain(s, a) && !is_plain(s, b));
}

static bool pends(const plain *s, int place)
{
    bool any = false;
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int k = 0; under(s, i, place) && k < ACTS_PARTS; k++)
            any |= s->pending[k] && one_tree(s, part_of(i), k);
    return any;
}

static void clear(plain *s, int place)
{
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int r = 0; under(s, i, place) && r < ACTS_RANKS; r++)
            s->of[i][r] = s->held[i][r] = (gradient){ 0 };
}

static void unclip(plain *s, int place)
{
    for (int at = 0; at < ACTS_PLACES; at++)
        if (place_under(s, at, place))
            memset(s->coef[at], 0, sizeof s->coef[at]);
}

/* ---- what divides ---------------------------------------------------------------------------- */

/* The place whose optimizer steps a parameter; -1: none. */
static int stepped_at(const plain *s, int param)
{
    int at = acts_above(ACTS_PLACES + param);
    while (at >= 0 && (!acts_has_optim(s->p, at) || !under(s, param, at)))
        at = acts_above(at);
    return at;
}

/* What divides param's gradient on a rank, where those of place are looked at. */
static double divisor(const plain *s, int param, int place, int rank)
{
    int by = stepped_at(s, param), count = 0;
    set all = 0;
    for (int i = 0; i < ACTS_PARAMS; i++)
        if (under(s, i, by < 0 ? place : by) && stepped_at(s, i) == by &&
            (is_plain(s, part_of(param)) || !is_plain(s, part_of(i)))) /* as ranks agree on */
            all |= s->of[i][group_of(s, i, rank)].passes;
    for (; all; all &= all - 1)
        count++;
    return count * (is_plain(s, part_of(param)) ? 1 : acts_ranks_of(s->p, part_of(param), rank));
}

/* The ranks that a norm goes over, of which rank is one: bits. */
static int ranks_of_norm(const plain *s, int place, int rank)
{
    int first = -1, mine = 0;
    bool whole = place == AT_ROOT ||
                 s->merged[place >= AT_LINEAR ? (place - AT_LINEAR) / 2 : place - AT_PART];
    for (int k = 0; k < ACTS_PARTS; k++) {
        bool in_tree = whole ? s->merged[k] : under(s, 4 * k, place) || under(s, 4 * k + 2, place);
        if (!in_tree || is_plain(s, k))
            continue;
        int ranks = 0;
        for (int r = 0; r < s->ranks; r++)
            ranks |= (acts_group(s->p, k, r) == acts_group(s->p, k, rank)) << r;
        first = first < 0 ? ranks : first;
        mine = first == ranks ? ranks : (1 << s->ranks) - 1;
        first = mine;
    }
    return first < 0 ? 1 << rank : mine;
}

/* Each group's part counts once; plain ones on the first rank, in a maximum on all. */
static double norm(const plain *s, int place, int rank, int order)
{
    double sum = 0;
    int ranks = ranks_of_norm(s, place, rank);
    for (int i = 0; i < ACTS_PARAMS; i++) {
        bool alone = is_plain(s, part_of(i)), first = true;
        int done = 0;
        for (int r = 0; r < s->ranks; r++) {
            int g = group_of(s, i, r);
            bool counts = ranks >> r & 1 && !(done >> g & 1) && (!alone || first || order == 2);
            if (!counts || !under(s, i, place) || s->frozen[i] || !s->of[i][g].passes)
                continue;
            first = false;
            done |= 1 << g;
            for (int e = 0; e < acts_numel(i); e++) {
                double x = fabs(s->of[i][g].sum[e]) / divisor(s, i, place, r);
                sum = order == 2 ? fmax(sum, x) : sum + (order == 1 ? x : x * x);
            }
        }
    }
    return order == 0 ? sqrt(sum) : sum;
}

static bool has_gradient(const plain *s, int place)
{
    bool any = false;
    for (int i = 0; i < ACTS_PARAMS; i++)
        any |= under(s, i, place) && !s->frozen[i] && s->of[i][0].passes;
    return any;
}

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

static kn_tensor *tensor_of(plain *s, int param)
{
    kn_linear *fc = param < ACTS_GAIN ? &s->net.part[param / 4]->fc[param / 2 % 2] : NULL;
    return fc ? kn_module_param(fc, param % 2 ? "bias" : "weight") : s->net.gain;
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
            in[n] = tensor_of(s, i), param[n++] = i;
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

/* What waits in part k, or the gain, is reduced. */
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
        if (parts >> k & 1 && a->arg[2] && !s->merged[k])
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
        if (under(s, i, place))
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
    unclip(s, AT_ROOT);
    for (int k = 0; k < ACTS_PARTS; k++)
        unclip(s, AT_PART + k);
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
    if (pends(s, place) || !has_gradient(s, place))
        return false;
    while (clipped >= 0 && (s->coef[clipped][0] == 0 || !place_under(s, place, clipped)))
        clipped = acts_above(clipped);
    for (int at = 0; at < ACTS_PLACES && clipped < 0; at++)
        if (at != place && place_under(s, at, place) && s->coef[at][0] > 0)
            return false; /* refused: the clip was for less */
    double by[ACTS_PARAMS][ACTS_RANKS];
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int r = 0; r < s->ranks; r++)
            by[i][r] = divisor(s, i, place, r);
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int r = 0, done = 0; r < s->ranks; r++) {
            int g = group_of(s, i, r);
            double coef = clipped < 0 ? 1 : s->coef[clipped][r];
            bool now =
                !(done >> g & 1) && under(s, i, place) && !s->frozen[i] && s->of[i][g].passes;
            done |= 1 << g;
            for (int e = 0; now && e < acts_numel(i); e++)
                s->value[g].of[i][e] -= (float)(0.0625 * s->of[i][g].sum[e] * coef / by[i][r]);
        }
    clear(s, place);
    return true;
}

static bool clip(plain *s, const act *a, act_outcome *want)
{
    static const double fraction[] = { 0.5, 0.01, 3 };
    int place = a->arg[0];
    if (pends(s, place) || !has_gradient(s, place))
        return false;
    for (int i = 0; i < ACTS_PARAMS; i++) /* kn_grad_scale may count too many until then */
        if (under(s, i, place) && stepped_at(s, i) >= 0 && pends(s, stepped_at(s, i)))
            return false;
    if (a->kind == ACT_CLIP)
        unclip(s, place);
    for (int r = 0; r < s->ranks; r++) {
        double x = want->norm[r] = norm(s, place, r, a->arg[1]), most = fraction[a->arg[2]];
        if (a->kind == ACT_CLIP)
            s->coef[place][r] = x > most ? most / x : 1;
    }
    for (int r = 0; r < s->ranks && a->kind == ACT_MEASURE; r++) {
        double one = 0;
        for (int i = 0; i < ACTS_PARAMS; i++) {
            if (!under(s, i, place) || !s->of[i][group_of(s, i, r)].passes)
                continue;
            double by = divisor(s, i, place, r);
            one = one == 0 || one == by ? by : -1;
        }
        want->scale[r] = one > 0 ? 1 / one : 0;
    }
    return true;
}

static bool edit(plain *s, const act *a)
{
    int i = a->arg[0];
    int place = acts_above(ACTS_PLACES + i);
    if (pends(s, place) || s->frozen[i] || !s->of[i][0].passes)
        return false;
    for (int r = 0; r < ACTS_RANKS; r++)
        for (int e = 0; e < ACTS_NUMEL; e++)
            s->of[i][r].sum[e] *= a->arg[1] ? 0.5 : 4;
    return true;
}

static bool reduces(plain *s, act *a)
{
    int trees = 0, place = s->root ? AT_ROOT : a->arg[0]; /* a tree is named by its root */
    a->arg[0] = place;
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int k = 0; k <= ACTS_PARTS && place < AT_LINEAR && under(s, i, place); k++)
            trees |= (!is_plain(s, k) && (k < ACTS_PARTS || s->root) && one_tree(s, part_of(i), k))
                     << k;
    for (int k = 0; k <= ACTS_PARTS; k++)
        if (trees >> k & 1)
            reduce(s, k);
    return trees != 0;
}

static bool wrap_root(plain *s)
{
    bool can = s->p->root == ROOT_LATE && !s->root;
    for (int k = 0; k < ACTS_PARTS; k++)
        can = can && s->merged[k] && !is_plain(s, k);
    s->root = s->root || can;
    return can;
}

/* A set of the backwards in the gradients of a tree. */
static set passes(const plain *s, int place)
{
    set all = 0;
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int r = 0; r < s->ranks; r++)
            if (under(s, i, place))
                all |= s->of[i][r].passes | s->held[i][r].passes;
    return all;
}

static bool merge(plain *s, const act *a, act_outcome *want)
{
    int k = a->arg[0], place = AT_PART + k;
    if (s->merged[k] || s->root)
        return false;
    bool waits = pends(s, AT_ROOT) || pends(s, place);
    want->zero_first = waits || passes(s, AT_ROOT) != passes(s, place);
    if (want->zero_first)
        clear(s, place);
    unclip(s, AT_ROOT); /* what comes wasn't clipped with the others */
    unclip(s, place);
    s->merged[k] = true;
    return true;
}

static bool replace(plain *s, const act *a, int number)
{
    int k = a->arg[0], place = AT_PART + k;
    if (!is_plain(s, k) || !s->merged[k] || s->root)
        return false;
    clear(s, place);
    unclip(s, place);
    freeze(s, place, false);
    for (int g = 0; g < ACTS_RANKS; g++)
        acts_fill(&s->value[g], k, (uint64_t)number);
    return true;
}

static bool run(plain *s, act *a, int number, act_outcome *want)
{
    bool there = true;
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
        clear(s, a->arg[0]);
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
    *s = (plain){ .p = &job->p, .ranks = job->p.ranks + 1, .root = job->p.root == ROOT_FIRST };
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
    for (int i = 0; i < ACTS_MOST && ok && kn_ok(); i++) {
        act_outcome *want = &job->want[i];
        want->run = run(s, &job->p.act[i], i, want);
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
    (void)world;
    return *job->where != 0;
}
