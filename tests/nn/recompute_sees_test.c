/* tests/nn/recompute_sees_test.c: a replay sees what its forward saw: draws, modes, tree, buffers,
 * versions, captured tensors; and gradients go where they would without recompute. */
#include "tests/nn/recompute_rows.h"

/* ---- forwards -------------------------------------------------------------------------------- */

/* Its tanh saves values that the mask has a part in. */
static kn_tensor *drops(part *p, kn_tensor *x)
{
    return kn_tanh(kn_call(&p->drop, plain(p, x)));
}

static kn_tensor *reads_other(part *p, kn_tensor *x)
{
    return kn_tanh(kn_linear(plain(p, x), w(&n.head), NULL, false));
}

static kn_tensor *reads_captured(part *p, kn_tensor *x)
{
    return kn_mul(plain(p, x), kn_exp(p->captured));
}

static kn_tensor *only_captured(part *p, kn_tensor *x)
{
    return kn_mul(x, kn_exp(p->captured));
}

static kn_tensor *own_parameter(part *p, kn_tensor *x)
{
    (void)x;
    return w(&p->fc);
}

static kn_tensor *reads_buffer(part *p, kn_tensor *x)
{
    return kn_mul(plain(p, x), p->buffer);
}

/* buffer = 0.9 buffer + 0.1 mean(y), with what it was and what it becomes in the result. */
static kn_tensor *moves_buffer(part *p, kn_tensor *x)
{
    kn_tensor *y = plain(p, x);
    kn_tensor *before = kn_scale(p->buffer, 1);
    const bool mode = kn_set_grad_mode(false);
    kn_copy_(p->buffer, kn_add(kn_scale(p->buffer, 0.9),
                               kn_scale(kn_mean(y, 1, (int64_t[]){ 0 }, false), 0.1)));
    kn_set_grad_mode(mode);
    return kn_mul(kn_mul(y, before), kn_scale(p->buffer, 1));
}

static kn_tensor *writes_only_again(part *p, kn_tensor *x)
{
    if (kn_recomputing())
        kn_fill_(p->buffer, 7);
    return plain(p, x);
}

/* Writes by itself, and says so. */
static kn_tensor *announces(part *p, kn_tensor *x)
{
    kn_bump_version(p->buffer);
    return plain(p, x);
}

static kn_tensor *writes_input(part *p, kn_tensor *x)
{
    const bool mode = kn_set_grad_mode(false);
    kn_scale_(x, 2);
    kn_set_grad_mode(mode);
    return kn_tanh(kn_mul(kn_call(&p->fc, x), x));
}

static kn_tensor *norms(part *p, kn_tensor *x)
{
    return kn_tanh(kn_call(&p->bn, plain(p, x)));
}

static kn_tensor *asks_training(part *p, kn_tensor *x)
{
    return kn_scale(plain(p, x), kn_training(p) ? 3 : 0.5);
}

static kn_tensor *asks_step(part *p, kn_tensor *x)
{
    return kn_scale(plain(p, x), 1 + (double)kn_get_step());
}

/* ---- programs -------------------------------------------------------------------------------- */

/* As kn_step of another optimizer does. */
static void step_between(void)
{
    int64_t seen = kn_steps_seen();
    kn_tensor *y = forward();
    kn_step_taken(&seen);
    backward(y);
    note_value((double)kn_get_step());
}

static void set_step_between(void)
{
    kn_tensor *y = forward();
    kn_set_step(7);
    backward(y);
}

static void seed_between(void)
{
    kn_tensor *y = forward();
    kn_seed(99);
    backward(y);
    note(kn_call(&n, data(3))); /* the program's own seed stayed */
}

static void hook_on_other(void)
{
    int calls = 0;
    kn_on_grad(w(&n.head), count, &calls);
    kn_tensor *x = leaf(2);
    backward(total(kn_call(&n, kn_call(&n.p, kn_call(&n.p, x)))));
    note(kn_grad(x));
    note_value(calls);
}

