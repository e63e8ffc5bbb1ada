/* tests/fsdp/full_precision_test.c: a model that trains in bf16 is evaluated in the precision of
 * its masters: with the bits of a plain f32 model that has their values, and training goes on as if
 * that had not been. Rank functions return a status. */
#include "tests/fsdp/net.h"

static bool wrap(net *m, kn_comm *world, const way *w)
{
    return net_init(m, KN_META) &&
           kn_fsdp_wrap(m, world, WAY_OPTIONS(w), .wrap_class = "linear",
                        .full_precision_class = "layer_norm", .seed = NET_SEED,
                        .param_dtype = KN_BF16, .buffer_dtype = KN_BF16, .output_dtype = KN_F32);
}

/* The loss of micro-batch 0 with grad mode off. */
static bool evaluate(net *m, double *loss)
{
    IN_SCOPE;
    WITHOUT_GRAD;
    kn_tensor *y = net_loss(m, 0);
    *loss = y ? kn_item(y) : NAN;
    return kn_ok();
}

static void sum_gathers(const kn_fsdp_event *e, void *bytes)
{
    *(int64_t *)bytes += e->kind == KN_FSDP_GATHER ? e->bytes : 0;
}

/* plain's parameters become the masters of m (collective). */
static bool copy_masters(net *plain, net *m)
{
    float room[NET_VOCAB * NET_HIDDEN];
    const kn_param *p;
    bool ok = true;
    int n = kn_params(plain, &p);
    for (int i = 0; i < n && ok; i++)
        ok = kn_param_read(m, i, room) && kn_param_write(plain, i, room);
    return ok;
}

/* Evaluates m in full precision; *loss gets plain f32's bits, *low those of bf16. */
static void in_full(net *m, net *plain)
{
    double low, full, want;
    int64_t narrow = 0, wide = 0;
    KN_CHECK(copy_masters(plain, m) && evaluate(plain, &want));
    KN_CHECK(kn_fsdp_on_event(m, sum_gathers, &narrow) && evaluate(m, &low) &&
             kn_fsdp_set_full_precision(m, true) && kn_fsdp_on_event(m, sum_gathers, &wide));
    kn_tensor *scale = kn_module_buffer(m, "scale");
    KN_CHECK(kn_dtype_of(scale) == KN_F32 && ((float *)kn_array_of(scale).data)[2] == 1e-3f);
    KN_CHECK(evaluate(m, &full));
    KN_CHECK(full == want && low != want, "%.9g, not %.9g (bf16: %.9g)", full, want, low);
    KN_CHECK(wide > narrow, "gathers of %lld and %lld bytes", (long long)narrow, (long long)wide);
    KN_CHECK(kn_fsdp_set_full_precision(m, true) && evaluate(m, &full) && full == want, "again");
    KN_CHECK(kn_fsdp_set_full_precision(m, false) && kn_dtype_of(scale) == KN_BF16);
    KN_CHECK(evaluate(m, &full) && full == low, "back in bf16");
    KN_CHECK(kn_fsdp_on_event(m, NULL, NULL));
}

RANK_TEST(full_precision, bits_of_f32_and_training_goes_on, IN_ALL_WAYS)
{
    const way *w = arg;
    OWNED_MODULE net m, twin, plain;
    const int rank = kn_rank(world);
    KN_CHECK(wrap(&m, world, w) && wrap(&twin, world, w) && net_reference(&plain));
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.01), *t = kn_adamw(&twin, .lr = 0.01);
    KN_CHECK(o && t);
    in_full(&m, &plain);
    for (int i = 0; i < 3; i++) {
        KN_CHECK(net_backward(&m, i * 4 + rank) && net_backward(&twin, i * 4 + rank));
        in_full(&m, &plain);
        kn_scope scope = kn_scope_begin();
        kn_tensor *loss = net_loss(&m, 50 + rank);
        in_full(&m, &plain);
        KN_CHECK(kn_backward(loss));
        kn_scope_end(scope);
        KN_CHECK(net_backward(&twin, 50 + rank) && kn_step(o) && kn_step(t));
        in_full(&m, &plain);
    }
    const kn_param *p;
    int n = kn_params(&twin, &p);
    float a[NET_VOCAB * NET_HIDDEN], b[NET_VOCAB * NET_HIDDEN];
    for (int i = 0; i < n; i++)
        KN_CHECK(kn_param_read(&m, i, a) && kn_param_read(&twin, i, b) &&
                     memcmp(a, b, (size_t)p[i].numel * sizeof *a) == 0,
                 "\'%s\' trained otherwise", p[i].name);
}

KN_TEST(full_precision, wrong_use_is_a_sentence)
{
    OWNED_MODULE net m, plain;
    double loss;
    KN_CHECK(net_reference(&plain) && wrap(&m, NULL, &ways[0]));
    REFUSED(kn_fsdp_set_full_precision(&plain, true), "there is no unit of fsdp");
    kn_scope scope = kn_scope_begin();
    kn_tensor *early = net_loss(&m, 1);
    KN_CHECK(early && kn_fsdp_set_full_precision(&m, true));
    REFUSED(kn_backward(early), "before it trains");
    kn_scope_end(scope);
    REFUSED(net_backward(&m, 0), "set grad mode off");
    KN_CHECK(evaluate(&m, &loss));
    kn_summon_scope open = kn_summon(&m);
    REFUSED(kn_fsdp_set_full_precision(&m, false), "is summoned");
    KN_CHECK(kn_summon_end(open) && kn_fsdp_set_full_precision(&m, false) && net_backward(&m, 0));
}
