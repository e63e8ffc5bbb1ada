/* state/checkpoint_open.c: chooses a checkpoint and opens it on all ranks.
 *
 * Rank 0 names one; each rank tries it; if some rank finds it damaged, rank 0 names the next. An
 * attempt's errors don't count: the newest may be damaged, and a run that saves there may remove
 * what is being opened.
 *
 * One that can't be read just now (kn_is_passing) isn't damaged: that is an error. A run that went
 * on from an older one would remove it in time. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "state/attempt.h"
#include "state/checkpoint_internal.h"
#include "tensor/files.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define ATTEMPTS 200 /* while a run removes what was chosen */

/* Rank 0's word to the others: a folder, or (empty) that there is nothing left. */
typedef struct choice {
    char dir[KN_FOLDER_PATH], id[KN_FOLDER_ID], why[256]; /* why: it is known to be damaged */
    bool foreign;                                         /* tensors that another program wrote */
    uint64_t glance;                                      /* of those (kn_pieces_glance) */
} choice;

/* An attempt's error: first the number of kn_error_number. "": none. */
typedef struct failure {
    int number;
    char text[KN_ATTEMPT_TEXT];
} failure;

/* Rank 0's search. */
typedef struct search {
    const char *dir;    /* as given */
    kn_listing refused; /* by name, step and number */
    bool folder;        /* dir is a run's: there may be others */
    bool checks;        /* on all ranks: the tensors' bytes, too */
    char first[KN_ATTEMPT_TEXT], first_dir[KN_FOLDER_PATH]; /* the first that isn't whole */
    int step;                                               /* attempts */
} search;

/* ---- rank 0 chooses -------------------------------------------------------------------------- */

/* A link to a checkpoint, as RUN/best: its target, so that a new one doesn't come between. */
static bool follow(const char *dir, char to[KN_FOLDER_PATH])
{
    struct stat st;
    const int there = kn_look_at_link(dir, &st);
    char *real = NULL;
    if (there > 0 && S_ISLNK(st.st_mode) && !(real = kn_real_path(dir)))
        return false;
    const bool ok = there >= 0 && kn_folder_fits(real ? real : dir);
    snprintf(to, KN_FOLDER_PATH, "%s", real ? real : dir);
    free(real);
    return ok;
}

/* A folder without a checkpoint: the tensors of another program, if there are some. */
static bool choose_foreign(const search *s, choice *it)
{
    if (s->first[0] || !kn_pieces_are_there(s->dir))
        return kn_ok();
    kn_pieces *p = kn_pieces_open(s->dir);
    bool ok = p && kn_pieces_glance(p, &it->glance);
    kn_pieces_close(p);
    it->foreign = true;
    snprintf(it->dir, sizeof it->dir, "%s", s->dir);
    return ok;
}

/* The newest that wasn't refused, nor replaced by another run, into *one; .dir stays empty where
 * there is none. */
static bool choose(search *s, choice *it, kn_listed *one)
{
    kn_listing l;
    bool ok = kn_folder_list(&l, s->dir) && kn_listing_is_sure(&l);
    *it = (choice){ 0 };
    s->folder = false;
    for (int i = 0; i < l.count; i++)
        s->folder |= l.list[i].name[0] != 0;
    for (int i = 0; ok && i < l.count; i++) {
        if (l.list[i].doomed || kn_listing_has(&s->refused, &l.list[i], true))
            continue;
        *one = l.list[i];
        if (*one->name)
            memcpy(it->dir, kn_path_of(s->dir, one->name, "").text, sizeof it->dir);
        else
            ok = follow(s->dir, it->dir);
        memcpy(it->id, one->id, sizeof it->id);
        memcpy(it->why, one->why, sizeof it->why);
        break;
    }
    ok = ok && (l.count > 0 || choose_foreign(s, it));
    kn_listing_free(&l);
    return ok && kn_ok();
}

/* After an attempt that failed: is that one still there, as it was? Else a run replaced or removed
 * it meanwhile. */
static bool is_still_there(const search *s, const kn_listed *one)
{
    kn_listing l;
    bool there = kn_folder_list(&l, s->dir) && kn_listing_has(&l, one, true);
    kn_listing_free(&l);
    return there;
}

static bool refuse(search *s, const kn_listed *one, const choice *it, const failure *f)
{
    if (!it->foreign && !is_still_there(s, one)) {
        nanosleep(&(struct timespec){ .tv_nsec = 5000000 }, NULL);
        return true;
    }
    if (kn_is_passing(f->number)) {
        errno = f->number;
        return kn_fail_system("%s; no other checkpoint is taken for it: try again, or name "
                              "another one",
                              f->text);
    }
    if (!s->first[0]) {
        snprintf(s->first, sizeof s->first, "%s", f->text);
        snprintf(s->first_dir, sizeof s->first_dir, "%s", it->dir);
    }
    if (!kn_host_grow(&s->refused.list, &s->refused.room, s->refused.count + 1, sizeof *one))
        return false;
    s->refused.list[s->refused.count++] = *one;
    return true;
}

