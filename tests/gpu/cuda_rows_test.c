/* tests/gpu/cuda_rows_test.c: rows and reductions of the CUDA kernels in sizes that the overlay's
 * cases don't have: rows of a block, kept in shared memory and too long for it; folds in several
 * parts. */
#include "tests/kernels/overlay.h"

static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };

/* Rows of a warp, of a block, and beyond 48 KB; dense and not. */
static const int64_t lengths[] = { 520, 1500, 2600, 6000, 6001, 13000 };

static kn_array rows_array(overlay_case *c, int i, layout l, values v)
{
    int64_t shape[2] = { 3, lengths[i % 6] };
    return case_array(c, types[(i + i / 6) % 4], l, v, 2, shape);
}

OVERLAY(cuda_rows, softmax, SOFTMAX, 0, 24)
{
    kn_softmax_args a = { .log = i % 2 };
    a.x = rows_array(c, i, i % 5 == 4 ? STRIDED : DENSE, NORMAL);
    a.y = i % 3 == 2 ? a.x : rows_array(c, i, DENSE, UNSET);
    case_close(c, &a.y, i % 2 ? 1e-5 : 1e-7);
    case_run(c, &a);

    c = case_begin(KN_K_SOFTMAX_GRAD, (uint64_t)i);
    kn_softmax_grad_args g = { .log = i % 2 };
    g.dy = rows_array(c, i, DENSE, NORMAL);
    g.y = rows_array(c, i, DENSE, SMALL);
    g.dx = i % 3 == 2 ? g.dy : rows_array(c, i, i % 5 == 4 ? STRIDED : DENSE, UNSET);
    case_close(c, &g.dx, i % 2 ? 3e-3 : 1e-4);
    case_run(c, &g);
}

OVERLAY(cuda_rows, cross_entropy, CROSS_ENTROPY, 0, 24)
{
    kn_cross_entropy_args f = { .ignore_index = 7, .smoothing = i % 3 ? 0 : 0.1 };
    f.logits = rows_array(c, i, i % 5 == 4 ? PITCHED : DENSE, NORMAL);
    f.targets = case_vector(c, KN_I64, NORMAL, 3);
    case_set(&f.targets, 0, (double)(lengths[i % 6] - 1));
    case_set(&f.targets, 1, i % 2 ? 7 : 0);
    case_set(&f.targets, 2, 8);
    for (int64_t v = 0; v < lengths[i % 6] && i % 4 == 1; v++) /* a row without a distribution */
        case_set(&f.logits, f.logits.stride[0] + v, -INFINITY);
    kn_dtype stat = f.logits.dtype == KN_F64 ? KN_F64 : KN_F32;
    f.loss = case_vector(c, stat, UNSET, 1);
    f.count = case_vector(c, stat, UNSET, 1);
    f.lse = case_vector(c, stat, UNSET, 3);
    case_close(c, &f.loss, 1e-5);
    case_close(c, &f.count, 0);
    case_close(c, &f.lse, 1e-6);
    case_run(c, &f);

    kn_cross_entropy_args part = f;
    part.part = true;
    part.dlogits = rows_array(c, i, i % 5 == 4 ? PITCHED : DENSE, UNSET);
    case_close(c, &part.dlogits, 1e-6);
    case_run(c, &part);

    c->kernel = KN_K_CROSS_ENTROPY_GRAD;
    c->outs = 0;
    case_prepare(KN_K_CROSS_ENTROPY, &f);
    kn_array dloss = case_vector(c, stat, NORMAL, 1);
    kn_cross_entropy_grad_args g = { f.logits, f.logits, f.targets,      f.lse,
                                     f.count,  dloss,    f.ignore_index, f.smoothing };
    case_close(c, &g.dlogits, 1e-6);
    case_run(c, &g);
}

OVERLAY(cuda_rows, norm, NORM, 0, 12)
{
    int64_t C = lengths[i % 6];
    kn_norm_args f = { .eps = 1e-5, .rms = i / 2 % 2 };
    f.x = rows_array(c, i, i % 5 == 4 ? PITCHED : DENSE, NORMAL);
    f.y = rows_array(c, i, DENSE, UNSET);
    if (i % 3 == 1) {
        f.add = rows_array(c, i, i % 5 == 1 ? PITCHED : DENSE, NORMAL);
        f.sum = i % 2 ? f.x : f.add;
        case_exact(c, &f.sum);
    }
    kn_dtype t = f.x.dtype, stat = t == KN_F64 ? KN_F64 : KN_F32, wt = i % 4 ? t : KN_F32;
    f.w = case_vector(c, wt, NORMAL, C);
    if (!f.rms)
        f.b = case_vector(c, wt, NORMAL, C);
    f.mean = case_vector(c, stat, UNSET, 3);
    f.rstd = case_vector(c, stat, UNSET, 3);
    case_close(c, &f.y, 1e-5);
    if (!f.rms)
        case_close(c, &f.mean, 1e-6);
    case_close(c, &f.rstd, 1e-6);
    case_run(c, &f);

    c->kernel = KN_K_NORM_GRAD;
    c->outs = 0;
    case_prepare(KN_K_NORM, &f);
    kn_norm_grad_args g = {
        .x = f.add.data ? f.sum : f.x, .w = f.w, .mean = f.mean, .rstd = f.rstd, .rms = f.rms
    };
    g.dy = rows_array(c, i, DENSE, NORMAL);
    if (i % 7 != 3)
        g.dx = rows_array(c, i, DENSE, NORMAL);
    if (i % 3 == 2)
        g.more = i % 2 && g.dx.data ? g.dx : rows_array(c, i, DENSE, NORMAL);
    if (i % 4 != 1)
        g.dw = case_vector(c, wt, UNSET, C);
    if (i % 4 != 2)
        g.db = case_vector(c, wt, UNSET, C);
    if (g.dx.data)
        case_close(c, &g.dx, 2e-5);
    if (g.dw.data)
        case_close(c, &g.dw, 2e-5);
    if (g.db.data)
        case_close(c, &g.db, 2e-5);
    case_run(c, &g);
}

