/* tests/models/numbers_test.c: each number among the options of public functions, given as NaN,
 * infinite, negative and as large as its type: an error that names the option, or a meaning that
 * the header tells. numeric_options.py lists the numbers from the headers: one in a struct without
 * a call doesn't compile. */
#include "tests/models/numbers.h"
#include "tests/models/temp.h"
#include <limits.h>

#include "numeric_options.inc"

#define UNPACKED(...) __VA_ARGS__
#define CALL(of, needs, ...)                                                                       \
    static void of##_call(const void *options)                                                     \
    {                                                                                              \
        of o = *(const of *)options;                                                               \
        __VA_ARGS__;                                                                               \
    }                                                                                              \
    static void of##_needs(void *options)                                                          \
    {                                                                                              \
        *(of *)options = (of){ UNPACKED needs };                                                   \
    }
ROWS(CALL)

typedef struct row {
    const char *name;
    void (*call)(const void *options), (*needs)(void *options);
    size_t struct_size, at, size, count; /* a number may be an array */
    bool real;
} row;

/* The number of a field, or the first of its array. */
#define FIRST_OF(of, field)                                                                        \
    _Generic(&((of *)0)->field, double *: 0.0, double(*)[2]: 0.0, double(*)[3]: 0.0, int *: 0,     \
             int64_t *: (int64_t)0, int64_t(*)[2]: (int64_t)0, int64_t(*)[3]: (int64_t)0)
#define ROW(of, field)                                                                             \
    { #of "." #field,                                                                              \
      of##_call,                                                                                   \
      of##_needs,                                                                                  \
      sizeof(of),                                                                                  \
      offsetof(of, field),                                                                         \
      sizeof FIRST_OF(of, field),                                                                  \
      sizeof((of *)0)->field / sizeof FIRST_OF(of, field),                                         \
      _Generic(FIRST_OF(of, field), double                                                         \
               : true, default                                                                     \
               : false) },
static const row rows[] = { NUMBERS(ROW) };

