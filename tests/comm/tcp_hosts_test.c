/* tests/comm/tcp_hosts_test.c: ranks on two hosts, each with interfaces, a name and an /etc/hosts
 * of its own: Linux namespaces joined by a virtual cable. As root, with ip(8); skipped
 * elsewhere. */
#include "tests/comm/program_test.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

/* On both, docker0 comes first and has the same address; on Debian a host's own name is
 * 127.0.1.1. */
typedef struct host {
    const char *name, *address, *address6;
    pid_t pid; /* holds the namespaces */
} host;

static host hosts[2] = { { "hosta", "10.77.0.1", "fd77::1", 0 },
                         { "hostb", "10.77.0.2", "fd77::2", 0 } };

static bool put_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    return f && fputs(text, f) >= 0 && fclose(f) == 0;
}

/* Runs inside the namespaces of a new host. */
static bool furnish(int i)
{
    char text[300], path[64];
    const host *me = &hosts[i], *other = &hosts[1 - i];
    snprintf(path, sizeof path, "/tmp/knap-hosts-%d", (int)getpid());
    snprintf(text, sizeof text, "127.0.0.1 localhost\n127.0.1.1 %s\n%s %s\n%s %s6\n", me->name,
             other->address, other->name, hosts[0].address6, hosts[0].name);
    bool ok = mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 && put_text(path, text) &&
              mount(path, "/etc/hosts", NULL, MS_BIND, NULL) == 0 &&
              sethostname(me->name, strlen(me->name)) == 0;
    unlink(path);
    return ok && system("ip link set lo up && ip link add docker0 type veth peer name nothing && "
                        "ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up && "
                        "ip link set nothing up") == 0;
}

/* Makes a host, which lasts as long as this test. */
static void make_host(int i)
{
    int ready[2];
    char said = 'n';
    KN_CHECK(pipe(ready) == 0);
    fflush(NULL);
    hosts[i].pid = fork();
    if (hosts[i].pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        bool ok = unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUTS) == 0 && furnish(i);
        ssize_t n = write(ready[1], ok ? "y" : "n", 1);
        while (n > 0)
            pause();
        _exit(1);
    }
    close(ready[1]);
    if (read(ready[0], &said, 1) != 1 || said != 'y')
        KN_SKIP("namespaces and veth with ip(8), as root, are not to be had here");
    close(ready[0]);
}

static void enter(pid_t pid)
{
    static const char *const spaces[] = { "net", "uts", "mnt" };
    int fd[3];
    char path[64];
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "/proc/%d/ns/%s", (int)pid, spaces[i]);
        fd[i] = open(path, O_RDONLY | O_CLOEXEC);
    }
    for (int i = 0; i < 3; i++) {
        KN_CHECK(fd[i] >= 0 && setns(fd[i], 0) == 0, "%s: %s", spaces[i], strerror(errno));
        close(fd[i]);
    }
}

static bool on_host(int i, const char *command)
{
    pid_t pid = fork();
    int status = 1;
    if (pid == 0) {
        enter(hosts[i].pid);
        _exit(system(command) == 0 ? 0 : 1);
    }
    return waitpid(pid, &status, 0) == pid && status == 0;
}

static void make_hosts(void)
{
    char line[400];
    for (int i = 0; i < 2; i++)
        make_host(i);
    snprintf(line, sizeof line, "ip link add cable type veth peer name cable netns %d",
             (int)hosts[1].pid);
    bool ok = on_host(0, line);
    for (int i = 0; i < 2 && ok; i++) {
        snprintf(line, sizeof line,
                 "ip addr add %s/24 dev cable && ip link set cable up && "
                 "(ip addr add %s/64 dev cable nodad || true)",
                 hosts[i].address, hosts[i].address6);
        ok = on_host(i, line);
    }
    if (!ok)
        KN_SKIP("two network namespaces cannot be joined here");
}

static void end_hosts(void)
{
    for (int i = 0; i < 2; i++) {
        kill(hosts[i].pid, SIGKILL);
        waitpid(hosts[i].pid, NULL, 0);
    }
}

static bool local_said = true;

/* Rank of n, half of them on each host. */
static void start_rank(result *r, int rank, int n, const char *words)
{
    static pid_t home;
    char line[400];
    if (!home) { /* a process that stays in the original namespace */
        home = fork();
        if (home == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (;;)
                pause();
        }
    }
    memset(r, 0, sizeof *r);
    if (local_said)
        snprintf(line, sizeof line, "RANK=%d WORLD_SIZE=%d LOCAL_RANK=%d LOCAL_WORLD_SIZE=%d %s",
                 rank, n, rank % (n / 2), n / 2, words);
    else
        snprintf(line, sizeof line, "RANK=%d WORLD_SIZE=%d %s", rank, n, words);
    enter(hosts[rank / (n / 2)].pid);
    start(r, line);
    enter(home);
}

