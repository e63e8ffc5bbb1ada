/* comm/messages/tcp_file.c: the file that leads ranks to rank 0 (tcp.h): its address, and a token
 * that only this user can read and that therefore proves membership of the job. Only such files of
 * this user are replaced, and removed only while they hold the token that this process wrote: a
 * path may belong to any user, and a later attempt may have its own file there. */
#include "comm/messages/tcp.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define FAMILY "knap t" /* how all such files begin, of every version */
#define MAGIC  "knap t3"
enum { MOST = 4096, ABSENT, FOREIGN, OURS };

/* The text of the file at path if it is one of ours (ABSENT and FOREIGN: *text is empty). */
static int look(const char *path, char *text, struct stat *st)
{
    int kind = FOREIGN, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    ssize_t n = 0;
    text[0] = 0;
    if (fd < 0)
        return errno == ENOENT ? ABSENT : FOREIGN;
    if (fstat(fd, st) == 0 && S_ISREG(st->st_mode) && st->st_uid == geteuid() &&
        (n = read(fd, text, MOST - 1)) > 0 && strncmp(text, FAMILY, strlen(FAMILY)) == 0)
        kind = OURS;
    text[kind == OURS ? n : 0] = 0;
    close(fd);
    return kind;
}

static bool next_line(char **at, const char *name, const char **value)
{
    char *line = *at, *end = strchr(line, '\n');
    size_t n = strlen(name);
    if (!end || strncmp(line, name, n) != 0)
        return false;
    *end = 0;
    *value = line + n;
    *at = end + 1;
    return true;
}

bool kn_tcp_file_read(const char *path, kn_tcp_file *f, const char **why)
{
    char text[MOST], *at = text;
    const char *magic, *token, *net, *port, *address;
    struct stat st;
    uint8_t a[16];
    int kind = look(path, text, &st);
    *f = (kn_tcp_file){ 0 };
    *why = kind == ABSENT ? "the file is not there"
                          : "the file there is no meeting file of this user and version";
    if (kind != OURS || (st.st_mode & 077) || !next_line(&at, MAGIC, &magic) || *magic ||
        !next_line(&at, "token ", &token) || strlen(token) != sizeof f->token - 1 ||
        !next_line(&at, "net ", &net) || !next_line(&at, "port ", &port))
        return false;
    memcpy(f->token, token, sizeof f->token);
    f->seat.net = strtoull(net, NULL, 16);
    f->seat.port = atoi(port);
    while (next_line(&at, "address ", &address))
        if (kn_tcp_address_read(address, a))
            kn_tcp_seat_add(&f->seat, a, false);
    return true;
}

static bool write_text(int fd, const kn_tcp_file *f)
{
    char name[KN_TCP_TEXT];
    FILE *out = fdopen(fd, "w");
    if (!out) {
        close(fd);
        return false;
    }
    fprintf(out, "%s\ntoken %s\nnet %llx\nport %d\n", MAGIC, f->token,
            (unsigned long long)f->seat.net, (int)f->seat.port);
    for (int i = 0; i < f->seat.count; i++)
        fprintf(out, "address %s\n", kn_tcp_address_text(f->seat.address[i], name));
    return fclose(out) == 0;
}

/* temporary becomes path, in the place of nothing or of a file of ours; false with errno, EEXIST
 * for another. */
static bool put(const char *temporary, const char *path)
{
    char text[MOST];
    struct stat st;
    int kind = look(path, text, &st);
    if (kind == FOREIGN) {
        errno = EEXIST;
        return false;
    }
    if (kind == OURS)
        return rename(temporary, path) == 0;
    if (link(temporary, path) == 0) /* never over a file that came a moment ago */
        return unlink(temporary) == 0;
    return errno != EEXIST && rename(temporary, path) == 0; /* a file system without links */
}

bool kn_tcp_file_write(const char *path, kn_tcp_file *f)
{
    uint64_t random[2];
    char temporary[300];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return kn_fail("rendezvous: the system has no random numbers: %s", strerror(errno));
    snprintf(f->token, sizeof f->token, "%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    snprintf(temporary, sizeof temporary, "%s.XXXXXX", path);
    int fd = mkostemp(temporary, O_CLOEXEC); /* no other user may read it */
    if (fd >= 0 && write_text(fd, f) && put(temporary, path))
        return true;
    int error = errno;
    if (fd >= 0)
        unlink(temporary);
    f->token[0] = 0;
    if (error == EEXIST)
        return kn_fail(
            "rendezvous: %s is there and is no meeting file of this user, so it stays as "
            "it is: remove it, or give KNAP_RENDEZVOUS another path",
            path);
    return kn_fail("rendezvous: cannot write %s: %s", path, strerror(error));
}

bool kn_tcp_file_stands(const char *path, const kn_tcp_file *f)
{
    kn_tcp_file now;
    const char *why;
    return f->token[0] && kn_tcp_file_read(path, &now, &why) && strcmp(now.token, f->token) == 0;
}

void kn_tcp_file_remove(const char *path, const kn_tcp_file *f)
{
    if (kn_tcp_file_stands(path, f))
        unlink(path);
}
