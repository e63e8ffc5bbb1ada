/* nn/walk.h: going over the modules, parameters and buffers of a tree, and looking for one by its
 * name. */
#ifndef KNAP_NN_WALK_H
#define KNAP_NN_WALK_H

#include "nn/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A place in a tree. One walk goes over one kind; the tree must not change meanwhile.
 *
 *     for (kn_walk w = kn_walk_begin(&net); kn_next_param(&w);)
 *         printf("%s %s\n", w.name, kn_requires_grad(w.tensor) ? "trains" : "is frozen"); */
typedef struct kn_walk {
    char name[512];    /* dotted, from the module of kn_walk_begin; that one is "" */
    kn_module *module; /* the module, or the one that holds the tensor */
    kn_tensor *tensor; /* kn_next_param, kn_next_buffer; borrowed */
    kn_module *_root;
    int _next;
} kn_walk;

/* Before the first one. Where m is no module, an error, and nothing follows. */
KN_API kn_walk kn_walk_begin(void *m);
/* Go to the next one: modules before those below them, in the order in which they were added;
 * tensors module by module. A parameter or buffer that several modules share comes once, under its
 * first name. False at the end, or with an error (a name of more than 511 characters). */
KN_API bool kn_next_module(kn_walk *w);
KN_API bool kn_next_param(kn_walk *w);
KN_API bool kn_next_buffer(kn_walk *w);

/* The module with the dotted path below m ("" is m itself). NULL, without an error, where there is
 * none. */
KN_API kn_module *kn_look_module(void *m, const char *path);
KN_API kn_tensor *kn_look_param(const void *m, const char *path);
KN_API kn_tensor *kn_look_buffer(const void *m, const char *path);

#ifdef __cplusplus
}
#endif

#endif
