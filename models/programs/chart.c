/* models/programs/chart.c: one scale for both forms of a chart. */
#include "models/programs/chart.h"
#include "data/data.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/tokens/tokens.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { PANEL = 240, LEFT = 60, TOP = 30, BOTTOM = 40, RIGHT = 20, LEGEND = 16, TICKS = 5 };

/* ---- lines ----------------------------------------------------------------------------------- */

static void join_points(chart_line *l)
{
    for (int i = 0; i + 1 < l->count; i += 2) {
        l->x[i / 2] = (l->x[i] + l->x[i + 1]) / 2;
        l->y[i / 2] = (l->y[i] + l->y[i + 1]) / 2;
    }
    l->count /= 2;
    l->joined *= 2;
}

bool chart_add(chart_line *l, double x, double y)
{
    if (!l->x) {
        l->x = kn_host_alloc(CHART_POINTS * sizeof *l->x);
        l->y = kn_host_alloc(CHART_POINTS * sizeof *l->y);
        l->joined = 1;
    }
    if (!l->x || !l->y)
        return false;
    if (!isfinite(x) || !isfinite(y))
        return true;
    l->sum_x += x;
    l->sum_y += y;
    l->last = x;
    if (++l->waiting < l->joined)
        return true;
    if (l->count == CHART_POINTS)
        join_points(l);
    l->x[l->count] = l->sum_x / (double)l->waiting;
    l->y[l->count++] = l->sum_y / (double)l->waiting;
    l->sum_x = l->sum_y = 0;
    l->waiting = 0;
    return true;
}

void chart_cut(chart_line *l, double x)
{
    if (!l->x || l->last < x)
        return;
    l->waiting = 0;
    l->sum_x = l->sum_y = 0;
    while (l->count > 0 && l->x[l->count - 1] >= x)
        l->count--;
    l->last = l->count > 0 ? l->x[l->count - 1] : -INFINITY;
}

void chart_line_free(chart_line *l)
{
    kn_host_free(l->x);
    kn_host_free(l->y);
    l->x = l->y = NULL;
    l->count = 0;
}

/* ---- the scale ------------------------------------------------------------------------------- */

typedef struct scale {
    const chart *c;
    double low, high, from, to; /* values (or their logarithms), places */
} scale;

/* As the axis has it. */
static double on_axis(const chart *c, double value)
{
    return !c->log_scale ? value : value > 0 ? log10(value) : NAN;
}

/* The points of a line in their order, a faint one's smoothed: each is a mean of those before, with
 * weights that fall. false behind the last. */
typedef struct walk {
    int next;
    double mean, weight;
} walk;
static bool walk_on(const chart *c, const chart_line *l, walk *w, double *x, double *y)
{
    const double keep = l->faint ? c->smooth : 0;
    for (; w->next < l->count; w->next++) {
        const double value = on_axis(c, l->y[w->next]);
        if (!isfinite(value))
            continue;
        w->mean = keep * w->mean + (1 - keep) * value;
        w->weight = keep * w->weight + (1 - keep);
        *x = l->x[w->next++];
        *y = w->mean / w->weight;
        return true;
    }
    return false;
}

/* 1, 2 or 5 times a power of ten, at most TICKS of which make the range. */
static double round_step(double range)
{
    double step = range > 1e-300 ? pow(10, floor(log10(range / TICKS))) : 1;
    for (int i = 0; range > TICKS * step; i++)
        step *= i % 3 == 1 ? 2.5 : 2;
    return step;
}

double chart_round(double value)
{
    const double step = round_step(value);
    return step * ceil(value / step);
}

static scale scale_of(const chart *c)
{
    scale s = { c, INFINITY, -INFINITY, INFINITY, -INFINITY };
    double x, y;
    for (int i = 0; i < c->lines; i++)
        for (walk w = { 0 }; walk_on(c, &c->line[i], &w, &x, &y);) {
            s.low = fmin(s.low, y), s.high = fmax(s.high, y);
            s.from = fmin(s.from, x), s.to = fmax(s.to, x);
        }
    if (s.low > s.high) /* no point at all */
        s = (scale){ c, 0, 1, 0, 1 };
    if (c->low < c->high)
        s.low = c->low, s.high = c->high;
    else {
        const double step = round_step(s.high - s.low);
        s.low = step * floor(s.low / step);
        s.high = step * ceil(s.high / step);
        s.high = s.high > s.low ? s.high : s.low + step;
    }
    return s;
}

