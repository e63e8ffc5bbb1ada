/* tests/kernels/overlay_sequence_test.c: recurrent layers and CTC of the providers against the
 * reference (overlay.h). A failure's line names the case. */
#include "tests/kernels/overlay.h"

static const kn_dtype floats[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };

/* What both ways have: rows of different lengths, states and a bias, or none of them. */
typedef struct sequence {
    kn_cell cell;
    kn_dtype t, wide;
    int64_t T, N, H, G;
    bool keeps, lstm, states;
    kn_array w, bias, lengths, c0, none;
} sequence;

static sequence draw(overlay_case *c, int i)
{
    sequence q = { .cell = (kn_cell)(i % 4), .t = floats[i / 4 % 4], .T = 1 + case_pick(c, 5) };
    q.N = i % 24 == 17 ? 40 : 1 + case_pick(c, 14);
    q.H = i % 24 == 17 ? 70 : 1 + case_pick(c, 40);
    q.G = q.H * kn_cell_gates(q.cell);
    q.wide = q.t == KN_F64 ? KN_F64 : KN_F32;
    q.lstm = q.cell == KN_CELL_LSTM;
    q.keeps = q.lstm || q.cell == KN_CELL_GRU;
    q.states = case_pick(c, 2);
    q.w = case_array(c, q.t, DENSE, SMALL, 2, (int64_t[]){ q.G, q.H });
    if (case_pick(c, 2))
        q.bias = case_vector(c, case_pick(c, 2) ? q.t : q.wide, NORMAL, q.G);
    if (q.lstm && q.states)
        q.c0 = case_array(c, q.t, DENSE, NORMAL, 2, (int64_t[]){ q.N, q.H });
    if (case_pick(c, 2)) {
        q.lengths = case_vector(c, KN_I64, NORMAL, q.N);
        for (int64_t n = 0; n < q.N; n++)
            case_set(&q.lengths, n, (double)(1 + case_pick(c, q.T)));
    }
    case_note(c, " cell %d T %lld N %lld H %lld", (int)q.cell, (long long)q.T, (long long)q.N,
              (long long)q.H);
    return q;
}

static kn_array steps(overlay_case *c, const sequence *q, kn_dtype t, values v, int64_t last)
{
    return case_array(c, t, DENSE, v, 3, (int64_t[]){ q->T, q->N, last });
}

static kn_array row(overlay_case *c, const sequence *q, kn_dtype t, values v, int64_t last)
{
    return case_array(c, t, DENSE, v, 2, (int64_t[]){ q->N, last });
}

/* Errors of a step go on to the next ones; a state of a narrow dtype may round the other way. */
static double slack(const sequence *q)
{
    return q->t == KN_BF16 ? 4e-3 : q->t == KN_F16 ? 4e-4 : 3e-6;
}

static kn_recurrent_args forward_args(overlay_case *c, const sequence *q, bool reverse)
{
    kn_recurrent_args a = { .cell = q->cell, .reverse = reverse, .w = q->w, .bias = q->bias };
    a.lengths = q->lengths;
    a.c0 = q->c0;
    a.y = steps(c, q, q->t, UNSET, q->H);
    a.gates = steps(c, q, q->t, NORMAL, q->G);
    a.h = row(c, q, q->t, q->states ? NORMAL : SMALL, q->H);
    if (q->keeps)
        a.kept = steps(c, q, q->wide, UNSET, q->H);
    if (q->lstm)
        a.cn = row(c, q, q->t, UNSET, q->H);
    return a;
}

OVERLAY(overlay_sequence, recurrent, RECURRENT, 0, overlay_cases(192))
{
    const sequence q = draw(c, i);
    kn_recurrent_args a = forward_args(c, &q, case_pick(c, 2));
    a.work = row(c, &q, q.wide, UNSET, q.G);
    const kn_array *const out[] = { &a.y, &a.gates, &a.h, &a.kept, &a.cn };
    for (int k = 0; k < 5; k++)
        if (out[k]->data)
            case_close(c, out[k], slack(&q));
    case_scratch(c, &a.work);
    case_run(c, &a);
}

OVERLAY(overlay_sequence, recurrent_grad, RECURRENT_GRAD, 0, overlay_cases(192))
{
    const sequence q = draw(c, i);
    kn_array h0 = q.states ? row(c, &q, q.t, NORMAL, q.H) : q.none;
    kn_recurrent_args f = forward_args(c, &q, case_pick(c, 2));
    f.work = row(c, &q, q.wide, UNSET, q.G);
    if (q.states)
        memcpy(f.h.data, h0.data, (size_t)(q.N * q.H) * kn_dtype_size(q.t));
    else
        memset(f.h.data, 0, (size_t)(q.N * q.H) * kn_dtype_size(q.t));
    case_prepare(KN_K_RECURRENT, &f);
    kn_recurrent_grad_args a = { .cell = q.cell, .reverse = f.reverse, .w = q.w, .h0 = h0 };
    a.lengths = q.lengths;
    a.c0 = q.c0;
    a.y = f.y;
    a.gates = f.gates;
    a.kept = f.kept;
    a.dgates = steps(c, &q, q.t, UNSET, q.G);
    a.dh = row(c, &q, q.wide, NORMAL, q.H);
    a.work = row(c, &q, q.t, UNSET, q.G);
    if (q.cell == KN_CELL_GRU)
        a.dq = steps(c, &q, q.t, UNSET, q.G);
    if (q.lstm)
        a.dc = row(c, &q, q.wide, NORMAL, q.H);
    if (case_pick(c, 4))
        a.dy = steps(c, &q, q.t, NORMAL, q.H);
    const kn_array *const out[] = { &a.dgates, &a.dh, &a.work, &a.dq, &a.dc };
    for (int k = 0; k < 5; k++)
        if (out[k]->data)
            case_close(c, out[k], 4 * slack(&q));
    case_run(c, &a);
}

