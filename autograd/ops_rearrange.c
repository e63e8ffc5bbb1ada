/* autograd/ops_rearrange.c: elements in other places: flipped, rolled, padded, repeated, stacked,
 * masked to a triangle. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include <string.h>

static bool has_arithmetic(const char *op, const kn_tensor *x)
{
    return kn_dtype_is_arithmetic(x->dtype) ||
           kn_fail("%s: %s has no arithmetic; floats, i64, i32, u8 and bool are supported", op,
                   kn_dtype_name(x->dtype));
}

/* ---- flip: y[.., i, ..] = x[.., n - 1 - i, ..] ----------------------------------------------- */

static bool flip(kn_tensor *y, kn_tensor *x, const void *attr, bool back)
{
    const int dim = *(const int *)attr;
    const int64_t n = x->shape[dim];
    (void)back;
    kn_tensor *index = kn_empty(KN_I64, kn_device_of(x), 1, &n);
    return index && kn_array_fill(y, kn_array_of(index), n - 1, -1) &&
           KN_RUN(
               y, KN_K_INDEX_SELECT,
               ((kn_index_select_args){ kn_array_of(y), kn_array_of(x), kn_array_of(index), dim }));
}

KN_OP(kn_op_flip, .name = "flip", .makes = true, .attr_size = sizeof(int),
      .shape = kn_shape_of_input, KN_MAP(flip), .on_tape = kn_linear_on_tape);

kn_tensor *kn_flip(kn_tensor *x, int n, const int64_t *dims)
{
    uint32_t chosen;
    if (!kn_dims("flip", x, n, dims, &chosen))
        return NULL;
    for (int d = 0; x && d < KN_MAX_DIMS; d++)
        if (chosen >> d & 1)
            x = kn_apply1(&kn_op_flip, 1, &x, 0, &d);
    return x;
}

/* ---- roll: y[.., (i + shift) mod n, ..] = x[.., i, ..] --------------------------------------- */

typedef struct roll_attr {
    int dim;
    int64_t shift; /* in [0, n) */
} roll_attr;

static bool roll(kn_tensor *y, kn_tensor *x, const void *attr, bool back)
{
    const roll_attr *a = attr;
    const int64_t n = x->shape[a->dim], shift = back ? n - a->shift : a->shift, rest = n - shift;
    return kn_array_copy(y, kn_part(y, a->dim, shift, rest), kn_part(x, a->dim, 0, rest)) &&
           kn_array_copy(y, kn_part(y, a->dim, 0, shift), kn_part(x, a->dim, rest, shift));
}

KN_OP(kn_op_roll, .name = "roll", .attr_size = sizeof(roll_attr), .shape = kn_shape_of_input,
      KN_MAP(roll), .on_tape = kn_linear_on_tape);

static kn_tensor *roll_dim(kn_tensor *x, int dim, int64_t shift)
{
    const int64_t n = x->shape[dim];
    if (n == 0 || shift % n == 0)
        return x;
    roll_attr a = { dim, shift % n + (shift % n < 0 ? n : 0) };
    return kn_apply1(&kn_op_roll, 1, &x, 0, &a);
}

kn_tensor *kn_roll(kn_tensor *x, int n, const int64_t *shifts, const int64_t *dims)
{
    uint32_t chosen;
    if (!kn_ok() || !kn_check(x, "roll"))
        return NULL;
    if (n < 1 || n > KN_MAX_DIMS)
        return kn_fail_null("roll: %d shifts; 1 to %d are supported", n, KN_MAX_DIMS);
    if (!kn_given(shifts, "roll", "the list of shifts") ||
        !kn_dims("roll", x, dims ? n : 0, dims, &chosen))
        return NULL;
    if (!dims && n > 1)
        return kn_fail_null("roll: %d shifts without dims; one shift rolls all elements", n);
    if (!dims) {
        const int ndim = x->ndim;
        int64_t shape[KN_MAX_DIMS];
        memcpy(shape, x->shape, sizeof shape);
        x = kn_reshape(x, 1, (int64_t[]){ kn_numel(x) });
        x = x ? roll_dim(x, 0, shifts[0]) : NULL;
        return kn_reshape(x, ndim, shape);
    }
    for (int i = 0; x && i < n; i++)
        x = roll_dim(x, kn_dim("roll", x, (int)dims[i]), shifts[i]);
    return x;
}

