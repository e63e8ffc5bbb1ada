/* fsdp/comm/tcp_meet.c: ranks on several hosts find each other (tcp.h).
 *
 *   rank r                                      rank 0
 *   connect, hello (job, rank, size, port) -->  check it
 *                                          <--  the secret of this job, or an error in words
 *                  (once all have come)    <--  where all ranks listen
 *   connect to the ranks below, twice, with the secret; take in those above
 *   "here"                                 -->  wait for all
 *   go                                     <--  "go"
 *
 * The connection to rank 0 stays, for words. Rank 0 is found by address and port, of which a few are tried: a
 * launcher's agent holds MASTER_PORT itself, and others the next; or by a file that rank 0 writes. */
#include "fsdp/comm/tcp.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAGIC "knap t1" /* changes with what follows */
enum { ADDRESS = 64, FILE_MOST = 8192, KNOCK_MS = 20 };

typedef struct hello {
    char magic[8];
    uint64_t job, host,
        word; /* hash of the job's name, of the host's; size of a word: the same libknap? */
    int32_t rank, size, port, unused;
} hello;

typedef struct answer {
    char magic[8];
    uint64_t secret[2];
    char error[240]; /* empty for yes */
} answer;

/* To a rank that has the table. */
typedef struct greeting {
    char magic[8];
    uint64_t secret[2];
    int32_t rank, data; /* data: for bytes, else for words */
} greeting;

typedef struct seat {
    char address[ADDRESS]; /* as numbers */
    int32_t port, unused;
    uint64_t host;
} seat;

typedef struct meeting {
    const kn_tcp_place *place;
    int rank, size, listener, port;
    uint64_t job, host, secret[2];
    double deadline;
    seat *seat; /* [size] */
    kn_tcp_link *link;
    int missing;
} meeting;

/* ---- names ------------------------------------------------------------------------------------- */

static uint64_t hash(uint64_t h, const char *text)
{
    for (; *text; text++) /* FNV-1a */
        h = (h ^ (unsigned char)*text) * UINT64_C(0x100000001b3);
    return h;
}

static uint64_t hash_host(void)
{
    char text[512] = "";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && read(fd, text, 128) < 0)
        text[0] = 0;
    if (fd >= 0)
        close(fd);
    uint64_t h = hash(UINT64_C(0xcbf29ce484222325), text);
    memset(text, 0, sizeof text);
    gethostname(text, sizeof text - 1); /* containers of one machine are hosts of their own */
    return hash(h, text);
}

static bool name_of(const struct sockaddr *a, char *text)
{
    const void *from = a->sa_family == AF_INET6
                           ? (const void *)&((const struct sockaddr_in6 *)a)->sin6_addr
                           : &((const struct sockaddr_in *)a)->sin_addr;
    return (a->sa_family == AF_INET || a->sa_family == AF_INET6) &&
           inet_ntop(a->sa_family, from, text, ADDRESS) != NULL;
}

static bool address_of(int fd, bool own, char *text)
{
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    return (own ? getsockname : getpeername)(fd, (struct sockaddr *)&a, &n) == 0 &&
           name_of((struct sockaddr *)&a, text);
}

/* "at 10.0.0.1, ports 29501 to 29508", or "by the file /tmp/x". */
static const char *where(const kn_tcp_place *p, char *text, size_t size)
{
    if (p->ports == 0)
        snprintf(text, size, "by the file %s", p->host);
    else if (p->ports == 1)
        snprintf(text, size, "at %s, port %d", p->host, p->port);
    else
        snprintf(text, size, "at %s, ports %d to %d", p->host, p->port, p->port + p->ports - 1);
    return text;
}

/* ---- the file ------------------------------------------------------------------------------------ */

/* Its lines: magic and job; the port; an address each. It appears whole. */
static bool write_file(const meeting *m)
{
    char temporary[300], text[ADDRESS];
    struct ifaddrs *all = NULL;
    snprintf(temporary, sizeof temporary, "%s.%d", m->place->host, (int)getpid());
    unlink(temporary);
    FILE *f = fopen(temporary, "wxe");
    if (!f)
        return kn_fail("rendezvous: cannot write %s: %s", temporary, strerror(errno));
    fprintf(f, "%s %016llx\n%d\n", MAGIC, (unsigned long long)m->job, m->port);
    if (getifaddrs(&all) == 0)
        for (int loop = 0; loop < 2; loop++) /* the loopback last */
            for (struct ifaddrs *a = all; a; a = a->ifa_next)
                if (a->ifa_addr && (a->ifa_flags & IFF_UP) &&
                    !!(a->ifa_flags & IFF_LOOPBACK) == loop && a->ifa_addr->sa_family == AF_INET &&
                    name_of(a->ifa_addr, text))
                    fprintf(f, "%s\n", text);
    if (all)
        freeifaddrs(all);
    bool ok = fclose(f) == 0 && rename(temporary, m->place->host) == 0;
    if (!ok)
        unlink(temporary);
    return ok || kn_fail("rendezvous: cannot write %s: %s", m->place->host, strerror(errno));
}

