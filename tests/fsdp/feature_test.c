/* tests/fsdp/feature_test.c: each capability that must not change a bit, one at a time: as settings
 * of random programs (random.h), or of the matrix (matrix.h) where those don't have it. */
#include "tests/fsdp/matrix.h"
#include "tests/fsdp/random.h"
#include "tests/fsdp/two.h"

/* Two models: one with a tied head, parameters of odd sizes and frozen ones; one whose modules run
 * twice, by another entry, not in each round, or whose results only some ranks use. */
static const char *const models[] = {
    "head=tied dim=7 wrap=hand m1.kind=mlp m1.unit=yes m2.kind=norm m3.kind=own m3.unit=yes "
    "m4.kind=linear m4.frozen=yes m5.kind=residual m6.kind=mlp m6.in=m5 m6.unit=yes "
    "m7.kind=dropout",
    "head=embed dim=5 wrap=hand m1.kind=linear m1.unit=yes m1.twice=yes m2.kind=partly m2.unit=yes "
    "m3.kind=mlp m3.unit=yes m3.when=round m3.entered=yes m4.kind=seq m5.kind=mlp m5.in=m4 "
    "m5.unit=yes m5.when=loss_micro m6.kind=conv m7.kind=shared",
};
/* Each of the settings, up to NULL, with each model, which must not drop one that doesn't fit. */
static void check(const char *const *settings)
{
    for (int i = 0; *settings; settings++, i++)
        for (int m = i % kn_one_in(2); m < 2; m += kn_one_in(2)) {
            char text[2048], left[4096], word[64];
            random_program p;
            snprintf(text, sizeof text, "%s %s", models[m], *settings);
            KN_CHECK(random_parse(text, &p));
            random_text(&p, left, sizeof left);
            for (const char *w = *settings; *w; w += strcspn(w, " "), w += *w == ' ') {
                snprintf(word, sizeof word, "%.*s", (int)strcspn(w, " "), w);
                KN_CHECK(strstr(left, word), "'%s' of '%s' doesn't fit", word, text);
            }
            random_check_program(text);
        }
}
#define CHECK(...) check((const char *const[]){ __VA_ARGS__, NULL })

KN_TEST(feature, strategies)
{
    CHECK("ranks=1", "ranks=3", "ranks=3 strategy=shard_grad_op", "ranks=3 strategy=no_shard",
          "ranks=4 strategy=hybrid_shard", "ranks=4 strategy=hybrid_shard mesh=large",
          "ranks=4 strategy=hybrid_shard mesh=one",
          "ranks=4 strategy=hybrid_shard_grad_op rounds=3",
          "ranks=4 strategy=hybrid_shard rounds=3 no_all_reduce=3",
          "ranks=4 strategy=hybrid_shard_grad_op rounds=4 no_all_reduce=5 no_sync=2");
}

KN_TEST(feature, layouts)
{
    CHECK("ranks=4 layout=per_param", "ranks=3 layout=ragged",
          "ranks=4 layout=per_param placement=last", "ranks=3 keep_whole_below=20",
          "strategy=shard_grad_op keep_whole_below=1000",
          "ranks=4 strategy=hybrid_shard no_sync=1 keep_whole_below=20");
}

KN_TEST(feature, reshard_after_forward)
{
    CHECK("ranks=4 reshard_after_forward=2",
          "ranks=4 strategy=hybrid_shard mesh=large layout=per_param reshard_after_forward=2",
          "reshard_after_forward=-1", "strategy=shard_grad_op reshard_after_forward=1");
}

KN_TEST(feature, gathering_ahead)
{
    CHECK("forward_prefetch=yes workers=yes",
          "forward_prefetch=yes backward_prefetch=post max_gathers=1",
          "forward_prefetch=yes backward_prefetch=none max_gathers=4",
          "prefetch_lists=next max_gathers=2", "prefetch_lists=all workers=yes",
          "workers=yes e0.kind=unshard e0.at=m1 e1.kind=unshard_reshard e1.step=1 e1.at=m3",
          "head=embed embedding=stays_sharded backward_prefetch=post layout=ragged");
}

KN_TEST(feature, accumulation)
{
    CHECK("rounds=3 no_sync=3", "ranks=1 no_sync=1 layout=per_param",
          "ranks=3 no_sync=1 layout=per_param", "strategy=no_shard rounds=3 no_sync=3",
          "offload=file rounds=3 no_sync=3", "keep_gathered=yes rounds=3",
          "keep_gathered=yes strategy=shard_grad_op no_sync=1 e0.kind=evaluate",
          "rounds=3 e0.kind=never_reshard e1.kind=always_reshard e1.round=2",
          "forward_prefetch=yes e0.kind=evaluate e1.kind=evaluate e1.step=1",
          "pairs=yes strategy=shard_grad_op rounds=4", "pairs=swapped m0.recompute=yes",
          "e0.kind=retain e1.kind=retain e1.step=1 layout=per_param",
          "ranks=4 strategy=hybrid_shard e0.kind=retain",
          "ranks=3 strategy=shard_grad_op m0.recompute=yes e0.kind=retain e0.round=1",
          "offload=file m1.recompute=yes e0.kind=retain");
}

KN_TEST(feature, factors)
{
    CHECK("ranks=4 divide_factor=8", "ranks=3 divide_factor=3", "ranks=1 predivide_factor=2",
          "ranks=4 predivide_factor=2", "no_sync=1 divide_factor=8 predivide_factor=4",
          "ranks=3 reduce_op=sum");
}

