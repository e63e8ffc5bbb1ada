/* tests/autograd/every_errors_test.c: each public operation (every.h) with inputs of wrong shapes:
 * it gives a result or an error that names itself and has the shapes of its operands; and with each
 * of its allocations failing. And with kn_set_check: none of them counts as one that makes values
 * that aren't finite. */
#include "autograd/autograd.h"
#include "tests/autograd/every.h"
#include "tests/failing.h"
#include "tests/owned.h"

/* "[2,3]" of t. */
static const char *shape_of(const kn_tensor *t, char *text, size_t size)
{
    kn_describe(t, text, size);
    return strchr(text, '[');
}

static int complaints;

static void complain(const every_case *c, const char *shape, const char *error)
{
    complaints++;
    fprintf(stderr, "%s: %s isn't in '%s'\n", c->name, shape, error);
}

/* in has a wrong shape at k. An error holds it, and those of the other inputs, or of one of them
 * where there are several: which two disagree is the operation's to say. */
static void check_error(const every_case *c, kn_tensor *const *in, int n, int k)
{
    char text[128];
    kn_tensor *y = c->call(in);
    if (y) {
        KN_CHECK_OK();
        return;
    }
    const char *error = kn_error() ? kn_error() : "";
    const char *wrong = shape_of(in[k], text, sizeof text);
    if (!strstr(error, wrong))
        complain(c, wrong, error);
    bool other = n == 1;
    for (int i = 0; i < n; i++)
        other = other || (i != k && strstr(error, shape_of(in[i], text, sizeof text)));
    if (!other)
        complain(c, "another shape", error);
    kn_clear_error();
}

static kn_tensor *shaped(int ndim, const int64_t *shape)
{
    return kn_add_scalar(kn_rand(KN_F64, KN_CPU, 5, 1, ndim, shape), 0.25);
}

/* Input k with another size, one dim more, one less. */
static void vary(const every_case *c, kn_tensor **in, int n, int k)
{
    kn_tensor *right = in[k];
    const int ndim = kn_ndim(right);
    int64_t shape[KN_MAX_DIMS + 1];
    for (int d = 0; d < ndim; d++)
        shape[d] = kn_size(right, d);
    for (int d = 0; d < ndim; d++) {
        const int64_t size = shape[d];
        shape[d] = 11;
        in[k] = shaped(ndim, shape);
        check_error(c, in, n, k);
        shape[d] = size;
    }
    shape[ndim] = 13;
    in[k] = shaped(ndim + 1, shape);
    check_error(c, in, n, k);
    if (ndim > 0) {
        in[k] = shaped(ndim - 1, shape);
        check_error(c, in, n, k);
    }
    in[k] = right;
}

/* Of a function's first row; others may call further ones. */
static bool first_set(const every_case *row, every_set *s)
{
    bool first = true;
    EACH_CASE(c)
    first = first && (strcmp(c->name, row->name) != 0 || c->line >= row->line);
    return first && every_next(row, s);
}

KN_TEST(every_errors, have_the_shapes)
{
    EACH_CASE(c)
    {
        every_set s = { 0 };
        if (!first_set(c, &s))
            continue;
        IN_SCOPE;
        kn_tensor *leaf[EVERY_MAX_IN], *x[EVERY_MAX_IN];
        every_leaves(&s, KN_F64, KN_CPU, leaf);
        every_inputs(&s, leaf, x);
        for (int k = 0; k < s.n; k++)
            vary(c, x, s.n, k);
    }
    KN_CHECK(complaints == 0, "%d messages lack a shape", complaints);
}

static bool runs(const every_case *c, kn_tensor *const *x, bool backward)
{
    kn_tensor *y = c->call(x);
    if (!y || !backward || !c->differentiable)
        return y && kn_ok();
    return kn_backward(y, .grad = kn_ones_like(y), .retain_graph = true);
}

/* Of a call in bf16, whose sums have tensors of their own, and of a call in f64 and its backward:
 * each is an error that leaves nothing. */
KN_TEST(every_errors, each_allocation_may_fail)
{
    EACH_CASE(c)
    for (int wide = 0; wide < 2; wide++) {
        every_set s = { 0 };
        IN_SCOPE;
        kn_tensor *leaf[EVERY_MAX_IN], *x[EVERY_MAX_IN];
        KN_CHECK(every_next(c, &s));
        every_leaves(&s, wide ? KN_F64 : KN_BF16, KN_CPU, leaf);
        every_inputs(&s, leaf, x);
        if (runs(c, x, wide))
            EACH_ALLOCATION_FAILS(runs(c, x, wide), 0);
        kn_clear_error();
    }
}

KN_TEST(every_errors, of_operations_in_place)
{
    kn_tensor *t = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 3)),
              *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(4));
    for (int i = 0; i < 4; i++) {
        KN_CHECK(!(i == 0   ? kn_copy_(t, x)
                   : i == 1 ? kn_add_(t, x, 2)
                   : i == 2 ? kn_mul_(t, x)
                            : kn_lerp_(t, x, 0.5)));
        KN_CHECK(strstr(kn_error(), "f32[2,3]") && strstr(kn_error(), "f32[4]"));
        kn_clear_error();
    }
}

KN_TEST(every_errors, a_check_finds_nothing_where_all_is_finite)
{
    kn_set_check(true);
    EACH_CASE(c)
    EACH_SET(c, s)
    {
        IN_SCOPE;
        kn_tensor *leaf[EVERY_MAX_IN], *x[EVERY_MAX_IN];
        every_leaves(&s, KN_F32, KN_CPU, leaf);
        every_inputs(&s, leaf, x);
        kn_tensor *y = c->call(x);
        KN_CHECK(y && (!c->differentiable || kn_backward(y, .grad = kn_ones_like(y))), "%s",
                 c->name);
    }
    kn_set_check(false);
}
