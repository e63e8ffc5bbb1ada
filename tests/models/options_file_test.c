/* tests/models/options_file_test.c: options in a file: what is read, what is refused with its line,
 * and that a text of options that was written reads back as the same. */
#include "kernels/error.h"
#include "models/options.h"
#include "tests/models/owned.h"
#include "tests/models/temp.h"

typedef struct config {
    int64_t steps, save_every;
    double lr;
    const char *data, *log, *note, *once, *bytes;
    bool recompute, flip;
    int strategy;
} config;

static const kn_option table[] = {
    { "Training", KN_OPTION_HEADING },
    { "steps", KN_OPTION_INT, offsetof(config, steps), "2000", "steps", 1, 1e9 },
    { "save-every", KN_OPTION_INT, offsetof(config, save_every), NULL, "steps", .any = true },
    { "lr", KN_OPTION_FLOAT, offsetof(config, lr), "1e-3", "rate", 0, 10 },
    { "data", KN_OPTION_PATH, offsetof(config, data), "shakespeare", "data" },
    { "log", KN_OPTION_PATH, offsetof(config, log), NULL, "log", .clashes = "note" },
    { "note", KN_OPTION_STRING, offsetof(config, note), NULL, "a remark" },
    { "once", KN_OPTION_STRING, offsetof(config, once), NULL, "", .of = KN_OF_ONCE },
    { "bytes", KN_OPTION_STRING, offsetof(config, bytes), NULL, "" },
    { "recompute", KN_OPTION_FLAG, offsetof(config, recompute), NULL, "", .clashes = "log" },
    { "flip", KN_OPTION_FLAG, offsetof(config, flip), "true", "" },
    { "strategy", KN_OPTION_CHOICE, offsetof(config, strategy), NULL, "",
      .choices = "full_shard|no_shard" },
    { 0 },
};

/* Options from a command line, "--name=value" each, up to NULL, and then from a file. */
static kn_options *load(config *c, const char *const *given, const char *text, size_t size)
{
    char *argv[8] = { (char *)"program" };
    int argc = 1;
    for (; given && *given; given++)
        argv[argc++] = (char *)(uintptr_t)*given;
    kn_options *o = kn_options_create(table, c);
    KN_CHECK(o && kn_options_parse(o, argc, argv));
    if (kn_options_load(o, write_temp("x.toml", text, size)))
        return o;
    kn_options_free(o);
    return NULL;
}

KN_TEST(options_file, read)
{
    static const char text[] = "# a comment\r\n"
                               "\r\n"
                               " steps\t=1_0 # behind a value\r\n"
                               "lr = 2.5E-1\n"
                               "save-every=-7\n"
                               "data = 'C:\\no escapes # here'\n"
                               "note = \"a \\\"b\\\" \\\\ \\t\\u00e9\\U0001F600 caf\xc3\xa9\"\n"
                               "strategy = \"no_shard\"\n"
                               "recompute = true\n"
                               "flip = false";
    config c;
    OWNED_OPTIONS kn_options *o = load(&c, NULL, text, sizeof text - 1);
    KN_CHECK(o != NULL);
    KN_CHECK(c.steps == 10 && c.lr == 0.25 && c.save_every == -7 && c.strategy == 1);
    KN_CHECK(c.recompute && !c.flip && strcmp(c.data, "C:\\no escapes # here") == 0);
    KN_CHECK(strcmp(c.note, "a \"b\" \\ \t\xc3\xa9\xf0\x9f\x98\x80 caf\xc3\xa9") == 0, "%s",
             c.note);
    KN_CHECK(kn_options_given(o, "lr") && !kn_options_given(o, "log"));
    kn_options_free(o);
    o = load(&c, NULL, "lr = 1", 6); /* a whole number for a number */
    KN_CHECK(o && c.lr == 1);
    kn_options_free(o);
    o = load(&c, NULL, "", 0);
    KN_CHECK(o && c.lr == 1e-3);
}

/* The command line wins, also over what contradicts it. */
KN_TEST(options_file, command_line_wins)
{
    static const char text[] = "lr = 0.5\nsteps = 7\nnote = \"x\"\n";
    config c;
    OWNED_OPTIONS kn_options *o =
        load(&c, (const char *const[]){ "--lr=0.25", "--log=y", NULL }, text, sizeof text - 1);
    KN_CHECK(o && c.lr == 0.25 && c.steps == 7 && !c.note && strcmp(c.log, "y") == 0);
    kn_options_free(o);
    o = load(&c, (const char *const[]){ "--note=z", NULL }, "log = 'x'", 9);
    KN_CHECK(o && !c.log && strcmp(c.note, "z") == 0);
    kn_options_free(o);
    REFUSED(load(&c, NULL, "log = 'x'\nnote = 'y'", 20), "--log and --note contradict each other");
    /* what is off contradicts nothing */
    o = load(&c, (const char *const[]){ "--no-recompute", NULL }, "log = 'x'", 9);
    KN_CHECK(o && c.log && strcmp(c.log, "x") == 0 && !c.recompute);
    kn_options_free(o);
    o = load(&c, NULL, "recompute = false\nlog = 'x'", 27);
    KN_CHECK(o && c.log && !c.recompute);
}

