/* kernels/cuda/runtime/load.c: NVIDIA's libraries, opened when first needed, so that one binary
 * runs on hosts without them. */
#include "kernels/context.h"
#include "kernels/device.h"
#include "kernels/cuda/runtime/runtime.h"

#include <dlfcn.h>
#include <limits.h>
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

/* Below the folders that a toolkit is installed in. */
static void *open_in_toolkits(const char *soname)
{
    const char *const home[] = { getenv("CUDA_HOME"), getenv("CUDA_PATH"), getenv("CONDA_PREFIX"),
                                 "/usr/local/cuda" };
    void *library = NULL;
    for (int i = 0; i < 4 && !library; i++)
        library = open_below(home[i], soname);
    return library;
}

static const char *open_error(const char *name)
{
    const char *why = dlerror();
    return why ? why : name;
}

/* Where the system finds it, then in toolkits. */
static void *open_library(kn_cuda_library *l)
{
    const char *given = l->variable ? getenv(l->variable) : NULL;
    const char *name = given && *given ? given : l->soname;
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library)
        return library;
    snprintf(l->lack, sizeof l->lack, "%s can't be loaded: %s", l->name, open_error(name));
    return name == l->soname ? open_in_toolkits(name) : NULL;
}

/* Calls its function of that name, which takes nothing and returns a number; 0: it has none. */
static int number_of(void *library, const char *name)
{
    size_t (*function)(void) = NULL;
    void *at = name ? dlsym(library, name) : NULL;
    memcpy(&function, &at, sizeof at);
    return function ? (int)function() : 0;
}

/* A part of the library lies in its folder; one of CUDA (of_cuda) where the system finds it first,
 * as for others that open it. Else in toolkits. It stays open: a later opening of the name gets it,
 * wherever it lies. why: 128 bytes. */
static bool open_part(void *library, const char *soname, bool of_cuda, char *why)
{
    char folder[PATH_MAX], path[PATH_MAX + 64];
    void *part = of_cuda ? dlopen(soname, RTLD_LAZY | RTLD_LOCAL) : NULL;
    if (!part && dlinfo(library, RTLD_DI_ORIGIN, folder) == 0) {
        snprintf(path, sizeof path, "%s/%s", folder, soname);
        part = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    }
    part = part ? part : dlopen(soname, RTLD_LAZY | RTLD_LOCAL);
    if (!part)
        snprintf(why, 128, "%s", open_error(soname));
    return part || open_in_toolkits(soname);
}

/* Opens its parts, of_cuda or not. A part that isn't there must be found here: the library would
 * end the process. */
static bool has_parts(kn_cuda_library *l, void *library, bool of_cuda)
{
    const int cuda = of_cuda ? number_of(library, l->cuda) / 1000 : 0;
    for (const kn_cuda_part *p = l->part; p < l->part + 4 && p->soname; p++) {
        char soname[64], number[16] = "", why[128];
        if (of_cuda)
            snprintf(number, sizeof number, "%d", cuda);
        snprintf(soname, sizeof soname, "%s%s", p->soname, number);
        if (p->of_cuda != of_cuda || open_part(library, soname, of_cuda, why))
            continue;
        if (p->optional) {
            snprintf(l->missing, sizeof l->missing, "%s", why);
            continue;
        }
        snprintf(l->lack, sizeof l->lack,
                 "%s needs another library, which can't be loaded: %s (LD_LIBRARY_PATH)", l->name,
                 why);
        return false;
    }
    return true;
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
    char have[32], need[32];
    l->version = number_of(library, l->versions);
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
        l->there = library && has_parts(l, library, false) && is_new_enough(l, library) &&
                   has_symbols(l, library) && has_parts(l, library, true);
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
