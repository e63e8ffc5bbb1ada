/* models/programs/sheet.c: a table is kept until it ends, since its columns are as wide as their
 * longest texts. Cells may hold a stranger's texts. */
#include "models/programs/sheet.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "kernels/memory_internal.h"
#include "models/programs/chart.h"

#include <stdarg.h>
#include <string.h>

enum { LONGEST = 400, WIDEST = 48 };

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

static void print_text(sheet *s, char *text)
{
    kn_defuse(text);
    if (s->html)
        svg_text(s->out, text);
    else
        fputs(text, s->out);
}

void sheet_sentence(sheet *s, const char *fmt, ...)
{
    char text[4096];
    va_list list;
    va_start(list, fmt);
    vsnprintf(text, sizeof text, fmt, list);
    va_end(list);
    fprintf(s->out, s->html ? "<p class=\"fact\">" : "  ");
    print_text(s, text);
    fprintf(s->out, s->html ? "</p>\n" : "\n");
}

void sheet_table(sheet *s, const char *above, const char *const *columns)
{
    snprintf(s->above, sizeof s->above, "%s", above);
    s->cells = s->rows = s->column_count = 0;
    while (columns[s->column_count]) {
        s->columns[s->column_count] = columns[s->column_count];
        s->column_count++;
    }
}

void sheet_cell(sheet *s, const char *fmt, ...)
{
    char text[LONGEST];
    va_list list;
    va_start(list, fmt);
    vsnprintf(text, sizeof text, fmt, list);
    va_end(list);
    if (kn_host_grow(&s->cell, &s->cell_room, s->cells + 1, sizeof *s->cell) &&
        (s->cell[s->cells] = kn_host_strdup(text)))
        s->cells++;
}

void sheet_row(sheet *s, double bar)
{
    if (kn_host_grow(&s->bar, &s->row_room, s->rows + 1, sizeof *s->bar))
        s->bar[s->rows++] = bar;
}

/* Without the mark of a column of numbers. */
static const char *column_name(const sheet *s, int k, bool *number)
{
    *number = s->columns[k][0] == '#';
    return s->columns[k] + *number;
}

static void print_html(sheet *s, const char *id)
{
    bool number;
    fprintf(s->out,
            "<div class=\"wide\"><table data-table=\"%s\">\n<caption>%s</caption>\n<thead><tr>", id,
            s->above);
    for (int k = 0; k < s->column_count; k++) {
        const char *name = column_name(s, k, &number);
        fprintf(s->out, "<th scope=\"col\"%s>%s</th>", number ? " class=\"number\"" : "", name);
    }
    fprintf(s->out, "</tr></thead>\n<tbody>\n");
    for (int64_t i = 0; i < s->rows; i++) {
        fprintf(s->out, s->bar[i] > 0 ? "<tr class=\"bar\" style=\"--share:%.2f%%\">" : "<tr>",
                100 * s->bar[i]);
        for (int k = 0; k < s->column_count; k++) {
            column_name(s, k, &number);
            fprintf(s->out, number ? "<td class=\"number\">" : "<td>");
            print_text(s, s->cell[i * s->column_count + k]);
            fprintf(s->out, "</td>");
        }
        fprintf(s->out, "</tr>\n");
    }
    fprintf(s->out, "</tbody></table></div>\n");
}

static void print_line(sheet *s, const int *width, int64_t row)
{
    bool number;
    fprintf(s->out, " ");
    for (int k = 0; k < s->column_count; k++) {
        const char *name = column_name(s, k, &number);
        const bool last = k == s->column_count - 1;
        char *text = row < 0 ? NULL : s->cell[row * s->column_count + k];
        if (text)
            kn_defuse(text);
        fprintf(s->out,
                number ? " %*s"
                : last ? " %.*s"
                       : " %-*s",
                last && !number ? LONGEST : width[k], text ? text : name);
        if (!last)
            fprintf(s->out, " ");
    }
    fprintf(s->out, "\n");
}

static void print_plain(sheet *s)
{
    int width[SHEET_COLUMNS];
    bool number;
    for (int k = 0; k < s->column_count; k++) {
        width[k] = (int)strlen(column_name(s, k, &number));
        for (int64_t i = 0; i < s->rows; i++) {
            const int n = (int)strnlen(s->cell[i * s->column_count + k], WIDEST);
            width[k] = n > width[k] ? n : width[k];
        }
    }
    fprintf(s->out, "\n  %s:\n", s->above);
    for (int64_t i = -1; i < s->rows; i++)
        print_line(s, width, i);
}

bool sheet_table_end(sheet *s, const char *id)
{
    const bool whole = kn_ok() && s->cells == s->rows * s->column_count;
    if (whole && s->html)
        print_html(s, id);
    else if (whole && s->rows > 0)
        print_plain(s);
    for (int64_t i = 0; i < s->cells; i++)
        kn_host_free(s->cell[i]);
    kn_host_free(s->cell);
    kn_host_free(s->bar);
    *s = (sheet){ .out = s->out, .html = s->html };
    return kn_ok();
}
