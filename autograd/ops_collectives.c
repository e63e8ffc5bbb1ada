/* autograd/ops_collectives.c: collectives on tensors (collectives.h). Each way of moving and adding
 * is a row: its function, and the way of its backward. */
#include "autograd/collectives.h"
#include "autograd/engine.h"
#include "autograd/ops.h"
#include "autograd/second.h"
#include "comm/comm_internal.h"
#include <stdio.h>
#include <string.h>

typedef enum way { GATHER, SCATTER, SUM, MEAN, SPREAD, TO_ALL, TO_ROOT } way;

typedef struct collective {
    way way;
    kn_comm *comm;
    int dim, root;
    bool wants; /* a gradient comes back */
} collective;

typedef struct trip {
    const collective *of;
    kn_tensor *x, *y;
    kn_stream *s;
    const char *label;
} trip;

static void *bytes_of(const kn_tensor *t)
{
    return kn_array_of(t).data;
}

static kn_tensor *room(kn_dtype dtype, const kn_tensor *like)
{
    return kn_empty(dtype, kn_device_of(like), like->ndim, like->shape);
}

/* ---- along a dim ----------------------------------------------------------------------------- */

/* t, which has n blocks along dim, as [n, before, block]: apart, block behind block in memory, or
 * as they lie in t. */
static kn_array blocks_of(const kn_tensor *t, int dim, int n, bool apart)
{
    int64_t before = 1;
    for (int d = 0; d < dim; d++)
        before *= t->shape[d];
    const int64_t block = before ? kn_numel(t) / before / n : 0;
    kn_array a = kn_array_make(bytes_of(t), t->dtype, 3, (int64_t[]){ n, before, block });
    if (!apart) {
        a.stride[0] = block;
        a.stride[1] = n * block;
    }
    return a;
}

static bool in_order(const kn_tensor *t, int dim)
{
    bool first = true;
    for (int d = 0; d < dim; d++)
        first = first && t->shape[d] == 1;
    return first;
}

static bool gather(const trip *t)
{
    const int n = kn_comm_size(t->of->comm), dim = t->of->dim;
    kn_tensor *apart = in_order(t->y, dim) ? t->y : room(t->y->dtype, t->y);
    return apart &&
           kn_all_gather(t->of->comm, bytes_of(apart), bytes_of(t->x), kn_numel(t->x), t->x->dtype,
                         t->s, t->label) &&
           (apart == t->y ||
            kn_array_copy(t->y, blocks_of(t->y, dim, n, false), blocks_of(apart, dim, n, true)));
}

static bool scatter(const trip *t)
{
    const int n = kn_comm_size(t->of->comm), dim = t->of->dim;
    kn_tensor *apart = in_order(t->x, dim) ? t->x : room(t->x->dtype, t->x);
    return apart &&
           (apart == t->x ||
            kn_array_copy(t->x, blocks_of(apart, dim, n, true), blocks_of(t->x, dim, n, false))) &&
           kn_reduce_scatter(t->of->comm, bytes_of(t->y), NULL, bytes_of(apart), kn_numel(t->y),
                             t->y->dtype, t->x->dtype, t->s, t->label);
}

/* ---- as a whole ------------------------------------------------------------------------------ */

static bool sum(const trip *t)
{
    const int64_t count = kn_numel(t->x);
    if (t->x->dtype == KN_I64)
        return kn_array_copy(t->y, kn_array_of(t->y), kn_array_of(t->x)) &&
               kn_all_reduce_i64(t->of->comm, bytes_of(t->y), count, t->s, t->label);
    return kn_all_reduce(t->of->comm, bytes_of(t->y), NULL, bytes_of(t->x), count, t->y->dtype,
                         t->x->dtype, t->s, t->label);
}

static bool mean(const trip *t)
{
    trip wide = *t;
    if (kn_wide_dtype(t->x->dtype) != t->x->dtype)
        wide.y = room(kn_wide_dtype(t->x->dtype), t->y);
    if (!wide.y || !sum(&wide))
        return false;
    const kn_array all = kn_array_of(wide.y);
    const double factor = 1.0 / kn_comm_size(t->of->comm);
    return KN_RUN(t->y, KN_K_UNARY, ((kn_unary_args){ all, all, KN_AFFINE, factor, 0 })) &&
           (wide.y == t->y || kn_array_copy(t->y, kn_array_of(t->y), all));
}

