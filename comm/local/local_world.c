/* comm/local/local_world.c: the shared mapping itself: making it, poisoning it, sleeping on a
 * phase. Layout and protocol: local.h. */
#include "kernels/trace.h"
#include "comm/local/local.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAGIC      UINT64_C(0x6b6e61702d303104) /* changes with the layout */
#define REGION_MAX ((size_t)64 << 30)
#define REGION_MIN ((size_t)64 << 20)
#define HUGE_PAGE  ((size_t)2 << 20) /* regions start on a huge page's boundary */
#define LEFT_S     1.0               /* for what a rank that ended had launched */

/* Poison is noticed after at most this long by a rank that sleeps. */
enum { SLEEP_NS = 20 * 1000 * 1000, SPINS = 20000 };

static size_t control_bytes(int n)
{
    size_t slots = (size_t)KN_LOCAL_CHANNELS * (size_t)n;
    size_t bytes = sizeof(kn_local_head) + slots * sizeof(kn_local_slot);
    return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
}

static void *map_shared(size_t bytes, int fd)
{
    int flags = MAP_SHARED | MAP_NORESERVE | (fd < 0 ? MAP_ANONYMOUS : 0);
    void *m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (m == MAP_FAILED)
        return NULL;
    madvise(m, bytes, MADV_DONTDUMP); /* a core file of the sparse whole is useless */
    return m;
}

/* ftruncate; a limit on the size of files (ulimit -f) is an error here and not a signal. */
static bool set_size(int file, size_t bytes)
{
    sigset_t one, old, pending;
    sigemptyset(&one);
    sigaddset(&one, SIGXFSZ);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &one, &old);
    bool ok = ftruncate(file, (off_t)bytes) == 0;
    int error = errno;
    if (!ok &&
        !sigismember(&pending, SIGXFSZ)) /* it came to this thread; no other one shall see it */
        sigtimedwait(&one, NULL, &(struct timespec){ 0 });
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    errno = error;
    return ok;
}

/* The size of the file stays as it is, so that no rank can end another by cutting off its pages. */
enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW };

kn_local_head *kn_local_create(int n, kn_local_cores cores, int *fd, size_t *bytes)
{
    size_t control = control_bytes(n), region = REGION_MAX;
    int file = -1;
    if (fd && (file = memfd_create("knap", MFD_CLOEXEC | MFD_ALLOW_SEALING)) < 0)
        return kn_fail_null("local ranks: memfd_create: %s", strerror(errno));
    kn_local_head *head = NULL;
    for (; !head && region >= REGION_MIN; region /= 2) {
        *bytes = control + (size_t)n * region;
        if (file < 0 || set_size(file, *bytes))
            head = map_shared(*bytes, file);
        if (head)
            break;
    }
    if (!head) {
        kn_fail(
            "local ranks: cannot map %d regions of %zu MiB of shared memory: %s (see ulimit -v and "
            "ulimit -f)",
            n, (size_t)REGION_MIN >> 20, strerror(errno));
        goto fail;
    }
    if (file >= 0 && fcntl(file, F_ADD_SEALS, SEALS | F_SEAL_SEAL) != 0) {
        kn_fail("local ranks: cannot seal the shared memory: %s", strerror(errno));
        goto fail;
    }
    head->magic = MAGIC;
    head->control_bytes = control;
    head->region_bytes = region;
    head->size = n;
    head->cores = cores;
    if (fd)
        *fd = file;
    return head;
fail:
    kn_local_unmap(head, *bytes);
    if (file >= 0)
        close(file);
    return NULL;
}

/* The sizes in the mapping are those of this library. Read once: they lie in shared memory. */
static bool fits(const kn_local_head *head, size_t bytes)
{
    uint64_t control = head->control_bytes, region = head->region_bytes;
    int size = head->size;
    return head->magic == MAGIC && size >= 1 && size <= KN_LOCAL_MAX_RANKS &&
           control == control_bytes(size) && region >= REGION_MIN && region <= REGION_MAX &&
           control + (uint64_t)size * region == bytes;
}

kn_local_head *kn_local_map(int fd, size_t *bytes)
{
    struct stat st;
    if (fstat(fd, &st) != 0 || st.st_size < (off_t)sizeof(kn_local_head))
        return kn_fail_null(
            "local ranks: KNAP_LOCAL_FD=%d is not the supervisor's shared memory: start with "
            "--ranks, not by setting KNAP_RANK",
            fd);
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS)
        return kn_fail_null(
            "local ranks: descriptor %d is no sealed memory, so its pages could be taken away: "
            "it was not made by this version of libknap",
            fd);
    *bytes = (size_t)st.st_size;
    kn_local_head *head = map_shared(*bytes, fd);
    if (!head)
        return kn_fail_null("local ranks: cannot map %zu GiB of address space: %s (see ulimit -v)",
                            *bytes >> 30, strerror(errno));
    if (!fits(head, *bytes)) {
        kn_fail("local ranks: the shared memory was made by another version of libknap");
        kn_local_unmap(head, *bytes);
        return NULL;
    }
    return head;
}

