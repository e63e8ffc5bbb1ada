/* Files that are there whole or not at all: what a writer that died leaves is replaced by the next
 * one, and a living writer's file is left alone. */
#include "tensor/files.h"
#include "tensor/whole_file.h"
#include "tests/tensor/temp.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

static kn_whole_file *begin(const char *path, const char *text)
{
    kn_whole_file *f = kn_whole_file_create(path);
    KN_CHECK(f && kn_whole_file_write(f, text, strlen(text)));
    return f;
}

static void holds(const char *path, const char *text)
{
    char got[16] = "";
    int fd = open(path, O_RDONLY);
    KN_CHECK(fd >= 0 && read(fd, got, sizeof got - 1) == (ssize_t)strlen(text));
    KN_CHECK(strcmp(got, text) == 0, "%s, not %s", got, text);
    close(fd);
}

static void die_while_writing(const char *path)
{
    pid_t child = fork();
    if (child == 0) {
        kn_whole_file *f = kn_whole_file_create(path);
        if (f && kn_whole_file_write(f, "half", 4))
            raise(SIGKILL);
        _exit(1);
    }
    int status;
    KN_CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
}

KN_TEST(whole_file, the_next_writer_replaces_what_a_dead_one_left)
{
    OWNED_TEMP temp t = temp_begin();
    die_while_writing(t.path);
    KN_CHECK(temp_files(&t) == 1 && access(t.path, F_OK) != 0);
    KN_CHECK(kn_whole_file_commit(begin(t.path, "all")));
    holds(t.path, "all");
    KN_CHECK(temp_files(&t) == 1, "%d files", temp_files(&t));
}

KN_TEST(whole_file, writers_of_one_path_dont_disturb_each_other)
{
    OWNED_TEMP temp t = temp_begin();
    kn_whole_file *a = begin(t.path, "first"), *b = begin(t.path, "second"),
                  *c = begin(t.path, "third");
    KN_CHECK(temp_files(&t) == 3);
    KN_CHECK(kn_whole_file_commit(b));
    holds(t.path, "second");
    kn_whole_file_abandon(c);
    KN_CHECK(kn_whole_file_commit(a));
    holds(t.path, "first");
    KN_CHECK(temp_files(&t) == 1);
}

/* A link in its place may be another user's, to a file of ours. */
KN_TEST(whole_file, a_link_at_the_temporary_name_is_never_written_through)
{
    OWNED_TEMP temp t = temp_begin();
    char link_at[320], victim[320];
    snprintf(victim, sizeof victim, "%s/victim", t.folder);
    snprintf(link_at, sizeof link_at, "%s.tmp", t.path);
    KN_CHECK(kn_whole_file_commit(begin(victim, "mine")));
    KN_CHECK(symlink(victim, link_at) == 0);
    KN_CHECK(kn_whole_file_commit(begin(t.path, "all")));
    holds(victim, "mine");
    holds(t.path, "all");
    unlink(link_at);
    KN_CHECK(link(victim, link_at) == 0); /* one more name of the same file: only the name goes */
    KN_CHECK(kn_whole_file_commit(begin(t.path, "all")));
    holds(victim, "mine");
    unlink(victim);
}

KN_TEST(whole_file, another_or_one_written_meanwhile_is_not_the_same)
{
    const struct stat seen = { 0 }, now[] = { { .st_dev = 1 },
                                              { .st_ino = 1 },
                                              { .st_size = 1 },
                                              { .st_mtim = { .tv_sec = 1 } },
                                              { .st_mtim = { .tv_nsec = 1 } } };
    KN_CHECK(kn_same_file(&seen, &seen));
    for (int i = 0; i < 5; i++)
        KN_CHECK(!kn_same_file(&seen, &now[i]), "%d", i);
}
