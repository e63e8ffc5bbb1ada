/* kernels/choices.c: the file of choices (choices.h): in memory, a tree of the lines that count,
 * one for each key. */
#include "kernels/choices.h"
#include "kernels/environment.h"
#include "kernels/error_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SUM 16 /* letters of a checksum */

static struct {
    pthread_mutex_t lock;
    bool read, tuning;
    char path[4096];  /* empty: no file */
    bool there;       /* the file was there */
    void *lines;      /* a tree of tsearch: "key = value" by key */
    int64_t damaged;  /* lines that were left out */
    char unread[256]; /* why the file isn't used, or is not to be written; else empty */
    char unwritten[256];
} all = { .lock = PTHREAD_MUTEX_INITIALIZER };

bool kn_tuning(void)
{
    bool on = false;
    kn_env_switch("KNAP_TUNE", &on);
    return on;
}

/* ---- lines ----------------------------------------------------------------------------------- */

/* FNV-1a: finds what a torn write or a bad disk leaves. */
static uint64_t sum_of(const char *line, size_t n)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < n; i++)
        h = (h ^ (unsigned char)line[i]) * UINT64_C(0x100000001b3);
    return h;
}

/* The length of the key of "key = value", both printable; 0: the line isn't one. */
static size_t key_of(const char *line, size_t n)
{
    const char *equals = memmem(line, n, " = ", 3);
    size_t key = equals ? (size_t)(equals - line) : 0, value = equals ? n - key - 3 : 0;
    for (size_t i = 0; i < n; i++)
        if (line[i] < 0x20 || line[i] > 0x7e)
            return 0;
    return value > 0 && key < KN_CHOICE_KEY && value < KN_CHOICE_KEY ? key : 0;
}

static bool is_choice(const char *line, size_t n)
{
    char sum[SUM + 1];
    if (n < SUM + 2 || line[SUM] != ' ')
        return false;
    snprintf(sum, sizeof sum, "%016llx", (unsigned long long)sum_of(line + SUM + 1, n - SUM - 1));
    return memcmp(line, sum, SUM) == 0 && key_of(line + SUM + 1, n - SUM - 1) > 0;
}

static int by_key(const void *a, const void *b)
{
    const size_t m = (size_t)(strstr(a, " = ") - (const char *)a);
    const size_t n = (size_t)(strstr(b, " = ") - (const char *)b);
    const int order = memcmp(a, b, m < n ? m : n);
    return order ? order : (m > n) - (m < n);
}

/* Puts a line into memory, in the place of one with its key; false: there is none. */
static bool enter(const char *line, size_t n)
{
    char *copy = strndup(line, n), **at = copy ? tsearch(copy, &all.lines, by_key) : NULL;
    if (!at) {
        free(copy);
        return false;
    }
    if (*at != copy)
        free(*at);
    *at = copy;
    return true;
}

static void drop_lines(void)
{
    tdestroy(all.lines, free);
    all.lines = NULL;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Says why the file isn't used. */
static char *unread(const char *why)
{
    snprintf(all.unread, sizeof all.unread, "%s", why);
    return NULL;
}

static char *contents(int fd, size_t *size)
{
    struct stat st;
    *size = 0;
    if (fstat(fd, &st) != 0)
        return unread(strerror(errno));
    if (!S_ISREG(st.st_mode))
        return unread("it is no file");
    if (st.st_size > (off_t)KN_CHOICES_MOST)
        return unread("it is too large for a file of choices");
    char *text = malloc((size_t)st.st_size + 1);
    ssize_t got = text ? 0 : -1;
    for (; text && *size < (size_t)st.st_size; *size += (size_t)got) {
        while ((got = read(fd, text + *size, (size_t)st.st_size - *size)) < 0 && errno == EINTR)
            ;
        if (got <= 0)
            break;
    }
    if (got >= 0) {
        text[*size] = 0;
        return text;
    }
    int error = errno;
    free(text);
    return unread(strerror(error));
}

static void take_lines(const char *text, size_t size)
{
    for (const char *at = text, *end = text + size; at < end;) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        size_t n = (size_t)((stop ? stop : end) - at);
        bool whole = stop && is_choice(at, n);
        if (whole && !enter(at + SUM + 1, n - SUM - 1)) {
            drop_lines();
            unread("no memory is left");
            return;
        }
        all.damaged += n > 0 && !whole;
        at += n + 1;
    }
    if (all.damaged > 0 && !all.lines)
        unread("it isn't one of Knap's files of choices");
}

/* mkdir -p of the folder that path lies in; what fails shows when the file is opened. */
static void make_folders(const char *path)
{
    char folder[sizeof all.path];
    snprintf(folder, sizeof folder, "%s", path);
    for (char *slash = folder + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(folder, 0777);
        *slash = '/';
    }
}

static void find_path(void)
{
    const char *given = getenv("KNAP_TUNED"), *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    int n = 0;
    if (given && strcmp(given, "none") == 0)
        return;
    if (given && *given)
        n = snprintf(all.path, sizeof all.path, "%s", given);
    else if (cache && *cache == '/')
        n = snprintf(all.path, sizeof all.path, "%s/knap/tuned.txt", cache);
    else if (home && *home)
        n = snprintf(all.path, sizeof all.path, "%s/.cache/knap/tuned.txt", home);
    if (n >= (int)sizeof all.path)
        all.path[0] = 0;
}

