/* state/pieces_write.c: a rank's files, one a rectangle of its most cut up tensor, written side by
 * side from one stream of bytes. Each byte is summed and handed to the kernel while it is in the
 * processor's cache, in portions of a MiB. A file's header is written last, when the checksums in
 * it are known: a file that isn't finished has a length of 0 there, and no reader takes it. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "state/pieces_internal.h"
#include "tensor/checksum.h"
#include "tensor/files.h"
#include "tensor/json.h"
#include "tensor/safetensors_format.h"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PORTION (1 << 20)   /* bytes summed and written at once */
#define SMALL   (128 << 10) /* bytes: smaller portions are gathered in a buffer of PORTION */

typedef struct shard_file {
    char *path;
    int fd; /* -1: closed */
    bool created;
    size_t header;   /* bytes */
    int64_t at;      /* bytes of data taken so far */
    int64_t all;     /* bytes of data */
    int64_t written; /* bytes of data in the file */
    char *buffer;    /* [PORTION]: the data [written, at) */
} shard_file;

/* The stream's next bytes: a rectangle of a tensor, and the file that takes it. */
typedef struct segment {
    int file;
    kn_piece of;
    kn_rectangle r;
    int64_t bytes;
    uint64_t sum; /* once it is whole */
} segment;

struct kn_pieces_writer {
    shard_file file[KN_MAX_RECTANGLES];
    int files;
    bool whole; /* tensors, as in files of other programs: nothing says which part one is */
    const char *id, *values;
    segment *segment;
    int64_t room;
    int segments, now;
    int64_t left;      /* bytes of segment[now] that haven't come */
    kn_checksum check; /* of it */
};

/* ---- the header ------------------------------------------------------------------------------ */

/* Adds the segment's part and checksum to what the metadata says. */
static bool describe(const segment *s, json_t *info, json_t *sums)
{
    char sum[17];
    snprintf(sum, sizeof sum, "%016llx", (unsigned long long)s->sum);
    return json_object_set_new(sums, s->of.name, json_string(sum)) == 0 &&
           json_object_set_new(info, s->of.name,
                               json_pack("{s:o, s:o}", "saved_offsets",
                                         kn_json_sizes(s->r.offset, s->of.ndim), "global_shape",
                                         kn_json_sizes(s->of.shape, s->of.ndim))) == 0;
}

/* Length and header of file k, for the caller to free. Its size depends on the segments alone: a
 * checksum takes as many digits as a 0. */
