/* autograd/operands.c: the shapes of an operation's operands in its errors. */
#include "autograd/operands.h"
#include <string.h>

static _Thread_local const kn_operands *listed;

/* "[2,3]" of t. */
static const char *shape_of(const kn_tensor *t, char *text, size_t size)
{
    const char *shape = strchr(kn_describe(t, text, size), '[');
    return shape ? shape : text;
}

/* " (operands: f32[2,3], f32[4])", unless the text has the shape of each. */
static void append(char *text, size_t size)
{
    const kn_operands *o = listed; /* the outermost: what the program called */
    while (o && o->outer)
        o = o->outer;
    char one[128];
    bool known = true;
    for (int i = 0; o && i < o->n; i++)
        known = known && (!o->in[i] || strstr(text, shape_of(o->in[i], one, sizeof one)));
    if (known)
        return;
    size_t used = strlen(text);
    const char *before = " (operands: ";
    for (int i = 0; i < o->n && used + sizeof one + 16 < size; i++) {
        if (!o->in[i])
            continue;
        used += (size_t)snprintf(text + used, size - used, "%s%s", before,
                                 kn_describe(o->in[i], one, sizeof one));
        before = ", ";
    }
    if (*before == ',')
        snprintf(text + used, size - used, ")");
}

void kn_operands_begin(kn_operands *o, int n, kn_tensor *const *in)
{
    *o = (kn_operands){ in, n, listed };
    listed = o;
}

void kn_operands_end(const kn_operands *o)
{
    listed = o->outer;
}

__attribute__((constructor)) static void join_errors(void)
{
    kn_error_details = append;
}
