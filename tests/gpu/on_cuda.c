/* tests/gpu/on_cuda.c: see on_cuda.h. */
#include "comm/comm_internal.h"
#include "tests/gpu/nccl_ranks.h"
#include "knap.h"
#include "kernels/kernels_internal.h"
#include "tensor/tensor_internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Not here. */
#undef KN_CPU
#undef kn_data
#undef kn_spawn_threads

/* Parts of the names of cases that can't run so, and why. */
static const char *const cannot[][2] = {
    { "own_operation.", "its functions read bytes on the host" },
    { "sync_batch_norm.batches_of_any_size", "its functions read bytes on the host" },
    { "sync_batch_norm.too_few_values", "its functions read bytes on the host" },
    { "alike.what_one_rank_changed_is_found", "offload to memory is none on the CPU" },
    { "fill.every_allocation_failing", "CUDA keeps the scratch that it first takes" },
    { "place.", "it compares the CPU with another device" },
    { "mesh.trees_beside_each_other", "it counts the CPU's streams" },
    { "call.methods_are_cast_and_gathered", "it reads a parameter's bytes" },

    { "device.tensors_cross", "it copies between CUDA and the stand-in, which no machine has" },
    { "sync_batch_norm.as_plain", "its functions read bytes on the host" },
    { "sync_batch_norm.same_bits", "its functions read bytes on the host" },
    { "summon_device.", "it compares the CPU with another device" },
    { "forward_prefetch.is_on_where", "it compares the CPU with another device" },
    { "offload_masters.parameters_in_two", "it compares the CPU with another device" },
    { "wrong_use.options_out_of_range", "it names a device that is not the default" },
    { "memory.worked_example", "its reductions wait, which those of a GPU do not" },
    { "init.four_ranks", "its limit knows no segments of registered memory" },
    { "offload_units.one_", "the CPU offloads to files only" },
    { "tensor_collectives.a_rank_that_goes_wrong", "labels of a GPU's calls name no shapes" },
    { "table_ranks.among_simulated", "simulated ranks move bytes of the host" },
    { "acts.programs", "with offload an ignored parameter lies elsewhere than the others" },
};

const char *kn_test_cannot(const char *name)
{
    for (size_t i = 0; i < sizeof cannot / sizeof *cannot; i++)
        if (strstr(name, cannot[i][0]))
            return cannot[i][1];
    return NULL;
}

__attribute__((constructor)) static void begin(void)
{
    kn_default_device = KN_CUDA;
    on_cpu_kernels = true;
    fake.memory = (size_t)16 << 30; /* threads share it */
    kn_cuda_deterministic(true);
}

/* The real CUDA doesn't survive a fork of the process that began it, and the runtime says so by the
 * process's number. The fake one does: so all processes of a case have one number. */
pid_t getpid(void)
{
    static pid_t first;
    return first = first ? first : (pid_t)syscall(SYS_getpid);
}

pid_t getppid(void)
{
    return getpid();
}

int fake_threads(int n, kn_rank_fn fn, void *arg)
{
    setenv("KNAP_COMM", "local", 1);
    int failed = kn_spawn_threads(n, fn, arg);
    unsetenv("KNAP_COMM");
    return failed;
}

bool fake_settled(void)
{
    return kn_stream_sync(kn_compute_stream(KN_CUDA));
}

void *fake_data(const kn_tensor *t)
{
    if (!t || kn_device_of(t) != KN_CUDA)
        return kn_data(t);
    return fake_settled() ? kn_array_of(t).data : NULL;
}
