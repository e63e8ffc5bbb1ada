/* tests/kernels/emulated.h (private): what tests ask of the emulator (kernels/cuda/emulate_check.cc). */
#ifndef KNAP_TESTS_KERNELS_EMULATED_H
#define KNAP_TESTS_KERNELS_EMULATED_H

#include <stddef.h>

/* Until the next emulated_allow_all, kernels may access nothing but what was allowed since then (and scratch, tables
 * and shared memory). */
void emulated_allow(const void *p, size_t bytes);
void emulated_allow_all(void);

#endif
