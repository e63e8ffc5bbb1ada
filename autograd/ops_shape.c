/* autograd/ops_shape.c: views (reshape, permute, slice, expand, split) and concatenation. Views
 * share the input's storage; their backward is the inverse view or a copy into zeros. */
#include "autograd/operands.h"
#include "autograd/ops.h"
#include "autograd/second.h"
#include <string.h>

/* ---- reshape --------------------------------------------------------------------------------- */

typedef struct shape_attr {
    int n;
    int64_t size[KN_MAX_DIMS]; /* sizes, an order of dims, ... */
} shape_attr;

/* Writes the n sizes (or dims) of a call as "[2, -1]", for messages. */
static const char *sizes(int n, const int64_t *size, char *buf, size_t room)
{
    size_t used = (size_t)snprintf(buf, room, "[");
    for (int d = 0; d < n && used < room; d++)
        used +=
            (size_t)snprintf(buf + used, room - used, "%s%lld", d ? ", " : "", (long long)size[d]);
    if (used < room)
        snprintf(buf + used, room - used, "]");
    return buf;
}

static bool reshape_part(kn_op_call *c)
{
    const shape_attr *a = c->attr;
    kn_spec *s = &c->spec[0];
    *s = kn_spec_like(c->in[0]);
    s->ndim = a->n;
    memcpy(s->shape, a->size, sizeof s->shape);
    return kn_view_strides(c->in[0], a->n, a->size, s->stride);
}

static bool reshape_shape(kn_op_call *c)
{
    const shape_attr *a = c->attr;
    if (reshape_part(c))
        return true;
    char to[192];
    return kn_fail(
        "view: the strides of %s don't allow the shape %s without a copy; use kn_reshape",
        KN_SHOWN(c->in[0]), sizes(a->n, a->size, to, sizeof to));
}

static bool reshape_backward(kn_op_grad *g)
{
    const kn_spec *x = &g->in_spec[0];
    kn_tensor *dy = g->dout[0];
    int64_t stride[KN_MAX_DIMS];
    if (kn_view_strides(dy, x->ndim, x->shape, stride)) {
        g->din[0] = kn_tensor_alias(dy, 0, x->ndim, x->shape, stride);
        return g->din[0] != NULL;
    }
    kn_tensor *dx = kn_grad_out(g, 0);
    if (!dx)
        return false;
    kn_array to = kn_array_make(kn_array_of(dx).data, dx->dtype, dy->ndim, dy->shape);
    return kn_array_copy(dx, to, kn_array_of(dy));
}

KN_OP(kn_op_reshape, .name = "reshape", .attr_size = sizeof(shape_attr), .view = true,
      .shape = reshape_shape, .part = reshape_part, .backward = reshape_backward,
      .on_tape = kn_linear_on_tape);

bool kn_sizes_of(const char *op, const char *where, int64_t count, int n, const int64_t *given,
                 int64_t *sizes)
{
    int64_t known = 1;
    int open = -1;
    for (int d = 0; d < n; d++) {
        sizes[d] = given[d];
        if (given[d] == -1 && open < 0)
            open = d;
        else if (given[d] < 0 || __builtin_mul_overflow(known, given[d], &known))
            return kn_fail("%s: size %lld %s %d cannot be (one size may be -1)", op,
                           (long long)given[d], where, d);
    }
    if (open < 0)
        return known == count;
    sizes[open] = known > 0 ? count / known : -1;
    return known > 0 && count % known == 0;
}

/* Fills in a size of -1 and checks the element count. */
static bool resolve(const char *op, const kn_tensor *x, int n, const int64_t *shape, shape_attr *a)
{
    char asked[192];
    if (n < 0 || n > KN_MAX_DIMS)
        return kn_fail("%s: %d dims; at most %d are supported", op, n, KN_MAX_DIMS);
    if (n > 0 && !kn_given(shape, op, "the shape"))
        return false;
    a->n = n;
    return kn_sizes_of(op, "in dim", kn_numel(x), n, shape, a->size) ||
           kn_fail("%s: %s has %lld elements, the shape %s doesn't", op, KN_SHOWN(x),
                   (long long)kn_numel(x), sizes(n, shape, asked, sizeof asked));
}

