/* tests/state/state_values_test.c: numbers, texts and objects in a state, its file, wrong use, and
 * memory that runs out. */
#include "data/loader.h"
#include "kernels/context.h"
#include "tests/failing.h"
#include "tests/models/temp.h"
#include "tests/kn_test.h"
#include "tests/state/moving.h"

/* ---- values ---------------------------------------------------------------------------------- */

KN_TEST(state_values, by_name)
{
    kn_state *s = kn_state_new(), *other = kn_state_new();
    char name[32];
    for (int i = 0; i < 50; i++) {
        snprintf(name, sizeof name, "n%d", i);
        KN_CHECK(kn_state_set_int(s, name, i) && kn_state_set_int(s, name, i + 1));
    }
    KN_CHECK(kn_state_remove(s, "n0") && kn_state_count(s) == 49 && !kn_state_has(s, "n0"));
    KN_CHECK(kn_state_int(s, "n49") == 50 && kn_state_number(s, "n1") == 2);
    KN_CHECK(strcmp(kn_state_name(s, 0), "n1") == 0);
    KN_CHECK(kn_state_set_text(s, "n1", "text") && strcmp(kn_state_text(s, "n1"), "text") == 0);
    REFUSED(kn_state_int(s, "n1"), "'n1' is a text, not a whole number");
    REFUSED(kn_state_tensor(s, "n2"), "'n2' is a whole number, not a tensor");
    REFUSED(kn_state_number(s, "none"), "the state has no 'none'");
    REFUSED(kn_state_remove(s, "none"), "the state has no 'none'");
    REFUSED(kn_state_name(s, 49), "number 49 doesn't exist; the state has 49 names");
    KN_CHECK(kn_state_set_int(other, "n2", 3) && kn_state_set_int(other, "n3", 3));
    REFUSED(kn_state_merge(s, other), "both states have 'n3', with other values");
    REFUSED(kn_state_merge(s, s), "both states are the same");
    KN_CHECK(kn_state_set_int(other, "n3", 4) && kn_state_set_number(other, "x", 0.5));
    KN_CHECK(kn_state_merge(s, other) && kn_state_count(s) == 50 && kn_state_number(s, "x") == 0.5);
    REFUSED(kn_state_set_int(s, "", 1), "the name is empty");
    REFUSED(kn_state_set_int(NULL, "a", 1), "the state is NULL");
    kn_state_free(s);
    kn_state_free(NULL);
}

/* ---- hostile names --------------------------------------------------------------------------- */

enum { BITS = 20, BLOCKS = 15, WORD = 4 };

/* FNV-1a, of a word after what gave h: a hash that an author of files can compute. */
static uint64_t fnv(uint64_t h, const char *word)
{
    for (int i = 0; i < WORD; i++)
        h = (h ^ (unsigned char)word[i]) * 0x100000001b3u;
    return h;
}

static void spell(int n, char word[WORD + 1])
{
    for (int i = 0; i < WORD; i++, n /= 26)
        word[i] = (char)('a' + n % 26);
    word[WORD] = 0;
}

/* Two words that lead from h to the same low bits, which become h. */
static void find_pair(uint64_t *h, char pair[2][WORD + 1])
{
    static int seen[1 << BITS];
    memset(seen, 0, sizeof seen);
    for (int n = 1;; n++) {
        spell(n, pair[1]);
        const uint64_t low = fnv(*h, pair[1]) & ((1 << BITS) - 1);
        if (seen[low]) {
            spell(seen[low], pair[0]);
            *h = low;
            return;
        }
        seen[low] = n;
    }
}

/* Seconds for as many names as there are ways to choose a word of each pair. */
static double seconds_for(char pair[BLOCKS][2][WORD + 1])
{
    kn_state *s = kn_state_new();
    const double begin = kn_now();
    for (int n = 0; n < 1 << BLOCKS; n++) {
        char name[BLOCKS * WORD + 1] = "";
        for (int k = 0; k < BLOCKS; k++)
            memcpy(name + k * WORD, pair[k][n >> k & 1], WORD);
        KN_CHECK(kn_state_set_int(s, name, n));
    }
    const double seconds = kn_now() - begin;
    KN_CHECK(kn_state_count(s) == 1 << BLOCKS);
    kn_state_free(s);
    return seconds;
}

/* Names from a file can't be chosen so that all of them are looked for in one place. */
KN_TEST(state_values, hostile_names_take_no_longer)
{
    char hostile[BLOCKS][2][WORD + 1], usual[BLOCKS][2][WORD + 1];
    uint64_t h = 0xcbf29ce484222325u;
    for (int k = 0; k < BLOCKS; k++) {
        find_pair(&h, hostile[k]);
        spell(2 * k, usual[k][0]);
        spell(2 * k + 1, usual[k][1]);
    }
    const double least = seconds_for(usual), most = seconds_for(hostile);
    KN_CHECK(most < 30 * least + 0.5, "%g s, and %g s for usual names", most, least);
}

