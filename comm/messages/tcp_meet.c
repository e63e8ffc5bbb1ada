/* comm/messages/tcp_meet.c: ranks on several hosts find each other (tcp.h).
 *
 *   rank r                                            rank 0
 *   connect, hello (rank, size, where it listens) -->  check it
 *                                                <--  this meeting's number, or a refusal in words
 *                  (once all have come)          <--  where all ranks listen
 *   (all connect to each other: tcp_connect.c)
 *   "here"                                       -->  wait for all
 *   go                                           <--  "go"
 *
 * The connection to rank 0 stays, for words. The numbers in hello and answer are sealed with the
 * job's key. A hello that is wrong is refused, and the others are waited for; so are ranks that
 * came and left again.
 *
 * Ranks try a few ports at rank 0's address: a launcher's agent holds MASTER_PORT itself, and
 * others the next; or by a file that rank 0 writes.
 *
 * Where rank 0's address is a number, it listens there, and every other rank at the address by
 * which it gets there; at a loopback all of them. By a name, which may mean another address on each
 * host, and by a file, every rank listens on all of its interfaces and publishes all of its
 * addresses, since a host can't tell which of them the others can reach. */
#include "kernels/trace.h"
#include "comm/messages/tcp.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define MAGIC "knap t3" /* changes with the messages */
enum { KNOCK_MS = 20 };
/* How long rank 0 may take to answer before it is called again; how often it looks after its
 * file. */
#define ANSWER_S 3.0
#define LOOK_S   0.2

typedef struct hello {
    char magic[8];
    uint64_t nonce[2]; /* of this process */
    uint64_t word;     /* size of a word: the same libknap? */
    int32_t rank, size;
    kn_tcp_seat seat;
    char seal[KN_TCP_SEAL];
} hello;

typedef struct answer {
    char magic[8];
    uint64_t meeting[2]; /* a random number */
    char error[240];     /* empty for yes */
    char seal[KN_TCP_SEAL];
} answer;

typedef struct meeting {
    const kn_tcp_place *place;
    char key[320];
    int rank, size, listener;
    uint64_t nonce[2], number[2];
    double deadline, look;
    kn_tcp_file file;      /* that rank 0 wrote, or another rank found */
    kn_tcp_seat own;       /* of this rank */
    kn_tcp_seat *seat;     /* [size] */
    uint64_t (*nonces)[2]; /* [size] rank 0: of the rank there */
    kn_lobby lobby;
    kn_tcp_link *link; /* the lobby's */
    bool exposed;      /* this rank listens at more than a loopback */
    answer said;       /* rank 0: to the last arrival */
    char why[240];     /* rank 0 can't be reached */
} meeting;

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

static void make_key(meeting *m)
{
    snprintf(m->key, sizeof m->key, "%s:%s", m->file.token, m->place->job);
}

/* ---- seals ----------------------------------------------------------------------------------- */

typedef uint64_t words[6];

static void words_of_hello(const hello *h, uint64_t *w)
{
    memcpy(w,
           (words){ h->nonce[0], h->nonce[1], h->word, (uint32_t)h->rank, (uint32_t)h->size,
                    (uint32_t)h->seat.port },
           sizeof(words));
}

/* It answers the hello of this nonce. */
static void words_of_answer(const answer *a, const uint64_t *nonce, uint64_t *w)
{
    memcpy(w, (words){ a->meeting[0], a->meeting[1], nonce[0], nonce[1], a->error[0] != 0 },
           sizeof(words));
}

/* ---- rank 0 ---------------------------------------------------------------------------------- */

/* Listens at one of so many ports from port on, and notes where in own. */
static bool listen_at(meeting *m, int port, int ports)
{
    uint8_t room[16];
    bool given = m->place->ports > 0 && kn_tcp_address_for(m->place->host, m->rank == 0, room);
    const uint8_t *at = given ? room : NULL;
    int got = 0;
    for (int i = 0; i < ports && m->listener < 0; i++) {
        m->listener = kn_tcp_listen(at, port + i, &got);
        if (m->listener < 0 && at && errno == EADDRNOTAVAIL) { /* another host's forwards to here */
            at = NULL;
            i--;
        }
    }
    m->exposed = !at || !kn_tcp_is_loopback(at);
    if (m->listener >= 0)
        kn_tcp_seat_begin(&m->own, got, at);
    return m->listener >= 0;
}

