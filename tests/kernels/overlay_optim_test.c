/* tests/kernels/overlay_optim_test.c: the fast providers against the reference (overlay.h): sums
 * over ranks, optimizers, norms; and for every kernel on plain vectors that a piece of an array
 * gives the bits that the whole gives, wherever it is cut. */
#include "tests/kernels/overlay.h"

static int64_t length(overlay_case *c, int i)
{
    return i % 20 == 13 ? 70001 : case_size(c, 1000);
}

OVERLAY(overlay_optim, sum_n, SUM_N, 0, overlay_cases(300))
{
    static const kn_dtype pairs[][2] = { { KN_F32, KN_F32 },   { KN_F32, KN_BF16 },
                                         { KN_BF16, KN_BF16 }, { KN_F16, KN_F16 },
                                         { KN_F64, KN_F64 },   { KN_F32, KN_F16 },
                                         { KN_BF16, KN_F32 } };
    static const int sources[] = { 1, 2, 3, 4, 7, 16, KN_SUM_N_MAX };
    kn_dtype to = pairs[i % 7][0], from = pairs[i % 7][1];
    kn_sum_n_args a = { .n = sources[case_pick(c, 7)], .dst_dtype = to, .src_dtype = from };
    a.count = length(c, i);
    if (a.count > 1000 && a.n > 7)
        a.n = 7;
    kn_array dst = case_vector(c, to, NORMAL, a.count);
    for (int j = 0; j < a.n; j++)
        a.src[j] = case_vector(c, from, i % 3 ? NORMAL : FINITE, a.count).data;
    a.dst = dst.data;
    int how = (int)case_pick(c, 4);
    case_note(c, " x %d", a.n);
    if (how == 1) {
        a.acc = a.dst;
        case_note(c, " acc in place");
    } else if (how == 2) {
        a.acc = case_vector(c, to, NORMAL, a.count).data;
        case_note(c, " acc");
    } else if (how == 3 && to == from) {
        a.dst = (void *)(uintptr_t)a.src[a.n - 1];
        dst.data = a.dst;
        case_note(c, " onto the last source");
    }
    case_exact(c, &dst);
    case_run(c, &a);
}

/* ---- optimizers ---------------------------------------------------------------------------- */

typedef struct optim_case {
    kn_opt_piece piece[3];
    double lr, scale, step, limit;
    uint64_t seed;
} optim_case;

static void optim_case_make(overlay_case *c, int i, optim_case *o, bool momentum, bool squares)
{
    static const kn_dtype grads[] = { KN_F32, KN_BF16, KN_F16 };
    static const kn_dtype masters[] = { KN_F32, KN_BF16, KN_F32, KN_F16, KN_F32, KN_F64 };
    kn_dtype t = masters[i % 6];
    const double rel = t == KN_BF16 || t == KN_F16 ? 0 : 1e-7;
    *o = (optim_case){
        .lr = 0.01, .scale = i % 2 ? 1 : 0.37, .step = 1 + i % 3, .limit = 0.1, .seed = (uint64_t)i
    };
    for (int k = 0; k < 3; k++) {
        kn_dtype g = t == KN_F64 ? t : grads[case_pick(c, 3)];
        int64_t n = k == 0 ? length(c, i) : case_size(c, 257);
        kn_array p = case_vector(c, t, NORMAL, n), m = { 0 }, v = { 0 };
        case_close(c, &p, rel);
        if (momentum) {
            m = case_vector(c, t, SMALL, n);
            case_close(c, &m, rel);
        }
        if (squares) {
            v = case_vector(c, t, POSITIVE, n);
            case_close(c, &v, rel);
        }
        o->piece[k] = (kn_opt_piece){ .param = p.data,
                                      .grad = case_vector(c, g, NORMAL, n).data,
                                      .m = m.data,
                                      .v = v.data,
                                      .count = n,
                                      .lr_mul = k == 1 ? 0.5f : 1,
                                      .weight_decay = k == 2 ? 0 : 0.1f,
                                      .param_dtype = t,
                                      .grad_dtype = g,
                                      .place = { 7, 3 + 5 * k, k ? 1 + n / 5 : 0, 1000 } };
        if (i % 3 == k) { /* one of the pieces is also written rounded */
            static const kn_dtype outs[] = { KN_BF16, KN_F16, KN_F32, KN_F64 };
            static const double close[] = { 0x1p-8, 0x1p-11, 1e-7, 1e-7 };
            int w = i / 3 % 4;
            kn_array out = case_vector(c, outs[w], UNSET, n);
            case_close(c, &out, close[w]);
            o->piece[k].out = out.data;
            o->piece[k].out_dtype = outs[w];
        }
    }
}

