/* tests/models/shards_test.c: texts of several files, and data of their own to validate with. */
#include "models/text.h"
#include "tests/models/owned.h"
#include "tests/models/temp.h"

#include <sys/stat.h>

enum { CTX = 8, ROWS = 64, IDS = 100 };

/* Ids begin, begin + 1, ... of a vocabulary of 256. */
static void write_tokens(const char *name, int begin, int count, int vocab)
{
    uint16_t ids[IDS];
    for (int i = 0; i < count; i++)
        ids[i] = (uint16_t)(begin + i);
    OWNED_TEXT kn_text *t = kn_text_of_ids(ids, count, vocab);
    KN_CHECK(t && kn_text_save(t, temp_path(name)));
}

/* A folder of three files that hold 0 .. 99 in order of their names, and of other things. */
static void write_shards(void)
{
    mkdir(temp_path("set"), 0755);
    write_tokens("set/b_1.tokens", 30, 1, 256);
    write_tokens("set/b_2.tokens", 31, 69, 256);
    write_tokens("set/a.tokens", 0, 30, 256);
    write_temp("set/.hidden", "x", 1);
    mkdir(temp_path("set/folder"), 0755);
    KN_CHECK_OK();
}

/* Windows go over the borders of files: those of one file with the same tokens. */
KN_TEST(shards, several_files_are_one_text)
{
    int64_t x[2][ROWS * CTX], y[2][ROWS * CTX];
    kn_tokenizer *tok = NULL;
    uint16_t ids[IDS];
    write_shards();
    for (int i = 0; i < IDS; i++)
        ids[i] = (uint16_t)i;
    OWNED_TEXT kn_text *one = kn_text_of_ids(ids, IDS, 256),
                       *t = kn_text_read(temp_path("set"), &tok, .kind = "char");
    KN_CHECK(t && !tok && kn_text_count(t, KN_TRAIN) == 90);
    for (int i = 0; i < IDS; i++)
        KN_CHECK(kn_text_token(t, i) == i, "token %d is %lld", i, (long long)kn_text_token(t, i));
    KN_CHECK(kn_text_batch(one, KN_TRAIN, 1, 0, ROWS, CTX, x[0], y[0]));
    KN_CHECK(kn_text_batch(t, KN_TRAIN, 1, 0, ROWS, CTX, x[1], y[1]));
    KN_CHECK(memcmp(x[0], x[1], sizeof x[0]) == 0 && memcmp(y[0], y[1], sizeof y[0]) == 0);
    REFUSED(kn_text_save(t, temp_path("all.tokens")), "a text of 3 files");
    kn_text_free(t);
    t = kn_text_open(temp_path("set/b_?.tokens"), "char", &tok);
    KN_CHECK(t && kn_text_token(t, 0) == 30 && kn_text_token(t, 69) == 99);
}

/* The tokenizer of the first file, or of the folder. */
KN_TEST(shards, tokenizers_beside_them)
{
    OWNED_TOKENIZER kn_tokenizer *byte = kn_tokenizer_create("byte", NULL, 0), *tok = NULL;
    write_shards();
    KN_CHECK(kn_tokenizer_save(byte, temp_path("set/tokenizer.json")));
    OWNED_TEXT kn_text *t = kn_text_open(temp_path("set"), "char", &tok);
    KN_CHECK(t && tok && kn_tokenizer_vocab(tok) == 256);
    kn_text_free(t);
    kn_tokenizer_free(tok);
    tok = NULL;
    KN_CHECK(remove(temp_path("set/tokenizer.json")) == 0);
    KN_CHECK(kn_tokenizer_save(byte, temp_path("set/a.tokens.json")));
    t = kn_text_open(temp_path("set"), "char", &tok);
    KN_CHECK(t && tok);
}

/* Texts of a folder are encoded by one tokenizer. */
KN_TEST(shards, several_texts)
{
    OWNED_TOKENIZER kn_tokenizer *tok = NULL;
    mkdir(temp_path("set"), 0755);
    write_temp("set/2.txt", "cd", 2);
    write_temp("set/1.txt", "ab", 2);
    KN_CHECK(!kn_text_open(temp_path("set"), "char", &tok) && !tok);
    KN_CHECK_ERROR("1.txt is one of several texts, and a char tokenizer is made from one");
    OWNED_TEXT kn_text *t = kn_text_open(temp_path("set"), "byte", &tok);
    KN_CHECK(t && kn_text_token(t, 0) == 'a' && kn_text_token(t, 3) == 'd');
}

