/* tests/autograd/every.h: rows of the public operations. Each is checked in every shape and layout
 * that it lists: its gradient by kn_gradcheck, its results in f32 and bf16 against those in f64
 * (ops_test.c), the same call on meta, its errors (every_test.c, every_errors_test.c). An operation
 * without a row fails. */
#ifndef KNAP_TESTS_EVERY_H
#define KNAP_TESTS_EVERY_H

#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "tests/kn_test.h"

enum { EVERY_MAX_IN = 4 };

/* The device of the operations. */
#ifdef CHECKED_DEVICE
#define CHECKED_ELSEWHERE
#else
#define CHECKED_DEVICE KN_CPU
#endif

typedef struct every_case {
    const char *name;
    int line; /* of the row */
    bool differentiable, on_meta;
    /* Sets of inputs that may require a gradient: "2 3; +3 | . ; 4 3t" is [2,3] with values in
     * [-1.5, 1.5) and [3] with values in [0.3, 2), then a scalar and [4,3], transposed in memory.
     * Before the sizes: + as above, * [0.4, 2), % [0.1, 0.9), ^ [1.2, 3). Behind: a layout. */
    const char *inputs;
    kn_tensor *(*call)(kn_tensor *const *in);
} every_case;

typedef struct every_entry {
    const every_case *row;
} every_entry;

/* EVERY(kn_add, "2 3; 3", kn_add(x, y)): the call with its inputs x, y, z, w; NULL where a set has
 * fewer. A function may have several rows. The linker collects the rows of all files (EVERY_FLAT:
 * results without gradient; EVERY_ROW: also sizes that depend on values, an error on meta). Other
 * tensors of a call are made on x's device. */
#define EVERY(name, inputs, ...)        EVERY_ROW(name, true, true, inputs, __VA_ARGS__)
#define EVERY_FLAT(name, inputs, ...)   EVERY_ROW(name, false, true, inputs, __VA_ARGS__)
#define EVERY_ROW(name, ...)            EVERY_LINE(name, __LINE__, __VA_ARGS__)
#define EVERY_LINE(name, line, ...)     EVERY_NUMBERED(name, line, __VA_ARGS__)
#define EVERY_NUMBERED(name, line, ...) EVERY_CASE(name, name##_##line, line, __VA_ARGS__)
#define EVERY_CASE(name, id, line, differentiable, on_meta, inputs, ...)                           \
    static kn_tensor *every_##id(kn_tensor *const *in)                                             \
    {                                                                                              \
        kn_tensor *x = in[0], *y = in[1], *z = in[2], *w = in[3];                                  \
        (void)x, (void)y, (void)z, (void)w;                                                        \
        return __VA_ARGS__;                                                                        \
    }                                                                                              \
    static const every_case case_##id = {                                                          \
        #name, line, differentiable, on_meta, inputs, every_##id                                   \
    };                                                                                             \
    static const every_entry entry_##id                                                            \
        __attribute__((section("kn_every"), used, aligned(sizeof(every_entry)))) = { &case_##id }

/* Whole numbers beside t. */
#define WHOLE(t, shape, ...)                                                                       \
    kn_from(KN_I64, kn_device_of(t), (int64_t[]){ __VA_ARGS__ }, KN_SHAPE shape)
#define DIMS(...)                                                                                  \
    (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (int64_t[])                       \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

/* The rows of all files: EACH_CASE(c) { c->call(...); } */
extern const every_entry __start_kn_every[], __stop_kn_every[];
#define EACH_CASE(c)                                                                               \
    for (const every_entry *e = __start_kn_every; e < __stop_kn_every; e++)                        \
        for (const every_case *c = e->row; c; c = NULL)

/* The form of an input: the leaf itself, or a view of a leaf of another layout. */
typedef enum layout {
    PLAIN,      /* row-major */
    TRANSPOSED, /* t: the last two dims swapped in memory */
    SLICED,     /* s: columns 1..n of 2n + 1 */
    STRETCHED   /* e: size 1 in dim 0, expanded */
} layout;

typedef struct input_spec {
    int ndim;
    int64_t shape[5];
    layout how;
    double low, high; /* range of the values */
} input_spec;

typedef struct every_set {
    int n;
    input_spec in[EVERY_MAX_IN];
    const char *rest; /* sets to come */
} every_set;

/* The next set of a row: every_set s = { 0 }; while (every_next(c, &s)) ... */
bool every_next(const every_case *c, every_set *s);
#define EACH_SET(c, s) for (every_set s = { 0 }; every_next(c, &s);)

/* The leaf behind an input, and the input as a view of it. */
input_spec leaf_spec(const input_spec *s);
kn_tensor *input_view(const input_spec *s, kn_tensor *leaf);
/* Leaves of a set on a device in dtype t, and with x the inputs made of them. */
void every_leaves(const every_set *s, kn_dtype t, kn_device device, kn_tensor **leaf);
void every_inputs(const every_set *s, kn_tensor *const *leaf, kn_tensor **x);

/* Tensors and their values. */
kn_tensor *tensor_of(kn_dtype t, const double *v, int ndim, const int64_t *shape);
void to_doubles(kn_tensor *t, double *v);
double next_random(uint64_t *state); /* in [0, 1) */
double *random_doubles(int64_t n, double low, double high, uint64_t seed);
/* a[n] is b[n], but for tol times the largest of b or 1. */
void compare(const char *op, const char *what, const double *a, const double *b, int64_t n,
             double tol);

#endif
