/* kernels/checks.c: the arrays of a kernel's arguments against its row (kernels.h): how many there
 * are, their dtypes and shapes. */
#include "kernels/checks.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* ---- rows ------------------------------------------------------------------------------------ */

#define BIT(t) (1u << (t))
#define FLOATS (BIT(KN_F32) | BIT(KN_BF16) | BIT(KN_F16) | BIT(KN_F64))

static const struct class
{
    char letter;
    unsigned dtypes;
    const char *names;
} classes[] = {
    { 'f', FLOATS, "f32, bf16, f16 or f64" },
    { 'a', FLOATS | BIT(KN_I64) | BIT(KN_I32) | BIT(KN_U8) | BIT(KN_BOOL),
      "f32, bf16, f16, f64, i64, i32, u8 or bool, which have arithmetic" },
    { 'i', BIT(KN_I64) | BIT(KN_I32), "i64 or i32" },
    { 'h', BIT(KN_BF16) | BIT(KN_F16), "bf16 or f16" },
    { 'l', BIT(KN_I64), "i64" },
    { 'n', BIT(KN_I32), "i32" },
    { 'b', BIT(KN_BOOL), "bool" },
    { 't', ~0u, "any" },
};
enum { CLASSES = sizeof classes / sizeof *classes, LETTERS = 26, MOST = 16 };

/* One word of a row, "mask?:b[BHTS]". */
typedef struct word {
    const char *name, *shape;  /* shape: NULL: any */
    int length, dims;          /* of name; of shape, its letters */
    bool optional, some;       /* some: there is a * in shape */
    bool counts;               /* shape is that of elements, of any number of dims */
    const struct class *class; /* NULL: any dtype */
    char same;                 /* the letter of arrays with one dtype; 0: none */
} word;

static word rows[KN_K_COUNT][MOST]; /* a word of length 0 ends each */

static const char *read_word(const char *s, word *w)
{
    *w = (word){ .name = s, .length = (int)strcspn(s, "?:[( ") };
    s += w->length;
    w->optional = *s == '?';
    s += w->optional;
    if (*s == ':') {
        for (int i = 0; i < CLASSES; i++)
            if (classes[i].letter == tolower(s[1]))
                w->class = &classes[i];
        w->same = isupper((unsigned char)s[1]) ? s[1] : 0;
        s += 2;
    }
    if (*s == '[' || *s == '(') {
        w->counts = *s == '(';
        w->shape = ++s;
        w->dims = (int)strcspn(s, "])");
        w->some = memchr(s, '*', (size_t)w->dims) != NULL;
        s += w->dims + 1;
    }
    return s + (*s == ' ');
}

__attribute__((constructor)) static void read_rows(void)
{
#define ARRAYS(entry, name, arrays, ...) arrays,
    static const char *const text[] = { KN_KERNELS(ARRAYS) };
    for (int k = 0; k < KN_K_COUNT; k++) {
        const char *s = text[k];
        for (int i = 0; *s; i++)
            s = read_word(s, &rows[k][i]);
    }
}

int kn_kernel_arrays(kn_kernel k)
{
    int n = 0;
    while (rows[k][n].length > 0)
        n++;
    return n;
}

char *kn_kernel_describe(kn_kernel k, const void *args, char *text, size_t size)
{
    char array[128];
    const kn_array *a = args;
    size_t used = 0;
    text[0] = 0;
    for (const word *w = rows[k]; w->length > 0 && used < size; w++, a++)
        if (a->data || !w->optional)
            used += (size_t)snprintf(text + used, size - used, "%s%.*s %s", used ? ", " : "",
                                     w->length, w->name, kn_array_describe(a, array, sizeof array));
    return text;
}

bool kn_kernel_has_bytes(kn_kernel k, const void *args)
{
    char array[128];
    const kn_array *a = args;
    for (const word *w = rows[k]; w->length > 0; w++, a++)
        if (!a->data && !w->optional && kn_array_numel(a) > 0)
            return kn_fail("%s: array %.*s %s has no bytes", kn_kernel_name(k), w->length, w->name,
                           kn_array_describe(a, array, sizeof array));
    return true;
}

/* ---- dtypes ---------------------------------------------------------------------------------- */

bool kn_check_float(kn_kernel k, kn_dtype t)
{
    return kn_dtype_is_float(t) ||
           kn_fail("%s: dtype %s is not supported; use f32, bf16, f16 or f64", kn_kernel_name(k),
                   kn_dtype_name(t));
}

