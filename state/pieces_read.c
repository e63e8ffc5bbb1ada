/* state/pieces_read.c: bytes of an index's files. An interval is rectangles of the whole shape, a
 * file holds rectangles of it, and what two rectangles share is runs of bytes in the file and runs
 * in memory: neighbours in the file are read together.
 *
 * Nothing is mapped: a file that is cut while it is read is an error, not a signal. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "state/copy.h"
#include "state/pieces_internal.h"
#include "tensor/checksum.h"
#include "tensor/files.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define MOST_OPEN 256       /* files; more are opened again when they are read */
#define GLANCE    (1 << 16) /* at most KN_PORTION */
#define RUNS      256       /* in memory, read together */

/* ---- the files ------------------------------------------------------------------------------- */

static void close_file(kn_pieces *p, int file)
{
    close(p->file[file].fd);
    p->file[file].fd = -1;
    p->open--;
}

/* Any but keep; false: no other is open. */
static bool close_one(kn_pieces *p, int keep)
{
    for (int i = 0; i < p->files; i++)
        if (p->file[i].fd >= 0 && i != keep) {
            close_file(p, i);
            return true;
        }
    return false;
}

/* After a call that failed for want of a descriptor: is there one more? */
static bool makes_room(kn_pieces *p, int keep)
{
    return (errno == EMFILE || errno == ENFILE) && close_one(p, keep);
}

int kn_indexed_copy(kn_pieces *p, int file)
{
    int fd = kn_indexed_open(p, file), copy;
    if (fd < 0)
        return -1;
    do
        copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    while (copy < 0 && makes_room(p, file));
    if (copy < 0)
        kn_fail_system("%s: cannot open: %m", p->file[file].path);
    return copy;
}

int kn_indexed_open(kn_pieces *p, int file)
{
    kn_indexed_file *f = &p->file[file];
    struct stat now;
    if (f->fd >= 0)
        return f->fd;
    if (p->open == MOST_OPEN)
        close_one(p, file);
    do
        f->fd = kn_open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0); /* no wait at a FIFO */
    while (f->fd < 0 && makes_room(p, file));
    if (f->fd < 0) {
        kn_fail_system("%s: cannot open: %m", f->path);
        return -1;
    }
    p->open++;
    if (kn_file_facts(f->fd, &now) != 0)
        kn_fail_system("%s: cannot read its size: %m", f->path);
    else if (f->info.bytes == 0)
        f->identity = now;
    else if (!kn_same_file(&f->identity, &now))
        kn_fail("%s: the file was replaced or changed while it was read", f->path);
    if (!kn_ok())
        close_file(p, file);
    return f->fd;
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* Neighbouring bytes of a file and their places in memory, not read yet. */
typedef struct batch {
    const char *path;
    int fd;
    char *room;   /* [KN_PORTION] */
    int64_t at;   /* where they begin in the file */
    size_t bytes; /* of all runs, at most KN_PORTION */
    struct {
        char *to;
        size_t bytes;
    } run[RUNS];
    int runs;
    kn_checksum *sum; /* NULL: none is made */
} batch;

/* The room that all batches of p take turns with. */
static bool batch_begin(batch *b, kn_pieces *p, int file, kn_checksum *sum)
{
    *b = (batch){ .path = p->file[file].path, .fd = kn_indexed_open(p, file), .sum = sum };
    b->room = kn_pieces_ready(p) ? p->room : NULL;
    return b->fd >= 0 && b->room;
}

bool kn_pieces_ready(kn_pieces *p)
{
    if (!p->room)
        p->room = kn_host_alloc(KN_PORTION);
    return p->room != NULL;
}

static bool read_batch(batch *b)
{
    if (!kn_read_whole(b->fd, b->path, b->room, b->bytes, b->at))
        return false;
    if (b->sum)
        kn_checksum_add(b->sum, b->room, b->bytes);
    const char *from = b->room;
    for (int i = 0; i < b->runs; from += b->run[i++].bytes)
        kn_copy_past_caches(b->run[i].to, from, b->run[i].bytes);
    b->at += (int64_t)b->bytes;
    b->bytes = 0;
    b->runs = 0;
    return true;
}

