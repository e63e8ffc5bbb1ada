/* tests/models/data_test.c: finding data, token files, batches of a text, random choices. */
#include "models/text.h"
#include "tests/models/owned.h"
#include "tests/models/temp.h"

#include <sys/stat.h>

static char *const text_100 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                              "0123456789abcdefghijklmnopqrstuvwxyzAB";

/* 100 tokens: 90 for training, 10 for validation. */
static kn_text *small_text(void)
{
    kn_tokenizer *tok = kn_tokenizer_create("byte", NULL, 0);
    kn_text *t = kn_text_encode(tok, text_100, 100);
    kn_tokenizer_free(tok);
    KN_CHECK_OK();
    return t;
}

/* ---- finding ------------------------------------------------------------------------------- */

/* Restores a variable and frees old. */
static void restore(const char *name, char *old)
{
    if (old)
        setenv(name, old, 1);
    else
        unsetenv(name);
    free(old);
}

KN_TEST(data, finding)
{
    char list[512], home[256];
    char *old_data = getenv("KNAP_DATA") ? strdup(getenv("KNAP_DATA")) : NULL;
    char *old_home = getenv("HOME") ? strdup(getenv("HOME")) : NULL;
    const char *path = temp_path("");
    snprintf(home, sizeof home, "%s", temp_path("home"));
    snprintf(list, sizeof list, ":/nowhere::%s", path);
    setenv("KNAP_DATA", list, 1);
    setenv("HOME", home, 1);
    KN_CHECK(!kn_data_find("shakespeare"));
    KN_CHECK(strstr(kn_error(), list) && strstr(kn_error(), "scripts/get-data shakespeare"));
    KN_CHECK_ERROR("there is no tinyshakespeare/input.txt below the folders of KNAP_DATA");
    KN_CHECK(!kn_data_find_quietly("shakespeare") && kn_ok());

    mkdir(temp_path("tinyshakespeare"), 0755);
    write_temp("tinyshakespeare/input.txt", "text", 4);
    char *found = kn_data_find("shakespeare");
    KN_CHECK(found && strstr(found, "tinyshakespeare/input.txt"));
    kn_host_free(found);

    unsetenv("KNAP_DATA");
    REFUSED(kn_data_find("mnist"), "(not set)");
    mkdir(home, 0755);
    mkdir(temp_path("home/.cache"), 0755);
    mkdir(temp_path("home/.cache/knap"), 0755);
    mkdir(temp_path("home/.cache/knap/mnist"), 0755);
    found = kn_data_find("mnist");
    KN_CHECK(found && strstr(found, "home/.cache/knap/mnist"));
    kn_host_free(found);
    restore("KNAP_DATA", old_data);
    restore("HOME", old_home);
}

KN_TEST(data, finding_paths)
{
    const char *path = write_temp("my.txt", "text", 4);
    char *found = kn_data_find(path);
    KN_CHECK(found && strcmp(found, path) == 0);
    kn_host_free(found);
    REFUSED(kn_data_find("shakespear"),
            "no data set, file or folder 'shakespear'; did you mean shakespeare?");
    REFUSED(kn_data_find("no/such/file.txt"),
            "no data set, file or folder 'no/such/file.txt'; the text among the data sets is "
            "shakespeare, images are mnist, fashion-mnist, cifar10 and cifar100");
}

KN_TEST(data, files_that_are_no_texts)
{
    kn_tokenizer *tok = NULL;
    REFUSED(kn_text_open(temp_path("missing.txt"), "char", &tok), "cannot open the text file");
    REFUSED(kn_text_open(write_temp("empty.txt", "", 0), "char", &tok), "empty.txt is empty");
    mkdir(temp_path("none"), 0755);
    REFUSED(kn_text_open(temp_path("none"), "char", &tok), "none holds no texts or token files");
    REFUSED(kn_text_map(temp_path("none")), "is a folder");
    REFUSED(kn_text_open("/dev/null", "char", &tok), "is not a regular file");
    REFUSED(kn_text_open(write_temp("latin1.txt", "caf\xe9 au lait", 12), "char", &tok),
            "not valid UTF-8 at byte 3 (0xe9)");
    REFUSED(kn_text_open(write_temp("a.txt", "abc", 3), "wordy", &tok),
            "no tokenizer 'wordy': give char, byte, or the file");
    KN_CHECK(tok == NULL);
}