KN_TEST(shards, files_that_do_not_go_together)
{
    kn_tokenizer *tok = NULL;
    write_shards();
    write_tokens("set/c.tokens", 0, 4, 300);
    REFUSED(kn_text_open(temp_path("set"), "char", &tok),
            "c.tokens 300; all must be of one tokenizer");
    write_temp("set/c.tokens", "text", 4);
    KN_CHECK(!kn_text_open(temp_path("set"), "byte", &tok) && !tok);
    KN_CHECK_ERROR("c.tokens isn't; give files of one sort");
    write_temp("set/c.tokens", "KNTOKENS", 8);
    REFUSED(kn_text_open(temp_path("set/*"), "char", &tok), "c.tokens is no token file");
    REFUSED(kn_text_open(temp_path("set/*.bin"), "char", &tok), "no file matches");
    REFUSED(kn_text_open(temp_path("nowhere/*.bin"), "char", &tok), "nowhere");
    mkdir(temp_path("empty"), 0755);
    REFUSED(kn_text_open(temp_path("empty"), "char", &tok), "empty holds no texts or token files");
    REFUSED(kn_text_read(temp_path("set/a.tokens"), &tok, .vocab = 256),
            "--vocab is for tokens without a header");
    REFUSED(kn_text_read(temp_path("set"), &tok, .vocab = 65537), ".vocab is 65537");
}

/* An id outside the vocabulary is named by its place in its file. */
KN_TEST(shards, damaged_tokens)
{
    int64_t x[CTX], y[CTX];
    kn_tokenizer *tok = NULL;
    const uint16_t good[IDS] = { 0 }, bad[IDS] = { [3] = 9 };
    mkdir(temp_path("set"), 0755);
    write_temp("set/1.bin", good, sizeof good);
    write_temp("set/2.bin", bad, 20);
    OWNED_TEXT kn_text *t = kn_text_read(temp_path("set"), &tok, .vocab = 9);
    kn_text *val = kn_text_read(temp_path("set/2.bin"), &tok, .vocab = 9);
    t = kn_text_join(t, val);
    KN_CHECK(t && kn_text_token(t, 103) == 9);
    KN_CHECK(!kn_text_batch(t, KN_VALIDATION, 1, 0, 1, CTX, x, y));
    KN_CHECK(strstr(kn_error(), "token 3 of ") && strstr(kn_error(), "2.bin is 9, outside"));
    KN_CHECK_ERROR("outside the vocabulary of 9");
}

/* All of one text is for training, all of the other for validation. */
KN_TEST(shards, validation_of_its_own)
{
    int64_t x[CTX], y[CTX];
    uint16_t ids[IDS];
    for (int i = 0; i < IDS; i++)
        ids[i] = (uint16_t)i;
    kn_text *t = kn_text_join(kn_text_of_ids(ids, 50, 100), kn_text_of_ids(ids + 50, 9, 100));
    KN_CHECK(t && kn_text_count(t, KN_TRAIN) == 50 && kn_text_count(t, KN_VALIDATION) == 9);
    KN_CHECK(kn_text_batch(t, KN_VALIDATION, 1, 0, 1, CTX, x, y));
    KN_CHECK(x[0] == 50 && y[CTX - 1] == 58);
    for (int i = 0; i < 100; i++)
        KN_CHECK(kn_text_batch(t, KN_TRAIN, 1, i, 1, CTX, x, y) && y[CTX - 1] < 50);
    REFUSED(kn_text_check(t, 9), "9 are for validation; a context of 8");
    kn_text *other = kn_text_join(kn_text_of_ids(ids, 49, 100), kn_text_of_ids(ids + 49, 10, 100)),
            *plain = kn_text_of_ids(ids, 59, 100);
    KN_CHECK(kn_text_hash(t) != kn_text_hash(other) && kn_text_hash(t) != kn_text_hash(plain));
    kn_text_free(other);
    kn_text_free(plain);
    kn_text_free(t);
    REFUSED(kn_text_join(kn_text_of_ids(ids, 50, 100), kn_text_of_ids(ids, 50, 101)),
            "has 101 kinds of token, that for training 100");
    REFUSED(kn_text_join(kn_text_of_ids(ids, 50, 100), NULL), "the text for validation");
}
