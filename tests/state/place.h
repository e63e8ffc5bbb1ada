/* tests/state/place.h: files of any bytes in a test's folder. */
#ifndef KNAP_TESTS_STATE_PLACE_H
#define KNAP_TESTS_STATE_PLACE_H

#include "tests/models/temp.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

static inline void place_begin(void)
{
    (void)temp_path(""); /* makes the folder */
}

/* Removes the files of the folder, and of name in it: how many. */
static inline int clear_folder(const char *name)
{
    int n = 0;
    char folder[256], path[600];
    snprintf(folder, sizeof folder, "%s", temp_path(name));
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        n += e->d_name[0] != '.' && unlink(path) == 0;
    }
    closedir(d);
    return n;
}

static inline int place_files(void)
{
    int n = 0;
    DIR *d = opendir(temp_folder);
    for (struct dirent *e; d && (e = readdir(d));)
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

/* The header of a .safetensors file, its length before it, and its data. */
static inline void place_put(const char *name, const char *header, const void *data, size_t bytes)
{
    uint64_t n = strlen(header);
    unlink(temp_path(name));
    FILE *f = fopen(temp_path(name), "wb");
    KN_CHECK(f && fwrite(&n, 8, 1, f) == 1 && fwrite(header, 1, n, f) == n);
    KN_CHECK(fwrite(data, 1, bytes, f) == bytes && fclose(f) == 0);
}

static inline void put_text(const char *name, const char *text)
{
    unlink(temp_path(name));
    write_temp(name, text, strlen(text));
}

/* The header of a file without the spaces at its end; where data begins is left in *data. */
static inline char *place_header(const char *name, uint64_t *data)
{
    uint64_t n = 0;
    FILE *f = fopen(temp_path(name), "rb");
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
