/* autograd/ops_bag.c: embedding bags: rows of a table, reduced over bags of positions. Made of
 * operations: gradients follow, and stay rows where the table keeps them. */
#include "autograd/ops.h"
#include "autograd/rows.h"
#include <math.h>

/* The bags of positions: [B, L] of them, or n of them, each with the number of its bag. */
typedef struct bags {
    kn_embedding_bag_options o;
    int64_t padding, n, count; /* count: of bags, with one behind the last offset */
    kn_tensor *index, *of;     /* of: NULL where positions are [B, L] */
    kn_tensor *hidden;         /* bool, of index's shape with a 1 behind: the row of padding */
} bags;

/* ---- arguments ------------------------------------------------------------------------------- */

static bool good(kn_tensor *w, kn_tensor *index, const kn_embedding_bag_options *o)
{
    const kn_tensor *at = o->offsets, *by = o->per_sample_weights;
    if (index->ndim != (at ? 1 : 2))
        return kn_fail("embedding_bag: the index is %s; it takes [B, L], or [n] with .offsets",
                       KN_SHOWN(index));
    if (at && (at->ndim != 1 || !kn_indices_are_whole("embedding_bag", at) ||
               at->shape[0] < o->include_last_offset))
        return kn_ok() && kn_fail("embedding_bag: .offsets is %s; it takes [B], and one more with "
                                  ".include_last_offset",
                                  KN_SHOWN(at));
    if (o->include_last_offset && !at)
        return kn_fail("embedding_bag: .include_last_offset is for .offsets");
    if (o->mode > KN_BAG_MAX)
        return kn_fail("embedding_bag: .mode is %d; it is one of enum kn_bag_mode", (int)o->mode);
    if (by && o->mode != KN_BAG_SUM)
        return kn_fail("embedding_bag: .per_sample_weights are for .mode = KN_BAG_SUM");
    return !by || (by->dtype == w->dtype && kn_has_shape(by, index->ndim, index->shape)) ||
           kn_fail("embedding_bag: .per_sample_weights is %s; it needs the index's shape, %s, and "
                   "the table's dtype, %s",
                   KN_SHOWN(by), KN_SHOWN(index), kn_dtype_name(w->dtype));
}

/* Position p lies in the last bag that begins at or before it. */
static bool number_bags(bags *x)
{
    kn_tensor *at = kn_cast(x->o.offsets, KN_I64);
    const int64_t more = x->n + 1, all = at ? kn_numel(at) : 0;
    kn_device d = kn_device_of(x->index);
    x->count = all;
    kn_tensor *begun =
        kn_scatter_add(kn_zeros(KN_I64, d, 1, &more), 0, at, kn_ones(KN_I64, d, 1, &all));
    begun = kn_cumsum(begun, 0);
    x->of = begun ? kn_add_scalar(kn_slice(begun, 0, 0, x->n), -1) : NULL;
    return x->of != NULL;
}

static bool begin(bags *x, kn_tensor *w)
{
    x->n = kn_numel(x->index);
    x->count = x->index->shape[0];
    if (!kn_padding_row("embedding_bag", w, x->o.padding_idx, &x->padding) ||
        (x->o.offsets && !number_bags(x)))
        return false;
    if (x->padding < 0)
        return true;
    int64_t shape[3] = { x->index->shape[0], 1, 1 };
    shape[1] = x->of ? 1 : x->index->shape[1];
    x->hidden = kn_eq(x->index, kn_full_like(x->index, (double)x->padding));
    x->hidden = kn_reshape(x->hidden, x->index->ndim + 1, shape);
    return x->hidden != NULL;
}

/* ---- sums and means -------------------------------------------------------------------------- */

/* t[..., C] of positions, added up: [count, C]. */
static kn_tensor *sums(const bags *x, kn_tensor *t)
{
    if (!t || !x->of)
        return t ? kn_sum(t, 1, (int64_t[]){ 1 }, false) : NULL;
    kn_tensor *zero = kn_zeros(t->dtype, kn_device_of(t), KN_SHAPE(x->count, t->shape[1]));
    return kn_index_add(zero, 0, x->of, t);
}

/* Positions that count in each bag, of dtype: [count, 1]. */
static kn_tensor *sizes(const bags *x, kn_dtype dtype)
{
    int64_t shape[3] = { x->index->shape[0], 1, 1 };
    shape[1] = x->of ? 1 : x->index->shape[1];
    kn_tensor *one = kn_ones(dtype, kn_device_of(x->index), x->index->ndim + 1, shape);
    return sums(x, x->hidden ? kn_masked_fill(one, x->hidden, 0) : one);
}

static kn_tensor *weighted(const bags *x, kn_tensor *rows)
{
    kn_tensor *by = x->o.per_sample_weights;
    if (!by || !rows)
        return rows;
    int64_t shape[3] = { by->shape[0], 1, 1 };
    shape[1] = x->of ? 1 : by->shape[1];
    return kn_mul(rows, kn_reshape(kn_cast(by, rows->dtype), by->ndim + 1, shape));
}

