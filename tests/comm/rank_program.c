/* tests/comm/rank_program.c: a program of several ranks, for supervisor_test.c. Its first argument
 * selects the ranks' behaviour:    ok            gather once, print "rank R of N", end well   args
 * print the remaining arguments   environment   print the variables that they name   machine
 * print the number of ranks on a machine   kill R
 * rank R kills itself while the others wait in a collective   exit R S      rank R exits with
 * status S and prints nothing   fail R        rank R gets an error while the others wait   halt R
 * the same, and R stops   deaf R
 * rank R kills itself; the others ignore SIGTERM and never end by themselves   step [HOW R NTH]
 * run rank_step.c, print its result and number of meetings; at rank R's                 NTH meeting
 * it fails: HOW is exit, crash, stop, memory or error   chain R S     rank R stops itself; rank S
 * soon waits for it, the others for all   last N        rank 0 gives the others N bytes and ends at
 * once   pieces        collectives of several buffers, together and one by one   diverge R
 * rank R reduces where the others gather, in another communicator   sleep
 * print the process id and sleep, end well on SIGTERM   linger MS     the same, but the end takes
 * so many milliseconds after SIGTERM   crash HOW R
 * rank R goes on after an error and dies: HOW is null, divide, abort, bus, well (without an error),
 * own (by a handler of the program's), none (it ends)
 *   hang          print the process id and sleep
 *   detain HOW    over TCP rank 1 keeps rank 0, which ends: HOW is talking (it sends words for
 * ever), deaf (it reads none, and rank 0 has sent as many as there is room for)
 *
 * RANK_TIMEOUT in the environment is the timeout once the ranks have met, which takes long on a
 * busy machine. */
#include "comm/comm_internal.h"
#include "comm/messages/tcp.h"
#include "tests/comm/pieces.h"
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The handler writes a byte into a pipe, so a signal that arrives early or on any thread isn't
 * lost. */
static int asked[2];

static void on_term(int sig)
{
    (void)sig;
    (void)!write(asked[1], "", 1);
}

static void wait_until_asked(void)
{
    char byte;
    while (read(asked[0], &byte, 1) != 1)
        continue;
}

static void wait_for_all(kn_comm *w)
{
    while (kn_ok())
        kn_barrier(w, kn_compute_stream(KN_CPU), "work");
}

static void misbehave(kn_comm *w, const char *what, int who, int status)
{
    kn_barrier(w, kn_compute_stream(KN_CPU), "start");
    if (strcmp(what, "deaf") == 0)
        signal(SIGTERM, SIG_IGN);
    if (kn_rank(w) == who) {
        if (strcmp(what, "exit") == 0)
            _exit(status);
        if (strcmp(what, "fail") == 0 || strcmp(what, "halt") == 0)
            kn_fail("data: file is empty");
        else
            raise(SIGKILL);
    } else if (strcmp(what, "deaf") == 0) {
        for (;;)
            pause();
    }
    if (strcmp(what, "halt") == 0 && kn_rank(w) == who)
        raise(SIGSTOP); /* without another call */
    wait_for_all(w);
}

static volatile char *volatile nothing;

static void own_handler(int sig)
{
    (void)!write(STDERR_FILENO, "own\n", 4);
    _exit(sig);
}

__attribute__((no_sanitize("undefined"))) static void crash(kn_comm *w, const char *how, int who)
{
    static const struct {
        const char *how;
        int sig;
    } ends[] = { { "abort", SIGABRT }, { "divide", SIGFPE }, { "bus", SIGBUS } };
    kn_barrier(w, kn_compute_stream(KN_CPU), "start");
    if (kn_rank(w) != who) {
        wait_for_all(w);
        return;
    }
    if (strcmp(how, "well") != 0)
        kn_fail("data: file is empty");
    if (strcmp(how, "none") == 0)
        return;
    for (int i = 0; i < 3; i++)
        if (strcmp(how, ends[i].how) == 0)
            raise(ends[i].sig);
    *nothing = 1;
}

bool rank_step(kn_comm *w, uint64_t *hash);

static void step(kn_comm *w, const char *how, int who, int64_t nth)
{
    static const char *const names[KN_FAULT_KINDS] = { [KN_FAULT_EXIT] = "exit",
                                                       [KN_FAULT_CRASH] = "crash",
                                                       [KN_FAULT_STOP] = "stop",
                                                       [KN_FAULT_MEMORY] = "memory",
                                                       [KN_FAULT_ERROR] = "error" };
    uint64_t hash;
    kn_fault_at(KN_AT_MEETING, 0, KN_NO_FAULT);
    for (int i = 0; i < KN_FAULT_KINDS && kn_rank(w) == who; i++)
        if (names[i] && strcmp(how, names[i]) == 0)
            kn_fault_at(KN_AT_MEETING, nth, (kn_fault_kind)i);
    if (rank_step(w, &hash))
        printf("rank %d of %d: %016" PRIx64 " in %d meetings\n", kn_rank(w), kn_comm_size(w), hash,
               (int)kn_fault_at(KN_AT_MEETING, 0, KN_NO_FAULT));
}

static void diverge(kn_comm *w, int who)
{
    float x[64] = { 0 };
    kn_stream *s = kn_compute_stream(KN_CPU);
    kn_comm *gather = kn_comm_dup(w, "gather"), *reduce = kn_comm_dup(w, "reduce");
    if (kn_rank(w) == who)
        kn_all_reduce(reduce, x, NULL, x, 64, KN_F32, KN_F32, s, "block.1");
    else
        kn_all_gather(gather, x, x, 64 / kn_comm_size(w), KN_F32, s, "block.0");
}

