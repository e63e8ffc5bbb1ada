/* state/folder_save.c: what a save does in the run's folder, and what it leaves there. */
#include "kernels/error_internal.h"
#include "state/attempt.h"
#include "state/saving.h"
#include "tensor/whole_file.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char SAVING[] = ".saving", OLD[] = ".old", REMOVING[] = ".removing", BEST[] = "best",
                  BEST_NEW[] = ".best.new";

/* ---- removing -------------------------------------------------------------------------------- */

bool kn_folder_remove_empty(const char *path)
{
    return KN_AGAIN(rmdir(path)) == 0 || errno == ENOENT ||
           kn_fail_system("checkpoint: cannot remove the folder %s: %m", path);
}

/* Ends an attempt at something on which no checkpoint depends: an error is told. */
static void tell(kn_attempt *a)
{
    char error[KN_ATTEMPT_TEXT];
    if (!kn_attempt_end(a, error) && !a->counts)
        fprintf(stderr, "knap: %s\n", error);
}

static void remove_leftover(const char *path)
{
    kn_attempt a;
    kn_attempt_begin(&a);
    kn_folder_remove(path);
    tell(&a);
}

int kn_folder_find(const char *path)
{
    struct stat st;
    return kn_look_at_link(path, &st);
}

bool kn_folder_rename(const char *from, const char *to)
{
    return KN_AGAIN(rename(from, to)) == 0 ||
           kn_fail_system("checkpoint: cannot rename %s to %s: %m", from, to);
}

/* Removes the checkpoint step-N or step-N.old, in two steps: as step-N.removing a part of
 * it is nothing. True once it is nothing; a part that stays is told. */
static bool remove_saved(const char *dir, const char *step, const char *suffix)
{
    const kn_path path = kn_path_of(dir, step, suffix), gone = kn_path_of(dir, step, REMOVING);
    kn_attempt a;
    kn_attempt_begin(&a);
    bool ok = kn_folder_remove(gone.text) && kn_folder_rename(path.text, gone.text);
    if (ok)
        kn_folder_remove(gone.text);
    tell(&a);
    return ok;
}

/* ---- which stay ------------------------------------------------------------------------------ */

/* The name that the link to the best has; "" if there is none. False with an error. */
static bool best_name(const char *dir, char name[KN_FOLDER_NAME])
{
    const kn_path path = kn_path_of(dir, BEST, "");
    ssize_t n;
    int tries = 0;
    while ((n = readlink(path.text, name, KN_FOLDER_NAME - 1)) < 0 && kn_try_again(&tries, false))
        ;
    name[n > 0 ? n : 0] = 0;
    return n >= 0 || errno == ENOENT || errno == EINVAL || /* EINVAL: it is no link */
           kn_fail_system("checkpoint: cannot read the link %s: %m", path.text);
}

/* RUN/best becomes a link to name; NULL: none. */
static bool link_best(const char *dir, const char *name)
{
    const kn_path from = kn_path_of(dir, BEST_NEW, ""), to = kn_path_of(dir, BEST, "");
    char now[KN_FOLDER_NAME];
    if (!best_name(dir, now))
        return false;
    if (strcmp(now, name ? name : "") == 0)
        return true;
    if (!name)
        return KN_AGAIN(unlink(to.text)) == 0 ||
               kn_fail_system("checkpoint: cannot remove the link %s: %m", to.text);
    return (KN_AGAIN(symlink(name, from.text)) == 0 ||
            kn_fail_system("checkpoint: cannot make the link %s: %m", from.text)) &&
           kn_folder_rename(from.text, to.text) && kn_sync_folder(dir);
}

/* RUN/best becomes a link to the best one known, if it is to be kept or there is a link: that may
 * be to one that was replaced. */
static bool set_best(const char *dir, bool keep_best, const kn_listing *l)
{
    char now[KN_FOLDER_NAME];
    const kn_listed *best = kn_listing_best(l);
    if (!best_name(dir, now))
        return false;
    const bool linked = kn_folder_step(now, "") >= 0;
    return (!linked && !(keep_best && best)) || link_best(dir, best ? best->name : NULL);
}

