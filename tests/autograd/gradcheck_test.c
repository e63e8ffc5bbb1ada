/* tests/autograd/gradcheck_test.c: the public gradient check finds wrong gradients, says where they
 * are wrong, and takes right ones. */
#include "autograd/gradcheck.h"
#include "nn/layers.h"
#include "nn/nn_internal.h"
#include "tests/owned.h"

static kn_tensor *leaf(int ndim, const int64_t *shape)
{
    return kn_require_grad(kn_randn(KN_F64, KN_CPU, 11, (uint64_t)ndim, ndim, shape), true);
}

/* y = 3 x, with a gradient that goes wrong in a way. */
typedef enum fault {
    NO_FAULT = 0,
    ONE_ELEMENT,     /* element 4 is off by 0.25 */
    ALL_NAN,         /* not a number */
    FORGOTTEN,       /* NULL */
    IGNORES_STRIDES, /* reads elements of dy side by side */
    KEEPS_FIRST      /* of two calls before one backward, one gets no gradient */
} fault;

static int calls;

static kn_values triple_forward(kn_function_run *run, kn_values in)
{
    (void)run;
    return KN_VALUES(kn_scale(in.v[0], 3));
}

static kn_values triple_backward(kn_function_run *run, kn_values dout)
{
    kn_tensor *dx = kn_contiguous(kn_scale(dout.v[0], 3));
    double *d = kn_data(dx);
    switch (*(const fault *)run->arg) {
    case ONE_ELEMENT:
        d[4] += 0.25;
        break;
    case ALL_NAN:
        for (int64_t i = 0; i < kn_numel(dx); i++)
            d[i] = NAN;
        break;
    case FORGOTTEN:
        return KN_VALUES(NULL);
    case IGNORES_STRIDES: {
        kn_tensor *dy = dout.v[0];
        kn_tensor *flat = kn_contiguous(kn_transpose(dy, 0, 1));
        if (!kn_is_contiguous(dy))
            kn_copy_(dx, kn_scale(kn_reshape(flat, kn_ndim(dy), kn_shape(dy)), 3));
        break;
    }
    case KEEPS_FIRST:
        if (calls++ == 3)
            return KN_VALUES(NULL);
        break;
    case NO_FAULT:
        break;
    }
    return KN_VALUES(dx);
}

static const kn_function triple = { .name = "triple",
                                    .forward = triple_forward,
                                    .backward = triple_backward };

static kn_values triple_of(kn_values in, void *arg)
{
    return kn_function_call_n(&triple, KN_VALUES(in.v[0]), arg, sizeof(fault));
}

static bool check_triple(fault f, kn_tensor *x)
{
    calls = 0;
    return kn_gradcheck(triple_of, KN_VALUES(x), .arg = &f);
}

KN_TEST(gradcheck, finds_wrong_gradients)
{
    kn_tensor *x = leaf(KN_SHAPE(2, 3));
    KN_CHECK(check_triple(NO_FAULT, x));
    KN_CHECK(!check_triple(ONE_ELEMENT, x));
    KN_CHECK(strstr(kn_error(), "gradcheck: input 1 f64[2,3], element [1,1]: backward gives "));
    KN_CHECK(strstr(kn_error(), "they differ by 0.25, allowed is ") &&
             strstr(kn_error(), "(1 elements are off)"));
    kn_clear_error();
    REFUSED(check_triple(ALL_NAN, x), "backward gives nan, differences give ");
    REFUSED(check_triple(FORGOTTEN, x), "backward gives 0, differences give ");
    REFUSED(check_triple(IGNORES_STRIDES, x), "with inputs and gradients that aren't contiguous (");
    REFUSED(check_triple(KEEPS_FIRST, x), "with two calls before one backward (");
    KN_CHECK(!kn_grad(x));
}

/* ---- inputs ---------------------------------------------------------------------------------- */

static kn_values weighted(kn_values in, void *arg) /* x[..., 3], index i64[n], maybe more -> */
{
    (void)arg;
    kn_tensor *picked = kn_index_select(in.v[0], -1, in.v[1]);
    return KN_VALUES(kn_mul(picked, kn_exp(in.v[2] ? in.v[2] : picked)), in.v[1]);
}

static kn_values dropped(kn_values in, void *arg)
{
    (void)arg;
    return KN_VALUES(kn_mul(in.v[0], kn_dropout(in.v[0], 0.5)));
}

static kn_values product(kn_values in, void *arg)
{
    (void)arg;
    return KN_VALUES(kn_mul(in.v[0], kn_sin(in.v[1])), kn_detach(in.v[0]));
}

KN_TEST(gradcheck, takes_all_kinds_of_inputs)
{
    kn_tensor *x = leaf(KN_SHAPE(2, 3));
    kn_tensor *i = kn_from(KN_I64, KN_CPU, (int64_t[]){ 2, 0, 2 }, KN_SHAPE(3));
    KN_CHECK(kn_gradcheck(weighted, KN_VALUES(x, i, NULL)));
    KN_CHECK(kn_gradcheck(weighted, KN_VALUES(x, i, kn_scale(x, 2))));
    KN_CHECK(kn_gradcheck(weighted, KN_VALUES(kn_expand(leaf(KN_SHAPE(3)), KN_SHAPE(2, 3)), i, x)));
    KN_CHECK(kn_gradcheck(product, KN_VALUES(kn_transpose(x, 0, 1), kn_transpose(x, 0, 1))));
    KN_CHECK(kn_gradcheck(product, KN_VALUES(x, x)));
    KN_CHECK(kn_gradcheck(product, KN_VALUES(leaf(KN_SCALAR), x)));
    KN_CHECK(kn_gradcheck(product, KN_VALUES(leaf(KN_SHAPE(0, 3)), leaf(KN_SHAPE(3)))));
    KN_CHECK(!kn_grad(x));
}

