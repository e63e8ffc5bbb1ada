/* models/programs/training_table.c: a run's printed output: the table at the start, progress, the
 * end. */
#include "comm/comm_internal.h"
#include "kernels/device.h"
#include "kernels/error_internal.h"
#include "kernels/kernels.h"
#include "models/programs/stop.h"
#include "models/programs/training.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void print_sharding(const training *t)
{
    const settings *s = t->s;
    const kn_options *o = t->options;
    report_row("strategy", "%s", kn_options_value(o, "strategy"));
    report_row("mesh", "%d replica%s of %d shard%s", s->mesh.replicas,
               s->mesh.replicas == 1 ? "" : "s", s->mesh.shards, s->mesh.shards == 1 ? "" : "s");
    report_row("layout", "%s", kn_options_value(o, "layout"));
    report_row("dtypes", "%s computes, %s reduces%s%s, f32 masters", kn_options_value(o, "dtype"),
               kn_options_value(o, "reduce-dtype"), s->hook ? " through " : "",
               s->hook ? kn_options_value(o, "hook") : "");
}

static void print_memory(const training *t, const kn_fsdp_memory *m)
{
    char a[32], b[32], states[32];
    snprintf(states, sizeof states, "%s's", settings_optim_name(t->s));
    report_row("memory a rank", "%s parameters, gradients and %s, %s gathered and unreduced",
               report_bytes((double)(m->param + m->grad + m->optim - m->pinned), a, sizeof a),
               states, report_bytes((double)(m->gathered + m->unreduced), b, sizeof b));
    if (t->replay)
        report_row("step as a graph", "%s%s", kn_replay_why(t->replay) ? "no: " : "from step 3 on",
                   kn_replay_why(t->replay) ? kn_replay_why(t->replay) : "");
    if (m->pinned)
        report_row("on the host", "%s parameters, gradients and %s, page-locked",
                   report_bytes((double)m->pinned, a, sizeof a), states);
    else if (t->s->offload)
        report_row("in the store", "%s parameters, gradients and %s, in %s",
                   report_bytes((double)m->store, a, sizeof a), states, t->s->offload);
}

/* The bytes that an asynchronous save takes while it is written. */
static bool print_copy(training *t)
{
    char a[32];
    if (!t->s->async_save)
        return true;
    int64_t bytes = kn_checkpoint_copy_bytes(&t->model, .optim = t->optim, .ema = t->ema);
    if (bytes >= 0 && first_rank(t))
        report_row("copy of a save", "%s on rank 0, while it is written",
                   report_bytes((double)bytes, a, sizeof a));
    return bytes >= 0;
}

/* Beside the optimizer's state, wherever that is. */
static void print_averages(training *t)
{
    char a[32];
    const kn_param *p;
    double bytes = 0;
    for (int i = 0, n = kn_params(&t->model, &p); t->ema && i < n; i++) {
        const kn_tensor *value = kn_ema_value(t->ema, i);
        if (value)
            bytes += (double)kn_numel(value) * (double)kn_dtype_size(kn_dtype_of(value));
    }
    if (t->ema)
        report_row("averages", "%s a rank, beside the optimizer's state",
                   report_bytes(bytes, a, sizeof a));
}

static void print_products(const training *t)
{
    const kn_products asked = (kn_products)t->s->f32_products, taken = kn_f32_products(t->device);
    const char *variable = getenv("KNAP_F32_PRODUCTS");
    if (asked != taken)
        report_row("f32 products", "%s: %s was asked for, which this %s doesn't have",
                   kn_products_name(taken), kn_products_name(asked),
                   t->device == KN_CUDA ? "gpu" : "cpu");
    else if (asked || t->device == KN_CUDA)
        report_row("f32 products", "%s", kn_products_name(taken));
    if (variable && *variable)
        report_row("not read", "KNAP_F32_PRODUCTS=%s; --f32-products is", variable);
}

bool print_run(training *t, const kn_fsdp_memory *m)
{
    if (!first_rank(t))
        return print_copy(t);
    report_row("ranks", "%d (%s)", kn_comm_size(t->world), kn_comm_backend(t->world));
    print_sharding(t);
    report_row("threads a rank", "%d", kn_threads());
    report_row("instruction set", "%s", kn_cpu_isa());
    report_row("libraries", "%s", kn_cpu_libraries());
    print_products(t);
    if (t->device == KN_CPU && !kn_f32_products(KN_CPU) && kn_cpu_choices())
        report_row("algorithms", "%s", kn_cpu_choices());
    if (t->device == KN_CUDA) {
        const char *gpu = kn_cuda_describe();
        report_row("gpu", "%s, NCCL %s", gpu ? gpu : "n/a", kn_comm_nccl_version());
        for (int i = 0; kn_cuda_lacks(i); i++)
            report_row("slow here", "%s", kn_cuda_lacks(i));
        for (int i = 0; kn_comm_nccl_lacks(t->world, i); i++)
            report_row("slow here", "%s", kn_comm_nccl_lacks(t->world, i));
        if (kn_cuda_choices())
            report_row("algorithms", "%s", kn_cuda_choices());
        report_row("deterministic", "%s", t->s->deterministic ? "yes" : "no");
    }
    print_memory(t, m);
    print_averages(t);
    if (!print_copy(t))
        return false;
    if (t->from)
        print_resumed(t);
    printf("\n");
    return fflush(stdout) == 0 || kn_fail_system("cannot write to standard output: %m");
}

