/* models/text_files.c: token files: Knap's, llm.c's, and those without a header. */
#include "kernels/error_internal.h"
#include "models/text_internal.h"
#include "tensor/files.h"

#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token files are mapped as they are");

static const char MAGIC[8] = "KNTOKENS";
typedef struct header {
    char magic[8];
    uint32_t version, width;
    uint64_t count, vocab;
    char zeros[32];
} header;

/* llm.c's: 256 numbers, of which these are the first ones, and the third is the count. */
enum { LLMC_BYTES = 1024 };
static const struct {
    int32_t magic, version;
    int width;
    int64_t vocab;
} llmc[] = { { 20240520, 1, 2, 50257 }, { 20240801, 7, 4, 128256 } };

/* Which of them a file begins as; -1: none. */
static int llmc_of(const kn_mapped *map)
{
    int32_t magic;
    if (map->size < LLMC_BYTES)
        return -1;
    memcpy(&magic, map->data, sizeof magic);
    return magic == llmc[0].magic ? 0 : magic == llmc[1].magic ? 1 : -1;
}

static bool read_llmc(kn_text_part *t, int64_t *of, const char *path, int which)
{
    int32_t h[3];
    memcpy(h, t->map.data, sizeof h);
    t->width = llmc[which].width;
    *of = llmc[which].vocab;
    t->count = h[2];
    t->tokens = t->map.data + LLMC_BYTES;
    if (h[1] != llmc[which].version)
        return kn_fail("%s: llm.c's token file of version %d; this program reads version %d", path,
                       h[1], llmc[which].version);
    return (h[2] > 0 && (uint64_t)h[2] * (uint64_t)t->width == t->map.size - LLMC_BYTES) ||
           kn_fail("%s: its header says %d tokens of %d bytes, but %zu bytes follow; it was cut "
                   "short or is damaged",
                   path, h[2], t->width, t->map.size - LLMC_BYTES);
}

/* Of GPT-2's tokens documents begin with <|endoftext|>, of Llama 3's with <|begin_of_text|>. */
int64_t kn_text_llmc_begin(const kn_text *t)
{
    const int which = t->parts > 0 ? llmc_of(&t->part[0].map) : -1;
    return which == 0 ? 50256 : which == 1 ? 128000 : -1;
}

bool kn_text_has_header(const kn_mapped *map)
{
    return llmc_of(map) >= 0 ||
           (map->size >= sizeof MAGIC && memcmp(map->data, MAGIC, sizeof MAGIC) == 0);
}

bool kn_text_is_tokens(const char *path)
{
    kn_mapped map;
    if (!kn_given_path(path, "kn_text_is_tokens", "the path") ||
        !kn_file_map(path, "token file", &map))
        return false;
    const bool is = kn_text_has_header(&map);
    kn_file_unmap(&map);
    return is;
}

bool kn_text_is_plain(const char *path)
{
    kn_mapped map;
    if (!kn_given_path(path, "kn_text_is_plain", "the path"))
        return false;
    if (!kn_ends_in(path, ".bin") || !kn_file_map(path, "token file", &map))
        return false;
    const bool plain = !kn_text_has_header(&map);
    kn_file_unmap(&map);
    return plain;
}

/* A text of one file, or NULL with the error that stands; p is freed then. */
static kn_text *whole(kn_text_part p, int64_t vocab, const char *path)
{
    kn_text *t = kn_ok() && (p.path = kn_host_strdup(path)) ? kn_text_new(vocab) : NULL;
    if (t && kn_text_add(t, p))
        return t;
    if (!t)
        kn_text_part_free(&p);
    kn_text_free(t);
    return NULL;
}

kn_text *kn_text_map_plain(const char *path, int64_t vocab)
{
    if (!kn_given_path(path, "kn_text_map_plain", "the path"))
        return NULL;
    if (vocab < 1 || vocab > 65536)
        return kn_fail_null(
            "kn_text_map_plain: a vocabulary of %lld; 1 to 65536 ids have two bytes",
            (long long)vocab);
    kn_text_part p = { 0 };
    if (!kn_file_map(path, "token file", &p.map))
        return NULL;
    p.width = 2;
    p.count = (int64_t)p.map.size / 2;
    p.tokens = p.map.data;
    if (p.map.size % 2 != 0)
        kn_fail("%s has %zu bytes, which is no number of tokens of two bytes", path, p.map.size);
    return whole(p, vocab, path);
}

/* Reads the header of a mapped token file into t and *of; checks every field. */
static bool read_header(kn_text_part *t, int64_t *of, const char *path)
{
    static const header none;
    header h;
    const int which = llmc_of(&t->map);
    if (which >= 0)
        return read_llmc(t, of, path, which);
    if (t->map.size < sizeof h || memcmp(t->map.data, MAGIC, sizeof MAGIC) != 0)
        return kn_fail("%s is no token file: it does not begin with KNTOKENS and a header of %zu "
                       "bytes",
                       path, sizeof h);
    memcpy(&h, t->map.data, sizeof h);
    if (h.version != 1)
        return kn_fail("%s: token file version %u; this program reads version 1", path, h.version);
    if (h.width != 2 && h.width != 4)
        return kn_fail("%s: %u bytes a token; 2 and 4 are supported", path, h.width);
    if (memcmp(h.zeros, none.zeros, sizeof h.zeros) != 0)
        return kn_fail("%s: its header has bytes behind its numbers that aren't 0", path);
    if (h.vocab == 0 || h.vocab > (h.width == 2 ? 1ull << 16 : 1ull << 31))
        return kn_fail("%s: a vocabulary of %llu does not go with %u bytes a token", path,
                       (unsigned long long)h.vocab, h.width);
    const uint64_t room = t->map.size - sizeof h;
    if (h.count > room / h.width || h.count * h.width != room)
        return kn_fail("%s: its header says %llu tokens of %u bytes, but %llu bytes follow; it was "
                       "cut short or is damaged",
                       path, (unsigned long long)h.count, h.width, (unsigned long long)room);
    if (h.count == 0)
        return kn_fail("%s holds no tokens", path);
    t->width = (int)h.width;
    t->count = (int64_t)h.count;
    *of = (int64_t)h.vocab;
    t->tokens = t->map.data + sizeof h;
    return true;
}

kn_text *kn_text_map(const char *path)
{
    kn_text_part p = { 0 };
    int64_t vocab = 0;
    if (!kn_given_path(path, "kn_text_map", "the path") || !kn_file_map(path, "token file", &p.map))
        return NULL;
    read_header(&p, &vocab, path);
    return whole(p, vocab, path);
}

bool kn_text_save(const kn_text *t, const char *path)
{
    if (!kn_given(t, "kn_text_save", "the text") ||
        !kn_given_path(path, "kn_text_save", "the path"))
        return false;
    if (t->parts != 1)
        return kn_fail("kn_text_save: a text of %lld files; one is written", (long long)t->parts);
    const kn_text_part *p = &t->part[0];
    header h = { .version = 1,
                 .width = (uint32_t)p->width,
                 .count = (uint64_t)p->count,
                 .vocab = (uint64_t)t->vocab };
    memcpy(h.magic, MAGIC, sizeof MAGIC);
    return kn_file_write(path, (const void *const[]){ &h, p->tokens },
                         (const size_t[]){ sizeof h, (size_t)(p->count * p->width) }, 2);
}
