/* comm/nccl/nccl_load.c: NCCL's library, opened when collectives of GPU tensors first need it
 * (nccl.h). */
#include "comm/nccl/nccl.h"

#include <stdio.h>

static nccl_functions nccl;

static const kn_cuda_symbol symbols[] = {
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
    { "ncclCommSplit", &nccl.split, true },    /* 2.18 */
    { "ncclMemAlloc", &nccl.mem_alloc, true }, /* 2.19 */
    { "ncclMemFree", &nccl.mem_free, true },
    { "ncclCommRegister", &nccl.enroll, true },
    { "ncclCommDeregister", &nccl.dismiss, true },
};

kn_cuda_library kn_nccl_library = { .name = "NCCL",
                                    .soname = "libnccl.so.2",
                                    .variable = "KNAP_NCCL",
                                    .symbols = symbols,
                                    .count = sizeof symbols / sizeof *symbols };

const nccl_functions *kn_nccl(void)
{
    if (kn_cuda_library_open(&kn_nccl_library))
        return &nccl;
    return kn_fail_null(
        "collectives of GPU tensors need NCCL: %s; install it, name it in KNAP_NCCL, or set "
        "KNAP_COMM=local",
        kn_nccl_library.lack);
}

const char *kn_nccl_version(void)
{
    static char text[32];
    int v = 0;
    if (!kn_cuda_library_open(&kn_nccl_library) || nccl.version(&v) != NCCL_SUCCESS)
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
