/* tests/models/documents_test.c: texts that are many documents, and attention that stays inside of
 * each. */
#include "models/text.h"
#include "tests/models/owned.h"
#include "tests/owned.h"
#include "tests/models/small_models.h"

#include <math.h>

/* ---- reading --------------------------------------------------------------------------------- */

/* The ids of a text as numbers with blanks between them. */
static const char *ids_in(const kn_text *t)
{
    static char room[512];
    int n = 0;
    const int64_t count = t ? kn_text_count(t, KN_TRAIN) + kn_text_count(t, KN_VALIDATION) : 0;
    room[0] = 0;
    for (int64_t i = 0; i < count; i++)
        n += snprintf(room + n, sizeof room - (size_t)n, i ? " %lld" : "%lld",
                      (long long)kn_text_token(t, i));
    return room;
}

/* Reads a text in that way; its ids, or "" with an error. */
#define READS(text, ids, ...)                                                                      \
    do {                                                                                           \
        kn_tokenizer *tok_ = NULL;                                                                 \
        kn_text *t_ = kn_text_read(write_temp("docs", text, sizeof text - 1), &tok_, __VA_ARGS__); \
        KN_CHECK(t_ &&strcmp(ids_in(t_), ids) == 0, "%s, not %s: %s", ids_in(t_), ids,             \
                 kn_error());                                                                      \
        kn_text_free(t_);                                                                          \
        kn_tokenizer_free(tok_);                                                                   \
    } while (0)

/* Bytes have ids up to 255; the end token is 256. */
KN_TEST(documents, lines_of_json)
{
    READS(
        "{\"text\": \"ab\"}\n\n{\"n\": 1, \"text\": \"c\\n\"}\r\n{\"text\": \"\"}\n \t\n{\"text\": "
        "\"\\u0000\"}",
        "97 98 256 99 10 256 0 256", .kind = "byte", .field = "text");
    READS("{\"text\": \"a<|endoftext|>b\"}", "97 256 98 256", .kind = "byte", .field = "text");
    READS("{\"body\": \"ab\"}", "97 98 256", .kind = "byte", .field = "body", .end = "<end>");
    READS("{\"text\": \"ba\"}\n{\"text\": \"c\"}", "1 0 3 2 3", .field = "text"); /* char */
}

KN_TEST(documents, separators)
{
    READS("a\nb\n--\n--\nc\n--\n", "97 10 98 256 99 256", .kind = "byte", .separator = "--");
    READS("a\r\n--\r\n\nb--\n", "97 256 10 98 45 45 256", .kind = "byte", .separator = "--");
    READS("a\nb\n\n\nc", "97 10 98 256 99 256", .kind = "byte", .separator = "");
    READS("ab", "97 98 256", .kind = "byte", .end = "<|endoftext|>"); /* a file is one */
}

#define REFUSES(text, says, ...)                                                                   \
    do {                                                                                           \
        kn_tokenizer *tok_ = NULL;                                                                 \
        KN_CHECK(!kn_text_read(write_temp("docs", text, sizeof text - 1), &tok_, __VA_ARGS__) &&   \
                     !tok_,                                                                        \
                 "%s", text);                                                                      \
        KN_CHECK_ERROR(says);                                                                      \
    } while (0)

