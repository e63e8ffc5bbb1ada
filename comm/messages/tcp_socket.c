/* comm/messages/tcp_socket.c: connections for ranks that meet over TCP (tcp.h). All are
 * non-blocking; every wait has an end. */
#include "kernels/trace.h"
#include "comm/messages/tcp.h"
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* The time that a silent connection stays open, and the number of such connections. */
#define PATIENCE_S 5
enum { LISTENED_TO = 256 };

/* Words go at once; a host that vanishes is noticed in seconds, not hours. */
static void settle(int fd)
{
    const int one = 1, idle = 5, between = 2, tries = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between, sizeof between);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
}

static int listen_on(const uint8_t *address, int port, int *got_port)
{
    const int one = 1, none = 0;
    kn_tcp_target at = { .port = port };
    struct sockaddr_storage a;
    memcpy(at.address, address, sizeof at.address);
    socklen_t n = kn_tcp_socket_address(&at, &a);
    const int family = a.ss_family;
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one); /* of a job that just ended */
    if (family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &none, sizeof none);
    if (bind(fd, (struct sockaddr *)&a, n) == 0 && listen(fd, SOMAXCONN) == 0 &&
        getsockname(fd, (struct sockaddr *)&a, &n) == 0) {
        *got_port = ntohs(family == AF_INET6 ? ((struct sockaddr_in6 *)(void *)&a)->sin6_port
                                             : ((struct sockaddr_in *)(void *)&a)->sin_port);
        return fd;
    }
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

int kn_tcp_listen(const uint8_t *address, int port, int *got_port)
{
    static const uint8_t any[16] = { 0 }, any_of_ipv4[16] = { [10] = 0xff, [11] = 0xff };
    int fd = listen_on(address ? address : any, port, got_port);
    bool without = fd < 0 && errno != EADDRINUSE && errno != EACCES; /* a system without IPv6 */
    return without && !address ? listen_on(any_of_ipv4, port, got_port) : fd;
}

bool kn_tcp_ready(int fd, short events, double deadline)
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

bool kn_tcp_receive(int fd, void *data, size_t size, double deadline)
{
    for (size_t at = 0; at < size;) {
        ssize_t n = recv(fd, (char *)data + at, size - at, 0);
        if (n > 0)
            at += (size_t)n;
        else if (n == 0 || (errno != EAGAIN && errno != EINTR) ||
                 !kn_tcp_ready(fd, POLLIN, deadline))
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
        else if ((errno != EAGAIN && errno != EINTR) || !kn_tcp_ready(fd, POLLOUT, deadline))
            return false;
    }
    return true;
}

bool kn_tcp_is_gone(int fd)
{
    struct pollfd p = { fd, POLLRDHUP, 0 };
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

/* ---- calling --------------------------------------------------------------------------------- */

enum { ANSWER_MOST = 1024 };
/* After so long a silence the next address is tried. */
#define STAGGER_S 0.2

typedef struct attempt {
    int fd;
    bool said;
    size_t got;
    char answer[ANSWER_MOST];
} attempt;

typedef struct caller {
    const void *say;
    size_t bytes, size;
    bool (*right)(void *arg, const void *answer);
    void *arg;
    attempt attempt[KN_TCP_TARGETS];
    int started, open;
    int error; /* why the last one ended */
} caller;

static void begin(caller *c, const kn_tcp_target *t)
{
    struct sockaddr_storage a;
    socklen_t n = kn_tcp_socket_address(t, &a);
    attempt *x = &c->attempt[c->started++];
    *x = (attempt){ .fd = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0) };
    if (x->fd >= 0 && (connect(x->fd, (struct sockaddr *)&a, n) == 0 || errno == EINPROGRESS)) {
        c->open++;
        return;
    }
    c->error = errno;
    if (x->fd >= 0)
        close(x->fd);
    x->fd = -1;
}

