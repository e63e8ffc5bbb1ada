/* models/programs/knap_report.c: recordings as one page for browsers, or as text on the terminal.
 *
 * The page is models/report/page.html with its styles and scripts, put together while the program
 * is built (scripts/report_page.py). Each recording becomes an article of it: the facts, which need
 * no script, and the events as columns of JSON, which the scripts draw. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/programs/chart.h"
#include "models/programs/facts.h"
#include "models/programs/tool.h"
#include "models/programs/waiting.h"
#include "tensor/files.h"
#include "tensor/json.h"

#include <unistd.h>

static const char about[] =
    "Shows recordings of training steps, which --record FILE of a trainer writes:\n"
    "  knap-report RUN.rec... [--out page.html]   as one page for browsers, a tab a recording\n"
    "  knap-report RUN.rec... --text              the same facts on the terminal\n"
    "  knap-report RUN.rec --what-if 'train_gpt ... --prefetch none'   beside another way\n"
    "The page needs no network. docs/recording.md explains it, and the form of a recording.";

typedef struct settings {
    const char *out, *what_if;
    bool text;
} settings;

static settings given;
static const kn_option table[] = {
    { "RUN.rec...", KN_OPTION_REST, .help = "one or several, in the order of the tabs" },
    { "out", KN_OPTION_PATH, offsetof(settings, out), NULL, "the page",
      .note = "the first recording's name and .html" },
    { "text", KN_OPTION_FLAG, offsetof(settings, text), NULL, "print the facts, write no page",
      .clashes = "out" },
    { "what-if", KN_OPTION_STRING, offsetof(settings, what_if), NULL,
      "run this command, a trainer's with another option, and show it beside the first recording" },
    { 0 },
};

extern const char report_page[]; /* made of models/report: the recordings go between its halves */
extern const char report_page_end[];

/* ---- the events, as the scripts read them ---------------------------------------------------- */

/* JSON inside of a page's script: no "<" may begin a tag there. */
static void put_json(FILE *out, const char *text)
{
    for (; *text; text++)
        if (*text == '<')
            fputs("\\u003c", out);
        else
            fputc(*text, out);
}

static bool put_text(FILE *out, const char *text)
{
    char *json = kn_json_copy(json_string(text), JSON_ENCODE_ANY, "the page");
    if (json)
        put_json(out, json);
    kn_host_free(json);
    return json != NULL;
}

/* The key of all events, unless none has it. */
static void put_column(FILE *out, const recording *r, const event_key *key)
{
    bool any = false;
    for (int64_t i = 0; i < r->events && !any; i++) {
        const void *at = (const char *)&r->event[i] + key->at;
        any = key->text ? *(const int32_t *)at != 0 : *(const double *)at != 0;
    }
    if (!any)
        return;
    fprintf(out, ",\n\"%s\":[", key->key);
    for (int64_t i = 0; i < r->events; i++) {
        const void *at = (const char *)&r->event[i] + key->at;
        if (key->text)
            fprintf(out, "%s%d", i ? "," : "", *(const int32_t *)at);
        else
            fprintf(out, "%s%.12g", i ? "," : "", *(const double *)at);
    }
    fputc(']', out);
}

static bool put_data(FILE *out, const recording *r, const waiting *w)
{
    char *head = kn_json_text(r->head, JSON_COMPACT, "the page");
    bool ok = head != NULL;
    fputs("<script type=\"application/json\">{\"head\":", out);
    if (ok)
        put_json(out, head);
    kn_host_free(head);
    fputs(",\n\"names\":[", out);
    for (int32_t i = 0; ok && i < r->names.count; i++) {
        fputs(i ? "," : "", out);
        ok = put_text(out, name_of(r, i));
    }
    fputs("],\n\"kinds\":[", out);
    for (int i = 0; i < KINDS; i++)
        fprintf(out, "%s\"%s\"", i ? "," : "", event_kinds[i]);
    fputs("],\n\"causes\":[", out);
    for (int i = 0; i < CAUSES; i++)
        fprintf(out, "%s\"%s\"", i ? "," : "", idle_causes[i].name);
    fputs("],\n\"idle\":[", out);
    for (int64_t i = 0; i < w->idles; i++)
        fprintf(out, "%s[%d,%.12g,%.12g,%d,%lld]", i ? "," : "", w->idle[i].rank, w->idle[i].begin,
                w->idle[i].end, w->idle[i].cause, (long long)w->idle[i].awaited);
    fputs("],\n\"steps\":[", out);
    for (int64_t i = 0; i < w->steps; i++)
        fprintf(out, "%s[%d,%.12g,%.12g,%.12g]", i ? "," : "", w->step[i].rank, w->step[i].begin,
                w->step[i].end, w->step[i].busy);
    fputs("],\n\"events\":{\"k\":[", out);
    for (int64_t i = 0; i < r->events; i++)
        fprintf(out, "%s%d", i ? "," : "", r->event[i].k);
    fputs("],\n\"r\":[", out);
    for (int64_t i = 0; i < r->events; i++)
        fprintf(out, "%s%d", i ? "," : "", r->event[i].r);
    fputc(']', out);
    for (const event_key *key = event_keys; key->key; key++)
        put_column(out, r, key);
    fputs("}}</script>\n", out);
    return ok;
}

