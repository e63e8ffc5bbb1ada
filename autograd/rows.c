/* autograd/rows.c: gradients of tables that stay rows: kn_keep_rows. Memory and time of a backward
 * grow with the rows that it used, not with the table. All of it is made of kernels that add in the
 * order of positions, so bits depend neither on threads nor on how rows lie on ranks. */
#include "autograd/rows.h"
#include "autograd/ops.h"
#include "kernels/graph_internal.h"
#include "kernels/memory_internal.h"

kn_rows *kn_table_of(const kn_tensor *w)
{
    return w && w->leaf ? w->leaf->rows : NULL;
}

static void drop(kn_row_list *l)
{
    kn_tensor_free(l->ids);
    kn_tensor_free(l->values);
    *l = (kn_row_list){ 0 };
}

static void drop_uses(kn_rows *r)
{
    while (r->uses > 0)
        drop(&r->use[--r->uses]);
    r->padded = false;
}

bool kn_rows_any(const kn_leaf *leaf)
{
    return leaf && leaf->rows && leaf->rows->sum.ids;
}

void kn_rows_drop(kn_leaf *leaf)
{
    if (leaf->rows)
        drop(&leaf->rows->sum);
}

void kn_rows_free(kn_leaf *leaf)
{
    if (!leaf->rows)
        return;
    drop(&leaf->rows->sum);
    drop_uses(leaf->rows);
    kn_tensor_free(leaf->rows->shard);
    kn_host_free(leaf->rows->use);
    kn_host_free(leaf->rows);
    leaf->rows = NULL;
}

kn_tensor *kn_keep_rows(kn_tensor *w)
{
    if (!kn_ok() || !kn_check(w, "kn_keep_rows"))
        return NULL;
    if (w->node || w->ndim != 2 || w->shape[1] < 1 || !kn_dtype_is_float(w->dtype))
        return kn_fail_null("kn_keep_rows: %s%s is no table: it takes a leaf [rows, columns] of "
                            "floats, with a column at least",
                            KN_SHOWN(w), w->node ? ", which an operation made," : "");
    kn_leaf *leaf = kn_leaf_of(w);
    if (leaf && (leaf->dest || leaf->grad))
        return kn_fail_null("kn_keep_rows: '%s' %s; call it right after the table was made",
                            kn_name(w), leaf->dest ? "is sharded" : "has a gradient");
    if (leaf && !leaf->rows)
        leaf->rows = kn_host_calloc(1, sizeof *leaf->rows);
    return leaf && leaf->rows ? w : NULL;
}

static kn_tensor *part_of_grad(const kn_tensor *w, bool ids, const char *what)
{
    const kn_rows *r = kn_table_of(w);
    if (!kn_given(w, what, "the table"))
        return NULL;
    if (!r)
        return kn_fail_null("%s: '%s' keeps no rows (kn_keep_rows, .sparse); kn_grad has its "
                            "gradient",
                            what, kn_name(w));
    if (w->leaf->accum == KN_ACCUM_SPOILED)
        return kn_fail_null("%s: the gradient of '%s' can't be used: " KN_SPOILED_GRAD, what,
                            kn_name(w));
    return ids ? r->sum.ids : r->sum.values;
}

kn_tensor *kn_grad_rows(const kn_tensor *w)
{
    return part_of_grad(w, true, "kn_grad_rows");
}

kn_tensor *kn_grad_values(const kn_tensor *w)
{
    return part_of_grad(w, false, "kn_grad_values");
}

/* ---- equal numbers --------------------------------------------------------------------------- */

static bool put(kn_tensor *to, kn_tensor *from, kn_tensor *at)
{
    return to && from &&
           KN_RUN(to, KN_K_SCATTER,
                  ((kn_scatter_args){ kn_array_of(to), kn_array_of(from), kn_array_of(at), 0, false,
                                      "rows" }));
}

/* The number at position i of t[n]. */
static int64_t number_at(kn_tensor *t, int64_t i)
{
    return (int64_t)kn_item(kn_tensor_alias(t, i, 0, NULL, NULL));
}

