/* state/pieces_form.c: tensors that lie otherwise in their file than in memory: transposed, with
 * rows in another order, or in blocks of small numbers. Only the elements that are wanted are read,
 * but for the rest of a block. */
#include "kernels/convert.h"
#include "state/pieces_internal.h"
#include "tensor/files.h"
#include "tensor/safetensors_format.h"

#include <string.h>

enum { BLOCK = 32, BLOCK_BYTES = 2 + BLOCK }; /* elements of Q8_0 that share a factor */

bool kn_foreign_bytes(const kn_foreign_piece *f, int64_t *bytes)
{
    const kn_piece *p = &f->piece;
    const bool t = f->form.transposed;
    if (p->ndim < 1 || p->ndim > 2 || ((t || f->form.head) && p->ndim != 2) || f->form.head % 2 ||
        !kn_safetensors_bytes(p->dtype, p->ndim, p->shape, bytes))
        return false;
    if (f->form.head && (t || p->shape[0] % f->form.head))
        return false;
    if (!f->form.blocks)
        return true;
    *bytes = *bytes / (int64_t)kn_dtype_size(p->dtype) / BLOCK * BLOCK_BYTES;
    return p->dtype == KN_F32 && p->shape[t ? 0 : p->ndim - 1] % BLOCK == 0;
}

/* Bytes of the file into p's room. */
static bool fetch(kn_pieces *p, const kn_indexed_part *part, int64_t bytes, int64_t at)
{
    const int fd = kn_indexed_open(p, part->file);
    return fd >= 0 && kn_pieces_ready(p) &&
           kn_read_whole(fd, p->file[part->file].path, p->room, (size_t)bytes, at);
}

/* Elements first .. first + count - 1, in the order of the file, to to[0], to[step], ... */
static bool read_run(kn_pieces *p, const kn_indexed_part *part, size_t size, int64_t first,
                     int64_t count, char *to, int64_t step)
{
    const int64_t most = KN_PORTION / (int64_t)size;
    for (int64_t done = 0, n; done < count; done += n) {
        n = count - done < most ? count - done : most;
        if (!fetch(p, part, n * (int64_t)size, part->at + (first + done) * (int64_t)size))
            return false;
        if (step == 1)
            memcpy(to + done * (int64_t)size, p->room, (size_t)n * size);
        for (int64_t i = 0; step != 1 && i < n; i++)
            memcpy(to + (done + i) * step * (int64_t)size, p->room + i * (int64_t)size, size);
    }
    return true;
}

/* The same of blocks, to f32. */
static bool read_blocks(kn_pieces *p, const kn_indexed_part *part, int64_t first, int64_t count,
                        float *to, int64_t step)
{
    const int64_t most = (int64_t)(KN_PORTION / BLOCK_BYTES) * BLOCK;
    for (int64_t done = 0, n; done < count; done += n) {
        const int64_t skip = (first + done) % BLOCK;
        n = count - done < most - skip ? count - done : most - skip;
        if (!fetch(p, part, (skip + n + BLOCK - 1) / BLOCK * BLOCK_BYTES,
                   part->at + (first + done) / BLOCK * BLOCK_BYTES))
            return false;
        for (int64_t i = 0; i < n; i++) {
            const char *block = p->room + (skip + i) / BLOCK * BLOCK_BYTES;
            uint16_t factor;
            memcpy(&factor, block, sizeof factor);
            to[(done + i) * step] =
                kn_f16_to_f32(factor) * (float)(int8_t)block[2 + (skip + i) % BLOCK];
        }
    }
    return true;
}

static bool read_elements(kn_pieces *p, const kn_indexed_tensor *t, int64_t first, int64_t count,
                          char *to, int64_t step)
{
    return t->part->form.blocks
               ? read_blocks(p, t->part, first, count, (float *)(void *)to, step)
               : read_run(p, t->part, kn_dtype_size(t->piece.dtype), first, count, to, step);
}

int64_t kn_piece_form_row(const kn_piece_form *f, int64_t r)
{
    if (!f->head)
        return r;
    const int64_t in = r % f->head, half = f->head / 2;
    return r - in + 2 * (in % half) + in / half;
}

bool kn_formed_read(kn_pieces *p, const kn_indexed_tensor *t, const kn_rectangle *w, char *to)
{
    const kn_piece_form *f = &t->part->form;
    const bool two = t->piece.ndim == 2;
    const int64_t *shape = t->piece.shape, rows = two ? w->size[0] : 1,
                  row = two ? w->offset[0] : 0;
    const int64_t cols = w->size[two], col = w->offset[two], width = shape[two];
    const int64_t size = (int64_t)kn_dtype_size(t->piece.dtype);
    if (f->transposed) {
        for (int64_t c = 0; c < cols; c++)
            if (!read_elements(p, t, (col + c) * shape[0] + row, rows, to + c * size, cols))
                return false;
        return true;
    }
    if (!f->head && cols == width)
        return read_elements(p, t, row * width, rows * cols, to, 1);
    for (int64_t r = 0; r < rows; r++)
        if (!read_elements(p, t, kn_piece_form_row(f, row + r) * width + col, cols,
                           to + r * cols * size, 1))
            return false;
    return true;
}
