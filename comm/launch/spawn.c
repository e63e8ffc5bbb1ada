/* comm/launch/spawn.c: ranks for tests: forked processes, or threads of this one. */
#include "comm/local/local.h"
#include "kernels/context.h"
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static bool check_count(const char *what, int n)
{
    if (n < 1 || n > KN_LOCAL_MAX_RANKS)
        return kn_fail("%s: %d ranks, must be 1 to %d", what, n, KN_LOCAL_MAX_RANKS);
    return true;
}

/* Tests say when a stream has a worker. */
static kn_local_cores cores_of(int ranks, int threads)
{
    kn_local_cores cores = kn_local_share_cores(ranks, threads);
    cores.free = 0;
    return cores;
}

/* Runs fn as one rank over the mapping, from entering the world to leaving it. */
static int run_rank(kn_local_head *head, size_t bytes, int rank, kn_rank_fn fn, void *arg)
{
    int failed = 1;
    kn_comm *world = kn_comm_local(head, bytes, rank, false);
    if (kn_rank_enter(world))
        failed = fn(world, arg) != 0;
    if (failed)
        fprintf(stderr, "knap: rank %d failed: %s\n", rank,
                kn_ok() ? "its function says so" : kn_error());
    kn_context_end();
    return failed;
}

/* ---- processes ------------------------------------------------------------------------------- */

/* A thread that was joined is still listed until the kernel has let go of it; it runs nothing of
 * ours any more. */
static bool is_leaving(const char *thread)
{
    enum { PF_EXITING = 4 }; /* of the kernel's flags */
    char path[64], stat[512];
    unsigned flags = 0;
    snprintf(path, sizeof path, "/proc/self/task/%.20s/stat", thread);
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(stat, 1, sizeof stat - 1, f) : 0;
    if (f)
        fclose(f);
    stat[n] = 0;
    const char *name_end = strrchr(stat, ')');
    return n == 0 || (name_end && sscanf(name_end, ") %*c %*d %*d %*d %*d %*d %u", &flags) == 1 &&
                      (flags & PF_EXITING));
}

static int count_threads(void)
{
    DIR *d = opendir("/proc/self/task");
    int n = 0;
    if (!d)
        return 1;
    for (struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.' && !is_leaving(e->d_name);
    closedir(d);
    return n;
}

/* A thread that is about to end may need a moment: what is too many now is counted again for up to
 * a second. */
static int count_threads_that_stay(int allowed)
{
    int n = count_threads();
    for (int i = 0; n > allowed && i < 1000; i++) {
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
        n = count_threads();
    }
    return n;
}

/* Threads that were there before the library was first used, such as a test runner's, are idle and
 * hold nothing of ours: forking beside them is safe. */
static int threads_before = 1;

static void count_before(void)
{
    threads_before = count_threads();
}

__attribute__((constructor)) static void count_register(void)
{
    kn_process_on_begin = count_before;
}

static _Noreturn void child(kn_local_head *head, size_t bytes, int rank, int ranks, pid_t parent,
                            kn_rank_fn fn, void *arg)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    threads_before = 1;
    kn_clear_error();
    if (!getenv("LOCAL_WORLD_SIZE")) /* else the caller has places for its ranks */
        kn_comm_device_place(rank, ranks, true);
    int failed = run_rank(head, bytes, rank, fn, arg);
    fflush(NULL);
    _exit(failed);
}

int kn_spawn(int n, kn_rank_fn fn, void *arg)
{
    if (!kn_given(fn, "kn_spawn", "the function"))
        return n;
    size_t bytes;
    int status[KN_LOCAL_MAX_RANKS], failed = 0, started = 0;
    pid_t pid[KN_LOCAL_MAX_RANKS], self = getpid();
    if (!check_count("kn_spawn", n))
        return n;
    kn_context_get(); /* if this is the first use, threads are counted now */
    int threads = count_threads_that_stay(threads_before);
    if (threads > threads_before) {
        kn_fail(
            "kn_spawn: this process has %d threads, and forking them hangs: spawn before streams, "
            "OpenMP or oneDNN have run, or use kn_spawn_threads",
            threads);
        return n;
    }
    kn_local_head *head = kn_local_create(n, cores_of(n, 0), NULL, &bytes);
    if (!head)
        return n;
    fflush(NULL);
    for (; started < n; started++) {
        pid[started] = fork();
        if (pid[started] == 0)
            child(head, bytes, started, n, self, fn, arg);
        if (pid[started] < 0) {
            kn_fail("kn_spawn: cannot start rank %d of %d: %s", started, n, strerror(errno));
            kn_poison_set(&head->poison, started, "could not be started");
            failed = n - started;
            break;
        }
    }
    kn_local_watch(head, started, pid, false, -1, status, NULL);
    for (int r = 0; r < started; r++) {
        char text[128];
        failed += status[r] != 0;
        if (WIFSIGNALED(status[r]))
            fprintf(stderr, "knap: rank %d %s\n", r,
                    kn_local_describe_exit(status[r], text, sizeof text));
    }
    kn_local_unmap(head, bytes);
    return failed;
}

/* ---- threads --------------------------------------------------------------------------------- */

typedef struct rank_thread {
    pthread_t thread;
    kn_local_head *head;
    size_t bytes;
    int rank, failed;
    kn_rank_fn fn;
    void *arg;
} rank_thread;

static void *thread_main(void *arg)
{
    rank_thread *t = arg;
    t->failed = run_rank(t->head, t->bytes, t->rank, t->fn, t->arg);
    kn_local_left(t->head, t->rank); /* also if it never entered the world */
    return NULL;
}

int kn_spawn_threads(int n, kn_rank_fn fn, void *arg)
{
    if (!kn_given(fn, "kn_spawn_threads", "the function"))
        return n;
    size_t bytes;
    int failed = 0, started = 0;
    if (!check_count("kn_spawn_threads", n))
        return n;
    rank_thread *t = kn_host_calloc((size_t)n, sizeof *t);
    kn_local_head *head = t ? kn_local_create(n, cores_of(n, 1), NULL, &bytes) : NULL;
    if (!head) {
        kn_host_free(t);
        return n;
    }
    for (; started < n; started++) {
        t[started] =
            (rank_thread){ .head = head, .bytes = bytes, .rank = started, .fn = fn, .arg = arg };
        int e = pthread_create(&t[started].thread, NULL, thread_main, &t[started]);
        if (e != 0) {
            kn_fail("kn_spawn_threads: cannot start rank %d of %d: %s", started, n, strerror(e));
            kn_poison_set(&head->poison, started, "could not be started");
            failed = n - started;
            break;
        }
    }
    for (int r = 0; r < started; r++) {
        pthread_join(t[r].thread, NULL);
        failed += t[r].failed;
    }
    kn_local_unmap(head, bytes);
    kn_host_free(t);
    return failed;
}