/* Right for contiguous inputs alone. */
static kn_values ignores_strides(kn_values in, void *arg)
{
    (void)arg;
    return KN_VALUES(kn_scale(in.v[0], kn_is_contiguous(in.v[0]) ? 3 : 4));
}

static kn_values wants_one_input(kn_values in, void *arg)
{
    (void)arg;
    if (in.v[0] != in.v[1])
        kn_fail("two inputs");
    return KN_VALUES(kn_mul(in.v[0], in.v[1]));
}

KN_TEST(gradcheck, inputs_with_gaps_and_inputs_given_twice)
{
    kn_tensor *x = leaf(KN_SHAPE(2, 3));
    REFUSED(kn_gradcheck(ignores_strides, KN_VALUES(x)),
            "with inputs and gradients that aren't contiguous");
    KN_CHECK(kn_gradcheck(wants_one_input, KN_VALUES(x, x)));
    REFUSED(kn_gradcheck(wants_one_input, KN_VALUES(x, kn_scale(x, 1))), "two inputs");
}

/* It draws the same numbers each time, and leaves the keys as they were. */
KN_TEST(gradcheck, random_draws_repeat)
{
    kn_tensor *x = leaf(KN_SHAPE(4, 4)), *ones = kn_ones(KN_F32, KN_CPU, KN_SHAPE(64));
    double sum[2];
    for (int turn = 0; turn < 2; turn++) {
        kn_set_step(5);
        KN_CHECK(turn == 0 || kn_gradcheck(dropped, KN_VALUES(x)));
        kn_tensor *places = kn_arange(KN_F32, KN_CPU, 64);
        sum[turn] = kn_item(sum_of(kn_mul(places, kn_dropout(ones, 0.5))));
    }
    KN_CHECK(sum[0] == sum[1] && sum[0] > 0);
}

/* ---- what fn uses and returns ---------------------------------------------------------------- */

static kn_values called(kn_values in, void *module)
{
    return KN_VALUES(kn_call(module, in.v[0]));
}

/* Parameters beside the inputs keep their gradients, and their model its count of micro-batches. */
KN_TEST(gradcheck, leaves_parameters_as_they_were)
{
    OWNED_MODULE kn_linear l = { 0 };
    kn_tensor *x = leaf(KN_SHAPE(2, 3));
    KN_CHECK(kn_linear_init(&l, NULL, "l", 3, 2, .dtype = KN_F64));
    kn_tensor *w = kn_module_param(&l, "weight");
    for (int turn = 0; turn < 3; turn++) { /* the last one computes again in backward */
        double before[6] = { 0 }, after[6] = { 0 };
        KN_CHECK(turn != 1 || kn_backward(sum_of(kn_call(&l, x))));
        KN_CHECK(turn < 2 || kn_recompute(&l, true));
        KN_CHECK(turn == 0 || kn_to_host(kn_grad(w), before, sizeof before));
        KN_CHECK(kn_gradcheck(called, KN_VALUES(x), .arg = &l));
        KN_CHECK((kn_grad(w) != NULL) == (turn > 0), "turn %d", turn);
        KN_CHECK(turn == 0 || kn_to_host(kn_grad(w), after, sizeof after));
        KN_CHECK(memcmp(before, after, sizeof after) == 0, "turn %d", turn);
        KN_CHECK(kn_passes_count(&w->leaf->passes) == (turn > 0), "turn %d", turn);
    }
}

static kn_values with_inputs(kn_values in, void *arg)
{
    (void)arg;
    return KN_VALUES(in.v[0], kn_mul(in.v[0], in.v[0]), in.v[0]);
}

KN_TEST(gradcheck, results_that_are_inputs)
{
    KN_CHECK(kn_gradcheck(with_inputs, KN_VALUES(leaf(KN_SHAPE(2, 3)))));
}

/* ---- wrong uses ------------------------------------------------------------------------------ */

static kn_values nothing(kn_values in, void *arg)
{
    (void)in;
    return (kn_values){ .n = *(int *)arg };
}

KN_TEST(gradcheck, wrong_uses)
{
    kn_tensor *x = leaf(KN_SHAPE(2)), *c = kn_detach(x);
    REFUSED(kn_gradcheck(NULL, KN_VALUES(x)), "gradcheck: no function");
    REFUSED(kn_gradcheck(product, (kn_values){ 0 }), "gradcheck: takes 1 to 8 inputs, got 0");
    REFUSED(kn_gradcheck(product, KN_VALUES(c, c)), "gradcheck: no input requires grad");
    kn_tensor *f = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(2)), true);
    REFUSED(kn_gradcheck(product, KN_VALUES(x, f)),
            "gradcheck: input 2 is f32[2] on cpu; differences need f64");
    REFUSED(kn_gradcheck(product, KN_VALUES(x, x), .eps = -1), "eps is -1");
    REFUSED(kn_gradcheck(product, KN_VALUES(x, x), .atol = NAN), "atol nan");
    REFUSED(kn_gradcheck(nothing, KN_VALUES(x), .arg = &(int){ 0 }),
            "gradcheck: the function returned 0 results");
    REFUSED(kn_gradcheck(nothing, KN_VALUES(x), .arg = &(int){ 1 }), "NULL");
    REFUSED(kn_gradcheck(nothing, KN_VALUES(x), .arg = &(int){ 100 }), "gradcheck");
    REFUSED(kn_gradcheck(triple_of, KN_VALUES(kn_require_grad(kn_exp(c), true)), .arg = NULL),
            "triple: arg is NULL");
}
