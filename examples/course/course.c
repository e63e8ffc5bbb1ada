/* examples/course/course.c: the net of the exercises, ranks that report, and references to compare
 * with. You needn't read it to do the course; course.h says what there is. */
#include "course.h"
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *const names[UNITS] = { "in", "middle", "out" };
static const int sizes[UNITS + 1] = { IN, HIDDEN, HIDDEN, OUT };
static training run;    /* the running one, of all ranks */
static report *reports; /* theirs, in memory that they share with the checker */
static report *seen;    /* this rank's */
static float begin_with[TOTAL];

/* ---- the net --------------------------------------------------------------------------------- */

static void note(char what, const unit *u)
{
    size_t n = strlen(seen->events);
    if (n + 5 < sizeof seen->events)
        snprintf(seen->events + n, 5, "%s%c%d", n ? " " : "", what, u->index);
}

static size_t full_bytes(const unit *u)
{
    size_t bytes = (size_t)(u->numel + PADDING) * kn_dtype_size(u->dtype);
    return (bytes + KN_ALIGN - 1) / KN_ALIGN * KN_ALIGN;
}

static void *room_take(kn_memory *m, size_t bytes)
{
    unit *u = m->state;
    if (m == &u->grad_room)
        return aligned_alloc(KN_ALIGN, 2 * bytes);
    note('g', u);
    return bytes > full_bytes(u) ? NULL : u->full;
}

static void room_give(kn_memory *m, void *p, size_t bytes)
{
    unit *u = m->state;
    note(m == &u->room ? 'r' : 's', u);
    memset(p, 0xff, bytes); /* NaN in every dtype */
    if (m == &u->grad_room)
        free(p);
}

static kn_tensor *unit_forward(kn_module *self, kn_tensor *x)
{
    unit *u = (unit *)self;
    return kn_linear(kn_cast(x, u->dtype), u->weight, u->bias, false);
}

static kn_tensor *layers_forward(kn_module *self, kn_tensor *x)
{
    for (int i = 0; i < UNITS; i++)
        for (int call = 0; call < (i == 1 && run.twice ? 2 : 1); call++) {
            x = kn_call(kn_module_child(self, i), x);
            x = i < UNITS - 1 ? kn_tanh(x) : x;
        }
    return x;
}

kn_tensor *net_loss(void *net, int64_t micro)
{
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, (uint64_t)micro, KN_SHAPE(BATCH, IN));
    kn_tensor *y = kn_randn(KN_F32, KN_CPU, 2, (uint64_t)micro, KN_SHAPE(BATCH, OUT));
    return kn_mse_loss(kn_cast(kn_call(net, x), KN_F32), y);
}

/* The values to begin with, of all units one after the other. */
static const float *first_values(float differ)
{
    for (int i = 0; i < TOTAL; i++)
        begin_with[i] = (float)(0.4 * sin(7.0 * i + 1)) + differ;
    return begin_with;
}

static void unit_init(unit *u, net *n, int i, const float *first)
{
    int64_t in = sizes[i], out = sizes[i + 1], numel = out * (in + 1);
    kn_dtype dtype = run.dtype ? run.dtype : KN_F32;
    *u = (unit){ .name = names[i], .index = i, .dtype = dtype, .numel = numel, .first = first };
    u->room = (kn_memory){ "room", KN_CPU, room_take, room_give, u, false };
    u->grad_room = (kn_memory){ "grad_room", KN_CPU, room_take, room_give, u, false };
    kn_module_init(&u->base, unit_forward);
    kn_module_add(&n->base, names[i], &u->base);
    u->full = calloc(2, full_bytes(u));
    u->weight = kn_keep(kn_borrow(dtype, u->full, KN_SHAPE(out, in)));
    char *bias = (char *)u->full + (size_t)(out * in) * kn_dtype_size(dtype);
    u->bias = kn_keep(kn_borrow(dtype, bias, KN_SHAPE(out)));
    kn_copy_(kn_borrow(dtype, u->full, KN_SHAPE(numel)), kn_from(KN_F32, KN_CPU, first, 1, &numel));
    kn_require_grad(u->weight, true);
    kn_require_grad(u->bias, true);
    u->arrived = kn_event_create(KN_CPU);
    u->computed = kn_event_create(KN_CPU);
    u->reduced = kn_event_create(KN_CPU);
}

