/* tests/kernels/overlay_index_test.c: gather, scatter, sort and cumsum of the providers against the
 * reference (overlay.h). A failure's line names the case. */
#include "tests/kernels/overlay.h"

static const kn_dtype arithmetic[] = { KN_F32, KN_BF16, KN_F16, KN_F64,
                                       KN_I64, KN_I32,  KN_U8,  KN_BOOL };

/* Random indices in [0, n). */
static void fill_index(overlay_case *c, const kn_array *index, int64_t n)
{
    int64_t count = kn_array_numel(index);
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = i, at = 0;
        for (int d = index->ndim - 1; d >= 0; d--) {
            at += rest % index->shape[d] * index->stride[d];
            rest /= index->shape[d];
        }
        case_set(index, at, (double)case_pick(c, n));
    }
}

/* An index of shape that is the same for whole slices along dim. */
static kn_array slices_index(overlay_case *c, kn_dtype t, int dim, const int64_t *shape, int64_t n)
{
    kn_array index = case_array(c, t, case_layout(c, OUTPUT_LAYOUTS), NORMAL, 1, &shape[dim]);
    fill_index(c, &index, n);
    const int64_t step = index.stride[0];
    index.ndim = c->ndim;
    for (int d = 0; d < c->ndim; d++) {
        index.shape[d] = shape[d];
        index.stride[d] = d == dim ? step : 0;
    }
    return index;
}

/* full and, of an index's shape, picked. Every third case is dense and equal but in dim. */
static void gather_case(overlay_case *c, int number, kn_dtype full_t, kn_dtype picked_t,
                        bool scatter, bool join)
{
    int64_t picked[KN_MAX_DIMS];
    case_shape_below(c, 3000);
    const int64_t *shape = c->shape;
    const int dim = (int)case_pick(c, c->ndim);
    const bool plain = number / 2 % 3 == 0;
    for (int d = 0; d < c->ndim; d++)
        picked[d] = d == dim ? (shape[d] ? case_size(c, 100) : 0)
                             : shape[d] - (shape[d] > 1 && !plain ? case_pick(c, 2) : 0);
    const kn_dtype t = number / 3 % 2 ? KN_I64 : KN_I32;
    kn_array index;
    if (case_pick(c, 3) == 0) {
        index = slices_index(c, t, dim, picked, shape[dim]);
    } else {
        index = case_array(c, t, plain ? DENSE : case_layout(c, OUTPUT_LAYOUTS), NORMAL, c->ndim,
                           picked);
        fill_index(c, &index, shape[dim]);
    }
    const kn_join by = join ? (kn_join)case_pick(c, KN_JOIN_LOG_SUM) : KN_JOIN_SUM;
    case_note(c, "by %d", (int)by);
    layout in = plain ? DENSE : case_layout(c, LAYOUTS);
    layout out = plain ? DENSE : case_layout(c, OUTPUT_LAYOUTS);
    kn_array full = case_array(c, full_t, scatter ? out : in, NORMAL, c->ndim, shape);
    kn_array some = case_array(c, picked_t, scatter ? in : out, NORMAL, c->ndim, picked);
    case_exact(c, scatter ? &full : &some);
    if (scatter)
        case_run(c, &(kn_scatter_args){ full, some, index, dim, join, NULL, by });
    else
        case_run(c, &(kn_gather_args){ some, full, index, dim });
}

OVERLAY(overlay_index, gather, GATHER, 0, overlay_cases(120))
{
    gather_case(c, i, arithmetic[i % 8], arithmetic[i % 8], false, false);
}

/* Slices that lie beside each other; memory goes on so behind the index. */
OVERLAY(overlay_index, neighbours, INDEX_SELECT, 0, overlay_cases(96))
{
    const int64_t outer = 1 + i % 3, n = 9, count = 1 + i % 8, inner = i % 5 ? i % 5 : 70;
    const kn_dtype t = arithmetic[i / 2 % 8];
    kn_array index = case_array(c, i % 2 ? KN_I64 : KN_I32, DENSE, NORMAL, 1, &n);
    for (int64_t k = 0; k < n; k++)
        case_set(&index, k, (double)((k + i / 4) % n));
    index.shape[0] = count;
    kn_array src = case_array(c, t, DENSE, NORMAL, 3, (int64_t[]){ outer, n, inner });
    kn_array dst = case_array(c, t, DENSE, NORMAL, 3, (int64_t[]){ outer, count, inner });
    case_exact(c, &dst);
    case_run(c, &(kn_index_select_args){ dst, src, index, 1 });
}

