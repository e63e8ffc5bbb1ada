/* comm/contract.c: the contract among ranks: the same calls in the same order. Numbers and hashes
 * of calls, the log that other ranks read, and the messages for ranks that are out of step or late
 * (comm_internal.h). */
#include "comm/comm_internal.h"
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* ---- hashing --------------------------------------------------------------------------------- */

static uint64_t mix_text(uint64_t h, const char *text)
{
    size_t n = text ? strlen(text) : 0;
    h = kn_hash64(h, n);
    for (size_t at = 0; at < n; at += 8) {
        uint64_t word = 0;
        memcpy(&word, text + at, n - at < 8 ? n - at : 8);
        h = kn_hash64(h, word);
    }
    return h;
}

static uint64_t mix_call(uint64_t h, const kn_comm *c, const kn_comm_call *call)
{
    h = kn_hash64(h, (uint64_t)c->id << 32 | (uint64_t)call->kind << 24);
    h = kn_hash64(h, call->content);
    h = kn_hash64(h, (uint64_t)call->root);
    return mix_text(h, call->label);
}

kn_comm_call kn_comm_call_of(kn_comm_kind kind, int root, const kn_comm_piece *piece, int pieces,
                             const char *label)
{
    kn_comm_call call = { .kind = kind,
                          .root = root,
                          .piece = piece,
                          .pieces = pieces,
                          .label = label,
                          .dst_dtype = piece->dst_dtype,
                          .src_dtype = piece->src_dtype };
    for (int i = 0; i < pieces; i++) {
        call.count += piece[i].count;
        call.content = kn_hash64(call.content,
                                 (uint64_t)piece[i].dst_dtype << 8 | (uint64_t)piece[i].src_dtype);
        call.content = kn_hash64(call.content, (uint64_t)piece[i].count);
    }
    return call;
}

kn_comm_call kn_comm_call_in_place(kn_comm_kind kind, int root, void *data, int64_t count,
                                   kn_dtype t, const char *label, kn_comm_piece *piece)
{
    *piece =
        (kn_comm_piece){ .dst = data, .src = data, .count = count, .dst_dtype = t, .src_dtype = t };
    return kn_comm_call_of(kind, root, piece, 1, label);
}

/* ---- the log --------------------------------------------------------------------------------- */

/* Notes are copied word by word. A reader that sees a word of a later note (its store releases)
 * also sees the number that was published before it, and so detects that the writer came round. */
typedef uint64_t __attribute__((may_alias)) word;
_Static_assert(sizeof(kn_comm_note) % sizeof(word) == 0, "notes are copied by words");
enum { NOTE_WORDS = sizeof(kn_comm_note) / sizeof(word) };

static void note_write(kn_comm_note *to, const kn_comm_note *from)
{
    for (int i = 0; i < NOTE_WORDS; i++)
        __atomic_store_n((word *)to + i, ((const word *)from)[i], __ATOMIC_RELEASE);
}

kn_comm_note kn_comm_note_of(const kn_comm *c, const kn_comm_call *call)
{
    kn_comm_note n = { .seq = call->seq,
                       .hash = call->hash,
                       .count = call->count,
                       .kind = (int32_t)call->kind,
                       .dst_dtype = (int32_t)call->dst_dtype,
                       .src_dtype = (int32_t)call->src_dtype,
                       .root = call->root,
                       .pieces = call->pieces,
                       .content = (uint32_t)call->content };
    size_t label = call->label ? strnlen(call->label, sizeof n.label - 1) : 0;
    if (label > 0)
        memcpy(n.label, call->label, label);
    memcpy(n.comm, c->name, strnlen(c->name, sizeof n.comm - 1));
    return n;
}

/* Calls of a number of elements. */
static bool has_count(kn_comm_kind kind)
{
    return kind != KN_CALL_BARRIER && kind != KN_CALL_AGREE && kind != KN_CALL_GROUP;
}

/* A fault that was asked for at this call. Of another shape the others learn before a byte moves,
 * so that the call differs in what it says. */
static bool suffer(const kn_comm *c, kn_comm_call *call, kn_fault_kind fault)
{
    char what[256];
    if (fault == KN_FAULT_SHAPE && !has_count(call->kind))
        return kn_fail(
            "the fault \"%s\" is at %s, which has no other shape: give another collective",
            kn_context_get()->fault.text, kn_comm_kind_name(call->kind));
    if (fault == KN_FAULT_SHAPE)
        call->content = kn_hash64(call->content, (uint64_t)++call->count);
    call->flips = fault == KN_FAULT_FLIP;
    kn_comm_note note = kn_comm_note_of(c, call);
    return kn_fault_come(fault, kn_comm_describe(&note, what, sizeof what));
}

bool kn_comm_note_call(kn_comm *c, kn_comm_call *call)
{
    kn_comm *f = c->family;
    call->seq = 0;
    if (!f->log)
        return true;
    if (kn_context_is_worker()) { /* its order among the others' is not the program's */
        call->hash = mix_call(0, c, call);
        return true;
    }
    const kn_fault_kind fault = c->size > 1 ? kn_fault_due(KN_AT_COLLECTIVE) : KN_NO_FAULT;
    const bool changes = fault == KN_FAULT_SHAPE || fault == KN_FAULT_SKIP;
    if (changes && (!suffer(c, call, fault) || fault == KN_FAULT_SKIP))
        return false;
    call->seq = ++f->seq;
    call->hash = f->hash = mix_call(kn_hash64(f->hash, call->seq), c, call);
    kn_comm_note note = kn_comm_note_of(c, call);
    note_write(&f->log->note[call->seq % KN_NOTES], &note);
    atomic_store_explicit(&f->log->launched, call->seq, memory_order_release);
    return !fault || changes || suffer(c, call, fault);
}

