/* tests/gpu/fake_cublaslt.c: a cuBLASLt on the host, which holds its caller to the rules of
 * epilogues. The environment says what it is like:
 *
 *   FAKE_HEURISTIC   numbers with which its heuristics answer: their status, the algorithm's, and
 *                    how many they found. Nothing is computed then.
 *   FAKE_ALGORITHMS  seconds that each of its algorithms takes, in the order of the heuristics: "4
 *                    2 3". Algorithm i begins a sum with its i-th term, so that each has bits of
 *                    its own. -1: it is found not to be for these products; -2: when it runs.
 *   FAKE_SCHEMES     how each adds up what blocks have (CUBLASLT_REDUCTION_SCHEME_..), else 0
 *   FAKE_EPILOGUE    seconds more of a product with a gradient in its epilogue
 *   FAKE_REFUSES     1: no algorithm that somebody brings is for this product
 *   FAKE_VERSION     its version
 *   FAKE_CALLS       a file with a line a call: "heuristic 8", "run 2", "check 2"
 */
#include "kernels/convert.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID = 7, NOT_SUPPORTED = 15, MAGIC = 0x616c676f };
enum { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };                        /* cudaDataType */
enum { NONE = 1, BIAS = 4, DGELU = 192, BGRADA = 256, BGRADB = 512 }; /* cublasLtEpilogue_t */

/* Of fake CUDA, in programs that have it: the device's clock goes on, and what is recorded. */
__attribute__((weak)) void fake_pass(double seconds);
__attribute__((weak)) void fake_wait(void *stream);
__attribute__((weak)) bool fake_record(void (*run)(void *), void (*drop)(void *), void *arg);

/* ---- what it is like ------------------------------------------------------------------------- */

static int number_in(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

/* The i-th number; 0 behind the last. */
static double item(const char *name, int i)
{
    const char *text = getenv(name);
    char *end;
    for (double s; text && (s = strtod(text, &end), end != text); text = end)
        if (i-- == 0)
            return s;
    return 0;
}

static double seconds_of(int i)
{
    return item("FAKE_ALGORITHMS", i);
}

static void tell(const char *call, int value)
{
    const char *path = getenv("FAKE_CALLS");
    FILE *f = path ? fopen(path, "a") : NULL;
    if (!f)
        return;
    fprintf(f, "%s %d\n", call, value);
    fclose(f);
}

API size_t cublasLtGetVersion(void);
size_t cublasLtGetVersion(void)
{
    return (size_t)number_in("FAKE_VERSION", 130100);
}

API const char *cublasLtGetStatusString(int status);
const char *cublasLtGetStatusString(int status)
{
    return status == 3 ? "CUBLAS_STATUS_ALLOC_FAILED" : "another status";
}

API int cublasLtCreate(void **handle);
int cublasLtCreate(void **handle)
{
    static int one;
    *handle = &one;
    return OK;
}

/* ---- descriptions ---------------------------------------------------------------------------- */

typedef struct product {
    int32_t transposed[2], epilogue, bias_type, x_type;
    char *bias;
    const char *x;
    int64_t ldx;
} product;

typedef struct layout {
    int type;
    uint64_t rows, cols;
    int64_t ld, stride;
    int32_t batch;
} layout;

API int cublasLtMatmulDescCreate(product **p, int compute, int scale);
int cublasLtMatmulDescCreate(product **p, int compute, int scale)
{
    (void)compute, (void)scale;
    *p = calloc(1, sizeof **p);
    (*p)->epilogue = NONE;
    return OK;
}

API int cublasLtMatmulDescSetAttribute(product *p, int name, const void *value, size_t size);
int cublasLtMatmulDescSetAttribute(product *p, int name, const void *value, size_t size)
{
    void *const fields[30] = {
        [3] = &p->transposed[0],
        [4] = &p->transposed[1],
        [7] = &p->epilogue,
        [8] = &p->bias,
        [11] = &p->x,
        [12] = &p->ldx,
        [22] = &p->x_type,
        [26] = &p->bias_type,
    };
    if (name < 30 && fields[name])
        memcpy(fields[name], value, size);
    return OK;
}

API int cublasLtMatmulDescDestroy(product *p);
int cublasLtMatmulDescDestroy(product *p)
{
    free(p);
    return OK;
}

API int cublasLtMatrixLayoutCreate(layout **l, int type, uint64_t rows, uint64_t cols, int64_t ld);
int cublasLtMatrixLayoutCreate(layout **l, int type, uint64_t rows, uint64_t cols, int64_t ld)
{
    *l = calloc(1, sizeof **l);
    **l = (layout){ type, rows, cols, ld, 0, 1 };
    return OK;
}

API int cublasLtMatrixLayoutSetAttribute(layout *l, int name, const void *value, size_t size);
int cublasLtMatrixLayoutSetAttribute(layout *l, int name, const void *value, size_t size)
{
    void *to = name == 5 ? (void *)&l->batch : name == 6 ? (void *)&l->stride : NULL;
    if (to)
        memcpy(to, value, size);
    return OK;
}

API int cublasLtMatrixLayoutDestroy(layout *l);
int cublasLtMatrixLayoutDestroy(layout *l)
{
    free(l);
    return OK;
}

#define SUCCEEDS(name)                                                                             \
    API int name(void);                                                                            \
    int name(void)                                                                                 \
    {                                                                                              \
        return OK;                                                                                 \
    }
SUCCEEDS(cublasLtMatmulPreferenceCreate)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)

