/* models/programs/sheet.h: facts as tables and sentences, for the terminal or as HTML. */
#ifndef KNAP_MODELS_PROGRAMS_SHEET_H
#define KNAP_MODELS_PROGRAMS_SHEET_H

#include "kernels/error.h"
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum { SHEET_COLUMNS = 12 };
/* clang-format off */
#define COLUMNS(...) (const char *const[]){ __VA_ARGS__, NULL }
/* clang-format on */

typedef struct sheet {
    FILE *out;
    bool html;
    const char *columns[SHEET_COLUMNS]; /* of the open table; borrowed */
    int column_count;
    char above[120];
    char **cell; /* row by row */
    double *bar; /* by row: a share to draw, 0 to 1 */
    int64_t cells, cell_room, rows, row_room;
} sheet;

/* A part of the page, with its heading; views are drawn into it by that id. */
void sheet_part(sheet *s, const char *id, const char *title, const char *explained);
void sheet_part_end(sheet *s);
void sheet_sentence(sheet *s, const char *fmt, ...) KN_PRINTF(2, 3);
/* A table: its columns end with NULL; "#name" is one of numbers, at the right. The words above it
 * are copied. */
void sheet_table(sheet *s, const char *above, const char *const *columns);
void sheet_cell(sheet *s, const char *fmt, ...) KN_PRINTF(2, 3);
void sheet_row(sheet *s, double bar); /* ends a row */
bool sheet_table_end(sheet *s, const char *id);

#endif
