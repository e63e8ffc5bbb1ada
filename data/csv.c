/* data/csv.c: reads a table of numbers: once to count lines and check their fields, then, into
 * memory of that size, once more for the values. */
#include "data/csv_internal.h"
#include "data/data.h"
#include "kernels/memory_internal.h"
#include "tensor/tensor_internal.h"

#include <stdlib.h>
#include <string.h>

#define MOST_COLUMNS (1 << 20)

/* The use of a column. */
typedef struct column {
    char *name;
    bool named; /* by the header */
    bool ignored;
    int64_t input, target; /* its place in x or y, or -1 */
} column;

typedef struct reading {
    kn_csv_read_options o;
    kn_mapped map;
    kn_csv_scan scan;
    column *column;
    int64_t columns, room;
    int64_t texts, numbers; /* fields of the first line */
    bool header;
    kn_csv *out;
} reading;

/* ---- columns --------------------------------------------------------------------------------- */

/* A copy of the field's text, quotes in it undone. */
static char *text_of(const kn_csv_field *f)
{
    char *copy = kn_host_alloc(f->length + 1), *to = copy;
    for (size_t i = 0; copy && i < f->length; i++) {
        *to++ = f->text[i];
        i += f->quoted && f->text[i] == '"';
    }
    if (copy)
        *to = '\0';
    return copy;
}

/* The columns as the first line has them. */
static bool read_first_line(reading *t)
{
    kn_csv_field f = { 0 };
    double value;
    if (!kn_csv_more(&t->scan))
        return kn_fail("%s has no line with a field", t->scan.path);
    while (!f.last) {
        if (t->columns == MOST_COLUMNS)
            return kn_fail("%s: its first line has more than %d fields; is '%c' the separator?",
                           t->scan.path, MOST_COLUMNS, t->scan.separator);
        if (!kn_csv_next(&t->scan, &f) ||
            !kn_host_grow(&t->column, &t->room, t->columns + 1, sizeof *t->column))
            return false;
        kn_csv_kind kind = kn_csv_kind_of(&f, &value);
        t->texts += kind == KN_CSV_TEXT;
        t->numbers += kind == KN_CSV_NUMBER;
        t->column[t->columns] = (column){ .input = -1, .target = -1, .name = text_of(&f) };
        if (!t->column[t->columns++].name)
            return false;
    }
    return true;
}

static bool settle_header(reading *t)
{
    kn_csv_header h = t->o.header;
    if ((unsigned)h > KN_CSV_NO_HEADER)
        return kn_fail("kn_csv_read: .header %d is none of kn_csv_header", (int)h);
    /* a line of texts and numbers is data: columns that are left out may hold texts */
    t->header = h == KN_CSV_HEADER || (h == KN_CSV_HEADER_AUTO && t->numbers == 0 && t->texts > 0);
    for (int64_t i = 0; i < t->columns; i++) {
        column *c = &t->column[i];
        c->named = t->header;
        if (t->header && c->name[0])
            continue;
        kn_host_free(c->name);
        c->name = kn_host_alloc(32);
        if (!c->name)
            return false;
        snprintf(c->name, 32, "column %lld", (long long)i + 1);
    }
    return true;
}

/* Names the nearest column, else the first ones. */
static void fail_unknown(const reading *t, const char *name)
{
    char words[2048] = "", list[256] = "", near[64];
    size_t used = 0, shown = 0;
    for (int64_t i = 0; i < t->columns; i++) {
        const char *word = t->column[i].name;
        if (t->column[i].named && used < sizeof words && !strchr(word, '|'))
            used +=
                (size_t)snprintf(words + used, sizeof words - used, "%s%s", used ? "|" : "", word);
        if (shown < sizeof list)
            shown +=
                (size_t)snprintf(list + shown, sizeof list - shown, "%s%s", i ? ", " : "", word);
    }
    if (kn_nearest(name, words, near, sizeof near))
        kn_fail("%s has no column '%s'; did you mean '%s'? (%lld columns: %s%s)", t->scan.path,
                name, near, (long long)t->columns, list, shown < sizeof list ? "" : "...");
    else
        kn_fail("%s has no column '%s'; its %lld columns are %s%s", t->scan.path, name,
                (long long)t->columns, list, shown < sizeof list ? "" : "...");
}

