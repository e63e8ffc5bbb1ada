/* nn/cache.h (private): an attention's part of a cache, and the attention to it. */
#ifndef KNAP_NN_CACHE_H
#define KNAP_NN_CACHE_H

#include "nn/layers.h"

/* The data of every attention begin with it. */
typedef struct kn_attention_cache {
    kn_cache *of;     /* whose texts are selected; NULL: no cache */
    kn_kv_cache **kv; /* [slots], by number of the text; NULL: it has no positions yet */
    int64_t slots;
} kn_attention_cache;

/* Of both attentions. */
typedef struct kn_attend_options {
    kn_rms_norm *q_norm, *k_norm; /* q_norm NULL: none */
    bool rope, causal;
    double rope_base;
    kn_rope_scaling rope_scaling;
    int64_t window;
    kn_tensor *mask;
    double dropout;
} kn_attend_options;

/* The attention of q[B,H,t,D], before norms and rope, to keys and values [B,G,t,D], which with a
 * cache go behind those of the text so far; rope turns by the positions there. Of several texts row
 * i is that of text i. */
kn_tensor *kn_attend(kn_attention_cache *c, const char *name, kn_tensor *q, kn_tensor *k,
                     kn_tensor *v, const kn_attend_options *o);

#endif
