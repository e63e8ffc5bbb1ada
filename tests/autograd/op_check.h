/* tests/autograd/op_check.h: a case of an operation: its gradient against central differences
 * (kn_gradcheck), its results in narrower dtypes against those in f64. */
#ifndef KNAP_TESTS_OP_CHECK_H
#define KNAP_TESTS_OP_CHECK_H

#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "tests/kn_test.h"

/* The device of the operations; the share of elements that are compared with differences: 1 in so
 * many. */
#ifndef CHECKED_DEVICE
#define CHECKED_DEVICE KN_CPU
#endif
#ifndef CHECKED_ONE_IN
#define CHECKED_ONE_IN 1
#endif
#ifdef CHECKED_FAKE /* over fake CUDA */
#include "tests/gpu/fake_cuda/fake.h"
#endif

/* The form of an operation's input: the leaf itself, or a view of a leaf of another layout. */
typedef enum layout {
    PLAIN,      /* row-major */
    TRANSPOSED, /* the last two dims swapped in memory */
    SLICED,     /* columns 1..n of 2n + 1 */
    STRETCHED   /* size 1 in dim 0, expanded */
} layout;

typedef struct input_spec {
    int ndim;
    int64_t shape[4];
    layout how;
} input_spec;

typedef struct op_case {
    const char *op;
    kn_tensor *(*run)(kn_tensor *const *x);
    int nin;
    input_spec in[4];
    double low, high; /* range of the inputs; 0, 0: [-1.5, 1.5) */
} op_case;

#define CHECK_MAX_IN 4

static inline double next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) / 9007199254740992.0;
}

/* The leaf behind an input. */
static inline input_spec leaf_spec(const input_spec *s)
{
    input_spec b = *s;
    if (s->how == TRANSPOSED) {
        b.shape[s->ndim - 1] = s->shape[s->ndim - 2];
        b.shape[s->ndim - 2] = s->shape[s->ndim - 1];
    } else if (s->how == SLICED) {
        b.shape[s->ndim - 1] = 2 * s->shape[s->ndim - 1] + 1;
    } else if (s->how == STRETCHED) {
        b.shape[0] = 1;
    }
    return b;
}

static inline kn_tensor *input_view(const input_spec *s, kn_tensor *leaf)
{
    if (s->how == TRANSPOSED)
        return kn_transpose(leaf, -1, -2);
    if (s->how == SLICED)
        return kn_slice(leaf, -1, 1, 1 + s->shape[s->ndim - 1]);
    if (s->how == STRETCHED)
        return kn_expand(leaf, s->ndim, s->shape);
    return leaf;
}

/* x from doubles, in dtype t. */
static inline kn_tensor *tensor_of(kn_dtype t, const double *v, int ndim, const int64_t *shape)
{
    return kn_cast(kn_from(KN_F64, CHECKED_DEVICE, v, ndim, shape), t);
}

static inline void to_doubles(kn_tensor *t, double *v)
{
    kn_tensor *d = kn_cast(kn_detach(t), KN_F64);
    KN_CHECK(kn_to_host(d, v, (size_t)kn_numel(d) * sizeof *v), "%s", kn_error() ? kn_error() : "");
}

static inline double *random_doubles(int64_t n, double low, double high, uint64_t seed)
{
    double *v = calloc((size_t)n + 1, sizeof *v);
    for (int64_t i = 0; i < n; i++)
        v[i] = low + (high - low) * next_random(&seed);
    return v;
}

/* Values rounded to t, so that every dtype computes from the same numbers. */
static inline void round_to(kn_dtype t, double *v, int64_t n)
{
    kn_scope s = kn_scope_begin();
    to_doubles(tensor_of(t, v, 1, &n), v);
    kn_scope_end(s);
}

typedef struct evaluation {
    double *out, *grad[CHECK_MAX_IN];
    int64_t out_numel, numel[CHECK_MAX_IN];
} evaluation;

static inline bool made_by(const kn_node *n, const char *op, int depth)
{
    if (!n || depth == 0)
        return false;
    if (strcmp(n->op->name, op) == 0)
        return true;
    for (int i = 0; i < n->nin; i++)
        if (made_by(n->edge[i].node, op, depth - 1))
            return true;
    return false;
}

