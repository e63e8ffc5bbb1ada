/* autograd/node.c: nodes of the tape, their edges, saved tensors and hooks.
 *
 * Ownership: a tensor holds its node; a node holds the nodes of its inputs (edges), the leaves it
 * feeds, and the saved tensors. Saved outputs are kept as bare views of the output's storage,
 * because the output itself holds the node. Dropping the last output drops the graph behind it. */
#include "autograd/autograd_internal.h"
#include <string.h>

static void drop_saved(kn_saved *s, int n)
{
    for (int i = 0; s && i < n; i++) {
        kn_tensor_free(s[i].tensor);
        s[i].tensor = NULL;
    }
}

bool kn_save(kn_saved *s, const kn_tensor *t)
{
    s->tensor = kn_tensor_on(t->storage, t->offset, t->dtype, t->ndim, t->shape, t->stride, false);
    s->version = t->storage->version;
    return s->tensor != NULL;
}

void kn_node_free_saved(kn_node *n)
{
    drop_saved(n->saved_in, n->nin);
    drop_saved(n->saved_out, n->nout);
    drop_saved(n->kept, KN_MAX_OUT);
    n->freed = true;
}

kn_node *kn_node_new(const kn_op *op, int nin, int nout)
{
    kn_node *n = kn_host_calloc(1, sizeof *n);
    if (!n)
        return NULL;
    kn_context *c = kn_context_get();
    n->refs = 1;
    n->op = op;
    n->nin = nin;
    n->nout = nout;
    n->seq = ++c->node_seq;
    n->edge = kn_host_calloc((size_t)nin + 1, sizeof *n->edge);
    n->in_spec = kn_host_calloc((size_t)nin + 1, sizeof *n->in_spec);
    n->out_spec = kn_host_calloc((size_t)nout, sizeof *n->out_spec);
    n->saved_in = kn_host_calloc((size_t)nin + 1, sizeof *n->saved_in);
    n->saved_out = kn_host_calloc((size_t)nout, sizeof *n->saved_out);
    if (!n->edge || !n->in_spec || !n->out_spec || !n->saved_in || !n->saved_out) {
        kn_node_unref(n);
        return NULL;
    }
    n->frame = c->frame;
    if (n->frame)
        n->frame->refs++;
    return n;
}

/* Frees one node; the nodes it alone held are pushed on the list instead of recursing, because a
 * long chain of operations would overflow the stack. */
static void destroy(kn_node *n, kn_node **list)
{
    for (int i = 0; n->edge && i < n->nin; i++) {
        kn_node *p = n->edge[i].node;
        if (p && --p->refs == 0) {
            p->mark = (uint64_t)(uintptr_t)*list; /* reuse as the list's link */
            *list = p;
        }
        kn_tensor_free(n->edge[i].leaf);
    }
    drop_saved(n->saved_in, n->nin);
    drop_saved(n->saved_out, n->nout);
    drop_saved(n->kept, KN_MAX_OUT);
    for (int i = 0; i < n->nout; i++)
        kn_tensor_free(n->dout[i]);
    for (int i = 0; i < n->ntouch; i++)
        kn_tensor_free(n->touch[i]);
    while (n->hooks) {
        kn_hook_entry *next = n->hooks->next;
        kn_host_free(n->hooks);
        n->hooks = next;
    }
    if (n->free_attr)
        n->free_attr(n->attr);
    kn_frame_unref(n->frame);
    kn_host_free(n->touch);
    kn_host_free(n->attr);
    kn_host_free(n->edge);
    kn_host_free(n->in_spec);
    kn_host_free(n->out_spec);
    kn_host_free(n->saved_in);
    kn_host_free(n->saved_out);
    kn_host_free(n);
}

void kn_node_unref(kn_node *n)
{
    if (!n || --n->refs > 0)
        return;
    kn_node *list = NULL;
    destroy(n, &list);
    while (list) {
        kn_node *next = list;
        list = (kn_node *)(uintptr_t)next->mark;
        destroy(next, &list);
    }
}

static kn_spec spec_of(const kn_tensor *t)
{
    kn_spec s = { .dtype = t->dtype, .ndim = t->ndim, .device = kn_device_of(t) };
    memcpy(s.shape, t->shape, sizeof s.shape);
    return s;
}

void kn_node_set_output(kn_node *n, int i, kn_tensor *t)
{
    n->out_spec[i] = spec_of(t);
    t->node = n;
    n->refs++;
    t->out_index = i;
    t->requires_grad = true;
}

bool kn_node_set_input(kn_node *n, int i, kn_tensor *t)
{
    if (!t)
        return true;
    n->in_spec[i] = spec_of(t);
    if (!t->requires_grad)
        return true;
    if (t->node) {
        n->edge[i].node = t->node;
        n->edge[i].out_index = t->out_index;
        t->node->refs++;
        return true;
    }
    if (!kn_leaf_of(t))
        return false;
    n->edge[i].leaf = kn_tensor_ref(t);
    return true;
}

/* ---- hooks --------------------------------------------------------------------------------- */

static kn_hook_entry *add_hook(kn_tensor *t, const char *what)
{
    if (!kn_check(t, what))
        return NULL;
    if (!t->requires_grad) {
        kn_fail("%s: the tensor doesn't require grad, so no gradient will come by; call "
                "kn_require_grad on a leaf before it is used",
                what);
        return NULL;
    }
    kn_leaf *leaf = t->node ? NULL : kn_leaf_of(t);
    if (!t->node && !leaf)
        return NULL;
    kn_hook_entry *h = kn_host_calloc(1, sizeof *h);
    if (!h)
        return NULL;
    kn_hook_entry **at = t->node ? &t->node->hooks : &leaf->hooks;
    while (*at) /* hooks run in the order in which they were added */
        at = &(*at)->next;
    *at = h;
    h->out_index = t->out_index;
    return h;
}

bool kn_on_grad(kn_tensor *t, kn_tensor_hook hook, void *arg)
{
    kn_hook_entry *h = add_hook(t, "kn_on_grad");
    if (!h)
        return false;
    h->hook = hook;
    h->arg = arg;
    return true;
}

bool kn_on_node(kn_tensor *t, kn_node_hook pre, kn_node_hook post, void *arg)
{
    if (!kn_check(t, "kn_on_node"))
        return false;
    if (!t->node)
        return kn_fail("kn_on_node: no operation on the tape made this tensor");
    kn_hook_entry *h = add_hook(t, "kn_on_node");
    if (!h)
        return false;
    h->pre = pre;
    h->post = post;
    h->arg = arg;
    return true;
}

bool kn_on_accumulated(kn_tensor *t, kn_leaf_hook hook, void *arg)
{
    if (!kn_check(t, "kn_on_accumulated"))
        return false;
    if (t->node || !t->requires_grad)
        return kn_fail("kn_on_accumulated: only leaves that require grad accumulate one");
    kn_leaf *leaf = kn_leaf_of(t);
    struct kn_leaf_hook_entry *h = leaf ? kn_host_calloc(1, sizeof *h) : NULL;
    if (!h)
        return false;
    h->hook = hook;
    h->arg = arg;
    struct kn_leaf_hook_entry **at = &leaf->post;
    while (*at)
        at = &(*at)->next;
    *at = h;
    return true;
}
