/* nn/call.c: calling a module: a frame (who made the nodes), a scope (who owns the temporaries),
 * hooks, and the unit's gather and release around its forward. */
#include "autograd/record.h"
#include "kernels/trace.h"
#include "nn/edit.h"
#include "nn/hooks_internal.h"

static void trace(const kn_module_impl *m, const char *what)
{
    kn_trace_put(NULL, (kn_trace_event){ .kind = KN_TRACE_CALL,
                                         .what = what,
                                         .provider = m->class_name,
                                         .path = m->path,
                                         .backward = kn_in_backward() });
}

static void pre_backward(void *module, kn_frame *f)
{
    kn_module_impl *m = module;
    if (m->unit)
        m->unit->reach(m->unit->unit);
    trace(m, "backward");
    kn_hooks_pre_backward(m, f);
}

static void post_backward(void *module, kn_frame *f)
{
    kn_hooks_post_backward(module, f);
    trace(module, "backward end");
}

static void attach(kn_frame *f, kn_module_impl *m)
{
    if (m->unit || m->hooks || kn_trace_sees(KN_TRACE_CALL)) {
        f->pre_backward = pre_backward;
        f->post_backward = post_backward;
    }
    f->hooked = m->hooks > 0; /* those that come later are for later calls */
    f->group = m->unit ? kn_group_ref(m->unit->group) : NULL;
}

/* True: the call begins, and end_call must follow, though an error may stand. */
static bool begin_call(kn_module_impl *m, kn_values *in)
{
    if (m->unit && !m->unit->pre_forward(m->unit->unit, m, in))
        return false;
    kn_record_group(m->unit ? m->unit->group : NULL);
    kn_record_use(m->life->id, (uint32_t)kn_hooks_count(m) << 1 | m->training, kn_module_shown(m));
    trace(m, "forward");
    kn_hooks_pre_forward(m, in);
    return true;
}

static void end_call(kn_module_impl *m, kn_values in, kn_values *out)
{
    kn_hooks_post_forward(m, in, out);
    trace(m, "forward end");
    for (int i = 0; out && kn_trace_sees(KN_TRACE_VALUE) && i < out->n; i++) /* kn_leave has none */
        kn_trace_tensor(kn_module_shown(m), "activation", out->v[i]);
    if (m->unit)
        m->unit->post_forward(m->unit->unit, out);
}

static void compute(kn_module_impl *m, kn_method method, kn_values in, const void *arg,
                    kn_values *out)
{
    if (method.fn) {
        *out = method.fn(m->self, in, arg);
    } else if (in.n != 1) {
        kn_fail("'%s' (%s) takes one tensor, %d were passed; use kn_module_init_n for several",
                kn_module_shown(m), m->class_name, in.n);
    } else {
        out->v[0] = method.f1(m->self, in.v[0]);
        out->n = 1;
    }
    if (out->n < 0 || out->n > KN_MAX_VALUES) {
        kn_fail("'%s' (%s): forward returned %d tensors; at most %d are possible: concatenate some "
                "(kn_cat)",
                kn_module_shown(m), m->class_name, out->n, KN_MAX_VALUES);
        out->n = 0;
    }
    for (int i = 0; i < out->n && kn_ok(); i++)
        if (!out->v[i])
            kn_fail("'%s' (%s): forward returned NULL as result %d although no error stands",
                    kn_module_shown(m), m->class_name, i + 1);
}

kn_values kn_module_run(kn_module_impl *m, kn_method method, kn_values in, const void *arg)
{
    kn_values out = { 0 };
    if (!begin_call(m, &in))
        return out;
    if (kn_ok())
        compute(m, method, in, arg, &out);
    end_call(m, in, &out);
    return out;
}

