/* autograd/node.c: nodes of the tape, their edges, saved tensors and hooks.
 *
 * Ownership: a tensor holds its node; a node holds the nodes of its inputs (edges), the leaves it
 * feeds, and the saved tensors. Saved outputs are kept as bare views of the output's storage,
 * because the output itself holds the node. Dropping the last output drops the graph behind it. */
#include "autograd/hooks.h"
#include "autograd/record.h"
#include <string.h>

void kn_saved_drop(kn_saved *s)
{
    kn_tensor_free(s->tensor);
    s->tensor = NULL;
    if (s->record)
        kn_record_forget(s);
}

static void drop_saved(kn_saved *s, int n)
{
    for (int i = 0; s && i < n; i++)
        kn_saved_drop(&s[i]);
}

bool kn_save_bare(kn_saved *s, const kn_tensor *t)
{
    s->tensor = kn_tensor_on(t->storage, t->offset, t->dtype, t->ndim, t->shape, t->stride, false);
    s->version = kn_version_of(t);
    return s->tensor != NULL;
}

bool kn_save(kn_saved *s, const kn_tensor *t)
{
    if (kn_record_running())
        return kn_record_save(s, t);
    const kn_context *c = kn_context_get();
    if (c->on_save)
        c->on_save(c->on_save_arg, t);
    return kn_save_bare(s, t);
}

void kn_node_free_saved(kn_node *n)
{
    drop_saved(n->saved_in, n->nin);
    drop_saved(n->saved_out, n->nout);
    drop_saved(n->kept, KN_MAX_OUT);
    kn_tensor_free(n->scale);
    n->scale = NULL;
    n->freed = true;
}

static void drop_again(kn_saved *s, int n)
{
    for (int i = 0; i < n; i++)
        if (s[i].record) {
            kn_tensor_free(s[i].tensor);
            s[i].tensor = NULL;
        }
}

void kn_node_free_again(kn_node *n)
{
    drop_again(n->saved_in, n->nin);
    drop_again(n->saved_out, n->nout);
    drop_again(n->kept, KN_MAX_OUT);
}

void kn_node_drop_parts(kn_node *n)
{
    for (int64_t i = 0; i < n->parts; i++)
        kn_tensor_free(n->part[i].grad);
    n->parts = 0;
}

/* A node, its arrays and the attributes of an operation that has some are one allocation. */
kn_node *kn_node_new(const kn_op *op, int nin, int nout)
{
    const size_t in = (size_t)nin + 1, out = (size_t)nout;
    kn_node *n;
    n = kn_host_calloc(1, sizeof *n + in * (sizeof *n->edge + sizeof *n->in_spec) +
                              out * sizeof *n->out_spec + (in + out) * sizeof *n->saved_in +
                              op->attr_size);
    if (!n)
        return NULL;
    kn_context *c = kn_context_get();
    n->refs = 1;
    n->op = op;
    n->nin = nin;
    n->nout = nout;
    n->seq = ++c->node_seq;
    n->in_spec = (kn_spec *)(n + 1);
    n->out_spec = n->in_spec + in;
    n->saved_in = (kn_saved *)(n->out_spec + out);
    n->saved_out = n->saved_in + in;
    n->edge = (kn_edge *)(n->saved_out + out);
    n->attr = op->attr_size ? n->edge + in : NULL;
    n->place = (kn_place){ c->user_file, c->user_line };
    n->freed = kn_record_replays(); /* its tensors go to the forward's node */
    n->frame = c->frame;
    if (n->frame)
        n->frame->refs++;
    return n;
}

/* Frees one node; the nodes it alone held are pushed on the list instead of recursing, because a
 * long chain of operations would overflow the stack. */
static void destroy(kn_node *n, kn_node **list)
{
    for (int i = 0; i < n->nin; i++) {
        kn_node *p = n->edge[i].node;
        if (p && --p->refs == 0) {
            p->mark = (uint64_t)(uintptr_t)*list; /* reuse as the list's link */
            *list = p;
        }
        kn_tensor_free(n->edge[i].leaf);
    }
    kn_node_free_saved(n);
    for (int i = 0; i < n->nout; i++)
        kn_tensor_free(n->dout[i]);
    kn_hooks_free(n->hooks);
    if (n->free_attr)
        n->free_attr(n->attr);
    if (n->frame && n->frame->grads && n->frame->grads->results == n)
        n->frame->grads->results = NULL;
    kn_node_drop_parts(n);
    kn_node_drop_places(n);
    kn_host_free(n->part);
    kn_frame_unref(n->frame);
    if (!n->op->attr_size)
        kn_host_free(n->attr);
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

char *kn_spec_describe(const kn_spec *s, char *text, size_t size)
{
    const kn_array a = kn_array_make((void *)16, s->dtype, s->ndim, s->shape);
    return kn_array_describe(&a, text, size);
}

/* s is zero before. In place: a struct that is returned by value is written word by word and copied
 * by vectors, whose loads wait for the words. */
static void set_spec(kn_spec *s, const kn_tensor *t)
{
    s->dtype = t->dtype;
    s->ndim = t->ndim;
    s->device = kn_device_of(t);
    s->order = kn_order_of(t);
    memcpy(s->shape, t->shape, sizeof s->shape);
}

void kn_node_set_output(kn_node *n, int i, kn_tensor *t)
{
    set_spec(&n->out_spec[i], t);
    t->node = n;
    n->refs++;
    t->out_index = i;
    t->requires_grad = true;
}

bool kn_node_set_input(kn_node *n, int i, kn_tensor *t)
{
    if (!t)
        return true;
    if (t->first_order && !(n->op->const_in >> i & 1))
        return kn_fail("%s: argument %d is made of a gradient of kn_grad_of without .create_graph, "
                       "through which nothing is differentiated; kn_detach takes it as a constant",
                       n->op->name, i + 1);
    set_spec(&n->in_spec[i], t);
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

bool kn_with_graph(kn_tensor **t, kn_node *node, int out, kn_tensor *leaf)
{
    if (!*t || (!node && !leaf) || !kn_dtype_is_float((*t)->dtype))
        return true;
    if (leaf) {
        *t = leaf;
        return true;
    }
    *t = kn_tensor_alias(*t, 0, (*t)->ndim, (*t)->shape, (*t)->stride);
    if (!*t)
        return false;
    (*t)->node = node;
    node->refs++;
    (*t)->out_index = out;
    (*t)->requires_grad = true;
    return true;
}
