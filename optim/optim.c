/* optim/optim.c: AdamW and SGD over all parameters in one fused launch. */
#include "nn/nn_internal.h"
#include "optim/optim_internal.h"
#include <fnmatch.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum method { ADAMW, SGD } method;

/* What the optimizer keeps for one parameter. */
typedef struct slot {
    kn_tensor *m, *v; /* this rank's part; made at the first step that sees a gradient */
    double lr_mul, weight_decay;
    const kn_param_source *source; /* who held the gradient, and how many */
    int64_t count;                 /* elements were this rank's, when the optimizer was made */
} slot;

/* A parameter whose turn it is in a step. */
typedef struct due {
    const kn_param *p;
    int index;
    kn_tensor *grad;
    kn_param_home home; /* zero where it lies with the device that computes */
} due;

struct kn_optim {
    method method;
    kn_module_impl *module;
    kn_adamw_options adamw;
    kn_sgd_options sgd;
    slot *slot;
    int slots;
    kn_opt_piece *piece; /* scratch for a launch */
    due *due;            /* whose pieces they are */
    kn_tensor *scalars;  /* kn_step_scalars in device memory */
    double lr;
    int64_t
        steps; /* where scaled: with those that were skipped, which only the device has counted */
    int64_t seen; /* kn_step_taken */
    bool scaled;
    double recorded_scale;    /* of the gradients in the recorded step */
    const kn_graph *recorded; /* in which it steps */
};

static void assign_groups(kn_optim *o, const kn_param *p, int n, double decay,
                          const kn_optim_group *g, int groups)
{
    for (int i = 0; i < n; i++) {
        o->slot[i].source = p[i].source;
        o->slot[i].count = kn_numel(p[i].master);
        o->slot[i].lr_mul = 1;
        o->slot[i].weight_decay = decay;
        for (int k = 0; k < groups; k++) {
            int dims = kn_ndim(p[i].tensor);
            if ((g[k].pattern && fnmatch(g[k].pattern, p[i].name, 0) != 0) ||
                dims < g[k].min_ndim || (g[k].max_ndim && dims > g[k].max_ndim))
                continue;
            o->slot[i].lr_mul = kn_value_or(g[k].lr_mul, 1);
            o->slot[i].weight_decay = kn_value_or(g[k].weight_decay, decay);
            break;
        }
    }
}

static bool negative(double x)
{
    return x != KN_ZERO && !(x >= 0 && isfinite(x));
}

static bool groups_match(const kn_param *p, int n, const kn_optim_group *g, int groups)
{
    for (int k = 0; k < groups; k++) {
        if (negative(g[k].lr_mul) || negative(g[k].weight_decay))
            return kn_fail(
                "optimizer: group %d ('%s') has .lr_mul %g and .weight_decay %g; both must "
                "be at least 0, and KN_ZERO is the way to write 0",
                k, g[k].pattern ? g[k].pattern : "*", g[k].lr_mul, g[k].weight_decay);
        bool any = !g[k].pattern;
        for (int i = 0; i < n && !any; i++)
            any = fnmatch(g[k].pattern, p[i].name, 0) == 0;
        if (!any)
            return kn_fail("optimizer: the group pattern '%s' matches no parameter", g[k].pattern);
    }
    return true;
}