static void chain(kn_comm *w, int stops, int waits)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    bool in = kn_rank(w) == stops || kn_rank(w) == waits;
    kn_comm *two = kn_comm_split(w, in ? 0 : -1, 0, "two");
    kn_barrier(w, s, "start");
    if (kn_rank(w) == stops)
        raise(SIGSTOP);
    if (kn_rank(w) == waits) {
        usleep(300000);
        kn_barrier(two, s, "of two");
    }
    kn_barrier(w, s, "of all");
}

static void last(kn_comm *w, int64_t bytes)
{
    unsigned char *data = calloc(1, (size_t)bytes);
    int64_t wrong = data ? 0 : -1;
    for (int64_t i = 0; data && kn_rank(w) == 0 && i < bytes; i++)
        data[i] = (unsigned char)(i * 7);
    if (data && kn_broadcast(w, data, bytes, 0, kn_compute_stream(KN_CPU), "last")) {
        for (int64_t i = 0; i < bytes; i++)
            wrong += data[i] != (unsigned char)(i * 7);
        printf("rank %d: %s\n", kn_rank(w), wrong ? "bad" : "good");
    }
    free(data);
}

static void detain(kn_comm *w, bool talks)
{
    static kn_message_word words[200]; /* many at once: who sends is faster than who reads */
    const int me = kn_rank(w), fd = ((kn_tcp_world *)w->world->backend)->link[1 - me].control;
    for (int i = 0; i < 200; i++)
        words[i] = (kn_message_word){ .what = KN_WORD_HERE, .family = 77 };
    kn_barrier(w, kn_compute_stream(KN_CPU), "start");
    if (me == 1 ? talks : !talks)
        while (send(fd, words, sizeof words, MSG_NOSIGNAL | (talks ? 0 : MSG_DONTWAIT)) > 0)
            ;
    if (me == 1 && !talks)
        pause();
    if (me == 1)
        _exit(0);
}

/* Not the forms in memory that ranks share. */
static void several_buffers(kn_comm *w)
{
    int failed = 0;
    for (int form = 0; form < PIECES_FORMS / 2 && !failed; form++)
        failed = pieces_once(w, kn_compute_stream(KN_CPU), form) ||
                 to_all_once(w, kn_compute_stream(KN_CPU), form * 40009, KN_BF16, 0);
    printf("rank %d: %s\n", kn_rank(w), failed ? "bad" : "good");
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[2], "own") == 0)
        signal(SIGSEGV, own_handler);
    kn_comm *w = kn_init(&argc, &argv);
    const char *what = argc > 1 ? argv[1] : "ok";
    int64_t all[256], me = kn_rank(w);
    const char *later = getenv("RANK_TIMEOUT");
    if (!kn_ok())
        return kn_finish();
    if (later)
        kn_comm_set_timeout(w, atof(later));
    if (strcmp(what, "ok") == 0) {
        if (kn_all_gather(w, all, &me, 1, KN_I64, kn_compute_stream(KN_CPU), NULL))
            printf("rank %d of %d threads %d %s\n", kn_rank(w), kn_comm_size(w), kn_threads(),
                   all[kn_comm_size(w) - 1] == kn_comm_size(w) - 1 ? "good" : "bad");
    } else if (strcmp(what, "args") == 0) {
        if (me == 0)
            for (int i = 1; i < argc; i++)
                printf("[%s]", argv[i]);
    } else if (strcmp(what, "environment") == 0) {
        for (int i = 2; me == 0 && i < argc; i++)
            printf("[%s]", getenv(argv[i]) ? getenv(argv[i]) : "");
    } else if (strcmp(what, "machine") == 0) {
        int ranks = kn_comm_ranks_a_machine(w);
        if (ranks > 0)
            printf("%d ranks on the machine of rank %d\n", ranks, (int)me);
    } else if (strcmp(what, "step") == 0) {
        step(w, argc > 4 ? argv[2] : "", argc > 4 ? atoi(argv[3]) : -1,
             argc > 4 ? atoi(argv[4]) : 0);
    } else if (strcmp(what, "crash") == 0) {
        crash(w, argc > 3 ? argv[2] : "", argc > 3 ? atoi(argv[3]) : 0);
    } else if (strcmp(what, "chain") == 0) {
        chain(w, argc > 3 ? atoi(argv[2]) : 0, argc > 3 ? atoi(argv[3]) : 0);
    } else if (strcmp(what, "last") == 0) {
        last(w, argc > 2 ? atoll(argv[2]) : 1);
    } else if (strcmp(what, "detain") == 0) {
        detain(w, argc > 2 && strcmp(argv[2], "talking") == 0);
    } else if (strcmp(what, "pieces") == 0) {
        several_buffers(w);
    } else if (strcmp(what, "diverge") == 0) {
        diverge(w, argc > 2 ? atoi(argv[2]) : 1);
    } else if (strcmp(what, "sleep") == 0 || strcmp(what, "hang") == 0 ||
               strcmp(what, "linger") == 0) {
        if (pipe(asked) == 0 && what[0] != 'h')
            signal(SIGTERM, on_term);
        printf("%d\n", (int)getpid());
        fflush(stdout);
        wait_until_asked();
        for (unsigned ms = what[0] == 'l' && argc > 2 ? (unsigned)atoi(argv[2]) : 0; ms > 0; ms--)
            usleep(1000);
    } else {
        misbehave(w, what, argc > 2 ? atoi(argv[2]) : 0, argc > 3 ? atoi(argv[3]) : 0);
    }
    return kn_finish();
}
