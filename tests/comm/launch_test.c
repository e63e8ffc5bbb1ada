/* tests/comm/launch_test.c: ranks that another launcher starts (torchrun's variables, srun): they
 * find each other, and incomplete or contradictory settings are an error. mpirun:
 * tests/cli/mpi.sh. */
#include "tests/comm/program_test.h"

KN_TEST(launch, torchrun_s_ranks_find_each_other)
{
    static result r[4];
    adopt_orphans();
    for (int n = 2; n <= 4; n++) {
        for (int k = n - 1; k >= 0; k--) /* rank 0 last */
            start_local_rank(&r[k], k, n, "step");
        check_step(r, n, "torchrun");
    }
    check_no_orphans();
}

KN_TEST(launch, slurm_s_ranks_find_each_other)
{
    static result r[2];
    char line[300];
    for (int k = 0; k < 2; k++) {
        memset(&r[k], 0, sizeof r[k]);
        snprintf(line, sizeof line,
                 "SLURM_JOB_ID=%d SLURM_STEP_ID=0 SLURM_PROCID=%d SLURM_STEP_NUM_TASKS=2 "
                 "SLURM_STEP_NUM_NODES=1 SLURM_LOCALID=%d SLURM_MPI_TYPE=none ok",
                 (int)getpid(), k, k);
        start(&r[k], line);
    }
    for (int k = 0; k < 2; k++) {
        finish(&r[k]);
        KN_CHECK(r[k].status == 0 && strstr(r[k].text, "of 2 threads"), "%s%s", r[k].text,
                 r[k].errors);
    }
    /* the shell of a batch job isn't a step of it */
    result alone = run("SLURM_JOB_ID=5 SLURM_PROCID=0 SLURM_NTASKS=8 ok");
    KN_CHECK(alone.status == 0 && strstr(alone.text, "rank 0 of 1 "), "%s", alone.errors);
    alone = run("SLURM_STEP_ID=4294967291 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 ok --ranks 2");
    KN_CHECK(alone.status == 0 && strstr(alone.text, "rank 1 of 2 "), "%s", alone.errors);
}

KN_TEST(launch, empty_variables_count_as_unset)
{
    result r = run("KNAP_RANKS= KNAP_TIMEOUT= KNAP_RENDEZVOUS= KNAP_COMM= KNAP_NCCL= "
                   "KNAP_REGISTER= KNAP_MEMORY_LIMIT= KNAP_POOL= KNAP_ABORT= KNAP_ISA= "
                   "KNAP_PROVIDERS= KNAP_DATA= KNAP_CUDA_DEVICE= ok");
    KN_CHECK(r.status == 0 && strstr(r.text, "rank 0 of 1 "), "%s", r.errors);
}

KN_TEST(launch, contradictions)
{
#define TORCH "MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 "
    static const char *const lines[][2] = {
        { "RANK=1 ok", "RANK is set, but WORLD_SIZE isn't" },
        { "WORLD_SIZE=2 ok", "WORLD_SIZE is set, but RANK isn't" },
        { "RANK=0 WORLD_SIZE=2 ok", "MASTER_ADDR isn't" },
        { "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost ok", "MASTER_PORT isn't" },
        { "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=x ok", "MASTER_PORT=x: must be" },
        { TORCH "RANK=2 WORLD_SIZE=2 ok", "RANK=2 contradicts WORLD_SIZE=2" },
        { TORCH "RANK=-1 WORLD_SIZE=2 ok", "RANK=-1: must be a number from 0" },
        { TORCH "RANK=0 WORLD_SIZE=two ok", "WORLD_SIZE=two: must be" },
        { TORCH "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3 ok",
          "LOCAL_WORLD_SIZE=3 contradicts WORLD_SIZE=2" },
        { TORCH "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 ok",
          "LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2" },
        { TORCH "RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 ok",
          "LOCAL_RANK=1 contradicts RANK=0" },
        { TORCH "RANK=0 WORLD_SIZE=2 ok --ranks 3", "--ranks 3 (or KNAP_RANKS) contradicts WORLD" },
        { TORCH "RANK=0 WORLD_SIZE=2 KNAP_RANKS=4 ok", "--ranks 4 (or KNAP_RANKS) contradicts" },
        { TORCH "RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 ok",
          "RANK=1 contradicts OMPI_COMM_WORLD_RANK=0" },
        { TORCH "RANK=1 WORLD_SIZE=3 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 ok",
          "WORLD_SIZE=3 contradicts OMPI_COMM_WORLD_SIZE=2" },
        { "PMI_RANK=1 ok", "PMI_RANK is set, but PMI_SIZE isn't" },
        { "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 "
          "SLURM_MPI_TYPE=none ok",
          "SLURM_STEP_NUM_TASKS=4: ranks on several hosts need a place to meet" },
        { "KNAP_TIMEOUT=soon ok", "KNAP_TIMEOUT soon: must be a number of seconds" },
    };
    check_refused_lines(lines, sizeof lines / sizeof *lines);
}

