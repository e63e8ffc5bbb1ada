/* optim/optim.c: a step. It lists the gradients, sends the step's numbers to the device
 * (numbers.c), and updates all pieces in one fused launch: adamw.c, lion.c and sgd.c hold the
 * formulas, own.c calls a user's; then whole matrices (muon.c). A sharded parameter is this rank's
 * part (kn_param.master); where gradients arrive one by one (offload), its source launches batches
 * of pieces (kn_param_source.step). make.c makes optimizers and their states. */
#include "kernels/faults.h"
#include "kernels/trace.h"
#include "optim/optim_internal.h"

#include <string.h>

/* ---- the pieces of a step -------------------------------------------------------------------- */

static kn_opt_place place_of(const kn_param *p)
{
    kn_opt_place at = { .stream = kn_hash_string(p->name), .start = p->start };
    if (p->source->rows)
        p->source->rows(p, &at.run, &at.step);
    return at;
}

static kn_opt_piece piece_of(const kn_optim *o, const kn_optim_slot *s, const kn_param *p,
                             const kn_tensor *grad)
{
    return (kn_opt_piece){ .param = kn_data_of(p->master),
                           .grad = kn_data_of(grad),
                           .m = kn_data_of(s->state[0]),
                           .v = kn_data_of(s->state[1]),
                           .more = kn_data_of(s->state[2]),
                           .count = kn_numel(p->master),
                           .lr_mul = s->group.lr_mul,
                           .weight_decay = s->group.weight_decay,
                           .param_dtype = p->master->dtype,
                           .grad_dtype = grad->dtype,
                           .place = o->at_random ? place_of(p) : (kn_opt_place){ 0 } };
}

/* Lists matrices, or the others, with a gradient behind so many pieces; returns the new number of
 * pieces, -1 with an error. */
static int collect(kn_optim *o, const kn_param *p, int n, bool matrix, int pieces)
{
    for (int i = 0; i < n && pieces >= 0; i++) {
        const kn_optim_slot *s = &o->slot[i];
        bool mine = p[i].trainable && !s->group.frozen && s->matrix == matrix;
        bool now = o->means.by[i] != o->means.base; /* it is read here */
        kn_tensor *g = mine ? (now ? kn_param_grad : p[i].source->grad)(&p[i]) : NULL;
        g = kn_grad_by_mean(g, &o->means, i);
        if (!kn_ok() || (g && !kn_optim_make_state(o, &p[i], i)))
            return -1;
        if (!g)
            continue;
        o->param[pieces] = &p[i];
        o->piece[pieces] = piece_of(o, &o->slot[i], &p[i], g);
        kn_tensor *ids = p[i].source->row_ids ? p[i].source->row_ids(&p[i]) : NULL;
        if (ids && !kn_rows_take(o, &o->slot[i], &p[i], ids, &o->piece[pieces]))
            return -1;
        pieces++;
    }
    return pieces;
}

static bool update_pieces(void *optim, const kn_opt_piece *piece, int count, kn_stream *s)
{
    kn_optim *o = optim;
    o->update.piece = piece;
    o->update.pieces = count;
    return count == 0 || o->method->update(o->options, &o->update,
                                           s ? s : kn_compute_stream(kn_device_of(o->scalars)));
}

static void written(const kn_optim *o, int from, int to)
{
    for (int i = from; i < to; i++) /* also after a failure half way */
        o->param[i]->source->written(o->param[i]);
}

static bool update_all(kn_optim *o, int others, int pieces)
{
    kn_step_pieces s = { o->param, o->piece, others, update_pieces, o };
    bool (*in_batches)(const kn_step_pieces *) = NULL;
    for (int i = 0; i < others && !in_batches; i++)
        in_batches = o->param[i]->source->step;
    bool ok = (in_batches ? in_batches(&s) : update_pieces(o, o->piece, others, NULL)) &&
              kn_rows_put_back(o);
    written(o, 0, others);
    if (ok && pieces > others)
        ok = o->method->matrices(o->options, &o->update, o->piece + others, o->param + others,
                                 pieces - others);
    written(o, others, pieces);
    return ok;
}

/* ---- the step -------------------------------------------------------------------------------- */

/* The factor of clipped gradients, and their limit: read in place if they lie on the step's device,
 * else (on meta, where nothing is computed) the factor comes through the host. */
static bool find_coef(kn_optim *o, const kn_clipping *clipped, double *scale)
{
    if (kn_device_of(clipped->norms[true]) == kn_device_of(o->scalars)) {
        o->update.grad_scale = &kn_norms_of(clipped, true)->coef;
        if (clipped->value > 0)
            o->update.limit = &kn_norms_of(clipped, true)->limit;
        return true;
    }
    kn_norms host = { 0 };
    bool ok = kn_to_host(clipped->norms[true], &host, sizeof host);
    *scale = host.coef;
    return ok;
}

/* The factor of the gradients, which may be the clipping's, as its negative in o's own place. */
static bool negate_scale(kn_optim *o)
{
    const int64_t one = 1;
    kn_step_scalars *at = kn_data_of(o->scalars);
    const kn_array from = kn_array_make((void *)(uintptr_t)o->update.grad_scale, KN_F64, 1, &one);
    o->update.grad_scale = &at->grad_scale;
    return KN_LAUNCH(kn_compute_stream(kn_device_of(o->scalars)), KN_K_UNARY,
                     ((kn_unary_args){ kn_array_make(&at->grad_scale, KN_F64, 1, &one), from,
                                       KN_AFFINE, -1, 0 }));
}

