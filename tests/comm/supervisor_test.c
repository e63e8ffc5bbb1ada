/* tests/comm/supervisor_test.c: programs started with --ranks (rank_program.c): their output, their
 * end, and that nothing is left behind. */
#include "comm/local/local.h"
#include "tests/comm/program_test.h"

KN_TEST(supervisor, runs_ranks)
{
    adopt_orphans();
    for (int n = 1; n <= 4; n++) {
        char line[64], want[64];
        snprintf(line, sizeof line, n % 2 ? "ok --ranks %d" : "--ranks=%d ok", n);
        result r = run(line);
        KN_CHECK(r.status == 0, "%d: %s%s", r.status, r.text, r.errors);
        KN_CHECK(lines_with(r.text, "good") == n, "%s", r.text);
        for (int k = 0; k < n; k++) {
            snprintf(want, sizeof want, "rank %d of %d", k, n);
            KN_CHECK(lines_with(r.text, want) == 1, "%s", r.text);
        }
        KN_CHECK(r.errors[0] == 0, "%s", r.errors);
    }
    result r = run("KNAP_RANKS=3 ok --threads 2");
    KN_CHECK(r.status == 0 && lines_with(r.text, "of 3 threads 2 good") == 3, "%s%s", r.text,
             r.errors);
    check_no_orphans();
}

KN_TEST(supervisor, removes_its_options)
{
    result r = run("args --ranks 2 a --threads 1 --rank 3 -- --ranks 4");
    KN_CHECK(r.status == 0 && strcmp(r.text, "[args][a][--rank][3][--][--ranks][4]") == 0, "%s %s",
             r.text, r.errors);
}

/* Where ranks have more threads than cores, those of OpenMP sleep while they wait. */
KN_TEST(supervisor, says_how_openmp_waits)
{
    const int threads[] = { 1, 1 + kn_local_share_cores(1, 0).threads };
    for (int i = 0; i < 2; i++) {
        char line[128], want[32];
        snprintf(line, sizeof line,
                 "OMP_WAIT_POLICY=active environment OMP_NUM_THREADS OMP_WAIT_POLICY --ranks 2 "
                 "--threads %d",
                 threads[i]);
        snprintf(want, sizeof want, "[%d][%s]", threads[i],
                 kn_local_share_cores(2, threads[i]).enough ? "active" : "passive");
        result r = run(line);
        KN_CHECK(r.status == 0 && strcmp(r.text, want) == 0, "%s, not %s %s", r.text, want,
                 r.errors);
    }
}

/* A program that a rank of another job starts inherits what was said of that rank. */
KN_TEST(supervisor, a_job_inside_a_job_counts_its_own_ranks)
{
    result r = run("LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 machine --ranks 2");
    KN_CHECK(strstr(r.text, "2 ranks on the machine of rank 0") &&
                 strstr(r.text, "2 ranks on the machine of rank 1"),
             "%s%s", r.text, r.errors);
    r = run("LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 machine");
    KN_CHECK(strstr(r.text, "1 ranks on the machine of rank 0"), "%s%s", r.text, r.errors);
}

/* The checker's own handlers of these signals would stand before the library's. */
#define CRASH "ASAN_OPTIONS=handle_segv=0:handle_sigbus=0:handle_sigfpe=0:detect_leaks=0 crash "

/* A program that goes on after an error and crashes of it shows the error, once, and dies as it
 * would have. */
KN_TEST(supervisor, a_crash_shows_the_error_that_stands)
{
    static const struct {
        const char *how;
        int sig;
    } ends[] = {
        { "null", SIGSEGV }, { "divide", SIGFPE }, { "abort", SIGABRT }, { "bus", SIGBUS }
    };
    char line[160];
    for (int i = 0; i < 8; i++) {
        const bool two = i >= 4;
        snprintf(line, sizeof line, CRASH "%s %d --ranks %d", ends[i % 4].how, two, two + 1);
        result r = run(line);
        KN_CHECK(r.status == (two ? 128 : 1000) + ends[i % 4].sig, "%s: %d", line, r.status);
        KN_CHECK(lines_with(r.errors, "\n") == 1 &&
                     strstr(r.errors, two ? "knap: rank 1: data: file is empty"
                                          : "knap: data: file is empty") == r.errors,
                 "%s: %s", line, r.errors);
    }
    result r = run(CRASH "well 0");
    KN_CHECK(r.status == 1000 + SIGSEGV && !r.errors[0], "%d %s", r.status, r.errors);
    r = run(CRASH "own 0");
    KN_CHECK(r.status == SIGSEGV && strcmp(r.errors, "own\n") == 0, "%d %s", r.status, r.errors);
    r = run(CRASH "none 0");
    KN_CHECK(r.status == 1 && lines_with(r.errors, "\n") == 1, "%d %s", r.status, r.errors);
}