static bool refuse_empty(const char *dir)
{
    struct stat st;
    const int there = kn_look(dir, &st);
    if (there == 0)
        return kn_fail("%s holds no checkpoint: there is no such folder", dir);
    if (there > 0 && !S_ISDIR(st.st_mode))
        return kn_fail("%s holds no checkpoint: it is a file; give the folder of a run or of a "
                       "checkpoint",
                       dir);
    return there > 0 && kn_fail("%s holds no checkpoint: there is no %s, nor a folder step-N with "
                                "one, nor a .safetensors file; give a folder that a trainer's "
                                "--out (kn_checkpoint_save) wrote",
                                dir, KN_STATE_FILE);
}

/* Nothing is left to try. */
static bool give_up(const search *s)
{
    if (!s->first[0])
        return refuse_empty(s->dir);
    return s->folder ? kn_fail("%s; no other checkpoint in %s is whole; a training that begins "
                               "anew there replaces them (a trainer's --overwrite)",
                               s->first, s->dir)
                     : kn_fail("%s", s->first);
}

/* ---- all ranks try --------------------------------------------------------------------------- */

static bool try_one(kn_checkpoint *c, const choice *it, bool checks, failure *f)
{
    kn_attempt a;
    kn_attempt_begin(&a);
    c->dir = it->why[0] ? NULL : kn_host_strdup(it->dir);
    if (it->why[0])
        kn_fail("%s", it->why);
    uint64_t glance = 0;
    bool same = false;
    if (c->dir && it->foreign)
        same = kn_checkpoint_read_foreign(c) && kn_pieces_glance(c->part[KN_PART_MODEL], &glance) &&
               glance == it->glance;
    else if (c->dir)
        same = kn_checkpoint_read(c) && strcmp(c->id, it->id) == 0;
    if (kn_ok() && !same)
        kn_fail("%s: ranks see different files there", c->dir);
    if (checks && kn_ok())
        kn_checkpoint_check(c);
    bool ok = kn_attempt_end(&a, f->text);
    f->number = a.number;
    if (!ok)
        kn_checkpoint_clear(c);
    return ok;
}

/* The failure of the first rank that could not read it just now, else of the first that found it
 * damaged, on every rank. *failed: whether one did. */
static bool compare(kn_comm *comm, bool ok, failure *f, bool *failed)
{
    const int ranks = kn_comm_size(comm);
    const int place = ranks - kn_rank(comm) + (kn_is_passing(f->number) ? ranks : 0);
    float who = ok ? 0 : (float)place;
    if (!kn_hosts_max(comm, &who, 1, "checkpoint"))
        return false;
    *failed = who > 0;
    const int from = ranks - ((int)who > ranks ? (int)who - ranks : (int)who);
    return !*failed || kn_hosts_broadcast(comm, f, sizeof *f, from, "checkpoint");
}

/* One attempt. *done: opened on all ranks. False with an error. */
static bool attempt(kn_checkpoint *c, search *s, bool *done)
{
    choice it = { 0 };
    kn_listed one = { 0 };
    failure f = { 0 };
    bool first = kn_rank(c->comm) == 0, failed;
    if (first && (!choose(s, &it, &one) || (!it.dir[0] && !give_up(s))))
        return false;
    if (!kn_hosts_broadcast(c->comm, &it, sizeof it, 0, "checkpoint"))
        return false;
    bool ok = try_one(c, &it, s->checks, &f);
    if (!compare(c->comm, ok, &f, &failed))
        return false;
    *done = !failed;
    if (failed)
        kn_checkpoint_clear(c);
    return !failed || !first || refuse(s, &one, &it, &f);
}

static bool open_all(kn_checkpoint *c, search *s)
{
    bool done = false;
    for (int i = 0; i < ATTEMPTS && !done; i++)
        if (!attempt(c, s, &done))
            return false;
    if (done && s->first[0])
        fprintf(stderr, "knap: %s isn't whole: %s; %s is taken, the newest that is\n", s->first_dir,
                s->first, c->dir);
    return done || kn_fail("%s changes faster than it can be opened; try again", s->dir);
}

