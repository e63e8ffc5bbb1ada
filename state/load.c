/* state/load.c: fills a module or optimizers. All that may fail comes first, on every rank; ranks
 * agree; then values are written. */
#include "comm/comm_internal.h"
#include "kernels/error_internal.h"
#include "state/load_internal.h"
#include "tensor/tensor_internal.h"

#include <string.h>

/* ---- before anything is written -------------------------------------------------------------- */

static size_t item_bytes(const kn_state_item *i, int64_t numel)
{
    return (size_t)numel * kn_dtype_size(i->dtype);
}

/* The tensor of the names' item on this rank; not where rank 0 alone has values. */
static const kn_state_item *original(const kn_loading *l, const kn_state_item *i)
{
    const kn_source *x = l->source;
    while (i < x->names->list || i >= x->names->list + x->names->count)
        x++;
    return &x->s->list[i->origin];
}

static const kn_state_item *item_of(const kn_loading *l, int at)
{
    return original(l, l->item[at]);
}

static bool same_part(kn_interval a, kn_interval b)
{
    return a.start == b.start && a.count == b.count && a.blocks == b.blocks &&
           (a.blocks <= 1 || a.stride == b.stride);
}

/* Makes the states that will be filled. */
static bool make_states(kn_loading *l)
{
    const kn_param *p;
    for (int i = 0; i < l->all.count; i++) {
        kn_entry *e = &l->all.list[i];
        if (!l->item[i] || e->kind != KN_ENTRY_STATE || e->tensor)
            continue;
        const int n = kn_params(kn_optim_module(e->optim), &p);
        l->made[i] = !kn_optim_state_there(e->optim, e->param, e->state);
        if (e->param >= n || !kn_optim_make_state(e->optim, &p[e->param], e->param))
            return false;
        e->tensor = kn_optim_state_there(e->optim, e->param, e->state);
    }
    return true;
}

static void drop_states(kn_loading *l)
{
    for (int i = 0; l->made && i < l->all.count; i++)
        if (l->made[i])
            kn_optim_drop_state(l->all.list[i].optim, l->all.list[i].param);
}

/* From a file to where the values lie. */
static bool goes_straight(const kn_loading *l, const kn_entry *e, const kn_state_item *i)
{
    return i && !l->header && !original(l, i)->tensor && i->dtype == e->dtype &&
           kn_device_of(e->tensor) == KN_CPU && kn_is_contiguous(e->tensor);
}

/* Whether some rank needs elements of parts that others have. */
static bool find_travels(kn_loading *l)
{
    float travels = 0;
    for (int i = 0; i < l->all.count; i++) {
        const kn_state_item *item = l->item[i];
        if (item && item->shards > 1 && !same_part(item->part, l->all.list[i].part))
            travels = 1;
    }
    bool ok = !l->parts || kn_hosts_max(l->all.comm, &travels, 1, l->what);
    l->travels = travels > 0;
    return ok;
}

/* Parts that travel come from one state, and so do rank 0's tensors. */
static bool begin_gathering(kn_loading *l)
{
    const kn_source *x = l->source;
    const bool has = !l->header || kn_rank(l->all.comm) == 0;
    if (!(l->sent = kn_host_calloc((size_t)x->names->count + 1, sizeof *l->sent)))
        return false;
    for (int i = 0; i < l->all.count; i++)
        if (l->item[i] && (l->header || l->item[i]->shards > 1))
            l->sent[l->item[i] - x->names->list] = true;
    l->gathering = (kn_gathering){ .what = l->what,
                                   .comm = l->all.comm,
                                   .s = has ? x->names : NULL,
                                   .values = x->s,
                                   .only = l->sent,
                                   .here = true };
    return kn_gathering_begin(&l->gathering);
}

static bool make_room(kn_loading *l)
{
    size_t whole = 0, part = 0, converted = 0;
    for (int i = 0; i < l->all.count; i++) {
        const kn_entry *e = &l->all.list[i];
        const kn_state_item *item = l->item[i];
        if (!e->tensor || (!item && !l->zero[i]) || goes_straight(l, e, item))
            continue;
        const size_t all = item ? item_bytes(item, kn_entry_numel(e)) : 0;
        const size_t some = item ? item_bytes(item, kn_interval_numel(e->part)) : 0;
        whole = all > whole ? all : whole;
        part = some > part ? some : part;
        converted = kn_entry_part_bytes(e) > converted ? kn_entry_part_bytes(e) : converted;
    }
    l->whole = kn_host_alloc(l->travels || l->header ? whole + 1 : 1);
    l->part = kn_host_alloc(part + 1);
    l->converted = kn_host_alloc(converted + 1);
    return l->whole && l->part && l->converted;
}

