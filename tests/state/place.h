/* tests/state/place.h: a folder of files for one test, and files of any bytes in it. */
#ifndef KNAP_TESTS_STATE_PLACE_H
#define KNAP_TESTS_STATE_PLACE_H

#include "tests/kn_test.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static char place_folder[256];

/* Valid until the call after the next. */
static inline const char *place_path(const char *name)
{
    static char path[2][600];
    static int turn;
    turn = !turn;
    snprintf(path[turn], sizeof path[turn], "%s/%s", place_folder, name);
    return path[turn];
}

static inline void place_begin(void)
{
    const char *base = getenv("TMPDIR");
    snprintf(place_folder, sizeof place_folder, "%s/knap-state-XXXXXX", base ? base : "/tmp");
    KN_CHECK(mkdtemp(place_folder) != NULL);
}

static inline int place_files(void)
{
    int n = 0;
    DIR *d = opendir(place_folder);
    for (struct dirent *e; d && (e = readdir(d));)
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static inline void place_clear(void)
{
    DIR *d = opendir(place_folder);
    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.')
            unlink(place_path(e->d_name));
    closedir(d);
}

static inline void place_end(void)
{
    place_clear();
    KN_CHECK(rmdir(place_folder) == 0);
}

/* The header of a .safetensors file, its length before it, and its data. */
static inline void place_put(const char *name, const char *header, const void *data, size_t bytes)
{
    uint64_t n = strlen(header);
    unlink(place_path(name));
    FILE *f = fopen(place_path(name), "wb");
    KN_CHECK(f && fwrite(&n, 8, 1, f) == 1 && fwrite(header, 1, n, f) == n);
    KN_CHECK(fwrite(data, 1, bytes, f) == bytes && fclose(f) == 0);
}

static inline void place_put_text(const char *name, const char *text)
{
    unlink(place_path(name));
    FILE *f = fopen(place_path(name), "wb");
    KN_CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

/* The header of a file without the spaces at its end; where data begins is left in *data. */
static inline char *place_header(const char *name, uint64_t *data)
{
    uint64_t n = 0;
    FILE *f = fopen(place_path(name), "rb");
    KN_CHECK(f && fread(&n, 8, 1, f) == 1 && n < 100000, "%s", name);
    char *text = calloc(n + 1, 1);
    KN_CHECK(fread(text, 1, n, f) == n);
    fclose(f);
    *data = 8 + n;
    while (n > 0 && text[n - 1] == ' ')
        text[--n] = '\0';
    return text;
}

#endif
