/* models/formats/formats.c: which format a file has, names of tensors, and writing a planned
 * file. */
#include "models/formats/formats.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "tensor/whole_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- which ----------------------------------------------------------------------------------- */

const kn_file_format *kn_file_format_at(int i)
{
    static const kn_file_format *const all[] = { &kn_gguf_format, &kn_llmc_format };
    return i >= 0 && (size_t)i < sizeof all / sizeof *all ? all[i] : NULL;
}

/* Bytes of a file at a place; fewer where it ends. -1 with an error. */
static ssize_t peek(const char *path, void *to, size_t bytes, int64_t at)
{
    const int fd = kn_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    const ssize_t n = fd < 0 ? -1 : kn_read_at(fd, to, bytes, at);
    if (n < 0)
        kn_fail_system("%s: cannot read: %m", path);
    if (fd >= 0)
        close(fd);
    return n;
}

const kn_file_format *kn_file_format_of(char *path)
{
    struct stat st;
    char magic[4];
    const kn_file_format *f;
    if (kn_look(path, &st) <= 0)
        return NULL;
    for (int i = 0; S_ISDIR(st.st_mode) && (f = kn_file_format_at(i)); i++) {
        const kn_path file = kn_path_of(path, f->file, "");
        if (kn_is_there(file.text)) {
            memcpy(path, file.text, sizeof file.text);
            return f;
        }
    }
    if (S_ISDIR(st.st_mode) || !kn_ok())
        return NULL;
    if (!S_ISREG(st.st_mode))
        return kn_fail_null("%s is neither a file nor a folder", path);
    const ssize_t n = peek(path, magic, sizeof magic, 0);
    for (int i = 0; n == sizeof magic && (f = kn_file_format_at(i)); i++)
        if (memcmp(magic, f->magic, sizeof magic) == 0)
            return f;
    return n < 0 ? NULL
                 : kn_fail_null("%s is no model: neither GGUF nor llm.c's weights (.bin); of a "
                                "model of transformers, give the folder",
                                path);
}

/* ---- names ----------------------------------------------------------------------------------- */

bool kn_tensor_name_at(char out[256], const char *pattern, int64_t number)
{
    const char *star = strchr(pattern, '*');
    if (star)
        snprintf(out, 256, "%.*s%lld%s", (int)(star - pattern), pattern, (long long)number,
                 star + 1);
    else
        snprintf(out, 256, "%s", pattern);
    return star != NULL;
}

const kn_tensor_name *kn_tensor_name_of(const kn_family *f, const char *name, char gguf[256])
{
    char again[256];
    for (const kn_tensor_name *row = f->tensors; row && row->name; row++) {
        const char *star = strchr(row->name, '*');
        const int64_t number = star && strncmp(name, row->name, (size_t)(star - row->name)) == 0
                                   ? strtoll(name + (star - row->name), NULL, 10)
                                   : 0;
        kn_tensor_name_at(again, row->name, number);
        if (strcmp(again, name) == 0) {
            kn_tensor_name_at(gguf, row->gguf, number);
            return row;
        }
    }
    return NULL;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* There is no such file in dir, or one that Knap wrote. */
bool kn_file_may_save(const kn_file_writer *w, const char *dir)
{
    const kn_file_format *format = w->format;
    const kn_path path = kn_path_of(dir, format->file, "");
    char mark[64];
    const size_t n = strlen(format->mark);
    if (!kn_is_there(path.text))
        return kn_ok();
    return (peek(path.text, mark, n, format->mark_at) == (ssize_t)n &&
            memcmp(mark, format->mark, n) == 0) ||
           (kn_ok() && kn_fail("%s holds a %s that Knap didn't export; choose another folder", dir,
                               format->file));
}

typedef struct writing {
    const kn_file_plan *plan;
    kn_whole_file *file; /* NULL: another rank writes */
    char *room;
    int64_t size;
} writing;

static bool write_zeros(kn_whole_file *f, int64_t count)
{
    static const char zeros[4096];
    for (int64_t n; count > 0; count -= n) {
        n = count < (int64_t)sizeof zeros ? count : (int64_t)sizeof zeros;
        if (!kn_whole_file_write(f, zeros, (size_t)n))
            return false;
    }
    return true;
}

/* The rows of x in the order of the file, or its columns as rows. */
static void arrange(const kn_piece_form *f, const char *from, char *to, int64_t rows, int64_t cols,
                    size_t size)
{
    for (int64_t r = 0; r < rows; r++) {
        const size_t row = (size_t)kn_piece_form_row(f, r);
        for (int64_t c = 0; f->transposed && c < cols; c++)
            memcpy(to + (size_t)(c * rows + r) * size, from + (size_t)(r * cols + c) * size, size);
        if (!f->transposed)
            memcpy(to + row * (size_t)cols * size, from + (size_t)(r * cols) * size,
                   (size_t)cols * size);
    }
}

static bool put(void *to, int i, kn_tensor *x)
{
    writing *w = to;
    const struct kn_planned *p = &w->plan->tensor[i];
    const size_t size = kn_dtype_size(kn_dtype_of(x)), bytes = (size_t)kn_numel(x) * size;
    const char *from = kn_data(x);
    if (!w->file)
        return true;
    if (!from || !kn_host_grow(&w->room, &w->size, (int64_t)bytes + 1, 1))
        return false;
    if (p->form.transposed || p->form.head) {
        arrange(&p->form, from, w->room, kn_size(x, 0), kn_size(x, 1), size);
        from = w->room;
    }
    return kn_whole_file_write(w->file, from, bytes) && write_zeros(w->file, p->zeros);
}

static bool write_planned(const kn_file_plan *p, const char *path, void *module,
                          const kn_model_tensors *t, const kn_ema *ema, kn_comm *comm)
{
    const bool writes = kn_rank(comm) == 0;
    kn_dtype *as = kn_host_calloc((size_t)t->count + 1, sizeof *as);
    for (int i = 0; as && i < t->count; i++)
        as[i] = p->tensor[i].dtype;
    writing w = { .plan = p, .file = as && writes ? kn_whole_file_create(path) : NULL };
    bool ok = as && (w.file || !writes) &&
              (!w.file || kn_whole_file_write(w.file, p->header, (size_t)p->size)) &&
              kn_model_each(t, module, ema, comm, as, p->order, put, &w);
    if (w.file && ok)
        ok = kn_whole_file_commit(w.file);
    else
        kn_whole_file_abandon(w.file);
    kn_host_free(w.room);
    kn_host_free(as);
    return ok;
}

bool kn_file_save(const kn_file_writer *w, const char *dir, void *module, const kn_model_tensors *t,
                  kn_comm *comm)
{
    kn_file_plan plan = { 0 };
    bool ok =
        w->format->plan(&plan, w, t) &&
        write_planned(&plan, kn_path_of(dir, w->format->file, "").text, module, t, w->ema, comm);
    kn_host_free(plan.header);
    kn_host_free(plan.tensor);
    kn_host_free(plan.order);
    return ok;
}
