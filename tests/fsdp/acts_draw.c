/* tests/fsdp/acts_draw.c: programs of acts as numbers: drawing, text, shrinking, running many. */
#include "tests/fsdp/acts.h"

static const char *const name_of[ACTS] = { "none",   "backward", "step",    "clip",
                                           "freeze", "zero",     "edit",    "reduce",
                                           "root",   "merge",    "replace", "free",
                                           "update", "evaluate", "measure", "sample" };
/* Of 100 acts. */
static const int percent[ACTS] = { 0, 34, 17, 7, 6, 3, 5, 4, 4, 4, 2, 1, 3, 4, 4, 2 };
/* Values of each argument. */
static const int values[ACTS][ACT_ARGS] = {
    [ACT_BACKWARD] = { 8, 4, 2, 16, 5, ACTS_PLACES + ACTS_PARAMS, 12 },
    [ACT_STEP] = { ACTS_PLACES, 8 },
    [ACT_CLIP] = { ACTS_PLACES, 3, 3, 2 },
    [ACT_FREEZE] = { ACTS_PLACES + ACTS_PARAMS, 2 },
    [ACT_ZERO] = { ACTS_PLACES + ACTS_PARAMS },
    [ACT_EDIT] = { ACTS_PARAMS, 3, 2 },
    [ACT_REDUCE] = { AT_LINEAR },
    [ACT_MERGE] = { ACTS_PARTS },
    [ACT_REPLACE] = { ACTS_PARTS },
    [ACT_FREE] = { ACTS_PARTS },
    [ACT_EVALUATE] = { 8, 1, 2, 1, 2 },
    [ACT_MEASURE] = { ACTS_PLACES, 3 },
};

/* The options as ints, and their numbers of values. */
enum { OF_ALL = 11, OF_PARTS = OF_ALL + 4 * ACTS_PARTS, SETTINGS = OF_PARTS + 8 };
static const int choices[] = { 4,          3, 7, 4, 3, 3, 2, 3, 2, 2, 2, 3,
                               RANKS_WAYS, 2, 2, 2, 2, 3, 2, 2, 2, 2, 2 };

static int *setting(acts_program *p, int i)
{
    return (int *)p + i;
}

static int choices_of(int i)
{
    bool of_part = i >= OF_ALL && i < OF_PARTS;
    return choices[i < OF_ALL ? i
                   : of_part  ? OF_ALL + (i - OF_ALL) % 4
                              : i - OF_PARTS + OF_ALL + 4];
}

/* The root is one unit with all in it: no part may be plain or apart. A scaler is of one tree. */
static void settle(acts_program *p)
{
    for (int k = 0; k < ACTS_PARTS; k++) {
        acts_part *part = &p->part[k];
        part->apart = p->root == ROOT_FIRST || p->scaler ? 0 : part->apart;
        part->style = p->root != ROOT_PLAIN && part->style == STYLE_PLAIN ? 0 : part->style;
        part->early = part->style == STYLE_PLAIN || (k == 2 && p->cold) ? 0 : part->early;
    }
}

static int below(uint64_t *state, int n)
{
    *state += 0x9e3779b97f4a7c15u;
    return (int)(kn_hash64(*state, 0xac75) % (uint64_t)n);
}

static bool some_part(const acts_program *p, bool apart)
{
    bool some = false;
    for (int k = 0; k < ACTS_PARTS; k++)
        some |= apart ? p->part[k].apart : p->part[k].style == STYLE_PLAIN;
    return some;
}

/* Overflows of new gradients, steps that skip them, ends of iterations. */
static void follow(const acts_program *p, act *a, uint64_t *state)
{
    const act *last = a - 1;
    if (last->kind == ACT_BACKWARD && below(state, 5) == 0)
        *a = (act){ ACT_EDIT, { below(state, ACTS_PARAMS), 2, below(state, 2) } };
    else if (last->kind == ACT_EDIT && last->arg[1] == 2 && below(state, 3))
        *a = (act){ ACT_STEP, { below(state, 2) ? AT_ROOT : below(state, ACTS_PLACES) } };
    else if (last->kind == ACT_STEP && p->optims && below(state, 2))
        *a = (act){ ACT_UPDATE, { 0 } };
}

