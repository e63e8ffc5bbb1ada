/* autograd/apply.c: how an operation is applied: checks, shape rule, outputs, kernels, node. */
#include "autograd/check.h"
#include "autograd/operands.h"
#include "autograd/record.h"
#include <string.h>

/* Argument i lies elsewhere than the first one. */
static bool refuse_places(const kn_op *op, int i, kn_device at, kn_device first)
{
    bool meta = at == KN_META || first == KN_META;
    return kn_fail("%s: argument %d is on %s, argument 1 on %s; %s", op->name, i + 1,
                   kn_device_name(at), kn_device_name(first),
                   meta ? "parameters that a model only declares get values by kn_materialize or "
                          "kn_fsdp_wrap: call one before a forward"
                        : "move one of them");
}

static bool check_inputs(const kn_op *op, int nin, kn_tensor *const *in, uint32_t optional)
{
    if (!kn_ok())
        return false;
    for (int i = 0; i < nin; i++) {
        if (!in[i] && (optional >> i & 1))
            continue;
        if (!in[i])
            return kn_fail(
                "%s: argument %d is NULL although no error stands; was a tensor that its "
                "scope let go of passed on?",
                op->name, i + 1);
        if (!kn_check(in[i], op->name))
            return false;
        kn_device first = kn_device_of(in[0] ? in[0] : in[1]);
        if (kn_device_of(in[i]) != first)
            return refuse_places(op, i, kn_device_of(in[i]), first);
    }
    return true;
}

static bool make_outputs(kn_op_call *c)
{
    const kn_tensor *like = c->in[0] ? c->in[0] : c->in[1];
    kn_context *ctx = kn_context_get();
    kn_mem_category category = ctx->alloc_category ? ctx->alloc_category - 1 : KN_MEM_ACTIVATION;
    for (int i = 0; i < c->nout; i++) {
        kn_spec *s = &c->spec[i];
        if (c->op->view)
            c->out[i] = kn_tensor_alias(c->in[0], s->offset, s->ndim, s->shape, s->stride);
        else
            c->out[i] = kn_tensor_new(s->dtype, s->device ? s->device : kn_device_of(like), NULL,
                                      category, s->ndim, s->shape, s->order, true);
        if (!c->out[i])
            return false;
    }
    return true;
}

static bool record(kn_op_call *c)
{
    const kn_op *op = c->op;
    kn_node *n = kn_node_new(op, c->nin, c->nout);
    if (!n)
        return false;
    if (op->attr_size)
        memcpy(n->attr, c->attr, op->attr_size);
    for (int i = 0; i < c->nin; i++) {
        if (!kn_node_set_input(n, i, c->in[i]))
            goto fail;
        if (c->in[i] && (op->save_in >> i & 1) && !kn_save(&n->saved_in[i], c->in[i]))
            goto fail;
    }
    for (int i = 0; i < c->nout; i++) {
        if ((op->save_out >> i & 1) && !kn_save(&n->saved_out[i], c->out[i]))
            goto fail;
    }
    for (int i = 0; i < c->nout; i++) {
        n->out_spec[i].dtype = c->out[i]->dtype;
        kn_node_set_output(n, i, c->out[i]);
        if (!kn_dtype_is_float(c->out[i]->dtype))
            c->out[i]->requires_grad = false;
    }
    kn_node_unref(n); /* the outputs hold it now */
    return true;
fail:
    kn_node_unref(n);
    return false;
}

/* A later graph that holds what no graph of its own was made for would lose a part silently. */
static void pass_on_order(kn_op_call *c)
{
    bool first_order = false;
    for (int i = 0; i < c->nin; i++)
        first_order |= c->in[i] && c->in[i]->first_order && !(c->op->const_in >> i & 1);
    for (int i = 0; i < c->nout && first_order && c->op->backward && kn_grad_mode(); i++)
        c->out[i]->first_order = kn_dtype_is_float(c->out[i]->dtype);
}

static bool compute(kn_op_call *c)
{
    if (!c->op->forward)
        return true;
    if (!c->op->makes)
        return c->op->forward(c);
    const bool mode = kn_set_grad_mode(false);
    const kn_scope scope = kn_scope_begin();
    const bool ok = c->op->forward(c);
    kn_scope_end(scope);
    kn_set_grad_mode(mode);
    return ok;
}

bool kn_apply(const kn_op *op, int nin, kn_tensor *const *in, uint32_t optional, const void *attr,
              int nout, kn_tensor **out)
{
    for (int i = 0; i < nout; i++)
        out[i] = NULL;
    if (!check_inputs(op, nin, in, optional))
        return false;
    char room[256];
    if (op->attr_size > sizeof room)
        return kn_fail("%s: attributes of %zu bytes are more than %zu", op->name, op->attr_size,
                       sizeof room);
    if (op->attr_size)
        memcpy(room, attr, op->attr_size);
    kn_op_call c = { .op = op, .nin = nin, .nout = nout, .attr = op->attr_size ? room : NULL };
    bool wants = false;
    for (int i = 0; i < nin; i++) {
        c.in[i] = in[i];
        wants |= kn_record_read(in[i]) && !(op->const_in >> i & 1);
    }
    if (!kn_ok())
        return false;
    kn_operands operands;
    kn_operands_begin(&operands, nin, c.in);
    const bool fits = op->shape(&c);
    kn_operands_end(&operands);
    if (!fits || !make_outputs(&c) || !compute(&c))
        return false;
    if (kn_checking() && op->forward &&
        !kn_check_results(op->name, op->may_fill, c.in, nin, c.out, nout))
        return false;
    if (wants && op->backward && kn_grad_mode() && !record(&c))
        return false;
    pass_on_order(&c);
    for (int i = 0; i < nout; i++)
        out[i] = c.out[i];
    return true;
}

kn_tensor *kn_apply1(const kn_op *op, int nin, kn_tensor *const *in, uint32_t optional,
                     const void *attr)
{
    kn_tensor *out;
    return kn_apply(op, nin, in, optional, attr, 1, &out) ? out : NULL;
}