static char *make_header(const kn_pieces_writer *w, int k, size_t *size, int64_t *data)
{
    const char *path = w->file[k].path;
    kn_safetensors_entry *entry = kn_host_calloc((size_t)w->segments + 1, sizeof *entry);
    json_t *info = json_object(), *sums = json_object();
    bool ok = entry != NULL;
    int n = 0, pairs = 1;
    for (int i = 0; ok && i < w->segments; i++) {
        const segment *s = &w->segment[i];
        if (s->file != k)
            continue;
        entry[n] = (kn_safetensors_entry){ s->of.name, s->of.dtype, s->of.ndim, { 0 }, NULL };
        memcpy(entry[n++].shape, s->r.size, sizeof s->r.size);
        ok = describe(s, info, sums) ||
             kn_fail("%s: the name \"%.200s\" is not UTF-8, or memory is out", path, s->of.name);
    }
    char *parts = ok ? kn_json_text(info, JSON_COMPACT, path) : NULL,
         *sum = parts ? kn_json_text(sums, JSON_COMPACT, path) : NULL, *header = NULL;
    kn_safetensors_pair pair[6] = { { "format", "pt" } };
    if (!w->whole) {
        pair[pairs++] = (kn_safetensors_pair){ "DCP_VERSION", "1.0" };
        pair[pairs++] = (kn_safetensors_pair){ KN_SHARD_INFO, parts };
    }
    pair[pairs++] = (kn_safetensors_pair){ KN_SHARD_SUMS, sum };
    if (w->id)
        pair[pairs++] = (kn_safetensors_pair){ KN_SHARD_ID, w->id };
    if (w->values)
        pair[pairs++] = (kn_safetensors_pair){ KN_SHARD_VALUES, w->values };
    if (sum)
        header = kn_safetensors_header(path, entry, n, pair, pairs, size, data);
    kn_host_free(parts);
    kn_host_free(sum);
    json_decref(info);
    json_decref(sums);
    kn_host_free(entry);
    return header;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static bool write_at(const shard_file *f, const void *data, int64_t bytes, int64_t at)
{
    return kn_write_at(f->fd, data, (size_t)bytes, at) == 0 ||
           kn_fail_system("cannot write %s: %m", f->path);
}

static bool flush(shard_file *f)
{
    if (!write_at(f, f->buffer, f->at - f->written, (int64_t)f->header + f->written))
        return false;
    f->written = f->at;
    return true;
}

/* bytes: at most PORTION. */
static bool put(shard_file *f, const char *data, int64_t bytes)
{
    const bool large = bytes >= SMALL;
    if ((large || f->at - f->written + bytes > PORTION) && !flush(f))
        return false;
    if (large && !write_at(f, data, bytes, (int64_t)f->header + f->at))
        return false;
    if (!large)
        memcpy(f->buffer + (f->at - f->written), data, (size_t)bytes);
    f->written += large ? bytes : 0;
    f->at += bytes;
    return true;
}

/* Goes to the first segment from i on that has bytes. */
static void begin_segment(kn_pieces_writer *w, int i)
{
    while (i < w->segments && w->segment[i].bytes == 0)
        i++;
    w->now = i;
    w->left = i < w->segments ? w->segment[i].bytes : 0;
    kn_checksum_begin(&w->check);
}

bool kn_pieces_append(kn_pieces_writer *w, const void *data, size_t bytes)
{
    const char *p = data;
    if (!kn_ok())
        return false;
    for (int64_t n, more = (int64_t)bytes; more > 0; more -= n, p += n) {
        if (w->now == w->segments)
            return kn_fail("a rank's part of a checkpoint: %lld bytes more than its tensors have",
                           (long long)more);
        segment *s = &w->segment[w->now];
        n = more < w->left ? more : w->left;
        n = n < PORTION ? n : PORTION;
        kn_checksum_add(&w->check, p, (size_t)n);
        if (!put(&w->file[s->file], p, n))
            return false;
        w->left -= n;
        if (w->left == 0) {
            s->sum = kn_checksum_end(&w->check);
            begin_segment(w, w->now + 1);
        }
    }
    return true;
}

/* ---- the files ------------------------------------------------------------------------------- */

/* Appends the rectangles of a piece to the segments, each to a file of its own. */
static bool list_piece(kn_pieces_writer *w, const kn_piece *p)
{
    kn_rectangle r[KN_MAX_RECTANGLES];
    int n = kn_interval_rectangles(p->name, p->ndim, p->shape, p->part, r);
    for (int k = 0; k < n; k++) {
        if (!kn_host_grow(&w->segment, &w->room, w->segments + 1, sizeof *w->segment))
            return false;
        segment *s = &w->segment[w->segments++];
        *s = (segment){ .file = k, .of = *p, .r = r[k], .sum = kn_checksum_of("", 0) };
        if (!kn_safetensors_bytes(p->dtype, p->ndim, r[k].size, &s->bytes))
            return kn_fail("tensor \"%.200s\": too many bytes", p->name);
    }
    w->files = n > w->files ? n : w->files;
    return n >= 0;
}

static bool create_file(kn_pieces_writer *w, int k, const char *dir, const char *name)
{
    shard_file *f = &w->file[k];
    f->path = kn_host_strdup(kn_path_of(dir, name, "").text);
    f->buffer = kn_host_alloc(PORTION);
    char *header = f->path && f->buffer && kn_ok() ? make_header(w, k, &f->header, &f->all) : NULL;
    kn_host_free(header);
    if (!header)
        return false;
    f->fd = kn_open(f->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    f->created = f->fd >= 0;
    if (!f->created && errno == EEXIST)
        return kn_fail("%s is there already, and a file of a checkpoint is never replaced: remove "
                       "it or write to another folder",
                       f->path);
    return f->created || kn_fail_system("cannot create %s: %m", f->path);
}

static kn_pieces_writer *create(const kn_pieces_writer *as, const char *dir, const char *name,
                                int rank, const kn_piece *piece, int pieces)
{
    char own[64];
    kn_pieces_writer *w = kn_ok() ? kn_host_alloc(sizeof *w) : NULL;
    if (!w)
        return NULL;
    *w = *as;
    for (int k = 0; k < KN_MAX_RECTANGLES; k++)
        w->file[k].fd = -1;
    bool ok = true;
    for (int i = 0; ok && i < pieces; i++)
        ok = list_piece(w, &piece[i]);
    for (int k = 0; ok && k < w->files; k++) {
        snprintf(own, sizeof own, "shard-%05d-model-%05d-of-%05d.safetensors", rank + 1, k + 1,
                 w->files);
        ok = create_file(w, k, dir, name ? name : own);
    }
    begin_segment(w, 0);
    if (ok)
        return w;
    kn_pieces_abandon(w);
    return NULL;
}

kn_pieces_writer *kn_pieces_create(const char *dir, int rank, const char *id, const char *values,
                                   const kn_piece *piece, int pieces)
{
    return create(&(kn_pieces_writer){ .id = id, .values = values }, dir, NULL, rank, piece,
                  pieces);
}

kn_pieces_writer *kn_pieces_create_whole(const char *dir, const char *name, const kn_piece *piece,
                                         int pieces)
{
    return create(&(kn_pieces_writer){ .whole = true, .files = 1 }, dir, name, 0, piece, pieces);
}

static bool write_header(const kn_pieces_writer *w, int k)
{
    const shard_file *f = &w->file[k];
    size_t size = 0;
    int64_t data;
    char *header = make_header(w, k, &size, &data);
    bool ok = header && (size == f->header || kn_fail("%s: the header grew from %zu to %zu bytes",
                                                      f->path, f->header, size));
    ok = ok && write_at(f, header, (int64_t)size, 0);
    kn_host_free(header);
    return ok;
}

static bool sync_and_close(shard_file *f)
{
    const int fd = f->fd;
    if (KN_AGAIN(fsync(fd)) != 0)
        return kn_fail_system("cannot sync %s: %m", f->path);
    f->fd = -1; /* close gives the descriptor back even if it fails */
    return close(fd) == 0 || errno == EINTR || kn_fail_system("cannot close %s: %m", f->path);
}

bool kn_pieces_commit(kn_pieces_writer *w)
{
    bool ok = w && kn_ok();
    for (int k = 0; ok && k < w->files; k++) {
        shard_file *f = &w->file[k];
        ok = (f->at == f->all || kn_fail("%s: %lld of %lld bytes of data came", f->path,
                                         (long long)f->at, (long long)f->all)) &&
             flush(f) && write_header(w, k) && sync_and_close(f);
    }
    for (int k = 0; ok && k < w->files; k++)
        w->file[k].created = false; /* they stay */
    kn_pieces_abandon(w);
    return ok;
}

void kn_pieces_abandon(kn_pieces_writer *w)
{
    for (int k = 0; w && k < w->files; k++) {
        shard_file *f = &w->file[k];
        if (f->fd >= 0)
            close(f->fd);
        if (f->created)
            (void)KN_AGAIN(unlink(f->path));
        kn_host_free(f->path);
        kn_host_free(f->buffer);
    }
    if (w)
        kn_host_free(w->segment);
    kn_host_free(w);
}
