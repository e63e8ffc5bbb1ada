/* autograd/distributions.c: normal, categorical and Bernoulli distributions, made of operations. */
#include "autograd/distributions.h"
#include "autograd/autograd.h"
#include "autograd/losses.h"
#include <math.h>

static const double LOG_2PI = 1.8378770664093454836;

typedef struct call {
    kn_scope scope;
    kn_dtype dtype;
} call;

/* Checks n float arguments, which become wide ones, in a scope; NULL where one is wrong: then an
 * error stands, and operations give NULL. */
static call begin(const char *op, int n, kn_tensor **in)
{
    int ndim = 0;
    int64_t shape[KN_MAX_DIMS];
    call c = { kn_scope_begin(), KN_F32 };
    bool ok = kn_ok();
    for (int i = 0; i < n && ok; i++) {
        ok = kn_check(in[i], op) && kn_loss_same_device(op, in[0], in[i]);
        if (ok && (!kn_dtype_is_float(in[i]->dtype) || in[i]->dtype != in[0]->dtype ||
                   !kn_broadcast_shape(ndim, shape, in[i]->ndim, in[i]->shape, &ndim, shape)))
            ok = kn_fail("%s: argument %d is %s, the first %s; they need one float dtype and "
                         "shapes that broadcast",
                         op, i + 1, KN_SHOWN(in[i]), KN_SHOWN(in[0]));
    }
    c.dtype = ok ? in[0]->dtype : KN_F32;
    for (int i = 0; i < n; i++)
        in[i] = ok ? kn_wide(in[i]) : NULL;
    return c;
}

static kn_tensor *end(call c, kn_tensor *y)
{
    y = kn_cast(y, c.dtype);
    kn_scope_end_except(c.scope, &y, 1);
    return y;
}

/* ---- normal ---------------------------------------------------------------------------------- */

kn_tensor *kn_normal_log_prob(kn_tensor *mean, kn_tensor *std, kn_tensor *x)
{
    kn_tensor *in[] = { mean, std, x };
    call c = begin("normal_log_prob", 3, in);
    kn_tensor *far = kn_div(kn_sub(in[2], in[0]), in[1]);
    kn_tensor *y = kn_sub(kn_scale(kn_mul(far, far), -0.5), kn_log(in[1]));
    return end(c, kn_add_scalar(y, -0.5 * LOG_2PI));
}

static kn_tensor *drawn(const char *op, kn_tensor *mean, kn_tensor *std)
{
    kn_tensor *in[] = { mean, std };
    call c = begin(op, 2, in);
    kn_tensor *both = kn_add(kn_detach(in[0]), kn_detach(in[1])); /* the shape */
    kn_tensor *noise = both ? kn_randn_like(both) : NULL;
    return end(c, kn_add(in[0], kn_mul(in[1], noise)));
}

kn_tensor *kn_normal_sample(kn_tensor *mean, kn_tensor *std)
{
    kn_tensor *y = drawn("normal_sample", mean, std);
    return kn_detach(y);
}

kn_tensor *kn_normal_rsample(kn_tensor *mean, kn_tensor *std)
{
    return drawn("normal_rsample", mean, std);
}

kn_tensor *kn_normal_entropy(kn_tensor *std)
{
    call c = begin("normal_entropy", 1, &std);
    return end(c, kn_add_scalar(kn_log(std), 0.5 + 0.5 * LOG_2PI));
}

/* (r^2 + d^2 - 1) / 2 - log r with r = p_std / q_std, d = (p_mean - q_mean) / q_std */
kn_tensor *kn_normal_kl(kn_tensor *p_mean, kn_tensor *p_std, kn_tensor *q_mean, kn_tensor *q_std)
{
    kn_tensor *in[] = { p_mean, p_std, q_mean, q_std };
    call c = begin("normal_kl", 4, in);
    kn_tensor *r = kn_div(in[1], in[3]), *d = kn_div(kn_sub(in[0], in[2]), in[3]);
    kn_tensor *squares = kn_add_scalar(kn_add(kn_mul(r, r), kn_mul(d, d)), -1);
    return end(c, kn_sub(kn_scale(squares, 0.5), kn_log(r)));
}

