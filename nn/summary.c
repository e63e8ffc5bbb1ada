/* nn/summary.c: a run of a module without values that counts what it does. Parameters and buffers
 * take the storage of twins on meta meanwhile, modules have hooks of their own and belong to no
 * unit of fsdp, and a thread of its own runs it, whose random keys, ledger and errors nobody else
 * sees. */
#include "nn/summary.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "nn/hooks.h"
#include "nn/nn_internal.h"
#include <pthread.h>
#include <string.h>

typedef struct twin {
    kn_tensor *real, *other; /* handles that changed their storage, dtype and leaf */
} twin;

/* A module while it is summarized. */
typedef struct place {
    kn_module_impl *m;
    struct run *run;
    int row;
    /* what the module has otherwise */
    kn_unit_hooks *unit;
    struct kn_hooks_entry *hook;
    int hooks, hooks_running;
    /* counts at the beginning of the outermost call, of its backward */
    double forward, backward;
    int64_t kept;
    int open, open_backward;
} place;

typedef struct run {
    kn_module_impl *m;
    kn_values in;
    kn_summary_options o;
    kn_summary_table *table;
    place *place;
    twin *twin;
    int64_t twins, twin_room;
    const kn_storage **seen; /* storages that are kept */
    int64_t seens, seen_room;
    int64_t kept;
    char error[1024]; /* "": none */
} run;

/* ---- the list of modules --------------------------------------------------------------------- */

/* Its owner isn't below the module that lists it. */
static bool is_anothers(const kn_param *p)
{
    bool owned = false;
    for (int i = 0; i < p->owner->params; i++)
        owned = owned || (p->owner->param[i].tensor == p->tensor && p->owner->param[i].owner);
    return !owned;
}

static void list_module(run *r, kn_module_impl *m)
{
    const kn_param *p;
    const int at = r->table->rows++;
    kn_summary_row *row = &r->table->row[at];
    r->place[at] = (place){ .m = m, .run = r, .row = at };
    row->module = m->self;
    for (const kn_module_impl *up = m; up != r->m; up = up->parent)
        row->depth++;
    for (int i = 0, n = kn_params(m->self, &p); i < n; i++) {
        if (is_anothers(&p[i]))
            continue;
        const kn_dtype dtype = p[i].master ? p[i].master->dtype : p[i].tensor->dtype;
        row->params += p[i].numel;
        row->trainable += p[i].trainable ? p[i].numel : 0;
        row->param_bytes += p[i].numel * (int64_t)kn_dtype_size(dtype);
    }
}

/* ---- twins ----------------------------------------------------------------------------------- */

static bool add_twin(run *r, kn_tensor *t, kn_dtype dtype, kn_mem_category category)
{
    for (int64_t i = 0; i < r->twins; i++)
        if (r->twin[i].real == t)
            return true;
    if (!kn_host_grow(&r->twin, &r->twin_room, r->twins + 1, sizeof *r->twin))
        return false;
    kn_tensor *other =
        kn_tensor_new(dtype, KN_META, NULL, category, t->ndim, t->shape, NULL, false);
    if (other)
        r->twin[r->twins++] = (twin){ t, other };
    return other;
}

static bool make_twins(run *r)
{
    for (int k = 0; k < r->table->rows; k++) {
        const kn_module_impl *m = r->place[k].m;
        for (int i = 0; i < m->params; i++) {
            const kn_param_entry *e = &m->param[i];
            const kn_tensor *like = e->master ? e->master : e->tensor;
            if (!add_twin(r, e->tensor, like->dtype, KN_MEM_PARAM))
                return false;
        }
        for (int i = 0; i < m->buffers; i++)
            if (!add_twin(r, m->buffer[i].tensor, m->buffer[i].tensor->dtype, KN_MEM_BUFFER))
                return false;
    }
    return true;
}

static void swap_twin(twin *w)
{
    kn_tensor a = *w->real, *t = w->real, *o = w->other;
    t->storage = o->storage;
    t->offset = o->offset;
    t->dtype = o->dtype;
    t->leaf = o->leaf;
    memcpy(t->stride, o->stride, sizeof t->stride);
    o->storage = a.storage;
    o->offset = a.offset;
    o->dtype = a.dtype;
    o->leaf = a.leaf;
    memcpy(o->stride, a.stride, sizeof o->stride);
}

