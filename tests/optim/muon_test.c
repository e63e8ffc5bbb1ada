/* tests/optim/muon_test.c: Muon against plain loops in double precision, its rule, the orthogonal
 * factor, bad use. */
#include "nn/layers.h"
#include "optim/optim_internal.h"
#include "tests/failing.h"
#include "tests/owned.h"

enum { MOST = 64, SIDE = 8 };

typedef struct net {
    kn_module base;
    kn_embedding token;
    kn_linear wide, tall, head;
    kn_tensor *kernel; /* [3, 2, 2, 1]: as a conv's, [3, 4] */
} net;

static kn_tensor *net_forward(kn_module *self, kn_tensor *ids)
{
    net *m = (net *)self;
    kn_tensor *x = kn_call(&m->wide, kn_call(&m->token, ids)); /* 5 -> 4 */
    x = kn_matmul(x, kn_transpose(kn_view(m->kernel, 2, (int64_t[]){ 3, 4 }), 0, 1));
    return kn_call(&m->head, kn_tanh(kn_call(&m->tall, x))); /* 3 -> 6 -> 2 */
}

static void build(net *m, kn_dtype t)
{
    KN_CHECK(kn_module_init(&m->base, net_forward) &&
             kn_embedding_init(&m->token, &m->base, "token", 7, 5, .dtype = t) &&
             kn_linear_init(&m->wide, &m->base, "wide", 5, 4, .dtype = t) &&
             kn_linear_init(&m->tall, &m->base, "tall", 3, 6, .dtype = t) &&
             kn_linear_init(&m->head, &m->base, "head", 6, 2, .dtype = t));
    m->kernel = kn_parameter(m, "kernel", t, KN_CPU, KN_NORMAL_INIT(0.5), KN_SHAPE(3, 2, 2, 1));
    KN_CHECK(kn_materialize(m, KN_CPU, 7));
}

static bool backward(net *m, kn_scaler *scaler, int batch)
{
    IN_SCOPE;
    int64_t ids[3] = { batch % 7, (batch + 3) % 7, (2 * batch + 1) % 7 };
    kn_tensor *y = kn_call(m, kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(3)));
    kn_tensor *loss = mean_square(y);
    return kn_backward(scaler ? kn_scale_loss(scaler, loss) : loss);
}

static void read_part(kn_tensor *t, double *v)
{
    IN_SCOPE;
    KN_CHECK(t && kn_numel(t) <= MOST);
    KN_CHECK(kn_to_host(kn_cast(kn_detach(t), KN_F64), v, (size_t)kn_numel(t) * sizeof *v));
}

/* ---- the formula ----------------------------------------------------------------------------- */

typedef struct rule {
    double lr, momentum, decay, ns[3];
    int steps;
    bool nesterov;
    kn_muon_scale scale;
} rule;

/* The textbook's loop: X = a X + (b A + c A A) X, A = X X', of the matrix with few rows. */
static void orthogonal(double *x, int rows, int cols, const rule *r)
{
    double y[SIDE][SIDE] = { 0 }, norm = 0;
    bool tall = rows > cols;
    int n = tall ? cols : rows, k = tall ? rows : cols;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < k; j++) {
            y[i][j] = tall ? x[j * cols + i] : x[i * cols + j];
            norm += y[i][j] * y[i][j];
        }
    norm = fmax(sqrt(norm), 1e-7);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < k; j++)
            y[i][j] /= norm;
    for (int step = 0; step < r->steps; step++) {
        double a[SIDE][SIDE] = { 0 }, p[SIDE][SIDE] = { 0 }, z[SIDE][SIDE] = { 0 };
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++)
                for (int l = 0; l < k; l++)
                    a[i][j] += y[i][l] * y[j][l];
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++) {
                p[i][j] = r->ns[1] * a[i][j];
                for (int l = 0; l < n; l++)
                    p[i][j] += r->ns[2] * a[i][l] * a[l][j];
            }
        for (int i = 0; i < n; i++)
            for (int j = 0; j < k; j++) {
                z[i][j] = r->ns[0] * y[i][j];
                for (int l = 0; l < n; l++)
                    z[i][j] += p[i][l] * y[l][j];
            }
        memcpy(y, z, sizeof y);
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < k; j++)
            x[tall ? j * cols + i : i * cols + j] = y[i][j];
}

static double factor(const rule *r, double rows, double cols)
{
    if (r->scale == KN_MUON_MATCH_ADAMW)
        return 0.2 * sqrt(fmax(rows, cols));
    return sqrt(r->scale == KN_MUON_SPECTRAL ? rows / cols : fmax(1, rows / cols));
}

