/* models/conversations.c: texts of conversations, whose answers alone count, and the rows that they
 * are laid out in. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/text_internal.h"
#include "models/tokens/tokens.h"

#include <string.h>

/* ---- reading --------------------------------------------------------------------------------- */

void kn_conversations_free(kn_conversations *c)
{
    if (!c)
        return;
    kn_host_free(c->start);
    kn_host_free(c->answer);
    kn_host_free(c->kept);
    kn_host_free(c->row);
    kn_host_free(c->counted);
    kn_host_free(c);
}

typedef struct reading {
    const kn_chat *chat;
    const kn_tokenizer *t;
    kn_conversations *to;
    kn_chat_ids ids;
} reading;

/* Behind those that are there. */
static bool add_start(kn_conversations *c, int64_t at)
{
    if (!kn_host_grow(&c->start, &c->room, c->count + 2, sizeof *c->start))
        return false;
    if (c->count == 0)
        c->start[0] = 0;
    c->start[++c->count] = at;
    return true;
}

static bool read_line(json_t *object, const char *where, void *arg)
{
    reading *r = arg;
    const int64_t answers = r->ids.answers, count = r->ids.count;
    if (!kn_chat_encode(r->chat, r->t, object, where, &r->ids))
        return false;
    if (r->ids.answers > answers)
        return add_start(r->to, r->ids.count);
    r->ids.count = count; /* nothing to learn */
    r->to->left_out++;
    return true;
}

kn_text *kn_conversations_read(const char *path, const kn_mapped *map, const kn_tokenizer *t,
                               const kn_chat *chat)
{
    reading r = { .chat = chat, .t = t, .to = kn_host_calloc(1, sizeof *r.to) };
    const int64_t vocab = kn_tokenizer_vocab(t);
    kn_text *text = NULL;
    bool ok = r.to && kn_json_lines(path, map, read_line, &r);
    if (ok && r.to->count == 0)
        ok = kn_fail("%s holds no conversation with an answer", path);
    const size_t width = vocab <= 65536 ? 2 : 4; /* little-endian: the low bytes are the id */
    for (int64_t i = 0; ok && i < r.ids.count; i++)
        memmove((char *)r.ids.id + (size_t)i * width, &r.ids.id[i], width);
    if (ok && (text = kn_text_of_ids(r.ids.id, r.ids.count, vocab))) {
        text->talk = r.to;
        r.to->answer = r.ids.answer;
        r.ids.answer = NULL;
        r.to->train = r.to->count / 10 * 9 + r.to->count % 10 * 9 / 10;
        r.to = NULL;
    }
    kn_chat_ids_free(&r.ids);
    kn_conversations_free(r.to);
    return text;
}

