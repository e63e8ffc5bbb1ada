/* state/rekey.c: keys of an optimizer's state by names of parameters or by their numbers
 * (rekey_optim_state_dict). */
#include "kernels/error_internal.h"
#include "state/dict_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The number of the parameter that a name begins with, up to a dot; the longest one; -1: none. */
static int param_by_name(const char *name, const kn_param *p, int n, size_t *length)
{
    int best = -1;
    *length = 0;
    for (int i = 0; i < n; i++) {
        const size_t size = strlen(p[i].name);
        if (strncmp(name, p[i].name, size) == 0 && name[size] == '.' && size > *length) {
            best = i;
            *length = size;
        }
    }
    return best;
}

/* The same of a number. "0.weight.exp_avg" is a name: behind a number comes what is kept. */
static int param_by_number(const char *name, const kn_param *p, int n, size_t *length)
{
    char *end;
    size_t named;
    const long i = name[0] >= '0' && name[0] <= '9' ? strtol(name, &end, 10) : -1;
    if (i < 0 || i >= n || *end != '.' ||
        (strchr(end + 1, '.') && param_by_name(name, p, n, &named) >= 0))
        return -1;
    *length = (size_t)(end - name);
    return (int)i;
}

/* The new key of an item below prefix; NULL with an error. */
static char *rekeyed(const char *name, const char *prefix, const kn_param *p, int n,
                     kn_state_keys keys)
{
    const char *below = kn_state_below(name, prefix);
    size_t length;
    char number[24];
    const int i = keys == KN_KEYS_INDEX ? param_by_name(below, p, n, &length)
                                        : param_by_number(below, p, n, &length);
    if (i < 0)
        return kn_fail_null(
            "kn_state_rekey: '%s' begins with no %s of a parameter of the module, which has "
            "%d",
            name, keys == KN_KEYS_INDEX ? "name" : "number", n);
    snprintf(number, sizeof number, "%d", i);
    char *head = kn_state_join(prefix, keys == KN_KEYS_INDEX ? number : p[i].name, NULL);
    char *joined = head ? kn_state_join(head, below + length, NULL) : NULL;
    kn_host_free(head);
    return joined;
}

/* All new names first; then they are exchanged. */
bool kn_state_rekey(kn_state *s, void *module, kn_state_keys keys, const char *prefix)
{
    static const char what[] = "kn_state_rekey";
    const kn_param *p;
    if (!kn_ok() || !kn_given(s, what, "the state"))
        return false;
    if (keys != KN_KEYS_NAME && keys != KN_KEYS_INDEX)
        return kn_fail("%s: the keys are %d; give KN_KEYS_NAME or KN_KEYS_INDEX", what, (int)keys);
    const int n = kn_params(module, &p);
    kn_state *to = n > 0 ? kn_state_new() : NULL;
    bool ok = to != NULL;
    for (int i = 0; ok && i < s->count; i++) {
        const char *name = s->list[i].name;
        const bool stays = !kn_state_below(name, prefix);
        char *key = stays ? kn_state_join(NULL, name, NULL) : rekeyed(name, prefix, p, n, keys);
        ok = key && (!kn_state_find(to, key) || kn_fail("%s: two keys become '%s'", what, key)) &&
             kn_state_add(to, NULL, key);
        kn_host_free(key);
    }
    for (int i = 0; ok && i < s->count; i++) { /* the old ones to what is freed */
        char *key = to->list[i].name;
        to->list[i].name = s->list[i].name;
        s->list[i].name = key;
    }
    if (ok) {
        const kn_name_table table = s->table;
        s->table = to->table;
        to->table = table;
    }
    kn_state_free(to);
    return ok;
}