/* -1: unwritten says why. */
static int open_to_add(void)
{
    int fd = open(all.path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
    if (fd < 0)
        snprintf(all.unwritten, sizeof all.unwritten, "%s", strerror(errno));
    return fd;
}

/* Once a process; the lock is held. */
static void read_once(void)
{
    size_t size;
    if (all.read)
        return;
    all.read = true;
    all.tuning = kn_tuning();
    find_path();
    if (!*all.path)
        return;
    int fd = open(all.path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    all.there = fd >= 0 || errno != ENOENT;
    if (fd < 0 && errno != ENOENT && errno != ENOTDIR)
        unread(strerror(errno));
    char *text = fd >= 0 ? contents(fd, &size) : NULL;
    if (text)
        take_lines(text, size);
    free(text);
    if (fd >= 0)
        close(fd);
    if (!all.tuning || *all.unread)
        return;
    if (!getenv("KNAP_TUNED") || !*getenv("KNAP_TUNED"))
        make_folders(all.path);
    fd = open_to_add();
    if (fd >= 0)
        close(fd);
}

/* ---- what others ask ------------------------------------------------------------------------- */

bool kn_choice_find(const char *key, char value[KN_CHOICE_KEY])
{
    char line[KN_CHOICE_KEY + 4];
    const size_t n = (size_t)snprintf(line, sizeof line, "%s = ", key);
    pthread_mutex_lock(&all.lock);
    read_once();
    char **at = n < sizeof line ? tfind(line, &all.lines, by_key) : NULL;
    if (at)
        snprintf(value, KN_CHOICE_KEY, "%s", *at + n);
    pthread_mutex_unlock(&all.lock);
    return at != NULL;
}

/* A line feed before and behind: a line that another process could write in part only doesn't join
 * this one. */
static void add_to_file(const char *line, size_t n)
{
    char text[SUM + 2 * KN_CHOICE_KEY + 8];
    if (!*all.path || *all.unread || *all.unwritten)
        return;
    int size =
        snprintf(text, sizeof text, "\n%016llx %s\n", (unsigned long long)sum_of(line, n), line);
    int fd = open_to_add();
    if (fd < 0)
        return;
    ssize_t wrote;
    while ((wrote = write(fd, text, (size_t)size)) < 0 && errno == EINTR)
        ;
    if (wrote != size)
        snprintf(all.unwritten, sizeof all.unwritten, "%s",
                 wrote < 0 ? strerror(errno) : "the disk is full");
    if (close(fd) != 0 && wrote == size)
        snprintf(all.unwritten, sizeof all.unwritten, "%s", strerror(errno));
}

void kn_choice_keep(const char *key, const char *value)
{
    char line[2 * KN_CHOICE_KEY + 4];
    size_t n = (size_t)snprintf(line, sizeof line, "%s = %s", key, value);
    pthread_mutex_lock(&all.lock);
    read_once();
    if (n >= sizeof line || !*key || key_of(line, n) != strlen(key))
        snprintf(all.unwritten, sizeof all.unwritten, "a line can't hold '%.100s'", line);
    else if (enter(line, n))
        add_to_file(line, n);
    pthread_mutex_unlock(&all.lock);
}

typedef struct tally {
    const char *begin; /* of the lines that count */
    int64_t count;
    uint64_t hash; /* of all */
} tally;

static void count_line(const void *node, VISIT visit, void *arg)
{
    const char *line = *(char *const *)node;
    tally *t = arg;
    if (visit != postorder && visit != leaf)
        return; /* a node with others below it is visited three times */
    t->count += strncmp(line, t->begin, strlen(t->begin)) == 0;
    t->hash += sum_of(line, strlen(line));
}

static tally count_lines(const char *begin)
{
    tally t = { .begin = begin };
    pthread_mutex_lock(&all.lock);
    read_once();
    twalk_r(all.lines, count_line, &t);
    pthread_mutex_unlock(&all.lock);
    return t;
}

int64_t kn_choices_of(const char *machine)
{
    return count_lines(machine).count;
}

uint64_t kn_choices_hash(void)
{
    return count_lines("").hash;
}

const char *kn_choices_tell(char *text, size_t size)
{
    pthread_mutex_lock(&all.lock);
    read_once();
    int n = 0;
    if (!*all.path)
        n = snprintf(text, size, "no file keeps choices (KNAP_TUNED=none, or HOME isn't set)");
    else if (*all.unread)
        n = snprintf(text, size, "%s isn't used: %s", all.path, all.unread);
    else if (*all.unwritten)
        n = snprintf(text, size, "%s can't be written: %s", all.path, all.unwritten);
    else
        n = snprintf(text, size, "%s%s", all.path, all.there || all.tuning ? "" : " isn't there");
    if (all.damaged > 0 && !*all.unread && n > 0 && (size_t)n < size)
        snprintf(text + n, size - (size_t)n, ", without %lld damaged line%s",
                 (long long)all.damaged, all.damaged == 1 ? "" : "s");
    pthread_mutex_unlock(&all.lock);
    kn_defuse(text);
    return text;
}

const char *kn_choices_said(const char *machine, const char *none)
{
    static _Thread_local char text[4600];
    char file[4400];
    const long long n = kn_choices_of(machine);
    kn_choices_tell(file, sizeof file);
    if (kn_tuning())
        snprintf(text, sizeof text, "timed when first met, %lld so far: %s", n, file);
    else if (n > 0)
        snprintf(text, sizeof text, "%lld timed before: %s", n, file);
    else
        snprintf(text, sizeof text, "%s: %s", none ? none : "", file);
    return kn_tuning() || n > 0 || none ? text : NULL;
}

void kn_choices_forget(void)
{
    pthread_mutex_lock(&all.lock);
    drop_lines();
    all.read = all.tuning = all.there = false;
    all.damaged = 0;
    all.path[0] = all.unread[0] = all.unwritten[0] = 0;
    pthread_mutex_unlock(&all.lock);
}