static void plain_step(const rule *r, double *p, const double *g, double *m, int rows, int cols)
{
    double d[MOST];
    for (int i = 0; i < rows * cols; i++) {
        m[i] += (1 - r->momentum) * (g[i] - m[i]);
        d[i] = r->nesterov ? g[i] + r->momentum * (m[i] - g[i]) : m[i];
    }
    orthogonal(d, rows, cols, r);
    for (int i = 0; i < rows * cols; i++)
        p[i] -= r->lr * (factor(r, rows, cols) * d[i] + r->decay * p[i]);
}

static int number_of(net *m, const char *name)
{
    const kn_param *p;
    int n = kn_params(m, &p);
    for (int i = 0; i < n; i++)
        if (strcmp(p[i].name, name) == 0)
            return i;
    return -1;
}

static void against_the_formula(const rule *r, kn_dtype t, double most)
{
    static const struct {
        const char *name;
        int rows, cols;
    } matrix[] = { { "wide.weight", 4, 5 }, { "tall.weight", 6, 3 }, { "kernel", 3, 4 } };
    enum { COUNT = 3 };
    double p[COUNT][MOST], g[COUNT][MOST], m[COUNT][MOST] = { { 0 } }, now[MOST];
    OWNED_MODULE net n;
    const kn_param *list;
    build(&n, t);
    OWNED_OPTIM kn_optim *o =
        kn_muon(&n, .lr = r->lr, .momentum = r->momentum, .weight_decay = r->decay,
                .no_nesterov = !r->nesterov, .scale = r->scale, .ns_steps = r->steps,
                .ns = { r->ns[0], r->ns[1], r->ns[2] }, .ns_dtype = t);
    kn_params(&n, &list);
    for (int k = 0; k < COUNT; k++)
        read_part(list[number_of(&n, matrix[k].name)].master, p[k]);
    for (int step = 0; step < 4; step++) {
        KN_CHECK(backward(&n, NULL, 2 * step) && backward(&n, NULL, 2 * step + 1));
        for (int k = 0; k < COUNT; k++) {
            read_part(kn_param_grad(&list[number_of(&n, matrix[k].name)]), g[k]);
            for (int i = 0; i < MOST; i++)
                g[k][i] /= 2; /* micro-batches */
            plain_step(r, p[k], g[k], m[k], matrix[k].rows, matrix[k].cols);
        }
        KN_CHECK(kn_step(o));
        for (int k = 0; k < COUNT; k++) {
            int i = number_of(&n, matrix[k].name);
            read_part(list[i].master, now);
            for (int j = 0; j < matrix[k].rows * matrix[k].cols; j++)
                KN_CHECK(fabs(now[j] - p[k][j]) <= most, "%s[%d] is %.17g, expected %.17g",
                         matrix[k].name, j, now[j], p[k][j]);
            read_part(kn_optim_state(o, i, "momentum"), now);
            for (int j = 0; j < matrix[k].rows * matrix[k].cols; j++)
                KN_CHECK(fabs(now[j] - m[k][j]) <= most, "momentum of %s", matrix[k].name);
        }
    }
}

KN_TEST(muon, agrees_with_the_formula)
{
    rule r = { .lr = 0.125,
               .momentum = 0.9,
               .decay = 0.25,
               .ns = { 3.4445, -4.7750, 2.0315 },
               .steps = 5,
               .nesterov = true,
               .scale = KN_MUON_ORIGINAL };
    against_the_formula(&r, KN_F64, 1e-13);
    against_the_formula(&r, KN_F32, 1e-5);
    r.nesterov = false;
    r.scale = KN_MUON_MATCH_ADAMW;
    r.steps = 2;
    against_the_formula(&r, KN_F64, 1e-13);
    r.scale = KN_MUON_SPECTRAL;
    r.ns[0] = 1.5, r.ns[1] = -0.5, r.ns[2] = 0;
    against_the_formula(&r, KN_F64, 1e-13);
}

/* ---- the rule -------------------------------------------------------------------------------- */

static int adamws_states(const kn_optim *o, int i)
{
    const char *a = kn_optim_state_name_of(o, i, 0), *b = kn_optim_state_name_of(o, i, 1);
    return a && b && strcmp(a, "exp_avg") == 0 && strcmp(b, "exp_avg_sq") == 0;
}