KN_TEST(launch, a_second_rank_0_is_an_error)
{
    static result r[2];
    for (int k = 0; k < 2; k++)
        start_local_rank(&r[k], 0, 2, "ok");
    order_by_end(&r[0], &r[1]);
    kill(r[0].pid, SIGKILL); /* it would wait for rank 1 */
    for (int k = 0; k < 2; k++)
        finish(&r[k]);
    KN_CHECK(r[1].status == 1 && lines_with(r[1].errors, "\n") == 1 &&
                 strstr(r[1].errors, "another rank 0 of this user is there"),
             "%s", r[1].errors);
    KN_CHECK(r[0].status == 1009, "%d: %s", r[0].status, r[0].errors);
}

/* Without a supervisor the ranks notice that one has died, and name it. */
KN_TEST(launch, a_dead_rank_is_noticed)
{
    static result r[3];
    int lines = 0, named = 0; /* each rank says why it ends, as one of them says it for all */
    adopt_orphans();
    for (int k = 0; k < 3; k++)
        start_local_rank(&r[k], k, 3, "step crash 1 12");
    for (int k = 0; k < 3; k++) {
        finish(&r[k]);
        KN_CHECK(r[k].status != 0, "rank %d", k);
        lines += lines_with(r[k].errors, "\n");
        KN_CHECK(k == 1 || strstr(r[k].errors, "rank 1 died without an error message; its last "
                                               "call was "),
                 "%s", r[k].errors);
        named += strncmp(r[k].errors, "knap: rank 1 died", 17) == 0;
    }
    KN_CHECK(lines == 2 && named == 1, "%s%s%s", r[0].errors, r[1].errors, r[2].errors);
    check_no_orphans();
}

/* ---- a rank fails at any collective ---------------------------------------------------------- */

enum { RANKS = 3 };

static void start_failing(result *r, const char *how, int nth, double seconds)
{
    char line[128];
    memset(r, 0, sizeof *r);
    snprintf(line, sizeof line, "KNAP_TIMEOUT=%g step %s %d %d --ranks %d", seconds, how,
             nth % RANKS, nth, RANKS);
    start(r, line);
}

/* A rank that stopped is named by those whose timeout has passed. */
static void check_stopped(result *r, int nth, double seconds)
{
    char says[64];
    for (;; seconds *= 2) {
        finish(r);
        snprintf(says, sizeof says, "waited %g s for rank %d ", seconds, nth % RANKS);
        if (strstr(r->errors, says))
            return;
        KN_CHECK(ran_out_of(r->errors, seconds), "at %d: not '%s': %s", nth, says, r->errors);
        start_failing(r, "stop", nth, 2 * seconds);
    }
}

/* A rank fails at each meeting of a step of three ranks, some meetings at a time. The job must end
 * without waiting for a timeout, unless the rank stops, print one line that names the rank, and
 * leave no process behind. says: other text of the line. */
static void fail_everywhere(const char *how, int status, const char *says)
{
    enum { AT_ONCE = 10, MOST = 128 };
    static result r[AT_ONCE];
    adopt_orphans();
    result whole = run("step --ranks 3");
    const char *in = strstr(whole.text, " in ");
    bool stops = strcmp(how, "stop") == 0;
    double seconds = stops ? 1 : 100000;
    int meetings = in ? atoi(in + 4) : 0;
    KN_CHECK(meetings >= 20 && meetings < MOST, "%s%s", whole.text, whole.errors);
    const int apart = kn_one_in(10);
    for (int first = 1 + how[1] % apart; first <= meetings; first += AT_ONCE * apart) {
        for (int k = 0; k < AT_ONCE && first + k * apart <= meetings; k++)
            start_failing(&r[k], how, first + k * apart, seconds);
        for (int k = 0; k < AT_ONCE && first + k * apart <= meetings; k++) {
            const int nth = first + k * apart;
            result *t = &r[k];
            char who[32];
            if (stops)
                check_stopped(t, nth, seconds);
            else
                finish(t);
            snprintf(who, sizeof who, "rank %d", nth % RANKS);
            KN_CHECK(t->status == status, "%s at %d: status %d: %s", how, nth, t->status,
                     t->errors);
            KN_CHECK(lines_with(t->errors, "\n") == 1 && strncmp(t->errors, "knap: rank ", 11) == 0,
                     "%s at %d: %s", how, nth, t->errors);
            KN_CHECK(strstr(t->errors, who) && strstr(t->errors, says), "%s at %d: %s", how, nth,
                     t->errors);
        }
    }
    check_no_orphans();
}

KN_TEST(launch, a_rank_exits_at_any_collective)
{
    fail_everywhere("exit", 7, "exited with status 7");
}

KN_TEST(launch, a_rank_crashes_at_any_collective)
{
    fail_everywhere("crash", 128 + SIGSEGV, "was killed by signal 11");
}

KN_TEST(launch, a_rank_stops_at_any_collective)
{
    fail_everywhere("stop", 1, "for rank ");
}

KN_TEST(launch, a_rank_runs_out_of_memory_at_any_collective)
{
    fail_everywhere("memory", 1, "out of memory");
}

KN_TEST(launch, an_error_at_any_collective)
{
    fail_everywhere("error", 1, ": a failure asked for");
}

KN_TEST(launch, a_memory_limit_is_the_rank_s_error)
{
    result r = run("KNAP_MEMORY_LIMIT=100000 step --ranks 2");
    KN_CHECK(r.status == 1 && lines_with(r.errors, "\n") == 1, "%d %s", r.status, r.errors);
    KN_CHECK(strstr(r.errors, "out of memory"), "%s", r.errors);
}