/* Takes the tree out of its life, and puts it back. */
static void set_apart(run *r, bool apart)
{
    for (int64_t i = 0; i < r->twins; i++)
        swap_twin(&r->twin[i]);
    for (int i = 0; i < r->table->rows; i++) {
        place *p = &r->place[i];
        if (apart) {
            p->unit = p->m->unit;
            p->hook = p->m->hook;
            p->hooks = p->m->hooks;
            p->hooks_running = p->m->hooks_running;
            p->m->unit = NULL;
            p->m->hook = NULL;
            p->m->hooks = p->m->hooks_running = 0;
        } else {
            kn_host_free(p->m->hook);
            p->m->unit = p->unit;
            p->m->hook = p->hook;
            p->m->hooks = p->hooks;
            p->m->hooks_running = p->hooks_running;
        }
    }
}

/* ---- counting -------------------------------------------------------------------------------- */

static void on_save(void *arg, const kn_tensor *t)
{
    run *r = arg;
    const kn_storage *s = t->storage;
    bool known = s->category == KN_MEM_PARAM;
    for (int64_t i = 0; i < r->seens && !known; i++)
        known = r->seen[i] == s;
    if (known || !kn_host_grow(&r->seen, &r->seen_room, r->seens + 1, sizeof *r->seen))
        return;
    r->seen[r->seens++] = s;
    r->kept += (int64_t)s->bytes;
}

static void before_call(kn_module_event *e, void *arg)
{
    place *p = arg;
    if (e->again || p->open++ > 0)
        return;
    p->forward = kn_context_get()->meta_flops;
    p->kept = p->run->kept;
}

static void after_call(kn_module_event *e, void *arg)
{
    place *p = arg;
    kn_summary_row *row = &p->run->table->row[p->row];
    if (e->again)
        return;
    if (row->calls++ == 0) {
        row->results = e->out.n;
        for (int i = 0; i < e->out.n; i++) {
            row->dtype[i] = e->out.v[i]->dtype;
            row->ndim[i] = e->out.v[i]->ndim;
            memcpy(row->shape[i], e->out.v[i]->shape, sizeof row->shape[i]);
        }
    }
    if (--p->open > 0)
        return;
    row->forward += kn_context_get()->meta_flops - p->forward;
    row->kept += p->run->kept - p->kept;
}

static void before_backward(kn_module_event *e, void *arg)
{
    place *p = arg;
    (void)e;
    if (p->open_backward++ == 0)
        p->backward = kn_context_get()->meta_flops;
}

static void after_backward(kn_module_event *e, void *arg)
{
    place *p = arg;
    (void)e;
    if (--p->open_backward == 0)
        p->run->table->row[p->row].backward += kn_context_get()->meta_flops - p->backward;
}

static bool count_calls(run *r)
{
    for (int i = 0; i < r->table->rows; i++)
        if (!kn_module_hook(r->place[i].m->self,
                            (kn_module_hooks){ before_call, after_call, before_backward,
                                               after_backward, &r->place[i], "kn_summary" }))
            return false;
    return true;
}

/* ---- the run --------------------------------------------------------------------------------- */

static kn_values examples(const run *r)
{
    kn_values in = { .n = r->in.n };
    for (int i = 0; i < in.n; i++) {
        const kn_tensor *t = r->in.v[i];
        if (!t)
            continue;
        in.v[i] = kn_empty(t->dtype, KN_META, t->ndim, t->shape);
        if (in.v[i] && t->requires_grad)
            kn_require_grad(in.v[i], true);
    }
    return in;
}

/* Goes back from all results that have a gradient. */
static void run_backward(kn_values out)
{
    kn_tensor *sum = NULL;
    for (int i = 0; i < out.n && kn_ok(); i++) {
        if (!kn_requires_grad(out.v[i]))
            continue;
        kn_tensor *one = kn_cast(kn_sum(out.v[i], 0, NULL, false), KN_F64);
        sum = sum ? kn_add(sum, one) : one;
    }
    if (sum && kn_ok())
        kn_backward(sum);
}