void print_plot(const training *t)
{
    if (!t->plot)
        return;
    t->plot->line[TRAINED].name = "loss";
    t->plot->line[VALIDATED].name = "val";
    chart_print(stdout, &(chart){ .below = "steps", .line = t->plot->line, .lines = LOSSES }, 12);
    fflush(stdout);
}

void report_step(training *t, const step_report *p)
{
    if (!first_rank(t))
        return;
    if (!progress_step(&t->progress, p) && !t->output_error)
        t->output_error = errno;
    if (t->plot)
        losses_add(t->plot, p);
    if (t->curves)
        losses_add(t->curves, p);
    if ((t->log && !log_step(t->log, p)) || t->output_error)
        stop_request();
}

/* Prints the GPU memory reserved from the driver, and how fragmented its free part is. */
void print_gpu_memory(const training *t)
{
    char a[32], b[32];
    if (t->device != KN_CUDA || !first_rank(t))
        return;
    kn_cuda_memory_stats m = kn_cuda_memory_read();
    int64_t idle = m.reserved - m.live;
    printf("\ngpu memory: %s reserved at most; of %s that are free in it now, %.0f %% are in "
           "pieces smaller "
           "than the largest\n",
           report_bytes((double)m.peak_reserved, a, sizeof a),
           report_bytes((double)idle, b, sizeof b),
           idle > 0 ? 100 - 100 * (double)m.largest_free / (double)idle : 0);
    printf("beside it: %s of CUDA, its libraries, NCCL's channels and other programs\n",
           report_bytes((double)(m.device_total - m.device_free - m.reserved), a, sizeof a));
}

void print_saved(const training *t, int64_t step)
{
    if (!first_rank(t))
        return;
    printf(t->s->out ? "\nsaved after step %lld, as SIGUSR1 asked; the run goes on\n"
                     : "\nstep %lld: SIGUSR1 asked for a save, but no --out DIR was given\n",
           (long long)step);
    fflush(stdout); /* a file shows it now, too */
}

void print_help(const training *t, const char *program, const char *about)
{
    char text[512];
    if (!first_rank(t))
        return;
    snprintf(
        text, sizeof text,
        "%s\n\nSignals: SIGUSR1 saves and goes on. SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR2,\n"
        "SIGPWR and SIGXCPU (ulimit -St) save and stop.",
        about);
    kn_options_help(t->options, stdout, program, text);
}

void print_stopped(const training *t, int64_t step)
{
    if (!first_rank(t))
        return;
    if (t->early) {
        printf("\nstopped early after step %lld of %lld: %lld evaluations without a better one\n",
               (long long)step, (long long)t->s->steps, (long long)t->worse);
        return;
    }
    printf("\nstopped after step %lld of %lld; ", (long long)step, (long long)t->s->steps);
    if (!t->s->out) {
        printf("nothing was saved: no --out DIR was given\n");
        return;
    }
    printf("saved. To go on: %s --resume %s%s\n", t->program, t->s->out,
           t->command ? t->command : "");
}

void print_evaluation(const training *t, const step_report *p)
{
    char text[96];
    const char *of = t->from ? kn_checkpoint_folder(t->from) : kn_options_value(t->options, "init");
    if (first_rank(t))
        printf("\n%s: %s\n", of, report_evaluation(p, text, sizeof text));
}

void print_best(const training *t)
{
    if (!t->s->keep_best || !first_rank(t))
        return;
    if (t->best_step < 0)
        printf("\nbest: no evaluation yet\n");
    else if (t->of->evaluate) /* its score is the share of wrong ones */
        printf("\nbest: step %lld with %.2f %% right, kept in %s/best\n", (long long)t->best_step,
               100 * (1 - t->best), t->s->out);
    else
        printf("\nbest: step %lld with a validation loss of %.4f, kept in %s/best\n",
               (long long)t->best_step, t->best, t->s->out);
}

bool end_output(training *t)
{
    run_log *log = t->log;
    t->log = NULL;
    if (fflush(stdout) != 0 && !t->output_error)
        t->output_error = errno;
    if (!log_close(log))
        return false;
    return !t->output_error || kn_fail("cannot write to standard output: %s; the run stopped there",
                                       strerror(t->output_error));
}
