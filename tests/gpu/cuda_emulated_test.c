/* tests/gpu/cuda_emulated_test.c: parts of the CUDA kernels that the overlay's cases don't reach,
 * on the host (tests/gpu/emulator/emulate.h), and the emulator itself. */
#include "kernels/cuda/kernels/cuda_internal.h"
#include "tests/kernels/overlay.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* The provider has no fallback: an empty entry is a call that fails on a GPU. */
KN_TEST(cuda_emulated, no_entry_is_empty)
{
    for (int k = 0; k < KN_K_COUNT; k++)
        KN_CHECK(kn_cuda_kernels.run[k], "%s has no kernel", kn_kernel_name((kn_kernel)k));
}

/* ---- the emulator ---------------------------------------------------------------------------- */

kn_status emulated_sums(long long *out, int blocks, int threads);
kn_status emulated_swap(int *out, int threads);
kn_status emulated_lost_barrier(int *out);
kn_status emulated_flat_barrier(int *out);
kn_status emulated_too_many(int *out);

KN_TEST(cuda_emulated, blocks_and_shuffles)
{
    static const int sizes[] = { 32, 64, 256, 1024, 96 };
    for (int s = 0; s < 5; s++) {
        long long out[5], n = sizes[s];
        KN_CHECK(emulated_sums(out, 5, sizes[s]) == KN_DONE);
        for (long long b = 0; b < 5; b++)
            KN_CHECK(out[b] == b * n * n + n * (n - 1) / 2, "block %lld of %lld threads: %lld", b,
                     n, out[b]);
    }
    int swapped[64];
    KN_CHECK(emulated_swap(swapped, 64) == KN_DONE);
    for (int i = 0; i < 64; i++)
        KN_CHECK(swapped[i] == (i ^ 5) * 3000 + i * 3, "lane %d: %d", i, swapped[i]);
}

/* A GPU might miss these faults or hang, or not start a block beyond the kernel's bound. */
KN_TEST(cuda_emulated, faults_of_a_kernel_end_the_program)
{
    static kn_status (*const faults[])(int *) = { emulated_lost_barrier, emulated_flat_barrier,
                                                  emulated_too_many };
    for (int i = 0; i < 3; i++) {
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            int out[96];
            close(2);
            faults[i](out);
            _exit(0);
        }
        int status = 0;
        KN_CHECK(waitpid(child, &status, 0) == child, "no child");
        KN_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "status %x, fault %d",
                 (unsigned)status, i);
    }
}

/* ---- copy ------------------------------------------------------------------------------------ */

/* Values at the edges of every dtype, into every other one. */
KN_TEST(cuda_emulated, copy_edges)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16, KN_F64,
                                      KN_I64, KN_I32,  KN_U8,  KN_BOOL };
    static const int64_t whole[] = { 0,
                                     1,
                                     -1,
                                     INT64_MAX,
                                     INT64_MIN,
                                     INT32_MAX,
                                     INT32_MIN,
                                     1LL << 40,
                                     (1LL << 53) + 1,
                                     (1LL << 60) + 129,
                                     -((1LL << 54) + 3),
                                     16777217,
                                     255,
                                     256 };
    static const double real[] = { 0.5,          -0.5,         255.9,    -1e300,    1e300,
                                   2147483647.5, 9.3e18,       -9.3e18,  65519.999, 65520,
                                   1e-8,         3.4028236e38, INFINITY, NAN };
    enum { COUNT = 14 };
    for (int i = 0; i < 64; i++) {
        kn_dtype from = types[i / 8], to = types[i % 8];
        overlay_case *c = case_begin(KN_K_COPY, (uint64_t)i);
        kn_array src = case_vector(c, from, NORMAL, COUNT), dst = case_vector(c, to, UNSET, COUNT);
        for (int k = 0; k < COUNT; k++) {
            if (from == KN_I64)
                ((int64_t *)src.data)[k] = whole[k];
            else if (kn_dtype_is_float(from))
                case_set(&src, k, real[k]);
            else
                case_set(&src, k, (double)(whole[k] % 128));
        }
        case_close(c, &dst, 0);
        c->rel[0] = 0;
        c->abs[0] = 1e-300; /* exact but for the bits of NaN */
        kn_copy_args args = { dst, src };
        case_run(c, &args);
    }
}

