/* comm/messages/tcp_connect.c: ranks with all addresses (tcp_meet.c) connect, each pair twice: to
 * those below, while those above come. A greeting holds sender and receiver, and gets an answer: at
 * that address and port another process may listen, if the address is one of the caller's own host
 * as well. */
#include "kernels/trace.h"
#include "comm/messages/tcp.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define MAGIC "knap t3" /* changes with the messages */

/* The answer is one, too. */
typedef struct greeting {
    char magic[8];
    int32_t from, to, data, unused; /* data: for bytes, else for words */
    char seal[KN_TCP_SEAL];
} greeting;

typedef struct greeter {
    const kn_tcp_table *t;
    kn_tcp_link *link;
    int missing, to; /* connections; the receiver of the greeting */
    bool to_data;
} greeter;

enum { WORDS = 5 };

static void words_of(const kn_tcp_table *t, int from, int to, bool data, uint64_t *w)
{
    memcpy(w, (uint64_t[WORDS]){ t->number[0], t->number[1], (uint32_t)from, (uint32_t)to, data },
           WORDS * sizeof *w);
}

/* A rank above connects: confirm that it reached this one. */
static int admit(void *arg, int fd, const void *message)
{
    greeter *m = arg;
    const kn_tcp_table *t = m->t;
    greeting g;
    uint64_t w[WORDS];
    memcpy(&g, message, sizeof g);
    words_of(t, g.from, g.to, g.data != 0, w);
    if (memcmp(g.magic, MAGIC, sizeof g.magic) != 0 || g.to != t->rank || g.from <= t->rank ||
        g.from >= t->size || !kn_tcp_sealed(t->key, 'G', w, WORDS, g.seal))
        return -1;
    int *to = g.data ? &m->link[g.from].data : &m->link[g.from].control;
    if (*to >= 0 || !kn_tcp_seal(t->key, 'Y', w, WORDS, g.seal) ||
        !kn_tcp_send(fd, &g, sizeof g, kn_now() + 1))
        return -1;
    *to = fd;
    return --m->missing == 0;
}

static bool is_from_whom_we_greet(void *arg, const void *message)
{
    const greeter *m = arg;
    greeting g;
    uint64_t w[WORDS];
    memcpy(&g, message, sizeof g);
    words_of(m->t, m->t->rank, m->to, m->to_data, w);
    return kn_tcp_sealed(m->t->key, 'Y', w, WORDS, g.seal);
}

static const char *list_addresses(const kn_tcp_target *t, int n, char *text, size_t size)
{
    char one[KN_TCP_TEXT];
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < n && used + KN_TCP_TEXT + 8 < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? ", " : "",
                                 kn_tcp_address_text(t[i].address, one));
    return text;
}

static int greet(greeter *m, int r, bool data)
{
    const kn_tcp_table *t = m->t;
    kn_tcp_target at[KN_TCP_TARGETS];
    greeting g = { .magic = MAGIC, .from = t->rank, .to = r, .data = data }, back;
    uint64_t w[WORDS];
    char text[300];
    int n = kn_tcp_seat_targets(&t->seat[r], t->net, at);
    m->to = r;
    m->to_data = data;
    words_of(t, t->rank, r, data, w);
    if (!kn_tcp_seal(t->key, 'G', w, WORDS, g.seal))
        return -1;
    int fd =
        kn_tcp_call(at, n, &g, sizeof g, &back, sizeof back, is_from_whom_we_greet, m, t->deadline);
    if (fd < 0)
        kn_fail("rendezvous: rank %d cannot connect to rank %d, port %d at %s: %s: may the hosts "
                "connect to each other?",
                t->rank, r, (int)t->seat[r].port, list_addresses(at, n, text, sizeof text),
                strerror(errno));
    return fd;
}

/* Rank 0 answers at once, rank 1 once it is connected to rank 0, and so on: no circle of waits. */
bool kn_tcp_connect_all(const kn_tcp_table *t, kn_tcp_link *link)
{
    greeter m = { .t = t, .link = link };
    kn_tcp_target at[KN_TCP_TARGETS];
    char text[300];
    for (int r = 0; r < t->rank; r++)
        if ((r > 0 && (link[r].control = greet(&m, r, false)) < 0) ||
            (link[r].data = greet(&m, r, true)) < 0)
            return false;
    int above = t->size - 1 - t->rank, r = t->rank + 1;
    m.missing = t->rank == 0 ? above : 2 * above; /* rank 0 has those for words */
    if (m.missing == 0 || kn_tcp_admit(t->listener, sizeof(greeting), t->deadline, admit, NULL, &m))
        return true;
    while (kn_ok() && r < t->size - 1 && link[r].data >= 0 && link[r].control >= 0)
        r++;
    int n = kn_tcp_seat_targets(&t->seat[t->rank], 0, at);
    return kn_ok() &&
           kn_fail("rendezvous: rank %d did not connect to rank %d, port %d at %s in %g s: may the "
                   "hosts connect to each other? (to wait longer: KNAP_TIMEOUT)",
                   r, t->rank, (int)t->seat[t->rank].port, list_addresses(at, n, text, sizeof text),
                   kn_comm_default_timeout());
}
