/* fsdp/record.c: a recording of all ranks. Each keeps its events; at the end each writes them as
 * lines of JSON, with times on the clock of rank 0, and rank 0 puts them behind one another into
 * the file. */
#include "fsdp/record.h"
#include "comm/comm_internal.h"
#include "fsdp/kinds.h"
#include "fsdp/unit.h"
#include "kernels/trace_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct kn_recording {
    char *path;
    kn_comm *comm;
    char *header; /* made at the start: units may change */
    double zero;  /* seconds of this rank's clock when the recording began */
};

enum { ROUNDS = 8 }; /* of looking at all clocks */

/* ---- one clock ------------------------------------------------------------------------------- */

/* Nanoseconds that this rank's clock is ahead of rank 0's. An exchange of times is over for a
 * rank only after each has begun it: so each gives a bound from both sides. Where 0 lies
 * between, it is the same clock, as on one machine; else the middle is the guess. */
static bool clock_ahead(kn_comm *c, double *ahead)
{
    const int n = kn_comm_size(c), me = kn_rank(c);
    int64_t *begun = kn_host_calloc((size_t)(2 * n), sizeof *begun),
            *over = begun ? begun + n : NULL;
    double low = -INFINITY, high = INFINITY;
    bool ok = begun;
    for (int i = 0; i < ROUNDS && ok; i++) {
        memset(begun, 0, (size_t)(2 * n) * sizeof *begun);
        begun[me] = (int64_t)(1e9 * kn_now());
        ok = kn_hosts_sum(c, begun, n, "clocks of ranks");
        const int64_t now = (int64_t)(1e9 * kn_now());
        over[me] = now;
        ok = ok && kn_hosts_sum(c, over, n, "clocks of ranks");
        high = fmin(high, (double)(now - begun[0]));
        low = fmax(low, (double)(begun[me] - over[0]));
    }
    kn_host_free(begun);
    *ahead = low <= 0 && high >= 0 ? 0 : (low + high) / 2;
    return ok;
}

/* ---- the first line -------------------------------------------------------------------------- */

static void write_param(FILE *f, const kn_bucket *b, int i)
{
    const kn_bucket_param *p = &b->param[i];
    fputs("{\"name\": ", f);
    kn_json_string(f, p->name);
    fputs(", \"shape\": [", f);
    for (int d = 0; d < p->ndim; d++)
        fprintf(f, "%s%" PRId64, d ? ", " : "", p->shape[d]);
    fprintf(f, "], \"offset\": %" PRId64 ", \"numel\": %" PRId64 ", \"parts\": [",
            b->layout.offset[i], b->layout.numel[i]);
    for (int r = 0; r < b->shards; r++) {
        const kn_interval part = kn_layout_part(&b->layout, i, r);
        fprintf(f, "%s[%" PRId64 ", %" PRId64, r ? ", " : "", part.start, part.start + part.count);
        if (part.blocks > 1)
            fprintf(f, ", %" PRId64 ", %" PRId64, part.blocks, part.stride);
        fputs("]", f);
    }
    fputs("]}", f);
}

static void write_bucket(FILE *f, const kn_bucket *b)
{
    fprintf(f,
            "{\"master_dtype\": \"%s\", \"param_dtype\": \"%s\", \"reduce_dtype\": \"%s\", "
            "\"layout\": \"%s\", \"memory\": \"%s\", \"full_bytes\": %" PRId64 ", \"trains\": %s, "
            "\"params\": [",
            kn_dtype_name(b->master_dtype), kn_dtype_name(b->param_dtype),
            kn_dtype_name(b->reduce_dtype), kn_layout_name(b->layout.kind),
            b->memory ? b->memory->name : "", kn_bucket_gathered_bytes(b),
            kn_bucket_trains(b) ? "true" : "false");
    for (int i = 0; i < b->params; i++) {
        fputs(i ? ",\n      " : "\n      ", f);
        write_param(f, b, i);
    }
    fputs("]}", f);
}

