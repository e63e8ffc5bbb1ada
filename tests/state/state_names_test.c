/* tests/state/state_names_test.c: names of state dicts: strict and not, other names of shared
 * tensors, prefixes, kinds of a scope, dtypes, keys by number. */
#include "tests/kn_test.h"
#include "tests/state/stored.h"

/* ---- strict ---------------------------------------------------------------------------------- */

/* Without fc1.weight, with another one, and with fc2.weight of another shape. */
static kn_state *odd_state(net *m)
{
    kn_state *s = kn_state_dict(m);
    IN_SCOPE;
    bool ok = kn_state_remove(s, "fc1.weight") &&
              kn_state_set_tensor(s, "fc3.weight", kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2))) &&
              kn_state_set_tensor(s, "fc2.weight", kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 3))) &&
              kn_state_set_tensor(s, "scale", kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3)));
    return ok ? s : NULL;
}

static bool one(char **list, const char *name)
{
    return list && list[0] && !list[1] && strcmp(list[0], name) == 0;
}

static int lists(trial *t)
{
    net *m = &t->m, *other = &t->other;
    kn_state *s = odd_state(m), *before = kn_state_dict(other);
    kn_load_report r;
    EXPECT(
        s && before &&
            kn_load_state_dict(other, s, .not_strict = true, .skip_mismatched = true, .report = &r),
        "load");
    EXPECT(one(r.missing, "fc1.weight") && one(r.unexpected, "fc3.weight") &&
               one(r.mismatched, "fc2.weight"),
           "lists");
    kn_load_report_free(&r);
    kn_state *after = kn_state_dict(other);
    for (int i = 0; i < kn_state_count(after); i++) {
        const char *name = kn_state_name(after, i);
        const bool stays = strstr(name, "fc1.weight") || strstr(name, "fc2.weight");
        EXPECT(same_bytes(kn_state_tensor(after, name), kn_state_tensor(stays ? before : s, name)),
               "%s", name);
    }
    kn_state_free(s), kn_state_free(before), kn_state_free(after);
    return 0;
}

KN_TEST(state_names, lists_of_what_does_not_fit)
{
    TRY(lists, .ranks = { 1, 2 }, .ways = 1 << 0 | 1 << 1);
}

static int nothing_fits(trial *t)
{
    net *m = &t->m;
    kn_load_report r;
    kn_state *s = kn_state_dict(m);
    EXPECT(s && kn_load_state_dict(m, s, .prefix = "other.", .not_strict = true, .report = &r) &&
               r.missing,
           "a report tells it");
    kn_load_report_free(&r);
    EXPECT(!kn_load_state_dict(m, s, .prefix = "other.", .not_strict = true), "loads");
    EXPECT(strstr(kn_error(), "no name fits: the module has") && strstr(kn_error(), ".prefix"),
           "%s", kn_error());
    kn_clear_error();
    kn_state_free(s);
    return 0;
}

KN_TEST(state_names, a_load_of_nothing_is_an_error)
{
    TRY(nothing_fits, .ranks = { 1, 2 }, .ways = 1 << 0 | 1 << 1);
}

/* The other rank has nothing against the state, and yet nothing is written there. */
static int one_refuses(kn_comm *world, void *arg)
{
    net m, other;
    EXPECT(net_init(&m, KN_META) && net_wrap(&m, world, arg) && net_other(&other, world, arg),
           "init");
    kn_state *s = kn_state_dict(&m);
    char before[3][MOST * 4], after[MOST * 4];
    kn_entries all;
    EXPECT(s && kn_entries_begin(&all, &other, NULL) && kn_entries_add_model(&all, NULL), "list");
    for (int i = 0; i < 3; i++)
        EXPECT(kn_entry_read(&all.list[i], before[i]), "read");
    EXPECT(kn_rank(world) > 0 || kn_state_remove(s, "ln.bias"), "remove");
    EXPECT(!kn_load_state_dict(&other, s), "loads");
    if (kn_rank(world) == 0)
        EXPECT(strstr(kn_error(), "1 missing (ln.bias)"), "text");
    kn_clear_error();
    for (int i = 0; i < 3; i++)
        EXPECT(kn_entry_read(&all.list[i], after) &&
                   memcmp(before[i], after, kn_entry_part_bytes(&all.list[i])) == 0,
               "%s was written", all.list[i].name);
    kn_entries_end(&all);
    kn_state_free(s);
    kn_module_free(&m), kn_module_free(&other);
    kn_clear_error();
    return 0;
}

