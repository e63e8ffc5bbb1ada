/* tensor/names.c: a hash table over the names of a list. */
#include "tensor/names.h"
#include "kernels/memory.h"
#include "tensor/checksum.h"

#include <string.h>

static const char *name_of(const void *list, size_t size, int i)
{
    return *(const char *const *)((const char *)list + (size_t)i * size);
}

/* The slot of name, or the empty one where it would be. */
static int *slot_of(const kn_name_table *t, const void *list, size_t size, const char *name)
{
    for (uint64_t at = kn_checksum_name(name, (uint64_t)(uintptr_t)t->slot);; at++) {
        int *slot = &t->slot[at & (t->slots - 1)];
        if (!*slot || strcmp(name_of(list, size, *slot - 1), name) == 0)
            return slot;
    }
}

/* At most half of the slots are taken. */
bool kn_name_table_grow(kn_name_table *t, const void *list, size_t size, int there, int count)
{
    kn_name_table more = { .slots = t->slots ? t->slots : 16 };
    while (more.slots < 2 * (size_t)count)
        more.slots *= 2;
    if (more.slots == t->slots)
        return true;
    if (!(more.slot = kn_host_calloc(more.slots, sizeof *more.slot)))
        return false;
    kn_host_free(t->slot);
    *t = more;
    kn_name_table_fill(t, list, size, there);
    return true;
}

void kn_name_table_fill(kn_name_table *t, const void *list, size_t size, int count)
{
    memset(t->slot, 0, t->slots * sizeof *t->slot);
    for (int i = 0; i < count; i++)
        kn_name_table_add(t, list, size, i);
}

int kn_name_table_find(const kn_name_table *t, const void *list, size_t size, const char *name)
{
    return t->slots ? *slot_of(t, list, size, name) - 1 : -1;
}

void kn_name_table_add(kn_name_table *t, const void *list, size_t size, int i)
{
    *slot_of(t, list, size, name_of(list, size, i)) = i + 1;
}
