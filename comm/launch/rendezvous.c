/* comm/launch/rendezvous.c: ranks of one host that another launcher started find each other.
 *
 *   rank r                                  rank 0
 *   connect, hello (rank, size)       -->   check it
 *   map the memory, lock byte r       <--   yes and the memory's descriptor, or an error in words
 *   "here"                            -->   wait for all
 *   go                                <--   "go"
 *
 * The lock is how ranks notice that one has died, there being no supervisor: the kernel lets go of
 * it (local_world.c). Nothing has a name in the file system.
 *
 * Names in the abstract namespace have no owner: any user can take them first. So both sides read
 * the other's user from the kernel (SO_PEERCRED); if another user holds a name, ranks try the next
 * one. */
#include "kernels/trace.h"
#include "comm/launch/launch.h"
#include "comm/local/local.h"
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
    char magic[8]; /* changes with the messages */
    int32_t rank, size;
    char error[240]; /* rank 0's answer: empty for yes */
} message;

#define MAGIC "knap r3"
enum { NAMES = 8 }; /* that a job may meet under */

/* ---- sockets --------------------------------------------------------------------------------- */

/* Names of jobs can be longer than a path. */
static socklen_t address_of(const char *job, int name, struct sockaddr_un *a)
{
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "knap-%u-%016llx-%d",
                     (unsigned)getuid(), (unsigned long long)kn_hash_string(job), name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* A message that carries a descriptor has one byte. */
typedef struct parcel {
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    char byte;
    struct iovec io;
    struct msghdr message;
} parcel;

static struct cmsghdr *begin_parcel(parcel *p)
{
    *p = (parcel){ .byte = 'm' };
    p->io = (struct iovec){ &p->byte, 1 };
    p->message = (struct msghdr){ .msg_iov = &p->io,
                                  .msg_iovlen = 1,
                                  .msg_control = p->control,
                                  .msg_controllen = sizeof p->control };
    return CMSG_FIRSTHDR(&p->message);
}

static bool pass(int fd, int descriptor)
{
    parcel p;
    struct cmsghdr *c = begin_parcel(&p);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof descriptor);
    memcpy(CMSG_DATA(c), &descriptor, sizeof descriptor);
    return sendmsg(fd, &p.message, MSG_NOSIGNAL) == 1;
}

/* The descriptor that comes; -1: none. */
static int take_passed(int fd, double deadline)
{
    parcel p;
    int descriptor = -1;
    begin_parcel(&p);
    if (!kn_tcp_ready(fd, POLLIN, deadline) || recvmsg(fd, &p.message, MSG_CMSG_CLOEXEC) != 1)
        return -1;
    struct cmsghdr *c = CMSG_FIRSTHDR(&p.message);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
        memcpy(&descriptor, CMSG_DATA(c), sizeof descriptor);
    return descriptor;
}

/* The process at the other end belongs to this user; *uid (may be NULL): its user. */
static bool is_ours(int fd, unsigned *uid)
{
    struct ucred who = { .uid = (uid_t)-1 };
    socklen_t n = sizeof who;
    bool known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) == 0;
    if (known && uid)
        *uid = who.uid;
    return known && who.uid == getuid();
}

/* Connects to this user's listener at this name; -1 if there is none, with *uid of another user's
 * listener (unchanged without a listener). Never waits: a foreign process may keep its queue
 * full. */
static int call(const char *job, int name, unsigned *uid)
{
    struct sockaddr_un a;
    socklen_t n = address_of(job, name, &a);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, n) == 0 && is_ours(fd, uid))
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

static bool take_lock(int fd, int rank)
{
    struct flock f = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1 };
    return fcntl(fd, F_SETLK, &f) == 0 ||
           kn_fail("rendezvous: cannot lock byte %d of the shared memory: %s", rank,
                   strerror(errno));
}

/* ---- rank 0 ---------------------------------------------------------------------------------- */

/* At the first name that no other user holds. */
static int listen_at(const char *job)
{
    unsigned other = 0;
    for (int name = 0; name < NAMES; name++) {
        struct sockaddr_un a;
        socklen_t n = address_of(job, name, &a);
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd >= 0 && bind(fd, (struct sockaddr *)&a, n) == 0 &&
            listen(fd, KN_LOCAL_MAX_RANKS) == 0)
            return fd;
        int error = errno;
        if (fd >= 0)
            close(fd);
        if (error != EADDRINUSE) {
            kn_fail("rendezvous (%s): cannot open a Unix socket: %s", job, strerror(error));
            return -1;
        }
        if ((fd = call(job, name, &other)) >= 0) {
            close(fd);
            kn_fail("rendezvous (%s): another rank 0 of this user is there already: give each job "
                    "a MASTER_PORT of its own",
                    job);
            return -1;
        }
    }
    kn_fail("rendezvous (%s): other users (one has the number %u) hold all %d names that this job "
            "can meet under: give it another MASTER_PORT",
            job, other, NAMES);
    return -1;
}

