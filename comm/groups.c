/* comm/groups.c: communicators made from others: the same ranks once more, or some of them; and
 * their lending, for programs that make many models. */
#include "comm/comm_internal.h"
#include <string.h>

kn_comm *kn_comm_dup(kn_comm *c, const char *name)
{
    return kn_comm_split(c, 0, 0, name); /* equal keys: in the order of c's ranks */
}

kn_comm *kn_comm_around(kn_comm *a, kn_comm *b)
{
    for (const kn_comm *x = a; x; x = x->parent)
        for (const kn_comm *y = b; y; y = y->parent)
            if (x == y)
                return (kn_comm *)x;
    return NULL;
}

/* Ranks of my color by (key, rank): insertion into an order that starts by rank. */
static int members_of(const int64_t (*choice)[2], int n, int64_t color, int *member)
{
    int size = 0;
    for (int r = 0; r < n; r++) {
        if (choice[r][0] != color)
            continue;
        int at = size++;
        for (; at > 0 && choice[member[at - 1]][1] > choice[r][1]; at--)
            member[at] = member[at - 1];
        member[at] = r;
    }
    return size;
}

/* The number of colors; *group: that of color in the order of their first ranks. */
static int groups_of(const int64_t (*choice)[2], int n, int64_t color, int *group)
{
    int groups = 0;
    for (int r = 0; r < n; r++) {
        bool first = choice[r][0] >= 0;
        for (int k = 0; k < r && first; k++)
            first = choice[k][0] != choice[r][0];
        if (first && choice[r][0] == color)
            *group = groups;
        groups += first;
    }
    return groups;
}

kn_comm *kn_comm_split(kn_comm *c, int color, int key, const char *name)
{
    if (!kn_ok())
        return NULL;
    if (!c)
        return kn_fail_null(
            "comm_split %s: communicator is NULL: pass kn_world() or one made from it",
            name ? name : "-");
    if (!kn_comm_usable(c, "comm_split"))
        return NULL;
    kn_comm *made = NULL;
    int64_t(*choice)[2] =
        kn_host_calloc((size_t)c->size, sizeof *choice); /* (color, key) of each */
    int *member = kn_host_calloc((size_t)c->size, sizeof *member);
    if (!choice || !member)
        goto done;
    choice[c->rank][0] = color;
    choice[c->rank][1] = key;
    kn_comm_piece piece = { choice, NULL, choice[c->rank], 2, KN_I64, KN_I64 };
    kn_comm_call call = kn_comm_call_of(KN_CALL_GROUP, 0, &piece, 1, name);
    if (!kn_comm_run_now(c, &call))
        goto done;
    int size = color < 0 ? 0 : members_of((const int64_t(*)[2])choice, c->size, color, member);
    int rank = -1;
    for (int i = 0; i < size; i++)
        if (member[i] == c->rank)
            rank = i;
    made = c->ops->group(c, member, size, rank, name);
    if (made) {
        made->parent = c;
        made->groups = groups_of((const int64_t(*)[2])choice, c->size, color, &made->group);
    }
    if (!kn_ok() || !kn_comm_device_split(c, made, color, key))
        made = NULL; /* the world frees it */
done:
    kn_host_free(choice);
    kn_host_free(member);
    return made;
}

/* ---- lending: programs that make many models use communicators again ------------------------ */

kn_comm *kn_comm_lend(kn_comm *c, int size, int color, const char *name)
{
    kn_comm *made = NULL;
    for (kn_comm *k = kn_ok() ? c->world->first : NULL; k; k = k->next) /* newest first */
        if (k->of == c && k->idle && k->size == size && strcmp(k->name, name) == 0)
            made = k;
    if (!made &&
        strcmp(c->ops->backend, "simulated") == 0) /* there is no rank to agree with on colors */
        made = kn_comm_simulated_part(c, size, name);
    else if (!made)
        made = size == c->size ? kn_comm_dup(c, name) : kn_comm_split(c, color, c->rank, name);
    if (made) {
        made->of = c;
        made->idle = false;
    }
    return made;
}

void kn_comm_give_back(kn_comm *c)
{
    if (c)
        c->idle = true;
}
