/* models/programs/knap_diff.c: where two recordings differ first: in their settings, in the
 * schedule, in operations, in values.
 *
 * Each comparison walks both recordings rank by rank, in the order in which the ranks noted their
 * events, and stops at the first difference. Values are paired by name, kind, and count in their
 * step, so that runs of other ranks, layouts or schedules can be compared, too. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "kernels/memory_internal.h"
#include "models/programs/recorded.h"
#include "models/programs/tool.h"
#include "tensor/files.h"

#include <math.h>
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

/* ---- the two sides --------------------------------------------------------------------------- */

typedef struct side {
    recording r;
    event **in_order; /* of r's events, by line */
} side;

static int by_line(const void *a, const void *b)
{
    const event *x = *(event *const *)a, *y = *(event *const *)b;
    return (x->line > y->line) - (x->line < y->line);
}

static bool side_read(side *s, const char *path)
{
    if (!recording_read(&s->r, path) ||
        !(s->in_order = kn_host_alloc((size_t)s->r.events * sizeof *s->in_order)))
        return false;
    for (int64_t i = 0; i < s->r.events; i++)
        s->in_order[i] = &s->r.event[i];
    qsort(s->in_order, (size_t)s->r.events, sizeof *s->in_order, by_line);
    return true;
}

static void side_free(side *s)
{
    kn_host_free(s->in_order);
    recording_free(&s->r);
}

static const char *word(const side *s, int32_t number)
{
    return name_of(&s->r, number);
}

static bool same_word(const side *a, int32_t x, const side *b, int32_t y)
{
    return strcmp(word(a, x), word(b, y)) == 0;
}

/* The next event from *at on that wanted chooses of a rank; NULL: there is none. */
static const event *next(const side *s, int rank, bool (*wanted)(const side *s, const event *e),
                         int64_t *at)
{
    while (*at < s->r.events) {
        const event *e = s->in_order[(*at)++];
        if (e->r == rank && wanted(s, e))
            return e;
    }
    return NULL;
}

/* ---- settings -------------------------------------------------------------------------------- */

static void compare_text(const char *what, const char *a, const char *b)
{
    if (strcmp(a, b) != 0)
        printf("%s: %s and %s\n", what, *a ? a : "none", *b ? b : "none");
}

static void compare_number(const char *what, double a, double b)
{
    if (a != b)
        printf("%s: %.17g and %.17g\n", what, a, b);
}

/* Of the first unit and its first bucket: a run has one setting for all, as a rule. */
static const char *unit_text(const side *s, const char *key, bool of_bucket)
{
    const json_t *u = json_array_get(json_object_get(s->r.head, "units"), 0);
    const json_t *b = json_array_get(json_object_get(u, "buckets"), 0);
    const char *text = json_string_value(json_object_get(of_bucket ? b : u, key));
    return text ? text : "";
}

static void compare_settings(const side *a, const side *b)
{
    static const char *const text[] = { "model", "device", "clock" },
                             *const of_unit[] = { "strategy", "backward_prefetch" },
                             *const of_bucket[] = { "layout", "param_dtype", "reduce_dtype" };
    compare_number("ranks", a->r.ranks, b->r.ranks);
    compare_number("threads", head_number(&a->r, "", "threads"), head_number(&b->r, "", "threads"));
    compare_number("first step", head_number(&a->r, "", "first_step"),
                   head_number(&b->r, "", "first_step"));
    for (int i = 0; i < 3; i++)
        compare_text(text[i], head_text(&a->r, text[i]), head_text(&b->r, text[i]));
    for (int i = 0; i < 2; i++)
        compare_text(of_unit[i], unit_text(a, of_unit[i], false), unit_text(b, of_unit[i], false));
    for (int i = 0; i < 3; i++)
        compare_text(of_bucket[i], unit_text(a, of_bucket[i], true),
                     unit_text(b, of_bucket[i], true));
}

/* ---- order ----------------------------------------------------------------------------------- */

static bool is_schedule(const side *s, const event *e)
{
    (void)s;
    return e->k == VERB || e->k == CALL;
}

static bool is_operation(const side *s, const event *e)
{
    return e->k == RUN && strcmp(word(s, e->s), "compute") == 0;
}

static void print_event(const char *which, const side *s, const event *e)
{
    if (!e)
        printf("  %s: nothing more\n", which);
    else
        printf("  %s: %s of %s%s%s%s%s%s%s\n", which, word(s, e->w),
               e->m ? word(s, e->m) : "the root", e->x ? ": " : "", word(s, e->x),
               e->p ? ", by " : "", word(s, e->p), e->k == VERB ? ", because: " : "",
               e->k == VERB ? word(s, e->c) : "");
}

