/* data/idx.c: reads idx files, gzipped or not: arrays with a header of their type and sizes. */
#include "data/data.h"
#include "data/idx_internal.h"
#include "kernels/error_internal.h"
#include "tensor/files.h"
#include "tensor/tensor_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef KN_HAVE_ZLIB
#include <zlib.h>
#endif

#define MOST 0xffffff /* of a dim but the first: a larger size means a broken header */

/* ---- bytes: through zlib, which also reads files that are not compressed, or plain -------------
 */

/* One idx file while it is read. */
typedef struct idx_file {
    const char *path;
    uint64_t limit; /* bytes it can hold at most, from its size and deflate's best ratio, 1032 */
#ifdef KN_HAVE_ZLIB
    gzFile file;
#else
    FILE *file;
#endif
} idx_file;

#ifdef KN_HAVE_ZLIB
static bool start(idx_file *f)
{
    int fd = kn_open(f->path, O_RDONLY | O_CLOEXEC, 0);
    f->file = fd >= 0 ? gzdopen(fd, "rb") : NULL;
    if (f->file)
        gzbuffer(f->file, 1 << 16);
    else if (fd >= 0) {
        close(fd);
        return kn_fail_memory("%s could not be read", f->path);
    }
    return f->file || kn_fail_system("cannot open %s: %m", f->path);
}

/* The number of bytes read; 0 at the end, -1 if the file is damaged: *why tells it; or where it is
 * NULL, errno that it can't be read just now. */
static int64_t read_some(idx_file *f, void *to, unsigned size, const char **why)
{
    int code = Z_OK, n = gzread(f->file, to, size), error = errno;
    *why = gzerror(f->file, &code);
    if (code == Z_ERRNO || code == Z_MEM_ERROR) {
        *why = NULL;
        errno = code == Z_ERRNO ? error : ENOMEM;
        return -1;
    }
    if (n == 0 && code == Z_BUF_ERROR)
        *why = "cut short";
    return code == Z_OK || code == Z_STREAM_END || n > 0 ? n : code == Z_BUF_ERROR ? 0 : -1;
}

/* The checksum at the end was seen and holds. */
static bool is_complete(idx_file *f)
{
    int code = Z_OK;
    gzerror(f->file, &code);
    return code == Z_OK || code == Z_STREAM_END;
}

static void stop(idx_file *f)
{
    if (f->file)
        gzclose_r(f->file);
}
#else
static bool start(idx_file *f)
{
    int fd = kn_open(f->path, O_RDONLY | O_CLOEXEC, 0);
    f->file = fd >= 0 ? fdopen(fd, "rb") : NULL;
    if (fd >= 0 && !f->file)
        close(fd);
    if (!f->file)
        return kn_fail_system("cannot open %s: %m", f->path);
    int first = getc(f->file), second = getc(f->file);
    rewind(f->file);
    return first != 0x1f || second != 0x8b ||
           kn_fail("%s is gzipped, but zlib wasn't found when Knap was built (zlib1g-dev on "
                   "Debian); unpack the file, or build with zlib",
                   f->path);
}

static int64_t read_some(idx_file *f, void *to, unsigned size, const char **why)
{
    size_t n = fread(to, 1, size, f->file);
    *why = NULL;
    return n > 0 || !ferror(f->file) ? (int64_t)n : -1;
}

static bool is_complete(idx_file *f)
{
    return !ferror(f->file);
}

static void stop(idx_file *f)
{
    if (f->file)
        fclose(f->file);
}
#endif

static bool idx_open(idx_file *f, const char *path)
{
    struct stat st;
    f->path = path;
    const int there = kn_look(path, &st);
    if (there <= 0)
        return there == 0 && kn_fail("cannot open %s: No such file or directory", path);
    if (!S_ISREG(st.st_mode))
        return kn_fail("%s is not a regular file", path);
    f->limit = ((uint64_t)st.st_size + 1) * 1032;
    return start(f);
}

/* Reads exactly size bytes. */
static bool idx_read(idx_file *f, void *to, size_t size)
{
    unsigned char *p = to;
    const char *why = "";
    while (size > 0) {
        int64_t n = read_some(f, p, size > 1u << 30 ? 1u << 30 : (unsigned)size, &why);
        if (n < 0)
            return why ? kn_fail("%s is damaged: %s; download it again", f->path, why)
                       : kn_fail_system("cannot read %s: %m", f->path);
        if (n == 0)
            return kn_fail("%s is cut short (%zu bytes are missing); download it again", f->path,
                           size);
        p += n;
        size -= (size_t)n;
    }
    return true;
}