/* Runs forward and backward. */
static inline evaluation evaluate(const op_case *c, kn_dtype t, double *const *values,
                                  const double *w)
{
    evaluation e = { 0 };
    kn_tensor *leaf[CHECK_MAX_IN], *x[CHECK_MAX_IN] = { 0 };
#ifdef CHECKED_FAKE
    fake_begin();
#endif
    kn_scope s = kn_scope_begin();
    kn_set_step(3); /* the same draws each time */
    for (int i = 0; i < c->nin; i++) {
        input_spec b = leaf_spec(&c->in[i]);
        leaf[i] = kn_require_grad(tensor_of(t, values[i], b.ndim, b.shape), true);
        x[i] = input_view(&c->in[i], leaf[i]);
    }
    kn_tensor *y = c->run(x);
    KN_CHECK(kn_ok() && y, "%s: %s", c->op, kn_error() ? kn_error() : "no result");
    e.out_numel = kn_numel(y);
    e.out = calloc((size_t)e.out_numel + 1, sizeof(double));
    to_doubles(y, e.out);
    kn_tensor *g = kn_cast(tensor_of(t, w, y->ndim, y->shape), y->dtype);
    bool done = kn_backward(y, .grad = g);
    KN_CHECK(done, "%s: %s", c->op, kn_error());
    for (int i = 0; i < c->nin; i++) {
        e.numel[i] = kn_numel(leaf[i]);
        e.grad[i] = calloc((size_t)e.numel[i] + 1, sizeof(double));
        if (kn_grad(leaf[i])) {
            KN_CHECK(kn_grad(leaf[i])->dtype == t, "%s: gradient's dtype", c->op);
            to_doubles(kn_grad(leaf[i]), e.grad[i]);
        }
    }
    kn_scope_end(s);
    return e;
}

static inline void evaluation_free(evaluation *e)
{
    free(e->out);
    for (int i = 0; i < CHECK_MAX_IN; i++)
        free(e->grad[i]);
}

#define WEIGHTS 4096 /* more than any case has outputs */

static inline void make_values(const op_case *c, double **values)
{
    for (int i = 0; i < c->nin; i++) {
        input_spec b = leaf_spec(&c->in[i]);
        int64_t n = 1;
        for (int d = 0; d < b.ndim; d++)
            n *= b.shape[d];
        bool range = c->low != 0 || c->high != 0;
        values[i] =
            random_doubles(n, range ? c->low : -1.5, range ? c->high : 1.5, (uint64_t)i + 17);
    }
}

static inline void free_values(const op_case *c, double **values)
{
    for (int i = 0; i < c->nin; i++)
        free(values[i]);
}

/* As kn_gradcheck_fn: in has the leaves. */
static inline kn_values run_case(kn_values in, void *arg)
{
    const op_case *c = arg;
    kn_tensor *x[CHECK_MAX_IN] = { 0 };
    for (int i = 0; i < c->nin; i++)
        x[i] = input_view(&c->in[i], in.v[i]);
    kn_tensor *y = c->run(x);
    KN_CHECK(!y || !y->requires_grad || made_by(y->node, c->op, 4),
             "the case of '%s' doesn't run it", c->op);
    return KN_VALUES(y);
}

static inline void check_gradient(const op_case *c)
{
    double *values[CHECK_MAX_IN];
    make_values(c, values);
#ifdef CHECKED_FAKE
    fake_begin();
#endif
    kn_scope s = kn_scope_begin();
    kn_values in = { .n = c->nin };
    for (int i = 0; i < c->nin; i++) {
        input_spec b = leaf_spec(&c->in[i]);
        in.v[i] = kn_require_grad(tensor_of(KN_F64, values[i], b.ndim, b.shape), true);
    }
    KN_CHECK(kn_gradcheck(run_case, in, .arg = (void *)c, .one_in = CHECKED_ONE_IN),
             "%s of %d dims, layout %d: %s", c->op, c->in[0].ndim, (int)c->in[0].how, kn_error());
    kn_scope_end(s);
    free_values(c, values);
}

static inline void compare(const char *op, const char *what, const double *a, const double *b,
                           int64_t n, double tol)
{
    double scale = 1;
    for (int64_t i = 0; i < n; i++)
        scale = fmax(scale, fabs(b[i]));
    for (int64_t i = 0; i < n; i++)
        KN_CHECK(fabs(a[i] - b[i]) <= tol * scale, "%s: %s[%lld] is %.8g, in f64 %.8g", op, what,
                 (long long)i, a[i], b[i]);
}

/* Outputs and gradients in t against those in f64 from the same rounded inputs. */
static inline void dtype_check(const op_case *c, kn_dtype t, double tol)
{
    double *values[CHECK_MAX_IN], *w = random_doubles(WEIGHTS, -1, 1, 99);
    make_values(c, values);
    evaluation shape = evaluate(c, KN_F64, values, w);
    for (int i = 0; i < c->nin; i++)
        round_to(t, values[i], shape.numel[i]);
    round_to(t, w, WEIGHTS);
    evaluation_free(&shape);
    evaluation want = evaluate(c, KN_F64, values, w);
    evaluation got = evaluate(c, t, values, w);
    compare(c->op, "output", got.out, want.out, want.out_numel, tol);
    for (int i = 0; i < c->nin; i++)
        compare(c->op, "gradient", got.grad[i], want.grad[i], want.numel[i], tol);
    evaluation_free(&want);
    evaluation_free(&got);
    free_values(c, values);
    free(w);
}

#endif
