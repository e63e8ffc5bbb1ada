/* tests/autograd/linear_loss_test.c: kn_linear_cross_entropy against cross_entropy of linear:
 * values and gradients, of one chunk of rows and of several; memory; narrow dtypes; frozen inputs;
 * the same bits by any number of threads. */
#include "kernels/memory.h"
#include "kernels/stream.h"
#include "tests/failing.h"
#include "tests/owned.h"
#include <math.h>

enum { C = 6, V = 11, IGNORED = 3, MORE = 1100 }; /* MORE rows have several chunks */

typedef struct setting {
    int64_t rows;
    kn_dtype dtype;
    bool in_out, bias, apart; /* apart: the two operations */
    double smoothing, factor; /* factor: of the gradient that arrives */
    kn_loss_reduction reduction;
    int frozen; /* bits: inputs without gradient */
} setting;

enum { INPUTS = 3 };

typedef struct found {
    double loss;
    kn_tensor *in[INPUTS], *grad[INPUTS];
} found;

static kn_tensor *targets(int64_t rows)
{
    OWNED_HOST int64_t *t = kn_host_alloc((size_t)rows * sizeof *t);
    for (int64_t i = 0; i < rows; i++)
        t[i] = i % 5 == 1 ? IGNORED : i * 7 % V;
    kn_tensor *y = kn_from(KN_I64, KN_CPU, t, KN_SHAPE(rows));
    return y;
}

static kn_tensor *input(const setting *s, int i, int ndim, const int64_t *shape)
{
    kn_tensor *t = kn_cast(kn_randn(KN_F64, KN_CPU, 17, (uint64_t)i, ndim, shape), s->dtype);
    return kn_require_grad(t, !(s->frozen >> i & 1));
}

static kn_tensor *loss_of(const setting *s, kn_tensor *const *in)
{
    kn_tensor *bias = s->bias ? in[2] : NULL, *t = targets(s->rows);
    if (s->apart)
        return kn_cross_entropy(kn_linear(in[0], in[1], bias, s->in_out), t,
                                .ignore_index = IGNORED, .smoothing = s->smoothing,
                                .reduction = s->reduction);
    return kn_linear_cross_entropy(in[0], in[1], t, .bias = bias, .in_out = s->in_out,
                                   .ignore_index = IGNORED, .smoothing = s->smoothing,
                                   .reduction = s->reduction);
}

static found find(const setting *s)
{
    found f = { .in = { input(s, 0, KN_SHAPE(s->rows, C)),
                        s->in_out ? input(s, 1, KN_SHAPE(C, V)) : input(s, 1, KN_SHAPE(V, C)),
                        input(s, 2, KN_SHAPE(V)) } };
    kn_tensor *loss = loss_of(s, f.in);
    f.loss = kn_item(loss);
    kn_backward(s->factor != 0 ? kn_scale(loss, s->factor) : loss);
    KN_CHECK(kn_ok());
    for (int i = 0; i < INPUTS; i++)
        f.grad[i] = kn_grad(f.in[i]);
    return f;
}

static double largest(kn_tensor *t)
{
    return kn_item(kn_amax(kn_abs(kn_cast(t, KN_F64)), 0, NULL, false));
}

/* The largest difference, of the size of want's largest element. */
static double apart(kn_tensor *have, kn_tensor *want)
{
    kn_set_grad_mode(false);
    double d = largest(kn_sub(kn_cast(have, KN_F64), kn_cast(want, KN_F64))) / largest(want);
    kn_set_grad_mode(true);
    return d;
}

static void check_close(const found *have, const found *want, double bound)
{
    KN_CHECK(fabs(have->loss - want->loss) <= bound * fabs(want->loss), "%.15g is not %.15g",
             have->loss, want->loss);
    for (int i = 0; i < INPUTS; i++) {
        KN_CHECK(!have->grad[i] == !want->grad[i], "a gradient of input %d", i);
        if (have->grad[i])
            KN_CHECK(apart(have->grad[i], want->grad[i]) <= bound, "gradient %d is %g off", i,
                     apart(have->grad[i], want->grad[i]));
    }
}

static const int64_t sizes[] = { 1, 7, 1024, 1025, MORE, 9000 };

KN_TEST(linear_loss, equals_the_two_operations)
{
    for (int i = 0; i < 6 * 16; i++) {
        IN_SCOPE;
        setting s = { .rows = sizes[i % 6],
                      .dtype = KN_F64,
                      .in_out = i / 6 & 1,
                      .bias = i / 6 & 2,
                      .smoothing = i / 6 & 4 ? 0.3 : 0,
                      .reduction = i / 6 & 8 ? KN_REDUCTION_SUM : KN_REDUCTION_MEAN,
                      .factor = i % 3 ? 0 : -2.5,
                      .frozen = i % 4 == 3 ? i / 4 % 7 : 0 };
        setting two = s;
        two.apart = true;
        const found have = find(&s), want = find(&two);
        check_close(&have, &want, 1e-12);
    }
}

