/* comm/messages/mpi_wait.c: exchanging messages with the other ranks by MPI (mpi_world.h). */
#include "comm/messages/mpi_world.h"
#include "kernels/kernels_internal.h"
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Looks before a wait sleeps; how long it sleeps. */
enum { LOOKS = 200 };
#define SLEEP_S 50e-6

/* ---- the control channel --------------------------------------------------------------------- */

static bool may_call_mpi(kn_message_world *w)
{
    return !w->first->world->inline_only || pthread_equal(pthread_self(), w->main);
}

void kn_mpi_forget_sent(kn_mpi_world *w)
{
    pthread_mutex_lock(&w->base.lock);
    for (kn_mpi_sent **at = &w->sent; *at;) {
        kn_mpi_sent *m = *at;
        int done = 0;
        if (MPI_Test(&m->request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done) {
            *at = m->next;
            free(m);
        } else {
            at = &m->next;
        }
    }
    pthread_mutex_unlock(&w->base.lock);
}

static void tell(kn_message_world *base, int r, const kn_message_word *word)
{
    kn_mpi_world *w = (kn_mpi_world *)base;
    kn_mpi_sent *m = malloc(sizeof *m); /* not ours to count: also used when memory has run out */
    if (!m)
        return;
    m->word = *word;
    if (MPI_Isend(&m->word, (int)sizeof m->word, MPI_BYTE, r, word->what, w->control,
                  &m->request) != MPI_SUCCESS) {
        free(m);
        return;
    }
    pthread_mutex_lock(&base->lock);
    m->next = w->sent;
    w->sent = m;
    pthread_mutex_unlock(&base->lock);
}

static bool listen_to_all(kn_message_world *base)
{
    kn_mpi_world *w = (kn_mpi_world *)base;
    for (;;) {
        kn_message_word word;
        MPI_Status status;
        int there = 0;
        if (pthread_mutex_trylock(&base->lock) != 0)
            return true; /* another thread does */
        if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, w->control, &there, &status) == MPI_SUCCESS &&
            there)
            there = MPI_Recv(&word, (int)sizeof word, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG,
                             w->control, MPI_STATUS_IGNORE) == MPI_SUCCESS;
        pthread_mutex_unlock(&base->lock);
        if (!there)
            return true;
        if (!kn_message_heard(base, status.MPI_SOURCE, &word))
            return false;
    }
}

/* ---- waiting --------------------------------------------------------------------------------- */

static bool is_open(kn_message_comm *base, int peer)
{
    const kn_mpi_comm *c = (kn_mpi_comm *)base;
    return c->req[peer] != MPI_REQUEST_NULL || c->req[base->base.size + peer] != MPI_REQUEST_NULL;
}

/* The first rank with an unfinished exchange. */
static int missing_peer(kn_mpi_comm *c)
{
    for (int i = 0; i < c->base.base.size; i++)
        if (is_open(&c->base, i))
            return i;
    return c->base.base.rank;
}

static bool wait_all(kn_mpi_comm *c, const kn_comm_call *call)
{
    kn_message_wait_begin(&c->base);
    for (int looks = 0;; looks++) {
        int n = 0;
        if (MPI_Testsome(2 * c->base.base.size, c->req, &n, c->done, MPI_STATUSES_IGNORE) !=
            MPI_SUCCESS)
            return kn_fail("%s %s: MPI_Testsome failed: another rank or the network is gone",
                           kn_comm_kind_name(call->kind), call->label ? call->label : "-");
        if (n == MPI_UNDEFINED)
            return true;
        if (n > 0)
            c->base.left_since = 0; /* earlier messages still come */
        if (looks < LOOKS) {
            sched_yield();
            continue;
        }
        int peer = missing_peer(c);
        if (peer == c->base.base.rank)
            continue; /* the last one is just done */
        if (!kn_message_wait_on(&c->base, call, peer, false))
            return false;
        kn_mpi_forget_sent((kn_mpi_world *)c->base.w);
        kn_sleep(SLEEP_S);
    }
}

/* The message to or from rank j as MPI takes it: count of type at the address. type is to be freed
 * where it was made, of several parts. */
typedef struct letter {
    void *at;
    int count;
    MPI_Datatype type;
    bool made;
} letter;

static int write_letter(const kn_message_parts *p, int j, bool sends, letter *l)
{
    MPI_Aint at[KN_MESSAGE_PARTS];
    int bytes[KN_MESSAGE_PARTS];
    for (int i = 0; i < p->parts; i++) {
        const kn_message_side side = kn_message_at(p, i, j, sends);
        bytes[i] = (int)side.bytes;
        MPI_Get_address(side.at, &at[i]);
        *l = (letter){ side.at, bytes[i], MPI_BYTE, false };
    }
    if (p->parts == 1)
        return MPI_SUCCESS;
    *l = (letter){ MPI_BOTTOM, 1, MPI_BYTE, false };
    int ok = MPI_Type_create_hindexed(p->parts, bytes, at, MPI_BYTE, &l->type);
    l->made = ok == MPI_SUCCESS;
    return l->made ? MPI_Type_commit(&l->type) : ok;
}

/* Begins to send to rank j, or to receive from it. */
static int post(kn_mpi_comm *c, const kn_message_parts *p, int j, bool sends, int tag)
{
    int n = c->base.base.size;
    letter l;
    int ok = write_letter(p, j, sends, &l);
    if (ok == MPI_SUCCESS)
        ok = sends ? MPI_Isend(l.at, l.count, l.type, j, tag, c->mpi, &c->req[n + j])
                   : MPI_Irecv(l.at, l.count, l.type, j, tag, c->mpi, &c->req[j]);
    if (l.made)
        MPI_Type_free(&l.type); /* MPI keeps it until the message is through */
    return ok;
}

static bool exchange(kn_message_comm *base, const kn_comm_call *call, const kn_message_parts *p,
                     int tag)
{
    kn_mpi_comm *c = (kn_mpi_comm *)base;
    if (tag == KN_TAG_HEADER)
        kn_mpi_forget_sent((kn_mpi_world *)base->w);
    int n = c->base.base.size, me = c->base.base.rank, ok = MPI_SUCCESS;
    if (!kn_fault_pass(KN_AT_MEETING))
        return false;
    for (int i = 0; i < 2 * n; i++)
        c->req[i] = MPI_REQUEST_NULL;
    for (int sends = 0; sends < 2; sends++)
        for (int i = 1; i < n && ok == MPI_SUCCESS; i++)
            if (kn_message_bytes(p, me, (me + i) % n, sends) > 0)
                ok = post(c, p, (me + i) % n, sends, tag);
    if (ok != MPI_SUCCESS)
        return kn_fail("%s %s: MPI cannot send or receive: another rank or the network is gone",
                       kn_comm_kind_name(call->kind), call->label ? call->label : "-");
    return wait_all(c, call);
}

const kn_transport kn_mpi_transport = {
    .exchange = exchange,
    .tell = tell,
    .listen = listen_to_all,
    .may = may_call_mpi,
    .open = is_open,
};
