/* comm/messages/tcp.c: the world of ranks that talk over TCP, and communicators over some of them
 * (tcp.h). */
#include "comm/messages/tcp.h"
#include "kernels/trace.h"
#include <linux/sockios.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* The most seconds that the end of a world waits for its last words to arrive. */
#define SEE_OFF_S 5

/* ---- communicators --------------------------------------------------------------------------- */

static bool begin(kn_comm *base, int size)
{
    kn_tcp_comm *c = (kn_tcp_comm *)base;
    c->flow = kn_host_calloc(2 * (size_t)size, sizeof *c->flow);
    c->polled = kn_host_calloc(2 * (size_t)size, sizeof *c->polled);
    return kn_message_comm_begin(&c->base, size) && c->flow && c->polled;
}

static void end(kn_comm *base)
{
    kn_tcp_comm *c = (kn_tcp_comm *)base;
    if (base == c->base.w->first)
        kn_message_say_goodbye(c->base.w);
    kn_message_comm_end(&c->base);
    kn_host_free(c->flow);
    kn_host_free(c->polled);
}

/* ---- the world ------------------------------------------------------------------------------- */

/* Reads and forgets what has come; of a rank that goes on sending, some of it. */
static void drain(int fd)
{
    char rest[4096];
    for (int i = 0; i < 1024 && recv(fd, rest, sizeof rest, MSG_DONTWAIT) > 0; i++)
        ;
}

/* Waits until the other end has the last word. A connection that is closed before answers the next
 * message of that end by a reset, which would drop the word on a slow link. */
static void see_off(int fd, double deadline)
{
    struct pollfd p = { .fd = fd };
    int waiting = 0;
    while (kn_now() < deadline) {
        drain(fd);
        if (ioctl(fd, SIOCOUTQ, &waiting) != 0 || waiting == 0 || poll(&p, 1, 0) != 0)
            return; /* a poll that asks for nothing reports a connection that both ends have left */
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    }
}

/* Closing over unread bytes would drop sent ones. */
static void close_links(kn_tcp_world *w, int size)
{
    double deadline = kn_now() + SEE_OFF_S;
    for (int r = 0; w->link && r < size; r++) {
        int fd[2] = { w->link[r].data, w->link[r].control };
        for (int k = 0; k < 2; k++) {
            if (fd[k] < 0)
                continue;
            shutdown(fd[k], SHUT_WR);
            if (k == 1)
                see_off(fd[k], deadline);
            drain(fd[k]);
            close(fd[k]);
        }
    }
}

static void world_end(kn_tcp_world *w, int size)
{
    if (!w)
        return;
    close_links(w, size);
    kn_message_world_end(&w->base);
    pthread_mutex_destroy(&w->out_lock);
    pthread_mutex_destroy(&w->ear);
    kn_host_free(w->link);
    kn_host_free(w);
}

static int world_size; /* the communicators are gone when the world closes */

static void close_world(kn_comm_world *world)
{
    world_end(world->backend, world_size);
}

static const kn_comm_ops tcp_ops = {
    .backend = "tcp",
    .bytes = sizeof(kn_tcp_comm),
    .begin = begin,
    .end = end,
    .close = close_world,
    KN_MESSAGE_OPS,
};

kn_comm *kn_comm_tcp(const kn_tcp_place *place, int rank, int size)
{
    int local_rank = 0, local_size = 1;
    if (size > KN_TCP_MAX_RANKS)
        return kn_fail_null("%d ranks over TCP: at most %d; use MPI", size, KN_TCP_MAX_RANKS);
    kn_comm_world *world = kn_comm_world_make();
    kn_tcp_world *w = kn_host_calloc(1, sizeof *w);
    kn_comm *c = NULL;
    if (!world || !w ||
        !kn_comm_allow_files("tcp: each rank", 2 * size + 64)) /* two sockets for each other rank */
        goto fail;
    world->backend = w;
    pthread_mutex_init(&w->out_lock, NULL);
    pthread_mutex_init(&w->ear, NULL);
    w->link = kn_host_calloc((size_t)size, sizeof *w->link);
    for (int r = 0; w->link && r < size; r++)
        w->link[r].data = w->link[r].control = -1;
    if (!w->link || !kn_message_world_begin(&w->base, &kn_tcp_transport, size) ||
        !(c = kn_comm_make(world, &tcp_ops, size)) ||
        !kn_tcp_meet(place, rank, size, w->link, &local_rank, &local_size))
        goto fail;
    w->base.first = c;
    world_size = size;
    world->memory = kn_device_memory(KN_CPU);
    world->inline_only =
        true; /* the order of messages between two ranks is that of their programs */
    kn_set_free_cores(0);
    kn_comm_enter(c, world, &tcp_ops, rank, size, "world");
    kn_comm_device_place(local_rank, local_size, false);
    return c;
fail:
    kn_comm_drop(c);
    world_end(w, size);
    kn_host_free(world);
    return NULL;
}