/* After the last byte: nothing may follow, and gzip's checksum must hold. */
static bool idx_end(idx_file *f)
{
    unsigned char extra;
    const char *why = "";
    int64_t n = read_some(f, &extra, 1, &why);
    if (n > 0)
        return kn_fail("%s holds more bytes than its header says", f->path);
    if (n < 0 && !why)
        return kn_fail_system("cannot read %s: %m", f->path);
    return (n == 0 && is_complete(f)) ||
           kn_fail("%s is damaged at its end: %s; download it again", f->path, why ? why : "");
}

/* ---- the header ------------------------------------------------------------------------------ */

static uint32_t big_endian(const unsigned char *b)
{
    return (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
}

static kn_dtype dtype_of(uint32_t magic)
{
    switch (magic >> 8) {
    case 0x08:
        return KN_U8;
    case 0x09:
        return KN_I8;
    case 0x0b:
        return KN_I16;
    case 0x0c:
        return KN_I32;
    case 0x0d:
        return KN_F32;
    case 0x0e:
        return KN_F64;
    default:
        return KN_DTYPE_DEFAULT;
    }
}

/* The type and number of dims; *dims of those that the caller wants, or any. */
static bool read_magic(idx_file *f, uint32_t wanted, const char *what, kn_dtype *dtype, int *dims)
{
    unsigned char raw[4];
    if (!idx_read(f, raw, sizeof raw))
        return false;
    uint32_t magic = big_endian(raw);
    if (wanted && magic != wanted)
        return kn_fail("%s is no idx file of %s: magic 0x%08x, not 0x%08x", f->path, what, magic,
                       wanted);
    *dtype = dtype_of(magic);
    *dims = (int)(magic & 0xff);
    if (*dtype == KN_DTYPE_DEFAULT || *dims == 0)
        return kn_fail("%s is no idx file: it begins with 0x%08x", f->path, magic);
    return *dims <= KN_MAX_DIMS ||
           kn_fail("%s has %d dims; at most %d are possible", f->path, *dims, KN_MAX_DIMS);
}

/* The sizes; checks that the file can hold so many elements. */
static bool read_sizes(idx_file *f, kn_dtype dtype, int dims, int64_t *size)
{
    unsigned char raw[4];
    uint64_t total = kn_dtype_size(dtype);
    for (int i = 0; i < dims; i++) {
        if (!idx_read(f, raw, sizeof raw))
            return false;
        uint32_t v = big_endian(raw);
        if (v == 0 || (i > 0 && v > MOST))
            return kn_fail("%s: its header gives %u for dimension %d, which is impossible", f->path,
                           v, i + 1);
        size[i] = v;
        if (__builtin_mul_overflow(total, v, &total))
            total = UINT64_MAX;
    }
    return total <= f->limit ||
           kn_fail("%s: its header promises %llu bytes, more than a file of its size can hold",
                   f->path, (unsigned long long)total);
}

static bool check_count(const idx_file *f, const char *what, int64_t size, int64_t count)
{
    return count == 0 || size == count ||
           kn_fail("%s has %lld %s for %lld images", f->path, (long long)size, what,
                   (long long)count);
}

/* ---- the elements ---------------------------------------------------------------------------- */

/* The bytes of n elements from big-endian order. */
static void swap(unsigned char *p, int64_t n, size_t size)
{
    for (unsigned char *end = p + (size_t)n * size; size > 1 && p < end; p += size)
        for (size_t i = 0; i < size / 2; i++) {
            unsigned char byte = p[i];
            p[i] = p[size - 1 - i];
            p[size - 1 - i] = byte;
        }
}

kn_tensor *kn_idx_read_as(const char *path, uint32_t magic, const char *what, int64_t count)
{
    idx_file f = { 0 };
    kn_dtype dtype = KN_DTYPE_DEFAULT;
    int dims = 0;
    int64_t size[KN_MAX_DIMS];
    kn_tensor *t = NULL;
    bool ok = idx_open(&f, path) && read_magic(&f, magic, what, &dtype, &dims) &&
              read_sizes(&f, dtype, dims, size) && check_count(&f, what, size[0], count) &&
              (t = kn_tensor_new(dtype, KN_CPU, NULL, KN_MEM_DATA, dims, size, NULL, false));
    if (ok) {
        void *data = kn_array_of(t).data;
        ok = idx_read(&f, data, (size_t)kn_numel(t) * kn_dtype_size(dtype)) && idx_end(&f);
        if (ok) /* else most of its memory may never have been touched */
            swap(data, kn_numel(t), kn_dtype_size(dtype));
    }
    stop(&f);
    if (ok)
        return t;
    kn_tensor_free(t);
    return NULL;
}

kn_tensor *kn_idx_read(const char *path)
{
    if (!kn_ok() || !kn_given_path(path, "kn_idx_read", "the path"))
        return NULL;
    kn_tensor *t = kn_idx_read_as(path, 0, NULL, 0);
    return t ? kn_scope_adopt(t) : NULL;
}