void *take_zeros(int64_t bytes, kn_mem_category category)
{
    void *p = kn_take(kn_device_memory(KN_CPU), (size_t)bytes, category);
    return p ? memset(p, 0, (size_t)bytes) : NULL;
}

size_t bytes_of(const unit *u)
{
    int64_t padded = u->part ? u->part * kn_comm_size(u->ranks) : u->numel;
    return (size_t)padded * kn_dtype_size(u->dtype);
}

void pack_grads(unit *u, void *dst)
{
    size_t size = kn_dtype_size(u->dtype), n = (size_t)kn_numel(u->weight) * size;
    bool whole = kn_grad(u->weight) && kn_grad(u->bias);
    if (!dst || !whole || bytes_of(u) < (size_t)u->numel * size) {
        kn_fail("pack_grads: '%s': %s", u->name,
                !whole ? "a gradient isn't there" : "the memory is smaller than the unit");
        return;
    }
    memset(dst, 0, bytes_of(u));
    memcpy(dst, kn_data(kn_grad(u->weight)), n);
    memcpy((char *)dst + n, kn_data(kn_grad(u->bias)), (size_t)u->numel * size - n);
    kn_clear_grad(u->weight);
    kn_clear_grad(u->bias);
}

void cut(unit *u, kn_comm *ranks)
{
    int64_t size = kn_comm_size(ranks);
    u->ranks = ranks;
    u->part = (u->numel + size - 1) / size;
    u->shard = take_zeros(u->part * (int64_t)sizeof(float), KN_MEM_PARAM);
    u->grad = take_zeros(u->part * (int64_t)sizeof(float), KN_MEM_GRAD);
    for (int64_t i = 0, at = kn_rank(ranks) * u->part; i < u->part && at < u->numel; i++, at++)
        u->shard[i] = u->first[at];
}

/* ---- sentences ------------------------------------------------------------------------------- */

/* The first element that differs, or -1; where: "element 3 of middle.weight". */
static int difference(const float *a, const float *b, char where[64])
{
    int at = 0, begin = 0, i = 0;
    while (at < TOTAL && !memcmp(&a[at], &b[at], sizeof *a))
        at++;
    while (i < UNITS && at >= begin + sizes[i + 1] * (sizes[i] + 1))
        begin += sizes[i + 1] * (sizes[i] + 1), i++;
    if (at == TOTAL)
        return -1;
    int k = at - begin, weights = sizes[i] * sizes[i + 1];
    snprintf(where, 64, "element %d of %s.%s", k < weights ? k : k - weights, names[i],
             k < weights ? "weight" : "bias");
    return at;
}

void same(const float *got, const float *want, const char *when, const char *hint)
{
    char where[64];
    int at = difference(got, want, where);
    if (at >= 0)
        wrong("%s %s is %.9g, and should be %.9g: %s", when, where, got[at], want[at], hint);
}

void moved_alike(const report *got, const report *want, const char *hint)
{
    char where[64];
    int at = difference(got->first, want->first, where);
    if (at >= 0)
        wrong("in the first step %s moved %.3g times as far as in one process: %s", where,
              (got->first[at] - got->value[at]) / (want->first[at] - want->value[at]), hint);
    same(got->param, want->param, "the first step is right, but after the last one", hint);
}

void at_most(const report *r, kn_mem_category category, int64_t most, const char *hint)
{
    if (r->ledger.peak[category] > most)
        wrong("at its peak a rank holds %lld bytes of %s, and %lld are enough: %s",
              (long long)r->ledger.peak[category], kn_mem_name(category), (long long)most, hint);
}

