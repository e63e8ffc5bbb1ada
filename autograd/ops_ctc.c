/* autograd/ops_ctc.c: connectionist temporal classification. The forward makes the gradient too,
 * where one is wanted: it takes less memory than the sums over paths that it is made of. */
#include "autograd/losses.h"
#include "autograd/sequences.h"
#include <math.h>

typedef struct ctc_attr {
    int64_t blank, width;
    bool zero_infinity, want;
} ctc_attr;

enum { LOG_PROBS, TARGETS, FRAMES, LABELS };
enum { LOSS, GRAD };

static bool is_length(const kn_op_call *c, int i, const char *what)
{
    const kn_tensor *t = c->in[i], *x = c->in[LOG_PROBS];
    return (t->dtype == KN_I64 && kn_has_shape(t, 1, x->shape + 1)) ||
           kn_fail("ctc_loss: %s are %s; for log_probs %s they should be i64[%lld]", what,
                   KN_SHOWN(t), KN_SHOWN(x), (long long)x->shape[1]);
}

static bool ctc_shape(kn_op_call *c)
{
    const ctc_attr *a = c->attr;
    const kn_tensor *x = c->in[LOG_PROBS];
    if (x->ndim != 3 || !kn_dtype_is_float(x->dtype))
        return kn_fail("ctc_loss: needs float log_probs[T,N,C], got %s", KN_SHOWN(x));
    if (!is_length(c, FRAMES, "the input lengths") || !is_length(c, LABELS, "the target lengths"))
        return false;
    if (a->blank < 0 || a->blank >= x->shape[2])
        return kn_fail("ctc_loss: .blank is %lld; for log_probs %s it lies in [0, %lld)",
                       (long long)a->blank, KN_SHOWN(x), (long long)x->shape[2]);
    c->spec[LOSS] = (kn_spec){ .dtype = x->dtype, .ndim = 1, .shape = { x->shape[1] } };
    c->spec[GRAD] = kn_spec_like(x);
    c->spec[GRAD].shape[0] = a->want ? x->shape[0] : 0;
    return true;
}

static bool ctc_forward(kn_op_call *c)
{
    const ctc_attr *a = c->attr;
    const kn_tensor *x = c->in[LOG_PROBS];
    const int64_t states = 2 * kn_numel(c->in[TARGETS]) + x->shape[1],
                  size = (x->shape[0] + 1) * states;
    kn_tensor *work = kn_empty(KN_F64, kn_device_of(x), 1, &size);
    if (!work)
        return false;
    kn_ctc_args args = { .loss = kn_array_of(c->out[LOSS]),
                         .work = kn_array_of(work),
                         .log_probs = kn_array_of(x),
                         .targets = kn_flat(c->in[TARGETS]),
                         .frames = kn_array_of(c->in[FRAMES]),
                         .labels = kn_array_of(c->in[LABELS]),
                         .blank = a->blank,
                         .width = a->width,
                         .zero_infinity = a->zero_infinity };
    if (a->want)
        args.grad = kn_array_of(c->out[GRAD]);
    return KN_RUN(c->out[LOSS], KN_K_CTC, args);
}

static bool ctc_backward(kn_op_grad *g)
{
    kn_tensor *dx = kn_grad_out(g, LOG_PROBS);
    if (!dx)
        return false;
    kn_array d = kn_array_of(g->dout[LOSS]), to = kn_array_of(dx);
    const kn_array rows = { .data = d.data,
                            .dtype = d.dtype,
                            .ndim = 3,
                            .shape = { to.shape[0], to.shape[1], to.shape[2] },
                            .stride = { 0, d.stride[0], 0 } };
    return KN_RUN(dx, KN_K_BINARY,
                  ((kn_binary_args){ to, kn_array_of(g->out[GRAD]), rows, KN_MUL }));
}

KN_OP(kn_op_ctc_loss, .name = "ctc_loss", .makes = true, .attr_size = sizeof(ctc_attr),
      .save_out = 1 << GRAD, .const_in = 1 << TARGETS | 1 << FRAMES | 1 << LABELS,
      .shape = ctc_shape, .forward = ctc_forward, .backward = ctc_backward);

kn_tensor *kn_ctc_loss_(kn_tensor *log_probs, kn_tensor *targets, kn_tensor *input_lengths,
                        kn_tensor *target_lengths, kn_ctc_loss_options o)
{
    const char *op = "ctc_loss";
    kn_tensor *in[4] = { log_probs, targets, input_lengths, target_lengths }, *out[2] = { 0 };
    for (int i = 0; i < 4; i++)
        if (!kn_ok() || !kn_check(in[i], op))
            return NULL;
    if (!kn_indices_are_whole(op, targets) || targets->ndim < 1 || targets->ndim > 2 ||
        (targets->ndim == 2 && log_probs->ndim == 3 && targets->shape[0] != log_probs->shape[1]))
        return kn_fail_null("%s: targets are %s; for log_probs %s they are whole numbers [N,S], or "
                            "all rows' one after the other [sum of the target lengths]",
                            op, KN_SHOWN(targets), KN_SHOWN(log_probs));
    const ctc_attr a = { .blank = o.blank,
                         .width = targets->ndim == 2 ? targets->shape[1] : -1,
                         .zero_infinity = o.zero_infinity,
                         .want = kn_grad_mode() && log_probs->requires_grad };
    kn_scope s = kn_scope_begin();
    in[LOG_PROBS] = kn_contiguous(kn_wide(log_probs));
    in[TARGETS] = kn_contiguous(kn_cast(targets, KN_I64));
    in[FRAMES] = kn_contiguous(input_lengths);
    in[LABELS] = kn_contiguous(target_lengths);
    kn_apply(&kn_op_ctc_loss, 4, in, 0, &a, 2, out);
    kn_tensor *loss = out[LOSS];
    if (loss && o.reduction != KN_REDUCTION_NONE && o.reduction != KN_REDUCTION_SUM)
        loss = kn_div(loss, kn_clamp(kn_cast(in[LABELS], loss->dtype), 1, INFINITY));
    loss = kn_loss_reduced(op, loss, o.reduction);
    loss = kn_cast(loss, log_probs->dtype);
    kn_scope_end_except(s, &loss, 1);
    return kn_ok() ? loss : NULL;
}
