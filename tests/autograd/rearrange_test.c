/* tests/autograd/rearrange_test.c: elements in other places against formulas of the place: flip,
 * roll, pad, repeat, stack, triangles, columns of images. */
#include "tests/autograd/expect.h"
#include "tests/owned.h"

static const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_F16, KN_F64, KN_I64, KN_I32, KN_U8 };
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

static int64_t mod(int64_t i, int64_t n)
{
    return (i % n + n) % n;
}

/* ---- flip and roll: x[3,4,2] counts, and is transposed where that is said -------------------- */

static double at_342(int64_t i, int64_t j, int64_t k)
{
    return (double)(8 * i + 2 * j + k);
}
static double flipped(const int64_t *at, void *arg)
{
    (void)arg;
    return at_342(2 - at[0], at[1], 1 - at[2]);
}
static double flipped_all(const int64_t *at, void *arg)
{
    (void)arg;
    return at_342(2 - at[0], 3 - at[1], 1 - at[2]);
}
static double flipped_transposed(const int64_t *at, void *arg) /* [4,3,2] */
{
    (void)arg;
    return at_342(at[1], 3 - at[0], at[2]);
}
static double rolled(const int64_t *at, void *arg)
{
    const int64_t *s = arg;
    return at_342(at[0], mod(at[1] - s[0] % 4, 4), mod(at[2] - s[1] % 2, 2));
}
static double rolled_flat(const int64_t *at, void *arg)
{
    return (double)mod(8 * at[0] + 2 * at[1] + at[2] - *(const int64_t *)arg, 24);
}

KN_TEST(rearrange, flip_and_roll)
{
    const int64_t shifts[][2] = { { 1, 1 },  { -1, 0 }, { 4, 2 },         { 7, -3 },
                                  { -9, 1 }, { 0, 1 },  { INT64_MIN, 3 }, { INT64_MAX, -1 } };
    for (int t = 0; t < DTYPES; t++)
        for (int device = KN_CPU; device <= KN_META; device++) {
            kn_tensor *x = counted(dtypes[t], (kn_device)device, KN_SHAPE(3, 4, 2));
            expect(kn_flip(x, KN_SHAPE(0, -1)), KN_SHAPE(3, 4, 2), flipped, NULL);
            expect(kn_flip(x, KN_SCALAR), KN_SHAPE(3, 4, 2), flipped_all, NULL);
            expect(kn_flip(kn_transpose(x, 0, 1), KN_SHAPE(0)), KN_SHAPE(4, 3, 2),
                   flipped_transposed, NULL);
            for (size_t i = 0; i < sizeof shifts / sizeof *shifts; i++) {
                int64_t s[2] = { shifts[i][0], shifts[i][1] };
                expect(kn_roll(x, 2, s, (int64_t[]){ 1, -1 }), KN_SHAPE(3, 4, 2), rolled, s);
                if (s[0] > INT64_MIN && s[0] < INT64_MAX)
                    expect(kn_roll(x, 1, s, NULL), KN_SHAPE(3, 4, 2), rolled_flat, s);
            }
        }
    kn_tensor *none = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 3));
    KN_CHECK(kn_roll(none, 1, (int64_t[]){ 2 }, (int64_t[]){ 0 }) && kn_flip(none, KN_SCALAR) &&
             kn_roll(none, 1, (int64_t[]){ 2 }, NULL));
    kn_tensor *b = kn_flip(
        kn_gt(counted(KN_F32, KN_CPU, KN_SHAPE(3)), kn_ones(KN_F32, KN_CPU, KN_SCALAR)), KN_SCALAR);
    KN_CHECK(b && kn_dtype_of(b) == KN_BOOL && kn_item(kn_slice(b, 0, 0, 1)) == 1);
}

/* An image in channels-last order stays in it. */
KN_TEST(rearrange, order_of_images_is_kept)
{
    kn_tensor *x = kn_channels_last(kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(2, 3, 4, 5)));
    kn_tensor *y[] = { kn_flip(x, KN_SHAPE(3)), kn_roll(x, 1, (int64_t[]){ 2 }, (int64_t[]){ 2 }),
                       kn_pad(x, KN_PAD_CONSTANT, 1, KN_SHAPE(1, 0, 2, 2)) };
    for (int i = 0; i < 3; i++)
        KN_CHECK(y[i] && kn_is_channels_last(y[i]) && !kn_is_contiguous(y[i]), "%d", i);
}

