/* tests/data/csv_test.c: tables of numbers in text files, well-formed and not. */
#include "data/csv.h"
#include "tests/failing.h"
#include "tests/models/temp.h"

#include <locale.h>
#include <math.h>

static const char *file(const char *text)
{
    return write_temp("table.csv", text, strlen(text));
}

static bool is(const kn_tensor *t, const double *value, int64_t n)
{
    double x[64];
    if (!t || kn_numel(t) != n || kn_dtype_of(t) != KN_F64 || !kn_to_host(t, x, 8 * (size_t)n))
        return false;
    return memcmp(x, value, 8 * (size_t)n) == 0;
}

/* All of these are the same table. */
KN_TEST(csv, ways_to_write_a_table)
{
    static const struct {
        const char *text;
        char separator;
    } cases[] = {
        { "a,b,c\n1,2.5,-3e2\n4,.5,6\n", 0 },
        { "a,b,c\r\n1,2.5,-3e2\r\n4,.5,6", 0 },
        { "\xef\xbb\xbf"
          "a,b,c\n1,2.5,-3e2\n4,.5,6\n",
          0 },
        { "\n\n a , b ,c \n\n1 ,\t2.5, -3e2 \n  \r\n4,.5,6\n\n", 0 },
        { "\"a\",\"b\",\"c\"\n\"1\",\"2.5\" ,\"-3e2\"\n4,0.5,+6", 0 },
        { "a;b;c\n1;2.5;-3e2\n4;.5;6\n", ';' },
        { "a\tb\tc\n1\t2.5\t-3e2\n4\t.5\t6\n", '\t' },
        { "  a b  c\n1   2.5\t-3e2  \n4 .5 6\n", ' ' },
    };
    const double x[] = { 1, 2.5, 4, .5 }, y[] = { -300, 6 };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kn_csv t;
        KN_CHECK(kn_csv_read(file(cases[i].text), &t, .target = "c", .dtype = KN_F64,
                             .target_dtype = KN_F64, .separator = cases[i].separator),
                 "case %zu", i);
        KN_CHECK(t.rows == 2 && t.inputs == 2 && t.targets == 1, "case %zu", i);
        KN_CHECK(is(t.x, x, 4) && is(t.y, y, 2), "case %zu", i);
        KN_CHECK(kn_ndim(t.x) == 2 && kn_ndim(t.y) == 1 && kn_size(t.x, 0) == 2);
        KN_CHECK(strcmp(t.name[0], "a") == 0 && strcmp(t.name[2], "c") == 0);
        kn_csv_free(&t);
    }
}

KN_TEST(csv, columns)
{
    kn_csv t;
    const char *path = file("id,\"sp\"\"ace, x\",7,d\nx1,1,2,3\n\"multi\nline\",4,5,6\n");
    const double x[] = { 2, 5 }, y[] = { 3, 1, 6, 4 };
    KN_CHECK(kn_csv_read(path, &t, .target = "d, 2", .ignore = "id", .dtype = KN_F64,
                         .target_dtype = KN_F64, .header = KN_CSV_HEADER));
    KN_CHECK(is(t.x, x, 2) && is(t.y, y, 4) && kn_ndim(t.y) == 2);
    KN_CHECK(strcmp(t.name[0], "7") == 0 && strcmp(t.name[1], "d") == 0);
    KN_CHECK(strcmp(t.name[2], "sp\"ace, x") == 0);
    kn_csv_free(&t);
    path = file("1,2,3\n4,5,6\n");
    KN_CHECK(kn_csv_read(path, &t, .target = "-3", .target_dtype = KN_I64));
    KN_CHECK(t.rows == 2 && kn_dtype_of(t.x) == KN_F32 && kn_dtype_of(t.y) == KN_I64);
    KN_CHECK(((int64_t *)kn_data(t.y))[1] == 4 && ((float *)kn_data(t.x))[2] == 5);
    KN_CHECK(strcmp(t.name[0], "column 2") == 0 && strcmp(t.name[2], "column 1") == 0);
    kn_csv_free(&t);
    KN_CHECK(kn_csv_read(path, &t, .header = KN_CSV_HEADER) && t.rows == 1 && !t.y);
    KN_CHECK(t.targets == 0 && strcmp(t.name[1], "2") == 0);
    kn_csv_free(&t);
}