/* The distinct numbers among ids[n] that aren't `none`, rising, and for each of ids where it is
 * among them (none: behind them). */
typedef struct distinct {
    kn_tensor *ids, *at; /* [count], [n] */
    int64_t count;
} distinct;

/* A number begins where it isn't the one before; the beginnings so far number the distinct ones. */
static bool distinct_of(kn_tensor *ids, int64_t none, distinct *d)
{
    const int64_t n = kn_numel(ids), one = 1, rest = n - 1;
    const kn_device device = kn_device_of(ids);
    kn_tensor *from, *sorted = kn_sort(ids, 0, .indices = &from);
    kn_tensor *number = kn_zeros(KN_I64, device, 1, &n);
    if (!sorted || !number)
        return false;
    d->count = 0;
    if (n > 0) {
        kn_tensor *begins = kn_ne(kn_tensor_alias(sorted, 1, 1, &rest, &one),
                                  kn_tensor_alias(sorted, 0, 1, &rest, &one));
        kn_tensor *behind = kn_tensor_alias(number, 1, 1, &rest, &one);
        if (!begins || !behind || !kn_copy_(behind, begins) || !(number = kn_cumsum(number, 0)))
            return false;
        /* on meta there are no values: as many as there can be */
        d->count = device == KN_META ? n : number_at(number, n - 1) + 1;
    }
    d->ids = kn_empty(KN_I64, device, 1, &d->count);
    d->at = kn_empty(KN_I64, device, 1, &n);
    if (n == 0)
        return d->ids && d->at;
    if (!put(d->ids, sorted, number) || !put(d->at, number, from))
        return false;
    if (none < 0 || device == KN_META || number_at(d->ids, d->count - 1) != none)
        return kn_ok();
    d->count--;
    d->ids = kn_tensor_alias(d->ids, 0, 1, &d->count, &one);
    return d->ids != NULL;
}

/* *to gets the sums of values[n, C] at equal numbers, each in the order of positions; none: as
 * distinct_of. */
static bool add_up(kn_row_list from, int64_t none, kn_dtype dtype, kn_row_list *to)
{
    distinct d;
    if (!distinct_of(from.ids, none, &d))
        return false;
    const int64_t c = from.values->shape[1], with = kn_numel(d.ids) + (none >= 0);
    kn_tensor *sum = kn_tensor_new(dtype, kn_device_of(from.ids), NULL, KN_MEM_GRAD,
                                   KN_SHAPE(with, c), NULL, true);
    if (!sum || !kn_fill_(sum, 0) ||
        !KN_RUN(sum, KN_K_INDEX_ADD,
                ((kn_index_add_args){ kn_array_of(sum), kn_array_of(from.values), kn_array_of(d.at),
                                      0 })))
        return false;
    to->ids = kn_contiguous(d.ids);
    to->values = kn_tensor_alias(sum, 0, KN_SHAPE(d.count, c), (int64_t[]){ c, 1 });
    return to->ids && to->values;
}

/* One list behind the other. */
static bool join(const kn_row_list *list, int n, kn_dtype dtype, kn_row_list *to)
{
    int64_t all = 0, at = 0, one = 1;
    const int64_t c = list[0].values->shape[1];
    *to = list[0];
    if (n == 1)
        return true;
    for (int i = 0; i < n; i++)
        all += kn_numel(list[i].ids);
    const kn_device d = kn_device_of(list[0].ids);
    to->ids = kn_empty(KN_I64, d, 1, &all);
    to->values = kn_empty(dtype, d, KN_SHAPE(all, c));
    bool ok = to->ids && to->values;
    for (int i = 0; ok && i < n; i++) {
        const int64_t k = kn_numel(list[i].ids);
        kn_tensor *ids = kn_tensor_alias(to->ids, at, 1, &k, &one);
        kn_tensor *values =
            kn_tensor_alias(to->values, at * c, KN_SHAPE(k, c), (int64_t[]){ c, 1 });
        ok = ids && values && kn_copy_(ids, list[i].ids) && kn_copy_(values, list[i].values);
        at += k;
    }
    return ok;
}