static void write_unit(FILE *f, const kn_unit *u)
{
    const kn_fsdp_wrap_options *o = &u->options;
    static const char *const prefetch[] = {
        [KN_PREFETCH_PRE] = "pre", [KN_PREFETCH_POST] = "post", [KN_PREFETCH_NONE] = "none"
    };
    fputs("{\"name\": ", f);
    kn_json_string(f, kn_unit_name(u));
    fputs(", \"path\": ", f);
    kn_json_string(f, u->module[0]->path);
    fputs(", \"class\": ", f);
    kn_json_string(f, u->module[0]->class_name);
    fprintf(f,
            ", \"strategy\": \"%s\", \"shards\": %d, \"replicas\": %d, \"backward_prefetch\": "
            "\"%s\", \"forward_prefetch\": %s, \"max_gathers\": %d, \"max_reductions\": %d, "
            "\"buckets\": [",
            kn_strategies[o->strategy].name, o->mesh.shards, o->mesh.replicas,
            prefetch[o->backward_prefetch], o->forward_prefetch ? "true" : "false", o->max_gathers,
            o->max_reductions);
    for (int i = 0; i < u->buckets; i++) {
        fputs(i ? ",\n    " : "\n    ", f);
        write_bucket(f, u->bucket[i]);
    }
    fputs("]}", f);
}

/* Units as a forward meets them: outer ones first. */
static void write_units(FILE *f, const kn_module_impl *root)
{
    bool any = false;
    for (const kn_module_impl *m = root; m; m = kn_impl_next(m, root)) {
        const kn_unit *u = kn_unit_of(m);
        if (!u || u->module[0] != m)
            continue;
        fputs(any ? ",\n  " : "\n  ", f);
        write_unit(f, u);
        any = true;
    }
}

/* Bytes that live at the start, of each rank. */
static bool write_live(FILE *f, kn_comm *c)
{
    const kn_ledger now = kn_ledger_read();
    const int n = kn_comm_size(c), me = kn_rank(c);
    int64_t *live = kn_host_calloc((size_t)n * KN_MEM_COUNT, sizeof *live);
    if (live)
        memcpy(live + me * KN_MEM_COUNT, now.live, sizeof now.live);
    const bool ok = live && kn_hosts_sum(c, live, (int64_t)n * KN_MEM_COUNT, "bytes of ranks");
    for (int r = 0; r < n && ok; r++) {
        fputs(r ? ", {" : "{", f);
        for (int i = 0; i < KN_MEM_COUNT; i++)
            fprintf(f, "%s\"%s\": %" PRId64, i ? ", " : "", kn_mem_name((kn_mem_category)i),
                    live[r * KN_MEM_COUNT + i]);
        fputs("}", f);
    }
    kn_host_free(live);
    return ok;
}

static char *make_header(const kn_module_impl *root, kn_comm *c, const char *command, kn_device d)
{
    char *text = NULL;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    if (!f)
        return kn_fail_null("kn_record_start: no memory for the recording");
    fprintf(f, "{\"knap\": \"recording\", \"version\": 1, \"command\": ");
    kn_json_string(f, command ? command : "");
    fprintf(f,
            ", \"ranks\": %d, \"device\": \"%s\", \"clock\": \"%s\", \"threads\": %d, "
            "\"first_step\": %" PRId64 ", \"model\": ",
            kn_comm_size(c), kn_device_name(d), d == KN_META ? "virtual" : "real", kn_threads(),
            kn_get_step() + 1);
    kn_json_string(f, root->class_name);
    fputs(", \"units\": [", f);
    write_units(f, root);
    fputs("], \"live\": [", f);
    const bool ok = write_live(f, c);
    fputs("]}", f);
    if (fclose(f) == 0 && ok) {
        for (char *at = text; *at; at++) /* one line */
            if (*at == '\n')
                *at = ' ';
        return text;
    }
    free(text);
    return NULL;
}

/* ---- the start ------------------------------------------------------------------------------- */