static kn_optim *make(void *module, method how, double lr, double decay, const kn_optim_group *g,
                      int groups)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "optimizer") : NULL;
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    if (!m)
        return NULL;
    if (n == 0) {
        kn_fail("optimizer: the module has no parameters");
        return NULL;
    }
    if (!kn_one_place(p, n, "optimizer"))
        return NULL;
    if (lr == 0 || negative(lr)) {
        kn_fail("optimizer: .lr is %g; it is required and must be above 0 (KN_ZERO for none)", lr);
        return NULL;
    }
    if (negative(decay)) {
        kn_fail("optimizer: .weight_decay is %g; it must be at least 0 (KN_ZERO for none)", decay);
        return NULL;
    }
    kn_optim *o = groups_match(p, n, g, groups) ? kn_host_calloc(1, sizeof *o) : NULL;
    if (!o)
        return NULL;
    o->method = how;
    o->module = m;
    o->lr = kn_value_or(lr, 0);
    o->seen = kn_steps_seen();
    o->slots = n;
    o->slot = kn_host_calloc((size_t)n, sizeof *o->slot);
    o->piece = kn_host_calloc((size_t)n, sizeof *o->piece);
    o->due = kn_host_calloc((size_t)n, sizeof *o->due);
    int64_t scalars = sizeof(kn_step_scalars) / sizeof(float);
    o->scalars = kn_tensor_new(KN_F32, kn_device_of(p[0].master), NULL, KN_MEM_OPTIM, 1, &scalars,
                               NULL, false);
    if (!o->slot || !o->piece || !o->due || !o->scalars || !kn_fill_(o->scalars, 0)) {
        kn_optim_free(o);
        return NULL;
    }
    assign_groups(o, p, n, decay, g, groups);
    kn_changed();
    return o;
}

kn_optim *kn_adamw_(void *module, kn_adamw_options a)
{
    a.beta1 = kn_value_or(a.beta1, 0.9);
    a.beta2 = kn_value_or(a.beta2, 0.999);
    a.eps = kn_value_or(a.eps, 1e-8);
    if (!(a.eps >= 0) || !isfinite(a.eps)) {
        kn_fail("adamw: .eps is %g; it must be at least 0 (KN_ZERO for none)", a.eps);
        return NULL;
    }
    if (!(a.beta1 >= 0 && a.beta1 < 1 && a.beta2 >= 0 && a.beta2 < 1)) {
        kn_fail("adamw: betas are %g and %g; both must lie in [0, 1)", a.beta1, a.beta2);
        return NULL;
    }
    kn_optim *o =
        make(module, ADAMW, a.lr, kn_value_or(a.weight_decay, 0.01), a.groups, a.group_count);
    if (o)
        o->adamw = a;
    return o;
}

kn_optim *kn_sgd_(void *module, kn_sgd_options s)
{
    s.momentum = kn_value_or(s.momentum, 0);
    s.dampening = kn_value_or(s.dampening, 0);
    if (!(s.momentum >= 0 && s.momentum < 1) || !(s.dampening >= 0 && s.dampening <= 1)) {
        kn_fail("sgd: .momentum is %g and .dampening %g; they must lie in [0, 1) and [0, 1]",
                s.momentum, s.dampening);
        return NULL;
    }
    if (s.dampening != 0 && s.momentum == 0) {
        kn_fail("sgd: .dampening %g does nothing without .momentum; leave it out or give both",
                s.dampening);
        return NULL;
    }
    if (s.nesterov && (s.momentum == 0 || s.dampening != 0)) {
        kn_fail("sgd: .nesterov needs .momentum above 0 and no .dampening");
        return NULL;
    }
    kn_optim *o = make(module, SGD, s.lr, kn_value_or(s.weight_decay, 0), s.groups, s.group_count);
    if (o)
        o->sgd = s;
    return o;
}

void kn_optim_free(kn_optim *o)
{
    if (!o)
        return;
    kn_graph_forget(o);
    kn_changed();
    for (int i = 0; o->slot && i < o->slots; i++) {
        kn_tensor_free(o->slot[i].m);
        kn_tensor_free(o->slot[i].v);
    }
    kn_tensor_free(o->scalars);
    kn_host_free(o->slot);
    kn_host_free(o->piece);
    kn_host_free(o->due);
    kn_host_free(o);
}

/* ---- the step --------------------------------------------------------------------------------------- */