/* ---- a file ---------------------------------------------------------------------------------- */

KN_TEST(state_values, come_back_from_a_file)
{
    kn_state *s = kn_state_new(), *back;
    KN_CHECK(kn_state_set_number(s, "best", INFINITY) && kn_state_set_number(s, "third", 1.0 / 3) &&
             kn_state_set_int(s, "least", INT64_MIN) &&
             kn_state_set_text(s, "note", "\"quoted\" \xc3\xa4"));
    KN_CHECK(kn_state_save(s, temp_path("state.safetensors")));
    back = kn_state_open(temp_path("state.safetensors"));
    KN_CHECK(back && isinf(kn_state_number(back, "best")) &&
             kn_state_number(back, "third") == 1.0 / 3 &&
             kn_state_int(back, "least") == INT64_MIN &&
             strcmp(kn_state_text(back, "note"), "\"quoted\" \xc3\xa4") == 0);
    kn_state_free(s), kn_state_free(back);
}

KN_TEST(state_values, files_that_are_none)
{
    kn_state *s = kn_state_new();
    REFUSED(kn_state_save(s, temp_path("a")), "the state is empty");
    REFUSED(kn_state_open(temp_path("none")), "cannot open");
    REFUSED(kn_state_open(""), "the path is empty");
    const kn_safetensors_pair bad[] = { { "knap.values", "[1]" }, { "knap.values", "{\"a\":[]}" } };
    const float x = 1;
    const kn_safetensors_entry e = { .name = "a", .dtype = KN_F32, .data = &x };
    KN_CHECK(kn_safetensors_save(temp_path("b"), &e, 1, &bad[0], 1));
    REFUSED(kn_state_open(temp_path("b")), "its values are no JSON object");
    KN_CHECK(kn_safetensors_save(temp_path("b"), &e, 1, &bad[1], 1));
    REFUSED(kn_state_open(temp_path("b")), "'a' is a tensor and a value");
    kn_state_free(s);
}

/* ---- objects --------------------------------------------------------------------------------- */

static int fill_index(kn_data_sample *s, void *arg)
{
    (void)arg;
    *(int64_t *)s->field[0] = s->index;
    return true;
}

static kn_loader *loader_of(int64_t samples)
{
    return kn_loader_new(fill_index, NULL, NULL, .samples = samples, .batch = 2, .shuffle = true,
                         .field = { { KN_I64 } });
}

KN_TEST(state_values, objects_go_on)
{
    OWNED_MODULE net m;
    KN_CHECK(net_reference(&m));
    kn_scaler *scaler = kn_scaler_new(&m, .init_scale = 8), *fresh = kn_scaler_new(&m);
    kn_schedule schedule = { KN_COSINE, .lr = 0.5, .min_lr = 0.1, .warmup = 3, .steps = 90 },
                to = { 0 };
    kn_loader *data = loader_of(20), *again = loader_of(20), *other = loader_of(10);
    kn_scope scope = kn_scope_begin();
    for (int i = 0; i < 3; i++)
        kn_next(data);
    kn_seed(77), kn_set_step(5);
    kn_set_grad_mode(false);
    kn_tensor *first = kn_rand_like(kn_ones(KN_F32, KN_CPU, KN_SHAPE(9)));
    kn_state *s = kn_state_new();
    KN_CHECK(kn_state_put(s, .scaler = scaler, .schedule = &schedule, .loader = data,
                          .random = true, .prefix = "t."));
    KN_CHECK(kn_state_int(s, "t.random.step") == 5 && kn_state_number(s, "t.scaler.scale") == 8);
    kn_tensor *drawn = kn_rand_like(first);
    kn_seed(1), kn_set_step(0);
    REFUSED(kn_state_get(s, .scaler = fresh, .schedule = &to, .loader = other, .random = true,
                         .prefix = "t."),
            "loader");
    KN_CHECK(to.lr == 0 && kn_get_step() == 0 && kn_scaler_get(fresh).scale == 65536);
    KN_CHECK(kn_state_get(s, .scaler = fresh, .schedule = &to, .loader = again, .random = true,
                          .prefix = "t."));
    KN_CHECK(kn_scaler_get(fresh).scale == 8 && kn_get_step() == 5 &&
             kn_context_get()->rng.seed == 77);
    KN_CHECK(same_bytes(kn_rand_like(drawn), drawn), "draws with grad mode off don't go on");
    KN_CHECK(to.kind == KN_COSINE && kn_schedule_at(&to, 50) == kn_schedule_at(&schedule, 50));
    KN_CHECK(same_bytes(kn_next(again).x, kn_next(data).x));
    REFUSED(kn_state_get(s, .random = true), "the state has no whole number 'random.seed'");
    KN_CHECK(kn_state_set_int(s, "t.schedule.kind", 99));
    REFUSED(kn_state_get(s, .schedule = &to, .prefix = "t."), "schedule.kind is 99");
    KN_CHECK(kn_state_set_number(s, "t.scaler.scale", NAN));
    REFUSED(kn_state_get(s, .scaler = fresh, .loader = again, .prefix = "t."), "scale");
    KN_CHECK(kn_loader_round(again) == 4 && kn_state_set_int(s, "t.random.step", -1));
    REFUSED(kn_state_get(s, .random = true, .prefix = "t."), "random.step is -1");
    KN_CHECK(kn_state_set_int(s, "t.random.step", 5) && kn_state_set_int(s, "t.random.quiet", -1));
    REFUSED(kn_state_get(s, .random = true, .prefix = "t."), "random.quiet is -1");
    KN_CHECK(kn_state_remove(s, "t.random.quiet"));
    REFUSED(kn_state_get(s, .random = true, .prefix = "t."), "no whole number 't.random.quiet'");
    kn_scope_end(scope);
    kn_loader_free(data), kn_loader_free(again), kn_loader_free(other);
    kn_scaler_free(scaler), kn_scaler_free(fresh);
    kn_state_free(s);
}

