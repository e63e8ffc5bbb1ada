/* tests/ports.h: ports for programs that meet over TCP. */
#ifndef KNAP_TESTS_PORTS_H
#define KNAP_TESTS_PORTS_H

#include <arpa/inet.h>
#include <stdbool.h>
#include <sys/socket.h>
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

/* The first of n free ports in a row, different at each call. They lie below the system's own range
 * of ephemeral ports, and processes begin at different ones. */
static inline int kn_test_ports(int n)
{
    static int at;
    at = at ? at : 10000 + (int)(getpid() % 1000) * 20;
    for (int i = 0; i < n; i++)
        if (!kn_test_port_is_free(at + i)) {
            at += i + 1;
            i = -1;
        }
    at += n;
    return at - n;
}

#endif