/* The sentence for an error of the library's that students meet. */
static void explain(const report *r, int rank)
{
    static const char *const known[][2] = {
        { "finite", "a layer computed with NaN: its unit wasn't gathered, hasn't arrived, or has "
                    "another dtype." },
        { "don't match", "the ranks are out of step: one left a collective out or made another." },
        { "wait", "the ranks are out of step: one of them left a collective out." },
        { "left in room", "more was taken from room than a unit has in its dtype." },
        { "pack_grads", "gradients were packed before they were whole, or into too few bytes." },
    };
    printf("rank %d reports: %s\n", rank, r->error);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strstr(r->error, known[i][0]))
            wrong("%s", known[i][1]);
    wrong("rank %d has an error, see above.", rank);
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static void watch(kn_module_event *e, void *arg)
{
    note(e->moment == KN_PRE_FORWARD ? 'F' : 'B', arg);
    usleep((useconds_t)(run.slow * 1e6));
}

/* The values of all units, one after the other. */
static void copy_values(net *n, float *param)
{
    for (int i = 0; i < UNITS && kn_ok(); param += n->unit[i++].numel) {
        unit *u = &n->unit[i];
        float whole[TOTAL + PADDING];
        if (!run.sharded)
            memcpy(param, u->full, (size_t)u->numel * sizeof *param);
        else if (kn_all_gather(u->ranks, whole, u->shard, u->part, KN_F32,
                               kn_compute_stream(KN_CPU), "checker"))
            memcpy(param, whole, (size_t)u->numel * sizeof *param);
    }
}

static void net_begin(net *n, kn_comm *world)
{
    kn_scope scope = kn_scope_begin();
    const float *first = first_values(run.differ * (float)kn_rank(world));
    kn_module_init(&n->base, layers_forward);
    for (int i = 0; i < UNITS; first += n->unit[i++].numel)
        unit_init(&n->unit[i], n, i, first);
    for (int i = 0; run.begin && i < UNITS; i++)
        run.begin(&n->unit[i], world);
    if (run.begun && kn_ok())
        run.begun(n, seen);
    kn_scope_end(scope);
    for (int i = 0; i < UNITS; i++) {
        kn_module_hook(&n->unit[i],
                       (kn_module_hooks){ watch, NULL, watch, NULL, &n->unit[i], "watch" });
        if (run.sharded) /* what isn't gathered isn't there */
            memset(n->unit[i].full, 0xff, full_bytes(&n->unit[i]));
        if (run.slow > 0) {
            kn_comm_slow(n->unit[i].ranks, run.slow, 1e12);
            kn_comm_slow(n->unit[i].reducers, run.slow, 1e12);
        }
    }
}

static void backwards(net *n, kn_comm *world, int step)
{
    for (int m = kn_rank(world); m < run.micros && kn_ok(); m += run.ranks) {
        seen->events[0] = 0;
        double t0 = kn_now();
        kn_tensor *loss = net_loss(n, step * run.micros + m);
        double t1 = kn_now();
        kn_backward(loss);
        if (run.end_of_backward)
            run.end_of_backward();
        seen->seconds[0] = step ? fmin(seen->seconds[0], t1 - t0) : t1 - t0;
        seen->seconds[1] = step ? fmin(seen->seconds[1], kn_now() - t1) : kn_now() - t1;
    }
}

static void train_rank(kn_comm *world)
{
    static net n;
    net_begin(&n, world);
    if (seen->lacks[0] || !kn_ok())
        return;
    copy_values(&n, seen->value);
    kn_ledger_reset_peaks();
    for (int s = run.from; s < run.steps && kn_ok(); s++) {
        kn_scope scope = kn_scope_begin();
        if (!run.whole_step)
            backwards(&n, world, s);
        seen->before = kn_ledger_read();
        for (int i = 0; run.step && kn_ok() && i < UNITS; i++)
            run.step(&n.unit[i]);
        if (run.whole_step)
            run.whole_step(&n, world, s);
        kn_scope_end(scope);
        copy_values(&n, s == 0 ? seen->first : seen->param);
    }
    if (run.ended && kn_ok())
        run.ended(&n, seen);
}

