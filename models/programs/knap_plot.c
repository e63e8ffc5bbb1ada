/* models/programs/knap_plot.c: the losses of runs in one picture, on the terminal or as SVG. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/programs/losses.h"
#include "models/programs/tool.h"
#include "tensor/files.h"

enum { MOST_RUNS = 16 };

static const char about[] =
    "Draws the losses of runs in one picture, of folders that train_gpt or train_resnet wrote\n"
    "(--out) or of their logs (--log, JSON):\n"
    "  knap-plot RUN|LOG...                     on the terminal\n"
    "  knap-plot RUN|LOG... --out picture.svg    as a picture for browsers\n"
    "Thin lines are the losses of steps, thick ones those of evaluations.";

typedef struct settings {
    const char *out;
    bool log_scale, samples, only_val;
    double smooth;
} settings;

static settings given;
static const kn_option table[] = {
    { "RUN|LOG...", KN_OPTION_REST, .help = "one or several, in the order of the legend" },
    { "out", KN_OPTION_PATH, offsetof(settings, out), NULL, "an SVG file", .note = "the terminal" },
    { "log-scale", KN_OPTION_FLAG, offsetof(settings, log_scale), NULL,
      "the logarithm of the loss on the axis" },
    { "smooth", KN_OPTION_FLOAT, offsetof(settings, smooth), "0",
      "of the thin lines: the weight of the steps before, as 0.9", .max = 0.9999 },
    { "samples", KN_OPTION_FLAG, offsetof(settings, samples), NULL,
      "over samples: for runs whose steps have other sizes" },
    { "only-val", KN_OPTION_FLAG, offsetof(settings, only_val), NULL, "without the thin lines" },
    { 0 },
};

/* RUN/log.jsonl of a folder, else the file itself. */
static bool read_run(losses *l, const char *word)
{
    struct stat st;
    const int there = kn_look(word, &st);
    if (there < 0)
        return false;
    if (there == 0)
        return kn_fail("%s isn't there; give a run's folder or its log", word);
    const bool folder = S_ISDIR(st.st_mode);
    const kn_path file = folder ? kn_path_of(word, LOG_FILE, "") : (kn_path){ .text = "" };
    const char *path = folder ? file.text : word;
    bool ok = kn_ok() && losses_read(l, path, -1, false);
    if (ok && l->line[TRAINED].count == 0)
        ok = kn_fail("%s has no line of a step, as --log of a trainer writes them in JSON", path);
    return ok;
}

static bool draw(const chart *c, const char *path)
{
    page t;
    if (!svg_begin(&t, CHART_WIDTH, chart_height(c)))
        return false;
    chart_draw(t.out, c, 0);
    return svg_end(&t, path);
}

/* Lines of one run have one colour. */
static int lines_of(const losses *run, char *const *name, int runs, chart_line *line)
{
    static const char *const colours[] = { "#06c", "#c50", "#093", "#a0a", "#777", "#c03" };
    int n = 0;
    for (int i = 0; i < runs; i++) {
        const bool has_val = run[i].line[VALIDATED].count > 0;
        for (int k = 0; k < LOSSES; k++) {
            if (k == VALIDATED ? !has_val : given.only_val && has_val)
                continue;
            line[n] = run[i].line[k];
            line[n].name = k == VALIDATED || !has_val ? name[i] : "";
            line[n++].colour = colours[i % 6];
        }
    }
    return n;
}

static bool run(char *const *word, int words)
{
    static losses all[MOST_RUNS];
    char *name[MOST_RUNS] = { NULL };
    chart_line line[MOST_RUNS * LOSSES];
    bool ok = true;
    if (words == 0)
        return kn_fail("give the folder of a run, or its log; --help explains more");
    if (given.out && !kn_ends_in(given.out, ".svg"))
        return kn_fail("--out %s: a picture is an SVG; give a name that ends in .svg", given.out);
    if (words > MOST_RUNS)
        return kn_fail("%d runs are more than the %d that one picture takes", words, MOST_RUNS);
    for (int i = 0; ok && i < words; i++) {
        all[i].unit = given.samples;
        ok = read_run(&all[i], word[i]) && (name[i] = kn_host_strdup(word[i]));
        if (ok)
            kn_defuse(name[i]);
    }
    const chart c = { .title = "loss",
                      .below = given.samples ? "samples" : "steps",
                      .line = line,
                      .lines = ok ? lines_of(all, name, words, line) : 0,
                      .log_scale = given.log_scale,
                      .smooth = given.smooth };
    if (ok && given.out)
        ok = draw(&c, given.out);
    else if (ok) {
        chart_print(stdout, &c, 20);
        ok = fflush(stdout) == 0 || kn_fail_system("cannot write to standard output: %m");
    }
    for (int i = 0; i < words; i++) {
        losses_free(&all[i]);
        kn_host_free(name[i]);
    }
    return ok;
}

int main(int argc, char **argv)
{
    const tool t = { "knap-plot", about, table, &given, run };
    return tool_main(&t, argc, argv);
}
