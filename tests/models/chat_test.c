/* tests/models/chat_test.c: conversations: their ids by each template, the answers that count, and
 * the rows that they are laid out in. */
#include "models/chat_internal.h"
#include "models/text.h"
#include "models/tokens/tokens.h"
#include "tests/models/owned.h"
#include "tests/models/temp.h"

/* ---- ids ------------------------------------------------------------------------------------- */

static json_t *json_of(const char *text)
{
    json_error_t e;
    json_t *j = json_loads(text, 0, &e);
    KN_CHECK(j != NULL, "%s", e.text);
    return j;
}

/* The byte tokenizer with the template's tokens. */
static kn_tokenizer *bytes_for(const kn_chat *c)
{
    kn_tokenizer *byte = kn_tokenizer_create("byte", NULL, 0), *t = kn_chat_tokenizer(byte, c);
    KN_CHECK(t && kn_chat_fits(t, c));
    kn_tokenizer_free(byte);
    return t;
}

/* The text of the ids, or of the answers' among them. */
static const char *text_of(const kn_tokenizer *t, const kn_chat_ids *ids, bool answers)
{
    static char room[2][1024];
    int64_t list[1024], n = 0;
    for (int64_t i = 0; i < ids->count; i++)
        if (ids->answer[i] || !answers)
            list[n++] = ids->id[i];
    KN_CHECK(kn_tokenizer_decode(t, list, n, room[answers], sizeof room[0]) >= 0);
    return room[answers];
}

#define TALK                                                                                       \
    "{\"messages\": [{\"role\": \"system\", \"content\": \" Be brief. \"}, {\"role\": \"user\", "  \
    "\"content\": \"Hi\\n\"}, {\"role\": \"assistant\", \"content\": \"\\u00a0Hello!\"}, "         \
    "{\"role\": \"user\", \"content\": \"Bye\"}, {\"role\": \"assistant\", \"content\": \"\"}]}"

KN_TEST(chat, texts_and_answers)
{
    static const struct {
        const char *name, *text, *answers;
    } cases[] = {
        { "chatml",
          "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
          "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
          "<|im_start|>assistant\n<|im_end|>\n",
          "Hello!<|im_end|><|im_end|>" },
        { "llama3",
          "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
          "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
          "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
          "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
          "<|start_header_id|>assistant<|end_header_id|>\n\n<|eot_id|>",
          "Hello!<|eot_id|><|eot_id|>" },
        { "llama2",
          "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello! </s><s>[INST] Bye [/INST]  "
          "</s>",
          " Hello! </s>  </s>" },
        { "plain",
          "### System:\nBe brief.\n\n### User:\nHi\n\n### Assistant:\nHello!<|endoftext|>"
          "### User:\nBye\n\n### Assistant:\n<|endoftext|>",
          "Hello!<|endoftext|><|endoftext|>" },
    };
    json_t *talk = json_of(TALK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const kn_chat *c = kn_chat_named(cases[i].name);
        OWNED_TOKENIZER kn_tokenizer *t = bytes_for(c);
        kn_chat_ids ids = { 0 };
        KN_CHECK(kn_chat_encode(c, t, talk, "x", &ids));
        KN_CHECK(strcmp(text_of(t, &ids, false), cases[i].text) == 0, "%s",
                 text_of(t, &ids, false));
        KN_CHECK(strcmp(text_of(t, &ids, true), cases[i].answers) == 0, "%s",
                 text_of(t, &ids, true));
        KN_CHECK(kn_chat_of_jinja(c->jinja) == c, "%s", c->name);
        kn_chat_ids_free(&ids);
    }
    json_decref(talk);
    KN_CHECK(!kn_chat_named("alpaca") && !kn_chat_of_jinja("{{ messages }}"));
}

/* What a program asks turn by turn is what a conversation has: the same ids. */
KN_TEST(chat, turn_by_turn)
{
    json_t *talk = json_of(TALK);
    for (const char *name = KN_CHATS; *name;) {
        char one[16];
        snprintf(one, sizeof one, "%.*s", (int)strcspn(name, "|"), name);
        name += strcspn(name, "|") + (name[strcspn(name, "|")] == '|');
        const kn_chat *c = kn_chat_named(one);
        OWNED_TOKENIZER kn_tokenizer *t = bytes_for(c);
        kn_chat_ids all = { 0 }, turns = { 0 };
        kn_chat_writer w = { .chat = c, .t = t };
        KN_CHECK(kn_chat_encode(c, t, talk, "x", &all));
        KN_CHECK(kn_chat_add(&w, KN_SYSTEM, "Be brief.", 9, "x", &turns) &&
                 kn_chat_add(&w, KN_USER, "Hi", 2, "x", &turns) && kn_chat_ask(&w, &turns));
        do /* the model's answer, to its stop */
            KN_CHECK(kn_chat_put(&turns, all.id[turns.count], true));
        while (turns.id[turns.count - 1] != kn_tokenizer_id(t, c->stop));
        KN_CHECK(kn_chat_answered(&w) && kn_chat_add(&w, KN_USER, "Bye", 3, "x", &turns) &&
                 kn_chat_ask(&w, &turns));
        KN_CHECK(turns.count < all.count &&
                     memcmp(turns.id, all.id, (size_t)turns.count * sizeof *all.id) == 0,
                 "%s: %s", one, text_of(t, &turns, false));
        kn_chat_end(&w);
        kn_chat_ids_free(&all);
        kn_chat_ids_free(&turns);
    }
    json_decref(talk);
}

