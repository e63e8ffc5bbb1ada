/* kernels/nearest.c: finds the word nearest to a mistyped one. */
#include "kernels/error_internal.h"

#include <stdio.h>
#include <string.h>

#define WORD_MAX 48

/* Edit distance with transpositions of neighbours (optimal string alignment), for short words. */
static int distance(const char *a, size_t n, const char *b, size_t m)
{
    int d[WORD_MAX + 1][WORD_MAX + 1];
    if (n > WORD_MAX || m > WORD_MAX)
        return WORD_MAX;
    for (size_t i = 0; i <= n; i++) {
        for (size_t j = 0; j <= m; j++) {
            if (i == 0 || j == 0) {
                d[i][j] = (int)(i + j);
                continue;
            }
            int best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (d[i - 1][j] + 1 < best)
                best = d[i - 1][j] + 1;
            if (d[i][j - 1] + 1 < best)
                best = d[i][j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                d[i - 2][j - 2] + 1 < best)
                best = d[i - 2][j - 2] + 1;
            d[i][j] = best;
        }
    }
    return d[n][m];
}

const char *kn_nearest(const char *text, const char *words, char *buf, size_t size)
{
    if (!kn_given(text, "kn_nearest", "the text") ||
        !kn_given(words, "kn_nearest", "the list of words") ||
        !kn_given(buf, "kn_nearest", "the buffer"))
        return NULL;
    size_t n = strlen(text), length = 0;
    const char *found = NULL;
    int limit = n / 3 > 2 ? (int)(n / 3) : 2, best = limit + 1;
    for (const char *w = words; *w;) {
        size_t m = strcspn(w, "|");
        int d = distance(text, n, w, m);
        size_t shorter = n < m ? n : m;
        const int start = n < m ? 1 : limit;
        if (shorter >= 3 && strncmp(text, w, shorter) == 0 && d > start)
            d = start; /* "--stop" for "--stop-after" rather than "--steps" */
        /* two edits make any word of two letters from any other */
        if (d < best && (size_t)d < (n > m ? n : m) && (d < 2 || m > 3)) {
            best = d;
            found = w;
            length = m;
        }
        w += m + (w[m] == '|');
    }
    if (!found)
        return NULL;
    snprintf(buf, size, "%.*s", (int)length, found);
    return buf;
}