static void gradient_of_other(void)
{
    kn_tensor *g = NULL, *other = w(&n.head);
    kn_grad_of(total(kn_call(&n, leaf(2))), &other, 1, &g);
    note(g);
}

static void nothing_else_wants(void)
{
    n.p.captured = leaf(8);
    backward(total(kn_call(&n.p, data(2))));
    note(kn_grad(n.p.captured));
}

static void captured_history(void)
{
    kn_tensor *from = leaf(8), *x = leaf(2);
    n.p.captured = kn_tanh(from);
    kn_tensor *y = kn_add(kn_call(&n.p, x), kn_call(&n.p, kn_scale(x, 2)));
    backward(total(y));
    note(kn_grad(from));
    note(kn_grad(x));
}

static void write_buffer_between(void)
{
    kn_tensor *y = forward();
    kn_fill_(n.p.buffer, 7);
    backward(y);
}

static void buffer_moves(void)
{
    kn_tensor *x = data(2), *one = kn_call(&n.p, x), *two = kn_call(&n.p, kn_scale(x, 3));
    note(n.p.buffer);
    backward(total(kn_add(one, kn_mul(two, two))));
    note(n.p.buffer);
}

static void input_written(void)
{
    kn_tensor *x = data(2);
    backward(total(kn_call(&n.p, x)));
    note(x);
    n.p.captured = data(4);
}

static void note_statistics(void)
{
    for (int i = 0; i < 2; i++)
        note(kn_module_buffer_at(&n.p.bn, i, NULL));
    int64_t batches = 0;
    kn_to_host(kn_module_buffer_at(&n.p.bn, 2, NULL), &batches, sizeof batches);
    note_value((double)batches);
}

static void two_batches(void)
{
    kn_tensor *a = forward(), *b = forward();
    backward(kn_add(a, b));
    note_statistics();
}

static void evaluated_then_moved(void)
{
    kn_train(&n, false);
    kn_tensor *y = forward();
    kn_train(&n, true);
    kn_call(&n, data(5));
    kn_backward(y);
}

static void mode_between(void)
{
    kn_tensor *y = forward();
    kn_train(&n, false);
    backward(y);
    note_value(kn_training(&n.p.fc));
}

static void switched_between(void)
{
    kn_tensor *y = forward();
    kn_recompute(&n.p, false);
    kn_recompute(&n.p.fc, true);
    backward(y);
}

static void frozen_between(void)
{
    kn_freeze(&n.p.fc, true);
    kn_tensor *y = forward();
    kn_freeze(&n, true);
    kn_freeze(&n.p.fc, false);
    backward(y);
}

static void child_replaced(void)
{
    static kn_linear other;
    kn_tensor *y = forward();
    kn_linear_init(&other, NULL, "", WIDE, WIDE);
    kn_materialize(&other, KN_CPU, 9);
    kn_module *old = kn_module_replace(&n, "p.fc", &other);
    backward(y);
    (void)old;
}

static void child_removed(void)
{
    kn_tensor *y = forward();
    kn_module *old = kn_module_remove(&n, "p.bn");
    kn_backward(y);
    kn_module_free(old);
}

static void freed_between(void)
{
    kn_tensor *y = forward();
    kn_module_free(&n);
    kn_backward(y);
}

static void look(kn_module_event *e, void *arg)
{
    (void)e;
    ++*(int *)arg;
}

static void hooked_and_freed(void)
{
    int calls = 0;
    kn_module_hook(&n.head, (kn_module_hooks){ NULL, NULL, look, look, &calls, "look" });
    kn_module_hook(&n.p, (kn_module_hooks){ NULL, NULL, look, look, &calls, "look" });
    kn_tensor *x = leaf(2), *y = total(kn_call(&n.head, x));
    kn_module_free(&n);
    kn_backward(y);
    note(kn_grad(x));
    note_value(calls);
}

