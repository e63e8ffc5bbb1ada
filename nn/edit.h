/* nn/edit.h (private): modules in the places of others (kn_module_replace), and the owners of
 * parameters that several modules hold. */
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

/* ties.c. The tree of m changed: chooses the owner of each shared parameter. Before m is freed:
 * what its entries know goes to entries that stay. */
void kn_owners_settle(kn_module_impl *m);
void kn_owners_leave(kn_module_impl *m);
/* The owner of e's parameter in m's tree; *holds is its module. */
const kn_param_entry *kn_owner_of(const kn_module_impl *m, const kn_param_entry *e,
                                  const kn_module_impl **holds);
/* m's entry e may stand for its parameter in root's list: the owner is e, or not below root. */
bool kn_stands_in(const kn_module_impl *m, const kn_param_entry *e, const kn_module_impl *root);

#endif