KN_TEST(supervisor, an_abort_at_the_first_error_shows_it)
{
    static const char *const lines[][2] = {
        { "KNAP_ABORT=1 crash none 0", "knap: data: file is empty" },
        { "KNAP_ABORT=1 ok --ranks 0", "knap: --ranks 0: must be" },
    };
    for (int i = 0; i < 2; i++) {
        result r = run(lines[i][0]);
        KN_CHECK(r.status == 1000 + SIGABRT, "%s: %d", lines[i][0], r.status);
        KN_CHECK(lines_with(r.errors, "\n") == 1 && strstr(r.errors, lines[i][1]) == r.errors,
                 "%s: %s", lines[i][0], r.errors);
    }
    result r = run("KNAP_ABORT=1 crash none 1 --ranks 2");
    KN_CHECK(lines_with(r.errors, "\n") == 1 && strstr(r.errors, "knap: rank 1: data: file"),
             "%d %s", r.status, r.errors);
}

KN_TEST(supervisor, bad_options)
{
    static const char *const lines[][2] = {
        { "ok --ranks 0", "--ranks 0: must be a number from 1 to 256" },
        { "ok --ranks abc", "--ranks abc: must be" },
        { "ok --ranks 2x", "--ranks 2x: must be" },
        { "ok --ranks -1", "--ranks -1: must be" },
        { "ok --ranks 1000", "--ranks 1000: must be" },
        { "ok --ranks 99999999999999999999", "must be" },
        { "ok --ranks=", "--ranks needs a number" },
        { "ok --ranks", "--ranks needs a number" },
        { "ok --threads 0", "--threads 0: must be" },
        { "ok --ranks 2 --ranks 3", "--ranks 3 contradicts the 2" },
        { "KNAP_RANKS=3 ok --ranks 2", "--ranks 2 contradicts KNAP_RANKS=3" },
        { "KNAP_RANKS=no ok", "KNAP_RANKS no: must be" },
        { "KNAP_RANK=0 KNAP_WORLD=2 KNAP_LOCAL_FD=0 ok",
          "KNAP_LOCAL_FD=0 is not the supervisor's" },
        { "KNAP_RANK=0 KNAP_WORLD=2 KNAP_LOCAL_FD=0 ok --ranks 3", "--ranks given to rank 0 of 2" },
    };
    check_refused_lines(lines, sizeof lines / sizeof *lines);
}

KN_TEST(supervisor, a_killed_rank_ends_all)
{
    adopt_orphans();
    result r = run("kill 2 --ranks 4");
    KN_CHECK(r.status == 137, "status %d", r.status);
    KN_CHECK(strcmp(r.errors, "knap: rank 2 was killed by signal 9 (Killed) after barrier (start) "
                              "in communicator world; the other ranks were ended\n") == 0,
             "%s", r.errors);
    r = run("deaf 0 --ranks 3");
    KN_CHECK(r.status == 137 && strstr(r.errors, "rank 0 was killed"), "%d %s", r.status, r.errors);
    check_no_orphans();
}

KN_TEST(supervisor, exit_status_is_the_first_failing_rank_s)
{
    adopt_orphans();
    result r = run("exit 1 7 --ranks 3");
    KN_CHECK(r.status == 7, "status %d", r.status);
    KN_CHECK(strcmp(r.errors, "knap: rank 1 exited with status 7 after barrier (start) in "
                              "communicator world; the other ranks were ended\n") == 0,
             "%s", r.errors);
    r = run("fail 1 --ranks 3"); /* the error once, by the rank that failed */
    KN_CHECK(r.status == 1, "status %d", r.status);
    KN_CHECK(strcmp(r.errors, "knap: rank 1: data: file is empty\n") == 0, "%s", r.errors);
    r = run("halt 1 --ranks 3"); /* the supervisor ends that rank, which is not the news */
    KN_CHECK(r.status == 1, "status %d", r.status);
    KN_CHECK(strcmp(r.errors, "knap: rank 1: data: file is empty\n") == 0, "%s", r.errors);
    check_no_orphans();
}