/* Few outputs of many elements, along either dim: parts, rows of a block, and few wide columns. */
OVERLAY(cuda_rows, folds_in_parts, REDUCE, 0, 5 * 8 * 4)
{
    static const int64_t shapes[][2] = {
        { 1, 40000 }, { 3, 17000 }, { 2100, 40 }, { 5000, 3 }, { 20001, 1 }
    };
    static const kn_dtype all[] = {
        KN_F32, KN_BF16, KN_F16, KN_F64, KN_I64, KN_I32, KN_U8, KN_BOOL
    };
    const int64_t *shape = shapes[i % 5];
    kn_dtype t = all[i / 5 % 8];
    bool floats = kn_dtype_is_float(t);
    kn_reduce_kind kind = (kn_reduce_kind)(i / 40);
    if (kind == KN_MEAN && !floats)
        kind = KN_ARGMAX;
    int dim = shape[0] > shape[1] ? 0 : 1;
    int64_t to[2] = { dim == 0 ? 1 : shape[0], dim == 1 ? 1 : shape[1] };
    kn_dtype out = kind == KN_ARGMAX || (kind == KN_SUM && !floats) ? KN_I64 : t;
    layout l = i % 3 == 2 ? TRANSPOSED : DENSE;
    values v = kind >= KN_MAX && i % 2 ? SPECIAL : NORMAL;
    kn_reduce_args a = { .kind = kind, .src = case_array(c, t, l, v, 2, shape) };
    a.dst = case_array(c, out, DENSE, UNSET, 2, to);
    case_note(c, " kind %d", kind);
    case_close(c, &a.dst, kind == KN_SUM ? 1e-4 : kind == KN_MEAN ? 1e-6 : 0);
    case_run(c, &a);
}

/* Columns in 1 to 260 parts (of 64 rows each) and outputs to either side of a block of threads:
 * where the parts of an output begin to be shared among threads, and where a thread's loads begin
 * to be several rounds. */
OVERLAY(cuda_rows, parts_are_joined, REDUCE, 7000, 14 * 6)
{
    static const int64_t parts[] = { 1, 2, 7, 15, 16, 17, 31, 33, 127, 128, 129, 145, 256, 260 };
    static const int64_t outputs[] = { 1, 31, 32, 33, 72, 257 };
    int64_t shape[2] = { 64 * parts[i % 14] + (i % 3 ? 0 : 63), outputs[i / 14] };
    if (shape[0] * shape[1] > 1200000 && parts[i % 14] != 129)
        return; /* many of many: one is enough */
    kn_reduce_kind kind = i % 4 ? KN_SUM : i % 8 ? KN_ARGMAX : KN_MEAN;
    kn_dtype t = i % 5 == 4 ? KN_I32 : types[i % 7 % 4];
    kind = t == KN_I32 && kind == KN_MEAN ? KN_MAX : kind;
    kn_reduce_args a = { .kind = kind, .src = case_array(c, t, DENSE, SMALL, 2, shape) };
    kn_dtype out = kind == KN_ARGMAX || (kind == KN_SUM && t == KN_I32) ? KN_I64 : t;
    shape[0] = 1;
    a.dst = case_array(c, out, DENSE, UNSET, 2, shape);
    case_note(c, " %lld parts of %lld outputs, kind %d", (long long)parts[i % 14],
              (long long)shape[1], kind);
    case_close(c, &a.dst, kind == KN_SUM ? 1e-5 : kind == KN_MEAN ? 1e-6 : 0);
    case_run(c, &a);
}

