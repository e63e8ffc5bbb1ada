/* kernels/graph.h: steps recorded on a device and launched again. */
#ifndef KNAP_KERNELS_GRAPH_H
#define KNAP_KERNELS_GRAPH_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launches on a device between kn_graph_begin and kn_graph_end don't run, but are recorded:
 * kernels, copies, host functions, on all streams of this thread's context, with the addresses they
 * were given. kn_graph_launch runs it all again, in one launch. What the host does in between (its
 * arithmetic, its branches, the values it passes) isn't in the graph.
 *
 * Memory that is taken from the device's pool while recording belongs to the graph until that is
 * freed, also after it was given back: replays write it again. So does memory that was taken
 * before, and is given back while the graph exists. The ledger counts what nobody else holds of it
 * as KN_MEM_GRAPH.
 *
 * Other actions are an error that names the operation: waits of the host for the device, host bytes
 * that are copied to the device but aren't held (kn_transfer), kernels on other devices. */
typedef struct kn_graph kn_graph;

/* CUDA; false without an error elsewhere. */
KN_API bool kn_graph_supported(kn_device d);
/* One recording a context at a time. Until the end, no stream of the context runs anything. */
KN_API bool kn_graph_begin(kn_device d);
/* NULL with an error: the recording is gone, nothing of it ran. A graph doesn't run by being
 * made. */
KN_API kn_graph *kn_graph_end(void);
KN_API void kn_graph_cancel(void); /* ends a recording and drops it, also after an error */
/* Behind all earlier launches on any stream of the context, and before all later ones. Steps and
 * random keys move on as they did in the recording. The first launch stands for the recorded call
 * itself. */
KN_API bool kn_graph_launch(kn_graph *g);
/* Waits for the device. NULL is fine. */
KN_API void kn_graph_free(kn_graph *g);
KN_API bool kn_recording(void); /* this context is */
/* From now on (off: no longer) stores the first action that a recording for d couldn't take, while
 * everything runs as usual; returns the one stored until now, or NULL. The text is valid until the
 * thread's next call. */
KN_API const char *kn_graph_rehearse(kn_device d, bool on);

/* A step has effects on the host, too: counters, values that it sends to the device. Their owner
 * registers a hook, while recording, that runs around each launch: before (the values are sent
 * here; first: this launch stands for the recording, whose host effects are there already) and
 * after. drop is called when the graph is freed, or never came to be. Each may be NULL. before
 * returns false with an error. */
typedef struct kn_graph_hook {
    bool (*before)(void *arg, bool first);
    void (*after)(void *arg);
    void (*drop)(void *arg);
    void *arg;
} kn_graph_hook;
KN_API bool kn_graph_on_launch(kn_graph_hook hook);
/* The host's part of a step, each time that the step runs: hook.before(arg, true) and
 * hook.after(arg) are called now, or, while the step is recorded, around each launch of its graph.
 * False with an error. */
KN_API bool kn_graph_host_part(kn_graph_hook hook);
/* The arg of hooks ends: they aren't called any more, and their graphs can't be launched. */
KN_API void kn_graph_forget(const void *arg);

#ifdef __cplusplus
}
#endif
#endif
