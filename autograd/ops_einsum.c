/* autograd/ops_einsum.c: sums of products by an equation ("bhtd,bhsd->bhts"), from views, sums and
 * batched matrix products.
 *
 * A dim has a label: its letter, or its place in the ellipsis, counted from the end. Operands are
 * taken from left to right; a label that neither the result nor a later operand has is summed as
 * soon as possible. */
#include "autograd/operands.h"
#include "autograd/ops.h"
#include <string.h>

enum { LETTERS = 52, LABELS = LETTERS + KN_MAX_DIMS, DOTS = LABELS };

/* Labels of an operand or of the result, in the order of dims. */
typedef struct term {
    int n, label[KN_MAX_DIMS + 1];
} term;

typedef struct equation {
    const char *text;
    int operands;
    bool has_out;
    term in[KN_MAX_IN], out;
    int64_t size[LABELS]; /* of each label; -1: no operand has it */
} equation;

/* A tensor whose dims have labels. */
typedef struct labelled {
    kn_tensor *t; /* NULL with an error */
    term dims;
} labelled;

static uint64_t bit(int label)
{
    return 1ull << label;
}

static uint64_t set_of(const term *t)
{
    uint64_t set = 0;
    for (int i = 0; i < t->n; i++)
        set |= bit(t->label[i]);
    return set;
}

static int place_of(const term *t, int label)
{
    int i = 0;
    while (i < t->n && t->label[i] != label)
        i++;
    return i;
}

/* ---- reading the equation -------------------------------------------------------------------- */

/* 'A' to 'Z', then 'a' to 'z'; -1 for others. */
static int letter(char c)
{
    return c >= 'A' && c <= 'Z' ? c - 'A' : c >= 'a' && c <= 'z' ? c - 'a' + 26 : -1;
}

static bool wrong(const equation *e, const char *at, const char *why)
{
    return kn_fail("einsum: '%.100s': %s at position %lld", e->text, why,
                   (long long)(at - e->text) + 1);
}

/* A letter or an ellipsis at *at joins the term; *at moves to its last character. */
static bool join(const equation *e, term *t, const char **at)
{
    int label = letter(**at);
    if (**at == '.') {
        if (strncmp(*at, "...", 3) != 0)
            return wrong(e, *at, "an ellipsis has three dots, others are found");
        label = DOTS;
        for (int i = 0; i < t->n; i++)
            if (t->label[i] == DOTS)
                return wrong(e, *at, "a second ellipsis of one operand");
    }
    if (label < 0)
        return wrong(e, *at, "neither a letter, ',', '->', '...' nor a space");
    if (label != DOTS && t->n - (place_of(t, DOTS) < t->n) >= KN_MAX_DIMS)
        return wrong(e, *at, "the ninth letter of an operand; tensors have at most 8 dims,");
    t->label[t->n++] = label;
    *at += label == DOTS ? 2 : 0;
    return true;
}

static bool parse(equation *e)
{
    term *t = &e->in[0];
    e->operands = 1;
    for (const char *at = e->text; *at; at++) {
        if (*at == ' ')
            continue;
        if (at[0] == '-' && at[1] == '>') {
            if (e->has_out)
                return wrong(e, at, "a second '->'");
            e->has_out = true;
            t = &e->out;
            at++;
        } else if (*at == ',') {
            if (e->has_out)
                return wrong(e, at, "a comma behind '->'");
            if (e->operands == KN_MAX_IN)
                return wrong(e, at, "the end of operand 16; there are at most 16 of them,");
            t = &e->in[e->operands++];
        } else if (!join(e, t, &at)) {
            return false;
        }
    }
    return true;
}

/* Puts labels of n dims in the place of the ellipsis, the last of which is LABELS - 1. */
static void spread(term *t, int n)
{
    const int at = place_of(t, DOTS);
    if (at == t->n)
        return;
    memmove(t->label + at + n, t->label + at + 1, (size_t)(t->n - at - 1) * sizeof *t->label);
    for (int i = 0; i < n; i++)
        t->label[at + i] = LABELS - n + i;
    t->n += n - 1;
}

