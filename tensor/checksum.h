/* tensor/checksum.h (private): XXH3 of 64 bits with seed 0 by libxxhash, a checksum that costs less
 * than reading the bytes (`xxhsum -H3` prints the same numbers). It finds damage, not malice. */
#ifndef KNAP_TENSOR_CHECKSUM_H
#define KNAP_TENSOR_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* Stays where it was begun: a copy of it is nothing. Takes no other memory. */
typedef struct kn_checksum {
    unsigned char room[704]; /* of the library's state, which has an alignment of its own */
} kn_checksum;

void kn_checksum_begin(kn_checksum *c);
void kn_checksum_add(kn_checksum *c, const void *data, size_t bytes);
uint64_t kn_checksum_end(const kn_checksum *c); /* of what was added; more may follow */
uint64_t kn_checksum_of(const void *data, size_t bytes);
/* For hash tables: who doesn't know seed can't choose names of the same hash. */
uint64_t kn_checksum_name(const char *name, uint64_t seed);
uint64_t kn_checksum_seeded(const void *data, size_t bytes, uint64_t seed);

#endif
