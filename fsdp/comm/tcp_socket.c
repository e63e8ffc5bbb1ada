/* fsdp/comm/tcp_socket.c: connections for ranks that meet over TCP (tcp.h). All are non-blocking; every wait has
 * an end. */
#include "fsdp/comm/tcp.h"
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Whoever connects and says nothing is listened to this long, and among so many. */
#define PATIENCE_S 5
enum { LISTENED_TO = 256 };

/* Words go at once; a host that is gone without a word is noticed in seconds, not hours. */
static void settle(int fd)
{
    const int one = 1, idle = 5, between = 2, tries = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between, sizeof between);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
}

static struct addrinfo *find(const char *host, int port, int flags)
{
    struct addrinfo *list = NULL,
                    wanted = { .ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV };
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    return getaddrinfo(host, service, &wanted, &list) == 0 ? list : NULL;
}

int kn_tcp_listen_at(const char *host, int port, int *got_port)
{
    struct addrinfo *list = find(host, port, AI_PASSIVE);
    int fd = -1, error = EADDRNOTAVAIL;
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        const int one = 1;
        struct sockaddr_storage own;
        socklen_t n = sizeof own;
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd >= 0)
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one,
                       sizeof one); /* of a job that just ended */
        if (fd >= 0 && bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0 &&
            getsockname(fd, (struct sockaddr *)&own, &n) == 0) {
            *got_port = ntohs(own.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&own)->sin6_port
                                                        : ((struct sockaddr_in *)&own)->sin_port);
            break;
        }
        error = errno;
        if (fd >= 0)
            close(fd);
        fd = -1;
    }
    if (list)
        freeaddrinfo(list);
    errno = error;
    return fd;
}

/* Waits for what events say, until the deadline. */
static bool ready(int fd, short events, double deadline)
{
    for (;;) {
        double left = deadline - kn_now();
        struct pollfd p = { fd, events, 0 };
        int n = poll(&p, 1, left <= 0 ? 0 : left < 1 ? (int)(left * 1000) + 1 : 1000);
        if (n > 0)
            return true;
        if ((n < 0 && errno != EINTR) || left <= 0)
            return false;
    }
}

int kn_tcp_connect(const char *host, int port, double deadline)
{
    struct addrinfo *list = find(host, port, 0);
    int fd = -1;
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        int error = 0;
        socklen_t n = sizeof error;
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
            continue;
        bool ok = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ||
                  (errno == EINPROGRESS && ready(fd, POLLOUT, deadline) &&
                   getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &n) == 0 && error == 0);
        if (!ok) {
            close(fd);
            fd = -1;
        }
    }
    if (list)
        freeaddrinfo(list);
    if (fd >= 0)
        settle(fd);
    return fd;
}

bool kn_tcp_receive(int fd, void *data, size_t size, double deadline)
{
    for (size_t at = 0; at < size;) {
        ssize_t n = recv(fd, (char *)data + at, size - at, 0);
        if (n > 0)
            at += (size_t)n;
        else if (n == 0 || (errno != EAGAIN && errno != EINTR) || !ready(fd, POLLIN, deadline))
            return false;
    }
    return true;
}

bool kn_tcp_send(int fd, const void *data, size_t size, double deadline)
{
    for (size_t at = 0; at < size;) {
        ssize_t n = send(fd, (const char *)data + at, size - at, MSG_NOSIGNAL);
        if (n > 0)
            at += (size_t)n;
        else if ((errno != EAGAIN && errno != EINTR) || !ready(fd, POLLOUT, deadline))
            return false;
    }
    return true;
}

/* ---- at the door ------------------------------------------------------------------------------ */

typedef struct guest {
    int fd;
    double since;
    size_t got;
} guest;

typedef struct door {
    int count;
    guest guest[LISTENED_TO];
    struct pollfd polled[LISTENED_TO + 1];
    char *said; /* [LISTENED_TO][size] */
} door;

static void forget(door *d, size_t size, int i, bool shut)
{
    if (shut)
        close(d->guest[i].fd);
    d->guest[i] = d->guest[--d->count];
    memcpy(d->said + (size_t)i * size, d->said + (size_t)d->count * size, size);
}

static void let_in(door *d, size_t size, int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    if (d->count == LISTENED_TO) { /* the one that has said nothing for longest makes room */
        int oldest = 0;
        for (int i = 1; i < d->count; i++)
            oldest = d->guest[i].since < d->guest[oldest].since ? i : oldest;
        forget(d, size, oldest, true);
    }
    settle(fd);
    d->guest[d->count++] = (guest){ .fd = fd, .since = kn_now() };
}

/* What guest i has said so far; 1: all of it, -1: it left, or said nothing for too long. */
static int hear(door *d, size_t size, int i)
{
    guest *g = &d->guest[i];
    ssize_t n = recv(g->fd, d->said + (size_t)i * size + g->got, size - g->got, 0);
    if (n > 0)
        g->got += (size_t)n;
    if (g->got == size)
        return 1;
    bool left = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
    return left || kn_now() - g->since > PATIENCE_S ? -1 : 0;
}

bool kn_tcp_admit(int listener, size_t size, double deadline,
                  int (*admit)(void *arg, int fd, const void *message), void *arg)
{
    door *d = kn_calloc(1, sizeof *d);
    int result = 0;
    if (!d || !(d->said = kn_calloc(LISTENED_TO, size)))
        result = -2;
    while (result == 0 && kn_now() < deadline) {
        d->polled[0] = (struct pollfd){ listener, POLLIN, 0 };
        for (int i = 0; i < d->count; i++)
            d->polled[i + 1] = (struct pollfd){ d->guest[i].fd, POLLIN, 0 };
        poll(d->polled, (nfds_t)d->count + 1, 20);
        for (int i = d->count - 1; i >= 0 && result == 0; i--) {
            int heard = hear(d, size, i);
            if (heard > 0)
                result = admit(arg, d->guest[i].fd, d->said + (size_t)i * size);
            if (heard != 0)
                forget(d, size, i, heard < 0 || result < 0);
            result = result == -1 ? 0 : result;
        }
        if (result == 0)
            let_in(d, size, listener);
    }
    while (d && d->count > 0)
        forget(d, size, d->count - 1, true);
    if (d)
        kn_free_host(d->said);
    kn_free_host(d);
    return result == 1;
}
