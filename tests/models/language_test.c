/* tests/models/language_test.c: language models of each family: they see no future, gradients are
 * those of the loss, tokens that don't fit are refused; and text out of any logits. family_test.c
 * has what every model does, llama_golden_test.c compares numbers. */
#include "models/sample.h"
#include "tests/models/owned.h"
#include "tests/owned.h"
#include "tests/models/small_models.h"

enum { VOCAB = 11 };

/* The first rows of four of two rows of six give the first logits, and the last of them those of
 * the next token. */
KN_TEST(language, begins_at_the_uniform_loss_and_sees_no_future)
{
    for (int kind = GPT; kind <= OWN_HEAD; kind++) {
        float whole[2 * 6 * VOCAB], part[2 * 4 * VOCAB], last[2 * VOCAB];
        OWNED_MODULE kn_module m;
        make_small(&m, kind, KN_F32, 7);
        kn_train(&m, false);
        IN_SCOPE;
        const double loss = kn_item(kn_language_loss(&m, ids_of(2, 6, 0), ids_of(2, 6, 1)));
        KN_CHECK(fabs(loss - log(VOCAB)) < 0.05, "model %d: loss %g", kind, loss);
        kn_tensor *x = ids_of(2, 6, 0), *four = kn_contiguous(kn_slice(x, 1, 0, 4));
        KN_CHECK(kn_to_host(kn_call(&m, x), whole, sizeof whole) &&
                 kn_to_host(kn_call(&m, four), part, sizeof part) &&
                 kn_to_host(kn_language_next_logits(&m, four), last, sizeof last));
        for (int r = 0; r < 2; r++)
            for (int i = 0; i < 4 * VOCAB; i++) {
                const float y = part[r * 4 * VOCAB + i];
                KN_CHECK(fabsf(whole[r * 6 * VOCAB + i] - y) < 1e-5f, "model %d: row %d, %d", kind,
                         r, i);
                KN_CHECK(i < 3 * VOCAB || fabsf(last[r * VOCAB + i - 3 * VOCAB] - y) < 1e-5f);
            }
    }
}

static double loss_value(kn_module *m, int kind)
{
    IN_SCOPE;
    double loss = kn_item(small_loss(m, kind, KN_F64));
    return loss;
}

/* Central differences in f64 at a few elements of every parameter. */
KN_TEST(language, gradients_are_those_of_the_loss)
{
    for (int kind = GPT; kind <= OWN_HEAD; kind++) {
        const kn_param *p;
        OWNED_MODULE kn_module m;
        make_small(&m, kind, KN_F64, 7);
        kn_train(&m, false);
        kn_scope s = kn_scope_begin();
        KN_CHECK(kn_backward(small_loss(&m, kind, KN_F64)));
        for (int i = 0, n = kn_params(&m, &p); i < n; i++) {
            double *w = kn_data(p[i].tensor), *grad = kn_data(kn_param_grad(&p[i])), h = 1e-5;
            KN_CHECK(w && grad, "%s", p[i].name);
            for (int64_t k = 0; k < p[i].numel; k += 1 + p[i].numel / 3) {
                const double kept = w[k];
                w[k] = kept + h;
                const double up = loss_value(&m, kind);
                w[k] = kept - h;
                const double want = (up - loss_value(&m, kind)) / (2 * h);
                w[k] = kept;
                KN_CHECK(fabs(want - grad[k]) < 1e-7 + 1e-5 * fabs(want),
                         "%s[%lld]: %g, should be %g", p[i].name, (long long)k, grad[k], want);
            }
        }
        kn_scope_end(s);
    }
}

