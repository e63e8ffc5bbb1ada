/* tests/models/said.h: a model of files against what transformers said of it (scripts/peers hf
 * --write): the logits behind a prompt, and the likeliest tokens. */
#ifndef KNAP_TESTS_MODELS_SAID_H
#define KNAP_TESTS_MODELS_SAID_H

#include "autograd/autograd.h"
#include "autograd/functional.h"
#include "models/imported_internal.h"
#include "tests/kn_test.h"

enum { SAID_IDS = 64 };

/* The numbers of a list, into ids[SAID_IDS]. */
static int64_t said_ids(const json_t *list, int64_t *ids)
{
    const size_t n = json_array_size(list);
    for (size_t i = 0; i < n && i < SAID_IDS; i++)
        ids[i] = json_integer_value(json_array_get(list, i));
    return (int64_t)n;
}

static void computes_as_said(const kn_imported *x, const char *path)
{
    json_error_t e;
    int64_t ids[SAID_IDS], wanted[SAID_IDS];
    kn_module m = { 0 };
    json_t *want = json_load_file(path, 0, &e);
    KN_CHECK(want, "%s", path);
    const kn_model_config *c = kn_import_config(x);
    kn_scope scope = kn_scope_begin();
    const bool mode = kn_set_grad_mode(false);
    KN_CHECK(kn_config_init(&m, c, KN_F32, KN_CPU) && kn_import_load(x, &m), "%s", path);
    kn_train(&m, false);
    int64_t n = said_ids(json_object_get(want, "prompt"), ids);
    const int64_t count = said_ids(json_object_get(want, "greedy"), wanted);
    const json_t *list = json_object_get(want, "logits");
    KN_CHECK(count > 0 && json_array_size(list) == (size_t)kn_config_get(c, "vocab", 0));
    for (int64_t k = 0; k < count; k++) {
        kn_tensor *y = kn_language_next_logits(&m, kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(1, n)));
        KN_CHECK(y);
        const float *logit = kn_data(y);
        int64_t best = 0;
        for (int64_t i = 0; i < kn_numel(y); i++) {
            const double theirs = k == 0 ? json_real_value(json_array_get(list, (size_t)i)) : 0;
            KN_CHECK(k > 0 || fabs(logit[i] - theirs) < 1e-4, "%s: logit %d is %g, should be %g",
                     path, (int)i, logit[i], theirs);
            best = logit[i] > logit[best] ? i : best;
        }
        KN_CHECK(best == wanted[k], "%s: token %d is %d, should be %d", path, (int)k, (int)best,
                 (int)wanted[k]);
        ids[n++] = best;
    }
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    kn_module_free(&m);
    json_decref(want);
}

#endif
