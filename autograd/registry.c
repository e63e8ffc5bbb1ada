/* autograd/registry.c: all operations, as the linker collected them from the files that define
 * them. */
#include "autograd/autograd_internal.h"

/* The bounds of the section "kn_ops", into which KN_OPS puts its entries; the linker defines
 * them. */
extern const kn_op_entry __start_kn_ops[] __attribute__((visibility("hidden")));
extern const kn_op_entry __stop_kn_ops[] __attribute__((visibility("hidden")));

const kn_op *kn_op_at(int i)
{
    for (const kn_op_entry *e = __start_kn_ops; e < __stop_kn_ops; e++) {
        if (i < e->count)
            return &e->op[i];
        i -= e->count;
    }
    return NULL;
}
