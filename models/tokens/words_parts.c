/* models/tokens/words_parts.c: a walk over the words of a long text on several threads. A part is
 * from the first word that begins at its place or behind it to the first that does at the next
 * part's. Its thread begins some bytes before that, where perhaps no word begins: after a few words
 * it cuts as a walk over the whole text does. A part that began elsewhere than the one before ended
 * is walked over again. */
#include "kernels/error_internal.h"
#include "kernels/kernels.h"
#include "kernels/team.h"
#include "models/tokens/tokens.h"

#include <pthread.h>

enum { PART_LEAST = 256 << 10, BEFORE = 1024 }; /* bytes: of a part, and to cut as the others do */

typedef struct part {
    size_t place;
    size_t begin, end; /* of its words */
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

/* Walks from *at to the first word that begins at until or behind it, and visits the words before
 * that; *at: where it is. */
static bool walk(const job *j, int number, size_t *at, size_t until, bool visits)
{
    kn_words w;
    kn_word word;
    size_t told = *at;
    bool ok = kn_words_begin(&w, j->t, j->text, j->size, *at), more = ok;
    w.early = j->early, w.late = j->late;
    while (more) {
        if (kn_words_between(&w)) {
            *at = w.at;
            if (visits)
                tell(&told, *at, false);
            if (w.at >= until)
                break;
        }
        more = kn_words_next(&w, &word);
        if (!more)
            ok = kn_ok() && w.at >= w.size;
        else if (visits)
            ok = more = j->visit(j->arg, number, &word);
        if (ok && !more)
            *at = w.size;
    }
    if (visits)
        tell(&told, *at, true);
    kn_words_end(&w);
    return ok;
}

/* The place where the next part begins. */
static size_t place_behind(const job *j, int64_t i)
{
    return i + 1 < j->parts ? j->part[i + 1].place : j->size;
}

static void walk_part(const void *ctx, int64_t i)
{
    job *j = *(job *const *)ctx;
    part *p = &j->part[i];
    size_t at = p->place > BEFORE ? p->place - BEFORE : 0;
    while (at < j->size && ((unsigned char)j->text[at] & 0xc0) == 0x80)
        at++;
    p->ok = walk(j, (int)i, &at, p->place, false);
    p->begin = p->end = at;
    p->ok = p->ok && walk(j, (int)i, &p->end, place_behind(j, i), true);
}

/* Every part begins where the one before ends. */
static bool join(job *j)
{
    for (int i = 1; i < j->parts; i++) {
        part *p = &j->part[i];
        if (p->begin == p[-1].end)
            continue;
        p->begin = p->end = p[-1].end;
        if (!j->visit(j->arg, i, NULL) || !walk(j, i, &p->end, place_behind(j, i), true))
            return false;
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
    for (int i = 1; i < j.parts; i++)
        j.part[i].place = size / (size_t)j.parts * (size_t)i;
    job *all = &j;
    if (j.parts > 1)
        kn_each_part(j.parts, walk_part, &all);
    else
        walk_part(&all, 0);
    for (int i = 0; i < j.parts; i++)
        if (!j.part[i].ok)
            return false;
    return join(&j);
}
