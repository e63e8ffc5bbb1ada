/* tests/fsdp/failure_test.c: a rank that fails at any meeting of a training step: every other rank ends
 * too, at once, and nothing is left behind. The step is a whole one (wrapping, gathers, reductions,
 * hybrid all-reduces, clipping, the optimizer); launch_test.c shows the sentences that users see. */
#include "comm/comm_internal.h"
#include "tests/fsdp/net.h"

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>

typedef struct failing {
    way w;
    kn_comm_failure how;
    int64_t at;               /* which meeting of the last rank */
    _Atomic int *got_through; /* ranks */
} failing;

static int step(kn_comm *world, void *arg)
{
    failing *f = arg;
    net m;
    kn_set_threads(1);
    if (kn_rank(world) == kn_comm_size(world) - 1)
        kn_comm_fail_at(world, f->at, f->how);
    bool ok = net_init(&m, KN_META) && net_wrap(&m, world, &f->w);
    kn_optim *o = ok ? kn_sgd(&m, .lr = 0.1) : NULL;
    ok = o && net_backward(&m, kn_rank(world)) && kn_item(kn_clip_grad_norm(&m, 1)) > 0 &&
         kn_step(o);
    kn_comm_fail_at(world, 0, f->how);
    ok = ok && kn_agree(world, true);
    kn_optim_free(o);
    kn_module_free(&m);
    *f->got_through += ok;
    return !ok;
}

static int shared_files(void)
{
    DIR *d = opendir("/dev/shm");
    int n = 0;
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

static void at_every_meeting(kn_comm_failure how, way w, int ranks)
{
    int before = shared_files();
    int64_t at = 1;
    _Atomic int *through =
        mmap(NULL, sizeof *through, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (;; at++) {
        failing f = { w, how, at, through };
        double begin = kn_now();
        *through = 0;
        int failed = kn_spawn(ranks, step, &f);
        KN_CHECK(failed == ranks - *through, "meeting %lld: %d ranks failed, %d got through",
                 (long long)at, failed, *through);
        KN_CHECK(kn_now() - begin < 20, "meeting %lld: the ranks hung", (long long)at);
        if (failed == 0)
            break;
        KN_CHECK(failed == ranks, "meeting %lld: only %d of %d ranks ended", (long long)at, failed,
                 ranks);
        KN_CHECK(at < 500, "the step never ends");
    }
    munmap((void *)through, sizeof *through);
    KN_CHECK(at > 10, "only %lld meetings were tried", (long long)at);
    KN_CHECK(shared_files() == before, "%d files are left in /dev/shm", shared_files() - before);
    KN_CHECK(waitpid(-1, NULL, WNOHANG) < 0, "a process is left");
}

KN_TEST(failure, a_rank_exits_anywhere_in_a_step)
{
    at_every_meeting(KN_FAIL_EXIT, ways[0], 3);
}

KN_TEST(failure, a_rank_crashes_anywhere_in_a_step)
{
    at_every_meeting(KN_FAIL_CRASH, ways[1], 2);
}

KN_TEST(failure, a_rank_runs_out_of_memory_anywhere_in_a_step)
{
    at_every_meeting(KN_FAIL_MEMORY, ways[2], 3);
}

KN_TEST(failure, an_error_anywhere_in_a_hybrid_step)
{
    at_every_meeting(KN_FAIL_ERROR, ways[8], 4);
}

/* ---- units that backward reaches, but whose parameters get a gradient on some ranks only -------------- */

typedef struct expert {
    kn_module base;
    kn_linear fc;
    bool asleep; /* for this micro-batch */
} expert;

static kn_tensor *expert_forward(kn_module *self, kn_tensor *x)
{
    expert *e = (expert *)self;
    return e->asleep ? kn_add(x, x) : kn_add(x, kn_call(&e->fc, x));
}

typedef struct experts {
    kn_module base;
    kn_linear in;
    expert one;
} experts;

static kn_tensor *experts_forward(kn_module *self, kn_tensor *x)
{
    experts *m = (experts *)self;
    return kn_call(&m->one, kn_call(&m->in, x));
}

static bool experts_init(experts *m)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->base, experts_forward) &&
           kn_linear_init(&m->in, &m->base, "in", 3, 5, .device = KN_META) &&
           kn_module_init(&m->one.base, expert_forward) &&
           kn_module_add(&m->base, "one", &m->one.base) &&
           kn_linear_init(&m->one.fc, &m->one.base, "fc", 5, 5, .device = KN_META);
}

static bool experts_backward(experts *m, int micro)
{
    kn_scope scope = kn_scope_begin();
    m->one.asleep = micro % 2 == 1;
    float v[6] = { 1, 2, 3, -1, (float)micro, 0.5f };
    kn_tensor *y = kn_call(m, kn_from(KN_F32, KN_CPU, v, KN_SHAPE(2, 3)));
    bool ok = kn_backward(kn_mse_loss(y, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 5))));
    kn_scope_end(scope);
    return ok;
}

static int some_sleep(kn_comm *world, void *arg)
{
    const way *w = arg;
    experts m, plain;
    kn_set_threads(1);
    EXPECT(experts_init(&plain) && kn_materialize(&plain, KN_CPU, NET_SEED));
    for (int i = 0; i < kn_comm_size(world); i++)
        EXPECT(experts_backward(&plain, i));
    kn_optim *o = kn_adamw(&plain, .lr = 0.1);
    EXPECT(o && kn_step(o));
    kn_optim_free(o);
    EXPECT(experts_init(&m) && kn_fsdp_wrap(&m, world, .strategy = w->strategy, .layout = w->layout,
                                            .wrap_class = "expert", .seed = NET_SEED));
    o = kn_adamw(&m, .lr = 0.1);
    EXPECT(o && experts_backward(&m, kn_rank(world)) && kn_step(o));
    kn_optim_free(o);
    const kn_param *p;
    int n = kn_params(&plain, &p);
    for (int i = 0; i < n; i++)
        EXPECT(reads_as(&m, i, p[i].tensor), "'%s' differs", p[i].name);
    kn_module_free(&m);
    kn_module_free(&plain);
    return 0;
}

KN_TEST(unit, all_parameters_without_gradient_on_some_ranks)
{
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int i = 0; i < 5; i++)
            KN_CHECK(kn_spawn(ranks, some_sleep, (void *)&ways[i]) == 0, "%d ranks, way %d", ranks,
                     i);
}