KN_TEST(data, texts_too_short_for_the_context)
{
    OWNED_TEXT kn_text *t = small_text();
    int64_t x[32], y[32];
    KN_CHECK(kn_text_count(t, KN_TRAIN) == 90 && kn_text_count(t, KN_VALIDATION) == 10);
    KN_CHECK(kn_text_check(t, 9));
    REFUSED(kn_text_check(t, 10),
            "a context of 10 tokens does not fit the text: of its 100 tokens, 10 are for "
            "validation (10 %); a context of 9 or less fits");
    REFUSED(kn_text_batch(t, KN_VALIDATION, 1, 0, 1, 10, x, y), "a context of 10 tokens");
    REFUSED(kn_text_batch(t, KN_TRAIN, 1, 0, -4, 9, x, y), "kn_text_batch: a batch of -4 rows");
    REFUSED(kn_text_batch(t, KN_TRAIN, 1, 0, 0, 9, x, y), "kn_text_batch: a batch of 0 rows");
    REFUSED(kn_text_batch(t, KN_TRAIN, 1, -1, 1, 9, x, y), "there is no window -1");
    REFUSED(kn_text_batch(t, KN_TRAIN, 1, INT64_MAX, 1, 9, x, y),
            "there is no window 9223372036854775807");
    REFUSED(kn_text_check(t, 0), "must be at least 1");
    KN_CHECK(kn_text_batch(t, KN_VALIDATION, 1, 0, 1, 9, x, y)); /* the only window */
    KN_CHECK(x[0] == text_100[90] && y[8] == text_100[99]);
    kn_text_free(t);

    OWNED_TOKENIZER kn_tokenizer *tok = kn_tokenizer_create("byte", NULL, 0);
    t = kn_text_encode(tok, "ab", 2);
    REFUSED(kn_text_check(t, 1), "too few for any context; give a longer text");
}

/* ---- batches ------------------------------------------------------------------------------- */

/* Rows are windows of their split, y is x shifted by one token, and starts are drawn uniformly. */
KN_TEST(data, batches_are_windows)
{
    enum { BATCH = 16, CTX = 8, ROUNDS = 1000, STARTS = 90 - CTX };
    OWNED_TEXT kn_text *t = small_text();
    int64_t x[BATCH * CTX], y[BATCH * CTX];
    int count[STARTS] = { 0 };
    for (int round = 0; round < ROUNDS; round++) {
        KN_CHECK(kn_text_batch(t, KN_TRAIN, 7, round * BATCH, BATCH, CTX, x, y));
        for (int r = 0; r < BATCH; r++) {
            int start = -1;
            for (int s = 0; s < STARTS && start < 0; s++) { /* text repeats after 62 characters */
                bool same = true;
                for (int i = 0; i < CTX; i++)
                    same = same && x[r * CTX + i] == text_100[s + i] &&
                           y[r * CTX + i] == text_100[s + i + 1];
                start = same ? s : -1;
            }
            KN_CHECK(start >= 0, "row %d of round %d is no window", r, round);
            count[start]++;
        }
    }
    /* starts 0 .. 19 also stand for their repetitions at 62 .. 81: 32 expected ones, else
     * 16000/82 */
    for (int s = 0; s < 62; s++) {
        double expected = 16000.0 / STARTS * (s < 20 ? 2 : 1);
        KN_CHECK(fabs(count[s] - expected) < 6 * sqrt(expected), "start %d: %d, expected %.0f", s,
                 count[s], expected);
    }
}

KN_TEST(data, batches_depend_on_what_they_are_for)
{
    enum { BATCH = 4, CTX = 8, N = BATCH * CTX };
    OWNED_TEXT kn_text *t = small_text();
    int64_t a[2][N], b[2][N];
    KN_CHECK(kn_text_batch(t, KN_TRAIN, 1, 5, BATCH, CTX, a[0], a[1]));
    KN_CHECK(kn_text_batch(t, KN_TRAIN, 1, 5, BATCH, CTX, b[0], b[1]));
    KN_CHECK(memcmp(a, b, sizeof a) == 0);
    /* a window doesn't depend on the batch that it is in */
    KN_CHECK(kn_text_batch(t, KN_TRAIN, 1, 7, 1, CTX, b[0], b[1]));
    KN_CHECK(memcmp(a[0] + 2 * CTX, b[0], CTX * sizeof(int64_t)) == 0);
    static const int64_t other[][2] = { { 2, 5 }, { 1, 6 }, { 1, 9 } };
    for (int i = 0; i < 3; i++) {
        KN_CHECK(
            kn_text_batch(t, KN_TRAIN, (uint64_t)other[i][0], other[i][1], BATCH, CTX, b[0], b[1]));
        KN_CHECK(memcmp(a[0], b[0], sizeof a[0]) != 0, "seed, first %d give the same rows", i);
    }
}