static void check_steps(const char *words)
{
    static result r[4];
    char line[300];
    snprintf(line, sizeof line, "KNAP_JOB=3fb2 %s step", words);
    for (int k = 3; k >= 0; k--)
        start_rank(&r[k], k, 4, line);
    check_step(r, 4, words);
}

/* torchrun's variables with the name of rank 0's host, which is a loopback there and an address
 * elsewhere. */
KN_TEST(tcp_hosts, a_host_that_calls_itself_127_0_1_1)
{
    make_hosts();
    check_steps("MASTER_ADDR=hosta MASTER_PORT=29500");
    check_steps("KNAP_RENDEZVOUS=tcp:hosta:29500");
    check_steps("KNAP_RENDEZVOUS=tcp:10.77.0.1:29500");
    local_said = false; /* the name of this host doesn't imply that all ranks are local */
    check_steps("MASTER_ADDR=hosta MASTER_PORT=29500");
    end_hosts();
}

/* Between hosts without KNAP_JOB rank 0 says so, once, and how to give one. */
KN_TEST(tcp_hosts, without_a_secret_is_said_aloud)
{
    static const char *const words[] = { "MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 ok",
                                         "KNAP_RENDEZVOUS=tcp:10.77.0.1:29500 ok",
                                         "KNAP_RENDEZVOUS=tcp:hosta:29500 ok" };
    static result r[2];
    make_hosts();
    for (int i = 0; i < 6; i++) {
        char line[200];
        snprintf(line, sizeof line, "%s%s", i % 2 ? "KNAP_JOB=8a5f " : "", words[i / 2]);
        for (int k = 1; k >= 0; k--)
            start_rank(&r[k], k, 2, line);
        for (int k = 0; k < 2; k++) {
            finish(&r[k]);
            KN_CHECK(r[k].status == 0, "%s: %s", line, r[k].errors);
            KN_CHECK(k || i % 2 ? !r[k].errors[0]
                                : strstr(r[k].errors, "Give all ranks the same random KNAP_JOB") &&
                                      lines_with(r[k].errors, "\n") == 1,
                     "%s: %s", line, r[k].errors);
        }
    }
    end_hosts();
}

/* The first address of the list is unreachable, or is the connecting host's own. */
KN_TEST(tcp_hosts, a_file_with_addresses_that_lead_nowhere)
{
    char words[100], path[64];
    make_hosts();
    snprintf(path, sizeof path, "/tmp/knap-hosts-meet-%d", (int)getpid());
    unlink(path); /* of a process before, which had this number and was killed */
    snprintf(words, sizeof words, "KNAP_RENDEZVOUS=file:%s", path);
    check_steps(words);
    KN_CHECK(access(path, F_OK) != 0);
    /* not only refused: packets vanish */
    if (!on_host(1, "ip route del 172.17.0.0/16 && ip route add blackhole 172.17.0.0/16"))
        KN_SKIP("no routes that lead nowhere here");
    check_steps(words);
    end_hosts();
}

KN_TEST(tcp_hosts, over_ipv6)
{
    make_hosts();
    bool ok = true;
    for (int i = 0; i < 2; i++)
        ok = ok &&
             on_host(i, "ip -6 addr show dev cable | grep -q fd77 && ip -4 addr flush dev cable");
    if (!ok)
        KN_SKIP("no IPv6 here");
    check_steps("MASTER_ADDR=hosta6 MASTER_PORT=29500");
    check_steps("KNAP_RENDEZVOUS=tcp:[fd77::1]:29500");
    end_hosts();
}

/* Rank 0's last bytes take 2 s to arrive, long after its end. */
KN_TEST(tcp_hosts, a_slow_link_at_the_end)
{
    static result r[2];
    make_hosts();
    if (!on_host(0, "tc qdisc add dev cable root tbf rate 8mbit burst 16kb limit 48kb"))
        KN_SKIP("no link can be slowed down here");
    for (int k = 0; k < 2; k++)
        start_rank(&r[k], k, 2, "KNAP_JOB=3fb2 MASTER_ADDR=hosta MASTER_PORT=29500 last 2000000");
    for (int k = 0; k < 2; k++) {
        finish(&r[k]);
        KN_CHECK(r[k].status == 0 && strstr(r[k].text, "good") && !r[k].errors[0], "rank %d: %s", k,
                 r[k].errors);
    }
    end_hosts();
}