KN_TEST(language, tokens_that_do_not_fit)
{
    for (int kind = GPT; kind <= OWN_HEAD; kind++) {
        OWNED_MODULE kn_module m;
        make_small(&m, kind, KN_F32, 7);
        kn_scope s = kn_scope_begin();
        REFUSED(kn_language_next_logits(&m, ids_of(1, 7, 0)),
                "7 tokens in a row; the model's context is 1 to 6");
        REFUSED(kn_language_loss(&m, ids_of(1, 6, 0), ids_of(2, 6, 0)),
                "ids are i64[1,6] but targets i64[2,6]");
        REFUSED(kn_language_loss(&m, ids_of(2, 6, 0), ids_of(2, 5, 0)),
                "ids are i64[2,6] but targets i64[2,5]");
        kn_set_grad_mode(false);
        kn_cache *c = kn_cache_new(&m, 9);
        KN_CHECK(c && kn_language_next_logits(&m, ids_of(1, 4, 0)));
        REFUSED(kn_language_next_logits(&m, ids_of(1, 3, 0)),
                "7 tokens in a row; the model's context is 1 to 6");
        kn_cache_free(c);
        kn_set_grad_mode(true);
        kn_scope_end(s);
    }
}

/* ---- text ------------------------------------------------------------------------------------ */

static kn_tensor *all_logits(void *m, kn_tensor *ids)
{
    return kn_call(m, ids);
}

static kn_tensor *no_logits(void *m, kn_tensor *ids)
{
    return kn_transpose(kn_gpt_next_logits(m, ids), 0, 1);
}

/* One position, all positions, with keys and values kept, into a file or nowhere: the same text. A
 * vocabulary larger than the tokenizer's draws ids without text. Other logits are refused. */
KN_TEST(language, writes_from_any_logits)
{
    char text[4][64] = { "" };
    OWNED_MODULE kn_module m;
    const kn_logits_fn next = kn_language_next_logits,
                       from[] = { next, all_logits, all_logits, next };
    const kn_sample_options o = { .temperature = 1, .seed = 5 };
    kn_tokenizer *t = kn_tokenizer_create("char", "abcdefghijk", VOCAB),
                 *few = kn_tokenizer_create("char", "abc", 3);
    make_small(&m, GPT, KN_F32, 7);
    for (int i = 0; i < 4; i++) {
        FILE *out = fmemopen(text[i], sizeof text[i], "w");
        KN_CHECK(kn_write_text(&m, from[i], i < 3 ? t : few, .prompt = "ab", .tokens = 9, .ctx = 6,
                               .draw = o, .cached = i == 2, .out = out));
        fclose(out);
    }
    KN_CHECK(strlen(text[0]) == 11 && strcmp(text[0], text[1]) == 0 &&
                 strcmp(text[0], text[2]) == 0,
             "%s, %s, %s", text[0], text[1], text[2]);
    KN_CHECK(strncmp(text[3], "ab", 2) == 0 && strlen(text[3]) < 11, "%s", text[3]);
    REFUSED(kn_write_text(&m, no_logits, t, .prompt = "a", .tokens = 1, .cached = true),
            "the logits are");
    /* as ids, up to the third of those that were drawn */
    int64_t ids[16], n = kn_tokenizer_encode(t, text[0], strlen(text[0]), ids, KN_I64);
    char got[64] = "", wanted[64] = "";
    FILE *numbers = fmemopen(got, sizeof got, "w");
    KN_CHECK(n == 11 && kn_write_text(&m, next, NULL, .prompt_ids = ids, .prompt_count = 2,
                                      .print_ids = true, .stop_ids = &ids[4], .stop_count = 1,
                                      .tokens = 9, .ctx = 6, .draw = o, .out = numbers));
    fclose(numbers);
    for (int i = 0; i < 2 || (i < 11 && ids[i] != ids[4]); i++)
        snprintf(wanted + strlen(wanted), sizeof wanted - strlen(wanted), i ? " %d" : "%d",
                 (int)ids[i]);
    KN_CHECK(strcmp(got, wanted) == 0, "%s, should be %s", got, wanted);
    REFUSED(kn_write_text(&m, next, NULL, .prompt = "a", .tokens = 1), "the tokenizer is NULL");
    REFUSED(kn_write_text(&m, next, NULL, .prompt_ids = ids, .print_ids = true), "at least one id");
    KN_CHECK(kn_write_text(&m, next, few, .prompt = "ab", .tokens = 9, .ctx = 6, .draw = o));
    KN_CHECK(kn_training(&m) && kn_grad_mode());
    REFUSED(kn_write_text(&m, no_logits, t, .prompt = "a", .tokens = 1, .ctx = 6),
            "the logits are");
    REFUSED(kn_write_text(&m, next, t, .prompt = "", .tokens = 1, .ctx = 6), "the prompt is empty");
    REFUSED(kn_write_text(&m, next, t, .prompt = "a", .tokens = -1), ".tokens is -1");
    kn_tokenizer_free(t), kn_tokenizer_free(few);
}

