/* comm/messages/messages_world.c: the control words beside messages, and all the reasons why a
 * message may never come (messages.h). */
#include "comm/messages/messages.h"
#include "kernels/kernels_internal.h"
#include "kernels/trace.h"
#include <stdatomic.h>
#include <stdio.h>

/* An error takes less than this to reach the other ranks. */
#define ROUND_S 0.1
/* So does a message that was sent before a rank left. */
#define LEFT_S 0.25
/* When a wait first sends where. Time to wait for answers; time between two of them for calls on a
 * device. */
#define ASK_AFTER_S 0.05
#define ANSWER_S    0.5
#define ASK_S       1.0

/* ---- life ---------------------------------------------------------------------------------- */

bool kn_message_world_begin(kn_message_world *w, const kn_transport *by, int size)
{
    w->by = by;
    w->main = pthread_self();
    pthread_mutex_init(&w->lock, NULL);
    atomic_store(&w->loudest, INT32_MAX);
    w->peer = kn_host_calloc((size_t)size, sizeof *w->peer);
    return w->peer != NULL;
}

void kn_message_world_end(kn_message_world *w)
{
    if (w->by)
        pthread_mutex_destroy(&w->lock);
    kn_host_free(w->peer);
}

bool kn_message_comm_begin(kn_message_comm *c, int size)
{
    size_t n = (size_t)size;
    c->w = c->base.world->backend;
    c->base.log = kn_host_calloc(1, sizeof *c->base.log);
    c->said = kn_host_calloc(n, sizeof *c->said);
    c->source = kn_host_calloc(n, sizeof *c->source);
    return c->base.log && c->said && c->source;
}

void kn_message_comm_end(kn_message_comm *c)
{
    kn_give(kn_device_memory(KN_CPU), c->room, c->room_bytes, KN_MEM_COMM);
    kn_host_free(c->base.log);
    kn_host_free(c->said);
    kn_host_free(c->source);
}

/* ---- words ----------------------------------------------------------------------------------- */

/* To rank r of the world, -1: to all others. */
static void tell(kn_message_world *w, int r, const kn_message_word *word)
{
    if (r >= 0)
        w->by->tell(w, r, word);
    for (int i = 0; r < 0 && i < w->first->size; i++)
        if (i != w->first->rank)
            w->by->tell(w, i, word);
}

static kn_poison *poison_of(const kn_message_world *w)
{
    return w->first->world->poison;
}

/* Sends the error that stands here to the others, once, if this thread may. */
static void tell_poison(kn_message_world *w)
{
    const char *text = "";
    kn_message_word word = { .what = KN_WORD_POISON };
    if (kn_poisoned(poison_of(w), &text) != w->first->rank || !w->by->may(w) ||
        atomic_exchange(&w->told, true))
        return;
    snprintf(word.text, sizeof word.text, "%s", text);
    tell(w, -1, &word);
}

void kn_message_say_goodbye(kn_message_world *w)
{
    tell_poison(w);
    tell(w, -1, &(kn_message_word){ .what = KN_WORD_LEFT });
}

static kn_comm *family_of(kn_message_world *w, int64_t id)
{
    kn_comm *f = __atomic_load_n(&w->first->world->first, __ATOMIC_ACQUIRE);
    while (f && (f->family != f || f->id != id))
        f = f->next;
    return f;
}

/* Rank r waits for us in a call. Have we made another one in its place, or one that r hasn't made,
 * before it? Then neither will ever come (local_world.c does the same by looking). */
static bool in_step(kn_message_world *w, int r, const kn_message_word *word)
{
    int me = w->first->rank;
    kn_comm_note mine;
    kn_comm *f = family_of(w, word->family);
    if (!f || !word->note.seq)
        return true;
    if (kn_comm_log_read(f->log, word->note.seq, &mine))
        return mine.hash == word->note.hash || kn_comm_mismatch(r, &word->note, me, &mine);
    for (int i = 0; i < word->families && i < KN_WORD_FAMILIES; i++) {
        kn_comm *other = word->at[i].id == word->family ? NULL : family_of(w, word->at[i].id);
        if (other && kn_comm_holds(other, r) &&
            kn_comm_log_read(other->log, (uint64_t)word->at[i].launched + 1, &mine))
            return kn_comm_mismatch(r, &word->note, me, &mine);
    }
    return true;
}

