/* tests/comm/tcp_meet_test.c: ranks meet over TCP despite obstacles: wrong ranks, ranks of an ended
 * job, other jobs, foreign files; and unit tests of a meeting's parts. */
#include "tests/comm/program_test.h"

#include "comm/messages/tcp.h"
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>

/* A port of its own for each job. */
static int port(void)
{
    return kn_test_ports(20);
}

static void check_refused(result *r, const char *says)
{
    finish(r);
    KN_CHECK(r->status == 1 && strstr(r->errors, says), "%s", r->errors);
}

/* Runs rank r of n at the place, with twice the time after each run that was too slow to learn more
 * than that its time was over: it fails and says so. */
static result fails_at(int rank, int n, const char *place, const char *words, const char *says)
{
    static result r;
    char line[100];
    for (double seconds = 0.5;; seconds *= 2) {
        snprintf(line, sizeof line, "%s%s", words, hasty_words(seconds));
        start_meeting(&r, rank, n, place, line);
        finish(&r);
        KN_CHECK(r.status == 1, "%d", r.status);
        if (strstr(r.errors, says))
            return r;
        KN_CHECK(ran_out_of(r.errors, seconds), "%s", r.errors);
    }
}

/* ---- other jobs ----------------------------------------------------------------------------- */

/* A process without the job's secret is rejected, and the job isn't disturbed. */
KN_TEST(tcp_meet, another_secret)
{
    static result r[2], wrong;
    char place[64];
    snprintf(place, sizeof place, "tcp:localhost:%d", port());
    start_meeting(&r[0], 0, 2, place, "KNAP_JOB=f7Qz ok");
    wrong = fails_at(1, 2, place, "KNAP_JOB=f7Qy ", "who listens there is not rank 0 of this job");
    KN_CHECK(!strstr(wrong.errors, "f7Q"), "a secret stays one: %s", wrong.errors);
    fails_at(1, 2, place, "", "who listens there is not rank 0 of this job");
    start_meeting(&r[1], 1, 2, place, "KNAP_JOB=f7Qz ok");
    check_good(r, 2);
    fails_at(1, 2, place, "", "the last try: Connection refused");
    memset(&r[0], 0, sizeof r[0]); /* ranks of one host don't reveal it either */
    start(&r[0], "RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=7999 KNAP_JOB=f7Qz "
                 "KNAP_TIMEOUT=0.2 ok");
    check_refused(&r[0], "waited 0.2 s for rank 0");
    KN_CHECK(!strstr(r[0].errors, "f7Q"), "%s", r[0].errors);
    fails_at(1, 2, "tcp:no.such.host.invalid:5", "", "the last try: ");
}

KN_TEST(tcp_meet, seals)
{
    uint64_t w[3] = { 1, 2, 3 };
    char seal[KN_TCP_SEAL], other[KN_TCP_SEAL], key[320];
    KN_CHECK(kn_tcp_seal("key", 'H', w, 3, seal) && kn_tcp_sealed("key", 'H', w, 3, seal));
    KN_CHECK(!kn_tcp_sealed("kez", 'H', w, 3, seal) && !kn_tcp_sealed("key", 'A', w, 3, seal));
    KN_CHECK(!kn_tcp_sealed("key", 'H', w, 2, seal) && !kn_tcp_sealed("", 'H', w, 3, seal));
    for (int i = 0; i < 3; i++) {
        w[i] ^= UINT64_C(1) << (20 * i + 3);
        KN_CHECK(!kn_tcp_sealed("key", 'H', w, 3, seal));
        w[i] ^= UINT64_C(1) << (20 * i + 3);
    }
    for (int i = 0; i < KN_TCP_SEAL; i++) {
        memcpy(other, seal, sizeof other);
        other[i] ^= 1;
        KN_CHECK(!kn_tcp_sealed("key", 'H', w, 3, other));
    }
    memset(key, 'k', sizeof key - 1); /* the longest: all of it counts */
    key[sizeof key - 1] = 0;
    uint64_t most[6] = { UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX };
    KN_CHECK(kn_tcp_seal(key, 'H', most, 6, seal));
    key[sizeof key - 2] = 'j';
    KN_CHECK(!kn_tcp_sealed(key, 'H', most, 6, seal));
    KN_CHECK_OK();
}

