/* models/formats/gguf.c: the container of GGUF. */
#include "models/formats/gguf.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "tensor/files.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_KEY = 65535, MOST_NAME = 255, MOST_ALIGNMENT = 1 << 20, FIRST = 1 << 16 };

static const int size_of[KN_GGUF_TYPES] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

/* ---- bytes ----------------------------------------------------------------------------------- */

/* The file's bytes up to end are in memory. */
static bool need(kn_gguf *g, int64_t end)
{
    const int64_t size = g->seen.st_size;
    if (end <= g->have)
        return true;
    if (end > size)
        return kn_fail("%s: the file ends within its header; it was cut, or is damaged: fetch it "
                       "again",
                       g->path);
    int64_t until = 2 * g->have > end ? 2 * g->have : end;
    until = until < FIRST ? FIRST : until;
    until = until > size ? size : until;
    if (!kn_host_grow(&g->bytes, &g->room, until, 1))
        return false;
    const ssize_t n = kn_read_at(g->fd, g->bytes + g->have, (size_t)(until - g->have), g->have);
    if (n < 0)
        return kn_fail_system("%s: cannot read: %m", g->path);
    g->have += n;
    return g->have == until ||
           kn_fail("%s: the file was cut while it was read; fetch it again", g->path);
}

/* Skips count elements of size bytes, which are in memory then. */
static bool skip(kn_gguf *g, uint64_t count, uint64_t size)
{
    uint64_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > (uint64_t)g->seen.st_size ||
        !need(g, g->at + (int64_t)bytes))
        return kn_ok() &&
               kn_fail("%s: a list of its header has %llu elements, more than the file has bytes; "
                       "it was cut, or is damaged: fetch it again",
                       g->path, (unsigned long long)count);
    g->at += (int64_t)bytes;
    return true;
}

static bool take(kn_gguf *g, void *to, size_t size)
{
    if (!need(g, g->at + (int64_t)size))
        return false;
    memcpy(to, g->bytes + g->at, size);
    g->at += (int64_t)size;
    return true;
}

/* The name of a key or a tensor, of most bytes, joins those there are; list has room for what it
 * names, which is of size bytes. */
static bool read_name(kn_gguf *g, uint64_t most, const char *what, kn_strings *names, void *list,
                      int64_t *room, size_t size)
{
    uint64_t n;
    if (!take(g, &n, sizeof n))
        return false;
    if (n == 0 || n > most)
        return kn_fail("%s: the name of a %s has %llu bytes; 1 to %llu are read", g->path, what,
                       (unsigned long long)n, (unsigned long long)most);
    if (!skip(g, n, 1))
        return false;
    const char *text = g->bytes + g->at - n;
    if (memchr(text, 0, n))
        return kn_fail("%s: the name of a %s has a 0", g->path, what);
    struct kn_string *s = kn_strings_add(names, text, n);
    if (!s || !kn_host_grow(list, room, names->count, size))
        return false;
    if (s->value >= 0)
        return kn_fail("%s: the %s '%.100s' is there twice", g->path, what,
                       kn_strings_text(names, s->value));
    s->value = names->count - 1;
    return true;
}

/* ---- values ---------------------------------------------------------------------------------- */

static bool read_strings(kn_gguf *g, uint64_t count)
{
    uint64_t n;
    for (uint64_t i = 0; i < count; i++)
        if (!take(g, &n, sizeof n) || !skip(g, n, 1))
            return false;
    return true;
}

static bool read_value(kn_gguf *g)
{
    uint32_t type;
    uint64_t count = 1;
    if (!read_name(g, MOST_KEY, "key", &g->keys, &g->value, &g->value_room, sizeof *g->value))
        return false;
    kn_gguf_value *v = &g->value[g->keys.count - 1];
    if (!take(g, &type, sizeof type))
        return false;
    const bool array = type == KN_GGUF_ARRAY;
    if (array && (!take(g, &type, sizeof type) || !take(g, &count, sizeof count)))
        return false;
    if (type >= KN_GGUF_TYPES || type == KN_GGUF_ARRAY)
        return kn_fail("%s: the value of '%.100s' is of type %u, which this library doesn't read",
                       g->path, kn_strings_text(&g->keys, g->keys.count - 1), type);
    *v = (kn_gguf_value){ .type = type, .array = array, .count = (int64_t)count, .at = g->at };
    return type == KN_GGUF_STRING ? read_strings(g, count)
                                  : skip(g, count, (uint64_t)size_of[type]);
}

const kn_gguf_value *kn_gguf_find(const kn_gguf *g, const char *key)
{
    const int64_t i = kn_strings_find(&g->keys, key, strlen(key));
    return i < 0 ? NULL : &g->value[i];
}

