/* nn/edit.h (private): modules in the places of others (kn_module_replace). */
#ifndef KNAP_NN_EDIT_H
#define KNAP_NN_EDIT_H

#include "nn/nn_internal.h"

/* The module that a call of m runs: the one in m's place, unless that one makes the call. Inside of
 * its tree's calls that is so after m was freed, too. NULL with an error. */
kn_module_impl *kn_module_in_place(void *m, const char *what);
/* m itself, where it is that one; else an error: no other module can run m's methods. */
kn_module_impl *kn_module_in_its_place(void *m, const char *what);
void kn_module_unreplace(kn_module_impl *m); /* m stands for no module, and none for m */
/* The parent of m, if any, lists m no more; m still knows its parent. */
void kn_module_unlist(kn_module_impl *m);

#endif