KN_TEST(data, random_choices)
{
    int hits[10] = { 0 };
    uint64_t stream = kn_random_stream("test", 1, 2);
    for (uint64_t i = 0; i < 10000; i++) {
        int64_t v = kn_random_below(3, stream, i, 10);
        KN_CHECK(v >= 0 && v < 10);
        hits[v]++;
    }
    for (int v = 0; v < 10; v++)
        KN_CHECK(abs(hits[v] - 1000) < 180, "%d: %d of 10000", v, hits[v]);
    KN_CHECK(kn_random_below(3, stream, 0, 1) == 0);
    KN_CHECK(stream != kn_random_stream("test", 2, 1) && stream != kn_random_stream("tesu", 1, 2));
}

/* A permutation for every n; another one for another seed or epoch; without a visible order. */
KN_TEST(data, shuffling)
{
    bool seen[1000];
    for (int64_t n = 1; n <= 1000; n += n < 70 ? 1 : 31) {
        memset(seen, 0, sizeof seen);
        for (int64_t i = 0; i < n; i++) {
            int64_t j = kn_shuffle(5, 3, n, i);
            KN_CHECK(j >= 0 && j < n && !seen[j], "n %d: %d -> %d", (int)n, (int)i, (int)j);
            seen[j] = true;
        }
    }
    int same_epoch = 0, same_seed = 0, fixed = 0, adjacent = 0;
    for (int64_t i = 0; i < 1000; i++) {
        int64_t j = kn_shuffle(5, 3, 1000, i);
        same_epoch += j == kn_shuffle(5, 4, 1000, i);
        same_seed += j == kn_shuffle(6, 3, 1000, i);
        fixed += j == i;
        adjacent += kn_shuffle(5, 3, 1000, (i + 1) % 1000) == j + 1;
    }
    /* each is about Poisson with mean 1: 10 has probability 1e-7 */
    KN_CHECK(same_epoch < 10 && same_seed < 10 && fixed < 10 && adjacent < 10, "%d %d %d %d",
             same_epoch, same_seed, fixed, adjacent);
    /* all 24 orders of four things are about equally frequent */
    int orders[256] = { 0 }, different = 0;
    for (int64_t e = 0; e < 24000; e++)
        orders[kn_shuffle(5, e, 4, 0) | kn_shuffle(5, e, 4, 1) << 2 | kn_shuffle(5, e, 4, 2) << 4 |
               kn_shuffle(5, e, 4, 3) << 6]++;
    for (int o = 0; o < 256; o++) {
        different += orders[o] > 0;
        KN_CHECK(orders[o] == 0 || abs(orders[o] - 1000) < 200, "order %d: %d of 24000", o,
                 orders[o]);
    }
    KN_CHECK(different == 24);
}

/* ---- token files --------------------------------------------------------------------------- */

