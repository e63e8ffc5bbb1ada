/* fsdp/comm/mpi_wait.c: exchanging messages with the other ranks, and all the reasons for which that
 * may not come to its end (mpi_world.h). */
#include "fsdp/comm/mpi_world.h"
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Looks before a wait sleeps; how long it sleeps; when it first asks where the others are. */
enum { LOOKS = 200, SLEEP_NS = 50 * 1000 };
#define ASK_AFTER_S 0.05

/* ---- the control channel --------------------------------------------------------------------- */

static bool may_call_mpi(const kn_mpi_world *w)
{
    return !w->first->world->inline_only || pthread_equal(pthread_self(), w->main);
}

void kn_mpi_forget_sent(kn_mpi_world *w)
{
    pthread_mutex_lock(&w->lock);
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
    pthread_mutex_unlock(&w->lock);
}

static void tell_one(kn_mpi_world *w, int r, int tag, const kn_mpi_word *word)
{
    kn_mpi_sent *m = malloc(sizeof *m); /* not ours to count: also told when memory has run out */
    if (!m)
        return;
    m->word = *word;
    if (MPI_Isend(&m->word, (int)sizeof m->word, MPI_BYTE, r, tag, w->control, &m->request) !=
        MPI_SUCCESS) {
        free(m);
        return;
    }
    pthread_mutex_lock(&w->lock);
    m->next = w->sent;
    w->sent = m;
    pthread_mutex_unlock(&w->lock);
}

void kn_mpi_tell(kn_mpi_world *w, int r, int tag, const kn_mpi_word *word)
{
    if (r >= 0)
        tell_one(w, r, tag, word);
    for (int i = 0; r < 0 && i < w->first->size; i++)
        if (i != w->first->rank)
            tell_one(w, i, tag, word);
}

void kn_mpi_poison(kn_mpi_world *w, int culprit, const char *message)
{
    int healthy = 0;
    if (!atomic_compare_exchange_strong(&w->poison, &healthy, 1))
        return;
    w->culprit = culprit;
    snprintf(w->text, sizeof w->text, "%s", message);
    atomic_store(&w->poison, 2);
}

int kn_mpi_poisoned(kn_mpi_world *w, const char **text)
{
    if (atomic_load(&w->poison) != 2)
        return -1;
    if (text)
        *text = w->text;
    return w->culprit;
}

/* The error that stands here becomes known to the others, once. */
void kn_mpi_tell_poison(kn_mpi_world *w)
{
    const char *text = "";
    kn_mpi_word word = { .family = 0 };
    if (kn_mpi_poisoned(w, &text) != w->first->rank || !may_call_mpi(w) ||
        atomic_exchange(&w->told, true))
        return;
    snprintf(word.text, sizeof word.text, "%s", text);
    kn_mpi_tell(w, -1, KN_MPI_POISON, &word);
}

static kn_comm *family_of(kn_mpi_world *w, int64_t id)
{
    kn_comm *f = __atomic_load_n(&w->first->world->first, __ATOMIC_ACQUIRE);
    while (f && (f->family != f || f->id != id))
        f = f->next;
    return f;
}

static bool holds(const kn_comm *c, int world_rank)
{
    for (int i = 0; i < c->size; i++)
        if (((const kn_mpi_comm *)c)->member[i] == world_rank)
            return true;
    return false;
}

/* Rank r waits for us in a call. Have we made another one in its place, or one that r hasn't made,
 * before it? Then neither will ever come (local_world.c does the same by looking). */
static bool in_step(kn_mpi_world *w, int r, const kn_mpi_word *word)
{
    int me = w->first->rank;
    kn_call_note mine;
    kn_comm *f = family_of(w, word->family);
    if (!f || !word->note.seq)
        return true;
    if (kn_call_log_read(f->log, word->note.seq, &mine))
        return mine.hash == word->note.hash || kn_call_mismatch(r, &word->note, me, &mine);
    for (int i = 0; i < word->families && i < KN_MPI_FAMILIES; i++) {
        kn_comm *other = word->at[i].id == word->family ? NULL : family_of(w, word->at[i].id);
        if (other && holds(other, r) &&
            kn_call_log_read(other->log, (uint64_t)word->at[i].launched + 1, &mine))
            return kn_call_mismatch(r, &word->note, me, &mine);
    }
    return true;
}

static void heard_poison(kn_mpi_world *w, int r, const char *text)
{
    if (r < atomic_load(&w->loudest)) /* one thread at a time reads */
        atomic_store(&w->loudest, r);
    kn_mpi_poison(w, r, text);
}

bool kn_mpi_listen(kn_mpi_world *w)
{
    for (;;) {
        kn_mpi_word word;
        MPI_Status status;
        int there = 0;
        if (pthread_mutex_trylock(&w->lock) != 0)
            return true; /* somebody else does */
        if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, w->control, &there, &status) == MPI_SUCCESS &&
            there)
            there = MPI_Recv(&word, (int)sizeof word, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG,
                             w->control, MPI_STATUS_IGNORE) == MPI_SUCCESS;
        if (there && status.MPI_TAG == KN_MPI_WHERE)
            w->last[status.MPI_SOURCE] = word.note;
        pthread_mutex_unlock(&w->lock);
        if (!there)
            return true;
        word.text[sizeof word.text - 1] = 0;
        if (status.MPI_TAG == KN_MPI_POISON)
            heard_poison(w, status.MPI_SOURCE, word.text);
        else if (status.MPI_TAG == KN_MPI_LEFT)
            atomic_store(&w->left[status.MPI_SOURCE], 1);
        else if (!in_step(w, status.MPI_SOURCE, &word))
            return false;
    }
}

