/* autograd/scale.c: losses that were multiplied by a scale (kn_scale_loss). The node that did it
 * knows the scale; a backward finds such nodes before it runs, and its gradients carry their scale
 * (kn_passes). It must be one for all of them: a step divides by one number. */
#include "autograd/engine.h"

kn_tensor *kn_backward_scale(void)
{
    const kn_engine *e = kn_context_get()->engine;
    return e ? e->scale : NULL;
}

void kn_scaled_by(const kn_tensor *loss, kn_tensor *scale)
{
    if (!loss || !loss->node)
        return;
    kn_tensor_free(loss->node->scale);
    loss->node->scale = kn_tensor_ref(scale);
}

/* The scale of the nodes behind e's roots; NULL: there is none. False with an error: several. */
static bool find(const kn_engine *e, kn_tensor **scale)
{
    *scale = NULL;
    for (int64_t i = 0; i < e->nodes; i++) {
        kn_tensor *s = e->node[i]->scale;
        if (s && *scale && s != *scale)
            return kn_fail("kn_backward: the result is made of losses with different loss scales; "
                           "scale all losses of a backward by one scaler, and at one time");
        *scale = s ? s : *scale;
    }
    return true;
}

static bool fail_bare(const kn_tensor *leaf)
{
    return kn_fail("kn_backward: the result is made of a loss that went through kn_scale_loss and "
                   "of one that didn't, which brings '%s' a gradient; scale their sum, or each",
                   kn_name(leaf));
}

/* From the roots on, every path meets one scale. The nodes come in their order. */
static bool all_scaled(const kn_engine *e, kn_node *const *root, int roots)
{
    for (int64_t i = 0; i < e->nodes; i++)
        e->node[i]->bare = e->node[i]->scaled = false;
    for (int i = 0; i < roots; i++)
        root[i]->bare = true;
    for (int64_t i = 0; i < e->nodes; i++) {
        kn_node *n = e->node[i];
        if (n->scale && n->scaled)
            return kn_fail("kn_backward: a loss went through kn_scale_loss twice");
        const bool bare = n->bare && !n->scale, scaled = n->scaled || n->scale;
        for (int k = 0; k < n->nin; k++) {
            kn_node *to = n->edge[k].node;
            if (bare && n->edge[k].leaf)
                return fail_bare(n->edge[k].leaf);
            if (to) {
                to->bare = to->bare || bare;
                to->scaled = to->scaled || scaled;
            }
        }
    }
    return true;
}

bool kn_engine_find_scale(kn_engine *e, kn_node *const *root, int roots)
{
    kn_tensor *scale = NULL;
    if (e->caught) /* its gradients go to the caller, as they are */
        return true;
    if (!find(e, &scale))
        return false;
    if (e->outer && e->outer->number && scale != e->outer->scale)
        return kn_fail("kn_backward: the backward around this one has another loss scale, and "
                       "their gradients add up");
    e->scale = scale ? kn_tensor_ref(scale) : NULL;
    return !scale || all_scaled(e, root, roots);
}
