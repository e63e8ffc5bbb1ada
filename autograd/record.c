/* autograd/record.c: what a call that recomputes keeps of its forward, and the replay (record.h). */
#include "autograd/record.h"
#include "autograd/engine.h"
#include "autograd/hooks.h"
#include "kernels/memory_internal.h"
#include <string.h>

/* A tensor from outside that the forward read, or a module that it called. */
typedef struct seen {
    uint64_t id;
    uint32_t version;
    bool wants;
} seen;

/* The bytes of a storage from outside before the forward wrote there. */
typedef struct written {
    int input;           /* that it belongs to, or -1 */
    kn_storage *storage; /* a reference, or, of an input, NULL */
    kn_tensor *before;   /* all of its bytes; owned */
    kn_tensor *scratch;  /* in a replay: the bytes that come back after it */
    uint32_t version, version_now;
} written;

typedef struct place {
    kn_saved *to;  /* NULL: nobody waits for it any more */
    uint64_t like; /* a hash of dtype and shape */
} place;

typedef enum state { FORWARD, REPLAYS, RESTS } state;

struct kn_record {
    int refs;
    state state;
    kn_frame *frame;   /* of the call; a reference */
    kn_record *around; /* of the call around it; a reference, or NULL */
    kn_record *outer;  /* while it runs: the one that ran before it began */
    kn_rerun how;
    kn_rng_key rng;
    uint64_t hooks; /* kn_record_hooks */
    int inputs;
    kn_saved input[KN_MAX_VALUES];
    bool wants[KN_MAX_VALUES];
    kn_storage *from[KN_MAX_VALUES];   /* while it runs: the inputs' storages; borrowed */
    int64_t offset[KN_MAX_VALUES];     /* their places there */
    uint32_t version[KN_MAX_VALUES];   /* and their versions as it began */
    uint64_t first, last, begin, end;  /* numbers of storages: of the forward, of the newest run */
    seen *seen;
    int64_t seens, seen_room, at; /* at: where the replay looks first */
    written *write;
    int64_t writes, write_room;
    place *place;
    int64_t places, place_room, saved; /* saved: by the replay so far */
};

/* ---- beginning, end -------------------------------------------------------------------------- */

kn_record *kn_record_ref(kn_record *r)
{
    r->refs++;
    return r;
}

void kn_record_unref(kn_record *r)
{
    if (!r || --r->refs > 0)
        return;
    if (r->frame && r->frame->record == r)
        r->frame->record = NULL;
    for (int i = 0; i < r->inputs; i++)
        kn_saved_drop(&r->input[i]);
    for (int64_t i = 0; i < r->writes; i++) {
        kn_storage_unref(r->write[i].storage);
        kn_tensor_free(r->write[i].before);
    }
    if (r->how.drop)
        r->how.drop(r->how.arg);
    kn_record_unref(r->around);
    kn_frame_unref(r->frame);
    kn_host_free(r->seen);
    kn_host_free(r->write);
    kn_host_free(r->place);
    kn_host_free(r);
}

/* r runs, with the inputs in. */
static void enter(kn_record *r, state s, kn_values in)
{
    kn_context *c = kn_context_get();
    r->state = s;
    r->outer = c->record;
    c->record = r;
    r->begin = kn_storages_made();
    r->at = r->saved = 0;
    for (int i = 0; i < in.n; i++) {
        r->from[i] = in.v[i] ? in.v[i]->storage : NULL;
        r->offset[i] = in.v[i] ? in.v[i]->offset : 0;
        r->version[i] = in.v[i] ? kn_version_of(in.v[i]) : 0;
    }
}

static void leave(kn_record *r)
{
    kn_context_get()->record = r->outer;
    r->outer = NULL;
    r->state = RESTS;
    r->end = kn_storages_made();
}

kn_record *kn_record_begin(kn_frame *f, kn_values in, kn_rerun how)
{
    kn_context *c = kn_context_get();
    kn_record *r = kn_host_calloc(1, sizeof *r);
    if (!r) {
        how.drop(how.arg);
        return NULL;
    }
    r->refs = 1;
    r->how = how;
    r->frame = f;
    f->refs++;
    f->record = r;
    f->recorded = true;
    r->around = c->record ? kn_record_ref(c->record) : NULL;
    r->rng = f->rng ? *f->rng : c->rng;
    r->hooks = kn_record_hooks() < UINT64_MAX ? kn_record_hooks() : kn_hook_next();
    r->inputs = in.n;
    bool ok = true;
    for (int i = 0; i < in.n && ok; i++) {
        ok = !in.v[i] || kn_save(&r->input[i], in.v[i]);
        r->wants[i] = in.v[i] && kn_record_read(in.v[i]);
    }
    if (!ok || !kn_ok()) {
        kn_record_unref(r);
        return NULL;
    }
    enter(r, FORWARD, in);
    r->first = r->begin;
    return r;
}

