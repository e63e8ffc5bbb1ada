/* tests/optim/plain.h: a net of two layers, and steps of optimizers beside plain loops in double
 * precision. */
#ifndef KNAP_TESTS_PLAIN_H
#define KNAP_TESTS_PLAIN_H

#include "nn/layers.h"
#include "nn/nn_internal.h"
#include "optim/optim.h"
#include "tests/owned.h"

typedef struct two_layers {
    kn_module base;
    kn_linear fc, out;
} two_layers;

static inline kn_tensor *two_layers_forward(kn_module *self, kn_tensor *x)
{
    two_layers *m = (two_layers *)self;
    return kn_call(&m->out, kn_tanh(kn_call(&m->fc, x)));
}

static inline void build(two_layers *m, kn_dtype t)
{
    kn_module_init(&m->base, two_layers_forward);
    kn_linear_init(&m->fc, &m->base, "fc", 3, 4, .dtype = t);
    kn_linear_init(&m->out, &m->base, "out", 4, 2, .dtype = t);
    kn_materialize(m, KN_CPU, 7);
    KN_CHECK_OK();
}

static inline bool backward(two_layers *m, kn_dtype t, int batch)
{
    IN_SCOPE;
    kn_tensor *x = kn_randn(t, KN_CPU, 5, (uint64_t)batch, KN_SHAPE(6, 3));
    kn_tensor *y = kn_randn(t, KN_CPU, 6, (uint64_t)batch, KN_SHAPE(6, 2));
    bool ok = kn_backward(kn_mse_loss(kn_call(m, x), y));
    return ok;
}

#define PARAMS 4
#define MOST   12

static inline void read_params(two_layers *m, bool grads, double v[PARAMS][MOST])
{
    const kn_param *p;
    KN_CHECK(kn_params(m, &p) == PARAMS);
    IN_SCOPE;
    for (int i = 0; i < PARAMS; i++) {
        kn_tensor *t = grads ? kn_param_grad(&p[i]) : p[i].master;
        KN_CHECK(t && kn_numel(t) <= MOST && kn_numel(t) == p[i].numel);
        kn_tensor *d = kn_cast(kn_detach(t), KN_F64);
        KN_CHECK(kn_to_host(d, v[i], (size_t)kn_numel(d) * sizeof(double)));
    }
}

/* A step of o takes factor times its gradient from each element. */
static inline void step_by(two_layers *m, kn_optim *o, double factor, double tol)
{
    static double g[PARAMS][MOST], p[PARAMS][MOST], got[PARAMS][MOST];
    read_params(m, true, g);
    read_params(m, false, p);
    KN_CHECK(kn_step(o));
    read_params(m, false, got);
    for (int i = 0; i < PARAMS; i++)
        for (int k = 0; k < MOST; k++)
            KN_CHECK(fabs(got[i][k] - (p[i][k] - factor * g[i][k])) < tol, "%d[%d]: %.12g", i, k,
                     got[i][k]);
}

/* Reference: the step of one element in plain C. */
typedef struct rule {
    bool adam, lion, nesterov, l2, amsgrad, maximize;
    double lr, beta1, beta2, eps, momentum, dampening;
    double decay[PARAMS], lr_mul[PARAMS];
} rule;

static inline void plain_step(const rule *r, int step, double scale, double p[PARAMS][MOST],
                              double g[PARAMS][MOST], double m[PARAMS][MOST],
                              double v[PARAMS][MOST])
{
    for (int i = 0; i < PARAMS; i++)
        for (int k = 0; k < MOST; k++) {
            double grad = g[i][k] * (r->maximize ? -scale : scale), lr = r->lr * r->lr_mul[i];
            if (r->lion) {
                double c = r->beta1 * m[i][k] + (1 - r->beta1) * grad;
                m[i][k] = r->beta2 * m[i][k] + (1 - r->beta2) * grad;
                p[i][k] -= lr * ((c > 0) - (c < 0) + r->decay[i] * p[i][k]);
                continue;
            }
            if (r->adam) {
                static double most[PARAMS][MOST];
                grad += r->l2 ? r->decay[i] * p[i][k] : 0;
                m[i][k] = r->beta1 * m[i][k] + (1 - r->beta1) * grad;
                v[i][k] = r->beta2 * v[i][k] + (1 - r->beta2) * grad * grad;
                most[i][k] = step == 1 ? v[i][k] : fmax(most[i][k], v[i][k]);
                double mh = m[i][k] / (1 - pow(r->beta1, step)),
                       vh = (r->amsgrad ? most[i][k] : v[i][k]) / (1 - pow(r->beta2, step));
                p[i][k] -= r->l2 ? 0 : lr * r->decay[i] * p[i][k];
                p[i][k] -= lr * mh / (sqrt(vh) + r->eps);
                continue;
            }
            grad += r->decay[i] * p[i][k];
            if (r->momentum != 0) {
                m[i][k] = step == 1 ? grad : r->momentum * m[i][k] + (1 - r->dampening) * grad;
                grad = r->nesterov ? grad + r->momentum * m[i][k] : m[i][k];
            }
            p[i][k] -= lr * grad;
        }
}

/* Five steps of o, of micro batches each, beside the plain loop. */
static inline void follow(two_layers *m, kn_optim *o, rule r, kn_dtype t, int micro, double tol)
{
    static double p[PARAMS][MOST], g[PARAMS][MOST], m1[PARAMS][MOST], v1[PARAMS][MOST];
    static double got[PARAMS][MOST];
    memset(m1, 0, sizeof m1);
    memset(v1, 0, sizeof v1);
    KN_CHECK_OK();
    memset(p, 0, sizeof p);
    memset(g, 0, sizeof g);
    memset(got, 0, sizeof got);
    read_params(m, false, p);
    for (int step = 1; step <= 5; step++) {
        for (int b = 0; b < micro; b++)
            KN_CHECK(backward(m, t, 10 * step + b));
        read_params(m, true, g);
        KN_CHECK(fabs(kn_grad_scale(m) * micro - 1) < 1e-12);
        KN_CHECK(kn_step(o));
        plain_step(&r, step, 1.0 / micro, p, g, m1, v1);
        read_params(m, false, got);
        for (int i = 0; i < PARAMS; i++)
            for (int k = 0; k < MOST; k++)
                KN_CHECK(fabs(got[i][k] - p[i][k]) <= tol,
                         "step %d: parameter %d[%d] is %.12g, should be %.12g", step, i, k,
                         got[i][k], p[i][k]);
        const kn_param *list;
        kn_params(m, &list);
        KN_CHECK(!kn_param_grad(&list[0]), "the step consumes the gradients");
    }
    KN_CHECK(kn_optim_steps(o) == 5);
    kn_optim_free(o);
    kn_module_free(m);
    KN_CHECK_OK();
}

static inline rule adam_rule(double lr, double decay)
{
    rule r = { .adam = true, .lr = lr, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8 };
    for (int i = 0; i < PARAMS; i++) {
        r.decay[i] = decay;
        r.lr_mul[i] = 1;
    }
    return r;
}

static inline rule sgd_rule(double lr, double momentum, double dampening, bool nesterov,
                            double decay)
{
    rule r = adam_rule(lr, decay);
    r.adam = false;
    r.momentum = momentum;
    r.dampening = dampening;
    r.nesterov = nesterov;
    return r;
}

#endif
