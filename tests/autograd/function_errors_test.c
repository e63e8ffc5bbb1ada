/* tests/autograd/function_errors_test.c: wrong uses of operations of one's own: each is a sentence
 * that names the function and the user's line, and nothing is left behind. */
#undef KN_BUILDING
#include "knap.h"
#include "tests/owned.h"

static kn_tensor *leaf(kn_dtype dtype, uint64_t stream, int ndim, const int64_t *shape)
{
    return kn_require_grad(kn_randn(dtype, KN_CPU, 7, stream, ndim, shape), true);
}

/* ---- wrong uses ----------------------------------------------------------------------------- */

typedef enum wrong {
    RIGHT = 0,
    NO_RESULT,
    TOO_MANY_RESULTS,
    NULL_RESULT,
    NULL_RESULT_WITH_ERROR,
    WRITES_INPUT,
    SAVES_TOO_MANY,
    SAVES_FOR_ANOTHER,
    OPERATION_FAILS,
    BACKWARD, /* from here on backward goes wrong */
    FORGETS_AN_INPUT = BACKWARD,
    NULL_GRADIENT,
    WRONG_SHAPE,
    WRONG_DTYPE,
    WRONG_DEVICE,
    HAS_A_GRAPH,
    WRITES_DOUT,
    SAVES_IN_BACKWARD,
    BACKWARD_SAYS_ERROR,
    BACKWARD_OPERATION_FAILS,
    WRONGS
} wrong;

static kn_function_run *old_run;
static int line;

static kn_values wrong_forward(kn_function_run *run, kn_values in)
{
    kn_tensor *x = in.v[0], *y = kn_scale(x, 2);
    old_run = run;
    kn_save_for_backward(run, x);
    switch (*(const wrong *)run->arg) {
    case NO_RESULT:
        return (kn_values){ 0 };
    case TOO_MANY_RESULTS:
        return (kn_values){ .n = KN_MAX_VALUES + 1 };
    case NULL_RESULT:
        return KN_VALUES(y, NULL);
    case NULL_RESULT_WITH_ERROR:
        kn_fail("the sentence of forward");
        return KN_VALUES(NULL);
    case WRITES_INPUT:
        kn_fill_(x, 1);
        break;
    case SAVES_TOO_MANY:
        kn_save_for_backward(run, x, x, x, x, x, x, x, x);
        break;
    case SAVES_FOR_ANOTHER:
        kn_save_for_backward(&(kn_function_run){ 0 }, x);
        break;
    case OPERATION_FAILS:
        line = __LINE__ + 1;
        return KN_VALUES(kn_matmul(x, y));
    default:
        break;
    }
    return KN_VALUES(y);
}

static kn_values wrong_backward(kn_function_run *run, kn_values dout)
{
    kn_tensor *x = run->saved.v[0], *dx = kn_scale(dout.v[0], 2);
    switch (*(const wrong *)run->arg) {
    case FORGETS_AN_INPUT:
        return KN_VALUES(dx);
    case NULL_GRADIENT:
        return KN_VALUES(NULL, NULL);
    case WRONG_SHAPE:
        return KN_VALUES(kn_reshape(dx, KN_SHAPE(3, 2)), NULL);
    case WRONG_DTYPE:
        return KN_VALUES(kn_cast(dx, KN_F64), NULL);
    case WRONG_DEVICE:
        return KN_VALUES(kn_empty(KN_F32, KN_META, KN_SHAPE(2, 3)), NULL);
    case HAS_A_GRAPH:
        kn_set_grad_mode(true);
        return KN_VALUES(kn_mul(dx, kn_require_grad(kn_detach(x), true)), NULL);
    case WRITES_DOUT:
        kn_fill_(dout.v[0], 1);
        break;
    case SAVES_IN_BACKWARD:
        kn_save_for_backward(run, dx);
        break;
    case BACKWARD_SAYS_ERROR:
        kn_fail("the sentence of backward");
        break;
    case BACKWARD_OPERATION_FAILS:
        line = __LINE__ + 1;
        return KN_VALUES(kn_matmul(x, x), NULL);
    default:
        break;
    }
    return KN_VALUES(dx, NULL);
}

static const kn_function bad = { .name = "bad",
                                 .forward = wrong_forward,
                                 .backward = wrong_backward };

