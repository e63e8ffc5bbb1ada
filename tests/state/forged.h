/* tests/state/forged.h: a state.json that somebody made or changed, with a checksum that fits. */
#ifndef KNAP_TESTS_STATE_FORGED_H
#define KNAP_TESTS_STATE_FORGED_H

#include "tensor/checksum.h"
#include "tests/kn_test.h"

/* Writes text, an object, as the file; any other text as it is. */
static inline void put_state(const char *path, const char *text)
{
    char forged[1 << 15];
    size_t n = strlen(text);
    const bool object = n > 0 && text[n - 1] == '}';
    n = (size_t)snprintf(forged, sizeof forged - 100, "%.*s%s", (int)(object ? n - 1 : n), text,
                         object ? ",\n \"checksum\": \"" : "");
    KN_CHECK(n < sizeof forged - 100);
    if (object)
        n += (size_t)snprintf(forged + n, 100, "%016llx\"\n}\n",
                              (unsigned long long)kn_checksum_of(forged, n));
    FILE *f = fopen(path, "w");
    KN_CHECK(f && fwrite(forged, 1, n, f) == n && fclose(f) == 0, "%s", path);
}

/* Replaces a text of the file by another one. */
static inline void forge_state(const char *path, const char *from, const char *to)
{
    char text[1 << 14], forged[(1 << 14) + 100];
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    text[n] = 0;
    const char *at = strstr(text, from), *sum = strstr(text, ",\n \"checksum\"");
    KN_CHECK(at != NULL && sum != NULL, "%s: %s", path, text);
    fclose(f);
    snprintf(forged, sizeof forged, "%.*s%s%.*s}", (int)(at - text), text, to,
             (int)(sum - at - (ptrdiff_t)strlen(from)), at + strlen(from));
    put_state(path, forged);
}

#endif
