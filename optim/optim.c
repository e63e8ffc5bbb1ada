/* optim/optim.c: an optimizer: its options and states for each parameter, and the step over all of
 * them in one fused launch. adamw.c and sgd.c say what is computed. A sharded parameter is this
 * rank's part (kn_param.master); where gradients come later, its source launches batches of pieces
 * as they are ready (kn_param_source.step). */
#include "optim/optim_internal.h"
#include <math.h>
#include <string.h>

/* What the optimizer keeps for one parameter. */
typedef struct slot {
    kn_tensor
        *state[KN_OPTIM_STATES];   /* this rank's part; made at the first step with a gradient */
    kn_optim_group group;          /* lr_mul and weight_decay */
    const kn_param_source *source; /* who held the gradient, and how many */
    int64_t count;                 /* elements were this rank's, when the optimizer was made */
} slot;

struct kn_optim {
    const kn_optim_method *method;
    void *options; /* the method's; owned */
    kn_module_impl *module;
    slot *slot;
    int slots;
    kn_opt_piece *piece;    /* scratch of a step */
    const kn_param **param; /* whose pieces they are */
    kn_tensor *scalars;     /* kn_step_scalars in device memory */
    kn_update update;       /* of the running step: where its scalars lie */
    double lr;
    int64_t
        steps; /* where scaled: with those that were skipped, which only the device has counted */
    int64_t seen; /* kn_step_taken */
    bool scaled;
    const kn_graph *recorded; /* in which it steps */
    double recorded_scale;    /* of the gradients in the recorded step */
    double told_scale;        /* the same, and the step's number, as the device is told them */
    int64_t told_step;
};

kn_optim *kn_optim_new(void *module, const kn_optim_method *method, const void *options,
                       size_t size, kn_optim_groups groups)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "optimizer") : NULL;
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    if (m && n == 0)
        kn_fail("optimizer: the module has no parameters");
    if (!m || n == 0 || !kn_one_place(p, n, "optimizer") || !kn_optim_groups_check(&groups, p, n))
        return NULL;
    kn_optim *o = kn_host_calloc(1, sizeof *o);
    if (!o)
        return NULL;
    o->method = method;
    o->module = m;
    o->lr = kn_value_or(groups.lr, 0);
    o->seen = kn_steps_seen();
    o->slots = n;
    o->options = kn_host_alloc(size);
    o->slot = kn_host_calloc((size_t)n, sizeof *o->slot);
    o->piece = kn_host_calloc((size_t)n, sizeof *o->piece);
    o->param = kn_host_calloc((size_t)n, sizeof *o->param);
    int64_t scalars = sizeof(kn_step_scalars) / sizeof(float);
    o->scalars = kn_tensor_new(KN_F32, kn_device_of(p[0].master), NULL, KN_MEM_OPTIM, 1, &scalars,
                               NULL, false);
    if (!o->options || !o->slot || !o->piece || !o->param || !o->scalars ||
        !kn_fill_(o->scalars, 0)) {
        kn_optim_free(o);
        return NULL;
    }
    memcpy(o->options, options, size);
    for (int i = 0; i < n; i++)
        o->slot[i] = (slot){ .group = kn_optim_group_of(&groups, &p[i]),
                             .source = p[i].source,
                             .count = kn_numel(p[i].master) };
    kn_changed();
    return o;
}

void kn_optim_free(kn_optim *o)
{
    if (!o)
        return;
    kn_graph_forget(o);
    kn_changed();
    for (int i = 0; o->slot && i < o->slots; i++)
        for (int k = 0; k < KN_OPTIM_STATES; k++)
            kn_tensor_free(o->slot[i].state[k]);
    kn_tensor_free(o->scalars);
    kn_host_free(o->options);
    kn_host_free(o->slot);
    kn_host_free(o->piece);
    kn_host_free(o->param);
    kn_host_free(o);
}

/* ---- the pieces of a step -------------------------------------------------------------------- */

static bool make_state(kn_optim *o, const kn_param *p, int i)
{
    kn_mem_category category = kn_memory_is_store(p->state_memory) ? KN_MEM_STORE : KN_MEM_OPTIM;
    for (int k = 0; k < KN_OPTIM_STATES; k++) {
        kn_tensor **state = &o->slot[i].state[k];
        if (!o->method->state[k] || *state)
            continue;
        if (kn_recording()) /* replays would clear it each time */
            return kn_fail(
                "optimizer: the first step of '%s' is being recorded: run a step with its "
                "gradient before (.eager_steps)",
                p->name);
        *state = kn_tensor_new(p->master->dtype, kn_device_of(p->master), p->state_memory, category,
                               1, p->master->shape, NULL, false);
        if (!*state || !kn_fill_(*state, 0))
            return false;
    }
    return true;
}

static void *data_of(const kn_tensor *t)
{
    return t ? kn_array_of(t).data : NULL;
}

