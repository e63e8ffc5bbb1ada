/* tests/comm/tcp_listen_test.c: the addresses at which ranks listen. */
#include "tests/comm/program_test.h"

/* The number of the program's listening sockets; *open: of those at more than a loopback. */
static int listens(pid_t pid, int *open)
{
    static const char *const tables[] = { "tcp", "tcp6" };
    char path[64], line[512], where[64];
    int count = 0;
    *open = 0;
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "/proc/net/%s", tables[i]);
        FILE *f = fopen(path, "r");
        while (f && fgets(line, sizeof line, f)) {
            unsigned state;
            unsigned long inode;
            char at[64], socket[64];
            if (sscanf(line, " %*d: %63s %*s %x %*s %*s %*s %*u %*d %lu", where, &state, &inode) !=
                    3 ||
                state != 10)
                continue;
            snprintf(socket, sizeof socket, "socket:[%lu]", inode);
            for (int fd = 3; fd < 64; fd++) {
                snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
                ssize_t n = readlink(path, at, sizeof at - 1);
                at[n > 0 ? n : 0] = 0;
                if (strcmp(at, socket) != 0)
                    continue;
                count++;
                *open += i == 0 ? strncmp(where + 6, "7F:", 3) != 0
                                : strncmp(where, "00000000000000000000000001000000", 32) != 0;
            }
        }
        if (f)
            fclose(f);
    }
    return count;
}

KN_TEST(tcp_listen, at_a_loopback_nobody_listens_to_others)
{
    static const char *const places[] = { "tcp:127.0.0.1:%d", "tcp:localhost:%d",
                                          "tcp:127.0.0.3:%d", "tcp:[::1]:%d" };
    static result r[2];
    char place[64];
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        int open = 0, at = kn_test_ports(20);
        snprintf(place, sizeof place, places[i], at);
        for (int k = 0; k < 2; k++) { /* of each rank, while the other isn't there */
            start_meeting(&r[k], k, 2, place, "ok");
            while (listens(r[k].pid, &open) == 0 && !has_ended(&r[k]))
                usleep(10000);
            KN_CHECK(!has_ended(&r[k]) || i == 3, "%s", place);
            KN_CHECK(open == 0, "%s: rank %d listens to others", place, k);
            kill(r[k].pid, SIGKILL);
            finish(&r[k]);
            KN_CHECK(!strstr(r[k].errors, "secret"), "%s", r[k].errors);
        }
        for (int k = 0; k < 2; k++)
            start_meeting(&r[k], k, 2, place, "ok");
        for (int k = 0; k < 2; k++) {
            finish(&r[k]);
            if (i == 3 && strstr(r[k].errors, "rendezvous")) /* no IPv6 here */
                continue;
            KN_CHECK(r[k].status == 0 && !r[k].errors[0], "%s: %s", place, r[k].errors);
        }
    }
}