void kn_record_end(kn_record *r)
{
    leave(r);
    r->last = r->end;
    kn_record_unref(r);
}

/* ---- what runs ------------------------------------------------------------------------------- */

bool kn_recomputing(void)
{
    const kn_record *r = kn_context_get()->record;
    while (r && r->state != REPLAYS)
        r = r->outer;
    return r != NULL;
}

bool kn_record_replays(void)
{
    const kn_record *r = kn_context_get()->record;
    return r && r->state == REPLAYS;
}

uint64_t kn_record_hooks(void)
{
    const kn_record *r = kn_context_get()->record;
    while (r && r->state != REPLAYS)
        r = r->outer;
    return r ? r->hooks : UINT64_MAX;
}

static const char *call_of(const kn_record *r)
{
    return *r->frame->path ? r->frame->path : "the root";
}

#define AGAIN "backward of a call of '%s' that recomputes: "

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
    char shape[128];
    if (t->name && *t->name)
        snprintf(text, size, "'%s'", t->name);
    else
        snprintf(text, size, "a tensor, %s,", kn_describe(t, shape, sizeof shape));
    return text;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool found(const kn_record *r, const kn_tensor *t, const seen *had, seen now)
{
    char text[160];
    if (!had)
        return kn_fail(AGAIN "it reads %s which forward didn't read; forward must do the same when "
                             "it runs again (kn_recomputing)",
                       call_of(r), name_of(t, text, sizeof text));
    return had->version == now.version ||
           kn_fail(AGAIN "%s was written in place after forward used it (version %u, then %u); run "
                         "the forward again",
                   call_of(r), name_of(t, text, sizeof text), had->version, now.version);
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
    for (kn_record *r = kn_context_get()->record; r && kn_ok(); r = r->outer)
        read_in(r, t, &wants);
    return wants;
}

bool kn_record_use(uint64_t id, uint32_t what, const char *name)
{
    const seen now = { kn_hash64(id, 0x6d6f64u), what, false };
    for (kn_record *r = kn_context_get()->record; r && kn_ok(); r = r->outer) {
        if (r->state == FORWARD)
            remember(r, now);
        if (r->state != REPLAYS)
            continue;
        const seen *had = look_up(r, now);
        if (!had || had->version != what)
            kn_fail(AGAIN "it calls '%s', %s; run the forward again", call_of(r), name,
                    had ? "whose hooks or mode changed after forward"
                        : "which forward didn't call");
    }
    return kn_ok();
}