/* ---- pad: x[2,3,4] --------------------------------------------------------------------------- */

typedef struct pad_case {
    kn_pad_mode mode;
    int n;
    int64_t size[6];
} pad_case;

/* The place in a dim of n elements that stands at i, -1 for the value. */
static int64_t pad_place(kn_pad_mode mode, int64_t i, int64_t n)
{
    if (mode == KN_PAD_CONSTANT)
        return i < 0 || i >= n ? -1 : i;
    if (mode == KN_PAD_REPLICATE)
        return i < 0 ? 0 : i >= n ? n - 1 : i;
    if (mode == KN_PAD_CIRCULAR)
        return mod(i, n);
    return i < 0 ? -i : i >= n ? 2 * (n - 1) - i : i;
}

static double padded(const int64_t *at, void *arg)
{
    const pad_case *c = arg;
    const int64_t shape[3] = { 2, 3, 4 };
    int64_t place = 0;
    for (int d = 0; d < 3; d++) {
        const int64_t before = 2 * (2 - d) < c->n ? c->size[2 * (2 - d)] : 0;
        const int64_t i = pad_place(c->mode, at[d] - before, shape[d]);
        if (i < 0)
            return 9;
        place = place * shape[d] + i;
    }
    return (double)place;
}

static const pad_case pads[] = {
    { KN_PAD_CONSTANT, 0, { 0 } },
    { KN_PAD_CONSTANT, 2, { 1, 2 } },
    { KN_PAD_CONSTANT, 4, { 0, 3, 1, 0 } },
    { KN_PAD_CONSTANT, 6, { 1, 1, 2, 0, 0, 1 } },
    { KN_PAD_CONSTANT, 6, { -1, 2, 1, -2, -1, -1 } },
    { KN_PAD_CONSTANT, 2, { -4, 1 } },
    { KN_PAD_CONSTANT, 2, { -1, -2 } },
    { KN_PAD_REFLECT, 2, { 3, 2 } },
    { KN_PAD_REFLECT, 6, { 1, 0, 2, 2, 1, 1 } },
    { KN_PAD_REPLICATE, 2, { 5, 6 } },
    { KN_PAD_REPLICATE, 6, { 0, 1, 2, 3, 1, 4 } },
    { KN_PAD_CIRCULAR, 4, { 4, 3, 0, 3 } },
    { KN_PAD_CIRCULAR, 6, { 1, 2, 1, 1, 2, 2 } },
};
enum { PADS = sizeof pads / sizeof *pads };

static void padded_shape(const pad_case *c, int64_t shape[3])
{
    memcpy(shape, (int64_t[]){ 2, 3, 4 }, 3 * sizeof *shape);
    for (int i = 0; i < c->n; i++)
        shape[2 - i / 2] += c->size[i];
}

KN_TEST(rearrange, pad)
{
    for (int t = 0; t < DTYPES; t++)
        for (int i = 0; i < PADS; i++) {
            pad_case c = pads[i];
            int64_t shape[3];
            padded_shape(&c, shape);
            kn_tensor *x = counted(dtypes[t], KN_CPU, KN_SHAPE(2, 3, 4));
            expect(kn_pad(x, c.mode, 9, c.n, c.size), 3, shape, padded, &c);
            x = kn_permute(x, 3, (int64_t[]){ 2, 0, 1 }); /* the same values, not row-major */
            x = kn_permute(kn_contiguous(x), 3, (int64_t[]){ 1, 2, 0 });
            expect(kn_pad(x, c.mode, 9, c.n, c.size), 3, shape, padded, &c);
            x = kn_empty(dtypes[t], KN_META, KN_SHAPE(2, 3, 4));
            expect(kn_pad(x, c.mode, 9, c.n, c.size), 3, shape, padded, &c);
        }
    kn_tensor *low =
        kn_pad(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1)), KN_PAD_CONSTANT, -INFINITY, KN_SHAPE(1, 0));
    KN_CHECK(low && isinf(kn_item(kn_slice(low, 0, 0, 1))));
    KN_CHECK(kn_pad(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 2)), KN_PAD_REFLECT, 0, KN_SHAPE(1, 1)) &&
             kn_pad(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0)), KN_PAD_CONSTANT, 0, KN_SHAPE(1, 1)));
}

