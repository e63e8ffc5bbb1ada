/* state/shard_file.c: writing one .safetensors file of rectangles. Each byte is summed and handed
 * to the kernel while it is in the processor's cache, in portions of a MiB. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "state/shard_file.h"
#include "tensor/checksum.h"
#include "tensor/json.h"
#include "tensor/safetensors_format.h"
#include "tensor/whole_file.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PORTION (1 << 20)   /* bytes summed and written at once */
#define SMALL   (128 << 10) /* bytes: smaller portions are gathered in a buffer of PORTION */

struct kn_shard_file {
    char *path, name[64];
    int fd; /* -1: closed */
    bool created;
    int items;
    kn_safetensors_entry *entry; /* [items] */
    uint64_t *sum;               /* [items], 0 until the item is whole */
    char *info;                  /* the text of DCP_SHARDING_INFO, or NULL; of jansson */
    const char *values;
    char id[KN_CHECKPOINT_ID];
    size_t header;     /* bytes */
    int64_t at;        /* bytes of data taken so far */
    int64_t all;       /* bytes of data */
    int64_t written;   /* bytes of data in the file */
    int now;           /* the item that the next byte belongs to */
    int64_t left;      /* bytes of it that haven't come */
    kn_checksum check; /* of it */
    char *buffer;      /* [PORTION]: the data [written, at) */
};

/* ---- the header ------------------------------------------------------------------------------ */

/* The text of an object with a member an item: its part or, where item is NULL, its checksum. The
 * caller frees it with free. */
static char *describe(const kn_shard_file *f, const kn_shard_item *item)
{
    char sum[17], *text = NULL;
    json_t *all = json_object();
    bool ok = all != NULL;
    for (int i = 0; i < f->items && ok; i++) {
        const kn_shard_item *t = item ? &item[i] : NULL;
        snprintf(sum, sizeof sum, "%016llx", (unsigned long long)f->sum[i]);
        json_t *one =
            t ? json_pack("{s:o, s:o}", "saved_offsets", kn_json_sizes(t->part.offset, t->ndim),
                          "global_shape", kn_json_sizes(t->shape, t->ndim))
              : json_string(sum);
        ok = json_object_set_new(all, f->entry[i].name, one) == 0;
        if (!ok)
            kn_fail("%s: the name \"%.200s\" is not UTF-8, or memory is out", f->path,
                    f->entry[i].name);
    }
    text = ok ? kn_json_text(all, JSON_COMPACT) : NULL;
    json_decref(all);
    if (!text && kn_ok())
        kn_fail_memory("%s: its header", f->path);
    return text;
}