/* All but matrices are AdamW's: states, bits, and its rate. */
KN_TEST(muon, others_take_adamw)
{
    static const char *const others[] = { "token.weight", "wide.bias", "tall.bias", "head.weight",
                                          "head.bias" };
    static const char *const matrices[] = { "wide.weight", "tall.weight", "kernel" };
    OWNED_MODULE net a, b;
    const kn_param *p, *q;
    build(&a, KN_F32);
    build(&b, KN_F32);
    OWNED_OPTIM kn_optim *x =
        kn_muon(&a, .lr = 0.5, .adamw_lr_mul = 0.25, .weight_decay = 0.5, .beta2 = 0.99);
    OWNED_OPTIM kn_optim *y = kn_adamw(&b, .lr = 0.125, .weight_decay = 0.5, .beta2 = 0.99);
    KN_CHECK(backward(&a, NULL, 1) && backward(&b, NULL, 1) && kn_step(x) && kn_step(y));
    KN_CHECK(kn_params(&a, &p) == 8 && kn_params(&b, &q) == 8);
    for (int k = 0; k < 5; k++) {
        int i = number_of(&a, others[k]);
        size_t bytes = (size_t)p[i].numel * sizeof(float);
        KN_CHECK(adamws_states(x, i) && !kn_optim_state(x, i, "momentum"), "%s", others[k]);
        KN_CHECK(memcmp(kn_data(p[i].master), kn_data(q[i].master), bytes) == 0, "%s", others[k]);
    }
    for (int k = 0; k < 3; k++) {
        int i = number_of(&a, matrices[k]);
        KN_CHECK(strcmp(kn_optim_state_name_of(x, i, 0), "momentum") == 0);
        KN_CHECK(!kn_optim_state_name_of(x, i, 1) && !kn_optim_state(x, i, "exp_avg"));
    }
    KN_CHECK(kn_ok() && strcmp(kn_optim_state_name(x, 2), "momentum") == 0);
    KN_CHECK(kn_muon_seconds(x) > 0 && kn_muon_seconds(y) == 0 && kn_muon_seconds(NULL) == 0);
}

KN_TEST(muon, groups_choose)
{
    kn_optim_group groups[] = { { .pattern = "head.weight", .muon = KN_MUON_MATRIX, .lr_mul = 0.5 },
                                { .pattern = "kernel", .muon = KN_MUON_ADAMW } };
    OWNED_MODULE net m;
    build(&m, KN_F32);
    OWNED_OPTIM kn_optim *o = kn_muon(&m, .lr = 0.1, .groups = groups, .group_count = 2);
    KN_CHECK(strcmp(kn_optim_state_name_of(o, number_of(&m, "head.weight"), 0), "momentum") == 0);
    KN_CHECK(adamws_states(o, number_of(&m, "kernel")));
    KN_CHECK(backward(&m, NULL, 1) && kn_step(o));
}

/* Rates multiply: twice the rate with half of it for a group is, for the group, the step of the
 * rate, decay included, and for others that of twice the rate. */
KN_TEST(muon, rates_of_groups_multiply)
{
    const kn_optim_group half = { .pattern = "tall.*", .lr_mul = 0.5 };
    OWNED_MODULE net a, b, c;
    net *const m[3] = { &a, &b, &c };
    const kn_param *p[3];
    for (int i = 0; i < 3; i++) {
        build(m[i], KN_F32);
        OWNED_OPTIM kn_optim *o =
            kn_muon(m[i], .lr = i == 1 ? 0.125 : 0.25, .adamw_lr_mul = 0.25, .weight_decay = 0.5,
                    .groups = &half, .group_count = i == 0);
        KN_CHECK(backward(m[i], NULL, 1) && kn_step(o) && kn_params(m[i], &p[i]) == 8);
    }
    for (int i = 0; i < 8; i++) {
        const char *name = p[0][i].name;
        const int as = strncmp(name, "tall.", 5) == 0 ? 1 : 2;
        KN_CHECK(memcmp(kn_data(p[0][i].master), kn_data(p[as][i].master),
                        (size_t)p[0][i].numel * sizeof(float)) == 0,
                 "%s", name);
    }
}

/* Names begin at the tree's root: a head and an embedding are known below another module, also to
 * an optimizer of a part of the tree. */