/* ---- repeat: x[2,3] -------------------------------------------------------------------------- */

static double repeated(const int64_t *at, void *arg)
{
    const int extra = *(const int *)arg; /* dims in front */
    return (double)(3 * (at[extra] % 2) + at[extra + 1] % 3);
}
static double interleaved(const int64_t *at, void *arg)
{
    return (double)(3 * at[0] + at[1] / *(const int64_t *)arg);
}
static double interleaved_rows(const int64_t *at, void *arg)
{
    (void)arg;
    return (double)(at[0] < 1 ? at[1] : 3 + at[1]); /* {1, 3} times */
}

KN_TEST(rearrange, repeat)
{
    for (int t = 0; t < DTYPES; t++)
        for (int device = KN_CPU; device <= KN_META; device++) {
            kn_tensor *x = counted(dtypes[t], (kn_device)device, KN_SHAPE(2, 3));
            int none = 0, two = 2;
            expect(kn_repeat(x, KN_SHAPE(2, 3)), KN_SHAPE(4, 9), repeated, &none);
            expect(kn_repeat(x, KN_SHAPE(2, 1, 3, 1)), KN_SHAPE(2, 1, 6, 3), repeated, &two);
            expect(kn_repeat(x, KN_SHAPE(0, 2)), KN_SHAPE(0, 6), repeated, &none);
            expect(kn_repeat(kn_contiguous(x), KN_SHAPE(1, 1)), KN_SHAPE(2, 3), repeated, &none);
            expect(kn_tile(x, KN_SHAPE(4)), KN_SHAPE(2, 12), repeated, &none);
            expect(kn_tile(x, KN_SHAPE(3, 1, 2, 2)), KN_SHAPE(3, 1, 4, 6), repeated, &two);
            for (int64_t n = 0; n < 4; n++)
                expect(kn_repeat_interleave(x, -1, 1, &n), KN_SHAPE(2, 3 * n), interleaved, &n);
            expect(kn_repeat_interleave(x, 0, 2, (int64_t[]){ 1, 3 }), KN_SHAPE(4, 3),
                   interleaved_rows, NULL);
            expect(kn_repeat_interleave(x, 0, 2, (int64_t[]){ 0, 0 }), KN_SHAPE(0, 3),
                   interleaved_rows, NULL);
        }
    kn_tensor *eight = kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 1, 2, 1, 1, 1, 1, 2));
    KN_CHECK(kn_numel(kn_repeat(eight, KN_SHAPE(2, 1, 2, 1, 1, 3, 1, 2))) == 96);
}

/* ---- stack ----------------------------------------------------------------------------------- */

static double stacked(const int64_t *at, void *arg) /* two of [2,3]: x and 10 + x */
{
    const int dim = *(const int *)arg;
    const int64_t i = at[dim > 0 ? 0 : 1], j = at[dim > 1 ? 1 : 2];
    return (double)(10 * at[dim] + 3 * i + j);
}

KN_TEST(rearrange, stack)
{
    const int64_t shape[3][3] = { { 2, 2, 3 }, { 2, 2, 3 }, { 2, 3, 2 } };
    for (int t = 0; t < DTYPES; t++) {
        kn_tensor *x = counted(dtypes[t], KN_CPU, KN_SHAPE(2, 3));
        kn_tensor *y = kn_add(x, kn_full(dtypes[t], KN_CPU, 10, KN_SCALAR));
        for (int dim = 0; dim < 3; dim++) {
            expect(kn_stack((kn_tensor *[]){ x, y }, 2, dim), 3, shape[dim], stacked, &dim);
            expect(kn_stack((kn_tensor *[]){ x, y }, 2, dim - 3), 3, shape[dim], stacked, &dim);
        }
    }
    kn_tensor *s = kn_ones(KN_F32, KN_CPU, KN_SCALAR);
    KN_CHECK(kn_size(kn_stack((kn_tensor *[]){ s, s, s }, 3, 0), 0) == 3);
}

