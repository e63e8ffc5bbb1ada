/* nn/recurrent.c: recurrent layers: levels of one or two directions, each an operation
 * (autograd/ops_recurrent.c). Steps come first inside, as its products want them. */
#include "autograd/sequences.h"
#include "nn/layers.h"
#include "nn/nn_internal.h"
#include <math.h>
#include <string.h>

typedef struct recurrent_state {
    kn_cell cell;
    int64_t in, hidden;
    int levels, ways; /* ways: 2 where bidirectional */
    kn_recurrent_init_options o;
} recurrent_state;

/* What a call was given; states are h and, of LSTM, c. */
typedef struct recurrent_inputs {
    kn_tensor *x, *state[2], *lengths;
    int states;
} recurrent_inputs;

static bool read_inputs(const kn_module *self, kn_values in, recurrent_inputs *to)
{
    const recurrent_state *s = kn_module_data(self);
    const char *states = s->cell == KN_CELL_LSTM ? "h_0 and c_0" : "h_0";
    to->states = s->cell == KN_CELL_LSTM ? 2 : 1;
    if (in.n < 1 || in.n > to->states + 2 || (in.n > 1 && in.n <= to->states) || !in.v[0])
        return kn_fail(
            "'%s' (%s) takes x, or x, %s, or x, %s and lengths; %d tensors were passed%s",
            kn_module_shown(self->impl), self->impl->class_name, states, states, in.n,
            in.n > 0 && !in.v[0] ? ", x is NULL" : "");
    to->x = in.v[0];
    to->lengths = in.n == to->states + 2 ? in.v[to->states + 1] : NULL;
    const kn_tensor *x = to->x;
    if (x->ndim != 3 || x->shape[2] != s->in)
        return kn_fail("'%s' (%s): needs x[%s,%lld], got %s", kn_module_shown(self->impl),
                       self->impl->class_name, s->o.batch_first ? "N,T" : "T,N", (long long)s->in,
                       KN_SHOWN(x));
    const int64_t all = s->levels * s->ways, N = x->shape[s->o.batch_first ? 0 : 1];
    for (int i = 0; i < to->states; i++) {
        kn_tensor *h = to->state[i] = in.n > 1 ? in.v[i + 1] : NULL;
        if (h && !kn_has_shape(h, 3, (int64_t[]){ all, N, s->hidden }))
            return kn_fail("'%s' (%s): %s is %s; with x %s it should be [%lld,%lld,%lld]",
                           kn_module_shown(self->impl), self->impl->class_name, i ? "c_0" : "h_0",
                           KN_SHOWN(h), KN_SHOWN(x), (long long)all, (long long)N,
                           (long long)s->hidden);
    }
    return true;
}

/* Row i of a state [levels ways, N, H]; NULL of none. */
static kn_tensor *state_of(kn_tensor *state, int i)
{
    return state ? kn_reshape(kn_slice(state, 0, i, i + 1), 2, state->shape + 1) : NULL;
}

/* Adds h[N,H] behind the rows of *all. */
static void state_add(kn_tensor **all, kn_tensor *h)
{
    kn_tensor *row = kn_unsqueeze(h, 0);
    *all = *all ? kn_cat((kn_tensor *[]){ *all, row }, 2, 0) : row;
}

/* One level: y of its directions side by side; last: the states, where they are wanted. */
static kn_tensor *level(const kn_module *self, int number, kn_tensor *x, const recurrent_inputs *in,
                        kn_tensor **last)
{
    const recurrent_state *s = kn_module_data(self);
    const int each = s->o.no_bias ? 2 : 4;
    kn_tensor *y[2] = { NULL };
    for (int way = 0; way < s->ways; way++) {
        const int at = number * s->ways + way, p = at * each;
        kn_tensor *end[2];
        y[way] = kn_recurrent(
            x, kn_layer_param(self, p), kn_layer_param(self, p + 1), .cell = s->cell,
            .reverse = way == 1, .b_ih = each > 2 ? kn_layer_param(self, p + 2) : NULL,
            .b_hh = each > 2 ? kn_layer_param(self, p + 3) : NULL, .h0 = state_of(in->state[0], at),
            .c0 = state_of(in->state[1], at), .lengths = in->lengths, .last = end);
        for (int i = 0; last && i < in->states; i++)
            state_add(&last[i], end[i]);
    }
    return s->ways > 1 ? kn_cat(y, 2, 2) : y[0];
}

