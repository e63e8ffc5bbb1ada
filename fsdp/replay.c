/* fsdp/replay.c: a training step that is recorded once and replayed while nothing in it changes
 * (kernels/graph.c). Each call of kn_replay_step does one of
 *
 *   eager    runs the step, as without. The last one before a recording is a rehearsal: what a
 *            recording couldn't take is remembered, and the step is never recorded
 *   record   runs the step with the device recording, then launches what was recorded
 *   replay   launches it again
 *
 * Ranks take the same way: they vote on the host before each step, which also shows in the contract
 * of collectives where one of them is somewhere else. What a replay must agree on with the
 * recording is the signature: the modules' modes, which parameters there are and want gradients,
 * the units' settings, the random keys' place in the step, and kn_changed. */
#include "fsdp/replay.h"
#include "fsdp/unit.h"
#include "kernels/graph_internal.h"
#include "kernels/memory_internal.h"
#include <string.h>

/* A buffer that the recorded step wrote, or, while it runs, one that it may write. */
typedef struct written {
    kn_tensor *buffer; /* a reference */
    uint32_t version;  /* before the step */
} written;

struct kn_replay {
    kn_module_impl *module;
    kn_device device;
    int eager_steps, eager; /* as asked for; done since the last change */
    kn_graph *graph;
    uint64_t signature; /* of the graph */
    bool quiet;         /* the step draws with grad mode off, outside of training's calls */
    written *written;   /* by the graph */
    int writes;
    int64_t room;
    kn_step_fn fn;
    void *arg;
    char why[600];
    kn_replay_counts counts;
};

/* ---- what a step depends on ------------------------------------------------------------------ */

static void add(uint64_t *h, uint64_t x)
{
    *h = kn_hash64(*h, x);
}

static void add_pointer(uint64_t *h, const void *p)
{
    add(h, (uint64_t)(uintptr_t)p);
}

static void add_bytes(uint64_t *h, const void *bytes, size_t size)
{
    for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, (const char *)bytes + at, size - at < sizeof word ? size - at : sizeof word);
        add(h, word);
    }
}

static void add_unit(uint64_t *h, const kn_unit *u)
{
    add_bytes(h, &u->set, sizeof u->set); /* which came from kn_host_calloc: gaps are 0 */
    add(h, (uint64_t)u->options.reshard_after_forward);
    double divisor = kn_unit_divisor(u);
    add_bytes(h, &divisor, sizeof divisor);
    add_pointer(h, u->summoned);
    for (int i = 0; i < u->next_forward.count; i++)
        add_pointer(h, u->next_forward.list[i]);
    for (int i = 0; i < u->next_backward.count; i++)
        add_pointer(h, u->next_backward.list[i]);
    for (int i = 0; i < u->buckets; i++)
        add_pointer(h, u->bucket[i]->master->data);
}

static void add_module(uint64_t *hash, const kn_module_impl *m)
{
    add_pointer(hash, m);
    add(hash, (uint64_t)(m->training | m->recompute << 1 | m->hooks << 2));
    for (int i = 0; i < m->params; i++) {
        const kn_tensor *t = m->param[i].tensor;
        add_pointer(hash, t);
        add(hash, t->requires_grad);
        if (!m->param[i].source) /* else the unit's buffers hold it */
            add_pointer(hash, t->storage->data);
    }
    for (int i = 0; i < m->buffers; i++)
        add_pointer(hash, m->buffer[i].tensor->storage->data);
    if (m->unit)
        add_unit(hash, m->unit->unit);
}

static uint64_t signature(const kn_replay *r)
{
    const kn_context *c = kn_context_get();
    uint64_t h = kn_hash64(c->graph.changes, c->no_grad);
    add(&h, (uint64_t)c->rng.micro);
    add(&h, c->rng.calls);
    if (r->quiet)
        add(&h, c->rng.quiet - c->rng.quiet_before);
    for (const kn_module_impl *m = r->module; m; m = kn_impl_next(m, r->module))
        add_module(&h, m);
    return h;
}

