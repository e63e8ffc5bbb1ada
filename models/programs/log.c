/* models/programs/log.c: the files of a run's values. One list of a step's values is written in
 * three forms. */
#include "models/programs/log.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "tensor/files.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct log_file {
    FILE *out;       /* NULL: none */
    bool table;      /* CSV */
    char path[4200]; /* for errors */
} log_file;

enum { OF_RUN, GIVEN, EVENTS, FILES };
struct run_log {
    const char *item;
    log_file file[FILES];
    int error; /* errno of the write that failed first */
    const char *failed;
};

/* ---- values ---------------------------------------------------------------------------------- */

static int values_of(const step_report *r, const char *item, log_value v[LOG_VALUES])
{
    const log_value list[] = {
        { "step", NULL, (double)r->step },
        { "samples", NULL, (double)r->samples },
        { "loss", "%.9g", r->loss },
        { "val_loss", "%.9g", r->has_val ? r->val_loss : NAN },
        { "val_accuracy", "%.9g", r->has_accuracy ? r->accuracy : NAN, true },
        { "val_perplexity", "%.9g", r->perplexity > 0 ? r->perplexity : NAN, true },
        { "val_bits_per_byte", "%.9g", r->bits_per_byte > 0 ? r->bits_per_byte : NAN, true },
        { "lr", "%.9g", r->lr },
        { "grad_norm", "%.9g", r->grad_norm },
        { "", "%.1f", (double)r->items / r->seconds },
        { "step_ms", "%.3f", 1e3 * r->seconds },
        { "muon_ms", "%.3f", 1e3 * r->muon },
    };
    int n = (int)(sizeof list / sizeof *list);
    memcpy(v, list, sizeof list);
    for (int i = 0; i < n; i++)
        if (!v[i].name[0])
            snprintf(v[i].name, sizeof v[i].name, "%s_per_s", item);
    for (int i = 0; i <= KN_MEM_COUNT; i++, n++) {
        const bool all = i == KN_MEM_COUNT;
        v[n] = (log_value){ .value = (double)(all ? r->ledger.peak_total : r->ledger.peak[i]) };
        snprintf(v[n].name, sizeof v[n].name, "peak_bytes/%s",
                 all ? "total" : kn_mem_name((kn_mem_category)i));
    }
    return n;
}

static void put_value(FILE *out, const log_value *v, const char *none)
{
    if (!isfinite(v->value))
        fputs(none, out);
    else if (v->format)
        fprintf(out, v->format, v->value);
    else
        fprintf(out, "%lld", (long long)v->value);
}

/* One object; JSON has no infinity, which is the norm of a skipped step: null. */
static void put_object(FILE *out, const log_value *v, int n)
{
    bool inside = false;
    for (int i = 0; i < n; i++) {
        const char *slash = strchr(v[i].name, '/');
        if (v[i].optional && !isfinite(v[i].value))
            continue;
        fputs(i == 0 ? "{" : ", ", out);
        if (slash && !inside)
            fprintf(out, "\"%.*s\": {", (int)(slash - v[i].name), v[i].name);
        inside = slash != NULL;
        fprintf(out, "\"%s\": ", slash ? slash + 1 : v[i].name);
        put_value(out, &v[i], "null");
    }
    fputs(inside ? "}}\n" : "}\n", out);
}

static void put_row(FILE *out, const log_value *v, int n)
{
    for (int i = 0; i < n; i++) {
        fputs(i == 0 ? "" : ",", out);
        put_value(out, &v[i], "");
    }
    fputs("\n", out);
}

/* The first line of a table, in memory of the host that the caller frees. */
static char *header_of(const char *item)
{
    log_value v[LOG_VALUES];
    const int n = values_of(&(step_report){ .seconds = 1 }, item, v);
    char *line = kn_host_alloc(LOG_VALUES * sizeof v->name);
    for (int i = 0, used = 0; line && i < n; i++)
        used += sprintf(line + used, "%s%s", v[i].name, i + 1 < n ? "," : "\n");
    return line;
}

/* ---- going on -------------------------------------------------------------------------------- */

/* The samples of a line, which are its second value in either form; -1: none. */
static int64_t samples_of(const char *line, bool table)
{
    static const char key[] = "\"samples\": ";
    const char *at = table ? strchr(line, ',') : strstr(line, key);
    char *end;
    if (!at)
        return -1;
    at += table ? 1 : sizeof key - 1;
    const long long n = strtoll(at, &end, 10);
    return end != at && *end == ',' ? n : -1;
}

/* A file on its way to its end. */
typedef struct cutting {
    bool table;
    const char *path, *header; /* header: the first line of a table */
    int64_t samples;
    off_t place; /* of the first line with later samples, or of a last one that a crash cut */
} cutting;

