/* tests/fsdp/clip_value_test.c: clipping by value, alone and with a norm before or after it, as
 * torch.nn.utils.clip_grad_value_ does with means: a step of sgd is compared with plain arithmetic
 * on the whole gradients. Rank functions return a status. */
#include "tests/fsdp/net.h"
#include "tests/owned.h"

enum { MOST = 2048 };

typedef enum how { VALUE, NORM_VALUE, VALUE_NORM, VALUE_TWICE, HOWS } how;

/* Whole means of all trainable parameters' gradients (collective); returns their number. */
static int64_t whole_means(void *m, float *room)
{
    const kn_param *p;
    int n = kn_params(m, &p);
    int64_t count = 0;
    double scale = kn_grad_scale(m);
    for (int i = 0; i < n && kn_ok(); i++) {
        kn_tensor *g = p[i].trainable ? kn_param_grad(&p[i]) : NULL;
        if (g && kn_shard_read(m, i, g, room + count))
            count += p[i].numel;
    }
    for (int64_t k = 0; k < count; k++)
        room[k] = (float)((double)room[k] * scale);
    return count;
}

static bool read_all(void *m, float *room)
{
    const kn_param *p;
    int n = kn_params(m, &p);
    for (int i = 0; i < n && kn_ok(); i++)
        if (p[i].trainable && kn_param_read(m, i, room))
            room += p[i].numel;
    return kn_ok();
}

static double largest(const float *x, int64_t n)
{
    double most = 0;
    for (int64_t k = 0; k < n; k++)
        most = fmax(most, fabs((double)x[k]));
    return most;
}

/* Multiplies x so that its norm is at most max; returns the norm before. */
static double norm_to(float *x, int64_t n, double max)
{
    double sum = 0;
    for (int64_t k = 0; k < n; k++)
        sum += (double)x[k] * (double)x[k];
    double norm = sqrt(sum), factor = fmin(1, max / (norm + 1e-6));
    for (int64_t k = 0; k < n; k++)
        x[k] = (float)((double)x[k] * factor);
    return norm;
}

static int clamp_to(float *x, int64_t n, double value)
{
    int moved = 0;
    for (int64_t k = 0; k < n; k++) {
        moved += fabs((double)x[k]) > value;
        x[k] = (float)fmin(fmax((double)x[k], -value), value);
    }
    return moved;
}

/* Clips m's gradients, and x by plain arithmetic. */
static bool clip_both(void *m, how h, float *x, int64_t n)
{
    double value = 0.3 * largest(x, n), max = 0;
    int moved = 0;
    if (h == NORM_VALUE) {
        max = 0.02;
        norm_to(x, n, max);
        value = 0.3 * largest(x, n);
        if (!kn_clip_grad_norm(m, max))
            return false;
    }
    if (h == VALUE_TWICE && !kn_clip_grad_value(m, value * 2))
        return false;
    moved = clamp_to(x, n, value);
    if (!kn_clip_grad_value(m, value) || moved == 0 || moved == n)
        return kn_ok() && kn_fail("%d of %lld elements are clamped", moved, (long long)n);
    if (h != VALUE_NORM)
        return true;
    double got = kn_item(kn_clip_grad_norm(m, 0)), want = norm_to(x, n, 0.02);
    return kn_item(kn_clip_grad_norm(m, 0.02)) == got && fabs(got - want) < 1e-5 * want;
}

RANK_TEST(clip_value, follows_plain_arithmetic_in_every_way_of_sharding, IN_ALL_WAYS)
{
    static _Thread_local float mean[MOST], before[MOST], after[MOST];
    for (int k = 0; k < HOWS * 2; k++) {
        IN_SCOPE;
        NET_IN_WAY(m, world, arg);
        OWNED_SCALER kn_scaler *s = k % 2 ? kn_scaler_new(&m, .init_scale = 64) : NULL;
        OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1);
        for (int a = 0; a < 2; a++) {
            kn_tensor *loss = net_loss(&m, a * 4 + kn_rank(world));
            KN_CHECK(kn_backward(s ? kn_scale_loss(s, loss) : loss));
        }
        int64_t n = whole_means(&m, mean);
        KN_CHECK(read_all(&m, before) && clip_both(&m, k / 2, mean, n), "way %d", k);
        KN_CHECK(s ? kn_scaler_step(s, o) : kn_step(o));
        KN_CHECK(read_all(&m, after));
        for (int64_t i = 0; i < n; i++) {
            double want = (double)before[i] - (double)mean[i];
            KN_CHECK(fabs((double)after[i] - want) < 1e-6 * (1 + fabs(want)),
                     "way %d, element %lld: %.9g, not %.9g", k, (long long)i, (double)after[i],
                     want);
        }
        /* the next step is without it */
        KN_CHECK(!s || kn_scaler_get(s).skipped == 0);
    }
}

/* ---- what it must not hide, and wrong use ---------------------------------------------------- */

/* An overflow that the clamp would make finite is still one: the step is skipped on all ranks. */
static void overflows(kn_comm *world, void *arg)
{
    static _Thread_local float before[MOST], after[MOST];
    int last = kn_comm_size(world) - 1;
    NET_IN_WAY(m, world, arg);
    OWNED_SCALER kn_scaler *s = kn_scaler_new(&m, .init_scale = 64);
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1);
    for (int norm = 0; norm < 2; norm++) {
        IN_SCOPE;
        KN_CHECK(kn_backward(kn_scale_loss(s, net_loss(&m, 0))) && read_all(&m, before));
        const kn_param *p;
        kn_params(&m, &p);
        kn_tensor *g = kn_param_grad(&p[0]);
        if (kn_rank(world) == last && kn_numel(g) > 0)
            ((float *)kn_array_of(g).data)[0] = INFINITY;
        KN_CHECK(kn_clip_grad_value(&m, 0.1) && (!norm || kn_clip_grad_norm(&m, 1)));
        KN_CHECK(kn_scaler_step(s, o) && kn_scaler_get(s).skipped == norm + 1);
        KN_CHECK(read_all(&m, after) && memcmp(before, after, sizeof before) == 0);
    }
}

KN_TEST(clip_value, an_overflow_is_seen_behind_the_clamp)
{
    by_processes("2", overflows, (void *)&ways[0]);
    by_processes("2", overflows, (void *)&ways[3]);
}

KN_TEST(clip_value, wrong_use_is_a_sentence)
{
    NET_WHOLE(m);
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1);
    const double bad[] = { 0, -1, NAN };
    for (int i = 0; i < 3; i++) {
        KN_CHECK(!kn_clip_grad_value(&m, bad[i]) && strstr(kn_error(), "must be above 0"), "%g",
                 bad[i]);
        kn_clear_error();
    }
    KN_CHECK(net_backward(&m, 0) && kn_clip_grad_value(&m, 0.1) && net_backward(&m, 1));
    REFUSED(kn_step(o), "a later backward added to them");
    KN_CHECK(kn_unclip_grads(&m) && kn_clip_grad_norm(&m, 1) != NULL);
    REFUSED(kn_clip_grad_value(&m.fc1, 0.1), "name that one");
    KN_CHECK(kn_step(o));
}
