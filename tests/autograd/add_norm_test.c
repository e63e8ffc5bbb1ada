/* tests/autograd/add_norm_test.c: kn_add_layer_norm and kn_add_rms_norm beside kn_add and the norm:
 * the bits of the forward in each dtype, and the gradients of whichever results and inputs are
 * used. */
#include "knap.h"
#include "tests/owned.h"

enum { X, ADD, W, B, INPUTS }; /* leaves */

typedef enum layout { DENSE, TRANSPOSED, STRETCHED, LAYOUTS } layout;

/* The tensor that is normed, and the kind of norm. */
typedef struct setting {
    kn_dtype dtype, weight; /* weight KN_DTYPE_DEFAULT: no weight, no bias */
    bool rms, same;         /* same: x is added to itself */
    layout layout;
    int used;   /* 1: the norm, 2: the sum, 3: both */
    int wanted; /* bit i: input i requires a gradient */
} setting;

typedef struct outcome {
    kn_tensor *y, *sum, *grad[INPUTS];
} outcome;

/* Normal numbers [3,5,24] that lie in memory as l says. */
static kn_tensor *input(kn_dtype t, layout l, uint64_t stream)
{
    if (l == TRANSPOSED)
        return kn_transpose(kn_randn(t, KN_CPU, 1, stream, KN_SHAPE(3, 24, 5)), 1, 2);
    kn_tensor *x = kn_randn(t, KN_CPU, 1, stream, KN_SHAPE(3, 5, 24));
    return l == STRETCHED ? kn_expand(kn_slice(x, 1, 2, 3), KN_SHAPE(3, 5, 24)) : x;
}

static outcome run(const setting *s, bool at_once)
{
    outcome o = { 0 };
    kn_tensor *in[INPUTS] = { input(s->dtype, s->layout, 1), input(s->dtype, s->layout, 2) };
    if (s->weight) {
        in[W] = kn_randn(s->weight, KN_CPU, 1, 3, KN_SHAPE(24));
        in[B] = s->rms ? NULL : kn_randn(s->weight, KN_CPU, 1, 4, KN_SHAPE(24));
    }
    if (s->same)
        in[ADD] = in[X];
    for (int i = 0; i < INPUTS; i++)
        if (in[i] && s->wanted >> i & 1)
            kn_require_grad(in[i], true);
    if (!at_once) {
        o.sum = kn_add(in[X], in[ADD]);
        o.y = s->rms ? kn_rms_norm(o.sum, in[W], 1e-3) : kn_layer_norm(o.sum, in[W], in[B], 1e-3);
    } else if (s->rms) {
        o.y = kn_add_rms_norm(in[X], in[ADD], in[W], 1e-3, &o.sum);
    } else {
        o.y = kn_add_layer_norm(in[X], in[ADD], in[W], in[B], 1e-3, &o.sum);
    }
    kn_tensor *weigh[2] = { input(s->dtype, DENSE, 5), input(s->dtype, DENSE, 6) };
    kn_tensor *part[2] = { kn_mul(o.y, weigh[0]), kn_mul(o.sum, weigh[1]) };
    kn_tensor *loss = s->used == 3 ? kn_add(part[0], part[1]) : part[s->used - 1];
    if (loss && kn_requires_grad(loss))
        kn_backward(sum_of(loss));
    for (int i = 0; i < INPUTS && kn_ok(); i++)
        o.grad[i] = in[i] && s->wanted >> i & 1 ? kn_grad(in[i]) : NULL;
    KN_CHECK_OK();
    return o;
}

static char *shown(const setting *s, char *text, size_t size)
{
    snprintf(text, size, "%s, weights %s, rms %d, same %d, layout %d, used %d, wanted %d",
             kn_dtype_name(s->dtype), s->weight ? kn_dtype_name(s->weight) : "none", s->rms,
             s->same, s->layout, s->used, s->wanted);
    return text;
}

static void check_bits(const setting *s, const char *what, kn_tensor *a, kn_tensor *b)
{
    char text[160];
    KN_CHECK(!a == !b, "%s: %s has a gradient in one of the two only", shown(s, text, sizeof text),
             what);
    if (!a)
        return;
    a = kn_contiguous(a), b = kn_contiguous(b);
    KN_CHECK(memcmp(kn_data(a), kn_data(b), (size_t)kn_numel(a) * kn_dtype_size(kn_dtype_of(a))) ==
                 0,
             "%s: other bits of %s", shown(s, text, sizeof text), what);
}

/* The largest distance of a from truth, beside truth's largest value. */
static double distance(kn_tensor *a, kn_tensor *truth)
{
    kn_tensor *wide = kn_cast(a, KN_F64);
    return kn_item(kn_amax(kn_abs(kn_sub(wide, truth)), 0, NULL, false)) /
           kn_item(kn_amax(kn_abs(truth), 0, NULL, false));
}

