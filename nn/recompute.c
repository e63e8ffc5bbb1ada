/* nn/recompute.c: activation checkpointing (Chen et al., arXiv:1604.06174). autograd/record.h says
 * how; here is what a replay must see of the modules: the tree below the one that is called, each
 * module's mode, and the method with its arguments. */
#include "autograd/record.h"
#include "kernels/memory_internal.h"
#include "nn/nn_internal.h"
#include <string.h>

typedef struct below {
    kn_life *life; /* a reference */
    bool training, recompute;
} below;

typedef struct call {
    kn_life *life; /* of the module; a reference */
    kn_method method;
    void *arg;    /* a copy */
    below *below; /* the module and those below it, in the order of kn_impl_next */
    int64_t belows, room;
} call;

static void drop(void *arg)
{
    call *c = arg;
    for (int64_t i = 0; i < c->belows; i++)
        kn_life_unref(c->below[i].life);
    kn_life_unref(c->life);
    kn_host_free(c->below);
    kn_host_free(c->arg);
    kn_host_free(c);
}

static bool list(call *c, kn_module_impl *top)
{
    for (kn_module_impl *m = top; m; m = kn_impl_next(m, top)) {
        if (!kn_host_grow(&c->below, &c->room, c->belows + 1, sizeof *c->below))
            return false;
        c->below[c->belows++] = (below){ kn_life_ref(m->life), m->training, m->recompute };
    }
    return true;
}

static bool same_tree(const call *c, const kn_module_impl *top)
{
    int64_t at = 0;
    const kn_module_impl *m = top;
    for (; m && at < c->belows && c->below[at].life == m->life; m = kn_impl_next(m, top))
        at++;
    return (!m && at == c->belows) ||
           kn_fail("backward of a call of '%s' that recomputes: the modules below it changed "
                   "between forward and backward (kn_module_add, kn_module_remove, "
                   "kn_module_replace, kn_module_free); run the forward again",
                   kn_module_shown(top));
}

/* A second call undoes it. */
static void swap_modes(const call *c)
{
    for (int64_t i = 0; i < c->belows; i++) {
        below *b = &c->below[i];
        kn_module_impl *m = b->life->of;
        const bool training = m->training, recompute = m->recompute;
        m->training = b->training;
        m->recompute = b->recompute;
        b->training = training;
        b->recompute = recompute;
    }
}

static bool run_again(void *arg, int n, kn_tensor *const *in)
{
    kn_values values = { .n = n };
    memcpy(values.v, in, (size_t)n * sizeof *in);
    call *c = arg;
    kn_module_impl *m = c->life->of;
    if (!m)
        return kn_fail("backward of a call that recomputes: its module was freed; free modules "
                       "after the backward");
    if (!same_tree(c, m))
        return false;
    swap_modes(c);
    kn_module_run(m, c->method, values, c->arg);
    swap_modes(c);
    return kn_ok();
}

static call *make_call(kn_module_impl *m, kn_method method, const void *arg, size_t size)
{
    call *c = kn_host_calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->life = kn_life_ref(m->life);
    c->method = method;
    c->arg = size ? kn_host_alloc(size) : NULL;
    if (c->arg)
        memcpy(c->arg, arg, size);
    if ((!size || c->arg) && list(c, m))
        return c;
    drop(c);
    return NULL;
}

kn_values kn_recompute_call(kn_module_impl *m, kn_method method, kn_frame *frame, kn_values in,
                            const void *arg, size_t size)
{
    call *c = make_call(m, method, arg, size);
    kn_record *r = c ? kn_record_begin(frame, in.n, in.v, (kn_rerun){ run_again, drop, c }) : NULL;
    if (!r)
        return (kn_values){ 0 };
    kn_values out = kn_module_run(m, method, in, arg);
    kn_record_end(r);
    return out;
}
