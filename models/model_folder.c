/* models/model_folder.c: a model and its configuration in a folder, written so that a reader finds
 * both, or neither. */
#include "models/model_folder.h"
#include "data/data.h"
#include "kernels/error_internal.h"
#include "models/formats/formats.h"
#include "state/checkpoint_internal.h"
#include "tensor/json.h"
#include "tensor/whole_file.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_BYTES  (1 << 26) /* of a config.json */
#define MOST_VALUES (1 << 18) /* numbers, texts, lists and objects in it */

/* ---- reading --------------------------------------------------------------------------------- */

/* An upper bound of the values of a JSON text, so that it can't take much more memory than its own
 * bytes. */
static int64_t count_values(const kn_mapped *text)
{
    int64_t n = 1;
    bool quoted = false;
    for (size_t i = 0; i < text->size; i++) {
        const unsigned char c = text->data[i];
        if (quoted && c == '\\')
            i++;
        else if (c == '"')
            quoted = !quoted;
        else
            n += !quoted && (c == ',' || c == '[' || c == '{' || c == ':');
    }
    return n;
}

json_t *kn_model_json(const char *path)
{
    json_error_t error = { 0 };
    kn_mapped map;
    json_t *j = NULL;
    if (!kn_file_map(path, "configuration of a model", &map))
        return NULL;
    const int64_t values = map.size <= MOST_BYTES ? count_values(&map) : INT64_MAX;
    if (values <= MOST_VALUES)
        j = kn_json_parse((const char *)map.data, map.size, JSON_REJECT_DUPLICATES, path, &error);
    kn_file_unmap(&map);
    if (json_is_object(j))
        return j;
    if (values > MOST_VALUES)
        kn_fail("%s has more than %d bytes or %d values; it is no model's configuration", path,
                MOST_BYTES, MOST_VALUES);
    else
        kn_fail("%s is no JSON object (%s in line %d); the file is damaged", path,
                j ? "another value" : error.text, j ? 1 : error.line);
    json_decref(j);
    return NULL;
}

/* ---- saving ---------------------------------------------------------------------------------- */

/* Is dir/name the configuration of an export? */
static bool is_own(const char *dir, const char *name)
{
    json_t *j = kn_is_in(dir, name) ? kn_model_json(kn_path_of(dir, name, "").text) : NULL;
    const bool own = json_object_get(j, "knap") != NULL;
    json_decref(j);
    if (!kn_error_number()) /* else it can't be read just now */
        kn_clear_error();
    return own;
}

bool kn_model_may_save(const char *dir)
{
    int failed, tries = 0;
    if (!kn_ok() || !kn_folder_outside(dir))
        return false;
    if (KN_AGAIN(mkdir(dir, 0777)) != 0 && errno != EEXIST)
        return kn_fail_system("cannot make the folder %s: %m", dir);
    while ((failed = access(dir, W_OK | X_OK)) != 0 && kn_try_again(&tries, false))
        ;
    if (failed)
        return kn_fail_system("cannot write into %s: %m; choose another folder", dir);
    if (kn_run_folder_has_checkpoint(dir))
        return kn_fail("%s holds the checkpoint of a run; export into another folder", dir);
    if (is_own(dir, kn_is_in(dir, KN_CONFIG_FILE) ? KN_CONFIG_FILE : KN_CONFIG_FILE ".new"))
        return true;
    const char *other = kn_is_in(dir, KN_CONFIG_FILE)  ? KN_CONFIG_FILE
                        : kn_is_in(dir, KN_MODEL_FILE) ? KN_MODEL_FILE
                                                       : NULL;
    return kn_ok() &&
           (!other ||
            kn_fail("%s holds a %s that Knap didn't export; choose another folder", dir, other));
}

/* dir/name.new becomes dir/name. */
static bool rename_new(const char *dir, const char *name)
{
    const kn_path from = kn_path_of(dir, name, ".new"), to = kn_path_of(dir, name, "");
    return KN_AGAIN(rename(from.text, to.text)) == 0 ||
           kn_fail_system("cannot rename %s: %m", from.text);
}

static void remove_new(const char *dir, const char *name)
{
    (void)KN_AGAIN(unlink(kn_path_of(dir, name, ".new").text));
}

/* A reader never finds a model with the configuration of another: the old one goes first, the new
 * one comes last. What lies between is no model for anyone, and config.json.new tells the next
 * export that it may replace it. */
static bool remove_config(const char *dir)
{
    const kn_path path = kn_path_of(dir, KN_CONFIG_FILE, "");
    return KN_AGAIN(unlink(path.text)) == 0 || errno == ENOENT ||
           kn_fail_system("cannot remove %s: %m", path.text);
}

static bool rename_both(const char *dir)
{
    return kn_sync_folder(dir) && rename_new(dir, KN_MODEL_FILE) && kn_sync_folder(dir) &&
           rename_new(dir, KN_CONFIG_FILE) && kn_sync_folder(dir);
}

static bool write_config(const char *dir, const char *text)
{
    return text && kn_file_write(kn_path_of(dir, KN_CONFIG_FILE ".new", "").text,
                                 (const void *const[]){ text, "\n" },
                                 (const size_t[]){ strlen(text), 1 }, 2);
}

static bool save_both(const char *dir, void *module, const kn_model_tensors *t,
                      const kn_model_saving *o)
{
    const bool first = kn_rank(o->comm) == 0;
    bool ok = kn_model_write(t, module, o->ema, o->comm, o->dtype,
                             kn_path_of(dir, KN_MODEL_FILE, ".new").text);
    const bool begun = ok && first && write_config(dir, o->config) && remove_config(dir);
    ok = ok && (!first || (begun && rename_both(dir)));
    if (!ok && first)
        remove_new(dir, KN_MODEL_FILE);
    if (!begun && first)
        remove_new(dir, KN_CONFIG_FILE);
    return ok;
}

static bool save(const char *dir, void *module, const kn_model_config *c, const kn_model_saving *o)
{
    kn_model_tensors t = { 0 };
    bool ok =
        kn_model_tensors_make(&t, module) && kn_model_is(&t, c, "the configuration gives") &&
        (!c->family->export_more || c->family->export_more(&t, c->of)) &&
        (o->file ? kn_file_save(o->file, dir, module, &t, o->comm) : save_both(dir, module, &t, o));
    kn_model_tensors_free(&t);
    return ok;
}

bool kn_model_save(const char *dir, void *module, const kn_model_config *c, kn_model_saving o)
{
    o.comm = o.comm ? o.comm : kn_world();
    o.dtype = o.dtype ? o.dtype : KN_F32;
    if (o.dtype != KN_F32 && o.dtype != KN_BF16 && o.dtype != KN_F16 && o.dtype != KN_F64)
        kn_fail("%s: .dtype is %s, should be f32, bf16, f16 or f64", o.caller,
                kn_dtype_name(o.dtype));
    else if (o.ema && kn_ema_module(o.ema) != (kn_module *)module)
        kn_fail("%s: .ema was made for another module", o.caller);
    else if (kn_rank(o.comm) == 0 && kn_model_may_save(dir) && o.file)
        kn_file_may_save(o.file, dir);
    return kn_hosts_begin_slow(o.comm) && kn_hosts_end_slow(o.comm, save(dir, module, c, &o));
}
