/* nn/layers.c: linear, embedding, norms, dropout. A layer is a module that keeps its settings as
 * the module's data and finds its parameters by their order. */
#include "nn/edit.h"
#include "nn/layers.h"
#include "nn/nn_internal.h"
#include <math.h>

bool kn_layer_place(void *m, kn_module *parent, const char *name, const void *settings, size_t size)
{
    if (kn_module_set_data(m, settings, size) && (!parent || kn_module_add(parent, name, m)))
        return true;
    kn_module_free(m);
    return false;
}

bool kn_layer_begin(void *m, kn_module *parent, const char *name, kn_forward1 f,
                    const char *class_name, const void *settings, size_t size)
{
    return kn_module_init_(m, f, NULL, class_name) &&
           kn_layer_place(m, parent, name, settings, size);
}

kn_tensor *kn_layer_param(const kn_module *m, int i)
{
    return i < m->impl->params ? m->impl->param[i].tensor : NULL;
}

/* ---- linear ---------------------------------------------------------------------------------- */

static kn_tensor *linear_forward(kn_module *self, kn_tensor *x)
{
    const kn_linear_init_options *o = kn_module_data(self);
    return kn_linear(x, kn_layer_param(self, 0), kn_layer_param(self, 1), o->in_out);
}

/* For a weight [in, out]: fan_in and fan_out change places. */
static kn_initializer transposed(kn_initializer i)
{
    if (i.kind == KN_INIT_KAIMING_NORMAL || i.kind == KN_INIT_KAIMING_UNIFORM)
        i.b = i.b == 0 ? 1 : i.b == 1 ? 0 : i.b;
    return i;
}

bool kn_linear_init_(kn_linear *l, kn_module *parent, const char *name, int64_t in, int64_t out,
                     kn_linear_init_options o)
{
    if (in < 1 || out < 1)
        return kn_fail("kn_linear_init: '%s' would be %lld -> %lld; both must be at least 1", name,
                       (long long)in, (long long)out);
    double bound = 1 / sqrt((double)in);
    kn_initializer d = KN_UNIFORM_INIT(-bound, bound);
    if (!kn_layer_begin(l, parent, name, linear_forward, "linear", &o, sizeof o))
        return false;
    int64_t shape[2] = { o.in_out ? in : out, o.in_out ? out : in };
    if (o.in_out) /* dim 0 isn't out, as initializers by fans have it */
        o.weight = transposed(o.weight);
    return kn_parameter(l, "weight", o.dtype, o.device, kn_init_or(o.weight, d), 2, shape) &&
           (o.no_bias ||
            kn_parameter(l, "bias", o.dtype, o.device, kn_init_or(o.bias, d), 1, &out));
}

/* ---- embedding ------------------------------------------------------------------------------- */

static kn_tensor *embedding_forward(kn_module *self, kn_tensor *ids)
{
    const kn_embedding_init_options *o = kn_module_data(self);
    return kn_embedding(kn_layer_param(self, 0), ids, .padding_idx = o->padding_idx);
}

/* in: ids, and offsets and weights or NULL. */
static kn_values embedding_bag_forward(kn_module *self, kn_values in, const void *arg)
{
    const kn_embedding_bag_init_options *o = kn_module_data(self);
    kn_tensor *y = kn_embedding_bag(
        kn_layer_param(self, 0), in.v[0], .offsets = in.n > 1 ? in.v[1] : NULL,
        .per_sample_weights = in.n > 2 ? in.v[2] : NULL, .mode = o->mode,
        .padding_idx = o->padding_idx, .include_last_offset = o->include_last_offset);
    (void)arg;
    return KN_VALUES(y);
}

static bool table_fits(const char *what, const char *name, int64_t count, int64_t dim,
                       int64_t *padding)
{
    int64_t row = *padding == KN_ZERO ? 0 : *padding < 0 ? *padding + count : *padding;
    if (count < 1 || dim < 1)
        return kn_fail("%s: '%s' would be [%lld, %lld]; both must be at least 1", what, name,
                       (long long)count, (long long)dim);
    if (*padding != 0 && (row < 0 || row >= count))
        return kn_fail("%s: .padding_idx of '%s' is %lld; the table has %lld rows (KN_ZERO: row 0)",
                       what, name, (long long)*padding, (long long)count);
    *padding = *padding == 0 ? -1 : row;
    return true;
}

/* The weight of m, an initialised layer; padding: a row of zeros, or -1. */
static bool add_table(void *m, int64_t count, int64_t dim, kn_dtype dtype, kn_device device,
                      kn_initializer init, int64_t padding, bool sparse)
{
    kn_tensor *w = kn_parameter(m, "weight", dtype, device, kn_init_or(init, KN_NORMAL_INIT(1)),
                                KN_SHAPE(count, dim));
    if (!w)
        return false;
    kn_initializer *to = &((kn_module *)m)->impl->param[0].init;
    to->_blank = padding < 0 ? 0 : padding * dim;
    to->_blanks = padding < 0 ? 0 : dim;
    return !sparse || kn_keep_rows(w);
}

bool kn_embedding_init_(kn_embedding *e, kn_module *parent, const char *name, int64_t count,
                        int64_t dim, kn_embedding_init_options o)
{
    int64_t padding = o.padding_idx;
    return table_fits("kn_embedding_init", name, count, dim, &padding) &&
           kn_layer_begin(e, parent, name, embedding_forward, "embedding", &o, sizeof o) &&
           add_table(e, count, dim, o.dtype, o.device, o.weight, padding, o.sparse);
}

