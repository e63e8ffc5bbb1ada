/* tests/gpu/on_cuda.h: the tests of fsdp/ on the fake GPUs: included before each of them, it puts
 * CUDA in the CPU's place (test_cuda_fsdp, tests/gpu/on_cuda.c). */
#ifndef KNAP_TESTS_ON_CUDA_H
#define KNAP_TESTS_ON_CUDA_H

#include "comm/comm_internal.h"
#include "kernels/kernels_internal.h"
#include "knap.h"

/* The bytes of a tensor on a fake GPU, which are the host's, once all that writes them is over. */
void *fake_data(const kn_tensor *t);
bool fake_settled(void);

#define KN_CPU KN_CUDA
#undef kn_data
#undef kn_all_gather
#undef kn_all_reduce_i64
#undef kn_all_reduce_max
#define kn_data(t) fake_data(t)
/* Threads can't be ranks of NCCL: their collectives go through the hosts. */
int fake_threads(int n, kn_rank_fn fn, void *arg);
#undef kn_spawn_threads
#define kn_spawn_threads(n, fn, ...) fake_threads(n, fn, __VA_ARGS__)
/* Tests read what a collective on the compute stream gives at once. */
#define kn_all_gather(...)     (kn_all_gather(__VA_ARGS__) && fake_settled())
#define kn_all_reduce_i64(...) (kn_all_reduce_i64(__VA_ARGS__) && fake_settled())
#define kn_all_reduce_max(...) (kn_all_reduce_max(__VA_ARGS__) && fake_settled())

#endif
