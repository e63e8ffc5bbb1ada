/* fsdp/comm/rendezvous.c: ranks of one host that another launcher started find each other.
 *
 *   rank r                                  rank 0
 *   connect, hello (rank, size)       -->   check it
 *   map the memory, lock byte r       <--   the memory's descriptor, or an error in words
 *   "here"                            -->   wait for all
 *   go                                <--   "go"
 *
 * The lock is how ranks notice that one has died, there being no supervisor: the kernel lets go of
 * it (local_world.c). Nothing has a name in the file system. */
#include "fsdp/comm/launch.h"
#include "fsdp/comm/local.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef struct message {
    char magic[8]; /* changes with what follows */
    int32_t rank, size;
    char error[240]; /* rank 0's answer: empty for yes */
} message;

#define MAGIC "knap r1"

/* ---- sockets --------------------------------------------------------------------------------- */

static socklen_t address_of(const char *job, struct sockaddr_un *a)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325); /* FNV-1a: names of jobs can be longer than a path */
    for (const char *p = job; *p; p++)
        h = (h ^ (unsigned char)*p) * UINT64_C(0x100000001b3);
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "knap-%u-%016llx", (unsigned)getuid(),
                     (unsigned long long)h);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* Waits until fd can be read; false where the deadline comes first. */
static bool readable(int fd, double deadline)
{
    for (;;) {
        double left = deadline - kn_now();
        struct pollfd p = { fd, POLLIN, 0 };
        if (left <= 0)
            return false;
        int n = poll(&p, 1, left < 1 ? (int)(left * 1000) + 1 : 1000);
        if (n > 0)
            return true;
        if (n < 0 && errno != EINTR)
            return false;
    }
}

/* *passed (may be NULL): the descriptor that came along, -1 for none. */
static bool receive(int fd, void *data, size_t size, int *passed, double deadline)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec io = { data, size };
    struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1 };
    if (passed) {
        *passed = -1;
        m.msg_control = &control;
        m.msg_controllen = sizeof control;
    }
    if (!readable(fd, deadline) || recvmsg(fd, &m, MSG_CMSG_CLOEXEC | MSG_WAITALL) != (ssize_t)size)
        return false;
    struct cmsghdr *c = passed ? CMSG_FIRSTHDR(&m) : NULL;
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
        memcpy(passed, CMSG_DATA(c), sizeof *passed);
    return true;
}

static bool send_all(int fd, const void *data, size_t size, int pass)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec io = { (void *)(uintptr_t)data, size };
    struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1 };
    if (pass >= 0) {
        memset(&control, 0, sizeof control);
        m.msg_control = &control;
        m.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof pass);
        memcpy(CMSG_DATA(c), &pass, sizeof pass);
    }
    return sendmsg(fd, &m, MSG_NOSIGNAL) == (ssize_t)size;
}

static bool take_lock(int fd, int rank)
{
    struct flock f = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1 };
    return fcntl(fd, F_SETLK, &f) == 0 ||
           kn_fail("rendezvous: cannot lock byte %d of the shared memory: %s", rank,
                   strerror(errno));
}

/* ---- rank 0 ---------------------------------------------------------------------------------- */

static int listen_at(const char *job)
{
    struct sockaddr_un a;
    socklen_t n = address_of(job, &a);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&a, n) == 0 && listen(fd, KN_LOCAL_MAX_RANKS) == 0)
        return fd;
    if (errno == EADDRINUSE)
        kn_fail("rendezvous (%s): another rank 0 of this user is there already: give each job a "
                "MASTER_PORT of its own",
                job);
    else
        kn_fail("rendezvous (%s): cannot open a Unix socket: %s", job, strerror(errno));
    if (fd >= 0)
        close(fd);
    return -1;
}

/* Takes in one rank. Strangers are turned away without a word; false for a rank that is wrong. */
static bool admit(int listener, int size, int memory, int *link, int *missing, double deadline)
{
    struct ucred who = { 0 };
    socklen_t n = sizeof who;
    message hello = { 0 }, answer = { .magic = MAGIC, .size = size };
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return true;
    double soon = kn_now() + 5 < deadline ? kn_now() + 5 : deadline;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) != 0 || who.uid != getuid() ||
        !receive(fd, &hello, sizeof hello, NULL, soon) ||
        memcmp(hello.magic, MAGIC, sizeof hello.magic) != 0) {
        close(fd);
        return true;
    }
    if (hello.size != size)
        snprintf(answer.error, sizeof answer.error,
                 "WORLD_SIZE is %d on rank 0 and %d on rank %d: give every rank the same", size,
                 hello.size, hello.rank);
    else if (hello.rank < 1 || hello.rank >= size || link[hello.rank] >= 0)
        snprintf(answer.error, sizeof answer.error,
                 "two processes say that they are rank %d of %d: give each its own RANK",
                 hello.rank, size);
    bool good = !answer.error[0];
    send_all(fd, &answer, sizeof answer, good ? memory : -1);
    if (!good) {
        close(fd);
        return kn_fail("%s", answer.error);
    }
    link[hello.rank] = fd;
    --*missing;
    return true;
}

/* "1, 3 and 5 more" of the ranks without a link. */
static char *list_missing(const int *link, int size, char *buf, size_t room)
{
    size_t n = 0;
    int more = 0;
    buf[0] = 0;
    for (int r = 1; r < size; r++) {
        if (link[r] >= 0)
            continue;
        if (n + 32 < room)
            n += (size_t)snprintf(buf + n, room - n, "%s%d", n ? ", " : "", r);
        else
            more++;
    }
    if (more)
        snprintf(buf + n, room - n, " and %d more", more);
    return buf;
}

