/* tests/data/owned.h: loaders and sets of images that go at the end of their block. */
#ifndef KNAP_TESTS_DATA_OWNED_H
#define KNAP_TESTS_DATA_OWNED_H

#include "data/images.h"
#include "data/loader.h"

static inline void owned_loader(kn_loader **l)
{
    kn_loader_free(*l);
}

static inline void owned_set(kn_image_set **s)
{
    kn_image_set_free(*s);
}

#define OWNED_LOADER __attribute__((cleanup(owned_loader), unused))
#define OWNED_SET    __attribute__((cleanup(owned_set), unused))

#endif
