/* tests/kernels/cost_test.c: the operations and bytes that kn_kernel_cost gives, against numbers
 * counted by hand. */
#include "kernels/kernels.h"
#include "tests/kn_test.h"

#define OF(dtype, ...)                                                                             \
    kn_array_make(NULL, dtype, (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)),        \
                  (int64_t[]){ __VA_ARGS__ })
#define F32(...) OF(KN_F32, __VA_ARGS__)

KN_TEST(cost, products_attention_optimizers_and_images)
{
    kn_matmul_args m = { F32(2, 3, 5), F32(2, 3, 7), F32(2, 7, 5) };
    kn_cost c = kn_kernel_cost(KN_K_MATMUL, &m);
    KN_CHECK(c.flops == 2 * 2 * 3 * 5 * 7 && c.bytes == 4 * (30 + 42 + 70));
    m.b.stride[0] = 0;
    KN_CHECK(kn_kernel_cost(KN_K_MATMUL, &m).bytes == 4 * (30 + 42 + 35), "broadcast b");
    kn_attention_args a = { F32(1, 2, 4, 8), F32(1, 2, 4), F32(1, 2, 4, 8), F32(1, 2, 4, 8),
                            F32(1, 2, 4, 8) };
    double full = kn_kernel_cost(KN_K_ATTENTION, &a).flops;
    a.causal = true;
    KN_CHECK(kn_kernel_cost(KN_K_ATTENTION, &a).flops == full * 10 / 16, "10 of 16 pairs");
    a.window = 2;
    KN_CHECK(kn_kernel_cost(KN_K_ATTENTION, &a).flops == full * 7 / 16, "7 of 16 pairs");
    kn_opt_piece p = { .count = 10, .param_dtype = KN_F32, .grad_dtype = KN_BF16 };
    kn_adamw_args o = { .s = { .piece = &p, .pieces = 1 } };
    KN_CHECK(kn_kernel_cost(KN_K_ADAMW, &o).bytes == 10 * (6 * 4 + 2));
    p.out = &p;
    p.out_dtype = KN_BF16;
    KN_CHECK(kn_kernel_cost(KN_K_ADAMW, &o).bytes == 10 * (6 * 4 + 2 + 2));
    kn_conv_args v = { .y = F32(2, 6, 5, 5), .x = F32(2, 4, 5, 5), .w = F32(6, 2, 3, 3) };
    c = kn_kernel_cost(KN_K_CONV, &v); /* in two groups */
    KN_CHECK(c.flops == 2 * 300 * 18 && c.bytes == 4 * (300 + 200 + 108));
    kn_conv_grad_w_args g = { .dw = v.w, .dy = v.y, .x = v.x };
    KN_CHECK(kn_kernel_cost(KN_K_CONV_GRAD_W, &g).flops == c.flops);
    kn_pool_args q = { .y = F32(1, 2, 2, 2), .x = F32(1, 2, 4, 4), .window.kernel = { 2, 2 } };
    KN_CHECK(kn_kernel_cost(KN_K_POOL, &q).flops == 32 &&
             kn_kernel_cost(KN_K_POOL, &q).bytes == 160);
}

/* Each array once: what a training step is predicted from (bench/predict.c). */
KN_TEST(cost, bytes_of_the_other_kernels_of_a_step)
{
    const kn_array x = OF(KN_BF16, 6, 8), w = OF(KN_BF16, 8), rows = OF(KN_F32, 6);
    kn_attention_args a = { x, rows, x, x, x };
    KN_CHECK(kn_kernel_cost(KN_K_ATTENTION, &a).bytes == 4 * 96 + 24, "no mask");
    kn_attention_grad_args ag = {
        .dq = x, .dk = x, .dv = x, .dout = x, .o = x, .lse = rows, .q = x, .k = x, .v = x
    };
    KN_CHECK(kn_kernel_cost(KN_K_ATTENTION_GRAD, &ag).bytes == 8 * 96 + 24);
    kn_norm_args n = { .y = x, .x = x, .w = w, .b = w, .mean = rows, .rstd = rows };
    KN_CHECK(kn_kernel_cost(KN_K_NORM, &n).bytes == 2 * 96 + 2 * 16 + 2 * 24);
    n.add = n.sum = x;
    KN_CHECK(kn_kernel_cost(KN_K_NORM, &n).bytes == 4 * 96 + 2 * 16 + 2 * 24, "of a sum");
    kn_norm_grad_args ng = { .dx = x, .dw = w, .dy = x, .x = x, .w = w, .rstd = rows, .rms = true };
    KN_CHECK(kn_kernel_cost(KN_K_NORM_GRAD, &ng).bytes == 3 * 96 + 2 * 16 + 24, "rms, no bias");
    ng.more = x;
    KN_CHECK(kn_kernel_cost(KN_K_NORM_GRAD, &ng).bytes == 4 * 96 + 2 * 16 + 24, "and more");
    kn_cross_entropy_args e = { .lse = rows, .logits = x, .targets = OF(KN_I64, 6) };
    KN_CHECK(kn_kernel_cost(KN_K_CROSS_ENTROPY, &e).bytes == 96 + 48 + 24);
    kn_cross_entropy_grad_args eg = {
        .dlogits = x, .logits = x, .targets = e.targets, .lse = rows
    };
    KN_CHECK(kn_kernel_cost(KN_K_CROSS_ENTROPY_GRAD, &eg).bytes == 2 * 96 + 48 + 24);
    kn_unary_grad_args u = { .dx = x, .dy = x, .x = x, .kind = KN_GELU_TANH };
    KN_CHECK(kn_kernel_cost(KN_K_UNARY_GRAD, &u).bytes == 3 * 96);
    kn_reduce_args r = { .dst = OF(KN_F32, 1, 8), .src = x };
    KN_CHECK(kn_kernel_cost(KN_K_REDUCE, &r).bytes == 32 + 96);
    kn_copy_args c = { .dst = x, .src = OF(KN_F32, 6, 8) };
    KN_CHECK(kn_kernel_cost(KN_K_COPY, &c).bytes == 96 + 192);
    kn_index_add_args i = { .dst = OF(KN_BF16, 50, 8), .src = x, .index = e.targets };
    KN_CHECK(kn_kernel_cost(KN_K_INDEX_ADD, &i).bytes == 96 + 48 + 2 * 96, "only added rows");
    kn_sum_n_args s = { .count = 10, .n = 1, .src_dtype = KN_BF16, .dst_dtype = KN_F32 };
    KN_CHECK(kn_kernel_cost(KN_K_SUM_N, &s).bytes == 10 * (2 + 4));
}
