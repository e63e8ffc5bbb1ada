/* bench/kernel_rows.h: the kernels of a trace in rows: calls, operations, bytes and seconds. A
 * kernel is a row; products and attention, whose calls differ widely, are a row for each amount of
 * work. bench/gpt2.c prints the rows that it measured, bench/predict.c reads them. */
#ifndef KNAP_BENCH_KERNEL_ROWS_H
#define KNAP_BENCH_KERNEL_ROWS_H

#include "kernels/trace.h"

#include <stdio.h>
#include <string.h>

typedef struct kernel_row {
    char name[64], provider[16];
    double calls, flops, bytes, seconds;
} kernel_row;

enum { KERNEL_ROWS = 64 };

typedef struct kernel_rows {
    int count;
    kernel_row row[KERNEL_ROWS + 1]; /* the last one: the kernels left over */
} kernel_rows;

static inline bool is_attention(const char *what)
{
    return strncmp(what, "attention", 9) == 0;
}

static inline bool is_product(const char *what)
{
    return strncmp(what, "matmul", 6) == 0 || strncmp(what, "conv", 4) == 0;
}

static inline kernel_row *kernel_rows_find(kernel_rows *t, const char *name)
{
    for (int i = 0; i < t->count; i++)
        if (strcmp(t->row[i].name, name) == 0)
            return &t->row[i];
    return NULL;
}

/* The row of that name, new where there is none. */
static inline kernel_row *kernel_rows_of(kernel_rows *t, const char *name)
{
    kernel_row *r = kernel_rows_find(t, name);
    if (!r && t->count > KERNEL_ROWS)
        return &t->row[KERNEL_ROWS];
    if (!r) {
        r = &t->row[t->count++];
        snprintf(r->name, sizeof r->name, "%s", t->count <= KERNEL_ROWS ? name : "others");
    }
    return r;
}

/* Adds e to the row of that name. */
static inline void kernel_rows_add_as(kernel_rows *t, const char *name, const kn_trace_event *e,
                                      double seconds)
{
    kernel_row *r = kernel_rows_of(t, name);
    if (r->calls == 0)
        snprintf(r->provider, sizeof r->provider, "%s", e->provider);
    else if (strcmp(r->provider, e->provider) != 0)
        snprintf(r->provider, sizeof r->provider, "several");
    r->calls++;
    r->flops += e->flops;
    r->bytes += e->bytes;
    r->seconds += seconds;
}

static inline void kernel_rows_add(kernel_rows *t, const kn_trace_event *e, double seconds)
{
    char name[64];
    if (is_attention(e->what) || is_product(e->what))
        snprintf(name, sizeof name, "%.40s, %.4g GFLOP", e->what, e->flops / 1e9);
    else
        snprintf(name, sizeof name, "%.40s", e->what);
    kernel_rows_add_as(t, name, e, seconds);
}

/* A measured row as a line, and back; the rows read are those of one step. */
static inline void kernel_row_print(const kernel_row *r, double steps)
{
    printf("kernel %s: %g calls, %.4f ms a step by %s\n", r->name, r->calls / steps,
           1e3 * r->seconds / steps, r->provider);
}

static inline bool kernel_row_scan(const char *line, kernel_row *r)
{
    double ms;
    *r = (kernel_row){ .calls = 0 };
    if (sscanf(line, "kernel %63[^:]: %lf calls, %lf ms a step by %15s", r->name, &r->calls, &ms,
               r->provider) != 4)
        return false;
    r->seconds = ms / 1e3;
    return true;
}

#endif
