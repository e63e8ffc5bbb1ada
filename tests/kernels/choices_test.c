/* tests/kernels/choices_test.c: the file of choices (kernels/choices.h). Nothing in it can be
 * worse than lost: whatever happens to the file, a value that is found is the one that was kept. */
#include "kernels/choices.h"
#include "tests/kn_test.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { MANY = 20000 };

static char path[256], folder[200];

/* From now on the file is `name` in a fresh folder. */
static void use(const char *name, bool tuning)
{
    if (!*folder) {
        strcpy(folder, "/tmp/knap-choices-XXXXXX");
        KN_CHECK(mkdtemp(folder) != NULL);
    }
    snprintf(path, sizeof path, "%s/%s", folder, name);
    setenv("KNAP_TUNED", path, 1);
    setenv("KNAP_TUNE", tuning ? "1" : "0", 1);
    kn_choices_forget();
}

static void end(void)
{
    char command[300];
    kn_choices_forget();
    snprintf(command, sizeof command, "rm -rf %s", folder);
    KN_CHECK(system(command) == 0);
    folder[0] = 0;
    KN_CHECK_OK();
}

static void put(const void *bytes, size_t size)
{
    FILE *f = fopen(path, "wb");
    KN_CHECK(f && fwrite(bytes, 1, size, f) == size && fclose(f) == 0);
    kn_choices_forget();
}

static char got[1 << 16];

static size_t get(void)
{
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(got, 1, sizeof got, f) : 0;
    KN_CHECK(f && fclose(f) == 0 && n < sizeof got);
    got[n] = 0;
    return n;
}

static bool holds(const char *key, const char *value)
{
    char found[KN_CHOICE_KEY];
    return kn_choice_find(key, found) && strcmp(found, value) == 0;
}

static bool tells(const char *part)
{
    char text[5000];
    return strstr(kn_choices_tell(text, sizeof text), part) != NULL;
}

/* ---- use ------------------------------------------------------------------------------------- */

KN_TEST(choices, are_found_by_the_next_process)
{
    char value[KN_CHOICE_KEY];
    use("a", false);
    KN_CHECK(!kn_tuning() && !kn_choice_find("gpu, m 1", value) && tells("/a isn't there"));
    KN_CHECK(kn_choices_hash() == 0);
    use("a", true);
    KN_CHECK(kn_tuning());
    kn_choice_keep("gpu, m 1", "algorithm 0a");
    kn_choice_keep("gpu, m 12", "algorithm 1 = 2");
    kn_choice_keep("other, m 1", "algorithm 3");
    KN_CHECK(holds("gpu, m 1", "algorithm 0a"));
    uint64_t hash = kn_choices_hash();
    use("a", false);
    KN_CHECK(holds("gpu, m 1", "algorithm 0a") && holds("gpu, m 12", "algorithm 1 = 2"));
    KN_CHECK(!kn_choice_find("gpu, m", value) && !kn_choice_find("m 1", value));
    KN_CHECK(kn_choices_of("gpu, ") == 2 && kn_choices_of("other, ") == 1);
    KN_CHECK(kn_choices_hash() == hash && hash != 0 && tells("/a") && !tells("isn't"));
    use("a", true);
    kn_choice_keep("gpu, m 1", "algorithm 7");
    KN_CHECK(holds("gpu, m 1", "algorithm 7"), "the last one counts");
    use("a", false);
    KN_CHECK(holds("gpu, m 1", "algorithm 7") && kn_choices_hash() != hash);
    end();
}

KN_TEST(choices, hashes_differ_by_content_not_by_order)
{
    use("a", true);
    kn_choice_keep("k 1", "v 1");
    kn_choice_keep("k 2", "v 2");
    uint64_t a = kn_choices_hash();
    use("b", true);
    kn_choice_keep("k 2", "v 2");
    kn_choice_keep("k 1", "v 1");
    KN_CHECK(kn_choices_hash() == a);
    use("c", true);
    kn_choice_keep("k 2", "v 1");
    kn_choice_keep("k 1", "v 2");
    KN_CHECK(kn_choices_hash() != a);
    end();
}