/* ---- addresses ------------------------------------------------------------------------------- */

KN_TEST(tcp_meet, seats)
{
    kn_tcp_seat s = { .net = 5, .port = 7 };
    kn_tcp_target t[KN_TCP_TARGETS];
    uint8_t a[16];
    char text[KN_TCP_TEXT];
    static const char *const useless[] = { "127.0.0.1", "127.0.1.1", "::1", "fe80::1", "::" };
    for (int i = 0; i < 5; i++) {
        KN_CHECK(kn_tcp_address_read(useless[i], a));
        kn_tcp_seat_add(&s, a, i % 2);
    }
    KN_CHECK(s.count == 0 && kn_tcp_seat_targets(&s, 6, t) == 0, "no loopback for others");
    KN_CHECK(kn_tcp_seat_targets(&s, 5, t) == 1 &&
             strcmp(kn_tcp_address_text(t[0].address, text), "127.0.0.1") == 0 && t[0].port == 7);
    for (int i = 0; i < 20; i++) {
        char one[32];
        snprintf(one, sizeof one, i % 2 ? "10.0.0.%d" : "fd00::%d", i + 2);
        KN_CHECK(kn_tcp_address_read(one, a) && strcmp(kn_tcp_address_text(a, text), one) == 0);
        kn_tcp_seat_add(&s, a, false);
        kn_tcp_seat_add(&s, a, false);
    }
    KN_CHECK(s.count == KN_TCP_ADDRESSES);
    kn_tcp_seat_add(&s, a, true); /* 10.0.0.21 replaces the last entry and becomes the first */
    KN_CHECK(s.count == KN_TCP_ADDRESSES && kn_tcp_seat_targets(&s, 6, t) == KN_TCP_ADDRESSES);
    KN_CHECK(strcmp(kn_tcp_address_text(t[0].address, text), "10.0.0.21") == 0 &&
             strcmp(kn_tcp_address_text(t[1].address, text), "fd00::2") == 0);
    kn_tcp_address_read("10.0.0.3", a);
    kn_tcp_seat_add(&s, a, true);
    KN_CHECK(memcmp(s.address[0], a, 16) == 0 && s.count == KN_TCP_ADDRESSES);
    for (int i = 1; i < s.count; i++)
        KN_CHECK(memcmp(s.address[i], a, 16) != 0, "it is there once");
    s.count = 1000; /* as a foreign process may send */
    KN_CHECK(kn_tcp_seat_targets(&s, 5, t) == KN_TCP_ADDRESSES + 1);
    s.port = 70000;
    KN_CHECK(kn_tcp_seat_targets(&s, 5, t) == 0);
    KN_CHECK(!kn_tcp_address_read("10.0.0", a) && !kn_tcp_address_read("host", a));
}

/* A connection that nobody accepts fails with the reason. */
KN_TEST(tcp_meet, calls_that_fail)
{
    kn_tcp_target t = { .port = port() };
    int got = 0, door = kn_tcp_listen(NULL, 0, &got);
    char say = 's', answer;
    kn_tcp_address_read("127.0.0.1", t.address);
    KN_CHECK(kn_tcp_call(&t, 1, &say, 1, &answer, 1, NULL, NULL, kn_now() + 300) < 0 &&
                 errno == ECONNREFUSED,
             "%s", strerror(errno));
    t.port = got; /* listens, but never sends */
    KN_CHECK(door >= 0 && kn_tcp_call(&t, 1, &say, 1, &answer, 1, NULL, NULL, kn_now() + 0.3) < 0 &&
                 errno == ETIMEDOUT,
             "%s", strerror(errno));
    close(door);
}

