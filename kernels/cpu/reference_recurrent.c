/* kernels/cpu/reference_recurrent.c: recurrent layers, row by row and step by step. */
#include "kernels/cpu/reference.h"
#include "kernels/cpu/reference_words.h"

#include "kernels/cells.h"

enum { MOST_GATES = 4 };

bool kn_cpu_lengths_fit(const kn_array *lengths, int64_t steps)
{
    const int64_t *n = lengths->data;
    for (int64_t i = 0; n && i < lengths->shape[0]; i++)
        if (n[i] < 1 || n[i] > steps)
            return kn_fail("recurrent: row %lld has length %lld; lengths lie in [1, %lld]",
                           (long long)i, (long long)n[i], (long long)steps);
    return true;
}

/* The element of an array that isn't there is 0. */
static double get(const kn_array *a, int64_t at)
{
    return a->data ? kn_ref_get(a, at) : 0;
}

static void set(const kn_array *a, int64_t at, double x)
{
    if (a->data)
        kn_ref_set_computed(a, at, x);
}

/* Step s of row n. */
static void step(const kn_recurrent_args *a, int64_t n, int64_t s, int64_t length, double *q)
{
    const int64_t N = a->h.shape[0], H = a->h.shape[1], G = a->w.shape[0], gates = G / H;
    const int64_t t = kn_step_time(s, length, a->reverse), row = t * N + n;
    for (int64_t j = 0; j < G; j++) {
        double sum = 0;
        for (int64_t k = 0; k < H; k++)
            sum += get(&a->h, n * H + k) * get(&a->w, j * H + k);
        q[j] = sum + get(&a->bias, j);
    }
    for (int64_t u = 0; u < H; u++) {
        const int64_t before = (kn_step_time(s - 1, length, a->reverse) * N + n) * H + u;
        double p[MOST_GATES], sums[MOST_GATES];
        for (int64_t g = 0; g < gates; g++) {
            p[g] = get(&a->gates, row * G + g * H + u);
            sums[g] = q[g * H + u];
        }
        double kept = s == 0 ? get(&a->c0, n * H + u) : get(&a->kept, before);
        const double h = v_cell(a->cell, p, sums, get(&a->h, n * H + u), &kept);
        for (int64_t g = 0; g < gates; g++)
            set(&a->gates, row * G + g * H + u, p[g]);
        set(&a->y, row * H + u, h);
        set(&a->h, n * H + u, h);
        set(&a->kept, row * H + u, kept);
        if (s == length - 1)
            set(&a->cn, n * H + u, kept);
    }
}

kn_status kn_ref_recurrent(const void *args)
{
    const kn_recurrent_args *a = args;
    const int64_t T = a->y.shape[0], N = a->h.shape[0], H = a->h.shape[1], G = a->w.shape[0];
    double *q = kn_host_alloc((size_t)(G > 0 ? G : 1) * sizeof *q);
    if (!q || !kn_cpu_lengths_fit(&a->lengths, T)) {
        kn_host_free(q);
        return KN_FAILED;
    }
    for (int64_t n = 0; n < N; n++) {
        const int64_t length = kn_row_length(a->lengths.data, n, T);
        for (int64_t s = 0; s < length; s++)
            step(a, n, s, length, q);
        for (int64_t i = length * H; i < T * H; i++) {
            set(&a->y, (i / H * N + n) * H + i % H, 0);
            set(&a->kept, (i / H * N + n) * H + i % H, 0);
        }
    }
    kn_host_free(q);
    return KN_DONE;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* The gradients of step s of row n; those of q also go to q. */
static void step_grad(const kn_recurrent_grad_args *a, int64_t n, int64_t s, int64_t length,
                      double *q)
{
    const int64_t N = a->dh.shape[0], H = a->dh.shape[1], G = a->w.shape[0], gates = G / H;
    const int64_t row = kn_step_time(s, length, a->reverse) * N + n;
    const bool lstm = a->cell == KN_CELL_LSTM;
    for (int64_t u = 0; u < H; u++) {
        const int64_t at = n * H + u;
        const int64_t past = (kn_step_time(s - 1, length, a->reverse) * N + n) * H + u;
        double p[MOST_GATES], dq[MOST_GATES] = { 0 };
        for (int64_t g = 0; g < gates; g++)
            p[g] = get(&a->gates, row * G + g * H + u);
        const kn_array *first = lstm ? &a->c0 : &a->h0, *then = lstm ? &a->kept : &a->y;
        const double before = s == 0 ? get(first, at) : get(then, past);
        double dc = get(&a->dc, at);
        const double dh = get(&a->dh, at) + get(&a->dy, row * H + u);
        const double rest =
            v_cell_grad(a->cell, p, dq, before, get(&a->kept, row * H + u), dh, &dc);
        set(&a->dc, at, dc);
        set(&a->dh, at, rest);
        for (int64_t g = 0; g < gates; g++) {
            const int64_t to = row * G + g * H + u;
            set(&a->dgates, to, p[g]);
            set(&a->dq, to, dq[g]);
            const kn_array *of_q = a->dq.data ? &a->dq : &a->dgates;
            q[g * H + u] = get(of_q, to); /* rounded, as the products of weights have it */
            if (s == 0)
                set(&a->work, n * G + g * H + u, q[g * H + u]);
        }
    }
    for (int64_t u = 0; u < H; u++) {
        double sum = get(&a->dh, n * H + u);
        for (int64_t j = 0; j < G; j++)
            sum += q[j] * get(&a->w, j * H + u);
        set(&a->dh, n * H + u, sum);
    }
}

kn_status kn_ref_recurrent_grad(const void *args)
{
    const kn_recurrent_grad_args *a = args;
    const int64_t T = a->y.shape[0], N = a->dh.shape[0], G = a->w.shape[0];
    double *q = kn_host_alloc((size_t)(G > 0 ? G : 1) * sizeof *q);
    if (!q || !kn_cpu_lengths_fit(&a->lengths, T)) {
        kn_host_free(q);
        return KN_FAILED;
    }
    for (int64_t n = 0; n < N; n++) {
        const int64_t length = kn_row_length(a->lengths.data, n, T);
        for (int64_t s = length - 1; s >= 0; s--)
            step_grad(a, n, s, length, q);
        for (int64_t i = length * G; i < T * G; i++) {
            set(&a->dgates, (i / G * N + n) * G + i % G, 0);
            set(&a->dq, (i / G * N + n) * G + i % G, 0);
        }
    }
    kn_host_free(q);
    return KN_DONE;
}
