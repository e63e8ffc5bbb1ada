/* kernels/environment.c: variables of the environment (environment.h). */
#include "kernels/environment.h"
#include "kernels/error.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Digits alone: strtoll takes spaces and signs, too. */
static bool digits(const char *text, int64_t *value, const char **end)
{
    char *stop;
    if (*text < '0' || *text > '9')
        return false;
    errno = 0;
    *value = strtoll(text, &stop, 10);
    *end = stop;
    return errno == 0;
}

bool kn_parse_size(const char *text, int64_t *bytes)
{
    static const char units[] = "KMGT";
    const char *rest;
    int64_t n;
    if (!digits(text, &n, &rest))
        return false;
    int shift = 0;
    for (int i = 0; *rest && units[i]; i++)
        if (strncasecmp(rest, &units[i], 1) == 0)
            shift = 10 * (i + 1);
    rest += shift > 0;
    if (shift > 0 && (strcasecmp(rest, "B") == 0 || strcasecmp(rest, "iB") == 0))
        rest += strlen(rest);
    if (*rest || n > INT64_MAX >> shift)
        return false;
    *bytes = n << shift;
    return true;
}

bool kn_parse_number(const char *text, int64_t least, int64_t most, int64_t *value)
{
    const char *rest;
    int64_t n;
    if (!digits(text, &n, &rest) || *rest || n < least || n > most)
        return false;
    *value = n;
    return true;
}

static const char *value_of(const char *name)
{
    const char *text = getenv(name);
    return text && *text ? text : NULL;
}

bool kn_env_size(const char *name, int64_t *bytes)
{
    const char *text = value_of(name);
    return !text || kn_parse_size(text, bytes) ||
           kn_fail("%s=%s: must be a number of bytes, with K, M, G or T for powers of 1024: 4G, "
                   "for example",
                   name, text);
}

bool kn_env_number(const char *name, int64_t least, int64_t most, int64_t *value)
{
    const char *text = value_of(name);
    return !text || kn_parse_number(text, least, most, value) ||
           kn_fail("%s=%s: must be a number from %lld to %lld", name, text, (long long)least,
                   (long long)most);
}

bool kn_env_switch(const char *name, bool *on)
{
    const char *text = value_of(name);
    if (text && strcmp(text, "0") != 0 && strcmp(text, "1") != 0)
        return kn_fail("%s=%s: must be 1 (on) or 0 (off)", name, text);
    if (text)
        *on = *text == '1';
    return true;
}