/* Adds a run, at most KN_PORTION bytes; reads what can't be read together with it, if anything. */
static bool add_run(batch *b, char *to, size_t bytes, int64_t at)
{
    bool joins = at == b->at + (int64_t)b->bytes;
    if ((!joins || b->runs == RUNS || b->bytes + bytes > KN_PORTION) && !read_batch(b))
        return false;
    if (b->runs == 0)
        b->at = at;
    b->run[b->runs].to = to;
    b->run[b->runs++].bytes = bytes;
    b->bytes += bytes;
    return true;
}

/* ---- which files these are ------------------------------------------------------------------- */

static bool glance_at(kn_pieces *p, int file, kn_checksum *sum)
{
    const int64_t bytes = p->file[file].info.bytes, ends[] = { 0, bytes - GLANCE };
    batch b;
    kn_checksum_add(sum, &p->file[file].info.checksum, sizeof p->file[file].info.checksum);
    if (!batch_begin(&b, p, file, sum))
        return false;
    for (int i = 0; i < (bytes > GLANCE ? 2 : 1); i++) {
        b.at = ends[i];
        b.bytes = (size_t)(bytes < GLANCE ? bytes : GLANCE);
        if (!read_batch(&b))
            return false;
    }
    return true;
}

bool kn_pieces_glance(kn_pieces *p, uint64_t *sum)
{
    kn_checksum c;
    kn_checksum_begin(&c);
    for (int i = 0; i < p->files; i++)
        if (!glance_at(p, i, &c))
            return false;
    *sum = kn_checksum_end(&c);
    return true;
}

/* ---- rectangles ------------------------------------------------------------------------------ */

/* Where index at of the whole lies in row-major rectangle r, in elements. */
static int64_t place(int ndim, const kn_rectangle *r, const int64_t *at)
{
    int64_t n = 0;
    for (int d = 0; d < ndim; d++)
        n = n * r->size[d] + (at[d] - r->offset[d]);
    return n;
}

/* How many of the last dims of `box` make one run in both: all but the first of them are whole. */
static int run_dims(int ndim, const kn_rectangle *box, const kn_rectangle *a, const kn_rectangle *b)
{
    int n = ndim > 0;
    while (n < ndim && box->size[ndim - n] == a->size[ndim - n] &&
           box->size[ndim - n] == b->size[ndim - n])
        n++;
    return n;
}

/* The next index of box, of the dims before `dims`; false after the last. */
static bool advance(const kn_rectangle *box, int dims, int64_t *at)
{
    for (int d = dims - 1; d >= 0; d--) {
        if (++at[d] < box->offset[d] + box->size[d])
            return true;
        at[d] = box->offset[d];
    }
    return false;
}

/* Reads box, the elements that held (in the file) and wanted (at `to`) share. */
static bool read_box(batch *b, int ndim, size_t size, const kn_rectangle *box,
                     const kn_indexed_part *held, const kn_rectangle *wanted, char *to)
{
    int64_t at[KN_MAX_DIMS], bytes = (int64_t)size;
    int outer = ndim - run_dims(ndim, box, &held->r, wanted);
    memcpy(at, box->offset, sizeof at);
    for (int d = outer; d < ndim; d++)
        bytes *= box->size[d];
    do {
        int64_t from = held->at + place(ndim, &held->r, at) * (int64_t)size;
        char *run = to + place(ndim, wanted, at) * (int64_t)size;
        for (int64_t done = 0; done < bytes; done += KN_PORTION) {
            int64_t n = bytes - done < KN_PORTION ? bytes - done : KN_PORTION;
            if (!add_run(b, run + done, (size_t)n, from + done))
                return false;
        }
    } while (advance(box, outer, at));
    return read_batch(b);
}

static bool compare_sum(const kn_pieces *p, const kn_indexed_tensor *t, const kn_indexed_part *part,
                        uint64_t sum)
{
    return sum == part->sum ||
           kn_fail("%s: tensor \"%.200s\": its bytes have the checksum %016llx, and %016llx when "
                   "they were written: the file is damaged, use another checkpoint",
                   p->file[part->file].path, t->piece.name, (unsigned long long)sum,
                   (unsigned long long)part->sum);
}

/* Reads what part `held` of a file has of the rectangle wanted. */
static bool read_part(kn_pieces *p, const kn_indexed_tensor *t, const kn_indexed_part *held,
                      const kn_rectangle *wanted, char *to)
{
    kn_rectangle box;
    int ndim = t->piece.ndim;
    if (!kn_rectangle_meet(ndim, &held->r, wanted, &box))
        return true;
    kn_checksum sum;
    kn_checksum_begin(&sum);
    bool whole = held->has_sum && memcmp(&box, &held->r, sizeof box) == 0;
    batch b;
    return batch_begin(&b, p, held->file, whole ? &sum : NULL) &&
           read_box(&b, ndim, kn_dtype_size(t->piece.dtype), &box, held, wanted, to) &&
           (!whole || compare_sum(p, t, held, kn_checksum_end(&sum)));
}

