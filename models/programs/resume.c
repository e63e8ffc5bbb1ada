/* models/programs/resume.c: where a training stands, of which data, in a checkpoint's record.
 *
 *   {"options": {...}, "rows": of a step, "before": samples before step 0, "data": "...",
 *    "least": the best score of an evaluation, "worse": evaluations since} */
#include "fsdp/alike.h"
#include "models/programs/training.h"
#include "state/checkpoint_internal.h"
#include "tensor/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The checkpoint's record; the caller drops it. NULL: none. */
static json_t *record_of(const training *t)
{
    json_error_t error;
    const char *text = t->from ? kn_checkpoint_record(t->from) : NULL;
    return text ? kn_json_parse(text, strlen(text), 0, "a checkpoint's record", &error) : NULL;
}

/* ---- the place ------------------------------------------------------------------------------- */

/* An option in steps of the checkpoint becomes as many of this run's steps. */
static bool rescale(training *t, const char *name)
{
    kn_option_record r;
    char text[32];
    int64_t samples;
    for (int i = 0; kn_options_record(t->options, i, &r); i++)
        if (strcmp(r.name, name) == 0)
            break;
    const int64_t then = r.saved ? strtoll(r.saved, NULL, 10) : 0;
    if (r.origin == KN_VALUE_GIVEN || then <= 0 ||
        __builtin_mul_overflow(then, t->rows_then, &samples))
        return kn_ok();
    snprintf(text, sizeof text, "%lld", (long long)(samples / t->rows + (samples % t->rows > 0)));
    return kn_options_set(t->options, name, text);
}

bool training_place(training *t)
{
    const settings *s = t->s;
    const int ranks = kn_comm_size(t->world);
    int64_t samples;
    if (__builtin_mul_overflow(s->batch * s->accum, ranks, &t->rows)) /* both are up to 2^20 */
        return kn_fail("a step has more rows than can be counted; give a smaller --batch");
    t->least = NAN;
    if (!t->from)
        return true;
    json_t *record = record_of(t);
    const json_t *least = json_object_get(record, "least");
    const json_int_t worse = json_integer_value(json_object_get(record, "worse"));
    if (json_is_real(least) && worse >= 0) {
        t->least = json_real_value(least);
        t->worse = worse;
    }
    const int64_t then = json_integer_value(json_object_get(record, "rows")),
                  before = json_integer_value(json_object_get(record, "before"));
    json_decref(record);
    t->rows_then = then > 0 ? then : t->rows;
    if (before < 0 || __builtin_mul_overflow(kn_checkpoint_step(t->from), t->rows_then, &samples) ||
        __builtin_add_overflow(samples, before, &samples))
        return kn_fail("%s: the place of the training in state.json can't be; the checkpoint is "
                       "damaged",
                       kn_checkpoint_folder(t->from));
    t->begin = samples / t->rows;
    t->before = samples % t->rows;
    bool ok = kn_ok();
    for (int i = 0; ok && t->rows != t->rows_then && s->in_steps[i]; i++)
        ok = rescale(t, s->in_steps[i]);
    return ok;
}

int64_t training_samples(const training *t, int64_t step)
{
    return t->before + step * t->rows;
}

/* ---- the data -------------------------------------------------------------------------------- */

bool training_same_data(training *t, const char *text, uint64_t hash)
{
    kn_alike a = { .advice = "give all ranks copies of the same" };
    snprintf(t->data, sizeof t->data, "%s, hash %016llx", text, (unsigned long long)hash);
    bool ok = kn_ok() && kn_alike_add(&a, hash, "--data", "%s", t->data) &&
              kn_alike_agree(&a, 1, t->world, "data");
    kn_alike_free(&a);
    json_t *record = ok ? record_of(t) : NULL;
    const char *then = json_string_value(json_object_get(record, "data"));
    if (then && strcmp(then, t->data) != 0)
        snprintf(t->data_then, sizeof t->data_then, "%s", then);
    json_decref(record);
    if (ok && t->data_then[0] && !t->s->other_data)
        return kn_fail("--data: these are %s; the training in %s has %s. From here on its samples "
                       "would be others: give the same data, or accept these with --other-data",
                       t->data, kn_checkpoint_folder(t->from), t->data_then);
    return ok && kn_ok();
}

/* ---- the model ------------------------------------------------------------------------------- */

bool training_same_model(const training *t, const kn_model_config *now, const kn_model_config *then)
{
    if (!then->family)
        return true;
    const char *dir = kn_checkpoint_folder(t->from);
    if (now->family != then->family || kn_config_preset(now) != kn_config_preset(then))
        return kn_fail("the options make another model, and the checkpoint in %s holds a %s; leave "
                       "--model and the sizes out, or begin anew without --resume",
                       dir, then->family->noun);
    for (const kn_config_field *p = now->family->field; p->kind; p++) {
        if (p->kind == KN_FIELD_FIXED || p->kind == KN_FIELD_NUMBER || p->with)
            continue;
        const double here = kn_config_get(now, p->name, 0), there = kn_config_get(then, p->name, 0);
        if (here != there)
            return kn_fail("the options make a model with %s %g, and the one of the checkpoint in "
                           "%s has %g; leave the option out, or begin anew without --resume",
                           p->name, here, dir, there);
    }
    return true;
}

/* ---- the record ------------------------------------------------------------------------------ */

char *training_record(const training *t)
{
    char *options = kn_options_text(t->options), *text = NULL, least[80] = "";
    const size_t size = options ? strlen(options) + sizeof t->data + sizeof least + 128 : 0;
    if (!isnan(t->least))
        snprintf(least, sizeof least, ", \"least\": %.17e, \"worse\": %lld", t->least,
                 (long long)t->worse);
    if (options && (text = kn_host_alloc(size)))
        snprintf(text, size,
                 "{\"options\": %s, \"rows\": %lld, \"before\": %lld, \"data\": \"%s\"%s}", options,
                 (long long)t->rows, (long long)t->before, t->data, least);
    kn_host_free(options);
    return text;
}

/* ---- the table ------------------------------------------------------------------------------- */

void print_resumed(const training *t)
{
    kn_option_record r;
    const int64_t ranks = json_integer_value(json_object_get(t->from->state, "ranks"));
    report_row("resumed", "%s at step %lld", kn_checkpoint_folder(t->from), (long long)t->begin);
    for (int i = 0; kn_options_record(t->options, i, &r); i++)
        if (r.changed && r.origin != KN_VALUE_DERIVED && strcmp(r.name, "batch") != 0 &&
            strcmp(r.name, "accum") != 0)
            report_row("changed", "--%s %s; %s when it was saved", r.name,
                       *r.value ? r.value : "none", *r.saved ? r.saved : "none");
    if (t->rows != t->rows_then)
        report_row("other steps",
                   "%lld rows a step; %lld, on %lld rank%s, when it was saved: of %lld samples, "
                   "step %lld is now step %lld of %lld",
                   (long long)t->rows, (long long)t->rows_then, (long long)ranks,
                   ranks == 1 ? "" : "s", (long long)training_samples(t, t->begin),
                   (long long)kn_checkpoint_step(t->from), (long long)t->begin,
                   (long long)t->s->steps);
    if (t->data_then[0])
        report_row("other data", "%s; %s when it was saved", t->data, t->data_then);
}
