/* tests/autograd/einsum_test.c: sums of products against loops over all letters; ellipses; products
 * that keep views; errors with their position. */
#include "tests/autograd/expect.h"
#include "tests/owned.h"

typedef struct sum_case {
    const char *equation;
    int n;
    struct {
        int ndim;
        int64_t shape[5];
    } in[3];
} sum_case;

static const sum_case sums[] = {
    { "ij->ji", 1, { { 2, { 2, 3 } } } },
    { "ij->", 1, { { 2, { 2, 3 } } } },
    { "ijk->ik", 1, { { 3, { 2, 3, 4 } } } },
    { "ii->i", 1, { { 2, { 3, 3 } } } },
    { "iij->ji", 1, { { 3, { 2, 2, 3 } } } },
    { "jiiij->ij", 1, { { 5, { 2, 3, 3, 3, 2 } } } },
    { "->", 1, { { 0, { 0 } } } },
    { "i,i->", 2, { { 1, { 4 } }, { 1, { 4 } } } },
    { "i,j->ij", 2, { { 1, { 4 } }, { 1, { 3 } } } },
    { "i,j->", 2, { { 1, { 4 } }, { 1, { 3 } } } },
    { ",ij->ij", 2, { { 0, { 0 } }, { 2, { 2, 3 } } } },
    { "ij,jk->ik", 2, { { 2, { 2, 3 } }, { 2, { 3, 4 } } } },
    { " i j , k j -> k i ", 2, { { 2, { 2, 3 } }, { 2, { 4, 3 } } } },
    { "ij,ij->ij", 2, { { 2, { 2, 3 } }, { 2, { 2, 3 } } } },
    { "ij,ij->i", 2, { { 2, { 2, 3 } }, { 2, { 2, 3 } } } },
    { "ij,ji->", 2, { { 2, { 2, 3 } }, { 2, { 3, 2 } } } },
    { "ij,kl->ik", 2, { { 2, { 2, 3 } }, { 2, { 4, 2 } } } },
    { "bhtd,bhsd->bhts", 2, { { 4, { 2, 3, 2, 4 } }, { 4, { 2, 3, 5, 4 } } } },
    { "bhts,bshd->bthd", 2, { { 4, { 2, 3, 2, 4 } }, { 4, { 2, 4, 3, 5 } } } },
    { "btc,oc->bto", 2, { { 3, { 2, 3, 4 } }, { 2, { 5, 4 } } } },
    { "abcd,cbea->de", 2, { { 4, { 2, 3, 2, 4 } }, { 4, { 2, 3, 3, 2 } } } },
    { "bij,kj->bik", 2, { { 3, { 1, 2, 3 } }, { 2, { 2, 1 } } } },
    { "bij,bjk->bik", 2, { { 3, { 1, 2, 3 } }, { 3, { 2, 3, 2 } } } },
    { "bij,bjk->ik", 2, { { 3, { 1, 2, 3 } }, { 3, { 2, 3, 2 } } } },
    { "aib,ibb->ab", 2, { { 3, { 2, 3, 2 } }, { 3, { 3, 2, 2 } } } },
    { "ij,jk,kl->il", 3, { { 2, { 2, 3 } }, { 2, { 3, 4 } }, { 2, { 4, 2 } } } },
    { "i,j,k->kji", 3, { { 1, { 2 } }, { 1, { 3 } }, { 1, { 2 } } } },
    { "bi,oij,bj->bo", 3, { { 2, { 2, 3 } }, { 3, { 2, 3, 4 } }, { 2, { 2, 4 } } } },
    { "ij,jk->ik", 2, { { 2, { 2, 0 } }, { 2, { 0, 4 } } } },
    { "ij,jk->ik", 2, { { 2, { 0, 3 } }, { 2, { 3, 4 } } } },
    { "aA,Ab->ba", 2, { { 2, { 2, 3 } }, { 2, { 3, 2 } } } },
};
enum { SUMS = sizeof sums / sizeof *sums };

