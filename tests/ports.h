/* tests/ports.h: ports for programs that meet over TCP. */
#ifndef KNAP_TESTS_PORTS_H
#define KNAP_TESTS_PORTS_H

#include <arpa/inet.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static inline bool kn_test_port_is_free(int port)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
    int on = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    bool is_free = fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0;
    if (fd >= 0)
        close(fd);
    return is_free;
}

/* True if no other process of this host has taken this port so, which lasts as long as this
 * process. */
static inline bool kn_test_port_is_mine(int port)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int length = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "knap-test-port-%d", port);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&a,
                        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)) == 0)
        return true; /* the descriptor stays open */
    if (fd >= 0)
        close(fd);
    return false;
}

/* The first of n free ports in a row, different at each call and in each process of this host. They
 * lie below the system's own range of ephemeral ports. */
static inline int kn_test_ports(int n)
{
    static int at;
    at = at && at < 31000 ? at : 10000 + (int)(getpid() % 1000) * 20;
    for (int i = 0; i < n; i++)
        if (!kn_test_port_is_mine(at + i) || !kn_test_port_is_free(at + i)) {
            at += i + 1;
            i = -1;
        }
    at += n;
    return at - n;
}

#endif
