/* comm/launch/init.c: how a program becomes a rank, and how it ends being one: by our own
 * supervisor (--ranks), or by another launcher (launch.c). */
#include "comm/launch/launch.h"
#include "comm/local/local.h"
#include "kernels/choices.h"
#include "kernels/environment.h"
#include "kernels/error_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_THREADS 1024

/* ---- the world of a context ------------------------------------------------------------------ */

static void poison_world(const char *message, void *arg)
{
    const kn_comm *world = arg;
    if (!kn_comm_is_forked(world->world))
        kn_comm_poison(arg, message);
}

bool kn_rank_enter(kn_comm *world)
{
    kn_context *c = kn_context_get();
    if (!world)
        return false;
    c->init_state = world;
    c->rank = world->rank;
    c->world = world->size;
    c->rng.micro = c->rank; /* the first step's draws differ over ranks, as those after kn_step */
    if (strcmp(world->ops->backend, "self") == 0)
        return true; /* there is no other rank */
    c->on_error_internal = poison_world;
    c->on_error_internal_arg = world;
    if (kn_tuning())
        kn_fail("KNAP_TUNE=1 on %d ranks: one rank times algorithms, and all compute with the same "
                "ones; run it on one rank first, then here without KNAP_TUNE",
                world->size);
    if (!kn_ok())
        kn_comm_poison(world, kn_error());
    return true;
}

static _Thread_local kn_comm
    *self; /* kn_comm_self in a world with other ranks; lives as long as the context */

/* The context ends: its streams are idle, the layers above have let go of their tensors. */
static void (*end_next)(kn_context *c);

static void world_end(kn_context *c)
{
    kn_comm *world = c->init_state;
    kn_say_nothing(c);
    if (world) {
        c->on_error_internal = NULL;
        if (!kn_comm_is_forked(world->world)) /* else it is the parent's, whose ranks go on */
            kn_comm_world_free(world->world);
        c->init_state = NULL;
    }
    if (self)
        kn_comm_world_free(self->world);
    self = NULL;
    if (end_next)
        end_next(c);
}

/* Before the constructors of the layers above, so that it is called after them. */
__attribute__((constructor(200))) static void world_register(void)
{
    end_next = kn_context_on_end;
    kn_context_on_end = world_end;
}

kn_comm *kn_world(void)
{
    return kn_context_get()->init_state;
}

kn_comm *kn_comm_self(void)
{
    kn_comm *world = kn_world();
    if (world && world->size == 1)
        return world;
    if (!self)
        self = kn_comm_alone();
    return self;
}

bool kn_comm_default(kn_comm **c, const char *what)
{
    kn_launch launch = { 0 };
    *c = kn_world();
    if (*c)
        return true;
    if (!kn_launch_read(&launch))
        return false;
    return !launch.launcher || launch.size <= 1 ||
           kn_fail(
               "%s: no communicator was given, and %s started this program as one of %d ranks, but "
               "kn_init was not called; call it first, or pass kn_comm_self() for this rank alone",
               what, launch.launcher, launch.size);
}

/* ---- options --------------------------------------------------------------------------------- */

typedef struct options {
    int ranks, threads; /* 0: not given */
} options;

static bool parse_count(const char *name, const char *text, int most, int *value)
{
    int64_t n;
    if (!text || *text == 0)
        return kn_fail("%s needs a number from 1 to %d, for example %s 2", name, most, name);
    if (!kn_parse_number(text, 1, most, &n))
        return kn_fail("%s %s: must be a number from 1 to %d", name, text, most);
    if (*value && *value != n)
        return kn_fail("%s %d contradicts the %d given before: give it once", name, (int)n, *value);
    *value = (int)n;
    return true;
}

/* If argv[i] is option name: how many arguments it takes up (1 as --name=value, else 2), and its
 * value. Else 0. */
static int match(char **argv, int argc, int i, const char *name, const char **value)
{
    size_t length = strlen(name);
    if (strncmp(argv[i], name, length) != 0)
        return 0;
    if (argv[i][length] == '=') {
        *value = argv[i] + length + 1;
        return 1;
    }
    if (argv[i][length] != 0)
        return 0;
    *value = i + 1 < argc ? argv[i + 1] : NULL;
    return *value ? 2 : 1;
}

