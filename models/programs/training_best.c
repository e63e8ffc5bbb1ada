/* models/programs/training_best.c: the checkpoint with the best evaluation. Its configuration has
 * one key more, "evaluation", so that one file holds the model's save and its measure. */
#include "comm/comm.h"
#include "kernels/error.h"
#include "models/programs/training.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char KEY[] = "evaluation";

/* The configuration with the evaluation; for free. NULL with an error. */
static char *with_evaluation(const char *config, const step_report *p)
{
    json_t *j = json_loads(config ? config : "{}", 0, NULL);
    json_t *e = json_pack("{s:I, s:f}", "step", (json_int_t)p->step, "val_loss", p->val_loss);
    bool ok = j && e && json_object_set(j, KEY, e) == 0;
    if (ok && p->has_accuracy)
        ok = json_object_set_new(e, "accuracy", json_real(p->accuracy)) == 0;
    char *text = ok ? json_dumps(j, 0) : NULL;
    json_decref(e);
    json_decref(j);
    if (!text)
        kn_fail("--keep-best: no memory");
    return text;
}

static bool read_evaluation(best *b, const kn_checkpoint *c)
{
    json_t *j = json_loads(kn_checkpoint_config(c), 0, NULL);
    const json_t *e = json_object_get(j, KEY), *accuracy = json_object_get(e, "accuracy"),
                 *value = accuracy ? accuracy : json_object_get(e, "val_loss");
    b->accuracy = accuracy != NULL;
    b->value = json_number_value(value);
    b->step = json_integer_value(json_object_get(e, "step"));
    bool ok = json_is_number(value) && isfinite(b->value) && b->step > 0;
    json_decref(j);
    return ok || kn_fail("%s holds a checkpoint that --keep-best didn't save; move it away, or "
                         "leave --keep-best out",
                         b->dir);
}

bool best_begin(training *t, bool goes_on)
{
    best *b = &t->best;
    if (snprintf(b->dir, sizeof b->dir, "%s/best", t->plan.out) >= (int)sizeof b->dir)
        return kn_fail("--out: the path is too long");
    float there = kn_run_folder_has_checkpoint(b->dir);
    if (kn_comm_size(t->world) > 1 &&
        !kn_all_reduce_max(t->world, &there, 1, kn_compute_stream(KN_CPU), "best checkpoint"))
        return false;
    if (there == 0 || (!goes_on && t->plan.overwrite))
        return true;
    if (!goes_on)
        return kn_fail("%s already holds a checkpoint: choose another --out, or replace it with "
                       "--overwrite",
                       b->dir);
    kn_checkpoint *c = kn_checkpoint_open(b->dir, t->world);
    bool ok = c && read_evaluation(b, c);
    kn_checkpoint_free(c);
    return ok;
}

static bool is_better(const best *b, const step_report *p)
{
    const double value = p->has_accuracy ? p->accuracy : p->val_loss;
    if (!isfinite(value) || !isfinite(p->val_loss))
        return false;
    if (b->step == 0 || b->accuracy != p->has_accuracy)
        return true;
    return b->accuracy ? value > b->value : value < b->value;
}

bool best_keep(training *t, const step_report *p)
{
    const plan *n = &t->plan;
    best *b = &t->best;
    if (!b->dir[0] || !p->has_val || !is_better(b, p))
        return true;
    char *config = with_evaluation(n->config, p);
    bool ok = config && kn_checkpoint_save(b->dir, t->model, .comm = t->world, .step = p->step,
                                           .optim = t->optim, .scaler = t->scaler, .ema = t->ema,
                                           .config = config, .tokenizer = n->tokenizer,
                                           .options = t->options);
    free(config);
    if (ok) {
        b->step = p->step;
        b->accuracy = p->has_accuracy;
        b->value = p->has_accuracy ? p->accuracy : p->val_loss;
    }
    return ok;
}

void best_print(const training *t)
{
    const best *b = &t->best;
    if (!b->dir[0] || !first_rank(t))
        return;
    if (b->step == 0)
        printf("\nbest: no evaluation yet\n");
    else if (b->accuracy)
        printf("\nbest: step %lld with %.2f %% right, kept in %s\n", (long long)b->step,
               100 * b->value, b->dir);
    else
        printf("\nbest: step %lld with a validation loss of %.4f, kept in %s\n", (long long)b->step,
               b->value, b->dir);
}