/* ---- forward --------------------------------------------------------------------------------- */

/* What is there of the table w. */
static kn_array whole_rows(const kn_tensor *w)
{
    const kn_tensor *t = w->leaf->rows->shard;
    const int64_t c = w->shape[1], shape[2] = { t ? kn_numel(t) / c : 0, c };
    return t ? kn_array_make(kn_array_of(t).data, t->dtype, 2, shape) : kn_array_of(w);
}

bool kn_pick(kn_tensor *to, kn_array from, kn_tensor *ids)
{
    kn_tensor *same =
        to->dtype == from.dtype ? to : kn_empty(from.dtype, kn_device_of(to), to->ndim, to->shape);
    return same && kn_ok() &&
           KN_RUN(to, KN_K_INDEX_SELECT,
                  ((kn_index_select_args){ kn_rows_of(same), from, kn_flat(ids), 0 })) &&
           (same == to || kn_grad_copy(to, same));
}

/* This rank's numbers go to the owners, and rows come back. */
static bool pick_over_ranks(const kn_tensor *w, kn_tensor *ids, kn_tensor *y)
{
    const kn_rows *r = w->leaf->rows;
    distinct d;
    kn_routes x = { 0 };
    const int64_t c = w->shape[1];
    bool ok = distinct_of(ids, -1, &d) && kn_routes_find(&x, w, "rows", d.ids, d.count);
    kn_tensor *asked = ok ? kn_routes_send(&x, d.ids) : NULL;
    kn_tensor *rows = asked ? kn_empty(y->dtype, kn_device_of(y), KN_SHAPE(x.come, c)) : NULL;
    ok = rows && kn_pick(rows, whole_rows(w), kn_add_scalar(asked, -(double)r->first));
    kn_tensor *mine = ok ? kn_routes_answer(&x, rows) : NULL;
    kn_routes_free(&x);
    return mine && kn_pick(y, kn_array_of(mine), d.at);
}

bool kn_rows_pick(kn_tensor *w, kn_tensor *ids, kn_tensor *y)
{
    const kn_rows *r = w->leaf->rows;
    if (r->ranks < 2)
        return kn_pick(y, whole_rows(w), ids);
    if (!r->comm)
        return kn_fail("embedding: the table '%s' lies on %d ranks; use it in a forward of its "
                       "module",
                       kn_name(w), r->ranks);
    if (kn_unrecordable(kn_device_of(w), "embedding: a table over ranks ('%s')", kn_name(w)))
        return false;
    const int64_t n = kn_numel(ids), one = 1;
    kn_tensor *flat = kn_cast(kn_tensor_alias(ids, 0, 1, &n, &one), KN_I64);
    return flat && pick_over_ranks(w, flat, y);
}

/* ---- backward -------------------------------------------------------------------------------- */

bool kn_rows_note(kn_leaf *leaf, kn_tensor *ids, kn_tensor *dy, int64_t padding)
{
    kn_rows *r = leaf->rows;
    kn_tensor *w = leaf->tensor;
    const int64_t n = kn_numel(ids), c = w->shape[1], one = 1;
    if (kn_in_grad_of())
        return kn_fail("embedding: '%s' keeps its gradient as rows, which kn_grad_of can't return; "
                       "kn_backward, then kn_grad_rows and kn_grad_values",
                       kn_name(w));
    if (kn_unrecordable(kn_device_of(w), "the gradient of '%s', which is rows,", kn_name(w)) ||
        !kn_host_grow(&r->use, &r->room, r->uses + 1, sizeof *r->use))
        return false;
    ids = kn_cast(kn_tensor_alias(ids, 0, 1, &n, &one), KN_I64);
    dy = kn_contiguous(dy);
    dy = dy ? kn_tensor_alias(dy, 0, KN_SHAPE(n, c), (int64_t[]){ c, 1 }) : NULL;
    if (ids && padding >= 0)
        ids = kn_masked_fill(ids, kn_eq(ids, kn_full_like(ids, (double)padding)),
                             (double)w->shape[0]);
    if (!ids || !dy)
        return false;
    r->padded = r->padded || padding >= 0;
    r->use[r->uses++] = (kn_row_list){ kn_keep(ids), kn_keep(dy) };
    return true;
}

