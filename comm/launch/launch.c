/* comm/launch/launch.c: ranks of other launchers, recognized by their environment. */
#include "comm/launch/launch.h"
#include "comm/local/local.h"
#include "kernels/environment.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The variables of each launcher. slurm's come last: mpirun and torchrun use srun to start
 * themselves, so its variables count only if no other launcher's are set. */
static const struct source {
    const char *launcher, *rank, *size, *local_rank, *local_size;
    bool mpi;
} sources[] = {
    { "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
      "OMPI_COMM_WORLD_LOCAL_SIZE", true },
    { "mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", true },
    { "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", false },
    { "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL, true },
};
enum { SOURCES = sizeof sources / sizeof *sources, MOST = 1 << 16, TRIES = 8 };

/* *value: -1 if the variable is not set. */
static bool read_number(const char *name, int64_t least, int64_t most, int *value)
{
    int64_t n = -1;
    bool ok = !name || kn_env_number(name, least, most, &n);
    *value = (int)n;
    return ok;
}

static bool read_source(const struct source *s, kn_launch *l)
{
    *l = (kn_launch){ .launcher = s->launcher, .size_name = s->size };
    l->mpi = s->mpi;
    if (!read_number(s->rank, 0, MOST - 1, &l->rank) || !read_number(s->size, 1, MOST, &l->size) ||
        !read_number(s->local_rank, 0, MOST - 1, &l->local_rank) ||
        !read_number(s->local_size, 1, MOST, &l->local_size))
        return false;
    if (l->rank < 0 || l->size < 0)
        return kn_fail("%s is set, but %s isn't: a rank needs both (unset it to run as one rank)",
                       l->rank < 0 ? s->size : s->rank, l->rank < 0 ? s->rank : s->size);
    if (l->rank >= l->size)
        return kn_fail("%s=%d contradicts %s=%d: ranks count from 0 to %d", s->rank, l->rank,
                       s->size, l->size, l->size - 1);
    if (l->local_size > l->size)
        return kn_fail("%s=%d contradicts %s=%d: this host can't have more ranks than the job",
                       s->local_size, l->local_size, s->size, l->size);
    if (l->local_size > 0 && l->local_rank >= l->local_size)
        return kn_fail("%s=%d contradicts %s=%d: local ranks count from 0 to %d", s->local_rank,
                       l->local_rank, s->local_size, l->local_size, l->local_size - 1);
    if (l->local_size == l->size && l->local_rank >= 0 && l->local_rank != l->rank)
        return kn_fail("%s=%d contradicts %s=%d: with all %d ranks on this host they are equal",
                       s->local_rank, l->local_rank, s->rank, l->rank, l->size);
    return true;
}

/* A step of slurm is running this process; not the shell of sbatch or salloc, whose step ids are
 * reserved numbers near 2^32. */
static bool in_slurm_step(void)
{
    const char *step = getenv("SLURM_STEP_ID");
    return step && *step && strtoull(step, NULL, 10) < UINT64_C(0xfffffff0);
}

static bool names(const struct source *s)
{
    if (strcmp(s->launcher, "srun") == 0)
        return in_slurm_step() && getenv(s->rank) && getenv(s->size);
    return getenv(s->rank) || getenv(s->size);
}

/* Ranks that meet at a loopback share a host. At this host's own name ranks of others may meet,
 * too. */
static bool is_loopback(const char *address)
{
    return strcmp(address, "localhost") == 0 || strncmp(address, "127.", 4) == 0 ||
           strcmp(address, "::1") == 0;
}

/* torchrun's variables hold the address of rank 0. */
static bool read_master(kn_launch *l)
{
    const char *address = getenv("MASTER_ADDR"), *run = getenv("TORCHELASTIC_RUN_ID");
    const char *restart = getenv("TORCHELASTIC_RESTART_COUNT"), *job = getenv("KNAP_JOB");
    int port;
    if (!read_number("MASTER_PORT", 1, 65535, &port))
        return false;
    if (!address || !*address || port < 0)
        return kn_fail("RANK=%d and WORLD_SIZE=%d are set, but %s isn't: ranks find each other at "
                       "MASTER_ADDR and MASTER_PORT (MASTER_ADDR=127.0.0.1 MASTER_PORT=29500)",
                       l->rank, l->size, address && *address ? "MASTER_PORT" : "MASTER_ADDR");
    l->one_host = l->local_size == l->size || (l->local_size < 0 && is_loopback(address));
    /* the launcher's agent holds MASTER_PORT itself */
    l->place =
        (kn_tcp_place){ .port = port + TRIES < 65536 ? port + 1 : port - TRIES, .ports = TRIES };
    l->place.secret = job && *job;
    snprintf(l->place.host, sizeof l->place.host, "%s", address);
    snprintf(l->place.job, sizeof l->place.job, "torch %d %s %s %s", port, run ? run : "-",
             restart ? restart : "0",
             job ? job : "-"); /* hosts may have other names for the address */
    snprintf(l->job, sizeof l->job, "torch %s %d %s %s", address, port, run ? run : "-",
             restart ? restart : "0"); /* without KNAP_JOB: error messages name it */
    return true;
}

/* KNAP_RENDEZVOUS=tcp:host:port or file:/path: ranks of any launcher meet there, over TCP. */
static bool read_rendezvous(kn_launch *l, const char *text)
{
    const char *job = getenv("KNAP_JOB"), *slurm = getenv("SLURM_JOB_ID"),
               *step = getenv("SLURM_STEP_ID"), *colon = strrchr(text, ':');
    kn_tcp_place *p = &l->place;
    int64_t port = 0;
    bool file = strncmp(text, "file:/", 6) == 0;
    bool tcp = strncmp(text, "tcp:", 4) == 0 && colon > text + 4 &&
               kn_parse_number(colon + 1, 1, 65535, &port);
    const char *from = text + (file ? 5 : 4);
    int length = (int)(file ? strlen(from) : tcp ? (size_t)(colon - from) : 0);
    if (tcp && *from == '[' && colon[-1] == ']') { /* of IPv6 */
        from++;
        length -= 2;
    }
    if ((!file && !tcp) || length >= (int)sizeof p->host - 16)
        return kn_fail("KNAP_RENDEZVOUS=%s: must be tcp:HOST:PORT, of rank 0, or file:/PATH, which "
                       "all ranks see",
                       text);
    snprintf(p->host, sizeof p->host, "%.*s", length, from);
    p->port = tcp ? port : 0;
    p->ports = tcp ? 1 : 0;
    p->secret = job && *job;
    snprintf(p->job, sizeof p->job, "knap %d %s %s %s", p->port, job ? job : "-",
             slurm ? slurm : "-", step ? step : "-");
    l->tcp = true;
    return true;
}

static void read_job(kn_launch *l)
{
    const char *job = getenv("SLURM_JOB_ID"), *step = getenv("SLURM_STEP_ID");
    const char *space = getenv("PMIX_NAMESPACE"), *nodes = getenv("SLURM_STEP_NUM_NODES");
    l->one_host = l->local_size == l->size;
    if (strcmp(l->launcher, "srun") == 0) {
        l->one_host = nodes && atoi(nodes) == 1;
        snprintf(l->job, sizeof l->job, "slurm %s %s", job ? job : "-", step ? step : "-");
    } else if (space) {
        snprintf(l->job, sizeof l->job, "pmix %s", space);
    } else {
        snprintf(l->job, sizeof l->job, "parent %d", (int)getppid());
    }
}

bool kn_launch_read(kn_launch *l)
{
    const struct source *first = NULL;
    *l = (kn_launch){ 0 };
    for (int i = 0; i < SOURCES; i++) {
        kn_launch other;
        const struct source *s = &sources[i];
        if (!names(s) || (first && strcmp(s->launcher, "srun") == 0))
            continue;
        if (!read_source(s, &other))
            return false;
        if (!first) {
            *l = other;
            first = s;
            continue;
        }
        if (other.rank != l->rank)
            return kn_fail("%s=%d contradicts %s=%d: two launchers name this rank, unset what one "
                           "of them left",
                           s->rank, other.rank, first->rank, l->rank);
        if (other.size != l->size)
            return kn_fail("%s=%d contradicts %s=%d: two launchers name this job, unset what one "
                           "of them left",
                           s->size, other.size, first->size, l->size);
    }
    if (!first || l->size == 1)
        return true;
    const char *rendezvous = getenv("KNAP_RENDEZVOUS");
    if (rendezvous && *rendezvous)
        return read_rendezvous(l, rendezvous);
    if (strcmp(l->launcher, "torchrun") == 0)
        return read_master(l);
    read_job(l);
    return true;
}

#ifdef KN_HAVE_MPI
/* With --mpi only, srun starts programs so that MPI can connect them. */
static bool speaks_mpi(const kn_launch *l)
{
    const char *type = getenv("SLURM_MPI_TYPE");
    return l->mpi && (strcmp(l->launcher, "srun") != 0 || (type && strcmp(type, "none") != 0));
}
#endif

kn_comm *kn_launch_join(const kn_launch *l, int threads)
{
    const char *given = getenv("OMP_NUM_THREADS");
    int local = l->local_size > 0 ? l->local_size : l->one_host ? l->size : 1;
    if (threads == 0 && given && atoi(given) > 0)
        threads = atoi(given); /* the launcher also shares the cores among its ranks */
    kn_local_cores cores = kn_local_share_cores(local, threads);
    kn_set_threads(cores.threads);
    kn_set_free_cores(cores.free);
    if (l->size == 1)
        return NULL;
    if (l->tcp)
        return kn_comm_tcp(&l->place, l->rank, l->size);
#ifdef KN_HAVE_MPI
    if (speaks_mpi(l) && l->local_size > 0)
        kn_comm_device_place(l->local_rank, l->local_size, true);
    if (speaks_mpi(l))
        return kn_comm_mpi(l->rank, l->size);
#endif
    if (l->one_host)
        return kn_rendezvous(l->job, l->rank, l->size, cores.threads);
    if (l->place.host[0])
        return kn_comm_tcp(&l->place, l->rank, l->size);
    return kn_fail_null(
        "%s=%d: ranks on several hosts need a place to meet: start them with mpirun or srun "
        "--mpi=pmix (libknap built with -Dmpi=enabled), with torchrun, or set "
        "KNAP_RENDEZVOUS=tcp:HOST:PORT or file:/PATH",
        l->size_name, l->size);
}
