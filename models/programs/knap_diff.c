/* models/programs/knap_diff.c: where two recordings differ first: in their settings, in the
 * schedule, in operations, in values.
 *
 * Each comparison is a query of both, rank by rank, in the order in which the ranks noted their
 * events, for the first difference. Values are paired by name, kind, and count in their step, so
 * that runs of other ranks, layouts or schedules can be compared, too. */
#include "kernels/error_internal.h"
#include "models/programs/database.h"
#include "models/programs/tool.h"
#include "tensor/files.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char about[] =
    "Says where two trainings differ first: in the schedule, an operation, a tensor.\n"
    "  knap-diff A.rec B.rec                     two recordings (--record of a trainer)\n"
    "  knap-diff 'train_gpt --ranks 1' 'train_gpt --ranks 2'   two commands, which it runs\n"
    "One may be a recording, and the other a command.\n"
    "Values are compared where they were recorded (--record-values); commands record them.\n"
    "The status is 0 where nothing differs, 1 else, also after an error.";

typedef struct settings {
    double tolerance;
} settings;

static settings given;
static const kn_option table[] = {
    { "A B", KN_OPTION_REST, .help = "recordings, or commands of trainers in quotes" },
    { "tolerance", KN_OPTION_FLOAT, offsetof(settings, tolerance), "0",
      "values differ beyond this part of the largest magnitude shown; 0: in any bit", .max = 10 },
    { 0 },
};

static bool differs; /* something was found */

/* ---- queries --------------------------------------------------------------------------------- */

/* clang-format off */
/* Of the first unit and its first bucket: a run has one setting for all, as a rule. */
static const char settings_differ[] = SQL(
    with setting(place, what, path) as (values
        (1, 'ranks', '$.ranks'), (2, 'threads', '$.threads'), (3, 'first step', '$.first_step'),
        (4, 'model', '$.model'), (5, 'device', '$.device'), (6, 'clock', '$.clock'),
        (7, 'strategy', '$.units[0].strategy'),
        (8, 'backward_prefetch', '$.units[0].backward_prefetch'),
        (9, 'layout', '$.units[0].buckets[0].layout'),
        (10, 'param_dtype', '$.units[0].buckets[0].param_dtype'),
        (11, 'reduce_dtype', '$.units[0].buckets[0].reduce_dtype'))
    select format('%s: %s and %s', what, coalesce(a.j ->> path, 'none'),
        coalesce(b.j ->> path, 'none'))
    from setting, main.head a, other.head b where a.j ->> path is not b.j ->> path order by place);

/* Of rank ?1, operations (?2) or the schedule: how many A has, the first place at which both
 * differ, and what stands there. */
static const char order_differs[] = SQL(
    with
    placed as materialized (
        select 0 side, said,
            json_array(k, w, m, x, iif(k = 'run', p, null)) what,
            row_number() over (order by line) place
        from main.noted
        where r = ?1 and iif(?2, k = 'run' and s = 'compute', k in ('verb', 'call'))
        union all select 1 side, said,
            json_array(k, w, m, x, iif(k = 'run', p, null)) what,
            row_number() over (order by line) place
        from other.noted
        where r = ?1 and iif(?2, k = 'run' and s = 'compute', k in ('verb', 'call'))),
    first as (select place, max(iif(side = 0, said, null)) a, max(iif(side = 1, said, null)) b
        from placed group by place having count(*) < 2 or min(what) <> max(what)
        order by place limit 1)
    select (select coalesce(sum(side = 0), 0) from placed), place, coalesce(a, 'nothing more'),
        coalesce(b, 'nothing more')
    from (select 1) left join first);

/* Of the same shape, in any dtype; shards of other sizes begin with the same elements on rank 0. */
static const char values[] = SQL(
    select a.r, a.m, a.w, a.x, b.x, a.v, b.v, a.h, b.h, a.line, coalesce(a.since, 0),
        ', ' || a.before
    from main.valued a join other.valued b
        on a.r = b.r and a.step = b.step and a.m = b.m and a.w is b.w and a.nth = b.nth
    where (instr(a.x, '[') > 0 and instr(b.x, '[') > 0
        and substr(a.x, instr(a.x, '[')) = substr(b.x, instr(b.x, '[')))
    or (a.r = 0 and a.m <> 'activation') order by a.r, a.line);