/* Rank r requests this rank's position in the family of its call: none in a family that isn't made
 * yet. */
static void answer(kn_message_world *w, int r, int family)
{
    kn_comm *f = family_of(w, family);
    kn_message_word word = { .what = KN_WORD_HERE, .family = family };
    if (!w->by->may(w))
        return;
    word.launched = f && f->log ? (int64_t)atomic_load(&f->log->launched) : 0;
    tell(w, r, &word);
}

bool kn_message_heard(kn_message_world *w, int r, kn_message_word *word)
{
    word->text[sizeof word->text - 1] = 0;
    word->note.label[sizeof word->note.label - 1] = word->note.comm[sizeof word->note.comm - 1] = 0;
    switch (word->what) {
    case KN_WORD_POISON:
        if (r < atomic_load(&w->loudest)) /* one thread at a time reads */
            atomic_store(&w->loudest, r);
        kn_poison_set(poison_of(w), r, word->text);
        return true;
    case KN_WORD_LEFT:
        atomic_store(&w->peer[r].left, 1);
        return true;
    case KN_WORD_HERE:
        pthread_mutex_lock(&w->lock);
        w->peer[r].answered = kn_now();
        if (word->family == w->here_of)
            w->peer[r].here = word->launched;
        pthread_mutex_unlock(&w->lock);
        return true;
    case KN_WORD_WHERE:
        pthread_mutex_lock(&w->lock);
        w->peer[r].last = word->note;
        pthread_mutex_unlock(&w->lock);
        answer(w, r, word->family);
        return in_step(w, r, word);
    default:
        return true;
    }
}

static void ask_where(kn_message_comm *c, const kn_comm_call *call, int peer)
{
    kn_message_word word = { .what = KN_WORD_WHERE,
                             .note = kn_comm_note_of(&c->base, call),
                             .family = c->base.family->id };
    int n = 0;
    for (kn_comm *f = __atomic_load_n(&c->base.world->first, __ATOMIC_ACQUIRE);
         f && n < KN_WORD_FAMILIES; f = f->next)
        if (f->family == f && f->log) {
            word.at[n].id = f->id;
            word.at[n++].launched = (int64_t)atomic_load(&f->log->launched);
        }
    word.families = n;
    tell(c->w, c->base.member[peer], &word);
}

/* ---- waiting --------------------------------------------------------------------------------- */

bool kn_message_hopeful(kn_message_comm *c, const kn_comm_call *call, int peer)
{
    char mine[256];
    int owner = c->base.member[peer];
    tell_poison(c->w);
    kn_poison *poison = poison_of(c->w);
    if (!kn_unpoisoned(poison) || !c->w->by->listen(c->w) || !kn_unpoisoned(poison))
        return false;
    if (!atomic_load(&c->w->peer[owner].left) ||
        (c->w->by->drained && !c->w->by->drained(c->w, owner)))
        return true;
    if (c->left_since == 0)
        c->left_since = kn_now();
    if (kn_now() - c->left_since < LEFT_S) /* its last messages may come after this word */
        return true;
    kn_comm_note note = kn_comm_note_of(&c->base, call);
    return kn_fail(
        "rank %d waits in %s, but rank %d has ended: every rank must make the same calls",
        c->w->first->rank, kn_comm_describe(&note, mine, sizeof mine), owner);
}

static bool late(kn_message_comm *c, const kn_comm_call *call, int peer, double limit)
{
    kn_comm_note last;
    int owner = c->base.member[peer];
    pthread_mutex_lock(&c->w->lock);
    last = c->w->peer[owner].last;
    pthread_mutex_unlock(&c->w->lock);
    return kn_comm_timed_out(&c->base, call, c->w->first->rank, owner, limit,
                             last.kind == KN_CALL_NONE ? NULL : &last, true);
}

static void ask_open(kn_message_comm *c, const kn_comm_call *call)
{
    c->asked_late = c->waited;
    c->asked_at = kn_now();
    for (int i = 0; i < c->base.size; i++)
        if (c->w->by->open(c, i))
            ask_where(c, call, i);
}