/* Removes those of l, the newest first, that aren't kept. */
static bool remove_others(const char *dir, const kn_folder_save *s, const kn_listing *l)
{
    char linked[KN_FOLDER_NAME];
    const kn_listed *best = s->keep_best ? kn_listing_best(l) : NULL; /* the link may have failed */
    bool ok = true;
    int kept = 0;
    if (!best_name(dir, linked)) /* one that it names must stay */
        return false;
    for (int i = 0; i < l->count; i++) {
        const kn_listed *c = &l->list[i];
        if (!*c->name)
            continue;
        if (c->doomed && !*s->saved.name) /* the run that replaced it has ended, and can't say so */
            fprintf(stderr, "knap: %s/%s was replaced by a run that began anew here, and goes\n",
                    dir, c->name);
        if (c->doomed || (!c->why[0] && s->keep > 0 && kept++ >= s->keep && c != best &&
                          strcmp(linked, c->name) != 0))
            ok = remove_saved(dir, c->name, "") && ok;
    }
    return ok;
}

/* After the save s, or with none: of the checkpoints l only those stay that are kept. */
static void tidy(const char *dir, const kn_folder_save *s, const kn_listing *l)
{
    kn_attempt a;
    kn_attempt_begin(&a);
    const bool sure = kn_listing_is_sure(l); /* else the next save does it */
    tell(&a);
    if (!sure)
        return;
    kn_attempt_begin(&a);
    set_best(dir, s->keep_best, l);
    tell(&a);
    kn_attempt_begin(&a); /* a folder without links is no reason to keep all */
    remove_others(dir, s, l);
    tell(&a);
}

/* ---- what dead saves left -------------------------------------------------------------------- */

/* RUN/step-N.saving with its state.json becomes RUN/step-N; one that lies there already was to be
 * replaced by it, and stays if that fails. */
static bool put_in_place(const char *dir, const char *step)
{
    const kn_path from = kn_path_of(dir, step, SAVING), to = kn_path_of(dir, step, ""),
                  old = kn_path_of(dir, step, OLD);
    const int replaces = kn_folder_find(to.text);
    if (replaces < 0 ||
        (replaces && (!kn_folder_remove(old.text) || !kn_folder_rename(to.text, old.text))))
        return false;
    if (!kn_folder_rename(from.text, to.text)) {
        if (replaces)
            (void)KN_AGAIN(rename(old.text, to.text)); /* else the next claim does it */
        return false;
    }
    if (!kn_sync_folder(dir))
        return false;
    if (replaces)
        remove_saved(dir, step, OLD);
    return true;
}

/* The leftovers of saves of one step. step-N.saving is whole, or nothing; of step-N.old the
 * replacement is in place, or has never come. */
static bool recover_step(const char *dir, const char *step)
{
    const kn_path saving = kn_path_of(dir, step, SAVING), to = kn_path_of(dir, step, ""),
                  old = kn_path_of(dir, step, OLD);
    int there = kn_folder_find(saving.text);
    const int whole =
        there > 0 ? kn_folder_find(kn_path_of(saving.text, KN_STATE_FILE, "").text) : 0;
    if (there < 0 || whole < 0 || (whole && !put_in_place(dir, step)))
        return false;
    if (there && !whole)
        remove_leftover(saving.text);
    there = kn_folder_find(old.text);
    const int replaced = there > 0 ? kn_folder_find(to.text) : 0;
    if (there > 0 && replaced > 0)
        remove_saved(dir, step, OLD);
    return there >= 0 && replaced >= 0 &&
           (!there || replaced || kn_folder_rename(old.text, to.text));
}

static bool recover_all(const char *dir)
{
    static const char *const end[] = { SAVING, OLD, REMOVING };
    char step[KN_FOLDER_NAME];
    kn_folder_names n;
    bool ok = kn_folder_names_read(&n, dir, NULL);
    for (int64_t i = 0; i < n.count; i++)
        for (int k = 0; ok && k < 3; k++) {
            const int64_t number = kn_folder_step(n.list[i].name, end[k]);
            if (number < 0)
                continue;
            kn_folder_name(step, number, "");
            ok = recover_step(dir, step);
            if (ok)
                remove_leftover(kn_path_of(dir, step, REMOVING).text);
        }
    kn_folder_names_free(&n);
    return ok;
}

bool kn_folder_recover(const char *dir, kn_listing *l)
{
    if (!recover_all(dir))
        return false;
    remove_leftover(kn_path_of(dir, BEST_NEW, "").text);
    if (!kn_folder_list(l, dir))
        return false;
    tidy(dir, &(kn_folder_save){ 0 }, l);
    return true;
}

/* ---- a save ---------------------------------------------------------------------------------- */

static bool make_folder(const char *path)
{
    return KN_AGAIN(mkdir(path, 0777)) == 0 ||
           kn_fail_system("checkpoint: cannot make the folder %s: %m", path);
}

