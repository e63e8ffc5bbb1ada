/* tests/fsdp/recovery_test.c: training after a cleared error. A pass fails at each user callback
 * and at each allocation of a step in turn; the test clears the error and continues. The parameters
 * must equal those of a run that skipped the failed pass, bit for bit. If earlier gradients were
 * pending, the step may fail instead; after kn_zero_grad the repeated step must be right. Among
 * several ranks an error ends the communicator: each rank's next step must report it. */
#include "kernels/cpu/cpu_internal.h"
#include "kernels/faults.h"
#include "tests/failing.h"
#include "tests/fsdp/recovery.h"
#include <stdatomic.h>

/* ---- passes ---------------------------------------------------------------------------------- */

static bool synced_pass(model *m, const setting *s, int micro, bool last)
{
    return (s->plain || kn_fsdp_set_gradient_sync(m, last || !s->unsynced, true)) && pass(m, micro);
}

static bool same_params(model *a, model *b)
{
    const kn_param *p, *q;
    int n = kn_params(a, &p);
    kn_params(b, &q);
    kn_device d = device_of(a);
    if (!kn_stream_sync(kn_compute_stream(d)))
        return false;
    for (int i = 0; i < n; i++) {
        size_t bytes = (size_t)p[i].numel * 4;
        if (memcmp(kn_array_of(p[i].master).data, kn_array_of(q[i].master).data, bytes) != 0)
            return kn_fail("'%s' differs", p[i].name);
    }
    return true;
}

/* No whole parameters stay of a forward that failed, also of units gathered ahead. kept: those of
 * an earlier pass may. */
static bool gave_wholes_back(const model *m, bool kept)
{
    const kn_unit *u = kn_unit_of(m->base.impl);
    return !u || kept || fault.forward || kn_ledger_read().live[KN_MEM_GATHERED] == 0;
}

/* The n-th callback or allocation of a pass fails. False: it has fewer. */
static bool fails(model *m, const setting *s, int n, bool alloc, bool last, int micro)
{
    fault.now = 0;
    fault.at = alloc ? 0 : n;
    if (alloc)
        kn_fail_alloc(n);
    bool ok = synced_pass(m, s, micro, last);
    if (alloc)
        kn_fail_alloc(0);
    fault.at = 0;
    KN_CHECK(ok == kn_ok(), "%s: %s %d fails without a word", s->name,
             alloc ? "allocation" : "callback", n);
    KN_CHECK(ok || gave_wholes_back(m, s->unsynced && micro > 0), "%s, %s %d: %s left %lld bytes",
             s->name, alloc ? "allocation" : "callback", n, kn_error(),
             (long long)kn_ledger_read().live[KN_MEM_GATHERED]);
    kn_clear_error();
    return !ok;
}

/* No bytes of gradients stay of a pass that failed; pending: those of an earlier one wait. */
static bool gave_grads_back(model *m, const setting *s, bool pending)
{
    if (s->plain)
        return true;
    bool ok = kn_fsdp_reshard(&m->part[0]); /* as anything that begins does, it clears up first */
    return ok && (kn_ledger_read().live[KN_MEM_UNREDUCED] == 0 || (pending && s->unsynced));
}

/* A step of two micro-batches, of which callback (allocation) n of micro-batch `which` fails: of
 * the first, or of the second, when gradients of the first are pending. False: it has fewer.
 * *refused counts the steps that had to be repeated. */
static bool step_with_a_fault(model *m, kn_optim *o, const setting *s, bool alloc, int which, int n,
                              int *refused)
{
    char label[160];
    snprintf(label, sizeof label, "%s, %s %d of micro-batch %d", s->name,
             alloc ? "allocation" : "callback", n, which);
    kn_set_step(n);
    KN_CHECK(which == 0 || synced_pass(m, s, 0, false), "%s", label);
    bool more = fails(m, s, n, alloc, which == 1, which);
    KN_CHECK(!more || n % 2 || gave_grads_back(m, s, which), "%s: bytes stay", label);
    for (int i = more && which == 0 ? 0 : 1; i < 2; i++) /* what is left of the step */
        KN_CHECK((which == 1 && !more) || synced_pass(m, s, i, i), "%s", label);
    if (kn_step(o))
        return more;
    KN_CHECK(which == 1 && more && strstr(kn_error(), "a backward that failed"), "%s", label);
    kn_clear_error();
    kn_zero_grad(m);
    kn_set_step(n);
    KN_CHECK(synced_pass(m, s, 0, false) && synced_pass(m, s, 1, true) && kn_step(o), "%s", label);
    ++*refused;
    return more;
}

/* In step n the n-th one fails, of hurt[0] in its first micro-batch, of hurt[1] in its second;
 * under AddressSanitizer one in 3. */