static bool ends_with(const char *name, const char *end)
{
    const size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

static int meaning_of(const char *name)
{
    for (size_t i = 0; i < sizeof meanings / sizeof *meanings; i++)
        if (ends_with(name, meanings[i].name))
            return meanings[i].meaning;
    return 0;
}

/* ---- the values ------------------------------------------------------------------------------ */

static int bad; /* calls of a test that were taken silently, or whose error names something else */

static void expect_error(const row *r, bool wanted, double v)
{
    const char *error = kn_error(), *option = strchr(r->name, '.') + 1;
    char word[64]; /* "strides" is told as "stride ... along rows" */
    snprintf(word, sizeof word, "%s", option);
    const size_t n = strlen(word);
    if (n > 3 && word[n - 1] == 's')
        word[n - 1] = '\0';
    bool named = error && (strstr(error, word) || meaning_of(r->name) & UNNAMED);
    if (wanted ? !named : error && !named) {
        bad++;
        fprintf(stderr, "%s = %g: %s\n", r->name, v, error ? error : "was taken silently");
    }
}

/* Calls with the number k of r as value says; others of the array are 1. */
static void call_with(const row *r, size_t k, double real, int64_t whole)
{
    union {
        size_t size; /* options begin with theirs */
        char bytes[1024];
    } options;
    r->needs(&options);
    if (strstr(r->name, "_options."))
        options.size = r->struct_size;
    for (size_t i = 0; i < r->count; i++) {
        const double x = i == k ? real : 1;
        const int64_t n = i == k ? whole : 1;
        const int small = (int)n;
        memcpy(options.bytes + r->at + i * r->size,
               r->real        ? (const void *)&x
               : r->size == 8 ? (const void *)&n
                              : &small,
               r->size);
    }
    r->call(&options);
}

static void try_reals(const row *r, size_t k)
{
    const double v[] = { NAN, INFINITY, -INFINITY, -1, -1e300 };
    const int meaning[] = { NANS, INF, INF, NEG | MINUS_ONE, NEG };
    for (int i = 0; i < 5; i++) {
        call_with(r, k, v[i], 0);
        expect_error(r, !(meaning_of(r->name) & meaning[i]), v[i]);
        kn_clear_error();
    }
}

static void try_whole(const row *r, size_t k)
{
    const bool wide = r->size == 8;
    const int64_t v[] = { -1, -7, wide ? INT64_MIN : INT_MIN, wide ? INT64_MAX : INT_MAX,
                          wide ? INT64_MAX / 2 : INT_MAX / 2 };
    const int meaning = meaning_of(r->name);
    for (int i = 0; i < (meaning & NOT_BIG ? 3 : 5); i++) {
        call_with(r, k, 0, v[i]);
        if (v[i] < 0)
            expect_error(r, !(meaning & (i ? NEG : NEG | MINUS_ONE)), (double)v[i]);
        kn_clear_error(); /* large ones: no crash, but an error, whatever it names, or a meaning */
    }
}

static void begin(void)
{
    KN_CHECK(kn_linear_init(&in.l, NULL, NULL, 2, 2) && kn_materialize(&in.l, KN_CPU, 1));
    in.rows = kn_from(KN_F32, KN_CPU, (float[]){ 1, 2, 4, 3, 9, 5 }, KN_SHAPE(2, 3));
    in.to = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2));
    in.half = kn_full(KN_F32, KN_CPU, 0.5, KN_SHAPE(4, 2));
    in.q = kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 1, 2, 2));
    in.line = kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 2, 4));
    in.image = kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 1, 4, 4));
    in.w1 = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 2, 2));
    in.w2 = kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 1, 2, 2));
    in.scalar = kn_ones(KN_F64, KN_CPU, KN_SHAPE(1));
    kn_require_grad(in.scalar, true);
    in.tokenizer = kn_tokenizer_create("char", "abc", 3);
    in.text = kn_text_encode(in.tokenizer, "abcabcabcabcabcabcabcabcabcabc", 30);
    in.set = kn_image_set_open("shapes", "train");
    in.pixels = kn_zeros(KN_U8, KN_CPU, KN_SHAPE(3, 4, 4));
    const kn_resnet_config small = { .blocks = { 1 }, .classes = 1, .width = 1 };
    KN_CHECK(kn_resnet_init(&in.net, small, KN_F32, KN_META) && kn_materialize(&in.net, KN_CPU, 1));
    snprintf(in.exported, sizeof in.exported, "%s", temp_path("exported"));
    snprintf(in.saved, sizeof in.saved, "%s", temp_path("saved"));
    KN_CHECK(kn_checkpoint_save(in.saved, &in.l, .step = 1));
    snprintf(in.path, sizeof in.path, "%s", temp_path("numbers"));
    snprintf(in.picture, sizeof in.picture, "%s", temp_path("numbers.png"));
    KN_CHECK_OK();
}

KN_TEST(numbers, bad_ones_are_errors_that_name_the_option)
{
    bad = 0;
    kn_scope scope = kn_scope_begin();
    begin();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (size_t k = 0; k < rows[i].count; k++) {
            IN_SCOPE;
            (rows[i].real ? try_reals : try_whole)(&rows[i], k);
        }
    kn_image_set_free(in.set), kn_text_free(in.text), kn_tokenizer_free(in.tokenizer),
        kn_module_free(&in.l), kn_module_free(&in.net);
    kn_scope_end(scope);
    remove_temp();
    KN_CHECK(bad == 0, "%d calls", bad);
}

/* Each meaning is that of a number. */
KN_TEST(numbers, meanings)
{
    for (size_t k = 0; k < sizeof meanings / sizeof *meanings; k++) {
        int found = 0;
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            found += ends_with(rows[i].name, meanings[k].name);
        KN_CHECK(found, "no number's name ends in %s", meanings[k].name);
    }
}