bool kn_pieces_read(kn_pieces *p, int i, kn_interval part, void *to)
{
    const kn_indexed_tensor *t = &p->tensor[i];
    kn_rectangle wanted[KN_MAX_RECTANGLES];
    char *at = to;
    if (!kn_ok())
        return false;
    int n = kn_interval_rectangles(t->piece.name, t->piece.ndim, t->piece.shape, part, wanted);
    const kn_piece_form *form = &t->part->form;
    const bool formed = form->transposed || form->blocks || form->head;
    for (int k = 0; k < n; k++) {
        if (formed && !kn_formed_read(p, t, &wanted[k], at))
            return false;
        for (int f = 0; f < t->parts && !formed; f++)
            if (!read_part(p, t, &t->part[f], &wanted[k], at))
                return false;
        at +=
            kn_rectangle_numel(t->piece.ndim, &wanted[k]) * (int64_t)kn_dtype_size(t->piece.dtype);
    }
    return n >= 0;
}

kn_tensor *kn_pieces_get(kn_pieces *p, int i)
{
    const kn_piece *piece = &p->tensor[i].piece;
    kn_tensor *t = kn_empty(piece->dtype, KN_CPU, piece->ndim, piece->shape);
    void *data = t ? kn_data(t) : NULL;
    const bool empty = t && kn_numel(t) == 0;
    return empty || (data && kn_pieces_read(p, i, piece->part, data)) ? t : NULL;
}

/* ---- all bytes ------------------------------------------------------------------------------- */

static bool verify_part(kn_pieces *p, const kn_indexed_tensor *t, const kn_indexed_part *part,
                        kn_pieces_progress progress, void *arg)
{
    int64_t left =
        kn_rectangle_numel(t->piece.ndim, &part->r) * (int64_t)kn_dtype_size(t->piece.dtype);
    kn_checksum sum;
    kn_checksum_begin(&sum);
    batch b;
    if (!batch_begin(&b, p, part->file, &sum))
        return false;
    b.at = part->at;
    for (int64_t n; left > 0; left -= n) {
        n = left < KN_PORTION ? left : KN_PORTION;
        b.bytes = (size_t)n;
        if (!read_batch(&b))
            return false;
        if (progress)
            progress(n, arg);
    }
    return compare_sum(p, t, part, kn_checksum_end(&sum));
}

bool kn_pieces_verify(kn_pieces *p, int i, kn_pieces_progress progress, void *arg)
{
    const kn_indexed_tensor *t = &p->tensor[i];
    bool ok = kn_ok();
    for (int k = 0; k < t->parts && ok; k++)
        ok = !t->part[k].has_sum || verify_part(p, t, &t->part[k], progress, arg);
    return ok;
}

/* ---- what there is --------------------------------------------------------------------------- */

const char *kn_pieces_id(const kn_pieces *p)
{
    return p->id;
}

int kn_pieces_count(const kn_pieces *p)
{
    return p->tensors;
}

const kn_piece *kn_pieces_tensor(const kn_pieces *p, int i)
{
    return &p->tensor[i].piece;
}

int kn_pieces_find(const kn_pieces *p, const char *name)
{
    return kn_name_table_find(&p->table, p->tensor, sizeof *p->tensor, name);
}

bool kn_pieces_has_sums(const kn_pieces *p, int i)
{
    const kn_indexed_tensor *t = &p->tensor[i];
    for (int k = 0; k < t->parts; k++)
        if (!t->part[k].has_sum)
            return false;
    return true;
}

int64_t kn_piece_bytes(const kn_piece *t)
{
    return kn_interval_numel(t->part) * (int64_t)kn_dtype_size(t->dtype);
}

int64_t kn_pieces_bytes(const kn_pieces *p)
{
    int64_t bytes = 0;
    for (int i = 0; p && i < p->tensors; i++)
        bytes += kn_piece_bytes(&p->tensor[i].piece);
    return bytes;
}

int kn_pieces_files(const kn_pieces *p)
{
    return p->files;
}

const kn_piece_file *kn_pieces_file(const kn_pieces *p, int i)
{
    return &p->file[i].info;
}
