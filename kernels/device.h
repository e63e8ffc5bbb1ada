/* kernels/device.h: how products of f32 are computed, and functions of single devices: the rates
 * and the clock of meta, the switches of CUDA. */
#ifndef KNAP_KERNELS_DEVICE_H
#define KNAP_KERNELS_DEVICE_H

#include "kernels/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- products of f32 ------------------------------------------------------------------------- */

/* Products of f32 may round their factors so far from now on; at start KNAP_F32_PRODUCTS=exact (the
 * default), tf32 or bf16. A device takes the fastest products that it has among those allowed: a
 * GPU those of TF32, its convolutions too; a CPU that multiplies pairs of bf16 (AVX512_BF16) those
 * of bf16; other CPUs exact ones. Sums and results stay f32. With factors rounded by at most
 * u = 2^-8 (bf16) or 2^-11 (TF32) of themselves, an element is off by up to (2 u + u^2) sum |a| |b|
 * beside the rounding of its sum. Of bf16's on a CPU: factors below 2^-126 are taken for 0, those
 * above 3.39e38 for infinity, and products of up to 4 rows, batches of small ones, convolutions,
 * recurrent steps and attention stay exact. All ranks must set the same. false with an error for
 * another number. */
KN_API bool kn_set_f32_products(kn_products most);
/* Those that the device takes by this setting. */
KN_API kn_products kn_f32_products(kn_device d);
/* "exact", "tf32", "bf16". */
KN_API const char *kn_products_name(kn_products p);

/* ---- meta ------------------------------------------------------------------------------------ */

/* The virtual time of meta streams in seconds, and the rates of a meta device. */
KN_API double kn_meta_clock(const kn_stream *s);
/* Something that takes so long passes on a meta stream. */
KN_API void kn_meta_advance(kn_stream *s, const char *what, double seconds);
/* The rates of a meta device: operations and bytes a second, seconds a launch. */
KN_API void kn_meta_rates(double flops_per_s, double bytes_per_s, double launch_s);
/* Bytes a second of copies between meta and its host (kn_transfer), each way by itself; and that
 * the host moves when it computes on a stream of KN_STREAM_HOST. */
KN_API void kn_meta_host_rates(double link_bytes_per_s, double host_bytes_per_s);

/* ---- CUDA ------------------------------------------------------------------------------------ */

/* Which GPU this process uses, before its first use of one: index, or -1 for KNAP_CUDA_DEVICE, else
 * LOCAL_RANK modulo their number, else 0. */
KN_API void kn_cuda_choose(int index);
/* Whether a GPU can be used here; no error if not. */
KN_API bool kn_cuda_available(void);
/* "NVIDIA H200 (sm_90, 140 GiB, 132 multiprocessors), driver 13.0, CUDA 13.0, cuBLASLt 13.1.0,
 * cuDNN 9.19.0"; NULL with an error if no GPU can be used. Valid until the thread's next call. */
KN_API const char *kn_cuda_describe(void);
/* The i-th library of NVIDIA's that this GPU computes without, and what takes its place: "cuDNN
 * 9.1.0 is too old: ...; attention, convolutions and batch norm run on Knap's kernels, without
 * tensor cores". NULL after the last, and where no GPU can be used. Valid until the thread's next
 * call. */
KN_API const char *kn_cuda_lacks(int i);
/* How the algorithms of matrix products are chosen: "24 timed before: FILE", "timed when first met,
 * 24 so far: FILE" (KNAP_TUNE=1), or "chosen by heuristics, ..". It says too where the file is
 * damaged or can't be written. NULL without a GPU or cuBLASLt. Valid until the thread's next call.
 */
KN_API const char *kn_cuda_choices(void);
/* Only algorithms that repeat their bits from now on; off at start. Also KNAP_CUDA_DETERMINISTIC=1.
 * Everything but cuDNN's backward of attention and some of its gradients of f32 convolutions
 * repeats them anyway. Not to be changed between attention with dropout and its backward. */
KN_API void kn_cuda_deterministic(bool on);
/* What cuBLASLt computes along with a product from now on, a comma-separated list: bgrad (a bias's
 * gradient, with that of its weight), dgelu (the derivative of kn_gelu_tanh, in the product before
 * it), all or none of the two. Else kernels of their own compute it, which read an operand or the
 * result once more. At start "timed": where a run with KNAP_TUNE=1 timed both ways, and this one
 * was faster. cuBLASLt's sum has an order of its own, and its derivative multiplies what isn't
 * rounded yet, so bits differ. Also KNAP_CUDA_EPILOGUES. false with an error for another name. */
KN_API bool kn_cuda_epilogues(const char *list);

/* The pools of GPU memory of this thread's context, added up; 1 - largest_free / (reserved - live)
 * of it is fragmented. */
typedef struct kn_cuda_memory_stats {
    int64_t reserved, peak_reserved; /* bytes that were taken from the driver */
    int64_t live;                    /* bytes of blocks that are out, rounding included */
    int64_t largest_free;            /* bytes of the largest block that is free */
    int64_t segments, blocks_out, blocks_free;
    int64_t device_free, device_total; /* bytes, of all processes, from the driver */
} kn_cuda_memory_stats;
/* Zeros if no GPU is in use. */
KN_API kn_cuda_memory_stats kn_cuda_memory_read(void);

#ifdef __cplusplus
}
#endif
#endif
