/* models/tokens/words_parts.c: a walk over the words of a long text on several threads. Each begins
 * where it likes and cuts its part; then, part by part, the one before goes on past its end until
 * it meets the beginning of a word of the next, whose words before that are taken back. */
#include "kernels/error_internal.h"
#include "kernels/kernels.h"
#include "kernels/team.h"
#include "models/tokens/tokens.h"

#include <pthread.h>
#include <string.h>

#define MARKS      64          /* beginnings of words that a part remembers: two parts soon agree */
#define PART_LEAST (256 << 10) /* bytes */

typedef struct part {
    size_t begin, end; /* of its words */
    size_t mark[MARKS];
    int marks;
    bool ok;
} part;

typedef struct job {
    const kn_tokenizer *t;
    const char *text;
    size_t size;
    bool early, late;
    kn_visit_fn visit;
    void *arg;
    int parts;
    part part[KN_WORD_PARTS];
} job;

/* ---- progress -------------------------------------------------------------------------------- */

static void (*_Atomic teller)(int64_t bytes, void *arg);
static void *teller_arg;
static pthread_mutex_t telling = PTHREAD_MUTEX_INITIALIZER;

void kn_words_tell(void (*told)(int64_t bytes, void *arg), void *arg)
{
    teller_arg = arg;
    teller = told;
}

/* Says that the words up to at are done, if they are many; *from: up to where it was said. */
static void tell(size_t *from, size_t at, bool last)
{
    if (!teller || (at - *from < (1 << 20) && !last))
        return;
    pthread_mutex_lock(&telling);
    teller((int64_t)(at - *from), teller_arg);
    pthread_mutex_unlock(&telling);
    *from = at;
}

/* ---- parts ----------------------------------------------------------------------------------- */

/* Visits the words from *at to until, or to the first that begins behind it; with stop, to the
 * first beginning that stop remembers. *at: where that is. */
static bool visit(const job *j, int number, size_t *at, size_t until, int times, part *marks,
                  const part *stop)
{
    kn_words w;
    kn_word word;
    size_t told = *at;
    bool ok = kn_words_begin(&w, j->t, j->text, j->size, *at), more = ok;
    w.early = j->early, w.late = j->late;
    while (more) {
        if (kn_words_between(&w)) {
            *at = w.at;
            if (marks)
                tell(&told, *at, false);
            bool met = false;
            for (int i = 0; stop && i < stop->marks; i++)
                met = met || stop->mark[i] == w.at;
            if (w.at >= until || met)
                break;
            if (marks && marks->marks < MARKS)
                marks->mark[marks->marks++] = w.at;
        }
        more = kn_words_next(&w, &word);
        ok = more ? (more = j->visit(j->arg, number, &word, times)) : kn_ok() && w.at >= w.size;
        if (ok && !more)
            *at = w.size;
    }
    if (marks)
        tell(&told, *at, true);
    kn_words_end(&w);
    return ok;
}

static void visit_part(const void *ctx, int64_t i)
{
    job *j = *(job *const *)ctx;
    part *p = &j->part[i];
    size_t until = i + 1 < j->parts ? j->part[i + 1].begin : j->size;
    p->end = p->begin;
    p->ok = visit(j, (int)i, &p->end, until, 1, p, NULL);
}

/* Lets the parts agree. */
static bool join(job *j)
{
    for (int i = 0; i + 1 < j->parts; i++) {
        part *now = &j->part[i], *next = now + 1;
        size_t at = now->end, from = next->begin;
        /* up to a common beginning, or, where there is none, over the whole of the next part */
        if (!visit(j, i, &at, next->end, 1, NULL, next))
            return false;
        size_t met = at < next->end ? at : next->end;
        if (!visit(j, i + 1, &from, met, -1, NULL, NULL))
            return false;
        if (at > next->end) /* it swallowed the next: what follows goes on from there */
            next->end = at;
    }
    return true;
}

bool kn_words_each(const kn_tokenizer *t, const char *text, size_t size, bool early, bool late,
                   kn_visit_fn visitor, void *arg)
{
    job j = { .t = t,
              .text = text,
              .size = size,
              .early = early,
              .late = late,
              .visit = visitor,
              .arg = arg,
              .parts = 1 };
    size_t parts = size / PART_LEAST, most = kn_threads() > 1 ? 4 * (size_t)kn_threads() : 1;
    parts = parts < most ? parts : most;
    parts = parts < KN_WORD_PARTS ? parts : KN_WORD_PARTS;
    if (parts > 1 && (t->cuts == 0 || (t->cut[0].kind == KN_CUT_ISOLATED && !t->cut[0].looks_back)))
        j.parts = (int)parts;
    for (int i = 1; i < j.parts; i++) {
        size_t at = size / (size_t)j.parts * (size_t)i;
        const char *line = memchr(text + at, '\n', 4096);
        at = line ? (size_t)(line - text) + 1 : at;
        while (at < size && ((unsigned char)text[at] & 0xc0) == 0x80)
            at++;
        j.part[i].begin = at;
    }
    job *all = &j;
    if (j.parts > 1)
        kn_each_part(j.parts, visit_part, &all);
    else
        visit_part(&all, 0);
    for (int i = 0; i < j.parts; i++)
        if (!j.part[i].ok)
            return false;
    return join(&j);
}
