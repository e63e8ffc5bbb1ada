/* tests/fsdp/offload_test.c: states in a file: models whose states don't fit in memory, bad
 * folders, allocations that fail (feature_test.c has the bits). Rank functions return a status. */
#include "tests/failing.h"
#include "tests/fsdp/net.h"
#include "tests/owned.h"
#include "kernels/context.h"

static char *folder(void)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/knap-offload-test-XXXXXX");
    KN_CHECK(mkdtemp(path) != NULL);
    return path;
}

/* ---- larger than memory ---------------------------------------------------------------------- */

enum { LAYERS = 24, WIDTH = 320 };

typedef struct deep {
    kn_module base;
    kn_linear layer[LAYERS];
} deep;

static kn_tensor *deep_forward(kn_module *self, kn_tensor *x)
{
    deep *m = (deep *)self;
    for (int i = 0; i < LAYERS; i++)
        x = kn_tanh(kn_call(&m->layer[i], x));
    return x;
}

static bool deep_steps(deep *m, kn_comm *world, const char *dir, int steps)
{
    memset(m, 0, sizeof *m);
    kn_set_threads(1);
    bool ok = kn_module_init(&m->base, deep_forward);
    for (int i = 0; i < LAYERS && ok; i++) {
        char name[16];
        snprintf(name, sizeof name, "layer%d", i);
        ok = kn_linear_init(&m->layer[i], &m->base, name, WIDTH, WIDTH, .device = KN_META);
    }
    ok = ok && kn_fsdp_wrap(m, world, .wrap_class = "linear", .offload_dir = dir);
    kn_optim *o = ok ? kn_adamw(m, .lr = 1e-3) : NULL;
    ok = ok && o;
    float first = 0, last = 0;
    for (int i = 0; i < steps && ok; i++) {
        IN_SCOPE;
        kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, 1, KN_SHAPE(4, WIDTH));
        kn_tensor *loss =
            kn_mse_loss(kn_call(m, x), kn_randn(KN_F32, KN_CPU, 6, 1, KN_SHAPE(4, WIDTH)));
        ok = kn_backward(loss);
        last = ok ? (float)kn_item(loss) : 0;
        first = i == 0 ? last : first;
        kn_clip_grad_norm(m, 1);
        ok = ok && kn_step(o);
    }
    ok = ok && last < first;
    kn_optim_free(o);
    kn_module_free(m);
    return ok && kn_ok();
}

/* States and masters take four times the parameters' bytes; half of the parameters fit. */
static void limited(kn_comm *world, void *arg)
{
    deep m;
    int64_t states = (int64_t)LAYERS * WIDTH * WIDTH * 4 * 4 / kn_comm_size(world);
    int64_t limit = states / 4;
    kn_context_get()->memory_limit = limit;
    kn_ledger_reset_peaks();
    KN_CHECK(deep_steps(&m, world, arg, 4));
    kn_ledger l = kn_ledger_read();
    KN_CHECK(l.peak_total <= limit && l.peak[KN_MEM_STORE] >= states,
             "%lld bytes in memory, %lld out", (long long)l.peak_total,
             (long long)l.peak[KN_MEM_STORE]);
}

static void too_large(kn_comm *world, void *arg)
{
    deep m;
    kn_context_get()->memory_limit =
        (int64_t)LAYERS * WIDTH * WIDTH * 4 * 4 / kn_comm_size(world) / 4;
    KN_CHECK(!deep_steps(&m, world, NULL, 1) && !kn_ok());
    KN_CHECK(strstr(kn_error(), "out of memory"));
    kn_clear_error();
}

KN_TEST(offload, states_larger_than_memory)
{
    char *dir = folder();
    by_both("1", too_large, NULL);
    by_both("1", limited, dir);
    by_processes("2", limited, dir);
    KN_CHECK(rmdir(dir) == 0);
}

/* ---- errors ---------------------------------------------------------------------------------- */

KN_TEST(offload, a_bad_folder_is_a_sentence)
{
    net m;
    KN_CHECK(net_init(&m, KN_META) && !kn_fsdp_wrap(&m, NULL, .offload_dir = "/no/such/folder"));
    KN_CHECK_ERROR("there is no folder '/no/such/folder'");
    kn_module_free(&m);
    KN_CHECK(net_init(&m, KN_META) && !kn_fsdp_wrap(&m, NULL, .offload_dir = "/proc"));
    KN_CHECK_ERROR("no file can be made in '/proc'");
    kn_module_free(&m);
    KN_CHECK(kn_ledger_read().live[KN_MEM_STORE] == 0);
}

/* Optimizers outlive the model that they were made for, and their part of the file. */
KN_TEST(offload, the_model_may_be_freed_first)
{
    net m;
    char *dir = folder();
    KN_CHECK(net_init(&m, KN_META) && kn_fsdp_wrap(&m, NULL, .offload_dir = dir));
    kn_optim *o = kn_adamw(&m, .lr = 0.1);
    KN_CHECK(o && net_backward(&m, 0) && kn_step(o));
    kn_module_free(&m);
    KN_CHECK(kn_ledger_read().live[KN_MEM_STORE] > 0);
    kn_optim_free(o);
    KN_CHECK(kn_ledger_read().live[KN_MEM_STORE] == 0 && rmdir(dir) == 0);
    KN_CHECK_OK();
}

KN_TEST(offload, an_optimizer_made_before_wrapping_is_refused)
{
    NET_WHOLE(m);
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.1);
    KN_CHECK(o && kn_fsdp_wrap(&m, NULL) && net_backward(&m, 0));
    REFUSED(kn_step(o), "make the optimizer after kn_fsdp_wrap");
}

static bool whole_run(void *dir)
{
    OWNED_MODULE net m;
    OWNED_OPTIM kn_optim *o = NULL;
    OWNED_SCALER kn_scaler *s = NULL;
    bool ok =
        net_init(&m, KN_META) && kn_fsdp_wrap(&m, NULL, .offload_dir = dir, .wrap_class = "linear");
    ok = ok && (o = kn_adamw(&m, .lr = 0.1)) && (s = kn_scaler_new(&m));
    kn_scope scope = kn_scope_begin();
    ok = ok && kn_backward(kn_scale_loss(s, net_loss(&m, 0)));
    kn_scope_end(scope);
    ok = ok && kn_item(kn_clip_grad_norm_p(&m, 1, 3)) > 0 && kn_scaler_step(s, o);
    return ok && kn_ok();
}

KN_TEST(offload, every_allocation_failing_is_an_error)
{
    char *dir = folder();
    kn_set_threads(1);
    KN_CHECK(whole_run(dir));
    each_allocation_fails(whole_run, NULL, dir, 200);
    KN_CHECK(rmdir(dir) == 0);
}
