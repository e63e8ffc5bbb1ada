/* tests/models/llama_test.c: the Llama's loss, head and settings; llama_golden_test.c compares its
 * numbers, family_test.c has what every model does. */
#include "models/llama.h"
#include "tests/owned.h"
#include "tests/models/ids.h"
#include <math.h>

static const kn_llama_config small = {
    .layers = 2, .heads = 4, .kv_heads = 2, .embd = 16, .ctx = 6, .vocab = 11
};

static void begin(kn_llama *g, kn_llama_config c, kn_dtype dtype)
{
    KN_CHECK(kn_llama_init(g, c, dtype, KN_META) && kn_materialize(g, KN_CPU, 7));
}

/* A head that took lm_head's place: its own logits count. */
typedef struct doubled {
    kn_module base;
    kn_module *inner;
} doubled;

static kn_tensor *doubled_forward(kn_module *self, kn_tensor *x)
{
    return kn_scale(kn_call(((doubled *)self)->inner, x), 2);
}

static void check_loss(kn_llama *g)
{
    kn_tensor *x = ids_of(2, 6, 1);
    const double loss = kn_item(kn_llama_loss(g, x, x));
    const double want = kn_item(kn_cross_entropy(kn_llama_logits(g, x), x));
    KN_CHECK(fabs(loss - want) < 1e-6 * want, "%.9g, not %.9g", loss, want);
}

KN_TEST(llama, loss_is_that_of_the_logits)
{
    for (int untied = 0; untied < 2; untied++) {
        OWNED_MODULE kn_llama g = { 0 };
        doubled d = { 0 }; /* lives as long as g, of which it becomes a part */
        kn_llama_config c = small;
        c.untied = untied;
        begin(&g, c, KN_F32);
        check_loss(&g);
        if (untied) {
            kn_module_init(&d.base, doubled_forward);
            d.inner = kn_module_replace(&g, "lm_head", &d);
            KN_CHECK(d.inner && kn_module_add(&d.base, "inner", d.inner));
            check_loss(&g);
        }
    }
}

static double deviation_of(kn_llama *g, const char *name)
{
    kn_scope s = kn_scope_begin();
    kn_tensor *w = kn_detach(kn_module_param(g, name));
    double mean = kn_item(kn_mean(kn_mul(w, w), 0, NULL, false));
    kn_scope_end(s);
    return sqrt(mean);
}

static double first_loss(kn_llama *g)
{
    kn_set_step(1);
    IN_SCOPE;
    double loss = kn_item(kn_llama_loss(g, ids_of(2, 6, 0), ids_of(2, 6, 4)));
    return loss;
}

/* Each setting changes what it names: values at the beginning, dropout, the norms' .eps (a large
 * one takes the logits away). */
KN_TEST(llama, settings_take_effect)
{
    OWNED_MODULE kn_llama g = { 0 };
    kn_llama_config c = small;
    begin(&g, c, KN_F32);
    const double proj = 0.02 / sqrt(2.0 * c.layers);
    KN_CHECK(fabs(deviation_of(&g, "model.layers.0.self_attn.q_proj.weight") / 0.02 - 1) < 0.2);
    KN_CHECK(fabs(deviation_of(&g, "model.layers.1.self_attn.o_proj.weight") / proj - 1) < 0.2);
    KN_CHECK(fabs(deviation_of(&g, "model.layers.1.mlp.down_proj.weight") / proj - 1) < 0.2);
    double plain = first_loss(&g);
    kn_module_free(&g);
    c.dropout = 0.3;
    begin(&g, c, KN_F32);
    KN_CHECK(first_loss(&g) != plain);
    kn_module_free(&g);
    c = small;
    c.norm_eps = 1e12;
    begin(&g, c, KN_F32);
    KN_CHECK(fabs(first_loss(&g) - log((double)c.vocab)) < 1e-6 && fabs(plain - log(11)) > 1e-4);
}

/* Beside Muon the embedding and a head of its own take AdamW, the blocks' matrices don't. */
KN_TEST(llama, the_head_takes_adamw_beside_muon)
{
    for (int untied = 0; untied < 2; untied++) {
        OWNED_MODULE kn_llama g = { 0 };
        kn_llama_config c = small;
        const kn_param *p;
        c.untied = untied;
        begin(&g, c, KN_F32);
        OWNED_OPTIM kn_optim *o = kn_muon(&g, .lr = 0.1);
        int n = kn_params(&g, &p), matrices = 0;
        for (int i = 0; o && i < n; i++) {
            bool matrix = strcmp(kn_optim_state_name_of(o, i, 0), "momentum") == 0;
            bool block = strstr(p[i].name, "_proj.weight") != NULL;
            KN_CHECK(matrix == block, "%s", p[i].name);
            matrices += matrix;
        }
        KN_CHECK(o && matrices == 14, "%d", matrices);
    }
}
