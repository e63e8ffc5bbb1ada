/* tests/kn_test.c: runs KN_TEST cases without Criterion. Arguments: substrings of "suite.name", one
 * of which must occur (none: all cases); --part K/N takes the K-th of them and every N-th after it;
 * --no-fork runs all cases in this process; --list prints the names; --times prints how long each
 * case took, and its processors' time; --stop ends after the first that fails; --machine prints the
 * instruction set and the libraries that the CPU's kernels use here, and runs nothing. Compiled
 * into every test program; empty under Criterion. */
#ifndef KN_CRITERION
#include "comm/comm.h"
#include "kernels/kernels.h"
#include "tensor/tensor.h"
#include "tests/kn_test.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static kn_test_case *first, **last = &first;
static jmp_buf leave;
static _Thread_local jmp_buf *leave_rank; /* of the rank that this thread is */
static bool forked;
enum { PASSED = 0, FAILED = 1, SKIPPED = 77, CASE_SECONDS = 600, WORDS = 256 };

/* A program may say why a case can't run in it; NULL: it can. */
__attribute__((weak)) const char *kn_test_cannot(const char *name);

void kn_test_register(kn_test_case *t)
{
    *last = t;
    last = &t->next;
}

static _Noreturn void end(int status)
{
    fflush(NULL);
    if (leave_rank)
        longjmp(*leave_rank, status);
    if (forked)
        _exit(status); /* an aborted case: its memory is no leak */
    longjmp(leave, status);
}

int kn_test_rank(void (*fn)(kn_comm *world, void *arg), kn_comm *world, void *arg)
{
    jmp_buf here;
    leave_rank = &here;
    int status = setjmp(here);
    if (status == 0) {
        kn_scope scope = kn_scope_begin();
        fn(world, arg);
        kn_scope_end(scope);
        KN_CHECK_OK();
    }
    leave_rank = NULL;
    return status;
}

void kn_test_fail(const char *file, int line, const char *cond, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "%s:%d: ", file, line);
    if (leave_rank)
        fprintf(stderr, "rank %d: ", kn_rank(kn_world()));
    fprintf(stderr, "%s: ", cond);
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "%s%s\n", kn_ok() ? "" : " ", kn_ok() ? "" : kn_error());
    va_end(ap);
    end(FAILED);
}

void kn_test_skip(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    printf("skipped: ");
    vprintf(fmt, ap);
    putchar('\n');
    va_end(ap);
    end(SKIPPED);
}

static void (*at_end[8])(void);
static int ends;

void kn_test_at_end(void (*fn)(void))
{
    bool known = false;
    for (int i = 0; i < ends; i++)
        known |= at_end[i] == fn;
    KN_CHECK(known || ends < (int)(sizeof at_end / sizeof *at_end));
    if (!known)
        at_end[ends++] = fn;
}

static void run(kn_test_case *t)
{
    t->run();
    while (ends > 0)
        at_end[--ends]();
}

static int run_here(kn_test_case *t)
{
    int status = setjmp(leave);
    if (status == 0)
        run(t);
    return status;
}

/* Runs the case in a child that leads a process group, so that its leftover ranks end too. */
static int run_forked(kn_test_case *t)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0) {
        perror("fork");
        return FAILED;
    }
    if (pid == 0) {
        forked = true;
        setpgid(0, 0);
        alarm(CASE_SECONDS);
        run(t);
        fflush(NULL);
        exit(PASSED); /* exit, not _exit: leak checkers report in exit */
    }
    setpgid(pid, pid);
    int status = 0;
    waitpid(pid, &status, 0);
    kill(-pid, SIGKILL);
    if (WIFSIGNALED(status)) {
        int sig = WTERMSIG(status);
        fprintf(stderr, "%s.%s: killed by signal %d%s\n", t->suite, t->name, sig,
                sig == SIGALRM ? " (took too long)" : "");
        return FAILED;
    }
    return WEXITSTATUS(status);
}

/* True if argv[i] is a part of case names, not an option or --part's K/N. */
static bool is_word(int i, char **argv)
{
    return strncmp(argv[i], "--", 2) != 0 && strcmp(argv[i - 1], "--part") != 0;
}

/* Marks the words that occur in name. */
static bool selected(const char *name, int argc, char **argv, bool *used)
{
    bool any = false, found = false;
    for (int i = 1; i < argc; i++) {
        if (!is_word(i, argv))
            continue;
        any = true;
        if (strstr(name, argv[i]))
            found = used[i] = true;
    }
    return found || !any;
}

/* A word that no case has fails, so a renamed case can't drop out unnoticed. */
static int unused_words(int argc, char **argv, const bool *used)
{
    int n = 0;
    for (int i = 1; i < argc; i++)
        if (is_word(i, argv) && !used[i]) {
            fprintf(stderr, "no case has '%s' in its name\n", argv[i]);
            n++;
        }
    return n;
}

static bool has_option(const char *option, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], option) == 0)
            return true;
    return false;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The processors' time of the cases so far, and of the ranks that they waited for. */
static double processor_seconds(void)
{
    double sum = 0;
    for (int who = RUSAGE_CHILDREN; who <= RUSAGE_SELF; who++) {
        struct rusage u;
        getrusage(who, &u);
        sum += (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
               1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
    }
    return sum;
}

static bool in_part(int index, int argc, char **argv)
{
    int k = 1, n = 1;
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--part") == 0 && sscanf(argv[i + 1], "%d/%d", &k, &n) != 2)
            return false;
    return n > 0 && index % n == k - 1;
}

int main(int argc, char **argv)
{
    bool here = has_option("--no-fork", argc, argv), list = has_option("--list", argc, argv);
    bool times = has_option("--times", argc, argv), stop = has_option("--stop", argc, argv);
    int passed = 0, failed = 0, skipped = 0, index = 0;
    bool used[WORDS] = { false };
    if (argc > WORDS) {
        fprintf(stderr, "more than %d arguments\n", WORDS);
        return 1;
    }
    if (has_option("--machine", argc, argv)) {
        printf("%s, %s\n", kn_cpu_isa(), kn_cpu_libraries());
        return 0;
    }
    for (kn_test_case *t = first; t && !(stop && failed); t = t->next) {
        char name[256];
        snprintf(name, sizeof name, "%s.%s", t->suite, t->name);
        if (!selected(name, argc, argv, used) || !in_part(index++, argc, argv))
            continue;
        if (list) {
            puts(name);
            continue;
        }
        const char *why = kn_test_cannot ? kn_test_cannot(name) : NULL;
        if (why) {
            printf("skipped: %s: %s\n", name, why);
            skipped++;
            continue;
        }
        double begin = seconds(), worked = processor_seconds();
        int status = here ? run_here(t) : run_forked(t);
        if (status == PASSED)
            passed++;
        else if (status == SKIPPED)
            skipped++;
        else
            failed++;
        if (status != PASSED && status != SKIPPED)
            printf("FAIL %s\n", name);
        if (times)
            printf("%8.2f s, %6.2f s of processors  %s\n", seconds() - begin,
                   processor_seconds() - worked, name);
    }
    if (!list && first)
        failed += unused_words(argc, argv, used);
    if (!list)
        printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed ? 1 : 0;
}
#endif