/* The last operations of A since its value before; they made the one that differs. */
static const char operations[] = SQL(
    select said, n from (select said, line, count(*) over () n from main.noted
        where k = 'run' and s = 'compute' and r = ? and line > ? and line < ?
        order by line desc limit 12)
    order by line);

static const char numbers[] = SQL(
    select iif(a.w = b.w and a.c = b.c,
        format('%s of step %s is %s and %s', a.w, a.c, a.text, b.text),
        format('A has %s of step %s, B has %s of step %s', a.w, a.c, b.w, b.c)),
        a.w = b.w and a.c = b.c and a.x is b.x
        and abs(a.n - b.n) <= ? * max(abs(a.n), abs(b.n))
    from main.numbered a join other.numbered b using (place) order by place);
/* clang-format on */

/* ---- comparisons ----------------------------------------------------------------------------- */

static sqlite3 *db; /* A is "main", B "other" */

/* Texts of recordings may hold characters that control a terminal. */
static void say(const char *form, ...)
{
    va_list list;
    va_start(list, form);
    char *line = sqlite3_vmprintf(form, list);
    va_end(list);
    if (line)
        kn_defuse(line);
    puts(line ? line : "");
    sqlite3_free(line);
}

static void compare_settings(void)
{
    sqlite3_stmt *q = database_ask(db, settings_differ);
    while (database_next(q))
        say("%s", text_of(q, 0));
    sqlite3_finalize(q);
}

static void compare_order(int ranks, const char *what, bool of_operations)
{
    sqlite3_stmt *q = database_ask(db, order_differs);
    bool found = false;
    for (int rank = 0; q && rank < ranks && !found && kn_ok(); rank++) {
        if (!database_bind(q, "ii", (int64_t)rank, (int64_t)of_operations) || !database_next(q))
            break;
        found = sqlite3_column_type(q, 1) != SQLITE_NULL;
        if (!found) {
            printf("%s of rank %d: the same %s\n", what, rank, text_of(q, 0));
            continue;
        }
        printf("%s of rank %d: number %s differs\n", what, rank, text_of(q, 1));
        say("  A: %s", text_of(q, 2));
        say("  B: %s", text_of(q, 3));
    }
    sqlite3_finalize(q);
    differs |= found;
}

static double size_if_finite(double x)
{
    return isfinite(x) ? fabs(x) : 0;
}

/* The largest difference of the elements that both show, and the largest finite magnitude. */
static double difference(const char *a, const char *b, double *largest)
{
    double most = 0;
    *largest = 0;
    while (*a && *b) {
        char *a_end, *b_end;
        const double x = strtod(a, &a_end), y = strtod(b, &b_end);
        if (a_end == a || b_end == b)
            break;
        const double by = x == y || (isnan(x) && isnan(y)) ? 0 : fabs(x - y);
        most = isnan(by) ? INFINITY : fmax(most, by);
        *largest = fmax(*largest, fmax(size_if_finite(x), size_if_finite(y)));
        a = a_end, b = b_end;
    }
    return most;
}

static void print_operations(sqlite3_stmt *value)
{
    sqlite3_stmt *q = database_ask(db, operations);
    database_bind(q, "iii", sqlite3_column_int64(value, 0), sqlite3_column_int64(value, 10),
                  sqlite3_column_int64(value, 9));
    for (bool first = true; database_next(q); first = false) {
        if (first && sqlite3_column_int64(q, 1) > 12)
            printf("    %lld before, then\n", sqlite3_column_int64(q, 1) - 12);
        say("    %s", text_of(q, 0));
    }
    sqlite3_finalize(q);
}

