/* kernels/signature.c: the kernels by name, and the arrays that each takes, as its row in
 * kernels/kernels.h says (KN_KERNELS, arrays). */
#include "kernels/checks.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { MOST = 16 /* arrays */, LETTERS = 6 /* of an array */, SIZES = 12 /* of a kernel */ };

/* What an array's dtype has to be. */
typedef enum kind {
    ANY,
    FLOAT,
    NUMBER,
    INDEX,
    ONE /* dtype */,
    ALIKE /* to another array's */
} kind;

/* A word of a signature, "mask?:bool[B,H,T,S]", read. */
typedef struct rule {
    const char *name;
    int length;
    bool optional, shaped;
    kind kind;
    int which; /* ONE: the dtype; ALIKE: the number of the array */
    int letters, star;
    int size[LETTERS]; /* of each dim: the number of its letter; star: where any number of further
                        * dims stands, or -1 */
} rule;

#define KERNEL(entry, name, arrays, ...)                                                           \
    [KN_K_##entry] = { #name, sizeof(kn_##name##_args), arrays },
static struct {
    const char *name;
    size_t size;
    const char *signature;
    int arrays; /* from here on: made of the signature */
    rule rule[MOST];
} kernels[KN_K_COUNT] = { KN_KERNELS(KERNEL) };

static bool is(const char *text, size_t n, const char *word)
{
    return strlen(word) == n && memcmp(text, word, n) == 0;
}

static void read_dtype(kn_kernel k, rule *r, const char *text, size_t n)
{
    r->kind = n == 0                  ? ANY
              : is(text, n, "float")  ? FLOAT
              : is(text, n, "number") ? NUMBER
              : is(text, n, "index")  ? INDEX
                                      : ONE;
    for (int t = 0; r->kind == ONE && t < KN_DTYPE_COUNT; t++)
        if (is(text, n, kn_dtype_name((kn_dtype)t)))
            r->which = t;
    for (int i = 0; r->kind == ONE && r->which == 0 && i < kernels[k].arrays; i++)
        if ((int)n == kernels[k].rule[i].length && memcmp(text, kernels[k].rule[i].name, n) == 0)
            *r = (rule){ .name = r->name, .length = r->length, .kind = ALIKE, .which = i };
}

/* The number of a letter among those of its kernel. */
static int number_of(char letter, char letters[SIZES])
{
    int i = 0;
    while (letters[i] && letters[i] != letter)
        i++;
    letters[i] = letter;
    return i;
}

static void read_signature(int k)
{
    char letters[SIZES] = "";
    for (const char *at = kernels[k].signature; *at; at += *at == ' ') {
        rule *r = &kernels[k].rule[kernels[k].arrays];
        *r = (rule){ .name = at, .length = (int)strcspn(at, "?:[ "), .star = -1 };
        at += r->length;
        const bool optional = *at == '?';
        at += optional;
        const size_t n = *at == ':' ? strcspn(at, "[ ") : 0;
        read_dtype((kn_kernel)k, r, at + 1, n ? n - 1 : 0);
        at += n;
        r->optional = optional;
        r->star = -1;
        r->shaped = *at == '[';
        for (; *at && *at != ' '; at++)
            if (*at == '*')
                r->star = r->letters;
            else if (*at != '[' && *at != ',' && *at != ']')
                r->size[r->letters++] = number_of(*at, letters);
        kernels[k].arrays++;
    }
}

static void read_signatures(void)
{
    for (int k = 0; k < KN_K_COUNT; k++)
        read_signature(k);
}

static const rule *rules_of(kn_kernel k)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_signatures);
    return kernels[k].rule;
}

const char *kn_kernel_name(kn_kernel k)
{
    return (unsigned)k < KN_K_COUNT ? kernels[k].name : "unknown";
}

size_t kn_kernel_size(kn_kernel k)
{
    return kernels[k].size;
}

int kn_kernel_arrays(kn_kernel k)
{
    rules_of(k);
    return kernels[k].arrays;
}

/* "dst f32[2,3], a f32[2,4], b f32[4,3]" */
char *kn_kernel_describe(kn_kernel k, const void *args, char *text, size_t size)
{
    const rule *r = rules_of(k);
    const kn_array *a = args;
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < kernels[k].arrays && used < size; i++)
        if (a[i].data || !r[i].optional)
            used += (size_t)snprintf(text + used, size - used, "%s%.*s %s", used ? ", " : "",
                                     r[i].length, r[i].name, KN_ARRAY_SHOWN(&a[i]));
    return text;
}

bool kn_kernel_has_bytes(kn_kernel k, const void *args)
{
    const rule *r = rules_of(k);
    const kn_array *a = args;
    for (int i = 0; i < kernels[k].arrays; i++)
        if (!a[i].data && !r[i].optional && kn_array_numel(&a[i]) > 0)
            return kn_fail("%s: array %.*s %s has no bytes", kernels[k].name, r[i].length,
                           r[i].name, KN_ARRAY_SHOWN(&a[i]));
    return true;
}

/* ---- whether arrays fit ---------------------------------------------------------------------- */

static bool dtype_fits(const rule *r, const kn_array *a, const kn_array *all)
{
    switch (r->kind) {
    case FLOAT:
        return kn_dtype_is_float(a->dtype);
    case NUMBER:
        return kn_dtype_is_arithmetic(a->dtype);
    case INDEX:
        return a->dtype == KN_I64 || a->dtype == KN_I32;
    case ONE:
        return a->dtype == (kn_dtype)r->which;
    case ALIKE:
        return a->dtype == all[r->which].dtype;
    default:
        return true;
    }
}

/* The sizes that letters stand for, and those of the star, once an array has had them. */
typedef struct sizes {
    int64_t of[SIZES], star[KN_MAX_DIMS]; /* -1: not yet */
    int stars;
} sizes;

static bool size_fits(int64_t *size, int64_t have)
{
    *size = *size < 0 ? have : *size;
    return *size == have;
}

static bool shape_fits(const rule *r, const kn_array *a, sizes *s)
{
    const int stars = a->ndim - r->letters;
    bool fits = r->star < 0 ? stars == 0 : stars >= 0 && (s->stars < 0 || s->stars == stars);
    s->stars = r->star < 0 || !fits ? s->stars : stars;
    for (int d = 0, l = 0; fits && d < a->ndim; d++) {
        const bool star = r->star >= 0 && d >= r->star && d < r->star + stars;
        fits = size_fits(star ? &s->star[d - r->star] : &s->of[r->size[l++]], a->shape[d]);
    }
    return fits;
}

bool kn_kernel_arrays_fit(kn_kernel k, const void *args)
{
    char got[1024];
    const rule *r = rules_of(k);
    const kn_array *a = args;
    sizes s = { .stars = -1 };
    memset(s.of, -1, sizeof s.of);
    memset(s.star, -1, sizeof s.star);
    for (int i = 0; i < kernels[k].arrays; i++) {
        if ((r[i].optional && !a[i].data) ||
            (dtype_fits(&r[i], &a[i], a) && (!r[i].shaped || shape_fits(&r[i], &a[i], &s))))
            continue;
        return kn_fail("%s: %.*s %s does not fit: it takes %s; got %s", kernels[k].name,
                       r[i].length, r[i].name, KN_ARRAY_SHOWN(&a[i]), kernels[k].signature,
                       kn_kernel_describe(k, args, got, sizeof got));
    }
    return true;
}
