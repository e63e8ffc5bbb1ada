/* models/programs/trainer.c: a program that trains, from its options to its end. */
#include "comm/comm_internal.h"
#include "kernels/error.h"
#include "models/programs/stop.h"
#include "models/programs/training.h"
#include "nn/summary.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool training_has_steps(const training *t, const char *option)
{
    const settings *s = t->s;
    int64_t all;
    if (__builtin_mul_overflow(s->steps, t->rows, &all) || all > INT64_MAX / 2)
        return kn_fail("%lld steps of %lld rows are more samples than can be counted; give a "
                       "smaller --%s",
                       (long long)s->steps, (long long)t->rows, option);
    if (s->eval_only)
        return t->from || kn_options_given(t->options, "init") ||
               kn_fail("--eval-only evaluates the model of a folder; give --resume or --init");
    if (t->from && t->begin >= s->steps)
        return kn_fail(
            "%s is at step %lld of %lld%s: nothing is left to train; give a larger --%s",
            kn_checkpoint_folder(t->from), (long long)t->begin, (long long)s->steps,
            t->rows == t->rows_then
                ? ""
                : " (steps have other sizes than when it was saved, as with other --ranks)",
            option);
    if (s->patience > 0 && t->worse >= s->patience)
        return kn_fail("%s is behind %lld evaluations without a better one, where --patience %lld "
                       "ends the training; give a larger one, or 0",
                       kn_checkpoint_folder(t->from), (long long)t->worse, (long long)s->patience);
    return s->stop_after == 0 || t->begin < s->stop_after ||
           kn_fail("%s is at step %lld, where --stop-after %lld would stop no more; give a later "
                   "step, or leave it out to train to the end",
                   kn_checkpoint_folder(t->from), (long long)t->begin, (long long)s->stop_after);
}

/* kn_init took --ranks out of the command line; what a run repeats has them. */
static bool know_ranks(training *t)
{
    char text[16];
    snprintf(text, sizeof text, "%d", kn_comm_size(t->world));
    return (!kn_comm_started_ranks() && !kn_options_given(t->options, "ranks")) ||
           kn_options_set(t->options, "ranks", text);
}

/* Makes *o of the command line and the file of --config. */
static bool read_command(training *t, kn_options **o, int argc, char **argv)
{
    *o = t->of->table(t->s) ? kn_options_create(t->s->table, t->s) : NULL;
    return *o && kn_options_parse(*o, argc, argv) &&
           (kn_options_help_wanted(*o) || !t->s->config || kn_options_load(*o, t->s->config));
}

/* Reads these, and opens the checkpoint to resume from, which gives options, too. */
static bool read_options(training *t, int argc, char **argv)
{
    if (!read_command(t, &t->options, argc, argv) || !kn_options_agree(t->options, t->world))
        return false;
    const bool help = kn_options_help_wanted(t->options), fit = !help && t->s->fit;
    if (!help && !fit && !know_ranks(t))
        return false;
    return help || fit || (training_open(t) && training_place(t));
}

/* --summary: a micro-batch's modules and what they cost, before the model takes memory. */
static bool print_summary(training *t)
{
    if (!t->s->summary || !first_rank(t))
        return true;
    if (t->s->recompute)
        kn_family_recompute(t->family, &t->model, true);
    kn_scope scope = kn_scope_begin();
    bool ok = kn_summary(stdout, &t->model, t->of->example(t)) && fflush(stdout) == 0;
    kn_scope_end(scope);
    return ok;
}

/* Fills the model, the optimizer, whose options are the settings', and what goes with them from the
 * checkpoint, if the run goes on. */
static bool load(training *t)
{
    return !t->from || kn_checkpoint_load(t->from, &t->model, .optim = t->optim,
                                          .scaler = t->scaler, .ema = t->ema, .keep_options = true);
}

bool training_shard(training *t, kn_fsdp_wrap_options o)
{
    const kn_comm_hook hook = settings_hook(t->s);
    return kn_fsdp_wrap_(&t->model, t->world, o) &&
           (!hook || kn_fsdp_set_comm_hook(&t->model, hook, NULL, true));
}

bool training_make_optim(training *t)
{
    const settings *s = t->s;
    return (t->optim = settings_optim(s, &t->model)) &&
           (!settings_scaled(s) || (t->scaler = kn_scaler_new(&t->model))) &&
           (s->ema == 0 ||
            (t->ema = kn_ema_new(&t->model, .decay = s->ema, .use_buffers = s->ema_buffers)));
}

void training_free_model(training *t)
{
    kn_scaler_free(t->scaler);
    kn_ema_free(t->ema);
    kn_optim_free(t->optim);
    kn_module_free(&t->model);
    t->scaler = NULL;
    t->ema = NULL;
    t->optim = NULL;
}