/* Starts two sleeping ranks and reads their process ids. */
static void start_sleepers(result *r, const char *line, pid_t pid[2])
{
    memset(r, 0, sizeof *r);
    start(r, line);
    while (lines_with(r->text, "\n") < 2) {
        size_t used = strlen(r->text);
        ssize_t n = read(r->out, r->text + used, sizeof r->text - 1 - used);
        KN_CHECK(n > 0, "%s", r->text);
    }
    KN_CHECK(sscanf(r->text, "%d %d", &pid[0], &pid[1]) == 2);
}

KN_TEST(supervisor, passes_signals_on)
{
    static result r;
    pid_t pid[2];
    adopt_orphans();
    start_sleepers(&r, "sleep --ranks 2", pid); /* ranks that exit on SIGTERM */
    kill(r.pid, SIGTERM);
    finish(&r);
    KN_CHECK(r.status == 0 && r.errors[0] == 0, "%d %s", r.status, r.errors);
    start_sleepers(&r, "hang --ranks 2", pid);
    kill(r.pid, SIGINT);
    finish(&r);
    KN_CHECK(r.status == 130 && strstr(r.errors, "knap: ended by signal 2 (Interrupt)"), "%d %s",
             r.status, r.errors);
    check_no_orphans();
}

/* timeout(1) signals its child and then its group, so the child gets two signals: one request. */
KN_TEST(supervisor, repeats_are_one_request)
{
    static result r;
    pid_t pid[2];
    adopt_orphans();
    for (int tries = 0; tries == 0 || (r.status == 137 && tries < 8); tries++) {
        /* on a busy machine they may come too far apart: a later signal ends the program */
        start_sleepers(&r, "linger 300 --ranks 2", pid);
        for (int i = 0; i < 3; i++) {
            kill(r.pid, SIGTERM);
            usleep(50000);
        }
        finish(&r);
    }
    KN_CHECK(r.status == 0 && r.errors[0] == 0, "%d %s", r.status, r.errors);
    start_sleepers(&r, "linger 100000000 --ranks 2", pid);
    do {
        kill(r.pid, SIGTERM);
        usleep(1200000);
    } while (!has_ended(&r));
    finish(&r);
    KN_CHECK(r.status == 137, "%d", r.status);
    check_no_orphans();
}

KN_TEST(supervisor, its_own_death_ends_the_ranks)
{
    static result r;
    pid_t pid[2];
    adopt_orphans();
    start_sleepers(&r, "sleep --ranks 2", pid); /* they ignore SIGTERM but not SIGKILL */
    kill(r.pid, SIGKILL);
    finish(&r);
    KN_CHECK(r.status == 1009, "%d", r.status);
    check_no_orphans();
}

KN_TEST(supervisor, a_rank_killed_from_outside)
{
    static result r;
    pid_t pid[2];
    adopt_orphans();
    start_sleepers(&r, "sleep --ranks 2", pid);
    kill(pid[0], SIGKILL);
    finish(&r);
    KN_CHECK(r.status == 137 && strstr(r.errors, "was killed by signal 9"), "%d %s", r.status,
             r.errors);
    check_no_orphans();
}

/* All ranks ended before the supervisor looks for the first time. */
KN_TEST(supervisor, watches_ranks_that_have_ended)
{
    enum { RANKS = 4 };
    size_t bytes;
    pid_t pid[RANKS];
    siginfo_t end;
    int status[RANKS], forwarded, before = dup(0);
    kn_local_head *head = kn_local_create(RANKS, (kn_local_cores){ 0 }, NULL, &bytes);
    KN_CHECK(head != NULL);
    close(before); /* the next one again */
    for (int r = 0; r < RANKS; r++) {
        pid[r] = fork();
        if (pid[r] == 0)
            _exit(0);
        KN_CHECK(pid[r] > 0 && waitid(P_PID, (id_t)pid[r], &end, WEXITED | WNOWAIT) == 0);
    }
    KN_CHECK(kn_local_watch(head, RANKS, pid, true, -1, status, &forwarded) == -1);
    for (int r = 0; r < RANKS; r++)
        KN_CHECK(status[r] == 0, "rank %d: %d", r, status[r]);
    kn_local_unmap(head, bytes);
    const int after = dup(0);
    KN_CHECK(after == before, "descriptors stay open: the next is %d, before it was %d", after,
             before);
    close(after);
}