static kn_values recurrent_forward(kn_module *self, kn_values in, const void *arg)
{
    const recurrent_state *s = kn_module_data(self);
    recurrent_inputs given = { 0 };
    kn_tensor *last[2] = { NULL };
    (void)arg;
    if (!read_inputs(self, in, &given))
        return (kn_values){ 0 };
    kn_tensor *x = s->o.batch_first ? kn_contiguous(kn_transpose(given.x, 0, 1)) : given.x;
    for (int i = 0; x && i < s->levels; i++) {
        if (i > 0 && kn_training(self))
            x = kn_dropout(x, s->o.dropout);
        x = level(self, i, x, &given, in.n > 1 ? last : NULL);
    }
    x = s->o.batch_first ? kn_transpose(x, 0, 1) : x;
    if (!kn_ok())
        return (kn_values){ 0 };
    return in.n == 1                 ? KN_VALUES(x)
           : s->cell == KN_CELL_LSTM ? KN_VALUES(x, last[0], last[1])
                                     : KN_VALUES(x, last[0]);
}

static bool numbers_fit(const char *class_name, const char *name, int64_t in, int64_t hidden,
                        const kn_recurrent_init_options *o)
{
    if (in < 1 || hidden < 1 || hidden > 1 << 24 || o->layers < 0 || o->layers > 1024)
        return kn_fail("kn_%s_init: '%s' would be %lld -> %lld in %d layers; all must be at least "
                       "1, at most 2^24 and 1024 (0 layers: 1)",
                       class_name, name, (long long)in, (long long)hidden, o->layers);
    if (o->relu && strcmp(class_name, "rnn") != 0)
        return kn_fail("kn_%s_init: '%s' has .relu, which kn_rnn alone takes", class_name, name);
    return (o->dropout >= 0 && o->dropout < 1 && (o->dropout == 0 || o->layers > 1)) ||
           kn_fail("kn_%s_init: '%s' has .dropout %g in %d layer(s); it lies in [0, 1), and is "
                   "between layers, so it takes two",
                   class_name, name, o->dropout, o->layers ? o->layers : 1);
}

/* The parameters of a level's direction, with names as PyTorch's: weight_ih_l0_reverse. */
static bool add_params(void *m, const recurrent_state *s, int level, int way)
{
    static const char *const names[] = { "weight_ih", "weight_hh", "bias_ih", "bias_hh" };
    const double bound = 1 / sqrt((double)s->hidden);
    const kn_initializer d = kn_init_or(s->o.weight, KN_UNIFORM_INIT(-bound, bound));
    const int64_t G = s->hidden * kn_cell_gates(s->cell);
    for (int i = 0; i < (s->o.no_bias ? 2 : 4); i++) {
        const int64_t columns = i || !level ? (i ? s->hidden : s->in) : s->hidden * s->ways;
        char name[40];
        snprintf(name, sizeof name, "%s_l%d%s", names[i], level, way ? "_reverse" : "");
        if (!kn_parameter(m, name, s->o.dtype, s->o.device, d, i < 2 ? 2 : 1,
                          (int64_t[]){ G, columns }))
            return false;
    }
    return true;
}

static bool recurrent_init(void *m, kn_module *parent, const char *name, const char *class_name,
                           kn_cell cell, int64_t in, int64_t hidden,
                           const kn_recurrent_init_options *o)
{
    const recurrent_state s = { .cell = cell,
                                .in = in,
                                .hidden = hidden,
                                .levels = o->layers ? o->layers : 1,
                                .ways = o->bidirectional ? 2 : 1,
                                .o = *o };
    if (!numbers_fit(class_name, name, in, hidden, o) ||
        !kn_module_init_(m, NULL, recurrent_forward, class_name) ||
        !kn_layer_place(m, parent, name, &s, sizeof s))
        return false;
    for (int i = 0; i < s.levels * s.ways; i++)
        if (!add_params(m, &s, i / s.ways, i % s.ways))
            return false;
    return true;
}

bool kn_lstm_init_(kn_lstm *m, kn_module *parent, const char *name, int64_t in, int64_t hidden,
                   kn_recurrent_init_options o)
{
    return recurrent_init(m, parent, name, "lstm", KN_CELL_LSTM, in, hidden, &o);
}

bool kn_gru_init_(kn_gru *m, kn_module *parent, const char *name, int64_t in, int64_t hidden,
                  kn_recurrent_init_options o)
{
    return recurrent_init(m, parent, name, "gru", KN_CELL_GRU, in, hidden, &o);
}

bool kn_rnn_init_(kn_rnn *m, kn_module *parent, const char *name, int64_t in, int64_t hidden,
                  kn_recurrent_init_options o)
{
    return recurrent_init(m, parent, name, "rnn", o.relu ? KN_CELL_RELU : KN_CELL_TANH, in, hidden,
                          &o);
}
