/* tests/nn/recurrent_test.c: recurrent layers: names and shapes of parameters, rows of different
 * lengths against each row alone, gradients by differences, states, dropout, errors. */
#include "autograd/gradcheck.h"
#include "autograd/sequences.h"
#include "nn/layers.h"
#include "tests/owned.h"

static kn_tensor *noise(uint64_t stream, int64_t a, int64_t b, int64_t c)
{
    return kn_randn(KN_F64, KN_CPU, 3, stream, KN_SHAPE(a, b, c));
}

static double difference(kn_tensor *a, kn_tensor *b)
{
    KN_CHECK(a && b && kn_numel(a) == kn_numel(b), "%s", kn_error() ? kn_error() : "other shapes");
    return kn_item(kn_amax(kn_abs(kn_sub(a, b)), 0, NULL, false));
}

/* The names and shapes of torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True). */
KN_TEST(recurrent, parameters_have_the_names_of_pytorch)
{
    static const struct {
        const char *name;
        int64_t rows, columns;
    } want[] = {
        { "weight_ih_l0", 16, 3 },         { "weight_hh_l0", 16, 4 },
        { "bias_ih_l0", 16, 1 },           { "bias_hh_l0", 16, 1 },
        { "weight_ih_l0_reverse", 16, 3 }, { "weight_hh_l0_reverse", 16, 4 },
        { "bias_ih_l0_reverse", 16, 1 },   { "bias_hh_l0_reverse", 16, 1 },
        { "weight_ih_l1", 16, 8 },         { "weight_hh_l1", 16, 4 },
        { "bias_ih_l1", 16, 1 },           { "bias_hh_l1", 16, 1 },
        { "weight_ih_l1_reverse", 16, 8 }, { "weight_hh_l1_reverse", 16, 4 },
        { "bias_ih_l1_reverse", 16, 1 },   { "bias_hh_l1_reverse", 16, 1 },
    };
    OWNED_MODULE kn_lstm m;
    OWNED_MODULE kn_gru g;
    const kn_param *p;
    KN_CHECK(kn_lstm_init(&m, NULL, "", 3, 4, .layers = 2, .bidirectional = true) &&
             kn_materialize(&m, KN_CPU, 1) && kn_params(&m, &p) == 16);
    for (int i = 0; i < 16; i++) {
        const float *v = kn_data(p[i].tensor);
        KN_CHECK(strcmp(p[i].name, want[i].name) == 0, "%s", p[i].name);
        KN_CHECK(kn_size(p[i].tensor, 0) == want[i].rows &&
                     kn_numel(p[i].tensor) == want[i].rows * want[i].columns,
                 "%s", p[i].name);
        for (int64_t k = 0; k < kn_numel(p[i].tensor); k++)
            KN_CHECK(fabsf(v[k]) <= 0.5f, "%s[%lld] = %g", p[i].name, (long long)k, v[k]);
    }
    KN_CHECK(kn_gru_init(&g, NULL, "", 3, 4, .no_bias = true) && kn_params(&g, &p) == 2 &&
             kn_size(p[1].tensor, 0) == 12);
}

/* A row of some steps gives what it gives alone, and zeros behind its end. */
KN_TEST(recurrent, rows_of_different_lengths)
{
    const int64_t lengths[3] = { 4, 1, 6 };
    for (int k = 0; k < 2; k++) {
        OWNED_MODULE kn_lstm m;
        IN_SCOPE;
        KN_CHECK(kn_lstm_init(&m, NULL, "", 3, 5, .dtype = KN_F64, .layers = 2,
                              .bidirectional = true, .batch_first = k) &&
                 kn_materialize(&m, KN_CPU, 1));
        kn_tensor *x = noise(1, k ? 3 : 6, k ? 6 : 3, 3), *h = noise(2, 4, 3, 5),
                  *c = noise(3, 4, 3, 5), *n = kn_from(KN_I64, KN_CPU, lengths, KN_SHAPE(3));
        const kn_values all = kn_call_n(&m, KN_VALUES(x, h, c, n), NULL, 0);
        KN_CHECK(all.n == 3);
        for (int64_t i = 0; i < 3; i++) {
            const int time = k ? 1 : 0;
            kn_tensor *row = kn_slice(x, 1 - time, i, i + 1),
                      *y = kn_slice(all.v[0], 1 - time, i, i + 1);
            const kn_values one =
                kn_call_n(&m,
                          KN_VALUES(kn_slice(row, time, 0, lengths[i]), kn_slice(h, 1, i, i + 1),
                                    kn_slice(c, 1, i, i + 1)),
                          NULL, 0);
            KN_CHECK(difference(one.v[0], kn_slice(y, time, 0, lengths[i])) < 1e-12);
            KN_CHECK(difference(one.v[1], kn_slice(all.v[1], 1, i, i + 1)) < 1e-12);
            KN_CHECK(difference(one.v[2], kn_slice(all.v[2], 1, i, i + 1)) < 1e-12);
            if (lengths[i] < 6) {
                kn_tensor *rest = kn_slice(y, time, lengths[i], 6);
                KN_CHECK(difference(rest, kn_zeros_like(rest)) == 0);
            }
        }
    }
}

static kn_values run_all(kn_values in, void *m)
{
    return kn_call_n(m, in, NULL, 0);
}

