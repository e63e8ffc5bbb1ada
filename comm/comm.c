/* comm/comm.c: the interface of comm.h: checks arguments, launches a collective on a stream,
 * writes the trace, and hands the call to the back end (self.c, local.c). */
#include "kernels/device.h"
#include "kernels/trace.h"
#include "comm/comm_internal.h"
#include "kernels/kernels_internal.h"
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static const char *const kind_names[KN_CALL_COUNT] = {
    [KN_CALL_NONE] = "nothing",
    [KN_CALL_ALL_GATHER] = "all_gather",
    [KN_CALL_REDUCE_SCATTER] = "reduce_scatter",
    [KN_CALL_ALL_REDUCE] = "all_reduce",
    [KN_CALL_ALL_TO_ALL] = "all_to_all",
    [KN_CALL_SUM_I64] = "all_reduce_i64",
    [KN_CALL_MAX_F32] = "all_reduce_max",
    [KN_CALL_BROADCAST] = "broadcast",
    [KN_CALL_BARRIER] = "barrier",
    [KN_CALL_AGREE] = "agree",
    [KN_CALL_GROUP] = "comm_split",
    [KN_CALL_REPLAY] = "replay",
};

const char *kn_comm_kind_name(kn_comm_kind k)
{
    return (unsigned)k < KN_CALL_COUNT ? kind_names[k] : "unknown";
}

static double piece_bytes(const kn_comm *c, kn_comm_kind kind, const kn_comm_piece *p)
{
    int n = c->size;
    double dst = (double)kn_piece_dst_bytes(p), src = (double)kn_piece_src_bytes(p);
    bool in_place = p->src == (char *)p->dst + (size_t)dst * (size_t)c->rank;
    switch (kind) {
    case KN_CALL_ALL_GATHER:
        return 2.0 * dst * (n - (in_place ? 1 : 0));
    case KN_CALL_ALL_TO_ALL:
        return 2.0 * dst * n;
    case KN_CALL_REDUCE_SCATTER:
        return src * n + dst * (p->acc ? 2 : 1);
    case KN_CALL_ALL_REDUCE: /* a slice of 1/n summed, the others fetched */
        return src + dst * (p->acc ? 2.0 : 1.0) / n + 2.0 * dst * (n - 1) / n;
    default:
        return 2.0 * dst;
    }
}

double kn_comm_bytes(const kn_comm *c, const kn_comm_call *call)
{
    double bytes = 0;
    for (int i = 0; i < call->pieces; i++)
        bytes += piece_bytes(c, call->kind, &call->piece[i]);
    return bytes;
}

/* ---- launching ------------------------------------------------------------------------------- */

typedef struct job {
    kn_comm *c;
    kn_stream *s;
    kn_comm_call call;
    double slow_latency, slow_rate;
    char what[96];                       /* "all_gather transformer.h.0" */
    kn_comm_piece piece[KN_COMM_PIECES]; /* the last field: only those there are travel */
} job;

static size_t job_bytes(int pieces)
{
    return offsetof(job, piece) + (size_t)pieces * sizeof(kn_comm_piece);
}

bool kn_comm_flip(const kn_comm *c, const kn_comm_call *call, kn_stream *s)
{
    const bool all = call->kind == KN_CALL_ALL_GATHER || call->kind == KN_CALL_ALL_TO_ALL ||
                     call->kind == KN_CALL_GROUP;
    return kn_fault_flip(s, call->piece->dst, kn_piece_dst_bytes(call->piece) * (all ? c->size : 1),
                         "the call's first buffer");
}

/* The call, which is noted, to its end. */
static bool run(kn_comm *c, const kn_comm_call *call, kn_stream *s)
{
    if (!kn_unpoisoned(c->world->poison) || !c->ops->run(c, call, s))
        return false;
    kn_comm_note_end(c, call);
    return !call->flips || kn_comm_flip(c, call, s);
}