/* The result of an attempt: 1 the right answer, 0 nothing yet, -1 with errno. */
static int advance(caller *c, attempt *x)
{
    int error = 0;
    socklen_t n = sizeof error;
    if (!x->said) {
        if (!kn_tcp_ready(x->fd, POLLOUT, 0))
            return 0;
        if (getsockopt(x->fd, SOL_SOCKET, SO_ERROR, &error, &n) != 0 || error != 0) {
            errno = error ? error : errno;
            return -1;
        }
        settle(x->fd);
        if (!kn_tcp_send(x->fd, c->say, c->bytes, kn_now() + 1))
            return -1;
        x->said = true;
    }
    ssize_t got = recv(x->fd, x->answer + x->got, c->size - x->got, 0);
    if (got < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    x->got += (size_t)got;
    if (got > 0 && x->got < c->size)
        return 0;
    errno = ECONNRESET;
    return got > 0 && c->right(c->arg, x->answer) ? 1 : -1;
}

static void doze(const caller *c, double until)
{
    struct pollfd polled[KN_TCP_TARGETS];
    double left = until - kn_now();
    int count = 0;
    for (int i = 0; i < c->started; i++)
        if (c->attempt[i].fd >= 0)
            polled[count++] =
                (struct pollfd){ c->attempt[i].fd, c->attempt[i].said ? POLLIN : POLLOUT, 0 };
    poll(polled, (nfds_t)count, left <= 0 ? 0 : left < 0.02 ? (int)(left * 1000) + 1 : 20);
}

int kn_tcp_call(const kn_tcp_target *t, int n, const void *say, size_t bytes, void *answer,
                size_t size, bool (*right)(void *arg, const void *answer), void *arg,
                double deadline)
{
    caller *c = size <= ANSWER_MOST && n <= KN_TCP_TARGETS ? kn_host_calloc(1, sizeof *c) : NULL;
    int fd = -1;
    double next = 0, now = kn_now();
    if (!c)
        return -1;
    c->say = say, c->bytes = bytes, c->size = size, c->right = right, c->arg = arg;
    c->error = n > 0 ? ETIMEDOUT : EADDRNOTAVAIL;
    while (fd < 0 && (c->started < n || c->open > 0) && now < deadline) {
        if (c->started < n && (c->open == 0 || now >= next)) {
            begin(c, &t[c->started]);
            next = now + STAGGER_S;
        }
        if (c->open > 0)
            doze(c, c->started < n ? next : deadline);
        for (int i = 0; i < c->started && fd < 0; i++) {
            attempt *x = &c->attempt[i];
            int to = x->fd >= 0 ? advance(c, x) : 0;
            if (to == 0)
                continue;
            if (to > 0) {
                fd = x->fd;
                memcpy(answer, x->answer, size);
            } else {
                c->error = errno;
                close(x->fd);
            }
            x->fd = -1;
            c->open--;
        }
        now = kn_now();
    }
    for (int i = 0; i < c->started; i++)
        if (c->attempt[i].fd >= 0)
            close(c->attempt[i].fd);
    errno = c->open > 0 ? ETIMEDOUT : c->error;
    int error = errno;
    kn_host_free(c);
    errno = error;
    return fd;
}

/* ---- at the door ----------------------------------------------------------------------------- */

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

/* The one with the longest silence makes room. */
static void forget_oldest(door *d, size_t size)
{
    int oldest = 0;
    for (int i = 1; i < d->count; i++)
        oldest = d->guest[i].since < d->guest[oldest].since ? i : oldest;
    forget(d, size, oldest, true);
}

static void let_in(door *d, size_t size, int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    bool no_room = fd < 0 && (errno == EMFILE || errno == ENFILE);
    if (d->count > 0 && ((fd >= 0 && d->count == LISTENED_TO) || no_room))
        forget_oldest(d, size);
    if (fd < 0) {
        if (no_room) /* the listener stays readable: don't spin */
            nanosleep(&(struct timespec){ .tv_nsec = 20000000 }, NULL);
        return;
    }
    settle(fd);
    d->guest[d->count++] = (guest){ .fd = fd, .since = kn_now() };
}

/* Reads guest i's message; 1: all of it, -1: it left, or was silent for too long. */
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
                  int (*admit)(void *arg, int fd, const void *message), bool (*go_on)(void *arg),
                  void *arg)
{
    door *d = kn_host_calloc(1, sizeof *d);
    int result = 0;
    if (!d || !(d->said = kn_host_calloc(LISTENED_TO, size)))
        result = -2;
    while (result == 0 && kn_ok() && kn_now() < deadline && (!go_on || go_on(arg))) {
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
        kn_host_free(d->said);
    kn_host_free(d);
    return result == 1;
}