static void ask_where(kn_mpi_comm *c, const kn_comm_call *call, int peer)
{
    kn_mpi_word word = { .note = kn_call_note_of(&c->base, call), .family = c->base.family->id };
    int n = 0;
    for (kn_comm *f = __atomic_load_n(&c->base.world->first, __ATOMIC_ACQUIRE);
         f && n < KN_MPI_FAMILIES; f = f->next)
        if (f->family == f && f->log) {
            word.at[n].id = f->id;
            word.at[n++].launched = (int64_t)atomic_load(&f->log->launched);
        }
    word.families = n;
    kn_mpi_tell(c->w, c->member[peer], KN_MPI_WHERE, &word);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static bool broken(kn_mpi_world *w)
{
    const char *text;
    int r = kn_mpi_poisoned(w, &text);
    return r >= 0 && (kn_fail("rank %d failed: %s", r, text), true);
}

static bool too_late(kn_mpi_comm *c, const kn_comm_call *call, int peer, double limit)
{
    kn_call_note last;
    int owner = c->member[peer];
    pthread_mutex_lock(&c->w->lock);
    last = c->w->last[owner];
    pthread_mutex_unlock(&c->w->lock);
    return kn_call_timeout(&c->base, call, c->w->first->rank, owner, limit,
                           last.kind == KN_CALL_NONE ? NULL : &last, true);
}

/* The first rank with whom something is not done yet. */
static int missing_peer(const kn_mpi_comm *c)
{
    for (int i = 0; i < 2 * c->base.size; i++)
        if (c->req[i] != MPI_REQUEST_NULL)
            return i % c->base.size;
    return c->base.rank;
}

static bool still_hopeful(kn_mpi_comm *c, const kn_comm_call *call, int peer)
{
    char mine[256];
    int owner = c->member[peer];
    kn_mpi_tell_poison(c->w);
    if (broken(c->w) || !kn_mpi_listen(c->w) || broken(c->w))
        return false;
    if (!atomic_load(&c->w->left[owner]))
        return true;
    kn_call_note note = kn_call_note_of(&c->base, call);
    return kn_fail(
        "rank %d waits in %s, but rank %d has ended: every rank must make the same calls",
        c->w->first->rank, kn_call_describe(&note, mine, sizeof mine), owner);
}

static bool wait_all(kn_mpi_comm *c, const kn_comm_call *call)
{
    double waited = 0, now = kn_now(), limit = kn_comm_timeout(c->base.world), ask = ASK_AFTER_S;
    for (int looks = 0;; looks++) {
        int n = 0;
        if (MPI_Testsome(2 * c->base.size, c->req, &n, c->done, MPI_STATUSES_IGNORE) != MPI_SUCCESS)
            return kn_fail("%s %s: MPI_Testsome failed: another rank or the network is gone",
                           kn_comm_kind_name(call->kind), call->label ? call->label : "-");
        if (n == MPI_UNDEFINED)
            return true;
        if (looks < LOOKS) {
            sched_yield();
            continue;
        }
        int peer = missing_peer(c);
        if (peer == c->base.rank)
            continue; /* the last one is just done */
        if (!still_hopeful(c, call, peer))
            return false;
        double before = now;
        now = kn_now();
        waited += now - before < 0.1 ? now - before : 0.1; /* a suspended job is not late */
        if (waited > limit)
            return too_late(c, call, peer, limit);
        if (waited > ask) {
            ask_where(c, call, peer);
            kn_mpi_forget_sent(c->w);
            ask = ask * 2 < ask + 2 ? ask * 2 : ask + 2;
        }
        nanosleep(&(struct timespec){ .tv_nsec = SLEEP_NS }, NULL);
    }
}

bool kn_mpi_exchange(kn_mpi_comm *c, const kn_comm_call *call, const kn_mpi_parts *p, int tag)
{
    int n = c->base.size, me = c->base.rank, ok = MPI_SUCCESS;
    if (!kn_comm_meeting(c->base.world))
        return false;
    for (int i = 0; i < 2 * n; i++)
        c->req[i] = MPI_REQUEST_NULL;
    for (int i = 1; i < n && ok == MPI_SUCCESS; i++) {
        int j = (me + i) % n;
        if (p->receive_bytes > 0 && (p->from < 0 || p->from == j))
            ok = MPI_Irecv(p->receive + j * p->receive_stride, (int)p->receive_bytes, MPI_BYTE, j,
                           tag, c->mpi, &c->req[j]);
    }
    for (int i = 1; i < n && ok == MPI_SUCCESS; i++) {
        int j = (me + i) % n;
        if (p->send_bytes > 0)
            ok = MPI_Isend(p->send + j * p->send_stride, (int)p->send_bytes, MPI_BYTE, j, tag,
                           c->mpi, &c->req[n + j]);
    }
    if (ok != MPI_SUCCESS)
        return kn_fail("%s %s: MPI cannot send or receive: another rank or the network is gone",
                       kn_comm_kind_name(call->kind), call->label ? call->label : "-");
    return wait_all(c, call);
}