bool kn_conversations_append(kn_text *a, const kn_text *b)
{
    kn_conversations *to = a->talk;
    const kn_conversations *from = b->talk;
    unsigned char *answer =
        to && from ? kn_host_realloc(to->answer, (size_t)(a->count + b->count)) : NULL;
    if (!to != !from)
        return kn_fail("one of two texts holds conversations, and the other none");
    if (!to || !answer)
        return !to;
    to->answer = answer;
    memcpy(answer + a->count, from->answer, (size_t)b->count);
    for (int64_t i = 0; i < from->count; i++)
        if (!add_start(to, a->count + from->start[i + 1]))
            return false;
    to->left_out += from->left_out;
    to->train = to->count / 10 * 9 + to->count % 10 * 9 / 10;
    return true;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* Positions in a row of conversation i: a token and the one to predict. */
static int64_t length_of(const kn_conversations *c, int64_t i)
{
    const int64_t n = c->start[i + 1] - c->start[i] - 1;
    return n < c->ctx ? n : c->ctx;
}

/* How many targets of conversation i count in a row. */
static int64_t counted_in(const kn_conversations *c, int64_t i)
{
    int64_t n = 0;
    for (int64_t k = 1; k <= length_of(c, i); k++)
        n += c->answer[c->start[i] + k];
    return n;
}

/* Lays conversation i into the last row, or a new one where it has no room or must not share. */
static void lay(kn_conversations *c, int64_t i, int64_t counted, bool fresh, int64_t *used)
{
    const int64_t n = length_of(c, i);
    if (fresh || !c->several || *used + n > c->ctx) {
        c->row[c->rows] = c->laid;
        c->counted[c->rows++] = 0;
        *used = 0;
    }
    c->kept[c->laid++] = i;
    c->row[c->rows] = c->laid;
    c->counted[c->rows - 1] += counted;
    *used += n;
}

bool kn_text_pack(kn_text *t, int64_t ctx, bool several)
{
    int64_t used = 0;
    if (!kn_given(t, "kn_text_pack", "the text"))
        return false;
    kn_conversations *c = t->talk;
    if (!c)
        return kn_fail("kn_text_pack: the text holds no conversations");
    if (ctx < 1 || ctx > 1 << 24)
        return kn_fail("kn_text_pack: a context of %lld tokens; it must be 1 to %d", (long long)ctx,
                       1 << 24);
    const size_t room = (size_t)c->count + 1;
    if (!c->kept && (!(c->kept = kn_host_alloc(room * sizeof *c->kept)) ||
                     !(c->row = kn_host_alloc(room * sizeof *c->row)) ||
                     !(c->counted = kn_host_alloc(room * sizeof *c->counted))))
        return false;
    c->ctx = ctx, c->several = several;
    c->rows = c->laid = c->cut = c->lost = 0;
    for (int64_t i = 0, first = 0; i <= c->count; i++) {
        if (i == c->train)
            first = c->train_rows = c->rows;
        if (i == c->count)
            break;
        const int64_t counted = counted_in(c, i);
        c->cut += c->start[i + 1] - c->start[i] - 1 > ctx;
        c->lost += counted == 0;
        if (counted > 0)
            lay(c, i, counted, c->rows == first, &used);
    }
    return true;
}

static int64_t rows_of(const kn_conversations *c, kn_text_split split)
{
    return split == KN_TRAIN ? c->train_rows : c->rows - c->train_rows;
}

bool kn_conversations_check(const kn_text *t, kn_text_split split, int64_t ctx)
{
    const kn_conversations *c = t->talk;
    if (c->ctx != ctx)
        return kn_fail("the conversations are laid out in rows of %lld tokens, not %lld "
                       "(kn_text_pack)",
                       (long long)c->ctx, (long long)ctx);
    if (rows_of(c, split) == 0 && split == KN_TRAIN && c->rows > 0 && !t->given)
        return kn_fail(
            "of %lld conversations the %lld that fit are kept for validation; give more, or "
            "data of its own to validate with",
            (long long)c->count, (long long)c->rows);
    return rows_of(c, split) > 0 ||
           kn_fail("of %lld conversations none with an answer in its first %lld tokens is for %s; "
                   "give more, or a longer context%s",
                   (long long)c->count, (long long)ctx + 1,
                   split == KN_TRAIN ? "training" : "validation",
                   split == KN_TRAIN || t->given ? "" : ", or data of its own to validate with");
}

/* The row that stands at place i of the line: all rows, shuffled anew each time; those for
 * validation in their order. */
static int64_t row_at(const kn_conversations *c, kn_text_split split, uint64_t seed, int64_t i)
{
    const int64_t n = rows_of(c, split);
    return split == KN_TRAIN ? kn_shuffle(seed, i / n, n, i % n) : c->train_rows + i % n;
}

int64_t kn_conversations_counted(const kn_text *t, kn_text_split split, uint64_t seed, int64_t i)
{
    return t->talk->counted[row_at(t->talk, split, seed, i)];
}

void kn_conversations_row(const kn_text *t, kn_text_split split, uint64_t seed, int64_t i,
                          int64_t *x, int64_t *y, int64_t *begin)
{
    enum { IGNORED = -100 };
    const kn_conversations *c = t->talk;
    const int64_t row = row_at(c, split, seed, i);
    int64_t at = 0;
    for (int64_t k = c->row[row]; k < c->row[row + 1]; k++) {
        const int64_t from = c->start[c->kept[k]], n = length_of(c, c->kept[k]), first = at;
        for (int64_t j = 0; j < n; j++, at++) {
            x[at] = kn_text_token(t, from + j);
            y[at] = c->answer[from + j + 1] ? kn_text_token(t, from + j + 1) : IGNORED;
            if (begin)
                begin[at] = first;
        }
    }
    for (const int64_t first = at; at < c->ctx; at++) { /* nothing sees it */
        x[at] = 0;
        y[at] = IGNORED;
        if (begin)
            begin[at] = first;
    }
}