/* ---- pad with a value: before and after more elements along each dim, less where negative ---- */

typedef struct pad_attr {
    int64_t before[KN_MAX_DIMS], after[KN_MAX_DIMS];
    double value;
} pad_attr;

static bool pad_shape(kn_op_call *c)
{
    const pad_attr *a = c->attr;
    kn_shape_of_input(c);
    for (int d = 0; d < c->spec[0].ndim; d++)
        c->spec[0].shape[d] += a->before[d] + a->after[d];
    return true;
}

/* The elements of x that are in y, in the array of either. */
static kn_array inside(const kn_tensor *t, const pad_attr *a, bool padded)
{
    kn_array part = kn_array_of(t);
    int64_t at = 0;
    for (int d = 0; d < t->ndim; d++) {
        const int64_t sign = padded ? 1 : -1, before = sign * a->before[d],
                      after = sign * a->after[d];
        at += before > 0 ? before * part.stride[d] : 0;
        part.shape[d] -= (before > 0 ? before : 0) + (after > 0 ? after : 0);
    }
    if (part.data && kn_array_numel(&part) > 0)
        part.data = (char *)part.data + (size_t)at * kn_dtype_size(part.dtype);
    return part;
}

static bool pad(kn_tensor *y, kn_tensor *x, const void *attr, bool back)
{
    const pad_attr *a = attr;
    return kn_array_fill(y, kn_array_of(y), back ? 0 : a->value, 0) &&
           kn_array_copy(y, inside(y, a, !back), inside(x, a, back));
}

static bool pad_on_tape(kn_op_grad *g);

KN_OP(kn_op_pad, .name = "pad", .may_fill = true, .attr_size = sizeof(pad_attr), .shape = pad_shape,
      KN_MAP(pad), .on_tape = pad_on_tape);

/* Elements that were added are cut off, and zeros stand for those that were cut off. */
static bool pad_on_tape(kn_op_grad *g)
{
    pad_attr a = *(const pad_attr *)g->attr;
    a.value = 0;
    for (int d = 0; d < KN_MAX_DIMS; d++) {
        a.before[d] = -a.before[d];
        a.after[d] = -a.after[d];
    }
    g->din[0] = kn_apply1(&kn_op_pad, 1, &g->dout[0], 0, &a);
    return g->din[0] != NULL;
}

/* The sizes of one dim: those that the mode can't give are errors. */
static bool pad_fits(const kn_tensor *x, int d, kn_pad_mode mode, const int64_t size[2])
{
    const int64_t n = x->shape[d], far = INT64_MAX / 8;
    const int64_t most = mode == KN_PAD_REFLECT ? n - 1 : mode == KN_PAD_CIRCULAR ? n : far;
    int64_t cut = 0;
    for (int i = 0; i < 2; i++) {
        if (mode != KN_PAD_CONSTANT && size[i] > 0 && n == 0)
            return kn_fail("pad: size %lld for dim %d of %s; an empty dim KN_PAD_CONSTANT only "
                           "can pad",
                           (long long)size[i], d, KN_SHOWN(x));
        if (size[i] != 0 && size[i] > most)
            return kn_fail("pad: size %lld for dim %d of %s; in this mode at most %lld",
                           (long long)size[i], d, KN_SHOWN(x), (long long)most);
        cut += size[i] > 0 ? 0 : size[i] < -far ? -far : size[i];
    }
    return n + cut >= 0 || kn_fail("pad: sizes %lld and %lld cut more than dim %d of %s has",
                                   (long long)size[0], (long long)size[1], d, KN_SHOWN(x));
}