static kn_opt_piece piece_of(const slot *s, const kn_param *p, const kn_tensor *grad)
{
    return (kn_opt_piece){ .param = data_of(p->master),
                           .grad = data_of(grad),
                           .m = data_of(s->state[0]),
                           .v = data_of(s->state[1]),
                           .count = kn_numel(p->master),
                           .lr_mul = (float)s->group.lr_mul,
                           .weight_decay = (float)s->group.weight_decay,
                           .param_dtype = p->master->dtype,
                           .grad_dtype = grad->dtype };
}

/* Lists the parameters that have a gradient. Returns their number, -1 with an error. */
static int collect(kn_optim *o, const kn_param *p, int n)
{
    int pieces = 0;
    for (int i = 0; i < n; i++) {
        kn_tensor *g = p[i].trainable ? p[i].source->grad(&p[i]) : NULL;
        if (!kn_ok() || (g && !make_state(o, &p[i], i)))
            return -1;
        if (!g)
            continue;
        o->param[pieces] = &p[i];
        o->piece[pieces++] = piece_of(&o->slot[i], &p[i], g);
    }
    return pieces;
}

static bool update_pieces(void *optim, const kn_opt_piece *piece, int count, kn_stream *s)
{
    kn_optim *o = optim;
    o->update.piece = piece;
    o->update.pieces = count;
    return o->method->update(o->options, &o->update,
                             s ? s : kn_compute_stream(kn_device_of(o->scalars)));
}

static bool update_all(kn_optim *o, int pieces)
{
    kn_step_pieces s = { o->param, o->piece, pieces, update_pieces, o };
    bool (*in_batches)(const kn_step_pieces *) = NULL;
    for (int i = 0; i < pieces && !in_batches; i++)
        in_batches = o->param[i]->source->step;
    bool ok = in_batches ? in_batches(&s) : update_pieces(o, o->piece, pieces, NULL);
    for (int i = 0; i < pieces; i++) /* also of what failed half way */
        o->param[i]->master->storage->version++;
    return ok;
}

/* ---- the step's numbers ---------------------------------------------------------------------- */

/* What the host knows of the step, in front of it on the device's stream; how many were skipped
 * stays. */
static bool send(const kn_optim *o)
{
    kn_step_scalars x = { .lr = (float)o->lr,
                          .grad_scale = (float)o->told_scale,
                          .step = (float)o->told_step };
    size_t bytes = offsetof(kn_step_scalars, skipped);
    void *at = data_of(o->scalars);
    kn_device d = kn_device_of(o->scalars);
    if (d == KN_CPU)
        memcpy(at, &x, bytes);
    return d == KN_CPU || kn_transfer(kn_compute_stream(d), at, &x, bytes, KN_TO_DEVICE, false);
}

/* The host's part of the step. A replay of a recorded step counts, and has the learning rate of its
 * own time. */
static bool before_step(void *arg, bool first)
{
    kn_optim *o = arg;
    const kn_param *p;
    int n = first ? 0 : kn_params(o->module->self, &p);
    for (int i = 0; i < n; i++)
        p[i].master->storage->version++;
    if (!first) {
        o->told_step = ++o->steps;
        o->told_scale = o->recorded_scale;
    }
    return kn_ok() && send(o);
}

static void graph_dropped(void *arg)
{
    ((kn_optim *)arg)->recorded = NULL;
}

static bool announce(kn_optim *o, double scale)
{
    const kn_graph *g = kn_graph_recording();
    if (g && o->recorded == g)
        return kn_fail("kn_step: this optimizer has stepped already in the step that is recorded; "
                       "record one step at a time");
    if (g) {
        o->recorded = g;
        o->recorded_scale = scale;
    }
    o->told_scale = scale;
    o->told_step = o->steps + 1;
    return kn_graph_host_part(
        (kn_graph_hook){ .before = before_step, .drop = graph_dropped, .arg = o });
}

/* The factor of gradients that were clipped: where clipping left it, unless that is another
 * device. */
static bool find_coef(kn_optim *o, const kn_module_impl *clipped, double *scale)
{
    if (kn_device_of(kn_norms_tensor(clipped)) == kn_device_of(o->scalars)) {
        o->update.grad_scale = &kn_norms_of(clipped)->coef;
        return true;
    }
    kn_norms host = { 0 };
    bool ok = kn_to_host(kn_norms_tensor(clipped), &host, sizeof host);
    *scale = host.coef;
    return ok;
}

/* ---- the step -------------------------------------------------------------------------------- */