KN_TEST(options_file, refused)
{
    static const struct {
        const char *text, *says;
    } cases[] = {
        { "\nstpes = 5", "x.toml:2: unknown option --stpes; did you mean --steps?" },
        { "steps = 5\nlr = 1\nsteps = 5", "x.toml:3: steps is in line 1 already" },
        { "steps = 5.0", "x.toml:1: steps takes a whole number, not 5.0" },
        { "steps = \"5\"", "steps takes no text; leave the quotes out" },
        { "steps = 0", "x.toml:1: --steps must lie between 1 and 1000000000, not 0" },
        { "steps = 99999999999999999999", "x.toml:1: --steps must lie between" },
        { "steps = 007", "steps takes a whole number, not 007" },
        { "steps = 1__0", "steps takes a whole number" },
        { "steps = 1_", "steps takes a whole number" },
        { "steps = 0x10", "steps takes a whole number" },
        { "steps = 1979-05-27", "steps takes a whole number" },
        { "steps = true", "steps takes a whole number, not true" },
        { "steps = [1]", "steps takes a whole number, not this" },
        { "steps =", "steps takes a whole number, not this" },
        { "steps 5", "behind steps comes =" },
        { "steps", "behind steps comes =" },
        { "steps = 5 lr = 1", "something follows the value" },
        { "lr = fast", "lr takes a number, not fast" },
        { "lr = nan", "lr takes a number, not nan" },
        { "lr = 1.", "lr takes a number" },
        { "lr = .5", "lr takes a number" },
        { "lr = 1e", "lr takes a number" },
        { "lr = 11", "x.toml:1: --lr must lie between 0 and 10, not 11" },
        { "lr = 1111111111111111111111111111111111111111111111111111111111111111111111",
          "too long for a number" },
        { "flip = yes", "flip takes true or false, not yes" },
        { "flip = 1", "flip takes true or false, not 1" },
        { "data = text", "data takes a text in quotes, not text" },
        { "data = \"\"", "--data takes a path, not an empty text" },
        { "data = \"x", "the string has no closing quote" },
        { "data = \"x\nlr = 1\"", "x.toml:1: the string has no closing quote" },
        { "data = \"\"\"x\"\"\"", "strings of several lines aren't read" },
        { "data = '''x'''", "strings of several lines aren't read" },
        { "data = \"\\q\"", "after a backslash come" },
        { "data = \"\\", "after a backslash come" },
        { "data = \"\\u00\"", "\\u takes four hexadecimal digits" },
        { "data = \"\\u0000\"", "is no character" },
        { "data = \"\\ud800\"", "is no character" },
        { "data = \"\\U00110000\"", "is no character" },
        { "strategy = \"noshard\"", "x.toml:1: --strategy has no choice 'noshard'; did you mean" },
        { "[training]", "tables, [name], aren't read" },
        { "\"steps\" = 5", "with the name of an option without quotes" },
        { "= 5", "with the name of an option without quotes" },
        { "a.b = 5", "unknown option --a" },
        { "no-flip = true", "unknown option --no-flip" },
        { "help = true", "unknown option --help" },
        { "note = \"\xff\"", "x.toml:1: this isn't valid UTF-8" },
        { "# \xc0\xaf", "this isn't valid UTF-8" },
        { "note = 'a\033[2J'", "a control character stands in this line" },
    };
    config c;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        KN_CHECK(!load(&c, NULL, cases[i].text, strlen(cases[i].text)), "%s", cases[i].text);
        KN_CHECK(strstr(kn_error(), cases[i].says), "%s", cases[i].text);
        kn_clear_error();
    }
    REFUSED(load(&c, NULL, "lr = 1\0", 7), "a control character stands in this line");
    static char big[(1 << 20) + 1], string[5000];
    memset(big, '\n', sizeof big);
    REFUSED(load(&c, NULL, big, sizeof big), "and may have 1048576");
    const int n = snprintf(string, sizeof string, "note = \"%4990d\"", 1);
    REFUSED(load(&c, NULL, string, (size_t)n), "x.toml:1: the string is longer");
    OWNED_OPTIONS kn_options *o = kn_options_create(table, &c);
    REFUSED(kn_options_load(o, temp_path("none.toml")), "none.toml: No such file");
    KN_CHECK(!kn_options_load(o, NULL) && !kn_options_load(NULL, "x"));
    kn_clear_error();
}

KN_TEST(options_file, written_and_read)
{
    static const char *const given[] = {
        "--lr=.3",   "--steps=010", "--note=\t\"\\\x01\x7f'\xc3\xa9", "--once=x", "--bytes=\xff",
        "--no-flip", NULL
    };
    config a, b;
    OWNED_OPTIONS kn_options *from = load(&a, given, "", 0);
    KN_CHECK(from != NULL && kn_options_derive(from, "save-every", 12));
    OWNED_HOST char *text = kn_options_toml(from);
    KN_CHECK(text && strcmp(text, "\n# Training\n"
                                  "steps = 10\n"
                                  "# save-every = 12\n"
                                  "lr = 0.3\n"
                                  "# data = \"shakespeare\"\n"
                                  "note = \"\\u0009\\\"\\\\\\u0001\\u007f'\xc3\xa9\"\n"
                                  "# bytes: its text isn't valid UTF-8, as which TOML has it\n"
                                  "# recompute = false\n"
                                  "flip = false\n"
                                  "# strategy = \"full_shard\"\n") == 0,
             "%s", text);
    OWNED_OPTIONS kn_options *to = load(&b, NULL, text, strlen(text));
    KN_CHECK(to != NULL);
    KN_CHECK(b.lr == 0.3 && b.steps == 10 && !b.flip && strcmp(a.note, b.note) == 0 && !b.once);
    KN_CHECK(!kn_options_toml(NULL));
    kn_clear_error();
}
