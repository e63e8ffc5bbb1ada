/* autograd/backward.c: where users begin a backward: for all leaves, or for chosen tensors; the
 * functions at its end. */
#include "autograd/engine.h"
#include "autograd/second.h"

static bool check_result(const char *what, const kn_tensor *result, const kn_tensor *grad)
{
    if (result->first_order)
        return kn_fail(
            "%s: the tensor is made of gradients of kn_grad_of without .create_graph, through "
            "which nothing is differentiated",
            what);
    if (!result->requires_grad)
        return kn_fail("%s: the tensor has no graph: no operation made it from a tensor that "
                       "requires grad while grad mode was on",
                       what);
    if (!grad && kn_numel(result) != 1)
        return kn_fail("%s: the result is %s, not a scalar; reduce it (kn_mean) or pass .grad",
                       what, KN_SHOWN(result));
    if (grad && !kn_check(grad, what))
        return false;
    if (grad && (grad->dtype != result->dtype || !kn_has_shape(grad, result->ndim, result->shape)))
        return kn_fail("%s: .grad is %s, but must have the result's shape and dtype, %s", what,
                       KN_SHOWN(grad), KN_SHOWN(result));
    return true;
}

/* A result that an operation made: a pass begins at a node, and a leaf has none. */
static kn_tensor *with_node(kn_tensor *t)
{
    return t->node ? t : kn_on_tape_view(t);
}

/* Runs e from the result; grad as in kn_backward_options. */
static bool run(kn_engine *e, kn_tensor *result, kn_tensor *grad)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *g = grad ? grad : kn_full_like(result, 1), *y = g ? with_node(result) : NULL;
    bool ok = y && kn_engine_run(e, &(kn_node *){ y->node }, &y->out_index, &g, 1);
    if (!y && !kn_in_backward() && !e->caught) /* the same micro-batch again */
        kn_context_get()->rng.calls = 0;
    kn_scope_end(scope);
    return ok;
}

bool kn_backward_(kn_tensor *result, kn_backward_options o)
{
    kn_engine e = { .retain = o.retain_graph };
    return kn_ok() && kn_check(result, "backward") && check_result("backward", result, o.grad) &&
           run(&e, result, o.grad);
}

/* ---- the gradients of chosen tensors --------------------------------------------------------- */

static bool check_inputs(kn_tensor *const *inputs, int n, kn_tensor **grads)
{
    if (n < 1 || !inputs || !grads)
        return kn_fail("grad_of: needs at least one input and a place for each gradient; got %d "
                       "inputs%s%s",
                       n, inputs ? "" : ", their list is NULL", grads ? "" : ", no places");
    for (int i = 0; i < n; i++) {
        const kn_tensor *t = inputs[i];
        if (!kn_check(t, "grad_of"))
            return false;
        if (!t->requires_grad)
            return kn_fail("grad_of: input %d, %s, doesn't require grad; call kn_require_grad "
                           "before the forward",
                           i + 1, KN_SHOWN(t));
        if (t->leaf && t->leaf->dest)
            return kn_fail("grad_of: input %d, '%s', is a parameter of a unit of fsdp, whose "
                           "gradients lie in shards; use kn_backward and kn_param_grad",
                           i + 1, kn_name(t));
        if (t->leaf && t->leaf->pending > 0) /* both gradients would come to one place */
            return kn_fail("grad_of: input %d, %s, is a leaf that the backward that runs has yet "
                           "to complete; take the gradient of a kn_detach of it",
                           i + 1, KN_SHOWN(t));
    }
    return true;
}

/* Hands a gradient to the caller's scope: that of the first of equal inputs. */
static kn_tensor *hand_out(const kn_catch *caught, kn_tensor *const *grads, int i, bool graph)
{
    int first = 0;
    while (caught[first].input != caught[i].input)
        first++;
    if (first < i || !caught[i].grad)
        return first < i ? grads[first] : NULL;
    kn_tensor *g = graph ? kn_on_tape_view(caught[i].grad) : kn_detach(caught[i].grad);
    if (g && !graph)
        g->first_order = kn_grad_mode();
    return g;
}

bool kn_grad_of_(kn_tensor *result, kn_tensor *const *inputs, int n, kn_tensor **grads,
                 kn_grad_of_options o)
{
    for (int i = 0; grads && i < n; i++)
        grads[i] = NULL;
    if (!kn_ok() || !kn_check(result, "grad_of") || !check_inputs(inputs, n, grads) ||
        !check_result("grad_of", result, o.grad))
        return false;
    kn_catch *caught = kn_host_calloc((size_t)n, sizeof *caught);
    if (!caught)
        return false;
    for (int i = 0; i < n; i++)
        caught[i].input = inputs[i];
    kn_engine e = { .retain = o.retain_graph || o.create_graph,
                    .graph = o.create_graph,
                    .caught = caught,
                    .catches = n };
    bool ok = run(&e, result, o.grad);
    for (int i = 0; i < n && ok; i++)
        grads[i] = hand_out(caught, grads, i, o.create_graph);
    for (int i = 0; i < n; i++)
        kn_tensor_free(caught[i].grad);
    kn_host_free(caught);
    return ok && kn_ok();
}

/* ---- functions at its end -------------------------------------------------------------------- */

bool kn_on_backward(void (*ended)(void *arg), void (*failed)(void *arg), void *arg)
{
    kn_engine *e = kn_engine_outermost(kn_context_get()->engine);
    if (!e)
        return kn_fail("kn_on_backward_end: no backward is running");
    end_callback *c = kn_host_calloc(1, sizeof *c);
    if (!c)
        return false;
    c->ended = ended;
    c->failed = failed;
    c->arg = arg;
    end_callback **at = &e->callbacks;
    while (*at)
        at = &(*at)->next;
    *at = c;
    return true;
}

bool kn_on_backward_end(void (*fn)(void *arg), void *arg)
{
    return kn_on_backward(fn, NULL, arg);
}

void kn_engine_call_back(kn_engine *e)
{
    for (end_callback *c = e->callbacks; c && kn_ok(); c = c->next)
        if (c->ended)
            c->ended(c->arg);
    for (end_callback *c = e->callbacks; c && !kn_ok(); c = c->next)
        if (c->failed)
            c->failed(c->arg);
    while (e->callbacks) {
        end_callback *c = e->callbacks;
        e->callbacks = c->next;
        kn_host_free(c);
    }
}