static void attack(const setting *s, bool alloc)
{
    model good, hurt[2];
    fault.all = true;
    KN_CHECK(make(&good, NULL, s, true) && make(&hurt[0], NULL, s, true) &&
                 make(&hurt[1], NULL, s, true),
             "%s", s->name);
    kn_optim *a = kn_sgd(&good, .lr = 0.05, .momentum = 0.9),
             *b[2] = { kn_sgd(&hurt[0], .lr = 0.05, .momentum = 0.9),
                       kn_sgd(&hurt[1], .lr = 0.05, .momentum = 0.9) };
    int refused[2] = { 0 }, faults[2] = { 0 };
    bool more[2] = { true, true };
    for (int n = 1; more[0] || more[1]; n += kn_one_in(3)) {
        kn_set_step(n);
        KN_CHECK(synced_pass(&good, s, 0, false) && synced_pass(&good, s, 1, true) && kn_step(a),
                 "%s, step %d", s->name, n);
        for (int which = 0; which < 2; which++) {
            if (!more[which])
                continue;
            more[which] =
                step_with_a_fault(&hurt[which], b[which], s, alloc, which, n, &refused[which]);
            faults[which] += more[which];
            KN_CHECK(same_params(&good, &hurt[which]), "%s, %d of micro-batch %d", s->name, n,
                     which);
        }
    }
    KN_CHECK(faults[0] > 19 / kn_one_in(3) && faults[1] > 19 / kn_one_in(3) && refused[0] == 0 &&
                 refused[1] > 0,
             "%s: %d and %d faults, %d and %d refusals", s->name, faults[0], faults[1], refused[0],
             refused[1]);
    kn_optim_free(a);
    kn_module_free(&good);
    for (int which = 0; which < 2; which++) {
        kn_optim_free(b[which]);
        kn_module_free(&hurt[which]);
    }
    KN_CHECK_OK();
}

static void attack_all(bool alloc)
{
    kn_set_threads(1);
    /* a kernel that fails late can't be undone, so none may be pending */
    stand_in_begin((stand_in){ .inline_streams = alloc });
    for (int i = 0; i < SETTINGS; i++)
        attack(&settings[i], alloc);
    stand_in_end();
}

KN_TEST(recovery, every_callback_of_a_step)
{
    attack_all(false);
}

KN_TEST(recovery, every_allocation_of_a_step)
{
    attack_all(true);
}

/* Early allocations of a tree's first pass, which makes its streams and communicators: the pass
 * made again is as if it had been the first. */
KN_TEST(recovery, early_allocations_of_a_first_pass)
{
    enum { EARLY = 60 };                  /* the rest is that of any pass */
    static const int which[] = { 2, 11 }; /* sharded, in the host's memory */
    kn_set_threads(1);
    stand_in_begin((stand_in){ .inline_streams = true });
    for (int i = 0; i < 2; i++) {
        const setting *s = &settings[which[i]];
        OWNED_MODULE model good;
        fault.all = false;
        kn_set_step(0);
        KN_CHECK(make(&good, NULL, s, false) && pass(&good, 0), "%s", s->name);
        OWNED_OPTIM kn_optim *a = kn_sgd(&good, .lr = 0.1);
        KN_CHECK(kn_step(a), "%s", s->name);
        int n = 1;
        for (bool more = true; more && n <= EARLY; n++) {
            OWNED_MODULE model hurt;
            kn_set_step(0);
            KN_CHECK(make(&hurt, NULL, s, false), "%s", s->name);
            more = fails(&hurt, s, n, true, true, 0);
            KN_CHECK(!more || pass(&hurt, 0), "%s, allocation %d", s->name, n);
            OWNED_OPTIM kn_optim *b = kn_sgd(&hurt, .lr = 0.1);
            KN_CHECK(kn_step(b) && same_params(&good, &hurt), "%s, allocation %d", s->name, n);
        }
        KN_CHECK(n > EARLY, "%s: a pass makes %d allocations", s->name, n);
    }
    stand_in_end();
}

/* ---- work that is still running -------------------------------------------------------------- */

enum { STREAMS = 4 };

/* Of the streams beside compute: on each it ends once the host waits for that stream. */
static struct work {
    const kn_stream *stream;
    atomic_bool may_end, ended;
} work[STREAMS];

static void run_until_waited_for(void *arg)
{
    struct work *w = &work[*(int *)arg];
    while (!atomic_load(&w->may_end))
        usleep(20);
    atomic_store(&w->ended, true);
}

static void end_work(const kn_stream *s)
{
    for (int i = 0; i < STREAMS; i++)
        if (!s || s == work[i].stream)
            atomic_store(&work[i].may_end, true);
}