KN_TEST(muon, the_rule_below_another_module)
{
    OWNED_MODULE kn_module outer;
    net m;
    build(&m, KN_F32);
    KN_CHECK(kn_module_list_init(&outer, NULL, "outer") && kn_module_add(&outer, "inner", &m.base));
    for (int part = 0; part < 2; part++) {
        OWNED_OPTIM kn_optim *o = kn_muon(part ? (void *)&m : (void *)&outer, .lr = 0.5);
        KN_CHECK(adamws_states(o, number_of(&m, "inner.head.weight")) &&
                 adamws_states(o, number_of(&m, "inner.token.weight")) &&
                 !adamws_states(o, number_of(&m, "inner.wide.weight")));
    }
}

/* ---- the orthogonal factor ------------------------------------------------------------------- */

/* Coefficients that converge: X X' is the identity, for any norm of X. */
KN_TEST(muon, newton_schulz_makes_rows_orthogonal)
{
    static const double cubic[3] = { 1.5, -0.5, 0 };
    for (int tall = 0; tall < 2; tall++)
        for (int size = 0; size < 3; size++) {
            IN_SCOPE;
            kn_tensor *x = kn_randn(KN_F64, KN_CPU, 3, 0, KN_SHAPE(tall ? 9 : 5, tall ? 5 : 9));
            x = kn_scale(x, size == 0 ? 1e-3 : size == 1 ? 1 : 1e3);
            KN_CHECK(kn_newton_schulz(x, cubic, 40, 1e-7));
            kn_tensor *turned = kn_transpose(x, 0, 1);
            kn_tensor *gram = tall ? kn_matmul(turned, x) : kn_matmul(x, turned);
            for (int i = 0; i < 25; i++)
                KN_CHECK(fabs(((double *)kn_data(gram))[i] - (i % 6 == 0)) < 1e-12);
        }
}

/* X is divided by its norm, or by eps where that is larger: one step, in exact numbers. */
KN_TEST(muon, newton_schulz_divides_by_at_least_eps)
{
    static const double cubic[3] = { 1.5, -0.5, 0 };
    IN_SCOPE;
    for (int eps = 1; eps <= 4; eps += 3) { /* the norm is 2 */
        kn_tensor *x = kn_ones(KN_F64, KN_CPU, KN_SHAPE(1, 4));
        KN_CHECK(kn_newton_schulz(x, cubic, 1, eps));
        KN_CHECK(((double *)kn_data(x))[3] == (eps == 1 ? 0.5 : 0.34375));
    }
}

/* In bf16, as near the exact factor as torch.optim.Muon comes: 0.0153 on average for such sizes. */
KN_TEST(muon, newton_schulz_rounds_operands_once)
{
    static const double quintic[3] = { 3.4445, -4.7750, 2.0315 };
    double sum = 0;
    for (int seed = 0; seed < 20; seed++) {
        const bool tall = seed % 2;
        IN_SCOPE;
        kn_tensor *exact =
            kn_randn(KN_F64, KN_CPU, 3, (uint64_t)seed, KN_SHAPE(tall ? 12 : 5, tall ? 5 : 12));
        kn_tensor *x = kn_cast(exact, KN_BF16);
        exact = kn_cast(x, KN_F64);
        KN_CHECK(kn_newton_schulz(x, quintic, 5, 1e-7));
        KN_CHECK(kn_newton_schulz(exact, quintic, 5, 1e-7));
        const double apart =
            kn_item(kn_amax(kn_abs(kn_sub(kn_cast(x, KN_F64), exact)), 0, NULL, false));
        sum += apart;
    }
    KN_CHECK(sum / 20 < 0.016, "%g", sum / 20);
}

KN_TEST(muon, a_gradient_of_zeros_moves_nothing)
{
    static const double quintic[3] = { 3.4445, -4.7750, 2.0315 };
    IN_SCOPE;
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 4));
    KN_CHECK(kn_newton_schulz(x, quintic, 5, 1e-7));
    for (int i = 0; i < 12; i++)
        KN_CHECK(((float *)kn_data(x))[i] == 0);
}

/* ---- beside a scaler ------------------------------------------------------------------------- */

/* A step that overflowed leaves parameters and momentum as they are; the others are those of a run
 * without scale. */
