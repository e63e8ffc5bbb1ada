/* state/folder_state.c: state.json, with which a checkpoint counts.
 *
 * It ends in the checksum of its own bytes, XXH3 of all that come before the digits, so that
 * `head -c -20 state.json | xxhsum -H3` prints them:
 *
 *     {
 *      "version": 3,
 *      ...
 *      "checksum": "0123456789abcdef"
 *     }
 */
#include "data/data.h"
#include "kernels/error_internal.h"
#include "state/folder_internal.h"
#include "tensor/checksum.h"
#include "tensor/files.h"
#include "tensor/json.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const char SUM[] = ",\n \"checksum\": \"", END[] = "\"\n}\n";
enum { DIGITS = 16, TAIL = DIGITS + sizeof END - 1 };

static void digits_of(uint64_t sum, char digits[DIGITS + 1])
{
    snprintf(digits, DIGITS + 1, "%016llx", (unsigned long long)sum);
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool has_right_sum(const char *text, size_t size)
{
    char digits[DIGITS + 1];
    if (size < TAIL)
        return false;
    const char *tail = text + size - TAIL;
    digits_of(kn_checksum_of(text, size - TAIL), digits);
    return memcmp(tail, digits, DIGITS) == 0 && memcmp(tail + DIGITS, END, TAIL - DIGITS) == 0;
}

/* One bit that differs doesn't make another version of this one: its checksum is still there. */
static bool check(const json_t *j, const char *text, size_t size, const char *path)
{
    const bool right = has_right_sum(text, size);
    const json_int_t version = json_integer_value(json_object_get(j, "version"));
    if (!right && json_object_get(j, "checksum"))
        return kn_fail("%s isn't as it was saved: its checksum differs; the checkpoint is damaged",
                       path);
    return (right && version == KN_STATE_VERSION) ||
           kn_fail("%s is of version %lld, and version %d is read: go on from it with the Knap "
                   "that wrote it, or train anew",
                   path, (long long)version, KN_STATE_VERSION);
}

static json_t *parse(const char *text, size_t size, const char *path)
{
    json_error_t error;
    json_t *j = kn_json_parse(text, size, JSON_REJECT_DUPLICATES, path, &error);
    if (!json_is_object(j))
        kn_fail("%s is no JSON object (%s in line %d); the checkpoint is damaged", path,
                j ? "another value" : error.text, j ? 1 : error.line);
    else if (check(j, text, size, path))
        return j;
    json_decref(j);
    return NULL;
}

json_t *kn_folder_state(const char *dir)
{
    struct stat st;
    size_t size;
    const kn_path path = kn_path_of(dir, KN_STATE_FILE, "");
    const int there = kn_look(path.text, &st);
    if (there == 0)
        kn_fail("%s holds no checkpoint: there is no %s; give a folder that kn_checkpoint_save or "
                "a trainer's --out wrote",
                dir, KN_STATE_FILE);
    char *text = there > 0 ? kn_file_read(path.text, KN_STATE_MOST, &size) : NULL;
    json_t *j = text ? parse(text, size, path.text) : NULL;
    kn_host_free(text);
    return j;
}

bool kn_folder_int(const json_t *object, const char *key, int64_t low, int64_t high, int64_t *value,
                   const char *dir)
{
    const json_t *v = json_object_get(object, key);
    *value = json_integer_value(v);
    if (json_is_integer(v) && *value >= low && *value <= high)
        return true;
    return kn_fail("%s/%s: \"%s\" is missing or not a whole number from %lld to %lld; the "
                   "checkpoint is damaged",
                   dir, KN_STATE_FILE, key, (long long)low, (long long)high);
}

/* ---- writing --------------------------------------------------------------------------------- */

bool kn_folder_state_write(const char *dir, const char *text)
{
    char digits[DIGITS + 1];
    kn_checksum sum;
    const size_t n = strlen(text) - 2; /* without the last line and brace */
    if (n > KN_STATE_MOST - sizeof SUM - TAIL)
        return kn_fail("checkpoint: %s would have %zu bytes, more than the %zu that readers take; "
                       "keep .config and .record small",
                       KN_STATE_FILE, n, KN_STATE_MOST);
    kn_checksum_begin(&sum);
    kn_checksum_add(&sum, text, n);
    kn_checksum_add(&sum, SUM, sizeof SUM - 1);
    digits_of(kn_checksum_end(&sum), digits);
    return kn_file_write(kn_path_of(dir, KN_STATE_FILE, "").text,
                         (const void *const[]){ text, SUM, digits, END },
                         (const size_t[]){ n, sizeof SUM - 1, DIGITS, sizeof END - 1 }, 4);
}
