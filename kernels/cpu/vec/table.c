/* kernels/cpu/vec/table.c: the vector overlay as a provider of the CPU, one for each instruction
 * set it is compiled for. Empty entries decline. */
#include "kernels/cpu/vec/vec.h"

#define LAYER VEC_JOIN(cpu_vec, KN_VEC_NAME)

/* The file is also compiled where kernels_internal.h declares fewer providers. */
extern const kn_provider LAYER;

#define ENTRY(entry, name, arrays, vectors, ...)                                                   \
    VEC_HAS_##vectors([KN_K_##entry] = VEC_FN(vec_##name), )
const kn_provider LAYER = { .name = VEC_STR(KN_VEC_NAME), .run = { KN_KERNELS(ENTRY) } };
