/* tests/gpu/cuda_host_test.c: errors of the CUDA device on a machine without a GPU; some provider
 * takes every kernel. */
#include "kernels/device.h"
#include "kernels/cuda/runtime/runtime.h"
#include "tests/kn_test.h"

KN_TEST(cuda_host, every_kernel_has_a_taker)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    int n = kn_providers(KN_CUDA, providers);
    KN_CHECK(n >= 1 && strcmp(providers[n - 1]->name, "cuda") == 0);
    for (int k = 0; k < KN_K_COUNT; k++)
        KN_CHECK(providers[n - 1]->run[k],
                 "%s: the last provider of cuda has no kernel, and nothing comes after it",
                 kn_kernel_name((kn_kernel)k));
}

/* No entry of the device's table is empty: device.c calls all of them. */
KN_TEST(cuda_host, table_is_complete)
{
    const kn_device_table *t = kn_device_table_of(KN_CUDA);
    KN_CHECK(t && t->device == KN_CUDA && t->open && t->memory && t->trim && t->stream_create &&
             t->stream_destroy && t->stream_is_inline && t->stream_sync && t->stream_host &&
             t->launch && t->event_create && t->event_destroy && t->event_record && t->event_wait &&
             t->event_sync && t->event_done && t->providers && t->transfer && t->trace_begin &&
             t->trace_end && t->trace_flush);
}

/* A library that can't be used is no error: its kernels decline. Its lack names the cause. */
KN_TEST(cuda_host, libraries_that_do_not_fit)
{
    static void (*there)(void), (*absent)(void);
    const kn_cuda_symbol symbols[] = { { "abort", &there }, { "knap_no_such_function", &absent } };
    const kn_cuda_symbol optional[] = { { "knap_no_such_function", &absent, true } };
    kn_cuda_library none = { .name = "Flint", .soname = "libflint.so.99", .least = 90800 };
    kn_cuda_library old = { .name = "Libc", .soname = "libc.so.6", .least = 90800 };
    kn_cuda_library other = { .name = "Libc", .soname = "libc.so.6" };
    kn_cuda_library good = other;
    other.symbols = symbols, other.count = 2;
    good.symbols = optional, good.count = 1;
    for (int again = 0; again < 2; again++) {
        KN_CHECK(!kn_cuda_library_open(&none) && !kn_cuda_library_open(&old));
        KN_CHECK(!kn_cuda_library_open(&other) && kn_cuda_library_open(&good) && !absent);
        KN_CHECK_OK();
    }
    KN_CHECK(strstr(none.lack, "Flint can't be loaded: libflint.so.99: "), "%s", none.lack);
    KN_CHECK(strstr(old.lack, "is too old: this build needs 9.8.0 or newer"), "%s", old.lack);
    KN_CHECK(strstr(other.lack, "it has no knap_no_such_function"), "%s", other.lack);
    setenv("KNAP_FLINT", "/no/such/libc.so.6", 1);
    kn_cuda_library given = { .name = "Libc", .soname = "libc.so.6", .variable = "KNAP_FLINT" };
    KN_CHECK(!kn_cuda_library_open(&given), "a given path isn't looked for elsewhere");
    KN_CHECK(strstr(given.lack, "/no/such/"), "%s", given.lack);
}

/* What a library opens by itself is looked for before any of its functions is called: cuDNN ends
 * the process where its own isn't there. */
KN_TEST(cuda_host, libraries_of_a_library)
{
    static size_t (*called)(void);
    static const kn_cuda_symbol symbols[] = { { "abort", &called } };
    kn_cuda_library l = { .name = "Libc",
                          .soname = "libc.so.6",
                          .versions = "abort",
                          .least = 90800,
                          .part = { { "libm.so.6" }, { "libflint.so.99" } },
                          .symbols = symbols,
                          .count = 1 };
    KN_CHECK(!kn_cuda_library_open(&l));
    KN_CHECK(strstr(l.lack, "Libc needs another library, which can't be loaded: libflint.so.99: "),
             "%s", l.lack);
    kn_cuda_library some = { .name = "Libc",
                             .soname = "libc.so.6",
                             .part = { { "libflint.so.99", .optional = true }, { "libm.so.6" } } };
    KN_CHECK(kn_cuda_library_open(&some) && strstr(some.missing, "libflint.so.99: "), "%s",
             some.missing);
}

KN_TEST(cuda_host, one_sentence_without_a_gpu)
{
    if (kn_cuda_available())
        KN_SKIP("this machine has a GPU");
    KN_CHECK_OK();
    REFUSED(kn_compute_stream(KN_CUDA), "device cuda: ");
    REFUSED(kn_device_memory(KN_CUDA), "device cuda: ");
    KN_CHECK(!kn_stream_create(KN_CUDA, "side", KN_STREAM_AUTO) && !kn_ok());
    kn_clear_error();
    KN_CHECK(!kn_event_create(KN_CUDA) && !kn_ok());
    const char *text = kn_error();
    KN_CHECK(strchr(text, '\n') == NULL && (strstr(text, "driver") != NULL), "%s", text);
    kn_clear_error();
    KN_CHECK(!kn_cuda_describe() && !kn_ok());
    kn_clear_error();
    kn_memory_trim(KN_CUDA);
    KN_CHECK(kn_pinned_memory(KN_CUDA) == kn_device_memory(KN_CPU),
             "offload to host memory works without a GPU");
    KN_CHECK(kn_cuda_memory_read().reserved == 0);
    KN_CHECK_OK();
}
