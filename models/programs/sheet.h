/* models/programs/sheet.h: answers of queries as tables and sentences, for the terminal or as
 * HTML. */
#ifndef KNAP_MODELS_PROGRAMS_SHEET_H
#define KNAP_MODELS_PROGRAMS_SHEET_H

#include "models/programs/database.h"

#include <stdio.h>

typedef struct sheet {
    FILE *out;
    bool html;
    sqlite3 *db; /* that answers; borrowed */
} sheet;

/* A part of the page, with its heading; views are drawn into it by that id. */
void sheet_part(sheet *s, const char *id, const char *title, const char *explained);
void sheet_part_end(sheet *s);
void sheet_sentence(sheet *s, const char *text);
/* Of each row its first column as a sentence. */
bool sheet_sentences(sheet *s, const char *sql);
/* The rows as a table: a column "#name" is one of numbers, at the right; a last column "bar" is a
 * share to draw, 0 to 1. The terminal has no table without rows. */
bool sheet_table(sheet *s, const char *id, const char *above, const char *sql);

#endif
