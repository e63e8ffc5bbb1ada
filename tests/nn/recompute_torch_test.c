/* tests/nn/recompute_torch_test.c: PyTorch's own tests of torch.utils.checkpoint, as programs
 * beside the same ones without recompute; each row has the name of the test there. They are in
 * test/test_autograd.py (TestAutograd, TestNestedCheckpoint, TestSelectiveActivationCheckpoint) and
 * test/test_utils.py (TestCheckpoint). Others have their counterparts elsewhere: memory_savings
 * (recompute.keeps_less), arbitrary_input_output and non_tensor (recompute.inputs_passed_through),
 * sequential and module_list (sequential.*), autocast (precision.recompute_casts_again of fsdp),
 * dataparallel (random.* and acts.* of fsdp). Those of selective checkpointing's policies, of
 * compile and of early stopping as an option have none here. */
#include "tests/nn/recompute_rows.h"

/* ---- forwards -------------------------------------------------------------------------------- */

static kn_tensor *drops_twice(part *p, kn_tensor *x)
{
    return kn_tanh(kn_call(&p->drop, kn_dropout(plain(p, x), 0.5)));
}

static kn_values x_exp_forward(kn_function_run *run, kn_values in)
{
    kn_tensor *y = kn_exp(in.v[0]);
    kn_save_for_backward(run, in.v[0], y);
    return KN_VALUES(kn_mul(in.v[0], y));
}

static kn_values x_exp_backward(kn_function_run *run, kn_values dout)
{
    kn_tensor *x = run->saved.v[0], *y = run->saved.v[1];
    return KN_VALUES(kn_mul(dout.v[0], kn_mul(y, kn_add_scalar(x, 1))));
}

static const kn_function x_exp_x = { .name = "x exp x",
                                     .forward = x_exp_forward,
                                     .backward = x_exp_backward };

static kn_tensor *own_function(part *p, kn_tensor *x)
{
    return kn_function_call(&x_exp_x, plain(p, x));
}

static kn_tensor *detaches(part *p, kn_tensor *x)
{
    kn_tensor *y = plain(p, x);
    return kn_add(kn_mul(y, kn_detach(y)), kn_mul(x, y));
}

static kn_tensor *uses_other(part *p, kn_tensor *x)
{
    return kn_linear(plain(p, x), w(&n.head), NULL, false);
}

static kn_tensor *returns_captured(part *p, kn_tensor *x)
{
    (void)x;
    return p->captured;
}

static kn_tensor *without_grad_mode(part *p, kn_tensor *x)
{
    const bool mode = kn_set_grad_mode(false);
    kn_tensor *y = kn_tanh(kn_call(&p->fc, x));
    kn_set_grad_mode(mode);
    return kn_add(y, kn_mul(x, y));
}

static kn_tensor *another_size(part *p, kn_tensor *x)
{
    kn_tensor *y = plain(p, x);
    return kn_tanh(kn_recomputing() ? kn_slice(y, 0, 0, 2) : y);
}

static kn_tensor *fewer_operations(part *p, kn_tensor *x)
{
    kn_tensor *y = plain(p, x);
    return kn_recomputing() ? y : kn_tanh(y);
}

static kn_tensor *more_operations(part *p, kn_tensor *x)
{
    kn_tensor *y = plain(p, x);
    return kn_recomputing() ? kn_tanh(y) : kn_scale(y, 3);
}

static kn_tensor *fails_again(part *p, kn_tensor *x)
{
    if (kn_recomputing())
        kn_fail("on purpose");
    return plain(p, x);
}

static kn_tensor *saves_nothing(part *p, kn_tensor *x)
{
    p->runs++;
    return kn_add(kn_scale(x, 3), x);
}

static kn_tensor *inner_of(kn_module *self, kn_tensor *x)
{
    part *p = (part *)self;
    return kn_sigmoid(kn_mul(kn_call(&p->fc, x), x));
}

static kn_tensor *inner(part *p, kn_tensor *x)
{
    return kn_call_method(p, inner_of, x);
}

static kn_tensor *nests(part *p, kn_tensor *x)
{
    p->runs++;
    kn_tensor *y = inner(p, kn_dropout(kn_tanh(x), 0.3));
    return kn_mul(kn_sin(y), kn_exp(inner(p, kn_scale(y, 2))));
}

static kn_tensor *nests_deep(part *p, kn_tensor *x)
{
    kn_recompute(&p->fc, recomputes());
    return nests(p, x);
}

static kn_tensor *writes_own(part *p, kn_tensor *x)
{
    kn_tensor *y = plain(p, x), *z = kn_detach(kn_scale(y, 2));
    kn_scale_(z, 2);
    return kn_mul(y, z);
}

static kn_tensor *writes_saved(part *p, kn_tensor *x)
{
    kn_tensor *y = plain(p, x), *z = kn_scale(kn_detach(y), 2), *out = kn_mul(y, z);
    kn_scale_(z, 2);
    return out;
}

static kn_tensor *takes_gradients(part *p, kn_tensor *x)
{
    kn_tensor *a = kn_require_grad(kn_scale(kn_detach(x), 1), true), *g = NULL;
    kn_grad_of(total(plain(p, a)), &a, 1, &g);
    return kn_ok() ? kn_mul(x, kn_detach(g)) : NULL;
}

/* ---- programs -------------------------------------------------------------------------------- */

static void without_input_gradient(void)
{
    backward(total(kn_call(&n, data(2))));
}

static void shared_inputs(void)
{
    kn_tensor *x = leaf(2), *a = kn_tanh(x);
    kn_tensor *y = kn_add(kn_call(&n.p, a), kn_mul(a, kn_call(&n.p, kn_add(a, x))));
    backward(total(kn_linear(y, w(&n.head), NULL, false)));
    note(kn_grad(x));
}