/* ---- files ----------------------------------------------------------------------------------- */

static const char *meeting_path(void)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/knap-meet-test-%d", (int)getpid());
    unlink(path);
    return path;
}

static bool holds(const char *path, const char *text)
{
    char now[200] = "";
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(now, 1, sizeof now - 1, f) : 0;
    if (f)
        fclose(f);
    now[n] = 0;
    return strcmp(now, text) == 0;
}

static void put_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    KN_CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

/* A file at the path that isn't this user's meeting file stays, whether the job succeeds or not. */
KN_TEST(tcp_meet, files_of_others_stay)
{
    static result r;
    char place[100], target[80];
    const char *path = meeting_path();
    struct stat st;
    snprintf(place, sizeof place, "file:%s", path);
    snprintf(target, sizeof target, "%s-target", path);
    for (int what = 0; what < 6; what++) {
        static const char *const texts[] = { "my thesis\n", "" };
        if (what < 2)
            put_text(path, texts[what]);
        else if (what == 2) {
            put_text(target, "knap t3\n");
            KN_CHECK(symlink(target, path) == 0);
        } else if (what == 3)
            KN_CHECK(mkfifo(path, 0600) == 0);
        else if (what == 4)
            KN_CHECK(mkdir(path, 0700) == 0);
        else {
            put_text(path, "knap t3\n");
            if (chown(path, 65534, 65534) != 0) /* a file of another user, where we may make one */
                break;
        }
        start_meeting(&r, 0, 2, place, "ok");
        check_refused(&r, "is no meeting file of this user");
        KN_CHECK(lstat(path, &st) == 0 && (what >= 2 || holds(path, texts[what])), "%d", what);
        KN_CHECK(what != 2 || (S_ISLNK(st.st_mode) && holds(target, "knap t3\n")));
        KN_CHECK(what != 5 || st.st_uid == 65534);
        fails_at(1, 2, place, "", "is no meeting file of this user"); /* it reads the file there */
        KN_CHECK((what == 4 ? rmdir(path) : unlink(path)) == 0);
    }
    char more[5000] = "knap t3\n"; /* than a meeting file can be */
    memset(more + 8, 'k', sizeof more - 9);
    put_text(path, more);
    fails_at(1, 2, place, "", "is no meeting file of this user");
    unlink(path);
    unlink(target);
}

/* A job whose file a later job has replaced leaves the new file alone; its ranks move to the later
 * job. */
KN_TEST(tcp_meet, a_later_attempt_takes_over)
{
    static result old[2], r[2];
    char place[100];
    const char *path = meeting_path();
    snprintf(place, sizeof place, "file:%s", path);
    start_meeting(&old[0], 0, 3, place, "ok"); /* of 3, so that it keeps waiting */
    usleep(300000);
    start_meeting(&old[1], 1, 2, place, "ok"); /* the first attempt, other size */
    check_refused(&old[1], "WORLD_SIZE is 3 on rank 0 and 2 on rank 1");
    start_meeting(&old[1], 1, 3, place, "ok");
    usleep(300000);
    start_meeting(&r[0], 0, 3, place, "ok");
    check_refused(&old[0], "was removed or replaced while rank 0 of 3 waited");
    KN_CHECK(access(path, F_OK) == 0, "the later file is there");
    start_meeting(&r[1], 2, 3, place, "ok");
    check_good(r, 2);
    check_good(&old[1], 1);
    KN_CHECK(access(path, F_OK) != 0, "and gone once all have met");
}