KN_TEST(state_names, a_load_that_fails_on_one_rank_changes_nothing)
{
    kn_spawn_threads(1, one_refuses, (void *)&ways[0]);
    KN_CHECK_OK();
    KN_CHECK(kn_spawn_threads(2, one_refuses, (void *)&ways[0]) == 0);
    kn_clear_error();
}

KN_TEST(state_names, strict_tells_what_does_not_fit)
{
    net m, other;
    KN_CHECK(net_reference(&m) && net_reference(&other));
    kn_state *s = odd_state(&m);
    REFUSED(kn_load_state_dict(&other, s), "1 missing (fc1.weight), 1 unexpected (fc3.weight), 1 "
                                           "mismatched (fc2.weight): it is f32[2,3], not "
                                           "f32[6,13]");
    REFUSED(kn_load_state_dict(&other, s, .not_strict = true), "fit: 1 mismatched (fc2.weight)");
    REFUSED(kn_load_state_dict(&other, s, .skip_mismatched = true), "1 missing (fc1.weight)");
    KN_CHECK(all_read_as(&other, &m));
    kn_state_free(s);
    kn_module_free(&m), kn_module_free(&other);
}

/* ---- other names ----------------------------------------------------------------------------- */

/* head.weight is wte.weight. */
KN_TEST(state_names, a_shared_parameter_has_every_name)
{
    net m, other;
    KN_CHECK(net_reference(&m) && net_other(&other, NULL, NULL));
    kn_state *s = kn_state_dict(&m);
    KN_CHECK(kn_load_state_dict(&other, s, .from_rank0 = true) && all_read_as(&other, &m));
    kn_module_free(&other);
    KN_CHECK(net_other(&other, NULL, NULL));
    KN_CHECK(s && !kn_state_has(s, "head.weight"));
    KN_CHECK(kn_state_set_tensor(s, "head.weight", kn_state_tensor(s, "wte.weight")));
    KN_CHECK(kn_load_state_dict(&other, s) && all_read_as(&other, &m));
    kn_module_free(&other);
    KN_CHECK(net_other(&other, NULL, NULL) && kn_state_remove(s, "wte.weight"));
    KN_CHECK(kn_load_state_dict(&other, s) && all_read_as(&other, &m));
    KN_CHECK(kn_state_remove(s, "head.weight"));
    REFUSED(kn_load_state_dict(&other, s), "1 missing (wte.weight)");
    kn_state_free(s);
    kn_module_free(&m), kn_module_free(&other);
}

/* A module's names begin below it. */
static int parts(trial *t)
{
    net *m = &t->m, *other = &t->other;
    kn_state *s = kn_state_dict(&m->fc1, .prefix = "a.");
    EXPECT(s && kn_state_count(s) == 2 && kn_state_has(s, "a.weight") && kn_state_has(s, "a.bias"),
           "names");
    kn_state *rest = kn_state_dict(&m->ln, .prefix = "b.");
    EXPECT(kn_state_merge(s, rest) && kn_state_count(s) == 4, "merge");
    EXPECT(kn_load_state_dict(&other->fc1, s, .prefix = "a.") &&
               kn_load_state_dict(&other->ln, s, .prefix = "b."),
           "load");
    kn_state *again = kn_state_dict(&other->fc1, .prefix = "a."),
             *more = kn_state_dict(&other->ln, .prefix = "b.");
    EXPECT(again && kn_state_merge(again, more) && same_states(again, s), "values");
    kn_state_free(s), kn_state_free(again);
    return 0;
}

KN_TEST(state_names, parts_of_a_tree_under_prefixes)
{
    TRY(parts, .ranks = { 2, 4 }, .ways = 1 << 0 | 1 << 2);
}

/* ---- a scope --------------------------------------------------------------------------------- */

