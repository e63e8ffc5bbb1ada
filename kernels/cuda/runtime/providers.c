/* kernels/cuda/runtime/providers.c: the providers of the CUDA device, and the options of all of
 * them. */
#include "kernels/device.h"
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/runtime/runtime.h"
#include "kernels/environment.h"
#include "kernels/graph_internal.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

const kn_provider *kn_cuda_own_provider = &kn_cuda_kernels;

int kn_cuda_providers(const kn_provider *out[KN_MAX_PROVIDERS])
{
    int n = 0;
    out[n++] = &kn_cuda_cublaslt;
#ifdef KN_HAVE_CUDNN
    out[n++] = &kn_cuda_cudnn;
#endif
    out[n++] = kn_cuda_own_provider;
    return n;
}

static _Atomic bool deterministic;
static _Atomic unsigned epilogues = KN_EPILOGUES_TIMED;
static int sm_target;
static pthread_once_t environment_once = PTHREAD_ONCE_INIT;

static bool is_on(const char *name)
{
    bool on = false;
    kn_env_switch(name, &on);
    return on;
}

/* The set of a comma-separated list; false where it has another word. */
static bool parse_epilogues(const char *list, unsigned *set)
{
    static const struct {
        const char *name;
        unsigned set;
    } names[] = { { "bgrad", KN_EPILOGUE_BGRAD },
                  { "dgelu", KN_EPILOGUE_DGELU },
                  { "all", KN_EPILOGUE_BGRAD | KN_EPILOGUE_DGELU },
                  { "none", 0 },
                  { "timed", KN_EPILOGUES_TIMED } };
    enum { NAMES = sizeof names / sizeof *names };
    *set = 0;
    for (const char *s = list; *s;) {
        const size_t n = strcspn(s, ",");
        int i = 0;
        while (i < NAMES && (strlen(names[i].name) != n || memcmp(s, names[i].name, n) != 0))
            i++;
        if (i == NAMES)
            return false;
        *set |= names[i].set;
        s += n + (s[n] == ',');
    }
    return !(*set & KN_EPILOGUES_TIMED) || *set == KN_EPILOGUES_TIMED;
}

static bool choose_epilogues(const char *who, const char *list)
{
    unsigned set;
    if (!parse_epilogues(list, &set))
        return kn_fail("%s%s: must be bgrad, dgelu, or both with a comma between them, all, none "
                       "or timed",
                       who, list);
    atomic_store(&epilogues, set);
    return true;
}

static void read_environment(void)
{
    const char *list = getenv("KNAP_CUDA_EPILOGUES");
    int64_t sms = 0;
    atomic_store(&deterministic, is_on("KNAP_CUDA_DETERMINISTIC"));
    if (list && *list)
        choose_epilogues("KNAP_CUDA_EPILOGUES=", list);
    kn_env_number("KNAP_CUDA_SM_TARGET", 0, 100000, &sms);
    sm_target = (int)sms;
}

void kn_cuda_deterministic(bool on)
{
    pthread_once(&environment_once, read_environment);
    atomic_store(&deterministic, on);
    kn_changed();
}

bool kn_cuda_epilogues(const char *list)
{
    pthread_once(&environment_once, read_environment);
    if (!kn_given(list, "kn_cuda_epilogues", "the list") ||
        !choose_epilogues("kn_cuda_epilogues: ", list))
        return false;
    kn_changed();
    return true;
}

unsigned kn_cuda_epilogues_chosen(void)
{
    pthread_once(&environment_once, read_environment);
    return atomic_load_explicit(&epilogues, memory_order_relaxed);
}

kn_products kn_cuda_f32_products(void)
{
    return KN_PRODUCTS_TF32;
}

bool kn_cuda_is_deterministic(void)
{
    pthread_once(&environment_once, read_environment);
    return atomic_load_explicit(&deterministic, memory_order_relaxed);
}

int kn_cuda_sm_target(void)
{
    pthread_once(&environment_once, read_environment);
    return sm_target;
}