KN_TEST(documents, bad_ones_are_named)
{
    REFUSES("{\"text\": \"a\"}\n{\"text\": \"b\"\n", "docs:2: this line isn't JSON: column",
            .kind = "byte", .field = "text");
    REFUSES("\n[1]\n", "docs:2: this line is no object", .kind = "byte", .field = "text");
    REFUSES("{\"text\": \"a\"}\n{\"text\": 1}\n",
            "docs:2: the line's object has no text \"text\" (--field)", .kind = "byte",
            .field = "text");
    REFUSES("{\"text\": \"a\"}\n{\"txt\": \"\"}\n", "docs:2: the line's object has no text",
            .kind = "byte", .field = "text");
    REFUSES("{\"text\": \"\\ud800\"}", "docs:1: this line isn't JSON", .kind = "byte",
            .field = "text");
    REFUSES("{\"text\": \"\xff\"}", "docs:1: this line isn't JSON", .kind = "byte",
            .field = "text");
    REFUSES("{\"text\": \"\"}", "docs holds no documents, or empty ones only", .kind = "byte",
            .field = "text");
    REFUSES("a\nb\n", "has no line '--' between two documents", .kind = "byte", .separator = "--");
    REFUSES("--\n--\n", "holds no documents", .kind = "byte", .separator = "--");
    REFUSES("a", ".field and .separator contradict", .field = "a", .separator = "b");
    REFUSES("KNTOKENS", "--field is for texts, and", .field = "a");
    REFUSES("  ", "holds no documents", .field = "a");
    char deep[4096];
    memset(deep, '[', sizeof deep);
    OWNED_TOKENIZER kn_tokenizer *tok = kn_tokenizer_create("byte", NULL, 0);
    REFUSED(kn_text_read(write_temp("docs", deep, sizeof deep), &tok, .field = "text"),
            "docs:1: this line isn't JSON");
    REFUSED(kn_text_read(write_temp("docs", "a\n--\n", 5), &tok, .separator = "--"),
            "the tokenizer has no <|endoftext|>; say which of its tokens");
    REFUSED(kn_text_read(write_temp("docs", "a\n--\n", 5), &tok, .separator = "--", .end = "x<>"),
            "the tokenizer has no token 'x<>', which is to end a document");
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* A document begins with the end token of the one before; of token files the end token is said. */
KN_TEST(documents, begin_of_each_token)
{
    enum { CTX = 6 };
    const uint16_t ids[] = { 1, 9, 2, 3, 9, 9, 4 };
    const int64_t want[CTX] = { 0, 1, 1, 1, 4, 5 };
    int64_t x[CTX], y[CTX], begin[CTX];
    kn_tokenizer *tok = NULL;
    const char *path = write_temp("x.bin", ids, sizeof ids);
    OWNED_TEXT kn_text *t = kn_text_join(kn_text_read(path, &tok, .vocab = 10, .end = "9"),
                                         kn_text_read(path, &tok, .vocab = 10, .end = "9"));
    KN_CHECK(t && kn_text_batch_documents(t, KN_TRAIN, 1, 0, 1, CTX, x, y, begin));
    KN_CHECK(memcmp(begin, want, sizeof begin) == 0);
    kn_text_free(t);
    REFUSED(kn_text_read(path, &tok, .vocab = 10, .end = "10"),
            "--end 10: without a tokenizer give the id of the token, below 10");
    t = kn_text_read(path, &tok, .vocab = 10);
    t = kn_text_join(t, kn_text_read(path, &tok, .vocab = 10));
    REFUSED(kn_text_batch_documents(t, KN_TRAIN, 1, 0, 1, CTX, x, y, begin),
            "which token stands between documents of the text isn't known");
}

/* ---- attention ------------------------------------------------------------------------------- */

enum { ROWS = 3, CTX = 6 };
/* Where documents begin: two, one, three in a row. */
static const int64_t begins[ROWS][CTX] = { { 0, 0, 2, 2, 2, 2 }, { 0 }, { 0, 1, 1, 1, 4, 4 } };

/* The loss of rows in which documents are masked, and that of each document as a row of its own,
 * weighted by its tokens. */
static kn_tensor *masked_loss(kn_module *m, const kn_family *f)
{
    return kn_language_documents_loss(m, ids_of(ROWS, CTX, 1), ids_of(ROWS, CTX, 5),
                                      kn_from(KN_I64, KN_CPU, begins, KN_SHAPE(ROWS, CTX)));
}

static kn_tensor *separate_loss(kn_module *m, const kn_family *f)
{
    kn_tensor *x = ids_of(ROWS, CTX, 1), *y = ids_of(ROWS, CTX, 5), *sum = NULL;
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t from = 0, to; from < CTX; from = to) {
            for (to = from + 1; to < CTX && begins[r][to] == from; to++)
                ;
            kn_tensor *part[2];
            for (int i = 0; i < 2; i++)
                part[i] = kn_contiguous(kn_slice(kn_slice(i ? y : x, 0, r, r + 1), 1, from, to));
            kn_tensor *loss =
                kn_scale(kn_language_loss(m, part[0], part[1]), (double)(to - from) / (ROWS * CTX));
            sum = sum ? kn_add(sum, loss) : loss;
        }
    return sum;
}

typedef kn_tensor *(*loss_fn)(kn_module *m, const kn_family *f);

/* The loss, and the gradients of all parameters in one list, for free. */
static double *run(kn_module *m, const kn_family *f, loss_fn of, double *loss, int64_t *count)
{
    double *all = NULL;
    int64_t n = 0;
    kn_scope s = kn_scope_begin();
    kn_tensor *l = of(m, f);
    KN_CHECK(l && kn_backward(l));
    *loss = kn_item(l);
    const kn_param *p;
    const int params = kn_params(m, &p);
    for (int i = 0; i < params; i++) {
        const int64_t size = kn_numel(p[i].tensor);
        all = realloc(all, (size_t)(n + size) * sizeof *all);
        KN_CHECK(
            kn_to_host(kn_contiguous(kn_grad(p[i].tensor)), all + n, (size_t)size * sizeof *all));
        n += size;
    }
    kn_zero_grad(m);
    kn_scope_end(s);
    *count = n;
    return all;
}

/* Forward and gradient are those of separate documents; recomputed, too. */
KN_TEST(documents, masked_ones_are_separate_ones)
{
    for (int kind = GPT; kind <= LLAMA; kind++)
        for (int recompute = 0; recompute < 2; recompute++) {
            const kn_family *f = small_models[kind].family;
            OWNED_MODULE kn_module m;
            double loss[2], worst = 0;
            int64_t count[2];
            make_small(&m, kind, KN_F64, 3);
            if (recompute)
                kn_family_recompute(f, &m, true);
            OWNED_BYTES double *a = run(&m, f, masked_loss, &loss[0], &count[0]),
                               *b = run(&m, f, separate_loss, &loss[1], &count[1]);
            for (int64_t i = 0; i < count[0]; i++)
                worst = fmax(worst, fabs(a[i] - b[i]));
            KN_CHECK(count[0] == count[1] && fabs(loss[0] - loss[1]) < 1e-12 && worst < 1e-12,
                     "%s: losses %.15g and %.15g, gradients differ by %g", f->noun, loss[0],
                     loss[1], worst);
        }
}

KN_TEST(documents, bad_begins)
{
    OWNED_MODULE kn_module m;
    make_small(&m, GPT, KN_F32, 3);
    IN_SCOPE;
    REFUSED(kn_language_documents_loss(&m, ids_of(1, 6, 1), ids_of(1, 6, 1), ids_of(1, 5, 1)),
            "gpt: ids are i64[1,6] but documents' begins i64[1,5]; both must be [B,T]");
    REFUSED(kn_document_mask(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2))), "begin has 1 dims");
}
