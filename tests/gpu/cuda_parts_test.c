/* tests/gpu/cuda_parts_test.c: a deterministic backward of attention through cuDNN is computed in
 * parts that fit its workspace. Here the CPU's reference computes the parts: the same bits as of
 * the whole. And with dropout forward and backward agree whether cuDNN computes them. */
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

/* ---- dropout --------------------------------------------------------------------------------- */

/* A call of bf16 whose arrays have places but no bytes; its backward with gradients in other
 * places, dense or with rows of three heads' channels. */
typedef struct call {
    kn_attention_args forward;
    kn_attention_grad_args backward;
} call;

static kn_array place(int64_t heads, int64_t row)
{
    kn_array a = kn_array_make((void *)4096, KN_BF16, 4, (int64_t[]){ B, heads, T, D });
    a.stride[0] = T * row, a.stride[1] = D, a.stride[2] = row;
    return a;
}

static call call_of(double dropout, bool packed)
{
    const int64_t all = 12 * D;
    const kn_array q = place(6, all), k = place(G, all), d = place(6, packed ? all : 6 * D);
    call c = { .forward = { .o = place(6, 6 * D),
                            .lse = kn_array_make((void *)4096, KN_F32, 3, (int64_t[]){ B, 6, T }),
                            .q = q,
                            .k = k,
                            .v = k,
                            .causal = true,
                            .dropout_p = dropout } };
    c.backward = (kn_attention_grad_args){ .dq = d,
                                           .dk = packed ? k : place(G, G * D),
                                           .dv = packed ? k : place(G, G * D),
                                           .dout = d,
                                           .o = c.forward.o,
                                           .lse = c.forward.lse,
                                           .q = q,
                                           .k = k,
                                           .v = k,
                                           .causal = true,
                                           .dropout_p = dropout };
    return c;
}

static bool described(const kn_dnn_kernel *how, const void *args, kn_dnn_problem *p)
{
    memset(p, 0, sizeof *p);
    p->arch = 90;
    return how->describe(p, args);
}

static bool same_plan(const kn_dnn_problem *a, const kn_dnn_problem *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* Both ask for the plans of the same problems: the forward, and the dense backward. */
static void check_agreement(const call *c, bool takes)
{
    kn_dnn_problem forward, dense, asked;
    kn_dnn_args to;
    kn_kernel k;
    const kn_dnn_kernel *need = kn_dnn_attention_forward.needs(&c->forward, 0, &k, &to);
    KN_CHECK(need == &kn_dnn_attention_backward_dense && k == KN_K_ATTENTION_GRAD);
    KN_CHECK(described(&kn_dnn_attention_forward, &c->forward, &forward));
    KN_CHECK(described(need, &to, &dense) == takes);
    KN_CHECK(!kn_dnn_attention_forward.needs(&c->forward, 1, &k, &to));
    const kn_dnn_kernel *const ways[] = { &kn_dnn_attention_backward,
                                          &kn_dnn_attention_backward_dense };
    for (int i = 0; i < 2; i++) {
        KN_CHECK(described(ways[i], &c->backward, &asked) == takes);
        KN_CHECK(i == 0 || !takes || same_plan(&asked, &dense), "the plan that the forward saw");
        need = ways[i]->needs(&c->backward, 0, &k, &to);
        KN_CHECK(need == &kn_dnn_attention_forward && k == KN_K_ATTENTION);
        KN_CHECK(described(need, &to, &asked) && same_plan(&asked, &forward));
        need = ways[i]->needs(&c->backward, 1, &k, &to);
        KN_CHECK(need == &kn_dnn_attention_backward_dense && described(need, &to, &asked) == takes);
        KN_CHECK(!takes || same_plan(&asked, &dense));
        KN_CHECK(!ways[i]->needs(&c->backward, 2, &k, &to));
    }
}

KN_TEST(cuda_parts, forward_and_backward_agree_on_dropout)
{
    kn_dnn_attention_most = (uint64_t)1 << 30;
    for (int i = 0; i < 4; i++) {
        const call c = call_of(i & 1 ? 0.1 : 0.5, i & 2);
        kn_cuda_deterministic(false);
        check_agreement(&c, true);
        kn_cuda_deterministic(true);
        check_agreement(&c, true);
        kn_dnn_attention_most = 1; /* parts, which would draw other elements */
        check_agreement(&c, false);
        kn_dnn_attention_most = (uint64_t)1 << 30;
        kn_cuda_deterministic(false);
    }
    kn_dnn_problem a, b;
    kn_dnn_args to;
    kn_kernel k;
    const call none = call_of(0, false), some = call_of(0.1, false), more = call_of(0.2, false);
    KN_CHECK(described(&kn_dnn_attention_forward, &some.forward, &a) &&
             described(&kn_dnn_attention_forward, &more.forward, &b) && !same_plan(&a, &b));
    KN_CHECK(!kn_dnn_attention_forward.needs(&none.forward, 0, &k, &to) &&
             !kn_dnn_attention_backward.needs(&none.backward, 0, &k, &to));
    KN_CHECK(!described(&kn_dnn_attention_backward_dense, &none.backward, &a));
}

/* What a plan with dropout is bound to: a seed and an offset of the call's draw, and 1 / keep. */
KN_TEST(cuda_parts, dropout_is_bound)
{
    const uint64_t at = 5;
    const kn_dnn_kernel *const ways[] = { &kn_dnn_attention_forward, &kn_dnn_attention_backward,
                                          &kn_dnn_attention_backward_dense };
    for (int i = 0; i < 3; i++) {
        call c = call_of(0.25, true);
        c.forward.seed = c.backward.seed = 3, c.forward.stream = c.backward.stream = 4;
        c.forward.seed_at = c.backward.seed_at = &at;
        const void *args = i ? (const void *)&c.backward : &c.forward;
        kn_dnn_problem p;
        kn_dnn_pack b = { 0 };
        KN_CHECK(described(ways[i], args, &p));
        ways[i]->bind(&b, &p, args);
        KN_CHECK(b.draw.used && b.draw.seed == 3 && b.draw.stream == 4 && b.draw.seed_at == &at);
        KN_CHECK(b.room[b.draw.at] >= 8 && b.room[b.draw.at + 1] >= 8 && b.n <= KN_DNN_BOUND);
        bool scale = false, keep = i == 0;
        for (int s = 0; s < b.scalars; s++) {
            scale = scale || b.scalar[s] == (float)(1 / 0.75);
            keep = keep || b.scalar[s] == 0.75f;
        }
        KN_CHECK(scale && keep && b.scalars <= KN_DNN_SCALARS && b.copies == (i == 2 ? 4 : 0));
    }
}
