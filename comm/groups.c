/* comm/groups.c: communicators made from others: the same ranks once more, or some of them; and
 * their lending, for programs that make many models. */
#include "comm/comm_internal.h"
#include <string.h>

kn_comm *kn_comm_make(kn_comm_world *world, const kn_comm_ops *ops, int size)
{
    kn_comm *c = kn_host_calloc(1, ops->bytes ? ops->bytes : sizeof *c);
    if (!c)
        return NULL;
    c->ops = ops;
    c->world = world;
    const bool begun = !ops->begin || ops->begin(c, size);
    c->member = begun ? kn_host_calloc((size_t)size, sizeof *c->member) : NULL;
    for (int r = 0; c->member && r < size; r++)
        c->member[r] = r;
    if (c->member)
        return c;
    kn_comm_drop(c);
    return NULL;
}

void kn_comm_drop(kn_comm *c)
{
    if (!c)
        return;
    if (c->ops->end)
        c->ops->end(c);
    kn_host_free(c->member);
    kn_host_free(c);
}

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

/* A rank's word: where it wants to go, and the number that its next communicator may have. */
typedef struct choice {
    int64_t color, key, id;
} choice;

/* Ranks of my color by (key, rank): insertion into an order that starts by rank. */
static int members_of(const choice *of, int n, int64_t color, int *member)
{
    int size = 0;
    for (int r = 0; r < n; r++) {
        if (of[r].color != color)
            continue;
        int at = size++;
        for (; at > 0 && of[member[at - 1]].key > of[r].key; at--)
            member[at] = member[at - 1];
        member[at] = r;
    }
    return size;
}

/* The number of colors; *group: that of color in the order of their first ranks. */
static int groups_of(const choice *of, int n, int64_t color, int *group)
{
    int groups = 0;
    for (int r = 0; r < n; r++) {
        bool first = of[r].color >= 0;
        for (int k = 0; k < r && first; k++)
            first = of[k].color != of[r].color;
        if (first && of[r].color == color)
            *group = groups;
        groups += first;
    }
    return groups;
}

/* made's fields as the communicator of these ranks of c. */
static void fill(kn_comm *made, kn_comm *c, const int *member, int size)
{
    bool dup = size == c->size;
    for (int i = 0; i < size; i++) {
        made->member[i] = c->member[member[i]];
        dup = dup && member[i] == i;
        made->rank = member[i] == c->rank ? i : made->rank;
    }
    made->size = size;
    made->family = dup ? c->family : made;
    made->parent = c;
}

/* One exchange tells where all ranks go, and the number of what they make: one more than any of
 * them has. Disjoint groups have the same. */
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
    choice *all = kn_host_calloc((size_t)c->size, sizeof *all), *mine = &all[c->rank];
    int *member = kn_host_calloc((size_t)c->size, sizeof *member);
    if (!all || !member || (color >= 0 && !(made = kn_comm_make(c->world, c->ops, c->size))))
        goto fail;
    *mine = (choice){ color, key, c->world->next_id };
    kn_comm_piece piece = { all, NULL, mine, sizeof *mine / sizeof(int64_t), KN_I64, KN_I64 };
    kn_comm_call call = kn_comm_call_of(KN_CALL_GROUP, 0, &piece, 1, name);
    if (!kn_comm_run_now(c, &call, NULL))
        goto fail;
    int id = (int)mine->id;
    for (int r = 0; r < c->size; r++)
        id = all[r].id > id ? (int)all[r].id : id;
    c->world->next_id = id + 1;
    if (made) {
        made->id = id;
        made->groups = groups_of(all, c->size, color, &made->group);
        fill(made, c, member, members_of(all, c->size, color, member));
    }
    if (c->ops->join && !c->ops->join(c, made, name ? name : "-"))
        goto fail;
    if (made)
        kn_comm_enter(made, c->world, c->ops, made->rank, made->size, name);
    kn_host_free(all);
    kn_host_free(member);
    return kn_comm_device_split(c, made, color, key) ? made : NULL; /* else the world frees it */
fail:
    kn_comm_drop(made);
    kn_host_free(all);
    kn_host_free(member);
    return NULL;
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
