/* tests/kernels/team_race_test.c: a thread that loses its core between its last part and its check
 * whether the caller sleeps. This file compiles team.c again, with pauses at these points. */
#include "kernels/team.h"
#include "tests/kn_test.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static _Thread_local bool calls;
static _Atomic int lasts;

static void nap(int ms)
{
    nanosleep(&(struct timespec){ .tv_nsec = ms * 1000000L }, NULL);
}

static void after_last(void)
{
    if (!calls && atomic_fetch_add(&lasts, 1) == 0)
        nap(150);
}

static void before_futex(int operation)
{
    if (calls && (operation & FUTEX_CMD_MASK) == FUTEX_WAIT)
        nap(100);
}

#undef atomic_fetch_sub
#define atomic_fetch_sub(p, n)                                                                     \
    ({                                                                                             \
        __auto_type was_ = atomic_fetch_sub_explicit(p, n, memory_order_seq_cst);                  \
        if ((void *)(p) == (void *)&t->left && was_ == 1)                                          \
            after_last();                                                                          \
        was_;                                                                                      \
    })
#define syscall(number, word, operation, ...)                                                      \
    (before_futex(operation), syscall(number, word, operation, __VA_ARGS__))
#define kn_each_part         paused_each_part
#define kn_each_range        paused_each_range
#define kn_threads_for       paused_threads_for
#define kn_team_default_size paused_default_size
#define kn_claim             paused_claim
#define kn_team_end          paused_end
#include "kernels/team.c"

static _Atomic int ran;

/* Part 1 is the last of the first round, part 2 of the second. */
static void part_of_round(const void *ctx, int64_t part)
{
    const int round = *(const int *)ctx;
    if (part == 0)
        nap(20); /* so that the other threads begin their parts */
    if (round == 1 && part > 0)
        nap(part == 1 ? 60 : 30);
    if (round == 2 && part == 2)
        nap(400);
    ran++;
}

KN_TEST(team_race, a_late_thread_of_the_round_before_takes_no_wake_away)
{
    calls = true;
    alarm(250);
    kn_set_threads(3);
    for (int round = 1; round <= 2; round++)
        kn_each_part(3, part_of_round, &round);
    KN_CHECK(ran == 6, "%d parts", ran);
    kn_team_end();
    alarm(0);
    kn_set_threads(1);
}