static void own_rank(kn_comm *world)
{
    static struct {
        kn_module base;
        kn_linear layer[UNITS];
    } n;
    const float *value = first_values(0);
    float *param = seen->param;
    const kn_param *p;
    kn_module_init(&n.base, layers_forward);
    for (int i = 0; i < UNITS; i++)
        kn_linear_init(&n.layer[i], &n.base, names[i], sizes[i], sizes[i + 1], .device = KN_META);
    kn_fsdp_wrap(&n, world, .wrap_class = "linear", .param_dtype = run.dtype,
                 .backward_prefetch = run.prefetch);
    int count = kn_params(&n, &p);
    for (int i = 0; i < count; value += p[i++].numel)
        kn_param_write(&n, i, value);
    kn_ledger_reset_peaks();
    kn_optim *opt = kn_sgd(&n, .lr = LR);
    for (int step = 0; step < run.steps && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        kn_backward(net_loss(&n, step * run.ranks + kn_rank(world)));
        kn_step(opt);
        kn_scope_end(scope);
    }
    for (int i = 0; i < count; param += p[i++].numel)
        kn_param_read(&n, i, param);
    kn_optim_free(opt), kn_module_free(&n);
}

/* As a rank of kn_spawn; arg is one of the functions above. */
static int rank_main(kn_comm *world, void *arg)
{
    void (*fn)(kn_comm *) = *(void (**)(kn_comm *))arg;
    seen = &reports[kn_rank(world)];
    alarm(30);
    kn_comm_set_timeout(world, 10);
    kn_set_threads(1);
    kn_set_check(true);
    kn_trace_start(4000);
    fn(world);
    seen->ledger = kn_ledger_read();
    if (run.slow > 0 && kn_rank(world) == 0)
        kn_trace_write("course-trace.json");
    kn_trace_stop(NULL);
    if (!kn_ok())
        snprintf(seen->error, sizeof seen->error, "%s", kn_error());
    seen->ended = true;
    return 0;
}

static report *run_ranks(training t, void (*fn)(kn_comm *))
{
    size_t bytes = sizeof *reports * MAX_RANKS;
    run = t;
    run.micros = t.micros ? t.micros : t.ranks;
    reports = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    kn_spawn(t.ranks, rank_main, &fn);
    for (int i = 0; i < t.ranks; i++)
        if (!reports[i].ended)
            wrong("rank %d did not come to its end: it crashed or still ran after 30 seconds.", i);
    for (int i = 0; i < t.ranks; i++)
        if (reports[i].lacks[0])
            wrong("%s", reports[i].lacks);
    for (int i = 0; i < t.ranks; i++)
        if (reports[i].error[0])
            explain(&reports[i], i);
    return reports;
}

report *train(training t)
{
    return run_ranks(t, train_rank);
}

report *knaps_own(training t)
{
    return run_ranks(t, own_rank);
}

void sgd_step(unit *u)
{
    for (int64_t i = 0; i < u->part; i++)
        u->shard[i] -= LR * (u->grad[i] / (float)run.micros);
}

static void plain_step(unit *u)
{
    static float momentum[TOTAL];
    float grad[TOTAL], *p = u->full, *m = momentum + (u->first - begin_with);
    float largest = 0, factor = 1;
    pack_grads(u, grad);
    for (int64_t k = 0; k < u->numel; k++)
        largest = fmaxf(largest, fabsf(grad[k] / (float)run.micros));
    if (run.clip > 0 && largest > run.clip)
        factor = run.clip / largest;
    for (int64_t k = 0; kn_ok() && k < u->numel; k++) {
        m[k] = run.momentum * m[k] + factor * (grad[k] / (float)run.micros);
        p[k] -= LR * m[k];
    }
}

report *reference(training t)
{
    training one = { .ranks = 1, .steps = t.steps, .twice = t.twice, .step = plain_step };
    one.micros = t.micros ? t.micros : t.ranks;
    one.momentum = t.momentum, one.clip = t.clip;
    return train(one);
}
