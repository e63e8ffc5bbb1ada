/* optim/muon.c: Muon (Jordan et al., 2024): the momentum of a matrix, made orthogonal, is its step;
 * AdamW updates the other parameters.
 *
 * The momentum is cut as its parameter is. A step takes the directions that it gives, whole matrix
 * by whole matrix, to a rank that makes each orthogonal (kn_param_source.matrices), and the results
 * back to the parts:
 *
 *   begin   m += (1 - mu)(g - m);  direction = g + mu (m - g), or m      each rank its part
 *   whole   direction = orthogonal(direction)                            one rank
 *   end     p -= lr (factor direction + weight_decay p)                  each rank its part */
#include "autograd/ops.h"
#include "kernels/kernels_internal.h"
#include "kernels/trace.h"
#include "nn/matrices.h"
#include "optim/optim_internal.h"
#include <math.h>
#include <string.h>

typedef struct muon {
    kn_muon_options o;
    double spent; /* seconds that the last step's matrices took */
} muon;

/* ---- which parameters ------------------------------------------------------------------------ */

static int64_t rows_of(const kn_param *p)
{
    return kn_ndim(p->tensor) > 0 ? kn_size(p->tensor, 0) : 1;
}

static int64_t cols_of(const kn_param *p)
{
    return rows_of(p) > 0 ? p->numel / rows_of(p) : 0;
}

static bool holds_embedding(const kn_module_impl *m, const kn_param *p)
{
    const kn_module_impl *owner = kn_param_owner(p, m);
    return owner && strncmp(owner->class_name, "embedding", 9) == 0; /* embedding_bag, too */
}

static bool by_rule(const kn_module_impl *m, const kn_param *p)
{
    return rows_of(p) > 1 && cols_of(p) > 1 && !kn_param_row(p) && !holds_embedding(m, p) &&
           !kn_matched("head.*, *.head.*, lm_head.*, *.lm_head.*", p->name);
}

static bool choose(kn_optim *o, double adamw_lr_mul)
{
    const kn_param *p;
    int n = kn_params(o->live.module->self, &p);
    for (int i = 0; i < n && kn_ok(); i++) {
        kn_optim_slot *s = &o->slot[i];
        kn_muon_use use = s->group.muon;
        if (use == KN_MUON_MATRIX && kn_ndim(p[i].tensor) < 2)
            return kn_fail("kn_muon: group .muon is KN_MUON_MATRIX for '%s', which has %d dims; a "
                           "matrix has at least 2",
                           p[i].name, kn_ndim(p[i].tensor));
        if (use == KN_MUON_MATRIX && kn_param_row(&p[i]))
            return kn_fail("kn_muon: group .muon is KN_MUON_MATRIX for '%s', whose gradient stays "
                           "rows; a matrix needs the whole: leave .sparse out, or choose "
                           "KN_MUON_ADAMW",
                           p[i].name);
        s->matrix = use == KN_MUON_DEFAULT ? by_rule(o->live.module, &p[i]) : use == KN_MUON_MATRIX;
        if (!s->matrix)
            s->group.lr_mul *= adamw_lr_mul;
    }
    return kn_ok();
}

/* ---- the step of a matrix -------------------------------------------------------------------- */

typedef struct matrices {
    const kn_muon_options *o;
    const kn_opt_step *step;
    const kn_opt_piece *piece;
    const kn_param *const *param;
    kn_device device;
} matrices;

/* now where the step is to be taken, else before. */
static kn_tensor *unless_skipped(const matrices *x, kn_tensor *before, kn_tensor *now)
{
    if (!x->step->skip)
        return now;
    kn_tensor *skip = kn_piece_tensor(x->device, x->step->skip, KN_F64, 1);
    return kn_where(kn_ne(skip, kn_zeros_like(skip)), before, now);
}

static bool begin(void *arg, int i, kn_tensor *out)
{
    const matrices *x = arg;
    const kn_opt_piece *q = &x->piece[i];
    if (q->count == 0)
        return true;
    kn_scope scope = kn_scope_begin();
    kn_tensor *g = kn_piece_grad(x->device, x->step, q);
    kn_tensor *m = kn_wide(kn_piece_tensor(x->device, q->m, q->param_dtype, q->count));
    kn_tensor *now = kn_lerp(m, g, 1 - x->o->momentum);
    kn_tensor *direction = x->o->no_nesterov ? now : kn_lerp(g, now, x->o->momentum);
    bool ok = direction && kn_copy_(out, direction) &&
              kn_piece_write(x->device, x->step, q, 1, unless_skipped(x, m, now));
    kn_scope_end(scope);
    return ok;
}