OVERLAY(cuda_rows, powsum, POWSUM, 0, 12)
{
    kn_run run[2];
    for (int k = 0; k < 2; k++) {
        run[k].dtype = types[(i + k) % 4];
        run[k].count = k ? 5000 : case_size(c, 1000);
        run[k].data = case_vector(c, run[k].dtype, NORMAL, run[k].count).data;
    }
    kn_array max = case_vector(c, KN_F32, UNSET, 1), limbs = case_vector(c, KN_I64, UNSET, 4);
    kn_absmax_args find = { run, 2, max.data };
    case_prepare(KN_K_ABSMAX, &find);
    kn_powsum_args a = { run, 2, max.data, i % 3 == 0 ? 1 : i % 3 == 1 ? 3 : 0.5, limbs.data };
    case_exact(c, &limbs);
    case_run(c, &a);
}

/* An array of the same values at an odd address. */
static kn_array moved(overlay_case *c, const kn_array *a)
{
    kn_array b = case_array(c, a->dtype, OFFSET, NORMAL, a->ndim, a->shape);
    for (int64_t i = 0; i < kn_array_numel(a); i++)
        case_set(&b, i, case_get(a, i));
    return b;
}

static void run_own(kn_kernel k, const void *args)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    KN_CHECK(overlay_providers(providers) == 1 && providers[0]->run[k](args) == KN_DONE);
}

static void check_same(kn_kernel k, const kn_array *a, const kn_array *b)
{
    KN_CHECK(memcmp(a->data, b->data, (size_t)kn_array_numel(a) * kn_dtype_size(a->dtype)) == 0,
             "%s: other bits at an odd address in %s", kn_kernel_name(k), kn_dtype_name(a->dtype));
}

/* A flat shard may put a parameter anywhere: no bit may depend on the address. */
OVERLAY(cuda_rows, addresses_do_not_matter, NORM, 0, 12)
{
    kn_dtype t = types[(i + i / 6) % 4], stat = t == KN_F64 ? KN_F64 : KN_F32;
    kn_array x[2], y[2], w[2], dy[2], dw[2], mean[2], rstd[2], s[2], z[2];
    int64_t C = lengths[i % 6], one[2] = { 3, 1 };
    x[0] = rows_array(c, i, DENSE, NORMAL);
    x[1] = moved(c, &x[0]);
    w[0] = case_vector(c, t, NORMAL, C);
    w[1] = moved(c, &w[0]);
    dy[0] = rows_array(c, i, DENSE, NORMAL);
    dy[1] = moved(c, &dy[0]);
    for (int k = 0; k < 2; k++) {
        layout l = k ? OFFSET : DENSE;
        y[k] = rows_array(c, i, l, UNSET);
        z[k] = rows_array(c, i, l, UNSET);
        dw[k] = case_array(c, t, l, UNSET, 1, &C);
        mean[k] = case_vector(c, stat, UNSET, 3);
        rstd[k] = case_vector(c, stat, UNSET, 3);
        s[k] = case_array(c, t, l, UNSET, 2, one);
        kn_norm_args norm = { .y = y[k],
                              .x = x[k],
                              .w = w[k],
                              .mean = mean[k],
                              .rstd = rstd[k],
                              .add = dy[k],
                              .sum = z[k],
                              .eps = 1e-5 };
        run_own(KN_K_NORM, &norm);
    }
    check_same(KN_K_NORM, &y[0], &y[1]);
    check_same(KN_K_NORM, &z[0], &z[1]);
    for (int k = 0; k < 2; k++) {
        kn_norm_grad_args grad = { .dx = y[k],
                                   .dw = dw[k],
                                   .dy = dy[k],
                                   .x = x[k],
                                   .w = w[k],
                                   .mean = mean[0],
                                   .rstd = rstd[0],
                                   .more = z[k] };
        run_own(KN_K_NORM_GRAD, &grad);
    }
    check_same(KN_K_NORM_GRAD, &y[0], &y[1]);
    check_same(KN_K_NORM_GRAD, &dw[0], &dw[1]);
    for (int k = 0; k < 2; k++) {
        kn_softmax_args soft = { y[k], x[k], false };
        run_own(KN_K_SOFTMAX, &soft);
        kn_reduce_args sum = { s[k], x[k], KN_SUM };
        run_own(KN_K_REDUCE, &sum);
    }
    check_same(KN_K_SOFTMAX, &y[0], &y[1]);
    check_same(KN_K_REDUCE, &s[0], &s[1]);
    kn_array targets = case_vector(c, KN_I32, NORMAL, 3), total[2],
             count = case_vector(c, stat, UNSET, 1);
    for (int k = 0; k < 3; k++)
        case_set(&targets, k, k);
    for (int k = 0; k < 2; k++) {
        total[k] = case_vector(c, stat, UNSET, 1);
        kn_cross_entropy_args loss = { .loss = total[k],
                                       .count = count,
                                       .lse = mean[k],
                                       .logits = x[k],
                                       .targets = targets,
                                       .ignore_index = -1,
                                       .smoothing = 0.1 };
        run_own(KN_K_CROSS_ENTROPY, &loss);
    }
    check_same(KN_K_CROSS_ENTROPY, &total[0], &total[1]);
    check_same(KN_K_CROSS_ENTROPY, &mean[0], &mean[1]);
}
