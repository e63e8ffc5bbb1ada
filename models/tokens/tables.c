/* models/tokens/tables.c: hash tables of strings and of pairs of ids, a heap, and GPT-2's alphabet
 * of bytes. The seed of a hash is an address, which a file's author doesn't know. */
#include "kernels/memory_internal.h"
#include "models/tokens/tokens.h"
#include "tensor/checksum.h"

#include <string.h>

/* ---- strings --------------------------------------------------------------------------------- */

/* The slot of text, or the free one where it belongs. */
static uint32_t *slot_of(const kn_strings *s, const char *text, size_t length)
{
    for (uint64_t i = kn_checksum_seeded(text, length, s->seed);; i++) {
        uint32_t *slot = &s->slot[i & (s->slots - 1)];
        const struct kn_string *there = *slot ? &s->list[*slot - 1] : NULL;
        if (!there || (there->length == length && memcmp(s->bytes + there->at, text, length) == 0))
            return slot;
    }
}

int64_t kn_strings_find(const kn_strings *s, const char *text, size_t length)
{
    return s->count > 0 ? (int64_t)*slot_of(s, text, length) - 1 : -1;
}

/* Twice as many slots, or the first ones. */
static bool more_slots(kn_strings *s)
{
    const uint64_t slots = s->slots ? 2 * s->slots : 64;
    uint32_t *slot = kn_host_calloc(slots, sizeof *slot);
    if (!slot)
        return false;
    kn_host_free(s->slot);
    s->slot = slot, s->slots = slots, s->seed = (uint64_t)(uintptr_t)slot;
    for (int64_t i = 0; i < s->count; i++)
        *slot_of(s, kn_strings_text(s, i), s->list[i].length) = (uint32_t)i + 1;
    return true;
}

struct kn_string *kn_strings_add(kn_strings *s, const char *text, size_t length)
{
    uint32_t *slot = s->slots ? slot_of(s, text, length) : NULL;
    if (slot && *slot)
        return &s->list[*slot - 1];
    const int64_t end = s->bytes_used + (int64_t)length + 1;
    if ((2 * ((uint64_t)s->count + 1) > s->slots && !more_slots(s)) ||
        !kn_host_grow(&s->list, &s->room, s->count + 1, sizeof *s->list) ||
        !kn_host_grow(&s->bytes, &s->bytes_room, end, 1))
        return NULL;
    memcpy(s->bytes + s->bytes_used, text, length);
    s->bytes[end - 1] = 0;
    s->list[s->count] = (struct kn_string){ (size_t)s->bytes_used, length, -1 };
    *slot_of(s, text, length) = (uint32_t)++s->count;
    s->bytes_used = end;
    return &s->list[s->count - 1];
}

