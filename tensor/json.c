/* tensor/json.c: texts of JSON. Where memory runs out jansson may drop a character of a name or a
 * number and go on, so its allocations are watched: a text that was read in part must not be taken
 * for a damaged one, or for another one. */
#include "tensor/json.h"
#include "kernels/error_internal.h"

#include <stdbool.h>
#include <stdlib.h>

static _Thread_local bool ran_out;

static void *take(size_t bytes)
{
    void *p = malloc(bytes);
    ran_out |= !p;
    return p;
}

/* A program that has given jansson its own allocator keeps it. */
static void watch(void) __attribute__((constructor));
static void watch(void)
{
    json_malloc_t allocate;
    json_free_t release;
    json_get_alloc_funcs(&allocate, &release);
    if (allocate == malloc && release == free)
        json_set_alloc_funcs(take, free);
}

json_t *kn_json_parse(const char *text, size_t size, const char *where, json_error_t *e)
{
    ran_out = false;
    json_t *j = json_loadb(text, size, JSON_REJECT_DUPLICATES, e);
    if (!ran_out)
        return j;
    json_decref(j);
    kn_fail_memory("%s could not be read", where);
    return NULL;
}
