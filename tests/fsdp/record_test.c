/* tests/fsdp/record_test.c: recordings of all ranks (fsdp/record.h): form, order, bytes, values,
 * and that nobody notices them. */
#include "fsdp/record.h"
#include "tests/fsdp/ranks.h"
#include "tests/fsdp/two.h"

#include "tensor/files.h"
#include "tensor/tensor_internal.h"
#include <jansson.h>
#include <math.h>
#include <unistd.h>

enum { MOST = 4096 };

typedef struct recorded {
    kn_strategy strategy;
    kn_layout_kind layout;
    kn_backward_prefetch prefetch;
    bool forward_prefetch;
    int max_gathers;
} recorded;
static const recorded settings[] = {
    { KN_FULL_SHARD, KN_LAYOUT_FLAT, KN_PREFETCH_PRE, false, 0 },
    { KN_FULL_SHARD, KN_LAYOUT_PER_PARAM, KN_PREFETCH_POST, false, 0 },
    { KN_FULL_SHARD, KN_LAYOUT_RAGGED, KN_PREFETCH_NONE, false, 0 },
    { KN_FULL_SHARD, KN_LAYOUT_FLAT, KN_PREFETCH_PRE, true, 1 },
    { KN_SHARD_GRAD_OP, KN_LAYOUT_FLAT, KN_PREFETCH_PRE, false, 0 },
};

static bool wrap(two *m, kn_comm *ranks, const recorded *w, kn_device d)
{
    return kn_fsdp_wrap(m, ranks, .strategy = w->strategy, .layout = w->layout,
                        .backward_prefetch = w->prefetch, .forward_prefetch = w->forward_prefetch,
                        .max_gathers = w->max_gathers, .wrap_class = "linear", .device = d);
}

static bool step_on(two *m, kn_optim *o, kn_device d)
{
    IN_SCOPE;
    kn_tensor *x = d == KN_META ? kn_zeros(KN_F32, d, KN_SHAPE(2, 4))
                                : kn_randn(KN_F32, d, 5, 1, KN_SHAPE(2, 4));
    const bool ok = kn_backward(mean_square(kn_call(m, x))) && kn_step(o);
    return ok;
}

