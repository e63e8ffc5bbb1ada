/* tests/optim/tables_test.c: tables whose gradients stay rows, on one rank: the rows are those of
 * the whole gradient, steps change them alone, and what else has a say about gradients. */
#include "nn/layers.h"
#include "optim/optim.h"
#include "tests/kn_test.h"
#include "tests/owned.h"
#include <string.h>

enum { ROWS = 9, DIM = 3, IDS = 8 };

typedef struct net {
    kn_module base;
    kn_embedding table;
    kn_linear fc;
} net;

/* ids [n] -> (n, 2), with the table used twice */
static kn_tensor *net_forward(kn_module *self, kn_tensor *ids)
{
    net *m = (net *)self;
    kn_tensor *y = kn_call(&m->table, ids);
    kn_tensor *again = kn_call(&m->table, kn_slice(ids, 0, 0, 3));
    return kn_add(kn_call(&m->fc, kn_tanh(y)), mean_of(kn_mul(again, again)));
}

static void build(net *m, kn_dtype t, bool sparse, int64_t padding)
{
    *m = (net){ 0 };
    kn_module_init(&m->base, net_forward);
    kn_embedding_init(&m->table, &m->base, "table", ROWS, DIM, .dtype = t, .sparse = sparse,
                      .padding_idx = padding);
    kn_linear_init(&m->fc, &m->base, "fc", DIM, 2, .dtype = t);
    kn_materialize(m, KN_CPU, 7);
    KN_CHECK_OK();
}

static kn_tensor *weight(net *m)
{
    return kn_module_param(&m->table, "weight");
}

static bool backward(net *m, int batch, kn_scaler *scaler)
{
    static const int64_t ids[3][IDS] = { { 4, 1, 4, 7, 1, 4, 0, 7 },
                                         { 7, 3, 3, 0, 8, 8, 3, 3 },
                                         { 0, 0, 4, 0, 0, 4, 0, 4 } };
    IN_SCOPE;
    kn_tensor *y = kn_call(m, kn_from(KN_I64, KN_CPU, ids[batch % 3], KN_SHAPE(IDS)));
    kn_tensor *loss = mean_of(kn_mul(y, y));
    return kn_backward(scaler ? kn_scale_loss(scaler, loss) : loss);
}

/* The largest difference. */
static double apart(kn_tensor *a, kn_tensor *b)
{
    IN_SCOPE;
    kn_tensor *d = kn_abs(kn_sub(kn_cast(kn_detach(a), KN_F64), kn_cast(kn_detach(b), KN_F64)));
    return kn_item(kn_amax(d, 0, NULL, false));
}

static double apart_nets(net *a, net *b)
{
    const kn_param *p, *q;
    double most = 0;
    int n = kn_params(a, &p);
    KN_CHECK(n == 3 && kn_params(b, &q) == n);
    for (int i = 0; i < n; i++)
        most = fmax(most, apart(p[i].master, q[i].master));
    KN_CHECK_OK();
    return most;
}

/* The rows of w's gradient as a whole one, f64. */
static kn_tensor *whole_grad(kn_tensor *w)
{
    kn_tensor *zero = kn_zeros(KN_F64, KN_CPU, KN_SHAPE(ROWS, DIM));
    return kn_index_add(zero, 0, kn_grad_rows(w), kn_cast(kn_grad_values(w), KN_F64));
}

KN_TEST(tables, rows_are_those_of_the_whole_gradient)
{
    const kn_dtype types[] = { KN_F64, KN_F32, KN_BF16, KN_F16 };
    for (int i = 0; i < 8; i++) {
        const kn_dtype t = types[i % 4];
        const int64_t padding = i < 4 ? 0 : 4;
        OWNED_MODULE net a, b;
        build(&a, t, true, padding);
        build(&b, t, false, padding);
        KN_CHECK(apart_nets(&a, &b) == 0);
        for (int micro = 0; micro < 2; micro++)
            KN_CHECK(backward(&a, micro, NULL) && backward(&b, micro, NULL));
        IN_SCOPE;
        kn_tensor *ids = kn_grad_rows(weight(&a));
        int64_t host[ROWS], want[] = { 0, 1, 3, 4, 7, 8 }, without[] = { 0, 1, 3, 7, 8 };
        const int n = padding ? 5 : 6;
        KN_CHECK(kn_numel(ids) == n && kn_to_host(ids, host, (size_t)n * sizeof *host) &&
                 memcmp(host, padding ? without : want, (size_t)n * sizeof *host) == 0);
        KN_CHECK(kn_dtype_of(kn_grad_values(weight(&a))) == (t == KN_F64 ? KN_F64 : KN_F32));
        const double off = apart(whole_grad(weight(&a)), kn_grad(weight(&b)));
        KN_CHECK(off <= (t == KN_F64   ? 1e-15
                         : t == KN_F32 ? 1e-7
                                       : 0.02),
                 "%s: %g", kn_dtype_name(t), off);
        kn_zero_grad(&a);
        KN_CHECK(!kn_grad_rows(weight(&a)) && !kn_grad_values(weight(&a)));
        KN_CHECK_OK();
    }
}