static void run_once(run *r)
{
    kn_context *c = kn_context_get();
    kn_set_grad_mode(!r->o.no_backward);
    c->on_save = on_save;
    c->on_save_arg = r;
    kn_values in = examples(r), out = { 0 };
    if (kn_ok())
        out = r->o.method ? kn_call_method_n(r->m->self, r->o.method, in, r->o.arg, r->o.arg_size)
                          : kn_call_n(r->m->self, in, r->o.arg, r->o.arg_size);
    c->on_save = NULL;
    if (kn_ok() && !r->o.no_backward)
        run_backward(out);
}

static void *run_apart(void *arg)
{
    run *r = arg;
    kn_context_get()->memory_limit = 0; /* bytes on meta are none */
    kn_scope scope = kn_scope_begin();
    if (make_twins(r)) {
        set_apart(r, true);
        if (count_calls(r))
            run_once(r);
        set_apart(r, false);
    }
    kn_scope_end(scope);
    for (int64_t i = 0; i < r->twins; i++)
        kn_tensor_free(r->twin[i].other);
    snprintf(r->error, sizeof r->error, "%s", kn_error() ? kn_error() : "");
    kn_clear_error();
    kn_context_end();
    return NULL;
}

/* A module that isn't called itself costs as much as those right below it. */
static void add_up(kn_summary_table *s)
{
    for (int i = s->rows - 1; i >= 0; i--) {
        kn_summary_row *row = &s->row[i];
        for (int k = i + 1; row->calls == 0 && k < s->rows && s->row[k].depth > row->depth; k++) {
            if (s->row[k].depth != row->depth + 1)
                continue;
            row->forward += s->row[k].forward;
            row->backward += s->row[k].backward;
            row->kept += s->row[k].kept;
        }
    }
}

static bool on_a_thread(run *r)
{
    pthread_t thread;
    int error = pthread_create(&thread, NULL, run_apart, r);
    if (error)
        return kn_fail("kn_summary: no thread to run on: %s", strerror(error));
    pthread_join(thread, NULL);
    return !*r->error || kn_fail("kn_summary: '%s' (%s) doesn't run without values: %s",
                                 kn_module_shown(r->m), r->m->class_name, r->error);
}

static bool may_run(const kn_values *in)
{
    if (kn_context_get()->frame || kn_in_backward())
        return kn_fail("kn_summary: while a module is called or a backward runs, its parameters "
                       "can't be set apart; call it before");
    if (in->n < 0 || in->n > KN_MAX_VALUES)
        return kn_fail("kn_summary: %d inputs; at most %d are possible", in->n, KN_MAX_VALUES);
    for (int i = 0; i < in->n; i++)
        if (in->v[i] && !kn_check(in->v[i], "kn_summary"))
            return false;
    return true;
}

kn_summary_table *kn_summary_new_(void *module, kn_values in, kn_summary_options o)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_summary") : NULL;
    if (!m || !may_run(&in))
        return NULL;
    if (o.depth < 0)
        return kn_fail_null("kn_summary: .depth is %d; it is at least 1, or 0 for all", o.depth);
    run r = { .m = m, .in = in, .o = o };
    size_t n = 0;
    for (const kn_module_impl *at = m; at; at = kn_impl_next(at, m))
        n++;
    r.table = kn_host_calloc(1, sizeof *r.table);
    r.place = kn_host_calloc(n, sizeof *r.place);
    if (r.table)
        r.table->row = kn_host_calloc(n, sizeof *r.table->row);
    for (kn_module_impl *at = m; at && kn_ok(); at = kn_impl_next(at, m))
        list_module(&r, at);
    bool ok = kn_ok() && on_a_thread(&r);
    kn_host_free(r.place);
    kn_host_free(r.twin);
    kn_host_free((void *)r.seen);
    if (ok) {
        add_up(r.table);
        return r.table;
    }
    kn_summary_free(r.table);
    return NULL;
}

void kn_summary_free(kn_summary_table *s)
{
    if (s)
        kn_host_free(s->row);
    kn_host_free(s);
}

/* ---- printing -------------------------------------------------------------------------------- */

enum { WORD = 160, COLUMNS = 8 };

