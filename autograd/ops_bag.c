/* autograd/ops_bag.c: embedding bags: rows of a table, reduced over bags of positions. Made of
 * operations: gradients follow, and stay rows where the table keeps them. */
#include "autograd/ops.h"
#include "autograd/rows.h"
#include <math.h>

/* n positions, each with the number of its bag. */
typedef struct bags {
    kn_embedding_bag_options o;
    int64_t n, count;      /* count: of bags, with one behind the last offset */
    kn_tensor *index, *of; /* [n] */
    kn_tensor *hidden;     /* bool [n, 1]: the row of padding; NULL: there is none */
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

/* Position p lies in the last bag that begins at or before it; of [B, L] in bag p / L. */
static kn_tensor *numbers(const bags *x, const kn_tensor *index)
{
    const kn_device d = kn_device_of(index);
    const int64_t more = x->n + 1;
    if (!x->o.offsets) {
        kn_tensor *bag = kn_view(kn_arange(KN_I64, d, x->count), KN_SHAPE(x->count, 1));
        return kn_reshape(kn_expand(bag, 2, index->shape), 1, &x->n);
    }
    kn_tensor *begun =
        kn_scatter_add(kn_zeros(KN_I64, d, 1, &more), 0, kn_cast(x->o.offsets, KN_I64),
                       kn_ones(KN_I64, d, 1, &x->count));
    begun = kn_cumsum(begun, 0);
    return kn_add_scalar(kn_slice(begun, 0, 0, x->n), -1);
}

static bool begin(bags *x, kn_tensor *w, kn_tensor *index)
{
    int64_t padding;
    if (!kn_padding_row("embedding_bag", w, x->o.padding_idx, &padding))
        return false;
    x->n = kn_numel(index);
    x->count = x->o.offsets ? kn_numel(x->o.offsets) : index->shape[0];
    x->of = numbers(x, index);
    x->index = kn_reshape(index, 1, &x->n);
    if (padding >= 0 && x->index)
        x->hidden =
            kn_reshape(kn_eq(x->index, kn_full_like(x->index, (double)padding)), KN_SHAPE(x->n, 1));
    return kn_ok();
}

/* ---- sums and means -------------------------------------------------------------------------- */

/* t[n, C] added up by bag: [count, C]. */
static kn_tensor *sums(const bags *x, kn_tensor *t)
{
    if (x->hidden)
        t = kn_masked_fill(t, x->hidden, 0);
    if (!t)
        return NULL;
    kn_tensor *zero = kn_zeros(t->dtype, kn_device_of(t), KN_SHAPE(x->count, t->shape[1]));
    return kn_index_add(zero, 0, x->of, t);
}

/* Positions that count in each bag, of dtype: [count, 1]. */
static kn_tensor *sizes(const bags *x, kn_dtype dtype)
{
    return sums(x, kn_ones(dtype, kn_device_of(x->index), KN_SHAPE(x->n, 1)));
}

static kn_tensor *added(const bags *x, kn_tensor *rows)
{
    kn_tensor *by = x->o.per_sample_weights;
    if (by)
        rows = kn_mul(rows, kn_reshape(kn_cast(by, rows->dtype), KN_SHAPE(x->n, 1)));
    kn_tensor *sum = sums(x, rows);
    return !sum || x->o.mode == KN_BAG_SUM
               ? sum
               : kn_div(sum, kn_clamp(sizes(x, sum->dtype), 1, INFINITY));
}

/* ---- maxima ---------------------------------------------------------------------------------- */

/* rows[n, C] as [count, L, C], L the size of the largest bag, -inf where there is none. */
static kn_tensor *padded(const bags *x, kn_tensor *rows)
{
    const kn_device d = kn_device_of(rows);
    const int64_t c = rows->shape[1];
    if (x->hidden)
        rows = kn_masked_fill(rows, x->hidden, -INFINITY);
    kn_tensor *size = kn_index_add(kn_zeros(KN_I64, d, KN_SHAPE(x->count)), 0, x->of,
                                   kn_ones(KN_I64, d, KN_SHAPE(x->n)));
    kn_tensor *begin = kn_sub(kn_cumsum(size, 0), size);
    kn_tensor *largest = d == KN_META ? NULL : kn_amax(size, 0, NULL, false);
    const int64_t most = d == KN_META ? x->n : largest ? (int64_t)kn_item(largest) : 0;
    kn_tensor *at = kn_view(kn_arange(KN_I64, d, most), KN_SHAPE(1, most));
    kn_tensor *none = kn_ge(at, kn_view(size, KN_SHAPE(x->count, 1)));
    at = kn_add(at, kn_view(begin, KN_SHAPE(x->count, 1)));
    at = kn_minimum(at, kn_full_like(at, (double)(x->n - 1)));
    rows = kn_index_select(rows, 0, kn_reshape(at, KN_SHAPE(x->count * most)));
    rows = kn_view(rows, KN_SHAPE(x->count, most, c));
    return kn_masked_fill(rows, kn_view(none, KN_SHAPE(x->count, most, 1)), -INFINITY);
}

static kn_tensor *largest(const bags *x, kn_tensor *rows)
{
    const int64_t c = rows->shape[1];
    if (x->n == 0 || x->count == 0)
        return sums(x, rows);
    rows = padded(x, rows);
    kn_tensor *at = kn_argmax(kn_detach(rows), 1);
    kn_tensor *y = kn_take_along_dim(rows, kn_reshape(at, KN_SHAPE(x->count, 1, c)), 1);
    kn_tensor *size = sizes(x, KN_F32), *none = kn_eq(size, kn_zeros_like(size));
    return kn_masked_fill(kn_reshape(y, KN_SHAPE(x->count, c)), none, 0);
}

/* ---- the operation --------------------------------------------------------------------------- */

static kn_tensor *bag(bags *x, kn_tensor *w, kn_tensor *index)
{
    if (!begin(x, w, index))
        return NULL;
    kn_tensor *rows = kn_embedding(w, x->index, .padding_idx = x->o.padding_idx);
    rows = kn_cast(rows, kn_wide_dtype(w->dtype));
    kn_tensor *y = rows ? (x->o.mode == KN_BAG_MAX ? largest : added)(x, rows) : NULL;
    y = kn_cast(y, w->dtype);
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
    return kn_scope_result(s, bag(&(bags){ .o = o }, w, index));
}
