/* tests/models/temp.h: a folder for a test's files, which goes at the test's end. */
#ifndef KNAP_TESTS_MODELS_TEMP_H
#define KNAP_TESTS_MODELS_TEMP_H

#include "tests/kn_test.h"

#include <ftw.h>
#include <unistd.h>

static char temp_folder[64];
static pid_t temp_owner;

static inline int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st;
    (void)kind;
    (void)ftw;
    return remove(path);
}

/* For a test that begins anew, too. */
static inline void remove_temp(void)
{
    if (temp_folder[0] && temp_owner == getpid()) /* no child's */
        nftw(temp_folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    temp_folder[0] = '\0';
}

/* folder/name; the folder is made at the first call. Valid until the fourth next call. */
static inline const char *temp_path(const char *name)
{
    static char room[4][256];
    static int turn;
    if (!temp_folder[0]) {
        strcpy(temp_folder, "/tmp/knap-test-XXXXXX");
        KN_CHECK(mkdtemp(temp_folder) != NULL);
        temp_owner = getpid();
        kn_test_at_end(remove_temp);
    }
    turn = (turn + 1) % 4;
    snprintf(room[turn], sizeof room[turn], "%s/%s", temp_folder, name);
    return room[turn];
}

static inline const char *write_temp(const char *name, const void *data, size_t size)
{
    const char *path = temp_path(name);
    FILE *f = fopen(path, "wb");
    KN_CHECK(f != NULL && fwrite(data, 1, size, f) == size && fclose(f) == 0, "%s", path);
    return path;
}

#endif