/* No flag, 0, or 1: with 1 every byte must stay. */
static const double *skip_of(overlay_case *c, int i)
{
    if (i % 5 < 3)
        return NULL;
    kn_array skip = case_vector(c, KN_F64, NORMAL, 1);
    case_set(&skip, 0, i % 5 == 4);
    return skip.data;
}

/* The step's numbers: some clamp gradients, some round at random. */
static kn_opt_step step_of(overlay_case *c, int i, const optim_case *o)
{
    return (kn_opt_step){ .piece = o->piece,
                          .pieces = 3,
                          .lr = &o->lr,
                          .grad_scale = &o->scale,
                          .step = &o->step,
                          .skip = skip_of(c, i),
                          .limit = i % 7 < 3 ? &o->limit : NULL,
                          .seed = i % 4 == 3 || i % 4 == 1 ? &o->seed : NULL };
}

OVERLAY(overlay_optim, adamw, ADAMW, 0, overlay_cases(90))
{
    optim_case o;
    optim_case_make(c, i, &o, true, true);
    kn_adamw_args a = { step_of(c, i, &o), i % 5 ? 0.9 : 0, i % 7 ? 0.95 : 0.3, 1e-8 };
    case_run(c, &a);
}

OVERLAY(overlay_optim, sgd, SGD, 0, overlay_cases(90))
{
    optim_case o;
    bool momentum = i % 3 > 0;
    optim_case_make(c, i, &o, momentum, false);
    kn_sgd_args a = { step_of(c, i, &o), momentum ? 0.9 : 0, i % 2 ? 0.1 : 0, momentum && i % 2 };
    case_run(c, &a);
}

OVERLAY(overlay_optim, lion, LION, 0, overlay_cases(90))
{
    optim_case o;
    optim_case_make(c, i, &o, true, false);
    kn_lion_args a = { step_of(c, i, &o), i % 5 ? 0.9 : 0.3, i % 7 ? 0.99 : 0 };
    case_run(c, &a);
}

/* ---- norms --------------------------------------------------------------------------------- */

OVERLAY(overlay_optim, absmax_and_sqsum, ABSMAX, 0, overlay_cases(200))
{
    if (i % 2)
        c->kernel = KN_K_SQSUM;
    kn_run run[3];
    values v = i % 8 == 2 ? SPECIAL : i % 8 == 3 ? FINITE : NORMAL;
    for (int k = 0; k < 3; k++) {
        run[k].dtype = case_float(c);
        run[k].count = k == 0 ? length(c, i) : case_size(c, 1000);
        run[k].data = case_vector(c, run[k].dtype, v, run[k].count).data;
    }
    kn_array max = case_vector(c, KN_F32, UNSET, 1), limbs = case_vector(c, KN_I64, UNSET, 4);
    kn_array first = case_vector(c, KN_I64, UNSET, 1);
    kn_absmax_args find = { run, 3, max.data, i % 4 == 2 ? first.data : NULL };
    if (find.first)
        case_exact(c, &first);
    kn_sqsum_args sum = { run, 3, max.data, limbs.data };
    case_close(c, i % 2 ? &limbs : &max, 0);
    c->rel[0] = 0;
    c->abs[0] = i % 2 ? 0 : 1e-300; /* absmax: exact but for the bits of NaN */
    if (i % 2)
        case_prepare(KN_K_ABSMAX, &find);
    case_run(c, i % 2 ? (const void *)&sum : (const void *)&find);
}

OVERLAY(overlay_optim, clip, CLIP, 0, overlay_cases(60))
{
    kn_array limbs = case_vector(c, KN_I64, UNSET, 4), max = case_vector(c, KN_F32, NORMAL, 1);
    kn_array norm = case_vector(c, KN_F32, UNSET, 1), coef = case_vector(c, KN_F64, UNSET, 1);
    for (int k = 0; k < 4; k++)
        case_set(&limbs, k, (double)case_pick(c, i % 2 ? 1LL << 40 : 1LL << 50));
    case_set(&max, 0, i % 10 == 9 ? INFINITY : ldexp(fabs(case_get(&max, 0)), i - 20));
    case_close(c, &norm, 0);
    case_close(c, &coef, 0);
    kn_clip_args a = { limbs.data, max.data, i % 3 ? 1 : 0.25, i % 4, norm.data, coef.data };
    kn_array limit = case_vector(c, KN_F64, UNSET, 1);
    if (i % 2) {
        case_close(c, &limit, 0);
        a.value = 0.5;
        a.limit = limit.data;
    }
    if (i % 5 == 3) {
        kn_array carried = case_vector(c, KN_F32, POSITIVE, 1);
        a.loss_scale = carried.data;
    }
    case_run(c, &a);
}