/* Reads sizes, the last dim's first. */
static bool pad_sizes(const kn_tensor *x, kn_pad_mode mode, int n, const int64_t *sizes,
                      pad_attr *a)
{
    if (n < 0 || n % 2 || n > 2 * x->ndim)
        return kn_fail("pad: %d sizes for %s; a pair for each dim is possible, the last dim's "
                       "first",
                       n, KN_SHOWN(x));
    if (n > 0 && !kn_given(sizes, "pad", "the list of sizes"))
        return false;
    for (int i = 0; i < n; i += 2) {
        const int d = x->ndim - 1 - i / 2;
        if (!pad_fits(x, d, mode, sizes + i))
            return false;
        a->before[d] = sizes[i];
        a->after[d] = sizes[i + 1];
    }
    return true;
}

/* Where in dim d each element of the result comes from. */
static kn_tensor *pad_index(const kn_tensor *x, int d, kn_pad_mode mode, int64_t before,
                            int64_t after)
{
    const int64_t n = x->shape[d], all = before + n + after;
    const int64_t first = mode == KN_PAD_REFLECT     ? before
                          : mode == KN_PAD_REPLICATE ? 0
                                                     : n - before;
    const int64_t last = mode == KN_PAD_REFLECT ? n - 2 : mode == KN_PAD_REPLICATE ? n - 1 : 0;
    const int64_t step = mode == KN_PAD_REFLECT ? -1 : mode == KN_PAD_REPLICATE ? 0 : 1;
    kn_tensor *at = kn_empty(KN_I64, kn_device_of(x), 1, &all);
    return at && kn_array_fill(at, kn_part(at, 0, 0, before), first, step) &&
                   kn_array_fill(at, kn_part(at, 0, before, n), 0, 1) &&
                   kn_array_fill(at, kn_part(at, 0, before + n, after), last, step)
               ? at
               : NULL;
}

/* Sizes below 0 cut the result; the circular mode goes round what they leave, as torch's. */
static kn_tensor *pad_dim(kn_tensor *x, int d, kn_pad_mode mode, int64_t before, int64_t after)
{
    const int64_t from = before < 0 ? -before : 0, off = after < 0 ? -after : 0;
    const bool first = mode == KN_PAD_CIRCULAR;
    before += from, after += off;
    if (first && (from || off))
        x = kn_slice(x, d, from, x->shape[d] - off);
    kn_tensor *at = x && (before || after) ? pad_index(x, d, mode, before, after) : NULL;
    x = at ? kn_index_select(x, d, at) : x;
    return x && !first && (from || off) ? kn_slice(x, d, from, x->shape[d] - off) : x;
}

kn_tensor *kn_pad(kn_tensor *x, kn_pad_mode mode, double value, int n, const int64_t *sizes)
{
    pad_attr a = { .value = value == KN_ZERO ? 0 : value };
    if (!kn_ok() || !kn_check(x, "pad") || !has_arithmetic("pad", x))
        return NULL;
    if (mode < KN_PAD_CONSTANT || mode > KN_PAD_CIRCULAR)
        return kn_fail_null("pad: mode %d; KN_PAD_CONSTANT, _REFLECT, _REPLICATE and _CIRCULAR are "
                            "supported",
                            (int)mode);
    if (!pad_sizes(x, mode, n, sizes, &a))
        return NULL;
    if (mode == KN_PAD_CONSTANT)
        return kn_apply1(&kn_op_pad, 1, &x, 0, &a);
    for (int d = 0; x && d < x->ndim; d++)
        x = pad_dim(x, d, mode, a.before[d], a.after[d]);
    return x;
}

/* ---- repeat ---------------------------------------------------------------------------------- */

