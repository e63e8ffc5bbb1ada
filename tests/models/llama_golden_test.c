/* tests/models/llama_golden_test.c: losses, logits and gradients of small Llamas against those that
 * transformers computed (bench/peers/llama.py): with and without scaled rope, a tied and an untied
 * head, one, two and four key-value heads. */
#include "models/llama.h"
#include "tests/owned.h"

#include "tests/models/llama_golden.h"

enum { CASES = sizeof golden / sizeof *golden };

/* Element i is a function of the name and i: bench/peers/llama.py has the same. */
static void fill(const kn_param *p)
{
    uint32_t hash = 2166136261u;
    for (const char *c = p->name; *c; c++)
        hash = (hash ^ (uint32_t)*c) * 16777619u;
    double shift = strstr(p->name, "norm") ? 1 : 0;
    for (int64_t i = 0; i < p->numel; i++) {
        uint32_t u = (uint32_t)i * 2654435761u + hash;
        u = (u ^ u >> 16) * 0x85ebca6bu;
        u ^= u >> 13;
        double w = ((double)u / 4294967296.0 - 0.5) * 0.4 + shift;
        if (kn_dtype_of(p->tensor) == KN_F64)
            ((double *)kn_data(p->tensor))[i] = w;
        else
            ((float *)kn_data(p->tensor))[i] = (float)w;
    }
}

static void begin(kn_llama *g, int which, kn_dtype dtype)
{
    const kn_llama_config c = { .layers = LAYERS,
                                .heads = HEADS,
                                .kv_heads = golden[which].kv_heads,
                                .embd = EMBD,
                                .hidden = HIDDEN,
                                .ctx = 64,
                                .vocab = VOCAB,
                                .rope_base = golden[which].base,
                                .rope_scaling = golden[which].scaling,
                                .untied = golden[which].untied };
    KN_CHECK(kn_llama_init(g, c, dtype, KN_META) && kn_materialize(g, KN_CPU, 1));
    const kn_param *p;
    int n = kn_params(g, &p);
    for (int i = 0; i < n; i++)
        fill(&p[i]);
}

static double far_from(kn_tensor *x, const double *want, int64_t n)
{
    double worst = 0, got[VOCAB];
    KN_CHECK(kn_to_host(kn_cast(x, KN_F64), got, (size_t)n * sizeof *got));
    for (int64_t i = 0; i < n; i++)
        worst = fmax(worst, fabs(got[i] - want[i]));
    return worst;
}

static void check_case(int which, kn_dtype dtype, double bound)
{
    OWNED_MODULE kn_llama g = { 0 };
    begin(&g, which, dtype);
    IN_SCOPE;
    int64_t id[BATCH * LEN], target[BATCH * LEN];
    for (int i = 0; i < BATCH * LEN; i++) {
        id[i] = (5 * i + 3 * i * i) % VOCAB;
        target[i] = (7 * i + 2) % VOCAB;
    }
    kn_tensor *ids = kn_from(KN_I64, KN_CPU, id, KN_SHAPE(BATCH, LEN)),
              *targets = kn_from(KN_I64, KN_CPU, target, KN_SHAPE(BATCH, LEN));
    kn_tensor *logits = kn_reshape(kn_llama_logits(&g, ids), KN_SHAPE(BATCH * LEN, VOCAB));
    const int64_t row[2] = { 4, BATCH * LEN - 1 };
    for (int i = 0; i < 2; i++) {
        double off =
            far_from(kn_slice(logits, 0, row[i], row[i] + 1), golden[which].logits[i], VOCAB);
        KN_CHECK(off < bound, "%s: logits of row %d are off by %g", golden[which].name, i, off);
    }
    kn_tensor *next = kn_slice(kn_llama_next_logits(&g, ids), 0, 1, 2);
    KN_CHECK(far_from(next, golden[which].logits[1], VOCAB) < bound, "%s", golden[which].name);
    kn_tensor *loss = kn_llama_loss(&g, ids, targets);
    KN_CHECK(far_from(loss, &golden[which].loss, 1) < bound && kn_backward(loss),
             "%s: the loss is off by %g", golden[which].name,
             far_from(loss, &golden[which].loss, 1));
    for (int i = 0; i < GRADS; i++) {
        kn_tensor *grad = kn_grad(kn_module_param(&g, golden_grads[i]));
        kn_tensor *norm = kn_norm(kn_cast(grad, KN_F64), 2, 0, NULL, false);
        double off = far_from(norm, &golden[which].grads[i], 1);
        KN_CHECK(off < bound, "%s: the gradient of %s is off by %g", golden[which].name,
                 golden_grads[i], off);
    }
}

KN_TEST(llama_golden, f64)
{
    for (int i = 0; i < CASES; i++)
        check_case(i, KN_F64, 1e-9);
}

KN_TEST(llama_golden, f32)
{
    for (int i = 0; i < CASES; i++)
        check_case(i, KN_F32, 1e-5);
}