/* A name for all ranks of this case. */
static void name_of(kn_comm *world, char path[64])
{
    const double pid = kn_sum_over_ranks(world, kn_rank(world) == 0 ? getpid() : 0);
    snprintf(path, 64, "/tmp/knap-record-%.0f", pid);
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct recording {
    json_t *head;
    kn_trace_event event[MOST];
    json_t *line[MOST];
    size_t events;
} recording;

static const char *text_of(const json_t *e, const char *key)
{
    const char *text = json_string_value(json_object_get(e, key));
    return text ? text : "";
}

static kn_trace_event event_of(const json_t *e)
{
    kn_trace_event read = { .what = text_of(e, "w"),
                            .path = text_of(e, "m"),
                            .stream = text_of(e, "s") };
    while (read.kind < KN_TRACE_KINDS &&
           strcmp(kn_trace_kind_name(read.kind), text_of(e, "k")) != 0)
        read.kind++;
    const bool call = read.kind == KN_TRACE_CALL;
    read.provider = text_of(e, call ? "c" : "p");
    read.detail = text_of(e, call || read.kind == KN_TRACE_RUN ? "x" : "c");
    read.source = text_of(e, "o");
    return read;
}

/* The events of one rank. */
static void read_recording(recording *r, const char *path, int rank)
{
    size_t size;
    char *text = kn_file_read(path, 1 << 24, &size);
    KN_CHECK(text);
    memset(r, 0, sizeof *r);
    char *rest = NULL;
    for (char *at = strtok_r(text, "\n", &rest); at; at = strtok_r(NULL, "\n", &rest)) {
        json_t *j = json_loads(at, 0, NULL);
        KN_CHECK(j, "no JSON: %.80s", at);
        if (!r->head)
            r->head = j;
        else if (json_integer_value(json_object_get(j, "r")) == rank && r->events < MOST) {
            r->line[r->events] = j;
            r->event[r->events++] = event_of(j);
        } else {
            json_decref(j);
        }
    }
    kn_host_free(text);
    KN_CHECK(r->head && r->events > 20 && r->events < MOST, "%zu events", r->events);
}

static void recording_end(recording *r)
{
    json_decref(r->head);
    for (size_t i = 0; i < r->events; i++)
        json_decref(r->line[i]);
}

/* ---- cases ----------------------------------------------------------------------------------- */

/* The line of a rehearsal among simulated ranks. */
static void line_on_meta(int ranks, const recorded *w, char *line, size_t size)
{
    OWNED_SIMULATED kn_comm *world = kn_comm_simulated(ranks, 0, 0);
    two m;
    kn_trace_event *event = NULL;
    KN_CHECK(two_init(&m, KN_META, KN_F32) && wrap(&m, world, w, KN_META));
    kn_optim *o = kn_sgd(&m, .lr = 0.1);
    KN_CHECK(step_on(&m, o, KN_META));
    kn_trace_watch((1u << KN_TRACE_KINDS) - 1, KN_META);
    KN_CHECK(step_on(&m, o, KN_META));
    const size_t n = kn_trace_stop(&event);
    kn_explain_line(event, n, line, size);
    kn_host_free(event);
    kn_optim_free(o);
    kn_module_free(&m);
}

static double peak_of(const recording *r, int rank)
{
    double peak = 0;
    const char *category;
    json_t *bytes;
    json_object_foreach(json_array_get(json_object_get(r->head, "live"), (size_t)rank), category,
                        bytes) if (strcmp(category, "host") != 0 &&
                                   strcmp(category, "offloaded") != 0) peak +=
        json_number_value(bytes);
    for (size_t i = 0; i < r->events; i++)
        peak = fmax(peak, json_number_value(json_object_get(r->line[i], "l")));
    return peak;
}

/* The order is that of a rehearsal, the peak is the ledger's to the byte, times begin at 0 and the
 * causes name lines of the schedule. */
RANK_TEST(record, is_what_happened, .threads = "124", .processes = "2", ROWS(settings))
{
    const recorded *w = arg;
    static _Thread_local recording r;
    char path[64], line[1024], want[1024];
    TWO(m);
    OWNED_OPTIM kn_optim *o = NULL;
    name_of(world, path);
    KN_CHECK(wrap(&m, world, w, KN_CPU) && (o = kn_sgd(&m, .lr = 0.1)) && step_on(&m, o, KN_CPU));
    KN_CHECK(kn_record_start(&m, path, .comm = world));
    kn_ledger_reset_peaks();
    KN_CHECK(step_on(&m, o, KN_CPU));
    kn_record_number(2, "loss", NAN);
    const double peak = (double)kn_ledger_read().peak_total;
    KN_CHECK(kn_record_stop() && kn_record_stop());
    read_recording(&r, path, kn_rank(world));
    KN_CHECK(peak_of(&r, kn_rank(world)) == peak, "%.0f and not %.0f", peak_of(&r, kn_rank(world)),
             peak);
    line_on_meta(kn_comm_size(world), w, want, sizeof want);
    kn_explain_line(r.event, r.events, line, sizeof line);
    KN_CHECK(strcmp(line, want) == 0, "\n  %s\nand not\n  %s", line, want);
    const bool whole = strstr(line, "ga ") && strstr(line, "Fa ") && strstr(line, "Ba sa");
    KN_CHECK(whole || kn_comm_size(world) == 1, "%s", line);
    int verbs = 0, steps = 0, numbers = 0;
    for (size_t i = 0; i < r.events; i++) {
        const kn_trace_event *e = &r.event[i];
        KN_CHECK(json_number_value(json_object_get(r.line[i], "t")) >= 0);
        verbs += e->kind == KN_TRACE_VERB;
        steps +=
            e->kind == KN_TRACE_STEP && json_number_value(json_object_get(r.line[i], "n")) == 2;
        numbers += e->kind == KN_TRACE_NUMBER && strcmp(text_of(r.line[i], "n"), "nan") == 0;
        KN_CHECK(e->kind != KN_TRACE_VERB || (*e->detail && strncmp(e->source, "fsdp/", 5) == 0));
    }
    KN_CHECK((verbs > 8 || kn_comm_size(world) == 1) && steps == 1 && numbers == 1,
             "%d verbs, %d steps, %d numbers", verbs, steps, numbers);
    recording_end(&r);
    KN_CHECK(kn_barrier(world, kn_compute_stream(KN_CPU), "end"));
    unlink(path);
}

/* Parameters after three steps, of which one is recorded, or none. */
static void train(kn_comm *world, const char *path, double *sum)
{
    double host[TWO_MOST];
    const kn_param *p;
    TWO(m);
    OWNED_OPTIM kn_optim *o = NULL;
    KN_CHECK(wrap(&m, world, &settings[0], KN_CPU) && (o = kn_adamw(&m, .lr = 0.1)));
    for (int i = 0; i < 3; i++) {
        KN_CHECK(i != 1 || !path || kn_record_start(&m, path, .comm = world, .values = true));
        KN_CHECK(step_on(&m, o, KN_CPU));
        KN_CHECK(i != 1 || kn_record_stop());
    }
    *sum = 0;
    for (int i = 0, n = kn_params(&m, &p); i < n; i++) {
        float *value = (float *)host;
        KN_CHECK(kn_param_read(&m, i, value));
        for (int k = 0; k < kn_numel(p[i].tensor) && k < TWO_MOST; k++)
            *sum = *sum * 1.000000119 + value[k];
    }
}

/* Recording changes no bit, and values have the digests that one process has. */
RANK_TEST(record, is_not_noticed, .threads = "12")
{
    static _Thread_local recording r;
    static char digest[64];
    char path[64];
    double with, without;
    name_of(world, path);
    train(world, path, &with);
    train(world, NULL, &without);
    KN_CHECK(with == without, "%.17g and not %.17g", with, without);
    read_recording(&r, path, kn_rank(world));
    int values = 0;
    for (size_t i = 0; i < r.events; i++) {
        const json_t *e = r.line[i];
        if (r.event[i].kind != KN_TRACE_VALUE)
            continue;
        values++;
        const double n = json_number_value(json_object_get(e, "n"));
        KN_CHECK(strlen(text_of(e, "h")) == 16 &&
                 (double)json_array_size(json_object_get(e, "v")) == fmin(n, 8));
        if (strcmp(r.event[i].what, "a") == 0 && kn_comm_size(world) == 1)
            snprintf(digest, sizeof digest, "%s", text_of(e, "h"));
    }
    KN_CHECK(values >= 3 + 4, "%d values", values);
    for (size_t i = 0; i < r.events; i++)
        if (r.event[i].kind == KN_TRACE_VALUE && strcmp(r.event[i].what, "a") == 0)
            KN_CHECK(strcmp(text_of(r.line[i], "h"), digest) == 0, "%s on one rank", digest);
    recording_end(&r);
    KN_CHECK(kn_barrier(world, kn_compute_stream(KN_CPU), "end"));
    unlink(path);
}

/* While the host reads a tensor for its values, work of other threads is recorded on. */
KN_TEST(record, values_hide_no_work_of_a_worker)
{
    enum { JOBS = 2000 };
    float a[64] = { 1 }, b[64];
    const int64_t n = 64;
    kn_copy_args args = { .dst = kn_array_make(b, KN_F32, 1, &n),
                          .src = kn_array_make(a, KN_F32, 1, &n) };
    OWNED_HOST kn_trace_event *events = NULL;
    IN_SCOPE;
    const kn_tensor *t = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(256, 256));
    kn_stream *s = kn_stream_create(KN_CPU, "gather", KN_STREAM_WORKER);
    size_t copies = 0;
    kn_trace_watch(1u << KN_TRACE_RUN | 1u << KN_TRACE_VALUE, KN_CPU);
    for (int i = 0; i < JOBS; i++) {
        KN_CHECK(kn_launch(s, KN_K_COPY, &args, sizeof args));
        if (i % 10 == 0)
            kn_trace_tensor("t", "activation", t);
    }
    kn_stream_destroy(s);
    const size_t count = kn_trace_stop(&events);
    for (size_t i = 0; i < count; i++)
        copies += strcmp(events[i].stream, "gather") == 0;
    KN_CHECK(copies == JOBS && count == JOBS + JOBS / 10, "%zu copies, %zu events", copies, count);
}

