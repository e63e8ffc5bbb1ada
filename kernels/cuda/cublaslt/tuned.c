/* kernels/cuda/cublaslt/tuned.c: choices of algorithms as text (tuned.h). */
#include "kernels/cuda/cublaslt/tuned.h"
#include "kernels/choices.h"
#include "kernels/cuda/cublaslt/plan.h"
#include "kernels/cuda/runtime/runtime.h"
#include "kernels/device.h"

#include <stdio.h>
#include <string.h>

/* ---- keys ------------------------------------------------------------------------------------ */

static const struct {
    const char *type, *name;
    size_t at, bytes;
} field[] = {
#define FIELD(type, name) { #type, #name, offsetof(kn_gemm, name), sizeof(type) },
    KN_GEMM_FIELDS(FIELD)
#undef FIELD
};
enum { FIELDS = sizeof field / sizeof *field };

static long long number(const kn_gemm *g, int i)
{
    const char *at = (const char *)g + field[i].at;
    int64_t wide = *at; /* a bool */
    int32_t narrow;
    if (field[i].bytes == sizeof wide)
        memcpy(&wide, at, sizeof wide);
    if (field[i].bytes == sizeof narrow) {
        memcpy(&narrow, at, sizeof narrow);
        wide = narrow;
    }
    return wide;
}

/* The part of a key that is the same for all products here; false without a GPU. */
static bool machine_key(char *text, size_t size)
{
    static _Thread_local struct cudaDeviceProp gpu;
    char version[32];
    if (!kn_cuda_usable() || !kn_cuda_library_open(&kn_cublaslt_library) ||
        (!*gpu.name && cudaGetDeviceProperties(&gpu, kn_cuda_index()) != cudaSuccess))
        return false;
    int n = snprintf(text, size, "cuBLASLt %s, %.100s, %d of %d multiprocessors, workspace %zu, ",
                     kn_cuda_version_text(kn_cublaslt_library.version, version), gpu.name,
                     kn_cuda_sm_target(), gpu.multiProcessorCount, KN_BLAS_WORKSPACE);
    return n > 0 && (size_t)n < size;
}

/* The key of g on this GPU; false where there is no GPU. */
static bool key_of(const kn_gemm *g, char key[])
{
    size_t used = 0;
    if (!machine_key(key, KN_CHOICE_KEY))
        return false;
    for (int i = 0; i < FIELDS; i++) {
        used = strlen(key);
        snprintf(key + used, KN_CHOICE_KEY - used, "%s%s ", i ? ", " : "", field[i].name);
        used = strlen(key);
        if (strcmp(field[i].type, "kn_dtype") == 0)
            snprintf(key + used, KN_CHOICE_KEY - used, "%s", kn_dtype_name((kn_dtype)number(g, i)));
        else
            snprintf(key + used, KN_CHOICE_KEY - used, "%lld", number(g, i));
    }
    return strlen(key) + 1 < KN_CHOICE_KEY;
}

/* ---- values ---------------------------------------------------------------------------------- */

void kn_tuned_write(const kn_tuned *t, char value[])
{
    char *at = value + sprintf(value, t->parts ? "parts" : "algorithm ");
    for (size_t i = 0; i < sizeof t->algorithm && !t->parts; i++)
        at += sprintf(at, "%02x", t->algorithm[i]);
    snprintf(at, 100, ", first %.1f us, best %.1f us", t->first_us, t->best_us);
}

/* Reads what kn_tuned_write writes, and nothing else: what was read is written again. */
bool kn_tuned_read(const char *value, kn_tuned *t)
{
    char again[KN_CHOICE_KEY];
    const char *at = value;
    *t = (kn_tuned){ .parts = strncmp(value, "parts", 5) == 0 };
    at += t->parts ? 5 : strncmp(value, "algorithm ", 10) == 0 ? 10 : 0;
    if (!t->parts && strlen(at) < 2 * sizeof t->algorithm)
        return false;
    for (size_t i = 0; i < sizeof t->algorithm && !t->parts; i++, at += 2)
        if (sscanf(at, "%2hhx", &t->algorithm[i]) != 1)
            return false;
    if (sscanf(at, ", first %lf us, best %lf us", &t->first_us, &t->best_us) != 2 ||
        !(t->first_us >= 0 && t->first_us < 1e9 && t->best_us >= 0 && t->best_us < 1e9))
        return false;
    kn_tuned_write(t, again);
    return strcmp(again, value) == 0;
}

/* ---- both ------------------------------------------------------------------------------------ */

bool kn_tuned_find(const kn_gemm *g, kn_tuned *t)
{
    char key[KN_CHOICE_KEY], value[KN_CHOICE_KEY];
    return key_of(g, key) && kn_choice_find(key, value) && kn_tuned_read(value, t);
}

void kn_tuned_keep(const kn_gemm *g, const kn_tuned *t)
{
    char key[KN_CHOICE_KEY], value[KN_CHOICE_KEY];
    if (key_of(g, key)) {
        kn_tuned_write(t, value);
        kn_choice_keep(key, value);
    }
}

const char *kn_cuda_choices(void)
{
    char machine[KN_CHOICE_KEY];
    if (!machine_key(machine, sizeof machine))
        return NULL;
    return kn_choices_said(machine,
                           "chosen by heuristics, none was timed before (KNAP_TUNE=1 does)");
}
