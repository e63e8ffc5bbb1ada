/* tests/models/vision_input_test.c: what a checkpoint records of a model's images: the labels of
 * its classes, sizes, means and deviations; damaged ones are refused. */
#include "tests/models/small_models.h"

/* "é" so many times, behind front. */
static const char *many(const char *front, int count, char *buf)
{
    strcpy(buf, front);
    for (int i = 0; i < count; i++)
        strcat(buf, "\xc3\xa9");
    return buf;
}

KN_TEST(vision_input, labels_are_text_for_json_xml_and_terminals)
{
    char a[256], b[256];
    const struct {
        const char *name, *label;
    } is[] = {
        { "cat", "cat" },
        { "", "" },
        { "a b<&>", "a b<&>" },
        { "tab\tnew\nesc\x1b[31m\x7f", "tab?new?esc?[31m?" },
        { "caf\xe9", "caf?" },
        { "caf\xc3\xa9", "caf\xc3\xa9" },
        { "\xc2\x9b"
          "2J",
          "?2J" }, /* a control character of two bytes */
        { "\xed\xa0\x80", "???" },
        { "\xc3", "?" },
    };
    for (size_t i = 0; i < sizeof is / sizeof *is; i++) {
        char label[KN_LABEL_SIZE];
        kn_vision_label(label, is[i].name);
        KN_CHECK(strcmp(label, is[i].label) == 0, "%s is %s", is[i].name, label);
    }
    for (int x = 0; x < 2; x++) { /* only whole characters */
        char label[KN_LABEL_SIZE];
        kn_vision_label(label, many(x ? "x" : "", 60, a));
        KN_CHECK(strcmp(label, many(x ? "x" : "", 31, b)) == 0, "%s", label);
    }
}

KN_TEST(vision_input, inputs_of_strangers_are_checked)
{
    const struct {
        const char *from, *to, *error;
    } bad[] = {
        { NULL, NULL, NULL },
        { "\"std\": [0.5,", "\"std\": [0.0,", "std should be above 0" },
        { "\"std\": [0.5,", "\"std\": [-0.5,", "std should be above 0" },
        { "\"std\": [0.5,", "\"std\": [", "doesn't hold 3 numbers" },
        { "\"mean\": [0.5,", "\"mean\": [\"a\",", "doesn't hold 3 numbers" },
        { "\"input_size\": [3, 8, 8]", "\"input_size\": [3, 65536, 65536]", "from 1 to 4096" },
        { "\"input_size\": [3, 8, 8]", "\"input_size\": [3, 8, 9]", "squares of 1 or 3" },
        { "\"input_size\": [3, 8, 8]", "\"input_size\": [1, 8, 8]",
          "the model takes images of 3 x 8 x 8" },
        { "\"input_size\": [3, 8, 8]", "\"input_size\": [3, 16, 16]", "takes images of 3 x 8 x 8" },
        { "\"label_names\"", "\"other\"", "aren't 2 names" },
    };
    char label[2][KN_LABEL_SIZE] = { "cat", "dog" };
    const kn_vision_input in = { 3, 8, 2, { 0.5, 0.5, 0.5 }, { 0.5, 0.5, 0.5 }, label };
    const kn_vision_sizes sizes = { .channels = 3, .side = 8, .classes = 2, .patch = 4 };
    kn_model_config c = small_config(VIT), read;
    kn_module m = { 0 };
    KN_CHECK(kn_vision_fit(&c, &sizes) && kn_config_init(&m, &c, KN_F32, KN_META) &&
             kn_materialize(&m, KN_CPU, 1));
    char *text = kn_vision_config_text(&c, &in);
    KN_CHECK(text != NULL);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kn_vision_input got = { 0 };
        kn_checkpoint *from = saved_with(&m, text, bad[i].from, bad[i].to);
        KN_CHECK(from != NULL);
        const bool ok = kn_vision_config_saved(from, &read, &got);
        KN_CHECK(ok == !bad[i].error, "%s", bad[i].to);
        if (bad[i].error)
            KN_CHECK_ERROR(bad[i].error);
        else
            KN_CHECK(got.side == 8 && got.std[2] == 0.5 && strcmp(got.label[1], "dog") == 0);
        kn_host_free(got.label);
        kn_checkpoint_free(from);
    }
    kn_host_free(text);
    kn_module_free(&m);
}