static int scoped(trial *t)
{
    net *m = &t->m;
    kn_comm *world = t->world;
    OWNED_OPTIM kn_optim *o = kn_adamw(m, .lr = 0.1);
    const bool first = kn_rank(world) == 0;
    kn_state_dict_scope outer = kn_state_dict_type(m, KN_STATE_SHARDED, .optim_kind = KN_STATE_FULL,
                                                   .optim_rank0_only = true);
    kn_state *s = kn_state_dict(m), *so = kn_optim_state_dict(o);
    EXPECT(s && kn_ndim(kn_state_tensor(s, "fc1.weight")) == 1, "sharded");
    EXPECT(so && (kn_state_count(so) > 0) == first, "full on rank 0");
    kn_state_free(s), kn_state_free(so);
    kn_state_dict_scope inner = kn_state_dict_type(&m->fc1, KN_STATE_LOCAL);
    s = kn_state_dict(&m->fc1), so = kn_state_dict(&m->fc2);
    EXPECT(s && kn_state_has(s, "_flat_param") && so && kn_state_has(so, "weight"), "local");
    kn_state_free(s), kn_state_free(so);
    s = kn_state_dict(m, .kind = KN_STATE_FULL);
    EXPECT(s && kn_ndim(kn_state_tensor(s, "fc1.weight")) == 2, "what is given counts");
    kn_state_free(s);
    EXPECT(kn_state_dict_type_end(inner) && kn_state_dict_type_end(outer), "end");
    s = kn_state_dict(m);
    EXPECT(s && kn_ndim(kn_state_tensor(s, "fc1.weight")) == 2, "full again");
    kn_state_free(s);
    return 0;
}

/* A scope's .rank0_only is for modules, .optim_rank0_only for optimizers. */
static int scoped_rank0(trial *t)
{
    net *m = &t->m;
    kn_comm *world = t->world;
    const bool first = kn_rank(world) == 0;
    OWNED_OPTIM kn_optim *o = kn_adamw(m, .lr = 0.1);
    for (int optim = 0; optim < 2; optim++) {
        kn_state_dict_scope scope =
            kn_state_dict_type(m, KN_STATE_FULL, .rank0_only = !optim, .optim_rank0_only = optim);
        kn_state *s = kn_state_dict(m), *so = kn_optim_state_dict(o);
        EXPECT(s && so && (kn_state_count(s) > 0) == (first || optim) &&
                   (kn_state_count(so) > 0) == (first || !optim),
               "optim %d", optim);
        kn_state_free(s), kn_state_free(so);
        EXPECT(kn_state_dict_type_end(scope));
    }
    return 0;
}

KN_TEST(state_names, a_scope_sets_the_kind)
{
    TRY(scoped, .ranks = { 2 }, .ways = 1 << 0);
    TRY(scoped_rank0, .ranks = { 2 }, .ways = 1 << 0);
}

/* ---- dtypes and keys ------------------------------------------------------------------------- */

/* A state in bf16 fills f32 with the rounded values. */
static int rounded(trial *t)
{
    net *m = &t->m, *other = &t->other;
    const kn_state_kind kinds[] = { KN_STATE_FULL, KN_STATE_SHARDED, KN_STATE_LOCAL };
    for (int i = 0; i < 3; i++) {
        kn_state *s = kn_state_dict(m, .kind = kinds[i], .dtype = KN_BF16);
        EXPECT(s && kn_dtype_of(kn_state_tensor(s, "scale")) == KN_BF16 &&
                   kn_load_state_dict(other, s),
               "load");
        kn_state *full = kn_state_dict(m, .dtype = KN_BF16),
                 *again = kn_state_dict(other, .dtype = KN_BF16), *wide = kn_state_dict(other);
        EXPECT(full && again && same_states(full, again), "rounded once");
        float v[3];
        EXPECT(kn_to_host(kn_state_tensor(wide, "scale"), v, sizeof v) && v[1] == 2.5f &&
                   v[2] != 1e-3f && fabsf(v[2] - 1e-3f) < 1e-5f,
               "%g", (double)v[2]);
        kn_state_free(s), kn_state_free(full), kn_state_free(again), kn_state_free(wide);
    }
    return 0;
}

