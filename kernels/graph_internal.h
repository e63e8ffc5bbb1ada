/* kernels/graph_internal.h (private): the joint between recorded steps (graph.h) and the rest of
 * the library. Files whose state a replay must move on give a hook (kn_graph_on_launch,
 * kn_graph_forget); files that do things which no replay would repeat say so (kn_unrecordable);
 * files that change the course of a step report it (kn_changed). */
#ifndef KNAP_KERNELS_GRAPH_INTERNAL_H
#define KNAP_KERNELS_GRAPH_INTERNAL_H

#include "kernels/graph.h"

/* How a device records (kn_device_table.graph). */
typedef struct kn_graph_table {
    /* Of kn_host_calloc; graph.c fills in the common fields. NULL with an error. */
    kn_graph *(*begin)(void);
    /* False with an error: g can't be launched, and the caller drops it. */
    bool (*end)(kn_graph *g);
    bool (*launch)(kn_graph *g);
    void (*drop)(kn_graph *g); /* recorded or half recorded: frees everything but g itself */
} kn_graph_table;

/* First member of every device's graph. */
struct kn_graph {
    const kn_graph_table *table;
    kn_device device;
    struct kn_context *context;
    int64_t step;        /* optimizer steps done when it was recorded, or before its next launch */
    int64_t steps;       /* that one launch does */
    uint64_t quiet;      /* draws with grad mode off in the micro-batch that it ends in */
    kn_graph_hook *hook; /* in the order in which they were given */
    int hooks;
    int64_t room;
    bool launched; /* at least once */
    bool stale;    /* an object that it uses has ended */
    kn_graph *next;
};

/* The graph that this context records, or NULL. */
kn_graph *kn_graph_recording(void);
/* The hook of g with this arg, or, where arg is NULL, with this before; NULL: none yet. */
const kn_graph_hook *kn_graph_find_hook(const kn_graph *g, const void *arg,
                                        bool (*before)(void *arg, bool first));
/* The context ends: its graphs stay as empty shells until they are freed. */
void kn_graphs_end(struct kn_context *c);

/* Reports an operation on d (default: any device) that a replay wouldn't repeat. While this context
 * records for d: an error that begins with the given text, and true. While it rehearses for d:
 * remembers the first text, and false. Else false. */
KN_API bool kn_unrecordable(kn_device d, const char *fmt, ...) KN_PRINTF(2, 3);
/* Reports a change that steps depend on and that a walk over the modules doesn't show: an optimizer
 * was made or freed, units were made, a switch of the device was turned. Steps are recorded anew
 * then. */
KN_API void kn_changed(void);

#endif
