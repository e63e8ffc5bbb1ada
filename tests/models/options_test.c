/* tests/models/options_test.c: the table of options: values accepted and refused, messages,
 * records. */
#include "kernels/error.h"
#include "kernels/memory.h"
#include "models/options.h"
#include "tests/failing.h"
#include "tests/models/owned.h"

#include <stdarg.h>
#include <stddef.h>

typedef struct config {
    int64_t steps, threads, shift;
    double lr;
    const char *data, *log, *note, *out;
    bool recompute, prefetch;
    int strategy;
    const char *model;
} config;

static const kn_option table[] = {
    { "Training", KN_OPTION_HEADING },
    { "steps", KN_OPTION_INT, offsetof(config, steps), "2000", "optimizer steps", 1, 1e9 },
    { "threads", KN_OPTION_INT, offsetof(config, threads), "0", "threads of a kernel",
      .note = "one per core", .own = true },
    { "shift", KN_OPTION_INT, offsetof(config, shift), "-3", "any number", .any = true },
    { "lr", KN_OPTION_FLOAT, offsetof(config, lr), "1e-3", "peak learning rate", 0, 10 },
    { "data", KN_OPTION_PATH, offsetof(config, data), "shakespeare", "data set or file",
      .only_read = true },
    { "out", KN_OPTION_PATH, offsetof(config, out), NULL, "folder" },
    { "log", KN_OPTION_PATH, offsetof(config, log), NULL, "log file", .of = KN_OF_RUN,
      .clashes = "note" },
    { "note", KN_OPTION_STRING, offsetof(config, note), NULL, "a remark" },
    { "recompute", KN_OPTION_FLAG, offsetof(config, recompute), NULL, "save memory" },
    { "prefetch", KN_OPTION_FLAG, offsetof(config, prefetch), "true", "gather ahead" },
    { "strategy", KN_OPTION_CHOICE, offsetof(config, strategy), NULL, "sharding",
      .choices = "full_shard|no_shard", .fixed = true },
    { 0 },
};

/* Parses the words up to NULL. */
static bool parse(kn_options *o, ...)
{
    char *argv[32] = { (char *)"program" };
    int argc = 1;
    va_list words;
    va_start(words, o);
    for (char *w; argc < 32 && (w = va_arg(words, char *));)
        argv[argc++] = w;
    va_end(words);
    return kn_options_parse(o, argc, argv);
}

static char *print(const kn_options *o, bool help)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    KN_CHECK(f != NULL);
    if (help)
        kn_options_help(o, f, "program", "Trains.");
    else
        kn_options_banner(o, f);
    fclose(f);
    return text;
}

KN_TEST(options, defaults)
{
    config c;
    memset(&c, 0xff, sizeof c);
    OWNED_OPTIONS kn_options *o = kn_options_create(table, &c);
    KN_CHECK_OK();
    KN_CHECK(o && parse(o, NULL));
    KN_CHECK(c.steps == 2000 && c.threads == 0 && c.shift == -3 && c.lr == 1e-3);
    KN_CHECK(strcmp(c.data, "shakespeare") == 0 && c.log == NULL && c.note == NULL);
    KN_CHECK(!c.recompute && c.prefetch && c.strategy == 0);
    KN_CHECK(!kn_options_given(o, "steps") && !kn_options_help_wanted(o));
}

KN_TEST(options, forms)
{
    config c;
    OWNED_OPTIONS kn_options *o = kn_options_create(table, &c);
    KN_CHECK(o && parse(o, "--steps", "10", "--lr=0.5", "--no-prefetch", "--recompute",
                        "--strategy=no_shard", "--data", "a=b.txt", "--note=", "--shift", "-7",
                        "--steps=10", NULL));
    KN_CHECK(c.steps == 10 && c.lr == 0.5 && !c.prefetch && c.recompute && c.strategy == 1);
    KN_CHECK(strcmp(c.data, "a=b.txt") == 0 && strcmp(c.note, "") == 0 && c.shift == -7);
    KN_CHECK(kn_options_given(o, "steps") && !kn_options_given(o, "threads"));
    kn_options_free(o);
    o = kn_options_create(table, &c);
    KN_CHECK(parse(o, "--prefetch=false", "--recompute=true", NULL));
    KN_CHECK(!c.prefetch && c.recompute);
}