/* A line that another with its key follows is none. */
KN_TEST(choices, only_the_last_line_with_a_key_is_counted_and_hashed)
{
    uint64_t hash[3];
    for (int i = 0; i < 3; i++) {
        use((const char *[]){ "a", "b", "c" }[i], true);
        kn_choice_keep("k 1", i == 1 ? "v 2" : "v 1");
        kn_choice_keep("k 2", "v");
        kn_choice_keep("l 1", "v");
        if (i < 2)
            kn_choice_keep("k 1", i == 1 ? "v 1" : "v 2");
        hash[i] = kn_choices_hash();
        KN_CHECK(kn_choices_of("k ") == 2 && kn_choices_of("") == 3, "file %d", i);
        kn_choices_forget();
        KN_CHECK(kn_choices_hash() == hash[i] && holds("k 1", i == 0 ? "v 2" : "v 1"));
        KN_CHECK(kn_choices_of("k ") == 2 && kn_choices_of("") == 3, "file %d", i);
    }
    KN_CHECK(hash[0] != hash[1], "ranks with other algorithms have one hash");
    KN_CHECK(hash[1] == hash[2], "ranks with the same algorithms have other hashes");
    end();
}

KN_TEST(choices, the_file_is_where_caches_are)
{
    char home[300], want[400];
    use("home", true);
    snprintf(home, sizeof home, "%s", path);
    unsetenv("KNAP_TUNED");
    unsetenv("XDG_CACHE_HOME");
    setenv("HOME", home, 1);
    snprintf(want, sizeof want, "%s/.cache/knap/tuned.txt", home);
    kn_choice_keep("k", "v");
    KN_CHECK(access(want, R_OK) == 0 && tells(want));
    setenv("XDG_CACHE_HOME", home, 1);
    kn_choices_forget();
    snprintf(want, sizeof want, "%s/knap/tuned.txt", home);
    KN_CHECK(!kn_choices_of("k") && tells(want));
    kn_choice_keep("k", "v");
    KN_CHECK(access(want, R_OK) == 0);
    setenv("KNAP_TUNED", "none", 1);
    kn_choices_forget();
    KN_CHECK(kn_choices_of("k") == 0 && tells("no file"));
    kn_choice_keep("k", "v");
    KN_CHECK(holds("k", "v"), "this process has it");
    setenv("KNAP_TUNE", "yes", 1);
    kn_choices_forget();
    REFUSED(kn_tuning(), "KNAP_TUNE=yes: must be 1 (on) or 0 (off)");
    end();
}

/* ---- files that can't be used ---------------------------------------------------------------- */

static const struct {
    const char *what, *bytes, *why;
} foreign[] = {
    { "a text", "hello\n", "it isn't one of Knap's files of choices" },
    { "one without an end", "hello", "it isn't one of Knap's files of choices" },
    { "a wrong sum", "0000000000000000 k = v\n", "it isn't one of Knap's files of choices" },
    { "control characters", "\1\2\3\n\33[31m\n", "it isn't one of Knap's files of choices" },
};

KN_TEST(choices, foreign_files_are_left_alone)
{
    use("a", true);
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        put(foreign[i].bytes, strlen(foreign[i].bytes));
        KN_CHECK(kn_choices_of("") == 0 && tells(foreign[i].why), "%s", foreign[i].what);
        kn_choice_keep("k", "v");
        KN_CHECK(holds("k", "v"));
        get();
        KN_CHECK(strcmp(got, foreign[i].bytes) == 0, "%s was changed", foreign[i].what);
    }
    put("x", 1);
    KN_CHECK(truncate(path, (off_t)KN_CHOICES_MOST + 1) == 0 && kn_choices_of("") == 0);
    KN_CHECK(tells("too large"));
    end();
}

KN_TEST(choices, what_is_no_file_is_not_read)
{
    use("folder", true);
    KN_CHECK(mkdir(path, 0755) == 0 && kn_choices_of("") == 0 && tells("it is no file"));
    kn_choice_keep("k", "v");
    use("pipe", true);
    KN_CHECK(mkfifo(path, 0600) == 0 && kn_choices_of("") == 0 && tells("it is no file"));
    use("file", true);
    put("", 0);
    use("file/below", true);
    kn_choice_keep("k", "v");
    KN_CHECK(holds("k", "v") && tells("can't be written: Not a directory"));
    use("none/below", true);
    kn_choice_keep("k", "v");
    KN_CHECK(holds("k", "v") && tells("can't be written: No such file or directory"));
    setenv("KNAP_TUNED", "/dev/full", 1);
    kn_choices_forget();
    kn_choice_keep("k", "v");
    KN_CHECK(holds("k", "v") && tells("it is no file"));
    end();
}

