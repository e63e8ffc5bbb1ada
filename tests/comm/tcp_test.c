/* tests/comm/tcp_test.c: ranks on several hosts without MPI, which meet over TCP. The hosts are not
 * real: each rank is configured as alone on its host, and rank 0's address is one of this
 * machine's. */
#include "tests/comm/program_test.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

/* A port of its own for each job. */
static int port(void)
{
    return kn_test_ports(20);
}

/* Starts rank r of n, each a host, running words. */
static void start_rank(result *r, int rank, int n, int at, const char *words)
{
    char line[400];
    memset(r, 0, sizeof *r);
    snprintf(line, sizeof line,
             "RANK=%d WORLD_SIZE=%d LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.2 "
             "MASTER_PORT=%d %s",
             rank, n, at, words);
    start(r, line);
}

KN_TEST(tcp, ranks_of_several_hosts_compute_the_same_bits)
{
    static result r[4];
    adopt_orphans();
    for (int n = 2; n <= 4; n++) {
        int at = port();
        for (int k = n - 1; k >= 0; k--) /* rank 0 last */
            start_rank(&r[k], k, n, at, "step");
        check_step(r, n, "several hosts");
    }
    check_no_orphans();
}

/* Messages of several buffers that pass through the sockets a bit at a time. */
KN_TEST(tcp, buffers_together_have_the_bits_of_each_alone)
{
    static result r[3];
    int at = port();
    for (int k = 2; k >= 0; k--)
        start_rank(&r[k], k, 3, at, "pieces");
    for (int k = 0; k < 3; k++) {
        finish(&r[k]);
        KN_CHECK(r[k].status == 0 && strstr(r[k].text, "good"), "rank %d: %s%s", k, r[k].text,
                 r[k].errors);
    }
}

KN_TEST(tcp, ranks_meet_where_they_are_told)
{
    static result r[3];
    char place[128], path[64];
    snprintf(place, sizeof place, "tcp:localhost:%d", port());
    for (int k = 0; k < 2; k++)
        start_meeting(&r[k], k, 2, place, "step");
    check_step(r, 2, "a port");
    /* a file left by a crashed job */
    snprintf(path, sizeof path, "/tmp/knap-meet-%d", (int)getpid());
    snprintf(place, sizeof place, "file:%s", path);
    FILE *f = fopen(path, "w");
    KN_CHECK(f && fprintf(f, "knap t1 0123456789abcdef\n%d\n127.0.0.1\n", port()) > 0 &&
             !fclose(f));
    for (int k = 2; k >= 0; k--)
        start_meeting(&r[k], k, 3, place, "step");
    check_step(r, 3, "a file");
    KN_CHECK(access(path, F_OK) != 0, "the file is gone");
}

/* A rank waits at its end until the others have its last word, and no longer than some seconds. */
KN_TEST(tcp, no_rank_can_keep_another_from_its_end)
{
    static const char *const how[] = { "detain talking", "detain deaf" };
    static result r[2];
    for (int i = 0; i < 2; i++) {
        int at = port();
        for (int k = 0; k < 2; k++)
            start_rank(&r[k], k, 2, at, how[i]);
        finish(&r[0]);
        kill(r[1].pid, SIGKILL);
        finish(&r[1]);
        KN_CHECK(r[0].status == 0 && !r[0].errors[0], "%s: %s", how[i], r[0].errors);
    }
}

/* The word goes out when the error comes to stand: the failed rank makes no other call. */
KN_TEST(tcp, a_rank_that_fails_and_stops_has_told_the_others)
{
    static result r[3];
    int at = port();
    for (int k = 2; k >= 0; k--)
        start_rank(&r[k], k, 3, at, "RANK_TIMEOUT=30 halt 1");
    for (int k = 0; k < 3; k += 2) {
        finish(&r[k]);
        KN_CHECK(strstr(r[k].errors, "ends: rank 1 failed: data: file is empty\n"),
                 "rank %d: status %d, %s", k, r[k].status, r[k].errors);
    }
    kill(r[1].pid, SIGKILL);
    finish(&r[1]);
}