static bool spread(const trip *t)
{
    const int64_t bytes = kn_numel(t->y) * (int64_t)kn_dtype_size(t->y->dtype);
    return (kn_rank(t->of->comm) != t->of->root ||
            kn_array_copy(t->y, kn_array_of(t->y), kn_array_of(t->x))) &&
           kn_broadcast(t->of->comm, bytes_of(t->y), bytes, t->of->root, t->s, t->label);
}

static bool to_root(const trip *t)
{
    return sum(t) &&
           (kn_rank(t->of->comm) == t->of->root || kn_array_fill(t->y, kn_array_of(t->y), 0, 0));
}

static bool to_all(const trip *t)
{
    return kn_all_to_all(t->of->comm, bytes_of(t->y), bytes_of(t->x),
                         kn_numel(t->x) / kn_comm_size(t->of->comm), t->x->dtype, t->s, t->label);
}

/* ---- the operations -------------------------------------------------------------------------- */

static const struct {
    bool (*run)(const trip *t);
    way back;
    bool adds, parts; /* numbers are added, so they are floats (a sum's i64, too); x has n parts */
} ways[] = {
    [GATHER] = { gather, SCATTER },
    [SCATTER] = { scatter, GATHER, true, true },
    [SUM] = { sum, SUM, true },
    [MEAN] = { mean, MEAN, true },
    [SPREAD] = { spread, TO_ROOT },
    [TO_ROOT] = { to_root, SPREAD },
    [TO_ALL] = { to_all, TO_ALL, .parts = true },
};

static bool shape(kn_op_call *c)
{
    const collective *a = c->attr;
    const kn_tensor *x = c->in[0];
    const int n = kn_comm_size(a->comm);
    const bool whole = a->way == SUM;
    if (ways[a->way].adds && !kn_dtype_is_float(x->dtype) && !(whole && x->dtype == KN_I64))
        return kn_fail("%s: adds floats%s, got %s; kn_cast it", c->op->name,
                       whole ? " and i64" : "", KN_SHOWN(x));
    if (ways[a->way].parts && x->shape[a->dim] % n)
        return kn_fail("%s: dim %d of %s doesn't divide by the %d ranks", c->op->name, a->dim,
                       KN_SHOWN(x), n);
    c->spec[0] = kn_spec_like(x);
    int64_t *size = &c->spec[0].shape[a->dim];
    *size /= a->way == SCATTER ? n : 1;
    return a->way != GATHER || !__builtin_mul_overflow(*size, (int64_t)n, size) ||
           kn_fail("%s: %d ranks with %s are more than memory can hold", c->op->name, n,
                   KN_SHOWN(x));
}

/* The label makes ranks with other shapes out of step; where a device looks at it later, it is a
 * text that stays. */
static bool run(const collective *a, way w, const char *name, const char *how, kn_tensor *x,
                kn_tensor *y)
{
    char text[192];
    const kn_device d = kn_device_of(x);
    snprintf(text, sizeof text, "%s of %s, dim %d, %s", name, KN_SHOWN(x), a->dim, how);
    const trip t = { a, kn_contiguous(x), y, kn_compute_stream(d),
                     d == KN_CPU || d == KN_META ? text : how };
    return t.x && t.s && kn_collective_begins() && ways[w].run(&t) && kn_ok();
}

static bool forward(kn_op_call *c)
{
    const collective *a = c->attr;
    return run(a, a->way, c->op->name, a->wants ? "with a gradient" : "without a gradient",
               c->in[0], c->out[0]);
}

static bool backward(kn_op_grad *g)
{
    const collective *a = g->attr;
    const kn_spec *s = &g->in_spec[0];
    g->din[0] =
        kn_empty(s->dtype, s->device ? s->device : kn_device_of(g->dout[0]), s->ndim, s->shape);
    return g->din[0] &&
           run(a, ways[a->way].back, g->node->op->name, "in backward", g->dout[0], g->din[0]);
}

