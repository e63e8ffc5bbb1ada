/* tests/comm/meet_test.c: ranks meet, or say why they can't, in the same words wherever they meet:
 * over shared memory, and over TCP as torchrun starts them or at a place of their own. */
#include "tests/comm/program_test.h"

typedef enum way { ON_ONE_HOST, ON_HOSTS, AT_A_PLACE, WAYS } way;

/* Starts rank r of n that runs words; at: the job's port. */
static void start_by(way w, result *r, int rank, int n, int at, const char *words)
{
    char line[400];
    memset(r, 0, sizeof *r);
    if (w == AT_A_PLACE)
        snprintf(line, sizeof line, "RANK=%d WORLD_SIZE=%d KNAP_RENDEZVOUS=tcp:localhost:%d %s",
                 rank, n, at, words);
    else
        snprintf(line, sizeof line,
                 "RANK=%d WORLD_SIZE=%d LOCAL_RANK=%d LOCAL_WORLD_SIZE=%d MASTER_ADDR=127.0.0.%d "
                 "MASTER_PORT=%d %s",
                 rank, n, w == ON_HOSTS ? 0 : rank, w == ON_HOSTS ? 1 : n, w == ON_HOSTS ? 2 : 1,
                 at, words);
    start(r, line);
}

static void check_refused(way w, result *r, const char *says)
{
    finish(r);
    KN_CHECK(r->status == 1 && strstr(r->errors, says), "way %d: %s", w, r->errors);
}

/* Ranks of another size, and one too many: each gets an error, and the others go on. */
KN_TEST(meet, a_wrong_rank_is_refused_and_the_job_goes_on)
{
    static result r[3], wrong;
    for (way w = 0; w < WAYS; w++) {
        int at = kn_test_ports(20);
        start_by(w, &r[0], 0, 3, at, "ok");
        start_by(w, &wrong, 1, 4, at, "ok");
        check_refused(w, &wrong, "WORLD_SIZE is 3 on rank 0 and 4 on rank 1");
        start_by(w, &wrong, 3, 4, at, "ok");
        check_refused(w, &wrong, "WORLD_SIZE is 3 on rank 0 and 4 on rank 3");
        start_by(w, &r[1], 1, 3, at, "ok");
        start_by(w, &wrong, 1, 3, at, "ok");
        order_by_end(&r[1], &wrong);
        check_refused(w, &wrong, "two processes say that they are rank 1 of 3");
        start_by(w, &r[2], 2, 3, at, "ok");
        check_good(r, 3);
    }
}

/* A rank that its launcher restarts replaces the one that connected and died. */
KN_TEST(meet, a_rank_that_left_makes_room)
{
    static result r[3], gone;
    for (way w = 0; w < WAYS; w++) {
        int at = kn_test_ports(20);
        start_by(w, &r[0], 0, 3, at, "ok");
        start_by(w, &gone, 1, 3, at, "ok");
        usleep(300000);
        kill(gone.pid, SIGKILL);
        finish(&gone);
        start_by(w, &r[2], 2, 3, at, "ok");
        start_by(w, &r[1], 1, 3, at, "ok");
        check_good(r, 3);
    }
}

/* ---- who doesn't come ------------------------------------------------------------------------ */

KN_TEST(meet, ranks_that_do_not_come)
{
    static result r;
    for (way w = 0; w < WAYS; w++)
        for (int rank = 0; rank < 2; rank++) {
            start_by(w, &r, rank, 2, kn_test_ports(20), "KNAP_TIMEOUT=0.3 ok");
            check_refused(
                w, &r, rank == 0 ? "and rank 1 did not come" : "waited 0.3 s for rank 0 to come");
            KN_CHECK(w != ON_HOSTS || rank == 0 || strstr(r.errors, "to come at 127.0.0.2"), "%s",
                     r.errors);
            KN_CHECK(lines_with(r.errors, "\n") == 1, "%s", r.errors);
        }
}

/* Starts these ranks of the sizes, as long as rank 0 runs out of time before the others are there.
 * All end with status 1, and so many with the text: rank 0 and the one that is wrong, or all that
 * wait. */
static void some_say(way w, const int (*rank_and_size)[2], int n, int most, const char *text)
{
    static result r[3];
    int said = 0;
    for (double seconds = 0.6; said < most; seconds *= 2) {
        int at = kn_test_ports(20);
        said = 0;
        for (int k = 0; k < n; k++)
            start_by(w, &r[k], rank_and_size[k][0], rank_and_size[k][1], at, hasty_words(seconds));
        for (int k = 0; k < n; k++) {
            finish(&r[k]);
            KN_CHECK(r[k].status == 1, "%d", r[k].status);
            said += strstr(r[k].errors, text) != NULL;
        }
        KN_CHECK(said >= most || ran_out_of(r[0].errors, seconds), "way %d: %s%s%s", w, r[0].errors,
                 r[1].errors, n > 2 ? r[2].errors : "");
    }
    KN_CHECK(strstr(r[0].errors, text) && strstr(r[0].errors, " did not come"), "%s", r[0].errors);
}

/* A wrong rank gets an error, and rank 0 keeps waiting, and then says why, too; over TCP to all. */
KN_TEST(meet, rank_0_says_who_is_missing_or_wrong)
{
    for (way w = 0; w < WAYS; w++) {
        some_say(w, (const int[][2]){ { 0, 3 }, { 1, 3 } }, 2, w == ON_ONE_HOST ? 1 : 2,
                 "rank 2 did not come");
        some_say(w, (const int[][2]){ { 0, 2 }, { 1, 3 } }, 2, 2,
                 "WORLD_SIZE is 2 on rank 0 and 3 on rank 1");
        some_say(w, (const int[][2]){ { 0, 3 }, { 1, 3 }, { 1, 3 } }, 3, w == ON_ONE_HOST ? 2 : 3,
                 "two processes say that they are rank 1 of 3");
    }
}