/* ---- the sum by loops ------------------------------------------------------------------------ */

/* The letters of operand k; k == n: of the result. */
static void letters_of(const sum_case *c, int k, char *out)
{
    const char *s = c->equation;
    for (int i = 0; i < k; s++)
        if (*s == ',' || (s[0] == '-' && s[1] == '>' && s++))
            i++;
    for (; *s && *s != ',' && *s != '-'; s++)
        if (*s != ' ')
            *out++ = *s;
    *out = 0;
}

static double element(kn_tensor *x, const char *letters, const int64_t *at)
{
    int64_t place = 0;
    for (int d = 0; letters[d]; d++) {
        const int64_t n = kn_size(x, d);
        place = place * n + (n == 1 ? 0 : at[(int)letters[d]]);
    }
    return ((const double *)kn_data(x))[place];
}

/* The result's element at[] of its letters: adds over all others. */
static double by_loops(const int64_t *place, void *arg)
{
    const sum_case *c = ((void **)arg)[0];
    kn_tensor *const *x = ((void **)arg)[1];
    char letters[4][16], others[32] = "";
    int64_t size[128] = { 0 }, at[128] = { 0 };
    letters_of(c, c->n, letters[3]);
    for (int k = 0; k < c->n; k++) {
        letters_of(c, k, letters[k]);
        for (int d = 0; letters[k][d]; d++) {
            const char l = letters[k][d];
            size[(int)l] = size[(int)l] > 1 ? size[(int)l] : c->in[k].shape[d];
            if (!strchr(letters[3], l) && !strchr(others, l))
                strncat(others, &l, 1);
        }
    }
    for (int d = 0; letters[3][d]; d++)
        at[(int)letters[3][d]] = place[d];
    double sum = 0;
    for (int d = 0; others[d]; d++)
        if (size[(int)others[d]] == 0)
            return 0;
    for (bool more = true; more;) {
        double p = 1;
        for (int k = 0; k < c->n; k++)
            p *= element(x[k], letters[k], at);
        sum += p;
        more = false;
        for (int d = 0; others[d] && !more; d++) {
            const int l = others[d];
            more = ++at[l] < size[l];
            at[l] = more ? at[l] : 0;
        }
    }
    return sum;
}

static int result_shape(const sum_case *c, int64_t *shape)
{
    char out[16], in[16];
    letters_of(c, c->n, out);
    for (int d = 0; out[d]; d++) {
        shape[d] = -1;
        for (int k = 0; k < c->n; k++) {
            letters_of(c, k, in);
            const char *at = strchr(in, out[d]);
            if (at && (shape[d] < 0 || shape[d] == 1))
                shape[d] = c->in[k].shape[at - in];
        }
    }
    return (int)strlen(out);
}

/* Small integers, so that sums are exact in f32, in any order. */
static kn_tensor *small(int ndim, const int64_t *shape, int seed)
{
    kn_tensor *x = kn_rand(KN_F64, KN_CPU, (uint64_t)seed, 0, ndim, shape);
    return kn_cast(kn_cast(kn_scale(kn_add_scalar(x, -0.5), 8), KN_I64), KN_F64);
}

KN_TEST(einsum, sums_of_products)
{
    const kn_dtype types[] = { KN_F64, KN_F32, KN_BF16 };
    for (int i = 0; i < SUMS; i++) {
        const sum_case *c = &sums[i];
        int64_t shape[8];
        const int ndim = result_shape(c, shape);
        kn_tensor *x[3], *y[3];
        for (int k = 0; k < c->n; k++)
            x[k] = small(c->in[k].ndim, c->in[k].shape, 10 * i + k);
        for (int t = 0; t < 3; t++) {
            for (int k = 0; k < c->n; k++)
                y[k] = kn_cast(x[k], types[t]);
            kn_tensor *z = kn_einsum(c->equation, c->n, y);
            KN_CHECK(z && kn_dtype_of(z) == types[t], "%s", c->equation);
            if (types[t] != KN_BF16) /* which doesn't hold each sum */
                expect(z, ndim, shape, by_loops, (void *[]){ (void *)c, x });
            for (int k = 0; k < c->n; k++)
                y[k] = kn_empty(types[t], KN_META, c->in[k].ndim, c->in[k].shape);
            expect(kn_einsum(c->equation, c->n, y), ndim, shape, by_loops, NULL);
        }
    }
}

