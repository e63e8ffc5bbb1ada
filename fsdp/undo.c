/* fsdp/undo.c: a kn_fsdp_wrap that is refused leaves the tree as it was: parameters, buffers and
 * modules are noted before the first unit is made, and turned back where the last one isn't. So the
 * bytes that parameters had stay until the call is over. */
#include "fsdp/build.h"
#include "kernels/memory_internal.h"
#include <string.h>

/* A parameter or a buffer as it was. */
typedef struct noted {
    kn_tensor *tensor; /* a reference */
    kn_location view;
    int64_t stride[KN_MAX_DIMS];
    bool cast;                               /* a buffer that computed in another dtype */
    bool (*first)(void *arg, kn_storage *s); /* of a parameter that nothing had filled */
    kn_param_entry *entry;                   /* NULL: a buffer */
    kn_param_entry was;
} noted;

struct kn_undo {
    kn_module_impl *const *module;
    int modules;
    noted *list;
    int count;
    int64_t room;
    bool *recompute; /* of all modules, in the order of kn_impl_next */
    int below;
    int64_t below_room;
};

/* ---- before ---------------------------------------------------------------------------------- */

static bool note(kn_undo *u, kn_tensor *t, kn_param_entry *e)
{
    if (!kn_host_grow(&u->list, &u->room, u->count + 1, sizeof *u->list))
        return false;
    noted *n = &u->list[u->count++];
    *n = (noted){ .tensor = kn_tensor_ref(t),
                  .view = { kn_storage_ref(t->storage), t->offset, t->dtype },
                  .cast = t->dtypes != NULL,
                  .first = t->storage->first,
                  .entry = e };
    memcpy(n->stride, t->stride, sizeof n->stride);
    if (e)
        n->was = *e;
    return true;
}

static bool note_module(kn_undo *u, kn_module_impl *m)
{
    bool ok = kn_host_grow(&u->recompute, &u->below_room, u->below + 1, sizeof *u->recompute);
    if (ok)
        u->recompute[u->below++] = m->recompute;
    for (int i = 0; ok && i < m->params; i++)
        ok = !m->param[i].owner || m->param[i].source || note(u, m->param[i].tensor, &m->param[i]);
    for (int i = 0; ok && i < m->buffers; i++)
        ok = note(u, m->buffer[i].tensor, NULL);
    return ok;
}

kn_undo *kn_undo_begin(kn_module_impl *const *module, int modules)
{
    kn_undo *u = kn_host_calloc(1, sizeof *u);
    if (!u)
        return NULL;
    u->module = module;
    u->modules = modules;
    bool ok = true;
    for (int i = 0; i < modules; i++)
        for (kn_module_impl *m = module[i]; ok && m; m = kn_impl_next(m, module[i]))
            ok = note_module(u, m);
    if (ok)
        return u;
    kn_undo_end(u, true);
    return NULL;
}

/* ---- after ----------------------------------------------------------------------------------- */

static void turn_back(noted *n)
{
    kn_tensor *t = n->tensor;
    if (t->dtypes && !n->cast)
        kn_buffer_uncast(t);
    if (n->first &&
        !n->view.storage->first) { /* it was filled meanwhile, maybe from another seed */
        kn_storage_release(n->view.storage);
        n->view.storage->first = n->first;
    }
    if (t->dtypes)
        return;
    n->view = kn_turn_to(t, n->view); /* what it turned to goes at the end */
    memcpy(t->stride, n->stride, sizeof n->stride);
}

/* A fresh unit stays, or m leaves it. */
static void settle(kn_module_impl *m, bool stays)
{
    kn_unit *unit = kn_unit_of(m);
    if (!unit || !unit->fresh)
        return;
    if (stays) {
        unit->fresh = false;
        return;
    }
    kn_host_free(m->unit);
    m->unit = NULL;
    kn_unit_leave(unit, m);
}

static void turn_all_back(kn_undo *u)
{
    int at = 0;
    for (int i = 0; i < u->count; i++)
        turn_back(&u->list[i]);
    for (int i = 0; i < u->modules; i++)
        for (kn_module_impl *m = u->module[i]; m && at < u->below;
             m = kn_impl_next(m, u->module[i]))
            m->recompute = u->recompute[at++];
    for (int i = 0; i < u->modules; i++) {
        for (kn_module_impl *m = kn_impl_lowest(u->module[i]); m;
             m = kn_impl_next_up(m, u->module[i]))
            settle(m, false);
        kn_params_changed(u->module[i]);
    }
    for (int i = 0; i < u->count; i++)
        if (u->list[i].entry)
            *u->list[i].entry = u->list[i].was;
}

void kn_undo_end(kn_undo *u, bool done)
{
    if (!u)
        return;
    if (!done)
        turn_all_back(u);
    for (int i = 0; i < u->modules && done; i++)
        for (kn_module_impl *m = u->module[i]; m; m = kn_impl_next(m, u->module[i]))
            settle(m, true);
    for (int i = 0; i < u->count; i++) {
        kn_storage_unref(u->list[i].view.storage);
        kn_tensor_free(u->list[i].tensor);
    }
    kn_host_free(u->list);
    kn_host_free(u->recompute);
    kn_host_free(u);
}