/* Several prompts and samples at once, of several lengths and beyond the context: each text is that
 * which its seed gives alone, whole and in its order. */
KN_TEST(language, texts_at_once_as_alone)
{
    enum { PROMPTS = 3, SAMPLES = 3 };
    const kn_prompt prompts[PROMPTS] = { { "ab" },
                                         { .ids = (int64_t[]){ 3, 0, 4, 1, 5 }, 5 },
                                         { "c" } };
    OWNED_TOKENIZER kn_tokenizer *t = kn_tokenizer_create("char", "abcdefghijk", VOCAB);
    for (int kind = GPT; kind <= OWN_HEAD; kind++)
        for (int how = 0; how < 4; how++) { /* with a cache or without; as ids or texts */
            char got[4096] = "", want[4096] = "";
            kn_module m;
            make_small(&m, kind, KN_F32, 7);
            FILE *out = fmemopen(want, sizeof want, "w");
            kn_sample_options o = { .temperature = 1.5, .seed = 40 };
            for (int i = 0; i < PROMPTS * SAMPLES; i++, o.seed++) {
                const kn_prompt *p = &prompts[i / SAMPLES];
                fprintf(out, "--- %d of 9: prompt %d, seed %d\n", i + 1, i / SAMPLES + 1, 40 + i);
                KN_CHECK(kn_write_text(&m, NULL, t, .prompt = p->text, .prompt_ids = p->ids,
                                       .prompt_count = p->count, .tokens = 9, .ctx = 6, .draw = o,
                                       .stop_ids = (int64_t[]){ 2 }, .stop_count = 1,
                                       .print_ids = how / 2, .cached = how % 2, .out = out));
                fprintf(out, "\n");
            }
            fclose(out);
            out = fmemopen(got, sizeof got, "w");
            o.seed = 40;
            KN_CHECK(kn_write_text(&m, NULL, t, .prompts = prompts, .prompts_count = PROMPTS,
                                   .samples = SAMPLES, .tokens = 9, .ctx = 6, .draw = o,
                                   .stop_ids = (int64_t[]){ 2 }, .stop_count = 1,
                                   .print_ids = how / 2, .cached = how % 2, .out = out));
            fclose(out);
            KN_CHECK(strcmp(got, want) == 0, "%s\nshould be\n%s", got, want);
            kn_module_free(&m);
        }
    OWNED_MODULE kn_module m;
    make_small(&m, GPT, KN_F32, 7);
    for (int64_t samples = 1; samples < 3; samples++) { /* of no tokens: the prompt alone */
        char got[128] = "";
        FILE *out = fmemopen(got, sizeof got, "w");
        KN_CHECK(kn_write_text(&m, NULL, t, .prompt = "ab", .samples = samples, .out = out));
        fclose(out);
        KN_CHECK(strcmp(got, samples == 1 ? "ab"
                                          : "--- 1 of 2: prompt 1, seed 0\nab\n"
                                            "--- 2 of 2: prompt 1, seed 1\nab\n") == 0,
                 "%s", got);
    }
    REFUSED(kn_write_text(&m, NULL, t, .prompts = (kn_prompt[]){ { "a" }, { "" } },
                          .prompts_count = 2, .tokens = 1),
            "the prompt is empty (number 2)");
    REFUSED(kn_write_text(&m, NULL, t, .prompts = prompts, .prompts_count = 1, .prompt = "a"),
            "give one");
    REFUSED(kn_write_text(&m, NULL, t, .prompts = prompts, .prompts_count = 1, .samples = -1),
            ".samples -1");
    REFUSED(kn_write_text(&m, NULL, t, .prompts_count = 1), "list of .prompts");
    REFUSED(kn_write_text(&m, NULL, NULL, .prompts = &prompts[1], .prompts_count = 1),
            "the tokenizer is NULL");
}

