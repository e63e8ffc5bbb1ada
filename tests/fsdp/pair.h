/* tests/fsdp/pair.h: two modules that record the dtypes that they see, one of them with buffers. */
#ifndef KNAP_TESTS_FSDP_PAIR_H
#define KNAP_TESTS_FSDP_PAIR_H

#include "knap.h"
#include "nn/nn_internal.h"
#include "tests/owned.h"
#include <string.h>

enum { DIM = 4, ROWS = 3 };

/* Multiplies by its weight in the weight's dtype, and records its input. */
typedef struct spy {
    kn_module base;
    kn_dtype in, weight;
} spy;

static inline kn_tensor *spy_forward(kn_module *self, kn_tensor *x)
{
    spy *m = (spy *)self;
    kn_tensor *w = kn_module_param(self, "weight");
    m->in = kn_dtype_of(x);
    m->weight = kn_dtype_of(w);
    return kn_mul(kn_cast(x, m->weight), w);
}

static inline kn_tensor *exact_forward(kn_module *self, kn_tensor *x)
{
    return spy_forward(self, x);
}

typedef struct pair {
    kn_module base;
    spy a, b;
    kn_dtype in, mask, between;
    kn_tensor *buffer; /* kept by the user too */
} pair;

/* (x, mask i64) -> (b(a(x)), mask) */
static inline kn_values pair_forward(kn_module *self, kn_values in, const void *arg)
{
    pair *m = (pair *)self;
    m->in = kn_dtype_of(in.v[0]);
    m->mask = kn_dtype_of(in.v[1]);
    kn_tensor *y = kn_call(&m->a, kn_cast(in.v[0], KN_F32)); /* f32 on purpose */
    m->between = y ? kn_dtype_of(y) : KN_DTYPE_DEFAULT;
    return (kn_values){ 2, { kn_call(&m->b, y), in.v[1] } };
}

static inline bool spy_init(spy *m, kn_module *parent, const char *name, bool exact)
{
    return (exact ? kn_module_init(&m->base, exact_forward)
                  : kn_module_init(&m->base, spy_forward)) &&
           kn_module_add(parent, name, &m->base) &&
           kn_parameter(m, "weight", KN_F32, KN_META, KN_UNIFORM_INIT(1, 2), KN_SHAPE(DIM));
}

static inline bool pair_init(pair *m, bool exact)
{
    memset(m, 0, sizeof *m);
    bool ok = kn_module_init_n(&m->base, pair_forward) && spy_init(&m->a, &m->base, "a", exact) &&
              spy_init(&m->b, &m->base, "b", false);
    IN_SCOPE;
    kn_tensor *b = kn_from(KN_F32, KN_CPU, (float[]){ 1, 1.0001f, 300.7f }, KN_SHAPE(3));
    ok = ok && kn_buffer(&m->b, "running", b) &&
         kn_buffer(&m->b, "count", kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2)));
    m->buffer = ok ? kn_keep(b) : NULL;
    return ok;
}

static inline void pair_free(pair *m)
{
    kn_tensor_free(m->buffer);
    kn_module_free(m);
}
#define OWNED_PAIR __attribute__((cleanup(pair_free), unused))

static inline bool shows(pair *m, kn_dtype dtype, float a, float b, float c)
{
    float v[3];
    IN_SCOPE;
    bool ok = kn_dtype_of(m->buffer) == dtype &&
              kn_to_host(kn_cast(m->buffer, KN_F32), v, sizeof v) && v[0] == a && v[1] == b &&
              v[2] == c && m->b.base.impl->buffer[0].tensor == m->buffer;
    if (!ok)
        fprintf(stderr, "%s %.9g %.9g %.9g\n", kn_dtype_name(kn_dtype_of(m->buffer)), (double)v[0],
                (double)v[1], (double)v[2]);
    return ok;
}

static inline bool put(kn_tensor *t, float a, float b, float c)
{
    IN_SCOPE;
    WITHOUT_GRAD;
    bool ok = kn_copy_(t, kn_from(KN_F32, KN_CPU, (float[]){ a, b, c }, KN_SHAPE(3)));
    return ok;
}

#endif