/* The ranks that are started here read the variable. */
static bool take_fault(const char *text)
{
    const char *given = getenv("KNAP_FAULT");
    if (!text || !*text)
        return kn_fail("--fault needs a text, for example --fault \"rank 1: kill at collective 17 "
                       "of step 3\"");
    if (given && *given && strcmp(given, text) != 0)
        return kn_fail("--fault \"%s\" contradicts another one or KNAP_FAULT, \"%s\": give one",
                       text, given);
    return setenv("KNAP_FAULT", text, 1) == 0 || kn_fail_memory("--fault");
}

/* Takes --ranks, --threads and --fault out of argv, up to a lone "--". */
static bool parse_options(int *argc, char **argv, options *o)
{
    bool ok = true;
    int kept = 1, i = 1;
    while (i < *argc && strcmp(argv[i], "--") != 0) {
        const char *value = NULL;
        int taken;
        if ((taken = match(argv, *argc, i, "--ranks", &value)))
            ok = parse_count("--ranks", value, KN_LOCAL_MAX_RANKS, &o->ranks) && ok;
        else if ((taken = match(argv, *argc, i, "--threads", &value)))
            ok = parse_count("--threads", value, MAX_THREADS, &o->threads) && ok;
        else if ((taken = match(argv, *argc, i, "--fault", &value)))
            ok = take_fault(value) && ok;
        else
            argv[kept++] = argv[i];
        i += taken ? taken : 1;
    }
    while (i < *argc)
        argv[kept++] = argv[i++];
    if (kept < *argc)
        argv[kept] = NULL;
    *argc = kept;
    return ok;
}

static bool read_environment(options *o)
{
    const char *ranks = getenv("KNAP_RANKS");
    int n = 0;
    if (!ranks || !*ranks)
        return true;
    if (!parse_count("KNAP_RANKS", ranks, KN_LOCAL_MAX_RANKS, &n))
        return false;
    if (o->ranks && o->ranks != n)
        return kn_fail("--ranks %d contradicts KNAP_RANKS=%d in the environment: unset one",
                       o->ranks, n);
    o->ranks = n;
    return true;
}

/* The fault that is asked for, for this rank of so many, if it is one. */
static bool read_fault(int rank, int ranks)
{
    const char *text = getenv("KNAP_FAULT");
    return !text || !*text || kn_fault_read(text, rank, ranks);
}

static double given_timeout; /* to kn_init; 0: none */

/* KNAP_TIMEOUT, or where it isn't set 60; false if it is none. */
static bool read_timeout(double *seconds)
{
    const char *text = getenv("KNAP_TIMEOUT");
    char *end = "";
    *seconds = text && *text ? strtod(text, &end) : 60;
    return *end == 0 && *seconds > 0;
}

double kn_comm_default_timeout(void)
{
    double seconds;
    return given_timeout > 0 ? given_timeout : read_timeout(&seconds) ? seconds : 60;
}

static bool check_timeout(void)
{
    double seconds;
    return read_timeout(&seconds) ||
           kn_fail("KNAP_TIMEOUT %s: must be a number of seconds above 0, for example 60",
                   getenv("KNAP_TIMEOUT"));
}

/* ---- launchers ------------------------------------------------------------------------------- */

static bool started_here;

bool kn_comm_started_ranks(void)
{
    return started_here;
}

static bool started_by_supervisor(void)
{
    return getenv("KNAP_RANK") != NULL;
}

static kn_comm *join_supervisor(const options *o)
{
    int64_t n[3] = { -1, -1, -1 };
    bool known = kn_env_number("KNAP_RANK", 0, KN_LOCAL_MAX_RANKS - 1, &n[0]) &&
                 kn_env_number("KNAP_WORLD", 1, KN_LOCAL_MAX_RANKS, &n[1]) &&
                 kn_env_number("KNAP_LOCAL_FD", 0, INT32_MAX, &n[2]);
    const int rank = (int)n[0], size = (int)n[1], fd = (int)n[2];
    /* a child of this process is not this rank */
    started_here = true;
    unsetenv("KNAP_RANK");
    unsetenv("KNAP_WORLD");
    unsetenv("KNAP_LOCAL_FD");
    if (!known)
        return NULL;
    if ((o->ranks && o->ranks != size) || o->threads)
        return kn_fail_null(
            "--%s given to rank %d of %d: give it to the program that starts the ranks",
            o->threads ? "threads" : "ranks", rank, size);
    size_t bytes;
    kn_local_head *head = kn_local_map(fd, &bytes);
    if (!head)
        return NULL;
    close(fd);
    if (rank < 0 || rank >= head->size || size != head->size) {
        kn_fail("local ranks: KNAP_RANK=%d of KNAP_WORLD=%d doesn't fit the %d ranks of the "
                "supervisor",
                rank, size, head->size);
        kn_local_unmap(head, bytes);
        return NULL;
    }
    kn_comm_device_place(rank, size, true);
    kn_comm *world = kn_comm_local(head, bytes, rank, true);
    if (!world)
        kn_local_unmap(head, bytes);
    return world;
}

