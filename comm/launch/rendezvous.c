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
    int size, memory, missing;
    int link[KN_LOCAL_MAX_RANKS];
    char refused[240]; /* why a rank was last refused */
} lobby;

/* The seat of a rank that left again is free. */
static void clear_seat(lobby *l, int r)
{
    if (l->link[r] < 0 || !kn_tcp_is_gone(l->link[r]))
        return;
    close(l->link[r]);
    l->link[r] = -1;
    l->missing++;
}

/* The fault of this hello, as text; empty: none. */
static void judge(lobby *l, const message *hello, char *error, size_t size)
{
    bool there = hello->rank >= 1 && hello->rank < l->size;
    error[0] = 0;
    if (there)
        clear_seat(l, hello->rank);
    if (hello->size != l->size)
        snprintf(error, size,
                 "WORLD_SIZE is %d on rank 0 and %d on rank %d: give every rank the same", l->size,
                 hello->size, hello->rank);
    else if (!there || l->link[hello->rank] >= 0)
        snprintf(error, size,
                 "two processes say that they are rank %d of %d: give each its own RANK",
                 hello->rank, l->size);
}

/* Other users' processes are rejected silently, wrong ranks of this user with a message; the wait
 * for the right ones goes on. */
static int admit(void *arg, int fd, const void *said)
{
    lobby *l = arg;
    message hello, answer = { .magic = MAGIC, .size = l->size };
    memcpy(&hello, said, sizeof hello);
    if (!is_ours(fd, NULL) || memcmp(hello.magic, MAGIC, sizeof hello.magic) != 0)
        return -1;
    judge(l, &hello, answer.error, sizeof answer.error);
    if (answer.error[0])
        memcpy(l->refused, answer.error, sizeof l->refused);
    if (!kn_tcp_send(fd, &answer, sizeof answer, kn_now() + 1) || answer.error[0] ||
        !pass(fd, l->memory))
        return -1;
    l->link[hello.rank] = fd;
    l->missing--;
    for (int r = 1; r < l->size && l->missing == 0; r++)
        clear_seat(l, r);
    return l->missing == 0;
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

static bool gather_ranks(const char *job, lobby *l, double seconds)
{
    char who[160], here;
    const double deadline = kn_now() + seconds;
    const int listener = listen_at(job);
    l->missing = l->size - 1;
    bool ok =
        listener >= 0 &&
        (l->missing == 0 || kn_tcp_admit(listener, sizeof(message), deadline, admit, NULL, l) ||
         kn_fail("rendezvous (%s): rank 0 of %d waited %g s, and rank %s did not come: are "
                 "all %d ranks started? (to wait longer: KNAP_TIMEOUT)%s%s",
                 job, l->size, seconds, list_missing(l->link, l->size, who, sizeof who), l->size,
                 l->refused[0] ? "; refused: " : "", l->refused));
    for (int r = 1; r < l->size && ok; r++)
        if (!kn_tcp_receive(l->link[r], &here, 1, deadline))
            ok = kn_fail("rendezvous (%s): rank %d came and did not answer", job, r);
    for (int r = 1; r < l->size && ok; r++)
        if (!kn_tcp_send(l->link[r], "g", 1, deadline))
            ok = kn_fail("rendezvous (%s): rank %d came and left again", job, r);
    if (listener >= 0)
        close(listener);
    return ok;
}

static kn_local_head *lead(const char *job, int size, int threads, int *fd, size_t *bytes)
{
    lobby l = { .size = size };
    kn_local_head *head = kn_local_create(size, kn_local_share_cores(size, threads), fd, bytes);
    if (!head)
        return NULL;
    for (int r = 0; r < size; r++)
        l.link[r] = -1;
    l.memory = *fd;
    bool ok = take_lock(*fd, 0) && gather_ranks(job, &l, kn_comm_default_timeout());
    for (int r = 1; r < size; r++)
        if (l.link[r] >= 0)
            close(l.link[r]);
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
    char go;
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
    if (!take_lock(*memory, rank))
        goto fail;
    if (!kn_tcp_send(fd, "h", 1, deadline) || !kn_tcp_receive(fd, &go, 1, deadline)) {
        kn_fail("rendezvous (%s): rank 0 gave up before all %d ranks had come; its message "
                "has the reason",
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
