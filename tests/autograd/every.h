/* tests/autograd/every.h: a case of each public operation: its gradient by kn_gradcheck, and the
 * same call on meta. every_test.c holds that none is missing. */
#ifndef KNAP_TESTS_EVERY_H
#define KNAP_TESTS_EVERY_H

#include "autograd/gradcheck.h"
#include "tests/kn_test.h"

enum { EVERY_MAX_IN = 4 };

typedef struct every_case {
    const char *name;
    bool differentiable, on_meta;
    /* The inputs that may require a gradient: "2 3; +3" is [2,3] with values in [-1.5, 1.5) and [3]
     * with values in [0.3, 1.8); "%2" values in [0.1, 0.9). */
    const char *inputs;
    kn_tensor *(*call)(kn_tensor *const *in);
} every_case;

typedef struct every_entry {
    const every_case *row;
} every_entry;

/* EVERY(kn_add, "2 3; 3", kn_add(x, y)): the call with its inputs x, y, z, w. The linker collects
 * the cases of all files (EVERY_FLAT: results without gradient; EVERY_ROW: also sizes that
 * depend on values, an error on meta). Other tensors of a call are made
 * on x's device. */
#define EVERY(name, inputs, ...)      EVERY_ROW(name, true, true, inputs, __VA_ARGS__)
#define EVERY_FLAT(name, inputs, ...) EVERY_ROW(name, false, true, inputs, __VA_ARGS__)
#define EVERY_ROW(name, differentiable, on_meta, inputs, ...)                                      \
    static kn_tensor *every_##name(kn_tensor *const *in)                                           \
    {                                                                                              \
        kn_tensor *x = in[0], *y = in[1], *z = in[2], *w = in[3];                                  \
        (void)x, (void)y, (void)z, (void)w;                                                        \
        return __VA_ARGS__;                                                                        \
    }                                                                                              \
    static const every_case case_##name = { #name, differentiable, on_meta, inputs,                \
                                            every_##name };                                        \
    static const every_entry entry_##name __attribute__((                                          \
        section("kn_every"), used, aligned(sizeof(every_entry)))) = { &case_##name }

/* Whole numbers beside t. */
#define WHOLE(t, shape, ...)                                                                       \
    kn_from(KN_I64, kn_device_of(t), (int64_t[]){ __VA_ARGS__ }, KN_SHAPE shape)
#define DIMS(...)                                                                                  \
    (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (int64_t[])                       \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

/* The cases of all files: EACH_CASE(c) { c->call(...); } */
extern const every_entry __start_kn_every[], __stop_kn_every[];
#define EACH_CASE(c)                                                                               \
    for (const every_entry *e = __start_kn_every; e < __stop_kn_every; e++)                        \
        for (const every_case *c = e->row; c; c = NULL)
/* The inputs of a case on a device, in dtype t; their number (every_test.c). */
int every_inputs(const every_case *c, kn_dtype t, kn_device device, kn_tensor **in);

#endif