static void count_backward(kn_module_event *e, void *arg)
{
    (void)e;
    ++*(int *)arg;
}

/* A hook holds for calls that begin behind it, watched or not. */
KN_TEST(record, adds_no_hook_to_a_call)
{
    int count = 0;
    TWO_WHOLE(m);
    IN_SCOPE;
    kn_trace_watch(1u << KN_TRACE_CALL, KN_CPU);
    kn_tensor *y = kn_call(&m, kn_randn(KN_F32, KN_CPU, 5, 1, KN_SHAPE(2, 4)));
    kn_module_hooks hooks = { .pre_backward = count_backward,
                              .post_backward = count_backward,
                              .arg = &count };
    KN_CHECK(kn_module_hook(&m.a, hooks) && kn_backward(mean_square(y)) && count == 0, "%d", count);
    kn_trace_stop(NULL);
}

/* The last one has no stop: the context ends with it. */
KN_TEST(record, errors)
{
    TWO(m);
    KN_CHECK(wrap(&m, NULL, &settings[0], KN_CPU));
    REFUSED(kn_record_start(&m, "/nowhere/step.rec"), "/nowhere/step.rec");
    REFUSED(kn_record_start(&m, NULL), "the path");
    KN_CHECK(!kn_record_start(NULL, "/dev/null") && kn_error());
    kn_clear_error();
    kn_trace_watch(0, KN_CPU);
    KN_CHECK(kn_error() && strstr(kn_error(), "1 << kind"));
    kn_clear_error();
    KN_CHECK(kn_record_stop() && kn_record_start(&m, "/dev/full"));
    REFUSED(kn_record_stop(), "/dev/full: No space left");
    KN_CHECK(kn_record_start(&m, "/dev/null"));
    REFUSED(kn_record_start(&m, "/dev/null"), "runs already");
    kn_trace_start(10);
    KN_CHECK(kn_error() && strstr(kn_error(), "a recording has the events"));
    kn_clear_error();
}
