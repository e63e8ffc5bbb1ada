/* tests/tensor/temp.h: a folder that is removed after the test, and reading and writing files in
 * it. */
#ifndef KNAP_TESTS_TENSOR_TEMP_H
#define KNAP_TESTS_TENSOR_TEMP_H

#include "tests/kn_test.h"
#include <dirent.h>
#include <unistd.h>

typedef struct temp {
    char folder[256], path[300]; /* path: a file in the folder */
} temp;

static inline temp temp_begin(void)
{
    temp t;
    const char *base = getenv("TMPDIR");
    snprintf(t.folder, sizeof t.folder, "%s/knap-tensor-XXXXXX", base ? base : "/tmp");
    KN_CHECK(mkdtemp(t.folder) != NULL);
    snprintf(t.path, sizeof t.path, "%s/t.safetensors", t.folder);
    return t;
}

/* The number of files in the folder. */
static inline int temp_files(const temp *t)
{
    int n = 0;
    DIR *d = opendir(t->folder);
    for (struct dirent *e; d && (e = readdir(d));)
        n += e->d_name[0] != '.';
    if (d)
        closedir(d);
    return n;
}

static inline void temp_end(const temp *t)
{
    unlink(t->path);
    KN_CHECK(rmdir(t->folder) == 0, "files are left in %s", t->folder);
}
#define OWNED_TEMP __attribute__((cleanup(temp_end), unused))

static inline void temp_write(const temp *t, const void *bytes, size_t size)
{
    unlink(t->path); /* overwriting a file would sync to disk at each close */
    FILE *f = fopen(t->path, "wb");
    KN_CHECK(f && fwrite(bytes, 1, size, f) == size);
    fclose(f);
}

/* The file's bytes; caller frees. */
static inline char *temp_read(const temp *t, size_t *size)
{
    FILE *f = fopen(t->path, "rb");
    KN_CHECK(f != NULL, "no %s", t->path);
    char *b = malloc(1 << 20);
    *size = fread(b, 1, 1 << 20, f);
    fclose(f);
    return b;
}

/* A whole .safetensors file: length, header text, data. Returns its size; out holds 64 KiB. */
static inline size_t temp_compose(char *out, const char *header, const void *data, size_t bytes)
{
    uint64_t n = strlen(header);
    for (int i = 0; i < 8; i++)
        out[i] = (char)(n >> (8 * i) & 0xff);
    memcpy(out + 8, header, n);
    if (bytes)
        memcpy(out + 8 + n, data, bytes);
    return 8 + n + bytes;
}

#endif
