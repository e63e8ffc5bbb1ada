/* tests/kernels/fences.h: blocks of the CPU's memory with fences around them. */
#ifndef KNAP_TESTS_KERNELS_FENCES_H
#define KNAP_TESTS_KERNELS_FENCES_H

#include "kernels/memory.h"

/* From now on, and for all of the program; a second call does nothing. */
void fences_put(void);
/* The bytes of fences that were written, of blocks given back since the last call. */
long fences_broken(void);

#endif