static void job_run(void *arg)
{
    job *j = arg;
    j->call.piece = j->piece;
    double begin = kn_now();
    double bytes = kn_comm_bytes(j->c, &j->call);
    if (kn_ok() && run(j->c, &j->call, j->s)) {
        double slow = j->slow_latency + (j->slow_rate > 0 ? bytes / j->slow_rate : 0);
        if (slow > 0)
            kn_sleep(slow);
        if (kn_tracing())
            kn_trace_add(j->what, j->c->ops->backend, j->s, begin, kn_now(), 0, bytes);
    }
}

/* Meta: no bytes move and no rank is waited for; the clock advances by the bytes, at the rate of
 * kn_comm_slow where one was given, else at that of a copy. */
static bool launch_meta(kn_comm *c, const kn_comm_call *call, kn_stream *s)
{
    if (c->slow_latency > 0 || c->slow_rate > 0) {
        char what[96];
        snprintf(what, sizeof what, "%s%s%s", kn_comm_kind_name(call->kind), call->label ? " " : "",
                 call->label ? call->label : "");
        kn_meta_advance(s, what,
                        c->slow_latency +
                            (c->slow_rate > 0 ? kn_comm_bytes(c, call) / c->slow_rate : 0));
        return kn_ok();
    }
    int64_t bytes = (int64_t)(kn_comm_bytes(c, call) / 2);
    kn_array a = kn_array_make(NULL, KN_U8, 1, &bytes);
    kn_copy_args args = { a, a };
    return kn_launch(s, KN_K_COPY, &args, sizeof args);
}

bool kn_comm_run_now(kn_comm *c, kn_comm_call *call, kn_stream *s)
{
    if (!kn_comm_note_call(c, call))
        return kn_ok();
    return run(c, call, s);
}

static bool launch(kn_comm *c, const kn_comm_call *call, kn_stream *s)
{
    if (kn_stream_device(s) == KN_META)
        return launch_meta(c, call, s);
    if (c->ops->launch)
        return c->ops->launch(c, call, s);
    if (kn_stream_device(s) != KN_CPU)
        return kn_comm_device_launch(c, call, s);
    job j;
    j.c = c;
    j.s = s;
    j.call = *call;
    j.slow_latency = c->slow_latency;
    j.slow_rate = c->slow_rate;
    memcpy(j.piece, call->piece, (size_t)call->pieces * sizeof *j.piece);
    if (!kn_comm_note_call(c, &j.call))
        return kn_ok();
    snprintf(j.what, sizeof j.what, "%s%s%s", kn_comm_kind_name(call->kind), call->label ? " " : "",
             call->label ? call->label : "");
    if (c->world->inline_only && !kn_stream_is_inline(s)) { /* after all earlier launches */
        if (!kn_stream_sync(s))
            return false;
        job_run(&j);
        return kn_ok();
    }
    return kn_stream_host(s, "collective", job_run, &j, job_bytes(call->pieces));
}

/* The checks of one piece. */
static bool check_piece(const char *what, const kn_comm *c, const kn_comm_piece *p,
                        const char *label, const kn_stream *s, bool buffers)
{
    const char *of = label ? label : "-";
    if (p->count < 0)
        return kn_fail("%s %s: count is %lld, must be at least 0", what, of, (long long)p->count);
    if (kn_dtype_size(p->dst_dtype) == 0 || kn_dtype_size(p->src_dtype) == 0)
        return kn_fail("%s %s: unknown dtype %d or %d", what, of, (int)p->dst_dtype,
                       (int)p->src_dtype);
    size_t wide = kn_dtype_size(p->dst_dtype) > kn_dtype_size(p->src_dtype)
                      ? kn_dtype_size(p->dst_dtype)
                      : kn_dtype_size(p->src_dtype);
    if (p->count > INT64_MAX / c->size / (int64_t)wide)
        return kn_fail("%s %s: count is %lld: %d ranks with so many elements of %zu bytes are more "
                       "than memory can hold",
                       what, of, (long long)p->count, c->size, wide);
    if (buffers && p->count > 0 && kn_stream_device(s) != KN_META && (!p->dst || !p->src))
        return kn_fail("%s %s: %s is NULL with count %lld", what, of, p->dst ? "src" : "dst",
                       (long long)p->count);
    return true;
}