static bool launch(kn_optim *o, int pieces, const kn_loss_scale_args *scaling)
{
    kn_step_scalars *at = data_of(o->scalars);
    const kn_module_impl *clipped = kn_clipped(o->module);
    double scale = 0;
    o->update = (kn_update){ .lr = &at->lr, .grad_scale = &at->grad_scale, .step = &at->step };
    if (clipped && !find_coef(o, clipped, &scale))
        return false;
    if (!clipped && !scaling)
        scale = kn_grad_scale(o->module->self);
    if (!announce(o, scale))
        return false;
    if (scaling) {
        kn_loss_scale_args args = *scaling;
        args.step = at;
        o->update.skip = &at->skip;
        if (!KN_LAUNCH(kn_compute_stream(kn_device_of(o->scalars)), KN_K_LOSS_SCALE, args))
            return false;
    }
    return update_all(o, pieces);
}

/* The parameters are those that the optimizer was made for, cut as they were then. */
static bool unchanged(const kn_optim *o, const kn_param *p, int n, const char *what)
{
    if (n != o->slots)
        return kn_fail(
            "%s: the module had %d parameters when the optimizer was made, it has %d now; "
            "make the optimizer after the module is complete",
            what, o->slots, n);
    for (int i = 0; i < n; i++)
        if (p[i].source != o->slot[i].source || kn_numel(p[i].master) != o->slot[i].count)
            return kn_fail(
                "%s: '%s' was sharded by kn_fsdp_wrap after the optimizer was made; make "
                "the optimizer after kn_fsdp_wrap",
                what, p[i].name);
    return true;
}

static bool step(kn_optim *o, const kn_loss_scale_args *scaling)
{
    const kn_param *p;
    int n = kn_params(o->module->self, &p);
    if (!kn_ok() || !unchanged(o, p, n, "kn_step") || !kn_may_step(o->module, p, n, "kn_step") ||
        !kn_streams_look())
        return false;
    kn_scope scope = kn_scope_begin();
    int pieces = collect(o, p, n);
    bool ok = pieces > 0 && launch(o, pieces, scaling);
    kn_scope_end(scope);
    if (pieces == 0)
        return kn_fail("kn_step: no parameter has a gradient; call kn_backward first");
    if (!ok)
        return false;
    kn_consume_grads(o->module, p, n);
    kn_step_taken(&o->seen);
    o->steps++;
    return true;
}

/* Steps that loss scaling skipped are counted by the device alone; from now on by nobody. Waits. */
static bool settle_steps(kn_optim *o)
{
    if (!o->scaled)
        return true;
    o->steps = kn_optim_steps(o);
    o->scaled = false;
    return kn_fill_(o->scalars, 0);
}

bool kn_step(kn_optim *o)
{
    if (!kn_ok() || !o)
        return kn_ok() && kn_fail("kn_step: the optimizer is NULL");
    return settle_steps(o) && step(o, NULL);
}

bool kn_step_scaled(kn_optim *o, kn_loss_scale_args scaling)
{
    o->scaled = true;
    return step(o, &scaling);
}

kn_module_impl *kn_optim_impl(const kn_optim *o)
{
    return o->module;
}

kn_module *kn_optim_module(const kn_optim *o)
{
    return o ? o->module->self : NULL;
}

void kn_set_lr(kn_optim *o, double lr)
{
    if (!(lr >= 0 && isfinite(lr))) {
        kn_fail("kn_set_lr: the learning rate is %g, should be at least 0", lr);
        return;
    }
    if (o && !kn_unrecordable(KN_DEVICE_DEFAULT, "kn_set_lr (call it before kn_replay_step)"))
        o->lr = lr;
}

double kn_lr(const kn_optim *o)
{
    return o ? o->lr : 0;
}

int64_t kn_optim_steps(const kn_optim *o)
{
    kn_step_scalars x = { 0 };
    if (o && o->scaled && kn_device_of(o->scalars) != KN_META)
        kn_to_host(o->scalars, &x, sizeof x);
    return o ? o->steps - (int64_t)x.skipped : 0;
}

void kn_optim_set_steps(kn_optim *o, int64_t steps)
{
    if (!o || !settle_steps(o))
        return;
    o->steps = steps;
}

const char *kn_optim_state_name(const kn_optim *o, int k)
{
    for (int i = 0; o && k >= 0 && i < KN_OPTIM_STATES; i++)
        if (o->method->state[i] && k-- == 0)
            return o->method->state[i];
    return NULL;
}

/* Made where missing, so that a checkpoint can be read into it. */
kn_tensor *kn_optim_state(const kn_optim *o, int i, const char *what)
{
    const kn_param *p;
    int n = o ? kn_params(o->module->self, &p) : 0;
    if (i < 0 || i >= n || !unchanged(o, p, n, "kn_optim_state"))
        return NULL;
    for (int k = 0; k < KN_OPTIM_STATES; k++) {
        const char *name = o->method->state[k];
        if (name && what && !strcmp(what, name))
            return p[i].trainable && make_state((kn_optim *)o, &p[i], i) ? o->slot[i].state[k]
                                                                         : NULL;
    }
    return NULL;
}
