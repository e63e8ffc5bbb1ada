/* nn/batch_norm.c: batch norm, and over the batches of several ranks as over one. */
#include "comm/comm_internal.h"
#include "nn/edit.h"
#include "kernels/graph_internal.h"
#include "nn/layers.h"
#include "nn/nn_internal.h"

typedef struct batch_norm_state {
    kn_batch_norm_init_options o;
    kn_comm *sync; /* the ranks whose batches are one while training; NULL: this one */
} batch_norm_state;

enum { MEAN, VAR, BATCHES }; /* the buffers, in this order */

static bool count_batch(kn_tensor *count)
{
    if (!kn_tensor_before_write(count, "batch_norm"))
        return false;
    kn_array a = kn_array_of(count);
    kn_written(count);
    kn_stream *s = kn_compute_stream(kn_device_of(count));
    return KN_LAUNCH(s, KN_K_UNARY, ((kn_unary_args){ a, a, KN_AFFINE, 1, 1 }));
}

static kn_tensor *copy_of(kn_tensor *t)
{
    kn_tensor *copy = kn_empty_like(t);
    return copy && kn_copy_(copy, t) ? copy : NULL;
}

/* running = ((batches - 1) running + of_batch) / batches: the mean over all batches so far. */
static bool average(kn_tensor *running, kn_tensor *of_batch, const kn_tensor *batches)
{
    kn_tensor *n = kn_cast((kn_tensor *)batches, running->dtype);
    kn_tensor *sum = kn_add(kn_mul(running, kn_add_scalar(n, -1)), of_batch);
    return kn_copy_(running, kn_div(sum, n));
}

/* Counts the batch; cumulative: stats[2] are the batch's own, which the running ones average. */
static bool move(const kn_module_impl *m, bool cumulative, kn_tensor *const *stats)
{
    kn_tensor *batches = m->buffer[BATCHES].tensor;
    if (!count_batch(batches) || !cumulative)
        return kn_ok();
    const bool mode = kn_set_grad_mode(false);
    const bool ok = average(m->buffer[MEAN].tensor, stats[MEAN], batches) &&
                    average(m->buffer[VAR].tensor, stats[VAR], batches);
    kn_set_grad_mode(mode);
    return ok;
}

static kn_tensor *norm(kn_module *self, kn_tensor *x, bool relu, kn_tensor *residual)
{
    const batch_norm_state *s = kn_module_data(self);
    const kn_module_impl *m = self->impl;
    const bool tracks = m->buffers > 0, trains = m->training || !tracks;
    const bool moves = tracks && m->training;
    const bool cumulative = s->o.cumulative && moves;
    kn_tensor *stats[2] = { NULL, NULL };
    for (int i = 0; i < 2 && (moves || !trains); i++) /* a copy stays where there is no batch */
        stats[i] = cumulative ? copy_of(m->buffer[i].tensor) : m->buffer[i].tensor;
    kn_tensor *y = kn_batch_norm(
        x, kn_layer_param(self, 0), kn_layer_param(self, 1), stats[MEAN], stats[VAR],
        .training = trains, .eps = s->o.eps, .momentum = cumulative ? 1 : s->o.momentum,
        .sync = m->training ? s->sync : NULL, .relu = relu, .residual = residual);
    return y && (!moves || move(m, cumulative, stats)) ? y : NULL;
}

static kn_tensor *batch_norm_forward(kn_module *self, kn_tensor *x)
{
    return norm(self, x, false, NULL);
}

/* in: x, and what is added before relu. */
static kn_values forward_relu(kn_module *self, kn_values in, const void *arg)
{
    (void)arg;
    return KN_VALUES(norm(self, in.v[0], true, in.v[1]));
}

kn_tensor *kn_batch_norm_relu(void *module, kn_tensor *x, kn_tensor *residual)
{
    const kn_module_impl *m = kn_module_in_place(module, "kn_batch_norm_relu");
    if (!m || !kn_ok())
        return NULL;
    if (m->forward.f1 == batch_norm_forward)
        return kn_call_method_n(m->self, forward_relu, KN_VALUES(x, residual), NULL, 0).v[0];
    kn_tensor *y = kn_call(module, x);
    return kn_relu(residual ? kn_add(y, residual) : y);
}

