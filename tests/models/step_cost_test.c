/* tests/models/step_cost_test.c: the trace of a step on the meta device, from which bench/predict.c
 * predicts a step on a GPU: the kernels are those that a device with bytes launches, and their
 * operations add up to the models' own count. */
#include "fsdp/fsdp.h"
#include "kernels/trace.h"
#include "optim/optim.h"
#include "tests/owned.h"
#include "tests/models/small_models.h"

#include <stdlib.h>

enum { BATCH = 2, LEN = 6 };

enum { FAMILIES = LLAMA + 1 };

static int by_work(const void *a, const void *b)
{
    const kn_trace_event *x = a, *y = b;
    int order = strcmp(x->what, y->what);
    if (order == 0)
        order = x->flops < y->flops ? -1 : x->flops > y->flops;
    return order ? order : x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* Transfers and the host's own functions are no kernels. Meta's norms lie on the host, since its
 * memory can't be read, and the step copies them there. */
static bool is_kernel(const kn_trace_event *e, kn_device d)
{
    bool on_host =
        strcmp(e->provider, "host") == 0 ||
        (d == KN_META && strcmp(e->provider, "meta") != 0 && strcmp(e->what, "copy") == 0);
    return !on_host && strncmp(e->what, "copy ", 5) != 0;
}

/* The kernels of the second step on d, sorted; the caller frees them. */
static size_t kernels_of_a_step(int kind, kn_device d, kn_dtype dtype, kn_trace_event **events)
{
    const kn_family *f = small_models[kind].family;
    OWNED_MODULE kn_module model;
    KN_CHECK(declare_small(&model, kind, KN_F32) &&
             kn_fsdp_wrap(&model, NULL, .wrap_class = f->block_class, .device = d,
                          .param_dtype = dtype));
    OWNED_OPTIM kn_optim *opt = kn_adamw(&model, .lr = 1e-3);
    for (int i = 0; i < 2; i++) {
        IN_SCOPE;
        kn_tensor *x = ids_of(BATCH, LEN, 0), *y = ids_of(BATCH, LEN, 1);
        if (d == KN_META)
            x = y = kn_empty(KN_I64, d, KN_SHAPE(BATCH, LEN));
        kn_trace_start(10000);
        kn_backward(kn_language_loss(&model, x, y));
        kn_clip_grad_norm(&model, 1.0);
        kn_step(opt);
    }
    size_t n = kn_trace_stop(events), kernels = 0;
    KN_CHECK_OK();
    for (size_t i = 0; i < n; i++)
        if (is_kernel(&(*events)[i], d))
            (*events)[kernels++] = (*events)[i];
    qsort(*events, kernels, sizeof **events, by_work);
    return kernels;
}

KN_TEST(step_cost, meta_launches_the_kernels_of_a_device_with_bytes)
{
    static const kn_dtype dtypes[] = { KN_DTYPE_DEFAULT, KN_BF16 };
    for (int i = 0; i < FAMILIES * 2; i++) {
        OWNED_HOST kn_trace_event *a, *b;
        size_t n = kernels_of_a_step(i / 2, KN_META, dtypes[i % 2], &a);
        size_t m = kernels_of_a_step(i / 2, KN_CPU, dtypes[i % 2], &b);
        KN_CHECK(n > 50 && n == m, "case %d: %zu kernels on meta, %zu on the cpu", i, n, m);
        for (size_t k = 0; k < n; k++)
            KN_CHECK(by_work(&a[k], &b[k]) == 0,
                     "case %d: %s of %g flops, %g bytes on meta; %s of %g, %g on the cpu", i,
                     a[k].what, a[k].flops, a[k].bytes, b[k].what, b[k].flops, b[k].bytes);
    }
}

/* All products of weights, to the last operation. Attention differs from the families' count by
 * its softmax (5 and 8 operations a pair of positions), the diagonal, of which they count half, and
 * the scores that its backward computes again: a fifth product beside four. */
KN_TEST(step_cost, products_are_the_models_own_count)
{
    for (int i = 0; i < FAMILIES; i++) {
        const kn_model_config c = small_config(i);
        const double layers = kn_config_get(&c, "layers", 0), heads = kn_config_get(&c, "heads", 0),
                     embd = kn_config_get(&c, "embd", 0);
        OWNED_HOST kn_trace_event *e;
        size_t n = kernels_of_a_step(i, KN_META, KN_BF16, &e);
        double products = 0, attention = 0;
        for (size_t k = 0; k < n; k++) {
            products += strcmp(e[k].what, "matmul") == 0 ? e[k].flops : 0;
            attention += strncmp(e[k].what, "attention", 9) == 0 ? e[k].flops : 0;
        }
        double count = BATCH * LEN * kn_family_flops(c.family, c.of, LEN);
        double counted = 6.0 * layers * LEN * embd * BATCH * LEN;
        double pairs = layers * heads * BATCH * LEN * (LEN + 1) / 2;
        double head = embd / heads;
        KN_CHECK(products == count - counted, "%s: %g operations in products, %g by its own count",
                 c.family->noun, products, count - counted);
        KN_CHECK(attention == pairs * (14 * head + 13), "%s: %g operations in attention",
                 c.family->noun, attention);
    }
}