/* ---- page and text --------------------------------------------------------------------------- */

typedef struct shown {
    recording r;
    waiting w;
} shown;

/* before: the recording that this one is put beside; NULL: none. The caller frees now. */
static bool put_recording(sheet *s, shown *now, const char *path, const char *name,
                          const shown *before)
{
    recording *r = &now->r;
    s->db = recording_read(r, path) ? database_open() : NULL;
    bool ok = s->db && database_add(s->db, "main", r) && waiting_find(&now->w, r, s->db) &&
              waiting_add(&now->w, s->db, "main");
    if (ok && s->html) {
        fputs("<article data-name=\"", s->out);
        svg_text(s->out, name);
        fputs("\">\n", s->out);
    } else if (ok) {
        sheet_sentence(s, name);
    }
    ok = ok &&
         (!before || (database_add(s->db, "before", &before->r) &&
                      waiting_add(&before->w, s->db, "before") && facts_what_if(s))) &&
         facts_write(s, r);
    sqlite3_close(s->db);
    if (ok && s->html) {
        ok = put_data(s->out, r, &now->w);
        fputs("</article>\n", s->out);
    }
    return ok;
}

static void shown_free(shown *it)
{
    waiting_free(&it->w);
    recording_free(&it->r);
}

/* The recordings, and that of --what-if behind the first one. */
static bool put_all(sheet *s, char *const *word)
{
    shown first = { 0 }, other = { 0 };
    char path[] = "/tmp/knap-report-XXXXXX";
    bool ok = put_recording(s, &first, word[0], word[0], NULL);
    for (word++; ok && *word; word++) {
        ok = put_recording(s, &other, *word, *word, NULL);
        shown_free(&other);
        other = (shown){ 0 };
    }
    if (ok && given.what_if) {
        const int fd = mkstemp(path);
        ok = (fd >= 0 && close(fd) == 0) || kn_fail_system("%s: %m", path);
        ok = ok && recording_make(given.what_if, "", path) &&
             put_recording(s, &other, path, given.what_if, &first);
        unlink(path);
    }
    shown_free(&other);
    shown_free(&first);
    return ok;
}

static bool print_facts(char *const *word)
{
    sheet s = { .out = stdout };
    if (!put_all(&s, word))
        return false;
    return fflush(stdout) == 0 || kn_fail_system("cannot write to standard output: %m");
}

static bool write_page(char *const *word, const char *path)
{
    page t;
    if (!page_begin(&t))
        return false;
    sheet s = { .out = t.out, .html = true };
    fputs(report_page, t.out);
    const bool ok = put_all(&s, word);
    fputs(report_page_end, t.out);
    if (ok)
        return page_end(&t, path) && printf("%s\n", path) > 0;
    fclose(t.out);
    free(t.data);
    return false;
}

static bool run(char *const *word, int words)
{
    char path[4096];
    if (words == 0)
        return kn_fail("give a recording, as --record FILE of a trainer writes it; --help explains "
                       "more");
    if (given.text)
        return print_facts(word);
    snprintf(path, sizeof path, "%s.html", word[0]);
    const char *out = given.out ? given.out : path;
    if (!kn_ends_in(out, ".html"))
        return kn_fail("--out %s: a page is HTML; give a name that ends in .html", out);
    return write_page(word, out);
}

int main(int argc, char **argv)
{
    const tool t = { "knap-report", about, table, &given, run };
    return tool_main(&t, argc, argv);
}