static bool whole(void *arg, int i, kn_tensor *direction)
{
    const matrices *x = arg;
    const kn_param *p = x->param[i];
    kn_scope scope = kn_scope_begin();
    kn_tensor *matrix = kn_view(direction, 2, (int64_t[]){ rows_of(p), cols_of(p) });
    bool ok = matrix && kn_newton_schulz(matrix, x->o->ns, x->o->ns_steps, x->o->eps);
    kn_scope_end(scope);
    return ok;
}

static double factor_of(const kn_muon_options *o, const kn_param *p)
{
    double rows = (double)rows_of(p), cols = (double)cols_of(p);
    if (o->scale == KN_MUON_MATCH_ADAMW)
        return 0.2 * sqrt(fmax(rows, cols));
    double ratio = sqrt(rows / cols);
    return o->scale == KN_MUON_SPECTRAL ? ratio : fmax(1, ratio);
}

static void done_with(const kn_param *p, const kn_opt_piece *q)
{
    size_t bytes = (size_t)q->count * kn_dtype_size(q->param_dtype);
    if (!kn_memory_is_store(p->state_memory))
        return;
    kn_store_done(q->param, bytes);
    kn_store_done(q->m, bytes);
    kn_store_done(q->grad, (size_t)q->count * kn_dtype_size(q->grad_dtype));
}

/* Adding 0 makes a -0 that no other rank added anything to a 0, as sums over ranks are. */
static bool end(void *arg, int i, kn_tensor *direction)
{
    const matrices *x = arg;
    const kn_opt_piece *q = &x->piece[i];
    if (q->count == 0)
        return true;
    kn_scope scope = kn_scope_begin();
    kn_dtype t = kn_wide_dtype(q->param_dtype);
    kn_tensor *p = kn_wide(kn_piece_tensor(x->device, q->param, q->param_dtype, q->count));
    kn_tensor *lr = kn_cast(kn_piece_tensor(x->device, x->step->lr, KN_F64, 1), t);
    kn_tensor *move =
        kn_add_scalar(kn_scale(kn_cast(direction, t), factor_of(x->o, x->param[i])), 0);
    if (q->weight_decay > 0)
        move = kn_add_scaled(move, p, q->weight_decay);
    kn_tensor *now = kn_sub(p, kn_mul(move, kn_scale(lr, q->lr_mul)));
    bool ok = now && kn_piece_write(x->device, x->step, q, 0, unless_skipped(x, p, now));
    kn_scope_end(scope);
    done_with(x->param[i], q);
    return ok;
}

/* Where the parameter lies whole on this rank. */
static bool step_alone(matrices *x, int i)
{
    int64_t n = x->piece[i].count;
    kn_scope scope = kn_scope_begin();
    kn_tensor *direction = kn_empty(x->o->ns_dtype, x->device, 1, &n);
    bool ok = direction && begin(x, i, direction) && (n == 0 || whole(x, i, direction)) &&
              end(x, i, direction);
    kn_scope_end(scope);
    return ok;
}

static bool step_matrices(void *options, const kn_opt_step *step, const kn_opt_piece *piece,
                          const kn_param *const *param, int n)
{
    muon *u = options;
    matrices x = { &u->o, step, piece, param, kn_device_of(param[0]->master) };
    double *flops = kn_host_alloc((size_t)n * sizeof *flops), before = kn_now();
    bool (*over_ranks)(const kn_matrix_step *) = NULL;
    bool mode = kn_set_grad_mode(false);
    bool ok = flops && !kn_unrecordable(KN_DEVICE_DEFAULT, "kn_muon's step of matrices");
    for (int i = 0; ok && i < n; i++) {
        flops[i] = kn_newton_schulz_flops(rows_of(param[i]), cols_of(param[i]));
        if (param[i]->source->matrices)
            over_ranks = param[i]->source->matrices;
        else
            ok = step_alone(&x, i);
    }
    kn_matrix_step all = { .param = param,
                           .cost = flops,
                           .count = n,
                           .dtype = u->o.ns_dtype,
                           .window = u->o.window,
                           .begin = begin,
                           .whole = whole,
                           .end = end,
                           .arg = &x };
    ok = ok && (!over_ranks || over_ranks(&all));
    kn_set_grad_mode(mode);
    kn_host_free(flops);
    u->spent = kn_now() - before;
    return ok;
}