/* what: for the sentence. x: shapes count, too. */
static void compare_order(const side *a, const side *b, const char *what,
                          bool (*wanted)(const side *s, const event *e))
{
    const int ranks = a->r.ranks < b->r.ranks ? a->r.ranks : b->r.ranks;
    for (int rank = 0; rank < ranks; rank++) {
        int64_t i = 0, k = 0, n = 0;
        const event *x, *y;
        do {
            x = next(a, rank, wanted, &i);
            y = next(b, rank, wanted, &k);
            n++;
        } while (x && y && x->k == y->k && same_word(a, x->w, b, y->w) &&
                 same_word(a, x->m, b, y->m) && same_word(a, x->x, b, y->x) &&
                 (x->k != RUN || same_word(a, x->p, b, y->p)));
        if (!x && !y) {
            printf("%s of rank %d: the same %lld\n", what, rank, (long long)n - 1);
            continue;
        }
        printf("%s of rank %d: number %lld differs\n", what, rank, (long long)n);
        print_event("A", a, x);
        print_event("B", b, y);
        differs = true;
        return;
    }
}

/* ---- values ---------------------------------------------------------------------------------- */

/* Not of a forward that runs again for backward, and ends of steps. */
static bool is_value(const side *s, const event *e)
{
    return e->k == STEP || (e->k == VALUE && !(e->a && strcmp(word(s, e->m), "activation") == 0));
}

/* Of both sides. */
typedef struct keys {
    names values;  /* "0|1|gradient|h.0.mlp.weight": a name and kind, on a rank, in a step */
    int64_t *seen; /* so many of each, on the side that is read */
    int64_t room;
    names all; /* "17|2": the second of those */
} keys;

