/* models/options_agree.c: ranks have the same options. */
#include "comm/comm_internal.h"
#include "fsdp/alike.h"
#include "kernels/error_internal.h"
#include "models/options.h"

#include <stdlib.h>
#include <string.h>

/* A number by its value (1e-3 is 0.001), everything else by its text. */
static bool add_option(kn_alike *a, const kn_option_record *r)
{
    const kn_option_kind kind = r->row->kind;
    const char *shown = *r->value ? r->value : "not given";
    char name[64];
    if (kind == KN_OPTION_PATH && strchr(r->value, '/'))
        shown = "a path";
    uint64_t bits = *r->value ? kn_hash_string(shown) : 0;
    if (*r->value && kind == KN_OPTION_INT)
        bits = (uint64_t)strtoll(r->value, NULL, 10);
    if (*r->value && kind == KN_OPTION_FLOAT)
        memcpy(&bits, &(double){ strtod(r->value, NULL) }, sizeof bits);
    snprintf(name, sizeof name, "--%s", r->name);
    return kn_alike_add(a, bits, name, kind == KN_OPTION_STRING && *r->value ? "'%s'" : "%s",
                        shown);
}

bool kn_options_agree(kn_options *o, kn_comm *comm)
{
    kn_alike a = { .advice = "give all ranks the same" };
    kn_option_record r;
    if (!kn_given(o, "kn_options_agree", "the options' struct") ||
        (!comm && !kn_comm_default(&comm, "kn_options_agree")))
        return false;
    bool help = kn_options_help_wanted(o),
         ok = kn_alike_add(&a, help, "--help", help ? "given" : "not given");
    for (int i = 0; ok && kn_options_record(o, i, &r); i++)
        ok = r.row->own || add_option(&a, &r);
    ok = ok && kn_alike_agree(&a, 1, comm, "options");
    kn_alike_free(&a);
    return ok;
}