KN_TEST(csv, numbers)
{
    kn_csv t;
    const char *path = file("9223372036854775807,-9223372036854775808\n9007199254740993,2e3\n");
    const int64_t whole[] = { INT64_MAX, INT64_MIN, 9007199254740993, 2000 };
    KN_CHECK(kn_csv_read(path, &t, .dtype = KN_I64));
    KN_CHECK(memcmp(kn_data(t.x), whole, sizeof whole) == 0);
    kn_csv_free(&t);
    const char *before = setlocale(LC_NUMERIC, NULL);
    setlocale(LC_NUMERIC, "de_DE.UTF-8"); /* where the machine has it */
    const double x[] = { 0.1, 1e-310, 123456789.125 };
    KN_CHECK(kn_csv_read(file("0.1\n1e-310\n123456789.125"), &t, .dtype = KN_F64));
    KN_CHECK(is(t.x, x, 3));
    kn_csv_free(&t);
    setlocale(LC_NUMERIC, before);
}

KN_TEST(csv, missing_values)
{
    kn_csv t;
    const char *path = file("a,b\n1,\nna,?\nN/A,NaN\nnull,2\n\"\",3\n");
    const double x[] = { 1, -1, -1, -1, -1, -1, -1, 2, -1, 3 };
    KN_CHECK(kn_csv_read(path, &t, .fill_missing = true, .fill = -1, .dtype = KN_F64));
    KN_CHECK(is(t.x, x, 10));
    kn_csv_free(&t);
    KN_CHECK(kn_csv_read(path, &t, .target = "b", .fill_missing = true, .fill = NAN));
    const float *a = kn_data(t.x), *b = kn_data(t.y);
    for (int i = 0; i < 5; i++)
        KN_CHECK(!isnan(a[i]) == (i == 0) && !isnan(b[i]) == (i >= 3), "row %d: %g %g", i, a[i],
                 b[i]);
    kn_csv_free(&t);
    REFUSED(kn_csv_read(path, &t, .fill_missing = true, .fill = NAN, .dtype = KN_I32),
            ":2, column 2 (b): '' is missing, and its column can't hold .fill");
    REFUSED(kn_csv_read(path, &t),
            "table.csv:2, column 2 (b): '' is a missing value; .fill_missing");
    REFUSED(kn_csv_read(path, &t, .fill_missing = true, .fill = 0.5, .dtype = KN_I64),
            ":2, column 2 (b): '' is missing, and its column can't hold .fill");
}

