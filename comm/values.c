/* comm/values.c: what a program's ranks tell each other in passing: a number, and bytes of which
 * one rank alone knows how many there are. On the host, and over when the function returns. */
#include "comm/values.h"
#include "comm/comm_internal.h"
#include <math.h>
#include <string.h>

/* *c becomes the ranks that it stands for; NULL stays where this process is the only one. */
static bool ranks_of(kn_comm **c, const char *what)
{
    return kn_ok() && (*c || kn_comm_default(c, what));
}

bool kn_hosts_broadcast(kn_comm *c, void *data, size_t bytes, int root, const char *label)
{
    return kn_comm_size(c) == 1 ||
           kn_broadcast(c, data, (int64_t)bytes, root, kn_compute_stream(KN_CPU), label);
}

bool kn_hosts_sum(kn_comm *c, int64_t *data, int64_t count, const char *label)
{
    return kn_comm_size(c) == 1 ||
           kn_all_reduce_i64(c, data, count, kn_compute_stream(KN_CPU), label);
}

bool kn_hosts_max(kn_comm *c, float *data, int64_t count, const char *label)
{
    return kn_comm_size(c) == 1 ||
           kn_all_reduce_max(c, data, count, kn_compute_stream(KN_CPU), label);
}

bool kn_hosts_begin_slow(kn_comm *c)
{
    if (!kn_agree(c, kn_ok()))
        return false;
    kn_comm_suspend_timeout(c);
    return true;
}

bool kn_hosts_end_slow(kn_comm *c, bool ok)
{
    ok = kn_agree(c, ok);
    kn_comm_resume_timeout(c);
    return ok;
}

static bool add_up(kn_comm *c, double *x, const char *what)
{
    if (!ranks_of(&c, what))
        return false;
    return kn_comm_size(c) == 1 ||
           (kn_all_reduce(c, x, NULL, x, 1, KN_F64, KN_F64, kn_compute_stream(KN_CPU), what) &&
            kn_ok());
}

double kn_sum_over_ranks(kn_comm *c, double x)
{
    return add_up(c, &x, "kn_sum_over_ranks") ? x : NAN;
}

double kn_mean_over_ranks(kn_comm *c, double x)
{
    if (!ranks_of(&c, "kn_mean_over_ranks") || !add_up(c, &x, "kn_mean_over_ranks"))
        return NAN;
    return x / kn_comm_size(c);
}

void *kn_broadcast_bytes(kn_comm *c, const void *data, size_t *size, int root)
{
    static const char what[] = "kn_broadcast_bytes";
    if (!kn_ok() || !kn_given(size, what, "the place for the size") || !ranks_of(&c, what))
        return NULL;
    if (root < 0 || root >= kn_comm_size(c))
        return kn_fail_null("%s: root is %d, must be a rank from 0 to %d", what, root,
                            kn_comm_size(c) - 1);
    bool mine = kn_rank(c) == root;
    int64_t n = mine ? (int64_t)*size : 0;
    if (mine && ((!data && n > 0) || n < 0))
        return kn_fail_null("%s: rank %d gives %s of %zu bytes", what, root,
                            data ? "something" : "NULL", *size);
    if (!kn_hosts_broadcast(c, &n, sizeof n, root, what))
        return NULL;
    char *copy = kn_host_alloc((size_t)n + 1);
    if (!copy)
        return NULL;
    if (mine && n > 0)
        memcpy(copy, data, (size_t)n);
    copy[n] = 0;
    if (!kn_hosts_broadcast(c, copy, (size_t)n, root, what) || !kn_ok()) {
        kn_host_free(copy);
        return NULL;
    }
    *size = (size_t)n;
    return copy;
}