static bool make_state(kn_optim *o, const kn_param *p, int i)
{
    slot *s = &o->slot[i];
    bool wants_m = o->method == ADAMW || o->sgd.momentum > 0, wants_v = o->method == ADAMW;
    kn_tensor **which[2] = { wants_m ? &s->m : NULL, wants_v ? &s->v : NULL };
    kn_mem_category category = kn_memory_is_store(p->home) ? KN_MEM_STORE : KN_MEM_OPTIM;
    for (int k = 0; k < 2; k++) {
        if (!which[k] || *which[k])
            continue;
        if (kn_recording()) /* replays would clear it each time */
            return kn_fail(
                "optimizer: the first step of '%s' is being recorded: run a step with its "
                "gradient before (.eager_steps)",
                p->name);
        *which[k] = kn_tensor_new(p->master->dtype, kn_device_of(p->master), p->home, category, 1,
                                  p->master->shape, NULL, false);
        if (!*which[k] || !kn_fill_(*which[k], 0))
            return false;
    }
    return true;
}

static int by_turn(const void *a, const void *b)
{
    const due *x = a, *y = b;
    if (x->home.turn != y->home.turn)
        return x->home.turn < y->home.turn ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

static void fill_piece(kn_optim *o, kn_opt_piece *q, const due *d)
{
    const kn_tensor *master = d->p->master;
    const slot *s = &o->slot[d->index];
    *q = (kn_opt_piece){ .param = kn_array_of(master).data,
                         .grad = kn_array_of(d->grad).data,
                         .m = s->m ? kn_array_of(s->m).data : NULL,
                         .v = s->v ? kn_array_of(s->v).data : NULL,
                         .count = kn_numel(master),
                         .lr_mul = (float)s->lr_mul,
                         .weight_decay = (float)s->weight_decay,
                         .param_dtype = master->dtype,
                         .grad_dtype = d->grad->dtype,
                         .out = d->home.out,
                         .out_dtype = d->home.out_dtype };
    master->storage->version++;
}

/* Lists the parameters that have a gradient, those that the host steps beside a device in the order in which
 * their gradients come to it. */
static int collect(kn_optim *o, const kn_param *p, int n)
{
    int pieces = 0;
    for (int i = 0; i < n; i++) {
        kn_tensor *g = p[i].trainable ? p[i].source->grad(&p[i]) : NULL;
        if (!kn_ok() || (g && !make_state(o, &p[i], i)))
            return -1;
        if (!g)
            continue;
        due *d = &o->due[pieces++];
        *d = (due){ .p = &p[i], .index = i, .grad = g };
        if (p[i].source->home)
            p[i].source->home(&p[i], &d->home);
    }
    qsort(o->due, (size_t)pieces, sizeof *o->due, by_turn);
    for (int k = 0; k < pieces; k++)
        fill_piece(o, &o->piece[k], &o->due[k]);
    return pieces;
}

/* A launch of the step: where its scalars lie. */
typedef struct scalars {
    const kn_step_scalars *at;
    const float *grad_scale, *skip;
} scalars;

static bool run_pieces(kn_optim *o, int begin, int end, scalars x)
{
    const kn_opt_piece *piece = o->piece + begin;
    kn_stream *home = o->due[begin].home.stream;
    kn_stream *s = home ? home : kn_compute_stream(kn_device_of(o->scalars));
    if (o->method == ADAMW)
        return KN_LAUNCH(s, KN_K_ADAMW,
                         ((kn_adamw_args){ piece, end - begin, &x.at->lr, x.grad_scale, &x.at->step,
                                           o->adamw.beta1, o->adamw.beta2, o->adamw.eps, x.skip }));
    return KN_LAUNCH(s, KN_K_SGD,
                     ((kn_sgd_args){ piece, end - begin, &x.at->lr, x.grad_scale, &x.at->step,
                                     o->sgd.momentum, o->sgd.dampening, o->sgd.nesterov, x.skip }));
}

/* ---- states in a store: a window of pieces at a time is in memory, the next one is on its way ------- */

#define WINDOW ((int64_t)1 << 20) /* elements of parameters */

static void each_array(const kn_opt_piece *q, void (*fn)(const void *p, size_t bytes))
{
    size_t bytes = (size_t)q->count * kn_dtype_size(q->param_dtype);
    fn(q->param, bytes);
    fn(q->grad, (size_t)q->count * kn_dtype_size(q->grad_dtype));
    if (q->m)
        fn(q->m, bytes);
    if (q->v)
        fn(q->v, bytes);
}

/* Pieces that follow begin, up to a window's worth and at least one; tells the store about them. */
static int window(const kn_opt_piece *piece, int begin, int last,
                  void (*fn)(const void *p, size_t bytes))
{
    int64_t elements = 0;
    int end = begin;
    while (end < last && (end == begin || elements + piece[end].count <= WINDOW)) {
        elements += piece[end].count;
        each_array(&piece[end++], fn);
    }
    return end;
}

/* Of all pieces, those from begin to last. */
static bool run_windows(kn_optim *o, int begin, int last, int pieces, scalars x)
{
    bool ok = true;
    for (int end; begin < last && ok; begin = end) {
        end = window(o->piece, begin, last, kn_store_ahead);
        window(o->piece, end, pieces, kn_store_ahead);
        ok = run_pieces(o, begin, end, x);
        window(o->piece, begin, end, kn_store_done);
    }
    return ok;
}

/* ---- turns: what the host steps beside a device ------------------------------------------------------ */

/* Pieces that are there together: all that lie with the device, then bucket by bucket. */
static int end_of_turn(const kn_optim *o, int begin, int pieces)
{
    int end = begin + 1;
    while (end < pieces && o->due[end].home.turn == o->due[begin].home.turn &&
           o->due[end].home.stream == o->due[begin].home.stream &&
           (!o->due[end].home.stream || o->due[end].p->source == o->due[begin].p->source))
        end++;
    return end;
}

/* The host waits for one bucket's gradients at a time and steps it while the device goes on with the backward
 * of those that follow. */
static bool run_turns(kn_optim *o, int pieces, bool stored, scalars x)
{
    for (int begin = 0, end; begin < pieces; begin = end) {
        const kn_param_source *source = o->due[begin].p->source;
        end = end_of_turn(o, begin, pieces);
        if (o->due[begin].home.stream && !source->arrive(o->due[begin].p))
            return false;
        if (!(stored ? run_windows(o, begin, end, pieces, x) : run_pieces(o, begin, end, x)))
            return false;
        for (int k = begin; k < end; k++)
            if (o->piece[k].out)
                source->stepped(o->due[k].p);
    }
    return true;
}

/* ---- the step itself -------------------------------------------------------------------------------- */

/* What the host knows of the step, in front of it on the device's stream; how many were skipped stays. */
static bool send(const kn_optim *o, double scale, int64_t step)
{
    kn_step_scalars x = { .lr = (float)o->lr, .grad_scale = (float)scale, .step = (float)step };
    size_t bytes = offsetof(kn_step_scalars, skipped);
    void *at = kn_array_of(o->scalars).data;
    kn_device d = kn_device_of(o->scalars);
    if (d == KN_CPU)
        memcpy(at, &x, bytes);
    return d == KN_CPU || kn_transfer(kn_compute_stream(d), at, &x, bytes, KN_TO_DEVICE, false);
}

/* A replay of a recorded step counts, and has the learning rate of its own time. */
static bool before_launch(void *arg, bool first)
{
    kn_optim *o = arg;
    const kn_param *p;
    int n = first ? 0 : kn_params(o->module->self, &p);
    for (int i = 0; i < n; i++)
        p[i].master->storage->version++;
    o->steps += !first;
    return kn_ok() && send(o, o->recorded_scale, o->steps);
}

static void graph_dropped(void *arg)
{
    ((kn_optim *)arg)->recorded = NULL;
}

/* While recording nothing is sent, but before each launch of the graph. */
static bool announce(kn_optim *o, double scale)
{
    const kn_graph *g = kn_context_get()->recording;
    if (!g) {
        kn_device rehearsing = kn_rehearse_for(KN_DEVICE_DEFAULT);
        bool ok = send(o, scale, o->steps + 1);
        kn_rehearse_for(rehearsing);
        return ok;
    }
    if (o->recorded == g)
        return kn_fail("kn_step: this optimizer has stepped already in the step that is recorded; "
                       "record one step at a time");
    o->recorded = g;
    o->recorded_scale = scale;
    return kn_graph_on_launch(
        (kn_graph_hook){ .before = before_launch, .drop = graph_dropped, .arg = o });
}

/* The factor of gradients that were clipped: where clipping left it, unless that is another device. */
static bool find_coef(kn_optim *o, const kn_module_impl *clipped, scalars *x, double *scale)
{
    kn_device d = kn_device_of(o->scalars);
    if (kn_device_of(clipped->norms) == d) {
        x->grad_scale = &kn_norms_of(clipped)->coef;
        return true;
    }
    kn_norms host = { 0 };
    bool ok = kn_to_host(clipped->norms, &host, sizeof host);
    *scale = host.coef;
    return ok;
}

static bool launch(kn_optim *o, int pieces, bool stored, const kn_loss_scale_args *scaling)
{
    kn_step_scalars *at = kn_array_of(o->scalars).data;
    scalars x = { .at = at, .grad_scale = &at->grad_scale };
    const kn_module_impl *clipped = kn_clipped(o->module);
    double scale = 0;
    if (clipped && !find_coef(o, clipped, &x, &scale))
        return false;
    if (!clipped && !scaling)
        scale = kn_grad_scale(o->module->self);
    if (!announce(o, scale))
        return false;
    if (scaling) {
        kn_loss_scale_args args = *scaling;
        args.step = at;
        x.skip = &at->skip;
        if (!KN_LAUNCH(kn_compute_stream(kn_device_of(o->scalars)), KN_K_LOSS_SCALE, args))
            return false;
    }
    return run_turns(o, pieces, stored, x);
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

void kn_consume_grads(kn_module_impl *m, const kn_param *p, int n)
{
    for (int i = 0; i < n; i++)
        p[i].source->clear(&p[i]);
    kn_rounds_take(m);
}

/* Names the first parameter of which part of the gradient isn't where a step reads it. */
static bool all_there(const kn_param *p, int n, const char *what)
{
    for (int i = 0; i < n; i++) {
        const char *why = p[i].source->held_back ? p[i].source->held_back(&p[i]) : NULL;
        if (why)
            return kn_fail("%s: of the gradient of '%s' %s", what, p[i].name, why);
    }
    return true;
}

bool kn_may_step(const kn_module_impl *m, const kn_param *p, int n, const char *what)
{
    return all_there(p, n, what) && kn_rounds_agree(m, what) && kn_clipped_whole(m, what);
}

static bool step(kn_optim *o, const kn_loss_scale_args *scaling)
{
    const kn_param *p;
    int n = kn_params(o->module->self, &p);
    if (!kn_ok() || !unchanged(o, p, n, "kn_step") || !kn_may_step(o->module, p, n, "kn_step") ||
        !kn_streams_look())
        return false;
    bool stored = false;
    for (int i = 0; i < n; i++)
        stored = stored || kn_memory_is_store(p[i].home);
    kn_scope scope = kn_scope_begin();
    int pieces = collect(o, p, n);
    bool ok = pieces > 0 && launch(o, pieces, stored, scaling);
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

kn_module_impl *kn_optim_module(const kn_optim *o)
{
    return o->module;
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

/* Made where missing, so that a checkpoint can be read into it. */
kn_tensor *kn_optim_state(const kn_optim *o, int i, const char *what)
{
    const kn_param *p;
    int n = o ? kn_params(o->module->self, &p) : 0;
    if (i < 0 || i >= n || !unchanged(o, p, n, "kn_optim_state"))
        return NULL;
    bool adam = o->method == ADAMW;
    bool known =
        adam ? !strcmp(what, "exp_avg") || !strcmp(what, "exp_avg_sq") : !strcmp(what, "momentum");
    if (!known || !p[i].trainable || !make_state((kn_optim *)o, &p[i], i))
        return NULL;
    return adam && !strcmp(what, "exp_avg_sq") ? o->slot[i].v : o->slot[i].m;
}