static kn_values call(kn_module_impl *m, kn_method method, kn_values in, const void *arg,
                      size_t arg_size)
{
    kn_values out = { 0 };
    if (in.n < 0 || in.n > KN_MAX_VALUES) {
        kn_fail("kn_call_n: %d tensors were passed to '%s' (%s); at most %d are possible: pass "
                "those without gradient in arg, or concatenate some (kn_cat)",
                in.n, kn_module_shown(m), m->class_name, KN_MAX_VALUES);
        return out;
    }
    for (int i = 0; i < in.n; i++)
        if ((in.v[i] || !method.fn) && !kn_check(in.v[i], m->class_name))
            return out;
    if (!kn_nest_begin(kn_module_shown(m)))
        return out;
    kn_frame *f = kn_frame_enter(m->life, m->path, m->name);
    if (!f) {
        kn_nest_end();
        return out;
    }
    attach(f, m);
    kn_scope scope = kn_scope_begin();
    kn_hooks_inputs(m, f, &in);
    if (m->recompute && kn_grad_mode())
        out = kn_recompute_call(m, method, f, in, arg, arg_size);
    else
        out = kn_module_run(m, method, in, arg);
    kn_hooks_results(m, f, &out);
    kn_scope_end_except(scope, out.v, out.n);
    kn_frame_leave(f);
    kn_nest_end();
    return kn_ok() ? out : (kn_values){ 0 };
}

kn_values kn_call_n(void *module, kn_values in, const void *arg, size_t arg_size)
{
    kn_module_impl *m = kn_module_in_place(module, "kn_call");
    return m ? call(m, m->forward, in, arg, arg_size) : (kn_values){ 0 };
}

static kn_module_impl *with_method(void *module, bool given)
{
    kn_module_impl *m = kn_module_in_its_place(module, "kn_call_method");
    if (m && !given)
        kn_fail("kn_call_method: the method is NULL; kn_call runs the forward");
    return given ? m : NULL;
}

kn_values kn_call_method_n(void *module, kn_forward_n method, kn_values in, const void *arg,
                           size_t arg_size)
{
    kn_module_impl *m = with_method(module, method != NULL);
    return m ? call(m, (kn_method){ .fn = method }, in, arg, arg_size) : (kn_values){ 0 };
}

kn_tensor *kn_call(void *m, kn_tensor *x)
{
    return kn_call_with_(m, KN_VALUES(x));
}

kn_tensor *kn_call_with_(void *m, kn_values in)
{
    kn_values out = kn_call_n(m, in, NULL, 0);
    if (kn_ok() && out.n > 1)
        kn_fail("kn_call: '%s' returns %d tensors; use kn_call_n",
                kn_module_shown(kn_module_in_place(m, "kn_call")), out.n);
    return kn_ok() && out.n == 1 ? out.v[0] : NULL;
}

kn_tensor *kn_call_method(void *module, kn_forward1 method, kn_tensor *x)
{
    kn_module_impl *m = with_method(module, method != NULL);
    return m ? call(m, (kn_method){ .f1 = method }, KN_VALUES(x), NULL, 0).v[0] : NULL;
}

kn_entered kn_enter(void *module)
{
    kn_entered e = { 0 };
    kn_module_impl *m = kn_module_in_its_place(module, "kn_enter");
    e.frame = m ? kn_frame_enter(m->life, m->path, m->name) : NULL;
    if (!e.frame)
        return e;
    attach(e.frame, m);
    e.module = m->self;
    e.scope = kn_scope_begin();
    bool begun = begin_call(m, NULL);
    if (kn_ok())
        return e;
    if (begun)
        end_call(m, (kn_values){ 0 }, NULL);
    kn_scope_end(e.scope);
    kn_frame_leave(e.frame);
    return (kn_entered){ 0 };
}

void kn_leave(kn_entered e, kn_tensor *const *results, int n)
{
    if (!e.frame)
        return;
    end_call(e.module->impl, (kn_values){ 0 }, NULL);
    kn_scope_end_except(e.scope, results, n);
    kn_frame_leave(e.frame);
}