KN_TEST(choices, a_line_that_cannot_be_is_not_written)
{
    char longest[2 * KN_CHOICE_KEY];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    const char *bad[][2] = {
        { "a\nb", "v" },  { "k", "v\n" },   { "k", "" },      { "", "v" },
        { "k = l", "v" }, { "k", longest }, { longest, "v" }, { "k\377", "v" }
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        use("a", true);
        kn_choice_keep(bad[i][0], bad[i][1]);
        KN_CHECK(kn_choices_of("") == 0 && tells("a line can't hold") && get() == 0, "%zu", i);
    }
    end();
}

/* Writes a line as the file has them. */
static void put_line(FILE *f, const char *line)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (const char *c = line; *c; c++)
        h = (h ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
    KN_CHECK(fprintf(f, "%016llx %s\n", (unsigned long long)h, line) > 0);
}

/* A process with so many bytes of memory more: all lines are there, or none and it says so. */
static int read_with(size_t bytes)
{
    size_t pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    const bool known = f && fscanf(f, "%*u %*u %*u %*u %*u %zu", &pages) == 1;
    const rlim_t most = pages * (size_t)sysconf(_SC_PAGESIZE) + bytes;
    if (!known || fclose(f) != 0 || setrlimit(RLIMIT_DATA, &(struct rlimit){ most, most }) != 0)
        return 3;
    const int64_t count = kn_choices_of("");
    const bool used = !tells("isn't used: ");
    return used ? count == MANY ? 0 : 2 : count == 0 && kn_choices_hash() == 0 ? 1 : 2;
}

/* Whatever of its memory a process lacks: never half of a file. */
KN_TEST(choices, without_memory_no_line_is_used)
{
    int had[4] = { 0 };
    char line[200];
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    KN_SKIP("a sanitizer takes memory of its own");
#endif
    use("a", false);
    FILE *f = fopen(path, "wb");
    KN_CHECK(f != NULL);
    for (int i = 0; i < MANY; i++) {
        snprintf(line, sizeof line, "gpu, m %d, %0100d = algorithm", i, 0);
        put_line(f, line);
    }
    KN_CHECK(fclose(f) == 0);
    fflush(NULL);
    for (size_t bytes = 0; bytes < (size_t)16 << 20; bytes += (size_t)512 << 10) {
        pid_t child = fork();
        int status = -1;
        if (child == 0)
            _exit(read_with(bytes));
        KN_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
        had[WEXITSTATUS(status) & 3]++;
    }
    KN_CHECK(had[0] > 0 && had[1] > 0 && had[2] == 0 && had[3] == 0,
             "%d with all, %d with none, "
             "%d with other lines",
             had[0], had[1], had[2]);
    end();
}

/* ---- damage ---------------------------------------------------------------------------------- */

enum { LINES = 3 };

/* Each of the lines is there as it was, or isn't; returns how many are. */
static int whole_lines(void)
{
    int n = 0;
    for (int i = 0; i < LINES; i++) {
        char key[32], value[KN_CHOICE_KEY], want[32];
        snprintf(key, sizeof key, "gpu, m %d", i);
        snprintf(want, sizeof want, "algorithm %d", i * i);
        bool found = kn_choice_find(key, value);
        KN_CHECK(!found || strcmp(value, want) == 0, "%s is %s", key, value);
        n += found;
    }
    KN_CHECK(kn_choices_of("") == n, "there are other lines");
    return n;
}

static size_t make(char *good)
{
    use("a", true);
    for (int i = 0; i < LINES; i++) {
        char key[32], value[32];
        snprintf(key, sizeof key, "gpu, m %d", i);
        snprintf(value, sizeof value, "algorithm %d", i * i);
        kn_choice_keep(key, value);
    }
    size_t n = get();
    memcpy(good, got, n);
    return n;
}

