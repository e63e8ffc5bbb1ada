/* tests/gpu/fake_cublaslt.c: a cuBLASLt for f32 on the host. The environment says what it is like:
 *
 *   FAKE_HEURISTIC   numbers with which its heuristics answer: their status, the algorithm's, and
 *                    how many they found. Nothing is computed then.
 *   FAKE_ALGORITHMS  seconds that each of its algorithms takes, in the order of the heuristics: "4
 *                    2 3". Algorithm i begins a sum with its i-th term, so that each has bits of
 *                    its own. -1: it is found not to be for these products; -2: when it runs.
 *   FAKE_SCHEMES     how each adds up what blocks have (CUBLASLT_REDUCTION_SCHEME_..), else 0
 *   FAKE_REFUSES     1: no algorithm that somebody brings is for this product
 *   FAKE_VERSION     its version
 *   FAKE_CALLS       a file with a line a call: "heuristic 8", "run 2", "check 2"
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID = 7, NOT_SUPPORTED = 15, MAGIC = 0x616c676f };

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
    int32_t transposed[2];
    const float *bias;
} product;

typedef struct layout {
    uint64_t rows, cols;
    int64_t ld, stride;
    int32_t batch;
} layout;

API int cublasLtMatmulDescCreate(product **p, int compute, int scale);
int cublasLtMatmulDescCreate(product **p, int compute, int scale)
{
    (void)compute, (void)scale;
    *p = calloc(1, sizeof **p);
    return OK;
}

API int cublasLtMatmulDescSetAttribute(product *p, int name, const void *value, size_t size);
int cublasLtMatmulDescSetAttribute(product *p, int name, const void *value, size_t size)
{
    void *to = name == 3 ? &p->transposed[0] : name == 4 ? &p->transposed[1] : NULL;
    if (name == 8)
        to = &p->bias;
    if (to)
        memcpy(to, value, size);
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
    (void)type;
    *l = calloc(1, sizeof **l);
    **l = (layout){ rows, cols, ld, 0, 1 };
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

static float element(const float *x, const layout *l, int transposed, uint64_t row, uint64_t col)
{
    return transposed ? x[col + row * (uint64_t)l->ld] : x[row + col * (uint64_t)l->ld];
}

/* A product, as long as a recorded step may run it. */
typedef struct call {
    product p;
    layout la, lb, ld;
    float alpha, beta;
    const float *a, *b;
    float *d; /* and c */
    uint64_t first;
} call;

static void compute(void *arg)
{
    const call *c = arg;
    const uint64_t terms = c->p.transposed[0] ? c->la.rows : c->la.cols;
    for (int32_t n = 0; n < c->ld.batch; n++)
        for (uint64_t j = 0; j < c->ld.cols; j++)
            for (uint64_t i = 0; i < c->ld.rows; i++) {
                const float *a = c->a + n * c->la.stride, *b = c->b + n * c->lb.stride;
                float *to = c->d + n * c->ld.stride + i + j * (uint64_t)c->ld.ld, sum = 0;
                for (uint64_t k = 0; k < terms; k++) {
                    uint64_t l = (k + c->first) % terms;
                    sum += element(a, &c->la, c->p.transposed[0], i, l) *
                           element(b, &c->lb, c->p.transposed[1], l, j);
                }
                sum = c->alpha * sum + (c->p.bias ? c->p.bias[i] : 0);
                *to = c->beta != 0 ? sum + c->beta * *to : sum;
            }
}

API int cublasLtMatmul(void *handle, const product *p, const float *alpha, const float *a,
                       const layout *la, const float *b, const layout *lb, const float *beta,
                       const float *c, const layout *lc, float *d, const layout *ld,
                       const algorithm *x, void *workspace, size_t workspace_size, void *stream);
int cublasLtMatmul(void *handle, const product *p, const float *alpha, const float *a,
                   const layout *la, const float *b, const layout *lb, const float *beta,
                   const float *c, const layout *lc, float *d, const layout *ld, const algorithm *x,
                   void *workspace, size_t workspace_size, void *stream)
{
    call now = { *p, *la, *lb, *ld, *alpha, *beta, a, b, d, x->data[1] };
    (void)handle, (void)lc;
    if (getenv("FAKE_HEURISTIC") || x->data[0] != MAGIC || c != d)
        abort(); /* nothing that was declined is computed */
    tell("run", (int)now.first);
    if (seconds_of((int)now.first) < 0 || workspace_size != (now.first % 2 ? 4096u : 0))
        return NOT_SUPPORTED;
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
        fake_pass(seconds_of((int)now.first));
    return OK;
}
