/* fsdp/verbs.c: the verbs of the schedule. A unit's buckets move together; each verb that moves
 * bytes emits an event. */
#include "fsdp/schedule.h"
#include "kernels/trace.h"

#include <stdio.h>
#include <string.h>

/* ---- events ---------------------------------------------------------------------------------- */

const char *kn_fsdp_event_name(kn_fsdp_event_kind kind)
{
    static const char *const name[KN_FSDP_EVENT_COUNT] = { "gather", "gathered", "release",
                                                           "reduce", "reduced" };
    return (unsigned)kind < KN_FSDP_EVENT_COUNT ? name[kind] : "unknown";
}

static void trace(const kn_unit *u, kn_fsdp_event_kind kind, int64_t bytes, kn_cause why)
{
    char cause[160];
    snprintf(cause, sizeof cause, "%s%s%s", why.why, why.of ? " " : "",
             why.of ? kn_unit_name(why.of) : "");
    kn_trace_put(NULL, (kn_trace_event){ .kind = KN_TRACE_VERB,
                                         .what = kn_fsdp_event_name(kind),
                                         .path = kn_unit_name(u),
                                         .detail = cause,
                                         .source = strstr(why.source, "fsdp/"),
                                         .bytes = (double)bytes,
                                         .backward = kn_in_backward() });
}

/* A verb moved bytes of u, if there are any. */
static void emit(const kn_unit *u, kn_fsdp_event_kind kind, int64_t bytes, kn_cause why)
{
    if (bytes > 0 && kn_trace_sees(KN_TRACE_VERB))
        trace(u, kind, bytes, why);
    if (bytes > 0 && u->observer)
        u->observer(&(kn_fsdp_event){ kind, kn_unit_name(u), bytes, u->rank }, u->observer_arg);
}

/* ---- verbs ----------------------------------------------------------------------------------- */

enum { AWAY = 1 << KN_SHARDED | 1 << KN_SLICED };

/* Bytes of u's whole parameters that are in one of these states (1 << kn_residency). */
static int64_t bytes_in(const kn_unit *u, int states)
{
    int64_t bytes = 0;
    for (int i = 0; i < u->buckets; i++)
        if (states & 1 << u->bucket[i]->residency)
            bytes += kn_bucket_gathered_bytes(u->bucket[i]);
    return bytes;
}

bool kn_unit_unshard(kn_unit *u, kn_cause why)
{
    int64_t away = bytes_in(u, AWAY);
    kn_buckets_unshard(u->bucket, u->buckets);
    emit(u, KN_FSDP_GATHER, away - bytes_in(u, AWAY), why);
    return kn_ok();
}

static void not_ahead(kn_unit *u)
{
    if (u->ahead && u->schedule)
        u->schedule->ahead--;
    u->ahead = false;
}

bool kn_unit_wait(kn_unit *u, kn_cause why)
{
    int64_t gathered = bytes_in(u, 1 << KN_GATHERING);
    for (int i = 0; i < u->buckets; i++)
        if (!kn_bucket_wait(u->bucket[i]))
            return false;
    not_ahead(u);
    emit(u, KN_FSDP_GATHERED, gathered, why);
    return kn_ok();
}

bool kn_unit_gather(kn_unit *u, kn_cause why)
{
    return kn_unit_unshard(u, why) && kn_unit_wait(u, why);
}

bool kn_unit_unshard_in_backward(kn_unit *u, kn_cause why)
{
    return !kn_unit_needed_in_backward(u) || (kn_unit_may_train(u) && kn_unit_gather(u, why));
}

static bool reshard(kn_unit *u, int keep, kn_cause why)
{
    bool ok = true;
    kn_unit_wait(u, why); /* what was gathered in vain arrives, too */
    int64_t away = bytes_in(u, AWAY);
    for (int i = 0; i < u->buckets; i++)
        ok = kn_bucket_reshard(u->bucket[i], keep) && ok;
    not_ahead(u); /* also where an error kept it from arriving */
    emit(u, KN_FSDP_RELEASE, bytes_in(u, AWAY) - away, why);
    return ok;
}