kn_tensor *kn_view(kn_tensor *x, int ndim, const int64_t *shape)
{
    shape_attr a = { 0 };
    if (!kn_ok() || !kn_check(x, "view") || !resolve("view", x, ndim, shape, &a))
        return NULL;
    return kn_apply1(&kn_op_reshape, 1, &x, 0, &a);
}

kn_tensor *kn_reshape(kn_tensor *x, int ndim, const int64_t *shape)
{
    shape_attr a = { 0 };
    int64_t stride[KN_MAX_DIMS];
    if (!kn_ok() || !kn_check(x, "reshape") || !resolve("reshape", x, ndim, shape, &a))
        return NULL;
    if (!kn_view_strides(x, a.n, a.size, stride))
        x = kn_contiguous(x);
    return x ? kn_apply1(&kn_op_reshape, 1, &x, 0, &a) : NULL;
}

/* ---- permute: y[i_order[0], ...] ------------------------------------------------------------- */

static bool permute_shape(kn_op_call *c)
{
    const shape_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    kn_spec *s = &c->spec[0];
    char asked[192];
    s->dtype = x->dtype;
    s->ndim = x->ndim;
    uint32_t seen = 0;
    for (int d = 0; d < x->ndim; d++) {
        int64_t from = a->size[d];
        if (from < 0 || from >= x->ndim || (seen >> from & 1))
            return kn_fail("permute: the order %s must name each of the %d dims of %s once",
                           sizes(a->n, a->size, asked, sizeof asked), x->ndim, KN_SHOWN(x));
        seen |= 1u << from;
        s->shape[d] = x->shape[from];
        s->stride[d] = x->stride[from];
    }
    return true;
}

static bool permute_backward(kn_op_grad *g)
{
    const shape_attr *a = g->attr;
    const kn_tensor *dy = g->dout[0];
    int64_t shape[KN_MAX_DIMS], stride[KN_MAX_DIMS];
    for (int d = 0; d < dy->ndim; d++) {
        shape[a->size[d]] = dy->shape[d];
        stride[a->size[d]] = dy->stride[d];
    }
    g->din[0] = kn_tensor_alias(dy, 0, dy->ndim, shape, stride);
    return g->din[0] != NULL;
}

KN_OP(kn_op_permute, .name = "permute", .attr_size = sizeof(shape_attr), .view = true,
      .shape = permute_shape, .part = permute_shape, .backward = permute_backward,
      .on_tape = kn_linear_on_tape);

kn_tensor *kn_permute(kn_tensor *x, int n, const int64_t *order)
{
    shape_attr a = { .n = n };
    if (!kn_ok() || !kn_check(x, "permute"))
        return NULL;
    if (n != x->ndim)
        return kn_fail_null("permute: %d dims are listed, %s has %d", n, KN_SHOWN(x), x->ndim);
    if (n > 0 && !kn_given(order, "kn_permute", "the order"))
        return NULL;
    for (int d = 0; d < n; d++)
        a.size[d] = order[d] < 0 ? order[d] + n : order[d];
    return kn_apply1(&kn_op_permute, 1, &x, 0, &a);
}

kn_tensor *kn_transpose(kn_tensor *x, int dim0, int dim1)
{
    int a = kn_dim("transpose", x, dim0), b = kn_dim("transpose", x, dim1);
    if (b < 0)
        return NULL;
    int64_t order[KN_MAX_DIMS];
    for (int d = 0; d < x->ndim; d++)
        order[d] = d == a ? b : d == b ? a : d;
    return kn_permute(x, x->ndim, order);
}

/* ---- slice and split ------------------------------------------------------------------------- */