static bool open_door(meeting *m)
{
    const kn_tcp_place *p = m->place;
    char text[400];
    if (!listen_at(m, p->port, p->ports > 0 ? p->ports : 1))
        return kn_fail("rendezvous: rank 0 cannot listen %s: %s", where(p, text, sizeof text),
                       strerror(errno));
    m->seat[0] = m->file.seat = m->own;
    if (p->ports == 0 && !kn_tcp_file_write(p->host, &m->file))
        return false;
    make_key(m);
    return true;
}

static bool reply(meeting *m, int fd, const uint64_t *nonce)
{
    words w;
    memcpy(m->said.magic, MAGIC, sizeof MAGIC);
    memcpy(m->said.meeting, m->number, sizeof m->number);
    words_of_answer(&m->said, nonce, w);
    return kn_tcp_seal(m->key, 'A', w, 6, m->said.seal) &&
           kn_tcp_send(fd, &m->said, sizeof m->said, kn_now() + 1);
}

static int admit_hello(void *arg, int fd, const void *message)
{
    meeting *m = arg;
    hello h;
    words w;
    uint8_t from[16];
    memcpy(&h, message, sizeof h);
    words_of_hello(&h, w);
    if (memcmp(h.magic, MAGIC, sizeof h.magic) != 0 || !kn_tcp_sealed(m->key, 'H', w, 6, h.seal))
        return -1; /* a stranger, or another job that looks for its rank 0 */
    kn_lobby_clear(&m->lobby, h.rank);
    if (h.rank >= 1 && h.rank < m->size && m->link[h.rank].control >= 0 &&
        memcmp(m->nonces[h.rank], h.nonce, sizeof h.nonce) == 0)
        return -1; /* the same process, by another address */
    bool welcome = kn_lobby_judge(&m->lobby, h.rank, h.size, h.word == sizeof(kn_message_word));
    memcpy(m->said.error, m->lobby.error, sizeof m->said.error);
    if (!reply(m, fd, h.nonce) || !welcome || !kn_tcp_seat_sound(&h.seat))
        return -1;
    m->seat[h.rank] = h.seat;
    if (kn_tcp_address_of(fd, false, from)) /* by that one it got here */
        kn_tcp_seat_add(&m->seat[h.rank], from, true);
    if (kn_tcp_address_of(fd, true, from) && m->own.net != h.seat.net)
        kn_tcp_seat_add(&m->seat[0], from, true);
    memcpy(m->nonces[h.rank], h.nonce, sizeof h.nonce);
    return kn_lobby_enter(&m->lobby, h.rank, fd);
}

/* Our file is there; else a later attempt has one in its place, and the ranks go there. */
static bool file_stands(void *arg)
{
    meeting *m = arg;
    if (m->place->ports > 0 || kn_now() < m->look)
        return true;
    m->look = kn_now() + LOOK_S;
    return kn_tcp_file_stands(m->place->host, &m->file);
}

/* Ranks that came learn, in the place of the table, why there is none. */
static void dismiss(meeting *m)
{
    snprintf(m->said.error, sizeof m->said.error, "%s", kn_error());
    for (int r = 1; r < m->size; r++)
        if (m->link[r].control >= 0)
            kn_tcp_send(m->link[r].control, &m->said, sizeof m->said, kn_now() + 1);
}

static bool lead(meeting *m)
{
    char at[400];
    if (!kn_tcp_admit(m->listener, sizeof(hello), m->deadline, admit_hello, file_stands, m)) {
        if (kn_ok() && kn_now() < m->deadline)
            return kn_fail("rendezvous: %s was removed or replaced while rank 0 of %d waited: "
                           "another rank 0 meets its ranks there",
                           m->place->host, m->size);
        if (kn_ok())
            kn_lobby_late(&m->lobby, where(m->place, at, sizeof at));
        dismiss(m);
        return false;
    }
    m->said.error[0] = 0;
    return kn_lobby_tell(&m->lobby, &m->said, sizeof m->said, m->deadline) &&
           kn_lobby_tell(&m->lobby, m->seat, (size_t)m->size * sizeof *m->seat, m->deadline);
}

