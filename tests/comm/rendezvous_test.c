/* tests/comm/rendezvous_test.c: ranks of one host meet despite obstacles: wrong ranks, another
 * user's socket of the same name, corrupt shared memory, limits on files. */
#include "tests/comm/program_test.h"

#include "comm/local/local.h"
#include <stddef.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

/* ---- another user ---------------------------------------------------------------------------- */

/* Starts a process of the user "nobody" that listens at names first to last of this job. Returns
 * its id, 0 where that isn't possible. */
static pid_t squat(int first, int last)
{
    char job[100];
    int ready[2];
    snprintf(job, sizeof job, "torch 127.0.0.1 %d - 0", local_port());
    if (geteuid() != 0 || pipe(ready) != 0)
        return 0;
    unsigned victim = (unsigned)getuid();
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        bool may = setgid(65534) == 0 && setuid(65534) == 0, ok = may;
        for (int name = first; name <= last && ok; name++) {
            struct sockaddr_un a = { .sun_family = AF_UNIX };
            int fd = socket(AF_UNIX, SOCK_STREAM, 0);
            int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "knap-%u-%016llx-%d", victim,
                             (unsigned long long)kn_hash_string(job), name);
            ok = bind(fd, (struct sockaddr *)&a,
                      (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) == 0 &&
                 listen(fd, name % 2 ? 64 : 0) == 0; /* some with a queue that fills up */
        }
        ssize_t said = write(ready[1], ok ? "y" : may ? "n" : "-", 1);
        while (said > 0)
            pause();
        _exit(1);
    }
    char ok = 'n';
    close(ready[1]);
    if (read(ready[0], &ok, 1) != 1)
        ok = 'n';
    close(ready[0]);
    KN_CHECK(ok != 'n', "nobody can listen there");
    if (ok == 'y')
        return pid;
    kill(pid, SIGKILL); /* in a user namespace without that user */
    waitpid(pid, NULL, 0);
    return 0;
}

/* Processes of this user say half of a hello, a byte at a time, or nothing: no rank waits for
 * them. */
KN_TEST(rendezvous, half_a_hello_delays_nobody)
{
    static result r[2];
    char job[64];
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int fd = -1;
    start_local_rank(&r[0], 0, 2, "ok");
    snprintf(job, sizeof job, "torch 127.0.0.1 %d - 0", local_port());
    int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "knap-%u-%016llx-0", (unsigned)getuid(),
                     (unsigned long long)kn_hash_string(job));
    while (!has_ended(&r[0])) {
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(fd, (struct sockaddr *)&a,
                    (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) == 0)
            break;
        close(fd);
        usleep(10000);
    }
    KN_CHECK(send(fd, "knap r3", 7, MSG_NOSIGNAL) == 7);
    start_local_rank(&r[1], 1, 2, "ok");
    check_good(r, 2);
    close(fd);
}

KN_TEST(rendezvous, another_user_at_the_name_is_passed_over)
{
    static result r[3];
    pid_t stranger = squat(0, 2);
    if (!stranger)
        KN_SKIP("becoming another user takes root");
    for (int k = 2; k >= 0; k--)
        start_local_rank(&r[k], k, 3, "ok");
    check_good(r, 3);
    kill(stranger, SIGKILL);
    waitpid(stranger, NULL, 0);
}

KN_TEST(rendezvous, another_user_at_all_names_is_a_sentence)
{
    static result r[2];
    pid_t stranger = squat(0, 7);
    if (!stranger)
        KN_SKIP("becoming another user takes root");
    for (int k = 0; k < 2; k++)
        start_local_rank(&r[k], k, 2, "KNAP_TIMEOUT=0.5 ok");
    for (int k = 0; k < 2; k++)
        finish(&r[k]);
    KN_CHECK(r[0].status == 1 && strstr(r[0].errors, "other users (one has the number 65534) hold"),
             "%s", r[0].errors);
    KN_CHECK(r[1].status == 1 && strstr(r[1].errors, "another user (number 65534) holds its name"),
             "%s", r[1].errors);
    kill(stranger, SIGKILL);
    waitpid(stranger, NULL, 0);
}

/* ---- the memory ------------------------------------------------------------------------------ */

static void check_refused(int fd, const char *says)
{
    size_t bytes;
    KN_CHECK(kn_local_map(fd, &bytes) == NULL && !kn_ok());
    KN_CHECK(strstr(kn_error(), says));
    kn_clear_error();
}

/* No rank can truncate the others' memory, and memory of the wrong size is rejected. */
KN_TEST(rendezvous, shared_memory_is_sealed_and_checked)
{
    size_t bytes, again;
    int fd = -1;
    kn_local_head *head = kn_local_create(2, (kn_local_cores){ 0 }, &fd, &bytes);
    KN_CHECK_OK();
    KN_CHECK(ftruncate(fd, 4096) != 0 && errno == EPERM && ftruncate(fd, (off_t)bytes * 2) != 0);
    kn_local_head *other = kn_local_map(fd, &again);
    KN_CHECK(other && again == bytes);
    kn_local_unmap(other, again);
    const uint64_t step = UINT64_C(2) << 20;
    for (int what = 0; what < 5; what++) {
        kn_local_head was = *head;
        if (what == 0) { /* the total is right, the parts are wrong */
            head->control_bytes -= 2 * step;
            head->region_bytes += step;
        } else if (what == 1) {
            head->control_bytes += 2 * step;
            head->region_bytes -= step;
        } else if (what == 2) {
            head->size = 1;
            head->region_bytes *= 2;
        } else if (what == 3) {
            head->size = 100000;
        } else {
            head->region_bytes = UINT64_MAX / 2 + 1;
            head->control_bytes = bytes;
        }
        check_refused(fd, "another version of libknap");
        head->control_bytes = was.control_bytes;
        head->region_bytes = was.region_bytes;
        head->size = was.size;
    }
    int loose = memfd_create("loose", MFD_CLOEXEC); /* the same bytes, but truncatable */
    KN_CHECK(loose >= 0 && ftruncate(loose, (off_t)bytes) == 0 &&
             pwrite(loose, head, sizeof *head, 0) == (ssize_t)sizeof *head);
    check_refused(loose, "is no sealed memory");
    close(loose);
    kn_local_unmap(head, bytes);
    close(fd);
}

static result run_with_files_of(rlim_t bytes, const char *line)
{
    static result r;
    struct rlimit old, limit;
    memset(&r, 0, sizeof r);
    getrlimit(RLIMIT_FSIZE, &old);
    limit = (struct rlimit){ bytes, old.rlim_max };
    setrlimit(RLIMIT_FSIZE, &limit);
    start(&r, line);
    setrlimit(RLIMIT_FSIZE, &old);
    finish(&r);
    return r;
}

/* ulimit -f limits shared memory, too: a smaller one or an error, never a signal. */
KN_TEST(rendezvous, a_limit_on_files)
{
    result r = run_with_files_of((rlim_t)1 << 30, "ok --ranks 2");
    KN_CHECK(r.status == 0 && lines_with(r.text, "good") == 2, "%d %s", r.status, r.errors);
    r = run_with_files_of(1 << 20, "ok --ranks 2");
    KN_CHECK(r.status == 1 && strstr(r.errors, "ulimit -f") && lines_with(r.errors, "\n") == 1,
             "%d %s", r.status, r.errors);
}