/* What the letters of a row stand for in this call, as far as its arrays have said. */
typedef struct meaning {
    int64_t size[LETTERS];
    unsigned known; /* of size: bit for bit */
    const int64_t *some;
    int somes;               /* '*': these sizes; -1: not known */
    kn_dtype dtype[LETTERS]; /* 0: not known */
} meaning;

static bool dtype_fits(kn_kernel k, const word *w, const kn_array *a, meaning *m)
{
    const unsigned t = a->dtype;
    if (t >= KN_DTYPE_COUNT || !(w->class->dtypes >> t & 1))
        return kn_fail("%s: %.*s is %s; it must be %s", kn_kernel_name(k), w->length, w->name,
                       kn_dtype_name(a->dtype), w->class->names);
    if (!w->same)
        return true;
    kn_dtype *same = &m->dtype[w->same - 'A'];
    if (!*same)
        *same = a->dtype;
    return *same == a->dtype ||
           kn_fail("%s: %.*s is %s and must be %s, as the arrays that it is computed with",
                   kn_kernel_name(k), w->length, w->name, kn_dtype_name(a->dtype),
                   kn_dtype_name(*same));
}

/* ---- shapes ---------------------------------------------------------------------------------- */

static bool means(meaning *m, char letter, int64_t size)
{
    const int i = letter - 'A';
    if (!(m->known >> i & 1))
        m->size[i] = size;
    m->known |= 1u << i;
    return m->size[i] == size;
}

/* "BHT" of elements: a single letter may be told by them. */
static bool count_fits(const word *w, const kn_array *a, meaning *m)
{
    int64_t n = 1;
    for (int i = 0; i < w->dims && w->dims > 1; i++)
        n *= m->size[w->shape[i] - 'A'];
    return w->dims > 1 ? kn_array_numel(a) == n : means(m, *w->shape, kn_array_numel(a));
}

static bool shape_fits(const word *w, const kn_array *a, meaning *m)
{
    const int somes = w->some ? a->ndim - (w->dims - 1) : 0; /* the others are a letter each */
    if (w->some ? somes < 0 || (m->somes >= 0 && m->somes != somes) : a->ndim != w->dims)
        return false;
    for (int i = 0, d = 0; i < w->dims; i++) {
        if (w->shape[i] != '*') {
            if (!means(m, w->shape[i], a->shape[d++]))
                return false;
            continue;
        }
        m->some = m->somes < 0 ? a->shape + d : m->some;
        m->somes = somes;
        for (int j = 0; j < somes; j++)
            if (m->some[j] != a->shape[d++])
                return false;
    }
    return true;
}

/* "dst[..., M, N] a[..., M, K] b[..., K, N] bias[N]": the words with a shape; returns text. */
static char *describe_row(kn_kernel k, char *text, size_t size)
{
    size_t used = 0;
    for (const word *w = rows[k]; w->length > 0; w++) {
        if (!w->shape)
            continue;
        used += (size_t)snprintf(text + used, size - used, "%s%.*s%c", used ? " " : "", w->length,
                                 w->name, w->counts ? '(' : '[');
        for (int i = 0; i < w->dims; i++) {
            const char letter[] = { w->shape[i], 0 };
            used += (size_t)snprintf(text + used, size - used, "%s%s", i ? ", " : "",
                                     *letter == '*' ? "..." : letter);
        }
        used += (size_t)snprintf(text + used, size - used, "%c", w->counts ? ')' : ']');
    }
    return text;
}

static bool fail_shape(kn_kernel k, const word *w, const kn_array *a, const void *args)
{
    char array[128], all[700], row[400];
    return kn_fail("%s: %.*s %s does not fit: %s; a letter is one size in %s", kn_kernel_name(k),
                   w->length, w->name, kn_array_describe(a, array, sizeof array),
                   kn_kernel_describe(k, args, all, sizeof all), describe_row(k, row, sizeof row));
}

bool kn_kernel_fits(kn_kernel k, const void *args)
{
    const kn_array *a = args;
    meaning m;
    m.known = 0;
    m.somes = -1;
    memset(m.dtype, 0, sizeof m.dtype);
    for (const word *w = rows[k]; w->length > 0; w++, a++) {
        if (w->optional && !a->data)
            continue;
        if (w->shape && !(w->counts ? count_fits : shape_fits)(w, a, &m))
            return fail_shape(k, w, a, args);
        if (w->class && !dtype_fits(k, w, a, &m))
            return false;
    }
    return kn_kernel_fits_more(k, args);
}
