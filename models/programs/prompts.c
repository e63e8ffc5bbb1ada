/* models/programs/prompts.c: how the texts of generate begin. */
#include "models/programs/prompts.h"
#include "comm/values.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The text of a file, "-" for standard input, for kn_host_free. */
static char *read_text(const char *path)
{
    char *text = NULL, *copy = NULL;
    size_t room = 0;
    FILE *f = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    if (!f) {
        kn_fail_system("cannot open the prompt %s: %m", path);
        return NULL;
    }
    errno = 0;
    const ssize_t n = getdelim(&text, &room, 0, f);
    if (ferror(f) || (n < 0 && errno))
        kn_fail_system("cannot read the prompt %s: %m", path);
    else if (n > 0 && text[n - 1] == 0)
        kn_fail("the prompt %s has the character U+0000", path);
    else
        copy = kn_host_strdup(n > 0 ? text : "");
    free(text);
    if (f != stdin)
        fclose(f);
    return copy;
}

char *share_text(char *text, const char *what, kn_comm *world)
{
    int64_t size = text ? (int64_t)strlen(text) + 1 : 0;
    const bool ok = kn_agree(world, kn_ok()) &&
                    kn_hosts_broadcast(world, &size, sizeof size, 0, what) && size > 0 &&
                    (text || (text = kn_host_alloc((size_t)size))) &&
                    kn_hosts_broadcast(world, text, (size_t)size, 0, what);
    if (ok)
        return text;
    kn_host_free(text);
    return NULL;
}

static bool add(prompts *p, kn_prompt prompt)
{
    if (!kn_host_grow(&p->list, &p->room, p->count + 1, sizeof *p->list))
        return false;
    p->list[p->count++] = prompt;
    return true;
}

/* The parts of p->text between the characters `at`. */
static bool add_parts(prompts *p, const char *at, bool empty_too)
{
    bool ok = p->text != NULL;
    for (char *part = p->text, *next; ok && part; part = next) {
        next = part + strcspn(part, at);
        next = *next ? next : NULL;
        if (next)
            *next++ = 0;
        if (!empty_too && *part && part[strlen(part) - 1] == '\r')
            part[strlen(part) - 1] = 0;
        ok = (!empty_too && !*part) || add(p, (kn_prompt){ .text = part });
    }
    return ok;
}

/* Lists of ids with commas between them. */
static bool add_ids(prompts *p, const char *text)
{
    int64_t n = 0, begin = 0, room = 0;
    for (const char *at = text;; at++) {
        char *end;
        errno = 0;
        const long long id = strtoll(at, &end, 10);
        if (end == at || errno || id < 0 || (*end && *end != ',' && *end != KN_OPTION_BETWEEN[0]))
            return kn_fail("--prompt-ids %.100s: give ids with commas between them", text);
        if (!kn_host_grow(&p->ids, &room, n + 1, sizeof *p->ids))
            return false;
        p->ids[n++] = id;
        at = end;
        if (*end == ',')
            continue;
        if (!add(p, (kn_prompt){ .count = n - begin }))
            return false;
        begin = n;
        if (!*end)
            break;
    }
    begin = 0;
    for (int64_t i = 0; i < p->count; begin += p->list[i++].count)
        p->list[i].ids = p->ids + begin;
    return true;
}

bool prompts_read(prompts *p, const prompt_settings *s, kn_comm *world)
{
    const char *file = s->file ? s->file : s->lines;
    if (s->ids)
        return add_ids(p, s->ids);
    p->text = file ? share_text(kn_rank(world) == 0 ? read_text(file) : NULL, "the prompt", world)
                   : kn_host_strdup(s->prompt);
    if (s->file)
        return p->text && add(p, (kn_prompt){ .text = p->text });
    return add_parts(p, s->lines ? "\n" : KN_OPTION_BETWEEN, !s->lines) &&
           (p->count > 0 ||
            kn_fail("--prompts %s has no prompt; write one a line", s->lines ? s->lines : ""));
}

bool prompts_fit(const prompts *p, int64_t vocab)
{
    for (int64_t i = 0; i < p->count; i++)
        for (int64_t k = 0; p->list[i].ids && k < p->list[i].count; k++)
            if (p->list[i].ids[k] >= vocab)
                return kn_fail("--prompt-ids: %lld is outside the model's vocabulary of %lld",
                               (long long)p->list[i].ids[k], (long long)vocab);
    return true;
}

void prompts_free(prompts *p)
{
    kn_host_free(p->list);
    kn_host_free(p->text);
    kn_host_free(p->ids);
}