/* The bound is some roundings of the dtype; losses are f32. */
KN_TEST(linear_loss, narrow_dtypes)
{
    static const struct {
        kn_dtype dtype;
        double bound;
    } row[] = { { KN_F32, 3e-6 }, { KN_BF16, 0.02 }, { KN_F16, 0.003 } };
    for (int i = 0; i < 12; i++) {
        IN_SCOPE;
        setting s = { .rows = i % 2 ? MORE : 40, .dtype = row[i % 3].dtype, .bias = true };
        s.factor = i > 5 ? 1024 : 0; /* a loss scale */
        const found have = find(&s);
        setting exact = s;
        exact.apart = true;
        exact.dtype = KN_F64;
        found want = { 0 };
        kn_tensor *in[INPUTS];
        for (int k = 0; k < INPUTS; k++)
            want.in[k] = in[k] = kn_require_grad(kn_detach(kn_cast(have.in[k], KN_F64)), true);
        kn_tensor *loss = loss_of(&exact, in);
        want.loss = kn_item(loss);
        KN_CHECK(kn_backward(s.factor != 0 ? kn_scale(loss, s.factor) : loss));
        for (int k = 0; k < INPUTS; k++)
            want.grad[k] = kn_grad(in[k]);
        check_close(&have, &want, row[i % 3].bound);
    }
}

/* A second backward through the same graph gives the same gradients once more. */
KN_TEST(linear_loss, backward_twice)
{
    for (int i = 0; i < 2; i++) {
        setting s = { .rows = i ? MORE : 9, .dtype = KN_F64, .bias = true };
        kn_tensor *in[INPUTS] = { input(&s, 0, KN_SHAPE(s.rows, C)), input(&s, 1, KN_SHAPE(V, C)),
                                  input(&s, 2, KN_SHAPE(V)) };
        kn_tensor *loss = loss_of(&s, in), *once[INPUTS];
        KN_CHECK(kn_backward(loss, .retain_graph = true));
        for (int k = 0; k < INPUTS; k++)
            once[k] = kn_scale(kn_detach(kn_grad(in[k])), 2);
        KN_CHECK(kn_backward(loss));
        for (int k = 0; k < INPUTS; k++)
            KN_CHECK(apart(kn_grad(in[k]), once[k]) == 0, "input %d", k);
    }
}

KN_TEST(linear_loss, nothing_counts)
{
    for (int i = 0; i < 2; i++) {
        const int64_t rows = i ? MORE : 5;
        kn_tensor *x = kn_require_grad(kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(rows, C)), true);
        kn_tensor *w = kn_require_grad(kn_randn(KN_F32, KN_CPU, 1, 2, KN_SHAPE(V, C)), true);
        kn_tensor *none = kn_full(KN_I64, KN_CPU, -100, KN_SHAPE(rows));
        kn_tensor *loss = kn_linear_cross_entropy(x, w, none);
        KN_CHECK(kn_backward(loss) && kn_item(loss) == 0);
        KN_CHECK(largest(kn_grad(x)) == 0 && largest(kn_grad(w)) == 0);
    }
}

/* A search for values that aren't finite (kn_set_check) finds none, whatever memory held before. */
KN_TEST(linear_loss, no_undefined_values)
{
    for (int i = 0; i < 2; i++) {
        setting s = { .rows = i ? MORE : 40, .dtype = KN_F32, .bias = true };
        kn_scope before = kn_scope_begin();
        for (int64_t rows = 40; rows <= 1024; rows += 984)
            kn_full(KN_F32, KN_CPU, NAN, KN_SHAPE(rows, 128));
        kn_scope_end(before);
        kn_set_check(true);
        const found f = find(&s);
        kn_set_check(false);
        KN_CHECK(isfinite(f.loss));
    }
}

