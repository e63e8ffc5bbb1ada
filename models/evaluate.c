/* models/evaluate.c: how well a language model predicts a whole text: windows of its context, each
 * of which is counted behind where the one before ended. */
#include "autograd/autograd.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/sample.h"
#include "models/tokens/tokens.h"

#include <math.h>

typedef struct evaluation {
    void *module;
    kn_loss_fn loss;
    const kn_text *text;
    kn_text_evaluate_options o;
    int64_t count; /* tokens of the text */
    int64_t windows;
    kn_device device;
    int64_t *x, *y; /* [batch, ctx] */
    double sums[2]; /* of the losses of tokens, of their number */
} evaluation;

/* Fills row r with window w, which may lie behind the last: then nothing of it counts. */
static int64_t fill(evaluation *e, int64_t r, int64_t w)
{
    const int64_t ctx = e->o.ctx, from = w * e->o.stride, last = e->count - 1,
                  before = w == 0 ? 0 : from - e->o.stride + ctx; /* predicted already */
    int64_t counted = 0;
    for (int64_t i = 0; i < ctx; i++) {
        const bool there = w < e->windows && from + i < last;
        const bool counts = there && from + i + 1 > before;
        e->x[r * ctx + i] = there ? kn_text_token(e->text, from + i) : 0;
        e->y[r * ctx + i] = counts ? kn_text_token(e->text, from + i + 1) : -100; /* ignored */
        counted += counts;
    }
    return counted;
}

/* Windows from w on, one batch. */
static bool batch(evaluation *e, int64_t w)
{
    const int64_t rows = e->o.batch;
    int64_t counted = 0;
    for (int64_t r = 0; r < rows; r++)
        counted += fill(e, r, w + r);
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_from(KN_I64, e->device, e->x, KN_SHAPE(rows, e->o.ctx)),
              *y = kn_from(KN_I64, e->device, e->y, KN_SHAPE(rows, e->o.ctx));
    kn_tensor *loss = x && y ? e->loss(e->module, x, y) : NULL;
    bool ok = loss || (kn_ok() && kn_fail("kn_text_evaluate: the model gave no loss"));
    if (ok) {
        e->sums[0] += counted > 0 ? kn_item(loss) * (double)counted : 0;
        e->sums[1] += (double)counted;
    }
    kn_scope_end(scope);
    return ok && kn_ok();
}

static bool run(evaluation *e, kn_text_score *out)
{
    kn_comm *comm = e->o.comm;
    const int64_t round = e->o.batch * kn_comm_size(comm); /* windows of a call on every rank */
    bool ok = true;
    for (int64_t w = 0; ok && w < e->windows; w += round) {
        ok = batch(e, w + kn_rank(comm) * e->o.batch);
        if (ok && e->o.tell)
            e->o.tell(fmin(1, (double)(w + round) / (double)e->windows), e->o.tell_arg);
    }
    for (int i = 0; ok && i < 2; i++)
        e->sums[i] = kn_sum_over_ranks(comm, e->sums[i]);
    out->loss = e->sums[0] / e->sums[1];
    out->tokens = (int64_t)e->sums[1];
    return ok && kn_ok();
}

/* The bytes that the predicted tokens stand for. */
static int64_t bytes_of(const kn_text *text, int64_t count, const kn_tokenizer *t)
{
    int64_t bytes = 0;
    for (int64_t i = 1; t && i < count; i++) {
        const int64_t id = kn_text_token(text, i);
        bytes += kn_tokenizer_bytes(t, &id, 1);
    }
    return bytes;
}

bool kn_text_evaluate_(void *module, kn_loss_fn loss, const kn_text *text, kn_text_score *out,
                       kn_text_evaluate_options o)
{
    if (!kn_given(module, "kn_text_evaluate", "the module") ||
        !kn_given(text, "kn_text_evaluate", "the text") ||
        !kn_given(out, "kn_text_evaluate", "the place for the score") ||
        !kn_given((const void *)(uintptr_t)loss, "kn_text_evaluate", "the loss"))
        return false;
    *out = (kn_text_score){ 0 };
    o.comm = o.comm ? o.comm : kn_world() ? kn_world() : kn_comm_self();
    o.stride = o.stride ? o.stride : o.ctx;
    o.batch = o.batch ? o.batch : 1;
    if (o.ctx < 1 || o.ctx > 1 << 24 || o.stride < 1 || o.stride > o.ctx || o.batch < 1 ||
        o.batch > 1 << 20)
        return kn_fail(
            "kn_text_evaluate: .ctx is %lld, .stride %lld and .batch %lld; a stride is 1 "
            "to the context, the others are at least 1",
            (long long)o.ctx, (long long)o.stride, (long long)o.batch);
    const kn_param *p;
    const int64_t count = kn_text_count(text, KN_TRAIN) + kn_text_count(text, KN_VALIDATION);
    if (count < 2)
        return kn_fail("kn_text_evaluate: the text has %lld tokens; a prediction takes two",
                       (long long)count);
    const int64_t behind = count - 1 > o.ctx ? count - 1 - o.ctx : 0;
    const bool cuda = kn_params(module, &p) > 0 && kn_device_of(p[0].tensor) == KN_CUDA;
    evaluation e = { .module = module,
                     .loss = loss,
                     .text = text,
                     .o = o,
                     .count = count,
                     .windows = 1 + (behind + o.stride - 1) / o.stride,
                     .device = cuda ? KN_CUDA : KN_CPU };
    const size_t ids = (size_t)(o.batch * o.ctx);
    e.x = kn_host_alloc(ids * sizeof *e.x);
    e.y = kn_host_alloc(ids * sizeof *e.y);
    bool ok = kn_agree(o.comm, e.x && e.y);
    if (ok) {
        bool training = kn_training(module), mode = kn_set_grad_mode(false);
        kn_train(module, false);
        ok = run(&e, out);
        kn_train(module, training);
        kn_set_grad_mode(mode);
        out->bytes = ok ? bytes_of(text, count, o.tokenizer) : 0;
    }
    kn_host_free(e.x);
    kn_host_free(e.y);
    return ok;
}
