/* tests/fuzz/comm_fuzz.c: bytes that other processes send or leave: the file of a meeting, the
 * hellos and answers of ranks over TCP, the connections of ranks that are met. Seals are made
 * right where the input asks for that, so that the fuzzer comes behind them. */
#include "tests/fuzz/fuzz.h"
#include "comm/messages/tcp.h"
#include "kernels/trace.h"

#include <pthread.h>
#include <sys/socket.h>

KN_FUZZ(meeting_file, .factor = 4, .extra = 1 << 20)
{
    kn_tcp_file f;
    const char *why = NULL;
    kn_tcp_target t[KN_TCP_TARGETS];
    if (kn_tcp_file_read(fuzz_file("meet", data, size), &f, &why)) {
        FUZZ_CHECK(strlen(f.token) == sizeof f.token - 1 && f.seat.count <= KN_TCP_ADDRESSES);
        FUZZ_CHECK(kn_tcp_seat_targets(&f.seat, 0, t) <= KN_TCP_ADDRESSES + 1);
    } else {
        FUZZ_CHECK(why && *why);
    }
}

/* A seat is part of a hello and of the table that rank 0 sends. */
KN_FUZZ(tcp_seat, .factor = 4, .extra = 1 << 20)
{
    kn_tcp_seat s = { 0 };
    kn_tcp_target t[KN_TCP_TARGETS];
    const uint8_t address[16] = { 0x20, 1, 2, 3 };
    memcpy(&s, data, size < sizeof s ? size : sizeof s);
    if (!kn_tcp_seat_sound(&s))
        return;
    kn_tcp_seat_add(&s, address, size % 2);
    int n = kn_tcp_seat_targets(&s, 0, t);
    FUZZ_CHECK(n >= 0 && n <= KN_TCP_ADDRESSES + 1 && s.count <= KN_TCP_ADDRESSES, "%d", n);
}

/* ---- connections ----------------------------------------------------------------------------- */

/* The heads of the messages that ranks send (tcp_meet.c, tcp_connect.c). */
typedef struct hello {
    char magic[8];
    uint64_t nonce[2], word;
    int32_t rank, size;
    kn_tcp_seat seat;
    char seal[KN_TCP_SEAL];
} hello;

typedef struct greeting {
    char magic[8];
    int32_t from, to, data, unused;
    char seal[KN_TCP_SEAL];
} greeting;

enum { SEALED = 1 }; /* in the first byte of the input */

/* Sends bytes to this process's listener and leaves. */
static void speak(int port, const void *bytes, size_t size)
{
    kn_tcp_target t = { .address = { [10] = 0xff, 0xff, 127, 0, 0, 1 }, .port = port };
    struct sockaddr_storage a;
    socklen_t n = kn_tcp_socket_address(&t, &a);
    int fd = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    FUZZ_CHECK(fd >= 0);
    if (connect(fd, (struct sockaddr *)&a, n) == 0)
        for (size_t at = 0; at < size;) {
            ssize_t sent = send(fd, (const char *)bytes + at, size - at, MSG_NOSIGNAL);
            if (sent <= 0)
                break;
            at += (size_t)sent;
        }
    shutdown(fd, SHUT_RDWR);
    close(fd);
}

/* A stranger, or a rank that lies, connects to rank 1 of 3 while it waits for rank 2. The table
 * has no addresses: nothing here connects elsewhere. */