KN_TEST(muon, a_skipped_step_changes_nothing)
{
    double before[8][MOST], after[MOST], momentum[MOST];
    OWNED_MODULE net m;
    const kn_param *p;
    build(&m, KN_F32);
    int at = number_of(&m, "tall.weight");
    OWNED_OPTIM kn_optim *o = kn_muon(&m, .lr = 0.1);
    OWNED_SCALER kn_scaler *s = kn_scaler_new(&m, .init_scale = 256);
    KN_CHECK(backward(&m, s, 1) && kn_scaler_step(s, o) && kn_params(&m, &p) == 8);
    read_part(kn_optim_state(o, at, "momentum"), momentum);
    for (int i = 0; i < 8; i++)
        read_part(p[i].master, before[i]);
    KN_CHECK(backward(&m, s, 2));
    kn_scope scope = kn_scope_begin();
    KN_CHECK(kn_fill_(kn_param_grad(&p[0]), INFINITY));
    kn_scope_end(scope);
    KN_CHECK(kn_scaler_step(s, o) && kn_scaler_get(s).skipped == 1);
    read_part(kn_optim_state(o, at, "momentum"), after);
    KN_CHECK(memcmp(momentum, after, 18 * sizeof *after) == 0);
    for (int i = 0; i < 8; i++) {
        read_part(p[i].master, after);
        KN_CHECK(memcmp(before[i], after, (size_t)p[i].numel * sizeof *after) == 0, "%s",
                 p[i].name);
    }
}

/* ---- bad use --------------------------------------------------------------------------------- */

static bool scaled_run(void *arg)
{
    OWNED_MODULE kn_linear fc = { 0 };
    IN_SCOPE;
    (void)arg;
    bool ok =
        kn_linear_init(&fc, NULL, "", 3, 2, .no_bias = true) && kn_materialize(&fc, KN_CPU, 7);
    OWNED_SCALER kn_scaler *s = ok ? kn_scaler_new(&fc, .several = true) : NULL;
    OWNED_OPTIM kn_optim *o = s ? kn_muon(&fc, .lr = 0.1) : NULL;
    kn_tensor *x = o ? kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 3)) : NULL;
    return x && kn_backward(kn_scale_loss(s, sum_of(kn_call(&fc, x)))) && kn_scaler_step(s, o);
}

KN_TEST(muon, every_allocation_of_a_scaled_step_may_fail)
{
    KN_CHECK(scaled_run(NULL)); /* fills the pools */
    each_allocation_fails(scaled_run, NULL, NULL, 30);
}

KN_TEST(muon, refuses)
{
    OWNED_MODULE net m;
    build(&m, KN_F32);
    kn_optim_group vector = { .pattern = "*.bias", .muon = KN_MUON_MATRIX };
    kn_optim_group unknown = { .pattern = "*.bias", .muon = (kn_muon_use)9 };
    REFUSED(kn_muon(&m), ".lr");
    REFUSED(kn_muon(&m, .lr = 1, .momentum = 1), ".momentum");
    REFUSED(kn_muon(&m, .lr = 1, .beta1 = -1), ".beta1");
    REFUSED(kn_muon(&m, .lr = 1, .beta2 = NAN), ".beta2");
    REFUSED(kn_muon(&m, .lr = 1, .eps = -1), ".eps");
    REFUSED(kn_muon(&m, .lr = 1, .eps = 1e-50), ".eps"); /* 1 / eps would be infinite in f32 */
    REFUSED(kn_muon(&m, .lr = 1, .adamw_eps = -1), ".adamw_eps");
    REFUSED(kn_muon(&m, .lr = 1, .ns_steps = 100), ".ns_steps");
    REFUSED(kn_muon(&m, .lr = 1, .ns_steps = -1), ".ns_steps");
    REFUSED(kn_muon(&m, .lr = 1, .ns = { 1, INFINITY, 0 }), ".ns");
    REFUSED(kn_muon(&m, .lr = 1, .scale = (kn_muon_scale)7), ".scale");
    REFUSED(kn_muon(&m, .lr = 1, .ns_dtype = KN_F16), ".ns_dtype");
    REFUSED(kn_muon(&m, .lr = 1, .ns_dtype = KN_I64), ".ns_dtype");
    REFUSED(kn_muon(&m, .lr = 1, .adamw_lr_mul = -1), ".adamw_lr_mul");
    REFUSED(kn_muon(&m, .lr = 1, .window = -1), ".window");
    REFUSED(kn_muon(&m, .lr = 1, .groups = &vector, .group_count = 1), "1 dims");
    REFUSED(kn_muon(&m, .lr = 1, .groups = &unknown, .group_count = 1), "has .muon 9");
    REFUSED(kn_muon(NULL, .lr = 1), "not an initialised module");
    unknown.muon = KN_MUON_ADAMW;
    REFUSED(kn_adamw(&m, .lr = 1, .groups = &unknown, .group_count = 1), "for kn_muon");
}