OVERLAY(overlay_optim, loss_scale, LOSS_SCALE, 0, overlay_cases(60))
{
    kn_array max = case_vector(c, KN_F32, POSITIVE, 1),
             carried = case_vector(c, KN_F32, POSITIVE, 1);
    kn_array words = case_vector(c, KN_I64, NORMAL, 5), step = case_vector(c, KN_F64, NORMAL, 6);
    kn_loss_scale_state *state = words.data;
    state->scale = 1 + (double)case_pick(c, 1000) / 7;
    state->good = case_pick(c, 4);
    state->found = case_pick(c, 2);
    if (i % 3 == 2)
        case_set(&max, 0, i % 2 ? NAN : INFINITY);
    case_exact(c, &step);
    kn_loss_scale_args a = { state,     i % 5 == 4 ? NULL : step.data,
                             max.data,  i % 4 ? carried.data : NULL,
                             0.25,      2,
                             0.5,       i % 6 == 2 ? 100 : 0x1p-20,
                             0x1p20,    3,
                             i % 7 == 3 };
    case_run(c, &a);
}

/* ---- pieces -------------------------------------------------------------------------------- */

/* Runs a kernel of provider on n elements of the vectors x, from element `from`. */
typedef kn_status (*span_fn)(const kn_provider *provider, kn_array *const *x, int64_t from,
                             int64_t n);

static kn_array span_of(const kn_array *x, int64_t from, int64_t n)
{
    kn_array a = *x;
    a.data = (char *)x->data + from * (int64_t)kn_dtype_size(x->dtype);
    a.shape[0] = n;
    return a;
}

static kn_status span_run(const kn_provider *provider, kn_kernel k, const void *args)
{
    return provider->run[k] ? provider->run[k](args) : KN_DECLINED;
}

static int span_kind; /* the kind of the unary and binary spans */

static kn_status unary_span(const kn_provider *provider, kn_array *const *x, int64_t from,
                            int64_t n)
{
    kn_unary_args a = { span_of(x[0], from, n), span_of(x[1], from, n), (kn_unary)span_kind, 1.5,
                        0.25 };
    return span_run(provider, KN_K_UNARY, &a);
}

static kn_status unary_grad_span(const kn_provider *provider, kn_array *const *x, int64_t from,
                                 int64_t n)
{
    kn_unary_grad_args a = { span_of(x[0], from, n),
                             span_of(x[1], from, n),
                             span_of(x[2], from, n),
                             span_of(x[3], from, n),
                             (kn_unary)span_kind,
                             1.5,
                             0.25 };
    return span_run(provider, KN_K_UNARY_GRAD, &a);
}

static kn_status binary_span(const kn_provider *provider, kn_array *const *x, int64_t from,
                             int64_t n)
{
    kn_binary_args a = { span_of(x[0], from, n), span_of(x[1], from, n), span_of(x[2], from, n),
                         (kn_binary)span_kind };
    return span_run(provider, KN_K_BINARY, &a);
}

static kn_status sum_span(const kn_provider *provider, kn_array *const *x, int64_t from, int64_t n)
{
    kn_sum_n_args a = { span_of(x[0], from, n).data,
                        NULL,
                        { span_of(x[1], from, n).data, span_of(x[2], from, n).data,
                          span_of(x[3], from, n).data },
                        3,
                        n,
                        x[0]->dtype,
                        x[0]->dtype };
    return span_run(provider, KN_K_SUM_N, &a);
}

static kn_status random_span(const kn_provider *provider, kn_array *const *x, int64_t from,
                             int64_t n)
{
    kn_random_args a = { span_of(x[0], from, n), (kn_random)span_kind, 3, 4, 1000 + from, 0.5, 2 };
    return span_run(provider, KN_K_RANDOM, &a);
}