/* Only the user can read the file; the job removes it at its end. */
KN_TEST(tcp_meet, files_come_and_go)
{
    const char *path = meeting_path(), *why = NULL;
    kn_tcp_file mine = { .seat = { .port = 17, .net = 99 } }, later = mine, got;
    uint8_t a[16];
    struct stat st;
    kn_tcp_address_read("10.1.2.3", a);
    kn_tcp_seat_add(&mine.seat, a, false);
    KN_CHECK(!kn_tcp_file_read(path, &got, &why) && strstr(why, "not there"));
    put_text(path, "knap t1 0123456789abcdef\n1\n127.0.0.1\n"); /* of an older version */
    KN_CHECK(!kn_tcp_file_read(path, &got, &why));
    KN_CHECK(kn_tcp_file_write(path, &mine));
    KN_CHECK(stat(path, &st) == 0 && (st.st_mode & 0777) == 0600 && st.st_nlink == 1);
    KN_CHECK(kn_tcp_file_read(path, &got, &why) && strcmp(got.token, mine.token) == 0 &&
             got.seat.port == 17 && got.seat.net == 99 && got.seat.count == 1 &&
             memcmp(got.seat.address[0], a, 16) == 0);
    KN_CHECK(chmod(path, 0644) == 0 && !kn_tcp_file_read(path, &got, &why), "a token known to all");
    KN_CHECK(chmod(path, 0600) == 0 && kn_tcp_file_write(path, &later));
    KN_CHECK(strcmp(mine.token, later.token) != 0 && !kn_tcp_file_stands(path, &mine));
    kn_tcp_file_remove(path, &mine);
    KN_CHECK(kn_tcp_file_stands(path, &later), "what another wrote stays");
    kn_tcp_file_remove(path, &later);
    KN_CHECK(access(path, F_OK) != 0);
    KN_CHECK_OK();
}

/* ---- the door -------------------------------------------------------------------------------- */

static int connected(int at)
{
    struct sockaddr_in a = { .sin_family = AF_INET,
                             .sin_port = htons((uint16_t)at),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    return fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0 ? fd : -1;
}

static int admit_first(void *arg, int fd, const void *message)
{
    *(int *)arg = memcmp(message, "rank", 4) == 0;
    close(fd);
    return 1;
}

/* With one file descriptor left, a silent foreign connection is closed in favour of a rank's. */
KN_TEST(tcp_meet, a_stranger_does_not_keep_the_last_file)
{
    int at = 0, admitted = 0, door = kn_tcp_listen(NULL, 0, &at);
    int stranger = connected(at), rank = connected(at), next = dup(door);
    KN_CHECK(door >= 0 && stranger >= 0 && rank >= 0 && next >= 0);
    close(next);
    KN_CHECK(send(rank, "rank", 4, MSG_NOSIGNAL) == 4);
    KN_CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){ (rlim_t)next + 1, (rlim_t)next + 1 }) == 0);
    bool ok = kn_tcp_admit(door, 4, kn_now() + 300, admit_first, NULL, &admitted);
    KN_CHECK(ok && admitted, "%s", kn_error() ? kn_error() : "nobody was let in");
    close(stranger);
    close(rank);
    close(door);
}

enum { FULL = 256 }; /* LISTENED_TO of tcp_socket.c */

typedef struct crowd {
    int at, count, looks, turned_away, fd[FULL];
} crowd;

/* One more silent guest at each look until the door is full, then some looks at which nobody
 * knocks. */
static bool nobody_leaves(void *arg)
{
    crowd *c = arg;
    char byte;
    if (c->count < FULL)
        return (c->fd[c->count++] = connected(c->at)) >= 0;
    for (int i = 0; i < FULL; i++) {
        ssize_t got = recv(c->fd[i], &byte, 1, MSG_DONTWAIT);
        c->turned_away += got == 0 || errno == ECONNRESET;
    }
    return ++c->looks < 5;
}

