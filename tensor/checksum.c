/* tensor/checksum.c: XXH3, compiled from libxxhash's header: its state may lie in any memory then,
 * and nothing depends on the version of the library that is there when a program runs. */
#define XXH_INLINE_ALL
#include "tensor/checksum.h"
#include <string.h>
#include <xxhash.h>

_Static_assert(sizeof(XXH3_state_t) + _Alignof(XXH3_state_t) - 1 <= sizeof(kn_checksum),
               "a checksum has no room for the library's state");

static XXH3_state_t *state_of(const kn_checksum *c)
{
    const uintptr_t align = _Alignof(XXH3_state_t);
    return (XXH3_state_t *)(((uintptr_t)c->room + align - 1) / align * align);
}

void kn_checksum_begin(kn_checksum *c)
{
    XXH3_64bits_reset(state_of(c));
}

void kn_checksum_add(kn_checksum *c, const void *data, size_t bytes)
{
    XXH3_64bits_update(state_of(c), data, bytes);
}

uint64_t kn_checksum_end(const kn_checksum *c)
{
    return XXH3_64bits_digest(state_of(c));
}

uint64_t kn_checksum_of(const void *data, size_t bytes)
{
    return XXH3_64bits(data, bytes);
}

uint64_t kn_checksum_name(const char *name, uint64_t seed)
{
    return kn_checksum_seeded(name, strlen(name), seed);
}

uint64_t kn_checksum_seeded(const void *data, size_t bytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, bytes, seed);
}
