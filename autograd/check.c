/* autograd/check.c: finding the first operation that makes a value that isn't finite
 * (kn_set_check). Operations are judged where they are applied (apply.c, function.c), and their
 * backwards where the engine runs them. */
#include "autograd/check.h"
#include <math.h>
#include <string.h>

void kn_set_check(bool on)
{
    kn_context_get()->check = on;
}

bool kn_checking(void)
{
    return kn_context_get()->check;
}

/* ---- counting -------------------------------------------------------------------------------- */

typedef struct found {
    int64_t nan, inf;
} found;

/* Bit patterns: an exponent of ones is an infinity, or with a mantissa a NaN. */
#define COUNT(type, p, n, exponent, mantissa)                                                      \
    for (int64_t i = 0; i < (n); i++) {                                                            \
        type v;                                                                                    \
        memcpy(&v, (const char *)(p) + (size_t)i * sizeof v, sizeof v);                            \
        if ((v & (exponent)) == (exponent))                                                        \
            *((v & (mantissa)) ? &f.nan : &f.inf) += 1;                                            \
    }

static found count(kn_dtype t, const void *p, int64_t n)
{
    found f = { 0 };
    if (t == KN_F32) {
        COUNT(uint32_t, p, n, 0x7f800000u, 0x007fffffu)
    } else if (t == KN_F64) {
        COUNT(uint64_t, p, n, 0x7ff0000000000000u, 0x000fffffffffffffu)
    } else if (t == KN_BF16) {
        COUNT(uint16_t, p, n, 0x7f80u, 0x007fu)
    } else if (t == KN_F16) {
        COUNT(uint16_t, p, n, 0x7c00u, 0x03ffu)
    }
    return f;
}

/* Tensors without values, whole numbers and bytes that a unit released have none. */
static found look(const kn_tensor *t)
{
    found f = { 0 };
    kn_context *c = kn_context_get();
    const int64_t n = t ? kn_numel(t) : 0;
    if (n == 0 || !kn_dtype_is_float(t->dtype) || kn_device_of(t) == KN_META || !kn_ok() ||
        t->storage->released)
        return f;
    const size_t size = kn_dtype_size(t->dtype), bytes = (size_t)n * size;
    if (kn_device_of(t) == KN_CPU && kn_is_contiguous(t) && t->storage->data)
        return count(t->dtype, (const char *)t->storage->data + (size_t)t->offset * size, n);
    void *host = kn_host_alloc(bytes);
    kn_frame *frame = c->frame; /* whose forward doesn't look */
    c->frame = NULL;
    if (host && kn_to_host(t, host, bytes))
        f = count(t->dtype, host, n);
    c->frame = frame;
    kn_host_free(host);
    return f;
}

/* ---- saying it ------------------------------------------------------------------------------- */

/* "f32[2,3] has 2 NaN and 1 infinite of 6 values" */
static char *describe(const kn_tensor *t, found f, char *text, size_t size)
{
    char nan[32] = "", inf[32] = "";
    if (f.nan)
        snprintf(nan, sizeof nan, "%lld NaN", (long long)f.nan);
    if (f.inf)
        snprintf(inf, sizeof inf, "%lld infinite", (long long)f.inf);
    snprintf(text, size, "%s has %s%s%s of %lld values", KN_SHOWN(t), nan,
             f.nan && f.inf ? " and " : "", inf, (long long)kn_numel(t));
    return text;
}

/* Appends "; input 2, f32[3], has 1 NaN of 3 values" for each that isn't finite. Their number. */
static int list(kn_tensor *const *t, int n, const char *noun, char *text, size_t size)
{
    int bad = 0;
    for (int i = 0; i < n; i++) {
        char one[224];
        const size_t used = strlen(text);
        found f = look(t[i]);
        if (f.nan + f.inf == 0)
            continue;
        bad++;
        snprintf(text + used, size - used, "; its %s %d, %s", noun, i + 1,
                 describe(t[i], f, one, sizeof one));
    }
    return bad;
}

static bool some_infinite(kn_tensor *const *in, int n)
{
    bool some = false;
    for (int i = 0; i < n && !some; i++)
        some = look(in[i]).inf > 0;
    return some;
}

/* ---- judging --------------------------------------------------------------------------------- */

bool kn_check_results(const char *what, bool may_fill, kn_tensor *const *in, int nin,
                      kn_tensor *const *out, int nout)
{
    const kn_context *c = kn_context_get();
    if (kn_backward_scale() && c->hook) /* a hook that looks at gradients */
        return kn_ok();
    for (int i = 0; i < nout; i++) {
        char one[224], inputs[640] = "";
        found f = look(out[i]);
        /* infinities that come in (masks of -inf) may go out; those of further results (the
         * logarithms of sums in attention) are the operation's own business */
        if (f.nan == 0 && (f.inf == 0 || i > 0 || may_fill || some_infinite(in, nin)))
            continue;
        const bool clean = list(in, nin, "input", inputs, sizeof inputs) == 0;
        return kn_fail("check: forward of '%s' made values that aren't finite: its result %s%s",
                       what, describe(out[i], f, one, sizeof one),
                       clean ? "; all inputs were finite" : inputs);
    }
    return kn_ok();
}

static void gather_saved(const kn_op_grad *g, char *text, size_t size)
{
    list(g->in, g->nin, "input", text, size);
    list(g->out, g->nout, "result", text, size);
    list(g->kept, KN_MAX_OUT, "saved tensor", text, size);
}

bool kn_check_gradients(const kn_node *n, const kn_op_grad *g)
{
    if (kn_backward_scale())
        return true;
    for (int i = 0; i < g->nin; i++) {
        char one[224], at[256] = "", why[640] = "";
        found f = g->want[i] ? look(g->din[i]) : (found){ 0 };
        if (f.nan + f.inf == 0)
            continue;
        const bool came = list(g->dout, g->nout, "gradient", why, sizeof why) > 0;
        if (!came) {
            gather_saved(g, why, sizeof why);
            const size_t used = strlen(why);
            snprintf(why + used, sizeof why - used, "; the gradient that came to it was finite");
        }
        if (n->place.file)
            snprintf(at, sizeof at, " (called at %s:%d)", n->place.file, n->place.line);
        return kn_fail("check: backward of '%s'%s made values that aren't finite: its gradient of "
                       "input %d, %s%s%s",
                       n->op->name, at, i + 1, describe(g->din[i], f, one, sizeof one), why,
                       came ? ", as it came: a sum of gradients overflowed, or it was passed in"
                            : "");
    }
    return kn_ok();
}

/* The operations inside of a backward belong to it, but for those of hooks. */
bool kn_check_pause(const kn_node *n)
{
    kn_context *c = kn_context_get();
    const bool was = c->check;
    if (!n->apart)
        c->check = false;
    return was;
}

void kn_check_resume(bool was)
{
    kn_context_get()->check = was;
}