/* (B, T, H, D) to every order of its dims, and back by strides. */
OVERLAY(cuda_emulated, copy_permuted, COPY, 1000, 7 * 24)
{
    static const kn_dtype pairs[][2] = { { KN_F32, KN_F32 }, { KN_BF16, KN_F32 },
                                         { KN_F32, KN_F16 }, { KN_BF16, KN_BF16 },
                                         { KN_F64, KN_F64 }, { KN_I8, KN_I8 },
                                         { KN_F16, KN_BF16 } };
    int64_t shape[4] = { 2, 40, 3, 33 };
    kn_dtype to = pairs[i % 7][0], from = pairs[i % 7][1];
    kn_array src = case_array(c, from, DENSE, NORMAL, 4, shape);
    int order[4] = { 0, 1, 2, 3 }, code = i / 7;
    for (int d = 0; d < 4; d++) { /* the code-th permutation */
        int other = d + code % (4 - d), kept = order[d];
        code /= 4 - d;
        order[d] = order[other];
        order[other] = kept;
    }
    kn_array view = src;
    for (int d = 0; d < 4; d++) {
        view.shape[d] = src.shape[order[d]];
        view.stride[d] = src.stride[order[d]];
    }
    kn_array dst = case_array(c, to, DENSE, UNSET, 4, view.shape);
    case_note(c, " order %d%d%d%d", order[0], order[1], order[2], order[3]);
    case_exact(c, &dst);
    kn_copy_args args = { dst, view };
    case_run(c, &args);
}

/* ---- indices --------------------------------------------------------------------------------- */

/* Thousands of positions: several tiles, several passes of the sort, rows that occur hundreds of
 * times. */
OVERLAY(cuda_emulated, index_add_long, INDEX_ADD, 5000, 40)
{
    static const kn_dtype pairs[][2] = { { KN_F32, KN_F32 },   { KN_F32, KN_BF16 },
                                         { KN_BF16, KN_BF16 }, { KN_F16, KN_F32 },
                                         { KN_F64, KN_F32 },   { KN_F32, KN_F64 },
                                         { KN_BF16, KN_F64 },  { KN_I64, KN_U8 },
                                         { KN_U8, KN_I64 },    { KN_BOOL, KN_I32 } };
    static const int64_t rows[] = { 1, 255, 256, 70000 };
    int64_t n = rows[i / 10], m = 1 + case_pick(c, 5000), C = i % 3 ? 16 : 7;
    kn_array index = case_vector(c, i % 2 ? KN_I64 : KN_I32, NORMAL, m);
    for (int64_t k = 0; k < m; k++)
        case_set(&index, k, (double)(case_pick(c, 4) ? case_pick(c, n) : n / 2));
    int64_t full[2] = { n, C }, some[2] = { m, C };
    kn_array dst = case_array(c, pairs[i % 10][0], DENSE, NORMAL, 2, full);
    kn_array src = case_array(c, pairs[i % 10][1], DENSE, NORMAL, 2, some);
    case_exact(c, &dst);
    kn_index_add_args args = { dst, src, index, 0 };
    case_run(c, &args);
}

/* An index outside is an error, and neither read nor written through. */
KN_TEST(cuda_emulated, bad_indices_touch_nothing)
{
    for (int add = 0; add < 2; add++) {
        float full[9] = { 1, 2, 3, 4, 5, 6, 7, 8, 9 }, some[9] = { 0 };
        int32_t at[3] = { 2, -1, 1 };
        kn_array f = kn_array_make(full, KN_F32, 2, (int64_t[]){ 3, 3 });
        kn_array s = kn_array_make(some, KN_F32, 2, (int64_t[]){ 3, 3 });
        kn_array index = kn_array_make(at, KN_I32, 1, (int64_t[]){ 3 });
        kn_index_select_args select = { s, f, index, 0 };
        kn_index_add_args sum = { f, s, index, 0 };
        kn_status status = kn_cuda_kernels.run[add ? KN_K_INDEX_ADD : KN_K_INDEX_SELECT](
            add ? (const void *)&sum : (const void *)&select);
        KN_CHECK(status == KN_FAILED, "taken");
        KN_CHECK_ERROR("index -1 at position 1");
        for (int k = 0; k < 9; k++)
            KN_CHECK(full[k] == (float)(k + 1), "element %d is %g", k, full[k]);
        for (int k = 3; k < 6; k++)
            KN_CHECK(some[k] == 0, "element %d is %g", k, some[k]);
    }
}

/* ---- sums and optimizers --------------------------------------------------------------------- */

