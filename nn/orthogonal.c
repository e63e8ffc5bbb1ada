/* nn/orthogonal.c: orthogonal initial values: a matrix of normal draws, whose rows (or columns,
 * where those are fewer) are made orthonormal one after another: the Q of a QR with a positive
 * diagonal. In f64 on the host, in an order that no number of threads changes. */
#include "nn/orthogonal.h"
#include <math.h>

enum { LANES = 8 };

static double dot(const double *a, const double *b, int64_t n)
{
    double lane[LANES] = { 0 }, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++)
            lane[k] += a[i + k] * b[i + k];
    for (; i < n; i++)
        sum += a[i] * b[i];
    for (int k = 0; k < LANES; k++)
        sum += lane[k];
    return sum;
}

/* Takes what v has of the unit vectors before it away; again while that was most of v: then
 * rounding would be left (Kahan's and Parlett's rule). */
static void make_orthonormal(double *vector, int64_t before, int64_t n)
{
    double *v = vector + before * n, norm = sqrt(dot(v, v, n)), was;
    int tries = 0;
    do {
        was = norm;
        for (int64_t i = 0; i < before; i++) {
            const double *q = vector + i * n;
            double along = dot(q, v, n);
            for (int64_t k = 0; k < n; k++)
                v[k] -= along * q[k];
        }
        norm = sqrt(dot(v, v, n));
    } while (norm < 0.7 * was && ++tries < 4);
    for (int64_t k = 0; k < n; k++)
        v[k] /= norm;
}

/* vector[few][many]: the rows of x[rows, cols], or its columns, made orthonormal. */
static void orthogonalise(double *vector, const float *x, int64_t rows, int64_t cols)
{
    bool by_rows = rows <= cols;
    int64_t few = by_rows ? rows : cols, many = by_rows ? cols : rows;
    for (int64_t i = 0; i < few; i++)
        for (int64_t k = 0; k < many; k++)
            vector[i * many + k] = (double)x[by_rows ? i * cols + k : k * cols + i];
    for (int64_t i = 0; i < few; i++)
        make_orthonormal(vector, i, many);
}

bool kn_init_orthogonal(const kn_initializer *init, uint64_t seed, uint64_t stream, kn_tensor *dst,
                        int64_t start)
{
    int64_t rows = init->_rows, cols = init->_cols, n = rows * cols, count = kn_numel(dst), one = 1;
    if (count == 0)
        return true;
    kn_scope scope = kn_scope_begin();
    const bool mode = kn_set_grad_mode(false);
    kn_tensor *normal = kn_empty(KN_F32, KN_CPU, 1, &n), *vectors = kn_empty(KN_F64, KN_CPU, 1, &n);
    kn_tensor *part = kn_empty(KN_F64, KN_CPU, 1, &count);
    bool ok = normal && vectors && part && kn_init_draw(normal, KN_NORMAL, seed, stream, 0, 0, 1);
    if (ok) {
        double *v = kn_data(vectors), *to = kn_data(part);
        orthogonalise(v, kn_data(normal), rows, cols);
        for (int64_t i = start; i < start + count; i++)
            to[i - start] = init->a * v[rows <= cols ? i : i % cols * rows + i / cols];
        kn_tensor *run = kn_tensor_alias(dst, 0, 1, &count, &one);
        ok = run && kn_copy_(run, part);
    }
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    return ok && kn_ok();
}