KN_TEST(choices, every_truncation_loses_lines_only)
{
    char good[1024];
    size_t size = make(good);
    for (size_t n = 0; n <= size; n++) {
        put(good, n);
        KN_CHECK((size_t)whole_lines() == n / (size / LINES), "%zu of %zu bytes", n, size);
    }
    end();
}

KN_TEST(choices, every_changed_bit_loses_a_line)
{
    char good[1024], bad[1024];
    size_t size = make(good);
    for (size_t at = 0; at < size; at++)
        for (int bit = 0; bit < 8; bit++) {
            memcpy(bad, good, size);
            bad[at] = (char)(bad[at] ^ 1 << bit);
            put(bad, size);
            KN_CHECK(whole_lines() >= LINES - 2, "bit %d of byte %zu", bit, at);
            KN_CHECK(good[at] == '\n' || (whole_lines() == LINES - 1 && tells("without ")));
        }
    end();
}

KN_TEST(choices, random_bytes_between_lines_are_left_out)
{
    char good[1024], bad[4096];
    size_t size = make(good);
    unsigned seed = 5;
    for (int round = 0; round < 500; round++) {
        size_t n = (size_t)rand_r(&seed) % 2000, used = 0;
        for (; used < n; used++)
            bad[used] = (char)rand_r(&seed);
        bad[used++] = '\n';
        memcpy(bad + used, good, size);
        put(bad, used + size);
        KN_CHECK(whole_lines() == LINES && tells("damaged"));
    }
    end();
}

/* A line that was written in part stands alone: the next one begins with a line feed. */
KN_TEST(choices, a_torn_line_harms_no_other)
{
    char good[1024];
    size_t size = make(good);
    put(good, size - 5);
    kn_choice_keep("gpu, m 2", "algorithm 4");
    KN_CHECK(whole_lines() == LINES);
    use("a", false);
    KN_CHECK(whole_lines() == LINES && tells("without 1 damaged line"));
    end();
}

static void bound_files(rlim_t bytes)
{
    const struct rlimit most = { bytes, RLIM_INFINITY };
    KN_CHECK(setrlimit(RLIMIT_FSIZE, &most) == 0);
}

/* A line written in part is left out, and harms no line that comes later. */
KN_TEST(choices, a_full_disk_is_said)
{
    const char *said[] = { "can't be written: File too large",
                           "can't be written: the disk is full" };
    char good[1024];
    const size_t size = make(good), two = size / LINES * (LINES - 1);
    signal(SIGXFSZ, SIG_IGN);
    for (int part = 0; part < 2; part++) {
        put(good, two);
        bound_files(part ? size - 2 : two);
        kn_choice_keep("gpu, m 2", "algorithm 4");
        KN_CHECK(whole_lines() == LINES && tells(said[part]), "this process has it");
        kn_choices_forget();
        KN_CHECK(whole_lines() == LINES - 1 && tells("damaged") == part);
        bound_files(RLIM_INFINITY);
        kn_choice_keep("gpu, m 2", "algorithm 4");
        kn_choices_forget();
        KN_CHECK(whole_lines() == LINES && tells("damaged") == part);
    }
    end();
}

KN_TEST(choices, processes_add_at_once)
{
    enum { WRITERS = 4, EACH = 100 };
    char key[64];
    use("a", true);
    fflush(NULL);
    for (int w = 0; w < WRITERS; w++)
        if (fork() == 0) {
            for (int i = 0; i < EACH; i++) {
                snprintf(key, sizeof key, "writer %d, line %d", w, i);
                kn_choice_keep(key, "value");
            }
            _exit(0);
        }
    for (int w = 0, status; w < WRITERS; w++)
        KN_CHECK(wait(&status) > 0 && status == 0);
    use("a", false);
    KN_CHECK(kn_choices_of("writer ") == WRITERS * EACH && !tells("damaged"));
    for (int w = 0; w < WRITERS; w++)
        for (int i = 0; i < EACH; i++) {
            snprintf(key, sizeof key, "writer %d, line %d", w, i);
            KN_CHECK(holds(key, "value"));
        }
    end();
}