KN_TEST(tcp, bad_places)
{
    static const char *const places[] = {
        "tcp:",          "tcp:host",   "tcp:host:0",         "tcp:host:99999",   "tcp::5",
        "file:relative", "udp:host:5", "tcp:localhost:5abc", "tcp:localhost:+5", "tcp:localhost:5.5"
    };
    static result r;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        start_meeting(&r, 1, 2, places[i], "ok");
        finish(&r);
        KN_CHECK(r.status == 1 && strstr(r.errors, "must be tcp:HOST:PORT"), "%s: %s", places[i],
                 r.errors);
    }
    start_meeting(&r, 0, 2, "file:/no/such/folder/x", "ok");
    finish(&r);
    KN_CHECK(r.status == 1 && strstr(r.errors, "cannot write /no/such/folder/x"), "%s", r.errors);
}

/* ---- who doesn't belong there ---------------------------------------------------------------- */

static int knock(int at)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)at) };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    inet_pton(AF_INET, "127.0.0.2", &a.sin_addr);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
        return fd;
    close(fd);
    return -1;
}

/* While rank 0 waits, foreign processes connect: more silent ones than it listens to, some that
 * send garbage or stop in the middle, a rank of another job. None delays it, and none becomes a
 * rank. */
KN_TEST(tcp, strangers_are_turned_away)
{
    enum { STRANGERS = 300 };
    static result r[3];
    static int fd[STRANGERS];
    int at = port(), open = 0;
    char nonsense[400];
    struct rlimit files;
    KN_CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
    files.rlim_cur = files.rlim_max < 4 * STRANGERS ? files.rlim_max : 4 * STRANGERS;
    KN_CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
    memset(nonsense, 0xff, sizeof nonsense);
    start_rank(&r[0], 0, 3, at, "step");
    while ((fd[0] = knock(at + 1)) < 0 && !has_ended(&r[0])) /* next to MASTER_PORT */
        usleep(10000);
    for (int i = 1; i < STRANGERS; i++) {
        fd[i] = knock(at + 1);
        if (fd[i] >= 0 && i % 3 == 1)
            send(fd[i], nonsense, i % 2 ? sizeof nonsense : 20, MSG_NOSIGNAL);
        if (fd[i] >= 0 && i % 5 == 0)
            send(fd[i], "knap t3", 8, MSG_NOSIGNAL); /* the beginning of a greeting */
        memcpy(nonsense, i % 7 ? "\xff\xff\xff\xff\xff\xff\xff" : "knap t3", 8);
        open += fd[i] >= 0;
    }
    KN_CHECK(open > 250, "%d", open);
    start_rank(&r[1], 1, 3, at, "step");
    start_rank(&r[2], 2, 3, at, "step");
    check_step(r, 3, "among strangers");
    for (int i = 0; i < STRANGERS; i++)
        if (fd[i] >= 0)
            close(fd[i]);
}

/* Another job on the same ports takes the next one; ranks of both find theirs. */
KN_TEST(tcp, two_jobs_with_one_port)
{
    static result a[2], b[2];
    int at = port();
    start_rank(&a[0], 0, 2, at, "TORCHELASTIC_RUN_ID=a ok");
    usleep(50000);
    start_rank(&b[0], 0, 2, at, "TORCHELASTIC_RUN_ID=b ok");
    start_rank(&b[1], 1, 2, at, "TORCHELASTIC_RUN_ID=b ok");
    for (int k = 0; k < 2; k++) {
        finish(&b[k]);
        KN_CHECK(b[k].status == 0 && strstr(b[k].text, "good"), "%s", b[k].errors);
    }
    start_rank(&a[1], 1, 2, at, "TORCHELASTIC_RUN_ID=a ok");
    for (int k = 0; k < 2; k++) {
        finish(&a[k]);
        KN_CHECK(a[k].status == 0 && strstr(a[k].text, "good"), "%s", a[k].errors);
    }
}

/* ---- failures -------------------------------------------------------------------------------- */

typedef char errors_of_three[3 * sizeof(((result *)0)->errors)];

/* Lines of ranks that don't only repeat another's error. */
static int first_lines(const char *all)
{
    return lines_with(all, "\n") - lines_with(all, " ends: ");
}