KN_FUZZ(tcp_greeting, .factor = 64, .extra = 4 << 20)
{
    fuzz_input rest = { data, size };
    const char *key = "fuzz";
    uint8_t how = fuzz_byte(&rest);
    uint8_t bytes[4096] = { 0 };
    greeting g;
    kn_tcp_seat seats[2] = { 0 };
    kn_tcp_link link[2] = { { .data = -1, .control = -1 }, { .data = -1 } };
    kn_tcp_table t = { .key = key, .number = { 3, 4 }, .rank = 0, .size = 2, .seat = seats };
    size_t n = rest.size < sizeof bytes ? rest.size : sizeof bytes;
    memcpy(bytes, rest.data, n);
    memcpy(&g, bytes, sizeof g);
    uint64_t w[5] = { t.number[0], t.number[1], (uint32_t)g.from, (uint32_t)g.to, g.data != 0 };
    if ((how & SEALED) && n >= sizeof g && kn_tcp_seal(key, 'G', w, 5, g.seal))
        memcpy(bytes, &g, sizeof g);
    t.listener = kn_tcp_listen(NULL, 0, &seats[0].port);
    link[1].control = dup(t.listener); /* rank 0 has the connections for words from the meeting */
    FUZZ_CHECK(t.listener >= 0 && link[1].control >= 0);
    speak(seats[0].port, bytes, n);
    t.deadline = kn_now() + 0.002;
    bool met = kn_tcp_connect_all(&t, link);
    FUZZ_CHECK(met == (link[1].data >= 0) && met == kn_ok());
    for (int r = 0; r < 2; r++) {
        if (link[r].data >= 0)
            close(link[r].data);
        if (link[r].control >= 0)
            close(link[r].control);
    }
    close(t.listener);
}

/* ---- rank 0 meets a stranger, then its rank 1 ------------------------------------------------ */

typedef struct leader {
    kn_tcp_place place;
    kn_tcp_link link[2];
    bool ok;
} leader;

static void *lead(void *arg)
{
    leader *l = arg;
    int rank, size;
    l->ok = kn_tcp_meet(&l->place, 0, 2, l->link, &rank, &size);
    FUZZ_CHECK(l->ok, "%s", kn_error());
    return NULL;
}

static void begin_leader(leader *l, pthread_t *thread, kn_tcp_file *file)
{
    const char *why;
    *l = (leader){ .place = { .job = "fuzz" },
                   .link = { { .data = -1, .control = -1 }, { .data = -1, .control = -1 } } };
    snprintf(l->place.host, sizeof l->place.host, "%s/meet", fuzz_folder());
    FUZZ_CHECK(pthread_create(thread, NULL, lead, l) == 0);
    while (!kn_tcp_file_read(l->place.host, file, &why))
        usleep(200);
}

static void close_link(kn_tcp_link *l)
{
    for (int r = 0; r < 2; r++) {
        if (l[r].data >= 0)
            close(l[r].data);
        if (l[r].control >= 0)
            close(l[r].control);
    }
}

/* Whatever a stranger says, the meeting goes on. */
KN_FUZZ(tcp_hello, .factor = 64, .extra = 4 << 20)
{
    fuzz_input rest = { data, size };
    leader l;
    pthread_t thread;
    kn_tcp_file file;
    uint8_t how = fuzz_byte(&rest), bytes[4096] = { 0 };
    hello h;
    char key[320];
    int rank, count;
    size_t n = rest.size < sizeof bytes ? rest.size : sizeof bytes;
    begin_leader(&l, &thread, &file);
    memcpy(bytes, rest.data, n);
    memcpy(&h, bytes, sizeof h);
    snprintf(key, sizeof key, "%s:%s", file.token, l.place.job);
    uint64_t w[6] = { h.nonce[0],       h.nonce[1],       h.word,
                      (uint32_t)h.rank, (uint32_t)h.size, (uint32_t)h.seat.port };
    if ((how & SEALED) && n >= sizeof h && !(h.rank == 1 && h.size == 2) &&
        kn_tcp_seal(key, 'H', w, 6, h.seal))
        memcpy(bytes, &h, sizeof h);
    speak(file.seat.port, bytes, n);
    kn_tcp_link own[2] = { { .data = -1, .control = -1 }, { .data = -1, .control = -1 } };
    bool met = kn_tcp_meet(&l.place, 1, 2, own, &rank, &count);
    FUZZ_CHECK(met && count == 2, "%s", kn_error());
    pthread_join(thread, NULL);
    close_link(own);
    close_link(l.link);
}
