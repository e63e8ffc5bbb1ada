/* tests/gpu/replay_trainer.c: the training of replay_trainer.h. */
#include "tests/gpu/replay_trainer.h"

bool trainer_begin(trainer *t, kn_dtype dtype, bool replayed)
{
    kn_gpt_config c = {
        .layers = 2, .heads = 2, .embd = 16, .ctx = 8, .vocab = 50, .dropout = 0.2
    };
    *t = (trainer){ 0 };
    kn_seed(11);
    kn_set_step(0);
    bool ok = kn_gpt_init(&t->model, c, KN_F32, KN_META) &&
              kn_recompute(kn_module_find(&t->model, "transformer.h.1"), true) &&
              kn_fsdp_wrap(&t->model, NULL, .wrap_class = "gpt_block", .device = KN_CUDA,
                           .param_dtype = dtype, .forward_prefetch = true);
    t->opt = ok ? kn_adamw(&t->model, .lr = 1e-2) : NULL;
    kn_scope scope = kn_scope_begin();
    for (int i = 0; i < MICRO; i++) {
        t->x[i] = kn_keep(kn_empty(KN_I64, KN_CUDA, KN_SHAPE(2, 8)));
        t->y[i] = kn_keep(kn_empty(KN_I64, KN_CUDA, KN_SHAPE(2, 8)));
    }
    t->loss = kn_keep(kn_zeros(KN_F32, KN_CUDA, KN_SHAPE(MICRO)));
    t->norm = kn_keep(kn_empty(KN_F32, KN_CUDA, KN_SCALAR));
    kn_scope_end(scope);
    t->replay = replayed && ok ? kn_replay_new(&t->model) : NULL;
    return kn_ok();
}

void trainer_end(trainer *t)
{
    kn_replay_free(t->replay);
    for (int i = 0; i < MICRO; i++) {
        kn_tensor_free(t->x[i]);
        kn_tensor_free(t->y[i]);
    }
    kn_tensor_free(t->loss);
    kn_tensor_free(t->norm);
    kn_optim_free(t->opt);
    kn_module_free(&t->model);
}

bool trainer_step(void *arg)
{
    trainer *t = arg;
    t->calls++;
    for (int i = 0; i < MICRO; i++) {
        kn_tensor *loss = kn_gpt_loss(&t->model, t->x[i], t->y[i]);
        if (!kn_backward(loss) ||
            !kn_copy_(kn_slice(t->loss, 0, i, i + 1), kn_reshape(kn_detach(loss), KN_SHAPE(1))))
            return false;
    }
    kn_tensor *norm = kn_clip_grad_norm(&t->model, 0.05); /* always above the limit */
    return norm && kn_copy_(t->norm, norm) && kn_step(t->opt);
}

bool trainer_feed(trainer *t, int64_t n)
{
    for (int m = 0; m < MICRO; m++) {
        int64_t x[IDS], y[IDS];
        for (int i = 0; i < IDS; i++) {
            x[i] = (i * 7 + n * MICRO + m) % 50;
            y[i] = (i * 7 + 7 + n * MICRO + m) % 50;
        }
        kn_scope s = kn_scope_begin();
        bool ok = kn_copy_(t->x[m], kn_from(KN_I64, KN_CPU, x, KN_SHAPE(2, 8))) &&
                  kn_copy_(t->y[m], kn_from(KN_I64, KN_CPU, y, KN_SHAPE(2, 8)));
        kn_scope_end(s);
        if (!ok)
            return false;
    }
    kn_set_lr(t->opt, 1e-2 / (double)(1 + n));
    return true;
}

bool trainer_read(trainer *t, record *r)
{
    const kn_param *p;
    int n = kn_params(&t->model, &p);
    for (int i = 0; i < n; i++) {
        if (r->values + p[i].numel > VALUES)
            return kn_fail("the model has more than %d values", VALUES);
        if (!kn_param_read(&t->model, i, r->param + r->values))
            return false;
        r->values += p[i].numel;
    }
    r->step = kn_get_step();
    r->optim_steps = kn_optim_steps(t->opt);
    return kn_ok();
}

static bool run_step(trainer *t, kn_step_fn fn, int n, record *r)
{
    kn_scope s = kn_scope_begin();
    bool ok = trainer_feed(t, n) && (t->replay ? kn_replay_step(t->replay, fn, t) : fn(t));
    kn_scope_end(s);
    return ok && kn_to_host(t->loss, r->loss[n], sizeof r->loss[n]) &&
           kn_to_host(t->norm, &r->norm[n], sizeof r->norm[n]);
}

void records_same(const record *a, const record *b, const char *what)
{
    for (int i = 0; i < STEPS; i++)
        for (int m = 0; m < MICRO; m++)
            KN_CHECK(a->loss[i][m] == b->loss[i][m], "%s: loss of step %d, %d: %.9g, %.9g", what, i,
                     m, (double)a->loss[i][m], (double)b->loss[i][m]);
    KN_CHECK(memcmp(a->norm, b->norm, sizeof a->norm) == 0 && a->norm[0] > 0.05);
    KN_CHECK(a->values == b->values && a->values > 1000 &&
                 memcmp(a->param, b->param, (size_t)a->values * 4) == 0,
             "%s: the parameters differ", what);
    KN_CHECK(a->step == b->step && a->optim_steps == b->optim_steps && a->step == STEPS);
}

void train(record *r, kn_dtype dtype, kn_step_fn fn, bool replayed,
           void (*between)(trainer *t, int n))
{
    trainer t;
    *r = (record){ 0 };
    KN_CHECK(trainer_begin(&t, dtype, replayed));
    for (int n = 0; n < STEPS; n++) {
        KN_CHECK(run_step(&t, fn, n, r), "step %d", n);
        if (between)
            between(&t, n);
    }
    if (replayed && !between) {
        kn_replay_counts c = kn_replay_count(t.replay);
        KN_CHECK(!kn_replay_why(t.replay), "%s", kn_replay_why(t.replay));
        KN_CHECK(c.eager == 2 && c.recorded == 1 && c.replayed == STEPS - 3 && t.calls == 3);
    }
    KN_CHECK(trainer_read(&t, r));
    trainer_end(&t);
    KN_CHECK_OK();
}