/* The gradient of output i, or zeros, into its part of dx. */
static bool put(kn_op_grad *g, int i, kn_tensor *dx, kn_array part)
{
    if (!g->dout[i])
        return kn_array_fill(dx, part, 0, 0);
    return kn_grad_in_place(g, i) || kn_array_copy(dx, part, kn_array_of(g->dout[i]));
}

static bool slice_shape(kn_op_call *c)
{
    const kn_slice_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    kn_spec *s = &c->spec[0];
    if (a->begin < 0 || a->end < a->begin || a->end > x->shape[a->dim])
        return kn_fail("slice: [%lld, %lld) doesn't lie in dim %d of size %lld",
                       (long long)a->begin, (long long)a->end, a->dim, (long long)x->shape[a->dim]);
    *s = kn_spec_like(x);
    memcpy(s->stride, x->stride, sizeof s->stride);
    s->shape[a->dim] = a->end - a->begin;
    s->offset = a->begin * x->stride[a->dim];
    return true;
}

static bool slice_backward(kn_op_grad *g)
{
    const kn_slice_attr *a = g->attr;
    kn_tensor *whole = kn_grad_whole(g), *dx = whole ? whole : kn_grad_zeros(g, 0);
    if (!dx)
        return false;
    if (whole)
        kn_grad_came(g);
    return put(g, 0, dx, kn_part(dx, a->dim, a->begin, a->end - a->begin));
}

KN_OP(kn_op_slice, .name = "slice", .attr_size = sizeof(kn_slice_attr), .view = true,
      .shape = slice_shape, .part = slice_shape, .slice = true, .backward = slice_backward,
      .on_tape = kn_linear_on_tape);

kn_tensor *kn_slice(kn_tensor *x, int dim, int64_t begin, int64_t end)
{
    kn_slice_attr a = { kn_dim("slice", x, dim), begin, end };
    return a.dim < 0 ? NULL : kn_apply1(&kn_op_slice, 1, &x, 0, &a);
}

typedef struct split_attr {
    int dim;
    int64_t size[KN_MAX_OUT];
} split_attr;

static bool split_shape(kn_op_call *c)
{
    const split_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    int64_t at = 0;
    for (int i = 0; i < c->nout; i++) {
        c->spec[i] = kn_spec_like(x);
        memcpy(c->spec[i].stride, x->stride, sizeof x->stride);
        c->spec[i].shape[a->dim] = a->size[i];
        c->spec[i].offset = at * x->stride[a->dim];
        at += a->size[i];
    }
    return true;
}

static bool split_backward(kn_op_grad *g)
{
    const split_attr *a = g->attr;
    kn_tensor *whole = kn_grad_whole(g), *dx = whole ? whole : kn_grad_out(g, 0);
    int64_t at = 0;
    for (int i = 0; dx && i < g->nout; i++) {
        if (!put(g, i, dx, kn_part(dx, a->dim, at, a->size[i])))
            return false;
        at += a->size[i];
    }
    g->din[0] = dx;
    return dx != NULL;
}

KN_OP(kn_op_split, .name = "split", .attr_size = sizeof(split_attr), .view = true,
      .shape = split_shape, .part = split_shape, .backward = split_backward,
      .on_tape = kn_linear_on_tape);

int kn_group_of(int n, int most)
{
    return n / most + (n % most != 0);
}

/* n parts of size[i], or where that is NULL of each. More than a call gives are parts of parts. */
static bool cut(kn_tensor *x, int dim, int n, const int64_t *size, int64_t each, kn_tensor **out)
{
    const int group = kn_group_of(n, KN_MAX_OUT), groups = kn_group_of(n, group);
    kn_tensor *held[KN_MAX_OUT], **part = group == 1 ? out : held;
    split_attr a = { .dim = dim };
    for (int i = 0; i < n; i++)
        a.size[i / group] += size ? size[i] : each;
    bool ok = kn_apply(&kn_op_split, 1, &x, 0, &a, groups, part);
    for (int i = 0; ok && group > 1 && i < groups; i++) {
        const int at = i * group, some = n - at < group ? n - at : group;
        ok = cut(part[i], dim, some, size ? size + at : NULL, each, out + at);
    }
    return ok;
}