/* x with dim d times as long: all of it times in a row, or each slice times in a row. */
static kn_tensor *repeat_dim(const char *op, kn_tensor *x, int d, int64_t times, bool each)
{
    int64_t shape[KN_MAX_DIMS], outer = 1, inner = 1;
    const int64_t n = x->shape[d];
    const int ndim = x->ndim;
    memcpy(shape, x->shape, sizeof shape);
    if (__builtin_mul_overflow(n, times, &shape[d]))
        return kn_fail_null(
            "%s: dim %d of size %lld, %lld times: more elements than can be counted", op, d,
            (long long)n, (long long)times);
    for (int i = 0; i < ndim; i++)
        *(i < d ? &outer : &inner) *= i == d ? 1 : shape[i];
    x = each ? kn_reshape(x, KN_SHAPE(outer, n, 1, inner))
             : kn_reshape(x, KN_SHAPE(outer, 1, n, inner));
    x = each ? kn_expand(x, KN_SHAPE(outer, n, times, inner))
             : kn_expand(x, KN_SHAPE(outer, times, n, inner));
    return kn_reshape(x, ndim, shape);
}

static kn_tensor *repeat(const char *op, kn_tensor *x, int n, const int64_t *times, bool fill)
{
    if (!kn_ok() || !kn_check(x, op))
        return NULL;
    if (n < 0 || n > KN_MAX_DIMS || (n < x->ndim && !fill))
        return kn_fail_null("%s: %d counts for %s; one for each dim, and at most %d", op, n,
                            KN_SHOWN(x), KN_MAX_DIMS);
    if (n > 0 && !kn_given(times, op, "the list of counts"))
        return NULL;
    for (int i = 0; i < n; i++)
        if (times[i] < 0)
            return kn_fail_null("%s: count %d is %lld, should be at least 0", op, i,
                                (long long)times[i]);
    while (x && x->ndim < n)
        x = kn_unsqueeze(x, 0);
    for (int i = n - 1; x && i >= 0; i--)
        if (times[i] != 1)
            x = repeat_dim(op, x, x->ndim - n + i, times[i], false);
    return x;
}

kn_tensor *kn_repeat(kn_tensor *x, int n, const int64_t *times)
{
    return repeat("repeat", x, n, times, false);
}

kn_tensor *kn_tile(kn_tensor *x, int n, const int64_t *times)
{
    return repeat("tile", x, n, times, true);
}

/* The position of slice i of x, times[i] times for each i. */
static kn_tensor *repeated_places(const kn_tensor *x, int64_t n, const int64_t *times)
{
    int64_t all = 0;
    for (int64_t i = 0; i < n; i++)
        if (times[i] < 0 || __builtin_add_overflow(all, times[i], &all) ||
            all > INT64_MAX / (int64_t)sizeof all)
            return kn_fail_null(
                "repeat_interleave: count %lld is %lld; counts are at least 0, and the "
                "result must fit in memory",
                (long long)i, (long long)times[i]);
    if (kn_device_of(x) == KN_META)
        return kn_empty(KN_I64, KN_META, 1, &all);
    int64_t *place = kn_host_alloc((size_t)(all + 1) * sizeof *place);
    for (int64_t i = 0, k = 0; place && i < n; i++)
        for (int64_t j = 0; j < times[i]; j++)
            place[k++] = i;
    return kn_of_host(KN_I64, kn_device_of(x), place, 1, &all);
}

kn_tensor *kn_repeat_interleave(kn_tensor *x, int dim, int n, const int64_t *times)
{
    const int d = kn_dim("repeat_interleave", x, dim);
    if (d < 0 || !kn_given(times, "repeat_interleave", "the list of counts"))
        return NULL;
    if (n == 1 && times[0] >= 0)
        return repeat_dim("repeat_interleave", x, d, times[0], true);
    if (n != 1 && n != x->shape[d])
        return kn_fail_null(
            "repeat_interleave: %d counts for dim %d of %s; one for all, or one for "
            "each of its slices",
            n, dim, KN_SHOWN(x));
    return kn_index_select(x, d, repeated_places(x, n, times));
}

