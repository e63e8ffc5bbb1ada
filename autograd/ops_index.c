/* autograd/ops_index.c: picking slices by index, and embedding (rows of a table). */
#include "autograd/ops.h"
#include <string.h>

static bool index_checks(const kn_op_call *c, const kn_tensor *index)
{
    return index->dtype == KN_I64 || index->dtype == KN_I32 ||
           kn_fail("%s: indices must be i64 or i32, got %s", c->op->name,
                   kn_dtype_name(index->dtype));
}

/* ---- embedding: y[..., :] = w[index[...], :] ------------------------------------------------- */

static bool embedding_shape(kn_op_call *c)
{
    const kn_tensor *w = c->in[0], *index = c->in[1];
    char buf[128];
    if (!index_checks(c, index))
        return false;
    if (w->ndim != 2 || index->ndim + 1 > KN_MAX_DIMS)
        return kn_fail("embedding: the table is %s, should be 2-d [count, dim]",
                       kn_describe(w, buf, sizeof buf));
    c->spec[0] = kn_spec_like(index);
    c->spec[0].dtype = w->dtype;
    c->spec[0].shape[c->spec[0].ndim++] = w->shape[1];
    return true;
}

static kn_array flat(const kn_tensor *t)
{
    return kn_array_make(kn_array_of(t).data, t->dtype, 1, (int64_t[]){ kn_numel(t) });
}

static bool embedding_forward(kn_op_call *c)
{
    const kn_tensor *w = c->in[0];
    return KN_RUN(
        c->out[0], KN_K_INDEX_SELECT,
        ((kn_index_select_args){ kn_rows_of(c->out[0]), kn_array_of(w), flat(c->in[1]), 0 }));
}

/* Only the rows that were used change: they are added into the table's gradient in place. */
static bool embedding_backward(kn_op_grad *g)
{
    bool fresh;
    kn_tensor *dw = kn_grad_into(g, 0, &fresh), *dy = kn_contiguous(g->dout[0]);
    if (!dw || !dy)
        return false;
    if (fresh && !KN_RUN(dw, KN_K_FILL, ((kn_fill_args){ kn_array_of(dw), 0, 0 })))
        return false;
    g->din[0] = dw;
    return KN_RUN(dw, KN_K_INDEX_ADD,
                  ((kn_index_add_args){ kn_array_of(dw), kn_rows_of(dy), flat(g->in[1]), 0 }));
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
    char buf[128];
    if (!index_checks(c, c->in[1]))
        return false;
    if (c->in[1]->ndim != 1)
        return kn_fail("index: the index is %s, should be 1-d",
                       kn_describe(c->in[1], buf, sizeof buf));
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
    bool fresh;
    kn_tensor *dx = kn_grad_into(g, 0, &fresh);
    if (!dx || (fresh && !KN_RUN(dx, KN_K_FILL, ((kn_fill_args){ kn_array_of(dx), 0, 0 }))))
        return false;
    g->din[0] = dx;
    return KN_RUN(dx, KN_K_INDEX_ADD,
                  ((kn_index_add_args){ kn_array_of(dx), kn_array_of(g->dout[0]),
                                        kn_array_of(g->in[1]), dim }));
}

KN_OP(kn_op_index, .name = "index", .attr_size = sizeof(int), .save_in = 2, .const_in = 2,
      .shape = index_shape, .forward = index_forward, .backward = index_backward);

kn_tensor *kn_index_select(kn_tensor *x, int dim, kn_tensor *index)
{
    if (!kn_ok() || !kn_check(x, "index"))
        return NULL;
    int d = kn_dim("index", x, dim);
    return d < 0 ? NULL : kn_apply1(&kn_op_index, 2, (kn_tensor *[]){ x, index }, 0, &d);
}
