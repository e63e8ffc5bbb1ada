/* tests/models/numbers_test.c: each number among the options of public functions, given as NaN,
 * infinite, negative and as large as its type: an error that names the option, or a meaning that
 * the header tells. numeric_options.py lists the numbers from the headers, so none is missing. */
#include "knap.h"
#include "tests/models/numbers.h"
#include "tests/models/temp.h"
#include <limits.h>

#include "numeric_options.inc"

/* The number of a field, or of the first of its array. */
#define TYPE_OF(of, field)                                                                         \
    __typeof__(_Generic(&((of *)0)->field,                                                         \
        double *: 0.0, double(*)[2]: 0.0, double(*)[3]: 0.0, int *: 0,                             \
        int64_t *: (int64_t)0, int64_t(*)[2]: (int64_t)0))
#define CALL(of, field, meaning, ...)                                                              \
    static void of##_##field(const double *number, int64_t whole)                                  \
    {                                                                                              \
        const TYPE_OF(of, field) v =                                                               \
            number ? (TYPE_OF(of, field)) * number : (TYPE_OF(of, field))whole;                    \
        __VA_ARGS__;                                                                               \
    }
ROWS(CALL)

static const struct row {
    const char *name;
    void (*call)(const double *number, int64_t whole);
    int meaning;
    bool real;
    size_t size;
} row[] = {
#define ROW(of, field, meaning, ...)                                                               \
    { #of "." #field, of##_##field, meaning,                                                       \
      _Generic((TYPE_OF(of, field))0, double                                                       \
               : true, default                                                                     \
               : false),                                                                           \
      sizeof(TYPE_OF(of, field)) },
    ROWS(ROW)
};
enum { COUNT = sizeof row / sizeof *row };

/* Numbers without a row of their own, and why. */
static const char *const elsewhere[] = {
    "kn_mnist_options.batch",
    "kn_mnist_options.accum", /* need files; loaders share their code */
    "kn_mnist_options.workers",
    "kn_mnist_options.ahead",
    "kn_csv_read_options.fill",    /* NAN has a meaning: tests/data/csv_test.c */
    "kn_init_options.timeout_s",   /* once a process: tests/comm */
    "kn_export_options.end_count", /* needs a language model: imported_test.c */
};

/* ---- the values ------------------------------------------------------------------------------ */

static int bad; /* calls of a test that were taken silently, or whose error names something else */

static void expect_error(const struct row *r, bool wanted, double v)
{
    const char *error = kn_error(), *option = strchr(r->name, '.') + 1;
    char word[64]; /* "strides" is told as "stride ... along rows" */
    snprintf(word, sizeof word, "%s", option);
    const size_t n = strlen(word);
    if (n > 3 && word[n - 1] == 's')
        word[n - 1] = '\0';
    bool named = error && (strstr(error, word) || r->meaning & UNNAMED);
    if (wanted ? !named : error && !named) {
        bad++;
        fprintf(stderr, "%s = %g: %s\n", r->name, v, error ? error : "was taken silently");
    }
    kn_clear_error();
}

static void try_reals(const struct row *r)
{
    const double v[] = { NAN, INFINITY, -INFINITY, -1, -1e300 };
    const int meaning[] = { NANS, INF, INF, NEG, NEG };
    for (int i = 0; i < 5; i++) {
        kn_scope scope = kn_scope_begin();
        r->call(&v[i], 0);
        expect_error(r, !(r->meaning & meaning[i]), v[i]);
        kn_scope_end(scope);
    }
}

static void try_whole(const struct row *r)
{
    const bool wide = r->size == 8;
    const int64_t v[] = { -1, -7, wide ? INT64_MIN : INT_MIN, wide ? INT64_MAX : INT_MAX,
                          wide ? INT64_MAX / 2 : INT_MAX / 2 };
    for (int i = 0; i < (r->meaning & NOT_BIG ? 3 : 5); i++) {
        kn_scope scope = kn_scope_begin();
        r->call(NULL, v[i]);
        if (v[i] < 0)
            expect_error(r, !(r->meaning & NEG), (double)v[i]);
        kn_clear_error(); /* large ones: no crash, but an error, whatever it names, or a meaning */
        kn_scope_end(scope);
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
    for (int i = 0; i < COUNT; i++)
        (row[i].real ? try_reals : try_whole)(&row[i]);
    kn_image_set_free(in.set), kn_text_free(in.text), kn_tokenizer_free(in.tokenizer),
        kn_module_free(&in.l), kn_module_free(&in.net);
    kn_scope_end(scope);
    remove_temp();
    KN_CHECK(bad == 0, "%d calls", bad);
}

static bool listed(const char *name)
{
    for (int i = 0; i < COUNT; i++)
        if (strcmp(row[i].name, name) == 0)
            return true;
    for (size_t i = 0; i < sizeof elsewhere / sizeof *elsewhere; i++)
        if (strcmp(elsewhere[i], name) == 0)
            return true;
    return false;
}

KN_TEST(numbers, none_is_missing)
{
    const size_t all = sizeof numeric_options / sizeof *numeric_options;
    for (size_t i = 0; i < all; i++)
        KN_CHECK(listed(numeric_options[i]), "%s has no row in the table above",
                 numeric_options[i]);
    KN_CHECK(all == COUNT + sizeof elsewhere / sizeof *elsewhere, "%zu", all);
}
