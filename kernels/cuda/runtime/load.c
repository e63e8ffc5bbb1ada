/* kernels/cuda/runtime/load.c: NVIDIA's libraries, opened when first needed, so that one binary
 * runs on hosts without them. */
#include "kernels/context.h"
#include "kernels/device.h"
#include "kernels/cuda/runtime/runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- opening --------------------------------------------------------------------------------- */

static void *open_below(const char *home, const char *soname)
{
    /* conda's packages have the last two alone */
    static const char *const folder[] = { "lib64", "lib", "targets/x86_64-linux/lib",
                                          "targets/sbsa-linux/lib" };
    char path[1024];
    void *library = NULL;
    for (int i = 0; i < 4 && home && *home && !library; i++)
        if (snprintf(path, sizeof path, "%s/%s/%s", home, folder[i], soname) < (int)sizeof path)
            library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return library;
}

/* Where the system finds it, then below the folders that a toolkit is installed in. */
static void *open_library(kn_cuda_library *l)
{
    const char *given = l->variable ? getenv(l->variable) : NULL;
    const char *name = given && *given ? given : l->soname;
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library)
        return library;
    const char *why = dlerror();
    snprintf(l->lack, sizeof l->lack, "%s can't be loaded: %s", l->name, why ? why : name);
    if (name != l->soname)
        return NULL;
    const char *const home[] = { getenv("CUDA_HOME"), getenv("CUDA_PATH"), getenv("CONDA_PREFIX"),
                                 "/usr/local/cuda" };
    for (int i = 0; i < 4 && !library; i++)
        library = open_below(home[i], l->soname);
    return library;
}

static bool has_symbols(kn_cuda_library *l, void *library)
{
    for (int i = 0; i < l->count; i++) {
        const kn_cuda_symbol *s = &l->symbols[i];
        void *at = dlsym(library, s->name);
        if (!at && !s->optional) {
            snprintf(l->lack, sizeof l->lack, "%s here doesn't fit this build: it has no %s",
                     l->name, s->name);
            return false;
        }
        memcpy(s->to, &at, sizeof at);
    }
    return true;
}

/* Before its symbols: a library that is too old may lack some. */
static bool is_new_enough(kn_cuda_library *l, void *library)
{
    size_t (*version)(void) = NULL;
    char have[32], need[32];
    void *at = l->versions ? dlsym(library, l->versions) : NULL;
    memcpy(&version, &at, sizeof at);
    l->version = version ? (int)version() : 0;
    if (l->version >= l->least)
        return true;
    snprintf(l->lack, sizeof l->lack, "%s %s is too old: this build needs %s or newer", l->name,
             kn_cuda_version_text(l->version, have), kn_cuda_version_text(l->least, need));
    return false;
}

bool kn_cuda_library_open(kn_cuda_library *l)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if (atomic_load_explicit(&l->looked, memory_order_acquire))
        return l->there;
    pthread_mutex_lock(&lock);
    if (!l->looked) {
        void *library = open_library(l);
        l->there = library && is_new_enough(l, library) && has_symbols(l, library);
        atomic_store_explicit(&l->looked, true, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
    return l->there;
}

const char *kn_cuda_version_text(int v, char text[32])
{
    snprintf(text, 32, "%d.%d.%d", v / 10000, v % 10000 / 100, v % 100);
    return text;
}

/* ---- what a run without one is like ---------------------------------------------------------- */

#ifndef KN_HAVE_CUDNN
kn_cuda_library kn_cudnn_library = {
    .looked = true,
    .lack = "this build is without cuDNN: there was no cudnn.h of cuDNN 9.8 or newer",
    .without = KN_WITHOUT_CUDNN,
};
#endif

const char *kn_cuda_lacks(int i)
{
    static _Thread_local char text[512];
    kn_cuda_library *const libraries[] = { &kn_cublaslt_library, &kn_cudnn_library };
    int n = 0;
    for (int k = 0; k < 2 && kn_cuda_usable(); k++) {
        kn_cuda_library *l = libraries[k];
        if (!kn_cuda_library_open(l) && n++ == i) {
            snprintf(text, sizeof text, "%s; %s", l->lack, l->without);
            return text;
        }
    }
    return NULL;
}

void kn_cuda_tell(_Atomic bool *told, const char *format, ...)
{
    if (atomic_exchange(told, true) || kn_context_get()->rank > 0)
        return;
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fprintf(stderr, "knap: %s\n", text);
}
