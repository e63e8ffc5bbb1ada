/* autograd/frame.c: module calls as the tape sees them, and the random keys that hang on them.
 *
 * A call's key is a hash of its parent's key, its module's name and how many calls the parent made
 * before it; an outermost call hashes (micro-batch, calls so far). A draw's stream hashes the key
 * of its call and a count; its seed is one number a step, a hash of the run's seed and the step. So
 * a draw depends on where it happens in the model and in training, never on the rank, and a
 * recompute that re-enters with its forward's key, seed and step draws the same numbers. In a
 * recorded step (kn_graph_begin) the streams stay as they are at each replay, and kernels read the
 * seed from the device's memory; each replay writes its own there.
 *
 * Draws and calls with grad mode off have a count of their own, so that evaluating doesn't shift
 * training's draws. It goes down from ~0, the other up from 0. A place of kn_draws_begin is a call
 * of no module, with a key of its own. */
#include "autograd/autograd_internal.h"
#include "autograd/hooks.h"
#include "kernels/faults.h"
#include "kernels/trace.h"

#define MOST_STEPS ((int64_t)1 << 62)

enum { DEEPEST = 500 }; /* calls in one another; each takes some kB of the stack */

bool kn_nest_begin(const char *name)
{
    kn_context *c = kn_context_get();
    if (c->nested >= DEEPEST)
        return kn_fail("'%s' is called inside %d other calls: does a forward call its own module "
                       "or function? Use a loop, or end the recursion earlier",
                       name, DEEPEST);
    c->nested++;
    return true;
}

void kn_nest_end(void)
{
    kn_context_get()->nested--;
}

static uint64_t *root_count(kn_context *c)
{
    return c->no_grad && !c->trains && !c->engine ? &c->rng.quiet : &c->rng.calls;
}

static uint64_t root_key(kn_context *c, bool draw)
{
    kn_rng_key *r = &c->rng;
    uint64_t key = kn_hash64(draw ? 2 : 1, (uint64_t)r->micro), *count = root_count(c);
    uint64_t before = (*count)++;
    return kn_hash64(key, count == &r->quiet ? ~(before - r->quiet_before) : before);
}

static kn_frame *enter(kn_life *life, const char *path, uint64_t key)
{
    kn_frame *f = kn_host_calloc(1, sizeof *f);
    if (!f)
        return NULL;
    kn_context *c = kn_context_get();
    f->path = kn_host_strdup(path);
    if (!f->path) {
        kn_host_free(f);
        return NULL;
    }
    f->refs = 1;
    f->life = kn_life_ref(life);
    f->key = key;
    f->parent = c->frame;
    if (f->parent) {
        f->parent->refs++;
        f->rng = f->parent->rng;
    }
    c->frame = f;
    return f;
}

kn_frame *kn_frame_enter(kn_life *life, const char *path, const char *name)
{
    kn_context *c = kn_context_get();
    kn_frame *p = c->frame;
    uint64_t *count = p ? NULL : root_count(c), before = count ? *count : 0;
    uint64_t key = p ? kn_hash64(p->key, p->calls++) : root_key(c, false);
    kn_frame *f = enter(life, path, kn_hash64(key, kn_hash_string(name)));
    if (!f && count)
        *count = before;
    if (f) {
        f->count = count;
        f->count_before = before;
    }
    return f;
}

kn_frame *kn_frame_reenter(kn_life *life, const char *path, uint64_t key)
{
    return enter(life, path, key);
}

void kn_frame_leave(kn_frame *f)
{
    if (!f)
        return;
    kn_context *c = kn_context_get();
    /* The next call draws the numbers of this one, which failed. An evaluation that draws nothing
     * moves no draws on. */
    if (f->count && (!kn_ok() || (f->count == &c->rng.quiet && !f->drew)))
        *f->count = f->count_before;
    c->frame = f->parent;
    kn_frame_unref(f);
}

void kn_frame_unref(kn_frame *f)
{
    while (f && --f->refs == 0) {
        kn_frame *parent = f->parent;
        kn_call_grads *g = f->grads;
        for (int i = 0; g && i < KN_MAX_OUT; i++)
            kn_tensor_free(g->out[i]);
        kn_host_free(g);
        for (int64_t i = 0; i < f->insides; i++)
            kn_group_unref(f->inside[i]);
        kn_host_free(f->inside);
        kn_group_unref(f->group);
        kn_life_unref(f->life);
        kn_host_free((void *)f->path);
        kn_host_free(f);
        f = parent;
    }
}

uint64_t kn_draw_stream(void)
{
    kn_context *c = kn_context_get();
    kn_frame *f = c->frame;
    for (kn_frame *p = f; p && !p->drew; p = p->parent)
        p->drew = true;
    return f ? kn_hash64(f->key, 0x64726177u + f->draws++) : root_key(c, true);
}

/* The running forward's seed and step. */
static const kn_rng_key *running_key(void)
{
    const kn_context *c = kn_context_get();
    return c->frame && c->frame->rng ? c->frame->rng : &c->rng;
}

uint64_t kn_draw_seed(void)
{
    const kn_rng_key *key = running_key();
    return kn_hash64(key->seed, (uint64_t)key->step);
}

static void begin_again(kn_rng_key *key)
{
    key->quiet_before = key->quiet;
}

void kn_seed(uint64_t seed)
{
    kn_context *c = kn_context_get();
    c->rng.seed = seed;
    begin_again(&c->rng);
}

void kn_set_step(int64_t step)
{
    kn_context *c = kn_context_get();
    if (step < 0 || step > MOST_STEPS) {
        kn_fail("kn_set_step: the step is %lld; steps count from 0 to 2^62", (long long)step);
        return;
    }
    const int64_t before = c->rng.step;
    c->rng.step = step;
    kn_fault_step(before);
    c->rng.micro = c->rank;
    c->rng.calls = 0;
    begin_again(&c->rng);
}

int64_t kn_steps_seen(void)
{
    return kn_context_get()->rng.counted;
}

void kn_step_taken(int64_t *seen)
{
    kn_context *c = kn_context_get();
    if (*seen == c->rng.counted) {
        c->rng.counted++;
        kn_set_step(c->rng.step + 1);
        kn_trace_put(NULL, (kn_trace_event){ .kind = KN_TRACE_STEP,
                                             .what = "end",
                                             .number = (double)c->rng.step });
    }
    *seen = c->rng.counted;
}

int64_t kn_get_step(void)
{
    return running_key()->step;
}

kn_draws kn_draws_begin(int64_t number)
{
    const kn_frame *f = kn_context_get()->frame;
    return (kn_draws){ kn_frame_reenter(f ? f->life : NULL, f ? f->path : "",
                                        kn_hash64(3, (uint64_t)number)) };
}

void kn_draws_end(kn_draws d)
{
    if (d.frame && d.frame != kn_context_get()->frame)
        kn_fail("kn_draws_end: another place, or a call of a module, began after it; end that "
                "first");
    else
        kn_frame_leave(d.frame);
}
