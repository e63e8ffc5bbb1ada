/* tests/state/linear_run.h: a small module and the folder of its run, for a test that saves there.
 * Statics: each program that includes it has its own. */
#ifndef KNAP_TESTS_STATE_LINEAR_RUN_H
#define KNAP_TESTS_STATE_LINEAR_RUN_H

#include "knap.h"
#include "tests/models/temp.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

static char dir[256]; /* of the run */
static kn_linear l;

static void begin(void)
{
    l = (kn_linear){ 0 };
    snprintf(dir, sizeof dir, "%s", temp_path("run"));
    KN_CHECK(kn_linear_init(&l, NULL, NULL, 2, 2) && kn_materialize(&l, KN_CPU, 1));
}

static void end(void)
{
    kn_module_free(&l);
    remove_temp();
}

/* A link is there, whatever it points to. Not by lstat, which a test may let fail. */
static bool is_there(const char *name)
{
    struct stat st;
    return fstatat(AT_FDCWD, temp_path(name), &st, AT_SYMLINK_NOFOLLOW) == 0;
}

#endif
