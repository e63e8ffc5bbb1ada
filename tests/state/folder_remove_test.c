/* tests/state/folder_remove_test.c: checkpoints are removed while another user puts links in their
 * place. */
#include "knap.h"
#include "tests/models/temp.h"
#include "tests/state/operations.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>

/* ---- another user, before any one operation on folders --------------------------------------- */

static atomic_int left; /* operations until the swap; 0: none comes */
static const char *victim;

/* The victim moves away, and a link to a home comes in its place. */
static int swap(const char *operation)
{
    (void)operation;
    if (atomic_load(&left) == 0 || atomic_fetch_sub(&left, 1) > 1)
        return 0;
    renameat(AT_FDCWD, temp_path(victim), AT_FDCWD, temp_path("moved"));
    KN_CHECK(symlinkat(temp_path("home"), AT_FDCWD, temp_path(victim)) == 0 || errno == ENOENT ||
             errno == EEXIST);
    return 0;
}

/* ---- what stays ------------------------------------------------------------------------------ */

static bool is_there(const char *name)
{
    return access(temp_path(name), F_OK) == 0;
}

static void make(const char *name)
{
    KN_CHECK(mkdir(temp_path(name), 0777) == 0, "%s", name);
}

#define LEFTOVER "run/step-00000001.removing"

static void begin(void)
{
    make("home");
    make("home/model");
    write_temp("home/letter", "x", 1);
    write_temp("home/model/letter", "x", 1);
    make("run");
    make(LEFTOVER);
    make(LEFTOVER "/model");
    make(LEFTOVER "/optimizer");
    write_temp(LEFTOVER "/model/letter", "x", 1);
    write_temp(LEFTOVER "/optimizer/letter", "x", 1);
    write_temp(LEFTOVER "/state.json", "x", 1);
}

/* A claim removes the leftover; before its at-th operation the victim is swapped. False: it has
 * fewer. */
static bool claim_while(int at)
{
    begin();
    atomic_store(&left, at);
    operation_hook = swap;
    kn_run_folder *f = kn_run_folder_claim(temp_path("run"));
    operation_hook = NULL;
    bool swapped = atomic_exchange(&left, 0) == 0;
    KN_CHECK(f != NULL);
    kn_run_folder_release(f);
    KN_CHECK(is_there("home/letter") && is_there("home/model/letter"),
             "%s is a link from operation %d on, and what it names goes", victim, at);
    KN_CHECK(swapped || !is_there(LEFTOVER));
    remove_temp();
    return swapped;
}

KN_TEST(folder_remove, a_link_that_comes_meanwhile_is_not_followed)
{
    static const char *const victims[] = { LEFTOVER, LEFTOVER "/model", LEFTOVER "/optimizer" };
    for (size_t i = 0; i < 3; i++) {
        int at = 1;
        for (victim = victims[i]; claim_while(at); at++)
            ;
        KN_CHECK(at > 8, "%d operations remove three folders and three files", at);
    }
}