/* ---- the others ------------------------------------------------------------------------------ */

/* Whether this is from rank 0 of our job. */
static bool is_from_rank_0(void *arg, const void *message)
{
    meeting *m = arg;
    answer a;
    words w;
    memcpy(&a, message, sizeof a);
    a.error[sizeof a.error - 1] = 0;
    words_of_answer(&a, m->nonce, w);
    return memcmp(a.magic, MAGIC, sizeof a.magic) == 0 && kn_tcp_sealed(m->key, 'A', w, 6, a.seal);
}

static int targets_of_rank_0(meeting *m, kn_tcp_target *t)
{
    const char *why = "";
    int n = 0;
    if (m->place->ports > 0)
        n = kn_tcp_resolve(m->place->host, m->place->port, m->place->ports, t, &why);
    else if (kn_tcp_file_read(m->place->host, &m->file, &why))
        n = kn_tcp_seat_targets(&m->file.seat, m->own.net, t);
    if (n == 0)
        snprintf(m->why, sizeof m->why, "%s", why);
    make_key(m);
    return n;
}

/* Rank 0 accepts this rank. False if no process does, and with an error if rank 0 refuses. */
static bool knock(meeting *m)
{
    kn_tcp_target t[KN_TCP_TARGETS];
    hello h = { .magic = MAGIC,
                .word = sizeof(kn_message_word),
                .rank = m->rank,
                .size = m->size,
                .seat = m->own };
    words w;
    answer a;
    uint8_t by[16];
    int n = targets_of_rank_0(m, t);
    double soon = kn_now() + ANSWER_S;
    memcpy(h.nonce, m->nonce, sizeof h.nonce);
    words_of_hello(&h, w);
    if (n == 0 || !kn_tcp_seal(m->key, 'H', w, 6, h.seal))
        return false;
    int fd = kn_tcp_call(t, n, &h, sizeof h, &a, sizeof a, is_from_rank_0, m,
                         soon < m->deadline ? soon : m->deadline);
    if (fd < 0) {
        bool cut_off = errno == ETIMEDOUT && m->why[0] && kn_now() >= m->deadline;
        if (!cut_off) /* else the try before has the better reason */
            snprintf(m->why, sizeof m->why, "%s",
                     errno == ECONNRESET ? "who listens there is not rank 0 of this job"
                                         : strerror(errno));
        return false;
    }
    a.error[sizeof a.error - 1] = 0;
    if (a.error[0] || !kn_tcp_address_of(fd, false, by)) {
        close(fd);
        return kn_fail("%s", a.error[0] ? a.error : "rendezvous: rank 0 has no address");
    }
    memcpy(m->number, a.meeting, sizeof m->number);
    m->link[0].control = fd;
    memcpy(m->seat[0].address[0], by, sizeof by); /* follow() puts it to the others */
    return true;
}

static bool find_leader(meeting *m)
{
    const kn_tcp_place *p = m->place;
    char at[400];
    while (kn_ok() && kn_now() < m->deadline) {
        if (knock(m))
            return true;
        nanosleep(&(struct timespec){ .tv_nsec = KNOCK_MS * 1000000L }, NULL);
    }
    return kn_ok() &&
           kn_fail("rendezvous: rank %d of %d waited %g s for rank 0 to come %s: is it started, is "
                   "this the address of its host, and the job the same? (to wait longer: "
                   "KNAP_TIMEOUT; the last try: %s)",
                   m->rank, m->size, kn_comm_default_timeout(), where(p, at, sizeof at), m->why);
}

/* Rank 0 left: has another attempt put its file there, in which it is found? */
static bool replaced(const meeting *m)
{
    kn_tcp_file now;
    const char *why;
    for (double end = kn_now() + 2 * LOOK_S; m->place->ports == 0 && kn_now() < end;) {
        if (kn_tcp_file_read(m->place->host, &now, &why) && strcmp(now.token, m->file.token) != 0)
            return true;
        nanosleep(&(struct timespec){ .tv_nsec = KNOCK_MS * 1000000L }, NULL);
    }
    return false;
}

