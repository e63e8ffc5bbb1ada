/* tests/models/providers_test.c: which kernels of a step the CPU's reference runs. It is right and
 * slow, so a step of each bundled model in each dtype and memory order leaves it small things
 * alone: kernels that touch few bytes, whatever the size of the model. */
#include "kernels/kernels.h"
#include "tests/kn_test.h"
#include "knap.h"

#include <string.h>

enum { BATCH = 4, SIDE = 16, CTX = 24, VOCAB = 130, SMALL = 256 /* bytes */ };

typedef struct any_model {
    kn_gpt gpt;
    kn_llama llama;
    kn_resnet resnet;
    kn_vit vit;
    kn_module *self; /* the one in use */
} any_model;

enum { GPT, LLAMA, RESNET, VIT, MODELS };
static const char *const names[MODELS] = { "gpt", "llama", "resnet", "vit" };

static bool model_init(any_model *m, int which)
{
    const kn_gpt_config gpt = {
        .layers = 1, .heads = 2, .embd = 32, .ctx = CTX, .vocab = VOCAB, .dropout = 0.1
    };
    const kn_llama_config llama = {
        .layers = 1, .heads = 4, .kv_heads = 2, .embd = 32, .hidden = 64, .ctx = CTX, .vocab = VOCAB
    };
    const kn_resnet_config resnet = {
        .blocks = { 1, 1 }, .classes = 10, .width = 16, .bottleneck = true
    };
    const kn_vit_config vit = {
        .layers = 1, .heads = 2, .embd = 32, .image = SIDE, .patch = 4, .classes = 10
    };
    *m = (any_model){ 0 };
    kn_module *const modules[] = { &m->gpt.base, &m->llama.base, &m->resnet.base, &m->vit.base };
    m->self = modules[which];
    switch (which) {
    case GPT:
        return kn_gpt_init(&m->gpt, gpt, KN_F32, KN_META);
    case LLAMA:
        return kn_llama_init(&m->llama, llama, KN_F32, KN_META);
    case RESNET:
        return kn_resnet_init(&m->resnet, resnet, KN_F32, KN_META);
    default:
        return kn_vit_init(&m->vit, vit, KN_F32, KN_META);
    }
}

typedef struct batch {
    kn_tensor *ids, *images, *classes;
} batch;

static kn_tensor *loss_of(any_model *m, int which, const batch *b)
{
    if (which == GPT)
        return kn_gpt_loss(&m->gpt, b->ids, b->ids);
    if (which == LLAMA)
        return kn_llama_loss(&m->llama, b->ids, b->ids);
    return kn_cross_entropy(kn_call(m->self, b->images), b->classes);
}

static bool step(any_model *m, int which, const batch *b, kn_optim *opt)
{
    kn_scope scope = kn_scope_begin();
    kn_backward(loss_of(m, which, b));
    kn_clip_grad_norm(m->self, 1.0);
    kn_step(opt);
    kn_scope_end(scope);
    return kn_ok();
}

/* Without oneDNN the reference has the only convolution. */
static bool allowed(const kn_trace_event *e)
{
    const bool only = strcmp(kn_cpu_libraries(), "none") == 0 && strncmp(e->what, "conv", 4) == 0;
    return strcmp(e->provider, "reference") != 0 || e->bytes <= SMALL || only;
}

static void check_step(int which, kn_dtype dtype, bool last)
{
    any_model m;
    kn_trace_event *events = NULL;
    KN_CHECK(model_init(&m, which) && kn_fsdp_wrap(m.self, NULL, .seed = 7, .param_dtype = dtype),
             "%s", kn_error());
    kn_optim *opt = kn_adamw(m.self, .lr = 1e-3);
    kn_scope scope = kn_scope_begin();
    batch b = { .ids = kn_randint(KN_I64, KN_CPU, 0, VOCAB, 1, 1, KN_SHAPE(BATCH, CTX)),
                .images = kn_randn(KN_F32, KN_CPU, 1, 3, KN_SHAPE(BATCH, 3, SIDE, SIDE)),
                .classes = kn_randint(KN_I64, KN_CPU, 0, 10, 1, 2, KN_SHAPE(BATCH)) };
    b.images = last ? kn_channels_last(b.images) : b.images;
    KN_CHECK(step(&m, which, &b, opt), "%s", kn_error());
    kn_trace_start(20000);
    KN_CHECK(step(&m, which, &b, opt), "%s", kn_error());
    const size_t count = kn_trace_stop(&events);
    kn_scope_end(scope);
    KN_CHECK(count > 50, "%zu events", count);
    for (size_t i = 0; i < count; i++)
        KN_CHECK(allowed(&events[i]),
                 "%s, %s, %s images: the reference runs %s of %.0f bytes; give the case a vector "
                 "kernel",
                 names[which], dtype ? kn_dtype_name(dtype) : "f32",
                 last ? "channels-last" : "row-major", events[i].what, events[i].bytes);
    kn_host_free(events);
    kn_optim_free(opt);
    kn_module_free(m.self);
}

KN_TEST(providers, the_reference_runs_small_things_alone)
{
    static const kn_dtype dtypes[] = { KN_DTYPE_DEFAULT, KN_BF16, KN_F16 };
    for (int which = 0; which < MODELS; which++)
        for (int t = 0; t < 3; t++)
            for (int last = 0; last < (which == RESNET || which == VIT ? 2 : 1); last++)
                check_step(which, dtypes[t], last);
}