static int32_t key_of(keys *k, const side *s, const event *e, int64_t step)
{
    const char *kind = word(s, e->m), *name = word(s, e->w);
    const int64_t before = k->values.count;
    char count[64], *text = kn_host_alloc(strlen(kind) + strlen(name) + 64);
    if (!text)
        return -1;
    sprintf(text, "%d|%lld|%s|%s", e->r, (long long)step, kind, name);
    const int32_t value = names_add(&k->values, text);
    kn_host_free(text);
    if (value < 0 || !kn_host_grow(&k->seen, &k->room, k->values.count, sizeof *k->seen))
        return -1;
    if (value >= before)
        k->seen[value] = 0;
    snprintf(count, sizeof count, "%d|%lld", value, (long long)++k->seen[value]);
    return names_add(&k->all, count);
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

enum { MOST_OPERATIONS = 12 };

/* The last operations of A since its value before; they made the one that differs. */
static void print_operations(const side *a, const event *since, const event *until)
{
    const int64_t from = since ? since->line : 0;
    int64_t count = 0;
    for (int print = 0; print < 2; print++) {
        const int64_t skip = count - MOST_OPERATIONS;
        int64_t n = 0;
        if (print && skip > 0)
            printf("    %lld before, then\n", (long long)skip);
        for (int64_t i = 0; i < a->r.events; i++) {
            const event *e = a->in_order[i];
            if (e->r == until->r && e->line > from && e->line < until->line && is_operation(a, e) &&
                n++ >= skip && print)
                printf("    %s of %s: %s, by %s\n", word(a, e->w),
                       e->m ? word(a, e->m) : "the root", word(a, e->x), word(a, e->p));
        }
        count = n;
    }
}

static bool value_differs(const side *a, const event *x, const side *b, const event *y, double *by,
                          double *largest)
{
    *by = difference(word(a, x->v), word(b, y->v), largest);
    if (given.tolerance > 0 ||
        !same_word(a, x->x, b, y->x)) /* of other shapes, the first elements */
        return *by > given.tolerance * *largest;
    return !same_word(a, x->h, b, y->h);
}

static void print_value(const side *a, const event *x, const side *b, const event *y,
                        const event *before, double by, double largest)
{
    printf("values: the first that differs is the %s %s of rank %d, %s\n", word(a, x->m),
           word(a, x->w), x->r, word(a, x->x));
    printf("  A: %s\n  B: %s\n", word(a, x->v), word(b, y->v));
    if (by > 0)
        printf("  by up to %.3g of %.3g in the elements shown\n", by, largest);
    else
        printf("  behind the elements shown: the digests are %s and %s\n", word(a, x->h),
               word(b, y->h));
    printf("  made since the value before%s%s by\n", before ? ", " : "",
           before ? word(a, before->w) : "");
    print_operations(a, before, x);
    differs = true;
}

/* Of the same shape, in any dtype. Shards of other sizes begin with the same elements on rank 0. */
static bool comparable(const side *a, const event *x, const side *b, const event *y)
{
    const char *one = strchr(word(a, x->x), '['), *other = strchr(word(b, y->x), '[');
    return (one && other && strcmp(one, other) == 0) ||
           (x->r == 0 && strcmp(word(a, x->m), "activation") != 0);
}

/* The values of b, by key. */
static const event **values_of(const side *b, int ranks, keys *k)
{
    const event **of = kn_host_calloc((size_t)b->r.events + 1, sizeof *of), *e;
    for (int rank = 0; of && rank < ranks; rank++)
        for (int64_t i = 0, step = 0; (e = next(b, rank, is_value, &i));) {
            const int32_t key = e->k == VALUE ? key_of(k, b, e, step) : -1;
            if (key >= 0)
                of[key] = e;
            step += e->k == STEP;
        }
    return of;
}

static void compare_values(const side *a, const side *b)
{
    keys k = { 0 };
    const int ranks = a->r.ranks < b->r.ranks ? a->r.ranks : b->r.ranks;
    const event **of = values_of(b, ranks, &k), *before, *e;
    const int64_t known = k.all.count;
    int64_t compared = 0;
    bool found = false;
    for (int64_t i = 0; i < k.values.count; i++)
        k.seen[i] = 0;
    for (int rank = 0; of && rank < ranks && !found; rank++) {
        before = NULL;
        for (int64_t i = 0, step = 0; !found && (e = next(a, rank, is_value, &i));) {
            step += e->k == STEP;
            if (e->k == STEP)
                continue;
            const int32_t key = key_of(&k, a, e, step);
            double by, largest;
            if (key >= 0 && key < known && comparable(a, e, b, of[key])) {
                compared++;
                found = value_differs(a, e, b, of[key], &by, &largest);
            }
            if (found)
                print_value(a, e, b, of[key], before, by, largest);
            before = e;
        }
    }
    if (!found && compared > 0)
        printf("values: the same %lld\n", (long long)compared);
    else if (!found)
        printf("values: none that both have; record them with --record-values\n");
    names_free(&k.values);
    names_free(&k.all);
    kn_host_free(k.seen);
    kn_host_free(of);
}

/* ---- numbers --------------------------------------------------------------------------------- */

static bool is_number(const side *s, const event *e)
{
    return e->k == NUMBER && strcmp(word(s, e->w), "items") != 0;
}

static const char *number_text(const side *s, const event *e, char text[32])
{
    snprintf(text, 32, "%.9g", e->n);
    return e->x ? word(s, e->x) : text; /* nan, inf */
}

static void compare_numbers(const side *a, const side *b)
{
    char one[32], other[32];
    int64_t i = 0, k = 0, n = 0;
    for (const event *x, *y; (x = next(a, 0, is_number, &i)) && (y = next(b, 0, is_number, &k));
         n++) {
        const double largest = fmax(fabs(x->n), fabs(y->n));
        const bool same_place = same_word(a, x->w, b, y->w) && same_word(a, x->c, b, y->c);
        if (same_place && fabs(x->n - y->n) <= given.tolerance * largest &&
            same_word(a, x->x, b, y->x))
            continue;
        if (same_place)
            printf("numbers: %s of step %s is %s and %s\n", word(a, x->w), word(a, x->c),
                   number_text(a, x, one), number_text(b, y, other));
        else
            printf("numbers: A has %s of step %s, B has %s of step %s\n", word(a, x->w),
                   word(a, x->c), word(b, y->w), word(b, y->c));
        differs = true;
        return;
    }
    printf("numbers: the same %lld\n", (long long)n);
}

/* ---- the program ----------------------------------------------------------------------------- */

static bool compare(const char *path[2])
{
    side s[2] = { 0 };
    const bool ok = side_read(&s[0], path[0]) && side_read(&s[1], path[1]);
    if (ok) {
        compare_settings(&s[0], &s[1]);
        compare_order(&s[0], &s[1], "calls and verbs", is_schedule);
        compare_order(&s[0], &s[1], "operations", is_operation);
        compare_values(&s[0], &s[1]);
        compare_numbers(&s[0], &s[1]);
    }
    side_free(&s[0]);
    side_free(&s[1]);
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
