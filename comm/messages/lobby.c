/* comm/messages/lobby.c: rank 0 waits until all ranks have come: it refuses wrong ones, and those
 * that came and left again are waited for once more. Ranks of one host meet so
 * (launch/rendezvous.c), and those of several (tcp_meet.c). */
#include "comm/messages/tcp.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

void kn_lobby_clear(kn_lobby *l, int rank)
{
    if (rank < 1 || rank >= l->size || l->link[rank].control < 0 ||
        !kn_tcp_is_gone(l->link[rank].control))
        return;
    close(l->link[rank].control);
    l->link[rank].control = -1;
    l->missing++;
}

bool kn_lobby_judge(kn_lobby *l, int rank, int size, bool same_version)
{
    l->error[0] = 0;
    kn_lobby_clear(l, rank);
    if (!same_version)
        snprintf(l->error, sizeof l->error,
                 "rendezvous: rank %d runs another version of libknap than rank 0", rank);
    else if (size != l->size)
        snprintf(l->error, sizeof l->error,
                 "WORLD_SIZE is %d on rank 0 and %d on rank %d: give every rank the same", l->size,
                 size, rank);
    else if (rank < 1 || rank >= size || l->link[rank].control >= 0)
        snprintf(l->error, sizeof l->error,
                 "two processes say that they are rank %d of %d: give each its own RANK", rank,
                 size);
    if (l->error[0])
        memcpy(l->refused, l->error, sizeof l->refused);
    return !l->error[0];
}

int kn_lobby_enter(kn_lobby *l, int rank, int fd)
{
    l->link[rank].control = fd;
    l->missing--;
    for (int r = 1; r < l->size && l->missing == 0; r++)
        kn_lobby_clear(l, r);
    return l->missing == 0;
}

/* "1, 3 and 5 more" */
static const char *list_missing(const kn_lobby *l, char *buf, size_t room)
{
    size_t n = 0;
    int more = 0;
    for (int r = 1; r < l->size; r++) {
        if (l->link[r].control >= 0)
            continue;
        if (n + 32 < room)
            n += (size_t)snprintf(buf + n, room - n, "%s%d", n ? ", " : "", r);
        else
            more++;
    }
    if (more)
        snprintf(buf + n, room - n, " and %d more", more);
    return buf;
}

bool kn_lobby_late(const kn_lobby *l, const char *where)
{
    char who[160] = "";
    return kn_fail("rendezvous: rank 0 of %d waited %g s %s, and rank %s did not come: are all %d "
                   "ranks started, and may they connect to here? (to wait longer: "
                   "KNAP_TIMEOUT)%s%s",
                   l->size, kn_comm_default_timeout(), where, list_missing(l, who, sizeof who),
                   l->size, l->refused[0] ? "; refused: " : "", l->refused);
}

bool kn_lobby_tell(const kn_lobby *l, const void *data, size_t bytes, double deadline)
{
    for (int r = 1; r < l->size; r++)
        if (!kn_tcp_send(l->link[r].control, data, bytes, deadline))
            return kn_fail("rendezvous: rank %d came and left again", r);
    return true;
}

bool kn_lobby_go(const kn_lobby *l, double deadline)
{
    char here;
    for (int r = 1; r < l->size; r++)
        if (!kn_tcp_receive(l->link[r].control, &here, 1, deadline))
            return kn_fail("rendezvous: rank %d came and did not connect to all others", r);
    return kn_lobby_tell(l, "g", 1, deadline);
}

bool kn_lobby_wait(int fd, int size, double deadline)
{
    char go;
    return (kn_tcp_send(fd, "h", 1, deadline) && kn_tcp_receive(fd, &go, 1, deadline)) ||
           kn_fail("rendezvous: rank 0 gave up before all %d ranks were connected; its message has "
                   "the reason",
                   size);
}