/* ---- triangles ------------------------------------------------------------------------------- */

typedef struct band {
    int64_t diagonal;
    bool lower;
} band;

static double in_band(const int64_t *at, void *arg) /* x[2,3,4] counts from 1 */
{
    const band *b = arg;
    const int64_t off = at[2] - at[1];
    const bool kept = b->lower ? off <= b->diagonal : off >= b->diagonal;
    return kept ? (double)(12 * at[0] + 4 * at[1] + at[2] + 1) : 0;
}

KN_TEST(rearrange, triangles)
{
    const int64_t diagonals[] = { 0, 1, -1, 3, -2, 4, -3, 99, INT64_MAX, INT64_MIN };
    for (int t = 0; t < DTYPES; t++) {
        kn_tensor *x = kn_add(counted(dtypes[t], KN_CPU, KN_SHAPE(2, 3, 4)),
                              kn_ones(dtypes[t], KN_CPU, KN_SCALAR));
        for (size_t i = 0; i < sizeof diagonals / sizeof *diagonals; i++)
            for (int lower = 0; lower < 2; lower++) {
                band b = { diagonals[i], lower };
                kn_tensor *y = lower ? kn_tril(x, b.diagonal) : kn_triu(x, b.diagonal);
                expect(y, KN_SHAPE(2, 3, 4), in_band, &b);
            }
    }
    kn_tensor *causal = kn_tril(kn_ones(KN_BOOL, KN_CPU, KN_SHAPE(3, 3)), 0);
    KN_CHECK(causal && kn_dtype_of(causal) == KN_BOOL && kn_item(sum_of(causal)) == 6);
    kn_tensor *nan = kn_full(KN_F32, KN_CPU, (double)NAN, KN_SHAPE(2, 2));
    KN_CHECK(kn_item(kn_slice(kn_slice(kn_tril(nan, -1), 0, 0, 1), 1, 1, 2)) == 0);
}

/* ---- columns of images ----------------------------------------------------------------------- */

typedef struct columns {
    int64_t R, S, stride[2], pad[2], dilation[2], P, Q;
} columns;

static double in_column(const int64_t *at, void *arg) /* x[2,3,5,4] counts from 1 */
{
    const columns *k = arg;
    const int64_t c = at[1] / (k->R * k->S), r = at[1] / k->S % k->R, s = at[1] % k->S;
    const int64_t h = at[2] / k->Q * k->stride[0] - k->pad[0] + r * k->dilation[0];
    const int64_t w = at[2] % k->Q * k->stride[1] - k->pad[1] + s * k->dilation[1];
    const bool inside = h >= 0 && h < 5 && w >= 0 && w < 4;
    return inside ? (double)(60 * at[0] + 20 * c + 4 * h + w + 1) : 0;
}

static const columns column_cases[] = {
    { 2, 2, { 1, 1 }, { 0, 0 }, { 1, 1 }, 4, 3 }, { 3, 1, { 2, 1 }, { 1, 0 }, { 1, 1 }, 3, 4 },
    { 2, 3, { 1, 2 }, { 0, 2 }, { 2, 1 }, 3, 3 }, { 5, 4, { 1, 1 }, { 0, 0 }, { 1, 1 }, 1, 1 },
    { 2, 2, { 2, 2 }, { 0, 0 }, { 1, 1 }, 2, 2 },
};

static kn_tensor *columns_of(kn_tensor *x, const columns *k)
{
    return kn_unfold2d(x, .kernels = { k->R, k->S }, .strides = { k->stride[0], k->stride[1] },
                       .pads = { k->pad[0], k->pad[1] },
                       .dilations = { k->dilation[0], k->dilation[1] });
}

