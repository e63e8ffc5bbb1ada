/* autograd/ops_linalg.c: inverses, equations and factors of matrices by LAPACK, one matrix after
 * the other; their gradients are made of products. LAPACK stores matrices by columns, so it sees
 * the transpose of each. */
#include "autograd/function.h"
#include "autograd/ops.h"
#include <math.h>
#include <string.h>

#ifdef KN_HAVE_LAPACK
/* Fortran's functions, with the lengths of texts behind the arguments. */
void dgetrf_(const int *m, const int *n, double *a, const int *lda, int *pivot, int *info);
void dgetri_(const int *n, double *a, const int *lda, const int *pivot, double *work,
             const int *lwork, int *info);
void dgetrs_(const char *trans, const int *n, const int *nrhs, const double *a, const int *lda,
             const int *pivot, double *b, const int *ldb, int *info, size_t);
void dpotrf_(const char *uplo, const int *n, double *a, const int *lda, int *info, size_t);
void dsyev_(const char *job, const char *uplo, const int *n, double *a, const int *lda, double *w,
            double *work, const int *lwork, int *info, size_t, size_t);
void dgeqrf_(const int *m, const int *n, double *a, const int *lda, double *tau, double *work,
             const int *lwork, int *info);
void dorgqr_(const int *m, const int *n, const int *k, double *a, const int *lda, const double *tau,
             double *work, const int *lwork, int *info);
void dgesvd_(const char *jobu, const char *jobvt, const int *m, const int *n, double *a,
             const int *lda, double *s, double *u, const int *ldu, double *vt, const int *ldvt,
             double *work, const int *lwork, int *info, size_t, size_t);
#endif

/* ---- matrices on the host -------------------------------------------------------------------- */

typedef enum job { INV, SOLVE, CHOLESKY, SLOGDET, EIGH, QR, SVD } job;
enum { MOST = 2 }; /* results besides the first */

/* One matrix: what a job reads and writes. M x N are its sizes, K the smaller one, or of SOLVE the
 * columns of b. a is x's matrix, as LAPACK sees it transposed (of QR as it is), and is
 * overwritten; pivot [N], work [size]. */
typedef struct one {
    int M, N, K, size;
    double *a, *work, *out[1 + MOST];
    int *pivot;
} one;

#ifdef KN_HAVE_LAPACK
static int factor(const one *m)
{
    int info;
    dgetrf_(&m->N, &m->N, m->a, &m->N, m->pivot, &info);
    return info;
}

static void sign_and_log(const one *m)
{
    double sign = 1, sum = 0;
    for (int i = 0; i < m->N; i++) {
        const double d = m->a[(size_t)i * (size_t)m->N + (size_t)i];
        sign *= (d > 0) - (d < 0) - 2 * ((d > 0) - (d < 0)) * (m->pivot[i] != i + 1);
        sum += log(fabs(d));
    }
    *m->out[0] = sum, *m->out[1] = sign;
}

/* r [K, N] out of what dgeqrf leaves: columns of M. */
static void upper(const one *m)
{
    for (int i = 0; i < m->K; i++)
        for (int j = 0; j < m->N; j++)
            m->out[1][(size_t)i * (size_t)m->N + (size_t)j] =
                j < i ? 0 : m->a[(size_t)j * (size_t)m->M + (size_t)i];
}

