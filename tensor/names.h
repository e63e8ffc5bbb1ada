/* tensor/names.h (private to the library): a hash table over the names of a list, whose items begin
 * with their name, a char *. An address is mixed into the hash, which a file's author can't know:
 * names can't be chosen to share a slot. */
#ifndef KNAP_TENSOR_NAMES_H
#define KNAP_TENSOR_NAMES_H

#include <stdbool.h>
#include <stddef.h>

typedef struct kn_name_table {
    int *slot; /* [slots]: number in the list + 1, or 0; for the owner to free */
    size_t slots;
} kn_name_table;

/* Makes room for the names of count items, of which the first `there` are in the list, of items of
 * size bytes. False with an error. */
bool kn_name_table_grow(kn_name_table *t, const void *list, size_t size, int there, int count);
/* The names of the list, and no others. */
void kn_name_table_fill(kn_name_table *t, const void *list, size_t size, int count);
/* The number of the item of that name; -1: none. */
int kn_name_table_find(const kn_name_table *t, const void *list, size_t size, const char *name);
/* Item i has its name in the table from here on. */
void kn_name_table_add(kn_name_table *t, const void *list, size_t size, int i);

#endif
