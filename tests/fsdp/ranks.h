/* tests/fsdp/ranks.h: cases that ranks run. On a rank KN_CHECK ends that rank alone; the tensors
 * that it makes lie in a scope, and no error may stand at its end.
 *
 *   RANK_TEST(step, of_a_part, .threads = "124") { KN_CHECK(kn_comm_size(world) > 0); }
 *
 * .threads, .processes, .hosts (processes that speak over TCP): numbers of ranks. .rows (by ROWS)
 * or .cases: it runs with each row of a table, or each number from 0 on, which arg points to. */
#ifndef KNAP_TESTS_FSDP_RANKS_H
#define KNAP_TESTS_FSDP_RANKS_H

#include "tests/comm/comm_test.h"
#include "tests/owned.h"

typedef void (*rank_body)(kn_comm *world, void *arg);
/* Status of a rank (kn_test.c). */
int kn_test_rank(rank_body body, kn_comm *world, void *arg);

typedef struct rank_runs {
    const char *threads, *processes, *hosts;
    const void *rows;
    size_t size, count; /* of the rows */
    int cases;
    void (*by)(rank_body body); /* runs it */
} rank_runs;
#define ROWS(table)                                                                                \
    .rows = (table), .size = sizeof *(table), .count = sizeof(table) / sizeof *(table)

typedef struct rank_job {
    rank_body body;
    void *arg;
} rank_job;

static inline int rank_main(kn_comm *world, void *arg)
{
    const rank_job *j = arg;
    return kn_test_rank(j->body, world, j->arg);
}

/* How many of n ranks failed. */
static inline int spawn_threads(int n, rank_body body, void *arg)
{
    return kn_spawn_threads(n, rank_main, &(rank_job){ body, arg });
}

static inline int spawn_processes(int n, rank_body body, void *arg)
{
    return spawn(n, rank_main, &(rank_job){ body, arg });
}

static inline int spawn_over_tcp(int n, rank_body body, void *arg)
{
    return spawn_hosts(n, rank_main, &(rank_job){ body, arg });
}

typedef int (*rank_spawn)(int n, rank_body body, void *arg);
static int rank_case; /* another number for each case of a file */

/* On each number of ranks, a digit. */
static inline void on_each(const char *ranks, rank_spawn run, rank_body body, void *arg, int row)
{
    for (; ranks && *ranks; ranks++) {
        const int n = *ranks - '0', failed = run(n, body, arg);
        KN_CHECK(failed == 0, "row %d: %d of %d ranks failed", row, failed, n);
        KN_CHECK_OK();
    }
}

static inline void by_threads(const char *ranks, rank_body body, void *arg)
{
    on_each(ranks, spawn_threads, body, arg, 0);
}

static inline void by_processes(const char *ranks, rank_body body, void *arg)
{
    on_each(ranks, spawn_processes, body, arg, 0);
}

static inline void by_both(const char *ranks, rank_body body, void *arg)
{
    by_processes(ranks, body, arg);
    by_threads(ranks, body, arg);
}

static inline void rank_test(rank_body body, int line, rank_runs r)
{
    rank_case = line;
    if (r.by)
        r.by(body);
    const size_t n = r.by ? 0 : r.rows ? r.count : (size_t)(r.cases > 0 ? r.cases : 1);
    for (size_t i = 0; i < n; i++) {
        int number = (int)i;
        void *arg = r.rows ? (char *)(uintptr_t)r.rows + i * r.size : (void *)&number;
        on_each(r.threads, spawn_threads, body, arg, number);
        on_each(r.processes, spawn_processes, body, arg, number);
        on_each(r.hosts, spawn_over_tcp, body, arg, number);
    }
}

#define RANK_TEST(suite, name, ...)                                                                \
    static void suite##_##name##_on(kn_comm *world, void *arg);                                    \
    KN_TEST(suite, name)                                                                           \
    {                                                                                              \
        rank_test(suite##_##name##_on, __LINE__, (rank_runs){ __VA_ARGS__ });                      \
    }                                                                                              \
    static void suite##_##name##_on(kn_comm *world, void *arg)

#endif
