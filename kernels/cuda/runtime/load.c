/* kernels/cuda/runtime/load.c: NVIDIA's libraries, opened when first needed, so that one binary
 * runs on hosts without them. */
#include "kernels/cuda/runtime/runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *open_below(const char *folder, const char *soname)
{
    char path[1024];
    if (!folder || !*folder)
        return NULL;
    if (snprintf(path, sizeof path, "%s/lib64/%s", folder, soname) >= (int)sizeof path)
        return NULL;
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

void *kn_cuda_library(const char *soname, const char *use)
{
    void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        library = open_below(getenv("CUDA_HOME"), soname);
    if (!library)
        library = open_below(getenv("CUDA_PATH"), soname);
    if (!library)
        library = open_below("/usr/local/cuda", soname);
    if (!library)
        kn_fail(
            "%s needs %s, which is neither among the system's libraries nor below CUDA_HOME or "
            "/usr/local/cuda; install it, or set KNAP_PROVIDERS=cuda to use the slower own kernels",
            use, soname);
    return library;
}

bool kn_cuda_symbols(void *library, const char *soname, const kn_cuda_symbol *list, int n)
{
    for (int i = 0; i < n; i++) {
        void *at = dlsym(library, list[i].name);
        if (!at)
            return kn_fail(
                "%s has no %s: its version doesn't fit this build; install the one of CUDA 13",
                soname, list[i].name);
        memcpy(list[i].to, &at, sizeof at);
    }
    return true;
}