/* ---- algorithms ------------------------------------------------------------------------------ */

typedef struct algorithm {
    uint64_t data[8]; /* MAGIC, its number */
} algorithm;

/* cublasLtMatmulHeuristicResult_t */
typedef struct answer {
    algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} answer;

API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d,
                                       void *preference, int asked, answer *result, int *found);
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d,
                                   void *preference, int asked, answer *result, int *found)
{
    const char *numbers = getenv("FAKE_HEURISTIC");
    int status = 0, i;
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference;
    tell("heuristic", asked);
    if (numbers && sscanf(numbers, "%d %d %d", &status, &result->state, found) == 3)
        return status;
    if (numbers || seconds_of(0) == 0)
        abort();
    for (i = 0; i < asked && seconds_of(i) != 0; i++)
        result[i] = (answer){ .algorithm = { { MAGIC, (uint64_t)i } },
                              .workspace = i % 2 ? 4096 : 0,
                              .state = seconds_of(i) == -1 ? NOT_SUPPORTED : OK };
    *found = i;
    return OK;
}

API int cublasLtMatmulAlgoCheck(void *handle, void *desc, void *a, void *b, void *c, void *d,
                                const algorithm *x, answer *result);
int cublasLtMatmulAlgoCheck(void *handle, void *desc, void *a, void *b, void *c, void *d,
                            const algorithm *x, answer *result)
{
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d;
    tell("check", (int)x->data[1]);
    if (x->data[0] != MAGIC || x->data[1] > 100 || seconds_of((int)x->data[1]) <= 0 ||
        number_in("FAKE_REFUSES", 0))
        return INVALID;
    result->workspace = x->data[1] % 2 ? 4096 : 0;
    result->state = OK;
    return OK;
}

API int cublasLtMatmulAlgoConfigGetAttribute(const algorithm *x, int name, void *value, size_t size,
                                             size_t *wrote);
int cublasLtMatmulAlgoConfigGetAttribute(const algorithm *x, int name, void *value, size_t size,
                                         size_t *wrote)
{
    const uint32_t scheme = (uint32_t)item("FAKE_SCHEMES", (int)x->data[1]);
    if (name != 3 || size != sizeof scheme || x->data[0] != MAGIC)
        return INVALID;
    memcpy(value, &scheme, sizeof scheme);
    *wrote = sizeof scheme;
    return OK;
}

/* ---- the product ----------------------------------------------------------------------------- */

static double get(const char *p, int type, uint64_t i)
{
    switch (type) {
    case BF16:
        return (double)kn_bf16_to_f32(((const uint16_t *)p)[i]);
    case F16:
        return (double)kn_f16_to_f32(((const uint16_t *)p)[i]);
    case F64:
        return ((const double *)p)[i];
    default:
        return (double)((const float *)p)[i];
    }
}

static void set(char *p, int type, uint64_t i, double v)
{
    if (type == BF16)
        ((uint16_t *)p)[i] = kn_f64_to_bf16(v);
    else if (type == F16)
        ((uint16_t *)p)[i] = kn_f64_to_f16(v);
    else if (type == F64)
        ((double *)p)[i] = v;
    else
        ((float *)p)[i] = (float)v;
}

static int64_t bytes_of(int type)
{
    return type == F64 ? 8 : type == F32 ? 4 : 2;
}

static double element(const char *x, const layout *l, int transposed, uint64_t row, uint64_t col)
{
    return get(x, l->type, transposed ? col + row * (uint64_t)l->ld : row + col * (uint64_t)l->ld);
}

/* Of 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3). */
static double gelu_slope(double x)
{
    const double s = 0.79788456080286535588, u = s * (x + 0.044715 * x * x * x), t = tanh(u);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * s * (1 + 3 * 0.044715 * x * x);
}

/* What is computed from a sum on its way to d. */
static double finished(const product *p, const layout *d, uint64_t i, uint64_t j, double sum)
{
    if (p->epilogue == BIAS)
        return sum + get(p->bias, p->bias_type, i);
    if (p->epilogue == DGELU)
        return sum * gelu_slope(get(p->x, d->type, i + j * (uint64_t)p->ldx));
    return sum;
}