/* Of other shapes, or with a tolerance, the elements shown count; else the digests of all. */
static bool value_differs(sqlite3_stmt *q, double *by, double *largest)
{
    *by = difference(text_of(q, 5), text_of(q, 6), largest);
    if (given.tolerance > 0 || strcmp(text_of(q, 3), text_of(q, 4)) != 0)
        return *by > given.tolerance * *largest;
    return strcmp(text_of(q, 7), text_of(q, 8)) != 0;
}

static void print_value(sqlite3_stmt *q, double by, double largest)
{
    say("values: the first that differs is the %s %s of rank %s, %s", text_of(q, 1), text_of(q, 2),
        text_of(q, 0), text_of(q, 3));
    say("  A: %s", text_of(q, 5));
    say("  B: %s", text_of(q, 6));
    if (by > 0)
        printf("  by up to %.3g of %.3g in the elements shown\n", by, largest);
    else
        say("  behind the elements shown: the digests are %s and %s", text_of(q, 7), text_of(q, 8));
    say("  made since the value before%s by", text_of(q, 11));
    print_operations(q);
}

static void compare_values(void)
{
    sqlite3_stmt *q = database_ask(db, values);
    double by, largest;
    int64_t compared = 0;
    bool found = false;
    for (; !found && database_next(q); compared++)
        if ((found = value_differs(q, &by, &largest)))
            print_value(q, by, largest);
    if (kn_ok() && !found && compared > 0)
        printf("values: the same %lld\n", (long long)compared);
    else if (kn_ok() && !found)
        printf("values: none that both have; record them with --record-values\n");
    sqlite3_finalize(q);
    differs |= found;
}

static void compare_numbers(void)
{
    sqlite3_stmt *q = database_ask(db, numbers);
    int64_t n = 0;
    bool found = false;
    database_bind(q, "d", given.tolerance);
    for (; !found && database_next(q); n++)
        if ((found = !sqlite3_column_int(q, 1)))
            say("numbers: %s", text_of(q, 0));
    if (kn_ok() && !found)
        printf("numbers: the same %lld\n", (long long)n);
    sqlite3_finalize(q);
    differs |= found;
}

/* ---- the program ----------------------------------------------------------------------------- */

static bool compare(const char *path[2])
{
    recording r[2] = { 0 };
    bool ok = recording_read(&r[0], path[0]) && recording_read(&r[1], path[1]) &&
              (db = database_open()) != NULL && database_add(db, "main", &r[0]) &&
              database_add(db, "other", &r[1]);
    if (ok) {
        const int ranks = r[0].ranks < r[1].ranks ? r[0].ranks : r[1].ranks;
        compare_settings();
        compare_order(ranks, "calls and verbs", false);
        compare_order(ranks, "operations", true);
        compare_values();
        compare_numbers();
    }
    sqlite3_close(db);
    recording_free(&r[0]);
    recording_free(&r[1]);
    return ok && kn_ok();
}

static bool run(char *const *words, int count)
{
    char folder[] = "/tmp/knap-diff-XXXXXX", made[2][64] = { "", "" };
    const char *path[2];
    if (count != 2)
        return kn_fail("give two recordings, or two commands in quotes; --help explains them");
    if (!mkdtemp(folder))
        return kn_fail_system("%s: %m", folder);
    bool ok = true;
    for (int i = 0; i < 2 && ok; i++) {
        const bool command = strchr(words[i], ' ') && !kn_is_there(words[i]);
        snprintf(made[i], sizeof made[i], "%s/%c.rec", folder, 'A' + i);
        path[i] = command ? made[i] : words[i];
        ok = !command || recording_make(words[i], "--record-values", made[i]);
    }
    ok = ok && compare(path);
    for (int i = 0; i < 2; i++)
        unlink(made[i]);
    rmdir(folder);
    return ok;
}

int main(int argc, char **argv)
{
    const int status = tool_main(&(tool){ "knap-diff", about, table, &given, run }, argc, argv);
    return status ? status : differs;
}