/* ---- the units ------------------------------------------------------------------------------- */

/* Every step begins with parameters that aren't gathered: a replay gathers them, and leaves what
 * was gathered before it out of date. */
static bool reshard(kn_unit *u, void *arg)
{
    (void)arg;
    return !u->schedule || kn_unit_reshard(u, KN_WHY("kn_replay_step"));
}

static kn_unit *some_unit(const kn_replay *r)
{
    kn_module_impl *m = kn_impl_lowest(r->module);
    while (m && !m->unit)
        m = kn_impl_next_up(m, r->module);
    return kn_unit_of(m);
}

/* ---- making ---------------------------------------------------------------------------------- */

static kn_device device_of(const kn_replay *r)
{
    const kn_param *p;
    const kn_unit *u = some_unit(r);
    int n = u ? 0 : kn_params(r->module->self, &p);
    return u ? u->options.device : n > 0 ? kn_device_of(p[0].tensor) : KN_CPU;
}

kn_replay *kn_replay_new_(void *module, kn_replay_options o)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_replay_new") : NULL;
    if (m && o.eager_steps < 0)
        kn_fail("kn_replay_new: .eager_steps is %d; it must be at least 1 (0: 2)", o.eager_steps);
    kn_replay *r = m && kn_ok() ? kn_host_calloc(1, sizeof *r) : NULL;
    if (!r)
        return NULL;
    r->module = m;
    r->device = device_of(r);
    r->eager_steps = o.eager_steps ? o.eager_steps : 2;
    if (!kn_graph_supported(r->device))
        snprintf(r->why, sizeof r->why, "device %s records no steps, cuda does",
                 kn_device_name(r->device));
    else if (kn_context_get()->fault.text)
        snprintf(r->why, sizeof r->why, "a fault is asked for, and a replay has no places for it");
    return r;
}

/* ---- buffers that a replay writes ------------------------------------------------------------ */

/* A replay runs no operation on the host, so it would leave the versions of buffers (statistics of
 * batch norm) as they are, and what compares versions, as kn_buffer_show does, would take the
 * values from before. Only those that the step wrote count as written: a table in bf16 that no step
 * writes keeps its values in full precision. */

static bool note_buffers(kn_replay *r)
{
    for (const kn_module_impl *m = r->module; m; m = kn_impl_next(m, r->module))
        for (int i = 0; i < m->buffers; i++) {
            kn_tensor *t = m->buffer[i].tensor;
            if (!kn_host_grow(&r->written, &r->room, r->writes + 1, sizeof *r->written))
                return false;
            r->written[r->writes++] = (written){ kn_tensor_ref(t), t->storage->version };
        }
    return true;
}

/* Those that weren't written since note_buffers go. */
static void drop_unwritten(kn_replay *r)
{
    int left = 0;
    for (int i = 0; i < r->writes; i++) {
        if (r->written[i].buffer->storage->version != r->written[i].version)
            r->written[left++] = r->written[i];
        else
            kn_tensor_free(r->written[i].buffer);
    }
    r->writes = left;
}

static void forget(kn_replay *r)
{
    while (r->writes > 0)
        kn_tensor_free(r->written[--r->writes].buffer);
    kn_host_free(r->written);
    r->written = NULL;
    r->room = 0;
    kn_graph_free(r->graph);
    r->graph = NULL;
    r->eager = 0;
}

void kn_replay_free(kn_replay *r)
{
    if (r)
        forget(r);
    kn_host_free(r);
}

const char *kn_replay_why(const kn_replay *r)
{
    return r && r->why[0] ? r->why : NULL;
}

kn_replay_counts kn_replay_count(const kn_replay *r)
{
    return r ? r->counts : (kn_replay_counts){ 0 };
}

/* ---- the three ways -------------------------------------------------------------------------- */

/* A step that ends as it began leaves no gradients, and the next one draws at the same places, by
 * another seed. */