/* Labels for each dim of operand i; dims of one label have one size, or 1. */
static bool measure(equation *e, int i, const kn_tensor *x)
{
    term *t = &e->in[i];
    const bool dots = place_of(t, DOTS) < t->n;
    const int letters = t->n - dots;
    if (dots ? letters > x->ndim : letters != x->ndim)
        return kn_fail("einsum: '%.100s': operand %d has %d letters, its tensor is %s", e->text,
                       i + 1, letters, KN_SHOWN(x));
    spread(t, x->ndim - letters);
    for (int d = 0; d < t->n; d++) {
        int64_t *size = &e->size[t->label[d]];
        const int first = place_of(t, t->label[d]);
        if (*size >= 0 && *size != 1 && x->shape[d] != 1 && *size != x->shape[d])
            return kn_fail("einsum: '%.100s': dim %d of operand %d, %s, has size %lld, and %lld "
                           "where its label stood before",
                           e->text, d, i + 1, KN_SHOWN(x), (long long)x->shape[d],
                           (long long)*size);
        if (x->shape[first] != x->shape[d])
            return kn_fail("einsum: '%.100s': dims %d and %d of operand %d, %s, have one letter, "
                           "but not one size",
                           e->text, first, d, i + 1, KN_SHOWN(x));
        *size = *size < 0 || *size == 1 ? x->shape[d] : *size;
    }
    return true;
}

/* Without '->': the dims of ellipses, then letters that stand once, in alphabetical order. */
static bool default_out(equation *e)
{
    int count[LABELS] = { 0 };
    for (int i = 0; i < e->operands; i++)
        for (int d = 0; d < e->in[i].n; d++)
            count[e->in[i].label[d]]++;
    e->out.label[e->out.n++] = DOTS;
    for (int l = 0; l < LETTERS; l++) {
        if (count[l] != 1)
            continue;
        if (e->out.n > KN_MAX_DIMS)
            return kn_fail("einsum: '%.100s': more than %d letters remain in the result; behind "
                           "'->' say which",
                           e->text, KN_MAX_DIMS);
        e->out.label[e->out.n++] = l;
    }
    return true;
}

static bool check_out(equation *e)
{
    int dots = 0;
    for (int l = LETTERS; l < LABELS; l++)
        dots += e->size[l] >= 0;
    const int letters = e->out.n - (place_of(&e->out, DOTS) < e->out.n);
    if (place_of(&e->out, DOTS) < e->out.n && letters + dots > KN_MAX_DIMS)
        return kn_fail("einsum: '%.100s': the result has %d dims or more; at most %d are supported",
                       e->text, letters + dots, KN_MAX_DIMS);
    for (int i = 0; i < e->out.n; i++) {
        const int l = e->out.label[i];
        const char name = (char)(l < 26 ? 'A' + l : 'a' + l - 26);
        if (l < LETTERS && e->size[l] < 0)
            return kn_fail("einsum: '%.100s': letter %c of the result is in no operand", e->text,
                           name);
        if (place_of(&e->out, l) != i)
            return kn_fail("einsum: '%.100s': letter %c stands twice in the result", e->text, name);
    }
    spread(&e->out, dots);
    return true;
}

static bool read_equation(equation *e, int n, kn_tensor *const *x)
{
    if (!parse(e))
        return false;
    KN_OPERANDS_OF(n, x);
    if (e->operands != n)
        return kn_fail("einsum: '%.100s' has %d operands, %d tensors are given", e->text,
                       e->operands, n);
    for (int l = 0; l < LABELS; l++)
        e->size[l] = -1;
    for (int i = 0; i < n; i++)
        if (!measure(e, i, x[i]))
            return false;
    return (e->has_out || default_out(e)) && check_out(e);
}

/* ---- computing ------------------------------------------------------------------------------- */

