/* comm/nccl/nccl_graph.c: collectives of NCCL in recorded steps. They are issued, numbered and
 * compared when the step is recorded; each launch of its graph is one call of the contract for each
 * communicator that it uses, and one piece of work in flight for the watch, which ends it if a rank
 * is missing. */
#include "comm/nccl/nccl.h"
#include "kernels/graph_internal.h"

#include <stdatomic.h>
#include <stdlib.h>

static cudaStream_t compute_of(const kn_nccl_comm *n)
{
    return ((kn_gpu_stream *)n->context->compute[KN_CUDA])->handle;
}

static bool before(void *comm, bool first)
{
    kn_nccl_comm *n = comm;
    kn_comm_piece piece;
    kn_comm_call call =
        kn_comm_call_in_place(KN_CALL_REPLAY, 0, NULL, 0, KN_U8, "a recorded step", &piece);
    (void)first;
    if (!kn_ok() || !kn_nccl_open(n, "replaying", "a recorded step"))
        return false;
    kn_comm_note_call(n->comm, &call);
    return kn_nccl_watch_begin(n, compute_of(n), &call, &n->replay);
}

static void after(void *comm)
{
    kn_nccl_comm *n = comm;
    kn_nccl_watch_end(compute_of(n), n->replay);
}

/* As NCCL's getImplicitOrder has it: with NCCL_LAUNCH_ORDER_IMPLICIT (nccl_place.c) kernels of a
 * graph may run side by side from 2.27 on, with a driver for CUDA 12.9; 2.26 lets none, and before
 * there was no such order. */
const char *kn_nccl_serial(void)
{
    const char *implicit = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    const nccl_functions *f = kn_nccl();
    int nccl = 0, driver = 0;
    if (!f || f->version(&nccl) != NCCL_SUCCESS || nccl < 22600 || (implicit && !atoi(implicit)))
        return NULL;
    if (nccl < 22700)
        return "NCCL is older than 2.27";
    bool known = cudaDriverGetVersion(&driver) == cudaSuccess;
    return known && driver < 12090 ? "the driver is older than R575" : NULL;
}

bool kn_nccl_recorded(kn_nccl_comm *n)
{
    const kn_graph *g = kn_graph_recording();
    return !g || kn_graph_find_hook(g, n, NULL) ||
           kn_graph_on_launch((kn_graph_hook){ .before = before, .after = after, .arg = n });
}