/* torchrun, mpirun, srun. */
static kn_comm *join_launcher(const kn_launch *l, const options *o)
{
    if (o->ranks && o->ranks != l->size)
        return kn_fail_null(
            "--ranks %d (or KNAP_RANKS) contradicts %s=%d, which %s set: leave it out", o->ranks,
            l->size_name, l->size, l->launcher);
    return kn_launch_join(l, o->threads);
}

/* No launcher: one rank, or the supervisor of several. */
static kn_comm *start_alone(const options *o, char **argv)
{
    kn_local_cores cores = kn_local_share_cores(o->ranks > 1 ? o->ranks : 1, o->threads);
    if (o->ranks > 1 && read_fault(-1, o->ranks)) { /* else no rank is started */
        kn_supervise(o->ranks, &cores, argv);
        return NULL;
    }
    kn_set_threads(cores.threads);
    kn_set_free_cores(cores.free);
    return NULL;
}

/* The arguments of this process, for callers without argv; NULL with an error. */
static char **own_arguments(void)
{
    FILE *f = fopen("/proc/self/cmdline", "re");
    char **argv = NULL, *text = NULL;
    size_t room = 0, n = 0;
    while (f && getdelim(&text, &room, 0, f) > 0) {
        if (!(argv = realloc(argv, (n + 2) * sizeof *argv)))
            break;
        argv[n++] = text; /* the next one has memory of its own */
        argv[n] = text = NULL;
        room = 0;
    }
    free(text);
    if (f)
        fclose(f);
    if (!argv)
        kn_fail("kn_init: cannot read /proc/self/cmdline: pass argc and argv");
    return argv;
}

/* argv and options as found; NULL with an error standing or for "one rank". */
static kn_comm *become_rank(int *argc, char ***argv)
{
    options o = { 0 };
    if (argc && argv && !parse_options(argc, *argv, &o))
        return NULL;
    if (!read_environment(&o) || !check_timeout())
        return NULL;
    if (started_by_supervisor())
        return join_supervisor(&o);
    kn_launch launch;
    if (!kn_launch_read(&launch))
        return NULL;
    if (launch.launcher)
        return join_launcher(&launch, &o);
    char **args = argc && argv ? *argv : NULL;
    if (!args && o.ranks > 1 && !(args = own_arguments()))
        return NULL;
    return start_alone(&o, args);
}

bool kn_open_standard(void)
{
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDWR) != fd)
            return kn_fail_system("descriptor %d (standard %s) is closed, and /dev/null can't "
                                  "take its place: %m; start the program with all three open",
                                  fd,
                                  fd == 0   ? "input"
                                  : fd == 1 ? "output"
                                            : "error");
    return true;
}

static bool take_options(const kn_init_options *o)
{
    if (!(o->timeout_s >= 0))
        return kn_fail("kn_init: .timeout_s = %g: must be more than 0 seconds", o->timeout_s);
    given_timeout = o->timeout_s;
    return kn_comm_device_choose(o->comm);
}

kn_comm *kn_init_(int *argc, char ***argv, kn_init_options o)
{
    if (kn_world())
        return kn_world();
    const bool open = kn_open_standard();
    kn_say_at_crash(kn_context_get());
    kn_comm *world = open && take_options(&o) ? become_rank(argc, argv) : NULL;
    if (!world)
        world = kn_comm_alone();
    kn_rank_enter(world);
    if (world && kn_ok())
        read_fault(world->rank, world->size);
    if (world && strcmp(world->ops->backend, "local") == 0) /* all on this host */
        kn_comm_device_place(world->rank, world->size, false);
    return world;
}

int kn_finish(void)
{
    if (fflush(stdout) != 0 ||
        ferror(stdout)) /* an exit status of 0 would mean that all was written */
        kn_fail("cannot write to standard output: %s", errno ? strerror(errno) : "a write failed");
    kn_fault_missed();
    bool failed = !kn_ok();
    if (failed)
        kn_say_error(kn_context_get(), false);
    kn_context_end();
    return failed ? 1 : 0;
}
