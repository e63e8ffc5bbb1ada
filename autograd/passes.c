/* autograd/passes.c: sets of backwards. Each gradient carries the set of those that are summed in
 * it, so the number of micro-batches in any gradients is the size of a union (nn/means.c).
 * Backwards that follow each other are one run of numbers. The scale of
 * their losses goes with them, so a step knows what its gradients are to be divided by, and whether
 * one number does. */
#include "autograd/passes.h"
#include "kernels/memory_internal.h"
#include "tensor/tensor_internal.h"
#include <string.h>

/* A gradient that no step ever consumes, and that only some backwards reach, would collect runs
 * without end. Past so many its oldest gaps close. */
enum { MOST_RUNS = 4096 };

bool kn_passes_add(kn_passes *s, int64_t first, int64_t last, kn_tensor *scale)
{
    int at = s->runs, end;
    while (at > 0 && s->run[at - 1].last + 1 >= first)
        at--;
    for (end = at; end < s->runs && s->run[end].first <= last + 1; end++) {
        first = s->run[end].first < first ? s->run[end].first : first;
        last = s->run[end].last > last ? s->run[end].last : last;
    }
    if (!kn_host_grow(&s->run, &s->room, s->runs + 1, sizeof *s->run))
        return false;
    if (s->runs == 0)
        s->scale = scale ? kn_tensor_ref(scale) : NULL;
    s->mixed = s->mixed || s->scale != scale;
    memmove(s->run + at + 1, s->run + end, (size_t)(s->runs - end) * sizeof *s->run);
    s->runs += 1 - (end - at);
    s->run[at] = (kn_pass_run){ first, last };
    if (s->runs <= MOST_RUNS)
        return true;
    s->run[1].first = s->run[0].first;
    memmove(s->run, s->run + 1, (size_t)--s->runs * sizeof *s->run);
    return true;
}

bool kn_passes_join(kn_passes *s, const kn_passes *from)
{
    for (int i = 0; i < from->runs; i++)
        if (!kn_passes_add(s, from->run[i].first, from->run[i].last, from->scale))
            return false;
    s->mixed = s->mixed || from->mixed;
    s->zeros = s->zeros || from->zeros;
    return true;
}

bool kn_passes_any(const kn_passes *s)
{
    return s->runs > 0 || s->zeros;
}

bool kn_passes_have(const kn_passes *s, int64_t pass)
{
    for (int i = s->runs - 1; i >= 0 && s->run[i].last >= pass; i--)
        if (s->run[i].first <= pass)
            return true;
    return false;
}

int64_t kn_passes_count(const kn_passes *s)
{
    int64_t n = 0;
    for (int i = 0; i < s->runs; i++)
        n += s->run[i].last - s->run[i].first + 1;
    return n;
}

void kn_passes_clear(kn_passes *s)
{
    s->runs = 0;
    s->mixed = s->zeros = false;
    kn_tensor_free(s->scale);
    s->scale = NULL;
}

void kn_passes_free(kn_passes *s)
{
    kn_passes_clear(s);
    kn_host_free(s->run);
    *s = (kn_passes){ 0 };
}