OVERLAY(cuda_emulated, sum_n_of_all_floats, SUM_N, 1000, 64)
{
    static const kn_dtype floats[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };
    kn_sum_n_args a = {
        .n = i / 16, .count = 1037, .dst_dtype = floats[i % 4], .src_dtype = floats[i / 4 % 4]
    };
    for (int j = 0; j < a.n; j++)
        a.src[j] = case_vector(c, a.src_dtype, FINITE, a.count).data;
    kn_array dst = case_vector(c, a.dst_dtype, NORMAL, a.count);
    a.dst = dst.data;
    a.acc = i % 3 ? NULL : dst.data;
    case_exact(c, &dst);
    case_run(c, &a);
}

/* The overlay allows vector providers a rounding; here every bit is the reference's. */
KN_TEST(cuda_emulated, optimizers_have_the_bits_of_the_reference)
{
    static const kn_dtype grads[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };
    for (int i = 0; i < 72; i++) {
        bool adamw = i % 3 == 0, lion = i % 3 == 1, momentum = lion || i / 3 % 3 > 0;
        kn_kernel kernel = adamw ? KN_K_ADAMW : lion ? KN_K_LION : KN_K_SGD;
        overlay_case *c = case_begin(kernel, 1000 + (uint64_t)i);
        static const kn_dtype masters[] = { KN_F32, KN_BF16, KN_F64, KN_F16 };
        double lr = 3e-4, scale = i % 4 ? 0.37 : 1, step = 1 + i % 5 * 40, limit = 0.3;
        uint64_t seed = (uint64_t)i;
        kn_opt_piece piece[3];
        for (int k = 0; k < 3; k++) { /* several kinds of masters in one call */
            kn_dtype t = masters[(i + k * 3) % 4], g = grads[(i / 4 + k) % 4];
            int64_t n = k == 0 ? 4096 * 3 + i : 1 + case_pick(c, 300);
            kn_array p = case_array(c, t, k == 1 ? OFFSET : DENSE, NORMAL, 1, &n);
            kn_array m = case_vector(c, t, SMALL, n), v = case_vector(c, t, POSITIVE, n);
            case_exact(c, &p);
            if (adamw || momentum)
                case_exact(c, &m);
            if (adamw)
                case_exact(c, &v);
            kn_dtype to = grads[(i / 4 + k + 1) % 4];
            kn_array out = case_array(c, to, k == i % 2 ? OFFSET : DENSE, UNSET, 1, &n);
            case_exact(c, &out);
            piece[k] = (kn_opt_piece){ .param = p.data,
                                       .grad = case_vector(c, g, NORMAL, n).data,
                                       .m = adamw || momentum ? m.data : NULL,
                                       .v = adamw ? v.data : NULL,
                                       .count = n,
                                       .lr_mul = k == 1 ? 0.5f : 1,
                                       .weight_decay = k == 2 ? 0 : 0.1f,
                                       .param_dtype = t,
                                       .grad_dtype = g,
                                       .out = out.data,
                                       .out_dtype = to,
                                       .place = { 3, 1 + k, k == 2 ? 7 : 0, 90 } };
        }
        kn_opt_step of = {
            piece, 3, &lr, &scale, &step, NULL, i % 5 < 2 ? &limit : NULL, i % 3 ? &seed : NULL
        };
        kn_adamw_args w = { of, 0.9, 0.95, 1e-8 };
        kn_lion_args l = { of, 0.9, 0.99 };
        kn_sgd_args s = { of, 0.9, 0.1, i % 4 == 0 };
        case_run(c, adamw ? (const void *)&w : lion ? (const void *)&l : (const void *)&s);
    }
}

OVERLAY(cuda_emulated, powsum, POWSUM, 0, 32)
{
    static const double powers[] = { 1, 3, 0.5, 2.5 };
    kn_run run[2];
    for (int k = 0; k < 2; k++) {
        run[k].count = k ? case_size(c, 1000) : 1 + case_pick(c, 9000);
        run[k].dtype = case_float(c);
        run[k].data = case_vector(c, run[k].dtype, i % 3 ? NORMAL : FINITE, run[k].count).data;
    }
    kn_array max = case_vector(c, KN_F32, UNSET, 1), limbs = case_vector(c, KN_I64, UNSET, 4);
    kn_absmax_args find = { run, 2, max.data };
    kn_powsum_args sum = { run, 2, max.data, powers[i % 4], limbs.data };
    case_exact(c, &limbs);
    case_prepare(KN_K_ABSMAX, &find);
    case_run(c, &sum);
}
