/* optim/ready.c: checks before a step: gradients are complete, and one clipping holds for all. */
#include "optim/optim_internal.h"

/* Fails at the first parameter whose gradient a step can't use yet. */
bool kn_grads_there(const kn_param *p, int n, const char *what)
{
    for (int i = 0; i < n; i++) {
        const char *why = p[i].source->held_back ? p[i].source->held_back(&p[i]) : NULL;
        if (why)
            return kn_fail("%s: the gradient of '%s' can't be used: %s", what, p[i].name, why);
    }
    return true;
}

/* A step on averages would be lost with the next kn_ema_swap. */
static bool none_averaged(const kn_module_impl *m, const char *what)
{
    const kn_module_impl *found = m, *up = m->parent;
    while (found && !found->averaged)
        found = kn_impl_next(found, m);
    for (; !found && up; up = up->parent)
        found = up->averaged ? up : NULL;
    return !found || kn_fail("%s: '%s' holds the averages of its weights; call kn_ema_swap before",
                             what, kn_module_shown(found));
}

bool kn_may_step(const kn_module_impl *m, const kn_param *p, int n, const char *what)
{
    return none_averaged(m, what) && kn_grads_there(p, n, what) && kn_clipped_whole(m, what);
}

bool kn_one_place(const kn_param *p, int n, const char *what)
{
    for (int i = 1; i < n; i++)
        if (kn_device_of(p[i].master) != kn_device_of(p[0].master))
            return kn_fail(
                "%s: '%s' lies on %s and '%s' on %s; offload all of a module's parameters "
                "to memory, or none (those that .ignore names stay on the device)",
                what, p[0].name, kn_device_name(kn_device_of(p[0].master)), p[i].name,
                kn_device_name(kn_device_of(p[i].master)));
    return true;
}

void kn_consume_grads(const kn_param *p, int n)
{
    for (int i = 0; i < n; i++) {
        p[i].source->clear(&p[i]);
        if (p[i].tensor->leaf)
            p[i].tensor->leaf->consumed = kn_newest_backward();
    }
}
