/* optim/adagrad.c: AdaGrad (Duchi, Hazan, Singer, JMLR 2011), and with one number a row of a table
 * (row-wise AdaGrad of FBGEMM). */
#include "optim/optim_internal.h"
#include <math.h>

typedef struct numbers {
    double lr_decay, eps;
    bool row_wise;
} numbers;

/* s += g^2, p -= rate g / (sqrt(s) + eps); a row's g^2 are averaged where it has one s. */
static bool update(const kn_optim_part *p, void *arg)
{
    const numbers *o = arg;
    const double rate = p->lr / (1 + (double)(p->step - 1) * o->lr_decay);
    kn_tensor *g = p->grad, *s = p->state[0];
    if (p->weight_decay != 0)
        g = kn_add(g, kn_scale(p->param, p->weight_decay));
    kn_tensor *squares = kn_mul(g, g);
    const bool rows = o->row_wise && p->row > 0;
    const int64_t shape[2] = { kn_numel(s), p->row }, column[2] = { kn_numel(s), 1 };
    if (rows)
        squares = kn_mean(kn_view(squares, 2, shape), 1, (int64_t[]){ 1 }, false);
    if (!kn_copy_(s, kn_add(s, squares)))
        return false;
    kn_tensor *size = kn_add_scalar(kn_sqrt(s), o->eps);
    if (rows)
        size = kn_reshape(kn_expand(kn_view(size, 2, column), 2, shape), 1,
                          (int64_t[]){ kn_numel(g) });
    return kn_copy_(p->param, kn_sub(p->param, kn_scale(kn_div(g, size), rate)));
}

kn_optim *kn_adagrad_(void *module, kn_adagrad_options o)
{
    numbers n = { kn_value_or(o.lr_decay, 0), kn_value_or(o.eps, 1e-10), o.row_wise };
    if (!(n.lr_decay >= 0) || !isfinite(n.lr_decay) || !(n.eps >= 0) || !isfinite(n.eps))
        return kn_fail_null("adagrad: .lr_decay is %g and .eps %g; neither may be below 0",
                            n.lr_decay, n.eps);
    kn_own_optim_options own = {
        .update = update, .arg = &n, .name = "kn_adagrad", .state = { "sum" }
    };
    return kn_own_optim_with(module, own, KN_OPTIM_GROUPS(o, 0), sizeof n, o.row_wise);
}
