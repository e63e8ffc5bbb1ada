/* models/programs/sheet.c: prints what a query answers. Cells may hold a stranger's texts. */
#include "models/programs/sheet.h"
#include "kernels/error_internal.h"
#include "models/programs/chart.h"

#include <string.h>

enum { LONGEST = 400, WIDEST = 48, MOST_COLUMNS = 12 };

void sheet_part(sheet *s, const char *id, const char *title, const char *explained)
{
    if (s->html)
        fprintf(s->out, "<section data-part=\"%s\">\n<h2>%s</h2>\n<p class=\"lead\">%s</p>\n", id,
                title, explained);
    else
        fprintf(s->out, "\n%s: %s\n", title, explained);
}

void sheet_part_end(sheet *s)
{
    if (s->html)
        fprintf(s->out, "</section>\n");
}

void sheet_sentence(sheet *s, const char *words)
{
    char text[4096];
    snprintf(text, sizeof text, "%s", words);
    kn_defuse(text);
    fputs(s->html ? "<p class=\"fact\">" : "  ", s->out);
    if (s->html)
        svg_text(s->out, text);
    else
        fputs(text, s->out);
    fputs(s->html ? "</p>\n" : "\n", s->out);
}

bool sheet_sentences(sheet *s, const char *sql)
{
    sqlite3_stmt *q = database_ask(s->db, sql);
    while (database_next(q))
        sheet_sentence(s, text_of(q, 0));
    sqlite3_finalize(q);
    return kn_ok();
}

/* ---- tables ---------------------------------------------------------------------------------- */

static int columns_of(sqlite3_stmt *q)
{
    const int n = sqlite3_column_count(q);
    return n - (strcmp(sqlite3_column_name(q, n - 1), "bar") == 0);
}

/* Without the mark of a column of numbers. */
static const char *column_name(sqlite3_stmt *q, int k, bool *number)
{
    const char *name = sqlite3_column_name(q, k);
    *number = name[0] == '#';
    return name + *number;
}

static const char *cell(sqlite3_stmt *q, int k, char text[LONGEST])
{
    snprintf(text, LONGEST, "%s", text_of(q, k));
    kn_defuse(text);
    return text;
}

static void print_html(sheet *s, const char *id, const char *above, sqlite3_stmt *q)
{
    const int n = columns_of(q);
    char text[LONGEST];
    bool number;
    fprintf(s->out,
            "<div class=\"wide\"><table data-table=\"%s\">\n<caption>%s</caption>\n<thead><tr>", id,
            above);
    for (int k = 0; k < n; k++) {
        const char *name = column_name(q, k, &number);
        fprintf(s->out, "<th scope=\"col\"%s>%s</th>", number ? " class=\"number\"" : "", name);
    }
    fprintf(s->out, "</tr></thead>\n<tbody>\n");
    while (database_next(q)) {
        const double bar = n < sqlite3_column_count(q) ? sqlite3_column_double(q, n) : 0;
        fprintf(s->out, bar > 0 ? "<tr class=\"bar\" style=\"--share:%.2f%%\">" : "<tr>",
                100 * bar);
        for (int k = 0; k < n; k++) {
            column_name(q, k, &number);
            fprintf(s->out, number ? "<td class=\"number\">" : "<td>");
            svg_text(s->out, cell(q, k, text));
            fprintf(s->out, "</td>");
        }
        fprintf(s->out, "</tr>\n");
    }
    fprintf(s->out, "</tbody></table></div>\n");
}

/* The names of columns, or the cells of the row. */
static void print_line(sheet *s, sqlite3_stmt *q, const int *width, bool head)
{
    const int n = columns_of(q);
    char text[LONGEST];
    bool number;
    for (int k = 0; k < n; k++) {
        const char *name = column_name(q, k, &number), *shown = head ? name : cell(q, k, text);
        const bool last = k == n - 1;
        fprintf(s->out,
                number ? " %*s"
                : last ? " %.*s"
                       : " %-*s",
                last && !number ? LONGEST : width[k], shown);
        fputs(last ? "\n" : " ", s->out);
    }
}

/* Columns are as wide as their longest texts: the query is asked twice. */
static void print_plain(sheet *s, const char *above, sqlite3_stmt *q)
{
    const int n = columns_of(q);
    int width[MOST_COLUMNS], rows = 0;
    char text[LONGEST];
    bool number;
    for (int k = 0; k < n; k++)
        width[k] = (int)strlen(column_name(q, k, &number));
    for (; database_next(q); rows++)
        for (int k = 0; k < n; k++) {
            const int length = (int)strnlen(cell(q, k, text), WIDEST);
            width[k] = length > width[k] ? length : width[k];
        }
    sqlite3_reset(q);
    if (rows == 0)
        return;
    fprintf(s->out, "\n  %s:\n ", above);
    print_line(s, q, width, true);
    while (database_next(q)) {
        fputs(" ", s->out);
        print_line(s, q, width, false);
    }
}

bool sheet_table(sheet *s, const char *id, const char *above, const char *sql)
{
    sqlite3_stmt *q = database_ask(s->db, sql);
    if (q && s->html)
        print_html(s, id, above, q);
    else if (q)
        print_plain(s, above, q);
    sqlite3_finalize(q);
    return kn_ok();
}