/* A table of one's own, in another order of memory. */
KN_TEST(tables, a_leaf_that_is_turned)
{
    IN_SCOPE;
    const int64_t at[] = { 3, 0, 3 };
    kn_tensor *ids = kn_from(KN_I64, KN_CPU, at, KN_SHAPE(3));
    kn_tensor *w = kn_transpose(kn_randn(KN_F32, KN_CPU, 1, 2, KN_SHAPE(DIM, 5)), 0, 1);
    kn_tensor *want = kn_index_select(w, 0, ids);
    KN_CHECK(kn_keep_rows(kn_require_grad(w, true)));
    kn_tensor *y = kn_embedding(w, ids);
    KN_CHECK(y && apart(y, want) == 0);
    KN_CHECK(kn_backward(sum_of(y)) && kn_numel(kn_grad_rows(w)) == 2);
}

/* A padding row begins as zeros and stays so. */
KN_TEST(tables, a_padding_row_is_zeros)
{
    const int64_t given[] = { KN_ZERO, 4, -1 }, row[] = { 0, 4, ROWS - 1 };
    for (int i = 0; i < 3; i++)
        for (int sparse = 0; sparse < 2; sparse++) {
            OWNED_MODULE net m;
            build(&m, KN_F32, sparse, given[i]);
            OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.1);
            for (int step = 0; step < 3; step++)
                KN_CHECK(backward(&m, step, NULL) && kn_step(o));
            float w[ROWS * DIM];
            KN_CHECK(kn_to_host(weight(&m), w, sizeof w));
            for (int k = 0; k < ROWS * DIM; k++)
                KN_CHECK((w[k] == 0) == (k / DIM == row[i]), "element %d", k);
        }
}

/* ---- steps ----------------------------------------------------------------------------------- */

static kn_optim *make(int kind, void *m)
{
    switch (kind) {
    case 0:
        return kn_sgd(m, .lr = 0.1);
    case 1:
        return kn_adagrad(m, .lr = 0.1, .lr_decay = 0.01);
    default:
        return kn_adagrad(m, .lr = 0.1, .eps = 1e-3);
    }
}

/* Where no gradient changes nothing, rows get what the whole table gets. */
KN_TEST(tables, steps_are_those_of_the_whole_table)
{
    for (int kind = 0; kind < 3; kind++)
        for (int clip = 0; clip < 3; clip++) {
            OWNED_MODULE net a, b;
            build(&a, KN_F64, true, 0);
            build(&b, KN_F64, false, 0);
            OWNED_OPTIM kn_optim *x = make(kind, &a), *y = make(kind, &b);
            for (int step = 0; step < 4; step++) {
                for (int micro = 0; micro < 2; micro++)
                    KN_CHECK(backward(&a, step + micro, NULL) && backward(&b, step + micro, NULL));
                IN_SCOPE;
                if (clip == 1)
                    KN_CHECK(fabs(kn_item(kn_clip_grad_norm(&a, 0.05)) -
                                  kn_item(kn_clip_grad_norm(&b, 0.05))) < 1e-9);
                if (clip == 2)
                    KN_CHECK(kn_clip_grad_value(&a, 1e-2) && kn_clip_grad_value(&b, 1e-2));
                KN_CHECK(kn_step(x) && kn_step(y));
                KN_CHECK(apart_nets(&a, &b) < 1e-14, "kind %d, clip %d, step %d: %g", kind, clip,
                         step, apart_nets(&a, &b));
            }
        }
}

/* AdamW on rows: of each row with a gradient what AdamW does, with the number of all steps; of the
 * others nothing. */