/* The column of a name or number in an option; -1 with an error. */
static int64_t find_column(const reading *t, const char *word, size_t length)
{
    char text[64], *end;
    int64_t found = -1;
    for (int64_t i = 0; i < t->columns; i++) {
        const column *c = &t->column[i];
        if (!c->named || strlen(c->name) != length || memcmp(c->name, word, length) != 0)
            continue;
        if (found >= 0)
            return kn_fail("%s: columns %lld and %lld are both called '%s'; give a number",
                           t->scan.path, (long long)found + 1, (long long)i + 1, c->name),
                   -1;
        found = i;
    }
    snprintf(text, sizeof text, "%.*s", (int)(length < 60 ? length : 60), word);
    long long n = strtoll(text, &end, 10);
    if (found < 0 && length > 0 && *end == '\0' && n != 0 && n >= -t->columns && n <= t->columns)
        found = n > 0 ? n - 1 : t->columns + n;
    if (found < 0)
        fail_unknown(t, text);
    return found;
}

/* Goes through a list of columns: targets, or those left out. */
static bool mark(reading *t, const char *list, bool target)
{
    for (const char *p = list ? list : ""; *p;) {
        size_t n = strcspn(p, ","), begin = strspn(p, " "), length = n > begin ? n - begin : 0;
        while (length > 0 && p[begin + length - 1] == ' ')
            length--;
        int64_t i = find_column(t, p + begin, length);
        if (i < 0)
            return false;
        if (t->column[i].ignored || t->column[i].target >= 0)
            return kn_fail("kn_csv_read: column '%s' is given twice in .target and .ignore",
                           t->column[i].name);
        t->column[i].ignored = !target;
        t->column[i].target = target ? t->out->targets++ : -1;
        p += n + (p[n] == ',');
    }
    return true;
}

static bool settle_columns(reading *t)
{
    if (!mark(t, t->o.target, true) || !mark(t, t->o.ignore, false))
        return false;
    for (int64_t i = 0; i < t->columns; i++)
        if (!t->column[i].ignored && t->column[i].target < 0)
            t->column[i].input = t->out->inputs++;
    return t->out->inputs > 0 ||
           kn_fail("%s: .target and .ignore leave no column for x", t->scan.path);
}

/* ---- lines ----------------------------------------------------------------------------------- */

static bool check_field_count(const reading *t, int64_t fields, bool last)
{
    const kn_csv_scan *s = &t->scan;
    if (fields <= t->columns && (!last || fields == t->columns))
        return true;
    return kn_fail("%s:%lld has %s %lld fields, but the first line has %lld", s->path,
                   (long long)s->line, fields > t->columns ? "more than" : "only",
                   (long long)(fields > t->columns ? t->columns : fields), (long long)t->columns);
}

static bool store(reading *t, const kn_csv_field *f, int64_t row, int64_t i)
{
    const column *c = &t->column[i];
    const bool input = c->input >= 0;
    const kn_tensor *to = input ? t->out->x : t->out->y;
    const int64_t at = input ? row * t->out->inputs + c->input : row * t->out->targets + c->target;
    double value;
    kn_csv_field filled = { .text = "" };
    kn_csv_kind kind = kn_csv_kind_of(f, &value);
    const char *why = NULL;
    if (kind == KN_CSV_TEXT)
        why = "is no number";
    if (kind == KN_CSV_MISSING && !t->o.fill_missing)
        why = "is a missing value; .fill_missing replaces them by .fill";
    if (kind == KN_CSV_MISSING)
        value = t->o.fill;
    if (!why && !kn_csv_store(kind == KN_CSV_MISSING ? &filled : f, value, to->dtype,
                              kn_storage_at(to->storage, to->offset + at, to->dtype)))
        why = kind == KN_CSV_MISSING ? "is missing, and its column can't hold .fill"
              : to->dtype == KN_I64 || to->dtype == KN_I32
                  ? "is no whole number that its column can hold"
                  : "is too large for its column";
    if (!why)
        return true;
    return kn_fail("%s:%lld, column %lld (%s): '%.*s%s' %s", t->scan.path, (long long)t->scan.line,
                   (long long)i + 1, c->name, (int)(f->length < 40 ? f->length : 40), f->text,
                   f->length > 40 ? "..." : "", why);
}

