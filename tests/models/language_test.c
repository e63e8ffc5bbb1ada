/* tests/models/language_test.c: the families of language models behind one interface: choices,
 * sizes, configurations in a checkpoint. */
#include "models/language.h"
#include "tests/kn_test.h"
#include "tests/models/temp.h"

static const kn_language_config small[] = {
    { &kn_gpt_family, { .gpt = { .layers = 2, .heads = 2, .embd = 8, .ctx = 6, .vocab = 11 } } },
    { &kn_llama_family,
      { .llama = { .layers = 2, .heads = 4, .kv_heads = 2, .embd = 16, .ctx = 6, .vocab = 11 } } },
};
enum { FAMILIES = sizeof small / sizeof *small };

/* Each word of .choices but the first is a preset of the family. */
KN_TEST(language, choices_are_presets)
{
    for (int i = 0; i < FAMILIES; i++) {
        const kn_family *f = small[i].family;
        char list[512], *rest = list;
        snprintf(list, sizeof list, "%s", f->choices);
        for (int n = 0; rest; n++) {
            const char *word = strsep(&rest, "|");
            kn_language_config c = { .family = f };
            KN_CHECK(kn_family_of_choice(word) == f, "%s", word);
            KN_CHECK(kn_family_is_own_size(f, word) == (n == 0), "%s", word);
            if (n == 0)
                continue;
            KN_CHECK(f->preset(word, &c), "%s", kn_error());
            kn_language_sizes s = f->sizes(&c);
            KN_CHECK(s.layers > 0 && s.heads % s.kv_heads == 0 && s.vocab >= 32000, "%s", word);
        }
    }
    KN_CHECK(!kn_family_of_choice("llam") && !kn_family_of_choice("") &&
             !kn_family_of_choice("llama9"));
}

static bool same_sizes(kn_language_sizes a, kn_language_sizes b)
{
    return a.layers == b.layers && a.heads == b.heads && a.kv_heads == b.kv_heads &&
           a.embd == b.embd && a.hidden == b.hidden && a.ctx == b.ctx && a.vocab == b.vocab;
}

KN_TEST(language, any_family_computes_and_is_saved)
{
    for (int i = 0; i < FAMILIES; i++) {
        const kn_family *f = small[i].family;
        kn_language_model m = { 0 };
        kn_language_config read;
        char text[KN_LANGUAGE_CONFIG_TEXT];
        KN_CHECK(kn_language_init(&m, &small[i], KN_F32, KN_META) && kn_materialize(&m, KN_CPU, 3),
                 "%s", kn_error());
        kn_scope scope = kn_scope_begin();
        const int64_t ids[4] = { 3, 1, 4, 1 };
        kn_tensor *x = kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(1, 4));
        double loss = kn_item(f->loss(&m, x, x));
        KN_CHECK(loss > 1 && loss < 4, "%s: %g", f->name, loss);
        kn_tensor *next = kn_language_next_logits(&m, x);
        KN_CHECK(next && kn_ndim(next) == 2 && kn_size(next, 1) == 11, "%s", kn_error());
        kn_scope_end(scope);
        KN_CHECK(f->flops_per_token(&small[i], 6) > 6.0 * 11 * f->sizes(&small[i]).embd);
        KN_CHECK(kn_language_config_text(&small[i], text) &&
                     kn_checkpoint_save(temp_path("run"), &m, .config = text),
                 "%s", kn_error());
        kn_checkpoint *c = kn_checkpoint_open(temp_path("run"), NULL);
        KN_CHECK(kn_language_config_saved(c, &read) && read.family == f, "%s", kn_error());
        kn_language_sizes a = f->sizes(&small[i]), b = f->sizes(&read);
        KN_CHECK(same_sizes(a, b), "%s", text);
        const kn_family *other = small[1 - i].family; /* which refuses it */
        KN_CHECK(!other->saved(c, &read));
        KN_CHECK_ERROR(i ? "the model is a llama, not a GPT" : "the model is a gpt2, not a Llama");
        kn_checkpoint_free(c);
        kn_module_free(&m);
        remove_temp();
    }
}

/* The first checkpoints of GPTs had no type; a type that isn't there is refused. */
KN_TEST(language, the_type_in_a_checkpoint)
{
    static const struct {
        const char *text, *error;
    } saved[] = {
        { "{\"layers\": 2, \"heads\": 2, \"embd\": 8, \"ctx\": 6, \"vocab\": 11}", NULL },
        { "{\"model_type\": \"mamba\"}", "the model is a mamba; there are gpt2, llama" },
        { "{\"model_type\": 3, \"layers\": 2}", "not a GPT" },
        { NULL, "of another model than a GPT" },
    };
    kn_language_model m = { 0 };
    KN_CHECK(kn_language_init(&m, &small[0], KN_F32, KN_META) && kn_materialize(&m, KN_CPU, 3));
    for (size_t i = 0; i < sizeof saved / sizeof *saved; i++) {
        kn_language_config read = { 0 };
        KN_CHECK(kn_checkpoint_save(temp_path("run"), &m, .config = saved[i].text));
        kn_checkpoint *c = kn_checkpoint_open(temp_path("run"), NULL);
        KN_CHECK(kn_language_config_saved(c, &read) == !saved[i].error, "%s", kn_error());
        if (saved[i].error)
            KN_CHECK_ERROR(saved[i].error);
        else
            KN_CHECK(read.family == &kn_gpt_family && read.gpt.vocab == 11);
        kn_checkpoint_free(c);
    }
    kn_module_free(&m);
    remove_temp();
}
