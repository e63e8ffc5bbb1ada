/* tests/models/gpt_test.c: the GPT's loss and gradients, and the text that it writes; family_test.c
 * has what every model does. */
#include "models/gpt.h"
#include "models/sample.h"
#include "tests/kn_test.h"
#include "tests/models/ids.h"

static const kn_gpt_config small = { .layers = 2, .heads = 2, .embd = 8, .ctx = 6, .vocab = 11 };

static void begin(kn_gpt *g, kn_gpt_config c, kn_dtype dtype)
{
    KN_CHECK(kn_gpt_init(g, c, dtype, KN_META) && kn_materialize(g, KN_CPU, 7), "%s", kn_error());
}

KN_TEST(gpt, begins_at_the_uniform_loss_and_sees_no_future)
{
    kn_gpt g = { 0 };
    begin(&g, small, KN_F32);
    kn_scope s = kn_scope_begin();
    double loss = kn_item(kn_gpt_loss(&g, ids_of(2, 6, 0), ids_of(2, 6, 1)));
    KN_CHECK(fabs(loss - log(11)) < 0.05, "loss %g", loss);
    float whole[2 * 6 * 11], part[2 * 4 * 11], last[2 * 11];
    int64_t ids[8];
    KN_CHECK(kn_to_host(kn_gpt_logits(&g, ids_of(2, 6, 0)), whole, sizeof whole));
    for (int i = 0; i < 8; i++) /* the first four of each row of six */
        ids[i] = (3 * (i / 4 * 6 + i % 4)) % small.vocab;
    kn_tensor *x = kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(2, 4));
    KN_CHECK(kn_to_host(kn_gpt_logits(&g, x), part, sizeof part));
    KN_CHECK(kn_to_host(kn_gpt_next_logits(&g, x), last, sizeof last));
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 4 * 11; i++)
            KN_CHECK(fabsf(whole[r * 66 + i] - part[r * 44 + i]) < 1e-5f, "row %d, %d", r, i);
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 11; i++)
            KN_CHECK(fabsf(last[r * 11 + i] - part[r * 44 + 33 + i]) < 1e-5f);
    kn_scope_end(s);
    kn_module_free(&g);
}

static double loss_value(kn_gpt *g)
{
    kn_scope s = kn_scope_begin();
    double loss = kn_item(kn_gpt_loss(g, ids_of(2, 6, 0), ids_of(2, 6, 4)));
    kn_scope_end(s);
    return loss;
}

/* Central differences in f64 at a few elements of every parameter. */
KN_TEST(gpt, gradients_are_those_of_the_loss)
{
    kn_gpt g = { 0 };
    begin(&g, small, KN_F64);
    kn_scope s = kn_scope_begin();
    KN_CHECK(kn_backward(kn_gpt_loss(&g, ids_of(2, 6, 0), ids_of(2, 6, 4))), "%s", kn_error());
    const kn_param *p;
    int n = kn_params(&g, &p);
    for (int i = 0; i < n; i++) {
        double *w = kn_data(p[i].tensor), *grad = kn_data(kn_param_grad(&p[i])), h = 1e-5;
        KN_CHECK(w && grad, "%s", p[i].name);
        for (int64_t k = 0; k < p[i].numel; k += 1 + p[i].numel / 3) {
            double kept = w[k];
            w[k] = kept + h;
            double up = loss_value(&g);
            w[k] = kept - h;
            double down = loss_value(&g);
            w[k] = kept;
            double want = (up - down) / (2 * h);
            KN_CHECK(fabs(want - grad[k]) < 1e-7 + 1e-5 * fabs(want), "%s[%lld]: %g, should be %g",
                     p[i].name, (long long)k, grad[k], want);
        }
    }
    kn_scope_end(s);
    kn_module_free(&g);
}