double kn_gguf_number(const kn_gguf *g, const kn_gguf_value *v, int64_t i)
{
    if (!v || i < 0 || i >= v->count || v->type == KN_GGUF_STRING)
        return NAN;
    const char *at = g->bytes + v->at + i * size_of[v->type];
    uint64_t u = 0;
    float f;
    double d;
    memcpy(&u, at, (size_t)size_of[v->type]); /* little-endian */
    memcpy(&f, &u, sizeof f);
    memcpy(&d, &u, sizeof d);
    const int unused = 64 - 8 * size_of[v->type];
    const bool with_sign = v->type == KN_GGUF_I8 || v->type == KN_GGUF_I16 ||
                           v->type == KN_GGUF_I32 || v->type == KN_GGUF_I64;
    return v->type == KN_GGUF_F32   ? f
           : v->type == KN_GGUF_F64 ? d
           : with_sign              ? (double)((int64_t)(u << unused) >> unused)
                                    : (double)u;
}

double kn_gguf_number_at(const kn_gguf *g, const char *key)
{
    return kn_gguf_number(g, kn_gguf_find(g, key), 0);
}

const char *kn_gguf_next(const kn_gguf *g, const kn_gguf_value *v, int64_t *at, size_t *length)
{
    uint64_t n;
    const char *text = g->bytes + v->at + *at;
    memcpy(&n, text, sizeof n);
    *at += (int64_t)sizeof n + (int64_t)n;
    *length = (size_t)n;
    return text + sizeof n;
}

const char *kn_gguf_text(const kn_gguf *g, const kn_gguf_value *v, size_t *length)
{
    int64_t at = 0;
    return v && v->type == KN_GGUF_STRING && !v->array ? kn_gguf_next(g, v, &at, length) : NULL;
}

bool kn_gguf_says(const kn_gguf *g, const char *key, const char *text)
{
    size_t length;
    const char *own = kn_gguf_text(g, kn_gguf_find(g, key), &length);
    return own && length == strlen(text) && memcmp(own, text, length) == 0;
}

json_t *kn_gguf_json(const kn_gguf *g, const kn_gguf_value *v)
{
    size_t length;
    const char *text = kn_gguf_text(g, v, &length);
    const double x = kn_gguf_number(g, v, 0);
    if (!v || v->array)
        return NULL;
    if (text)
        return json_stringn(text, length);
    if (v->type == KN_GGUF_BOOL)
        return json_boolean(x != 0);
    if (v->type == KN_GGUF_F64)
        return json_real(x);
    if (v->type != KN_GGUF_F32) /* above 2^53 it is out of every range */
        return fabs(x) < 0x1p53 ? json_integer((json_int_t)x) : json_integer(INT64_MAX);
    char digits[32] = "";
    for (int n = 6; n <= 9 && isfinite(x); n++) {
        snprintf(digits, sizeof digits, "%.*g", n, x);
        if (strtof(digits, NULL) == (float)x)
            break;
    }
    return json_real(*digits ? strtod(digits, NULL) : x);
}

/* ---- tensors --------------------------------------------------------------------------------- */

static bool read_tensor(kn_gguf *g, int64_t alignment)
{
    uint32_t ndim;
    uint64_t size, offset;
    if (!read_name(g, MOST_NAME, "tensor", &g->names, &g->tensor, &g->tensor_room,
                   sizeof *g->tensor))
        return false;
    kn_gguf_tensor *t = &g->tensor[g->tensors++];
    *t = (kn_gguf_tensor){ 0 };
    if (!take(g, &ndim, sizeof ndim))
        return false;
    if (ndim < 1 || ndim > 4)
        return kn_fail("%s: a tensor has %u dims; 1 to 4 are read", g->path, ndim);
    t->ndim = (int)ndim;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (!take(g, &size, sizeof size))
            return false;
        t->shape[d] = (int64_t)(size < INT64_MAX ? size : INT64_MAX);
    }
    if (!take(g, &t->type, sizeof t->type) || !take(g, &offset, sizeof offset))
        return false;
    t->at = (int64_t)(offset < INT64_MAX ? offset : INT64_MAX); /* from the data's beginning */
    return t->at % alignment == 0 ||
           kn_fail("%s: a tensor's offset of %llu isn't a multiple of its alignment of %lld",
                   g->path, (unsigned long long)offset, (long long)alignment);
}

/* The names stay where they are now. */
static bool place_tensors(kn_gguf *g, int64_t data)
{
    for (int64_t i = 0; i < g->tensors; i++) {
        kn_gguf_tensor *t = &g->tensor[i];
        t->name = kn_strings_text(&g->names, i);
        if (__builtin_add_overflow(t->at, data, &t->at) || t->at > g->seen.st_size)
            return kn_fail("%s: the tensor '%.200s' begins behind the end of the file, which was "
                           "cut, or is damaged; fetch it again",
                           g->path, t->name);
    }
    return true;
}