/* ---- wrong use ------------------------------------------------------------------------------- */

static void wrong_values(net *m, kn_optim *o, kn_state *so)
{
    KN_CHECK(kn_state_set_int(so, "fc1.weight.step", 7));
    REFUSED(kn_load_optim_state_dict(o, so), "it has one step number");
    KN_CHECK(kn_load_optim_state_dict(o, so, .keep_options = true));
    KN_CHECK(kn_state_set_int(so, "fc1.weight.step", -1));
    REFUSED(kn_load_optim_state_dict(o, so), "no whole number from 0 to 2^62");
    KN_CHECK(kn_state_set_int(so, "fc1.weight.step", 0) &&
             kn_state_set_number(so, "fc2.weight.lr", 0.25));
    REFUSED(kn_load_optim_state_dict(o, so), "it has one rate");
    KN_CHECK(kn_state_set_number(so, "fc2.weight.lr", NAN));
    REFUSED(kn_load_optim_state_dict(o, so), "no finite number");
    KN_CHECK(kn_state_remove(so, "fc2.weight.lr"));
    REFUSED(kn_load_optim_state_dict(o, so), "1 missing (fc2.weight.lr)");
    OWNED_OPTIM kn_optim *sgd = kn_sgd(m, .lr = 1);
    REFUSED(kn_load_optim_state_dict(sgd, so), "12 unexpected");
}

KN_TEST(state_values, wrong_use)
{
    net m, other;
    KN_CHECK(net_reference(&m) && net_reference(&other));
    kn_optim *o = kn_adamw(&m, .lr = 0.1);
    kn_ema *e = kn_ema_new(&other);
    kn_state *s = kn_state_dict(&m), *so = kn_optim_state_dict(o);
    REFUSED(kn_state_dict(NULL), "kn_state_dict");
    REFUSED(kn_optim_state_dict(NULL), "the optimizer is NULL");
    REFUSED(kn_load_state_dict(&m, NULL), "the state is NULL");
    REFUSED(kn_load_optim_state_dict(o, NULL), "the state is NULL");
    REFUSED(kn_state_dict(&m, .kind = 9), "the kind is 9");
    REFUSED(kn_state_dict(&m, .kind = KN_STATE_SHARDED, .rank0_only = true), "rank 0 alone");
    REFUSED(kn_state_dict(&m, .dtype = KN_I64), ".dtype is i64");
    REFUSED(kn_state_dict(&m, .ema = e), ".ema was made for another module");
    REFUSED(kn_optim_state_dict(o, .ema = e), ".ema is for kn_state_dict");
    REFUSED(kn_load_optim_state_dict(o, so, .ema = e), ".ema is for kn_load_state_dict");
    REFUSED(kn_load_state_dict(&m, s, .keep_options = true), ".keep_options is for optimizers");
    KN_CHECK(kn_ema_swap(e));
    REFUSED(kn_load_state_dict(&other, s), "the module holds averages");
    KN_CHECK(kn_ema_swap(e));
    REFUSED(kn_state_dict_type(&m, 9).type, "the kind is 9");
    REFUSED(kn_state_dict_type_end((kn_state_dict_scope){ NULL }), "the scope is NULL");
    kn_state_dict_scope scope = kn_state_dict_type(&other, KN_STATE_FULL);
    REFUSED(kn_state_rekey(s, &m, KN_KEYS_DEFAULT, NULL), "give KN_KEYS_NAME or KN_KEYS_INDEX");
    wrong_values(&m, o, so);
    kn_state_free(s), kn_state_free(so);
    kn_ema_free(e);
    kn_optim_free(o);
    kn_module_free(&m), kn_module_free(&other);
    KN_CHECK(kn_state_dict_type_end(scope), "of a module that was freed");
    REFUSED(kn_state_dict_type_end(scope), "the scope ended already");
}