void kn_comm_note_end(kn_comm *c, const kn_comm_call *call)
{
    kn_comm_log *log = c->family->log;
    if (!log || !call->seq)
        return;
    uint64_t seen = atomic_load_explicit(&log->finished, memory_order_relaxed);
    while (seen < call->seq && !atomic_compare_exchange_weak(&log->finished, &seen, call->seq))
        ;
}

bool kn_comm_log_read(kn_comm_log *log, uint64_t seq, kn_comm_note *note)
{
    if (seq == 0 || atomic_load_explicit(&log->launched, memory_order_acquire) < seq)
        return false;
    const kn_comm_note *from = &log->note[seq % KN_NOTES];
    for (int i = 0; i < NOTE_WORDS; i++)
        ((word *)note)[i] = __atomic_load_n((const word *)from + i, __ATOMIC_ACQUIRE);
    note->label[sizeof note->label - 1] = note->comm[sizeof note->comm - 1] = 0;
    /* one less: the writer may be at work on the next */
    return note->seq == seq &&
           atomic_load_explicit(&log->launched, memory_order_acquire) - seq < KN_NOTES - 1;
}

bool kn_comm_log_differ(kn_comm_log *a, kn_comm_log *b, kn_comm_note *of_a, kn_comm_note *of_b)
{
    uint64_t na = atomic_load(&a->launched), nb = atomic_load(&b->launched);
    uint64_t last = na < nb ? na : nb, most = na < nb ? nb : na;
    for (uint64_t seq = most > KN_NOTES ? most - KN_NOTES : 1; seq <= last; seq++)
        if (kn_comm_log_read(a, seq, of_a) && kn_comm_log_read(b, seq, of_b) &&
            of_a->hash != of_b->hash)
            return true;
    return false;
}

/* ---- messages ------------------------------------------------------------------------------- */

char *kn_comm_describe(const kn_comm_note *n, char *buf, size_t size)
{
    char what[96] = "", more[32] = "";
    const char *src = kn_dtype_name((kn_dtype)n->src_dtype);
    const char *dst = kn_dtype_name((kn_dtype)n->dst_dtype);
    kn_comm_kind kind = (kn_comm_kind)n->kind;
    if (kind == KN_CALL_BROADCAST)
        snprintf(more, sizeof more, " from rank %d", (int)n->root);
    if (n->pieces > 1)
        snprintf(more, sizeof more, " and others, %d buffers", (int)n->pieces);
    if (has_count(kind))
        snprintf(what, sizeof what, " of %lld %s%s%s%s", (long long)n->count, src,
                 n->src_dtype == n->dst_dtype ? "" : " to ",
                 n->src_dtype == n->dst_dtype ? "" : dst, more);
    snprintf(buf, size, "%s%s%s%s%s in communicator %s", kn_comm_kind_name(kind), what,
             n->label[0] ? " (" : "", n->label, n->label[0] ? ")" : "", n->comm);
    return buf;
}

bool kn_comm_mismatch(int rank_a, const kn_comm_note *a, int rank_b, const kn_comm_note *b)
{
    char of_a[256], of_b[256];
    if (rank_a > rank_b) /* the same sentence on every rank, whichever saw it first */
        return kn_comm_mismatch(rank_b, b, rank_a, a);
    bool lists = a->pieces > 1 && a->pieces == b->pieces && a->content != b->content;
    return kn_fail("collectives don't match: rank %d calls %s, rank %d calls %s%s: every rank must "
                   "make the same calls in the same order",
                   rank_a, kn_comm_describe(a, of_a, sizeof of_a), rank_b,
                   kn_comm_describe(b, of_b, sizeof of_b),
                   lists ? "; counts or dtypes of their buffers differ" : "");
}

bool kn_comm_timed_out(const kn_comm *c, const kn_comm_call *call, int me, int missing,
                       double seconds, const kn_comm_note *last, bool finished)
{
    char mine[256], theirs[256] = "";
    kn_comm_note note = kn_comm_note_of(c, call);
    kn_comm_describe(&note, mine, sizeof mine);
    if (!last)
        return kn_fail("rank %d waited %g s for rank %d in %s; rank %d has made no call yet: it is "
                       "stopped, stuck or late (to wait longer: kn_comm_set_timeout, KNAP_TIMEOUT)",
                       me, seconds, missing, mine, missing);
    return kn_fail("rank %d waited %g s for rank %d in %s; the last call of rank %d was %s, which "
                   "it has %s: it is stopped, stuck or late (to wait longer: kn_comm_set_timeout, "
                   "KNAP_TIMEOUT)",
                   me, seconds, missing, mine, missing,
                   kn_comm_describe(last, theirs, sizeof theirs),
                   finished ? "finished" : "not finished");
}