static bool update(const void *options, const kn_opt_step *step, kn_stream *s)
{
    const kn_muon_options *o = &((const muon *)options)->o;
    return KN_LAUNCH(s, KN_K_ADAMW, ((kn_adamw_args){ *step, o->beta1, o->beta2, o->adamw_eps }));
}

static const kn_optim_constant constant[] = {
    { "momentum_factor", offsetof(muon, o.momentum), KN_OF_REALS, 0, 1, true, "momentum" },
    { "no_nesterov", offsetof(muon, o.no_nesterov), KN_OF_BOOLS, 0, 1 },
    { "scale", offsetof(muon, o.scale), KN_OF_INTS, KN_MUON_ORIGINAL, KN_MUON_SPECTRAL },
    { "ns_steps", offsetof(muon, o.ns_steps), KN_OF_INTS, 1, 99 },
    { "eps", offsetof(muon, o.eps), KN_OF_REALS, 1e-37, INFINITY, true },
    { "beta1", offsetof(muon, o.beta1), KN_OF_REALS, 0, 1, true },
    { "beta2", offsetof(muon, o.beta2), KN_OF_REALS, 0, 1, true },
    { "adamw_eps", offsetof(muon, o.adamw_eps), KN_OF_REALS, 0, INFINITY, true },
    { 0 },
};

static const kn_optim_method method = { .constant = constant,
                                        .state = { "exp_avg", "exp_avg_sq" },
                                        .update = update,
                                        .matrix_state = "momentum",
                                        .matrices = step_matrices };

double kn_muon_seconds(const kn_optim *o)
{
    return o && o->method == &method ? ((const muon *)o->options)->spent : 0;
}

/* ---- making one ------------------------------------------------------------------------------ */

static bool good(const kn_muon_options *o)
{
    if (!isfinite(o->ns[0]) || !isfinite(o->ns[1]) || !isfinite(o->ns[2]))
        return kn_fail("kn_muon: .ns is { %g, %g, %g }; the coefficients must be finite", o->ns[0],
                       o->ns[1], o->ns[2]);
    if (o->ns_dtype != KN_BF16 && o->ns_dtype != KN_F32 && o->ns_dtype != KN_F64)
        return kn_fail("kn_muon: .ns_dtype is %s; bf16, f32 and f64 are supported",
                       kn_dtype_name(o->ns_dtype));
    if (!(o->adamw_lr_mul >= 0) || !isfinite(o->adamw_lr_mul))
        return kn_fail("kn_muon: .adamw_lr_mul is %g; it must be at least 0 (KN_ZERO for none)",
                       o->adamw_lr_mul);
    return o->window > 0 ||
           kn_fail("kn_muon: .window is %lld bytes; it must be above 0", (long long)o->window);
}

kn_optim *kn_muon_(void *module, kn_muon_options o)
{
    static const double quintic[3] = { 3.4445, -4.7750, 2.0315 };
    muon u = { .o = o };
    u.o.momentum = kn_value_or(o.momentum, 0.95);
    u.o.beta1 = kn_value_or(o.beta1, 0.9);
    u.o.beta2 = kn_value_or(o.beta2, 0.999);
    u.o.adamw_eps = kn_value_or(o.adamw_eps, 1e-8);
    u.o.adamw_lr_mul = kn_value_or(o.adamw_lr_mul, 1);
    u.o.eps = o.eps != 0 ? o.eps : 1e-7;
    u.o.scale = o.scale ? o.scale : KN_MUON_ORIGINAL;
    u.o.ns_steps = o.ns_steps ? o.ns_steps : 5;
    u.o.ns_dtype = o.ns_dtype ? o.ns_dtype : KN_BF16;
    u.o.window = o.window ? o.window : 256 << 20;
    if (o.ns[0] == 0 && o.ns[1] == 0 && o.ns[2] == 0)
        memcpy(u.o.ns, quintic, sizeof quintic);
    if (!kn_optim_in_ranges(constant, &u, "kn_muon") || !good(&u.o))
        return NULL;
    kn_optim *optim = kn_optim_new(module, &method, &u, sizeof u, KN_OPTIM_GROUPS(o, 0.1));
    if (optim && !choose(optim, u.o.adamw_lr_mul)) {
        kn_optim_free(optim);
        return NULL;
    }
    return optim;
}
