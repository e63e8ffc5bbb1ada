/* tests/nn/recompute_rows.c: recompute_rows.h. */
#include "tests/nn/recompute_rows.h"
#include "tests/owned.h"

enum { ROOM = 1024 };

/* The numbers of a run. */
static float *number;
static int numbers;

void note_value(double v)
{
    KN_CHECK(numbers < ROOM);
    number[numbers++] = (float)v;
}

/* A gradient that isn't there is a number, too. */
void note(const kn_tensor *t)
{
    float value[64];
    const int64_t count = t ? kn_numel(t) : 0;
    note_value((double)count);
    KN_CHECK(count <= 64);
    if (count == 0 || !kn_to_host(t, value, (size_t)count * sizeof *value))
        return;
    for (int64_t i = 0; i < count; i++)
        note_value(value[i]);
}

net n;
static kn_tensor *(*part_runs)(part *p, kn_tensor *x);

static kn_tensor *part_forward(kn_module *self, kn_tensor *x)
{
    return part_runs((part *)self, x);
}

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    net *self_ = (net *)self;
    return kn_call(&self_->head, kn_call(&self_->p, x));
}

static bool with_recompute;

bool recomputes(void)
{
    return with_recompute;
}

static void build(bool again)
{
    with_recompute = again;
    const kn_initializer ones = KN_ONES_INIT;
    n = (net){ 0 };
    kn_seed(3);
    kn_set_step(0);
    KN_CHECK(kn_module_init(&n.base, net_forward));
    KN_CHECK(kn_module_init(&n.p.base, part_forward) && kn_module_add(&n.base, "p", &n.p.base));
    KN_CHECK(kn_linear_init(&n.p.fc, &n.p.base, "fc", WIDE, WIDE));
    KN_CHECK(kn_dropout_init(&n.p.drop, &n.p.base, "drop", 0.5));
    KN_CHECK(kn_batch_norm_init(&n.p.bn, &n.p.base, "bn", WIDE));
    n.p.buffer = kn_declare_buffer(&n.p, "mean", KN_F32, KN_CPU, ones, KN_SHAPE(WIDE));
    KN_CHECK(kn_linear_init(&n.head, &n.base, "head", WIDE, WIDE));
    KN_CHECK(kn_materialize(&n, KN_CPU, 5) && kn_recompute(&n.p, again));
}

kn_tensor *data(uint64_t stream)
{
    return kn_randn(KN_F32, KN_CPU, 1, stream, KN_SHAPE(3, WIDE));
}

kn_tensor *leaf(uint64_t stream)
{
    return kn_require_grad(data(stream), true);
}

kn_tensor *total(kn_tensor *y)
{
    return sum_of(kn_mul(y, y));
}

void note_grads(void)
{
    const kn_param *p;
    const int count = kn_ok() ? kn_params(&n, &p) : 0;
    for (int i = 0; i < count; i++)
        note(kn_grad(p[i].tensor));
}

kn_tensor *w(const void *linear)
{
    return kn_module_param(linear, "weight");
}

kn_tensor *plain(part *p, kn_tensor *x)
{
    p->runs++;
    return kn_tanh(kn_call(&p->fc, x));
}

kn_tensor *forward(void)
{
    kn_tensor *x = leaf(2), *y = total(kn_call(&n, x));
    note(y);
    return y;
}

void backward(kn_tensor *y)
{
    kn_backward(y);
    note_grads();
}

void simple(void)
{
    backward(forward());
}

kn_tensor *count(kn_tensor *g, void *arg)
{
    note(g);
    ++*(int *)arg;
    return NULL;
}

static int run_row(const row *r, bool again, float *out, const char **error)
{
    static char text[2][1024];
    number = out;
    numbers = 0;
    part_runs = r->part;
    build(again);
    kn_scope s = kn_scope_begin();
    r->program();
    snprintf(text[again], sizeof text[again], "%s", kn_ok() ? "" : kn_error());
    *error = kn_ok() ? NULL : text[again];
    kn_clear_error();
    kn_scope_end(s);
    kn_module_free(&n);
    return numbers;
}

static bool same(const row *r, const float *a, int na, const float *b, int nb)
{
    int k = 0;
    while (k < na && k < nb && memcmp(&a[k], &b[k], sizeof *a) == 0)
        k++;
    if (k < na && k < nb)
        fprintf(stderr, "%s: number %d is %.9g, %.9g without recompute\n", r->name, k, (double)b[k],
                (double)a[k]);
    else if (na != nb)
        fprintf(stderr, "%s: %d numbers, %d without recompute\n", r->name, nb, na);
    return k == na && na == nb;
}

static bool expected(const row *r, const char *error, const char *refuses, const char *how)
{
    if (!error == !refuses && (!error || strstr(error, refuses)))
        return true;
    fprintf(stderr, "%s, %s: %s\n", r->name, how, error ? error : "no error");
    return false;
}

void run_rows(const row *rows, int rows_count)
{
    static float a[ROOM], b[ROOM];
    int wrong = 0;
    for (int i = 0; i < rows_count; i++) {
        const row *r = &rows[i];
        const char *error[2];
        const int na = run_row(r, false, a, &error[0]), nb = run_row(r, true, b, &error[1]);
        const bool ok = expected(r, error[0], r->plain_refuses ? r->refuses : NULL, "plain") &&
                        expected(r, error[1], r->refuses, "recomputed") &&
                        (error[0] || error[1] || same(r, a, na, b, nb));
        wrong += !ok;
    }
    KN_CHECK(wrong == 0, "%d of %d programs", wrong, rows_count);
}
