/* models/programs/database.c: fills the tables. Texts come from files of strangers: they are bound
 * to statements, and never become a part of one. */
#include "models/programs/database.h"
#include "kernels/error_internal.h"
#include "models/programs/report.h"
#include "tensor/json.h"

#include <stdarg.h>
#include <string.h>

/* clang-format off */
static const struct {
    const char *kind, *name, *is;
} tables[] = {
    { "table", "event", SQL((i integer primary key, r, k, line, collective,
        w, s, m, c, x, p, a, o, h, v, t, d, f, b, l, q, n,
        owner as (coalesce(w, m, 'outside of modules')),
        counts as (c not in ('host', 'offloaded', 'pinned')))) }, /* whether a peak does */
    { "table", "step", SQL((r, n, t, d, busy, flops, ideal)) },
    { "table", "idle", SQL((r, t, d, cause, awaited, backward)) },
    { "table", "cause", SQL((name, explained, remedy)) },
    { "table", "head", SQL((j)) },

    /* short: as --explain calls it, without what all names with a dot begin with, up to a dot */
    { "view", "unit", SQL(as
        with recursive
        units as (select key i, value j, value ->> 'name' name from head, json_each(j, '$.units')),
        dotted as (select min(name) low, max(name) high from units
            where i > 0 and instr(name, '.')),
        same(n) as (select 1 union all select n + 1 from same, dotted
            where n < min(length(low), 1000)),
        shared as (select coalesce(max(n), 0) end from same, dotted
            where substr(low, n, 1) = '.' and substr(low, 1, n) = substr(high, 1, n))
        select i, j, name, case when i = 0 then 'root'
            when instr(name, '.') then substr(name, 1 + shared.end) else name end short
        from units, shared) },

    { "view", "start", SQL(as /* bytes that lived as it began */
        select ranks.key r, bytes.key c, cast(bytes.value as real) b
        from head, json_each(j, '$.live') ranks, json_each(ranks.value) bytes
        where c not in ('host', 'offloaded', 'pinned')) },

    { "view", "peak", SQL(as /* of a rank, the first one */
        select r, i, t, l, owner
        from (select *, row_number() over (partition by r order by l desc, i) place
            from event where l > 0 and counts)
        where place = 1) },

    { "view", "told", SQL(as /* a number of a step, on the first rank that tells it */
        select cast(c as integer) step, w, coalesce(x, format('%.5g', n)) text, n, min(i)
        from event where k = 'number' group by 1, 2) },

    { "view", "figure", SQL(as /* of a step of a rank */
        select 0 place, 'step, ms' what, '%.3f' form, avg(d) / 1e3 value from step
        union all
        select 1, 'compute is busy, ms', '%.3f', avg(busy) / 1e3 from step
        union all
        select 1 + cause.rowid, format('idle, %s, ms', name), '%.3f',
            coalesce(sum(d), 0) / 1e3 / (select count(*) from step)
        from cause left join idle on cause = name group by name
        union all
        select 99, 'peak of memory, bytes', '%.0f', max((select max(l) from event),
            coalesce((select max(sum(b)) over () from start group by r), 0))) },

    { "view", "noted", SQL(as /* in words */
        select *, format('%s of %s%s%s%s', w, coalesce(m, 'the root'), ': ' || x, ', by ' || p,
            iif(k = 'verb' and length(c) > 0, ', because: ' || c, null)) said
        from event) },

    /* Not of a forward that runs again for backward. nth: of that name and kind in its step;
     * before, since: the value before, and its line */
    { "view", "valued", SQL(as
        select *, row_number() over (partition by r, step, m, w order by line) nth,
            lag(w) over (partition by r order by line) before,
            lag(line) over (partition by r order by line) since
        from (select *, sum(k = 'step') over (partition by r order by line) step
            from event where k = 'step'
            or (k = 'value' and not (a is not null and m = 'activation')))
        where k = 'value') },

    { "view", "numbered", SQL(as /* numbers of steps, by rank 0 */
        select *, row_number() over (order by line) place, coalesce(x, format('%.9g', n)) text
        from event where k = 'number' and r = 0 and w <> 'items') },
};
/* clang-format on */

static bool fail(sqlite3 *db)
{
    return kn_ok() && kn_fail("a recording's database: %s", sqlite3_errmsg(db));
}

sqlite3_stmt *database_ask(sqlite3 *db, const char *sql)
{
    sqlite3_stmt *q = NULL;
    if (!sql || sqlite3_prepare_v2(db, sql, -1, &q, NULL) != SQLITE_OK)
        fail(db);
    return q;
}

