/* kernels/types.h: the vocabulary of everything above: dtypes, devices, arrays. Raw pointers, no
 * tensors.
 *
 * Ownership: a kn_array borrows its bytes. */
#ifndef KNAP_KERNELS_TYPES_H
#define KNAP_KERNELS_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KN_API                __attribute__((visibility("default")))
#define KN_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))

/* ---- options --------------------------------------------------------------------------------- */

/* Options of a function stand behind its arguments, by name; those not named are 0, which is their
 * default:
 *
 *     #define kn_elu(x, ...) kn_elu_((x), KN_OPTIONS(kn_elu_options, __VA_ARGS__))
 *
 * Their struct begins with two fields that nobody names: without a name a value would go to the
 * second, and doesn't compile. */
#define KN_BEGIN_OPTIONS                                                                           \
    size_t _size;                                                                                  \
    struct kn_guard *_positional
#define KN_OPTIONS(type, ...) ((type){ ._size = sizeof(type), __VA_ARGS__ })
#ifdef __clang__ /* -Wpedantic would warn of each call without options */
#pragma clang diagnostic ignored "-Wgnu-zero-variadic-macro-arguments"
#endif

/* ---- dtypes and devices ---------------------------------------------------------------------- */

/* Arithmetic exists for KN_F32, KN_BF16, KN_F16 (computed in f32), KN_F64 and, where it makes
 * sense, KN_I64, KN_I32, KN_U8, KN_BOOL. The rest are storage only (files of safetensors). */
typedef enum kn_dtype {
    KN_DTYPE_DEFAULT = 0, /* in options: "the obvious one", usually KN_F32 */
    KN_F32,
    KN_BF16,
    KN_F16,
    KN_F64,
    KN_I64,
    KN_I32,
    KN_U8,
    KN_BOOL,
    KN_I8,
    KN_I16,
    KN_U16,
    KN_U32,
    KN_U64,
    KN_F8_E4M3,
    KN_F8_E5M2,
    KN_DTYPE_COUNT
} kn_dtype;

KN_API size_t kn_dtype_size(kn_dtype t);          /* bytes an element; 0 for an unknown dtype */
KN_API const char *kn_dtype_name(kn_dtype t);     /* "f32", "bf16", ... */
KN_API kn_dtype kn_dtype_parse(const char *name); /* KN_DTYPE_DEFAULT when unknown */
KN_API bool kn_dtype_is_float(kn_dtype t);        /* f32, bf16, f16, f64 */

typedef enum kn_device {
    KN_DEVICE_DEFAULT = 0,
    KN_CPU,
    KN_META,
    KN_CUDA,
    KN_OTHER_DEVICE, /* the first number for a device that a program registers */
    KN_MAX_DEVICES = KN_OTHER_DEVICE + 4
} kn_device;

KN_API const char *kn_device_name(kn_device d); /* "cpu", "meta", "cuda", or as registered */

/* The most that a product of f32 rounds its factors, to nearest, ties to even
 * (kn_set_f32_products). A float has 23 bits behind the point. */
typedef enum kn_products {
    KN_PRODUCTS_EXACT, /* not at all */
    KN_PRODUCTS_TF32,  /* to 10 bits */
    KN_PRODUCTS_BF16,  /* to 7 bits */
} kn_products;

/* ---- arrays ---------------------------------------------------------------------------------- */

#define KN_MAX_DIMS 8

/* A strided block of elements somewhere. data points at element [0,...,0]; strides count
 * elements and may be 0 (broadcast). On meta, data is NULL or an address that is never read. */
typedef struct kn_array {
    void *data;
    kn_dtype dtype;
    int ndim;
    int64_t shape[KN_MAX_DIMS];
    int64_t stride[KN_MAX_DIMS];
} kn_array;

KN_API int64_t kn_array_numel(const kn_array *a);
KN_API bool kn_array_contiguous(const kn_array *a); /* row-major without gaps (dims of 1 ignored) */
/* A row-major array over data. */
KN_API kn_array kn_array_make(void *data, kn_dtype dtype, int ndim, const int64_t *shape);
/* Writes "f32[2,3]" into buf and returns buf. */
KN_API char *kn_array_describe(const kn_array *a, char *buf, size_t size);

/* ---- numbers that several floors name -------------------------------------------------------- */

/* The cell of a recurrent layer; the last two are torch.nn.RNN's. */
typedef enum kn_cell { KN_CELL_LSTM = 0, KN_CELL_GRU, KN_CELL_TANH, KN_CELL_RELU } kn_cell;

/* Llama 3's scaling of rotary embeddings to a longer context (rope_type "llama3" of Hugging Face):
 * a pair that turns r times over the original context
 *   with r > high_freq_factor  turns as it would without scaling,
 *   with r < low_freq_factor   turns factor times slower,
 *   between them               at a mean of both speeds, weighted by r's place in between. */
typedef struct kn_rope_scaling {
    double factor;           /* 0: no scaling; else at least 1 */
    double low_freq_factor;  /* 0: 1 */
    double high_freq_factor; /* 0: 4; above the low one */
    int64_t original_ctx;    /* positions; 0: 8192 */
} kn_rope_scaling;

#ifdef __cplusplus
}
#endif
#endif