/* Ids by transformers' apply_chat_template (scripts/peers chat). */
KN_TEST(chat, golden_ids)
{
    json_error_t e;
    size_t i, k;
    json_t *all = json_load_file(KNAP_SOURCE_ROOT "/tests/models/chat_golden.json", 0, &e), *one;
    kn_tokenizer *bare = kn_tokenizer_load(KNAP_SOURCE_ROOT "/tests/models/tokenizers/gpt2");
    if (!bare)
        KN_SKIP("this build has no PCRE2");
    KN_CHECK(json_array_size(all) == 48, "%s", e.text);
    json_array_foreach(all, i, one)
    {
        const kn_chat *c = kn_chat_named(json_string_value(json_object_get(one, "template")));
        OWNED_TOKENIZER kn_tokenizer *t = kn_chat_tokenizer(bare, c);
        const json_t *want = json_object_get(one, "ids");
        kn_chat_ids ids = { 0 };
        KN_CHECK(kn_chat_encode(c, t, one, "golden", &ids));
        KN_CHECK((size_t)ids.count == json_array_size(want), "%zu, by %s", i, c->name);
        for (k = 0; k < json_array_size(want); k++)
            KN_CHECK(ids.id[k] == json_integer_value(json_array_get(want, k)), "%zu, by %s, id %zu",
                     i, c->name, k);
        kn_chat_ids_free(&ids);
    }
    kn_tokenizer_free(bare);
    json_decref(all);
}

/* ---- files ----------------------------------------------------------------------------------- */

#define PAIR(n)   "{\"prompt\": \"" n "\", \"completion\": \"" n n "\"}\n"
#define ANSWER(n) "{\"prompt\": \"" n "\", \"answer\": \"" n n "\"}\n"
#define SAID(who) "{\"messages\": [{\"role\": \"" who "\", \"content\": \"q\"}]}\n"

static kn_text *talks_of(const char *text, kn_tokenizer **t, const char *chat)
{
    return kn_text_read(write_temp("talk", text, strlen(text)), t, .kind = "byte", .chat = chat);
}

KN_TEST(chat, bad_lines_are_named)
{
    static const struct {
        const char *text, *says;
    } cases[] = {
        { PAIR("a") "{\"prompt\": \"a\"}", "talk:2: neither \"messages\"" },
        { "{\"messages\": \"a\"}", "talk:1: neither \"messages\"" },
        { "{\"prompt\": 1, \"answer\": \"a\"}", "talk:1: \"prompt\" is no text" },
        { "{\"prompt\": \"a\", \"answer\": null}", "talk:1: \"answer\" is no text" },
        { SAID("user") SAID("tool"), "talk:2: message 0 has the role tool" },
        { "{\"messages\": [1]}", "talk:1: message 0 has no role" },
        { "{\"messages\": [{\"role\": \"user\"}]}", "talk:1: \"content\" is no text" },
        { "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"system\", "
          "\"content\": \"a\"}]}",
          "talk:1: a message of the system isn't the first" },
        { SAID("user"), "talk holds no conversation with an answer" },
        { "{", "talk:1: this line isn't JSON" },
    };
    kn_tokenizer *t = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        KN_CHECK(!talks_of(cases[i].text, &t, "chatml") && !t, "%s", cases[i].text);
        KN_CHECK_ERROR(cases[i].says);
    }
    REFUSED(talks_of(SAID("assistant"), &t, "llama2"),
            "talk:1: the template llama2 takes user and assistant in turn");
    REFUSED(talks_of(PAIR("a"), &t, "alpaca"),
            "no template 'alpaca'; there are chatml|llama3|llama2|plain");
    REFUSED(kn_text_read(temp_path("talk"), &t, .chat = "plain"),
            "holds conversations, of which no char tokenizer is made");
    REFUSED(kn_text_read(temp_path("talk"), &t, .chat = "plain", .field = "text"),
            ".chat says where conversations end");
    REFUSED(kn_text_read(write_temp("x", "KNTOKENS", 8), &t, .chat = "plain"),
            "--template is for texts");
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* 20 pairs of one letter and its answer of two, 18 for training. */
static kn_text *letters(kn_tokenizer **t)
{
    char lines[2048] = "";
    for (int i = 0; i < 20; i++)
        snprintf(lines + strlen(lines), 100, i % 2 ? ANSWER("%c") : PAIR("%c"), 'a' + i, 'a' + i,
                 'a' + i);
    strcat(lines, SAID("user"));
    kn_text *text = talks_of(lines, t, "plain");
    KN_CHECK(text != NULL);
    return text;
}