KN_TEST(gpt, refuses_tokens_that_do_not_fit)
{
    kn_gpt g = { 0 };
    begin(&g, small, KN_F32);
    kn_scope s = kn_scope_begin();
    KN_CHECK(!kn_gpt_logits(&g, ids_of(1, 7, 0)) && strstr(kn_error(), "context"));
    kn_clear_error();
    KN_CHECK(!kn_gpt_loss(&g, ids_of(1, 6, 0), ids_of(2, 6, 0)) && strstr(kn_error(), "targets"));
    kn_clear_error();
    kn_scope_end(s);
    kn_module_free(&g);
}

static kn_tensor *next_logits(void *g, kn_tensor *ids)
{
    return kn_gpt_next_logits(g, ids);
}

/* One position, all positions: the same text. Logits of another shape are refused. */
static kn_tensor *all_logits(void *g, kn_tensor *ids)
{
    return kn_gpt_logits(g, ids);
}

static kn_tensor *no_logits(void *g, kn_tensor *ids)
{
    return kn_transpose(kn_gpt_next_logits(g, ids), 0, 1);
}

KN_TEST(gpt, writes_from_any_logits)
{
    kn_gpt g = { 0 };
    char a[64] = "", b[64] = "", c[64] = "";
    const kn_sample_options o = { .temperature = 1, .seed = 5 };
    kn_tokenizer *t = kn_tokenizer_create("char", "abcdefghijk", 11);
    FILE *one = fmemopen(a, sizeof a, "w"), *all = fmemopen(b, sizeof b, "w"),
         *kept = fmemopen(c, sizeof c, "w");
    begin(&g, small, KN_F32);
    KN_CHECK(kn_write_text(&g, next_logits, t, .prompt = "ab", .tokens = 9, .ctx = 6, .draw = o,
                           .out = one) &&
                 kn_write_text(&g, all_logits, t, .prompt = "ab", .tokens = 9, .ctx = 6, .draw = o,
                               .out = all) &&
                 kn_write_text(&g, all_logits, t, .prompt = "ab", .tokens = 9, .ctx = 6, .draw = o,
                               .cached = true, .out = kept),
             "%s", kn_error());
    fclose(one);
    fclose(all);
    fclose(kept);
    KN_CHECK(strlen(a) == 11 && strcmp(a, b) == 0 && strcmp(a, c) == 0, "%s, %s, %s", a, b, c);
    KN_CHECK(!kn_write_text(&g, no_logits, t, .prompt = "a", .tokens = 1, .cached = true));
    KN_CHECK_ERROR("the logits are");
    KN_CHECK(kn_training(&g) && kn_grad_mode());
    KN_CHECK(!kn_write_text(&g, no_logits, t, .prompt = "a", .tokens = 1, .ctx = 6));
    KN_CHECK_ERROR("the logits are");
    KN_CHECK(!kn_write_text(&g, next_logits, t, .prompt = "", .tokens = 1, .ctx = 6));
    KN_CHECK_ERROR("the prompt is empty");
    KN_CHECK(!kn_write_text(&g, next_logits, t, .prompt = "a", .tokens = -1));
    KN_CHECK_ERROR(".tokens is -1");
    kn_tokenizer_free(t);
    kn_module_free(&g);
}

KN_TEST(gpt, writes_to_a_file_or_nowhere)
{
    kn_gpt g = { 0 };
    char text[64] = "";
    const kn_sample_options o = { .temperature = 1, .seed = 5 };
    kn_tokenizer *t = kn_tokenizer_create("char", "abc", 3);
    FILE *out = fmemopen(text, sizeof text, "w");
    begin(&g, small, KN_F32);
    KN_CHECK(t && out, "%s", kn_error());
    KN_CHECK(kn_write_text(&g, next_logits, t, .prompt = "ab", .tokens = 9, .ctx = small.ctx,
                           .draw = o, .out = out),
             "%s", kn_error());
    fclose(out);
    KN_CHECK(strncmp(text, "ab", 2) == 0, "%s", text);
    KN_CHECK(
        kn_write_text(&g, next_logits, t, .prompt = "ab", .tokens = 9, .ctx = small.ctx, .draw = o),
        "%s", kn_error());
    kn_tokenizer_free(t);
    kn_module_free(&g);
}
