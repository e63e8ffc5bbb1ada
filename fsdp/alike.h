/* fsdp/alike.h (private): facts that must be alike on all ranks (alike.c). A list of lines, each a
 * name and a value, becomes one hash, which the ranks exchange. Only where hashes differ are lists
 * sent, and the first line that differs is named, on all ranks, by one sentence. */
#ifndef KNAP_FSDP_ALIKE_H
#define KNAP_FSDP_ALIKE_H

#include "comm/comm.h"

typedef struct kn_alike {
    const char *advice; /* the end of the sentence */
    int shards;         /* rank r is compared with rank r % shards; 0: 1 */
    uint64_t hash;
    char *text; /* lines: the value, its name with a 0 byte, and as it is shown with one */
    int64_t size, room;
} kn_alike;

/* One more line. value is compared; format shows it. Values that are shown alike count as equal.
 * False with an error where memory runs out. */
bool kn_alike_add(kn_alike *a, uint64_t value, const char *name, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Whether the ranks of comm have the same n lists; else false with a sentence of what, which names
 * the first line that differs. Collective: one message of n words. An error that stands makes it
 * fail. */
bool kn_alike_agree(const kn_alike *a, int n, kn_comm *comm, const char *what);
void kn_alike_free(kn_alike *a);

#endif