/* A letter that stands twice is one dim, the diagonal. */
static labelled diagonals(kn_tensor *x, const term *t)
{
    labelled a = { x, *t };
    for (int d = 0; d < a.dims.n; d++) {
        const int first = place_of(&a.dims, a.dims.label[d]), label = a.dims.label[d];
        if (first == d)
            continue;
        a.t = kn_diagonal(a.t, 0, first, d);
        memmove(a.dims.label + d, a.dims.label + d + 1,
                (size_t)(a.dims.n - d - 1) * sizeof *a.dims.label);
        memmove(a.dims.label + first, a.dims.label + first + 1,
                (size_t)(a.dims.n - first - 2) * sizeof *a.dims.label);
        a.dims.n--;
        a.dims.label[a.dims.n - 1] = label;
        d = -1; /* dims have moved */
    }
    return a;
}

/* Sums the dims with these labels, which go, or stay as 1. */
static labelled sum_labels(labelled a, uint64_t labels, bool keep)
{
    int64_t dims[KN_MAX_DIMS];
    int n = 0;
    term left = { 0 };
    for (int d = 0; d < a.dims.n; d++)
        if (labels & bit(a.dims.label[d]))
            dims[n++] = d;
        else
            left.label[left.n++] = a.dims.label[d];
    if (n == 0)
        return a;
    return (labelled){ kn_sum(a.t, n, dims, keep), keep ? a.dims : left };
}

/* The labels of a set, in the order in which they stand in t. */
static term ordered(const term *t, uint64_t set)
{
    term r = { 0 };
    for (int i = 0; i < t->n; i++)
        if (set & bit(t->label[i]))
            r.label[r.n++] = t->label[i];
    return r;
}

/* Permutes a to the order of the terms, which together have its labels, and makes one dim of the
 * dims of each of the last two. */
static kn_tensor *matrices(labelled a, const term *batch, const term *rows, const term *columns)
{
    const term *const all[3] = { batch, rows, columns };
    int64_t order[KN_MAX_DIMS], shape[KN_MAX_DIMS];
    int n = 0, m = 0;
    if (!a.t)
        return NULL;
    for (int k = 0; k < 3; k++) {
        int64_t size = 1;
        for (int i = 0; i < all[k]->n; i++) {
            const int d = place_of(&a.dims, all[k]->label[i]);
            order[n++] = d;
            size *= a.t->shape[d];
            if (k == 0)
                shape[m++] = a.t->shape[d];
        }
        if (k > 0)
            shape[m++] = size;
    }
    kn_tensor *p = kn_permute(a.t, n, order);
    return kn_reshape(p, m, shape);
}

/* a with a dim for each label of t, 1 where it has none. */
static kn_tensor *aligned(labelled a, const term *t)
{
    int64_t order[KN_MAX_DIMS], shape[KN_MAX_DIMS];
    int n = 0;
    if (!a.t)
        return NULL;
    for (int i = 0; i < t->n; i++) {
        const int d = place_of(&a.dims, t->label[i]);
        shape[i] = d < a.dims.n ? a.t->shape[d] : 1;
        if (d < a.dims.n)
            order[n++] = d;
    }
    kn_tensor *p = kn_permute(a.t, n, order);
    return kn_reshape(p, t->n, shape);
}

static term joined(const term *a, const term *b, const term *c)
{
    const term *const all[3] = { a, b, c };
    term r = { 0 };
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < all[k]->n && r.n <= KN_MAX_DIMS; i++)
            r.label[r.n++] = all[k]->label[i];
    return r;
}

/* Where a label that is summed over is 1 long in one operand, the other is summed first. */
static void sum_stretched(labelled *a, labelled *b, uint64_t both)
{
    uint64_t in_a = 0, in_b = 0;
    for (int d = 0; a->t && b->t && d < a->dims.n; d++) {
        const int l = a->dims.label[d];
        if (!(both & bit(l)))
            continue;
        const int64_t na = a->t->shape[d], nb = b->t->shape[place_of(&b->dims, l)];
        in_a |= nb == 1 && na != 1 ? bit(l) : 0;
        in_b |= na == 1 && nb != 1 ? bit(l) : 0;
    }
    *a = sum_labels(*a, in_a, true);
    *b = sum_labels(*b, in_b, true);
}