static bool follow(meeting *m)
{
    uint8_t by[16];
    answer a;
    double latest = m->deadline + 1; /* rank 0 gives up first, and sends the reason */
    if (!listen_at(m, 0, 1))
        return kn_fail("rendezvous: rank %d cannot listen: %s", m->rank, strerror(errno));
    for (;;) {
        if (!find_leader(m))
            return false;
        memcpy(by, m->seat[0].address[0], sizeof by);
        if (kn_tcp_receive(m->link[0].control, &a, sizeof a, latest))
            break;
        if (!replaced(m))
            return kn_fail("rendezvous: rank 0 left while rank %d of %d waited for the others",
                           m->rank, m->size);
        close(m->link[0].control);
        m->link[0].control = -1;
    }
    m->deadline = latest;
    a.error[sizeof a.error - 1] = 0;
    if (a.error[0])
        return kn_fail("%s", a.error);
    if (!kn_tcp_receive(m->link[0].control, m->seat, (size_t)m->size * sizeof *m->seat,
                        m->deadline))
        return kn_fail("rendezvous: rank 0 left while rank %d of %d waited for the others", m->rank,
                       m->size);
    for (int r = 0; r < m->size; r++)
        if (!kn_tcp_seat_sound(&m->seat[r]))
            return kn_fail("rendezvous: rank 0 sent addresses of rank %d that are damaged", r);
    kn_tcp_seat_add(&m->seat[0], by, true);
    return true;
}

/* ---- all ranks ------------------------------------------------------------------------------- */

static bool begin(meeting *m)
{
    m->deadline = kn_now() + kn_comm_default_timeout();
    m->seat = kn_host_calloc((size_t)m->size, sizeof *m->seat);
    m->nonces = kn_host_calloc((size_t)m->size, sizeof *m->nonces);
    return m->seat && m->nonces &&
           ((getrandom(m->nonce, sizeof m->nonce, 0) == (ssize_t)sizeof m->nonce &&
             getrandom(m->number, sizeof m->number, 0) == (ssize_t)sizeof m->number) ||
            kn_fail("rendezvous: the system has no random numbers: %s", strerror(errno)));
}

/* Once, by rank 0: who knows the place can be a rank. */
static void warn(const meeting *m)
{
    char at[400];
    if (m->rank == 0 && m->exposed && !m->place->secret && m->place->ports > 0)
        fprintf(stderr,
                "knap: the ranks meet %s without a secret: any process that can connect to there "
                "could be one of them. Give all ranks the same random KNAP_JOB, for example that "
                "of: openssl rand -hex 16\n",
                where(m->place, at, sizeof at));
}

bool kn_tcp_meet(const kn_tcp_place *place, int rank, int size, kn_tcp_link *link, int *local_rank,
                 int *local_size)
{
    meeting m = { .place = place,
                  .rank = rank,
                  .size = size,
                  .listener = -1,
                  .lobby = { .size = size, .missing = size - 1, .link = link },
                  .link = link };
    bool ok = begin(&m) && (rank == 0 ? open_door(&m) && lead(&m) : follow(&m));
    kn_tcp_table table = { .key = m.key,
                           .number = { m.number[0], m.number[1] },
                           .rank = rank,
                           .size = size,
                           .listener = m.listener,
                           .deadline = m.deadline,
                           .net = m.own.net,
                           .seat = m.seat };
    ok = ok && kn_tcp_connect_all(&table, link) &&
         (rank == 0 ? kn_lobby_go(&m.lobby, m.deadline)
                    : kn_lobby_wait(link[0].control, size, m.deadline));
    *local_rank = *local_size = 0;
    for (int r = 0; ok && r < size; r++) {
        *local_size += m.seat[r].host == m.own.host;
        *local_rank += m.seat[r].host == m.own.host && r < rank;
    }
    if (ok)
        warn(&m);
    if (rank == 0 && place->ports == 0)
        kn_tcp_file_remove(place->host, &m.file);
    if (m.listener >= 0)
        close(m.listener);
    kn_host_free(m.seat);
    kn_host_free(m.nonces);
    return ok;
}
