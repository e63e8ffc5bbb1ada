/* tests/gpu/cuda_attention_test.c: attention of the CUDA kernels with heads and lengths beyond
 * those of the overlay's cases: every tile size, several tiles, queries without keys. */
#include "kernels/philox.h"
#include "tests/gpu/emulator/emulated.h"
#include "tests/kernels/overlay.h"

static kn_attention_args attention_case(overlay_case *c, int i)
{
    static const int64_t dims[] = { 65, 128, 200, 256, 48, 20 };
    static const int64_t sizes[][2] = { { 70, 70 }, { 33, 90 }, { 90, 40 }, { 1, 130 }, { 66, 1 } };
    static const kn_dtype types[] = { KN_F32, KN_F64, KN_BF16, KN_F32, KN_F16 };
    int64_t D = dims[i % 6], H = 1 + i % 2, T = sizes[i % 5][0], S = sizes[i % 5][1];
    kn_dtype t = types[i / 6 % 5];
    kn_attention_args a = {
        .scale = 1 / sqrt((double)D), .causal = i / 2 % 2, .seed = 3, .stream = 4
    };
    a.dropout_p = i % 4 == 3 ? 0.3 : 0;
    /* q, k and v in one array [1, rows, 3 heads, D], as packed by one product */
    int64_t qs[4] = { 1, H, T, D }, ks[4] = { 1, 1, S, D }, ls[3] = { 1, H, T };
    int64_t packed[3] = { T > S ? T : S, H + 2, D };
    kn_array all = case_array(c, t, DENSE, NORMAL, 3, packed);
    kn_array *part[3] = { &a.q, &a.k, &a.v };
    for (int p = 0; p < 3; p++) {
        *part[p] = kn_array_make(NULL, t, 4, p ? ks : qs);
        part[p]->data = (char *)all.data + (p ? H + p - 1 : 0) * D * (int64_t)kn_dtype_size(t);
        part[p]->stride[0] = packed[0] * packed[1] * D;
        part[p]->stride[1] = D;
        part[p]->stride[2] = packed[1] * D;
    }
    a.o = case_array(c, t, DENSE, UNSET, 4, qs);
    a.lse = case_array(c, t == KN_F64 ? KN_F64 : KN_F32, DENSE, UNSET, 3, ls);
    int64_t ms[4] = { 1, H, T, S };
    a.window = a.causal && i % 3 == 1 ? 1 + 13 * (i % 5) : 0;
    if (i % 3 == 2)
        a.mask = case_array(c, i % 2 ? KN_BOOL : t, i % 4 ? DENSE : ONE_COLUMN, NORMAL, 4, ms);
    for (int64_t s = 0; s < S && i % 3 == 2; s += 3) /* in the last row */
        case_set(&a.mask, (T - 1) * a.mask.stride[2] + s * a.mask.stride[3], i % 2 ? 0 : -INFINITY);
    case_note(c, "%s dropout %g window %lld%s", a.causal ? " causal" : "", a.dropout_p,
              (long long)a.window, a.mask.data ? " mask" : "");
    return a;
}

OVERLAY(cuda_attention, forward, ATTENTION, 0, 30)
{
    kn_attention_args args = attention_case(c, i);
    case_close(c, &args.o, 4e-5); /* z of up to 20 has an error of 2e-6, values of up to 6 */
    case_close(c, &args.lse, 1e-5);
    case_run(c, &args);
}

OVERLAY(cuda_attention, backward, ATTENTION_GRAD, 0, 30)
{
    kn_attention_args f = attention_case(c, i);
    case_prepare(KN_K_ATTENTION, &f);
    kn_attention_grad_args a = case_attention_grad(&f);
    a.dout = case_array(c, f.q.dtype, DENSE, NORMAL, 4, f.q.shape);
    a.dq = case_array(c, f.q.dtype, DENSE, UNSET, 4, f.q.shape);
    a.dk = case_array(c, f.q.dtype, STRIDED, UNSET, 4, f.k.shape);
    a.dv = case_array(c, f.q.dtype, DENSE, UNSET, 4, f.k.shape);
    /* o as stored carries its rounding into delta = dout . o: in bf16 by 2^-9 of it */
    double scale = f.q.dtype == KN_BF16 ? 4e-3 : f.q.dtype == KN_F16 ? 5e-4 : 1e-4;
    case_close(c, &a.dq, scale);
    case_close(c, &a.dk, scale * 2);
    case_close(c, &a.dv, scale);
    case_dmask(c, &a, scale);
    case_run(c, &a);
}

/* The seed that cuDNN's dropout gets: another for each seed and each stream, and the same one
 * whether the seed is a value or lies in memory, as in a recorded step. */
KN_TEST(cuda_attention, key_of_another_generator)
{
    uint64_t key[64], offset, at;
    for (uint64_t i = 0; i < 64; i++) {
        const uint64_t seed = i / 8 << 40 | 3, stream = i % 8 << 33 | 5;
        const kn_philox4 words = kn_philox(seed, stream, 0);
        offset = 1, at = seed;
        KN_CHECK(emulated_draw_key(&key[i], &offset, seed, NULL, stream) == KN_DONE);
        KN_CHECK(offset == 0 && key[i] == (words.word[0] | (uint64_t)words.word[1] << 32));
        KN_CHECK(emulated_draw_key(&offset, &at, 7, &at, stream) == KN_DONE && at == 0 &&
                 offset == key[i]);
        for (uint64_t j = 0; j < i; j++)
            KN_CHECK(key[j] != key[i] && (uint32_t)key[j] != (uint32_t)key[i]);
    }
}