KN_TEST(tables, adamw_is_lazy)
{
    const double lr = 0.1, b1 = 0.9, b2 = 0.999, decay = 0.01;
    OWNED_MODULE net m;
    build(&m, KN_F64, true, 0);
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = lr, .weight_decay = decay);
    double w[ROWS * DIM], mean[ROWS * DIM] = { 0 }, square[ROWS * DIM] = { 0 }, now[ROWS * DIM];
    KN_CHECK(kn_to_host(weight(&m), w, sizeof w));
    for (int step = 1; step <= 4; step++) {
        IN_SCOPE;
        KN_CHECK(backward(&m, step, NULL));
        const int64_t n = kn_numel(kn_grad_rows(weight(&m)));
        int64_t id[ROWS];
        double g[ROWS * DIM];
        KN_CHECK(kn_to_host(kn_grad_rows(weight(&m)), id, (size_t)n * sizeof *id) &&
                 kn_to_host(kn_grad_values(weight(&m)), g, (size_t)(n * DIM) * sizeof *g));
        for (int64_t k = 0; k < n * DIM; k++) {
            const int64_t i = id[k / DIM] * DIM + k % DIM;
            mean[i] = b1 * mean[i] + (1 - b1) * g[k];
            square[i] = b2 * square[i] + (1 - b2) * g[k] * g[k];
            w[i] -= lr * (mean[i] / (1 - pow(b1, step)) /
                              (sqrt(square[i] / (1 - pow(b2, step))) + 1e-8) +
                          decay * w[i]);
        }
        KN_CHECK(kn_step(o) && kn_to_host(weight(&m), now, sizeof now));
        for (int k = 0; k < ROWS * DIM; k++)
            KN_CHECK(fabs(now[k] - w[k]) < 1e-12, "step %d, element %d", step, k);
    }
    KN_CHECK_OK();
}

KN_TEST(tables, adagrad_adds_decay_to_a_whole_gradient)
{
    const double lr = 0.1, decay = 0.3;
    OWNED_MODULE net m;
    build(&m, KN_F64, false, 0);
    OWNED_OPTIM kn_optim *o = kn_adagrad(&m, .lr = lr, .weight_decay = decay);
    double w[ROWS * DIM], g[ROWS * DIM], sum[ROWS * DIM] = { 0 }, now[ROWS * DIM];
    KN_CHECK(o && kn_to_host(weight(&m), w, sizeof w));
    for (int step = 0; step < 3; step++) {
        KN_CHECK(backward(&m, step, NULL) && kn_to_host(kn_grad(weight(&m)), g, sizeof g));
        KN_CHECK(kn_step(o) && kn_to_host(weight(&m), now, sizeof now));
        for (int k = 0; k < ROWS * DIM; k++) {
            const double with = g[k] + decay * w[k];
            sum[k] += with * with;
            w[k] -= lr * with / (sqrt(sum[k]) + 1e-10);
            KN_CHECK(fabs(now[k] - w[k]) < 1e-12, "step %d, element %d", step, k);
        }
    }
    KN_CHECK_OK();
}

/* One number a row. */
KN_TEST(tables, adagrad_by_rows)
{
    const kn_dtype types[] = { KN_F64, KN_F32, KN_BF16 };
    for (int i = 0; i < 3; i++) {
        OWNED_MODULE net m;
        build(&m, types[i], true, 0);
        OWNED_OPTIM kn_optim *o = kn_adagrad(&m, .lr = 0.1, .row_wise = true);
        double w[ROWS][DIM], sum[ROWS] = { 0 };
        IN_SCOPE;
        KN_CHECK(kn_to_host(kn_cast(kn_detach(weight(&m)), KN_F64), w, sizeof w));
        for (int step = 0; step < 3; step++) {
            KN_CHECK(backward(&m, step, NULL));
            double g[ROWS][DIM], now[ROWS][DIM];
            KN_CHECK(kn_to_host(whole_grad(weight(&m)), g, sizeof g) && kn_step(o) &&
                     kn_to_host(kn_cast(kn_detach(weight(&m)), KN_F64), now, sizeof now));
            for (int r = 0; r < ROWS; r++) {
                double square = 0;
                for (int k = 0; k < DIM; k++)
                    square += g[r][k] * g[r][k] / DIM;
                sum[r] += square;
                for (int k = 0; k < DIM; k++) {
                    if (square > 0)
                        w[r][k] -= 0.1 * g[r][k] / (sqrt(sum[r]) + 1e-10);
                    KN_CHECK(fabs(now[r][k] - w[r][k]) < (i == 0   ? 1e-12
                                                          : i == 1 ? 1e-5
                                                                   : 2e-2 * (1 + fabs(w[r][k]))),
                             "%s, step %d, row %d: %g, %g", kn_dtype_name(types[i]), step, r,
                             now[r][k], w[r][k]);
                }
            }
        }
        KN_CHECK(kn_numel(kn_optim_state(o, 0, "sum")) == ROWS &&
                 kn_numel(kn_optim_state(o, 1, "sum")) == 2 * DIM);
        KN_CHECK_OK();
    }
}