KN_TEST(data, token_files)
{
    int64_t a[2][32], b[2][32];
    OWNED_TOKENIZER kn_tokenizer *tok = NULL, *tok2 = NULL, *tok3 = NULL;
    const char *text = write_temp("a.txt", text_100, 100), *path = temp_path("a.tokens");
    OWNED_TEXT kn_text *t = kn_text_open(text, "char", &tok);
    KN_CHECK_OK();
    KN_CHECK(tok && kn_text_vocab(t) == 62 && kn_tokenizer_vocab(tok) == 62);
    KN_CHECK(kn_text_save(t, path));
    kn_text *u = kn_text_open(path, "char", &tok2); /* without a tokenizer file */
    KN_CHECK(u && !tok2 && kn_text_vocab(u) == 62);
    KN_CHECK(kn_text_count(u, KN_TRAIN) == 90);
    KN_CHECK(kn_text_batch(t, KN_TRAIN, 1, 2, 4, 8, a[0], a[1]));
    KN_CHECK(kn_text_batch(u, KN_TRAIN, 1, 2, 4, 8, b[0], b[1]));
    KN_CHECK(memcmp(a, b, sizeof a) == 0 && kn_text_hash(t) == kn_text_hash(u));
    kn_text_free(u);
    u = kn_text_encode(tok, text_100, 99);
    KN_CHECK(u && kn_text_hash(t) != kn_text_hash(u));
    kn_text_free(u);

    KN_CHECK(kn_tokenizer_save(tok, temp_path("a.tokens.json")));
    u = kn_text_open(path, "char", &tok2);
    KN_CHECK(u && tok2 && kn_tokenizer_vocab(tok2) == 62);
    kn_text_free(u);
    tok3 = kn_tokenizer_create("byte", NULL, 0);
    KN_CHECK(!kn_text_open(path, "char", &tok3)); /* another tokenizer than the file's */
    KN_CHECK_ERROR("was made for a vocabulary of 62, the byte tokenizer has 256");
    write_temp("a.tokens.json", "{", 1);
    kn_tokenizer *none = NULL;
    KN_CHECK(!kn_text_open(path, "char", &none) && !none);
    KN_CHECK_ERROR("a.tokens.json is no tokenizer.json");
}

