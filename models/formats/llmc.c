/* models/formats/llmc.c: weights of GPT-2 as llm.c's programs write them:
 * 256 numbers of 32 bits, then the tensors of kn_gpt_family's table in its order, each row of it
 * for all blocks; products are [out, in], and the token embedding has rows of zeros at its end. */
#include "kernels/error_internal.h"
#include "models/formats/formats.h"
#include "models/gpt.h"
#include "tensor/files.h"
#include "tensor/safetensors_format.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

enum { MAGIC, VERSION, CTX, VOCAB, LAYERS, HEADS, EMBD, PADDED, NUMBERS = 256 };
enum { F32 = 3, BF16 = 5, HEADER = NUMBERS * 4, MULTIPLE = 128 };

/* One that has this mark in its last number is of Knap; llm.c has zeros there. */
static const char MARK[] = "Knap", BEGIN[] = "\xc6\xd7\x34\x01"; /* 20240326 */

/* ---- reading --------------------------------------------------------------------------------- */

static bool read_header(const char *path, int32_t h[NUMBERS], struct stat *st)
{
    const int fd = kn_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    const bool there = fd >= 0 && kn_file_facts(fd, st) == 0;
    const ssize_t n = there ? kn_read_at(fd, h, HEADER, 0) : -1;
    if (n < 0)
        kn_fail_system("%s: cannot read: %m", path);
    if (fd >= 0)
        close(fd);
    return n == HEADER ||
           (n >= 0 &&
            kn_fail("%s ends within its header of %d bytes; fetch it again", path, HEADER));
}

static bool read_config(const char *path, const int32_t h[NUMBERS], kn_gpt_config *c)
{
    if (h[VERSION] != F32 && h[VERSION] != BF16)
        return kn_fail("%s is of llm.c's version %d; 3 (f32) and 5 (bf16) are read: write it again "
                       "with a newer train_gpt2.py",
                       path, h[VERSION]);
    for (int i = CTX; i <= PADDED; i++)
        if (h[i] < 1)
            return kn_fail("%s: number %d of its header is %d, should be above 0; the file is "
                           "damaged",
                           path, i, h[i]);
    *c = (kn_gpt_config){
        .layers = h[LAYERS], .heads = h[HEADS], .embd = h[EMBD], .ctx = h[CTX], .vocab = h[VOCAB]
    };
    if (h[PADDED] < h[VOCAB])
        return kn_fail("%s: its vocabulary of %d has more than the %d rows of the token embedding; "
                       "the file is damaged",
                       path, h[VOCAB], h[PADDED]);
    return kn_family_check(&kn_gpt_family, c);
}

/* Where the tensors lie, by those of a model of one block; room for all is in list (NULL: count and
 * measure only). */
static bool place_tensors(const kn_model_tensors *one, const kn_gpt_config *c, kn_dtype dtype,
                          int64_t padded, kn_foreign_piece *list, int64_t *count, int64_t *end)
{
    const int64_t blocks = c->layers;
    char name[256];
    *count = 0;
    *end = HEADER;
    for (const kn_tensor_name *row = kn_gpt_family.tensors; row->name; row++) {
        const int64_t times = kn_tensor_name_at(name, row->name, 0) ? blocks : 1;
        const kn_safetensors_entry *e = one->entry;
        while (strcmp(e->name, name) != 0)
            e++;
        kn_foreign_piece f = { .piece = { .dtype = dtype, .ndim = e->ndim },
                               .form.transposed = row->form == KN_FORM_TRANSPOSED };
        int64_t shape[2] = { e->shape[0], e->shape[1] }, bytes, all;
        memcpy(f.piece.shape, shape, sizeof shape);
        if (row == kn_gpt_family.tensors)
            shape[0] = padded;
        if (!kn_safetensors_bytes(dtype, e->ndim, shape, &bytes) ||
            __builtin_mul_overflow(bytes, times, &all))
            return false;
        for (int64_t i = 0; list && i < times; i++) {
            kn_tensor_name_at(name, row->name, i);
            f.at = *end + i * bytes;
            f.piece.name = kn_host_strdup(name);
            list[(*count) + i] = f;
        }
        *count += times;
        if (__builtin_add_overflow(*end, all, end))
            return false;
    }
    return kn_ok();
}

