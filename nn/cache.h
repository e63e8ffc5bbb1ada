/* nn/cache.h (private): an attention's part of a cache. */
#ifndef KNAP_NN_CACHE_H
#define KNAP_NN_CACHE_H

#include "nn/layers.h"

/* The data of every attention begin with it. */
typedef struct kn_attention_cache {
    kn_kv_cache *kv;  /* made by the first forward */
    int64_t capacity; /* 0: no cache */
} kn_attention_cache;

/* Puts keys and values [B,G,t,D] behind those so far, and gives all; without a cache they stay. */
bool kn_attention_extend(kn_attention_cache *c, const char *name, kn_tensor **k, kn_tensor **v);

#endif
