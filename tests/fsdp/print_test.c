/* tests/fsdp/print_test.c: the list of units and the sharded tree as text. */
#include "tests/fsdp/net.h"

static void printed(void *m, char *text, size_t size)
{
    FILE *f = fmemopen(text, size, "w");
    KN_CHECK(f && kn_fsdp_print(f, m));
    fclose(f);
}

static void says(const char *text, const char *part)
{
    KN_CHECK(strstr(text, part), "'%s' is missing in:\n%s", part, text);
}

KN_TEST(print, units_and_buckets)
{
    char text[4096] = "";
    NET(m);
    printed(&m, text, sizeof text);
    KN_CHECK(strcmp(text, "net: no unit of fsdp; kn_fsdp_wrap makes them\n") == 0, "%s", text);
    KN_CHECK(kn_fsdp_wrap(&m, NULL, .wrap_class = "linear", .param_dtype = KN_BF16));
    printed(&m, text, sizeof text);
    says(text, "net: unit, full_shard over 1 rank, 78 elements\n");
    says(text, "wte.weight [11,6]: 66 of 66 here\n");
    says(text, "  fc1 linear: unit, full_shard over 1 rank, 91 elements\n");
    says(text, "flat: 78 elements + ");
    says(text, "f32, computes in bf16, reduces in bf16, sharded");
    says(text, ", frozen");
    says(text, "fc2.bias [6]: 6 of 6 here\n");
    kn_freeze(&m, false);
    printed(&m, text, sizeof text);
    KN_CHECK(!strstr(text, ", frozen"), "%s", text);
    kn_fsdp_memory on = kn_fsdp_predict(&m);
    kn_freeze(&m.fc1, true);
    KN_CHECK(kn_fsdp_predict(&m).grad < on.grad);
    kn_summon_scope s = kn_summon(&m.fc1);
    printed(&m, text, sizeof text);
    says(text, "91 elements, summoned\n");
    KN_CHECK(kn_summon_end(s));
}

KN_TEST(print, a_group_is_one_unit)
{
    char text[4096] = "";
    kn_module *unit[8];
    NET(m);
    kn_module *group[] = { &m.fc1.base, &m.fc2.base };
    KN_CHECK(kn_fsdp_wrap_group(group, 2, NULL, .layout = KN_LAYOUT_PER_PARAM) &&
             kn_fsdp_wrap(&m, NULL, .strategy = KN_NO_SHARD));
    KN_CHECK(kn_fsdp_units(&m, unit, 8) == 2, "%d units", kn_fsdp_units(&m, unit, 8));
    KN_CHECK(unit[0] == &m.fc1.base && unit[1] == &m.base, "children first, a group by its first");
    KN_CHECK(kn_fsdp_units(&m, unit, 1) == 2, "counts beyond max");
    KN_CHECK(kn_fsdp_is_unit(&m.fc2) && !kn_fsdp_is_unit(&m.ln));
    printed(&m, text, sizeof text);
    says(text, "net: unit, no_shard over 1 rank");
    says(text, "fc1 linear: unit, full_shard over 1 rank, 175 elements\n");
    says(text, "with fc2\n");
    says(text, "per parameter: ");
    says(text, "fc2 linear: in the unit of fc1\n");
    says(text, "whole\n");
    kn_summon_scope s = kn_summon(&m); /* the group once */
    KN_CHECK(s.s && kn_summon_end(s));
}

KN_TEST(print, roots_of_trees_of_units)
{
    OWNED_MODULE net m;
    kn_module *unit[8];
    KN_CHECK(net_init(&m, KN_META) && kn_fsdp_roots(&m, unit, 8) == 0);
    kn_module *group[] = { &m.fc1.base, &m.fc2.base };
    KN_CHECK(kn_fsdp_wrap_group(group, 2, NULL) && kn_fsdp_wrap(&m.ln, NULL));
    KN_CHECK(kn_fsdp_roots(&m, unit, 8) == 2 && unit[0] == &m.fc1.base && unit[1] == &m.ln.base);
    KN_CHECK(kn_fsdp_roots(&m.ln, unit, 8) == 1 && unit[0] == &m.ln.base);
    KN_CHECK(kn_fsdp_device(&m.ln) == KN_CPU && kn_ok());
    KN_CHECK(kn_fsdp_device(&m) == KN_DEVICE_DEFAULT);
    KN_CHECK_ERROR("'net' (net) lies in no unit of fsdp");
    KN_CHECK(kn_fsdp_wrap(&m, NULL));
    KN_CHECK(kn_fsdp_roots(&m, unit, 8) == 1 && unit[0] == &m.base);
    KN_CHECK(kn_fsdp_roots(&m, NULL, 8) == 1 && kn_fsdp_units(&m, NULL, 8) == 3);
    KN_CHECK(kn_fsdp_roots(&m.ln, unit, 8) == 0, "it lies in the root's tree");
    KN_CHECK(kn_fsdp_device(&m.head) == KN_CPU, "of the unit around it");
    kn_module_free(&m);
    KN_CHECK(net_init(&m, KN_META) && kn_fsdp_wrap(&m, NULL, .device = KN_META));
    KN_CHECK(kn_fsdp_device(&m.fc1) == KN_META);
}

static void prints_its_shard(kn_comm *world, void *arg)
{
    char text[4096] = "", want[64];
    NET_WRAPPED(m, world, .strategy = KN_HYBRID_SHARD, .mesh = { 2, 2 },
                .layout = KN_LAYOUT_PER_PARAM);
    FILE *f = fmemopen(text, sizeof text, "w");
    KN_CHECK(f && kn_fsdp_print(f, &m), "print");
    fclose(f);
    KN_CHECK(strstr(text, "hybrid_shard over 2 x 2 ranks"), "%s", text);
    int shard = kn_rank(world) % 2;
    snprintf(want, sizeof want, "(this is %d of 2)", shard + 1);
    KN_CHECK(strstr(text, want), "%s", text);
    snprintf(want, sizeof want, "wte.weight [11,6]: %d of 66 here", shard ? 30 : 36);
    KN_CHECK(strstr(text, want), "%s", text);
}

KN_TEST(print, each_rank_says_what_it_holds)
{
    if (!THREADS_ONLY)
        KN_CHECK(spawn_processes(4, prints_its_shard, NULL) == 0);
}
