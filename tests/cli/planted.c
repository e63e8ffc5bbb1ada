/* tests/cli/planted.c: planted FILE [KEY=NUMBER]...: records two steps of a GPT among simulated ranks on meta, with
 * a fault of its settings as the keys say, for tests/cli/report.sh. */
#include <knap.h>
#include <stdlib.h>
#include <string.h>

static double setting(int argc, char **argv, const char *key, double otherwise)
{
    const size_t n = strlen(key);
    for (int i = 2; i < argc; i++)
        if (strncmp(argv[i], key, n) == 0 && argv[i][n] == '=')
            return atof(argv[i] + n + 1);
    return otherwise;
}

#define SETTING(key, otherwise) setting(argc, argv, key, otherwise)

int main(int argc, char **argv)
{
    kn_init(&argc, &argv);
    kn_gpt_config config = { .layers = (int)SETTING("layers", 4),
                             .heads = 12,
                             .embd = 768,
                             .ctx = 512,
                             .vocab = (int)SETTING("vocab", 4096) };
    const int batch = (int)SETTING("batch", 4);
    kn_gpt net = { 0 };
    kn_gpt_init(&net, config, KN_F32, KN_META);
    kn_meta_rates(20e12, 1e12, SETTING("launch", 2) * 1e-6);
    kn_comm *ranks = kn_comm_simulated((int)SETTING("ranks", 8), SETTING("latency", 10) * 1e-6,
                                       SETTING("GBs", 25) * 1e9);
    kn_fsdp_wrap(&net, ranks, .device = KN_META, .wrap_class = "gpt_block",
                 .backward_prefetch = (kn_backward_prefetch)SETTING("prefetch", KN_PREFETCH_PRE),
                 .forward_prefetch = SETTING("forward", 1) > 0,
                 .max_reductions = (int)SETTING("reductions", 2),
                 .param_dtype = SETTING("half", 0) > 0 ? KN_BF16 : KN_F32,
                 .reduce_dtype = SETTING("half", 0) > 0 ? KN_BF16 : KN_F32,
                 .reshard_after_forward = (int)SETTING("reshard", KN_RESHARD_DEFAULT));
    kn_optim *opt = kn_adamw(&net, .lr = 1e-3);
    for (int step = 0; step < 3 && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        if (step == 1)
            kn_record_start(&net, argv[1]);
        kn_tensor *ids = kn_zeros(KN_I64, KN_META, KN_SHAPE(batch, config.ctx));
        kn_backward(kn_gpt_loss(&net, ids, ids));
        kn_step(opt);
        kn_scope_end(scope);
    }
    kn_record_stop();
    kn_optim_free(opt), kn_module_free(&net), kn_comm_simulated_free(ranks);
    return kn_finish();
}