const kn_gguf_tensor *kn_gguf_tensor_of(const kn_gguf *g, const char *name)
{
    const int64_t i = kn_strings_find(&g->names, name, strlen(name));
    return i < 0 ? NULL : &g->tensor[i];
}

bool kn_gguf_piece(const kn_gguf *g, const kn_gguf_tensor *t, const char *name,
                   kn_foreign_piece *piece)
{
    static const char *const types[] = {
        [2] = "Q4_0",  [3] = "Q4_1",    [6] = "Q5_0",    [7] = "Q5_1",  [9] = "Q8_1",
        [10] = "Q2_K", [11] = "Q3_K",   [12] = "Q4_K",   [13] = "Q5_K", [14] = "Q6_K",
        [15] = "Q8_K", [20] = "IQ4_NL", [23] = "IQ4_XS", [28] = "F64",  [39] = "MXFP4"
    };
    const char *type =
        t->type < sizeof types / sizeof *types && types[t->type] ? types[t->type] : "of a number";
    const kn_dtype dtype = t->type == KN_GGML_F16    ? KN_F16
                           : t->type == KN_GGML_BF16 ? KN_BF16
                                                     : KN_F32;
    *piece = (kn_foreign_piece){ .piece = { name, dtype, t->ndim, { 0 }, { 0 } },
                                 .at = t->at,
                                 .form.blocks = t->type == KN_GGML_Q8_0 };
    if (dtype == KN_F32 && t->type != KN_GGML_F32 && t->type != KN_GGML_Q8_0)
        return kn_fail("%s: the tensor '%.200s' is of ggml's type %u (%s); F32, F16, BF16 and Q8_0 "
                       "are read: fetch or convert the model in one of them",
                       g->path, t->name, t->type, type);
    if (t->ndim > 2)
        return kn_fail("%s: the tensor '%.200s' has %d dims; no model here has it", g->path,
                       t->name, t->ndim);
    if (piece->form.blocks && t->shape[t->ndim - 1] % 32)
        return kn_fail("%s: the tensor '%.200s' of type Q8_0 has rows of %lld elements, which "
                       "aren't blocks of 32; the file is damaged",
                       g->path, t->name, (long long)t->shape[t->ndim - 1]);
    memcpy(piece->piece.shape, t->shape, sizeof t->shape);
    return true;
}

/* ---- opening --------------------------------------------------------------------------------- */

static bool read_counts(kn_gguf *g, uint64_t *tensors, uint64_t *values)
{
    uint32_t magic, version;
    if (!take(g, &magic, sizeof magic) || !take(g, &version, sizeof version))
        return false;
    if (version == 0x02000000 || version == 0x03000000)
        return kn_fail("%s is a big-endian GGUF; little-endian ones are read", g->path);
    if (version != 2 && version != 3)
        return kn_fail("%s is of GGUF's version %u; 2 and 3 are read", g->path, version);
    return take(g, tensors, sizeof *tensors) && take(g, values, sizeof *values);
}

bool kn_gguf_open(kn_gguf *g, const char *path)
{
    uint64_t tensors = 0, values = 0;
    g->path = path;
    g->fd = kn_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    if (g->fd < 0 || kn_file_facts(g->fd, &g->seen) != 0)
        return kn_fail_system("%s: cannot open: %m", path);
    if (!S_ISREG(g->seen.st_mode))
        return kn_fail("%s is no file", path);
    if (!read_counts(g, &tensors, &values))
        return false;
    for (uint64_t i = 0; i < values; i++)
        if (!read_value(g))
            return false;
    const bool says = kn_gguf_find(g, "general.alignment") != NULL;
    const double claim = says ? kn_gguf_number_at(g, "general.alignment") : 32;
    if (!(claim >= 1 && claim <= MOST_ALIGNMENT) || ((int64_t)claim & ((int64_t)claim - 1)))
        return kn_fail("%s: its general.alignment isn't a power of two up to %d", path,
                       MOST_ALIGNMENT);
    const int64_t alignment = (int64_t)claim;
    for (uint64_t i = 0; i < tensors; i++)
        if (!read_tensor(g, alignment))
            return false;
    return place_tensors(g, (g->at + alignment - 1) / alignment * alignment);
}

void kn_gguf_close(kn_gguf *g)
{
    if (g->path && g->fd >= 0)
        close(g->fd);
    kn_strings_free(&g->keys);
    kn_strings_free(&g->names);
    kn_host_free(g->bytes);
    kn_host_free(g->value);
    kn_host_free(g->tensor);
    *g = (kn_gguf){ 0 };
}
