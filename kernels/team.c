/* kernels/team.c: the threads that share a kernel's work (team.h).
 *
 * A round is one call of kn_each_part. claim[i] holds the last round in which part i was claimed,
 * so that the thread that raises it to the current round owns the part. A thread that is late sees
 * every part of its round claimed, and can't take one of a later round by mistake: claims only
 * grow, and a round stays until its parts are done. */
#include "kernels/trace.h"
#include "kernels/team.h"
#include "kernels/kernels_internal.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef KN_HAVE_X86
#include <immintrin.h>
#endif

#define SPIN_SHARED 5e-6 /* seconds of spinning before a sleep if others want the cores */
#define SPIN_ALONE  2e-3 /* if none do: no longer than a program's pause between two kernels */
#define LOOK        1e-4 /* between looks whether others do */
#define MEMORY      0.1  /* for so long the result holds */

typedef struct claim {
    _Alignas(64) _Atomic uint32_t round;
} claim;

typedef struct member {
    struct kn_team *team;
    pthread_t thread;
    int number;       /* from 1 on; 0 is the caller */
    int64_t switches; /* how often it had lost its core when it looked last */
    double looked;
} member;

typedef struct kn_team {
    int size;    /* threads, the caller included */
    int started; /* of them */
    _Atomic bool ending;
    kn_context *context;
    kn_part_fn fn; /* of the round */
    const void *ctx;
    _Alignas(64) _Atomic uint32_t round; /* futex word of threads without work */
    _Alignas(64) _Atomic uint32_t left;  /* parts that aren't done; futex word of the caller */
    _Alignas(64) _Atomic int sleepers;   /* threads that sleep on round */
    _Atomic bool caller_sleeps;
    _Atomic double shared_until; /* others want the cores, as far as is known */
    claim *claim;                /* [size] */
    member member[];
} kn_team;

static _Thread_local kn_team *team;
static _Thread_local bool inside; /* of a part */

/* ---- waiting --------------------------------------------------------------------------------- */

static void futex(_Atomic uint32_t *word, int operation, uint32_t value)
{
    syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static void pause_core(void)
{
#ifdef KN_HAVE_X86
    _mm_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* How often the system took this thread's core away for another thread. */
static int64_t lost_core(void)
{
    struct rusage use;
    return getrusage(RUSAGE_THREAD, &use) == 0 ? use.ru_nivcsw : 0;
}

/* Notices, now and then, whether others want the cores. */
static void look(member *m, double now)
{
    if (now < m->looked + LOOK)
        return;
    const int64_t switches = lost_core();
    if (switches != m->switches && m->looked > 0)
        atomic_store_explicit(&m->team->shared_until, now + MEMORY, memory_order_relaxed);
    m->switches = switches;
    m->looked = now;
}

/* Spins until *word isn't seen any more; false if that takes too long to spin. */
static bool changes(member *m, const _Atomic uint32_t *word, uint32_t seen)
{
    const double begin = kn_now();
    for (double now = begin;; now = kn_now()) {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != seen)
                return true;
            pause_core();
        }
        look(m, now);
        const bool shared =
            now < atomic_load_explicit(&m->team->shared_until, memory_order_relaxed);
        if (now - begin > (shared ? SPIN_SHARED : SPIN_ALONE))
            return false;
    }
}

/* ---- a round --------------------------------------------------------------------------------- */

static bool take(kn_team *t, int part, uint32_t round)
{
    uint32_t was = atomic_load_explicit(&t->claim[part].round, memory_order_relaxed);
    return (int32_t)(was - round) < 0 &&
           atomic_compare_exchange_strong_explicit(&t->claim[part].round, &was, round,
                                                   memory_order_acquire, memory_order_relaxed);
}

/* The parts that are left, a thread's own first: its results lie in its cache. */
static void work(kn_team *t, int number, uint32_t round)
{
    for (int i = 0; i < t->size; i++) {
        const int part = (number + i) % t->size;
        if (!take(t, part, round))
            continue;
        inside = true;
        t->fn(t->ctx, part);
        inside = false;
        /* only the caller resets caller_sleeps: by now it may sleep in the next round */
        if (atomic_fetch_sub(&t->left, 1) == 1 && atomic_load(&t->caller_sleeps))
            futex(&t->left, FUTEX_WAKE, 1);
    }
}

static void *member_main(void *arg)
{
    member *m = arg;
    kn_team *t = m->team;
    kn_context_adopt(t->context);
    for (uint32_t seen = 0;;) {
        if (!changes(m, &t->round, seen)) {
            atomic_fetch_add(&t->sleepers, 1);
            while (atomic_load(&t->round) == seen)
                futex(&t->round, FUTEX_WAIT, seen);
            atomic_fetch_sub(&t->sleepers, 1);
        }
        seen = atomic_load(&t->round);
        if (atomic_load(&t->ending))
            return NULL;
        work(t, m->number, seen);
    }
}

static void await_parts(kn_team *t)
{
    for (uint32_t left; (left = atomic_load(&t->left)) != 0;) {
        if (changes(&t->member[0], &t->left, left))
            continue;
        atomic_store(&t->caller_sleeps, true);
        if (atomic_load(&t->left) == left)
            futex(&t->left, FUTEX_WAIT, left);
        atomic_store(&t->caller_sleeps, false);
    }
}

