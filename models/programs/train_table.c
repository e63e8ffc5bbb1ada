/* models/programs/train_table.c: what people read of a run of train_gpt: the table at the start, its progress. */
#include "kernels/device.h"
#include "kernels/error.h"
#include "kernels/kernels.h"
#include "models/programs/stop.h"
#include "models/programs/train_run.h"

#include <errno.h>
#include <math.h>
#include <string.h>

static void print_sharding(const settings *s)
{
    char a[32], b[32], c[32];
    report_row("strategy", "%s", settings_word("strategy", s->strategy, a, sizeof a));
    report_row("mesh", "%d replica%s of %d shard%s", s->mesh.replicas,
               s->mesh.replicas == 1 ? "" : "s", s->mesh.shards, s->mesh.shards == 1 ? "" : "s");
    report_row("layout", "%s", settings_word("layout", s->layout, a, sizeof a));
    report_row("dtypes", "%s computes, %s reduces%s%s, f32 masters",
               settings_word("dtype", s->dtype, a, sizeof a),
               settings_word("reduce-dtype", s->reduce_dtype, b, sizeof b),
               s->hook ? " through " : "",
               s->hook ? settings_word("hook", s->hook, c, sizeof c) : "");
}

bool print_table(run *r)
{
    const settings *s = &r->s;
    const kn_gpt_config *c = kn_gpt_config_of(&r->model);
    char a[32], b[32], buf[32];
    kn_fsdp_memory m = kn_fsdp_predict(&r->model);
    if (!first_rank(r))
        return true;
    printf("train_gpt\n");
    report_row("model", "%s: %d layers, %d heads, %lld channels, context %lld, vocabulary %lld",
               settings_word("model", s->model, buf, sizeof buf), c->layers, c->heads,
               (long long)c->embd, (long long)c->ctx, (long long)c->vocab);
    report_row("parameters", "%lld", (long long)kn_param_count(&r->model));
    report_row("text", "%s: %lld tokens to train, %lld to validate", s->data,
               (long long)kn_text_count(r->text, KN_TRAIN),
               (long long)kn_text_count(r->text, KN_VALIDATION));
    report_row("step", "%lld rows of %lld x %lld micro-batches x %d ranks = %lld tokens",
               (long long)s->batch, (long long)s->ctx, (long long)s->accum, kn_comm_size(r->world),
               (long long)(s->batch * s->ctx * s->accum * kn_comm_size(r->world)));
    report_row("ranks", "%d (%s)", kn_comm_size(r->world), kn_comm_backend(r->world));
    print_sharding(s);
    report_row("threads a rank", "%d", kn_threads());
    report_row("instruction set", "%s", kn_cpu_isa());
    report_row("libraries", "%s", kn_cpu_libraries());
    if (settings_device(s) == KN_CUDA) {
        const char *gpu = kn_cuda_describe();
        report_row("gpu", "%s, NCCL %s", gpu ? gpu : "n/a", kn_comm_nccl_version());
        report_row("tf32, deterministic", "%s, %s", s->tf32 ? "yes" : "no",
                   s->deterministic ? "yes" : "no");
    }
    report_row("memory a rank", "%s parameters, gradients and AdamW's, %s gathered and unreduced",
               report_bytes((double)(m.param + m.grad + m.optim - m.pinned), a, sizeof a),
               report_bytes((double)(m.gathered + m.unreduced), b, sizeof b));
    if (r->replay)
        report_row("step as a graph", "%s%s", kn_replay_why(r->replay) ? "no: " : "from step 3 on",
                   kn_replay_why(r->replay) ? kn_replay_why(r->replay) : "");
    if (m.pinned)
        report_row("on the host", "%s parameters, gradients and AdamW's, page-locked",
                   report_bytes((double)m.pinned, a, sizeof a));
    else if (s->offload)
        report_row("in the store", "%s parameters, gradients and AdamW's, in %s",
                   report_bytes((double)m.store, a, sizeof a), s->offload);
    if (r->from)
        report_row("resumed", "%s at step %lld", s->resume, (long long)kn_checkpoint_step(r->from));
    printf("\n");
    return fflush(stdout) == 0 || kn_fail("cannot write to standard output: %s", strerror(errno));
}

void tell(run *r, const step_report *p)
{
    if (!first_rank(r))
        return;
    if (!progress_step(&r->progress, p) && !r->output_error)
        r->output_error = errno;
    if (r->log && !log_step(r->log, p) && !r->log_error)
        r->log_error = errno;
    if (r->output_error || r->log_error)
        stop_ask();
}

/* What GPU memory was taken from the driver, and how much of it lies idle in pieces. */
void say_gpu_memory(const run *r)
{
    char a[32], b[32];
    if (settings_device(&r->s) != KN_CUDA || !first_rank(r))
        return;
    kn_cuda_memory_stats m = kn_cuda_memory_read();
    int64_t idle = m.reserved - m.live;
    printf("\ngpu memory: %s reserved at most; of %s that are free in it now, %.0f %% are in "
           "pieces smaller "
           "than the largest\n",
           report_bytes((double)m.peak_reserved, a, sizeof a),
           report_bytes((double)idle, b, sizeof b),
           idle > 0 ? 100 - 100 * (double)m.largest_free / (double)idle : 0);
}

void say_stopped(const run *r, int64_t step)
{
    if (!first_rank(r))
        return;
    printf("\nstopped after step %lld of %lld; ", (long long)step, (long long)r->s.steps);
    if (r->s.out)
        printf("saved. To go on: %s --resume %s\n", r->program, r->s.out);
    else
        printf("nothing was saved, for lack of --out DIR\n");
}

bool end_output(run *r)
{
    if (r->log && fclose(r->log) != 0 && !r->log_error)
        r->log_error = errno;
    r->log = NULL;
    if (fflush(stdout) != 0 && !r->output_error)
        r->output_error = errno;
    if (r->log_error)
        return kn_fail("cannot write the log %s: %s; the run stopped there", r->s.log,
                       strerror(r->log_error));
    return !r->output_error || kn_fail("cannot write to standard output: %s; the run stopped there",
                                       strerror(r->output_error));
}