static bool fail_with_work(const kn_grad_reduction *r, void *module)
{
    const kn_schedule_state *s = kn_unit_of(((kn_module *)module)->impl)->schedule;
    kn_stream *stream[STREAMS] = { s->lanes->gather, s->lanes->reduce, s->lanes->upload,
                                   s->lanes->download };
    bool ok = true;
    for (int i = 0; i < STREAMS; i++) {
        work[i].stream = stream[i];
        ok = ok && kn_cpu_stream_host(stream[i], "work", run_until_waited_for, &i, sizeof i);
    }
    return ok && kn_fail("this hook fails after it gave work to streams for %s", r->unit);
}

/* Work that a failed reduction gave to streams may use bytes of the pass: they go after it has
 * ended. */
KN_TEST(recovery, bytes_go_after_the_work_of_a_failed_reduction)
{
    model m;
    stand_in_begin((stand_in){ 0 });
    KN_CHECK(make(&m, NULL, &settings[10], false) && pass(&m, 0));
    kn_zero_grad(&m);
    KN_CHECK(kn_fsdp_set_comm_hook(&m.part[1], fail_with_work, &m, false));
    REFUSED(pass(&m, 0), "this hook fails");
    stand_in_watch(end_work);
    bool ok = kn_fsdp_reshard(&m.part[0]), ended[STREAMS]; /* it clears up first */
    for (int i = 0; i < STREAMS; i++)
        ended[i] = atomic_load(&work[i].ended);
    end_work(NULL);
    stand_in_watch(NULL);
    for (int i = 0; i < STREAMS; i++)
        KN_CHECK(ok && ended[i], "stream %d still runs", i);
    kn_module_free(&m);
    stand_in_end();
}

/* ---- before the forward ---------------------------------------------------------------------- */

KN_TEST(recovery, an_input_that_the_root_refuses)
{
    stand_in_begin((stand_in){ 0 });
    for (int i = 0; i < SETTINGS; i++) {
        const setting *s = &settings[i];
        OWNED_MODULE model m = { 0 };
        if (s->plain)
            continue;
        fault.all = false;
        KN_CHECK(make(&m, NULL, s, false), "%s", s->name);
        kn_scope scope = kn_scope_begin();
        REFUSED(loss(&m, 0, KN_META), "input");
        kn_entered e = kn_enter(&m.part[0]);
        KN_CHECK(e.frame, "%s", s->name);
        kn_leave(e, NULL, 0);
        kn_scope_end(scope);
        KN_CHECK(pass(&m, 0), "%s", s->name);
    }
    stand_in_end();
}

/* A step right after a backward that failed has no gradients to consume. */
KN_TEST(recovery, a_step_after_a_failed_backward_finds_no_gradient)
{
    stand_in_begin((stand_in){ 0 });
    for (int i = 0; i < SETTINGS; i++) {
        const setting *s = &settings[i];
        OWNED_MODULE model m;
        fault.all = true;
        KN_CHECK(make(&m, NULL, s, true), "%s", s->name);
        OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 0.1);
        int n = 1;
        for (; fails(&m, s, n, false, true, 0); n++) {
            KN_CHECK(!kn_step(o), "%s, callback %d", s->name, n);
            KN_CHECK_ERROR("no parameter has a gradient");
            KN_CHECK(kn_grad_scale(&m) == 1, "%s: callback %d was counted", s->name, n);
        }
        KN_CHECK(kn_step(o), "%s", s->name);
    }
    stand_in_end();
}

/* Each allocation of a step itself fails: the repeated step equals one without a failure. */
KN_TEST(recovery, every_allocation_of_an_optimizer_step)
{
    kn_set_threads(1);
    stand_in_begin((stand_in){ .inline_streams = true });
    for (int i = 0; i < SETTINGS; i++) {
        const setting *s = &settings[i];
        OWNED_MODULE model good, hurt;
        fault.all = false;
        KN_CHECK(make(&good, NULL, s, false) && make(&hurt, NULL, s, false), "%s", s->name);
        int n = 1;
        for (bool ok = false; !ok; n++) {
            OWNED_OPTIM kn_optim *a = kn_adamw(&good, .lr = 0.01), *b = kn_adamw(&hurt, .lr = 0.01);
            kn_set_step(n);
            KN_CHECK(pass(&good, 0) && kn_step(a), "%s", s->name);
            kn_set_step(n);
            KN_CHECK(pass(&hurt, 0), "%s", s->name);
            ok = WITH_FAILING(n, kn_step(b));
            KN_CHECK(ok || kn_step(b), "%s, allocation %d", s->name, n);
            KN_CHECK(same_params(&good, &hurt), "%s, allocation %d", s->name, n);
        }
        KN_CHECK(n > 5, "%s: a step makes %d allocations", s->name, n);
    }
    stand_in_end();
}

/* On meta among simulated ranks, which no error poisons: the pass after the failed one allocates
 * and frees the same bytes as before, and nothing leaks. */