static void hooks_once(void)
{
    int calls[2] = { 0, 0 };
    kn_module_hook(&n.p.fc, (kn_module_hooks){ NULL, NULL, look, look, &calls[0], "look" });
    kn_on_grad(w(&n.p.fc), count, &calls[1]);
    simple();
    note_value(calls[0]);
    note_value(calls[1]);
}

static void times_ten(kn_module_event *e, void *arg)
{
    (void)arg;
    e->out.v[0] = kn_scale(e->out.v[0], 10);
}

static void hook_put_on_between(void)
{
    kn_tensor *y = forward();
    kn_module_hook(&n.p.fc, (kn_module_hooks){ .post_forward = times_ten });
    backward(y);
}

static void hook_taken_off_between(void)
{
    const kn_hook h = kn_module_hook(&n.p.fc, (kn_module_hooks){ .post_forward = times_ten });
    kn_tensor *y = forward();
    kn_module_unhook(&n.p.fc, h);
    backward(y);
}

static void retained(void)
{
    kn_tensor *y = forward();
    kn_backward(y, .retain_graph = true);
    backward(y);
}

static void twice(void)
{
    kn_tensor *y = forward();
    kn_backward(y);
    kn_backward(y);
}

static void input_between(void)
{
    kn_tensor *x = data(2), *y = total(kn_call(&n, x));
    kn_fill_(x, 1);
    kn_backward(y);
}

static void result_dropped(void)
{
    kn_scope s = kn_scope_begin();
    kn_call(&n, leaf(2));
    kn_scope_end(s);
    simple();
}

/* ---- the table ------------------------------------------------------------------------------- */

static const row rows[] = {
    { "a step of another optimizer between", drops, step_between },
    { "kn_set_step between", drops, set_step_between },
    { "kn_seed between", drops, seed_between },
    { "a forward that asks for the step", asks_step, set_step_between },
    { "another module's parameter: hooks", reads_other, hook_on_other },
    { "another module's parameter: kn_grad_of", reads_other, gradient_of_other },
    { "only a captured leaf wants", only_captured, nothing_else_wants },
    { "a captured history twice", reads_captured, captured_history },
    { "it returns its own parameter", own_parameter, simple },
    { "a buffer is written between", reads_buffer, write_buffer_between, "was written in place",
      true },
    { "it moves a buffer of its own", moves_buffer, buffer_moves },
    { "it writes a buffer only again", writes_only_again, simple, "its forward didn't write it" },
    { "it writes a buffer by itself", announces, simple, "take kn_write_data to write" },
    { "it writes its input in place", writes_input, input_written },
    { "batch norm counts once", norms, two_batches },
    { "batch norm evaluated, then moved", norms, evaluated_then_moved, "was written in place" },
    { "kn_train between, it drops", drops, mode_between },
    { "kn_train between, it asks", asks_training, mode_between },
    { "kn_recompute switched between", plain, switched_between },
    { "frozen and thawed between", reads_other, frozen_between },
    { "a child replaced between", plain, child_replaced, "changed between forward and backward" },
    { "a child removed between", plain, child_removed, "changed between forward and backward" },
    { "freed between", plain, freed_between, "was freed" },
    { "hooked and freed between", plain, hooked_and_freed },
    { "hooks inside run once", plain, hooks_once },
    { "a hook put on between", plain, hook_put_on_between },
    { "a hook taken off between", plain, hook_taken_off_between, "hooks" },
    { "a retained graph", drops, retained },
    { "a graph that was freed", plain, twice, "freed by an earlier backward", true },
    { "the input is written between", plain, input_between, "was written in place", true },
    { "a result that is dropped", drops, result_dropped },
};

KN_TEST(recompute_sees, what_its_forward_saw)
{
    run_rows(rows, sizeof rows / sizeof *rows);
}