KN_TEST(rearrange, unfold2d)
{
    for (size_t i = 0; i < sizeof column_cases / sizeof *column_cases; i++) {
        columns k = column_cases[i];
        kn_tensor *x = kn_add(counted(KN_F32, KN_CPU, KN_SHAPE(2, 3, 5, 4)),
                              kn_ones(KN_F32, KN_CPU, KN_SCALAR));
        kn_tensor *last = kn_channels_last(x),
                  *meta = kn_empty(KN_BF16, KN_META, KN_SHAPE(2, 3, 5, 4));
        expect(columns_of(x, &k), KN_SHAPE(2, 3 * k.R * k.S, k.P * k.Q), in_column, &k);
        expect(columns_of(last, &k), KN_SHAPE(2, 3 * k.R * k.S, k.P * k.Q), in_column, &k);
        expect(columns_of(meta, &k), KN_SHAPE(2, 3 * k.R * k.S, k.P * k.Q), in_column, &k);
    }
}

/* Columns times a weight are a convolution. */
KN_TEST(rearrange, columns_make_a_convolution)
{
    kn_tensor *x = kn_randn(KN_F64, KN_CPU, 1, 2, KN_SHAPE(2, 3, 6, 5));
    kn_tensor *w = kn_randn(KN_F64, KN_CPU, 1, 3, KN_SHAPE(4, 3, 3, 2));
    kn_tensor *y = kn_conv2d(x, w, NULL, .stride = 2, .pad = 1);
    kn_tensor *z =
        kn_matmul(kn_flatten(w, 1, -1), kn_unfold2d(x, .kernels = { 3, 2 }, .stride = 2, .pad = 1));
    kn_tensor *d = kn_abs(kn_sub(kn_flatten(y, 2, 3), z));
    KN_CHECK(d && kn_item(kn_amax(d, 0, NULL, false)) < 1e-12);
}

/* ---- errors ---------------------------------------------------------------------------------- */

