/* autograd/passes.h (private): sets of backwards, and the scale that multiplied their losses: what
 * a gradient carries (passes.c, scale.c). Backwards are known by kn_engine.number, not by
 * kn_engine.pass (engine.h). */
#ifndef KNAP_AUTOGRAD_PASSES_H
#define KNAP_AUTOGRAD_PASSES_H

#include "tensor/tensor.h"

/* Backwards by number (kn_backward_number), in runs that rise, and their losses' scale (passes.c).
 * Functions that return bool fail with an error where memory is out. */
typedef struct kn_pass_run {
    int64_t first, last;
} kn_pass_run;
typedef struct kn_passes {
    kn_pass_run *run;
    int runs;
    int64_t room;
    kn_tensor *scale; /* multiplied their losses; f32 without dims; a reference; NULL: none did */
    bool mixed;       /* not all of them */
    bool zeros;       /* of a gradient of zeros, which no backward brought; it counts nothing */
} kn_passes;
/* Whether there is a gradient that s speaks of. */
bool kn_passes_any(const kn_passes *s);
bool kn_passes_add(kn_passes *s, int64_t first, int64_t last, kn_tensor *scale);
/* scale.c: scale multiplied loss, the result of an operation (without one nothing is told). */
void kn_scaled_by(const kn_tensor *loss, kn_tensor *scale);
bool kn_passes_join(kn_passes *s, const kn_passes *from);
bool kn_passes_have(const kn_passes *s, int64_t pass);
int64_t kn_passes_count(const kn_passes *s);
void kn_passes_clear(kn_passes *s);
void kn_passes_free(kn_passes *s);
/* The factor of the running backward's loss (kn_scale_loss); NULL: none. Borrowed. */
kn_tensor *kn_backward_scale(void);

#endif
