/* state/pieces_write.c: a rank's files, one a rectangle of its most cut up tensor, written side by
 * side from one stream of bytes. */
#include "kernels/error.h"
#include "kernels/memory_internal.h"
#include "state/pieces.h"
#include "state/shard_file.h"
#include "tensor/safetensors_format.h"
#include <stdio.h>
#include <string.h>

/* The stream's next bytes and the file that takes them. */
typedef struct segment {
    int file;
    int64_t bytes;
} segment;

struct kn_pieces_writer {
    kn_shard_file *file[KN_MAX_RECTANGLES];
    int files;
    segment *segment;
    int segments, now;
    int64_t done; /* bytes of segment[now] */
};

/* The items of each file while they are listed. */
typedef struct listing {
    kn_shard_item *item[KN_MAX_RECTANGLES];
    int items[KN_MAX_RECTANGLES], files;
    int64_t room[KN_MAX_RECTANGLES], segments;
} listing;

/* Appends the parts of a piece to the lists. */
static bool list_piece(listing *l, const kn_piece *p, kn_pieces_writer *w)
{
    kn_rectangle r[KN_MAX_RECTANGLES];
    int64_t bytes;
    int n = kn_interval_rectangles(p->name, p->ndim, p->shape, p->part, r);
    for (int k = 0; k < n; k++) {
        if (!kn_host_grow(&l->item[k], &l->room[k], l->items[k] + 1, sizeof *l->item[k]) ||
            !kn_host_grow(&w->segment, &l->segments, w->segments + 1, sizeof *w->segment))
            return false;
        if (!kn_safetensors_bytes(p->dtype, p->ndim, r[k].size, &bytes))
            return kn_fail("tensor \"%.200s\": too many bytes", p->name);
        kn_shard_item *item = &l->item[k][l->items[k]++];
        *item = (kn_shard_item){ p->name, p->dtype, p->ndim, { 0 }, r[k] };
        memcpy(item->shape, p->shape, sizeof item->shape);
        w->segment[w->segments++] = (segment){ k, bytes };
    }
    l->files = n > l->files ? n : l->files;
    return n >= 0;
}

kn_pieces_writer *kn_pieces_create(const char *dir, int rank, const char *id, const char *values,
                                   const kn_piece *piece, int pieces)
{
    listing l = { 0 };
    kn_pieces_writer *w = kn_ok() ? kn_host_calloc(1, sizeof *w) : NULL;
    bool ok = w != NULL;
    for (int i = 0; ok && i < pieces; i++)
        ok = list_piece(&l, &piece[i], w);
    for (int k = 0; k < l.files && ok; k++) {
        char name[64];
        snprintf(name, sizeof name, "shard-%05d-model-%05d-of-%05d.safetensors", rank + 1, k + 1,
                 l.files);
        w->file[k] = kn_shard_file_create(dir, name, l.item[k], l.items[k], true, id, values);
        ok = w->file[k] != NULL;
        w->files += ok;
    }
    for (int k = 0; k < KN_MAX_RECTANGLES; k++)
        kn_host_free(l.item[k]);
    if (ok)
        return w;
    kn_pieces_abandon(w);
    return NULL;
}

bool kn_pieces_append(kn_pieces_writer *w, const void *data, size_t bytes)
{
    const char *p = data;
    if (!kn_ok())
        return false;
    while (w->now < w->segments) {
        const segment *s = &w->segment[w->now];
        int64_t n = (int64_t)bytes < s->bytes - w->done ? (int64_t)bytes : s->bytes - w->done;
        if (n > 0 && !kn_shard_file_append(w->file[s->file], p, (size_t)n))
            return false;
        p += n;
        bytes -= (size_t)n;
        w->done += n;
        if (w->done < s->bytes)
            return true;
        w->done = 0;
        w->now++;
    }
    return bytes == 0 || kn_fail("a rank's part of a checkpoint: %zu bytes more than its tensors "
                                 "have",
                                 bytes);
}

bool kn_pieces_commit(kn_pieces_writer *w, kn_piece_file file[KN_MAX_RECTANGLES], int *files)
{
    bool ok = kn_ok();
    for (int k = 0; k < w->files && ok; k++)
        ok = kn_shard_file_finish(w->file[k], &file[k]);
    *files = ok ? w->files : 0;
    for (int k = 0; k < w->files && ok; k++) {
        kn_shard_file_free(w->file[k], true);
        w->file[k] = NULL;
    }
    kn_pieces_abandon(w);
    return ok;
}

void kn_pieces_abandon(kn_pieces_writer *w)
{
    if (!w)
        return;
    for (int k = 0; k < w->files; k++)
        kn_shard_file_free(w->file[k], false);
    kn_host_free(w->segment);
    kn_host_free(w);
}
