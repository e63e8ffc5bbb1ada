/* comm/messages/tcp_wait.c: exchanging messages with the other ranks over TCP, and words beside
 * them (tcp.h). */
#include "comm/messages/tcp.h"
#include "kernels/kernels_internal.h"
#include "kernels/trace.h"
#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define MAGIC UINT32_C(0x706e6b02)
/* Time for words that explain a broken connection. */
#define EXPLAIN_S 0.4
/* Words of a rank that are heard before the caller looks at the time again. */
enum { SLEEP_MS = 5, WORDS_A_TURN = 64 };

/* ---- words ----------------------------------------------------------------------------------- */

static bool always(kn_message_world *w)
{
    (void)w;
    return true;
}

/* Sends the rest of the last word; out_lock is held. */
static void flush(kn_tcp_link *l)
{
    while (l->left > 0) {
        ssize_t n = send(l->control, (char *)&l->out + sizeof l->out - l->left, l->left,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n <= 0)
            return;
        l->left -= (size_t)n;
    }
}

static void tell(kn_message_world *base, int r, const kn_message_word *word)
{
    kn_tcp_world *w = (kn_tcp_world *)base;
    kn_tcp_link *l = &w->link[r];
    pthread_mutex_lock(&w->out_lock);
    for (int i = 0; l->control >= 0 && l->left > 0; i++) {
        flush(l);
        if (l->left == 0 || word->what != KN_WORD_POISON || i == 20)
            break;
        kn_sleep(0.005); /* it is worth a wait */
    }
    if (l->control >= 0 &&
        l->left == 0) { /* else nothing reads there: words less than poison can go */
        l->out = *word;
        l->left = sizeof *word;
        flush(l);
    }
    pthread_mutex_unlock(&w->out_lock);
}

/* The next word of rank r, if all of it is here. */
static bool next_word(kn_tcp_world *w, int r, kn_message_word *word)
{
    kn_tcp_link *l = &w->link[r];
    if (l->control < 0 || l->ended)
        return false;
    ssize_t n = recv(l->control, (char *)&l->in + l->got, sizeof l->in - l->got, MSG_DONTWAIT);
    if (n > 0)
        l->got += (size_t)n;
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        l->ended = true;
    if (l->got < sizeof l->in)
        return false;
    *word = l->in;
    l->got = 0;
    return true;
}

static bool died(kn_tcp_world *w, int r)
{
    char last[256] = "none";
    kn_comm_note note;
    pthread_mutex_lock(&w->base.lock);
    note = w->base.peer[r].last;
    pthread_mutex_unlock(&w->base.lock);
    if (note.kind != KN_CALL_NONE)
        kn_comm_describe(&note, last, sizeof last);
    return kn_fail("rank %d died without an error message; its last call known to rank %d was %s",
                   r, w->base.first->rank, last);
}

/* The others' words; then ranks that are gone without a leave. */
static bool hear_all(kn_tcp_world *w)
{
    kn_message_world *base = &w->base;
    kn_message_word word;
    int gone = -1;
    for (int r = 0; r < base->first->size; r++) {
        for (int i = 0; i < WORDS_A_TURN && next_word(w, r, &word); i++)
            if (!kn_message_heard(base, r, &word))
                return false;
        if (w->link[r].ended && !atomic_load(&base->peer[r].left) && gone < 0)
            gone = r;
    }
    return gone < 0 || kn_poisoned(base->first->world->poison, NULL) >= 0 || died(w, gone);
}

/* By one thread at a time, from the reading of a word to its effect: another one would see that a
 * connection has ended, and not yet the word before, which holds the reason. */