KN_TEST(rearrange, errors)
{
    kn_tensor *x = counted(KN_F32, KN_CPU, KN_SHAPE(2, 3)),
              *big = kn_expand(x, KN_SHAPE(1, 1, 1, 1, 1, 1, 2, 3));
    kn_tensor *f8 = kn_empty(KN_F8_E4M3, KN_CPU, KN_SHAPE(2, 3));
    REFUSED(kn_flip(x, KN_SHAPE(2)), "flip: dim 2 is out of range for f32[2,3]");
    REFUSED(kn_roll(x, 2, (int64_t[]){ 1, 2 }, NULL), "roll: 2 shifts without dims");
    REFUSED(kn_roll(x, 0, NULL, NULL), "roll: 0 shifts");
    REFUSED(kn_roll(x, 1, (int64_t[]){ 1 }, (int64_t[]){ -3 }), "roll: dim -3 is out of range");
    REFUSED(kn_pad(x, KN_PAD_CONSTANT, 0, 1, (int64_t[]){ 1 }),
            "pad: 1 sizes for f32[2,3]; a pair for each dim is possible");
    REFUSED(kn_pad(x, KN_PAD_CONSTANT, 0, KN_SHAPE(1, 1, 1, 1, 1, 1)), "pad: 6 sizes");
    REFUSED(kn_pad(x, KN_PAD_REFLECT, 0, KN_SHAPE(3, 0)),
            "pad: size 3 for dim 1 of f32[2,3]; in this mode at most 2");
    REFUSED(kn_pad(x, KN_PAD_CIRCULAR, 0, KN_SHAPE(0, 0, 0, 3)),
            "pad: size 3 for dim 0 of f32[2,3]; in this mode at most 2");
    REFUSED(kn_pad(x, KN_PAD_REPLICATE, 0, KN_SHAPE(-4, 0)), "pad: sizes -4 and 0 cut more");
    REFUSED(kn_pad(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 0)), KN_PAD_REPLICATE, 0, KN_SHAPE(0, 1)),
            "an empty dim");
    REFUSED(kn_pad(x, KN_PAD_CONSTANT, 0, KN_SHAPE(-2, -2)),
            "pad: sizes -2 and -2 cut more than dim 1");
    REFUSED(kn_pad(x, KN_PAD_CONSTANT, 0, KN_SHAPE(INT64_MIN, INT64_MIN)), "cut more than dim 1");
    REFUSED(kn_pad(x, KN_PAD_CONSTANT, 0, KN_SHAPE(INT64_MAX, 0)), "pad: size 9223372036854775807");
    REFUSED(kn_pad(x, KN_PAD_CONSTANT, 0, KN_SHAPE(INT64_MAX / 8, INT64_MAX / 8)),
            "more bytes than a machine can address");
    REFUSED(kn_pad(x, (kn_pad_mode)7, 0, KN_SCALAR), "pad: mode 7");
    REFUSED(kn_pad(f8, KN_PAD_CONSTANT, 0, KN_SHAPE(1, 1)), "pad: f8_e4m3 has no arithmetic");
    REFUSED(kn_repeat(x, KN_SHAPE(2)), "repeat: 1 counts for f32[2,3]; one for each dim");
    REFUSED(kn_repeat(x, KN_SHAPE(2, -1)), "repeat: count 1 is -1");
    REFUSED(kn_repeat(x, KN_SHAPE(1, INT64_MAX)), "more elements than can be counted");
    REFUSED(kn_tile(x, 9, (int64_t[9]){ 1 }), "tile: 9 counts");
    REFUSED(kn_repeat_interleave(x, 1, 2, (int64_t[]){ 1, 1 }),
            "repeat_interleave: 2 counts for dim 1 of f32[2,3]");
    REFUSED(kn_repeat_interleave(x, 0, 2, (int64_t[]){ 1, -1 }),
            "repeat_interleave: count 1 is -1");
    REFUSED(kn_repeat_interleave(x, 0, 2, (int64_t[]){ INT64_MAX, INT64_MAX }),
            "count 0 is 9223372036854775807");
    REFUSED(kn_stack((kn_tensor *[]){ x, kn_transpose(x, 0, 1) }, 2, 0),
            "stack: argument 2 is f32[3,2], argument 1 is f32[2,3]");
    REFUSED(kn_stack((kn_tensor *[]){ x, x }, 2, 3),
            "stack: dim 3 is out of range for tensors f32[2,3] (use -3 to 2");
    REFUSED(kn_stack((kn_tensor *[]){ big }, 1, 0), "at most 8 dims");
    REFUSED(kn_stack(NULL, 2, 0), "kn_stack: the list of tensors");
    REFUSED(kn_tril(kn_slice(kn_flatten(x, 0, 1), 0, 0, 2), 0),
            "tril: needs at least 2 dims, got f32[2]");
    REFUSED(kn_unfold2d(x, .kernel = 1), "unfold2d: needs x[N,C,H,W], got f32[2,3]");
    kn_tensor *image = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1, 1, 3, 3));
    REFUSED(kn_unfold2d(image), "unfold2d: kernel 0, stride 1, dilation 1, pad 0 along the rows");
    REFUSED(kn_unfold2d(image, .kernel = 3, .dilations = { 1, 2 }),
            "dilation 2, pad 0 along the columns of f32[1,1,3,3]");
    REFUSED(kn_unfold2d(image, .kernel = 2, .pad = INT64_MIN), "pad at least 0");
    REFUSED(kn_unfold2d(image, .kernel = 2, .pad = INT64_MAX),
            "a window fits into the padded image");
}

KN_TEST(rearrange, composed_ones_refuse)
{
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 4)), *out[2];
    REFUSED(kn_diag_embed(x, 0, 1, 1), "diag_embed: x is f32[3,4], so dims 1 and 1 can't be two");
    REFUSED(kn_diag_embed(x, 0, 0, 3), "dims 0 and 3 can't be two of the 3 dims of the result");
    REFUSED(kn_diag_embed(x, INT64_MAX, 0, 1), "is too large");
    REFUSED(kn_diag_embed(NULL, 0, 0, 1), "diag_embed");
    REFUSED(kn_meshgrid(&x, 1, false, out), "meshgrid: tensor 0 of f32[3,4]");
    REFUSED(kn_meshgrid(&x, 1, true, out), "meshgrid: 1 tensors; 2 to 8 are possible");
    REFUSED(kn_channel_shuffle(x, 2), "channel_shuffle: needs x[N,C,...]");
    REFUSED(kn_channel_shuffle(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1, 3, 2)), 2), "got f32[1,3,2]");
    REFUSED(kn_cdist(x, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 5))), "cdist: needs a[...,P,M]");
    REFUSED(kn_cdist(x, x, .p = -1), ".p -1");
}
