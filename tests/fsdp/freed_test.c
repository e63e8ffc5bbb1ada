/* tests/fsdp/freed_test.c: modules of a sharded tree that are freed while the rest lives on. */
#include "tests/fsdp/net.h"
#include "tests/fsdp/two.h"

enum { LAYERS = 4, WIDTH = 5 };

typedef struct row {
    kn_sequential base;
    kn_linear fc[LAYERS];
} row;

static bool row_init(row *m, unsigned without)
{
    bool ok = kn_sequential_init(&m->base, NULL, "");
    for (int i = 0; i < LAYERS && ok; i++) {
        char name[2] = { (char)('0' + i), 0 };
        ok = without & 1u << i ||
             kn_linear_init(&m->fc[i], &m->base.base, name, WIDTH, WIDTH, .device = KN_META);
    }
    return ok;
}

/* Everything that walks over the tree, and a step. */
static void train(row *m)
{
    const kn_param *p;
    kn_module *units[LAYERS + 1];
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    KN_CHECK(kn_params(m, &p) > 0 && kn_module_print(out, m));
    KN_CHECK(!kn_fsdp_is_unit(m) || (kn_fsdp_print(out, m) && kn_fsdp_units(m, units, LAYERS) > 0));
    fclose(out);
    KN_CHECK(!strstr(text, "1: linear"), "%s", text);
    free(text);
    IN_SCOPE;
    OWNED_OPTIM kn_optim *o = kn_adamw(m, .lr = 0.1);
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, 1, KN_SHAPE(2, WIDTH));
    KN_CHECK(kn_backward(sum_of(kn_call(m, x))));
    KN_CHECK(kn_clip_grad_norm(m, 0.5) && kn_step(o));
    kn_summon_scope whole = kn_summon(m);
    KN_CHECK(whole.s && kn_summon_end(whole));
    kn_state *s = kn_state_dict(m);
    KN_CHECK(s && kn_load_state_dict(m, s));
    kn_state_free(s);
}

enum moment { UNUSED, GRADIENTS_WAIT, SUMMONED, GATHERED, HELD_BACK, MOMENTS };

/* One layer is freed, of those that are units or a part of the root's, beside lists of prefetches
 * that name it and a handle of its gather. The rest trains as if it had never been there. */
RANK_TEST(freed, a_child_leaves_the_tree, .threads = "12", .cases = 2 * MOMENTS)
{
    const enum moment when = *(const enum moment *)arg % MOMENTS;
    const bool apart = *(const int *)arg < MOMENTS;
    row m, ref;
    kn_unshard_handle h = { NULL };
    kn_summon_scope whole = { NULL };
    KN_CHECK(row_init(&m, 0) &&
             kn_fsdp_wrap(&m, world, .wrap_class = apart ? "linear" : NULL, .seed = NET_SEED));
    kn_module *gone = &m.fc[1].base, *list[] = { gone, &m.fc[3].base };
    KN_CHECK(!apart || (kn_fsdp_prefetch_forward(&m, list, 2) &&
                        kn_fsdp_prefetch_forward(&m.fc[0], list, 1) &&
                        kn_fsdp_prefetch_backward(&m.fc[3], list, 1)));
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, WIDTH));
    KN_CHECK(when != HELD_BACK || kn_fsdp_set_gradient_sync(&m, false, true));
    KN_CHECK(when == UNUSED || kn_backward(sum_of(kn_call(&m, x))));
    kn_scope_end(scope);
    kn_fsdp_set_gradient_sync(&m, true, true);
    KN_CHECK(when != SUMMONED || (whole = kn_summon(&m)).s);
    KN_CHECK(when != GATHERED || (h = kn_fsdp_unshard(apart ? gone : &m.base.base)).unit);
    kn_module_free(gone);
    KN_CHECK(when != SUMMONED || kn_summon_end(whole));
    if (when == GATHERED && apart && kn_comm_size(world) == 1) /* others would hear of the error */
        REFUSED(kn_unshard_wait(h), "unit was freed", "kn_unshard_wait");
    kn_zero_grad(&m);
    KN_CHECK(row_init(&ref, 1u << 1) && kn_materialize(&ref, KN_CPU, NET_SEED));
    train(&ref);
    train(&m);
    KN_CHECK(all_read_as(&m, &ref));
    h = kn_fsdp_unshard(&m);
    kn_module_free(&m);
    kn_module_free(&ref);
    REFUSED(kn_unshard_wait(h), "unit was freed", "kn_unshard_wait");
}
