/* autograd/record.c: what a call that recomputes keeps of its forward, and the replay
 * (record.h). */
#include "autograd/record_internal.h"
#include "kernels/memory_internal.h"

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

/* r runs in the call f, with the inputs in. */
static void enter(kn_record *r, state s, kn_frame *f, kn_tensor *const *in)
{
    r->state = s;
    r->run = f;
    f->record = r;
    r->begin = kn_storages_made();
    r->at = r->saved = 0;
    for (int i = 0; i < r->inputs; i++) {
        r->from[i] = in[i] ? in[i]->storage : NULL;
        r->offset[i] = in[i] ? in[i]->offset : 0;
        r->version[i] = in[i] ? kn_version_of(in[i]) : 0;
    }
}

static void leave(kn_record *r)
{
    r->state = RESTS;
    r->run = NULL;
    r->end = kn_storages_made();
}

kn_record *kn_record_begin(kn_frame *f, int n, kn_tensor *const *in, kn_rerun how)
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
    f->recorded = true;
    r->around = kn_record_running() ? kn_record_ref(kn_record_running()) : NULL;
    r->rng = f->rng ? *f->rng : c->rng;
    r->hooks = kn_record_hooks() < UINT64_MAX ? kn_record_hooks() : kn_hook_next();
    r->inputs = n;
    bool ok = true;
    for (int i = 0; i < n && ok; i++) {
        ok = !in[i] || kn_save(&r->input[i], in[i]);
        r->wants[i] = in[i] && kn_record_read(in[i]);
    }
    if (!ok || !kn_ok()) {
        kn_record_unref(r);
        return NULL;
    }
    enter(r, FORWARD, f, in);
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

static kn_record *running(const kn_frame *f)
{
    while (f && !(f->record && f->record->state != RESTS))
        f = f->parent;
    return f ? f->record : NULL;
}

kn_record *kn_record_running(void)
{
    return running(kn_context_get()->frame);
}

kn_record *kn_record_around(const kn_record *r)
{
    return running(r->run->parent);
}

static const kn_record *replayed(void)
{
    const kn_record *r = kn_record_running();
    while (r && r->state != REPLAYS)
        r = kn_record_around(r);
    return r;
}

bool kn_recomputing(void)
{
    return replayed() != NULL;
}

bool kn_record_replays(void)
{
    const kn_record *r = kn_record_running();
    return r && r->state == REPLAYS;
}

uint64_t kn_record_hooks(void)
{
    const kn_record *r = replayed();
    return r ? r->hooks : UINT64_MAX;
}

const char *kn_record_call(const kn_record *r)
{
    return *r->frame->path ? r->frame->path : "the root";
}

/* ---- saving ---------------------------------------------------------------------------------- */

static uint64_t like(const kn_tensor *t)
{
    uint64_t h = kn_hash64((uint64_t)t->dtype, (uint64_t)t->ndim);
    for (int i = 0; i < t->ndim; i++)
        h = kn_hash64(h, (uint64_t)t->shape[i]);
    return h;
}

static bool differs(const kn_record *r, const kn_tensor *t)
{
    return kn_fail(AGAIN "it computed something else than forward did (tensor %lld of %lld that it "
                         "keeps is %s); a forward must do the same when it runs again",
                   kn_record_call(r), (long long)r->saved, (long long)r->places,
                   t ? KN_SHOWN(t) : "missing");
}

bool kn_record_save(kn_saved *s, const kn_tensor *t)
{
    kn_record *r = kn_record_running();
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
    return !p->to || p->to->tensor || kn_save_bare(p->to, t);
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
static bool fresh_inputs(kn_record *r, kn_tensor **in)
{
    for (int i = 0; i < r->inputs; i++) {
        kn_saved *s = &r->input[i];
        if (!s->tensor && !s->record)
            continue; /* not given */
        if (!s->tensor && !kn_record_fill(s->record))
            return false;
        if (!s->tensor)
            return differs(s->record, NULL);
        in[i] = kn_detach(s->tensor);
        if (!in[i] || (r->wants[i] && !kn_require_grad(in[i], true)))
            return false;
    }
    return true;
}

static bool replay(kn_record *r, kn_tensor *const *in)
{
    const kn_frame *call = r->frame;
    kn_frame *f = kn_frame_reenter(call->life, call->path, call->key);
    if (!f)
        return false;
    f->rng = &r->rng;
    enter(r, REPLAYS, f, in);
    for (int i = 0; i < r->inputs; i++)
        r->version[i] = r->input[i].version;
    const bool ok = kn_record_put_before(r) && r->how.run(r->how.arg, r->inputs, in) && kn_ok();
    kn_record_put_back(r);
    f->record = NULL;
    leave(r);
    kn_frame_leave(f);
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
                       kn_record_call(r));
    kn_frame *frame = c->frame;
    kn_tensor *in[KN_MAX_OUT] = { NULL };
    const bool mode = kn_set_grad_mode(true);
    const kn_scope scope = kn_scope_begin();
    c->frame = r->frame->parent;
    const bool ok = kn_engine_fills(r) && fresh_inputs(r, in) && replay(r, in);
    kn_scope_end(scope);
    kn_set_grad_mode(mode);
    c->frame = frame;
    drop_inputs(r);
    return ok && kn_engine_release(r->frame);
}
