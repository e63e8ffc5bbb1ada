/* state/set_aside.c: checkpoints that aren't whole, where a run goes on from an older one. */
#include "kernels/error_internal.h"
#include "state/checkpoint_internal.h"
#include "tensor/whole_file.h"

#include <stdio.h>

/* A name in dir that nothing has, RUN/step-N.damaged if that is one. */
static bool free_path(kn_path *path, const char *dir, int64_t step)
{
    char name[KN_FOLDER_NAME], again[16] = "";
    kn_folder_name(name, step, KN_DAMAGED);
    for (int i = 2; i < 1000; i++) {
        *path = kn_path_of(dir, name, again);
        const int there = kn_folder_find(path->text);
        if (there <= 0)
            return there == 0;
        snprintf(again, sizeof again, "-%d", i);
    }
    return kn_fail("checkpoint: there is no end of %s/%s; remove some", dir, name);
}

static bool set_aside(const char *dir, const kn_listed *one)
{
    kn_path to;
    const kn_path from = kn_path_of(dir, one->name, "");
    if (!free_path(&to, dir, one->step) || !kn_folder_rename(from.text, to.text) ||
        !kn_sync_folder(dir))
        return false;
    fprintf(stderr, "knap: %s is set aside as %s; no run counts, replaces or removes it there\n",
            from.text, to.text);
    return true;
}

/* Those that are still there as they were when they were passed over. What lies in RUN itself no
 * save counts or replaces. */
static bool set_all_aside(const char *dir, const kn_listing *passed)
{
    kn_listing l;
    bool ok = kn_folder_list(&l, dir);
    for (int i = 0; ok && i < l.count; i++) /* a claim may have renamed it meanwhile */
        if (*l.list[i].name && kn_listing_has(passed, &l.list[i], false))
            ok = set_aside(dir, &l.list[i]);
    kn_listing_free(&l);
    return ok;
}

/* The link to the best may have named one of them. */
static bool set_links(kn_run_folder *f)
{
    kn_listing l = { 0 };
    bool ok = f->lock < 0 || kn_folder_recover(f->dir, &l);
    kn_listing_free(&l);
    return ok;
}

bool kn_run_folder_set_aside(kn_run_folder *f, const kn_checkpoint *c)
{
    if (!kn_given(f, "kn_run_folder_set_aside", "the folder") ||
        !kn_given(c, "kn_run_folder_set_aside", "the checkpoint"))
        return false;
    if (f->saving) /* on all ranks alike */
        return kn_fail("kn_run_folder_set_aside: a save runs in the background; call this before "
                       "the first one, or after kn_checkpoint_wait");
    if (!kn_hosts_begin_slow(f->comm))
        return false;
    const bool some = kn_rank(f->comm) == 0 && c->passed.count > 0 &&
                      kn_are_same(kn_path_above(c->dir).text, f->dir); /* of this run */
    return kn_hosts_end_slow(f->comm,
                             some ? set_all_aside(f->dir, &c->passed) && set_links(f) : kn_ok());
}
