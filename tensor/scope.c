/* tensor/scope.c: scopes own temporaries (docs/architecture.md, idea 4).
 *
 * One stack of references a thread. A scope is a mark in it: ending the scope drops everything
 * above the mark, and with it the scopes opened later. Tensors made outside of any scope lie below
 * the first mark and live until the context ends. */
#include "kernels/memory_internal.h"
#include "tensor/tensor_internal.h"

typedef struct frame {
    int64_t mark;    /* entries below belong to scopes around */
    uint32_t serial; /* separates this opening from others at the same depth */
} frame;

struct kn_scope_stack {
    kn_tensor **entry; /* each is one reference */
    int64_t entries, entry_room;
    frame *frame;
    int64_t frames, frame_room;
    uint32_t serial;
#ifdef KN_DEBUG
    kn_tensor *quarantine[KN_QUARANTINE];
    int quarantine_next;
    bool ending;
#endif
};

struct kn_scope_stack *kn_scope_stack_get(void)
{
    kn_context *c = kn_context_get();
    if (!c->scopes)
        c->scopes = kn_host_calloc(1, sizeof *c->scopes);
    return c->scopes;
}

/* Drops entries down to count, newest first. Popping before the drop keeps the stack whole when a
 * drop sets off others. */
static void drop_to(struct kn_scope_stack *s, int64_t count)
{
    while (s->entries > count) {
        kn_tensor *t = s->entry[--s->entries];
        t->scoped--;
        kn_handle_unref(t);
    }
}

/* Opens a scope. If memory runs out, an error stands and the scope ends nothing. */
kn_scope kn_scope_begin(void)
{
    kn_scope none = { -1, 0 };
    struct kn_scope_stack *s = kn_scope_stack_get();
    if (!s || !kn_host_grow(&s->frame, &s->frame_room, s->frames + 1, sizeof *s->frame))
        return none;
    if (++s->serial == 0)
        s->serial = 1;
    s->frame[s->frames] = (frame){ s->entries, s->serial };
    return (kn_scope){ s->frames++, s->serial };
}

/* The stack if scope is open in this thread, else NULL. */
static struct kn_scope_stack *stack_of(kn_scope scope)
{
    struct kn_scope_stack *s = kn_context_get()->scopes;
    bool open = s && scope.serial && scope.mark >= 0 && scope.mark < s->frames &&
                s->frame[scope.mark].serial == scope.serial;
    return open ? s : NULL;
}

void kn_scope_end(kn_scope scope)
{
    struct kn_scope_stack *s = stack_of(scope);
    if (!s)
        return;
    s->frames = scope.mark;
    drop_to(s, s->frame[scope.mark].mark);
}

/* Kept entries move down to the mark, where the scope around owns them. All marking is done before
 * the first drop: a drop may free a listed tensor that these scopes don't own. */
void kn_scope_end_except(kn_scope scope, kn_tensor *const *keep, int n)
{
    struct kn_scope_stack *s = stack_of(scope);
    if (!s)
        return;
    int64_t kept = s->frame[scope.mark].mark;
    s->frames = scope.mark;
    for (int i = 0; i < n; i++)
        if (keep[i])
            keep[i]->passing = true;
    for (int64_t i = kept; i < s->entries; i++) {
        kn_tensor *t = s->entry[i];
        if (!t->passing)
            continue;
        s->entry[i] = s->entry[kept];
        s->entry[kept++] = t;
    }
    for (int i = 0; i < n; i++)
        if (keep[i])
            keep[i]->passing = false;
    drop_to(s, kept);
}

kn_tensor *kn_scope_adopt(kn_tensor *t)
{
    if (!t)
        return NULL;
    struct kn_scope_stack *s = kn_scope_stack_get();
    if (!s || !kn_host_grow(&s->entry, &s->entry_room, s->entries + 1, sizeof *s->entry)) {
        kn_handle_unref(t);
        return NULL;
    }
    s->entry[s->entries++] = t;
    t->scoped++;
    return t;
}

#ifdef KN_DEBUG
kn_tensor *kn_quarantine_swap(kn_tensor *p)
{
    struct kn_scope_stack *s = kn_context_get()->scopes;
    if (!s || s->ending)
        return p;
    kn_tensor **slot = &s->quarantine[s->quarantine_next];
    s->quarantine_next = (s->quarantine_next + 1) % KN_QUARANTINE;
    kn_tensor *old = *slot;
    *slot = p;
    return old;
}
#endif

/* The context ends: the base scope's tensors go, then the stack itself. */
static void (*end_next)(kn_context *c);

static void scopes_end(kn_context *c)
{
    struct kn_scope_stack *s = c->scopes;
    if (s) {
#ifdef KN_DEBUG
        s->ending = true;
        for (int i = 0; i < KN_QUARANTINE; i++)
            kn_host_free(s->quarantine[i]);
#endif
        s->frames = 0;
        drop_to(s, 0);
        kn_host_free(s->entry);
        kn_host_free(s->frame);
        kn_host_free(s);
        c->scopes = NULL;
    }
    if (end_next)
        end_next(c);
}

__attribute__((constructor)) static void scopes_register(void)
{
    end_next = kn_context_on_end;
    kn_context_on_end = scopes_end;
}