/* "### User:\na\n\n### Assistant:\naa<end>": the targets that count are two letters and the end. */
KN_TEST(chat, rows_of_one)
{
    enum { CTX = 40, HEAD = 30 };
    int64_t x[CTX], y[CTX];
    bool seen[20] = { false };
    OWNED_TOKENIZER kn_tokenizer *t = NULL;
    OWNED_TEXT kn_text *text = letters(&t);
    KN_CHECK(kn_text_pack(text, CTX, false) && kn_text_check(text, CTX));
    for (int64_t i = 0; i < 18 + 4; i++) {
        const bool val = i >= 18;
        KN_CHECK(kn_text_batch(text, val, 5, val ? i - 18 : i, 1, CTX, x, y));
        const int64_t letter = x[10]; /* behind "### User:\n" */
        for (int k = 0; k < CTX; k++)
            KN_CHECK(y[k] == (k == HEAD - 3 || k == HEAD - 2 ? letter
                              : k == HEAD - 1                ? 256
                                                             : -100),
                     "row %lld, target %d is %lld", (long long)i, k, (long long)y[k]);
        KN_CHECK(val ? letter == 'a' + 18 + i % 2 : letter < 'a' + 18 && !seen[letter - 'a']);
        seen[letter - 'a'] = true;
    }
    REFUSED(kn_text_check(text, CTX - 1), "laid out in rows of 40 tokens, not 39");
    REFUSED(kn_text_loader(text, NULL, .batch = 1, .ctx = CTX),
            "kn_text_loader: the text holds conversations");
    /* cut behind the first letter of the answer, or before it */
    KN_CHECK(kn_text_pack(text, HEAD - 2, false) && kn_text_check(text, HEAD - 2));
    KN_CHECK(kn_text_batch(text, KN_TRAIN, 5, 0, 1, HEAD - 2, x, y) && y[HEAD - 3] == x[10]);
    KN_CHECK(kn_text_pack(text, HEAD - 3, false) && !kn_text_check(text, HEAD - 3));
    KN_CHECK_ERROR("of 20 conversations none with an answer in its first 28 tokens is for");
}

/* As many as fit, each with the place where it begins; padding sees itself only. */
KN_TEST(chat, rows_of_several)
{
    enum { CTX = 70, EACH = 30 };
    int64_t x[CTX], y[CTX], begin[CTX], counted = 0;
    OWNED_TOKENIZER kn_tokenizer *t = NULL;
    OWNED_TEXT kn_text *text = letters(&t);
    KN_CHECK(kn_text_pack(text, CTX, true) && kn_text_check(text, CTX));
    for (int64_t i = 0; i < 9; i++) {
        KN_CHECK(kn_text_batch_documents(text, KN_TRAIN, 5, i, 1, CTX, x, y, begin));
        for (int k = 0; k < CTX; k++) {
            KN_CHECK(begin[k] == (k < EACH ? 0 : k < 2 * EACH ? EACH : 2 * EACH), "%d", k);
            counted += y[k] >= 0;
        }
        KN_CHECK(x[10] + 1 == x[EACH + 10]);
    }
    KN_CHECK(counted == 18 * 3, "%lld", (long long)counted);
}

/* All conversations of one file are for training, all of the other for validation. */
KN_TEST(chat, validation_of_its_own)
{
    int64_t x[40], y[40];
    OWNED_TOKENIZER kn_tokenizer *t = NULL;
    kn_text *train = letters(&t), *val = talks_of(PAIR("z"), &t, "plain");
    train = kn_text_join(train, val);
    KN_CHECK(train && kn_text_pack(train, 40, false));
    KN_CHECK(kn_text_batch(train, KN_VALIDATION, 5, 3, 1, 40, x, y) && x[10] == 'z');
    for (int64_t i = 0; i < 40; i++)
        KN_CHECK(kn_text_batch(train, KN_TRAIN, 5, i, 1, 40, x, y) && x[10] != 'z');
    OWNED_TEXT kn_text *plain = kn_text_encode(t, "a text", 6);
    REFUSED(kn_text_join(train, plain), "one of two texts holds conversations");
    plain = kn_text_encode(t, "a text", 6);
    REFUSED(kn_text_pack(plain, 4, false), "the text holds no conversations");
}