#define COLLECTIVE(way, text)                                                                      \
    [way] = { .name = (text),                                                                      \
              .attr_size = sizeof(collective),                                                     \
              .collective = true,                                                                  \
              .makes = true,                                                                       \
              .shape = shape,                                                                      \
              .forward = forward,                                                                  \
              .backward = backward,                                                                \
              .on_tape = kn_linear_on_tape }
KN_OPS(collectives, COLLECTIVE(GATHER, "all_gather_tensor"),
       COLLECTIVE(SCATTER, "reduce_scatter_tensor"), COLLECTIVE(SUM, "all_reduce_tensor"),
       COLLECTIVE(MEAN, "mean_tensor"), COLLECTIVE(SPREAD, "broadcast_tensor"),
       COLLECTIVE(TO_ALL, "all_to_all_tensor"));

/* The ranks of NULL. */
static bool ranks_of(kn_comm **c, const char *what)
{
    if (!kn_ok() || (!*c && !kn_comm_default(c, what)))
        return false;
    *c = *c ? *c : kn_comm_self();
    return *c && kn_comm_usable(*c, what);
}

static kn_tensor *apply(way w, kn_comm *c, kn_tensor *x, int dim, int root)
{
    const collective a = { w, c, dim, root, kn_requires_grad(x) && kn_grad_mode() };
    return kn_apply1(&collectives[w], 1, &x, 0, &a);
}

static kn_tensor *along(way w, kn_comm *c, kn_tensor *x, int dim)
{
    const char *op = collectives[w].name;
    return ranks_of(&c, op) && (dim = kn_dim(op, x, dim)) >= 0 ? apply(w, c, x, dim, 0) : NULL;
}

kn_tensor *kn_all_gather_tensor(kn_comm *c, kn_tensor *x, int dim)
{
    return along(GATHER, c, x, dim);
}

kn_tensor *kn_reduce_scatter_tensor(kn_comm *c, kn_tensor *x, int dim)
{
    return along(SCATTER, c, x, dim);
}

kn_tensor *kn_all_reduce_tensor(kn_comm *c, kn_tensor *x)
{
    return ranks_of(&c, collectives[SUM].name) ? apply(SUM, c, x, 0, 0) : NULL;
}

kn_tensor *kn_mean_tensor(kn_comm *c, kn_tensor *x)
{
    return ranks_of(&c, collectives[MEAN].name) ? apply(MEAN, c, x, 0, 0) : NULL;
}

kn_tensor *kn_broadcast_tensor(kn_comm *c, kn_tensor *x, int root)
{
    const char *op = collectives[SPREAD].name;
    if (!ranks_of(&c, op))
        return NULL;
    if (root < 0 || root >= kn_comm_size(c))
        return kn_fail_null("%s: root is %d, must be a rank from 0 to %d", op, root,
                            kn_comm_size(c) - 1);
    return apply(SPREAD, c, x, 0, root);
}

/* ---- any number of rows for each rank -------------------------------------------------------- */

/* x's rows by their places. */
static kn_tensor *rows_at(kn_tensor *x, const int64_t *at, int64_t n)
{
    kn_tensor *index = kn_device_of(x) == KN_META ? kn_empty(KN_I64, KN_META, 1, &n)
                                                  : kn_from(KN_I64, kn_device_of(x), at, 1, &n);
    return kn_index_select(x, 0, index);
}

/* Part r of x gets most rows: zeros behind its own. */
static kn_tensor *pack(kn_tensor *x, const int64_t *rows, int n, int64_t most, int64_t *at)
{
    int64_t shape[KN_MAX_DIMS], end = 0;
    memcpy(shape, x->shape, sizeof shape);
    shape[0] = 1;
    for (int r = 0; r < n; r++)
        for (int64_t i = 0; i < most; i++)
            at[r * most + i] = i < rows[r] ? end++ : x->shape[0];
    kn_tensor *zeros = kn_zeros(x->dtype, kn_device_of(x), x->ndim, shape);
    return zeros ? rows_at(kn_cat((kn_tensor *[]){ x, zeros }, 2, 0), at, n * most) : NULL;
}