/* The bytes of activations that a forward, and a backward, take at most. */
static int64_t peak(int64_t rows, int64_t classes, bool grad, double *loss)
{
    IN_SCOPE;
    OWNED_HOST int64_t *t = kn_host_alloc((size_t)rows * sizeof *t);
    for (int64_t i = 0; i < rows; i++)
        t[i] = i % classes;
    kn_tensor *x = kn_require_grad(kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(rows, 4)), true);
    kn_tensor *w = kn_require_grad(kn_randn(KN_F32, KN_CPU, 1, 2, KN_SHAPE(classes, 4)), true);
    kn_tensor *y = kn_from(KN_I64, KN_CPU, t, KN_SHAPE(rows));
    kn_ledger_reset_peaks();
    const int64_t before = kn_ledger_read().live[KN_MEM_ACTIVATION];
    kn_set_grad_mode(grad);
    kn_tensor *l = kn_linear_cross_entropy(x, w, y);
    *loss = kn_item(l);
    KN_CHECK(!grad || kn_backward(l));
    kn_set_grad_mode(true);
    const int64_t most_live = kn_ledger_read().peak[KN_MEM_ACTIVATION] - before;
    KN_CHECK(kn_ledger_read().live[KN_MEM_ACTIVATION] - before < 1024, "kept after backward");
    return most_live;
}

/* Eight chunks: an eighth of the logits, and the gradients. Without gradients the same loss. */
KN_TEST(linear_loss, logits_are_never_whole)
{
    enum { ROWS = 16384, CLASSES = 512 };
    const int64_t logits = ROWS * CLASSES * 4, grads = (ROWS + CLASSES) * 4 * 4;
    double loss, same;
    const int64_t with = peak(ROWS, CLASSES, true, &loss),
                  without = peak(ROWS, CLASSES, false, &same);
    KN_CHECK(with <= logits / 8 + grads + (16 << 10), "%lld bytes", (long long)with);
    KN_CHECK(without <= logits / 8 + (16 << 10), "%lld bytes", (long long)without);
    KN_CHECK(loss == same, "%.9g without gradients, %.9g with", same, loss);
    KN_CHECK(peak(1024, CLASSES, true, &loss) <= 1024 * (CLASSES + 2 * 4) * 4 + (16 << 10),
             "a gradient beside the logits");
}

KN_TEST(linear_loss, same_bits_by_any_threads)
{
    const int before = kn_threads();
    for (int i = 0; i < 6; i++) {
        IN_SCOPE;
        const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16 };
        setting s = { .rows = i % 2 ? 2 * MORE : 600, .dtype = types[i / 2], .bias = true };
        kn_set_threads(1);
        const found one = find(&s);
        kn_set_threads(3);
        const found three = find(&s);
        KN_CHECK(one.loss == three.loss);
        for (int k = 0; k < INPUTS; k++)
            KN_CHECK(apart(one.grad[k], three.grad[k]) == 0, "input %d", k);
    }
    kn_set_threads(before);
}

KN_TEST(linear_loss, a_bad_target_has_its_row)
{
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(MORE, C)),
              *w = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(V, C));
    kn_tensor *t = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(MORE));
    ((int64_t *)kn_data(t))[MORE - 10] = V;
    REFUSED(kn_linear_cross_entropy(x, w, t), "target 11 in row 1090");
}

static bool forward_and_backward(void *arg)
{
    kn_tensor **in = arg;
    return kn_backward(kn_linear_cross_entropy(in[0], in[1], in[INPUTS], .bias = in[2]));
}

/* Each allocation of a forward and a backward fails once: an error, and nothing stays. */
KN_TEST(linear_loss, every_allocation_fails_once)
{
    for (int i = 0; i < 2; i++) {
        IN_SCOPE;
        const setting s = { .rows = i ? MORE : 9, .dtype = KN_BF16, .bias = true };
        kn_tensor *in[] = { input(&s, 0, KN_SHAPE(s.rows, C)), input(&s, 1, KN_SHAPE(V, C)),
                            input(&s, 2, KN_SHAPE(V)), targets(s.rows) };
        each_allocation_fails(forward_and_backward, NULL, in, 20);
    }
}

/* Sizes on meta are those of a real step: so is the memory. */
KN_TEST(linear_loss, meta)
{
    for (int i = 0; i < 2; i++) {
        const int64_t rows = i ? MORE : 12;
        kn_tensor *x = kn_require_grad(kn_empty(KN_BF16, KN_META, KN_SHAPE(2, rows / 2, C)), true);
        kn_tensor *w = kn_require_grad(kn_empty(KN_BF16, KN_META, KN_SHAPE(V, C)), true);
        kn_tensor *t = kn_empty(KN_I64, KN_META, KN_SHAPE(2, rows / 2));
        kn_tensor *loss = kn_linear_cross_entropy(x, w, t);
        KN_CHECK(loss && kn_dtype_of(loss) == KN_F32 && kn_ndim(loss) == 0 && kn_backward(loss));
        KN_CHECK(kn_dtype_of(kn_grad(w)) == KN_BF16 && kn_size(kn_grad(w), 0) == V);
    }
}