/* The needs of reading the items' files: memory, and parts that are rectangles. */
static bool ready_files(const kn_loading *l)
{
    kn_rectangle r[KN_MAX_RECTANGLES];
    for (int i = 0; i < l->all.count; i++) {
        const kn_entry *e = &l->all.list[i];
        const kn_state_item *own =
            l->item[i] && (!l->header || kn_rank(l->all.comm) == 0) ? item_of(l, i) : NULL;
        if (own && own->files && !own->tensor && e->tensor &&
            (!kn_pieces_ready(own->files) ||
             kn_interval_rectangles(e->name, e->ndim, e->shape, e->part, r) < 0))
            return false;
    }
    return true;
}

bool kn_loading_check(kn_loading *l)
{
    bool ok = kn_entries_may_write(&l->all, l->what) && kn_loading_match(l);
    const bool fits = ok && kn_loading_fits(l);
    kn_loading_report(l);
    return fits && make_states(l) && find_travels(l) &&
           (!(l->travels || (l->header && l->header->count > 0)) || begin_gathering(l)) &&
           ready_files(l) && make_room(l);
}

/* ---- values ---------------------------------------------------------------------------------- */

/* Elements of the item number `at` that lie here, from the first of part on, go to room, if they
 * aren't there as they are; *values has them. */
static bool read_here(const kn_loading *l, int at, kn_interval part, void *room,
                      const char **values)
{
    const kn_state_item *own = item_of(l, at);
    *values = own->tensor ? kn_array_of(own->tensor).data : room;
    return own->tensor || kn_pieces_read(own->files, own->piece, part, room);
}

/* Whether the item comes from what all ranks hold of it. */
static bool is_gathered(const kn_loading *l, const kn_state_item *i)
{
    return l->header || (l->travels && i->shards > 1);
}

/* An item that other ranks hold, or parts of it, becomes l->whole on all ranks. */
static bool gather(kn_loading *l, int at)
{
    const kn_state *header = l->gathering.header;
    const kn_state_item *i = kn_state_find(header, l->item[at]->name);
    return kn_gathering_item(&l->gathering, (int)(i - header->list), l->whole);
}

/* *from: this rank's part of the item, in its dtype. */
static bool part_of(kn_loading *l, int at, const char **from)
{
    const kn_state_item *i = l->item[at];
    const kn_interval part = l->all.list[at].part;
    const bool gathered = is_gathered(l, i);
    if (!gathered && (i->shards > 1 || !item_of(l, at)->tensor))
        return read_here(l, at, part, l->part, from);
    *from = l->whole;
    if (gathered ? !gather(l, at) : !read_here(l, at, part, l->part, from))
        return false;
    if (part.blocks == 1) {
        *from += item_bytes(i, part.start);
    } else if (part.blocks > 1) {
        kn_interval_cut(part, l->part, *from, kn_dtype_size(i->dtype));
        *from = l->part;
    }
    return true;
}

static bool write_entry(kn_loading *l, int at)
{
    const kn_entry *e = &l->all.list[at];
    const kn_state_item *i = l->item[at];
    const char *from;
    if (!e->tensor)
        return kn_ok();
    if (goes_straight(l, e, i)) {
        void *to = kn_entry_data(e);
        return kn_ok() && read_here(l, at, e->part, to, &from) && kn_entry_write(e, to);
    }
    if (!part_of(l, at, &from))
        return false;
    if (i->dtype != e->dtype) {
        if (!kn_state_convert(l->converted, e->dtype, from, i->dtype, kn_interval_numel(e->part)))
            return false;
        from = l->converted;
    }
    return kn_entry_write(e, from);
}

static bool write_zeros(kn_loading *l, const kn_entry *e)
{
    if (!e->tensor)
        return kn_ok();
    memset(l->converted, 0, kn_entry_part_bytes(e));
    return kn_entry_write(e, l->converted);
}

bool kn_loading_write(kn_loading *l)
{
    bool ok = true;
    for (int i = 0; ok && i < l->all.count; i++)
        ok = l->item[i] ? write_entry(l, i) : l->zero[i] ? write_zeros(l, &l->all.list[i]) : true;
    for (int k = 0; ok && k < l->sources; k++) {
        const kn_source *x = &l->source[k];
        ok = !x->optim || kn_optim_values_set(&x->values, x->optim);
    }
    return ok && kn_ok();
}

bool kn_loading_end(kn_loading *l, bool ok)
{
    if (!ok)
        drop_states(l);
    ok = kn_entries_end(&l->all) && ok && kn_ok();
    kn_loading_report(l);
    kn_gathering_end(&l->gathering);
    kn_state_free(l->header);
    for (int k = 0; k < l->sources; k++) {
        kn_optim_values_free(&l->source[k].values);
        kn_state_free(l->source[k].names);
        kn_host_free(l->source[k].used);
    }
    void *const room[] = { l->item, l->zero, l->made, l->sent, l->whole, l->part, l->converted };
    for (size_t i = 0; i < sizeof room / sizeof *room; i++)
        kn_host_free(room[i]);
    return ok;
}

/* ---- state dicts ----------------------------------------------------------------------------- */