static void begin_round(kn_team *t, int parts)
{
    const uint32_t round = atomic_load_explicit(&t->round, memory_order_relaxed) + 1;
    for (int i = 0; i < t->size; i++) /* those that there aren't count as claimed */
        if (i >= parts)
            atomic_store_explicit(&t->claim[i].round, round, memory_order_relaxed);
    atomic_store(&t->left, (uint32_t)parts);
    atomic_store(&t->round, round);
    if (atomic_load(&t->sleepers) > 0)
        futex(&t->round, FUTEX_WAKE, parts > 0 ? (uint32_t)parts - 1 : INT_MAX);
}

/* ---- a team's life --------------------------------------------------------------------------- */

/* Starts the threads with all signals blocked: Ctrl-C belongs to the main thread. */
static void start(kn_team *t)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (int i = 0; i < t->size; i++)
        t->member[i] = (member){ .team = t, .number = i };
    for (t->started = 1; t->started < t->size; t->started++) {
        member *m = &t->member[t->started];
        if (pthread_create(&m->thread, NULL, member_main, m) != 0)
            break; /* the others do its parts */
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static kn_team *team_make(kn_context *c, int size)
{
    const size_t n = (size_t)size, bytes = sizeof(kn_team) + n * sizeof(member);
    kn_team *t = aligned_alloc(64, (bytes + 63) / 64 * 64);
    claim *claims = aligned_alloc(64, n * sizeof *claims);
    if (!t || !claims) {
        free(t);
        free(claims);
        return NULL;
    }
    memset(t, 0, bytes);
    memset(claims, 0, n * sizeof *claims);
    t->size = size;
    t->context = c;
    t->claim = claims;
    start(t);
    return t;
}

static void drop(void)
{
    if (team)
        free(team->claim);
    free(team);
    team = NULL;
}

void kn_team_end(void)
{
    if (!team)
        return;
    atomic_store(&team->ending, true);
    begin_round(team, 0);
    for (int i = 1; i < team->started; i++)
        pthread_join(team->member[i].thread, NULL);
    drop();
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, drop); /* the child has none of the threads */
}

/* This thread's team with room for so many parts; NULL if there is no memory. */
static kn_team *team_of(int64_t parts)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (team && team->size >= parts)
        return team;
    pthread_once(&once, watch_forks);
    kn_team_end();
    const int size = kn_threads() > parts ? kn_threads() : (int)parts;
    team = team_make(kn_context_get(), size);
    return team;
}

/* ---- the entries ----------------------------------------------------------------------------- */

void kn_each_part(int64_t parts, kn_part_fn fn, const void *ctx)
{
    const bool alone = parts <= 1 || inside || kn_context_is_worker() || parts > 4096;
    kn_team *t = alone ? NULL : team_of(parts);
    if (!t) {
        for (int64_t i = 0; i < parts; i++)
            fn(ctx, i);
        return;
    }
    t->fn = fn;
    t->ctx = ctx;
    begin_round(t, (int)parts);
    work(t, 0, atomic_load_explicit(&t->round, memory_order_relaxed));
    await_parts(t);
}

int64_t kn_claim(kn_claims *c, int64_t part)
{
    const int64_t shares = c->parts < KN_CLAIM_PARTS ? c->parts : KN_CLAIM_PARTS;
    for (int64_t i = 0; i < shares; i++) {
        const int64_t share = (part + i) % shares, each = c->n / shares, more = c->n % shares;
        const int64_t size = each + (share < more);
        if (atomic_load_explicit(&c->taken[share], memory_order_relaxed) >= size)
            continue;
        const int64_t at = atomic_fetch_add_explicit(&c->taken[share], 1, memory_order_relaxed);
        if (at < size)
            return share * each + (share < more ? share : more) + at;
    }
    return -1;
}

enum { PIECES = 4 }; /* of each part of a range */

typedef struct ranges {
    int64_t n;
    kn_range_fn fn;
    const void *ctx;
    kn_claims *claims;
} ranges;

static void some_ranges(const void *ctx, int64_t part)
{
    const ranges *r = ctx;
    const int64_t pieces = r->claims->n, each = r->n / pieces, more = r->n % pieces;
    for (int64_t i; (i = kn_claim(r->claims, part)) >= 0;) { /* n times i may overflow */
        const int64_t begin = i * each + (i < more ? i : more);
        r->fn(r->ctx, begin, begin + each + (i < more));
    }
}

void kn_each_range(int64_t parts, int64_t n, kn_range_fn fn, const void *ctx)
{
    if (n <= 0)
        return;
    if (parts <= 1) {
        fn(ctx, 0, n);
        return;
    }
    kn_claims claims = { .n = parts < n / PIECES ? parts * PIECES : n, .parts = parts };
    kn_each_part(parts, some_ranges, &(ranges){ n, fn, ctx, &claims });
}

/* Below 64 Ki operations or bytes a round costs more than it saves; above, 32 Ki a thread. */
int kn_threads_for(int64_t work_size)
{
    const int n = inside ? 1 : kn_threads();
    if (n <= 1 || work_size < 64 * 1024)
        return 1;
    return work_size / (32 * 1024) < n ? (int)(work_size / (32 * 1024)) : n;
}

int kn_team_default_size(void)
{
    const char *wanted = getenv("OMP_NUM_THREADS");
    const long given =
        wanted ? strtol(wanted, NULL, 10) : 0; /* a list, too: the outermost counts */
    if (given > 0)
        return given < 4096 ? (int)given : 4096;
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof mask, &mask) == 0 && CPU_COUNT(&mask) > 0)
        return CPU_COUNT(&mask);
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}
