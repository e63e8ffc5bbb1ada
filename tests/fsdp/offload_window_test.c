/* tests/fsdp/offload_window_test.c: the step over states in a file runs window by window, with the
 * bits of a step over states in memory. */
#include "fsdp/fsdp.h"
#include "nn/layers.h"
#include "optim/optim.h"
#include "tests/owned.h"

enum { LAYERS = 4, IN = 600, OUT = 1001 }; /* a layer is more than half a window */

typedef struct wide {
    kn_module base;
    kn_linear layer[LAYERS];
} wide;

static kn_tensor *wide_forward(kn_module *self, kn_tensor *x)
{
    wide *m = (wide *)self;
    kn_tensor *sum = NULL;
    for (int i = 0; i < LAYERS; i++) {
        kn_tensor *y = kn_tanh(kn_call(&m->layer[i], x));
        sum = sum ? kn_add(sum, y) : y;
    }
    return sum;
}

static void build(wide *m, const char *dir)
{
    kn_module_init(&m->base, wide_forward);
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "layer%d", i);
        kn_linear_init(&m->layer[i], &m->base, name, IN, OUT);
    }
    KN_CHECK(kn_fsdp_wrap(m, NULL, .offload_dir = dir, .seed = 7));
    KN_CHECK_OK();
}

static void train(const char *dir, bool sgd, float *out)
{
    OWNED_MODULE wide m;
    build(&m, dir);
    int64_t before = kn_ledger_read().live[KN_MEM_OPTIM];
    OWNED_OPTIM kn_optim *o =
        sgd ? kn_sgd(&m, .lr = 0.1, .momentum = 0.9) : kn_adamw(&m, .lr = 0.01);
    for (int step = 0; step < 2; step++) {
        IN_SCOPE;
        kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, (uint64_t)step, KN_SHAPE(2, IN));
        KN_CHECK(kn_backward(mean_of(kn_call(&m, x))) && kn_step(o));
    }
    int64_t states = (int64_t)LAYERS * IN * OUT * 4 * (sgd ? 1 : 2);
    kn_ledger l = kn_ledger_read();
    KN_CHECK(dir ? l.live[KN_MEM_STORE] >= states : l.live[KN_MEM_STORE] == 0);
    KN_CHECK(dir ? l.live[KN_MEM_OPTIM] == before + KN_ALIGN : l.live[KN_MEM_OPTIM] >= states);
    for (int i = 0; i < LAYERS; i++) /* weights and biases alternate */
        KN_CHECK(kn_param_read(&m, 2 * i, out + i * IN * OUT));
}

KN_TEST(offload_window, same_bits)
{
    size_t bytes = (size_t)LAYERS * IN * OUT * sizeof(float);
    OWNED_BYTES float *plain = malloc(bytes), *stored = malloc(bytes);
    for (int sgd = 0; sgd < 2; sgd++) {
        train(NULL, sgd, plain);
        train("/tmp", sgd, stored);
        KN_CHECK(memcmp(plain, stored, bytes) == 0, "%s differs", sgd ? "sgd" : "adamw");
        KN_CHECK(kn_ledger_read().live[KN_MEM_STORE] == 0);
    }
    KN_CHECK_OK();
}