static kn_tensor *unpack(kn_tensor *x, const int64_t *rows, int n, int64_t most, int64_t *at)
{
    int64_t end = 0;
    for (int r = 0; r < n; r++)
        for (int64_t i = 0; i < rows[r]; i++)
            at[end++] = r * most + i;
    return rows_at(x, at, end);
}

/* numbers[r n + q]: the rows that rank r has for rank q. Of ranks that don't exist as many as for
 * them. The largest; -1 with an error. */
static int64_t tell_rows(kn_comm *c, const int64_t *rows, int n, int64_t *numbers)
{
    int64_t most = 0;
    for (int i = 0; i < n * n; i++)
        numbers[i] = rows[i / n];
    if (strcmp(kn_comm_backend(c), "simulated") != 0 &&
        !kn_all_gather(c, numbers, rows, n, KN_I64, kn_compute_stream(KN_CPU),
                       "all_to_all_tensor: numbers of rows"))
        return -1;
    for (int i = 0; i < n * n; i++)
        most = numbers[i] > most ? numbers[i] : most;
    return most;
}

static kn_tensor *exchange_rows(kn_comm *c, kn_tensor *x, const int64_t *rows, int64_t *numbers,
                                int64_t *from)
{
    const int n = kn_comm_size(c), me = kn_rank(c);
    const int64_t most = tell_rows(c, rows, n, numbers);
    bool alike = true;
    for (int i = 0; i < n * n; i++)
        alike = alike && numbers[i] == most;
    for (int r = 0; r < n; r++)
        from[r] = numbers[r * n + me];
    if (most < 0 || alike)
        return most < 0 ? NULL : apply(TO_ALL, c, x, 0, 0);
    int64_t *at = kn_host_alloc((size_t)(n * most) * sizeof *at);
    kn_tensor *y = at ? pack(x, rows, n, most, at) : NULL;
    y = y ? apply(TO_ALL, c, y, 0, 0) : NULL;
    y = y ? unpack(y, from, n, most, at) : NULL;
    kn_host_free(at);
    return y;
}

static bool check_rows(const char *op, const kn_tensor *x, const int64_t *rows, int n)
{
    int64_t sum = 0;
    if (x->ndim < 1)
        return kn_fail("%s: sends rows of a tensor, got %s", op, KN_SHOWN(x));
    for (int r = 0; r < n && rows; r++) {
        if (rows[r] < 0 || rows[r] > x->shape[0] - sum)
            return kn_fail("%s: %lld rows for rank %d after %lld, of %s", op, (long long)rows[r], r,
                           (long long)sum, KN_SHOWN(x));
        sum += rows[r];
    }
    return !rows || sum == x->shape[0] ||
           kn_fail("%s: the numbers of rows add up to %lld, of %s", op, (long long)sum,
                   KN_SHOWN(x));
}

kn_tensor *kn_all_to_all_tensor(kn_comm *c, kn_tensor *x, const int64_t *rows, int64_t *received)
{
    const char *op = collectives[TO_ALL].name;
    if (!ranks_of(&c, op) || !kn_check(x, op) || !check_rows(op, x, rows, kn_comm_size(c)))
        return NULL;
    const int n = kn_comm_size(c);
    for (int r = 0; r < n && received && !rows; r++)
        received[r] = x->shape[0] / n;
    if (!rows)
        return apply(TO_ALL, c, x, 0, 0);
    int64_t *numbers = kn_host_alloc((size_t)(n * n + n) * sizeof *numbers);
    kn_scope scope = kn_scope_begin();
    kn_tensor *y = numbers ? exchange_rows(c, x, rows, numbers, numbers + n * n) : NULL;
    kn_scope_end_except(scope, &y, 1);
    if (y && received)
        memcpy(received, numbers + n * n, (size_t)n * sizeof *received);
    kn_host_free(numbers);
    return y;
}