acts_program acts_draw(uint64_t seed)
{
    acts_program p = { 0 };
    uint64_t state = kn_hash64(seed, 1);
    for (int i = 0; i < SETTINGS; i++)
        *setting(&p, i) = below(&state, 100) < 60 ? below(&state, choices_of(i)) : 0;
    p.ranks = below(&state, 5);
    p.ranks -= p.ranks > 3; /* 4 twice as often */
    p.dropout = below(&state, 10) == 0;
    p.store = below(&state, 20) == 0;
    settle(&p);
    for (int i = 0, count = 6 + below(&state, ACTS_MOST - 5); i < count; i++) {
        act *a = &p.act[i];
        int at = below(&state, 100);
        while (at >= percent[a->kind])
            at -= percent[a->kind++];
        if ((a->kind == ACT_ROOT && p.root != ROOT_LATE) ||
            (a->kind == ACT_MERGE && !some_part(&p, true)) ||
            (a->kind == ACT_REPLACE && !some_part(&p, false)) ||
            (a->kind == ACT_UPDATE && !(p.scaler && p.optims)))
            a->kind = ACT_STEP;
        for (int j = 0; j < ACT_ARGS; j++)
            a->arg[j] = values[a->kind][j] ? below(&state, values[a->kind][j]) : 0;
        if (a->kind == ACT_BACKWARD && below(&state, 2)) /* the usual one, mostly */
            a->arg[4] = a->arg[1] = 0;
        if (a->kind == ACT_FREEZE && below(&state, 2))
            a->arg[1] = 1;
        if ((a->kind == ACT_STEP || a->kind == ACT_CLIP || a->kind == ACT_REDUCE) &&
            below(&state, 2))
            a->arg[0] = AT_ROOT;
        if (i > 0 && a[-1].kind == ACT_CLIP && below(&state, 2))
            *a = (act){ ACT_STEP, { a[-1].arg[0] } };
        if (p.scaler && i > 0)
            follow(&p, a, &state);
    }
    return p;
}

const char *acts_text(const acts_program *program, char *buf, size_t size)
{
    acts_program p = *program;
    size_t used = 0;
    *buf = 0;
    for (int i = 0; i < SETTINGS; i++)
        used += (size_t)snprintf(buf + used, size - used, "%d%s", *setting(&p, i),
                                 i + 1 < SETTINGS ? "," : "");
    for (int i = 0; i < ACTS_MOST; i++) {
        const act *a = &p.act[i];
        if (a->kind)
            used += (size_t)snprintf(buf + used, size - used, " %s:%d,%d,%d,%d,%d,%d,%d",
                                     name_of[a->kind], a->arg[0], a->arg[1], a->arg[2], a->arg[3],
                                     a->arg[4], a->arg[5], a->arg[6]);
    }
    return buf;
}

bool acts_parse(const char *text, acts_program *p)
{
    char *end = (char *)text;
    memset(p, 0, sizeof *p);
    for (int i = 0; i < SETTINGS; i++, end += *end == ',')
        *setting(p, i) = (int)strtol(end, &end, 10) % choices_of(i);
    for (int i = 0; i < ACTS_MOST && *end == ' '; i++) {
        act *a = &p->act[i];
        size_t n = strcspn(++end, ":");
        while (a->kind < ACTS &&
               (strlen(name_of[a->kind]) != n || strncmp(name_of[a->kind], end, n) != 0))
            a->kind++;
        if (a->kind == ACTS || !end[n])
            return false;
        end += n + 1;
        for (int j = 0; j < ACT_ARGS; j++, end += *end == ',')
            a->arg[j] = (int)strtol(end, &end, 10);
    }
    settle(p);
    return *end == 0;
}

bool acts_simpler(const acts_program *p, int i, acts_program *simpler)
{
    *simpler = *p;
    if (i < ACTS_MOST) { /* without this act */
        memmove(&simpler->act[i], &simpler->act[i + 1], sizeof(act) * (size_t)(ACTS_MOST - 1 - i));
        simpler->act[ACTS_MOST - 1] = (act){ 0 };
    } else if (i < ACTS_MOST + SETTINGS) {
        *setting(simpler, i - ACTS_MOST) = 0;
    } else if (i < ACTS_MOST + SETTINGS + ACTS_MOST * ACT_ARGS) {
        int at = i - ACTS_MOST - SETTINGS;
        simpler->act[at / ACT_ARGS].arg[at % ACT_ARGS] = 0;
    } else {
        return false;
    }
    settle(simpler);
    return true;
}