/* 0 at the left or the bottom, 1 at the other end. */
static double part_of(double value, double low, double high)
{
    return high > low ? fmin(fmax((value - low) / (high - low), 0), 1) : 0.5;
}

/* Round value i of an axis, which may lie below low; false behind the last. From a factor of ten to
 * one of 1000 logarithms have 1, 2 and 5 times powers of ten, beyond only these. */
static bool tick_at(double low, double high, bool logs, int i, double *at)
{
    static const double parts[] = { 0, 0.30102999566398120, 0.69897000433601880 };
    const double range = high - low;
    if (logs && range < 1) {
        const bool there = tick_at(pow(10, low), pow(10, high), false, i, at);
        *at = log10(*at);
        return there;
    }
    if (logs && range <= 3)
        *at = floor(low) + i / 3 + parts[i % 3];
    else {
        const double step = logs ? ceil(round_step(range)) : round_step(range);
        *at = step * (ceil(low / step - 1e-9) + i);
    }
    return i < 24 && *at <= high + range / 1e6;
}

/* The text of a place on the value axis. */
static const char *tick_text(const chart *c, double at, char text[32])
{
    snprintf(text, 32, "%.4g", c->log_scale ? pow(10, at) : fabs(at) < 1e-12 ? 0 : at);
    return text;
}

/* ---- SVG ------------------------------------------------------------------------------------- */

bool page_begin(page *t)
{
    *t = (page){ 0 };
    return (t->out = open_memstream(&t->data, &t->size)) || kn_fail("no memory for a picture");
}

bool page_end(page *t, const char *path)
{
    bool ok = fclose(t->out) == 0 || kn_fail("no memory for %s", path);
    ok = ok && kn_file_write(path, (const void *[]){ t->data }, (size_t[]){ t->size }, 1);
    free(t->data);
    return ok;
}

bool svg_begin(page *t, double width, double height)
{
    if (!page_begin(t))
        return false;
    fprintf(t->out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            width, height);
    return true;
}

void svg_text(FILE *out, const char *text)
{
    const bool valid = kn_is_utf8(text, strlen(text)); /* XML has no other bytes */
    for (; *text; text++)
        if (!valid && (*text & 0x80))
            fputc('?', out);
        else if (strchr("<>&\"'", *text))
            fprintf(out, "&#%d;", *text);
        else
            fputc(*text, out);
}

bool svg_end(page *t, const char *path)
{
    fprintf(t->out, "</svg>\n");
    return page_end(t, path);
}

static int named(const chart *c)
{
    int n = 0;
    for (int i = 0; i < c->lines; i++)
        n += c->line[i].name[0] != 0;
    return n;
}

double chart_height(const chart *c)
{
    return PANEL + LEGEND * named(c);
}

static double across(const scale *s, double x)
{
    return LEFT + part_of(x, s->from, s->to) * (CHART_WIDTH - LEFT - RIGHT);
}

static double down(const scale *s, double y, double top)
{
    return top + TOP + (1 - part_of(y, s->low, s->high)) * (PANEL - TOP - BOTTOM);
}

static void draw_frame(FILE *out, const scale *s, double top)
{
    char text[32];
    double v;
    fprintf(out, "<text x=\"%d\" y=\"%.0f\" font-weight=\"bold\">", LEFT, top + 20);
    svg_text(out, s->c->title);
    fprintf(out, "</text>\n");
    for (int i = 0; tick_at(s->low, s->high, s->c->log_scale, i, &v); i++)
        if (v >= s->low - (s->high - s->low) / 1e6)
            fprintf(out,
                    "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>"
                    "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
                    LEFT, CHART_WIDTH - RIGHT, down(s, v, top), down(s, v, top), LEFT - 6,
                    down(s, v, top) + 4, tick_text(s->c, v, text));
    for (int i = 0; tick_at(s->from, s->to, false, i, &v); i++)
        fprintf(out, "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%.6g</text>\n",
                across(s, v), top + PANEL - BOTTOM + 18, v);
    fprintf(out, "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">%s</text>\n", CHART_WIDTH - RIGHT,
            top + PANEL - BOTTOM + 34, s->c->below);
}

