/* tests/state/linear_run.h: a small module and the folder of its run, for a test that saves there
 * and looks at what lies there, or changes it. Statics: each program that includes it has its
 * own. */
#ifndef KNAP_TESTS_STATE_LINEAR_RUN_H
#define KNAP_TESTS_STATE_LINEAR_RUN_H

#include "knap.h"
#include "tests/comm/comm_test.h"
#include "tests/models/temp.h"
#include "tests/kn_test.h"
#include "tests/state/forged.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <sys/stat.h>

static char dir[256]; /* of the run */
static kn_linear l;

static inline void begin(void)
{
    l = (kn_linear){ 0 };
    snprintf(dir, sizeof dir, "%s", temp_path("run"));
    KN_CHECK(kn_linear_init(&l, NULL, NULL, 2, 2) && kn_materialize(&l, KN_CPU, 1));
}

static inline void end(void)
{
    kn_module_free(&l);
    remove_temp();
}

/* What waited for the disk has given w's ranks their timeout back, as often as it took it. */
static inline bool has_its_timeout(kn_comm *w)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    kn_comm_set_timeout(w, 1000);
    bool ok =
        kn_barrier(w, s, "done") && kn_comm_get_timeout(w) == 1000 && kn_barrier(w, s, "seen");
    kn_comm_suspend_timeout(w);
    ok = isinf(kn_comm_get_timeout(w)) && ok;
    kn_comm_resume_timeout(w);
    return ok;
}

/* A link is there, whatever it points to. Not by lstat, which a test may let fail. On any
 * thread. */
static inline bool is_there(const char *name)
{
    char path[300];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", temp_folder, name);
    return fstatat(AT_FDCWD, path, &st, AT_SYMLINK_NOFOLLOW) == 0;
}

static inline bool links_to(const char *want)
{
    char name[64];
    ssize_t n = readlink(temp_path("run/best"), name, sizeof name - 1);
    name[n > 0 ? n : 0] = 0;
    return strcmp(name, want) == 0;
}

/* Its step, and frees it; -1 for NULL. */
static inline int64_t step_of(kn_checkpoint *c)
{
    int64_t step = c ? kn_checkpoint_step(c) : -1;
    kn_checkpoint_free(c);
    return step;
}

static inline int64_t newest(void)
{
    return step_of(kn_checkpoint_open(dir, NULL));
}

/* The only file of a step's model, as temp_path has it. */
static inline const char *model_file(const char *step)
{
    char name[128];
    snprintf(name, sizeof name, "run/%s/model/shard-00001-model-00001-of-00001.safetensors", step);
    return temp_path(name);
}

static inline void cut(const char *step)
{
    KN_CHECK(truncate(model_file(step), 100) == 0, "%s", step);
}

/* A folder, and those above it. */
static inline void make(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s", temp_path(name));
    for (char *p = path + 1; *p; p++)
        if (*p == '/') {
            *p = 0;
            mkdir(path, 0777);
            *p = '/';
        }
    KN_CHECK(mkdir(path, 0777) == 0, "%s", name);
}

#endif