/* Checks x, dim and the number of parts, and begins with no parts; x's dim, or -1. */
static int split_begin(const char *op, const kn_tensor *x, int dim, int n, kn_tensor **out)
{
    if (!kn_given(out, op, "the place for the parts"))
        return -1;
    for (int i = 0; i < n; i++)
        out[i] = NULL;
    return n < 1 ? kn_fail("%s: %d parts; at least 1 is needed", op, n) - 1 : kn_dim(op, x, dim);
}

bool kn_chunk(kn_tensor *x, int dim, int n, kn_tensor **out)
{
    const int d = split_begin("chunk", x, dim, n, out);
    if (d < 0)
        return false;
    if (x->shape[d] % n)
        return kn_fail("chunk: dim %d of %s doesn't divide by %d", dim, KN_SHOWN(x), n);
    return cut(x, d, n, NULL, x->shape[d] / n, out);
}

bool kn_split(kn_tensor *x, int dim, int n, const int64_t *part, kn_tensor **out)
{
    char asked[192];
    const int d = split_begin("split", x, dim, n, out);
    if (d < 0 || !kn_given(part, "split", "the sizes"))
        return false;
    int64_t left = x->shape[d];
    bool fits = true;
    for (int i = 0; i < n; i++) {
        fits = fits && part[i] >= 0 && part[i] <= left;
        left -= fits ? part[i] : 0;
    }
    if (!fits || left != 0)
        return kn_fail("split: the sizes %s of the parts aren't those of dim %d of %s",
                       sizes(n, part, asked, sizeof asked), dim, KN_SHOWN(x));
    return cut(x, d, n, part, 0, out);
}

/* ---- expand ---------------------------------------------------------------------------------- */

static bool expand_shape(kn_op_call *c)
{
    const shape_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    kn_spec *s = &c->spec[0];
    s->dtype = x->dtype;
    s->ndim = a->n;
    int lead = a->n - x->ndim;
    for (int d = 0; d < a->n; d++) {
        int64_t have = d < lead ? 1 : x->shape[d - lead];
        int64_t want = a->size[d] == -1 && d >= lead ? have : a->size[d];
        if (lead < 0 || want < 0 || (have != want && have != 1))
            return kn_fail("expand: size %lld of dim %d cannot become %lld (only 1 stretches)",
                           (long long)have, d - lead, (long long)want);
        s->shape[d] = want;
        s->stride[d] = d < lead || have != want ? 0 : x->stride[d - lead];
    }
    return true;
}

static bool expand_backward(kn_op_grad *g)
{
    g->din[0] = kn_grad_unbroadcast(g, 0, g->dout[0]);
    return g->din[0] != NULL;
}

KN_OP(kn_op_expand, .name = "expand", .attr_size = sizeof(shape_attr), .view = true,
      .shape = expand_shape, .backward = expand_backward, .on_tape = expand_backward);

kn_tensor *kn_expand(kn_tensor *x, int ndim, const int64_t *shape)
{
    shape_attr a = { .n = ndim };
    if (!kn_ok() || !kn_check(x, "expand"))
        return NULL;
    if (ndim < x->ndim || ndim > KN_MAX_DIMS)
        return kn_fail_null(
            "expand: to %d dims from %d; at least as many and at most %d are possible", ndim,
            x->ndim, KN_MAX_DIMS);
    if (ndim > 0 && !kn_given(shape, "expand", "the shape"))
        return NULL;
    for (int d = 0; d < ndim; d++)
        a.size[d] = shape[d];
    return kn_apply1(&kn_op_expand, 1, &x, 0, &a);
}

/* ---- cat ------------------------------------------------------------------------------------- */

