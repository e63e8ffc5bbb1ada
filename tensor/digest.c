/* tensor/digest.c: a tensor's values for a trace: a digest and the first elements. */
#include "kernels/trace_internal.h"
#include "tensor/checksum.h"
#include "tensor/tensor_internal.h"

#include <stdio.h>

enum { SHOWN = 8 };

/* "0123456789abcdef 0.5 1 -2 ..." */
static void describe(const kn_tensor *t, const char *data, size_t bytes, char *text, size_t size)
{
    const int64_t n = kn_numel(t);
    int used = snprintf(text, size, "%016llx", (unsigned long long)kn_checksum_of(data, bytes));
    for (int64_t i = 0; i < n && i < SHOWN; i++)
        used += snprintf(text + used, size - (size_t)used, " %.9g",
                         kn_element(t->dtype, data + (size_t)i * kn_dtype_size(t->dtype)));
}

void kn_trace_tensor(const char *name, const char *kind, const kn_tensor *t)
{
    if (!t || !kn_ok() || t->storage->device == KN_META || t->storage->released)
        return;
    const size_t bytes = (size_t)kn_numel(t) * kn_dtype_size(t->dtype);
    char *data = kn_host_alloc(bytes + 1), text[512];
    kn_trace_mute(true);
    const bool ok = data && kn_to_host(t, data, bytes);
    kn_trace_mute(false);
    if (ok)
        describe(t, data, bytes, text, sizeof text);
    kn_host_free(data);
    if (ok)
        kn_trace_put(NULL, (kn_trace_event){ .kind = KN_TRACE_VALUE,
                                             .what = name,
                                             .provider = kind,
                                             .detail = KN_SHOWN(t),
                                             .source = text,
                                             .number = (double)kn_numel(t) });
}
