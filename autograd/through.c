/* autograd/through.c: a backward that ends in a product goes on through the operation before it, in
 * the product's epilogue (kn_matmul_args.x). */
#include "autograd/engine.h"
#include "autograd/ops.h"

/* The gradient of f's result comes from g alone, and meets neither a hook nor a catch on its way to
 * f's backward, which writes it to no leaf. Orders of memory don't differ, since x is row-major, as
 * products' results are. (Without x the call that made f has yet to be replayed.) */
kn_tensor *kn_grad_through(kn_op_grad *g, int i, kn_unary *kind)
{
    const kn_engine *e = kn_context_get()->engine;
    kn_node *f = g->node->edge[i].node;
    if (g->alone || !f || f->mark != e->pass || !kn_unary_of_epilogue(f->op, kind))
        return NULL;
    const kn_saved *x = &f->saved_in[0];
    if (f->home[0].users != 1 || f->has_grad || !f->leads || f->hooks || f->edge[0].leaf ||
        (kn_engine_catches(e) && kn_engine_catch(e, NULL, f, 0)) || !x->tensor ||
        kn_version_of(x->tensor) != x->version || !kn_is_contiguous(x->tensor))
        return NULL;
    f->passed = true;
    return x->tensor;
}