OVERLAY(overlay_index, scatter, SCATTER, 0, overlay_cases(800))
{
    kn_dtype t = case_pick(c, 2) ? KN_F32 : arithmetic[i / 2 % 8];
    bool wider = i % 2 && (t == KN_BF16 || t == KN_F16) && i % 3 == 0;
    gather_case(c, i, wider ? KN_F32 : t, t, true, i % 2);
}

/* Whole rows: an index [count, inner] whose columns are one. */
OVERLAY(overlay_index, scatter_rows, SCATTER, 0, overlay_cases(60))
{
    const int64_t rows = case_size(c, 40), inner = case_size(c, 70), count = case_size(c, 90);
    const int64_t shape[2] = { rows, inner }, picked[2] = { count, inner };
    if (rows == 0)
        return;
    kn_array index = case_array(c, i % 2 ? KN_I64 : KN_I32, DENSE, NORMAL, 1, &count);
    fill_index(c, &index, rows);
    index = kn_array_make(index.data, index.dtype, 2, picked);
    index.stride[0] = 1;
    index.stride[1] = 0;
    const kn_dtype t = arithmetic[i / 2 % 8];
    kn_array full = case_array(c, t, DENSE, NORMAL, 2, shape);
    kn_array some = case_array(c, t, i % 3 ? DENSE : case_layout(c, LAYOUTS), NORMAL, 2, picked);
    case_exact(c, &full);
    case_run(c, &(kn_scatter_args){ full, some, index, 0, i % 5 == 4 });
}

OVERLAY(overlay_index, sort, SORT, 0, overlay_cases(160))
{
    int64_t first[KN_MAX_DIMS];
    case_shape_below(c, 3000);
    const int dim = (int)case_pick(c, c->ndim);
    memcpy(first, c->shape, sizeof first);
    if (i % 3 == 0)
        first[dim] = case_pick(c, c->shape[dim] + 1);
    kn_dtype t = arithmetic[i % 8];
    kn_array src = case_input(c, t, i % 2 ? SPECIAL : NORMAL);
    kn_array first_of = case_array(c, t, case_layout(c, OUTPUT_LAYOUTS), UNSET, c->ndim, first);
    kn_array indices = case_array(c, KN_I64, case_layout(c, OUTPUT_LAYOUTS), UNSET, c->ndim, first);
    case_exact(c, &first_of);
    case_exact(c, &indices);
    case_run(c, &(kn_sort_args){ first_of, indices, src, dim, case_pick(c, 2) });
}

OVERLAY(overlay_index, cumsum, CUMSUM, 0, overlay_cases(120))
{
    case_shape_below(c, 3000);
    const int dim = (int)case_pick(c, c->ndim);
    kn_dtype t = arithmetic[i % 8], to = i % 8 >= 4 ? KN_I64 : t;
    if (i % 16 == 1)
        to = KN_F32;
    kn_array x = case_input(c, t, NORMAL);
    kn_array y = case_output(c, to, UNSET);
    case_close(c, &y, 1e-6);
    const kn_join by = (kn_join)case_pick(c, KN_JOIN_COUNT - (to == KN_I64));
    case_note(c, "by %d", (int)by);
    case_run(c, &(kn_cumsum_args){ y, x, dim, case_pick(c, 2), by });
}

/* An index out of range is an error in every provider, or declined. */
KN_TEST(overlay_index, bad_index)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    int n = overlay_all_layers(providers);
    for (int i = 0; i < n; i++) {
        float x[12] = { 0 }, y[2] = { 0 };
        int64_t at[2] = { 1, -1 };
        kn_array full = kn_array_make(x, KN_F32, 2, (int64_t[]){ 4, 3 });
        kn_array some = kn_array_make(y, KN_F32, 2, (int64_t[]){ 1, 2 });
        kn_array index = kn_array_make(at, KN_I64, 2, (int64_t[]){ 1, 2 });
        kn_gather_args gather = { some, full, index, 0 };
        kn_scatter_args scatter = { full, some, index, 0, true };
        for (int k = 0; k < 2; k++) {
            kn_kernel_fn run = providers[i]->run[k ? KN_K_SCATTER : KN_K_GATHER];
            kn_status s = run ? run(k ? (void *)&scatter : (void *)&gather) : KN_DECLINED;
            KN_CHECK(s != KN_DONE, "%s took index -1", providers[i]->name);
            if (s == KN_FAILED)
                KN_CHECK_ERROR("index -1 at position 1 is outside");
        }
    }
}