KN_TEST(feature, offload_and_threads)
{
    CHECK("ranks=1 offload=file", "offload=file rounds=4",
          "offload=file rounds=4 strategy=shard_grad_op", "offload=file rounds=4 strategy=no_shard",
          "ranks_are=threads forward_prefetch=yes",
          "ranks_are=threads workers=yes offload=file layout=per_param");
}

KN_TEST(feature, precision)
{
    CHECK("param_dtype=bf16", "ranks=3 param_dtype=bf16 strategy=shard_grad_op layout=per_param",
          "param_dtype=bf16 reduce_dtype=f32 strategy=no_shard no_sync=1",
          "param_dtype=f16 reduce_dtype=f32 scaler=256", "param_dtype=f16 scaler=too_large",
          "ranks=4 strategy=hybrid_shard param_dtype=bf16 offload=file",
          "reduce_dtype=bf16 keep_low_precision_grads=yes rounds=3",
          "param_dtype=bf16 cast_inputs=root m8.kind=norm full_precision_class=layer_norm",
          "param_dtype=bf16 param_dtype_of=norms m8.kind=rms_norm",
          "param_dtype=bf16 output_dtype=f32", "param_dtype=bf16 buffer_dtype=bf16 offload=file");
}

KN_TEST(feature, units)
{
    CHECK("wrap=linear strategy=shard_grad_op",
          "wrap=parts wrap_like=yes forward_prefetch=yes max_gathers=1",
          "wrap=seq m8.kind=seq m8.recompute=yes m9.kind=mlp m9.in=m8", "wrap=size dim=8",
          "wrap=policy m3.other=yes forward_prefetch=yes",
          "wrap=groups forward_prefetch=yes backward_prefetch=post",
          "wrap=groups m1.recompute=yes e0.kind=evaluate",
          "recompute_by=part strategy=shard_grad_op", "recompute_by=both workers=yes",
          "head=embed embedding=unit", "m8.kind=linear m8.ignored=yes m8.frozen=yes");
}

static bool set_reshard(matrix_net *n, int step, int round)
{
    static const int value[] = { KN_RESHARD_NEVER, 2, KN_RESHARD_ALWAYS, 2, KN_RESHARD_NEVER };
    return kn_fsdp_set_reshard_after_forward(n->root, value[(step * 2 + round) % 5], true);
}

KN_TEST(feature, reshard_changes_between_forward_and_backward)
{
    for (int ranks = 2; ranks <= 4; ranks += 2)
        for (int m = 0; m < MATRIX_MODELS; m++)
            MATRIX_CHECK(.model = m, .ranks = ranks, .between = set_reshard,
                         .o.reshard_after_forward = 2);
}

/* The gradient of a parameter that micro-batches first, first + by, ... bring a plain model. */
static kn_tensor *plain_sum(int param, int first, int by, int count)
{
    const kn_param *p;
    TWO_WHOLE(plain);
    for (int k = 0; k < count; k++)
        KN_CHECK(two_backward(&plain, first + k * by));
    kn_params(&plain, &p);
    return kn_add_scalar(kn_grad(p[param].tensor), 0);
}

/* One unit adds up on its rank while the other reduces: two groupings in one step. */
RANK_TEST(feature, no_sync_of_one_unit, .threads = "1234", .cases = KN_NO_SHARD - KN_FULL_SHARD + 1)
{
    enum { ROUNDS = 3 };
    const int ranks = kn_comm_size(world), strategy = KN_FULL_SHARD + *(int *)arg;
    const kn_param *p;
    TWO_WRAPPED(m, world, .wrap_class = "linear", .seed = NET_SEED, .strategy = strategy);
    for (int k = 0; k < ROUNDS; k++)
        KN_CHECK(kn_fsdp_set_gradient_sync(&m.a, k + 1 == ROUNDS, false) &&
                 two_backward(&m, k * ranks + kn_rank(world)));
    kn_summon_scope s = kn_summon(&m, .with_grads = true, .read_only = true);
    KN_CHECK(s.s && kn_params(&m, &p) == 4);
    for (int i = 0; i < 4; i++) {
        kn_tensor *sum = plain_sum(i, 0, i < 2 ? ranks : 1, i < 2 ? ROUNDS : ROUNDS * ranks);
        for (int r = 1; r < ranks && i < 2; r++)
            sum = kn_add(sum, plain_sum(i, r, ranks, ROUNDS));
        KN_CHECK(same_bytes(kn_grad(p[i].tensor), sum), "%s", p[i].name);
    }
    KN_CHECK(kn_summon_end(s));
}

KN_TEST(feature, with_the_bundled_models)
{
    static const char *const inside[] = { "self_attention,mlp,layer_norm", "odd_block,linear",
                                          "linear" };
    for (int m = 0; m < MATRIX_MODELS; m++) {
        MATRIX_CHECK(.model = m, .ranks = 8, .steps = 2, .o.reshard_after_forward = 4);
        MATRIX_CHECK(.model = m, .ranks = 2, .o.predivide_factor = 0.5); /* it multiplies */
        MATRIX_CHECK(.model = m, .recompute = true, .workers = true,     /* holds units */
                     .o.wrap_class = inside[m]);
    }
}

/* bf16 with f32 reduction: no plain process rounds like it, but all strategies of N ranks agree. */
KN_TEST(feature, bf16_is_equal_among_strategies)
{
    for (int m = 0; m < MATRIX_BUNDLED; m++)
        matrix_check_16_bits((matrix_spec){ .model = m, .ranks = 2 }, KN_BF16, NULL);
}