static char *amount(double x, const char *unit, char *text)
{
    static const char *const prefix[] = { "", "k", "M", "G", "T", "P", "E" };
    int k = 0;
    for (; x >= 999.5 && k < 6; k++)
        x /= 1000;
    if (k == 0)
        snprintf(text, WORD, "%.0f%s%s", x, *unit ? " " : "", unit);
    else
        snprintf(text, WORD, "%.3g %s%s", x, prefix[k], unit);
    return text;
}

static void whole(int64_t n, char *text)
{
    snprintf(text, WORD, "%lld", (long long)n);
}

static void result(const kn_summary_row *row, char *text)
{
    char one[128];
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < row->results && used < WORD; i++) {
        const kn_array a = kn_array_make((void *)16, row->dtype[i], row->ndim[i], row->shape[i]);
        used += (size_t)snprintf(text + used, WORD - used, "%s%s", i ? " " : "",
                                 kn_array_describe(&a, one, sizeof one));
    }
}

static void line_of(const kn_summary_row *row, char cell[COLUMNS][WORD])
{
    const char *path = kn_module_path(row->module), *dot = strrchr(path, '.');
    char times[24] = "";
    if (row->calls > 1)
        snprintf(times, sizeof times, " x%d", row->calls);
    snprintf(cell[0], WORD, "%*s%.100s%s", 2 * (row->depth % 20), "",
             row->depth == 0 ? "(all)"
             : dot           ? dot + 1
                             : path,
             times);
    snprintf(cell[1], WORD, "%.100s", kn_module_class(row->module));
    result(row, cell[2]);
    whole(row->params, cell[3]);
    whole(row->trainable, cell[4]);
    amount(row->forward, "", cell[5]);
    amount(row->backward, "", cell[6]);
    amount((double)row->kept, "B", cell[7]);
}

static void print_line(FILE *out, char cell[COLUMNS][WORD], const int *width)
{
    for (int i = 0; i < COLUMNS; i++)
        fprintf(out, i < 3 ? "%s%-*s" : "%s%*s", i ? "  " : "", width[i], cell[i]);
    fputc('\n', out);
}

static const char *const head[COLUMNS] = { "module",    "class",   "result",   "parameters",
                                           "trainable", "forward", "backward", "kept" };

static void print_rows(FILE *out, const kn_summary_table *s, int depth)
{
    char cell[COLUMNS][WORD];
    int width[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) {
        snprintf(cell[i], WORD, "%s", head[i]);
        width[i] = (int)strlen(head[i]);
    }
    for (int k = 0; k < s->rows; k++) {
        char row[COLUMNS][WORD];
        if (depth > 0 && s->row[k].depth > depth)
            continue;
        line_of(&s->row[k], row);
        for (int i = 0; i < COLUMNS; i++)
            width[i] = (int)strlen(row[i]) > width[i] ? (int)strlen(row[i]) : width[i];
    }
    print_line(out, cell, width);
    for (int k = 0; k < s->rows; k++) {
        if (depth > 0 && s->row[k].depth > depth)
            continue;
        line_of(&s->row[k], cell);
        print_line(out, cell, width);
    }
}

bool kn_summary_print(FILE *out, const kn_summary_table *s, int depth)
{
    char bytes[WORD], forward[WORD], backward[WORD], kept[WORD];
    if (!kn_given(out, "kn_summary_print", "the file") ||
        !kn_given(s, "kn_summary_print", "the summary"))
        return false;
    print_rows(out, s, depth);
    const kn_summary_row *all = s->row;
    fprintf(out,
            "%lld parameters, %lld trainable, %s; operations: %s forward, %s backward; kept for "
            "backward: %s\n",
            (long long)all->params, (long long)all->trainable,
            amount((double)all->param_bytes, "B", bytes), amount(all->forward, "", forward),
            amount(all->backward, "", backward), amount((double)all->kept, "B", kept));
    return true;
}

bool kn_summary_(FILE *out, void *m, kn_values in, kn_summary_options o)
{
    if (!kn_given(out, "kn_summary", "the file"))
        return false;
    kn_summary_table *s = kn_summary_new_(m, in, o);
    bool ok = s && kn_summary_print(out, s, o.depth);
    kn_summary_free(s);
    return ok;
}
