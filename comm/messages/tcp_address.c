/* comm/messages/tcp_address.c: the addresses of a rank (tcp.h). A host has many addresses and can't
 * tell which of them work for the others, so it publishes all, and a connecting rank tries them. */
#include "comm/messages/tcp.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* The host and network of this process. */
static void find_here(uint64_t *host, uint64_t *net)
{
    char boot[128] = "", space[128] = "", name[256] = "";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    bool known = fd >= 0 && read(fd, boot, sizeof boot - 1) > 0 &&
                 readlink("/proc/self/ns/net", space, sizeof space - 1) > 0;
    if (fd >= 0)
        close(fd);
    uint64_t h = kn_hash64(kn_hash_string(boot), kn_hash_string(space));
    if (!known && getrandom(&h, sizeof h, 0) != (ssize_t)sizeof h)
        h = (uint64_t)getpid(); /* shares it with no other */
    *net = h;
    gethostname(name, sizeof name - 1); /* containers of one machine are hosts of their own */
    *host = kn_hash64(h, kn_hash_string(name));
}

bool kn_tcp_is_loopback(const uint8_t *a)
{
    const struct in6_addr *v6 = (const struct in6_addr *)(const void *)a;
    return IN6_IS_ADDR_LOOPBACK(v6) || (IN6_IS_ADDR_V4MAPPED(v6) && a[12] == 127);
}

/* Whether others can use it: link-local ones of IPv6 need an interface beside them. */
static bool is_public(const uint8_t *a)
{
    const struct in6_addr *v6 = (const struct in6_addr *)(const void *)a;
    return !kn_tcp_is_loopback(a) && !IN6_IS_ADDR_LINKLOCAL(v6) && !IN6_IS_ADDR_UNSPECIFIED(v6);
}

static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

static bool take(const struct sockaddr *from, uint8_t *a)
{
    if (from && from->sa_family == AF_INET6) {
        memcpy(a, &((const struct sockaddr_in6 *)(const void *)from)->sin6_addr, 16);
    } else if (from && from->sa_family == AF_INET) {
        memcpy(a, mapped, 12);
        memcpy(a + 12, &((const struct sockaddr_in *)(const void *)from)->sin_addr, 4);
    } else {
        return false;
    }
    return true;
}

socklen_t kn_tcp_socket_address(const kn_tcp_target *t, struct sockaddr_storage *to)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)(void *)to;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)(void *)to;
    memset(to, 0, sizeof *to);
    if (IN6_IS_ADDR_V4MAPPED((const struct in6_addr *)(const void *)t->address)) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)t->port);
        memcpy(&v4->sin_addr, t->address + 12, 4);
        return sizeof *v4;
    }
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons((uint16_t)t->port);
    memcpy(&v6->sin6_addr, t->address, 16);
    return sizeof *v6;
}

const char *kn_tcp_address_text(const uint8_t *a, char *text)
{
    bool v4 = IN6_IS_ADDR_V4MAPPED((const struct in6_addr *)(const void *)a);
    return inet_ntop(v4 ? AF_INET : AF_INET6, v4 ? a + 12 : a, text, KN_TCP_TEXT) ? text : "?";
}

bool kn_tcp_address_read(const char *text, uint8_t *a)
{
    if (inet_pton(AF_INET6, text, a) == 1)
        return true;
    memcpy(a, mapped, 12);
    return inet_pton(AF_INET, text, a + 12) == 1;
}

bool kn_tcp_address_of(int fd, bool own, uint8_t *a)
{
    struct sockaddr_storage from;
    socklen_t n = sizeof from;
    return (own ? getsockname : getpeername)(fd, (struct sockaddr *)&from, &n) == 0 &&
           take((struct sockaddr *)&from, a);
}

bool kn_tcp_seat_sound(const kn_tcp_seat *s)
{
    return s->port >= 1 && s->port <= 65535 && s->count >= 0 && s->count <= KN_TCP_ADDRESSES;
}

void kn_tcp_seat_add(kn_tcp_seat *s, const uint8_t *a, bool first)
{
    int at = 0;
    if (!is_public(a))
        return;
    while (at < s->count && memcmp(s->address[at], a, 16) != 0)
        at++;
    if (at < s->count && !first)
        return;
    if (at == KN_TCP_ADDRESSES) {
        if (!first)
            return;
        at--; /* in the place of the last */
    } else if (at == s->count) {
        s->count++;
    }
    for (; first && at > 0; at--)
        memcpy(s->address[at], s->address[at - 1], 16);
    memcpy(s->address[at], a, 16);
}

bool kn_tcp_address_for(const char *host, bool own, uint8_t *a)
{
    kn_tcp_target rank_0 = { .port = 9 }; /* nothing is sent there */
    struct sockaddr_storage to;
    if (!kn_tcp_address_read(strcmp(host, "localhost") == 0 ? "127.0.0.1" : host, a) ||
        (!kn_tcp_is_loopback(a) && !is_public(a)))
        return false;
    if (own || kn_tcp_is_loopback(a))
        return true;
    memcpy(rank_0.address, a, 16);
    socklen_t n = kn_tcp_socket_address(&rank_0, &to);
    int fd = socket(to.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool known = fd >= 0 && connect(fd, (struct sockaddr *)&to, n) == 0 &&
                 kn_tcp_address_of(fd, true, a) && is_public(a);
    if (fd >= 0)
        close(fd);
    return known;
}

void kn_tcp_seat_begin(kn_tcp_seat *s, int port, const uint8_t *address)
{
    struct ifaddrs *all = NULL;
    uint8_t a[16];
    *s = (kn_tcp_seat){ .port = port, .count = address != NULL };
    find_here(&s->host, &s->net);
    if (address)
        memcpy(s->address[0], address, 16);
    if (address || getifaddrs(&all) != 0)
        return;
    for (int family = 0; family < 2; family++) /* those of IPv4 first */
        for (struct ifaddrs *i = all; i; i = i->ifa_next)
            if (i->ifa_addr && (i->ifa_flags & IFF_UP) &&
                i->ifa_addr->sa_family == (family ? AF_INET6 : AF_INET) && take(i->ifa_addr, a))
                kn_tcp_seat_add(s, a, false);
    freeifaddrs(all);
}

int kn_tcp_seat_targets(const kn_tcp_seat *s, uint64_t net, kn_tcp_target *t)
{
    int n = 0;
    if (s->port < 1 || s->port > 65535)
        return 0;
    if (s->net == net && kn_tcp_address_read("127.0.0.1", t[n].address)) {
        if (s->count > 0 && kn_tcp_is_loopback(s->address[0]))
            memcpy(t[n].address, s->address[0], 16);
        t[n++].port = s->port;
    }
    for (int i = 0; i < s->count && i < KN_TCP_ADDRESSES; i++) {
        if (!is_public(s->address[i]))
            continue;
        memcpy(t[n].address, s->address[i], 16);
        t[n++].port = s->port;
    }
    return n;
}

int kn_tcp_resolve(const char *host, int port, int ports, kn_tcp_target *t, const char **why)
{
    struct addrinfo *list = NULL, wanted = { .ai_socktype = SOCK_STREAM };
    int n = 0, error = getaddrinfo(host, NULL, &wanted, &list);
    if (error != 0) {
        *why = gai_strerror(error);
        return 0;
    }
    for (int i = 0; i < ports; i++)
        for (struct addrinfo *a = list; a && n < KN_TCP_TARGETS; a = a->ai_next)
            if (take(a->ai_addr, t[n].address))
                t[n++].port = port + i;
    freeaddrinfo(list);
    return n;
}