/* A line, and its name with the last value below. */
static void draw_line(FILE *out, const scale *s, int i, double top, double legend)
{
    const chart_line *l = &s->c->line[i];
    const char *colour = l->colour;
    double x = 0, y = 0;
    char text[32];
    int n = 0;
    fprintf(out, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%s\" points=\"", colour,
            l->faint ? "1" : "2");
    for (walk w = { 0 }; walk_on(s->c, l, &w, &x, &y); n++)
        fprintf(out, "%.1f,%.1f ", across(s, x), down(s, y, top));
    fprintf(out, "\"/>\n");
    if (n > 0 && !l->faint)
        fprintf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", across(s, x),
                down(s, y, top), colour);
    if (!l->name[0])
        return;
    fprintf(out, "<text x=\"%d\" y=\"%.0f\" fill=\"%s\">", LEFT, legend, colour);
    svg_text(out, l->name);
    fprintf(out, "%s%s</text>\n", n ? ": " : ", no value", n ? tick_text(s->c, y, text) : "");
}

void chart_draw(FILE *out, const chart *c, double top)
{
    const scale s = scale_of(c);
    double legend = top + PANEL;
    draw_frame(out, &s, top);
    for (int i = 0; i < c->lines; i++) {
        draw_line(out, &s, i, top, legend);
        legend += c->line[i].name[0] ? LEGEND : 0;
    }
}

/* ---- characters ------------------------------------------------------------------------------ */

enum { MOST_COLUMNS = 200, MOST_ROWS = 60, MARGIN = 10 };
static const char marks[] = "*o+x#@%&";

/* The line's points at their columns, and between two points those of the straight line. */
static void plot_line(const scale *s, int i, int columns, int rows,
                      char cell[MOST_ROWS][MOST_COLUMNS])
{
    const chart_line *l = &s->c->line[i];
    const char mark = l->faint ? '.' : marks[i % (int)(sizeof marks - 1)];
    double x, y;
    int at = -1, was = 0;
    for (walk w = { 0 }; walk_on(s->c, l, &w, &x, &y);) {
        const int column = (int)lround(part_of(x, s->from, s->to) * (columns - 1)),
                  row = (int)lround((1 - part_of(y, s->low, s->high)) * (rows - 1));
        for (int k = at < 0 ? column : at; k <= column; k++) {
            const double part = column > at && at >= 0 ? (double)(k - at) / (column - at) : 1;
            cell[(int)lround(was + part * (row - was))][k] = mark;
        }
        at = column, was = row;
    }
}

static int terminal_columns(void)
{
    struct winsize size = { 0 };
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void chart_print(FILE *out, const chart *c, int rows)
{
    int columns = terminal_columns();
    char cell[MOST_ROWS][MOST_COLUMNS], text[32];
    const scale s = scale_of(c);
    columns = columns - MARGIN > MOST_COLUMNS ? MOST_COLUMNS : columns - MARGIN;
    columns = columns < 10 ? 10 : columns;
    rows = rows > MOST_ROWS ? MOST_ROWS : rows < 3 ? 3 : rows;
    memset(cell, ' ', sizeof cell);
    for (int i = 0; i < c->lines; i++)
        if (c->line[i].faint) /* below the others */
            plot_line(&s, i, columns, rows, cell);
    for (int i = 0; i < c->lines; i++)
        if (!c->line[i].faint)
            plot_line(&s, i, columns, rows, cell);
    for (int r = 0; r < rows; r++) {
        const bool marked = r % 3 == 0 || r == rows - 1;
        const double at = s.high - (s.high - s.low) * r / (rows - 1);
        fprintf(out, "%8.8s |%.*s\n", marked ? tick_text(c, at, text) : "", columns, cell[r]);
    }
    fprintf(out, "%8s  %-*.6g%10.6g %s\n", "", columns - 10, s.from, s.to, c->below);
    for (int i = 0; i < c->lines; i++) {
        double x, y = NAN;
        for (walk w = { 0 }; walk_on(c, &c->line[i], &w, &x, &y);)
            ;
        if (c->line[i].name[0])
            fprintf(out, "%8c  %s: %s\n",
                    c->line[i].faint ? '.' : marks[i % (int)(sizeof marks - 1)], c->line[i].name,
                    isfinite(y) ? tick_text(c, y, text) : "no value");
    }
}