static const char *open_end(const kn_rng_key *before)
{
    const kn_rng_key *now = &kn_context_get()->rng;
    if (now->micro != before->micro || now->calls != before->calls)
        return "the step doesn't end as it began: gradients are left for a kn_step that isn't part "
               "of it";
    return now->quiet == before->quiet || now->step != before->step
               ? NULL
               : "the step draws random numbers without a kn_step: replays would repeat them";
}

static bool run(kn_replay *r)
{
    const uint64_t quiet = kn_context_get()->rng.quiet;
    kn_scope scope = kn_scope_begin();
    bool ok = r->fn(r->arg);
    kn_scope_end(scope);
    r->quiet = kn_context_get()->rng.quiet != quiet;
    return ok && kn_ok();
}

static bool run_eagerly(kn_replay *r)
{
    bool rehearses = !r->why[0] && r->eager == r->eager_steps - 1;
    kn_rng_key before = kn_context_get()->rng;
    if (rehearses)
        kn_graph_rehearse(r->device, true);
    bool ok = run(r);
    const char *why = rehearses ? kn_graph_rehearse(r->device, false) : NULL;
    if (rehearses && ok && !why)
        why = open_end(&before);
    if (why)
        snprintf(r->why, sizeof r->why, "%s", why);
    r->eager++;
    r->counts.eager++;
    r->signature = signature(r);
    return ok;
}

static bool record(kn_replay *r)
{
    kn_rng_key before = kn_context_get()->rng;
    if (!kn_apply_units(r->module->self, reshard, NULL, NULL) || !note_buffers(r) ||
        !kn_graph_begin(r->device))
        return false;
    if (run(r) && open_end(&before))
        kn_fail("kn_replay_step: %s", open_end(&before));
    if (!kn_ok()) {
        kn_graph_cancel();
        return false;
    }
    drop_unwritten(r);
    r->graph = kn_graph_end();
    r->counts.recorded++;
    if (!r->graph || !kn_graph_launch(r->graph))
        return false;
    /* what the step made at its first time, like states of optimizers, counts as the step's own */
    r->signature = signature(r);
    return true;
}

static bool replay(kn_replay *r)
{
    r->counts.replayed++;
    for (int i = 0; i < r->writes; i++)
        kn_bump_version(r->written[i].buffer);
    return kn_apply_units(r->module->self, reshard, NULL, NULL) && kn_graph_launch(r->graph);
}

/* Whether all ranks may: [0] replay, [1] record. */
static bool vote(const kn_replay *r, int64_t may[2])
{
    const kn_unit *u = some_unit(r);
    if (!u)
        return true;
    if (!kn_hosts_sum(u->comm, may, 2, "whether a step is recorded or replayed"))
        return false;
    may[0] = may[0] == u->size;
    may[1] = may[1] == u->size;
    return true;
}

bool kn_replay_step(kn_replay *r, kn_step_fn fn, void *arg)
{
    if (!kn_ok() || !r || !fn)
        return kn_ok() && kn_fail("kn_replay_step: %s is NULL", r ? "the step" : "the replay");
    if (kn_recording())
        return kn_fail("kn_replay_step: a step is being recorded already; replays don't nest");
    const bool again = fn == r->fn && arg == r->arg;
    r->fn = fn;
    r->arg = arg;
    if (!kn_graph_supported(r->device))
        return run_eagerly(r);
    const bool same = again && r->signature == signature(r);
    if (!r->graph && !same)
        r->eager = 0; /* a step is recorded only after it has run as it is */
    int64_t may[2] = { r->graph && same, !r->graph && !r->why[0] && r->eager >= r->eager_steps };
    if (!vote(r, may))
        return false;
    if (may[0])
        return replay(r);
    if (r->graph)
        forget(r);
    bool ok = may[1] ? record(r) : run_eagerly(r);
    if (!ok && may[1]) {
        forget(r);
        snprintf(r->why, sizeof r->why, "%s", kn_error() ? kn_error() : "the step gave false");
    }
    return ok;
}