KN_TEST(state_names, floats_are_converted)
{
    TRY(rounded, .ranks = { 2 }, .ways = 1 << 0);
}

/* The moments at number i are those of parameter i, by name in the other state. */
static bool moments_by_number(const kn_state *s, net *m, const kn_state *by_name)
{
    static const char *const what[] = { "exp_avg", "exp_avg_sq" };
    const kn_param *p;
    const int n = kn_params(m, &p);
    int seen = 0;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < 2 && p[i].trainable; k++, seen++) {
            char number[64], name[64];
            snprintf(number, sizeof number, "o.%d.%s", i, what[k]);
            snprintf(name, sizeof name, "o.%s.%s", p[i].name, what[k]);
            if (!same_bytes(kn_state_tensor(s, number), kn_state_tensor(by_name, name)))
                return kn_ok() && kn_fail("%s differs from %s", number, name);
        }
    return kn_ok() && seen == 2 * 6;
}

KN_TEST(state_names, keys_by_number_and_back)
{
    OWNED_MODULE net m;
    KN_CHECK(net_reference(&m));
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.1);
    KN_CHECK(net_step(&m, o, NULL, 0));
    kn_state *s = kn_optim_state_dict(o, .prefix = "o."),
             *was = kn_optim_state_dict(o, .prefix = "o.");
    KN_CHECK(kn_state_set_int(s, "epoch", 3) && kn_state_set_int(was, "epoch", 3));
    KN_CHECK(kn_state_rekey(s, &m, KN_KEYS_INDEX, "o."));
    KN_CHECK(kn_state_has(s, "o.0.exp_avg") && kn_state_has(s, "o.3.step") &&
             kn_state_has(s, "epoch") && !kn_state_has(s, "o.wte.weight.exp_avg"));
    KN_CHECK(moments_by_number(s, &m, was));
    REFUSED(kn_state_rekey(s, &m, KN_KEYS_INDEX, "o."), "begins with no name of a parameter");
    KN_CHECK(kn_state_has(s, "o.0.exp_avg"));
    KN_CHECK(kn_state_rekey(s, &m, KN_KEYS_NAME, "o.") && kn_state_int(s, "epoch") == 3);
    KN_CHECK(kn_load_optim_state_dict(o, s, .prefix = "o."));
    for (int i = 0; i < kn_state_count(s); i++)
        KN_CHECK(strcmp(kn_state_name(s, i), kn_state_name(was, i)) == 0);
    KN_CHECK(kn_state_set_int(s, "o.99.step", 3));
    REFUSED(kn_state_rekey(s, &m, KN_KEYS_NAME, "o."), "begins with no number of a parameter");
    kn_state_free(s), kn_state_free(was);
}

/* Names that begin with digits aren't numbers. */
KN_TEST(state_names, keys_of_a_sequential_by_number_and_back)
{
    kn_linear fc[2] = { 0 };
    OWNED_MODULE kn_sequential list = { 0 };
    KN_CHECK(kn_linear_init(&fc[0], NULL, NULL, 3, 2) && kn_linear_init(&fc[1], NULL, NULL, 2, 1) &&
             kn_sequential_init(&list, NULL, NULL) && kn_sequential_append(&list, &fc[0]) &&
             kn_sequential_append(&list, &fc[1]) && kn_materialize(&list, KN_CPU, 1));
    OWNED_OPTIM kn_optim *o = kn_adamw(&list, .lr = 0.1);
    kn_state *s = kn_optim_state_dict(o), *was = kn_optim_state_dict(o);
    KN_CHECK(s && kn_state_has(s, "1.weight.exp_avg"));
    REFUSED(kn_state_rekey(s, &list, KN_KEYS_NAME, NULL), "begins with no number of a parameter");
    KN_CHECK(same_states(s, was));
    KN_CHECK(kn_state_rekey(s, &list, KN_KEYS_INDEX, NULL) && kn_state_has(s, "3.exp_avg"));
    KN_CHECK(kn_state_rekey(s, &list, KN_KEYS_NAME, NULL) && same_states(s, was));
    kn_state_free(s), kn_state_free(was);
}