static int run_job(job what, const one *m)
{
    const size_t n = (size_t)m->N;
    int info = 0;
    switch (what) {
    case INV:
        if ((info = factor(m)) == 0)
            dgetri_(&m->N, m->a, &m->N, m->pivot, m->work, &m->size, &info);
        memcpy(m->out[0], m->a, n * n * sizeof *m->a);
        break;
    case SOLVE: /* out[0] holds b by columns */
        if ((info = factor(m)) == 0)
            dgetrs_("T", &m->N, &m->K, m->a, &m->N, m->pivot, m->out[0], &m->N, &info, 1);
        break;
    case CHOLESKY:
        dpotrf_("U", &m->N, m->a, &m->N, &info, 1);
        for (size_t i = 0; i < n * n; i++)
            m->out[0][i] = i % n > i / n ? 0 : m->a[i];
        break;
    case SLOGDET:
        info = factor(m) < 0;
        sign_and_log(m);
        break;
    case EIGH:
        dsyev_("V", "U", &m->N, m->a, &m->N, m->out[0], m->work, &m->size, &info, 1, 1);
        memcpy(m->out[1], m->a, n * n * sizeof *m->a);
        break;
    case QR: /* tau stands at the end of work */
        dgeqrf_(&m->M, &m->N, m->a, &m->M, m->work + m->size, m->work, &m->size, &info);
        upper(m);
        dorgqr_(&m->M, &m->K, &m->K, m->a, &m->M, m->work + m->size, m->work, &m->size, &info);
        memcpy(m->out[0], m->a, (size_t)m->M * (size_t)m->K * sizeof *m->a);
        break;
    case SVD:
        dgesvd_("S", "S", &m->N, &m->M, m->a, &m->N, m->out[0], m->out[2], &m->N, m->out[1], &m->K,
                m->work, &m->size, &info, 1, 1);
        break;
    }
    return info;
}
#else
static int run_job(job what, const one *m)
{
    (void)what, (void)m;
    kn_fail("this build has no LAPACK: install liblapack-dev and build anew");
    return 1;
}
#endif

static const char *const failure[] = { [INV] = "is singular",
                                       [SOLVE] = "is singular",
                                       [CHOLESKY] = "is not positive definite",
                                       [SLOGDET] = "can't be factored",
                                       [EIGH] = "gave no eigenvalues",
                                       [QR] = "can't be factored",
                                       [SVD] = "gave no singular values" };

/* Runs a job on each matrix of x, in f64 on the CPU. out: results in f64, row-major, on the CPU,
 * whose last `rank` dims are a matrix's. */
static bool run_jobs(job what, kn_tensor *x, int K, int n, kn_tensor *const *out, const int *rank)
{
    const int d = x->ndim;
    one m = { .M = (int)x->shape[d - 2], .N = (int)x->shape[d - 1], .K = K };
    const int64_t each = x->shape[d - 2] * x->shape[d - 1];
    const int largest = m.M > m.N ? m.M : m.N;
    m.size = 64 * largest + 64;
    kn_tensor *wide =
        kn_cast(kn_to_device(what == QR ? kn_transpose(x, -2, -1) : x, KN_CPU), KN_F64);
    const double *from = wide ? kn_read_data(wide, KN_F64) : NULL;
    m.a = kn_host_calloc((size_t)each + 1, sizeof *m.a);
    m.work = kn_host_calloc((size_t)(m.size + largest), sizeof *m.work);
    m.pivot = kn_host_calloc((size_t)largest, sizeof *m.pivot);
    double *to[1 + MOST] = { NULL };
    for (int i = 0; i < n && kn_ok(); i++)
        to[i] = kn_write_data(out[i], KN_F64);
    const int64_t count = each ? kn_numel(x) / each : 0;
    for (int64_t b = 0; b < count && kn_ok(); b++) {
        memcpy(m.a, from + b * each, (size_t)each * sizeof *m.a);
        for (int i = 0; i < n; i++) {
            int64_t size = 1;
            for (int k = 0; k < rank[i]; k++)
                size *= out[i]->shape[out[i]->ndim - 1 - k];
            m.out[i] = to[i] + b * size;
        }
        if (run_job(what, &m) != 0 && kn_ok())
            kn_fail("matrix %lld of x %s %s", (long long)b, KN_SHOWN(x), failure[what]);
    }
    kn_host_free(m.a);
    kn_host_free(m.work);
    kn_host_free(m.pivot);
    return kn_ok();
}