static bool take_names(kn_loading *l, const kn_state *s)
{
    kn_source *x = l->source;
    const bool dealt = l->o->from_rank0 && l->all.comm;
    const bool has = !dealt || kn_rank(l->all.comm) == 0;
    if (has && !kn_given(s, l->what, "the state"))
        return false;
    x->s = has ? s : NULL;
    for (int i = 0; dealt && has && i < s->count; i++)
        if (s->list[i].flat || s->list[i].shards > 1)
            return kn_fail("state: .from_rank0: '%s' of rank 0 is a part; take the state full, or "
                           "gather the parts (kn_state_gather)",
                           s->list[i].name);
    l->header = dealt ? kn_state_header(x->s, l->all.comm, 0) : NULL;
    return (!dealt || l->header) && kn_source_names(l, x, dealt ? l->header : s, NULL);
}

/* ok: what came before on this rank. */
static bool run(kn_loading *l, bool ok)
{
    l->source->end = l->all.count;
    return kn_agree(l->all.comm, ok && kn_loading_check(l)) && kn_loading_write(l);
}

static bool is_averaged(kn_module *m, void *arg)
{
    bool *averaged = arg;
    *averaged = *averaged || m->impl->averaged;
    return true;
}

/* A load must write into the tensors that the module trains. */
static bool holds_own(kn_module_impl *m, const char *what)
{
    bool averaged = false;
    kn_apply_modules(m->self, is_averaged, &averaged);
    for (const kn_module_impl *up = m->parent; up; up = up->parent)
        averaged = averaged || up->averaged;
    return !averaged || kn_fail("%s: the module holds averages: call kn_ema_swap before", what);
}

/* Begins to list what is loaded into module, and has the state's names. */
static bool begin(kn_loading *l, void *module, const kn_state *s,
                  const kn_load_state_dict_options *o)
{
    l->sources = 1;
    l->prefix = o->prefix ? o->prefix : "";
    if (!kn_entries_begin(&l->all, module, o->comm))
        return false;
    l->all.only = o->only;
    l->all.except = o->except;
    return kn_loading_options(o, l->what) && take_names(l, s);
}

/* Whether units lie in the state as they did in memory. */
static bool is_local(const kn_loading *l)
{
    const kn_state *names = l->source->names;
    bool local = false;
    for (int i = 0; i < names->count; i++)
        local = local || (names->list[i].flat && kn_state_below(names->list[i].name, l->prefix));
    return local;
}

static bool list_module(kn_loading *l)
{
    l->all.outside = is_local(l);
    if (l->all.outside && (l->o->ema || l->o->only || l->o->except))
        return kn_fail("%s: .ema, .only and .except aren't for local states", l->what);
    return kn_entries_add_model(&l->all, l->o->ema) &&
           (!l->all.outside || kn_entries_add_flat(&l->all));
}

bool kn_state_fits(void *module, const kn_state *s, const kn_load_state_dict_options *o,
                   char text[KN_LOADING_TEXT])
{
    kn_source source = { 0 };
    kn_loading l = { .what = "kn_state_fits", .source = &source, .o = o };
    bool ok = begin(&l, module, s, o);
    l.all.declared = true;
    ok = ok && kn_entries_add_model(&l.all, NULL);
    source.end = l.all.count;
    ok = ok && kn_loading_match(&l);
    kn_loading_tell(&l, text);
    return kn_loading_end(&l, ok);
}

bool kn_load_state_dict_(void *module, const kn_state *s, kn_load_state_dict_options o)
{
    static const char what[] = "kn_load_state_dict";
    if (o.report)
        *o.report = (kn_load_report){ 0 };
    kn_module_impl *m = kn_ok() ? kn_impl(module, what) : NULL;
    if (!m || (o.keep_options && !kn_fail("%s: .keep_options is for optimizers", what)))
        return false;
    kn_source source = { 0 };
    kn_loading l = { .what = what, .source = &source, .o = &o };
    bool ok = (o.ema || holds_own(m, what)) && begin(&l, module, s, &o) && list_module(&l);
    return kn_loading_end(&l, run(&l, ok));
}

bool kn_load_optim_state_dict_(kn_optim *optim, const kn_state *s, kn_load_state_dict_options o)
{
    static const char what[] = "kn_load_optim_state_dict";
    if (o.report)
        *o.report = (kn_load_report){ 0 };
    kn_module *m =
        kn_ok() && kn_given(optim, what, "the optimizer") ? kn_optim_module(optim) : NULL;
    if (!m || (o.ema && !kn_fail("%s: .ema is for kn_load_state_dict", what)))
        return false;
    kn_source source = { .optim = optim };
    kn_loading l = { .what = what, .source = &source, .o = &o };
    bool ok = begin(&l, m, s, &o);
    l.all.below = 0;
    ok = ok && kn_entries_add_optim_all(&l.all, optim);
    return kn_loading_end(&l, run(&l, ok));
}
