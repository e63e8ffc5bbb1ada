/* data/idx.c: reads idx files, gzipped or not: arrays with a header of their type and sizes. */
#include "data/idx_internal.h"
#include "kernels/error_internal.h"
#include "tensor/files.h"
#include "tensor/tensor_internal.h"

#include <limits.h>
#include <string.h>
#ifdef KN_HAVE_ZLIB
#include <zlib.h>
#endif

#define GZIP 0x1f     /* a gzipped file begins with it */
#define MOST 0xffffff /* of a dim but the first: a larger size means a broken header */

/* ---- bytes ----------------------------------------------------------------------------------- */

/* One idx file while it is read. */
typedef struct idx_file {
    const char *path;
    unsigned char *bytes;    /* of the file; owned */
    const unsigned char *at; /* the next of them, and so many are left */
    size_t left;
    uint64_t limit; /* bytes it can hold at most, from its size and deflate's best ratio, 1032 */
    bool packed, ended; /* packed data has, and the checksum behind it holds */
#ifdef KN_HAVE_ZLIB
    z_stream z;
#endif
} idx_file;

#ifdef KN_HAVE_ZLIB
static bool begin(idx_file *f)
{
    return !f->packed || inflateInit2(&f->z, 16 + MAX_WBITS) == Z_OK ||
           kn_fail_memory("%s could not be read", f->path);
}

/* Up to size bytes; fewer where the data ends. -1 with an error where the file is damaged. */
static int64_t unpack(idx_file *f, unsigned char *to, size_t size)
{
    size_t done = 0;
    while (done < size && !f->ended) {
        f->z.next_in = (unsigned char *)(uintptr_t)f->at;
        f->z.avail_in = f->left < UINT_MAX ? (unsigned)f->left : UINT_MAX;
        f->z.next_out = to + done;
        f->z.avail_out = size - done < UINT_MAX ? (unsigned)(size - done) : UINT_MAX;
        const int code = inflate(&f->z, Z_NO_FLUSH);
        f->left -= (size_t)(f->z.next_in - f->at);
        f->at = f->z.next_in;
        done = (size_t)(f->z.next_out - to);
        if (code == Z_BUF_ERROR)
            return (int64_t)done;
        if (code == Z_MEM_ERROR)
            return kn_fail_memory("%s could not be read", f->path), -1;
        if (code != Z_OK && code != Z_STREAM_END)
            return kn_fail("%s is damaged: %s; download it again", f->path,
                           f->z.msg ? f->z.msg : "it isn't as gzip makes files"),
                   -1;
        if (code == Z_STREAM_END) /* others may follow, as gzip takes them */
            f->ended = f->left == 0 || *f->at != GZIP || inflateReset(&f->z) != Z_OK;
    }
    return (int64_t)done;
}

static void end(idx_file *f)
{
    if (f->packed)
        inflateEnd(&f->z);
}
#else
static bool begin(idx_file *f)
{
    return !f->packed ||
           kn_fail("%s is gzipped, but zlib wasn't found when Knap was built (zlib1g-dev on "
                   "Debian); unpack the file, or build with zlib",
                   f->path);
}

static int64_t unpack(idx_file *f, unsigned char *to, size_t size)
{
    (void)f, (void)to, (void)size;
    return 0;
}

static void end(idx_file *f)
{
    (void)f;
}
#endif

static bool idx_open(idx_file *f, const char *path)
{
    f->path = path;
    f->at = f->bytes = kn_file_read(path, INT64_MAX / 2, &f->left);
    f->limit = ((uint64_t)f->left + 1) * 1032;
    f->packed = f->left > 1 && f->at[0] == GZIP && f->at[1] == 0x8b;
    return f->bytes && begin(f);
}

/* Up to size bytes, fewer where the data ends; -1 with an error. */
static int64_t read_some(idx_file *f, void *to, size_t size)
{
    if (f->packed)
        return unpack(f, to, size);
    const size_t n = size < f->left ? size : f->left;
    memcpy(to, f->at, n);
    f->at += n;
    f->left -= n;
    return (int64_t)n;
}

/* Reads exactly size bytes. */
static bool idx_read(idx_file *f, void *to, size_t size)
{
    const int64_t n = read_some(f, to, size);
    return n == (int64_t)size ||
           (n >= 0 && kn_fail("%s is cut short (%zu bytes are missing); download it again", f->path,
                              size - (size_t)n));
}

/* After the last byte: nothing may follow, and gzip's checksum must hold. */
static bool idx_end(idx_file *f)
{
    unsigned char extra;
    const int64_t n = read_some(f, &extra, 1);
    if (n > 0)
        return kn_fail("%s holds more bytes than its header says", f->path);
    return n == 0 && (!f->packed || f->ended ||
                      kn_fail("%s is damaged at its end: cut short; download it again", f->path));
}

/* ---- the header ------------------------------------------------------------------------------ */

static uint32_t big_endian(const unsigned char *b)
{
    return (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
}

static kn_dtype dtype_of(uint32_t magic)
{
    static const kn_dtype types[] = { [0x08] = KN_U8,  [0x09] = KN_I8,  [0x0b] = KN_I16,
                                      [0x0c] = KN_I32, [0x0d] = KN_F32, [0x0e] = KN_F64 };
    const uint32_t type = magic >> 8;
    return type < sizeof types / sizeof *types ? types[type] : KN_DTYPE_DEFAULT;
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
    end(&f);
    kn_host_free(f.bytes);
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
