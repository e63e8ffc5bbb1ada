/* fsdp/checks.c: what a forward or a backward of a unit assumes, and the error messages where that
 * doesn't hold. */
#include "fsdp/schedule.h"

static const char *const state_name[] = { "idle", "in forward", "in backward", "done with backward",
                                          "done with backward" };

static bool expect(const kn_unit *u, kn_unit_state a, kn_unit_state b, const char *what)
{
    return u->state == a || u->state == b ||
           kn_fail("fsdp: unit '%s' is %s, so %s cannot happen now; a backward begins when all "
                   "calls of its units are over",
                   kn_unit_name(u), state_name[u->state], what);
}

static bool same_shapes(const kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++) {
        for (int k = 0; k < u->bucket[i]->params; k++) {
            const kn_bucket_param *p = &u->bucket[i]->param[k];
            bool same = p->tensor->ndim == p->ndim;
            for (int d = 0; same && d < p->ndim; d++)
                same = p->tensor->shape[d] == p->shape[d];
            if (!same)
                return kn_fail("fsdp: the shape of parameter '%s' was changed after its unit was "
                               "wrapped; change shapes before kn_fsdp_wrap",
                               p->name);
        }
    }
    return true;
}

bool kn_check_forward(const kn_unit *u)
{
    if (u->summoned)
        return kn_fail("fsdp: unit '%s' was called while its parameters are summoned; call "
                       "kn_summon_end first",
                       kn_unit_name(u));
    return expect(u, KN_UNIT_IDLE, KN_UNIT_FORWARD, "a forward") && same_shapes(u);
}

bool kn_check_backward(const kn_unit *u)
{
    if (!u->schedule)
        return kn_fail("fsdp: backward reached unit '%s', which has had no forward since it was "
                       "wrapped; call the wrapped module, then kn_backward on its result",
                       kn_unit_name(u));
    if (u->summoned)
        return kn_fail("fsdp: backward reached unit '%s' while its parameters are summoned; call "
                       "kn_summon_end first",
                       kn_unit_name(u));
    return u->state != KN_UNIT_FORWARD ||
           expect(u, KN_UNIT_IDLE, KN_UNIT_POST_BACKWARD, "a backward");
}