/* A result of x's leading dims and these n sizes: f64 on the CPU, or on meta as x. */
static kn_tensor *result_of(const kn_tensor *x, int n, int64_t a, int64_t b)
{
    int64_t shape[KN_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    if (n > 0)
        shape[x->ndim - 2] = a;
    if (n > 1)
        shape[x->ndim - 1] = b;
    const bool meta = kn_device_of(x) == KN_META;
    return kn_empty(meta ? x->dtype : KN_F64, meta ? KN_META : KN_CPU, x->ndim - 2 + n, shape);
}

/* In the dtype and on the device of x. */
static kn_tensor *like(kn_tensor *y, const kn_tensor *x)
{
    kn_tensor *t = kn_cast(y, x->dtype);
    return t && kn_device_of(t) != kn_device_of(x) ? kn_to_device(t, kn_device_of(x)) : t;
}

static kn_tensor *turned(kn_tensor *x)
{
    return kn_transpose(x, -2, -1);
}

/* A forward: one kn_function for each job, whose arg is the job. */
static kn_values forward(kn_function_run *run, kn_values in)
{
    const job what = *(const job *)run->arg;
    kn_tensor *x = in.v[0], *y[1 + MOST] = { NULL };
    const int d = x->ndim;
    const int64_t M = x->shape[d - 2], N = x->shape[d - 1];
    const int64_t K = what == SOLVE ? in.v[1]->shape[d - 1] : M < N ? M : N;
    int n = 1, rank[1 + MOST] = { 2, 2, 2 };
    switch (what) {
    case SOLVE:
        y[0] = result_of(x, 2, K, N);
        break;
    case SLOGDET:
        n = 2, rank[0] = rank[1] = 0;
        y[0] = result_of(x, 0, 0, 0), y[1] = result_of(x, 0, 0, 0);
        break;
    case EIGH:
        n = 2, rank[0] = 1;
        y[0] = result_of(x, 1, N, 0), y[1] = result_of(x, 2, N, N);
        break;
    case QR:
        n = 2;
        y[0] = result_of(x, 2, K, M), y[1] = result_of(x, 2, K, N);
        break;
    case SVD:
        n = 3, rank[0] = 1;
        y[0] = result_of(x, 1, K, 0), y[1] = result_of(x, 2, M, K), y[2] = result_of(x, 2, K, N);
        break;
    default:
        y[0] = result_of(x, 2, N, N);
    }
    if (what == SOLVE && y[0] && kn_device_of(x) != KN_META) {
        kn_tensor *b = kn_cast(kn_to_device(turned(in.v[1]), KN_CPU), KN_F64);
        const double *from = b ? kn_read_data(b, KN_F64) : NULL;
        double *to = from ? kn_write_data(y[0], KN_F64) : NULL;
        if (to)
            memcpy(to, from, (size_t)kn_numel(b) * sizeof *to);
    }
    if (kn_ok() && kn_device_of(x) != KN_META)
        run_jobs(what, x, (int)K, n, y, rank);
    for (int i = 0; i < n; i++) /* vectors come as rows */
        y[i] = like((what == SOLVE || what == QR) && i == 0 ? turned(y[i])
                    : what == EIGH && i == 1                ? turned(y[i])
                                                            : y[i],
                    x);
    kn_save_for_backward(run, what == SOLVE || what == SLOGDET ? x : NULL, y[0], y[1], y[2]);
    return (kn_values){ n, { y[0], y[1], y[2] } };
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* a / b, 0 where a is: no gradient of vectors, as of values alone, stays none where b is 0. */
static kn_tensor *over(kn_tensor *a, kn_tensor *b)
{
    kn_tensor *none = kn_eq(a, kn_number_like(a, 0));
    return kn_masked_fill(kn_div(a, b), none, 0);
}

/* x_ij / (w_j - w_i), 0 on the diagonal, of x[..., N, N] and w[..., N]. */
static kn_tensor *apart(kn_tensor *x, kn_tensor *w)
{
    const int64_t N = w ? w->shape[w->ndim - 1] : 0;
    kn_tensor *own =
        w ? kn_ne(kn_eye(w->dtype, kn_device_of(w), N, N), kn_number_like(w, 0)) : NULL;
    return over(kn_masked_fill(x, own, 0), kn_sub(kn_unsqueeze(w, -2), kn_unsqueeze(w, -1)));
}

/* diag(w) of w[..., N] */
static kn_tensor *diagonal(kn_tensor *w)
{
    return kn_diag_embed(w, 0, -2, -1);
}

/* The lower triangle of x with half its diagonal. */
static kn_tensor *lower(kn_tensor *x)
{
    return kn_scale(kn_add(kn_tril(x, 0), kn_tril(x, -1)), 0.5);
}

static kn_tensor *product(kn_tensor *a, kn_tensor *b, kn_tensor *c)
{
    return kn_matmul(kn_matmul(a, b), c);
}

static kn_values eigh_backward(kn_tensor *w, kn_tensor *v, kn_tensor *dw, kn_tensor *dv)
{
    kn_tensor *inner = apart(kn_matmul(turned(v), dv), w);
    return KN_VALUES(product(v, kn_add(inner, diagonal(dw)), turned(v)));
}

static kn_values qr_backward(kn_tensor *q, kn_tensor *r, kn_tensor *dq, kn_tensor *dr)
{
    if (q->shape[q->ndim - 1] != r->shape[r->ndim - 1]) {
        kn_fail("qr: the gradient needs at least as many rows as columns; q is %s and r %s",
                KN_SHOWN(q), KN_SHOWN(r));
        return KN_VALUES(NULL);
    }
    kn_tensor *m = kn_sub(kn_matmul(r, turned(dr)), kn_matmul(turned(dq), q));
    m = kn_tril(m, 0);
    m = kn_add(m, turned(kn_tril(m, -1)));
    kn_tensor *y = kn_add(dq, kn_matmul(q, m));
    return KN_VALUES(turned(kn_solve(r, turned(y))));
}

static kn_tensor *skew(kn_tensor *x)
{
    return kn_sub(x, turned(x));
}

/* u [skew(u^T du) / E diag(s) + diag(s) skew(v^T dv) / E + diag(ds)] v^T with E_ij = s_j^2 - s_i^2,
 * and what of du and dv lies outside of u and v, divided by s. */
static kn_values svd_backward(kn_tensor *s, kn_tensor *u, kn_tensor *vt, const kn_values *d)
{
    kn_tensor *du = d->v[1], *dvt = d->v[2], *e = kn_square(s);
    kn_tensor *rows = kn_unsqueeze(s, -1), *columns = kn_unsqueeze(s, -2);
    kn_tensor *left = kn_mul(apart(skew(kn_matmul(turned(u), du)), e), columns);
    kn_tensor *right = kn_mul(apart(skew(kn_matmul(vt, turned(dvt))), e), rows);
    kn_tensor *inner = kn_add(kn_add(left, right), diagonal(d->v[0]));
    kn_tensor *y = product(u, inner, vt);
    if (u->shape[u->ndim - 2] > s->shape[s->ndim - 1]) {
        kn_tensor *out = kn_sub(du, kn_matmul(u, kn_matmul(turned(u), du)));
        y = kn_add(y, kn_matmul(over(out, columns), vt));
    }
    if (vt->shape[vt->ndim - 1] > s->shape[s->ndim - 1]) {
        kn_tensor *out = kn_sub(dvt, kn_matmul(kn_matmul(dvt, turned(vt)), vt));
        y = kn_add(y, kn_matmul(u, over(out, rows)));
    }
    return KN_VALUES(y);
}

static kn_values backward(kn_function_run *run, kn_values d)
{
    kn_tensor *const *s = run->saved.v, *y = s[1], *dy = d.v[0], *t;
    switch (*(const job *)run->arg) {
    case INV:
        return KN_VALUES(kn_neg(product(turned(y), dy, turned(y))));
    case SOLVE:
        t = kn_solve(turned(s[0]), dy);
        return KN_VALUES(kn_neg(kn_matmul(t, turned(y))), t);
    case CHOLESKY: /* l^-T lower(l^T dl) l^-1, made symmetric */
        t = lower(kn_matmul(turned(y), dy));
        t = kn_solve(turned(y), turned(kn_solve(turned(y), turned(t))));
        return KN_VALUES(kn_scale(kn_add(t, turned(t)), 0.5));
    case SLOGDET:
        t = kn_inv(s[0]);
        return KN_VALUES(kn_mul(turned(t), kn_unsqueeze(kn_unsqueeze(dy, -1), -1)));
    case EIGH:
        return eigh_backward(y, s[2], dy, d.v[1]);
    case QR:
        return qr_backward(y, s[2], dy, d.v[1]);
    default:
        return svd_backward(y, s[2], s[3], &d);
    }
}

/* ---- the operations -------------------------------------------------------------------------- */

static bool are_matrices(const char *op, const kn_tensor *x, bool square)
{
    if (!kn_ok() || !kn_check(x, op))
        return false;
    const int d = x->ndim;
    const int64_t most = INT32_MAX / 128;
    return (d >= 2 && kn_dtype_is_float(x->dtype) && x->shape[d - 1] <= most &&
            x->shape[d - 2] <= most && x->shape[d - 1] > 0 && x->shape[d - 2] > 0 &&
            (!square || x->shape[d - 1] == x->shape[d - 2])) ||
           kn_fail("%s: needs a float x[...,%s], no dim of which is 0, got %s", op,
                   square ? "N,N" : "M,N", KN_SHOWN(x));
}

static kn_values call(job what, const char *name, kn_values in)
{
    const kn_function f = { .name = name,
                            .forward = forward,
                            .backward = backward,
                            .shape = forward,
                            .no_grad = what == SLOGDET ? 2 : 0 };
    return kn_function_call_n(&f, in, &what, sizeof what);
}

kn_tensor *kn_inv(kn_tensor *x)
{
    return are_matrices("inv", x, true) ? call(INV, "inv", KN_VALUES(x)).v[0] : NULL;
}

kn_tensor *kn_solve(kn_tensor *a, kn_tensor *b)
{
    if (!kn_ok() || !kn_check(a, "solve") || !kn_check(b, "solve"))
        return NULL;
    const int d = a->ndim;
    bool fits = d >= 2 && b->ndim == d && b->dtype == a->dtype &&
                kn_device_of(a) == kn_device_of(b) && b->shape[d - 1] <= INT32_MAX &&
                a->shape[d - 1] == a->shape[d - 2];
    for (int i = 0; fits && i < d - 1; i++)
        fits = a->shape[i] == b->shape[i];
    if (!fits)
        return kn_fail_null(
            "solve: needs a[...,N,N] and b[...,N,K] with the same leading dims, of one "
            "float dtype and device; got %s and %s",
            KN_SHOWN(a), KN_SHOWN(b));
    if (!are_matrices("solve", a, true))
        return NULL;
    return call(SOLVE, "solve", KN_VALUES(a, b)).v[0];
}

kn_tensor *kn_cholesky(kn_tensor *x)
{
    return are_matrices("cholesky", x, true) ? call(CHOLESKY, "cholesky", KN_VALUES(x)).v[0] : NULL;
}

kn_tensor *kn_slogdet(kn_tensor *x, kn_tensor **sign)
{
    if (!are_matrices("slogdet", x, true))
        return NULL;
    const kn_values y = call(SLOGDET, "slogdet", KN_VALUES(x));
    if (sign)
        *sign = y.v[1];
    return y.v[0];
}

kn_tensor *kn_det(kn_tensor *x)
{
    kn_tensor *sign = NULL, *log = are_matrices("det", x, true) ? kn_slogdet(x, &sign) : NULL;
    return kn_mul(sign, kn_exp(log));
}

kn_tensor *kn_eigh(kn_tensor *x, kn_tensor **vectors)
{
    if (!are_matrices("eigh", x, true))
        return NULL;
    const kn_values y = call(EIGH, "eigh", KN_VALUES(x));
    if (vectors)
        *vectors = y.v[1];
    return y.v[0];
}

kn_tensor *kn_qr(kn_tensor *x, kn_tensor **r)
{
    if (!are_matrices("qr", x, false))
        return NULL;
    const kn_values y = call(QR, "qr", KN_VALUES(x));
    if (r)
        *r = y.v[1];
    return y.v[0];
}

kn_tensor *kn_svd(kn_tensor *x, kn_tensor **u, kn_tensor **vt)
{
    if (!are_matrices("svd", x, false))
        return NULL;
    const kn_values y = call(SVD, "svd", KN_VALUES(x));
    if (u)
        *u = y.v[1];
    if (vt)
        *vt = y.v[2];
    return y.v[0];
}