KN_TEST(recovery, every_allocation_among_simulated_ranks)
{
    static const kn_fsdp_wrap_options options[] = {
        { .forward_prefetch = true, .wrap_class = "part,linear" },
        { .strategy = KN_SHARD_GRAD_OP, .layout = KN_LAYOUT_PER_PARAM, .wrap_class = "part" },
        { .strategy = KN_HYBRID_SHARD, .mesh = { .shards = 2 }, .wrap_class = "part" },
        { .reshard_after_forward = 2, .wrap_class = "part", .param_dtype = KN_BF16 },
    };
    for (int i = 0; i < 8; i++) {
        setting s = { "simulated", options[i % 4], .recompute = i / 4 };
        s.o.device = KN_META;
        model m;
        fault.all = false;
        kn_comm *world = kn_comm_simulated(4, 0, 1e9);
        KN_CHECK(world && make(&m, world, &s, false) && pass(&m, 0) && pass(&m, 0));
        kn_zero_grad(&m);
        kn_ledger_reset_peaks();
        KN_CHECK(pass(&m, 0));
        int64_t gathered = kn_ledger_read().peak[KN_MEM_GATHERED];
        int64_t unreduced = kn_ledger_read().peak[KN_MEM_UNREDUCED];
        for (int n = 1;; n++) {
            kn_zero_grad(&m);
            if (!fails(&m, &s, n, true, true, 0))
                break;
            KN_CHECK(pass(&m, 0), "options %d, allocation %d", i, n);
            kn_zero_grad(&m);
            kn_ledger_reset_peaks();
            KN_CHECK(pass(&m, 0), "options %d, allocation %d", i, n);
            KN_CHECK(kn_ledger_read().peak[KN_MEM_GATHERED] == gathered &&
                         kn_ledger_read().peak[KN_MEM_UNREDUCED] == unreduced,
                     "options %d, allocation %d: other bytes than before", i, n);
        }
        kn_module_free(&m);
        kn_comm_simulated_free(world);
    }
}

/* How often ranks ask each other in a pass which calls a backward reaches. */
static int asked(model *m)
{
    OWNED_HOST kn_trace_event *events = NULL;
    int times = 0;
    kn_trace_start(20000);
    KN_CHECK(pass(m, 0));
    size_t n = kn_trace_stop(&events);
    for (size_t i = 0; i < n; i++)
        times += strstr(events[i].what, "which units backward reaches") != NULL;
    return times;
}

/* The forward of a pass that failed waits for no backward. */
KN_TEST(recovery, ranks_agree_on_nothing_of_a_failed_pass)
{
    const setting s = { "simulated", { .wrap_class = "part,linear", .device = KN_META } };
    OWNED_SIMULATED kn_comm *world = kn_comm_simulated(2, 0, 1e9);
    model m;
    fault.all = true;
    KN_CHECK(world && make(&m, world, &s, true) && asked(&m) == 0);
    int n = 1;
    for (; fails(&m, &s, n, false, true, 0); n++) {
        fault.now = 0;
        KN_CHECK(asked(&m) == 0, "after callback %d failed", n);
        kn_zero_grad(&m);
    }
    KN_CHECK(n > 20, "%d callbacks", n);
    kn_module_free(&m);
}

/* ---- several ranks --------------------------------------------------------------------------- */

typedef struct rank_fault {
    const setting *s;
    int n, who; /* who: the rank that fails, or -1: all */
    bool alloc;
} rank_fault;

static void after_poison(kn_comm *world, void *arg)
{
    const rank_fault *f = arg;
    OWNED_MODULE model m;
    kn_set_threads(1);
    fault.all = true;
    KN_CHECK(make(&m, world, f->s, true));
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 0.1);
    bool mine = f->who < 0 || f->who == kn_rank(world);
    fault.now = 0;
    fault.at = mine && !f->alloc ? f->n : 0;
    if (mine && f->alloc)
        kn_fail_alloc(f->n);
    bool ok = pass(&m, 0);
    kn_fail_alloc(0);
    fault.at = 0;
    kn_clear_error();
    if (!ok || f->who >= 0) /* the other ranks may get the error only now */
        KN_CHECK(!(pass(&m, 1) && kn_step(o)) && strstr(kn_error(), "injected"), "%s: fault %d",
                 f->s->name, f->n);
    kn_clear_error();
}

KN_TEST(recovery, ranks_refuse_after_an_error)
{
    for (int i = 2; i < SETTINGS && settings[i].o.device != STAND_IN; i += 3)
        for (int who = -1; who < 2; who++)
            for (int n = 1; n < 60; n += 7) {
                rank_fault f = { &settings[i], n, who, false };
                KN_CHECK(spawn_threads(2, after_poison, &f) == 0, "%s: callback %d on rank %d",
                         settings[i].name, n, who);
            }
}
