/* tests/fsdp/rank_program.c: a program of several ranks, for supervisor_test.c. Its first argument
 * says what its ranks do:
 *
 *   ok            gather once, print "rank R of N", end well
 *   args          print what is left of the arguments
 *   kill R        rank R kills itself while the others wait in a collective
 *   exit R S      rank R exits with status S without a word
 *   fail R        an error comes to stand on rank R while the others wait
 *   deaf R        rank R kills itself; the others ignore SIGTERM and never end by themselves
 *   sleep         print the process id and sleep, end well on SIGTERM
 *   hang          print the process id and sleep */
#include "fsdp/comm/comm.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static volatile sig_atomic_t asked;

static void on_term(int sig)
{
    (void)sig;
    asked = 1;
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
        if (strcmp(what, "fail") == 0)
            kn_fail("data: file is empty");
        else
            raise(SIGKILL);
    } else if (strcmp(what, "deaf") == 0) {
        for (;;)
            pause();
    }
    wait_for_all(w);
}

int main(int argc, char **argv)
{
    kn_comm *w = kn_init(&argc, &argv);
    const char *what = argc > 1 ? argv[1] : "ok";
    int64_t all[256], me = kn_rank(w);
    if (!kn_ok())
        return kn_finish();
    if (strcmp(what, "ok") == 0) {
        if (kn_all_gather(w, all, &me, 1, KN_I64, kn_compute_stream(KN_CPU), NULL))
            printf("rank %d of %d threads %d %s\n", kn_rank(w), kn_comm_size(w), kn_threads(),
                   all[kn_comm_size(w) - 1] == kn_comm_size(w) - 1 ? "good" : "bad");
    } else if (strcmp(what, "args") == 0) {
        if (me == 0)
            for (int i = 1; i < argc; i++)
                printf("[%s]", argv[i]);
    } else if (strcmp(what, "sleep") == 0 || strcmp(what, "hang") == 0) {
        if (what[0] == 's')
            signal(SIGTERM, on_term);
        printf("%d\n", (int)getpid());
        fflush(stdout);
        while (!asked)
            pause();
    } else {
        misbehave(w, what, argc > 2 ? atoi(argv[2]) : 0, argc > 3 ? atoi(argv[3]) : 0);
    }
    return kn_finish();
}