static bool find_later(const char *line, off_t at, bool cut, void *arg)
{
    cutting *c = arg;
    if (c->table && at == 0 && strcmp(line, c->header) != 0)
        return kn_fail("%s has other columns than this run's log; give another file to --log",
                       c->path);
    if (!cut && samples_of(line, c->table) <= c->samples)
        return true;
    c->place = at;
    return false;
}

/* Cuts off the lines of later steps, and goes to the file's end. A file without lines stays so;
 * what is no regular file, as a terminal, has nothing to cut. */
static bool cut_later(log_file *f, const log_options *o, const char *header)
{
    struct stat st;
    if (kn_file_facts(fileno(f->out), &st) != 0)
        return kn_fail_system("cannot read the log %s: %m", f->path);
    if (!S_ISREG(st.st_mode))
        return true;
    cutting c = { f->table, f->path, header, o->samples, st.st_size };
    return log_lines(f->path, find_later, &c, false) &&
           (c.place == st.st_size || KN_AGAIN(ftruncate(fileno(f->out), c.place)) == 0 ||
            kn_fail_system("cannot cut the log %s: %m", f->path));
}

/* ---- files ----------------------------------------------------------------------------------- */

/* Two names of one regular file. */
static bool is_same(const log_file *a, const log_file *b)
{
    struct stat x, y;
    return a->out && b->out && kn_file_facts(fileno(a->out), &x) == 0 &&
           kn_file_facts(fileno(b->out), &y) == 0 && S_ISREG(x.st_mode) && x.st_dev == y.st_dev &&
           x.st_ino == y.st_ino;
}

static bool open_file(log_file *f, const log_options *o)
{
    char *header = f->table ? header_of(o->item) : NULL;
    bool ok = !f->table || header;
    if (ok && !(f->out = fopen(f->path, o->goes_on ? "ae" : "we")))
        ok = kn_fail_system("cannot write the log %s: %m", f->path);
    ok = ok && (!o->goes_on || cut_later(f, o, header));
    struct stat st;
    if (ok && f->table && (kn_file_facts(fileno(f->out), &st) != 0 || st.st_size == 0))
        fputs(header, f->out);
    kn_host_free(header);
    return ok;
}

const char *log_of_json(const char *file, const char *out, char *path, size_t size)
{
    if (file && !kn_ends_in(file, ".csv"))
        return file;
    if (!out || snprintf(path, size, "%s/" LOG_FILE, out) >= (int)size)
        return NULL;
    return path;
}

static bool name_file(log_file *f, const char *folder, const char *name)
{
    const int n =
        snprintf(f->path, sizeof f->path, "%s%s%s", folder ? folder : "", folder ? "/" : "", name);
    f->table = kn_ends_in(name, ".csv");
    return n < (int)sizeof f->path || kn_fail("the log's path %s is too long", name);
}

static bool open_all(run_log *l, const log_options *o)
{
    log_file *run = &l->file[OF_RUN], *given = &l->file[GIVEN], *events = &l->file[EVENTS];
    if (o->out && (!name_file(run, o->out, LOG_FILE) || !open_file(run, o)))
        return false;
    if (o->file && (!name_file(given, NULL, o->file) || !open_file(given, o)))
        return false;
    if (is_same(run, given)) { /* one line a step */
        fclose(given->out);
        given->out = NULL;
    }
    return !o->folder || (events->out = events_open(o->folder, o->goes_on ? o->step + 1 : 0,
                                                    events->path, sizeof events->path));
}

run_log *log_open(log_options o)
{
    run_log *l = kn_host_calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->item = o.item;
    if (open_all(l, &o))
        return l;
    log_close(l);
    return NULL;
}

static void note_error(run_log *l, const log_file *f)
{
    if (l->error == 0) {
        l->error = errno ? errno : EIO;
        l->failed = f->path;
    }
}

bool log_step(run_log *l, const step_report *r)
{
    log_value v[LOG_VALUES];
    const int n = values_of(r, l->item, v);
    for (log_file *f = l->file; f < l->file + FILES && l->error == 0; f++) {
        bool ok = true;
        errno = 0;
        if (!f->out)
            continue;
        if (f == &l->file[EVENTS])
            ok = events_step(f->out, r->step, v, n);
        else if (f->table)
            put_row(f->out, v, n);
        else
            put_object(f->out, v, n);
        if (!ok || fflush(f->out) != 0 || ferror(f->out))
            note_error(l, f);
    }
    return l->error == 0;
}

bool log_close(run_log *l)
{
    if (!l)
        return true;
    for (log_file *f = l->file; f < l->file + FILES; f++)
        if (f->out && fclose(f->out) != 0)
            note_error(l, f);
    const bool ok = l->error == 0 || kn_fail("cannot write the log %s: %s; the run stopped there",
                                             l->failed, strerror(l->error));
    kn_host_free(l);
    return ok;
}