typedef struct lobby {
    kn_lobby base;
    int memory; /* for those who enter */
} lobby;

/* Other users' processes are rejected silently, wrong ranks of this user with a message; the wait
 * for the right ones goes on. */
static int admit(void *arg, int fd, const void *said)
{
    lobby *l = arg;
    message hello, answer = { .magic = MAGIC, .size = l->base.size };
    memcpy(&hello, said, sizeof hello);
    if (!is_ours(fd, NULL) || memcmp(hello.magic, MAGIC, sizeof hello.magic) != 0)
        return -1;
    bool welcome = kn_lobby_judge(&l->base, hello.rank, hello.size, true);
    memcpy(answer.error, l->base.error, sizeof answer.error);
    if (!kn_tcp_send(fd, &answer, sizeof answer, kn_now() + 1) || !welcome || !pass(fd, l->memory))
        return -1;
    return kn_lobby_enter(&l->base, hello.rank, fd);
}

static bool gather_ranks(const char *job, lobby *l)
{
    char where[320];
    const double deadline = kn_now() + kn_comm_default_timeout();
    const int listener = listen_at(job);
    snprintf(where, sizeof where, "on this host (%s)", job);
    bool ok = listener >= 0 &&
              (l->base.missing == 0 ||
               kn_tcp_admit(listener, sizeof(message), deadline, admit, NULL, l) ||
               kn_lobby_late(&l->base, where)) &&
              kn_lobby_go(&l->base, deadline);
    if (listener >= 0)
        close(listener);
    return ok;
}

static kn_local_head *lead(const char *job, int size, int threads, int *fd, size_t *bytes)
{
    kn_tcp_link *link = kn_host_calloc((size_t)size, sizeof *link);
    kn_local_head *head =
        link ? kn_local_create(size, kn_local_share_cores(size, threads), fd, bytes) : NULL;
    lobby l = { { .size = size, .missing = size - 1, .link = link }, *fd };
    for (int r = 0; head && r < size; r++)
        link[r].control = -1;
    bool ok = head && take_lock(*fd, 0) && gather_ranks(job, &l);
    for (int r = 1; head && r < size; r++)
        if (link[r].control >= 0)
            close(link[r].control);
    kn_host_free(link);
    if (ok)
        return head;
    kn_local_unmap(head, *bytes);
    if (head)
        close(*fd);
    return NULL;
}

/* ---- the others ------------------------------------------------------------------------------ */

/* Connected to rank 0, which may be started after us. */
static int knock(const char *job, int rank, int size, double seconds)
{
    double deadline = kn_now() + seconds;
    for (;;) {
        unsigned other = getuid();
        for (int name = 0; name < NAMES; name++) {
            int fd = call(job, name, &other);
            if (fd >= 0)
                return fd;
        }
        if (kn_now() > deadline) {
            char squatter[80] = "";
            if (other != getuid())
                snprintf(squatter, sizeof squatter, "; another user (number %u) holds its name",
                         other);
            kn_fail("rendezvous (%s): rank %d of %d waited %g s for rank 0 to come: is it started, "
                    "on this host and with the same address and port? (to wait longer: "
                    "KNAP_TIMEOUT)%s",
                    job, rank, size, seconds, squatter);
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
    *memory = -1;
    int fd = knock(job, rank, size, seconds);
    if (fd < 0)
        return NULL;
    deadline = kn_now() + seconds + 1; /* rank 0 gives up first, and sends the reason */
    if (!kn_tcp_send(fd, &hello, sizeof hello, deadline) ||
        !kn_tcp_receive(fd, &answer, sizeof answer, deadline)) {
        kn_fail("rendezvous (%s): rank 0 did not answer rank %d of %d", job, rank, size);
        goto fail;
    }
    if (answer.error[0] || (*memory = take_passed(fd, deadline)) < 0) {
        answer.error[sizeof answer.error - 1] = 0;
        kn_fail("%s", answer.error[0] ? answer.error : "rendezvous: rank 0 sent no shared memory");
        goto fail;
    }
    if (!(head = kn_local_map(*memory, bytes)))
        goto fail;
    if (!take_lock(*memory, rank) || !kn_lobby_wait(fd, size, deadline))
        goto fail;
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
    if (size > KN_LOCAL_MAX_RANKS)
        return kn_fail_null("%d ranks on one host: at most %d", size, KN_LOCAL_MAX_RANKS);
    kn_local_head *head =
        rank == 0 ? lead(job, size, threads, &fd, &bytes) : follow(job, rank, size, &fd, &bytes);
    if (!head)
        return NULL;
    kn_comm *world = kn_comm_local(head, bytes, rank, true);
    if (!world) {
        kn_local_unmap(head, bytes);
        close(fd);
        return NULL;
    }
    ((kn_local *)world->world->backend)->lock = fd;
    return world;
}
