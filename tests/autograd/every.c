/* tests/autograd/every.c: the sets of inputs of a row (every.h), and values of tensors. */
#include "tests/autograd/every.h"
#include <stdlib.h>

/* Reads one input; where it ends. */
static const char *read_input(const char *p, input_spec *in)
{
    *in = (input_spec){ .low = -1.5, .high = 1.5 };
    for (; *p && *p != ';' && *p != '|'; p++) {
        char *end;
        if (*p == '+' || *p == '*' || *p == '%' || *p == '^') {
            in->low = *p == '+' ? 0.3 : *p == '*' ? 0.4 : *p == '%' ? 0.1 : 1.2;
            in->high = *p == '%' ? 0.9 : *p == '^' ? 3 : 2;
        } else if (*p == 't' || *p == 's' || *p == 'e') {
            in->how = *p == 't' ? TRANSPOSED : *p == 's' ? SLICED : STRETCHED;
        } else if (*p != ' ' && *p != '.') {
            in->shape[in->ndim++] = strtoll(p, &end, 10);
            KN_CHECK(end > p, "'%s' is no input", p);
            p = end - 1;
        }
    }
    return p;
}

bool every_next(const every_case *c, every_set *s)
{
    const char *p = s->rest ? s->rest : c->inputs;
    if (!*p)
        return false;
    *s = (every_set){ 0 };
    do
        p = read_input(p + (*p == ';'), &s->in[s->n++]);
    while (*p == ';');
    s->rest = p + (*p == '|');
    return true;
}

input_spec leaf_spec(const input_spec *s)
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

kn_tensor *input_view(const input_spec *s, kn_tensor *leaf)
{
    if (s->how == TRANSPOSED)
        return kn_transpose(leaf, -1, -2);
    if (s->how == SLICED)
        return kn_slice(leaf, -1, 1, 1 + s->shape[s->ndim - 1]);
    if (s->how == STRETCHED)
        return kn_expand(leaf, s->ndim, s->shape);
    return leaf;
}

void every_leaves(const every_set *s, kn_dtype t, kn_device device, kn_tensor **leaf)
{
    for (int i = 0; i < s->n; i++) {
        const input_spec b = leaf_spec(&s->in[i]);
        int64_t n = 1;
        for (int d = 0; d < b.ndim; d++)
            n *= b.shape[d];
        OWNED_BYTES double *v = random_doubles(n, b.low, b.high, (uint64_t)i + 17);
        kn_tensor *x = kn_from(KN_F64, device, v, b.ndim, b.shape);
        leaf[i] = kn_require_grad(kn_cast(x, t), true);
        KN_CHECK(leaf[i]);
    }
}

void every_inputs(const every_set *s, kn_tensor *const *leaf, kn_tensor **x)
{
    for (int i = 0; i < EVERY_MAX_IN; i++)
        x[i] = i < s->n ? input_view(&s->in[i], leaf[i]) : NULL;
}

kn_tensor *tensor_of(kn_dtype t, const double *v, int ndim, const int64_t *shape)
{
    return kn_cast(kn_from(KN_F64, CHECKED_DEVICE, v, ndim, shape), t);
}

void to_doubles(kn_tensor *t, double *v)
{
    kn_tensor *d = kn_cast(kn_detach(t), KN_F64);
    KN_CHECK(kn_to_host(d, v, (size_t)kn_numel(d) * sizeof *v));
}

double next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) / 9007199254740992.0;
}

double *random_doubles(int64_t n, double low, double high, uint64_t seed)
{
    double *v = calloc((size_t)n + 1, sizeof *v);
    for (int64_t i = 0; i < n; i++)
        v[i] = low + (high - low) * next_random(&seed);
    return v;
}

void compare(const char *op, const char *what, const double *a, const double *b, int64_t n,
             double tol)
{
    double scale = 1;
    for (int64_t i = 0; i < n; i++)
        scale = fmax(scale, fabs(b[i]));
    for (int64_t i = 0; i < n; i++)
        KN_CHECK(fabs(a[i] - b[i]) <= tol * scale, "%s: %s[%lld] is %.8g, in f64 %.8g", op, what,
                 (long long)i, a[i], b[i]);
}