static void recording_free(struct kn_recording *r)
{
    if (!r)
        return;
    free(r->header);
    kn_host_free(r->path);
    kn_host_free(r);
}

static void (*end_before)(kn_context *c);

static void end_with_context(kn_context *c)
{
    recording_free(c->recording);
    c->recording = NULL;
    if (end_before)
        end_before(c);
}

__attribute__((constructor)) static void look_for_ends(void)
{
    end_before = kn_context_on_end;
    kn_context_on_end = end_with_context;
}

static bool can_write(const char *path)
{
    FILE *f = fopen(path, "a"); /* what is there stays until there is another recording */
    return (f && fclose(f) == 0) ||
           kn_fail_system("kn_record_start: %s: %m; choose a file that can be written", path);
}

static kn_device device_of(const kn_module_impl *root)
{
    const kn_param *p;
    return kn_params(root->self, &p) > 0 ? kn_device_of(p[0].tensor) : KN_CPU;
}

bool kn_record_start_(void *module, const char *path, kn_record_options o)
{
    const kn_module_impl *root = kn_impl(module, "kn_record_start");
    kn_context *c = kn_context_get();
    kn_comm *comm = o.comm ? o.comm : kn_world() ? kn_world() : kn_comm_self();
    if (!root || !kn_given_path(path, "kn_record_start", "the path"))
        return false;
    if (c->recording)
        return kn_fail("kn_record_start: a recording runs already; end it with kn_record_stop");
    struct kn_recording *r = kn_host_calloc(1, sizeof *r);
    const kn_device d = device_of(root);
    double ahead = 0;
    bool ok = r && (r->path = kn_host_strdup(path)) && (kn_rank(comm) > 0 || can_write(path));
    if (!kn_agree(comm, ok) || !clock_ahead(comm, &ahead) ||
        !(r->header = make_header(root, comm, o.command, d)) ||
        !kn_barrier(comm, kn_compute_stream(KN_CPU), "the start of a recording")) {
        recording_free(r);
        return kn_ok() && kn_fail("kn_record_start: another rank can't record");
    }
    r->comm = comm;
    int64_t zero = (int64_t)(1e9 * kn_now() - ahead); /* by the clock of rank 0 */
    if (!kn_hosts_broadcast(comm, &zero, sizeof zero, 0, "clocks of ranks")) {
        recording_free(r);
        return false;
    }
    r->zero = d == KN_META ? 0 : 1e-9 * ((double)zero + ahead);
    const unsigned all = (1u << KN_TRACE_KINDS) - 1, values = 1u << KN_TRACE_VALUE;
    kn_trace_watch(o.values ? all : all & ~values, d);
    c->recording = r;
    return kn_ok();
}

void kn_record_number(int64_t step, const char *name, double value)
{
    char text[24];
    if (!kn_trace_sees(KN_TRACE_NUMBER) || !kn_given(name, "kn_record_number", "the name"))
        return;
    snprintf(text, sizeof text, "%" PRId64, step);
    kn_trace_put(
        NULL,
        (kn_trace_event){ .kind = KN_TRACE_NUMBER, .what = name, .detail = text, .number = value });
}

/* ---- the events ------------------------------------------------------------------------------ */

static void word(FILE *f, const char *key, const char *text)
{
    if (!*text)
        return;
    fprintf(f, ",\"%s\":", key);
    kn_json_string(f, text);
}

