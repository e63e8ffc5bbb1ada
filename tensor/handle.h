/* tensor/handle.h (private to tensor/): birth and death of handles; scopes hold references. */
#ifndef KNAP_TENSOR_HANDLE_H
#define KNAP_TENSOR_HANDLE_H

#include "tensor/tensor_internal.h"

/* A zeroed live handle with refs 1 and no storage; NULL with an error. */
kn_tensor *kn_handle_new(void);
/* Drops one reference without checks; the last one frees. */
void kn_handle_unref(kn_tensor *t);

/* This thread's scope stack, made at first use; NULL with an error. */
struct kn_scope_stack *kn_scope_stack_get(void);

#ifdef KN_DEBUG
/* Dead handles wait here before their memory is given back, so that a late use finds a dead handle
 * instead of other bytes. */
#define KN_QUARANTINE 4096
/* Puts p in and returns the pointer to free now (p itself without a stack). */
kn_tensor *kn_quarantine_swap(kn_tensor *p);
#endif

#endif