static const char *const sentences[WRONGS] = {
    [NO_RESULT] = "forward of 'bad': returned 0 results, not 1 to 8",
    [TOO_MANY_RESULTS] = "forward of 'bad': returned 9 results, not 1 to 8",
    [NULL_RESULT] = "forward of 'bad': returned NULL as result 2 although no error stands",
    [NULL_RESULT_WITH_ERROR] = "the sentence of forward in forward of 'bad', ",
    [WRITES_INPUT] = "forward of 'bad': wrote in place to input 1, which needs a gradient",
    [SAVES_TOO_MANY] = "kn_save_for_backward: 8 tensors after 1, at most 8 are saved",
    [SAVES_FOR_ANOTHER] = "kn_save_for_backward: belongs into the forward of the run",
    [OPERATION_FAILS] = "matmul: ",
    [FORGETS_AN_INPUT] = "returned 1 gradients for 2 inputs",
    [WRONG_SHAPE] = "the gradient of input 1 is f32[3,2], the input was f32[2,3]",
    [WRONG_DTYPE] = "the gradient of input 1 is f64[2,3], the input was f32[2,3]",
    [WRONG_DEVICE] = "the gradient of input 1 is on meta, the input was on cpu",
    [HAS_A_GRAPH] = "the gradient of input 1 has a graph, which only .create_graph asks for",
    [WRITES_DOUT] = "wrote in place to the gradient of result 1; write to a copy",
    [SAVES_IN_BACKWARD] = "kn_save_for_backward: belongs into the forward of the run",
    [BACKWARD_SAYS_ERROR] = "the sentence of backward in backward of 'bad' called at ",
    [BACKWARD_OPERATION_FAILS] = "matmul: ",
};

KN_TEST(function_errors, every_wrong_use_is_a_sentence_that_names_it)
{
    for (wrong w = RIGHT; w < WRONGS; w++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *x = leaf(KN_F32, 1, KN_SHAPE(2, 3));
        char place[64], inside[64];
        snprintf(place, sizeof place, "function_errors_test.c:%d", __LINE__ + 1);
        kn_tensor *y = kn_function_call_n(&bad, KN_VALUES(x, x), &w, sizeof w).v[0];
        KN_CHECK(kn_ok() == (!sentences[w] || w >= BACKWARD), "%d: %s", w,
                 kn_error() ? kn_error() : "no error");
        bool done = kn_backward(y ? sum_of(y) : NULL);
        KN_CHECK(done == !sentences[w] && kn_grad_mode(), "%d", w);
        if (!sentences[w]) {
            kn_scope_end(scope);
            continue;
        }
        const char *error = kn_error();
        KN_CHECK(error && strstr(error, sentences[w]) && strstr(error, "'bad'"), "%d: %s", w,
                 error ? error : "no error");
        snprintf(inside, sizeof inside, "function_errors_test.c:%d", line);
        const bool own = w == OPERATION_FAILS || w == BACKWARD_OPERATION_FAILS;
        KN_CHECK(own ? strstr(error, inside) != NULL
                     : strstr(error, "function_errors_test.c:") != NULL,
                 "%s", error);
        KN_CHECK(w < BACKWARD || strstr(error, place), "not called at %s: %s", place, error);
        kn_clear_error();
        KN_CHECK(!kn_grad(x));
        kn_scope_end(scope);
    }
}

KN_TEST(function_errors, wrong_calls)
{
    kn_tensor *x = leaf(KN_F32, 1, KN_SHAPE(2, 3)), *b = kn_ones(KN_F32, KN_CPU, KN_SCALAR);
    REFUSED(kn_function_call(NULL, x), "kn_function_call: a function has a .name and a .forward");
    REFUSED(kn_function_call(&(kn_function){ .name = "half" }, x),
            "a function has a .name and a .forward");
    REFUSED(kn_function_call_n(&bad, (kn_values){ .n = 9 }, NULL, 0).n,
            "bad: takes 1 to 8 tensors, got 9");
    REFUSED(kn_function_call_n(&bad, (kn_values){ .n = -1 }, NULL, 0).n,
            "bad: takes 1 to 8 tensors, got -1");
    REFUSED(kn_function_call_n(&bad, KN_VALUES(x, b), NULL, 7).n, "bad: arg is NULL, of 7 bytes");
    REFUSED(kn_function_call(&bad, x, NULL), "bad: input 2 is NULL although no error stands");
    KN_CHECK(!kn_function_call(&bad, x, (kn_tensor *)(void *)&bad));
    KN_CHECK(kn_error() && strstr(kn_error(), "bad"));
    kn_clear_error();
    /* after forward has ended, in the forward of another, of none */
    KN_CHECK(kn_function_call_n(&bad, KN_VALUES(x, x), &(wrong){ RIGHT }, sizeof(wrong)).n == 1);
    REFUSED(kn_save_for_backward(old_run, x),
            "kn_save_for_backward: belongs into the forward of the run");
    REFUSED(kn_save_for_backward(NULL, x), "kn_save_for_backward");
    kn_fail("the first");
    REFUSED(kn_function_call(&bad, x, b), "the first");
}