bool kn_unit_reshard(kn_unit *u, kn_cause why)
{
    bool ok = reshard(u, 1, why);
    for (int i = 0; i < u->buckets; i++)
        kn_bucket_drop_slice(u->bucket[i]);
    return ok;
}

bool kn_unit_reshard_after_forward(kn_unit *u, kn_cause why)
{
    bool root = u == u->schedule->root;
    int how = u->options.reshard_after_forward;
    if (!u->schedule->recording || u->ahead) /* no backward follows, or it was gathered in vain */
        return kn_unit_reshard(u, why);
    if (how == KN_RESHARD_DEFAULT)
        how = root || kn_unit_keeps(u) ? KN_RESHARD_NEVER : KN_RESHARD_ALWAYS;
    return how == KN_RESHARD_NEVER || reshard(u, how, why);
}

bool kn_unit_reshard_after_backward(kn_unit *u, kn_cause why)
{
    bool keep = !u->set.reshard_after_backward || (!u->set.sync && kn_unit_keeps(u));
    return (keep && !u->ahead) || kn_unit_reshard(u, why);
}

/* Bytes of gradients that are on their way through a reduction. */
static int64_t reducing_bytes(const kn_unit *u)
{
    int64_t bytes = 0;
    for (int i = 0; i < u->buckets; i++)
        bytes += u->bucket[i]->grad->released ? 0 : (int64_t)u->bucket[i]->grad->bytes;
    return bytes;
}

/* The oldest reduction. Two units' gradients may be on their way to the host: this one's from now
 * on, and those of the next one. */
static bool finish_oldest(kn_schedule_state *s, kn_cause why)
{
    kn_unit *u = s->reducing;
    int64_t bytes = reducing_bytes(u);
    bool ok = kn_unit_end_download(s->downloading);
    s->downloading = u;
    for (int i = 0; i < u->buckets; i++)
        ok = kn_bucket_finish_reduce(u->bucket[i]) && ok;
    s->reducing = u->reducing_next;
    s->reductions--;
    u->reducing_next = NULL;
    u->reducing = false;
    emit(u, KN_FSDP_REDUCED, bytes, why);
    return ok;
}

bool kn_finish_reductions(kn_schedule_state *s, int running, kn_cause why)
{
    bool ok = true;
    while (s->reductions > running)
        ok = finish_oldest(s, why) && ok && kn_ok();
    return ok;
}

/* They are done in the order in which they were issued. */
bool kn_unit_finish_reduce(kn_unit *u, kn_cause why)
{
    bool ok = true;
    while (u->reducing)
        ok = finish_oldest(u->schedule, why) && ok && kn_ok();
    return ok;
}

static bool has_to_reduce(const kn_unit *u)
{
    bool any = false;
    for (int i = 0; i < u->buckets; i++)
        any |= u->set.sync && kn_bucket_has_to_reduce(u->bucket[i], u->set.all_reduce);
    return any;
}

static void begin_reduction(kn_unit *u)
{
    kn_unit **end = &u->schedule->reducing;
    while (*end)
        end = &(*end)->reducing_next;
    *end = u;
    u->reducing = true;
    u->schedule->reductions++;
}

bool kn_unit_reduce(kn_unit *u, kn_cause why)
{
    kn_schedule_state *s = u->schedule;
    if (!kn_unit_finish_reduce(u, why))
        return false;
    bool reduces = has_to_reduce(u);
    if (reduces && !kn_finish_reductions(s, s->root->options.max_reductions - 1,
                                         KN_WHY_OF(".max_reductions, for", u)))
        return false;
    if (!kn_buckets_reduce(u->bucket, u->buckets, u->set.sync, u->set.all_reduce))
        return false;
    if (!reduces)
        return true;
    emit(u, KN_FSDP_REDUCE, reducing_bytes(u), why);
    begin_reduction(u);
    return !s->inline_reduce || (kn_unit_finish_reduce(u, why) && kn_unit_end_download(u));
}

bool kn_unit_end_download(kn_unit *u)
{
    bool ok = true;
    for (int i = 0; u && i < u->buckets; i++)
        ok = kn_bucket_end_download(u->bucket[i]) && ok;
    if (u && u->schedule->downloading == u)
        u->schedule->downloading = NULL;
    return ok;
}