/* Its size depends on the items alone: a checksum takes as many digits as a 0. Caller frees. */
static char *make_header(const kn_shard_file *f, size_t *size, int64_t *data)
{
    kn_safetensors_pair pair[6] = { { "format", "pt" } };
    int pairs = 1;
    char *sums = describe(f, NULL);
    if (!sums)
        return NULL;
    if (f->info) {
        pair[pairs++] = (kn_safetensors_pair){ "DCP_VERSION", "1.0" };
        pair[pairs++] = (kn_safetensors_pair){ KN_SHARD_INFO, f->info };
    }
    pair[pairs++] = (kn_safetensors_pair){ KN_SHARD_SUMS, sums };
    if (f->id[0])
        pair[pairs++] = (kn_safetensors_pair){ KN_SHARD_ID, f->id };
    if (f->values)
        pair[pairs++] = (kn_safetensors_pair){ KN_SHARD_VALUES, f->values };
    char *header = kn_safetensors_header(f->path, f->entry, f->items, pair, pairs, size, data);
    free(sums);
    return header;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

/* write(2) takes at most 2 GiB at once, and less when it is interrupted or the disk is full. */
static bool write_at(const kn_shard_file *f, const void *data, size_t bytes, int64_t at)
{
    const char *p = data;
    while (bytes > 0) {
        errno = EIO; /* where nothing is written */
        ssize_t n = pwrite(f->fd, p, bytes < (1u << 30) ? bytes : (1u << 30), (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return kn_fail_system("cannot write %s: %m", f->path);
        p += n;
        at += n;
        bytes -= (size_t)n;
    }
    return true;
}

static bool flush(kn_shard_file *f)
{
    int64_t bytes = f->at - f->written;
    if (!write_at(f, f->buffer, (size_t)bytes, (int64_t)f->header + f->written))
        return false;
    f->written = f->at;
    return true;
}

/* bytes: at most PORTION. */
static bool put(kn_shard_file *f, const char *data, size_t bytes)
{
    const bool large = bytes >= SMALL;
    if ((large || (size_t)(f->at - f->written) + bytes > PORTION) && !flush(f))
        return false;
    if (large && !write_at(f, data, bytes, (int64_t)f->header + f->at))
        return false;
    if (!large)
        memcpy(f->buffer + (f->at - f->written), data, bytes);
    f->written += large ? (int64_t)bytes : 0;
    f->at += (int64_t)bytes;
    return true;
}

/* Goes to the first item from i on that has bytes. */
static void begin_item(kn_shard_file *f, int i)
{
    for (f->left = 0; i < f->items && f->left == 0; i++) {
        kn_safetensors_bytes(f->entry[i].dtype, f->entry[i].ndim, f->entry[i].shape, &f->left);
        kn_checksum_begin(&f->check);
        f->sum[i] = kn_checksum_end(&f->check);
        f->now = i;
    }
}

bool kn_shard_file_append(kn_shard_file *f, const void *data, size_t bytes)
{
    const char *p = data;
    if (!kn_ok())
        return false;
    if ((int64_t)bytes > f->all - f->at)
        return kn_fail("%s: more bytes than the parts of its tensors have", f->path);
    while (bytes > 0) {
        size_t n = (int64_t)bytes < f->left ? bytes : (size_t)f->left;
        n = n < PORTION ? n : PORTION;
        kn_checksum_add(&f->check, p, n);
        if (!put(f, p, n))
            return false;
        p += n;
        bytes -= n;
        f->left -= (int64_t)n;
        if (f->left == 0) {
            f->sum[f->now] = kn_checksum_end(&f->check);
            begin_item(f, f->now + 1);
        }
    }
    return true;
}

/* ---- the file -------------------------------------------------------------------------------- */

static bool take_items(kn_shard_file *f, const kn_shard_item *item, int items)
{
    size_t n = (size_t)items + 1;
    f->entry = kn_host_calloc(n, sizeof *f->entry);
    f->sum = kn_host_calloc(n, sizeof *f->sum);
    if (!f->entry || !f->sum)
        return false;
    f->items = items;
    for (int i = 0; i < items; i++) {
        kn_safetensors_entry *e = &f->entry[i];
        *e = (kn_safetensors_entry){ item[i].name, item[i].dtype, item[i].ndim, { 0 }, NULL };
        memcpy(e->shape, item[i].part.size, sizeof e->shape);
    }
    return true;
}

static bool create_file(kn_shard_file *f)
{
    f->fd = kn_open(f->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    f->created = f->fd >= 0;
    if (f->created)
        return true;
    if (errno == EEXIST)
        return kn_fail("%s is there already, and a file of a checkpoint is never replaced: remove "
                       "it or write to another folder",
                       f->path);
    return kn_fail_system("cannot create %s: %m", f->path);
}

kn_shard_file *kn_shard_file_create(const char *dir, const char *name, const kn_shard_item *item,
                                    int items, bool sharded, const char *id, const char *values)
{
    char *header = NULL;
    kn_shard_file *f = kn_host_calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->fd = -1;
    f->values = values;
    snprintf(f->name, sizeof f->name, "%s", name);
    snprintf(f->id, sizeof f->id, "%s", id ? id : "");
    bool ok = (f->path = kn_path_join(dir, name)) && (f->buffer = kn_host_alloc(PORTION)) &&
              take_items(f, item, items) && (!sharded || (f->info = describe(f, item))) &&
              (header = make_header(f, &f->header, &f->all)) && create_file(f);
    kn_host_free(header);
    if (ok) {
        begin_item(f, 0);
        return f;
    }
    kn_shard_file_free(f, false);
    return NULL;
}

static bool write_header(kn_shard_file *f, kn_piece_file *file)
{
    size_t size = 0;
    int64_t data;
    char *header = make_header(f, &size, &data);
    bool ok = header && (size == f->header || kn_fail("%s: the header grew from %zu to %zu bytes",
                                                      f->path, f->header, size));
    ok = ok && write_at(f, header, size, 0);
    if (ok) {
        *file = (kn_piece_file){ .bytes = (int64_t)size + f->all,
                                 .checksum = kn_checksum_of(header, size) };
        memcpy(file->name, f->name, sizeof file->name);
    }
    kn_host_free(header);
    return ok;
}

static bool sync_and_close(kn_shard_file *f)
{
    const int fd = f->fd;
    if (KN_AGAIN(fsync(fd)) != 0)
        return kn_fail_system("cannot sync %s: %m", f->path);
    f->fd = -1; /* close gives the descriptor back even if it fails */
    return close(fd) == 0 || errno == EINTR || kn_fail_system("cannot close %s: %m", f->path);
}

bool kn_shard_file_finish(kn_shard_file *f, kn_piece_file *file)
{
    if (!kn_ok())
        return false;
    if (f->at != f->all)
        return kn_fail("%s: %lld of %lld bytes of data came", f->path, (long long)f->at,
                       (long long)f->all);
    return flush(f) && write_header(f, file) && sync_and_close(f);
}

void kn_shard_file_free(kn_shard_file *f, bool keep)
{
    if (!f)
        return;
    if (f->fd >= 0)
        close(f->fd);
    if (f->created && !keep)
        (void)KN_AGAIN(unlink(f->path));
    kn_host_free(f->path);
    kn_host_free(f->entry);
    kn_host_free(f->sum);
    free(f->info);
    kn_host_free(f->buffer);
    kn_host_free(f);
}