void kn_strings_free(kn_strings *s)
{
    kn_host_free(s->bytes);
    kn_host_free(s->list);
    kn_host_free(s->slot);
    *s = (kn_strings){ 0 };
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static struct kn_pair *pair_of(const kn_pairs *p, uint64_t key)
{
    for (uint64_t i = kn_hash64(key, p->seed);; i++) {
        struct kn_pair *s = &p->slot[i & (p->slots - 1)];
        if (s->key == key || s->key == UINT64_MAX)
            return s;
    }
}

uint64_t *kn_pairs_at(kn_pairs *p, uint64_t key)
{
    if (2 * (p->count + 1) > p->slots) {
        kn_pairs more = { .slots = p->slots ? 2 * p->slots : 64, .count = p->count };
        if (!(more.slot = kn_host_alloc(more.slots * sizeof *more.slot)))
            return NULL;
        memset(more.slot, 0xff, more.slots * sizeof *more.slot);
        more.seed = (uint64_t)(uintptr_t)more.slot;
        for (uint64_t i = 0; i < p->slots; i++)
            if (p->slot[i].key != UINT64_MAX)
                *pair_of(&more, p->slot[i].key) = p->slot[i];
        kn_host_free(p->slot);
        *p = more;
    }
    struct kn_pair *s = pair_of(p, key);
    p->count += s->key != key;
    s->key = key;
    return &s->value;
}

void kn_pairs_free(kn_pairs *p)
{
    kn_host_free(p->slot);
    *p = (kn_pairs){ 0 };
}

/* ---- lines, bytes and a heap ----------------------------------------------------------------- */

bool kn_next_line(const char *text, size_t size, size_t *at, const char **line, size_t *length)
{
    if (*at >= size)
        return false;
    const char *begin = text + *at, *end = memchr(begin, '\n', size - *at);
    *line = begin;
    *length = end ? (size_t)(end - begin) : size - *at;
    *at += *length + (end != NULL);
    if (*length > 0 && begin[*length - 1] == '\r')
        --*length;
    return true;
}

bool kn_bytes_append(kn_bytes *to, const char *from, size_t size)
{
    if (!kn_host_grow(&to->at, &to->room, to->size + (int64_t)size + 1, 1))
        return false;
    memcpy(to->at + to->size, from, size);
    to->size += (int64_t)size;
    to->at[to->size] = 0;
    return true;
}

static bool before(const struct kn_waiting *a, const struct kn_waiting *b)
{
    return a->key != b->key ? a->key < b->key : a->place < b->place;
}

bool kn_heap_push(kn_heap *h, struct kn_waiting new)
{
    if (!kn_host_grow(&h->list, &h->room, h->count + 1, sizeof *h->list))
        return false;
    int64_t i = h->count++;
    for (; i > 0 && before(&new, &h->list[(i - 1) / 2]); i = (i - 1) / 2)
        h->list[i] = h->list[(i - 1) / 2];
    h->list[i] = new;
    return true;
}

struct kn_waiting kn_heap_pop(kn_heap *h)
{
    const struct kn_waiting top = h->list[0], last = h->list[--h->count];
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < h->count; i = child) {
        child += child + 1 < h->count && before(&h->list[child + 1], &h->list[child]);
        if (!before(&h->list[child], &last))
            break;
        h->list[i] = h->list[child];
    }
    h->list[i] = last;
    return top;
}

/* ---- letters --------------------------------------------------------------------------------- */

/* Bytes that print, as characters of Latin-1, stand for themselves. */
static bool prints(int byte)
{
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xff && byte != 0xad);
}

/* The others, 0 to 0x20, 0x7f to 0xa0 and 0xad, are numbered from U+0100 on: a space is U+0120. */
uint32_t kn_byte_letter(unsigned char byte)
{
    if (prints(byte))
        return byte;
    return byte <= 0x20 ? 0x100u + byte : byte <= 0xa0 ? 0x121u + byte - 0x7f : 0x143u;
}

int kn_letter_byte(uint32_t letter)
{
    if (letter <= 0xff)
        return prints((int)letter) ? (int)letter : -1;
    if (letter <= 0x120)
        return (int)letter - 0x100;
    return letter <= 0x142 ? (int)letter - 0x121 + 0x7f : letter == 0x143 ? 0xad : -1;
}

char *kn_spell_bytes(const char *bytes, size_t size)
{
    char *text = kn_host_alloc(2 * size + 1), *to = text; /* no letter takes more than two bytes */
    for (size_t i = 0; text && i < size; i++)
        to += kn_utf8_write(kn_byte_letter((unsigned char)bytes[i]), to);
    if (text)
        *to = 0;
    return text;
}

/* ---- UTF-8 ----------------------------------------------------------------------------------- */

size_t kn_utf8_read(const char *s, size_t len, uint32_t *code)
{
    const unsigned char *b = (const unsigned char *)s;
    static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
    size_t n = b[0] < 0x80             ? 1
               : (b[0] & 0xe0) == 0xc0 ? 2
               : (b[0] & 0xf0) == 0xe0 ? 3
               : (b[0] & 0xf8) == 0xf0 ? 4
                                       : 0;
    if (n == 0 || n > len)
        return 0;
    uint32_t c = n == 1 ? b[0] : b[0] & (0xffu >> (n + 1));
    for (size_t i = 1; i < n; i++) {
        if ((b[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (b[i] & 0x3f);
    }
    if (c < least[n] || c >= 0x110000 || (c >= 0xd800 && c < 0xe000))
        return 0;
    *code = c;
    return n;
}

bool kn_is_utf8(const char *s, size_t len)
{
    uint32_t code;
    size_t n = 1;
    for (; len > 0 && n > 0; len -= n, s += n)
        n = kn_utf8_read(s, len, &code);
    return n > 0;
}

size_t kn_utf8_write(uint32_t c, char out[4])
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i > 0; i--, c >>= 6)
        out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)((0xf00u >> n & 0xff) | c);
    return n;
}
