/* tests/gpu/cuda_parts_test.c: a deterministic backward of attention through cuDNN is computed in
 * parts that fit its workspace. Here the CPU's reference computes the parts: the same bits as of
 * the whole. */
#include "kernels/cuda/cudnn/cudnn.h"
#include "kernels/device.h"
#include "kernels/kernels_internal.h"
#include "tests/kn_test.h"

enum { B = 5, G = 3, T = 9, S = 9, D = 8, ROOM = B * 12 * T * D * 4 };

static const kn_provider *reference(void)
{
    const kn_provider *list[KN_MAX_PROVIDERS];
    int n = kn_providers(KN_CPU, list);
    return list[n - 1];
}

/* [B, heads, T, D] at column `column` of rows that hold q, k and v one after the other. */
static kn_array packed(float *data, int heads, int64_t all, int64_t column)
{
    kn_array a = kn_array_make(data + column * D, KN_F32, 4, (int64_t[]){ B, heads, T, D });
    a.stride[0] = T * all * D, a.stride[1] = D, a.stride[2] = all * D;
    return a;
}

typedef struct memory {
    float x[ROOM], o[ROOM], dout[ROOM], grad[ROOM], lse[B * 12 * T];
} memory;

/* The backward of attention of `heads` heads; grads of all go to m->grad. */
static kn_attention_grad_args make(memory *m, int heads)
{
    int64_t all = heads + 2 * G;
    kn_attention_args f = { .o = packed(m->o, heads, heads, 0),
                            .lse = kn_array_make(m->lse, KN_F32, 3, (int64_t[]){ B, heads, T }),
                            .q = packed(m->x, heads, all, 0),
                            .k = packed(m->x, G, all, heads),
                            .v = packed(m->x, G, all, heads + G),
                            .scale = 0.25,
                            .causal = true };
    for (int i = 0; i < ROOM; i++)
        m->x[i] = (float)(i * 7919 % 1009) / 500 - 1, m->dout[i] = (float)(i * 31 % 97) / 50 - 1;
    KN_CHECK(reference()->run[KN_K_ATTENTION](&f) == KN_DONE);
    return (kn_attention_grad_args){ .dq = packed(m->grad, heads, all, 0),
                                     .dk = packed(m->grad, G, all, heads),
                                     .dv = packed(m->grad, G, all, heads + G),
                                     .dout = packed(m->dout, heads, heads, 0),
                                     .o = f.o,
                                     .lse = f.lse,
                                     .q = f.q,
                                     .k = f.k,
                                     .v = f.v,
                                     .scale = f.scale,
                                     .causal = true };
}

static void check_part(const kn_attention_grad_args *p, int64_t parts)
{
    int64_t b = p->q.shape[0], h = p->q.shape[1];
    KN_CHECK(p->lse.shape[0] == b && p->lse.shape[1] == h && p->lse.stride[1] == T);
    KN_CHECK(b == 1 || p->lse.stride[0] == h * T, "cuDNN reads lse without strides");
    int64_t bytes = b * h * 128 * 128 * 2 * (h > p->k.shape[1] ? 3 : 1);
    KN_CHECK(parts == 1 || bytes <= (int64_t)kn_dnn_attention_most ||
                 (b == 1 && p->k.shape[1] == 1),
             "%lld bytes", (long long)bytes);
}

/* Grouped heads and single ones; limits that cut the batch, one sequence, or nothing. */
KN_TEST(cuda_parts, of_a_deterministic_backward)
{
    static memory m;
    static float whole[ROOM];
    const int64_t kilo = 128 * 128 * 2; /* of one head alone */
    const kn_dnn_kernel *how = &kn_dnn_attention_backward;
    int cut = 0;
    for (int heads = G; heads <= 2 * G; heads += G) {
        kn_attention_grad_args a = make(&m, heads);
        KN_CHECK(reference()->run[KN_K_ATTENTION_GRAD](&a) == KN_DONE);
        memcpy(whole, m.grad, sizeof whole);
        kn_cuda_deterministic(false);
        kn_dnn_attention_most = 1;
        KN_CHECK(how->parts(&a) == 1);
        kn_cuda_deterministic(true);
        for (int64_t most = 1; most <= 100; most++) {
            kn_dnn_attention_most = (uint64_t)(most * kilo);
            memset(m.grad, 0xff, sizeof m.grad);
            int64_t n = how->parts(&a);
            for (int64_t i = 0; i < n; i++) {
                kn_dnn_args to;
                how->part(&a, i, &to);
                check_part(&to.attention_grad, n);
                KN_CHECK(reference()->run[KN_K_ATTENTION_GRAD](&to) == KN_DONE);
            }
            for (int64_t row = 0, all = (heads + 2 * G) * D; row < B * T; row++)
                KN_CHECK(memcmp(whole + row * all, m.grad + row * all, (size_t)all * 4) == 0,
                         "%d heads, at most %lld: %lld parts, row %lld", heads, (long long)most,
                         (long long)n, (long long)row);
            cut += n > 1;
            KN_CHECK(most < 100 || n == 1, "all fits");
        }
    }
    KN_CHECK(cut > 50);
}
