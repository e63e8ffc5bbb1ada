/* tests/gpu/cuda_plans.c: makes cuDNN's plans for lists of attentions and of layers of images, for
 * a GPU given by its description. tests/cli/cuda_plans.sh runs it beside a driver without a GPU.
 *
 *   cuda_plans DEVICE.json ARCH [K/N]     one line a case; TAP on the standard output. K/N: the
 *                                         K-th of N parts, which are about as long */
#include "kernels/device.h"
#include "kernels/cuda/runtime/runtime.h"
#include "tests/gpu/cuda_plans.h"

#include <stdio.h>
#include <stdlib.h>

/* PACKED: q, k and v are columns of one product [B, T, (H + 2G) D], and their gradients of its
 * gradient. ROTATED: so are v and its gradient only, for q and k were turned by rope. */
typedef enum layout { APART, PACKED, ROTATED } layout;

typedef struct test {
    int64_t b, h, g, t, s, d;
    kn_dtype dtype;
    bool causal;
    layout layout;
    bool declined; /* on every device: Knap's kernel takes it */
    double dropout;
} test;

static const test tests[] = {
    { 8, 12, 12, 1024, 1024, 64, KN_BF16, true, PACKED, false }, /* GPT-2 124M */
    { 4, 25, 25, 1024, 1024, 64, KN_BF16, true, PACKED, false }, /* GPT-2 1558M */
    { 2, 32, 8, 2048, 2048, 128, KN_BF16, true, APART, false },  /* grouped heads: Llama */
    { 2, 32, 8, 2048, 2048, 128, KN_BF16, true, PACKED, false },
    { 2, 32, 8, 2048, 2048, 128, KN_BF16, true, ROTATED, false },
    { 8, 12, 12, 197, 197, 64, KN_BF16, false, PACKED, false }, /* ViT-B/16 */
    { 8, 12, 12, 1024, 1024, 64, KN_F16, true, APART, false },
    { 1, 4, 4, 100, 100, 64, KN_BF16, true, PACKED, false },
    { 2, 8, 8, 1000, 1000, 80, KN_BF16, false, APART, false },
    { 2, 8, 2, 64, 256, 64, KN_F16, false, APART, false },        /* T != S without a mask */
    { 61, 12, 12, 1024, 1024, 64, KN_BF16, true, PACKED, false }, /* in two parts, if bits repeat */
    { 3, 16, 4, 4096, 4096, 128, KN_BF16, true, PACKED, false },  /* parts of one sequence, too */
    { 1, 10, 10, 16384, 16384, 64, KN_F16, true, APART, false },  /* a head each */
    { 8, 12, 12, 1024, 1024, 64, KN_BF16, true, PACKED, false, .dropout = 0.1 },
    { 4, 25, 25, 1024, 1024, 64, KN_BF16, true, PACKED, false, .dropout = 0.1 },
    { 2, 32, 8, 2048, 2048, 128, KN_BF16, true, ROTATED, false, .dropout = 0.25 },
    { 8, 12, 12, 197, 197, 64, KN_F16, false, PACKED, false, .dropout = 0.1 },
    { 2, 8, 8, 64, 256, 64, KN_BF16, true, APART, true }, /* cuDNN aligns the mask otherwise */
    { 2, 8, 8, 128, 128, 60, KN_BF16, true, APART, true },
    { 2, 8, 8, 128, 128, 64, KN_F32, true, APART, true },
};
enum { TESTS = sizeof tests / sizeof *tests };

/* [B,H,T,D] seen in memory [B,T,rows of `row` elements], at the given column. */
static kn_array view(const test *c, int64_t heads, int64_t t, int64_t row, int64_t column)
{
    int64_t shape[4] = { c->b, heads, t, c->d };
    uintptr_t at = ((uintptr_t)1 << 20) + (uintptr_t)column * 2; /* never read */
    kn_array a = kn_array_make((void *)at, c->dtype, 4, shape);
    a.stride[0] = t * row;
    a.stride[1] = c->d;
    a.stride[2] = row;
    return a;
}

static void views(const test *c, kn_array *q, kn_array *k, kn_array *v)
{
    int64_t row = (c->h + 2 * c->g) * c->d;
    const bool all = c->layout == PACKED, last = c->layout != APART;
    *q = view(c, c->h, c->t, all ? row : c->h * c->d, 0);
    *k = view(c, c->g, c->s, all ? row : c->g * c->d, all ? c->h * c->d : 0);
    *v = view(c, c->g, c->s, last ? row : c->g * c->d, last ? (c->h + c->g) * c->d : 0);
}