static bool bind(sqlite3_stmt *q, const char *form, va_list list)
{
    bool ok = q && sqlite3_reset(q) == SQLITE_OK;
    for (int at = 1; *form && ok; form++, at++)
        if (*form == 'i')
            ok = sqlite3_bind_int64(q, at, va_arg(list, int64_t)) == SQLITE_OK;
        else if (*form == 'd')
            ok = sqlite3_bind_double(q, at, va_arg(list, double)) == SQLITE_OK;
        else {
            const char *text = va_arg(list, const char *);
            ok = sqlite3_bind_text(q, at, *text ? text : NULL, -1, SQLITE_STATIC) == SQLITE_OK;
        }
    return ok || (q && fail(sqlite3_db_handle(q)));
}

bool database_bind(sqlite3_stmt *q, const char *form, ...)
{
    va_list list;
    va_start(list, form);
    const bool ok = bind(q, form, list);
    va_end(list);
    return ok;
}

bool database_next(sqlite3_stmt *q)
{
    const int result = q ? sqlite3_step(q) : SQLITE_DONE;
    return result == SQLITE_ROW || (result != SQLITE_DONE && fail(sqlite3_db_handle(q)));
}

/* Runs the statement that sqlite3_mprintf makes of the form. */
static bool run(sqlite3 *db, const char *form, ...)
{
    va_list list;
    va_start(list, form);
    char *sql = sqlite3_vmprintf(form, list);
    va_end(list);
    const bool ok = (sql && sqlite3_exec(db, sql, NULL, NULL, NULL) == SQLITE_OK) || fail(db);
    sqlite3_free(sql);
    return ok;
}

/* bytes(12345): "12.3 kB" */
static void bytes(sqlite3_context *c, int count, sqlite3_value **of)
{
    char text[32];
    (void)count;
    report_bytes(sqlite3_value_double(of[0]), text, sizeof text);
    sqlite3_result_text(c, text, -1, SQLITE_TRANSIENT);
}

sqlite3 *database_open(void)
{
    sqlite3 *db = NULL;
    if (sqlite3_open(":memory:", &db) == SQLITE_OK &&
        sqlite3_create_function(db, "bytes", 1, SQLITE_UTF8, NULL, bytes, NULL, NULL) == SQLITE_OK)
        return db;
    fail(db);
    sqlite3_close(db);
    return NULL;
}

/* ---- rows ------------------------------------------------------------------------------------ */

sqlite3_stmt *database_into(sqlite3 *db, const char *schema, const char *table, int columns)
{
    static const char more[] = ",?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?";
    char *sql =
        sqlite3_mprintf("insert into %s.%s values (?%.*s)", schema, table, 2 * (columns - 1), more);
    sqlite3_stmt *q = database_ask(db, sql);
    sqlite3_free(sql);
    return q;
}

bool database_put(sqlite3_stmt *q, const char *form, ...)
{
    va_list list;
    va_start(list, form);
    if (bind(q, form, list))
        database_next(q);
    va_end(list);
    return kn_ok();
}

static bool add_events(sqlite3 *db, const char *schema, const recording *r)
{
    sqlite3_stmt *q = database_into(db, schema, "event", 22);
    bool ok = q != NULL;
    for (int64_t i = 0; ok && i < r->events; i++) {
        const event *e = &r->event[i];
        ok = database_put(q,
                          "iisii"
                          "ssssssssss"
                          "ddddddd",
                          i, (int64_t)e->r, event_kinds[e->k], e->line,
                          (int64_t)is_collective(r, e), name_of(r, e->w), name_of(r, e->s),
                          name_of(r, e->m), name_of(r, e->c), name_of(r, e->x), name_of(r, e->p),
                          name_of(r, e->a), name_of(r, e->o), name_of(r, e->h), name_of(r, e->v),
                          e->t, e->d, e->f, e->b, e->l, e->q, e->n);
    }
    sqlite3_finalize(q);
    return ok;
}

static bool add_head(sqlite3 *db, const char *schema, const recording *r)
{
    sqlite3_stmt *q = database_into(db, schema, "head", 1);
    char *text = q ? kn_json_text(r->head, JSON_COMPACT, r->path) : NULL;
    const bool ok = text && database_put(q, "s", text);
    sqlite3_finalize(q);
    kn_host_free(text);
    return ok;
}

bool database_add(sqlite3 *db, const char *schema, const recording *r)
{
    bool ok = strcmp(schema, "main") == 0 || run(db, "attach ':memory:' as %s", schema);
    ok = ok && run(db, "begin");
    for (size_t i = 0; ok && i < sizeof tables / sizeof *tables; i++)
        ok = run(db, "create %s %s.%s %s", tables[i].kind, schema, tables[i].name, tables[i].is);
    return ok && add_head(db, schema, r) && add_events(db, schema, r) &&
           run(db, "create index %s.by_rank on event(r, line)", schema) && run(db, "commit");
}