/* Loads that need the same sharding, the same ranks or no open scope. */
static int wrong_ways(kn_comm *world, void *arg)
{
    net m, other;
    EXPECT(net_init(&m, KN_META) && net_wrap(&m, world, &ways[0]) &&
               net_other(&other, world, &ways[1]),
           "init");
    kn_state *s = kn_state_dict(&m, .kind = KN_STATE_LOCAL), *part;
    kn_summon_scope scope = { 0 };
    const int how = *(int *)arg;
    bool ok = true;
    const char *want = "";
    if (how == 0) {
        ok = kn_load_state_dict(&other, s);
        want = "mismatched";
    } else if (how == 1) {
        part = kn_state_dict(&m, .kind = KN_STATE_SHARDED);
        kn_module_free(&other);
        EXPECT(net_reference(&other), "plain");
        ok = kn_load_state_dict(&other, part);
        want = "load it on the ranks that took it";
        kn_state_free(part);
    } else {
        scope = kn_summon(&m);
        ok = kn_state_dict(&m) || kn_state_dict(&m, .kind = KN_STATE_LOCAL);
        want = "end the scope first";
    }
    EXPECT(!ok && (strstr(kn_error(), want) || kn_rank(world) > 0), "%s", want);
    kn_clear_error();
    if (how == 2)
        kn_summon_end(scope); /* fails: the ranks' errors ended their world */
    kn_state_free(s);
    kn_module_free(&m), kn_module_free(&other);
    kn_clear_error();
    return 0;
}

KN_TEST(state_values, wrong_ways)
{
    for (int how = 0; how < 3; how++) {
        KN_CHECK(kn_spawn_threads(2, wrong_ways, &how) == 0, "%d", how);
        kn_clear_error();
    }
}

/* ---- memory runs out ------------------------------------------------------------------------- */

typedef struct moved {
    net m, other;
    kn_optim *o, *p;
    kn_state *s, *so; /* of the other */
} moved;

/* Takes, moves and loads everything. What a failure leaves must be as before. */
static bool whole_way(void *arg)
{
    moved *v = arg;
    net *m = &v->m;
    kn_load_report r = { 0 };
    kn_state *s = kn_state_dict(m, .dtype = KN_BF16),
             *p = kn_optim_state_dict(v->o, .prefix = "o.");
    kn_state *l = kn_state_dict(m, .kind = KN_STATE_LOCAL);
    bool ok = s && p && l && kn_state_rekey(p, m, KN_KEYS_INDEX, "o.") &&
              kn_state_set_text(s, "note", "x") && kn_state_put(s, .random = true);
    ok = ok && kn_state_merge(s, p);
    kn_state_free(ok ? NULL : p);
    kn_state_dict_scope scope = kn_state_dict_type(m, KN_STATE_FULL);
    ok = ok && scope.type &&
         kn_load_state_dict(m, v->s, .not_strict = true, .report = &r, .from_rank0 = true) &&
         kn_load_optim_state_dict(v->o, v->so) && kn_load_state_dict(m, l);
    if (scope.type)
        ok = kn_state_dict_type_end(scope) && ok;
    kn_load_report_free(&r);
    kn_state_free(s);
    kn_state_free(l);
    return ok && kn_ok();
}

KN_TEST(state_values, memory_runs_out)
{
    moved v;
    KN_CHECK(net_init(&v.m, KN_META) && net_wrap(&v.m, kn_comm_self(), &ways[1]) &&
             net_reference(&v.other));
    v.o = kn_adamw(&v.m, .lr = 0.1), v.p = kn_adamw(&v.other, .lr = 0.1);
    v.s = kn_state_dict(&v.other), v.so = kn_optim_state_dict(v.p);
    KN_CHECK(kn_state_set_int(v.s, "more", 1) && whole_way(&v));
    each_allocation_fails(whole_way, NULL, &v, 100);
    kn_state_free(v.s), kn_state_free(v.so);
    kn_optim_free(v.o), kn_optim_free(v.p);
    kn_module_free(&v.m), kn_module_free(&v.other);
}