/* The first checks of every collective. */
static bool check(const char *what, const kn_comm *c, const kn_comm_piece *piece, int n,
                  const char *label, const kn_stream *s, bool buffers)
{
    const char *of = label ? label : "-";
    if (!kn_ok())
        return false;
    if (!c)
        return kn_fail("%s %s: communicator is NULL: pass kn_world() or one made from it", what,
                       of);
    if (!kn_comm_usable(c, what))
        return false;
    if (!s)
        return kn_fail("%s %s: stream is NULL: pass kn_compute_stream(KN_CPU) or a side stream",
                       what, of);
    if (n < 0 || (n > 0 && !piece))
        return kn_fail("%s %s: the list of pieces is NULL or has %d of them", what, of, n);
    for (int i = 0; i < n; i++)
        if (!check_piece(what, c, &piece[i], label, s, buffers))
            return false;
    return true;
}

static bool check_sum(const char *what, const kn_comm_piece *p, const char *label)
{
    if (!kn_dtype_is_float(p->dst_dtype) || !kn_dtype_is_float(p->src_dtype))
        return kn_fail("%s %s: adds f32, bf16, f16 or f64, not %s to %s (integers: "
                       "kn_all_reduce_i64)",
                       what, label ? label : "-", kn_dtype_name(p->src_dtype),
                       kn_dtype_name(p->dst_dtype));
    if ((p->dst_dtype == KN_F64) != (p->src_dtype == KN_F64))
        return kn_fail("%s %s: f64 adds to f64 only, not %s to %s", what, label ? label : "-",
                       kn_dtype_name(p->src_dtype), kn_dtype_name(p->dst_dtype));
    return true;
}

/* ---- collectives ----------------------------------------------------------------------------- */

static bool launch_pieces(kn_comm *c, kn_comm_kind kind, const kn_comm_piece *piece, int n,
                          kn_stream *s, const char *label)
{
    const char *what = kn_comm_kind_name(kind);
    const bool adds = kind == KN_CALL_REDUCE_SCATTER || kind == KN_CALL_ALL_REDUCE;
    if (!check(what, c, piece, n, label, s, true))
        return false;
    for (int i = 0; i < n; i++) {
        if (adds && !check_sum(what, &piece[i], label))
            return false;
        if (!adds && piece[i].src_dtype != piece[i].dst_dtype)
            return kn_fail("%s %s: gathers %s as %s: both dtypes of a piece are the same", what,
                           label ? label : "-", kn_dtype_name(piece[i].src_dtype),
                           kn_dtype_name(piece[i].dst_dtype));
    }
    for (int at = 0, some; at < n; at += some) {
        some = n - at < KN_COMM_PIECES ? n - at : KN_COMM_PIECES;
        kn_comm_call call = kn_comm_call_of(kind, 0, piece + at, some, label);
        if (!launch(c, &call, s))
            return false;
    }
    return true;
}

bool kn_all_gather_pieces(kn_comm *c, const kn_comm_piece *piece, int n, kn_stream *s,
                          const char *label)
{
    return launch_pieces(c, KN_CALL_ALL_GATHER, piece, n, s, label);
}

bool kn_reduce_scatter_pieces(kn_comm *c, const kn_comm_piece *piece, int n, kn_stream *s,
                              const char *label)
{
    return launch_pieces(c, KN_CALL_REDUCE_SCATTER, piece, n, s, label);
}