/* ---- categorical ----------------------------------------------------------------------------- */

/* The sum of p times term over the categories; where p is 0, 0. */
static kn_tensor *expected(kn_tensor *logits, kn_tensor *term)
{
    kn_tensor *p = kn_softmax(logits), *none = kn_eq(p, kn_number_like(p, 0));
    return kn_sum(kn_mul(p, kn_masked_fill(term, none, 0)), 1, (int64_t[]){ -1 }, false);
}

kn_tensor *kn_categorical_log_prob(kn_tensor *logits, kn_tensor *index)
{
    const char *op = "categorical_log_prob";
    if (!kn_ok() || !kn_check(logits, op) || !kn_check(index, op) ||
        !kn_indices_are_whole(op, index))
        return NULL;
    if (logits->ndim < 1 || !kn_has_shape(index, logits->ndim - 1, logits->shape))
        return kn_fail_null("%s: logits are %s, the index %s; needs logits[..., K], an index [...]",
                            op, KN_SHOWN(logits), KN_SHOWN(index));
    call c = begin(op, 1, &logits);
    kn_tensor *y = kn_gather(kn_log_softmax(logits), -1, kn_unsqueeze(index, -1));
    return end(c, kn_squeeze(y, 1, (int64_t[]){ -1 }));
}

kn_tensor *kn_categorical_sample(kn_tensor *logits)
{
    call c = begin("categorical_sample", 1, &logits);
    kn_tensor *y = kn_multinomial(kn_softmax(kn_detach(logits)), 1, true);
    c.dtype = KN_I64;
    return end(c, kn_squeeze(y, 1, (int64_t[]){ -1 }));
}

kn_tensor *kn_categorical_entropy(kn_tensor *logits)
{
    call c = begin("categorical_entropy", 1, &logits);
    return end(c, kn_neg(expected(logits, kn_log_softmax(logits))));
}

kn_tensor *kn_categorical_kl(kn_tensor *p_logits, kn_tensor *q_logits)
{
    kn_tensor *in[] = { p_logits, q_logits };
    call c = begin("categorical_kl", 2, in);
    return end(c, expected(in[0], kn_sub(kn_log_softmax(in[0]), kn_log_softmax(in[1]))));
}

/* ---- Bernoulli ------------------------------------------------------------------------------- */

/* yes x + no (1 - x) */
static kn_tensor *mixed(kn_tensor *x, kn_tensor *yes, kn_tensor *no)
{
    return kn_add(kn_mul(x, yes), kn_mul(kn_add_scalar(kn_neg(x), 1), no));
}

kn_tensor *kn_bernoulli_log_prob(kn_tensor *logits, kn_tensor *x)
{
    kn_tensor *in[] = { logits, x };
    call c = begin("bernoulli_log_prob", 2, in);
    return end(c, mixed(in[1], kn_logsigmoid(in[0]), kn_logsigmoid(kn_neg(in[0]))));
}

kn_tensor *kn_bernoulli_sample(kn_tensor *logits)
{
    call c = begin("bernoulli_sample", 1, &logits);
    return end(c, kn_bernoulli(kn_sigmoid(kn_detach(logits))));
}

kn_tensor *kn_bernoulli_entropy(kn_tensor *logits)
{
    call c = begin("bernoulli_entropy", 1, &logits);
    return end(
        c, kn_neg(mixed(kn_sigmoid(logits), kn_logsigmoid(logits), kn_logsigmoid(kn_neg(logits)))));
}

kn_tensor *kn_bernoulli_kl(kn_tensor *p_logits, kn_tensor *q_logits)
{
    kn_tensor *in[] = { p_logits, q_logits };
    call c = begin("bernoulli_kl", 2, in);
    kn_tensor *yes = kn_sub(kn_logsigmoid(in[0]), kn_logsigmoid(in[1]));
    kn_tensor *no = kn_sub(kn_logsigmoid(kn_neg(in[0])), kn_logsigmoid(kn_neg(in[1])));
    return end(c, mixed(kn_sigmoid(in[0]), yes, no));
}