/* A step that a scaler skips changes no row and no state; others are as without it. */
KN_TEST(tables, steps_with_a_loss_scale)
{
    OWNED_MODULE net a, b;
    build(&a, KN_F32, true, 0);
    build(&b, KN_F32, true, 0);
    OWNED_OPTIM kn_optim *x = kn_adamw(&a, .lr = 0.1), *y = kn_adamw(&b, .lr = 0.1);
    kn_scaler *s = kn_scaler_new(&a, .init_scale = 1024);
    for (int step = 0; step < 4; step++) {
        IN_SCOPE;
        KN_CHECK(backward(&a, step, s) && (step == 1 || backward(&b, step, NULL)));
        if (step == 1)
            KN_CHECK(kn_fill_(kn_grad_values(weight(&a)), INFINITY));
        KN_CHECK(kn_scaler_step(s, x) && (step == 1 || kn_step(y)));
        KN_CHECK(apart_nets(&a, &b) < 1e-6, "step %d: %g", step, apart_nets(&a, &b));
    }
    kn_scaler_free(s);
    KN_CHECK_OK();
}

/* A frozen table, and one of a frozen group, stay. */
KN_TEST(tables, frozen_ones_stay)
{
    OWNED_MODULE net m;
    build(&m, KN_F32, true, 0);
    float before[ROWS * DIM], now[ROWS * DIM];
    KN_CHECK(kn_to_host(weight(&m), before, sizeof before));
    const kn_optim_group group = { .pattern = "table.*", .frozen = true };
    for (int freeze = 0; freeze < 2; freeze++) {
        OWNED_OPTIM kn_optim *o = freeze
                                      ? kn_adamw(&m, .lr = 0.1)
                                      : kn_adamw(&m, .lr = 0.1, .groups = &group, .group_count = 1);
        if (freeze)
            kn_freeze(&m.table, true);
        KN_CHECK(backward(&m, 0, NULL) && kn_step(o));
        KN_CHECK(kn_to_host(weight(&m), now, sizeof now) && !memcmp(before, now, sizeof now));
        KN_CHECK(!kn_grad_rows(weight(&m)));
    }
}

/* ---- what can't be --------------------------------------------------------------------------- */

static bool fails(void *arg)
{
    (void)arg;
    return kn_fail("no");
}

static void fail(kn_tensor *leaf, void *arg)
{
    (void)leaf;
    fails(arg);
}

KN_TEST(tables, a_backward_that_fails_takes_its_rows_back)
{
    OWNED_MODULE net m;
    build(&m, KN_F32, true, 0);
    kn_on_accumulated(weight(&m), fail, NULL);
    REFUSED(backward(&m, 0, NULL), "no");
    KN_CHECK(!kn_grad_rows(weight(&m)));
    KN_CHECK_OK();
}

static kn_tensor *same(kn_tensor *g, void *arg)
{
    (void)arg;
    return g;
}

KN_TEST(tables, wrong_use)
{
    OWNED_MODULE net m;
    build(&m, KN_BF16, true, 0);
    IN_SCOPE;
    kn_tensor *w = weight(&m), *x = kn_zeros(KN_BF16, KN_CPU, KN_SHAPE(2, DIM));
    kn_tensor *ids = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2)), *got[1];
    REFUSED(kn_keep_rows(x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3))), "is no table");
    REFUSED(kn_keep_rows(ids), "is no table");
    REFUSED(kn_keep_rows(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 0))), "is no table");
    REFUSED(kn_grad_rows(ids), "keeps no rows");
    REFUSED(kn_grad(w), "stays rows; read kn_grad_rows");
    x = kn_zeros(KN_BF16, KN_CPU, KN_SHAPE(2, DIM));
    REFUSED(kn_backward(sum_of(kn_linear(x, w, NULL, false))),
            "stays rows (kn_keep_rows, .sparse)");
    REFUSED(kn_backward(sum_of(kn_tanh(kn_scale(w, 2)))), "stays rows (kn_keep_rows, .sparse)");
    REFUSED(kn_grad_of(sum_of(kn_embedding(w, ids)), &w, 1, got), "kn_grad_of can't return");
    REFUSED(kn_adamw(&m, .lr = 1, .stochastic_rounding = true), "doesn't know 'table.weight'");
    REFUSED(kn_muon(&m, .lr = 1,
                    .groups = &(kn_optim_group){ .muon = KN_MUON_MATRIX, .min_ndim = 2 },
                    .group_count = 1),
            "whose gradient stays rows");
    REFUSED(kn_embedding(w, ids, .padding_idx = ROWS), ".padding_idx is 9");
    REFUSED(kn_adagrad(&m, .lr = 1, .eps = -1), ".eps -1");
    kn_on_grad(w, same, NULL);
    REFUSED(backward(&m, 0, NULL), "a hook looks at the gradient of 'weight'");
    KN_CHECK(!kn_grad_rows(w));
}