static bool gather_ranks(const char *job, int size, int memory, int *link, double seconds)
{
    int missing = size - 1, listener = listen_at(job);
    double deadline = kn_now() + seconds;
    char who[160], here;
    bool ok = listener >= 0;
    while (ok && missing > 0) {
        if (!readable(listener, deadline))
            ok = kn_fail("rendezvous (%s): rank 0 of %d waited %g s, and rank %s did not come: are "
                         "all %d ranks started? (to wait longer: KNAP_TIMEOUT)",
                         job, size, seconds, list_missing(link, size, who, sizeof who), size);
        else
            ok = admit(listener, size, memory, link, &missing, deadline);
    }
    for (int r = 1; r < size && ok; r++)
        if (!receive(link[r], &here, 1, NULL, deadline))
            ok = kn_fail("rendezvous (%s): rank %d came and did not answer", job, r);
    for (int r = 1; r < size && ok; r++)
        if (!send_all(link[r], "g", 1, -1))
            ok = kn_fail("rendezvous (%s): rank %d came and left again", job, r);
    if (listener >= 0)
        close(listener);
    return ok;
}

static kn_local_head *lead(const char *job, int size, int threads, int *fd, size_t *bytes)
{
    int link[KN_LOCAL_MAX_RANKS];
    kn_local_head *head = kn_local_create(size, fd, bytes);
    if (!head)
        return NULL;
    for (int r = 0; r < size; r++)
        link[r] = -1;
    kn_local_cores cores = kn_local_share_cores(size, threads);
    head->threads = cores.threads;
    head->free_cores = cores.free;
    head->enough_cores = cores.enough;
    bool ok = take_lock(*fd, 0) && gather_ranks(job, size, *fd, link, kn_comm_default_timeout());
    for (int r = 1; r < size; r++)
        if (link[r] >= 0)
            close(link[r]);
    if (ok)
        return head;
    kn_local_unmap(head, *bytes);
    close(*fd);
    return NULL;
}

/* ---- the others ------------------------------------------------------------------------------ */

/* Connected to rank 0, which may be started after us. */
static int knock(const char *job, int rank, int size, double seconds)
{
    struct sockaddr_un a;
    socklen_t n = address_of(job, &a);
    double deadline = kn_now() + seconds;
    for (;;) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0 && connect(fd, (struct sockaddr *)&a, n) == 0)
            return fd;
        if (fd >= 0)
            close(fd);
        if (kn_now() > deadline) {
            kn_fail("rendezvous (%s): rank %d of %d waited %g s for rank 0 to come: is it started, "
                    "on this host and with the same address and port? (to wait longer: "
                    "KNAP_TIMEOUT)",
                    job, rank, size, seconds);
            return -1;
        }
        nanosleep(&(struct timespec){ .tv_nsec = 10000000 }, NULL);
    }
}

static kn_local_head *follow(const char *job, int rank, int size, int *memory, size_t *bytes)
{
    double seconds = kn_comm_default_timeout(), deadline;
    message hello = { .magic = MAGIC, .rank = rank, .size = size }, answer;
    kn_local_head *head = NULL;
    char go;
    *memory = -1;
    int fd = knock(job, rank, size, seconds);
    if (fd < 0)
        return NULL;
    deadline = kn_now() + seconds + 1; /* rank 0 gives up first, and says why */
    if (!send_all(fd, &hello, sizeof hello, -1) ||
        !receive(fd, &answer, sizeof answer, memory, deadline)) {
        kn_fail("rendezvous (%s): rank 0 did not answer rank %d of %d", job, rank, size);
        goto fail;
    }
    if (answer.error[0] || *memory < 0) {
        answer.error[sizeof answer.error - 1] = 0;
        kn_fail("%s", answer.error[0] ? answer.error : "rendezvous: rank 0 sent no shared memory");
        goto fail;
    }
    if (!(head = kn_local_map(*memory, bytes)))
        goto fail;
    if (!take_lock(*memory, rank))
        goto fail;
    if (!send_all(fd, "h", 1, -1) || !receive(fd, &go, 1, NULL, deadline)) {
        kn_fail("rendezvous (%s): rank 0 gave up before all %d ranks had come; its message says "
                "why",
                job, size);
        goto fail;
    }
    close(fd);
    return head;
fail:
    kn_local_unmap(head, *bytes);
    if (*memory >= 0)
        close(*memory);
    close(fd);
    return NULL;
}

kn_comm *kn_rendezvous(const char *job, int rank, int size, int threads)
{
    int fd = -1;
    size_t bytes = 0;
    if (size > KN_LOCAL_MAX_RANKS) {
        kn_fail("%d ranks on one host: at most %d", size, KN_LOCAL_MAX_RANKS);
        return NULL;
    }
    kn_local_head *head =
        rank == 0 ? lead(job, size, threads, &fd, &bytes) : follow(job, rank, size, &fd, &bytes);
    if (!head)
        return NULL;
    kn_comm *world = kn_comm_local(head, bytes, rank, true, head->enough_cores);
    if (!world) {
        kn_local_unmap(head, bytes);
        close(fd);
        return NULL;
    }
    ((kn_local *)world->world->backend)->lock = fd;
    return world;
}
