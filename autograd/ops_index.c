/* autograd/ops_index.c: picking slices by index, and embedding (rows of a table). */
#include "autograd/ops.h"
#include "autograd/rows.h"
#include "autograd/second.h"

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
    kn_tensor *w = c->in[0];
    if (kn_table_of(w))
        return kn_rows_pick(w, c->in[1], c->out[0]);
    return KN_RUN(
        c->out[0], KN_K_INDEX_SELECT,
        ((kn_index_select_args){ kn_rows_of(c->out[0]), kn_array_of(w), kn_flat(c->in[1]), 0 }));
}

/* Gradients of positions that pick the row `padding` are zeros. */
static kn_tensor *without_padding(kn_tensor *dy, kn_tensor *index, int64_t padding)
{
    if (padding < 0 || !dy)
        return dy;
    int64_t shape[KN_MAX_DIMS];
    for (int d = 0; d < dy->ndim; d++)
        shape[d] = d < index->ndim ? index->shape[d] : 1;
    kn_tensor *is = kn_eq(index, kn_full_like(index, (double)padding));
    return kn_masked_fill(dy, kn_reshape(is, dy->ndim, shape), 0);
}

/* Only the rows that were used change: they are added into the table's gradient in place. */
static bool embedding_backward(kn_op_grad *g)
{
    const int64_t padding = *(const int64_t *)g->attr;
    kn_tensor *leaf = g->want[0] ? g->node->edge[0].leaf : NULL;
    if (kn_table_of(leaf))
        return kn_rows_note(leaf->leaf, g->in[1], g->dout[0], padding);
    kn_tensor *dw = kn_grad_sum(g, 0),
              *dy = kn_contiguous(without_padding(g->dout[0], g->in[1], padding));
    return dw && dy &&
           KN_RUN(dw, KN_K_INDEX_ADD,
                  ((kn_index_add_args){ kn_array_of(dw), kn_rows_of(dy), kn_flat(g->in[1]), 0 }));
}

static bool embedding_on_tape(kn_op_grad *g)
{
    const int64_t padding = *(const int64_t *)g->attr;
    return padding < 0 ? kn_linear_on_tape(g)
                       : kn_fail("embedding: a gradient of a gradient of a table with .padding_idx "
                                 "isn't there; multiply by a mask instead");
}

KN_OP(kn_op_embedding, .name = "embedding", .makes = true, .attr_size = sizeof(int64_t),
      .save_in = 2, .const_in = 2, .shape = embedding_shape, .forward = embedding_forward,
      .backward = embedding_backward, .on_tape = embedding_on_tape);

/* *padding: the row that .padding_idx = given means, or -1. */
bool kn_padding_row(const char *op, const kn_tensor *w, int64_t given, int64_t *padding)
{
    const int64_t n = w->ndim == 2 ? w->shape[0] : 0;
    *padding = given == KN_ZERO ? 0 : given == 0 ? -1 : given < 0 ? given + n : given;
    return given == 0 || (*padding >= 0 && *padding < n) ||
           kn_fail("%s: .padding_idx is %lld, but the table is %s; give one of its rows (KN_ZERO: "
                   "row 0)",
                   op, (long long)(given == KN_ZERO ? 0 : given), KN_SHOWN(w));
}

kn_tensor *kn_embedding_(kn_tensor *w, kn_tensor *index, kn_embedding_options o)
{
    int64_t padding;
    if (!kn_ok() || !kn_check(w, "embedding") || !kn_check(index, "embedding") ||
        !kn_padding_row("embedding", w, o.padding_idx, &padding))
        return NULL;
    index = kn_contiguous(index);
    return kn_apply1(&kn_op_embedding, 2, (kn_tensor *[]){ w, index }, 0, &padding);
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
      .shape = index_shape, .forward = index_forward, .backward = index_backward,
      .on_tape = kn_linear_on_tape);

kn_tensor *kn_index_select(kn_tensor *x, int dim, kn_tensor *index)
{
    if (kn_is_number(x))
        return kn_number_of(kn_index_select(kn_row_of(x), dim, kn_row_of(index)));
    index = kn_row_of(index);
    int d = kn_dim("index", x, dim);
    return d < 0 ? NULL : kn_apply1(&kn_op_index, 2, (kn_tensor *[]){ x, index }, 0, &d);
}