bool kn_all_reduce_pieces(kn_comm *c, const kn_comm_piece *piece, int n, kn_stream *s,
                          const char *label)
{
    return launch_pieces(c, KN_CALL_ALL_REDUCE, piece, n, s, label);
}

bool kn_all_gather(kn_comm *c, void *dst, const void *src, int64_t count, kn_dtype dtype,
                   kn_stream *s, const char *label)
{
    return launch_pieces(c, KN_CALL_ALL_GATHER,
                         &(kn_comm_piece){ dst, NULL, src, count, dtype, dtype }, 1, s, label);
}

bool kn_reduce_scatter(kn_comm *c, void *dst, const void *acc, const void *src, int64_t count,
                       kn_dtype dst_dtype, kn_dtype src_dtype, kn_stream *s, const char *label)
{
    return launch_pieces(c, KN_CALL_REDUCE_SCATTER,
                         &(kn_comm_piece){ dst, acc, src, count, dst_dtype, src_dtype }, 1, s,
                         label);
}

bool kn_all_reduce(kn_comm *c, void *dst, const void *acc, const void *src, int64_t count,
                   kn_dtype dst_dtype, kn_dtype src_dtype, kn_stream *s, const char *label)
{
    return launch_pieces(c, KN_CALL_ALL_REDUCE,
                         &(kn_comm_piece){ dst, acc, src, count, dst_dtype, src_dtype }, 1, s,
                         label);
}

bool kn_all_to_all(kn_comm *c, void *dst, const void *src, int64_t count, kn_dtype dtype,
                   kn_stream *s, const char *label)
{
    return launch_pieces(c, KN_CALL_ALL_TO_ALL,
                         &(kn_comm_piece){ dst, NULL, src, count, dtype, dtype }, 1, s, label);
}

static bool launch_in_place(kn_comm *c, kn_comm_kind kind, int root, void *data, int64_t count,
                            kn_dtype t, kn_stream *s, const char *label)
{
    kn_comm_piece piece;
    kn_comm_call call = kn_comm_call_in_place(kind, root, data, count, t, label, &piece);
    return check(kn_comm_kind_name(kind), c, &piece, 1, label, s, kind != KN_CALL_BARRIER) &&
           (kind != KN_CALL_BROADCAST || (root >= 0 && root < c->size) ||
            kn_fail("broadcast %s: root is %d, must be a rank from 0 to %d", label ? label : "-",
                    root, c->size - 1)) &&
           launch(c, &call, s);
}

bool kn_all_reduce_i64(kn_comm *c, int64_t *data, int64_t count, kn_stream *s, const char *label)
{
    return launch_in_place(c, KN_CALL_SUM_I64, 0, data, count, KN_I64, s, label);
}

bool kn_all_reduce_max(kn_comm *c, float *data, int64_t count, kn_stream *s, const char *label)
{
    return launch_in_place(c, KN_CALL_MAX_F32, 0, data, count, KN_F32, s, label);
}

bool kn_broadcast(kn_comm *c, void *data, int64_t bytes, int root, kn_stream *s, const char *label)
{
    return launch_in_place(c, KN_CALL_BROADCAST, root, data, bytes, KN_U8, s, label);
}

bool kn_barrier(kn_comm *c, kn_stream *s, const char *label)
{
    return launch_in_place(c, KN_CALL_BARRIER, 0, NULL, 0, KN_U8, s, label);
}

bool kn_agree(kn_comm *c, bool cond)
{
    if (!kn_ok())
        return false;
    if (c && !kn_comm_usable(c, "kn_agree"))
        return false;
    if (!c || c->size == 1) /* which trains on after an error that was cleared */
        return cond;
    int64_t yes = cond;
    kn_comm_piece piece;
    kn_comm_call call = kn_comm_call_in_place(KN_CALL_AGREE, 0, &yes, 1, KN_I64, NULL, &piece);
    return kn_comm_run_now(c, &call, NULL) && yes == c->size;
}