static void compare(const setting *s)
{
    static const char *const names[INPUTS] = { "x", "what is added", "weight", "bias" };
    IN_SCOPE;
    const outcome one = run(s, true), two = run(s, false);
    check_bits(s, "the norm", one.y, two.y);
    check_bits(s, "the sum", one.sum, two.sum);
    /* 16 bits have one rounding less, and f32 where the reference computes it in f64 */
    const double close = s->dtype == KN_BF16 ? 0x1p-7 : s->dtype == KN_F16 ? 0x1p-10 : 1e-6;
    for (int i = 0; i < INPUTS; i++) {
        if (s->dtype == KN_F64 || i > ADD || !(s->used & 1))
            check_bits(s, names[i], one.grad[i], two.grad[i]);
        else if (two.grad[i])
            KN_CHECK(distance(one.grad[i], kn_cast(two.grad[i], KN_F64)) < close, "%s: d%s",
                     shown(s, (char[160]){ 0 }, 160), names[i]);
    }
}

KN_TEST(add_norm, is_kn_add_and_the_norm_in_each_dtype)
{
    static const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };
    for (int i = 0; i < 4 * 3 * 2 * LAYOUTS; i++) {
        setting s = { .dtype = dtypes[i % 4], .rms = i / 12 % 2, .layout = i / 24, .used = 3 };
        const kn_dtype weights[] = { s.dtype, s.dtype == KN_F64 ? KN_F64 : KN_F32,
                                     KN_DTYPE_DEFAULT };
        s.weight = weights[i / 4 % 3];
        s.wanted = s.layout == DENSE ? 15 : 0; /* a view of something else is no leaf */
        compare(&s);
    }
}

/* The sum alone, the norm alone; an input that wants no gradient, or stands on both sides. */
KN_TEST(add_norm, gradients_of_what_is_used_and_wanted)
{
    for (int used = 1; used <= 3; used++)
        for (int wanted = 1; wanted < 16; wanted++)
            for (int k = 0; k < 4; k++) {
                const bool same = k & 2;
                if (!same || !(wanted & 1 << ADD))
                    compare(&(setting){ .dtype = KN_F64,
                                        .weight = KN_F64,
                                        .rms = k & 1,
                                        .same = same,
                                        .used = used,
                                        .wanted = wanted });
            }
}

static kn_tensor *note(kn_tensor *grad, void *arg)
{
    *(const void **)arg = kn_data(grad);
    return grad;
}

/* Of 16 bits the gradient is rounded once: it is nearer to that of f64 than in two steps. */
KN_TEST(add_norm, gradient_is_one_tensor_and_rounded_once)
{
    const void *at[2] = { 0 };
    double far[2];
    for (int once = 0; once < 2; once++) {
        kn_tensor *leaf = kn_require_grad(input(KN_BF16, DENSE, 1), true), *sum;
        kn_tensor *x = kn_scale(leaf, 1), *add = kn_scale(leaf, 1), *y;
        kn_on_grad(x, note, &at[0]);
        kn_on_grad(add, note, &at[1]);
        if (once)
            y = kn_add_layer_norm(x, add, NULL, NULL, 0, &sum);
        else
            y = kn_layer_norm(sum = kn_add(x, add), NULL, NULL, 0);
        kn_tensor *gy = input(KN_BF16, DENSE, 5), *gs = input(KN_BF16, DENSE, 6);
        KN_CHECK(kn_backward(sum_of(kn_add(kn_mul(y, gy), kn_mul(sum, gs)))));
        KN_CHECK(at[0] && at[0] == at[1], "x and what is added have gradients of their own");
        kn_tensor *wide = kn_require_grad(kn_cast(kn_detach(sum), KN_F64), true);
        y = kn_layer_norm(wide, NULL, NULL, 0);
        gy = kn_cast(gy, KN_F64), gs = kn_cast(gs, KN_F64);
        kn_backward(sum_of(kn_add(kn_mul(y, gy), kn_mul(wide, gs))));
        far[once] = kn_item(
            mean_of(kn_square(kn_sub(kn_scale(kn_grad(wide), 2), kn_cast(kn_grad(leaf), KN_F64)))));
    }
    KN_CHECK(far[1] < 0.9 * far[0], "%g at once, %g in two steps", far[1], far[0]);
}

KN_TEST(add_norm, errors)
{
    kn_tensor *a = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 4)),
              *row = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4)), *sum = a;
    REFUSED(kn_add_layer_norm(a, row, NULL, NULL, 0, &sum),
            "add_layer_norm: x is f32[2,4], what is added to it is f32[4]; both should have one "
            "shape and dtype");
    KN_CHECK(!sum, "a sum beside an error");
    REFUSED(kn_add_rms_norm(a, kn_cast(a, KN_BF16), NULL, 0, &sum), "is bf16[2,4]; both");
    REFUSED(kn_add_rms_norm(a, a, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3)), 0, &sum),
            "add_rms_norm: x is f32[2,4], weight is f32[3]; it should be [4]");
    REFUSED(kn_add_rms_norm(a, a, NULL, -1, &sum), "add_rms_norm: eps is -1");
    REFUSED(kn_add_rms_norm(a, NULL, NULL, 0, &sum),
            "add_rms_norm: argument 2 is NULL although no error stands");
    REFUSED(kn_add_layer_norm(kn_cast(a, KN_I64), a, NULL, NULL, 0, &sum), "needs a float tensor");
}
