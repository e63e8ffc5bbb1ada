/* state/copy.h (private): copies that are large and not read soon. */
#ifndef KNAP_STATE_COPY_H
#define KNAP_STATE_COPY_H

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* memcpy that leaves the caches to others. Stores of whole lines don't read them first, as memcpy's
 * do below a size that each C library and processor chooses: a third of the traffic. */
static inline void kn_copy_past_caches(void *dst, const void *src, size_t bytes)
{
    char *to = dst;
    const char *from = src;
#ifdef __SSE2__
    const size_t before = -(uintptr_t)to % 64; /* up to the first whole line */
    if (bytes >= 4096) {
        memcpy(to, from, before);
        to += before, from += before, bytes -= before;
        for (; bytes >= 64; bytes -= 64, to += 64, from += 64)
            for (int i = 0; i < 64; i += 16)
                _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
        _mm_sfence();
    }
#endif
    memcpy(to, from, bytes);
}

#endif