KN_TEST(tcp_meet, a_full_door_waits_for_a_knock)
{
    static crowd c;
    struct rlimit files;
    int door = kn_tcp_listen(NULL, 0, &c.at), admitted = 0;
    KN_CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
    files.rlim_cur = files.rlim_max < 4 * FULL ? files.rlim_max : 4 * FULL;
    KN_CHECK(door >= 0 && setrlimit(RLIMIT_NOFILE, &files) == 0);
    KN_CHECK(!kn_tcp_admit(door, 4, kn_now() + 300, admit_first, nobody_leaves, &c) && !admitted);
    KN_CHECK(c.count == FULL && c.looks == 5 && c.turned_away == 0, "%d guests, %d turned away",
             c.count, c.turned_away);
    for (int i = 0; i < FULL; i++)
        close(c.fd[i]);
    close(door);
}

/* ---- words ----------------------------------------------------------------------------------- */

/* A world in which rank 0 hears of rank 1 by a pair of sockets. */
typedef struct half_world {
    int pair[2];
    kn_tcp_link link[2];
    kn_comm_world all;
    kn_comm first;
    kn_tcp_world w;
} half_world;

static void half_world_begin(half_world *h)
{
    *h = (half_world){ .link = { { .data = -1, .control = -1 }, { .data = -1, .control = -1 } },
                       .all = { .poison = &h->all.own },
                       .first = { .rank = 0, .size = 2, .world = &h->all },
                       .w = { .base = { .first = &h->first }, .link = h->link } };
    KN_CHECK(kn_message_world_begin(&h->w.base, &kn_tcp_transport, 2));
    pthread_mutex_init(&h->w.out_lock, NULL);
    pthread_mutex_init(&h->w.ear, NULL);
    KN_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, h->pair) == 0);
    h->link[1].control = h->pair[0];
}

typedef struct listener {
    kn_tcp_world *w;
    pthread_barrier_t *start;
    char error[300];
} listener;

static void *listen_on(void *arg)
{
    listener *l = arg;
    pthread_barrier_wait(l->start);
    for (int i = 0; i < 40 && kn_ok(); i++)
        kn_tcp_transport.listen(&l->w->base);
    snprintf(l->error, sizeof l->error, "%s", kn_ok() ? "" : kn_error());
    kn_context_end();
    return NULL;
}

/* Rank 1 sends its error and exits while two threads of rank 0 listen: neither may report a silent
 * death. */
KN_TEST(tcp_meet, two_threads_listen)
{
    static kn_message_word word = { .what = KN_WORD_POISON, .text = "the true cause" };
    for (int i = 0; i < 4000; i++) {
        half_world h;
        pthread_t thread[2];
        pthread_barrier_t start;
        listener l[2] = { { &h.w, &start, "" }, { &h.w, &start, "" } };
        half_world_begin(&h);
        pthread_barrier_init(&start, NULL, 3);
        for (int k = 0; k < 2; k++)
            pthread_create(&thread[k], NULL, listen_on, &l[k]);
        pthread_barrier_wait(&start);
        KN_CHECK(send(h.pair[1], &word, sizeof word, 0) == (ssize_t)sizeof word);
        close(h.pair[1]);
        for (int k = 0; k < 2; k++)
            pthread_join(thread[k], NULL);
        KN_CHECK(!l[0].error[0] && !l[1].error[0], "%d: %s%s", i, l[0].error, l[1].error);
        close(h.pair[0]);
        kn_message_world_end(&h.w.base);
        pthread_barrier_destroy(&start);
    }
}

/* A rank that never stops sending words: each look at them has an end. */
static void *flood(void *arg)
{
    static const kn_message_word word = { .what = KN_WORD_HERE, .family = 77 };
    while (send(*(int *)arg, &word, sizeof word, MSG_NOSIGNAL) > 0)
        ;
    return NULL;
}

KN_TEST(tcp_meet, a_flood_of_words_has_pauses)
{
    half_world h;
    pthread_t thread;
    half_world_begin(&h);
    pthread_create(&thread, NULL, flood, &h.pair[1]);
    for (int i = 0; i < 100; i++)
        KN_CHECK(kn_tcp_transport.listen(&h.w.base));
    close(h.pair[0]);
    pthread_join(thread, NULL);
    close(h.pair[1]);
    kn_message_world_end(&h.w.base);
}