static kn_values run_sum(kn_values in, void *arg)
{
    const sum_case *c = arg;
    return KN_VALUES(kn_einsum(c->equation, c->n, in.v));
}

KN_TEST(einsum, gradients)
{
    for (int i = 0; i < SUMS; i++) {
        IN_SCOPE;
        kn_values in = { sums[i].n, { 0 } };
        for (int k = 0; k < in.n; k++)
            in.v[k] = kn_require_grad(kn_randn(KN_F64, KN_CPU, 3, (uint64_t)(9 * i + k),
                                               sums[i].in[k].ndim, sums[i].in[k].shape),
                                      true);
        KN_CHECK(kn_gradcheck(run_sum, in, .arg = (void *)&sums[i]), "%s", sums[i].equation);
    }
}

/* ---- ellipses, and results that aren't named ------------------------------------------------- */

static void same(kn_tensor *a, kn_tensor *b)
{
    KN_CHECK(a && b && kn_ndim(a) == kn_ndim(b));
    for (int d = 0; d < kn_ndim(a); d++)
        KN_CHECK(kn_size(a, d) == kn_size(b, d), "dim %d: %lld, %lld", d, (long long)kn_size(a, d),
                 (long long)kn_size(b, d));
    kn_tensor *differ = sum_of(kn_ne(a, b));
    KN_CHECK(differ && kn_item(differ) == 0);
}

#define SUM(text, ...)                                                                             \
    kn_einsum(text, (int)(sizeof((kn_tensor *[]){ __VA_ARGS__ }) / sizeof(kn_tensor *)),           \
              (kn_tensor *[]){ __VA_ARGS__ })

KN_TEST(einsum, ellipses)
{
    kn_tensor *a = small(KN_SHAPE(2, 3, 4), 1), *b = small(KN_SHAPE(2, 4, 5), 2),
              *c = small(KN_SHAPE(4, 5), 3), *d = small(KN_SHAPE(6, 1, 4, 5), 4);
    same(SUM("...ij,...jk->...ik", a, b), kn_matmul(a, b));
    same(SUM("...ij,...jk", a, b), kn_matmul(a, b));
    same(SUM("...ij,...jk->...ik", a, c), kn_matmul(a, c));
    same(SUM("...ij,...jk->...ik", a, d), kn_matmul(a, d));
    same(SUM("...ij,...jk->ik", a, b), kn_sum(kn_matmul(a, b), KN_SHAPE(0), false));
    same(SUM("i...->...i", a), kn_movedim(a, 0, -1));
    same(SUM("...->...", a), a);
}

KN_TEST(einsum, results_that_are_not_named)
{
    kn_tensor *a = small(KN_SHAPE(2, 3), 1), *b = small(KN_SHAPE(3, 4), 2);
    same(SUM("ij,jk", a, b), kn_matmul(a, b));
    same(SUM("zj,ja", a, b), kn_transpose(kn_matmul(a, b), 0, 1)); /* a before z */
    same(SUM("ba", a), kn_transpose(a, 0, 1));
    same(SUM("bA", a), kn_transpose(a, 0, 1)); /* capitals first */
    same(SUM("ij,ij", a, a), sum_of(kn_mul(a, a)));
    same(SUM("ii", kn_slice(a, 1, 0, 2)), sum_of(kn_diagonal(a, 0, 0, 1)));
}

