/* models/options_text.c: options as text: the help, the banner, the command to go on. */
#include "comm/comm.h"
#include "models/options_internal.h"
#include "kernels/error_internal.h"
#include "tensor/files.h"

#include <stdlib.h>
#include <string.h>

/* ---- help and banner ------------------------------------------------------------------------- */

/* launched: kn_init took --ranks, --threads and --fault before the table was read. */
static void print_help(const kn_options *o, FILE *out, const char *program, const char *about,
                       bool launched)
{
    if (o->version) {
        fprintf(out, "%s (Knap) %s\n", program, KN_VERSION);
        return;
    }
    fprintf(out, "usage: %s [--option value | --option=value ...]\n", program);
    if (about)
        fprintf(out, "\n%s\n", about);
    fprintf(out, "\n");
    for (int i = 0; i < o->count; i++) {
        const kn_option *p = &o->table[i];
        char head[WORD_MAX + 16];
        if (p->kind == KN_OPTION_HEADING) {
            fprintf(out, "%s%s\n", i ? "\n" : "", p->name);
            continue;
        }
        if (p->kind == KN_OPTION_REST) {
            fprintf(out, "  %-22s %s\n", p->name, p->help);
            continue;
        }
        snprintf(head, sizeof head, "--%s%s", p->name, kn_option_kinds[p->kind].placeholder);
        fprintf(out, "  %-22s %s", head, p->help ? p->help : "");
        if (kn_option_chooses(p))
            fprintf(out, ": %s", p->choices);
        const char *shown = p->note ? p->note : p->value;
        if (!shown && kn_option_chooses(p))
            fprintf(out, " (default %.*s)", (int)strcspn(p->choices, "|"), p->choices);
        else if (shown && *shown && (p->kind != KN_OPTION_FLAG || strcmp(shown, "false") != 0))
            fprintf(out, " (default %s)", shown);
        fprintf(out, "\n");
    }
    if (launched && kn_options_find(o, "ranks", 5) < 0)
        fprintf(out, "  %-22s %s\n", "--ranks N", "processes that share the work (default 1)");
    if (launched && kn_options_find(o, "threads", 7) < 0)
        fprintf(out, "  %-22s %s\n", "--threads N", "threads of each rank");
    if (launched && kn_options_find(o, "fault", 5) < 0)
        fprintf(out, "  %-22s %s\n", "--fault TEXT", "a rank fails: \"rank 1: kill at step 3\"");
    fprintf(out, "  %-22s %s\n", "--help", "print this and stop");
    fprintf(out, "  %-22s %s\n", "--version", "print the version of Knap and stop");
}

void kn_options_help(const kn_options *o, FILE *out, const char *program, const char *about)
{
    if (kn_given(o, "kn_options_help", "the options' struct") &&
        kn_given(out, "kn_options_help", "the file"))
        print_help(o, out, program, about, false);
}

kn_options *kn_options_main(const kn_option *table, void *fields, int argc, char *const *argv,
                            const char *about)
{
    kn_options *o = kn_options_create(table, fields);
    bool parsed =
        o && kn_options_parse(o, argc, argv) && kn_options_check(o) && kn_options_agree(o, NULL);
    if (parsed && !kn_options_help_wanted(o))
        return o;
    if (parsed && kn_rank(kn_world()) == 0)
        print_help(o, stdout, kn_path_last(argv[0]), about, true);
    kn_options_free(o);
    return NULL;
}

void kn_options_banner(const kn_options *o, FILE *out)
{
    if (!kn_given(o, "kn_options_banner", "the options' struct") ||
        !kn_given(out, "kn_options_banner", "the file"))
        return;
    for (int i = 0; i < o->count; i++) {
        const kn_option *p = &o->table[i];
        const kn_option_value *v = &o->values[i];
        if (p->kind == KN_OPTION_HEADING) {
            fprintf(out, "%s\n", p->name);
            continue;
        }
        if (p->kind == KN_OPTION_REST)
            continue;
        bool as_note = p->note && v->origin != KN_VALUE_GIVEN &&
                       (!v->text || !p->value || !strcmp(v->text, p->value));
        const char *shown = as_note ? p->note : v->text && *v->text ? v->text : "-";
        fprintf(out, "  %-20s %s%s\n", p->name, shown, v->origin == KN_VALUE_GIVEN ? " *" : "");
    }
}

/* ---- the command to go on -------------------------------------------------------------------- */

/* A word as a shell reads it. */
static void write_word(FILE *out, const char *word)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_./:,=+@%-";
    if (*word && word[strspn(word, plain)] == '\0') {
        fputs(word, out);
        return;
    }
    putc('\'', out);
    for (; *word; word++)
        if (*word == '\'')
            fputs("'\\''", out);
        else
            putc(*word, out);
    putc('\'', out);
}

char *kn_options_end(FILE *out, char **text)
{
    const bool ok = out && fclose(out) == 0;
    char *copy = ok ? kn_host_strdup(*text) : NULL;
    free(*text);
    if (!copy && kn_ok())
        kn_fail_memory("the text of the options");
    return copy;
}

char *kn_options_command(kn_options *o)
{
    return kn_given(o, "kn_options_command", "the options' struct")
               ? kn_options_words(o, 1u << KN_OF_RUN)
               : NULL;
}

char *kn_options_words(kn_options *o, unsigned scopes)
{
    kn_option_record r;
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    for (int i = 0; out && kn_options_record(o, i, &r); i++) {
        if (!(scopes >> r.row->of & 1) || r.origin != KN_VALUE_GIVEN)
            continue;
        if (r.row->kind == KN_OPTION_FLAG) {
            fprintf(out, " --%s%s", strcmp(r.value, "true") == 0 ? "" : "no-", r.name);
            continue;
        }
        fprintf(out, " --%s%s", r.name, strncmp(r.value, "--", 2) == 0 ? "=" : " ");
        write_word(out, r.value);
    }
    return kn_options_end(out, &text);
}