static void number(FILE *f, const char *key, double x)
{
    if (x == 0)
        return;
    if (isfinite(x))
        fprintf(f, ",\"%s\":%.*g", key, x == floor(x) ? 17 : 9, x);
    else
        fprintf(f, ",\"%s\":\"%s\"", key, isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

/* "digest first second ..." of tensor/digest.c. */
static void values(FILE *f, const char *text)
{
    fprintf(f, ",\"h\":\"%.*s\",\"v\":[", (int)strcspn(text, " "), text);
    const char *at = strchr(text, ' ');
    for (bool first = true; at && at[1]; first = false) {
        const int n = (int)strcspn(at + 1, " ");
        fprintf(f, "%s\"%.*s\"", first ? "" : ",", n, at + 1);
        at = at[1 + n] ? at + 1 + n : NULL;
    }
    fputs("]", f);
}

static void write_event(FILE *f, const kn_trace_event *e, int rank, int64_t i, double zero)
{
    const bool run = e->kind == KN_TRACE_RUN;
    fprintf(f, "{\"r\":%d,\"i\":%" PRId64 ",\"t\":%.3f", rank, i, 1e6 * (e->begin - zero));
    if (e->end > e->begin)
        fprintf(f, ",\"d\":%.3f", 1e6 * (e->end - e->begin));
    fprintf(f, ",\"k\":\"%s\"", kn_trace_kind_name(e->kind));
    word(f, "w", e->what);
    if (run || e->kind == KN_TRACE_WAIT)
        word(f, "s", e->stream);
    word(f, e->kind == KN_TRACE_CALL ? "c" : e->kind == KN_TRACE_VALUE ? "m" : "p", e->provider);
    if (e->kind != KN_TRACE_VALUE)
        word(f, "m", e->path);
    word(f, run || e->kind == KN_TRACE_VALUE ? "x" : "c", e->detail);
    if (e->kind == KN_TRACE_VALUE)
        values(f, e->source);
    else
        word(f, "o", e->source);
    number(f, "f", e->flops);
    number(f, "b", e->bytes);
    if (e->issued > 0)
        fprintf(f, ",\"q\":%.3f", 1e6 * (e->issued - zero));
    number(f, e->kind == KN_TRACE_TAKE || e->kind == KN_TRACE_GIVE ? "l" : "n", e->number);
    fputs(e->backward ? ",\"a\":\"backward\"}\n" : "}\n", f);
}

/* This rank's events as text, to be freed with free. */
static char *own_lines(const struct kn_recording *r, const kn_trace_event *e, size_t events,
                       size_t *size)
{
    char *text = NULL;
    FILE *f = open_memstream(&text, size);
    for (size_t i = 0; f && i < events; i++)
        if (!kn_trace_wraps(&e[i]))
            write_event(f, &e[i], kn_rank(r->comm), (int64_t)i, r->zero);
    if (f && fclose(f) == 0)
        return text;
    free(text);
    return kn_fail_null("kn_record_stop: no memory for the lines of %zu events", events);
}

/* ---- the end --------------------------------------------------------------------------------- */

static bool write_file(const struct kn_recording *r, const char *own, size_t size)
{
    const bool first = kn_rank(r->comm) == 0;
    FILE *f = first ? fopen(r->path, "w") : NULL;
    bool written = !first || (f && fprintf(f, "%s\n", r->header) > 0);
    bool ok = true;
    for (int rank = 0; rank < kn_comm_size(r->comm) && ok; rank++) {
        size_t bytes = size;
        char *lines = kn_broadcast_bytes(r->comm, own, &bytes, rank);
        ok = lines;
        written = written && lines && (!first || fwrite(lines, 1, bytes, f) == bytes);
        kn_host_free(lines);
    }
    if (f)
        written = fclose(f) == 0 && written;
    return ok && (written || kn_fail_system("kn_record_stop: %s: %m; is the disk full?", r->path));
}

bool kn_record_stop(void)
{
    kn_context *c = kn_context_get();
    struct kn_recording *r = c->recording;
    kn_trace_event *events = NULL;
    size_t size = 0;
    if (!r)
        return kn_ok();
    c->recording = NULL;
    const size_t n = kn_trace_stop(&events);
    char *own = kn_ok() ? own_lines(r, events, n, &size) : NULL;
    const bool ok = kn_agree(r->comm, own != NULL) && kn_agree(r->comm, write_file(r, own, size));
    kn_host_free(events);
    free(own);
    recording_free(r);
    return ok;
}
