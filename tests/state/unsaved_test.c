/* tests/state/unsaved_test.c: buffers that aren't saved: no state dict and no checkpoint has them,
 * and one that has is loaded all the same. Rank functions return a status. */
#include "knap.h"
#include "tensor/tensor_internal.h"
#include "tests/owned.h"
#include "tests/comm/comm_test.h"
#include "tests/models/temp.h"

/* A layer with a table of as many places as the program asks for, and a buffer that is saved. */
typedef struct net {
    kn_module base, below;
    kn_linear fc;
} net;

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(&((net *)self)->fc, x);
}

static bool net_init(net *m, int places, bool saved, float fill)
{
    float table[16], mean[2] = { fill, 2 * fill };
    for (int i = 0; i < 16; i++)
        table[i] = fill + (float)i;
    memset(m, 0, sizeof *m);
    kn_scope scope = kn_scope_begin();
    bool ok = kn_module_init(&m->base, net_forward) &&
              kn_linear_init(&m->fc, &m->base, "fc", 4, 3, .device = KN_META) &&
              kn_module_init(&m->below, net_forward) &&
              kn_module_add(&m->base, "below", &m->below) &&
              kn_buffer(&m->below, "table", kn_from(KN_F32, KN_CPU, table, KN_SHAPE(places))) &&
              kn_buffer(&m->base, "mean", kn_from(KN_F32, KN_CPU, mean, KN_SHAPE(2))) &&
              kn_set_buffer_saved(&m->below, "table", saved);
    kn_scope_end(scope);
    return ok && kn_fsdp_wrap(m, kn_world(), .wrap_class = "linear", .seed = 3);
}

/* below.table is that of net_init, and mean has what was loaded. */
static bool as_made(net *m, float fill, float loaded)
{
    const float *table = kn_array_of(kn_module_buffer(m, "below.table")).data,
                *mean = kn_array_of(kn_module_buffer(m, "mean")).data;
    return table[0] == fill && table[1] == fill + 1 && mean[1] == 2 * loaded;
}

static bool step(net *m, kn_optim *o)
{
    IN_SCOPE;
    kn_tensor *y = kn_call(m, kn_randn(KN_F32, KN_CPU, 5, 1, KN_SHAPE(2, 4)));
    bool ok = kn_backward(kn_sum(kn_mul(y, y), 0, NULL, false)) && kn_step(o);
    return ok;
}

static int dicts(kn_comm *world, void *arg)
{
    (void)arg;
    for (int kind = KN_STATE_FULL; kind < KN_STATE_KINDS; kind++)
        for (int saved = 0; saved < 2; saved++) {
            OWNED_MODULE net from, to;
            EXPECT(net_init(&from, 5, saved, 1) && net_init(&to, 9, false, 50));
            kn_state *s = kn_state_dict(&from, .kind = kind, .prefix = "net.");
            EXPECT(s && kn_state_has(s, "net.below.table") == saved && kn_state_has(s, "net.mean"));
            kn_load_report report;
            EXPECT(kn_load_state_dict(&to, s, .prefix = "net.", .report = &report), "kind %d: %s",
                   kind, kn_error());
            EXPECT(!report.missing && !report.unexpected && !report.mismatched);
            EXPECT(as_made(&to, 50, 1));
            kn_state_free(s);
            s = kn_state_dict(&from.below, .kind = KN_STATE_SHARDED);
            EXPECT(s && kn_state_count(s) == saved && kn_load_state_dict(&to.below, s), "%s",
                   kn_error());
            kn_load_report_free(&report);
            kn_state_free(s);
        }
    (void)world;
    return 0;
}

KN_TEST(unsaved, state_dicts_have_no_such_buffer)
{
    on_ranks(1, dicts, NULL);
    on_ranks(2, dicts, NULL);
}

/* Of ranks that differ in the buffer, too. */
static int folders(kn_comm *world, void *arg)
{
    const char *dir = arg;
    for (int saved = 0; saved < 2; saved++) {
        OWNED_MODULE net from, to;
        char path[400];
        snprintf(path, sizeof path, "%s/%d", dir, saved);
        EXPECT(net_init(&from, 5, saved, 1 + (float)kn_rank(world)) && net_init(&to, 9, false, 50));
        OWNED_OPTIM kn_optim *o = kn_adamw(&from, .lr = 0.01), *p = kn_adamw(&to, .lr = 0.01);
        EXPECT(step(&from, o) && kn_checkpoint_save(path, &from, .optim = o, .step = 1), "%s",
               kn_error());
        kn_checkpoint *c = kn_checkpoint_open(path, NULL);
        EXPECT(c && kn_checkpoint_load(c, &to, .optim = p), "%s", kn_error());
        EXPECT(as_made(&to, 50, 1 + (float)kn_rank(world)));
        kn_checkpoint_free(c);
    }
    return 0;
}

KN_TEST(unsaved, checkpoints_have_no_such_buffer)
{
    for (int ranks = 1; ranks <= 2; ranks++) {
        char dir[256];
        snprintf(dir, sizeof dir, "%s", temp_path("run"));
        on_ranks(ranks, folders, dir);
        remove_temp();
    }
}

KN_TEST(unsaved, wrong_use_is_a_sentence)
{
    OWNED_MODULE net m;
    KN_CHECK(net_init(&m, 5, true, 1));
    KN_CHECK(kn_module_buffer_saved(&m.below, 0) && kn_set_buffer_saved(&m.below, "table", false) &&
             !kn_module_buffer_saved(&m.below, 0));
    KN_CHECK(!kn_set_buffer_saved(&m, "table", false) &&
             strstr(kn_error(), "has no buffer 'table' of its own"));
    kn_clear_error();
}
