/* tests/state/forged.h: a state.json that somebody changed, with a checksum that fits. */
#ifndef KNAP_TESTS_STATE_FORGED_H
#define KNAP_TESTS_STATE_FORGED_H

#include "tensor/checksum.h"
#include "tests/kn_test.h"

enum { FORGED_TAIL = 20 }; /* the checksum's digits, a quote, a line, a brace, a line */

/* Replaces a text of the file by another one. */
static inline void forge_state(const char *path, const char *from, const char *to)
{
    char text[1 << 14], forged[(1 << 14) + 100];
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    text[n] = 0;
    char *at = strstr(text, from);
    KN_CHECK(at != NULL && n > FORGED_TAIL, "%s: %s", path, text);
    fclose(f);
    n = (size_t)snprintf(forged, sizeof forged, "%.*s%s%s", (int)(at - text), text, to,
                         at + strlen(from));
    snprintf(forged + n - FORGED_TAIL, FORGED_TAIL + 1, "%016llx\"\n}\n",
             (unsigned long long)kn_checksum_of(forged, n - FORGED_TAIL));
    f = fopen(path, "w");
    KN_CHECK(f && fwrite(forged, 1, n, f) == n && fclose(f) == 0, "%s", path);
}

#endif
