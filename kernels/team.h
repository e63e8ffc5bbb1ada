/* kernels/team.h (private): the threads that share a kernel's work.
 *
 * A thread that has a context has a team, started by the first kernel that is worth dividing. Work
 * is cut into parts; a free thread claims the next one, the caller too, and what a part has not yet
 * begun is claimed by the others. So a thread without a core delays no other for longer than one
 * piece of its work takes. A waiting thread spins for some microseconds and
 * then sleeps; it spins for longer only while nothing else wants the cores. The kernels use no
 * OpenMP, whose threads spin for each other for milliseconds, by settings that it reads at the
 * start of the program, before a library can change them. */
#ifndef KNAP_KERNELS_TEAM_H
#define KNAP_KERNELS_TEAM_H

#include <stdbool.h>
#include <stdint.h>

typedef void (*kn_part_fn)(const void *ctx, int64_t part);
typedef void (*kn_range_fn)(const void *ctx, int64_t begin, int64_t end);

/* How many threads a kernel should use for about this many bytes or operations of work: 1 on
 * workers, inside of parts, and for small work. */
int kn_threads_for(int64_t work);

/* Calls fn(ctx, part) once for each part in [0, parts) and returns when all are done. Parts run at
 * the same time, in any order and on any threads, this one among them: they must not wait for each
 * other. */
void kn_each_part(int64_t parts, kn_part_fn fn, const void *ctx);
/* Calls fn(ctx, begin, end) for ranges that make up [0, n), on up to `parts` threads at once; each
 * has a share of neighbouring ranges, and then takes of others' shares. Nothing for n == 0. */
void kn_each_range(int64_t parts, int64_t n, kn_range_fn fn, const void *ctx);

/* n pieces of work, shared by the parts of one kn_each_part: zeros at first but for n, parts. */
enum { KN_CLAIM_PARTS = 64 };
typedef struct kn_claims {
    int64_t n, parts;
    _Atomic int64_t taken[KN_CLAIM_PARTS]; /* of the shares; of more parts, several have one */
} kn_claims;
/* The next piece for this part: of its share, a run of neighbours, then of others'; -1: none is
 * left. Each piece is given once. */
int64_t kn_claim(kn_claims *c, int64_t part);

/* The processors that this process may use, OMP_NUM_THREADS of them if that is set. */
int kn_team_default_size(void);
/* Ends this thread's team; the next kernel that is worth dividing starts another. */
void kn_team_end(void);

#endif