/* How many addresses the file names, at most `most`; 0 where it isn't there, or isn't of this job. */
static int read_file(const meeting *m, char address[][ADDRESS], int most, int *port)
{
    char text[FILE_MOST + 1], want[40], *save = NULL;
    int n = 0, fd = open(m->place->host, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t got = fd >= 0 ? read(fd, text, FILE_MOST) : 0;
    if (fd >= 0)
        close(fd);
    text[got > 0 ? got : 0] = 0;
    snprintf(want, sizeof want, "%s %016llx", MAGIC, (unsigned long long)m->job);
    char *line = strtok_r(text, "\n", &save);
    if (!line || strcmp(line, want) != 0 || !(line = strtok_r(NULL, "\n", &save)))
        return 0;
    *port = atoi(line);
    while (*port > 0 && *port < 65536 && n < most && (line = strtok_r(NULL, "\n", &save))) {
        struct in_addr a;
        if (inet_pton(AF_INET, line, &a) == 1)
            snprintf(address[n++], ADDRESS, "%s", line);
    }
    return n;
}

/* ---- rank 0 -------------------------------------------------------------------------------------- */

static bool open_door(meeting *m)
{
    const kn_tcp_place *p = m->place;
    char text[400];
    m->listener = -1;
    if (p->ports == 0) {
        m->listener = kn_tcp_listen_at("0.0.0.0", 0, &m->port);
    } else {
        /* on the address by which the others know this host, where it is one of this host's own */
        for (int i = 0; i < p->ports && m->listener < 0; i++)
            m->listener = kn_tcp_listen_at(p->host, p->port + i, &m->port);
        for (int i = 0; i < p->ports && m->listener < 0 && errno != EADDRINUSE; i++)
            m->listener = kn_tcp_listen_at(NULL, p->port + i, &m->port);
    }
    if (m->listener < 0)
        return kn_fail("rendezvous: rank 0 cannot listen %s: %s", where(p, text, sizeof text),
                       strerror(errno));
    return p->ports > 0 || write_file(m);
}

static void refuse(int fd, const char *error)
{
    answer no = { .magic = MAGIC };
    snprintf(no.error, sizeof no.error, "%s", error);
    kn_tcp_send(fd, &no, sizeof no, kn_now() + 1);
}

static int admit_hello(void *arg, int fd, const void *message)
{
    meeting *m = arg;
    const hello *h = message;
    answer yes = { .magic = MAGIC };
    if (memcmp(h->magic, MAGIC, sizeof h->magic) != 0 || h->job != m->job)
        return -1; /* a stranger, or another job that looks for its rank 0 */
    if (h->word != sizeof(kn_message_word))
        kn_fail("rendezvous: rank %d runs another version of libknap than rank 0", h->rank);
    else if (h->size != m->size)
        kn_fail("WORLD_SIZE is %d on rank 0 and %d on rank %d: give every rank the same", m->size,
                h->size, h->rank);
    else if (h->rank < 1 || h->rank >= m->size || m->link[h->rank].control >= 0)
        kn_fail("two processes say that they are rank %d of %d: give each its own RANK", h->rank,
                m->size);
    if (!kn_ok()) {
        refuse(fd, kn_error());
        return -2;
    }
    seat *s = &m->seat[h->rank];
    if (h->port < 1 || h->port > 65535 || !address_of(fd, false, s->address))
        return -1;
    s->port = h->port;
    s->host = h->host;
    memcpy(yes.secret, m->secret, sizeof yes.secret);
    if (!kn_tcp_send(fd, &yes, sizeof yes, kn_now() + 1))
        return -1;
    m->link[h->rank].control = fd;
    return --m->missing == 0;
}

static const char *list_missing(const meeting *m, char *buf, size_t size)
{
    size_t used = 0;
    buf[0] = 0;
    for (int r = 1; r < m->size && used + 16 < size; r++)
        if (m->link[r].control < 0)
            used += (size_t)snprintf(buf + used, size - used, "%s%d", used ? ", " : "", r);
    return buf;
}

static bool tell_all(const meeting *m, const void *data, size_t bytes)
{
    bool ok = true;
    for (int r = 1; r < m->size && ok; r++)
        ok = kn_tcp_send(m->link[r].control, data, bytes, m->deadline) ||
             kn_fail("rendezvous: rank %d came and left again", r);
    return ok;
}

static bool lead(meeting *m)
{
    char who[160], at[400];
    if (getrandom(m->secret, sizeof m->secret, 0) != (ssize_t)sizeof m->secret)
        return kn_fail("rendezvous: the system has no random numbers: %s", strerror(errno));
    m->missing = m->size - 1;
    m->seat[0].host = m->host;
    if (!kn_tcp_admit(m->listener, sizeof(hello), m->deadline, admit_hello, m)) {
        if (kn_ok())
            kn_fail("rendezvous: rank 0 of %d waited %g s %s, and rank %s did not come: are all %d "
                    "ranks started, and may they connect to here? (to wait longer: KNAP_TIMEOUT)",
                    m->size, kn_comm_default_timeout(), where(m->place, at, sizeof at),
                    list_missing(m, who, sizeof who), m->size);
        for (int r = 1; r < m->size; r++) /* in the place of the table */
            if (m->link[r].control >= 0)
                refuse(m->link[r].control, kn_error());
        return false;
    }
    answer yes = { .magic = MAGIC };
    return tell_all(m, &yes, sizeof yes) && tell_all(m, m->seat, (size_t)m->size * sizeof *m->seat);
}

/* ---- the others ---------------------------------------------------------------------------------- */

/* Rank 0 at this address takes us for one of its job. An error where it says no. */
static bool knock(meeting *m, const char *host, int port)
{
    double soon = kn_now() + 5 < m->deadline ? kn_now() + 5 : m->deadline;
    hello h = { .magic = MAGIC,
                .job = m->job,
                .host = m->host,
                .word = sizeof(kn_message_word),
                .rank = m->rank,
                .size = m->size };
    answer a;
    char own[ADDRESS];
    int fd = kn_tcp_connect(host, port, kn_now() + 2);
    if (fd < 0)
        return false;
    if (m->listener < 0 && address_of(fd, true, own))
        m->listener = kn_tcp_listen_at(own, 0, &m->port);
    h.port = m->port;
    bool ok = m->listener >= 0 && kn_tcp_send(fd, &h, sizeof h, soon) &&
              kn_tcp_receive(fd, &a, sizeof a, soon) && memcmp(a.magic, MAGIC, sizeof a.magic) == 0;
    if (ok && a.error[0]) {
        a.error[sizeof a.error - 1] = 0;
        ok = kn_fail("%s", a.error);
    }
    if (!ok) {
        close(fd);
        return false;
    }
    memcpy(m->secret, a.secret, sizeof m->secret);
    if (!address_of(fd, false, m->seat[0].address)) /* the others need it again */
        snprintf(m->seat[0].address, ADDRESS, "%.*s", ADDRESS - 1, host);
    m->seat[0].port = port;
    m->link[0].control = fd;
    return true;
}

static bool find_leader(meeting *m)
{
    const kn_tcp_place *p = m->place;
    char address[16][ADDRESS], at[400];
    while (kn_ok() && kn_now() < m->deadline) {
        int port = 0, n = p->ports == 0 ? read_file(m, address, 16, &port) : p->ports;
        for (int i = 0; i < n && kn_ok(); i++)
            if (knock(m, p->ports ? p->host : address[i], p->ports ? p->port + i : port))
                return true;
        nanosleep(&(struct timespec){ .tv_nsec = KNOCK_MS * 1000000L }, NULL);
    }
    return kn_ok() &&
           kn_fail("rendezvous: rank %d of %d waited %g s for rank 0 to come %s: is it started, is "
                   "this the address of its host, and the job the same? (to wait longer: "
                   "KNAP_TIMEOUT)",
                   m->rank, m->size, kn_comm_default_timeout(), where(p, at, sizeof at));
}

static bool follow(meeting *m)
{
    seat leader;
    answer a;
    if (!find_leader(m))
        return false;
    leader = m->seat[0]; /* it doesn't know by which of its addresses */
    m->deadline += 1;    /* rank 0 gives up first, and says why */
    if (!kn_tcp_receive(m->link[0].control, &a, sizeof a, m->deadline))
        return kn_fail("rendezvous: rank 0 left while rank %d of %d waited for the others", m->rank,
                       m->size);
    a.error[sizeof a.error - 1] = 0;
    if (a.error[0])
        return kn_fail("%s", a.error);
    if (!kn_tcp_receive(m->link[0].control, m->seat, (size_t)m->size * sizeof *m->seat,
                        m->deadline))
        return kn_fail("rendezvous: rank 0 left while rank %d of %d waited for the others", m->rank,
                       m->size);
    leader.host = m->seat[0].host;
    m->seat[0] = leader;
    for (int r = 0; r < m->size; r++)
        m->seat[r].address[ADDRESS - 1] = 0;
    return true;
}

/* ---- everybody ------------------------------------------------------------------------------------ */

static int admit_greeting(void *arg, int fd, const void *message)
{
    meeting *m = arg;
    const greeting *g = message;
    if (memcmp(g->magic, MAGIC, sizeof g->magic) != 0 ||
        memcmp(g->secret, m->secret, sizeof g->secret) != 0 || g->rank <= m->rank ||
        g->rank >= m->size)
        return -1;
    int *to = g->data ? &m->link[g->rank].data : &m->link[g->rank].control;
    if (*to >= 0)
        return -1;
    *to = fd;
    return --m->missing == 0;
}

static int greet(const meeting *m, int r, int data)
{
    greeting g = { .magic = MAGIC, .rank = m->rank, .data = data };
    int fd = kn_tcp_connect(m->seat[r].address, m->seat[r].port, m->deadline);
    memcpy(g.secret, m->secret, sizeof g.secret);
    if (fd >= 0 && kn_tcp_send(fd, &g, sizeof g, m->deadline))
        return fd;
    if (fd >= 0)
        close(fd);
    kn_fail("rendezvous: rank %d cannot connect to rank %d at %s, port %d: %s", m->rank, r,
            m->seat[r].address, (int)m->seat[r].port, strerror(errno));
    return -1;
}

/* Ranks below are connected to, those above come. Everybody listens already, so nobody waits in a circle. */
static bool connect_all(meeting *m)
{
    for (int r = 0; r < m->rank; r++)
        if ((r > 0 && (m->link[r].control = greet(m, r, 0)) < 0) ||
            (m->link[r].data = greet(m, r, 1)) < 0)
            return false;
    int above = m->size - 1 - m->rank;
    m->missing = m->rank == 0 ? above : 2 * above; /* rank 0 has those for words */
    if (m->missing == 0 ||
        kn_tcp_admit(m->listener, sizeof(greeting), m->deadline, admit_greeting, m))
        return true;
    int r = m->rank + 1;
    while (kn_ok() && r < m->size - 1 && m->link[r].data >= 0 && m->link[r].control >= 0)
        r++;
    return kn_ok() &&
           kn_fail("rendezvous: rank %d did not connect to rank %d at %s in %g s: may the "
                   "hosts connect to each other? (to wait longer: KNAP_TIMEOUT)",
                   r, m->rank, m->rank ? m->seat[m->rank].address : m->place->host,
                   kn_comm_default_timeout());
}

/* Nobody goes before all are connected. */
static bool go(meeting *m)
{
    char here = 'h';
    if (m->rank > 0)
        return (kn_tcp_send(m->link[0].control, &here, 1, m->deadline) &&
                kn_tcp_receive(m->link[0].control, &here, 1, m->deadline)) ||
               kn_fail("rendezvous: rank 0 gave up before all %d ranks were connected; its message "
                       "says why",
                       m->size);
    for (int r = 1; r < m->size; r++)
        if (!kn_tcp_receive(m->link[r].control, &here, 1, m->deadline))
            return kn_fail("rendezvous: rank %d came and did not connect to all others", r);
    return tell_all(m, "g", 1);
}

bool kn_tcp_meet(const kn_tcp_place *place, int rank, int size, kn_tcp_link *link, int *local_rank,
                 int *local_size)
{
    meeting m = { .place = place, .rank = rank, .size = size, .listener = -1, .link = link };
    m.deadline = kn_now() + kn_comm_default_timeout();
    m.job = hash(UINT64_C(0xcbf29ce484222325), place->job);
    m.host = hash_host();
    m.seat = kn_calloc((size_t)size, sizeof *m.seat);
    bool ok =
        m.seat && (rank == 0 ? open_door(&m) && lead(&m) : follow(&m)) && connect_all(&m) && go(&m);
    *local_rank = *local_size = 0;
    for (int r = 0; ok && r < size; r++) {
        *local_size += m.seat[r].host == m.host;
        *local_rank += m.seat[r].host == m.host && r < rank;
    }
    if (rank == 0 && place->ports == 0 && m.listener >= 0)
        unlink(place->host);
    if (m.listener >= 0)
        close(m.listener);
    kn_free_host(m.seat);
    return ok;
}