static bool launch(kn_optim *o, int others, int pieces, const kn_clipping *clipped,
                   const kn_loss_scale_args *scaling)
{
    kn_step_scalars *at = kn_data_of(o->scalars);
    const kn_tensor *carried = o->means.scale;
    double scale = 0;
    o->update = (kn_opt_step){ .lr = &at->lr,
                               .grad_scale = &at->grad_scale,
                               .step = &at->step,
                               .seed = o->at_random ? &at->seed : NULL };
    if (clipped && !find_coef(o, clipped, &scale))
        return false;
    if (!clipped && !scaling)
        scale = 1 / (o->means.base * (carried ? kn_item(carried) : 1));
    if (!kn_send_numbers(o, scale))
        return false;
    if (scaling) {
        kn_loss_scale_args args = *scaling;
        args.step = at;
        if (!kn_loss_scale_at(&o->means, kn_device_of(o->scalars), &args.scale, &args.loss_scale))
            return false;
        o->update.skip = &at->skip;
        if (!KN_LAUNCH(kn_compute_stream(kn_device_of(o->scalars)), KN_K_LOSS_SCALE, args))
            return false;
    }
    return (!o->maximize || negate_scale(o)) && update_all(o, others, pieces);
}

static bool freezes(const kn_optim *o)
{
    bool any = false;
    for (int i = 0; i < o->slots; i++)
        any = any || o->slot[i].group.frozen;
    return any;
}

/* The numbers that a kn_scaler decides by, and the scale that the gradients have to carry. */
typedef struct scaling {
    kn_loss_scale_args args;
    const kn_tensor *carried;
} scaling;

static bool is_carried(const kn_optim *o, const scaling *by)
{
    const char *m = kn_module_shown(o->live.module);
    if (!by || o->means.scale == by->carried)
        return true;
    return o->means.scale
               ? kn_fail("kn_scaler_step: the gradients of '%s' carry the scale of another "
                         "scaler; step with the one that scaled their loss",
                         m)
               : kn_fail("kn_scaler_step: no loss of this step went through "
                         "kn_scale_loss, so the gradients of '%s' carry no scale",
                         m);
}

/* Updates what has gradients; false without an error where nothing has. */
static bool update(kn_optim *o, const kn_param *p, int n, const scaling *by)
{
    const kn_clipping *clipped;
    kn_scope scope = kn_scope_begin();
    bool ok = kn_clipped(o->live.module, &clipped) &&
              kn_means_begin(&o->means, o->live.module, "kn_step");
    if (ok && clipped)
        o->means.base = clipped->means.base;
    int others = ok ? collect(o, p, n, false, 0) : -1,
        pieces = others >= 0 ? collect(o, p, n, true, others) : -1;
    ok = pieces > 0 && is_carried(o, by) &&
         launch(o, others, pieces, clipped, by ? &by->args : NULL);
    kn_means_end(&o->means);
    o->takes = 0;
    kn_scope_end(scope);
    return ok;
}

/* A fault of a parameter after this step (kernels/faults.h). */
static bool flip_bit(const kn_param *p, int n)
{
    const char *name = kn_context_get()->fault.parameter;
    for (int i = 0; *name && i < n; i++) {
        if (strcmp(p[i].name, name) != 0 || kn_fault_due(KN_AFTER_STEP) != KN_FAULT_FLIP)
            continue;
        kn_tensor *t = p[i].master;
        const int64_t bytes = kn_numel(t) * (int64_t)kn_dtype_size(t->dtype);
        kn_fault_come(KN_FAULT_FLIP, NULL);
        if (!kn_fault_flip(kn_compute_stream(kn_device_of(t)), kn_data_of(t), bytes,
                           "this rank's part of the parameter"))
            return false;
    }
    return true;
}

/* For a recording with values: this rank's parts, as the step finds or leaves them. */
static void trace_params(const kn_param *p, int n, bool grads)
{
    for (int i = 0; i < n && kn_trace_sees(KN_TRACE_VALUE); i++)
        kn_trace_tensor(p[i].name, grads ? "gradient" : "parameter",
                        grads ? kn_param_grad(&p[i]) : p[i].master);
}

static bool step(kn_optim *o, const scaling *by)
{
    const kn_param *p;
    int n = kn_params(o->live.module->self, &p);
    if (o->means.by) /* of the step around this one */
        return kn_fail("kn_step: .update takes a step of its own optimizer; it may only update the "
                       "part");
    if (!kn_ok() || !kn_optim_unchanged(o, p, n, "kn_step") ||
        !kn_may_step(o->live.module, p, n, "kn_step") || !kn_streams_look())
        return false;
    trace_params(p, n, true);
    if (!update(o, p, n, by))
        return kn_ok() ? kn_fail("kn_step: no parameter has a gradient%s; call kn_backward first",
                                 freezes(o) ? " but those of frozen groups" : "")
                       : false;
    if (!flip_bit(p, n))
        return false;
    trace_params(p, n, false);
    kn_consume_grads(p, n);
    kn_step_taken(&o->seen);
    o->steps++;
    return true;
}

bool kn_step(kn_optim *o)
{
    return kn_ok() && kn_given(o, "kn_step", "the optimizer") && kn_optim_lives(o, "kn_step") &&
           kn_settle_steps(o) && step(o, NULL);
}

bool kn_step_scaled(kn_optim *o, kn_loss_scale_args args, const kn_tensor *carried)
{
    o->scaled = true;
    return step(o, &(scaling){ args, carried });
}