/* The group is used by the call and by those around it that recompute. */
void kn_record_group(kn_group *g)
{
    for (kn_record *r = g ? kn_context_get()->record : NULL; r; r = r->outer) {
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
                   name_of(t, text, sizeof text), call_of(r), why);
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
    for (kn_record *r = kn_context_get()->record; r && kn_ok(); r = r->outer)
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

/* What the forward wrote becomes as it was before it: the bytes that are there now step aside. */
static bool put_before(kn_record *r)
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

static void put_back(kn_record *r)
{
    for (int64_t i = 0; i < r->writes; i++) {
        written *w = &r->write[i];
        if (w->scratch)
            swap_bytes(r, w)->version = w->version_now;
        kn_tensor_free(w->scratch);
        w->scratch = NULL;
    }
}

/* ---- saving ---------------------------------------------------------------------------------- */

static uint64_t like(const kn_tensor *t)
{
    uint64_t h = kn_hash64((uint64_t)t->dtype, (uint64_t)t->ndim);
    for (int i = 0; i < t->ndim; i++)
        h = kn_hash64(h, (uint64_t)t->shape[i]);
    return h;
}

static bool bare(kn_saved *s, const kn_tensor *t)
{
    s->tensor = kn_tensor_on(t->storage, t->offset, t->dtype, t->ndim, t->shape, t->stride, false);
    s->version = kn_version_of(t);
    return s->tensor != NULL;
}

static bool differs(const kn_record *r, const kn_tensor *t)
{
    char text[128];
    return kn_fail(AGAIN "it computed something else than forward did (tensor %lld of %lld that it "
                         "keeps is %s); a forward must do the same when it runs again",
                   call_of(r), (long long)r->saved, (long long)r->places,
                   t ? kn_describe(t, text, sizeof text) : "missing");
}

bool kn_record_save(kn_saved *s, const kn_tensor *t)
{
    kn_record *r = kn_context_get()->record;
    if (r->state == FORWARD) {
        if (!kn_host_grow(&r->place, &r->place_room, r->places + 1, sizeof *r->place))
            return false;
        s->record = kn_record_ref(r);
        s->index = r->places;
        r->place[r->places++] = (place){ s, like(t) };
        return true;
    }
    place *p = r->saved < r->places ? &r->place[r->saved] : NULL;
    r->saved++;
    if (!p || p->like != like(t))
        return differs(r, t);
    return !p->to || p->to->tensor || bare(p->to, t);
}

void kn_record_forget(kn_saved *s)
{
    kn_record *r = s->record;
    r->place[s->index].to = NULL;
    s->record = NULL;
    kn_record_unref(r);
}

bool kn_record_wants_fill(const kn_record *r)
{
    bool empty = false;
    for (int64_t i = 0; i < r->places && !empty; i++)
        empty = r->place[i].to && !r->place[i].to->tensor;
    return empty;
}

void kn_record_empty(kn_record *r)
{
    for (int64_t i = 0; i < r->places; i++)
        if (r->place[i].to) {
            kn_tensor_free(r->place[i].to->tensor);
            r->place[i].to->tensor = NULL;
        }
}

/* ---- the replay ------------------------------------------------------------------------------ */

/* The inputs as leaves: the replay's nodes lead nowhere. */
static bool fresh_inputs(kn_record *r, kn_values *in)
{
    in->n = r->inputs;
    for (int i = 0; i < r->inputs; i++) {
        kn_saved *s = &r->input[i];
        if (!s->tensor && !s->record)
            continue; /* not given */
        if (!s->tensor && !kn_record_fill(s->record))
            return false;
        if (!s->tensor)
            return differs(s->record, NULL);
        in->v[i] = kn_detach(s->tensor);
        if (!in->v[i] || (r->wants[i] && !kn_require_grad(in->v[i], true)))
            return false;
    }
    return true;
}

static bool replay(kn_record *r, kn_values in)
{
    const kn_frame *call = r->frame;
    kn_context *c = kn_context_get();
    enter(r, REPLAYS, in);
    for (int i = 0; i < r->inputs; i++)
        r->version[i] = r->input[i].version;
    bool ok = put_before(r);
    c->frame = call->parent;
    kn_frame *f = ok ? kn_frame_reenter(call->life, call->path, call->key) : NULL;
    if (f)
        f->rng = &r->rng;
    ok = f && r->how.run(r->how.arg, in) && kn_ok();
    kn_frame_leave(f);
    put_back(r);
    leave(r);
    return ok && (r->saved == r->places || differs(r, NULL));
}

/* Inputs that a replay around this one made go: it would make them again. */
static void drop_inputs(kn_record *r)
{
    for (int i = 0; i < r->inputs; i++)
        if (r->input[i].record) {
            kn_tensor_free(r->input[i].tensor);
            r->input[i].tensor = NULL;
        }
}

bool kn_record_fill(kn_record *r)
{
    kn_context *c = kn_context_get();
    if (r->state != RESTS)
        return kn_fail("a backward inside of a call of '%s' that recomputes can't go through what "
                       "that call computes: its forward runs",
                       call_of(r));
    kn_frame *frame = c->frame;
    kn_record *record = c->record;
    kn_values in = { 0 };
    const bool mode = kn_set_grad_mode(true);
    const kn_scope scope = kn_scope_begin();
    c->record = NULL;
    const bool ok = kn_engine_fills(r) && fresh_inputs(r, &in) && replay(r, in);
    kn_scope_end(scope);
    kn_set_grad_mode(mode);
    c->frame = frame;
    c->record = record;
    drop_inputs(r);
    return ok && kn_engine_release(r->frame);
}
