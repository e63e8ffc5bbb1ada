/* state/fits.c: whether a load may go on with what doesn't fit, and the caller's report of it. */
#include "state/load_internal.h"

#include <stdio.h>
#include <string.h>

void kn_loading_report(kn_loading *l)
{
    if (l->o->report && !l->reported) {
        *l->o->report = (kn_load_report){ l->missing.list, l->unexpected.list, l->mismatched.list };
        l->missing = l->unexpected = l->mismatched = (kn_names){ 0 };
        l->reported = true;
    }
    kn_names_free(&l->missing);
    kn_names_free(&l->unexpected);
    kn_names_free(&l->mismatched);
}

/* "2 missing (a, b)" behind what text[KN_LOADING_TEXT] has. */
static void tell_names(char *text, const kn_names *n, const char *how)
{
    const size_t size = KN_LOADING_TEXT - sizeof((kn_loading *)0)->first;
    size_t at = strlen(text);
    if (n->count == 0)
        return;
    snprintf(text + at, size - at, "%s%d %s (", at ? ", " : "", n->count, how);
    for (int i = 0; i < n->count && i < 3; i++) {
        at = strlen(text);
        snprintf(text + at, size - at, "%s%.80s", i ? ", " : "", n->list[i]);
    }
    at = strlen(text);
    snprintf(text + at, size - at, "%s)", n->count > 3 ? ", ..." : "");
}

/* .not_strict, and nothing is loaded: most likely .prefix is another's. */
static bool some_fit(const kn_loading *l)
{
    bool some = l->all.count == 0 || l->o->report;
    int names = 0;
    for (int i = 0; i < l->all.count; i++)
        some = some || l->item[i];
    for (int k = 0; k < l->sources; k++)
        names += l->source[k].names->count;
    return some || kn_fail("%s: no name fits: the module has %d (%.80s), the state %d%s; check "
                           ".prefix, or give a .report if nothing may fit",
                           l->what, l->all.count, l->missing.count ? l->missing.list[0] : "none",
                           names, *l->prefix ? " with and without the prefix" : "");
}

const char *kn_loading_tell(const kn_loading *l, char text[KN_LOADING_TEXT])
{
    *text = 0;
    if (!l->o->not_strict) {
        tell_names(text, &l->missing, "missing");
        tell_names(text, &l->unexpected, "unexpected");
    }
    if (!l->o->skip_mismatched)
        tell_names(text, &l->mismatched, "mismatched");
    if (*text && l->mismatched.count)
        strcat(text, l->first);
    return text;
}

bool kn_loading_fits(const kn_loading *l)
{
    char text[KN_LOADING_TEXT];
    if (*kn_loading_tell(l, text))
        return kn_fail(
            "%s: names don't fit: %s; it is of another model or optimizer: give "
            ".not_strict to load the names that fit, .skip_mismatched to leave out other "
            "shapes, .prefix or .renames where names differ",
            l->what, text);
    return kn_ok() && (!l->o->not_strict || some_fit(l));
}
