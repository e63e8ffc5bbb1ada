/* autograd/seen.c: what a forward that recomputes reads and writes, and whether its replay does the
 * same (record.h). */
#include "autograd/record_internal.h"
#include "kernels/memory_internal.h"
#include <string.h>

/* The input to whose bytes t belongs, or -1. Parts of a storage are apart. */
static int input_of(const kn_record *r, const kn_tensor *t)
{
    for (int i = 0; i < r->inputs; i++)
        if (r->from[i] == t->storage && (t->storage->parts == 0 || r->offset[i] == t->offset))
            return i;
    return -1;
}

/* The bytes of s were there before r began to run. */
static bool from_outside(const kn_record *r, const kn_storage *s)
{
    return s->born <= r->begin;
}

/* A replay reads what the forward itself, or the replay around it, made and kept: a table that is
 * made in the first call. */
static bool made_inside(const kn_record *r, uint64_t born)
{
    const kn_record *a = r->around;
    return (born > r->first && born <= r->last) || (a && born > a->begin && born <= a->end);
}

static bool remember(kn_record *r, seen what)
{
    if (!kn_host_grow(&r->seen, &r->seen_room, r->seens + 1, sizeof *r->seen))
        return false;
    r->seen[r->seens++] = what;
    return true;
}

/* The entry like what, the next one first; of another version if there is no better one, else
 * NULL. */
static const seen *look_up(kn_record *r, seen what)
{
    const seen *other = NULL;
    for (int64_t k = 0; k < r->seens; k++) {
        const int64_t i = (r->at + k) % r->seens;
        if (r->seen[i].id != what.id)
            continue;
        if (r->seen[i].version == what.version) {
            r->at = i + 1;
            return &r->seen[i];
        }
        other = other ? other : &r->seen[i];
    }
    return other;
}

