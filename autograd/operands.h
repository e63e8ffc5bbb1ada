/* autograd/operands.h (private): the shapes of an operation's operands in its errors. */
#ifndef KNAP_AUTOGRAD_OPERANDS_H
#define KNAP_AUTOGRAD_OPERANDS_H

#include "autograd/autograd_internal.h"

/* While they stand, an error that lacks the shape of an operand lists them all. kn_apply lists
 * those of each operation around its shape rule; a composition that checks its arguments itself
 * may, too. Ends in the order of stacks. The tensors are good ones (kn_check) or NULL. */
typedef struct kn_operands {
    kn_tensor *const *in;
    int n;
    const struct kn_operands *outer;
} kn_operands;
void kn_operands_begin(kn_operands *o, int n, kn_tensor *const *in);
void kn_operands_end(const kn_operands *o);

/* Those of a composition, which stand until the block ends: as a list, and one by one. */
#define KN_OPERANDS_OF(n, list)                                                                    \
    __attribute__((cleanup(kn_operands_end))) kn_operands operands_;                               \
    kn_operands_begin(&operands_, (n), (list))
#define KN_OPERANDS(...)                                                                           \
    KN_OPERANDS_OF(sizeof((kn_tensor *[]){ __VA_ARGS__ }) / sizeof(kn_tensor *),                   \
                   ((kn_tensor *[]){ __VA_ARGS__ }))

#endif
