/* comm/nccl/nccl_load.c: NCCL's library, opened when collectives of GPU tensors first need it
 * (nccl.h). */
#include "comm/nccl/nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static nccl_functions nccl;
static bool nccl_there;
static pthread_once_t nccl_once = PTHREAD_ONCE_INIT;

static void *open_library(void)
{
    static const char *const folder[] = { "/usr/local/cuda/lib64", "/usr/local/cuda/lib" };
    const char *given = getenv("KNAP_NCCL");
    char path[1024];
    if (given && *given)
        return dlopen(given, RTLD_NOW | RTLD_LOCAL);
    void *l = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; !l && i < sizeof folder / sizeof *folder; i++) {
        snprintf(path, sizeof path, "%s/libnccl.so.2", folder[i]);
        l = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return l;
}

static void load(void)
{
    const kn_cuda_symbol list[] = {
        { "ncclGetVersion", &nccl.version },
        { "ncclGetUniqueId", &nccl.unique_id },
        { "ncclCommInitRankConfig", &nccl.init },
        { "ncclCommGetAsyncError", &nccl.async_error },
        { "ncclCommAbort", &nccl.abort },
        { "ncclCommFinalize", &nccl.finalize },
        { "ncclCommDestroy", &nccl.destroy },
        { "ncclGetErrorString", &nccl.error_string },
        { "ncclGetLastError", &nccl.last_error },
        { "ncclAllGather", &nccl.all_gather },
        { "ncclReduceScatter", &nccl.reduce_scatter },
        { "ncclAllReduce", &nccl.all_reduce },
        { "ncclBroadcast", &nccl.broadcast },
        { "ncclSend", &nccl.send },
        { "ncclRecv", &nccl.recv },
        { "ncclGroupStart", &nccl.group_start },
        { "ncclGroupEnd", &nccl.group_end },
    };
    const kn_cuda_symbol more[] = {
        { "ncclCommSplit", &nccl.split },    /* 2.18 */
        { "ncclMemAlloc", &nccl.mem_alloc }, /* 2.19 */
        { "ncclMemFree", &nccl.mem_free },       { "ncclCommRegister", &nccl.enroll },
        { "ncclCommDeregister", &nccl.dismiss },
    };
    void *l = open_library();
    for (size_t i = 0; l && i < sizeof more / sizeof *more; i++) {
        void *at = dlsym(l, more[i].name);
        memcpy(more[i].to, &at, sizeof at);
    }
    nccl_there = l && kn_cuda_symbols(l, "libnccl.so.2", list, (int)(sizeof list / sizeof *list));
}

const nccl_functions *kn_nccl(void)
{
    pthread_once(&nccl_once, load);
    if (nccl_there)
        return &nccl;
    kn_fail("collectives of GPU tensors need libnccl.so.2, which is neither among the system's "
            "libraries nor below /usr/local/cuda; install it, name it in KNAP_NCCL, or set "
            "KNAP_COMM=local");
    return NULL;
}

const char *kn_nccl_version(void)
{
    static char text[32];
    int v = 0;
    pthread_once(&nccl_once, load);
    if (!nccl_there || nccl.version(&v) != NCCL_SUCCESS)
        return NULL;
    snprintf(text, sizeof text, "%d.%d.%d", v / 10000, v % 10000 / 100, v % 100);
    return text;
}

bool kn_nccl_failed(const kn_nccl_comm *n, const char *what, const char *label, int error)
{
    const char *last = n->handle ? nccl.last_error(n->handle) : "";
    return kn_fail("%s %s: NCCL reports %s%s%s (NCCL_DEBUG=WARN shows more)", what,
                   label ? label : "-", nccl.error_string(error), last && *last ? ": " : "",
                   last ? last : "");
}
