/* models/record.c: options and tokenizer in a checkpoint. */
#include "models/record.h"

#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/options_internal.h"
#include "models/tokens/tokens.h"
#include "tensor/json.h"
#include "tensor/files.h"
#include <jansson.h>
#include <stdio.h>
#include <string.h>

/* A value that the program worked out is told apart: a resumed run works it out again. */
static json_t *value_of(const kn_option_record *r)
{
    return r->origin == KN_VALUE_DERIVED ? json_pack("{s:s}", "derived", r->value)
                                         : json_string(r->value);
}

char *kn_options_text(kn_options *o)
{
    kn_option_record r;
    if (!kn_given(o, "kn_options_text", "the options' struct"))
        return NULL;
    json_t *j = json_object();
    for (int i = 0; j && kn_ok() && kn_options_record(o, i, &r); i++)
        if (r.row->of == KN_OF_TRAINING && !kn_is_utf8(r.value, strlen(r.value)))
            kn_fail("--%s %.200s: this isn't valid UTF-8, as which a checkpoint records it; rename "
                    "the file, or give a link to it",
                    r.name, r.value);
        else if (r.row->of == KN_OF_TRAINING && json_object_set_new(j, r.name, value_of(&r)) != 0) {
            json_decref(j);
            j = NULL;
        }
    return kn_json_copy(j, 0, "the options");
}

char *kn_tokenizer_text(const kn_tokenizer *t)
{
    return kn_given(t, "kn_tokenizer_text", "the tokenizer") ? kn_host_strdup(t->json) : NULL;
}

/* What c records, which the caller drops, and the options in it, which were the whole of it once.
 * NULL: nothing, or with an error. */
static json_t *record_of(const kn_checkpoint *c, json_t **options)
{
    const char *text = kn_checkpoint_record(c);
    json_error_t error;
    json_t *record =
        text ? kn_json_parse(text, strlen(text), 0, "a checkpoint's record", &error) : NULL;
    json_t *all = json_object_get(record, "options");
    *options = all ? all : record;
    return record;
}

/* Its text; NULL: it has none. */
static const char *text_in(const json_t *option)
{
    const json_t *derived = json_object_get(option, "derived");
    return json_string_value(derived ? derived : option);
}

bool kn_checkpoint_option(const kn_checkpoint *c, const char *name, char *buf, size_t size)
{
    if (!kn_given(c, "kn_checkpoint_option", "the checkpoint") ||
        !kn_given(name, "kn_checkpoint_option", "the name") ||
        !kn_given(buf, "kn_checkpoint_option", "the place for the text"))
        return false;
    json_t *options, *record = record_of(c, &options);
    const char *text = text_in(json_object_get(options, name));
    if (text)
        snprintf(buf, size, "%s", text);
    json_decref(record);
    return text != NULL;
}

bool kn_checkpoint_options(const kn_checkpoint *c, kn_options *options)
{
    if (!kn_given(c, "kn_checkpoint_options", "the checkpoint") ||
        !kn_given(options, "kn_checkpoint_options", "the place for the options"))
        return false;
    const char *name;
    json_t *value, *options_then, *record = record_of(c, &options_then);
    bool ok = kn_ok();
    json_object_foreach(options_then, name, value)
    {
        const char *is = text_in(value);
        if (ok && !is)
            ok = kn_fail("%s: option %s in state.json has no text; the checkpoint is damaged",
                         kn_checkpoint_folder(c), name);
        ok = ok && kn_options_restore(options, name, is,
                                      json_is_object(value) ? KN_VALUE_DERIVED : KN_VALUE_RESTORED);
    }
    json_decref(record);
    return ok;
}

kn_tokenizer *kn_checkpoint_tokenizer(const kn_checkpoint *c)
{
    if (!kn_given(c, "kn_checkpoint_tokenizer", "the checkpoint"))
        return NULL;
    size_t size;
    const char *text = kn_checkpoint_file_data(c, KN_TOKENIZER_FILE, &size);
    if (!text) {
        if (kn_ok())
            kn_fail("%s: the checkpoint was saved without a tokenizer", kn_checkpoint_folder(c));
        return NULL;
    }
    return kn_tokenizer_parse(text, size,
                              kn_path_of(kn_checkpoint_folder(c), KN_TOKENIZER_FILE, "").text);
}