/* Each rank's sums go to the owners of the rows; *to: those that came, by rank, with the numbers of
 * this rank's rows. */
static bool to_owners(const kn_tensor *w, kn_row_list sums, kn_row_list *to)
{
    kn_routes x = { 0 };
    bool ok = kn_routes_find(&x, w, "gradients", sums.ids, kn_numel(sums.ids));
    to->ids = ok ? kn_routes_send(&x, sums.ids) : NULL;
    to->values = to->ids ? kn_routes_send(&x, sums.values) : NULL;
    kn_routes_free(&x);
    to->ids = to->values ? kn_add_scalar(to->ids, -(double)kn_table_of(w)->first) : NULL;
    return to->ids != NULL;
}

/* Sums of a backward that used nothing here. */
static bool nothing(const kn_tensor *w, kn_row_list *to)
{
    const int64_t none = 0;
    to->ids = kn_empty(KN_I64, kn_device_of(w), 1, &none);
    to->values = kn_empty(kn_wide_dtype(w->dtype), kn_device_of(w), KN_SHAPE(none, w->shape[1]));
    return to->ids && to->values;
}

/* ((what came before + rank 0's sum) + rank 1's) + ... */
static bool complete(kn_leaf *leaf, kn_row_list *sum)
{
    kn_rows *r = leaf->rows;
    const kn_tensor *w = leaf->tensor;
    kn_row_list all, list[2];
    int n = 0;
    if (r->uses == 0 ? !nothing(w, sum)
                     : !join(r->use, r->uses, r->use[0].values->dtype, &all) ||
                           !add_up(all, r->padded ? w->shape[0] : -1, kn_wide_dtype(w->dtype), sum))
        return false;
    if (r->ranks > 1 && !to_owners(w, *sum, sum))
        return false;
    if (r->sum.ids)
        list[n++] = r->sum;
    list[n++] = *sum;
    return (n == 1 && r->ranks < 2) || (join(list, n, kn_wide_dtype(w->dtype), &all) &&
                                        add_up(all, -1, kn_wide_dtype(w->dtype), sum));
}

bool kn_rows_complete(kn_leaf *leaf, bool *any)
{
    kn_rows *r = leaf->rows;
    *any = r->uses > 0 || r->ranks > 1;
    if (!*any)
        return true;
    for (const kn_hook_entry *h = leaf->hooks; h; h = h->next)
        if (h->hook)
            return kn_fail("backward: a hook looks at the gradient of '%s', which stays rows; "
                           "kn_on_accumulated, and there kn_grad_values",
                           kn_name(leaf->tensor));
    if (r->ranks > 1 && !r->comm)
        return kn_fail("backward: the ranks of the table '%s' are gone", kn_name(leaf->tensor));
    kn_scope s = kn_scope_begin();
    kn_row_list sum;
    bool ok = complete(leaf, &sum);
    if (ok) {
        leaf->accum = leaf->accum ? leaf->accum : r->sum.ids ? KN_ACCUM_GROWN : KN_ACCUM_BEGUN;
        kn_keep(sum.ids);
        kn_keep(sum.values);
        drop(&r->sum);
        r->sum = sum;
    }
    drop_uses(r);
    kn_scope_end(s);
    return ok;
}

void kn_rows_failed(kn_leaf *leaf)
{
    if (!leaf->rows)
        return;
    drop_uses(leaf->rows);
    if (leaf->accum == KN_ACCUM_BEGUN)
        drop(&leaf->rows->sum);
}