void acts_count(const acts_job *job)
{
    static uint64_t ran[ACTS], came[ACTS], scaled, skipped;
    for (int i = 0; job && i < ACTS_MOST; i++) {
        came[job->p.act[i].kind]++;
        ran[job->p.act[i].kind] += job->want[i].run;
        scaled += job->want[i].run && job->want[i].scaled && job->p.act[i].kind == ACT_STEP;
        skipped += job->want[i].run && job->want[i].skipped;
    }
    for (int i = 1; !job && i < ACTS; i++)
        printf("  %s %llu of %llu", name_of[i], (unsigned long long)ran[i],
               (unsigned long long)came[i]);
    if (!job)
        printf("  steps by scalers %llu, skipped %llu\n", (unsigned long long)scaled,
               (unsigned long long)skipped);
}

/* ---- running --------------------------------------------------------------------------------- */

static bool between_changes_nothing(const act *a)
{
    return a->kind == ACT_CLIP ? a->arg[3] : a->arg[4] >= BETWEEN_EVALUATE;
}

/* The acts that change nothing are taken, and left out: the same bits. */
static bool same_without(acts_job *job)
{
    bool any = false;
    for (int i = 0; i < ACTS_MOST; i++)
        any |= job->want[i].run &&
               (acts_changes_nothing(&job->p.act[i]) || between_changes_nothing(&job->p.act[i]));
    if (!any)
        return true;
    job->without = true;
    if (kn_spawn_threads(job->p.ranks + 1, acts_ranks, job) != 0)
        return false;
    for (int r = 0; r <= job->p.ranks; r++)
        if (memcmp(&job->end[0][r], &job->end[1][r], sizeof job->end[0][r]) != 0) {
            snprintf(job->where, sizeof job->where,
                     "rank %d: acts that change nothing changed bits", r);
            return false;
        }
    return true;
}

static bool try(const acts_program *p, acts_job *job)
{
    memset(job, 0, sizeof *job);
    job->p = *p;
    return kn_spawn_threads(1, acts_plain, job) == 0 &&
           kn_spawn_threads(p->ranks + 1, acts_ranks, job) == 0 && same_without(job);
}

static void report(acts_program p, acts_job *job)
{
    char text[2048], where[sizeof job->where];
    acts_program next;
    snprintf(where, sizeof where, "%s", job->where);
    for (int i = 0; acts_simpler(&p, i, &next);)
        if (memcmp(&next, &p, sizeof p) != 0 && !try(&next, job)) {
            p = next;
            snprintf(where, sizeof where, "%s", job->where);
            i = 0;
        } else {
            i++;
        }
    fprintf(stderr, "shrunk: %s\nrepeat: KN_ACTS='%s' tests/test_fsdp acts.one_program\n", where,
            acts_text(&p, text, sizeof text));
}

void acts_check(uint64_t seed, uint64_t count)
{
    acts_job *job = malloc(sizeof *job);
    const char *on = getenv("KN_RANDOM_GO_ON");
    uint64_t different = 0;
    for (uint64_t i = 0; i < count && (on || !different); i++) {
        acts_program p = acts_draw(seed + i);
        if (!try(&p, job)) {
            fprintf(stderr, "seed %llu: %s\n", (unsigned long long)(seed + i), job->where);
            different++;
            report(p, job);
        }
        acts_count(job);
    }
    acts_count(NULL);
    free(job);
    KN_CHECK(different == 0, "%llu programs of acts differ", (unsigned long long)different);
}

bool acts_check_program(const char *text)
{
    acts_job *job = malloc(sizeof *job);
    acts_program p;
    KN_CHECK(acts_parse(text, &p), "'%s'", text);
    bool ok = try(&p, job);
    int idle = 0; /* the first act that makes no sense where it comes */
    while (idle < ACTS_MOST && (!p.act[idle].kind || job->want[idle].run))
        idle++;
    char where[sizeof job->where];
    snprintf(where, sizeof where, "%s", job->where);
    free(job);
    KN_CHECK(ok, "%s: %s", where, text);
    return idle == ACTS_MOST;
}