KN_TEST(csv, errors)
{
    static const struct {
        const char *text, *error;
        kn_csv_read_options o;
    } cases[] = {
        { "a,b\n1,2\n3,x4\n", "table.csv:3, column 2 (b): 'x4' is no number" },
        { "1,2\n\n3,x4\n", "table.csv:3, column 2 (column 2): 'x4' is no number" },
        { "a\n1\n\"2\n3\"\n", "table.csv:3, column 1 (a): '2?3' is no number" },
        { "a\n1e5x\n", "'1e5x' is no number" },
        { "a\n1.2.3\n", "'1.2.3' is no number" },
        { "a\n-\n", "'-' is no number" },
        { "a\n0x10\n", "'0x10' is no number" },
        { "a\ninf\n", "'inf' is no number" },
        { "a\n1\r2\n", "'1?2' is no number" },
        { "a\n1e39\n", "'1e39' is too large for its column" },
        { "a\n1e309\n", "'1e309' is too large", { .dtype = KN_F64 } },
        { "a\n1.5\n", "'1.5' is no whole number that its column can hold", { .dtype = KN_I64 } },
        { "a\n9223372036854775808\n", "is no whole number", { .dtype = KN_I64 } },
        { "a\n1e19\n", "is no whole number", { .dtype = KN_I64 } },
        { "a\n2147483648\n", "is no whole number", { .dtype = KN_I32 } },
        { "a,b\n1,2\n3\n", "table.csv:3 has only 1 fields, but the first line has 2" },
        { "a,b\n1,2,\n", "table.csv:2 has more than 2 fields" },
        { "a,b\n1,\"2\n3,4\n", "table.csv:2, column 2: the quote that begins here has no end" },
        { "a,b\n1,\"2\"3\n", "table.csv:2, column 2: '3' follows the closing quote" },
        { "a,b\n", "has a header and no line behind it" },
        { "\n \r\n\n", "has no line with a field" },
        { "a,b\n1,2\n", "has no column 'c'; its 2 columns are a, b", { .target = "c" } },
        { "weight,height\n1,2\n",
          "has no column 'hieght'; did you mean 'height'? (2 columns: weight, height)",
          { .ignore = "hieght" } },
        { "1,2\n3,4\n",
          "has no column 'a'; its 2 columns are column 1, column 2",
          { .target = "a" } },
        { "a,b\n1,2\n", "has no column '0'", { .target = "0" } },
        { "a,b\n1,2\n", "has no column '3'", { .target = "3" } },
        { "a,b\n1,2\n", "has no column ''", { .target = "a,,b" } },
        { "a,a\n1,2\n", "columns 1 and 2 are both called 'a'", { .target = "a" } },
        { "a,b\n1,2\n", "column 'a' is given twice", { .target = "a", .ignore = "1" } },
        { "a,b\n1,2\n", "leave no column for x", { .target = "a", .ignore = "b" } },
        { "a\n1\n", "dtype bf16", { .dtype = KN_BF16 } },
        { "a\n1\n", "dtype u8", { .target_dtype = KN_U8 } },
        { "a\n1\n", "the separator can't be character 10", { .separator = '\n' } },
        { "a\n1\n", ".header 7 is none", { .header = (kn_csv_header)7 } },
        { "a\n1\n", ".fill is given without .fill_missing", { .fill = 2 } },
    };
    int64_t live = kn_live_tensors();
    kn_csv t;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        KN_CHECK(!kn_csv_read_(file(cases[i].text), &t, cases[i].o), "case %zu", i);
        KN_CHECK(!kn_ok() && strstr(kn_error(), cases[i].error), "case %zu", i);
        KN_CHECK(!t.x && !t.y && !t.name && t.rows == 0);
        kn_clear_error();
    }
    REFUSED(kn_csv_read(temp_path("none.csv"), &t), "cannot open the table");
    KN_CHECK(kn_live_tensors() == live);
}

/* Every prefix of a file, and every byte of it replaced, is read or is an error. */
KN_TEST(csv, damaged_files)
{
    static const char text[] = "a,\"b\"\"\",c\r\n1,2.5,-3e2\n\"4\",,NA\r\n7,8,9";
    static const char bytes[] = { 0, '"', ',', '\n', 'e' };
    char copy[sizeof text];
    kn_csv t;
    for (size_t n = 1; n < sizeof text; n++)
        for (size_t b = 0; b <= sizeof bytes; b++) {
            memcpy(copy, text, sizeof text);
            if (b < sizeof bytes)
                copy[n - 1] = bytes[b];
            size_t size = b < sizeof bytes ? sizeof text - 1 : n;
            bool ok = kn_csv_read(write_temp("table.csv", copy, size), &t, .fill_missing = true,
                                  .target = "1");
            KN_CHECK(ok == kn_ok() && ok == (t.x != NULL));
            kn_clear_error();
            kn_csv_free(&t);
        }
}

KN_TEST(csv, a_huge_line)
{
    enum { COLUMNS = 30000 };
    char *text = malloc(2 * COLUMNS * 2 + 2000), *p = text;
    for (int row = 0; row < 2; row++)
        for (int i = 0; i < COLUMNS; i++) {
            *p++ = '7';
            *p++ = i + 1 < COLUMNS ? ',' : '\n';
        }
    kn_csv t;
    KN_CHECK(kn_csv_read(write_temp("table.csv", text, (size_t)(p - text)), &t));
    KN_CHECK(t.rows == 2 && t.inputs == COLUMNS);
    KN_CHECK(((float *)kn_data(t.x))[2 * COLUMNS - 1] == 7);
    kn_csv_free(&t);
    p[-1] = '9';
    memset(p, '9', 1000); /* a number that is too long for one */
    REFUSED(kn_csv_read(write_temp("table.csv", text, (size_t)(p - text) + 1000), &t),
            "table.csv:2, column 30000 (column 30000): '7999");
    free(text);
}

static bool reads(void *path)
{
    kn_csv t;
    const bool done = kn_csv_read(path, &t, .target = "b");
    if (done)
        kn_csv_free(&t);
    return done;
}

KN_TEST(csv, every_allocation_failing)
{
    each_allocation_fails(reads, NULL, (void *)(uintptr_t)file("a,b\n1,2\n3,4\n"), 3);
}
