/* tests/kn_test.c: runs KN_TEST cases without Criterion. Options: --no-fork, --list, a substring of
 * "suite.name" to select. Compiled into every test program; empty under Criterion. */
#ifndef KN_CRITERION
#include "tests/kn_test.h"
#include <stdarg.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static kn_test_case *first, **last = &first;
static jmp_buf leave;
static bool forked;
enum { PASSED = 0, FAILED = 1, SKIPPED = 77 };

void kn_test_register(kn_test_case *t)
{
    *last = t;
    last = &t->next;
}

static _Noreturn void end(int status)
{
    fflush(NULL);
    if (forked)
        _exit(status);
    longjmp(leave, status);
}

void kn_test_fail(const char *file, int line, const char *cond, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "%s:%d: %s: ", file, line, cond);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
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

static int run_here(kn_test_case *t)
{
    int status = setjmp(leave);
    if (status == 0)
        t->run();
    return status;
}

static int run_forked(kn_test_case *t)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        forked = true;
        alarm(600);
        t->run();
        fflush(NULL);
        exit(PASSED); /* exit, not _exit: leak checkers report here */
    }
    int status = 0;
    waitpid(pid, &status, 0);
    if (WIFSIGNALED(status)) {
        fprintf(stderr, "%s.%s: killed by signal %d\n", t->suite, t->name, WTERMSIG(status));
        return FAILED;
    }
    return WEXITSTATUS(status);
}

int main(int argc, char **argv)
{
    bool fork_each = true, list = false;
    const char *only = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--no-fork") == 0)
            fork_each = false;
        else if (strcmp(argv[i], "--list") == 0)
            list = true;
        else
            only = argv[i];
    }
    int passed = 0, failed = 0, skipped = 0;
    for (kn_test_case *t = first; t; t = t->next) {
        char name[256];
        snprintf(name, sizeof name, "%s.%s", t->suite, t->name);
        if (only && !strstr(name, only))
            continue;
        if (list) {
            puts(name);
            continue;
        }
        int status = fork_each ? run_forked(t) : run_here(t);
        if (status == PASSED)
            passed++;
        else if (status == SKIPPED)
            skipped++;
        else
            failed++;
        if (status != PASSED && status != SKIPPED)
            printf("FAIL %s\n", name);
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed ? 1 : 0;
}
#endif
