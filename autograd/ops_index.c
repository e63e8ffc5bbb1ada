/* autograd/ops_index.c: picking slices by index, and embedding (rows of a table). */
#include "autograd/ops.h"
#include <string.h>

/* ---- embedding: y[..., :] = w[index[...], :] ------------------------------------------------- */

static bool embedding_shape(kn_op_call *c)
{
    const kn_tensor *w = c->in[0], *index = c->in[1];
    if (!kn_indices_are_whole(c->op->name, index))
        return false;
    if (w->ndim != 2 || index->ndim + 1 > KN_MAX_DIMS)
        return kn_fail("embedding: the table is %s, should be 2-d [count, dim]", KN_SHOWN(w));
    c->spec[0] = kn_spec_like(index);
    c->spec[0].dtype = w->dtype;
    c->spec[0].shape[c->spec[0].ndim++] = w->shape[1];
    return true;
}

static bool embedding_forward(kn_op_call *c)
{
    const kn_tensor *w = c->in[0];
    return KN_RUN(
        c->out[0], KN_K_INDEX_SELECT,
        ((kn_index_select_args){ kn_rows_of(c->out[0]), kn_array_of(w), kn_flat(c->in[1]), 0 }));
}

/* Only the rows that were used change: they are added into the table's gradient in place. */
static bool embedding_backward(kn_op_grad *g)
{
    kn_tensor *dw = kn_grad_sum(g, 0), *dy = kn_contiguous(g->dout[0]);
    return dw && dy &&
           KN_RUN(dw, KN_K_INDEX_ADD,
                  ((kn_index_add_args){ kn_array_of(dw), kn_rows_of(dy), kn_flat(g->in[1]), 0 }));
}

KN_OP(kn_op_embedding, .name = "embedding", .save_in = 2, .const_in = 2, .shape = embedding_shape,
      .forward = embedding_forward, .backward = embedding_backward);

kn_tensor *kn_embedding_(kn_tensor *w, kn_tensor *index)
{
    if (!kn_ok() || !kn_check(index, "embedding"))
        return NULL;
    index = kn_contiguous(index);
    return kn_apply1(&kn_op_embedding, 2, (kn_tensor *[]){ w, index }, 0, NULL);
}

/* ---- index: slices along a dim --------------------------------------------------------------- */

static bool index_shape(kn_op_call *c)
{
    const int dim = *(const int *)c->attr;
    if (!kn_indices_are_whole(c->op->name, c->in[1]))
        return false;
    if (c->in[1]->ndim != 1)
        return kn_fail("index: the index is %s, should be 1-d", KN_SHOWN(c->in[1]));
    c->spec[0] = kn_spec_like(c->in[0]);
    c->spec[0].shape[dim] = c->in[1]->shape[0];
    return true;
}

static bool index_forward(kn_op_call *c)
{
    const int dim = *(const int *)c->attr;
    return KN_RUN(c->out[0], KN_K_INDEX_SELECT,
                  ((kn_index_select_args){ kn_array_of(c->out[0]), kn_array_of(c->in[0]),
                                           kn_array_of(c->in[1]), dim }));
}

static bool index_backward(kn_op_grad *g)
{
    const int dim = *(const int *)g->attr;
    kn_tensor *dx = kn_grad_sum(g, 0);
    return dx && KN_RUN(dx, KN_K_INDEX_ADD,
                        ((kn_index_add_args){ kn_array_of(dx), kn_array_of(g->dout[0]),
                                              kn_array_of(g->in[1]), dim }));
}

KN_OP(kn_op_index, .name = "index", .attr_size = sizeof(int), .save_in = 2, .const_in = 2,
      .shape = index_shape, .forward = index_forward, .backward = index_backward);

kn_tensor *kn_index_select(kn_tensor *x, int dim, kn_tensor *index)
{
    if (!kn_ok() || !kn_check(x, "index"))
        return NULL;
    if (x->ndim == 0)
        return kn_number_of(kn_index_select(kn_row_of(x), dim, kn_row_of(index)));
    index = kn_row_of(index);
    int d = kn_dim("index", x, dim);
    return d < 0 ? NULL : kn_apply1(&kn_op_index, 2, (kn_tensor *[]){ x, index }, 0, &d);
}
