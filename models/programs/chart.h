/* models/programs/chart.h: lines over steps or epochs as a picture (SVG) or as characters. */
#ifndef KNAP_MODELS_PROGRAMS_CHART_H
#define KNAP_MODELS_PROGRAMS_CHART_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum { CHART_POINTS = 2000 }; /* of a line: more are joined to their means, two and two */

/* A line's points. */
typedef struct chart_line {
    const char *name;   /* "": none in the legend; borrowed */
    const char *colour; /* of SVG */
    bool faint;         /* thin, without marks: a value a step */
    double *x, *y;      /* [count], owned */
    int count;
    double last;         /* place of the value that came last */
    int64_t joined;      /* values of a point */
    int64_t waiting;     /* values that don't make a point yet, */
    double sum_x, sum_y; /* and their sums */
} chart_line;

/* Appends a value; one that isn't finite is left out. False without memory. */
bool chart_add(chart_line *l, double x, double y);
/* Drops the points from x on, which come again. */
void chart_cut(chart_line *l, double x);
void chart_line_free(chart_line *l);

typedef struct chart {
    const char *title, *below; /* above it, and under its axis */
    const chart_line *line;
    int lines;
    bool log_scale;   /* values of 0 and below are left out */
    double smooth;    /* of faint lines: the weight of what came before, 0 to below 1 */
    double low, high; /* of the axis; both 0: those of the values */
} chart;

/* The next round value at or above it: an axis from 0 ends there. */
double chart_round(double value);
/* The whole picture's height, and its width, in pixels. */
enum { CHART_WIDTH = 640 };
double chart_height(const chart *c);
/* One chart as SVG's elements, from top on. */
void chart_draw(FILE *out, const chart *c, double top);
/* The same with characters, rows high and as wide as the terminal that standard output is (else
 * 80). */
void chart_print(FILE *out, const chart *c, int rows);

/* A file that grows in memory as text, and then is written whole or not at all. */
typedef struct page {
    FILE *out;
    char *data;
    size_t size;
} page;
bool page_begin(page *t);
bool page_end(page *t, const char *path); /* writes it, and frees t */
/* One of SVG: its frame, a text inside it without control characters, its end. */
bool svg_begin(page *t, double width, double height);
void svg_text(FILE *out, const char *text);
bool svg_end(page *t, const char *path);

#endif
