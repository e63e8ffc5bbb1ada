/* state/folder_list.c: the checkpoints that a run's folder holds. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "state/attempt.h"
#include "state/folder_internal.h"
#include "tensor/files.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_BELOW 256 /* characters of a file's path below the folder of its run */

bool kn_folder_fits(const char *dir)
{
    return strlen(dir) + MOST_BELOW < KN_FOLDER_PATH ||
           kn_fail("checkpoint: the path %s is too long", dir);
}

/* ---- the list -------------------------------------------------------------------------------- */

void kn_listing_free(kn_listing *l)
{
    kn_host_free(l->list);
    kn_host_free(l->replaced);
    *l = (kn_listing){ 0 };
}

bool kn_is_passing(int number)
{
    return number != 0 && number != ENOENT && number != ENOTDIR;
}

int64_t kn_listing_number(const kn_listing *l)
{
    int64_t most = 0;
    for (int i = 0; i < l->count; i++)
        most = l->list[i].number > most ? l->list[i].number : most;
    return most;
}

bool kn_listing_has(const kn_listing *l, const kn_listed *one, bool by_name)
{
    bool has = false;
    for (int i = 0; i < l->count && !has; i++) {
        const kn_listed *c = &l->list[i];
        has = c->number == one->number && strcmp(c->id, one->id) == 0 &&
              (by_name ? strcmp(c->name, one->name) == 0 : c->step == one->step);
    }
    return has;
}

bool kn_listing_is_sure(const kn_listing *l)
{
    for (int i = 0; i < l->count; i++)
        if (l->list[i].error) {
            errno = l->list[i].error;
            return kn_fail_system("%s; try again, or move that checkpoint away", l->list[i].why);
        }
    return true;
}

void kn_folder_name(char name[KN_FOLDER_NAME], int64_t step, const char *suffix)
{
    snprintf(name, KN_FOLDER_NAME, "step-%08lld%s", (long long)step, suffix);
}

int64_t kn_folder_step(const char *name, const char *suffix)
{
    char made[KN_FOLDER_NAME];
    if (strncmp(name, "step-", 5) != 0)
        return -1;
    errno = 0;
    int64_t step = strtoll(name + 5, NULL, 10);
    kn_folder_name(made, step, suffix);
    return step >= 0 && errno == 0 && strcmp(made, name) == 0 ? step : -1;
}

/* Adds the ids of those that a checkpoint replaces. */
static bool add_replaced(kn_listing *l, const json_t *ids)
{
    size_t i;
    const json_t *id;
    json_array_foreach(ids, i, id)
    {
        if (!json_is_string(id))
            continue;
        if (!kn_host_grow(&l->replaced, &l->replaced_room, l->replaced_count + 1,
                          sizeof *l->replaced))
            return false;
        snprintf(l->replaced[l->replaced_count++], KN_FOLDER_ID, "%s", json_string_value(id));
    }
    return true;
}

int64_t kn_folder_checkpoint(const char *name)
{
    char whole[KN_FOLDER_NAME] = "", end;
    int again = 0;
    const char *damaged = strstr(name, KN_DAMAGED);
    const size_t n = damaged ? (size_t)(damaged - name) : strlen(name);
    if (n >= sizeof whole ||
        (damaged && damaged[strlen(KN_DAMAGED)] &&
         (sscanf(damaged, KN_DAMAGED "-%d%c", &again, &end) != 1 || again < 2)))
        return -1;
    memcpy(whole, name, n);
    return kn_folder_step(whole, "");
}

static bool read_saved(kn_listing *l, kn_listed *s, const char *path)
{
    json_t *j = kn_folder_state(path);
    int64_t step, number;
    const bool named = s->name[0] != 0;
    const json_t *score = json_object_get(j, "score");
    const char *id = json_string_value(json_object_get(j, "id"));
    bool ok =
        j &&
        kn_folder_int(j, "step", named ? s->step : 0, named ? s->step : INT64_MAX, &step, path) &&
        kn_folder_int(j, "number", 1, KN_FOLDER_SAVES, &number, path) &&
        ((id && *id && strlen(id) < KN_FOLDER_ID) ||
         kn_fail("%s/%s: its id is no id; the checkpoint is damaged", path, KN_STATE_FILE)) &&
        add_replaced(l, json_object_get(j, "replaces"));
    if (ok) {
        s->step = step;
        s->number = number;
        snprintf(s->id, sizeof s->id, "%s", id);
    }
    s->score = json_is_number(score) ? json_number_value(score) : NAN;
    json_decref(j);
    return ok;
}