/* The checkpoints that the next save of f replaces: all, or the rest of those to replace. */
static bool list_replaced(kn_run_folder *f, const kn_listing *l)
{
    json_decref(f->replaces);
    f->replaces = json_array();
    bool ok = f->replaces != NULL;
    for (int i = 0; ok && i < l->count; i++)
        if (l->list[i].doomed || (f->overwrites && !l->list[i].why[0]))
            ok = json_array_append_new(f->replaces, json_string(l->list[i].id)) == 0;
    return ok || kn_fail_memory("the list of checkpoints that are replaced");
}

bool kn_folder_begin(kn_run_folder *f, kn_folder_save *s)
{
    kn_listing l = { 0 };
    kn_folder_name(s->saved.name, s->saved.step, "");
    /* Without a lock another run may be saving here, and its leftovers can't be told from this
     * run's: only what is in the way of the step that is saved next is put right. */
    bool ok = f->lock < 0 ? recover_step(f->dir, s->saved.name) && kn_folder_list(&l, f->dir)
                          : kn_folder_recover(f->dir, &l);
    const int64_t known = kn_listing_number(&l);
    if (known > f->number) /* else the newest may be one that can't be read just now */
        f->number = known;
    s->saved.number = ++f->number;
    ok = ok && (!f->overwrites || kn_listing_is_sure(&l)) && list_replaced(f, &l);
    kn_listing_free(&l);
    if (s->saved.number > KN_FOLDER_SAVES)
        return kn_fail("checkpoint: %s has a checkpoint of the last number that there is; choose "
                       "another folder",
                       f->dir);
    if (ok)
        s->path = kn_path_of(f->dir, s->saved.name, SAVING);
    return ok && kn_folder_remove(s->path.text) && make_folder(s->path.text) &&
           make_folder(kn_path_of(s->path.text, "model", "").text) &&
           make_folder(kn_path_of(s->path.text, "optimizer", "").text);
}

void kn_folder_abandon(const kn_folder_save *s)
{
    char error[KN_ATTEMPT_TEXT];
    kn_attempt a;
    kn_attempt_begin(&a);
    /* Without state.json the others are nothing; with it, what stays of them would count. */
    if (*s->path.text && kn_remove_file(kn_path_of(s->path.text, KN_STATE_FILE, "").text) &&
        kn_sync_folder(s->path.text))
        kn_folder_remove(s->path.text);
    kn_attempt_end(&a, error); /* the next claim removes what stays */
}

bool kn_folder_commit(kn_run_folder *f, const kn_folder_save *s, const char *text)
{
    kn_listing l;
    kn_attempt a;
    if (!kn_sync_folder(s->path.text) || !kn_folder_state_write(s->path.text, text) ||
        !put_in_place(f->dir, s->saved.name))
        return false;
    kn_attempt_begin(&a);
    bool listed = kn_folder_list(&l, f->dir);
    tell(&a);
    for (int i = 0; i < l.count; i++) /* those that are damaged were there before */
        l.list[i].doomed |= f->overwrites && l.list[i].why[0] && l.list[i].step != s->saved.step;
    f->overwrites = false;
    if (listed)
        tidy(f->dir, s, &l);
    kn_listing_free(&l);
    return true;
}

/* ---- the best one ---------------------------------------------------------------------------- */

int64_t kn_run_folder_best(const kn_run_folder *f, double *score)
{
    struct {
        int64_t step;
        double score;
    } told = { -1, NAN };
    kn_listing l = { 0 };
    if (!kn_given(f, "kn_run_folder_best", "the folder") ||
        !kn_given(score, "kn_run_folder_best", "the place for the score") ||
        !kn_hosts_begin_slow(f->comm))
        return -1;
    if (f->saving && f->saving->finished)
        kn_saving_join(f->saving); /* until then nothing was replaced */
    if (kn_rank(f->comm) == 0 && kn_folder_list(&l, f->dir) && kn_listing_is_sure(&l)) {
        const kn_listed *best = f->overwrites ? NULL : kn_listing_best(&l);
        if (best) {
            told.step = best->step;
            told.score = best->score;
        }
    }
    kn_listing_free(&l);
    kn_hosts_broadcast(f->comm, &told, sizeof told, 0, "best checkpoint");
    kn_comm_resume_timeout(f->comm);
    *score = told.score;
    return kn_ok() ? told.step : -1;
}