/* Goes over all lines behind the header: counts them, or stores their values. */
static bool walk(reading *t, bool storing)
{
    int64_t rows = 0;
    bool header = t->header;
    kn_csv_begin(&t->scan, t->scan.path, (const char *)t->map.data, t->map.size, t->scan.separator);
    while (kn_csv_more(&t->scan)) {
        kn_csv_field f = { 0 };
        if (storing && !header && rows == t->out->rows)
            return kn_fail("%s changed while it was read", t->scan.path);
        for (int64_t i = 0; !f.last; i++) {
            if (!kn_csv_next(&t->scan, &f) || !check_field_count(t, i + 1, f.last))
                return false;
            const bool wanted = storing && !header && !t->column[i].ignored;
            if (wanted && !store(t, &f, rows, i))
                return false;
        }
        rows += !header;
        header = false;
    }
    if (storing && rows != t->out->rows)
        return kn_fail("%s changed while it was read", t->scan.path);
    t->out->rows = rows;
    return rows > 0 || kn_fail("%s has a header and no line behind it", t->scan.path);
}

/* ---- the table ------------------------------------------------------------------------------- */

static kn_tensor *make(kn_dtype dtype, int64_t rows, int64_t columns, bool flat)
{
    return kn_tensor_new(dtype, KN_CPU, NULL, KN_MEM_DATA, flat ? 1 : 2,
                         (const int64_t[]){ rows, columns }, NULL, false);
}

static bool make_tensors(reading *t)
{
    kn_csv *out = t->out;
    out->x = make(t->o.dtype, out->rows, out->inputs, false);
    if (out->targets > 0)
        out->y = make(t->o.target_dtype, out->rows, out->targets, out->targets == 1);
    out->name = kn_host_calloc((size_t)(out->inputs + out->targets), sizeof *out->name);
    if (!kn_ok() || !out->name)
        return false;
    for (int64_t i = 0; i < t->columns; i++) {
        const column *c = &t->column[i];
        char **name = &out->name[c->input >= 0 ? c->input : out->inputs + c->target];
        if (!c->ignored && !(*name = kn_host_strdup(c->name)))
            return false;
    }
    return true;
}

static bool check_options(kn_csv_read_options *o)
{
    kn_dtype *dtypes[] = { &o->dtype, &o->target_dtype };
    for (int i = 0; i < 2; i++) {
        kn_dtype *d = dtypes[i];
        *d = *d ? *d : KN_F32;
        if (*d != KN_F32 && *d != KN_F64 && *d != KN_I64 && *d != KN_I32)
            return kn_fail("kn_csv_read: dtype %s; f32, f64, i64 and i32 are supported",
                           kn_dtype_name(*d));
    }
    o->separator = o->separator ? o->separator : ',';
    if (strchr("\"\r\n.+-0123456789eE", o->separator))
        return kn_fail("kn_csv_read: the separator can't be character %d", o->separator);
    if (o->fill != 0 && !o->fill_missing)
        return kn_fail("kn_csv_read: .fill is given without .fill_missing");
    return true;
}

bool kn_csv_read_(const char *path, kn_csv *out, kn_csv_read_options o)
{
    if (!kn_given_path(path, "kn_csv_read", "the path") ||
        !kn_given(out, "kn_csv_read", "the place for the table"))
        return false;
    *out = (kn_csv){ 0 };
    if (!kn_ok() || !check_options(&o))
        return false;
    reading t = { .o = o, .out = out };
    bool ok = kn_file_map(path, "table", &t.map);
    if (ok) {
        kn_csv_begin(&t.scan, path, (const char *)t.map.data, t.map.size, o.separator);
        ok = read_first_line(&t) && settle_header(&t) && settle_columns(&t) && walk(&t, false) &&
             make_tensors(&t) && walk(&t, true);
    }
    for (int64_t i = 0; i < t.columns; i++)
        kn_host_free(t.column[i].name);
    kn_host_free(t.column);
    kn_file_unmap(&t.map);
    if (!ok)
        kn_csv_free(out);
    return ok;
}

void kn_csv_free(kn_csv *table)
{
    if (!table)
        return;
    kn_tensor_free(table->x);
    kn_tensor_free(table->y);
    for (int64_t i = 0; table->name && i < table->inputs + table->targets; i++)
        kn_host_free(table->name[i]);
    kn_host_free(table->name);
    *table = (kn_csv){ 0 };
}