/* -log of what the model gives token i of ids, which sees those from `from` on. */
static double surprise(const kn_family *f, kn_module *m, const int64_t *ids, int64_t from,
                       int64_t i)
{
    double sum = 0, most = -INFINITY;
    IN_SCOPE;
    kn_tensor *y =
        kn_language_next_logits(m, kn_from(KN_I64, KN_CPU, ids + from, KN_SHAPE(1, i - from)));
    const float *logit = kn_data(y);
    for (int64_t k = 0; k < kn_numel(y); k++)
        most = logit[k] > most ? logit[k] : most;
    for (int64_t k = 0; k < kn_numel(y); k++)
        sum += exp(logit[k] - most);
    const double found = log(sum) + most - logit[ids[i]];
    return found;
}

static void note_share(double share, void *arg)
{
    double *last = arg;
    KN_CHECK(share > *last && share <= 1, "%g behind %g", share, *last);
    *last = share;
}

/* Each token once, from the window in which it comes first; texts of any length, batches of any. */
KN_TEST(language, a_text_is_evaluated)
{
    enum { CTX = 6, MOST = 29 };
    const kn_family *f = &kn_gpt_family;
    OWNED_TOKENIZER kn_tokenizer *t = kn_tokenizer_create("byte", NULL, 0);
    OWNED_MODULE kn_module m;
    kn_text_score score;
    uint16_t tokens[MOST];
    int64_t ids[MOST];
    make_small(&m, GPT, KN_F32, 7);
    for (int i = 0; i < MOST; i++)
        ids[i] = tokens[i] = (uint16_t)((i * i + 3 * i) % VOCAB);
    for (int64_t n = 2; n <= MOST; n = n < 9 ? n + 1 : n + 5)
        for (int64_t stride = 1; stride <= CTX; stride++) {
            OWNED_TEXT kn_text *text = kn_text_of_ids(tokens, n, VOCAB);
            double sum = 0, share = 0;
            for (int64_t i = 1; i < n; i++) {
                int64_t from = 0; /* of the first window that holds token i as a target */
                while (from + CTX < i)
                    from += stride;
                sum += surprise(f, &m, ids, from, i);
            }
            KN_CHECK(kn_text_evaluate(&m, kn_language_loss, text, &score, .ctx = CTX,
                                      .stride = stride, .batch = 1 + n % 3, .tokenizer = t,
                                      .comm = kn_comm_self(), .tell = note_share,
                                      .tell_arg = &share));
            KN_CHECK(share == 1);
            KN_CHECK(score.tokens == n - 1 && score.bytes == n - 1);
            KN_CHECK(fabs(score.loss - sum / (double)(n - 1)) < 1e-5,
                     "%d tokens, stride %d: %g, %g", (int)n, (int)stride, score.loss,
                     sum / (double)(n - 1));
        }
    kn_text *one = kn_text_of_ids(tokens, 1, VOCAB), *two = kn_text_of_ids(tokens, 2, VOCAB);
    REFUSED(kn_text_evaluate(&m, kn_language_loss, one, &score, .ctx = CTX, .comm = kn_comm_self()),
            "the text has 1 tokens");
    REFUSED(kn_text_evaluate(&m, kn_language_loss, two, &score, .ctx = CTX, .stride = 7),
            ".stride 7");
    kn_text_free(one), kn_text_free(two);
}