static kn_status optim_span(const kn_provider *provider, kn_array *const *x, int64_t from,
                            int64_t n)
{
    double lr = 0.01, scale = 0.3, step = 2, limit = 0.2;
    const uint64_t seed = 5;
    kn_opt_piece p = { .param = span_of(x[0], from, n).data,
                       .grad = span_of(x[1], from, n).data,
                       .m = span_of(x[2], from, n).data,
                       .v = span_of(x[3], from, n).data,
                       .count = n,
                       .lr_mul = 1,
                       .weight_decay = 0.1f,
                       .param_dtype = x[0]->dtype,
                       .grad_dtype = x[1]->dtype,
                       .place = { .stream = 9, .start = 70 + from } };
    kn_opt_step s = { &p, 1, &lr, &scale, &step, NULL, &limit, &seed };
    kn_adamw_args adamw = { s, 0.9, 0.99, 1e-8 };
    kn_sgd_args sgd = { s, 0.9, 0, true };
    kn_lion_args lion = { s, 0.9, 0.99 };
    return span_kind == 0   ? span_run(provider, KN_K_ADAMW, &adamw)
           : span_kind == 1 ? span_run(provider, KN_K_SGD, &sgd)
                            : span_run(provider, KN_K_LION, &lion);
}

/* The whole at once, then from the same bytes in pieces of uneven lengths. */
static void check_spans(const char *what, overlay_case *c, span_fn run, kn_array *const *x)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    int count = overlay_all_layers(providers);
    int64_t n = x[0]->shape[0];
    unsigned char *start = malloc(c->used), *whole = malloc(c->used);
    KN_CHECK(start && whole, "out of memory");
    memcpy(start, c->bytes, c->used);
    for (int i = 0; i < count; i++) {
        memcpy(c->bytes, start, c->used);
        kn_status s = run(providers[i], x, 0, n);
        if (s == KN_DECLINED)
            continue;
        KN_CHECK(s == KN_DONE, "%s %s %d", what, providers[i]->name, span_kind);
        memcpy(whole, c->bytes, c->used);
        memcpy(c->bytes, start, c->used);
        for (int64_t from = 0, step = 1; from < n; from += step, step = step * 2 % 97 + 1) {
            step = from + step > n ? n - from : step;
            KN_CHECK(run(providers[i], x, from, step) == KN_DONE, "%s %s: piece [%lld, +%lld)",
                     what, providers[i]->name, (long long)from, (long long)step);
        }
        KN_CHECK(memcmp(c->bytes, whole, c->used) == 0,
                 "%s %s %s %d: pieces give other bits than the whole", what, providers[i]->name,
                 kn_dtype_name(x[0]->dtype), span_kind);
    }
    free(start);
    free(whole);
}

enum { SPAN = 1003 };

KN_TEST(overlay_optim, pieces_give_the_bits_of_the_whole)
{
    static const kn_dtype floats[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };
    for (int t = 0; t < 4; t++) {
        overlay_case *c = case_begin(KN_K_UNARY, (uint64_t)t);
        kn_array a[4], *x[4] = { &a[0], &a[1], &a[2], &a[3] };
        for (int k = 0; k < 4; k++)
            a[k] = case_vector(c, floats[t], POSITIVE, SPAN);
        for (span_kind = 0; span_kind < KN_NOT; span_kind++) {
            check_spans("unary", c, unary_span, x);
            check_spans("unary_grad", c, unary_grad_span, x);
        }
        for (span_kind = 0; span_kind < KN_EQ; span_kind++)
            check_spans("binary", c, binary_span, x);
        span_kind = 0;
        check_spans("sum_n", c, sum_span, x);
        for (span_kind = 0; span_kind < KN_RANDOM_COUNT; span_kind++)
            check_spans("random", c, random_span, x);
        static const char *const optim[] = { "adamw", "sgd", "lion" };
        for (int masters = 0; masters < 4; masters++) {
            c = case_begin(KN_K_ADAMW, (uint64_t)t);
            a[0] = case_vector(c, floats[masters], NORMAL, SPAN);
            a[1] = case_vector(c, floats[t], NORMAL, SPAN);
            a[2] = case_vector(c, floats[masters], NORMAL, SPAN);
            a[3] = case_vector(c, floats[masters], POSITIVE, SPAN);
            for (span_kind = 0; span_kind < 3; span_kind++)
                check_spans(optim[span_kind], c, optim_span, x);
        }
    }
}
