/* tests/fsdp/random_check.c: runs random programs, compares, shrinks differing ones. */
#include "tests/fsdp/random.h"
#include <sys/mman.h>

typedef struct outcomes {
    random_outcome plain, rank[RANDOM_RANKS];
} outcomes;

static bool same_float(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

/* Describes the first difference of b from a in step; false if there is one. */
static bool same_step(const random_program *p, const random_outcome *a, const random_outcome *b,
                      int step, int rank, char *where, size_t size)
{
    int ranks = random_number(p, O_RANKS), micros = ranks * random_number(p, O_ROUNDS);
    for (int m = rank; m < micros; m += ranks)
        if (!same_float(a->loss[step][m], b->loss[step][m])) {
            snprintf(where, size, "step %d: the loss of micro-batch %d is %.9g, not %.9g", step, m,
                     (double)b->loss[step][m], (double)a->loss[step][m]);
            return false;
        }
    if (!same_float(a->norm[step], b->norm[step])) {
        snprintf(where, size, "step %d: the norm is %.9g, not %.9g", step, (double)b->norm[step],
                 (double)a->norm[step]);
        return false;
    }
    for (int i = 0; i < a->params; i++)
        for (int64_t k = a->begin[i]; k < a->begin[i + 1]; k++)
            if (!same_float(a->param[step][k], b->param[step][k])) {
                snprintf(where, size, "step %d: %s[%lld] is %.9g, not %.9g", step, a->name[i],
                         (long long)(k - a->begin[i]), (double)b->param[step][k],
                         (double)a->param[step][k]);
                return false;
            }
    return true;
}

/* After a failed pass several ranks refuse to continue; one rank alone refuses if the pass had
 * begun to add to gradients of earlier micro-batches. */
static bool may_refuse(const random_program *p, const random_outcome *o)
{
    bool later = p->event[0].kind && p->event[1].kind;
    for (int i = 0; i < RANDOM_EVENTS; i++)
        later |= p->event[i].kind >= EVENT_FAIL_FORWARD && p->event[i].round > 0;
    return random_fails(p) && (random_number(p, O_RANKS) > 1 ||
                               (later && strstr(o->refused, "a backward that failed")));
}

static bool same(const random_program *p, const outcomes *o, int rank, char *where, size_t size)
{
    const random_outcome *a = &o->plain, *b = &o->rank[rank];
    int steps = random_number(p, O_STEPS);
    bool diverged = strstr(a->refused, "aren't finite") &&
                    (strstr(b->refused, "aren't finite") || (*b->refused && may_refuse(p, b)));
    if (*a->refused && !diverged) {
        snprintf(where, size, "the reference failed: %s", a->refused);
        return false;
    }
    if (b->steps > a->steps || (b->steps < a->steps && !may_refuse(p, b))) {
        snprintf(where, size, "%d of %d steps: %s", b->steps, a->steps,
                 b->steps > a->steps ? "too many" : b->refused);
        return false;
    }
    if (b->steps < steps && !*b->refused) {
        snprintf(where, size, "%d of %d steps, without an error", b->steps, steps);
        return false;
    }
    if (b->steps > 0 && (a->params != b->params || a->begin[a->params] != b->begin[b->params])) {
        snprintf(where, size, "%d parameters, not %d", b->params, a->params);
        return false;
    }
    for (int i = 0; i < b->steps; i++)
        if (!same_step(p, a, b, i, rank, where, size))
            return false;
    return true;
}

/* Trains p both ways. False with a description if they differ. */
static bool try(const random_program *p, outcomes *o, char *where, size_t size)
{
    random_job plain = { p, &o->plain }, ranks = { p, o->rank };
    int n = random_number(p, O_RANKS);
    bool threads = p->option[O_THREADS] || THREADS_ONLY;
    memset(o, 0, sizeof *o);
    snprintf(where, size, "a process died");
    int failed = THREADS_ONLY ? kn_spawn_threads(1, random_reference, &plain)
                              : kn_spawn(1, random_reference, &plain);
    if (failed == 0)
        failed =
            threads ? kn_spawn_threads(n, random_ranks, &ranks) : kn_spawn(n, random_ranks, &ranks);
    KN_CHECK_OK();
    for (int r = 0; r < n && failed == 0; r++)
        if (!same(p, o, r, where, size))
            return false;
    return failed == 0;
}

/* The simplest program near p that still differs. */
static random_program shrink(random_program p, outcomes *o, char *where, size_t size)
{
    random_program next;
    char text[2048];
    int tries = 0;
    for (int i = 0; tries < 600 && random_simpler(&p, i, &next); tries++, i++)
        if (!try(&next, o, text, sizeof text)) {
            p = next;
            snprintf(where, size, "%s", text);
            i = -1;
        }
    return p;
}

static void report(uint64_t seed, random_program p, outcomes *o, const char *where)
{
    char text[2048], less[2048];
    snprintf(less, sizeof less, "%s", where);
    fprintf(stderr, "seed %llu: %s\n  %s\n", (unsigned long long)seed, where,
            random_text(&p, text, sizeof text));
    const char *no = getenv("KN_RANDOM_SHRINK");
    if (!no || strcmp(no, "0") != 0) {
        p = shrink(p, o, less, sizeof less);
        fprintf(stderr, "shrunk: %s\n", less);
    }
    fprintf(stderr, "repeat: KN_RANDOM_PROGRAM='%s' tests/test_fsdp random.one_program\n",
            random_text(&p, text, sizeof text));
}

static outcomes *shared(void)
{
    void *o =
        mmap(NULL, sizeof(outcomes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    KN_CHECK(o != MAP_FAILED, "mmap");
    return o;
}

/* KN_RANDOM_WITHOUT='loss_micro,=clear': skips programs whose text contains one of these. */
static bool left_out(const random_program *p)
{
    char text[2048], words[512], *save = NULL;
    const char *without = getenv("KN_RANDOM_WITHOUT");
    snprintf(words, sizeof words, "%s", without ? without : "");
    random_text(p, text, sizeof text);
    for (char *w = strtok_r(words, ",", &save); w; w = strtok_r(NULL, ",", &save))
        if (strstr(text, w))
            return true;
    return false;
}

void random_check(uint64_t seed, uint64_t count)
{
    outcomes *o = shared();
    uint64_t refused = 0, failing = 0, different = 0;
    const char *on = getenv("KN_RANDOM_GO_ON");
    for (uint64_t i = 0; i < count; i++) {
        char where[2048];
        random_program p = random_draw(seed + i);
        if (left_out(&p))
            continue;
        failing += random_fails(&p);
        if (!try(&p, o, where, sizeof where)) {
            report(seed + i, p, o, where);
            different++;
            if (!on)
                break;
        }
        refused += *o->rank[0].refused != 0;
    }
    munmap(o, sizeof *o);
    printf(
        "random programs %llu to %llu: %llu with a failing pass, %llu refused to go on after it\n",
        (unsigned long long)seed, (unsigned long long)(seed + count - 1),
        (unsigned long long)failing, (unsigned long long)refused);
    KN_CHECK(different == 0, "%llu random programs differ", (unsigned long long)different);
}

void random_check_program(const char *text)
{
    random_program p;
    char where[2048];
    outcomes *o = shared();
    KN_CHECK(random_parse(text, &p), "KN_RANDOM_PROGRAM");
    bool ok = try(&p, o, where, sizeof where);
    munmap(o, sizeof *o);
    KN_CHECK(ok, "%s: %s", where, random_text(&p, (char[2048]){ 0 }, 2048));
}