/* llm.c's and nanoGPT's token files, and such as aren't. */
KN_TEST(data, token_files_of_others)
{
    enum { COUNT = 40 };
    static const struct {
        int32_t magic, version, count, width;
        int64_t vocab;
        const char *says;
    } cases[] = { { 20240520, 1, COUNT, 2, 50257, NULL },
                  { 20240801, 7, COUNT, 4, 128256, NULL },
                  { 20240520, 2, COUNT, 2, 0, "of version 2" },
                  { 20240520, 1, COUNT + 1, 2, 0, "41 tokens of 2 bytes, but 80 bytes follow" },
                  { 20240520, 1, -1, 2, 0, "-1 tokens" },
                  { 20240520, 1, 0, 2, 0, "0 tokens" },
                  { 20240801, 7, COUNT, 2, 0, "40 tokens of 4 bytes, but 80 bytes follow" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unsigned char file[1024 + 4 * COUNT] = { 0 };
        const int width = cases[i].width;
        memcpy(file, &cases[i], 12);
        for (int k = 0; k < COUNT; k++)
            file[1024 + width * k] = (unsigned char)(k + 1);
        kn_tokenizer *none = NULL;
        const char *path = write_temp("x.bin", file, 1024 + (size_t)width * COUNT);
        OWNED_TEXT kn_text *t = kn_text_open(path, "char", &none);
        KN_CHECK(!t == (cases[i].says != NULL), "case %zu", i);
        if (t)
            KN_CHECK(kn_text_vocab(t) == cases[i].vocab && kn_text_token(t, 39) == 40 &&
                     kn_text_count(t, KN_TRAIN) == 36);
        else
            KN_CHECK_ERROR(cases[i].says);
    }
    const uint16_t ids[] = { 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    const char *path = write_temp("plain.bin", ids, sizeof ids);
    kn_tokenizer *tok = NULL;
    KN_CHECK(kn_text_is_plain(path) && !kn_text_open(path, "char", &tok) && !tok);
    KN_CHECK_ERROR("say how many kinds there are");
    kn_text *t = kn_text_map_plain(path, 16);
    KN_CHECK(t && kn_text_vocab(t) == 16 && kn_text_token(t, 10) == 15);
    kn_text_free(t);
    tok = kn_tokenizer_create("byte", NULL, 0);
    t = kn_text_open(path, "char", &tok);
    KN_CHECK(t && kn_text_vocab(t) == 256);
    kn_text_free(t);
    kn_tokenizer_free(tok);
    REFUSED(kn_text_map_plain(path, 65537), "a vocabulary of 65537");
    REFUSED(kn_text_map_plain(write_temp("odd.bin", ids, 7), 16),
            "7 bytes, which is no number of tokens");
    KN_CHECK(!kn_text_is_plain(write_temp("a.txt", ids, 8)));
}

/* A token file with these fields, 3 tokens of width bytes 1, 2, 3. */
static size_t make_tokens(unsigned char *file, uint32_t version, uint32_t width, uint64_t count,
                          uint64_t vocab)
{
    memset(file, 0, 128);
    memcpy(file, "KNTOKENS", 8);
    memcpy(file + 8, &version, 4);
    memcpy(file + 12, &width, 4);
    memcpy(file + 16, &count, 8);
    memcpy(file + 24, &vocab, 8);
    size_t step = width == 4 ? 4 : 2;
    for (size_t i = 0; i < 3; i++)
        file[64 + i * step] = (unsigned char)(i + 1);
    return 64 + 3 * step;
}

KN_TEST(data, hostile_token_files)
{
    static const struct {
        uint32_t version, width;
        uint64_t count, vocab;
        const char *says; /* NULL: a good file */
    } cases[] = {
        { 1, 2, 3, 4, NULL },
        { 1, 4, 3, 1 << 20, NULL },
        { 1, 2, 3, 65536, NULL },
        { 2, 2, 3, 4, "token file version 2" },
        { 1, 3, 3, 4, "3 bytes a token" },
        { 1, 0, 3, 4, "0 bytes a token" },
        { 1, 2, 3, 0, "a vocabulary of 0" },
        { 1, 2, 3, 65537, "a vocabulary of 65537" },
        { 1, 4, 3, UINT64_MAX, "a vocabulary of" },
        { 1, 2, 2, 4, "its header says 2 tokens of 2 bytes, but 6 bytes follow" },
        { 1, 2, 4, 4, "its header says 4 tokens" },
        { 1, 2, 0, 4, "its header says 0 tokens" },
        { 1, 2, UINT64_MAX, 4, "its header says 18446744073709551615 tokens" },
        { 1, 4, (1ull << 62) + 3, 4, "its header says" }, /* times 4 wraps around to 12 */
    };
    unsigned char file[128];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t size =
            make_tokens(file, cases[i].version, cases[i].width, cases[i].count, cases[i].vocab);
        OWNED_TEXT kn_text *t = kn_text_map(write_temp("x.tokens", file, size));
        KN_CHECK((t != NULL) == (cases[i].says == NULL), "case %zu: %s", i,
                 kn_ok() ? "taken" : kn_error());
        if (cases[i].says)
            KN_CHECK_ERROR(cases[i].says);
    }
    size_t size = make_tokens(file, 1, 2, 3, 4);
    for (size_t n = 0; n < size; n++) {
        KN_CHECK(!kn_text_map(write_temp("x.tokens", file, n)), "%zu bytes are taken", n);
        KN_CHECK(!kn_ok());
        kn_clear_error();
    }
    for (size_t i = 0; i < 64; i++) {
        file[i] ^= 0x40;
        kn_text *t = kn_text_map(write_temp("x.tokens", file, size));
        /* only a larger vocabulary than needed can't be detected */
        KN_CHECK((t != NULL) == kn_ok() && (!t || i == 24 || i == 25), "byte %zu", i);
        kn_text_free(t);
        kn_clear_error();
        file[i] ^= 0x40;
    }
}

/* An id outside the vocabulary is found when it is drawn, and named. */
KN_TEST(data, damaged_tokens)
{
    unsigned char file[64 + 100];
    int64_t x[8], y[8];
    make_tokens(file, 1, 2, 50, 4);
    memset(file + 64, 1, 100); /* every token is 257 */
    kn_text *t = kn_text_map(write_temp("x.tokens", file, sizeof file));
    KN_CHECK(t != NULL);
    REFUSED(kn_text_batch(t, KN_TRAIN, 1, 0, 1, 4, x, y), "is 257, outside the vocabulary of 4");
    kn_text_free(t);
}

KN_TEST(data, tiny_shakespeare)
{
    OWNED_TOKENIZER kn_tokenizer *tok = NULL;
    OWNED_HOST char *path = kn_data_find_quietly("shakespeare");
    if (!path)
        KN_SKIP("Tiny Shakespeare is not on this machine (KNAP_DATA)");
    OWNED_TEXT kn_text *t = kn_text_open(path, "char", &tok);
    KN_CHECK_OK();
    KN_CHECK(kn_text_vocab(t) == 65); /* the counts that nanoGPT's prepare.py prints */
    KN_CHECK(kn_text_count(t, KN_TRAIN) == 1003854 && kn_text_count(t, KN_VALIDATION) == 111540);
}