static kn_pieces *open_tensors(const char *path, const kn_gpt_config *c, const int32_t h[NUMBERS],
                               const struct stat *st)
{
    const kn_dtype dtype = h[VERSION] == F32 ? KN_F32 : KN_BF16;
    kn_model_config block = kn_config_of(&kn_gpt_family, c);
    kn_model_tensors t = { 0 };
    kn_foreign_piece *list = NULL;
    kn_pieces *p = NULL;
    int64_t count, end;
    kn_config_set(&block, "layers", 1);
    if (!kn_model_tensors_of(&t, &block))
        goto done;
    if (!place_tensors(&t, c, dtype, h[PADDED], NULL, &count, &end) || end != st->st_size) {
        kn_fail("%s has %lld bytes, which aren't those of a GPT of %d layers, %lld channels and a "
                "vocabulary of %lld (%d rows); it was cut, or is damaged: fetch it again",
                path, (long long)st->st_size, c->layers, (long long)c->embd, (long long)c->vocab,
                h[PADDED]);
        goto done;
    }
    list = kn_host_calloc((size_t)count, sizeof *list);
    if (list && place_tensors(&t, c, dtype, h[PADDED], list, &count, &end))
        p = kn_pieces_of(path, st, list, (int)count);
    for (int64_t i = 0; list && i < count; i++)
        kn_host_free((void *)list[i].piece.name);
done:
    kn_host_free(list);
    kn_model_tensors_free(&t);
    return p;
}

static bool open_llmc(const char *path, kn_found *f)
{
    int32_t h[NUMBERS];
    struct stat st;
    kn_gpt_config c;
    if (!read_header(path, h, &st) || !read_config(path, h, &c))
        return false;
    f->config = kn_config_of(&kn_gpt_family, &c);
    return (f->tensors = open_tensors(path, &c, h, &st)) != NULL;
}

static kn_tokenizer *tokenizer(const char *path)
{
    return kn_fail_null("%s holds no tokenizer, as all of llm.c's files: name GPT-2's "
                        "(--tokenizer FOLDER with its tokenizer.json or vocab.json and "
                        "merges.txt), or use ids (--prompt-ids with --print-ids)",
                        path);
}

/* ---- writing --------------------------------------------------------------------------------- */

/* The number of a tensor of t; there is one. */
static int number_of(const kn_model_tensors *t, const char *name)
{
    int i = 0;
    while (strcmp(t->entry[i].name, name) != 0)
        i++;
    return i;
}

static bool plan(kn_file_plan *p, const kn_file_writer *w, const kn_model_tensors *t)
{
    const kn_model_config *config = w->config;
    if (!kn_family_makes(config->family, &kn_gpt_family))
        return kn_fail("llm.c's files hold GPT-2s, and the model is a %s; export it as hf or gguf",
                       config->family->noun);
    if (w->dtype && w->dtype != KN_F32 && w->dtype != KN_BF16)
        return kn_fail("llm.c's files are of f32 or bf16, not %s", kn_dtype_name(w->dtype));
    const kn_gpt_config *c = (const void *)config->of;
    const bool wide = w->dtype != KN_BF16;
    const int64_t padded = (c->vocab + MULTIPLE - 1) / MULTIPLE * MULTIPLE,
                  rest = (padded - c->vocab) * c->embd * (wide ? 4 : 2);
    const int32_t h[] = {
        [VERSION] = wide ? F32 : BF16, [CTX] = (int32_t)c->ctx, [VOCAB] = (int32_t)c->vocab,
        [LAYERS] = c->layers,          [HEADS] = c->heads,      [EMBD] = (int32_t)c->embd,
        [PADDED] = (int32_t)padded
    };
    int count = 0;
    char name[256];
    p->size = HEADER;
    p->header = kn_host_calloc(HEADER, 1);
    p->tensor = kn_host_calloc((size_t)t->count, sizeof *p->tensor);
    p->order = kn_host_calloc((size_t)t->count, sizeof *p->order);
    if (!p->header || !p->tensor || !p->order)
        return false;
    memcpy(p->header, h, sizeof h);
    memcpy(p->header, BEGIN, 4);
    memcpy(p->header + HEADER - 4, MARK, 4);
    for (const kn_tensor_name *row = kn_gpt_family.tensors; row->name; row++) {
        const int64_t times = strchr(row->name, '*') ? c->layers : 1;
        for (int64_t i = 0; i < times; i++) {
            kn_tensor_name_at(name, row->name, i);
            const int at = p->order[count++] = number_of(t, name);
            p->tensor[at].dtype = wide ? KN_F32 : KN_BF16;
            p->tensor[at].form.transposed = row->form == KN_FORM_TRANSPOSED;
            p->tensor[at].zeros = row == kn_gpt_family.tensors ? rest : 0;
        }
    }
    return true;
}

const kn_file_format kn_llmc_format = { .name = "llmc",
                                        .file = "model.bin",
                                        .magic = BEGIN,
                                        .mark = MARK,
                                        .mark_at = HEADER - 4,
                                        .open = open_llmc,
                                        .tokenizer = tokenizer,
                                        .plan = plan };