/* Adds the checkpoint name of dir, if it is one. */
static bool add(kn_listing *l, const char *dir, const char *name, int64_t step)
{
    char error[KN_ATTEMPT_TEXT];
    struct stat st;
    const kn_path path = kn_path_of(dir, name, "");
    const int there = kn_look(kn_path_of(path.text, KN_STATE_FILE, "").text, &st);
    if (there < 0)
        return false;
    if (!there && (!*name || strstr(name, ".saving")))
        return true; /* being saved */
    if (!kn_host_grow(&l->list, &l->room, l->count + 1, sizeof *l->list))
        return false;
    kn_listed *s = &l->list[l->count++];
    kn_attempt a;
    *s = (kn_listed){ .step = step };
    snprintf(s->name, sizeof s->name, "%s", name);
    kn_attempt_begin(&a);
    read_saved(l, s, path.text);
    kn_attempt_end(&a, error);
    s->error = kn_is_passing(a.number) ? a.number : 0;
    snprintf(s->why, sizeof s->why, "%.*s", (int)sizeof s->why - 1, error);
    return true;
}

/* Those of unknown number take their order from the others, by step. */
static void set_orders(kn_listing *l)
{
    for (int i = 0; i < l->count; i++) {
        kn_listed *s = &l->list[i];
        s->order = s->number;
        for (int k = 0; k < l->count && s->why[0]; k++)
            if (l->list[k].step < s->step && l->list[k].number > s->order)
                s->order = l->list[k].number;
    }
}

/* By id: checkpoints are copied from run to run, and a number says something in one folder only. */
static void set_doomed(kn_listing *l)
{
    for (int i = 0; i < l->count; i++)
        for (int k = 0; k < l->replaced_count; k++) {
            kn_listed *s = &l->list[i];
            s->doomed |= !s->why[0] && !strcmp(s->id, l->replaced[k]);
        }
}

static int newest_first(const void *x, const void *y)
{
    const kn_listed *a = x, *b = y;
    if (a->order != b->order)
        return a->order > b->order ? -1 : 1;
    if (!a->why[0] != !b->why[0])
        return a->why[0] ? -1 : 1;
    return (a->step < b->step) - (a->step > b->step);
}

bool kn_folder_list(kn_listing *l, const char *dir)
{
    *l = (kn_listing){ 0 };
    kn_folder_names n = { 0 };
    bool there = false, ok = kn_folder_fits(dir) && kn_folder_names_read(&n, dir, &there);
    for (int64_t i = 0; ok && i < n.count; i++) {
        int64_t step = kn_folder_step(n.list[i].name, "");
        step = step >= 0 ? step : kn_folder_step(n.list[i].name, ".saving");
        ok = step < 0 || add(l, dir, n.list[i].name, step);
    }
    kn_folder_names_free(&n);
    if (ok && !there)
        return true;
    ok = ok && add(l, dir, "", 0);
    set_orders(l);
    set_doomed(l);
    if (ok && l->count > 1)
        qsort(l->list, (size_t)l->count, sizeof *l->list, newest_first);
    return ok && kn_ok();
}

const kn_listed *kn_listing_best(const kn_listing *l)
{
    const kn_listed *best = NULL;
    for (int i = 0; i < l->count; i++) {
        const kn_listed *s = &l->list[i];
        bool counts = *s->name && !s->why[0] && !s->doomed && isfinite(s->score);
        if (counts && (!best || s->score <= best->score))
            best = s;
    }
    return best;
}

bool kn_run_folder_has_checkpoint(const char *dir)
{
    kn_listing l;
    bool there = dir && kn_folder_list(&l, dir) && l.count > 0;
    if (dir)
        kn_listing_free(&l);
    return there;
}