static void with_captured(void)
{
    kn_tensor *from = leaf(9);
    n.p.captured = kn_tanh(from);
    backward(total(kn_mul(kn_call(&n.p, leaf(2)), n.p.captured)));
    note(kn_grad(from));
}

static void nothing_wants(void)
{
    kn_freeze(&n, true);
    kn_tensor *y = kn_call(&n, data(2));
    note(y);
    note_value(kn_requires_grad(y));
}

static void fails_and_goes_on(void)
{
    for (int i = 0; i < 2; i++) {
        kn_tensor *y = forward();
        const bool ok = kn_backward(y);
        if (recomputes() && !ok && strstr(kn_error(), "on purpose"))
            kn_clear_error();
        else if (recomputes())
            kn_fail("the replay's error didn't arrive");
        kn_zero_grad(&n);
    }
    kn_recompute(&n.p, false);
    kn_set_step(0);
    simple();
}

static kn_tensor *another_gradient(kn_tensor *g, void *arg)
{
    kn_tensor **of = arg, *loss = of[0], *other = NULL;
    (void)g;
    of[0] = NULL; /* that backward comes by here, too */
    if (!loss)
        return NULL;
    kn_grad_of(loss, &of[1], 1, &other, .retain_graph = true);
    note(other);
    return NULL;
}

static void a_backward_in_a_hook(void)
{
    kn_tensor *x = leaf(2), *of[2] = { NULL, kn_scale(x, 2) }, *y = kn_call(&n.p, of[1]);
    of[0] = total(kn_call(&n.head, y));
    kn_on_grad(y, another_gradient, of);
    kn_backward(of[0], .retain_graph = true);
    note_grads();
    note(kn_grad(x));
}

static void runs_once_more(void)
{
    const int before = n.p.runs;
    simple();
    note_value(n.p.runs - before - recomputes());
}

static void runs_no_more(void)
{
    simple();
    note_value(n.p.runs);
}

static void two_graphs(void)
{
    kn_tensor *x = leaf(2), *a = kn_call(&n, x), *b = kn_call(&n, x);
    kn_backward(total(b));
    backward(total(a));
    note(kn_grad(x));
}

static void retained_parts(void)
{
    kn_tensor *x = leaf(2), *y = kn_call(&n.p, x), *one = total(y), *two = total(kn_exp(y));
    kn_backward(one, .retain_graph = true);
    note(kn_grad(x));
    backward(two);
    note(kn_grad(x));
}

static int64_t activations(void)
{
    return kn_ledger_read().live[KN_MEM_ACTIVATION];
}

/* A replay's values go with the pass, also where the graph stays. */
static void lives_no_longer(void)
{
    kn_tensor *y = forward();
    const int64_t before = activations();
    kn_backward(y, .retain_graph = true);
    note_value((double)(activations() - before));
}

static const row rows[] = {
    { "test_checkpoint", plain, simple },
    { "test_checkpoint_trigger", nests, simple },
    { "test_checkpoint_valid", plain, retained_parts },
    { "test_checkpoint_rng_cpu", drops_twice, two_graphs },
    { "test_checkpoint_no_tensors", plain, nothing_wants },
    { "test_checkpoint_partial_grad", without_grad_mode, simple },
    { "test_checkpointing_without_reentrant_input_requires_grad_False", drops_twice,
      without_input_gradient },
    { "test_checkpointing_without_reentrant_input_requires_grad_True", drops_twice, shared_inputs },
    { "test_checkpointing_without_reentrant_correct_grad", nests, shared_inputs },
    { "test_checkpointing_without_reentrant_custom_function_works", own_function, shared_inputs },
    { "test_checkpointing_without_reentrant_detached_tensor", detaches, shared_inputs },
    { "test_checkpointing_without_reentrant_parameter_used_in_an_out", uses_other, shared_inputs },
    { "test_checkpointing_without_reentrant_saved_object_identity", own_function, with_captured },
    { "test_checkpointing_without_reentrant_with_context_fn", plain, runs_once_more },
    { "test_checkpoint_detects_non_determinism: sizes", another_size, simple,
      "computed something else" },
    { "test_checkpoint_detects_non_determinism: fewer", fewer_operations, simple,
      "computed something else" },
    { "test_checkpoint_detects_non_determinism: more", more_operations, simple,
      "computed something else" },
    { "test_checkpointing_without_reentrant_valid_reset_on_error", fails_again, fails_and_goes_on },
    { "test_access_saved_tensor_twice_without_recomputation_works", own_function,
      a_backward_in_a_hook },
    { "test_nested_checkpoint", nests_deep, runs_once_more },
    { "test_nested_checkpoint_two_children", nests_deep, shared_inputs },
    { "test_nested_checkpoint_same_graph", nests_deep, two_graphs },
    { "test_nested_checkpoint_reentrant_backwards", takes_gradients, simple,
      "a backward inside of a call" },
    { "test_nested_checkpoint_set_early_stop_no_recompution_needed", saves_nothing, runs_no_more },
    { "test_output_already_has_autograd_meta", returns_captured, with_captured },
    { "test_storage_lifetime", nests, lives_no_longer },
    { "test_version_counter: its own, before", writes_own, simple },
    { "test_version_counter: its own, saved", writes_saved, simple, "was written in place", true },
    { "test_can_only_trigger_recompute_once", nests, retained_parts },
};

KN_TEST(recompute_torch, its_tests_of_checkpointing)
{
    run_rows(rows, sizeof rows / sizeof *rows);
}