static kn_checkpoint *open_dir(const char *dir, kn_comm *comm, bool checks, const char *what)
{
    if (!kn_given_path(dir, what, "the folder"))
        return NULL;
    comm = comm ? comm : kn_world();
    search s = { .dir = dir, .checks = checks };
    kn_checkpoint *c = kn_host_calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->comm = comm;
    bool ok = kn_hosts_begin_slow(comm) && kn_hosts_end_slow(comm, open_all(c, &s));
    c->passed = s.refused;
    if (ok)
        return c;
    kn_checkpoint_free(c);
    return NULL;
}

kn_checkpoint *kn_checkpoint_open(const char *dir, kn_comm *comm)
{
    return open_dir(dir, comm, false, "kn_checkpoint_open");
}

kn_checkpoint *kn_checkpoint_open_checked(const char *dir, kn_comm *comm)
{
    return open_dir(dir, comm, true, "kn_checkpoint_open_checked");
}

void kn_checkpoint_free(kn_checkpoint *c)
{
    if (!c)
        return;
    kn_checkpoint_clear(c);
    kn_listing_free(&c->passed);
    kn_host_free(c);
}

/* ---- what it holds --------------------------------------------------------------------------- */

int64_t kn_checkpoint_step(const kn_checkpoint *c)
{
    return kn_given(c, "kn_checkpoint_step", "the checkpoint") ? c->step : 0;
}

const char *kn_checkpoint_folder(const kn_checkpoint *c)
{
    return kn_given(c, "kn_checkpoint_folder", "the checkpoint") ? c->dir : NULL;
}

const char *kn_checkpoint_config(const kn_checkpoint *c)
{
    return kn_given(c, "kn_checkpoint_config", "the checkpoint") ? c->config : NULL;
}

const char *kn_checkpoint_record(const kn_checkpoint *c)
{
    return kn_given(c, "kn_checkpoint_record", "the checkpoint") ? c->record : NULL;
}

const void *kn_checkpoint_file_data(const kn_checkpoint *c, const char *name, size_t *size)
{
    if (!kn_given(c, "kn_checkpoint_file_data", "the checkpoint") ||
        !kn_given(name, "kn_checkpoint_file_data", "the name") ||
        !kn_given(size, "kn_checkpoint_file_data", "the place for the size"))
        return NULL;
    for (int i = 0; i < c->files; i++)
        if (strcmp(c->file[i].name, name) == 0) {
            *size = c->file[i].size;
            return c->file[i].data;
        }
    return NULL;
}

static int find(const kn_checkpoint *c, const char *name, const char *what)
{
    if (!kn_given(c, what, "the checkpoint") || !kn_given(name, what, "the name") ||
        !c->part[KN_PART_MODEL])
        return -1;
    return kn_pieces_find(c->part[KN_PART_MODEL], name);
}

bool kn_checkpoint_has(const kn_checkpoint *c, const char *name)
{
    return find(c, name, "kn_checkpoint_has") >= 0;
}

bool kn_checkpoint_describe(const kn_checkpoint *c, const char *name, kn_array *array)
{
    int i = find(c, name, "kn_checkpoint_describe");
    if (!kn_ok() || !kn_given(array, "kn_checkpoint_describe", "the place for the array"))
        return false;
    if (i < 0)
        return kn_fail("%s: its model has no tensor '%s'", c->dir, name);
    const kn_piece *p = kn_pieces_tensor(c->part[KN_PART_MODEL], i);
    *array = kn_array_make(NULL, p->dtype, p->ndim, p->shape);
    return true;
}

kn_tensor *kn_checkpoint_get(const kn_checkpoint *c, const char *name)
{
    kn_array a;
    return kn_checkpoint_describe(c, name, &a)
               ? kn_pieces_get(c->part[KN_PART_MODEL], kn_pieces_find(c->part[KN_PART_MODEL], name))
               : NULL;
}

int kn_checkpoint_own_ranks(const kn_checkpoint *c)
{
    return kn_given(c, "kn_checkpoint_own_ranks", "the checkpoint")
               ? (int)json_array_size(json_object_get(c->state, "own"))
               : 0;
}

kn_state *kn_checkpoint_own(const kn_checkpoint *c, int rank)
{
    const int ranks = kn_checkpoint_own_ranks(c);
    if (!kn_ok())
        return NULL;
    if (rank < 0 || rank >= ranks)
        return kn_fail_null("%s: there is nothing of rank %d: %d gave .own", c->dir, rank, ranks);
    json_t *own = json_array_get(json_object_get(c->state, "own"), (size_t)rank);
    kn_state *s = kn_state_new();
    if (s &&
        (json_is_object(own) || kn_fail("%s: \"own\" of rank %d is no object; the checkpoint "
                                        "is damaged",
                                        c->dir, rank)) &&
        kn_state_values_add(s, own, c->dir))
        return s;
    kn_state_free(s);
    return NULL;
}
