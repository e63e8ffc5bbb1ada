/* bench/peers/in_f64.h: included before an example by scripts/peers examples: the example then
 * computes in f64, and writes what it begins with (parameters), what comes from outside (batches,
 * draws) and the loss of each backward, in this order, to the file $KNAP_TAPE: a line "kind name
 * dtype sizes...", then the elements. */
#include <knap.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One line and its tensor; x is given back. */
static inline kn_tensor *peer_tape(const char *kind, const char *name, kn_tensor *x)
{
    static FILE *tape;
    const size_t bytes = x ? (size_t)kn_numel(x) * kn_dtype_size(kn_dtype_of(x)) : 0;
    void *host = malloc(bytes ? bytes : 1);
    if (!tape && !(tape = fopen(getenv("KNAP_TAPE"), "wb")))
        abort();
    if (x && kn_to_host(kn_detach(x), host, bytes)) {
        fprintf(tape, "%s %s %s", kind, name, kn_dtype_name(kn_dtype_of(x)));
        for (int i = 0; i < kn_ndim(x); i++)
            fprintf(tape, " %lld", (long long)kn_size(x, i));
        fprintf(tape, "\n");
        fwrite(host, 1, bytes, tape);
        fflush(tape);
    }
    free(host);
    return x;
}

static inline bool peer_begin(void *module)
{
    const kn_param *p;
    const int n = kn_params(module, &p);
    kn_scope scope = kn_scope_begin();
    peer_tape("model", "begins", kn_zeros(KN_F32, KN_CPU, KN_SCALAR));
    for (int i = 0; i < n && kn_ok(); i++) {
        kn_tensor *whole = kn_empty(KN_F64, KN_CPU, kn_ndim(p[i].tensor), kn_shape(p[i].tensor));
        if (kn_param_read(module, i, kn_data(whole)))
            peer_tape("param", p[i].name, whole);
    }
    kn_scope_end(scope);
    return kn_ok();
}

static inline bool peer_wrap(void *module, kn_comm *comm, kn_fsdp_wrap_options o)
{
    return (kn_fsdp_wrap_)(module, comm, o) && peer_begin(module);
}

static inline bool peer_materialize(void *module, kn_device device, uint64_t seed)
{
    return (kn_materialize)(module, device, seed) && peer_begin(module);
}

static inline bool peer_init(kn_module *m, kn_forward1 f1, kn_forward_n fn, const char *name)
{
    return (kn_module_init_)(m, f1, fn, name) && kn_module_defaults(m, .dtype = KN_F64);
}

static inline bool peer_sequential(kn_sequential *s, kn_module *parent, const char *name)
{
    return (kn_sequential_init)(s, parent, name) &&
           (parent || kn_module_defaults(s, .dtype = KN_F64));
}

static inline bool peer_defaults(void *m, kn_module_defaults_options o)
{
    o.dtype = KN_F64;
    return (kn_module_defaults_)(m, o);
}

static inline kn_loader *peer_mnist(const char *split, const kn_comm *world, kn_mnist_options o)
{
    o.dtype = KN_F64;
    return (kn_mnist_)(split, world, o);
}

static inline kn_batch peer_next(kn_loader *l)
{
    kn_batch b = (kn_next)(l);
    peer_tape("batch", "x", b.x);
    peer_tape("batch", "y", b.y);
    return b;
}

/* The comparison ends where an evaluation begins. */
static inline void peer_train(void *m, bool on)
{
    if (!on)
        exit(0);
    (kn_train)(m, on);
}

static inline bool peer_backward(kn_tensor *loss, kn_backward_options o)
{
    if (loss && kn_ndim(loss) == 0) /* else a tensor whose gradient is given */
        peer_tape("loss", "loss", loss);
    return (kn_backward_)(loss, o);
}

#undef kn_fsdp_wrap_
#undef kn_materialize
#undef kn_module_init_
#undef kn_sequential_init
#undef kn_module_defaults_
#undef kn_mnist_
#undef kn_next
#undef kn_backward_
#undef kn_train
#undef kn_rand
#undef kn_randn
#undef kn_randint
#define kn_fsdp_wrap_       peer_wrap
#define kn_materialize      peer_materialize
#define kn_module_init_     peer_init
#define kn_sequential_init  peer_sequential
#define kn_module_defaults_ peer_defaults
#define kn_mnist_           peer_mnist
#define kn_next             peer_next
#define kn_backward_        peer_backward
#define kn_train            peer_train
#define kn_rand(...)        peer_tape("draw", "rand", (kn_rand)(__VA_ARGS__))
#define kn_randn(...)       peer_tape("draw", "randn", (kn_randn)(__VA_ARGS__))
#define kn_randint(...)     peer_tape("draw", "randint", (kn_randint)(__VA_ARGS__))
#define KN_F32              KN_F64
#define float double
#define rintf     rint
#define fabsf     fabs
#define fminf     fmin
#define fmaxf     fmax
#define copysignf copysign