static bool check_options(const char *name, int64_t channels, const kn_batch_norm_init_options *o)
{
    if (!kn_norm_fits("batch_norm", name, channels, o->eps))
        return false;
    if (!(kn_value_or(o->momentum, 0.1) >= 0 && o->momentum <= 1))
        return kn_fail(
            "kn_batch_norm_init: '%s' has momentum %g, should lie in [0, 1] (KN_ZERO for 0)", name,
            o->momentum);
    if (o->cumulative && (o->momentum != 0 || o->no_running))
        return kn_fail("kn_batch_norm_init: '%s' is .cumulative, which is without .momentum and "
                       "not with .no_running; leave one of them out",
                       name);
    return true;
}

bool kn_running_stats(void *layer, int64_t channels, kn_dtype dtype, kn_device device)
{
    const kn_initializer zeros = KN_ZEROS_INIT, ones = KN_ONES_INIT;
    const kn_dtype stat =
        kn_dtype_in(((kn_module *)layer)->impl, dtype) == KN_F64 ? KN_F64 : KN_F32;
    ((kn_module *)layer)->impl->running_stats = true;
    return kn_declare_buffer(layer, "running_mean", stat, device, zeros, 1, &channels) &&
           kn_declare_buffer(layer, "running_var", stat, device, ones, 1, &channels) &&
           kn_declare_buffer(layer, "num_batches_tracked", KN_I64, device, zeros, KN_SCALAR);
}

bool kn_batch_norm_init_(kn_batch_norm *b, kn_module *parent, const char *name, int64_t channels,
                         kn_batch_norm_init_options o)
{
    const kn_initializer ones = KN_ONES_INIT;
    const batch_norm_state s = { o, NULL };
    if (!check_options(name, channels, &o) ||
        !kn_layer_begin(b, parent, name, batch_norm_forward, "batch_norm", &s, sizeof s))
        return false;
    b->base.impl->widens = true;
    if (!o.no_affine &&
        !kn_norm_params(b, channels, o.dtype, o.device, kn_init_or(o.weight, ones), true))
        return false;
    return o.no_running || kn_running_stats(b, channels, o.dtype, o.device);
}

/* ---- over ranks ------------------------------------------------------------------------------ */

/* All batch norms at and below top take comm, unless it is NULL; gives their number. */
static int sync_all(const kn_module_impl *top, kn_comm *comm)
{
    int count = 0;
    for (const kn_module_impl *m = top; m; m = kn_impl_next(m, top)) {
        if (m->forward.f1 != batch_norm_forward)
            continue;
        if (comm)
            ((batch_norm_state *)m->data)->sync = comm;
        count++;
    }
    return count;
}

bool kn_buffers_are_own(const kn_module_impl *m)
{
    const bool synced =
        m->forward.f1 == batch_norm_forward && ((const batch_norm_state *)m->data)->sync;
    return m->running_stats && !synced;
}

int kn_sync_batch_norm(void *module, kn_comm *comm)
{
    static const char what[] = "kn_sync_batch_norm";
    const kn_module_impl *m = kn_impl(module, what);
    if (!m || !kn_ok())
        return 0;
    if (sync_all(m, NULL) == 0)
        kn_fail("%s: there is no batch norm at or below '%s'; kn_module_print shows the classes",
                what, kn_module_shown(m));
    if (!kn_ok() || (!comm && !kn_comm_default(&comm, what)))
        return 0;
    comm = comm ? comm : kn_comm_self();
    /* Lent and given back at once, it is the same one for all batch norms of these ranks: they run
     * one after another, on the compute stream. */
    comm = comm ? kn_comm_lend(comm, kn_comm_size(comm), 0, "batch norm") : NULL;
    kn_comm_give_back(comm);
    kn_changed(); /* steps recorded so far gather nothing */
    return comm ? sync_all(m, comm) : 0;
}
