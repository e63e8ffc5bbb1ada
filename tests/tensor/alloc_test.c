/* tests/tensor/alloc_test.c: every allocation fails in turn: an error, never a crash, and no
 * handle, byte or file is left behind. */
#include "kernels/faults.h"
#include "tensor/safetensors.h"
#include "tensor/tensor_internal.h"
#include "tests/owned.h"
#include "tests/failing.h"
#include "tests/tensor/temp.h"
#include <jansson.h>

static temp folder;

/* Runs body with the 1st, 2nd, ... allocation failing until none does. */
static void fail_each(const char *what, bool (*body)(void), int at_least)
{
    KN_CHECK(body(), "%s", what); /* warm: the scope stack has grown */
    int64_t live = kn_live_tensors();
    kn_ledger before = kn_ledger_read();
    for (int64_t n = 1;; n++) {
        kn_fail_alloc(n);
        bool done = body();
        kn_fail_alloc(0);
        KN_CHECK(kn_live_tensors() == live, "%s: allocation %lld leaks a handle", what,
                 (long long)n);
        kn_ledger after = kn_ledger_read();
        KN_CHECK(after.live_total == before.live_total, "%s: allocation %lld leaks bytes", what,
                 (long long)n);
#ifndef KN_DEBUG /* a debug build keeps dead handles for a while */
        KN_CHECK(after.live[KN_MEM_HOST] == before.live[KN_MEM_HOST],
                 "%s: allocation %lld leaks metadata", what, (long long)n);
#endif
        if (done) {
            KN_CHECK_OK();
            KN_CHECK(n > at_least, "%s: only %lld allocations", what, (long long)n - 1);
            return;
        }
        KN_CHECK(!kn_ok(), "%s: allocation %lld fails silently", what, (long long)n);
        KN_CHECK(strstr(kn_error(), "memory"));
        kn_clear_error();
    }
}

static bool making(void)
{
    float v[6] = { 1, 2, 3, 4, 5, 6 };
    int64_t shape[2] = { 2, 2 }, stride[2] = { 3, 1 };
    IN_SCOPE;
    kn_tensor *t = kn_from(KN_F32, KN_CPU, v, KN_SHAPE(2, 3));
    kn_tensor *part = t ? kn_tensor_alias(t, 1, 2, shape, stride) : NULL;
    kn_tensor *z = kn_zeros_like(part);
    kn_set_name(z, "z");
    bool ok =
        kn_copy_(z, part) && kn_arange(KN_I64, KN_CPU, 9) && kn_ones(KN_F32, KN_META, KN_SCALAR);
    /* a copy onto itself goes through a temporary */
    kn_tensor *low = t ? kn_tensor_alias(t, 0, 2, shape, stride) : NULL;
    ok = ok && kn_copy_(low, part);
    return ok && kn_ok();
}

static bool storing(void)
{
    kn_storage *s =
        kn_storage_create_released(kn_device_memory(KN_CPU), 4096, KN_MEM_GATHERED, "w");
    if (!s)
        return false;
    int64_t n = 1024;
    kn_tensor *t = kn_tensor_on(s, 0, KN_F32, 1, &n, NULL, false);
    bool ok = t && kn_storage_retake(s) && kn_fill_(t, 1);
    kn_storage_release(s);
    ok = ok && kn_storage_retake(s);
    kn_tensor_free(t);
    kn_storage_unref(s);
    return ok;
}

static bool wrapping(void)
{
    static float x;
    kn_storage *s = kn_storage_wrap(KN_CPU, &x, sizeof x, NULL, NULL, "x");
    kn_storage_unref(s);
    return s != NULL;
}

/* The very first scope and tensor of a context: allocating the stack fails. */
static bool beginning(void)
{
    IN_SCOPE;
    kn_tensor *t = kn_ok() ? kn_empty(KN_F32, KN_CPU, KN_SHAPE(4)) : NULL;
    return t && kn_ok();
}

static bool printing(void)
{
    static char text[4096];
    IN_SCOPE;
    kn_tensor *t = kn_arange(KN_F32, KN_CPU, 5);
    FILE *out = fmemopen(text, sizeof text, "w");
    bool ok = t && kn_print(out, t);
    fclose(out);
    return ok;
}

static const kn_safetensors_pair meta[] = { { "format", "pt" } };

static bool saving(void)
{
    float x[4] = { 1, 2, 3, 4 };
    kn_safetensors_entry e[] = {
        { .name = "x", .dtype = KN_F32, .ndim = 1, .shape = { 4 }, .data = x },
        { .name = "y", .dtype = KN_F32, .data = x },
    };
    bool ok = kn_safetensors_save(folder.path, e, 2, meta, 1);
    KN_CHECK(temp_files(&folder) == 1, "a temporary file is left, or the old one went");
    return ok;
}

static bool reading(void)
{
    kn_scope s = kn_scope_begin();
    kn_safetensors *f = kn_safetensors_open(folder.path);
    kn_tensor *x = f ? kn_safetensors_get(f, "x") : NULL,
              *y = f ? kn_safetensors_get(f, "y") : NULL;
    kn_safetensors_close(f);
    kn_scope_end(s);
    return x && y;
}

KN_TEST(alloc, tensors)
{
    fail_each("making", making, 10);
    fail_each("storing", storing, 5);
    fail_each("wrapping", wrapping, 2);
    fail_each("printing", printing, 3);
}

KN_TEST(alloc, first_scope)
{
    for (int64_t n = 1, done = 0; !done; n++) {
        kn_context_end();
        int64_t live = kn_live_tensors();
        done = WITH_FAILING(n, beginning());
        KN_CHECK(kn_live_tensors() == live, "allocation %d", (int)n);
        KN_CHECK(!done || n > 5, "%d", (int)n);
    }
}

KN_TEST(alloc, safetensors)
{
    float x[4] = { 1, 2, 3, 4 };
    kn_safetensors_entry e = { .name = "x", .dtype = KN_F32, .ndim = 1, .shape = { 4 }, .data = x };
    folder = temp_begin();
    KN_CHECK(kn_safetensors_save(folder.path, &e, 1, NULL, 0));
    json_set_alloc_funcs(kn_host_alloc, kn_host_free); /* jansson's allocations fail too */
    fail_each("saving", saving, 20);
    fail_each("reading", reading, 20);
    json_set_alloc_funcs(malloc, free);
    temp_end(&folder);
}