/* Argument number i fits behind the first one. */
static bool cat_fits(const kn_tensor *first, const kn_tensor *x, int i, int dim)
{
    bool ok = x->ndim == first->ndim && x->dtype == first->dtype;
    for (int d = 0; ok && d < x->ndim; d++)
        ok = d == dim || x->shape[d] == first->shape[d];
    return ok || kn_fail("cat: argument %d is %s, argument 1 is %s; all but dim %d must agree",
                         i + 1, KN_SHOWN(x), KN_SHOWN(first), dim);
}

static bool cat_shape(kn_op_call *c)
{
    const int dim = *(const int *)c->attr;
    kn_spec *s = &c->spec[0];
    *s = kn_spec_like(c->in[0]);
    s->shape[dim] = 0;
    for (int i = 0; i < c->nin; i++) {
        if (!cat_fits(c->in[0], c->in[i], i, dim))
            return false;
        s->shape[dim] += c->in[i]->shape[dim];
    }
    return true;
}

static bool cat_forward(kn_op_call *c)
{
    const int dim = *(const int *)c->attr;
    int64_t at = 0;
    for (int i = 0; i < c->nin; i++) {
        int64_t size = c->in[i]->shape[dim];
        if (!kn_array_copy(c->out[0], kn_part(c->out[0], dim, at, size), kn_array_of(c->in[i])))
            return false;
        at += size;
    }
    return true;
}

static bool cat_backward(kn_op_grad *g)
{
    const int dim = *(const int *)g->attr;
    int64_t at = 0;
    for (int i = 0; i < g->nin; i++) {
        kn_tensor *dy = g->dout[0];
        const kn_spec *x = &g->in_spec[i];
        if (g->want[i])
            g->din[i] = kn_tensor_alias(dy, at * dy->stride[dim], x->ndim, x->shape, dy->stride);
        at += x->shape[dim];
    }
    return kn_ok();
}

static bool cat_on_tape(kn_op_grad *g)
{
    const int dim = *(const int *)g->attr;
    int64_t at = 0;
    for (int i = 0; i < g->nin; i++) {
        const int64_t end = at + g->in_spec[i].shape[dim];
        if (g->want[i] && !(g->din[i] = kn_slice(g->dout[0], dim, at, end)))
            return false;
        at = end;
    }
    return true;
}

KN_OP(kn_op_cat, .name = "cat", .attr_size = sizeof(int), .shape = cat_shape,
      .forward = cat_forward, .backward = cat_backward, .on_tape = cat_on_tape);

/* More tensors than a call takes are joined in groups first. */
static kn_tensor *join(kn_tensor *const *x, int n, int dim)
{
    const int group = kn_group_of(n, KN_MAX_IN), groups = kn_group_of(n, group);
    kn_tensor *held[KN_MAX_IN];
    for (int i = 0; group > 1 && i < groups; i++) {
        const int at = i * group;
        held[i] = join(x + at, n - at < group ? n - at : group, dim);
        if (!held[i])
            return NULL;
    }
    return kn_apply1(&kn_op_cat, groups, group > 1 ? held : x, 0, &dim);
}

kn_tensor *kn_cat(kn_tensor *const *x, int n, int dim)
{
    if (!kn_ok())
        return NULL;
    if (n < 1)
        return kn_fail_null("cat: %d tensors; at least 1 is needed", n);
    if (!kn_given(x, "kn_cat", "the list of tensors") || !kn_check(x[0], "cat"))
        return NULL;
    for (int i = 1; i < n; i++)
        if (!kn_check(x[i], "cat"))
            return NULL;
    KN_OPERANDS_OF(n < KN_MAX_IN ? n : KN_MAX_IN, x);
    dim = kn_dim("cat", x[0], dim);
    bool fits = dim >= 0;
    for (int i = 1; fits && i < n; i++)
        fits = cat_fits(x[0], x[i], i, dim);
    return fits ? join(x, n, dim) : NULL;
}
