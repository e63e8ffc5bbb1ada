/* autograd/engine_collectives.c: which collectives of operations and tables the running backward
 * still comes to, for those who issue collectives of their own beside it (engine.h). */
#include "autograd/engine.h"
#include "autograd/rows.h"
#include "kernels/context.h"

bool kn_collective_begins(void)
{
    const kn_engine *e = kn_engine_outermost(kn_context_get()->engine);
    bool ok = kn_ok();
    for (int64_t i = 0; e && e->at < e->nodes && i < e->groups && ok; i++) {
        kn_group *g = e->group[i];
        ok = !g->complete || !g->before_collective || g->before_collective(g->arg);
    }
    return ok;
}

/* n's backward calls other ranks, or the gradients of a table go to them behind it. */
static bool calls_ranks(const kn_node *n)
{
    bool calls = n->op->collective;
    for (int k = 0; k < n->nin && !calls; k++)
        calls = kn_table_of(n->edge[k].leaf) && kn_table_of(n->edge[k].leaf)->ranks > 1;
    return calls && n->leads;
}

uint64_t kn_collective_next(void)
{
    kn_engine *e = kn_engine_outermost(kn_context_get()->engine);
    if (!e)
        return 0;
    e->collective = e->collective < e->at ? e->at : e->collective;
    while (e->collective < e->nodes && !calls_ranks(e->node[e->collective]))
        e->collective++;
    return e->collective < e->nodes ? e->node[e->collective]->seq : 0;
}