static kn_tensor *added(const bags *x, kn_tensor *rows)
{
    if (x->hidden)
        rows = kn_masked_fill(rows, x->hidden, 0);
    kn_tensor *sum = sums(x, weighted(x, rows));
    if (!sum || x->o.mode == KN_BAG_SUM)
        return sum;
    return kn_div(sum, kn_clamp(sizes(x, sum->dtype), 1, INFINITY));
}

/* ---- maxima ---------------------------------------------------------------------------------- */

/* rows[n, C] of bags as [count, L, C], L the size of the largest; *none: bool [count, L, 1]. */
static kn_tensor *padded(const bags *x, kn_tensor *rows, kn_tensor **none)
{
    const kn_device d = kn_device_of(rows);
    const int64_t c = rows->shape[1];
    kn_tensor *size = kn_index_add(kn_zeros(KN_I64, d, KN_SHAPE(x->count)), 0, x->of,
                                   kn_ones(KN_I64, d, KN_SHAPE(x->n)));
    kn_tensor *begin = kn_sub(kn_cumsum(size, 0), size);
    const int64_t most = d == KN_META ? x->n : size ? (int64_t)kn_item(kn_amax(size, 0, false)) : 0;
    kn_tensor *at = kn_view(kn_arange(KN_I64, d, most), KN_SHAPE(1, most));
    *none = kn_ge(at, kn_view(size, KN_SHAPE(x->count, 1)));
    at = kn_add(at, kn_view(begin, KN_SHAPE(x->count, 1)));
    at = kn_minimum(at, kn_full_like(at, (double)(x->n - 1)));
    rows = kn_index_select(rows, 0, kn_reshape(at, KN_SHAPE(x->count * most)));
    kn_tensor *hidden = x->hidden;
    if (hidden) {
        hidden = kn_index_select(kn_cast(hidden, KN_I64), 0, kn_reshape(at, KN_SHAPE(-1)));
        hidden = kn_view(kn_ne(hidden, kn_zeros_like(hidden)), KN_SHAPE(x->count, most));
        *none = kn_logical_or(*none, hidden);
    }
    *none = kn_view(*none, KN_SHAPE(x->count, most, 1));
    return kn_view(rows, KN_SHAPE(x->count, most, c));
}

static kn_tensor *largest(const bags *x, kn_tensor *rows)
{
    const int64_t c = rows->shape[rows->ndim - 1];
    kn_tensor *none = x->hidden;
    if (x->n == 0 || x->count == 0)
        return kn_sum(kn_reshape(rows, KN_SHAPE(1, x->n, c)), 1, (int64_t[]){ 1 }, false);
    if (x->of)
        rows = padded(x, rows, &none);
    if (none)
        rows = kn_masked_fill(rows, none, -INFINITY);
    kn_tensor *at = kn_argmax(kn_detach(rows), 1);
    kn_tensor *y = kn_take_along_dim(rows, kn_reshape(at, KN_SHAPE(x->count, 1, c)), 1);
    y = kn_reshape(y, KN_SHAPE(x->count, c));
    kn_tensor *size = sizes(x, KN_F32);
    return kn_masked_fill(y, kn_expand(kn_eq(size, kn_zeros_like(size)), KN_SHAPE(x->count, c)), 0);
}

/* ---- the operation --------------------------------------------------------------------------- */

static kn_tensor *bag(bags *x, kn_tensor *w)
{
    if (!begin(x, w))
        return NULL;
    kn_tensor *rows = kn_embedding(w, x->index, .padding_idx = x->o.padding_idx);
    if (rows && rows->dtype != KN_F64)
        rows = kn_cast(rows, KN_F32);
    kn_tensor *y = rows ? (x->o.mode == KN_BAG_MAX ? largest : added)(x, rows) : NULL;
    y = y ? kn_cast(y, w->dtype) : NULL;
    return y && x->o.include_last_offset ? kn_slice(y, 0, 0, x->count - 1) : y;
}

kn_tensor *kn_embedding_bag_(kn_tensor *w, kn_tensor *index, kn_embedding_bag_options o)
{
    if (!kn_ok() || !kn_check(w, "embedding_bag") || !kn_check(index, "embedding_bag") ||
        (o.offsets && !kn_check(o.offsets, "embedding_bag")) ||
        (o.per_sample_weights && !kn_check(o.per_sample_weights, "embedding_bag")) ||
        !good(w, index, &o))
        return NULL;
    o.mode = o.mode ? o.mode : KN_BAG_MEAN;
    kn_scope s = kn_scope_begin();
    kn_tensor *y = bag(&(bags){ .o = o, .index = index }, w);
    kn_scope_end_except(s, &y, 1);
    return y;
}
