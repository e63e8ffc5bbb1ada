/* optim/own.c: optimizers of a user's making. Each piece of a step becomes tensors over its memory,
 * which the user's function updates with the operations of autograd, off the tape.
 *
 * The function decides on the host, so such a step waits for the scaler's decision and can't be
 * recorded. */
#include "autograd/ops.h"
#include "optim/optim_internal.h"
#include <string.h>

typedef struct own {
    kn_optim_method method;
    kn_optim *optim;
    kn_optim_rule update;
    void *arg;
    char name[64], state[KN_OPTIM_STATES][64];
    _Alignas(double) char copy[64]; /* of arg, for the library's own */
} own;

/* The parameter that the piece is a part of. */
static const kn_param *param_of(const kn_optim *o, const kn_opt_piece *q)
{
    const kn_param *p;
    int n = kn_params(o->live.module->self, &p);
    const kn_taken *rows = kn_rows_taken(o, q);
    if (rows)
        return rows->param;
    for (int i = 0; i < n; i++) {
        const char *begin = kn_data_of(p[i].master), *at = q->param;
        size_t bytes = (size_t)kn_numel(p[i].master) * kn_dtype_size(p[i].master->dtype);
        if (begin && at >= begin && at < begin + bytes)
            return &p[i];
    }
    return NULL;
}

static bool update_piece(const own *x, const kn_opt_step *step, const kn_opt_piece *q,
                         int64_t number)
{
    kn_device d = kn_device_of(x->optim->scalars);
    const kn_param *p = param_of(x->optim, q);
    const int64_t row = kn_rows_taken(x->optim, q) ? kn_param_row(p) : 0;
    const int64_t states = row && x->method.one_a_row ? q->count / row : q->count;
    kn_optim_part part = {
        .name = p ? p->name : "",
        .param = kn_wide(kn_piece_tensor(d, q->param, q->param_dtype, q->count)),
        .grad = kn_piece_grad(d, step, q),
        .state = { kn_wide(kn_piece_tensor(d, q->m, q->param_dtype, states)),
                   kn_wide(kn_piece_tensor(d, q->v, q->param_dtype, states)),
                   kn_wide(kn_piece_tensor(d, q->more, q->param_dtype, states)) },
        .row = row,
        .lr = kn_lr(x->optim) * q->lr_mul,
        .weight_decay = q->weight_decay,
        .step = number,
    };
    if (!kn_ok() || (!x->update(&part, x->arg) && kn_ok()))
        return kn_ok() && kn_fail("%s: .update returned false for '%s'", x->name, part.name);
    bool narrow = kn_wide_dtype(q->param_dtype) != q->param_dtype, ok = kn_ok();
    kn_tensor *now[] = { part.param, part.state[0], part.state[1], part.state[2] };
    kn_opt_piece of_states = *q;
    of_states.count = states;
    for (int k = 0; k <= KN_OPTIM_STATES && narrow && ok; k++)
        ok = !now[k] || kn_piece_write(d, step, k ? &of_states : q, k, now[k]);
    return ok && (!q->out || kn_copy_run(kn_compute_stream(d), q->out, q->out_dtype, q->param,
                                         q->param_dtype, q->count));
}

/* The step's number, and whether a scaler skips it; waits for the device. */
static bool numbers_of(const kn_optim *o, const kn_opt_step *step, int64_t *number, bool *skip)
{
    kn_step_scalars x = { .step = (double)o->sent_step };
    if (kn_device_of(o->scalars) != KN_META && !kn_to_host(o->scalars, &x, sizeof x))
        return false;
    *number = step->skip ? (int64_t)x.step : o->sent_step;
    *skip = step->skip && x.skip != 0;
    return true;
}

static bool update(const void *options, const kn_opt_step *step, kn_stream *s)
{
    own *x = ((const own *)options)->optim->options;
    kn_device d = kn_device_of(x->optim->scalars);
    kn_stream *compute = kn_compute_stream(d);
    int64_t number;
    bool skip;
    if (kn_unrecordable(KN_DEVICE_DEFAULT, "the update of %s", x->name) ||
        (s != compute && !kn_stream_sync(s)) || !numbers_of(x->optim, step, &number, &skip))
        return false;
    bool mode = kn_set_grad_mode(false), ok = true;
    for (int i = 0; ok && !skip && i < step->pieces; i++) {
        kn_scope scope = kn_scope_begin();
        ok = step->piece[i].count == 0 || update_piece(x, step, &step->piece[i], number);
        kn_scope_end(scope);
    }
    kn_set_grad_mode(mode);
    return ok && (s == compute || kn_stream_sync(compute));
}

kn_optim *kn_own_optim_with(void *module, kn_own_optim_options o, kn_optim_groups groups,
                            size_t size, bool one_a_row)
{
    own x = { .method = { .update = update, .one_a_row = one_a_row },
              .update = o.update,
              .arg = o.arg };
    memcpy(x.copy, size ? o.arg : "", size);
    if (!o.update)
        return kn_fail_null("kn_own_optim: .update is NULL; give the function that updates a part");
    snprintf(x.name, sizeof x.name, "%s", o.name ? o.name : "kn_own_optim");
    for (int k = 0; k < KN_OPTIM_STATES; k++) {
        const char *name = o.state[k];
        if (name && (!*name || strlen(name) >= sizeof x.state[k] || strchr(name, '/')))
            return kn_fail_null("%s: '%s' can't name a state; use 1 to 63 characters without '/'",
                                x.name, name);
        snprintf(x.state[k], sizeof x.state[k], "%s", name ? name : "");
        for (int i = 0; name && i < k; i++)
            if (strcmp(x.state[i], name) == 0)
                return kn_fail_null("%s: both states are called '%s'; give each a name of its own",
                                    x.name, name);
    }
    kn_optim *optim = kn_optim_new(module, &x.method, &x, sizeof x, groups);
    if (!optim)
        return NULL;
    own *mine = optim->options;
    mine->optim = optim;
    for (int k = 0; k < KN_OPTIM_STATES; k++)
        mine->method.state[k] = *mine->state[k] ? mine->state[k] : NULL;
    mine->arg = size ? mine->copy : o.arg;
    optim->method = &mine->method;
    return optim;
}

kn_optim *kn_own_optim_(void *module, kn_own_optim_options o)
{
    return kn_own_optim_with(module, o, KN_OPTIM_GROUPS(o, 0), 0, false);
}
