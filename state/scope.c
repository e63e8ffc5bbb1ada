/* state/scope.c: the kind of state dicts that a scope sets for the modules below one
 * (FSDP.state_dict_type). */
#include "kernels/error_internal.h"
#include "state/dict_internal.h"

typedef struct kn_state_scoped {
    kn_live live; /* with the module */
    kn_state_kind kind[2];
    bool rank0_only[2]; /* of modules, of optimizers */
    struct kn_state_scoped *around;
} kn_state_scoped;

static _Thread_local kn_state_scoped *innermost;

static bool check_kind(kn_state_kind kind, bool rank0_only, const char *what)
{
    if ((unsigned)kind >= KN_STATE_KINDS)
        return kn_fail("%s: the kind is %u; there are KN_STATE_FULL, KN_STATE_SHARDED and "
                       "KN_STATE_LOCAL",
                       what, (unsigned)kind);
    return !rank0_only || kind == KN_STATE_FULL || kind == KN_STATE_DEFAULT ||
           kn_fail("%s: rank 0 alone can have a full state only; leave .rank0_only out, or take "
                   "KN_STATE_FULL",
                   what);
}

kn_state_dict_scope kn_state_dict_type_(void *module, kn_state_kind kind,
                                        kn_state_dict_type_options o)
{
    static const char what[] = "kn_state_dict_type";
    kn_module_impl *m = kn_ok() ? kn_impl(module, what) : NULL;
    const kn_state_kind optim = o.optim_kind ? o.optim_kind : kind;
    kn_state_scoped *t =
        m && check_kind(kind, o.rank0_only, what) && check_kind(optim, o.optim_rank0_only, what)
            ? kn_host_calloc(1, sizeof *t)
            : NULL;
    if (!t)
        return (kn_state_dict_scope){ NULL };
    kn_live_begin(&t->live, m);
    t->kind[0] = kind;
    t->kind[1] = optim;
    t->rank0_only[0] = o.rank0_only;
    t->rank0_only[1] = o.optim_rank0_only;
    t->around = innermost;
    innermost = t;
    return (kn_state_dict_scope){ t };
}

bool kn_state_dict_type_end(kn_state_dict_scope scope)
{
    static const char what[] = "kn_state_dict_type_end";
    kn_state_scoped **at = &innermost;
    if (!kn_given(scope.type, what, "the scope"))
        return false;
    while (*at && *at != scope.type)
        at = &(*at)->around;
    if (!*at)
        return kn_fail("%s: the scope ended already, or began on another thread", what);
    *at = scope.type->around;
    kn_live_end(&scope.type->live, "scope", what);
    kn_host_free(scope.type);
    return kn_ok();
}

static bool is_around(const kn_state_scoped *t, const kn_module_impl *m)
{
    while (m && m != t->live.module)
        m = m->parent;
    return m != NULL;
}

bool kn_state_kind_for(const kn_module_impl *m, const kn_state_dict_options *o, bool optim,
                       kn_state_kind *kind, bool *rank0_only, const char *what)
{
    const kn_state_scoped *t = o->kind ? NULL : innermost;
    while (t && !is_around(t, m))
        t = t->around;
    *kind = o->kind ? o->kind : t && t->kind[optim] ? t->kind[optim] : KN_STATE_FULL;
    *rank0_only = o->rank0_only || (t && t->rank0_only[optim]);
    return check_kind(*kind, *rank0_only, what);
}