OVERLAY(overlay_sequence, ctc, CTC, 0, overlay_cases(120))
{
    const kn_dtype t = i % 2 ? KN_F64 : KN_F32;
    const int64_t T = 1 + case_pick(c, 12), N = 1 + case_pick(c, 5), C = 2 + case_pick(c, 6);
    const int64_t width = 1 + case_pick(c, 5), shape[3] = { T, N, C };
    kn_ctc_args a = { .blank = case_pick(c, C), .width = i % 3 ? width : -1 };
    a.zero_infinity = case_pick(c, 2);
    kn_array x = case_array(c, t, DENSE, NORMAL, 3, shape);
    a.log_probs = case_array(c, t, DENSE, UNSET, 3, shape);
    case_prepare(KN_K_SOFTMAX, &(kn_softmax_args){ a.log_probs, x, true });
    a.targets = case_vector(c, KN_I64, NORMAL, N * width);
    a.frames = case_vector(c, KN_I64, NORMAL, N);
    a.labels = case_vector(c, KN_I64, NORMAL, N);
    for (int64_t n = 0; n < N * width; n++)
        case_set(&a.targets, n, (double)case_pick(c, C));
    for (int64_t n = 0; n < N; n++) {
        case_set(&a.frames, n, (double)case_pick(c, T + 1));
        case_set(&a.labels, n, (double)case_pick(c, width + 1));
    }
    a.loss = case_vector(c, t, UNSET, N);
    a.work = case_vector(c, KN_F64, UNSET, (T + 1) * (2 * N * width + N));
    if (case_pick(c, 4)) {
        a.grad = case_array(c, t, DENSE, UNSET, 3, shape);
        case_close(c, &a.grad, 1e-6);
    }
    case_close(c, &a.loss, 1e-6);
    case_scratch(c, &a.work);
    case_note(c, " T %lld N %lld C %lld", (long long)T, (long long)N, (long long)C);
    case_run(c, &a);
}

/* A length out of range is an error of the CPU's, as a label is. */
KN_TEST(overlay_sequence, bad_lengths)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    const int n = overlay_all_layers(providers);
    for (int i = 0; i < n; i++) {
        float x[8] = { 0 };
        double work[16];
        int64_t length = 3, label = 2, one = 1;
        const int64_t shape[3] = { 2, 1, 1 }, two[3] = { 2, 1, 2 };
        const kn_array h = kn_array_make(x + 4, KN_F32, 2, shape + 1);
        kn_recurrent_args r = { .y = kn_array_make(x, KN_F32, 3, shape),
                                .gates = kn_array_make(x + 2, KN_F32, 3, shape),
                                .h = h,
                                .w = kn_array_make(x + 5, KN_F32, 2, shape + 1),
                                .lengths = kn_array_make(&length, KN_I64, 1, &one),
                                .work = kn_array_make(x + 6, KN_F32, 2, shape + 1),
                                .cell = KN_CELL_TANH };
        kn_ctc_args c = { .loss = kn_array_make(x, KN_F32, 1, &one),
                          .log_probs = kn_array_make(x + 2, KN_F32, 3, two),
                          .work = kn_array_make(work, KN_F64, 1, (int64_t[]){ 9 }),
                          .targets = kn_array_make(&label, KN_I64, 1, &one),
                          .frames = kn_array_make(&one, KN_I64, 1, &one),
                          .labels = kn_array_make(&one, KN_I64, 1, &one),
                          .width = -1 };
        for (int k = 0; k < 2; k++) {
            kn_kernel_fn run = providers[i]->run[k ? KN_K_CTC : KN_K_RECURRENT];
            kn_status s = run ? run(k ? (void *)&c : (void *)&r) : KN_DECLINED;
            if (s == KN_FAILED && strcmp(providers[i]->name, "cuda") == 0)
                KN_CHECK_ERROR("at position 0 is outside");
            else if (s == KN_FAILED)
                KN_CHECK_ERROR(k ? "label 0 of row 0 is 2; labels lie in [0, 2)"
                                 : "row 0 has length 3; lengths lie in [1, 2]");
            else
                KN_CHECK(s == KN_DECLINED, "%s took it", providers[i]->name);
        }
    }
}