KN_TEST(options, a_beginning_is_nearer_than_a_mistyped_word)
{
    static const char *const cases[][3] = { { "stop", "steps|stop-after", "stop-after" },
                                            { "stpes", "stop-after|steps", "steps" },
                                            { "top-q", "temp|top-k|top-p", "top-k" },
                                            { "llama3.2-1", "llama|llama3.2-1b", "llama3.2-1b" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char near[48];
        const char *found = kn_nearest(cases[i][0], cases[i][1], near, sizeof near);
        KN_CHECK(found && strcmp(found, cases[i][2]) == 0, "%s: %s", cases[i][0], near);
    }
}

KN_TEST(options, version)
{
    config c;
    OWNED_OPTIONS kn_options *o = kn_options_create(table, &c);
    KN_CHECK(o && parse(o, "--version", "--nonsense", NULL) && kn_options_help_wanted(o));
    OWNED_BYTES char *text = print(o, true);
    KN_CHECK(strncmp(text, "program (Knap) ", 15) == 0 && strchr(text, '\n')[1] == '\0', "%s",
             text);
}

KN_TEST(options, errors)
{
    static const struct {
        const char *a, *b, *says;
    } cases[] = {
        { "--stpes", "5", "unknown option --stpes; did you mean --steps?" },
        { "--straegy=no_shard", NULL, "did you mean --strategy?" },
        { "--xyzzy", NULL, "unknown option --xyzzy; --help lists the options" },
        { "--no-steps", NULL, "unknown option --no-steps" },
        { "-steps", "5", "did you mean --steps?" },
        { "5", NULL, "unexpected argument '5'" },
        { "--", NULL, "unexpected argument '--'" },
        { "", NULL, "unexpected argument ''" },
        { "--steps", NULL, "--steps needs a value" },
        { "--steps", "--lr=1", "--steps needs a value: --steps=VALUE, which may begin with --" },
        { "--steps=", NULL, "--steps takes a whole number, not ''" },
        { "--steps", "12x", "--steps takes a whole number, not '12x'" },
        { "--steps", " 12", "--steps takes a whole number" },
        { "--steps", "1.5", "--steps takes a whole number" },
        { "--steps", "0", "--steps must lie between 1 and 1000000000, not 0" },
        { "--steps", "99999999999999999999", "--steps must lie between" },
        { "--shift", "99999999999999999999", "is too large" },
        { "--threads", "-1", "--threads must be 0 or more" },
        { "--lr", "fast", "--lr takes a number, not 'fast'" },
        { "--lr", "nan", "--lr takes a number" },
        { "--lr", "1e999", "--lr takes a number" },
        { "--lr", "11", "--lr must lie between 0 and 10, not 11" },
        { "--strategy", "noshard", "did you mean no_shard?" },
        { "--strategy", "zero", "choices: full_shard|no_shard" },
        { "--recompute=yes", NULL, "--recompute is a flag" },
        { "--no-recompute=true", NULL, "--no-recompute takes no value" },
        { "--recompute", "true", "unexpected argument 'true'" },
        { "--data=", NULL, "--data takes a path" },
        { "--steps=5", "--steps=6", "--steps is given twice, as 5 and as 6" },
        { "--recompute", "--no-recompute", "--recompute is given twice" },
        { "--log=x", "--note=y", "--log and --note contradict each other" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        config c;
        OWNED_OPTIONS kn_options *o = kn_options_create(table, &c);
        KN_CHECK(o != NULL);
        KN_CHECK(!parse(o, cases[i].a, cases[i].b, NULL), "%s is taken", cases[i].a);
        KN_CHECK_ERROR(cases[i].says);
    }
}

/* Options that do something only beside others, and a list of those that contradict one. */
KN_TEST(options, beside_others)
{
    static const kn_option rows[] = {
        { "log", KN_OPTION_PATH, offsetof(config, log) },
        { "steps", KN_OPTION_INT, offsetof(config, steps), "0" },
        { "prefetch", KN_OPTION_FLAG, offsetof(config, prefetch) },
        { "shift", KN_OPTION_INT, offsetof(config, shift), .with = "log|steps|prefetch" },
        { "model", KN_OPTION_NAME, offsetof(config, model), .choices = "sgd|adamw|muon" },
        { "lr", KN_OPTION_FLOAT, offsetof(config, lr), .with = "model=adamw|muon" },
        { "out", KN_OPTION_PATH, offsetof(config, out), .clashes = "note|data" },
        { "note", KN_OPTION_STRING, offsetof(config, note) },
        { "data", KN_OPTION_PATH, offsetof(config, data) },
        { "recompute", KN_OPTION_FLAG, offsetof(config, recompute), .clashes = "prefetch",
          .with = "data" },
        { 0 },
    };
    static const char *const cases[][3] = {
        { "--shift=1", NULL, "--shift is for --log or --steps or --prefetch; give that as well" },
        { "--shift=1", "--steps=0", "--shift is for --log" },
        { "--shift=1", "--no-prefetch", "--shift is for --log" },
        { "--shift=0", NULL, NULL },
        { "--shift=1", "--steps=2", NULL },
        { "--shift=1", "--prefetch", NULL },
        { "--log=x", "--shift=0", NULL },
        { "--log=0", "--shift=1", NULL }, /* a path as any other */
        { "--log=false", "--shift=1", NULL },
        { "--lr=1", NULL, "--lr is for --model adamw or muon; give that as well" },
        { "--lr=1", "--model=sgd", "--lr is for --model adamw or muon" },
        { "--lr=1", "--model=muon", NULL },
        { "--out=x", "--note=y", "--out and --note contradict each other" },
        { "--data=x", "--out=y", "--out and --data contradict each other" },
        { "--data=x", "--note=y", NULL },
        { "--recompute", "--prefetch", "--recompute and --prefetch contradict each other" },
        { "--no-recompute", "--prefetch", NULL }, /* off, it asks for nothing */
        { "--recompute", "--no-prefetch", "--recompute is for --data" },
        { "--lr=1", "--help", NULL },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        config c;
        OWNED_OPTIONS kn_options *o = kn_options_create(rows, &c);
        const bool taken = parse(o, cases[i][0], cases[i][1], NULL) && kn_options_check(o);
        KN_CHECK(taken == !cases[i][2], "%s %s", cases[i][0], cases[i][1]);
        if (cases[i][2])
            KN_CHECK_ERROR(cases[i][2]);
    }
    REFUSED(kn_options_check(NULL), "kn_options_check: the options' struct is NULL");
}

/* A refused value leaves the field as it was. */
KN_TEST(options, refused_value_changes_nothing)
{
    config c;
    OWNED_OPTIONS kn_options *o = kn_options_create(table, &c);
    KN_CHECK(o && !kn_options_set(o, "steps", "0"));
    kn_clear_error();
    KN_CHECK(c.steps == 2000);
    REFUSED(kn_options_set(o, "stepps", "3"), "did you mean --steps?");
}

KN_TEST(options, help_and_banner)
{
    config c;
    OWNED_OPTIONS kn_options *o = kn_options_create(table, &c);
    KN_CHECK(o && parse(o, "--lr=0.25", "--help", "--nonsense", NULL) && kn_options_help_wanted(o));
    OWNED_BYTES char *text = print(o, true);
    static const char *const says[] = { "usage: program", "Trains.",
                                        "--steps N",      "(default 2000)",
                                        "one per core",   "full_shard|no_shard",
                                        "(default 1e-3)", "--recompute",
                                        "(default true)", "(default full_shard)",
                                        "--help" };
    for (size_t i = 0; i < sizeof says / sizeof says[0]; i++)
        KN_CHECK(strstr(text, says[i]), "help lacks '%s':\n%s", says[i], text);
    KN_CHECK(!strstr(text, "(default false)"));
    free(text);
    text = print(o, false);
    KN_CHECK(strstr(text, "0.25 *") && strstr(text, "shakespeare\n") &&
                 strstr(text, "one per core") && strstr(text, "Training"),
             "%s", text);
}

/* A run restores the values that another recorded, except those of its own command line. */
KN_TEST(options, record_and_restore)
{
    config a, b;
    OWNED_OPTIONS kn_options *from = kn_options_create(table, &a),
                             *to = kn_options_create(table, &b);
    kn_option_record r;
    KN_CHECK(from && to);
    KN_CHECK(parse(from, "--steps=77", "--lr", "0.1234567890123", "--note=x y", "--no-prefetch",
                   "--strategy=no_shard", NULL));
    KN_CHECK(parse(to, "--steps", "88", NULL));
    int i = 0, of_run = 0;
    for (; kn_options_record(from, i, &r); i++) {
        of_run += r.row->of == KN_OF_RUN;
        if (strcmp(r.name, "out") == 0)
            continue;
        KN_CHECK(r.row->of == KN_OF_RUN || kn_options_restore(to, r.name, r.value, r.origin));
    }
    KN_CHECK(i == 11 && of_run == 1);
    KN_CHECK(b.steps == 88 && b.lr == a.lr && strcmp(b.note, "x y") == 0 && !b.prefetch);
    KN_CHECK(b.strategy == 1 && b.log == NULL && b.data != a.data);
    KN_CHECK(!kn_options_given(to, "lr"));
    /* output paths are the user's choice */
    KN_CHECK(!kn_options_restore(to, "log", "/tmp/elsewhere", KN_VALUE_RESTORED) && b.log == NULL);
    KN_CHECK_ERROR("--log, which belongs to a run");
    REFUSED(kn_options_restore(to, "out", "/tmp/elsewhere", KN_VALUE_RESTORED),
            "--out, which belongs to a run");
    REFUSED(kn_options_restore(to, "heats", "1", KN_VALUE_RESTORED),
            "the checkpoint records an option --heats");
    REFUSED(kn_options_restore(to, "lr", "much", KN_VALUE_RESTORED), "--lr takes a number");
}

/* The row of that name. */
static kn_option_record row_of(kn_options *o, const char *name)
{
    kn_option_record r = { 0 };
    for (int i = 0; kn_options_record(o, i, &r) && strcmp(r.name, name) != 0; i++)
        ;
    return r;
}

/* A value that was left open is worked out, in each run anew; a chosen one stays; what differs from
 * the checkpoint is told. */
KN_TEST(options, origins)
{
    config c;
    static const struct {
        const char *given, *recorded; /* NULL: none */
        kn_option_origin was, is;
        double value;
        bool changed;
    } rows[] = {
        { NULL, NULL, 0, KN_VALUE_DERIVED, 0.5, false },
        { "1e-3", NULL, 0, KN_VALUE_DERIVED, 0.5, false }, /* the table's: left open */
        { "0.25", NULL, 0, KN_VALUE_GIVEN, 0.25, false },
        { NULL, "0.125", KN_VALUE_RESTORED, KN_VALUE_RESTORED, 0.125, false },
        { NULL, "0.125", KN_VALUE_DERIVED, KN_VALUE_DERIVED, 0.5, true },
        { NULL, "0.500", KN_VALUE_DERIVED, KN_VALUE_DERIVED, 0.5, false },
        { NULL, "0.001", KN_VALUE_RESTORED, KN_VALUE_DERIVED, 0.5, true },
        { "0.25", "0.125", KN_VALUE_RESTORED, KN_VALUE_GIVEN, 0.25, true },
        { "0.25", "2.5e-1", KN_VALUE_RESTORED, KN_VALUE_GIVEN, 0.25, false },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        OWNED_OPTIONS kn_options *o = kn_options_create(table, &c);
        KN_CHECK(o && (!rows[i].given || parse(o, "--lr", rows[i].given, NULL)));
        KN_CHECK(!rows[i].recorded || kn_options_restore(o, "lr", rows[i].recorded, rows[i].was));
        KN_CHECK(kn_options_derive(o, "lr", 0.75) && kn_options_derive(o, "lr", 0.5));
        kn_option_record r = row_of(o, "lr");
        KN_CHECK(c.lr == rows[i].value && r.origin == rows[i].is && r.changed == rows[i].changed,
                 "row %zu: %s", i, r.value);
    }
    OWNED_OPTIONS kn_options *o = kn_options_create(table, &c);
    KN_CHECK(o && kn_options_derive(o, "lr", 0.1) && strcmp(row_of(o, "lr").value, "0.1") == 0);
    KN_CHECK(kn_options_derive(o, "lr", 1.0 / 3) && c.lr == 1.0 / 3);
    REFUSED(kn_options_derive(o, "lrr", 1), "did you mean --lr?");
    KN_CHECK(kn_options_restore(o, "strategy", "no_shard", KN_VALUE_RESTORED));
    kn_options_free(o);
    o = kn_options_create(table, &c);
    KN_CHECK(o && parse(o, "--strategy", "no_shard", NULL));
    KN_CHECK(kn_options_restore(o, "strategy", "no_shard", KN_VALUE_RESTORED));
    REFUSED(kn_options_restore(o, "strategy", "full_shard", KN_VALUE_RESTORED),
            "the training was begun with full_shard, which a resumed run can't change");
}

/* A choice as text, and the arguments that are no options, wherever they stand. */
KN_TEST(options, names_and_the_rest)
{
    config c;
    static const kn_option rows[] = {
        { "FILE...", KN_OPTION_REST, .help = "files to look at" },
        { "model", KN_OPTION_NAME, offsetof(config, model), NULL, "", .choices = "small|large" },
        { "steps", KN_OPTION_INT, offsetof(config, steps), "3", "" },
        { 0 },
    };
    OWNED_OPTIONS kn_options *o = kn_options_create(rows, &c);
    kn_option_record r;
    KN_CHECK(o && parse(o, NULL) && !kn_options_rest(o)[0] && strcmp(c.model, "small") == 0);
    KN_CHECK(parse(o, "a.png", "--model", "large", "-", "--steps=7", "large", NULL));
    KN_CHECK(strcmp(c.model, "large") == 0 && c.steps == 7);
    char *const *rest = kn_options_rest(o);
    KN_CHECK(strcmp(rest[0], "a.png") == 0 && strcmp(rest[1], "-") == 0 &&
             strcmp(rest[2], "large") == 0 && !rest[3]);
    KN_CHECK(strcmp(kn_options_value(o, "model"), "large") == 0 && !kn_options_value(o, "FILE..."));
    KN_CHECK(kn_options_record(o, 1, &r) && !kn_options_record(o, 2, &r));
    REFUSED(kn_options_set(o, "model", "lagre"), "did you mean large?");
    OWNED_BYTES char *text = print(o, true);
    KN_CHECK(strstr(text, "  FILE...  ") && strstr(text, "files to look at") &&
                 strstr(text, "small|large (default small)"),
             "%s", text);
}

/* Of a run, and given: as a shell reads it. */
KN_TEST(options, command)
{
    config c;
    static const kn_option rows[] = {
        { "steps", KN_OPTION_INT, offsetof(config, steps), "2000", "" },
        { "threads", KN_OPTION_INT, offsetof(config, threads), "3", "", .of = KN_OF_RUN },
        { "log", KN_OPTION_PATH, offsetof(config, log), NULL, "", .of = KN_OF_RUN },
        { "note", KN_OPTION_STRING, offsetof(config, note), NULL, "", .of = KN_OF_RUN },
        { "out", KN_OPTION_PATH, offsetof(config, out), NULL, "", .of = KN_OF_START },
        { "recompute", KN_OPTION_FLAG, offsetof(config, recompute), NULL, "", .of = KN_OF_RUN },
        { "prefetch", KN_OPTION_FLAG, offsetof(config, prefetch), "true", "", .of = KN_OF_RUN },
        { 0 },
    };
    OWNED_OPTIONS kn_options *o = kn_options_create(rows, &c);
    OWNED_HOST char *text = o ? kn_options_command(o) : NULL;
    KN_CHECK(text && strcmp(text, "") == 0);
    kn_host_free(text);
    KN_CHECK(parse(o, "--steps", "7", "--log", "a/b-1.x", "--note=--it's $HOME", "--out", "x",
                   "--recompute", "--no-prefetch", NULL));
    text = kn_options_command(o);
    KN_CHECK(text && strcmp(text, " --log a/b-1.x --note='--it'\\''s $HOME' --recompute "
                                  "--no-prefetch") == 0,
             "%s", text);
}

KN_TEST(options, broken_tables)
{
    config c;
    static const kn_option bad_default[] = {
        { "steps", KN_OPTION_INT, offsetof(config, steps), "0", "", 1, 5 }, { 0 }
    };
    static const kn_option twice[] = { { "lr", KN_OPTION_FLOAT, offsetof(config, lr) },
                                       { "lr", KN_OPTION_FLOAT, offsetof(config, lr) },
                                       { 0 } };
    static const kn_option no_choices[] = {
        { "strategy", KN_OPTION_CHOICE, offsetof(config, strategy) }, { 0 }
    };
    REFUSED(kn_options_create(bad_default, &c), "--steps must lie between");
    REFUSED(kn_options_create(twice, &c), "--lr is in it twice");
    REFUSED(kn_options_create(no_choices, &c), "--strategy has no choices");
}

/* What the last of the ranks gives where the others give nothing, and what all are told. */
static const struct {
    const char *word, *says; /* says NULL: they agree */
} others[] = {
    { "--steps=7", "options: --steps is 2000 on rank 0 and 7 on rank 2; give all ranks the same" },
    { "--steps=02000", NULL },
    { "--lr=5", "--lr is 1e-3 on rank 0 and 5 on rank 2" },
    { "--lr=0.001", NULL },
    { "--recompute", "--recompute is false on rank 0 and true on rank 2" },
    { "--strategy=no_shard", "--strategy is full_shard on rank 0 and no_shard on rank 2" },
    { "--note=not given", "--note is not given on rank 0 and 'not given' on rank 2" },
    { "--data=mnist", "--data is shakespeare on rank 0 and mnist on rank 2" },
    { "--data=/scratch/text", "--data is shakespeare on rank 0 and a path on rank 2" },
    { "--out=a/b", "--out is not given on rank 0 and a path on rank 2" },
    { "--threads=3", NULL }, /* .own */
    { "--help", "--help is not given on rank 0 and given on rank 2" },
    { "--haste", "unknown option --haste" },
};

static int agrees(kn_comm *world, void *arg)
{
    const int i = *(int *)arg;
    config c;
    OWNED_OPTIONS kn_options *o = kn_options_create(table, &c);
    bool ok = (kn_rank(world) < 2 ? parse(o, NULL) : parse(o, others[i].word, NULL)) &&
              kn_options_agree(o, kn_rank(world) % 2 ? world : NULL);
    bool as_said = others[i].says ? !ok && strstr(kn_error(), others[i].says) : ok;
    return !as_said;
}

KN_TEST(options, all_ranks_have_the_same)
{
    for (int i = 0; i < (int)(sizeof others / sizeof *others); i++)
        KN_CHECK(kn_spawn_threads(3, agrees, &i) == 0, "%s", others[i].word);
}

static bool makes_options(void *c)
{
    OWNED_OPTIONS kn_options *o = kn_options_create(table, c);
    const bool ok = o && parse(o, "--steps=9", "--note", "text", NULL) &&
                    kn_options_restore(o, "data", "cats", KN_VALUE_RESTORED) &&
                    kn_options_derive(o, "lr", 2);
    OWNED_HOST char *text = ok ? kn_options_command(o) : NULL;
    const bool done = text != NULL;
    return done;
}

KN_TEST(options, every_allocation_failing)
{
    config c;
    each_allocation_fails(makes_options, NULL, &c, 3);
}