static bool in_time(kn_message_comm *c, const kn_comm_call *call)
{
    double limit = kn_comm_timeout(&c->base);
    double most = limit + (limit > 3 * ANSWER_S ? limit : 3 * ANSWER_S);
    int missing = -1;
    bool silent = false;
    if (c->waited <= limit) {
        c->asked_late = 0;
        return true;
    }
    if (c->asked_late == 0)
        ask_open(c, call);
    if (c->waited - c->asked_late < ANSWER_S)
        return true;
    pthread_mutex_lock(&c->w->lock);
    for (int i = 0; i < c->base.size && !silent; i++) {
        if (!c->w->by->open(c, i))
            continue;
        missing = i;
        silent = c->w->peer[c->base.member[i]].answered < c->asked_at;
    }
    pthread_mutex_unlock(&c->w->lock);
    if (missing < 0 || (!silent && c->waited < most)) {
        ask_open(c, call);
        return true;
    }
    return late(c, call, missing, limit);
}

void kn_message_wait_begin(kn_message_comm *c)
{
    c->waited = c->asked_late = 0;
    c->counted = kn_now();
    c->ask = ASK_AFTER_S;
}

bool kn_message_wait_on(kn_message_comm *c, const kn_comm_call *call, int peer, bool moved)
{
    if (!kn_message_hopeful(c, call, peer))
        return false;
    const double now = kn_now(), passed = now - c->counted;
    c->counted = now;
    c->waited =
        moved ? 0 : c->waited + (passed < 0.1 ? passed : 0.1); /* a suspended job isn't late */
    if (!in_time(c, call))
        return false;
    if (c->waited > c->ask) {
        ask_where(c, call, peer);
        c->ask += c->ask < 2 ? c->ask : 2;
    }
    return true;
}

bool kn_message_ops_speaks(kn_comm *base)
{
    kn_message_world *w = ((kn_message_comm *)base)->w;
    int me = w->first->rank, first;
    tell_poison(w);
    for (double end = kn_now() + ROUND_S; kn_now() < end;) {
        w->by->listen(w);
        kn_sleep(0.001);
    }
    first = kn_poisoned(poison_of(w), NULL);
    return (first < 0 || first == me) && atomic_load(&w->loudest) > me;
}

/* ---- calls on a device ----------------------------------------------------------------------- */

bool kn_message_ops_healthy(kn_comm *base)
{
    kn_message_world *w = ((kn_message_comm *)base)->w;
    tell_poison(w);
    return kn_unpoisoned(poison_of(w)) && (!w->by->may(w) || w->by->listen(w)) &&
           kn_unpoisoned(poison_of(w));
}

static void ask_all(kn_message_comm *c, const kn_comm_call *call)
{
    for (int i = 0; i < c->base.size; i++)
        if (i != c->base.rank)
            ask_where(c, call, i);
}

/* The rank that got the word finds out; its poison comes back. */
bool kn_message_ops_in_step(kn_comm *base, const kn_comm_call *call)
{
    kn_message_comm *c = (kn_message_comm *)base;
    double now = kn_now();
    if (c->w->by->may(c->w) && now - c->w->asked > ASK_S) {
        c->w->asked = now;
        ask_all(c, call);
    }
    for (int i = 0; i < base->size; i++)
        if (i != base->rank && c->w->by->may(c->w) && !kn_message_hopeful(c, call, i))
            return false;
    return kn_message_ops_healthy(base);
}

/* The rank that is least far, or doesn't answer, is the one that is missing. */
void kn_message_ops_late(kn_comm *base, const kn_comm_call *call, double limit)
{
    kn_message_comm *c = (kn_message_comm *)base;
    kn_message_world *w = c->w;
    if (!w->by->may(w))
        return;
    pthread_mutex_lock(&w->lock);
    w->here_of = base->family->id;
    for (int r = 0; r < w->first->size; r++)
        w->peer[r].here = -1;
    pthread_mutex_unlock(&w->lock);
    ask_all(c, call);
    for (double end = kn_now() + ANSWER_S; kn_now() < end; kn_sleep(0.001))
        if (!kn_message_ops_healthy(base))
            return;
    int missing = -1;
    int64_t least = INT64_MAX;
    pthread_mutex_lock(&w->lock);
    for (int i = 0; i < base->size; i++) {
        int64_t launched = w->peer[c->base.member[i]].here;
        missing = i != base->rank && launched < least ? i : missing;
        least = i != base->rank && launched < least ? launched : least;
    }
    pthread_mutex_unlock(&w->lock);
    if (missing >= 0)
        late(c, call, missing, limit);
}

void kn_message_ops_tell(kn_comm *base)
{
    tell_poison(((kn_message_comm *)base)->w);
}