static bool listen_to_all(kn_message_world *base)
{
    kn_tcp_world *w = (kn_tcp_world *)base;
    if (pthread_mutex_trylock(&w->ear) != 0)
        return true; /* another thread does */
    bool ok = hear_all(w);
    pthread_mutex_unlock(&w->ear);
    return ok;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

/* There is a message, and a part of it is still to come or to go. */
static bool is_under_way(const kn_tcp_flow *f)
{
    return f->head.bytes > 0 && f->done < (int64_t)sizeof f->head + f->head.bytes;
}

/* The result of a socket call: 1 some bytes moved, 0 none, -1 the connection is gone. */
static int verdict(ssize_t moved)
{
    return moved > 0 ? 1 : moved < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

/* The rest of a message behind its first at bytes: *count spans of memory. */
static void spans_of(const kn_message_parts *p, int peer, bool sends, int64_t at,
                     struct iovec *span, size_t *count)
{
    for (int i = 0; i < p->parts; i++) {
        const kn_message_side side = kn_message_at(p, i, peer, sends);
        const int64_t skip = at < side.bytes ? at : side.bytes;
        at -= skip;
        if (side.bytes > skip)
            span[(*count)++] = (struct iovec){ side.at + skip, (size_t)(side.bytes - skip) };
    }
}

/* Sends as much as the socket takes, the head together with its bytes. */
static int give(kn_tcp_comm *c, int peer, int fd, kn_tcp_flow *f)
{
    struct iovec span[1 + KN_MESSAGE_PARTS];
    struct msghdr message = { .msg_iov = span };
    int64_t h = (int64_t)sizeof f->head;
    if (f->done < h)
        span[message.msg_iovlen++] =
            (struct iovec){ (char *)&f->head + f->done, (size_t)(h - f->done) };
    spans_of(c->parts, peer, true, f->done < h ? 0 : f->done - h, span, &message.msg_iovlen);
    ssize_t moved = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    f->done += moved > 0 ? moved : 0;
    return verdict(moved);
}

/* Reads as much as is there of the bytes after the head. */
static int fetch(kn_tcp_comm *c, int peer, int fd, kn_tcp_flow *f)
{
    struct iovec span[KN_MESSAGE_PARTS];
    struct msghdr message = { .msg_iov = span };
    spans_of(c->parts, peer, false, f->done - (int64_t)sizeof f->head, span, &message.msg_iovlen);
    ssize_t moved = recvmsg(fd, &message, MSG_DONTWAIT);
    f->done += moved > 0 ? moved : 0;
    return verdict(moved);
}

/* A connection is broken: the words that explain it may be on their way. False if they came. */
static bool unexplained(kn_tcp_comm *c, const kn_comm_call *call, int peer)
{
    for (double end = kn_now() + EXPLAIN_S; kn_now() < end;) {
        if (!kn_message_hopeful(&c->base, call, peer))
            return false;
        kn_sleep(0.001);
    }
    return true;
}

/* An unexpected message: which call was it? */
static bool wrong(kn_tcp_comm *c, const kn_comm_call *call, int peer, const kn_tcp_head *came)
{
    kn_tcp_world *w = (kn_tcp_world *)c->base.w;
    kn_comm_note mine = kn_comm_note_of(&c->base.base, call), theirs;
    int owner = c->base.base.member[peer], fd = w->link[owner].data;
    if (came->magic == MAGIC && came->tag == KN_TAG_HEADER && came->bytes == sizeof theirs &&
        kn_tcp_receive(fd, &theirs, sizeof theirs, kn_now() + EXPLAIN_S)) {
        theirs.label[sizeof theirs.label - 1] = theirs.comm[sizeof theirs.comm - 1] = 0;
        return kn_comm_mismatch(w->base.first->rank, &mine, owner, &theirs);
    }
    return unexplained(c, call, peer) &&
           kn_fail("tcp: rank %d sent %s in place of a message of %s: the connection is broken",
                   owner, came->magic == MAGIC ? "another message" : "garbage",
                   kn_comm_kind_name(call->kind));
}

static bool lost(kn_tcp_comm *c, const kn_comm_call *call, int peer)
{
    return unexplained(c, call, peer) &&
           kn_fail("tcp: the connection to rank %d broke in %s %s", c->base.base.member[peer],
                   kn_comm_kind_name(call->kind), call->label ? call->label : "-");
}

typedef struct progress {
    int open, peer; /* messages that are not done, and a rank one of them is of */
    bool moved;
} progress;

/* One turn over all messages; false with an error. */
static bool turn(kn_tcp_comm *c, const kn_comm_call *call, progress *g)
{
    kn_tcp_world *w = (kn_tcp_world *)c->base.w;
    int n = c->base.base.size;
    *g = (progress){ .peer = -1 };
    for (int i = 0; i < 2 * n; i++) {
        kn_tcp_flow *f = &c->flow[i];
        kn_tcp_head came = { 0 }, *head = &f->head;
        int peer = i % n, fd = w->link[c->base.base.member[peer]].data, moved = 0;
        if (!is_under_way(f))
            continue;
        if (i >= n && !f->checked) { /* the whole message is compared */
            ssize_t seen = recv(fd, &came, sizeof came, MSG_DONTWAIT | MSG_PEEK);
            moved = verdict(seen) < 0 ? -1 : 0;
            if (seen == (ssize_t)sizeof came) {
                recv(fd, &came, sizeof came, MSG_DONTWAIT);
                if (memcmp(&came, head, sizeof came) != 0)
                    return wrong(c, call, peer, &came);
                f->checked = true;
                f->done = (int64_t)sizeof came;
                moved = 1;
            }
        } else {
            moved = i < n ? give(c, peer, fd, f) : fetch(c, peer, fd, f);
        }
        if (moved < 0)
            return lost(c, call, peer);
        g->moved |= moved > 0;
        g->open += is_under_way(f);
        g->peer = is_under_way(f) && (g->peer < 0 || i >= n) ? peer : g->peer;
    }
    return true;
}

static bool is_open(kn_message_comm *base, int peer)
{
    const kn_tcp_flow *out = &((kn_tcp_comm *)base)->flow[peer], *in = out + base->base.size;
    return is_under_way(out) || is_under_way(in);
}

/* A leaving rank ends its connections, behind the last byte. */
static bool drained(kn_message_world *w, int r)
{
    char c;
    ssize_t n = recv(((kn_tcp_world *)w)->link[r].data, &c, 1, MSG_PEEK | MSG_DONTWAIT);
    return verdict(n) < 0;
}

/* Until a socket has something for us, for a moment. */
static void doze(kn_tcp_comm *c)
{
    kn_tcp_world *w = (kn_tcp_world *)c->base.w;
    int n = c->base.base.size, count = 0;
    for (int i = 0; i < n; i++) {
        const kn_tcp_link *l = &w->link[c->base.base.member[i]];
        bool sends = is_under_way(&c->flow[i]), comes = is_under_way(&c->flow[n + i]);
        if (sends || comes)
            c->polled[count++] =
                (struct pollfd){ l->data, (short)((sends ? POLLOUT : 0) | (comes ? POLLIN : 0)),
                                 0 };
        if (i != c->base.base.rank && !l->ended)
            c->polled[count++] = (struct pollfd){ l->control, POLLIN, 0 };
    }
    poll(c->polled, (nfds_t)count, SLEEP_MS);
}

static bool wait_all(kn_tcp_comm *c, const kn_comm_call *call)
{
    kn_message_wait_begin(&c->base);
    for (int turns = 0;; turns++) {
        progress g;
        if (!turn(c, call, &g))
            return false;
        if (g.open == 0)
            return true;
        if (g.moved && turns % 64)
            continue;
        if (!kn_message_wait_on(&c->base, call, g.peer, g.moved))
            return false;
        if (!g.moved)
            doze(c);
    }
}

static bool exchange(kn_message_comm *base, const kn_comm_call *call, const kn_message_parts *p,
                     int tag)
{
    kn_tcp_comm *c = (kn_tcp_comm *)base;
    int n = base->base.size, me = base->base.rank;
    if (!kn_fault_pass(KN_AT_MEETING))
        return false;
    c->exchanges++;
    c->parts = p;
    for (int j = 0; j < n; j++) {
        kn_tcp_head head = {
            .magic = MAGIC, .tag = tag, .comm = base->base.id, .number = c->exchanges
        };
        c->flow[j] = c->flow[n + j] = (kn_tcp_flow){ .head = head };
        c->flow[j].head.bytes = kn_message_bytes(p, me, j, true);
        c->flow[n + j].head.bytes = kn_message_bytes(p, me, j, false);
    }
    return wait_all(c, call);
}

const kn_transport kn_tcp_transport = {
    .exchange = exchange,
    .tell = tell,
    .listen = listen_to_all,
    .may = always,
    .open = is_open,
    .drained = drained,
};