/* Attention's products need no copy of their inputs: backward keeps these alone. */
KN_TEST(einsum, keeps_views)
{
    kn_tensor *q = kn_require_grad(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 4, 64, 32)), true);
    kn_tensor *k = kn_require_grad(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 4, 16, 32)), true);
    const int64_t before = kn_ledger_read().live[KN_MEM_ACTIVATION];
    kn_tensor *y = SUM("bhtd,bhsd->bhts", q, k);
    const int64_t held = kn_ledger_read().live[KN_MEM_ACTIVATION] - before;
    KN_CHECK(y && held < (int64_t)(1.2 * 2 * 4 * 64 * 16 * sizeof(float)), "%lld bytes",
             (long long)held);
}

/* ---- errors ---------------------------------------------------------------------------------- */

KN_TEST(einsum, errors)
{
    kn_tensor *a = small(KN_SHAPE(2, 3), 1), *b = small(KN_SHAPE(3, 4), 2);
    kn_tensor *f = kn_cast(b, KN_F32), *five = kn_ones(KN_F32, KN_META, KN_SHAPE(1, 1, 1, 1, 1));
    const struct {
        const char *equation, *error;
    } one[] = {
        { "i1->i",
          "einsum: 'i1->i': neither a letter, ',', '->', '...' nor a space at position 2" },
        { "ij-i", "at position 3" },
        { "i..j", "an ellipsis has three dots, others are found at position 2" },
        { "...i...", "a second ellipsis of one operand at position 5" },
        { "ij->i->j", "a second '->' at position 6" },
        { "ij->i,j", "a comma behind '->' at position 6" },
        { "abcdefghi",
          "the ninth letter of an operand; tensors have at most 8 dims, at position 9" },
        { "ij,jk", "einsum: 'ij,jk' has 2 operands, 1 tensors are given" },
        { "ijk", "operand 1 has 3 letters, its tensor is f64[2,3]" },
        { "...ijk", "operand 1 has 3 letters, its tensor is f64[2,3]" },
        { "i", "operand 1 has 1 letters" },
        { "", "operand 1 has 0 letters" },
        { "ij->ik", "letter k of the result is in no operand" },
        { "ij->iji", "letter i stands twice in the result" },
        { "ii", "has size 3, and 2 where its label stood before" },
    };
    for (size_t i = 0; i < sizeof one / sizeof *one; i++) {
        REFUSED(kn_einsum(one[i].equation, 1, &a), one[i].error);
    }
    REFUSED(SUM("ij,ij->ij", a, b),
            "dim 0 of operand 2, f64[3,4], has size 3, and 2 where its label stood before");
    REFUSED(SUM("ii", small(KN_SHAPE(1, 3), 1)),
            "dims 0 and 1 of operand 1, f64[1,3], have one letter, but not one size");
    REFUSED(SUM("ij,jk", a, f),
            "needs float tensors of one dtype on one device; tensor 2 is f32[3,4] on cpu");
    REFUSED(SUM("ij,jk", f, kn_empty(KN_F32, KN_META, KN_SHAPE(4, 2))),
            "tensor 2 is f32[4,2] on meta, the first f32[3,4] on cpu");
    REFUSED(SUM("ij", kn_ones(KN_I64, KN_CPU, KN_SHAPE(2, 2))), "needs float tensors");
    REFUSED(SUM("abcde,fghij", five, five), "more than 8 letters remain in the result");
    REFUSED(SUM("abcde,fghij,abcde->fghij", five, five, five),
            "a product on the way needs more than 8 dims");
    REFUSED(SUM("...,fghij->...fghij", five, five), "the result has 10 dims or more");
    REFUSED(kn_einsum("i", 0, NULL), "einsum: 0 tensors");
    REFUSED(kn_einsum(NULL, 1, &a), "the equation");
    REFUSED(kn_einsum(",,,,,,,,,,,,,,,,", 1, &a), "there are at most 16 of them, at position 16");
}