/* The errors of three hosts of which all but the one that stops, if there is one, must fail. */
static void finish_three(result *r, int stops, errors_of_three all)
{
    all[0] = 0;
    for (int k = 0; k < 3; k++) {
        if (k == stops)
            continue;
        finish(&r[k]);
        KN_CHECK(r[k].status != 0, "rank %d ended well", k);
        KN_CHECK(r[k].status != 1 || lines_with(r[k].errors, "\n") == 1,
                 "rank %d doesn't say why it ends: %s", k, r[k].errors);
        strcat(all, r[k].errors);
    }
    if (stops >= 0) { /* it would notice when continued */
        kill(r[stops].pid, SIGKILL);
        finish(&r[stops]);
    }
}

/* One of three hosts fails at a meeting of a step: one line names it, and not after a timeout. */
static void goes_wrong(const char *how, int nth, const char *says)
{
    static result r[3];
    char words[100], name[32];
    errors_of_three all;
    int who = nth % 3, at = port();
    snprintf(words, sizeof words, "step %s %d %d", how, who, nth);
    for (int k = 0; k < 3; k++)
        start_rank(&r[k], k, 3, at, words);
    finish_three(r, -1, all);
    snprintf(name, sizeof name, "rank %d", who);
    KN_CHECK(first_lines(all) == 1 && strstr(all, name) && strstr(all, says), "%s at %d: %s", how,
             nth, all);
}

/* Three ranks, one of which stops in what is said to them: when the others' timeout has passed, one
 * line names it. On one host if local. */
static void is_named(int stops, const char *what, bool local)
{
    static result r[3];
    char words[100], line[200], name[40];
    errors_of_three all;
    for (double seconds = 1.5;; seconds *= 2) {
        int at = port();
        snprintf(words, sizeof words, "RANK_TIMEOUT=%g %s", seconds, what);
        for (int k = 0; k < 3; k++) {
            if (!local) {
                start_rank(&r[k], k, 3, at, words);
                continue;
            }
            memset(&r[k], 0, sizeof r[k]);
            snprintf(line, sizeof line,
                     "RANK=%d WORLD_SIZE=3 LOCAL_RANK=%d LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 "
                     "MASTER_PORT=%d %s",
                     k, k, at, words);
            start(&r[k], line);
        }
        finish_three(r, stops, all);
        snprintf(name, sizeof name, "waited %g s for rank %d in ", seconds, stops);
        KN_CHECK(first_lines(all) == 1, "%s: %s", words, all);
        if (strstr(all, name))
            return;
        KN_CHECK(ran_out_of(all, seconds), "%s: %s", words, all);
    }
}

KN_TEST(tcp, a_rank_that_goes_wrong_is_named)
{
    adopt_orphans();
    for (int nth = 1; nth < 36; nth += 11) {
        goes_wrong("crash", nth, " died without an error message");
        goes_wrong("exit", nth + 1, " died without an error message");
        goes_wrong("error", nth + 2, "a failure asked for");
    }
    for (int nth = 2; nth < 36; nth += 5) {
        char step[40];
        snprintf(step, sizeof step, "step stop %d %d", nth % 3, nth);
        is_named(nth % 3, step, false);
    }
    goes_wrong("memory", 7, "out of memory");
    check_no_orphans();
}

/* Rank 0 waits for a rank that itself waits, less long, for a stopped rank: the error names the
 * stopped one. */
KN_TEST(tcp, who_waits_itself_is_not_named)
{
    static const int order[2][2] = { { 1, 2 }, { 2, 1 } };
    adopt_orphans();
    for (int i = 0; i < 4; i++) {
        char chain[40];
        snprintf(chain, sizeof chain, "chain %d %d", order[i % 2][0], order[i % 2][1]);
        is_named(order[i % 2][0], chain, i >= 2); /* the same over shared memory */
    }
    check_no_orphans();
}

KN_TEST(tcp, ranks_out_of_step)
{
    static result r[3];
    char all[3 * sizeof r[0].errors] = "";
    int at = port();
    for (int k = 0; k < 3; k++)
        start_rank(&r[k], k, 3, at, "diverge 1");
    for (int k = 0; k < 3; k++) {
        finish(&r[k]);
        strcat(all, r[k].errors);
    }
    KN_CHECK(strstr(all, "collectives don't match") && strstr(all, "(block.0)") &&
                 strstr(all, "(block.1)") && first_lines(all) == 1,
             "%s", all);
}
