/* tests/kernels/cost_test.c: the operations and bytes that kn_kernel_cost gives, against numbers
 * counted by hand. */
#include "kernels/kernels.h"
#include "tests/kn_test.h"

#define F32(...)                                                                                   \
    kn_array_make(NULL, KN_F32, (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)),       \
                  (int64_t[]){ __VA_ARGS__ })

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