/* The product of two operands, summed over what isn't needed any more. */
static labelled product(const equation *e, labelled a, labelled b, uint64_t needed)
{
    const uint64_t A = set_of(&a.dims), B = set_of(&b.dims);
    a = sum_labels(a, A & ~B & ~needed, false);
    b = sum_labels(b, B & ~A & ~needed, false);
    sum_stretched(&a, &b, A & B & ~needed);
    const term batch = ordered(&a.dims, A & B & needed), summed = ordered(&a.dims, A & B & ~needed),
               rows = ordered(&a.dims, A & ~B), columns = ordered(&b.dims, B & ~A),
               result = joined(&batch, &rows, &columns);
    if (!a.t || !b.t)
        return (labelled){ 0 };
    if (result.n > KN_MAX_DIMS || (summed.n && batch.n > KN_MAX_DIMS - 2)) {
        kn_fail("einsum: '%.100s': a product on the way needs more than %d dims; multiply in "
                "another order",
                e->text, KN_MAX_DIMS);
        return (labelled){ 0 };
    }
    if (summed.n == 0)
        return (labelled){ kn_mul(aligned(a, &result), aligned(b, &result)), result };
    kn_tensor *x = matrices(a, &batch, &rows, &summed), *y = matrices(b, &batch, &summed, &columns);
    kn_tensor *z = kn_matmul(x, y);
    if (!z)
        return (labelled){ 0 };
    int64_t shape[KN_MAX_DIMS];
    for (int i = 0; i < result.n; i++) {
        const int in_a = place_of(&a.dims, result.label[i]);
        const int in_b = place_of(&b.dims, result.label[i]);
        shape[i] = i < batch.n       ? z->shape[i]
                   : in_a < a.dims.n ? a.t->shape[in_a]
                                     : b.t->shape[in_b];
    }
    return (labelled){ kn_reshape(z, result.n, shape), result };
}

static bool check_tensors(int n, kn_tensor *const *x)
{
    if (n < 1 || n > KN_MAX_IN)
        return kn_fail("einsum: %d tensors; 1 to %d are supported", n, KN_MAX_IN);
    if (!kn_given(x, "einsum", "the list of tensors"))
        return false;
    for (int i = 0; i < n; i++) {
        if (!kn_check(x[i], "einsum"))
            return false;
        if (x[i]->dtype != x[0]->dtype || !kn_dtype_is_float(x[i]->dtype) ||
            kn_device_of(x[i]) != kn_device_of(x[0]))
            return kn_fail("einsum: needs float tensors of one dtype on one device; tensor %d is "
                           "%s on %s, the first %s on %s",
                           i + 1, KN_SHOWN(x[i]), kn_device_name(kn_device_of(x[i])),
                           KN_SHOWN(x[0]), kn_device_name(kn_device_of(x[0])));
    }
    return true;
}

kn_tensor *kn_einsum(const char *text, int n, kn_tensor *const *x)
{
    equation e = { .text = text };
    if (!kn_ok() || !kn_given(text, "einsum", "the equation") || !check_tensors(n, x) ||
        !read_equation(&e, n, x))
        return NULL;
    const uint64_t out = set_of(&e.out);
    labelled a = diagonals(x[0], &e.in[0]);
    for (int i = 1; i < n && a.t; i++) {
        uint64_t needed = out;
        for (int k = i + 1; k < n; k++)
            needed |= set_of(&e.in[k]);
        a = product(&e, a, diagonals(x[i], &e.in[i]), needed);
    }
    a = sum_labels(a, ~out, false);
    return a.t ? aligned(a, &e.out) : NULL;
}
