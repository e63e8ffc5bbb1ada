/* tests/fsdp/one_step_test.c: one training step of a small GPT leaks nothing: neither tensors nor
 * ledger bytes, nor (under valgrind, which runs this case) anything else. */
#include "tests/kn_test.h"
#include "knap.h"

KN_TEST(one_step, leaks_nothing)
{
    kn_set_threads(1);
    int64_t tensors = kn_live_tensors();
    kn_gpt g = { 0 };
    kn_gpt_config c = {
        .layers = 2, .heads = 2, .embd = 16, .ctx = 8, .vocab = 50, .dropout = 0.1
    };
    kn_gpt_init(&g, c, KN_F32, KN_META);
    kn_fsdp_wrap(&g, NULL, .wrap_class = "gpt_block");
    kn_optim *opt = kn_adamw(&g, .lr = 1e-3);
    double first = 0, last = 0;
    for (int step = 0; step < 3; step++) {
        kn_scope scope = kn_scope_begin();
        int64_t ids[16], next[16];
        for (int i = 0; i < 16; i++) {
            ids[i] = (i * 7) % 50;
            next[i] = (i * 7 + 7) % 50;
        }
        kn_tensor *loss = kn_gpt_loss(&g, kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(2, 8)),
                                      kn_from(KN_I64, KN_CPU, next, KN_SHAPE(2, 8)));
        last = kn_item(loss);
        first = step ? first : last;
        kn_backward(loss);
        kn_clip_grad_norm(&g, 1.0);
        kn_step(opt);
        kn_scope_end(scope);
        KN_CHECK_OK();
    }
    KN_CHECK(last < first, "the loss doesn't fall: %g to %g", first, last);
    kn_optim_free(opt);
    kn_module_free(&g);
    KN_CHECK(kn_live_tensors() == tensors, "%lld tensors are left",
             (long long)(kn_live_tensors() - tensors));
    kn_ledger l = kn_ledger_read();
    for (int m = 0; m < KN_MEM_COUNT; m++)
        KN_CHECK(l.live[m] == 0 || m == KN_MEM_HOST || m == KN_MEM_WORKSPACE,
                 "%s: %lld bytes are left", kn_mem_name((kn_mem_category)m), (long long)l.live[m]);
}