static bool shard(training *t)
{
    t->device = settings_device(t->s);
    return training_shard(t, settings_fsdp(t->s, t->family->block_class)) &&
           (!t->of->sharded || t->of->sharded(t));
}

/* What is the same for all steps, and for an evaluation. */
static void set_up(training *t)
{
    kn_seed((uint64_t)t->s->seed);
    kn_set_step(t->begin);
    kn_set_check(t->s->check);
}

/* Makes the optimizer, loads the checkpoint. */
static bool prepare(training *t)
{
    const settings *s = t->s;
    if (!shard(t) || !training_make_optim(t) || !load(t))
        return false;
    set_up(t);
    if (!t->lr.kind)
        t->lr = (kn_schedule){ KN_COSINE, s->lr, s->min_lr, s->warmup, s->steps };
    return kn_ok() && training_begin(t);
}

static void print_model(training *t)
{
    printf("%s\n", t->of->name);
    t->of->print_model(t);
    report_row("parameters", "%lld", (long long)kn_param_count(&t->model));
    t->of->print_data(t);
}

/* The table at the start. Every rank calls it. */
static bool print_table(training *t)
{
    kn_fsdp_memory m = kn_fsdp_predict_optim(t->optim);
    if (first_rank(t))
        print_model(t);
    return print_run(t, &m);
}

/* --eval-only: the model of the checkpoint (averages, where it has some) or of --init, as a
 * training evaluates it; neither claims a folder nor writes into one. */
static bool evaluate_only(training *t)
{
    step_report p = { .step = t->begin, .samples = training_samples(t, t->begin) };
    if (!shard(t) || (t->from && !kn_checkpoint_load(t->from, &t->model)))
        return false;
    set_up(t);
    stop_listen(first_rank(t));
    if (first_rank(t))
        print_model(t);
    if (!evaluate(t, &p) || t->stop)
        return kn_ok();
    print_evaluation(t, &p);
    return (!t->of->end || t->of->end(t)) && end_output(t);
}

static bool train(training *t)
{
    const trainer *of = t->of;
    if (!of->open(t) || t->over)
        return kn_ok();
    if (t->s->eval_only)
        return print_summary(t) && evaluate_only(t);
    if (!print_summary(t) || !prepare(t) || !recording_ready(t) || (of->ready && !of->ready(t)))
        return false;
    stop_listen(first_rank(t));
    bool ok = print_table(t) && training_run(t) && (!of->end || of->end(t));
    return end_output(t) && ok;
}

/* kn_init makes the ranks before the options are read, so --ranks, --threads and --fault of
 * --config join the command line first. NULL: there are none; else the caller frees it, before *o,
 * whose texts it has. An error waits for the ranks, which read the same again. */
static char **with_launch(training *t, kn_options **o, int *argc, char ***argv)
{
    static char *const names[] = { "--ranks", "--threads", "--fault" };
    char **all = NULL;
    if (read_command(t, o, *argc, *argv))
        all = kn_host_alloc(((size_t)*argc + 7) * sizeof *all);
    if (all) {
        int n = 0;
        all[n++] = **argv;
        for (int k = 0; k < 3; k++)
            if (kn_options_given(*o, names[k] + 2)) {
                all[n++] = names[k];
                all[n++] = (char *)kn_options_value(*o, names[k] + 2);
            }
        memcpy(all + n, *argv + 1, (size_t)*argc * sizeof *all); /* and the NULL behind them */
        *argc += n - 1;
        *argv = all;
    }
    kn_clear_error();
    return all;
}

static bool has_option(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], name, strlen(name)) == 0)
            return true;
    return false;
}

int training_main(training *t, int argc, char **argv)
{
    char **all = NULL;
    kn_options *of_launch = NULL;
    t->program = argv[0];
    save_listen();
    const bool fit = has_option(argc, argv, "--fit");
    int launched = fit ? 1 : argc; /* --fit starts no ranks */
    if (!fit && !getenv("KNAP_RANK") && has_option(argc, argv, "--config")) /* no started rank */
        all = with_launch(t, &of_launch, &launched, &argv);
    t->world = kn_init(&launched, &argv);
    if (kn_ok() && read_options(t, fit ? argc : launched, argv)) {
        if (kn_options_help_wanted(t->options))
            print_help(t, t->of->name, t->of->about);
        else if (t->s->fit && !fit)
            kn_fail("--fit is for the command line: it comes before a training, without ranks");
        else if (fit)
            training_fit(t);
        else
            train(t);
    }
    training_end(t);
    training_free_model(t);
    kn_host_free(t->config);
    t->of->free(t);
    kn_options_free(t->options);
    kn_host_free(all);
    kn_options_free(of_launch);
    return kn_finish();
}
