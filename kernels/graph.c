/* kernels/graph.c: recorded steps as every device sees them (graph.h): the recording context,
 * actions that can't be recorded, the host's work around a launch. The device records the work. */
#include "kernels/graph_internal.h"
#include "kernels/faults.h"
#include "kernels/kernels_internal.h"
#include "kernels/memory_internal.h"

#include <stdarg.h>
#include <stdio.h>

/* ---- recording ------------------------------------------------------------------------------- */

bool kn_graph_supported(kn_device d)
{
    const kn_device_table *t = kn_device_table_of(d);
    return t && t->graph;
}

kn_graph *kn_graph_recording(void)
{
    return kn_context_get()->graph.recording;
}

bool kn_recording(void)
{
    return kn_graph_recording() != NULL;
}

bool kn_graph_begin(kn_device d)
{
    kn_context *c = kn_context_get();
    if (!kn_ok())
        return false;
    if (c->graph.recording)
        return kn_fail("kn_graph_begin: a step is being recorded already; end it first");
    if (!kn_graph_supported(d))
        return kn_fail("kn_graph_begin: device %s records no steps; supported: cuda",
                       kn_device_name(d));
    if (!kn_compute_stream(d))
        return false;
    const kn_graph_table *table = kn_device_table_of(d)->graph;
    kn_graph *g = table->begin();
    if (!g)
        return false;
    g->table = table;
    g->device = d;
    g->context = c;
    g->step = c->rng.step;
    g->next = c->graph.all;
    c->graph.all = c->graph.recording = g;
    return true;
}

kn_graph *kn_graph_end(void)
{
    kn_context *c = kn_context_get();
    kn_graph *g = c->graph.recording;
    if (!g)
        return kn_fail_null("kn_graph_end: no step is being recorded; kn_graph_begin comes first");
    bool ok = kn_ok() && g->table->end(g);
    c->graph.recording = NULL;
    g->steps = c->rng.step - g->step;
    g->quiet = c->rng.quiet - c->rng.quiet_before;
    if (ok)
        return g;
    kn_graph_free(g);
    return NULL;
}

void kn_graph_cancel(void)
{
    kn_context *c = kn_context_get();
    kn_graph *g = c->graph.recording;
    c->graph.recording = NULL;
    kn_graph_free(g);
}

/* Leaves g empty. */
static void end_graph(kn_graph *g)
{
    kn_graph **at = &g->context->graph.all;
    while (*at && *at != g)
        at = &(*at)->next;
    if (!*at)
        return; /* its context has ended */
    *at = g->next;
    for (int i = 0; i < g->hooks; i++)
        if (g->hook[i].drop)
            g->hook[i].drop(g->hook[i].arg);
    kn_host_free(g->hook);
    g->table->drop(g);
}

void kn_graph_free(kn_graph *g)
{
    if (!g)
        return;
    if (g->context->graph.recording == g) {
        kn_graph_cancel();
        return;
    }
    end_graph(g);
    kn_host_free(g);
}

void kn_graphs_end(struct kn_context *c)
{
    kn_graph_cancel();
    while (c->graph.all)
        end_graph(c->graph.all);
}

void kn_graph_forget(const void *arg)
{
    for (kn_graph *g = kn_context_get()->graph.all; g; g = g->next) {
        int left = 0;
        for (int i = 0; i < g->hooks; i++)
            if (g->hook[i].arg != arg)
                g->hook[left++] = g->hook[i];
        g->stale |= left < g->hooks;
        g->hooks = left;
    }
}

const kn_graph_hook *kn_graph_find_hook(const kn_graph *g, const void *arg,
                                        bool (*before)(void *arg, bool first))
{
    for (int i = 0; i < g->hooks; i++)
        if (arg ? g->hook[i].arg == arg : g->hook[i].before == before)
            return &g->hook[i];
    return NULL;
}

bool kn_graph_on_launch(kn_graph_hook hook)
{
    kn_graph *g = kn_graph_recording();
    if (!g)
        return kn_fail("kn_graph_on_launch: no step is being recorded");
    if (!kn_host_grow(&g->hook, &g->room, g->hooks + 1, sizeof *g->hook))
        return false;
    g->hook[g->hooks++] = hook;
    return true;
}

bool kn_graph_host_part(kn_graph_hook hook)
{
    if (kn_recording())
        return kn_graph_on_launch(hook);
    kn_graph_state *g = &kn_context_get()->graph;
    const kn_device rehearsing = g->rehearsing;
    g->rehearsing = KN_DEVICE_DEFAULT; /* a graph has the hook in place of this */
    bool ok = !hook.before || hook.before(hook.arg, true);
    if (ok && hook.after)
        hook.after(hook.arg);
    g->rehearsing = rehearsing;
    return ok && kn_ok();
}

/* ---- launching ------------------------------------------------------------------------------- */

bool kn_graph_launch(kn_graph *g)
{
    kn_context *c = kn_context_get();
    if (!kn_ok())
        return false;
    if (!g)
        return kn_fail("kn_graph_launch: the graph is NULL");
    if (g->stale)
        return kn_fail(
            "kn_graph_launch: something that the recorded step uses, like its optimizer, was "
            "freed; record it again");
    if (c->graph.recording || g->context != c)
        return kn_fail("kn_graph_launch: %s", c->graph.recording
                                                  ? "not while a step is being recorded"
                                                  : "the graph was recorded by another thread");
    bool first = !g->launched, ok = true;
    if (!first)
        g->step = c->rng.step;
    for (int i = 0; i < g->hooks && ok; i++)
        ok = !g->hook[i].before || g->hook[i].before(g->hook[i].arg, first);
    ok = ok && g->table->launch(g);
    for (int i = 0; i < g->hooks && ok; i++)
        if (g->hook[i].after)
            g->hook[i].after(g->hook[i].arg);
    if (ok && !first && g->steps > 0) {
        c->rng.step += g->steps;
        kn_fault_step(c->rng.step - g->steps);
        c->rng.quiet_before = c->rng.quiet - g->quiet;
    }
    g->launched = true;
    ok = ok && kn_streams_look();
    return ok && kn_ok();
}

/* ---- actions that can't be recorded ---------------------------------------------------------- */

bool kn_unrecordable(kn_device d, const char *fmt, ...)
{
    kn_context *c = kn_context_get();
    char what[256];
    va_list ap;
    const kn_graph_state *s = &c->graph;
    kn_device of = s->recording ? s->recording->device : s->rehearsing;
    if (kn_context_is_worker() || (d && d != of) ||
        (!s->recording && (!s->rehearsing || s->refused[0])))
        return false;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    if (s->recording) {
        kn_fail("%s: not while a step is recorded: a replay wouldn't do it", what);
        return true;
    }
    const char *file;
    int line;
    kn_place_get(&file, &line);
    if (file)
        snprintf(c->graph.refused, sizeof c->graph.refused, "%s, %s:%d", what, file, line);
    else
        snprintf(c->graph.refused, sizeof c->graph.refused, "%s", what);
    return false;
}

const char *kn_graph_rehearse(kn_device d, bool on)
{
    static _Thread_local char text[sizeof((kn_graph_state *)0)->refused];
    kn_context *c = kn_context_get();
    snprintf(text, sizeof text, "%s", c->graph.refused);
    c->graph.rehearsing = on ? d : KN_DEVICE_DEFAULT;
    c->graph.refused[0] = 0;
    return text[0] ? text : NULL;
}

void kn_changed(void)
{
    kn_context_get()->graph.changes++;
}