/* Through both directions of two layers, with states, of padded rows; also in a recompute. */
KN_TEST(recurrent, gradients)
{
    const int64_t lengths[2] = { 4, 2 };
    for (int i = 0; i < 6; i++) {
        kn_lstm lstm = { 0 };
        kn_gru gru = { 0 };
        kn_rnn rnn = { 0 };
        void *m = i % 3 == 0 ? (void *)&lstm : i % 3 == 1 ? (void *)&gru : (void *)&rnn;
        IN_SCOPE;
        kn_recurrent_init_options o = { ._size = sizeof o,
                                        .dtype = KN_F64,
                                        .layers = 2,
                                        .bidirectional = i < 3,
                                        .no_bias = i == 4 };
        KN_CHECK(i % 3 == 0   ? kn_lstm_init_(&lstm, NULL, "", 3, 2, o)
                 : i % 3 == 1 ? kn_gru_init_(&gru, NULL, "", 3, 2, o)
                              : kn_rnn_init_(&rnn, NULL, "", 3, 2, o));
        KN_CHECK(kn_materialize(m, KN_CPU, 1) && kn_recompute(m, i > 2));
        kn_tensor *n = i % 2 ? NULL : kn_from(KN_I64, KN_CPU, lengths, KN_SHAPE(2));
        kn_tensor *x = kn_require_grad(noise(1, 4, 2, 3), true);
        kn_tensor *h = kn_require_grad(noise(2, i < 3 ? 4 : 2, 2, 2), true);
        kn_tensor *c = kn_require_grad(noise(3, i < 3 ? 4 : 2, 2, 2), true);
        const kn_values in = i % 3 == 0 ? KN_VALUES(x, h, c, n) : KN_VALUES(x, h, n);
        KN_CHECK(kn_gradcheck(run_all, in, .arg = m), "%d", i);
        kn_module_free(m);
    }
}

/* Between the layers, in training alone, and of what a second layer reads. */
KN_TEST(recurrent, dropout_lies_between_layers)
{
    OWNED_MODULE kn_gru m;
    KN_CHECK(kn_gru_init(&m, NULL, "", 3, 5, .dtype = KN_F64, .layers = 2, .dropout = 0.5) &&
             kn_materialize(&m, KN_CPU, 1));
    kn_tensor *x = noise(1, 4, 2, 3), *first = kn_call(&m, x), *second = kn_call(&m, x);
    KN_CHECK(difference(first, second) > 1e-3);
    kn_train(&m, false);
    KN_CHECK(difference(kn_call(&m, x), kn_call(&m, x)) == 0);
    KN_CHECK(difference(kn_call(&m, x), first) > 1e-3);
}

KN_TEST(recurrent, errors)
{
    OWNED_MODULE kn_lstm m;
    REFUSED(kn_lstm_init(&m, NULL, "r", 0, 2), "'r' would be 0 -> 2 in 0 layers");
    REFUSED(kn_lstm_init(&m, NULL, "r", 3, 2, .layers = -1), "in -1 layers");
    REFUSED(kn_lstm_init(&m, NULL, "r", 3, 2, .relu = true), ".relu, which kn_rnn alone takes");
    REFUSED(kn_gru_init((kn_gru *)&m, NULL, "r", 3, 2, .dropout = 0.5), "it takes two");
    REFUSED(kn_gru_init((kn_gru *)&m, NULL, "r", 3, 2, .layers = 2, .dropout = 1), ".dropout 1");
    KN_CHECK(kn_lstm_init(&m, NULL, "r", 3, 2, .dtype = KN_F64) && kn_materialize(&m, KN_CPU, 1));
    kn_tensor *x = noise(1, 4, 2, 3), *h = noise(2, 1, 2, 2), *bad = noise(2, 1, 3, 2);
    REFUSED(kn_call(&m, noise(1, 4, 2, 5)), "needs x[T,N,3], got f64[4,2,5]");
    REFUSED(kn_call_n(&m, KN_VALUES(x, h), NULL, 0).n, "takes x, or x, h_0 and c_0");
    REFUSED(kn_call_n(&m, KN_VALUES(x, h, bad), NULL, 0).n, "c_0 is f64[1,3,2]");
    REFUSED(kn_call_n(&m, KN_VALUES(x, h, h, h), NULL, 0).n, "lengths are f64[1,2,2]");
    const int64_t long_ones[2] = { 4, 5 };
    kn_tensor *n = kn_from(KN_I64, KN_CPU, long_ones, KN_SHAPE(2));
    REFUSED(kn_call_n(&m, KN_VALUES(x, h, h, n), NULL, 0).n,
            "row 1 has length 5; lengths lie in [1, 4]");
    REFUSED(kn_call(&m, noise(1, 0, 2, 3)), "at least one step");
    kn_tensor *w = noise(4, 1, 8, 3), *v = kn_reshape(w, KN_SHAPE(8, 3));
    REFUSED(kn_recurrent(x, v, noise(5, 1, 8, 2)), "got f64[4,2,3] and f64[1,8,2]");
    REFUSED(kn_recurrent(x, v, kn_reshape(noise(5, 1, 4, 4), KN_SHAPE(4, 4))),
            "weight_ih is f64[8,3]");
    REFUSED(kn_recurrent(x, v, v, .cell = (kn_cell)9), ".cell is 9");
    REFUSED(kn_recurrent(x, v, v, .cell = KN_CELL_GRU, .c0 = h), "with .c0");
}
