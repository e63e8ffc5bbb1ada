/* models/programs/database.h: a recording as tables of a database in memory (SQLite): a fact is a
 * query.
 *
 *   event(i, r, k, line, collective, w, s, ...)     in order of their times; keys as in the file
 *   step(r, n, t, d, busy, flops, ideal), idle(r, t, d, cause, awaited, backward)
 *   cause(name, explained, remedy), head(j)         awaited: an event, -1: none; j: the first line
 *
 * and views of these (database.c). Missing texts are null, missing numbers 0. */
#ifndef KNAP_MODELS_PROGRAMS_DATABASE_H
#define KNAP_MODELS_PROGRAMS_DATABASE_H

#include "models/programs/recorded.h"

#include <sqlite3.h>

/* What stands there, as a text; no macro in it is expanded. */
#define SQL(...) #__VA_ARGS__

sqlite3 *database_open(void); /* empty; sqlite3_close ends it; NULL with an error */
/* Adds r as a schema: "main", or a further one, without steps, idle pieces and causes. */
bool database_add(sqlite3 *db, const char *schema, const recording *r);
/* Begins a statement; sqlite3_finalize ends it. NULL with an error. */
sqlite3_stmt *database_ask(sqlite3 *db, const char *sql);
/* Begins q anew with these values of its parameters, by a letter each: i an integer (int64_t), d a
 * number, s a text, of which "" is missing. False where q is NULL, and with an error. */
bool database_bind(sqlite3_stmt *q, const char *form, ...);
/* Begins to add rows; database_put adds one, as database_bind has its columns. */
sqlite3_stmt *database_into(sqlite3 *db, const char *schema, const char *table, int columns);
bool database_put(sqlite3_stmt *q, const char *form, ...);
/* Goes to its next row. False behind the last one, and with an error. */
bool database_next(sqlite3_stmt *q);

/* A column of the row; valid until the next. */
static inline const char *text_of(sqlite3_stmt *q, int column)
{
    const char *text = (const char *)sqlite3_column_text(q, column);
    return text ? text : "";
}

#endif