static const char *name_of(const kn_tensor *t, char *text, size_t size)
{
    if (t->name && *t->name)
        snprintf(text, size, "'%s'", t->name);
    else
        snprintf(text, size, "a tensor, %s,", KN_SHOWN(t));
    return text;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool found(const kn_record *r, const kn_tensor *t, const seen *had, seen now)
{
    char text[160];
    if (!had)
        return kn_fail(AGAIN "it reads %s which forward didn't read; forward must do the same when "
                             "it runs again (kn_recomputing)",
                       kn_record_call(r), name_of(t, text, sizeof text));
    return had->version == now.version ||
           kn_fail(AGAIN "%s was written in place after forward used it (version %u, then %u); run "
                         "the forward again",
                   kn_record_call(r), name_of(t, text, sizeof text), had->version, now.version);
}

/* r sees t; *wants as the forward found it. */
static bool read_in(kn_record *r, const kn_tensor *t, bool *wants)
{
    const int input = input_of(r, t);
    if (r->state == RESTS || (input < 0 && !from_outside(r, t->storage)))
        return true;
    seen now = { .version = kn_version_of(t) - (input < 0 ? 0 : r->version[input]),
                 .wants = t->requires_grad };
    now.id = input < 0 ? kn_hash64(t->storage->born, (uint64_t)t->offset)
                       : kn_hash64(~(uint64_t)input, 0);
    if (r->state == FORWARD)
        return remember(r, now);
    const seen *had = look_up(r, now);
    if (!had && made_inside(r, t->storage->born))
        return true;
    if (had && !t->node && input < 0)
        *wants = had->wants;
    return found(r, t, had, now);
}

bool kn_record_read(const kn_tensor *t)
{
    if (!t)
        return false;
    bool wants = t->requires_grad;
    if (t->leaf)
        kn_record_group(t->leaf->group);
    for (kn_record *r = kn_record_running(); r && kn_ok(); r = kn_record_around(r))
        read_in(r, t, &wants);
    return wants;
}

bool kn_record_use(uint64_t id, uint32_t what, const char *name)
{
    const seen now = { kn_hash64(id, 0x6d6f64u), what, false };
    for (kn_record *r = kn_record_running(); r && kn_ok(); r = kn_record_around(r)) {
        if (r->state == FORWARD)
            remember(r, now);
        if (r->state != REPLAYS)
            continue;
        const seen *had = look_up(r, now);
        if (!had || had->version != what)
            kn_fail(AGAIN "it calls '%s', %s; run the forward again", kn_record_call(r), name,
                    had ? "whose hooks or mode changed after forward"
                        : "which forward didn't call");
    }
    return kn_ok();
}

/* The group is used by the call and by those around it that recompute. */
void kn_record_group(kn_group *g)
{
    for (kn_record *r = g ? kn_record_running() : NULL; r; r = kn_record_around(r)) {
        kn_frame *f = r->frame;
        int64_t i = f->insides - 1;
        while (i >= 0 && f->inside[i] != g)
            i--;
        if (r->state != FORWARD || i >= 0)
            continue;
        if (!kn_host_grow(&f->inside, &f->inside_room, f->insides + 1, sizeof(kn_group *)))
            return;
        f->inside[f->insides++] = kn_group_ref(g);
    }
}

/* ---- writing --------------------------------------------------------------------------------- */

/* All bytes of s, as a tensor of the caller's. */
static kn_tensor *bytes_of(kn_storage *s)
{
    const int64_t n = (int64_t)s->bytes;
    return kn_tensor_on(s, 0, KN_U8, 1, &n, NULL, false);
}

static bool move_bytes(kn_tensor *to, kn_tensor *from)
{
    return kn_numel(to) == 0 || kn_device_of(to) == KN_META || kn_grad_copy(to, from);
}

static kn_tensor *copy_of_bytes(kn_storage *s)
{
    const int64_t n = (int64_t)s->bytes;
    kn_tensor *all = bytes_of(s), *copy = NULL;
    if (all)
        copy = kn_tensor_new(KN_U8, s->device, NULL, KN_MEM_ACTIVATION, 1, &n, NULL, false);
    if (copy && !move_bytes(copy, all)) {
        kn_tensor_free(copy);
        copy = NULL;
    }
    kn_tensor_free(all);
    return copy;
}

static bool refuse_write(const kn_record *r, const kn_tensor *t, const char *what, const char *why)
{
    char text[160];
    return kn_fail("%s: %s is written in place by a call of '%s' that recomputes, %s", what,
                   name_of(t, text, sizeof text), kn_record_call(r), why);
}

static bool write_in(kn_record *r, kn_tensor *t, const char *what)
{
    kn_storage *s = t->storage;
    const int input = input_of(r, t);
    if (r->state == RESTS || (input < 0 && !from_outside(r, s)))
        return true;
    for (int64_t i = 0; i < r->writes; i++)
        if (input < 0 ? r->write[i].storage == s : r->write[i].input == input)
            return true;
    if (r->state == REPLAYS)
        return made_inside(r, s->born) ||
               refuse_write(r, t, what, "but its forward didn't write it");
    if (strcmp(what, "kn_bump_version") == 0)
        return refuse_write(r, t, what, "which must know before: take kn_write_data to write");
    if (s->parts > 0)
        return refuse_write(r, t, what, "but is a parameter of a unit");
    if (!kn_host_grow(&r->write, &r->write_room, r->writes + 1, sizeof *r->write))
        return false;
    written w = { .input = input, .before = copy_of_bytes(s), .version = s->version };
    if (!w.before)
        return false;
    w.storage = input < 0 ? kn_storage_ref(s) : NULL;
    r->write[r->writes++] = w;
    return true;
}

bool kn_record_write(kn_tensor *t, const char *what)
{
    for (kn_record *r = kn_record_running(); r && kn_ok(); r = kn_record_around(r))
        write_in(r, t, what);
    return kn_ok();
}

static kn_storage *swap_bytes(const kn_record *r, written *w)
{
    kn_storage *s = w->input < 0 ? w->storage : r->from[w->input], *other = w->scratch->storage;
    void *data = s->data;
    s->data = other->data;
    other->data = data;
    return s;
}

/* The bytes that are there now step aside. */
bool kn_record_put_before(kn_record *r)
{
    for (int64_t i = 0; i < r->writes; i++) {
        written *w = &r->write[i];
        w->scratch = copy_of_bytes(w->before->storage);
        if (!w->scratch)
            return false;
        kn_storage *s = swap_bytes(r, w);
        w->version_now = s->version;
        s->version = w->input < 0 ? w->version : r->input[w->input].version;
    }
    return true;
}

void kn_record_put_back(kn_record *r)
{
    for (int64_t i = 0; i < r->writes; i++) {
        written *w = &r->write[i];
        if (w->scratch)
            swap_bytes(r, w)->version = w->version_now;
        kn_tensor_free(w->scratch);
        w->scratch = NULL;
    }
}