void kn_local_unmap(kn_local_head *head, size_t bytes)
{
    if (head)
        munmap(head, bytes);
}

/* ---- phases ---------------------------------------------------------------------------------- */

void kn_local_left(kn_local_head *head, int rank)
{
    atomic_store(&head->left[rank], 1);
}

static void futex_sleep(_Atomic uint32_t *word, uint32_t seen)
{
    struct timespec t = { .tv_nsec = SLEEP_NS };
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

static bool reached(uint32_t phase, uint32_t target)
{
    return (int32_t)(phase - target) >= 0;
}

void kn_local_publish(kn_local_slot *mine, uint32_t phase)
{
    atomic_store(&mine->phase, phase);
    if (atomic_load(&mine->sleepers) > 0)
        syscall(SYS_futex, &mine->phase, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* The last launch of rank r, in any family. */
bool kn_local_last_call(kn_local_head *head, int r, kn_comm_note *note, bool *finished)
{
    int channel = atomic_load_explicit(&head->last[r], memory_order_relaxed);
    kn_comm_log *log = &kn_local_slot_at(head, channel, r)->log;
    uint64_t seq = atomic_load(&log->launched);
    if (finished)
        *finished = atomic_load(&log->finished) >= seq;
    return seq > 0 && kn_comm_log_read(log, seq, note);
}

/* Is peer in step with this rank? It isn't if its call of the same number is another one, or if it
 * made a call in another family of both ranks that this rank hasn't made, before this call, which
 * this rank has made. */
static bool in_step(const kn_local_comm *c, int peer, const kn_comm_call *call)
{
    kn_local_head *h = c->local->head;
    int them = c->base.member[peer], me = c->local->rank;
    const kn_comm *family = c->base.family;
    kn_comm_log *theirs = &kn_local_slot_at(h, family->id, them)->log;
    kn_comm_note mine = kn_comm_note_of(&c->base, call), other, first;
    if (!call->seq)
        return true;
    if (kn_comm_log_read(theirs, call->seq, &other) && other.hash != call->hash) {
        kn_comm_log *own = &kn_local_slot_at(h, family->id, me)->log;
        if (kn_comm_log_differ(own, theirs, &first, &other)) /* perhaps before */
            mine = first;
        return kn_comm_mismatch(me, &mine, them, &other);
    }
    for (kn_comm *f = __atomic_load_n(&c->base.world->first, __ATOMIC_ACQUIRE); f; f = f->next) {
        if (f->family != f || f == family || !kn_comm_holds(f, them))
            continue;
        kn_comm_log *log = &kn_local_slot_at(h, f->id, them)->log;
        uint64_t done = atomic_load(&f->log->launched);
        /* in this order: earlier launches are seen first */
        if (atomic_load(&log->launched) > done && atomic_load(&theirs->launched) < call->seq &&
            kn_comm_log_read(log, done + 1, &other))
            return kn_comm_mismatch(me, &mine, them, &other);
    }
    return true;
}

/* A rank without a supervisor holds its byte of the lock file for as long as it lives. */
static bool is_alive(const kn_local *l, int rank)
{
    struct flock f = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1 };
    return l->lock < 0 || fcntl(l->lock, F_GETLK, &f) != 0 || f.l_type != F_UNLCK;
}

/* An error: the others wait in call for a rank that is no more. */
static bool is_gone(const kn_local_comm *c, int owner, const kn_comm_call *call)
{
    const kn_comm_note note = kn_comm_note_of(&c->base, call);
    kn_comm_note last;
    char mine[256], theirs[256] = "none";
    if (kn_local_last_call(c->local->head, owner, &last, NULL))
        kn_comm_describe(&last, theirs, sizeof theirs);
    kn_comm_describe(&note, mine, sizeof mine);
    if (!atomic_load(&c->local->head->left[owner]))
        return kn_fail(
            "rank %d died without an error message; its last call was %s, and rank %d waited "
            "for it in %s",
            owner, theirs, c->local->rank, mine);
    return kn_fail("rank %d waits in %s, but rank %d has ended after %s: every rank must make "
                   "the same calls",
                   c->local->rank, mine, owner, theirs);
}

static bool still_hopeful(kn_local_comm *c, int peer, uint32_t target, const kn_comm_call *call)
{
    kn_local_head *h = c->local->head;
    kn_local_slot *slot = kn_local_slot_at(h, c->base.id, c->base.member[peer]);
    int owner = c->base.member[peer];
    const char *text;
    int rank = kn_poisoned(&h->poison, &text);
    if (rank >= 0) /* if the peer came first, the meeting took place: it is right on every rank */
        return reached(atomic_load(&slot->phase), target) || kn_fail_of_rank(rank, text);
    if ((atomic_load(&h->left[owner]) || !is_alive(c->local, owner)) &&
        !reached(atomic_load(&slot->phase), target))
        return is_gone(c, owner, call);
    return in_step(c, peer, call);
}

/* A rank that waits for a waiting rank leaves it to that one to name the missing rank. */
static bool waits_itself(kn_local_comm *c, int peer, double now)
{
    int64_t beat =
        atomic_load_explicit(&c->local->head->beat[c->base.member[peer]], memory_order_relaxed);
    return beat > 0 && now * 1e3 - (double)beat < 300;
}

static bool too_late(kn_local_comm *c, int peer, const kn_comm_call *call, double limit)
{
    kn_comm_note last;
    bool finished = false;
    int owner = c->base.member[peer];
    bool any = kn_local_last_call(c->local->head, owner, &last, &finished);
    return kn_comm_timed_out(&c->base, call, c->local->rank, owner, limit, any ? &last : NULL,
                             finished);
}

/* There is no supervisor, and a rank is gone: false with an error. */
static bool all_alive(kn_local_comm *c)
{
    for (int i = 0; i < c->base.size && c->local->lock >= 0; i++) {
        int owner = c->base.member[i];
        kn_comm_note last;
        char theirs[256] = "none";
        if (owner == c->local->rank || atomic_load(&c->local->head->left[owner]) ||
            is_alive(c->local, owner))
            continue;
        if (kn_local_last_call(c->local->head, owner, &last, NULL))
            kn_comm_describe(&last, theirs, sizeof theirs);
        return kn_fail("rank %d died without an error message; its last call was %s", owner,
                       theirs);
    }
    return true;
}

bool kn_local_healthy(kn_comm *base)
{
    return kn_unpoisoned(base->world->poison) && all_alive((kn_local_comm *)base);
}

/* Has the rank ended, with call still ahead? What it launched may be on its way for a while. */
static bool ended_before(kn_local_comm *c, int owner, const kn_comm_call *call)
{
    kn_local_head *h = c->local->head;
    const kn_comm_log *log = &kn_local_slot_at(h, c->base.family->id, owner)->log;
    if (!atomic_load(&h->left[owner]) || atomic_load(&log->finished) >= call->seq)
        return false;
    if (c->left_since == 0)
        c->left_since = kn_now();
    return atomic_load(&log->launched) < call->seq || kn_now() - c->left_since > LEFT_S;
}

bool kn_local_in_step(kn_comm *base, const kn_comm_call *call)
{
    kn_local_comm *c = (kn_local_comm *)base;
    for (int i = 0; i < base->size; i++) {
        const int owner = base->member[i];
        if (owner != c->local->rank && ended_before(c, owner, call))
            return is_gone(c, owner, call);
        if (owner != c->local->rank && !in_step(c, i, call))
            return false;
    }
    return true;
}

void kn_local_late(kn_comm *base, const kn_comm_call *call, double limit)
{
    kn_local_comm *c = (kn_local_comm *)base;
    int missing = -1;
    uint64_t least = UINT64_MAX;
    if (!kn_local_in_step(base, call))
        return;
    for (int i = 0; i < base->size; i++) {
        int owner = c->base.member[i];
        if (owner == c->local->rank)
            continue;
        uint64_t launched =
            atomic_load(&kn_local_slot_at(c->local->head, base->family->id, owner)->log.launched);
        missing = launched < least ? i : missing;
        least = launched < least ? launched : least;
    }
    if (missing >= 0)
        too_late(c, missing, call, limit);
}

bool kn_local_wait(kn_local_comm *c, int peer, uint32_t target, const kn_comm_call *call,
                   bool may_spin)
{
    kn_local_slot *slot = kn_local_slot_at(c->local->head, c->base.id, c->base.member[peer]);
    for (int i = may_spin && c->local->head->cores.enough ? SPINS : 1; i > 0; i--)
        if (reached(atomic_load_explicit(&slot->phase, memory_order_acquire), target))
            return true;
    double waited = 0, now = kn_now(), limit = kn_comm_timeout(&c->base);
    for (;;) {
        if (!still_hopeful(c, peer, target, call))
            return false;
        atomic_fetch_add(&slot->sleepers,
                         1); /* before the last look: publish looks after its store */
        uint32_t seen = atomic_load(&slot->phase);
        if (!reached(seen, target))
            futex_sleep(&slot->phase, seen);
        atomic_fetch_sub(&slot->sleepers, 1);
        if (reached(atomic_load(&slot->phase), target))
            return true;
        /* only time in which this process could run counts: a job may be suspended as a whole */
        double before = now;
        now = kn_now();
        waited += now - before < 0.1 ? now - before : 0.1;
        atomic_store_explicit(&c->local->head->beat[c->local->rank], (int64_t)(now * 1e3),
                              memory_order_relaxed);
        if (waited > limit && (waited > 2 * limit || !waits_itself(c, peer, now)))
            return too_late(c, peer, call, limit);
    }
}