static bool plan(const char *json, int arch, const test *c, bool backward, kn_dnn_found *found)
{
    int64_t rows[3] = { c->b, c->h, c->t };
    kn_array lse = kn_array_make((void *)((uintptr_t)1 << 20), KN_F32, 3, rows), q, k, v;
    views(c, &q, &k, &v);
    kn_array o = view(c, c->h, c->t, c->h * c->d, 0);
    if (!backward) {
        kn_attention_args a = { o, lse, q, k, v, { 0 }, 0.125, c->causal, c->dropout, 0, 0 };
        return kn_cudnn_try(json, arch, KN_K_ATTENTION, &a, found);
    }
    kn_attention_grad_args a = { q, k,     v,     o,     o,         lse,        q, k,
                                 v, { 0 }, { 0 }, 0.125, c->causal, c->dropout, 0, 0 };
    return kn_cudnn_try(json, arch, KN_K_ATTENTION_GRAD, &a, found);
}

static char *read_all(const char *path)
{
    static char text[4096];
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f)
        fclose(f);
    while (n > 0 && text[n - 1] == '\n')
        n--;
    text[n] = 0;
    return n > 0 ? text : NULL;
}

static int number, bad, part = 1, parts = 1, asked;

bool plan_mine(bool f32)
{
    if (f32)
        return part == 1;
    const int turn = asked + asked / parts; /* forwards and backwards alike */
    asked++;
    return turn % parts == part - 1;
}

void plan_line(bool ok, const char *what, bool made, const kn_dnn_found *found)
{
    char said[512];
    bad += !ok;
    printf("%s %d - %s", ok ? "ok" : "not ok", ++number, what);
    if (made && found)
        printf(": a plan, %.1f MiB, notes %x\n", (double)found->workspace / (1 << 20),
               found->notes);
    else
        printf("%s\n", made ? "" : ": declined");
    if (!ok && !made)
        printf("# %s\n", kn_dnn_said(said, sizeof said));
}

/* Whether cuDNN takes it. For datacenter Blackwell it has no backward of dropout that repeats its
 * bits, and so Knap's kernels take that forward, too. */
static bool expected(const test *c, int arch, bool deterministic)
{
    return !c->declined && !(deterministic && c->dropout > 0 && arch / 10 == 10);
}

/* Backwards of sm_80 and sm_120 stop at D = 128; nothing in the list is above. */
static void plan_attentions(const char *json, int arch)
{
    char what[160];
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        kn_cuda_deterministic(deterministic);
        for (int i = 0; i < TESTS; i++)
            for (int backward = deterministic && tests[i].dropout == 0; backward < 2; backward++) {
                const test *c = &tests[i];
                if (!plan_mine(c->dtype == KN_F32))
                    continue;
                kn_dnn_found found = { 0 };
                bool made = plan(json, arch, c, backward, &found);
                snprintf(what, sizeof what,
                         "sm_%d %s%s b%lld h%lld/%lld t%lld s%lld d%lld %s%s%s%s", arch,
                         backward ? "backward" : "forward", deterministic ? " deterministic" : "",
                         (long long)c->b, (long long)c->h, (long long)c->g, (long long)c->t,
                         (long long)c->s, (long long)c->d, kn_dtype_name(c->dtype),
                         c->causal ? " causal" : "",
                         c->layout == PACKED    ? " packed"
                         : c->layout == ROTATED ? " rotated"
                                                : "",
                         c->dropout > 0 ? " dropout" : "");
                plan_line(made == expected(c, arch, deterministic), what, made, &found);
            }
    }
    kn_cuda_deterministic(false);
}

int main(int argc, char **argv)
{
    char *json = argc == 3 || argc == 4 ? read_all(argv[1]) : NULL;
    if (!json || (argc == 4 && sscanf(argv[3], "%d/%d", &part, &parts) != 2) || parts < 1) {
        fprintf(stderr, "usage: cuda_plans DEVICE.json ARCH [K/N]\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0); /* for who dies in cuDNN */
    if (!kn_cuda_library_open(&kn_cudnn_library)) {
        printf("1..0 # SKIP %s\n", kn_cudnn_library.lack);
        return 77;
    }
    plan_attentions(json, atoi(argv[2]));
    plan_images(json, atoi(argv[2]));
    printf("1..%d\n", number);
    return bad > 0;
}