static bool has_gradient(const product *p)
{
    return p->epilogue == DGELU || p->epilogue == BGRADA || p->epilogue == BGRADB;
}

static bool keeps_rules(const product *p, const layout *d)
{
    if (has_gradient(p) && d->batch != 1)
        return false;
    if (p->epilogue == DGELU)
        return p->x && (uintptr_t)p->x % 16 == 0 && p->ldx % 8 == 0 && p->ldx >= (int64_t)d->rows &&
               p->x_type == d->type;
    return p->epilogue == NONE || (p->bias && p->bias_type == d->type);
}

/* A product, as long as a recorded step may run it. */
typedef struct call {
    product p;
    layout la, lb, ld;
    double beta;
    const char *a, *b;
    char *d; /* and c */
    uint64_t first;
} call;

static uint64_t terms(const call *c)
{
    return c->p.transposed[0] ? c->la.rows : c->la.cols;
}

/* Of the n-th matrices; in f32, but for f64; from the first-th term on. */
static double dot(const call *c, int32_t n, uint64_t i, uint64_t j)
{
    const char *a = c->a + n * c->la.stride * bytes_of(c->la.type),
               *b = c->b + n * c->lb.stride * bytes_of(c->lb.type);
    double wide = 0;
    float sum = 0;
    for (uint64_t k = 0; k < terms(c); k++) {
        const uint64_t l = (k + c->first) % terms(c);
        const double x = element(a, &c->la, c->p.transposed[0], i, l),
                     y = element(b, &c->lb, c->p.transposed[1], l, j);
        wide += x * y;
        sum += (float)x * (float)y;
    }
    return c->la.type == F64 ? wide : (double)sum;
}

/* The sum of A or B over their common dim. */
static void add_up(const call *c)
{
    const bool of_a = c->p.epilogue == BGRADA;
    for (uint64_t i = 0; i < (of_a ? c->ld.rows : c->ld.cols); i++) {
        double sum = 0;
        for (uint64_t l = 0; l < terms(c); l++)
            sum += of_a ? element(c->a, &c->la, c->p.transposed[0], i, l)
                        : element(c->b, &c->lb, c->p.transposed[1], l, i);
        set(c->p.bias, c->p.bias_type, i, sum);
    }
}

static void compute(void *arg)
{
    const call *c = arg;
    const layout *d = &c->ld;
    if (c->p.epilogue == BGRADA || c->p.epilogue == BGRADB)
        add_up(c);
    for (int32_t n = 0; n < d->batch; n++)
        for (uint64_t j = 0; j < d->cols; j++)
            for (uint64_t i = 0; i < d->rows; i++) {
                char *to = c->d + n * d->stride * bytes_of(d->type);
                const uint64_t at = i + j * (uint64_t)d->ld;
                const double sum = finished(&c->p, d, i, j, dot(c, n, i, j));
                set(to, d->type, at, c->beta != 0 ? sum + c->beta * get(to, d->type, at) : sum);
            }
}

API int cublasLtMatmul(void *handle, const product *p, const void *alpha, const char *a,
                       const layout *la, const char *b, const layout *lb, const void *beta,
                       const void *c, const layout *lc, char *d, const layout *ld,
                       const algorithm *x, void *workspace, size_t workspace_size, void *stream);
int cublasLtMatmul(void *handle, const product *p, const void *alpha, const char *a,
                   const layout *la, const char *b, const layout *lb, const void *beta,
                   const void *c, const layout *lc, char *d, const layout *ld, const algorithm *x,
                   void *workspace, size_t workspace_size, void *stream)
{
    const double scale = ld->type == F64 ? *(const double *)beta : (double)*(const float *)beta;
    const char *more = has_gradient(p) ? getenv("FAKE_EPILOGUE") : NULL;
    call now = { *p, *la, *lb, *ld, scale, a, b, d, x->data[1] };
    (void)handle, (void)lc, (void)alpha; /* which is 1 */
    if (getenv("FAKE_HEURISTIC") || x->data[0] != MAGIC || c != d)
        abort(); /* nothing that was declined is computed */
    tell(has_gradient(p) ? "run with a gradient" : "run", (int)now.first);
    if (seconds_of((int)now.first) < 0 || workspace_size != (now.first % 2 ? 4096u : 0))
        return NOT_SUPPORTED;
    if (!keeps_rules(p, ld))
        return INVALID;
    if (fake_record && fake_record(NULL, NULL, NULL)) { /* replays run it */
        call *later = malloc(sizeof *later);
        *later = now;
        fake_record(compute, free, later);
        return OK;
    }
    if (fake_wait)
        fake_wait(stream);
    memset(workspace, 0x5a, workspace_size);
    compute(&now);
    if (fake_pass)
        fake_pass(seconds_of((int)now.first) + (more ? atof(more) : 0));
    return OK;
}