bool kn_embedding_bag_init_(kn_embedding_bag *e, kn_module *parent, const char *name, int64_t count,
                            int64_t dim, kn_embedding_bag_init_options o)
{
    int64_t padding = o.padding_idx;
    return table_fits("kn_embedding_bag_init", name, count, dim, &padding) &&
           kn_module_init_((kn_module *)e, NULL, embedding_bag_forward, "embedding_bag") &&
           kn_layer_place(e, parent, name, &o, sizeof o) &&
           add_table(e, count, dim, o.dtype, o.device, o.weight, padding, o.sparse);
}

/* ---- norms ----------------------------------------------------------------------------------- */

typedef struct norm_state {
    double eps;
    int64_t dim;
    bool rms;
} norm_state;

/* x has the layer's last dim, also where no weight says so. */
static bool fits(const kn_module *self, const kn_tensor *x)
{
    const norm_state *s = kn_module_data(self);
    return !x || x->ndim < 1 || x->shape[x->ndim - 1] == s->dim || kn_layer_param(self, 0) ||
           kn_fail("%s: the layer is for a last dim of %lld, x is %s", kn_module_class(self),
                   (long long)s->dim, KN_SHOWN(x));
}

static kn_tensor *norm_forward(kn_module *self, kn_tensor *x)
{
    const norm_state *s = kn_module_data(self);
    kn_tensor *w = kn_layer_param(self, 0), *b = kn_layer_param(self, 1);
    if (!fits(self, x))
        return NULL;
    return s->rms ? kn_rms_norm(x, w, s->eps) : kn_layer_norm(x, w, b, s->eps);
}

/* in: x and what is added to it; the norm, and the sum. */
static kn_values norm_of_sum(kn_module *self, kn_values in, const void *arg)
{
    const norm_state *s = kn_module_data(self);
    kn_tensor *w = kn_layer_param(self, 0), *b = kn_layer_param(self, 1), *sum, *y;
    (void)arg;
    if (!fits(self, in.v[0]))
        return (kn_values){ 0 };
    y = s->rms ? kn_add_rms_norm(in.v[0], in.v[1], w, s->eps, &sum)
               : kn_add_layer_norm(in.v[0], in.v[1], w, b, s->eps, &sum);
    return KN_VALUES(y, sum);
}

/* Whether the norm of the sum of x and add is one operation: m is a norm, and its unit wouldn't
 * convert these two and the sum, as that is only for what is normed. */
static bool at_once(const kn_module_impl *m, const kn_tensor *x, const kn_tensor *add)
{
    const kn_unit_hooks *u = m->unit;
    return m->forward.f1 == norm_forward &&
           !(u && ((x && u->converts(u->unit, x)) || (add && u->converts(u->unit, add))));
}

kn_tensor *kn_add_norm(void *module, kn_tensor *x, kn_tensor *add, kn_tensor **sum)
{
    if (!sum)
        return kn_fail_null("kn_add_norm: the place for the sum is NULL");
    *sum = NULL;
    const kn_module_impl *m = kn_module_in_place(module, "kn_add_norm");
    if (!m || !kn_ok())
        return NULL;
    if (at_once(m, x, add)) {
        const kn_values out = kn_call_method_n(m->self, norm_of_sum, KN_VALUES(x, add), NULL, 0);
        *sum = out.v[1];
        return out.v[0];
    }
    kn_tensor *added = kn_add(x, add), *y = kn_call(module, added);
    *sum = y ? added : NULL;
    return y;
}

bool kn_norm_fits(const char *class_name, const char *name, int64_t channels, double eps)
{
    if (channels < 1)
        return kn_fail("kn_%s_init: '%s' has %lld channels; at least 1 is needed", class_name, name,
                       (long long)channels);
    return (kn_value_or(eps, 1e-5) >= 0 && isfinite(eps)) ||
           kn_fail("kn_%s_init: '%s' has eps %g, should be at least 0 (KN_ZERO for 0)", class_name,
                   name, eps);
}

bool kn_norm_params(void *m, int64_t channels, kn_dtype dtype, kn_device device,
                    kn_initializer weight, bool bias)
{
    return kn_parameter(m, "weight", dtype, device, weight, 1, &channels) &&
           (!bias || kn_parameter(m, "bias", dtype, device, KN_ZEROS_INIT, 1, &channels));
}

static bool norm_init(void *m, kn_module *parent, const char *name, int64_t dim,
                      kn_norm_init_options o, const char *class_name, bool rms)
{
    const norm_state s = { o.eps, dim, rms };
    return kn_norm_fits(class_name, name, dim, o.eps) &&
           kn_layer_begin(m, parent, name, norm_forward, class_name, &s, sizeof s) &&
           (o.no_affine ||
            kn_norm_params(m, dim, o.dtype, o.device, KN_ONES_INIT, !rms && !o.no_bias));
}

bool kn_layer_norm_init_(kn_layer_norm *l, kn_module *parent, const char *name, int64_t dim,
                         kn_norm_init_options o)
{
    return norm_init(l, parent, name, dim, o, "layer_norm", false);
}

bool kn_rms_norm_init_(kn_rms_norm *l, kn_module *parent, const char *name, int64_t dim,
                       kn_norm_init_options o)
{
    return norm_init(l, parent, name, dim, o, "rms_norm", true);
}

/* ---- dropout: only while training ------------------------------------------------------------ */

static kn_tensor *dropout_forward(kn_module *self, kn_tensor *x)
{
    const double *p = kn_module_data(self);
    return kn_training(self) ? kn_dropout(x, *p) : x;
}

bool kn_dropout_init(kn_dropout *d, kn_module *parent, const char *name, double p)
{
    if (!(p >= 0 && p < 1))
        return kn_fail("kn_dropout_init: '%s' has p %g, should lie in [0, 1)", name, p);
    return kn_layer_begin(d, parent, name, dropout_forward, "dropout", &p, sizeof p);
}