/* ---- stack ----------------------------------------------------------------------------------- */

/* kn_cat of the tensors with dim, in groups of as many as stand on the stack at a time. */
static kn_tensor *pile(kn_tensor *const *x, int n, int dim)
{
    const int group = kn_group_of(n, KN_MAX_IN), groups = kn_group_of(n, group);
    kn_tensor *part[KN_MAX_IN];
    for (int i = 0; i < groups; i++) {
        const int at = i * group, some = n - at < group ? n - at : group;
        part[i] = group == 1 ? kn_unsqueeze(x[i], dim) : pile(x + at, some, dim);
        if (!part[i])
            return NULL;
    }
    return kn_cat(part, groups, dim);
}

kn_tensor *kn_stack(kn_tensor *const *x, int n, int dim)
{
    if (!kn_ok())
        return NULL;
    if (n < 1)
        return kn_fail_null("stack: %d tensors; at least 1 is needed", n);
    if (!kn_given(x, "kn_stack", "the list of tensors") || !kn_check(x[0], "stack"))
        return NULL;
    if (x[0]->ndim == KN_MAX_DIMS || dim < -x[0]->ndim - 1 || dim > x[0]->ndim)
        return kn_fail_null(
            "stack: dim %d is out of range for tensors %s (use %d to %d; the result "
            "has at most %d dims)",
            dim, KN_SHOWN(x[0]), -x[0]->ndim - 1, x[0]->ndim, KN_MAX_DIMS);
    for (int i = 0; i < n; i++) {
        if (!kn_check(x[i], "stack"))
            return NULL;
        const bool same = x[i]->dtype == x[0]->dtype && kn_has_shape(x[i], x[0]->ndim, x[0]->shape);
        if (!same)
            return kn_fail_null(
                "stack: argument %d is %s, argument 1 is %s; all must have one shape "
                "and dtype",
                i + 1, KN_SHOWN(x[i]), KN_SHOWN(x[0]));
    }
    return pile(x, n, dim);
}

/* ---- triangles ------------------------------------------------------------------------------- */

/* Whether column - row <= diagonal at each place of the last two dims of x. */
static kn_tensor *up_to_diagonal(const kn_tensor *x, int64_t diagonal)
{
    const int64_t rows = x->shape[x->ndim - 2], columns = x->shape[x->ndim - 1];
    kn_tensor *last = kn_empty(KN_I64, kn_device_of(x), 2, (int64_t[]){ rows, 1 });
    kn_tensor *column = kn_empty(KN_I64, kn_device_of(x), 1, &columns);
    return last && column && kn_array_fill(last, kn_array_of(last), diagonal, 1) &&
                   kn_array_fill(column, kn_array_of(column), 0, 1)
               ? kn_le(column, last)
               : NULL;
}

static kn_tensor *triangle(const char *op, kn_tensor *x, int64_t diagonal, bool lower)
{
    if (!kn_ok() || !kn_check(x, op) || !has_arithmetic(op, x))
        return NULL;
    if (x->ndim < 2)
        return kn_fail_null("%s: needs at least 2 dims, got %s", op, KN_SHOWN(x));
    const int64_t least = -x->shape[x->ndim - 2] - 1, most = x->shape[x->ndim - 1] + 1;
    diagonal = diagonal < least ? least : diagonal > most ? most : diagonal;
    kn_tensor *low = up_to_diagonal(x, lower ? diagonal : diagonal - 1);
    kn_tensor *zero = kn_zeros(x->dtype, kn_device_of(x), KN_SCALAR);
    return lower ? kn_where(low, x, zero) : kn_where(low, zero, x);
}

kn_tensor *kn_tril(kn_tensor *x, int64_t diagonal)
{
    return triangle("tril", x, diagonal, true);
}

kn_tensor *kn_triu(kn_tensor *x, int64_t diagonal)
{
    return triangle("triu", x, diagonal, false);
}
