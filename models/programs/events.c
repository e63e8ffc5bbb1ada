/* models/programs/events.c: event files as TensorBoard reads them, without its library. A file is a
 * row of records (TFRecord): u64 bytes, u32 checksum of these, the bytes, u32 checksum of the
 * bytes; all little-endian. The bytes are a message of protocol buffers:
 *
 *   Event   { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5;
 *             SessionLog session_log = 7; }
 *   Summary { repeated Value value = 1; }   Value { string tag = 1; float simple_value = 2; }
 *   SessionLog { enum status = 1; }   START = 1: events from this step on replace earlier ones
 *
 * Formats: https://github.com/tensorflow/tensorboard, tensorboard/compat/proto/event.proto and
 * summary.proto; https://www.tensorflow.org/tutorials/load_data/tfrecord. */
#include "kernels/error_internal.h"
#include "models/programs/log.h"
#include "tensor/files.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A message, or a record; large enough for LOG_VALUES of them. */
typedef struct bytes {
    unsigned char at[LOG_VALUES * 80 + 64];
    size_t n;
} bytes;

/* ---- protocol buffers ------------------------------------------------------------------------ */

static void put_varint(bytes *b, uint64_t v)
{
    for (; v >= 0x80; v >>= 7)
        b->at[b->n++] = (unsigned char)(v | 0x80);
    b->at[b->n++] = (unsigned char)v;
}

/* Numbers are little-endian. */
static void put_raw(bytes *b, const void *data, size_t size)
{
    memcpy(b->at + b->n, data, size);
    b->n += size;
}

enum { VARINT = 0, I64 = 1, LEN = 2, I32 = 5 };
static void put_key(bytes *b, int field, int type)
{
    put_varint(b, (uint64_t)field << 3 | (uint64_t)type);
}

static void put_bytes(bytes *b, int field, const void *data, size_t size)
{
    put_key(b, field, LEN);
    put_varint(b, size);
    put_raw(b, data, size);
}

/* ---- records --------------------------------------------------------------------------------- */

/* CRC-32C (Castagnoli), rotated and shifted so that a checksum of checksums isn't trivial. */
static uint32_t checksum(const void *data, size_t n)
{
    const unsigned char *at = data;
    uint32_t crc = ~0u;
    for (size_t i = 0; i < n; i++) {
        crc ^= at[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static bool write_record(FILE *out, const bytes *event)
{
    const uint64_t n = event->n;
    const uint32_t head = checksum(&n, sizeof n), tail = checksum(event->at, n);
    return fwrite(&n, sizeof n, 1, out) == 1 && fwrite(&head, sizeof head, 1, out) == 1 &&
           fwrite(event->at, n, 1, out) == 1 && fwrite(&tail, sizeof tail, 1, out) == 1 &&
           fflush(out) == 0;
}

static bytes event_at(int64_t step)
{
    struct timespec now;
    bytes b = { .n = 0 };
    clock_gettime(CLOCK_REALTIME, &now);
    const double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    put_key(&b, 1, I64);
    put_raw(&b, &seconds, sizeof seconds);
    if (step != 0) {
        put_key(&b, 2, VARINT);
        put_varint(&b, (uint64_t)step);
    }
    return b;
}

/* ---- files ----------------------------------------------------------------------------------- */

/* TensorBoard reads the files of a folder in the order of their names, which begin with the second;
 * a name that is there already gets the next number. */
static FILE *new_file(const char *folder, char *path, size_t size)
{
    char host[256] = "host";
    FILE *out = NULL;
    gethostname(host, sizeof host - 1);
    for (int i = 0; !out && i < 1000; i++) {
        if (snprintf(path, size, "%s/events.out.tfevents.%010lld.%03d.%s", folder,
                     (long long)time(NULL), i, host) >= (int)size)
            return kn_fail_null("--tensorboard %s: the path is too long", folder);
        out = fopen(path, "wxe");
        if (!out && errno != EEXIST)
            break;
    }
    if (!out)
        kn_fail_system("cannot write the log %s: %m", path);
    return out;
}

FILE *events_open(const char *folder, int64_t from, char *path, size_t size)
{
    static const unsigned char start[] = { 1 << 3 | VARINT, 1 };
    FILE *out = kn_folder_make(folder, "--tensorboard ") ? new_file(folder, path, size) : NULL;
    if (!out)
        return NULL;
    bytes first = event_at(0), again = event_at(from);
    put_bytes(&first, 3, "brain.Event:2", 13);
    put_bytes(&again, 7, start, sizeof start);
    const bool ok = write_record(out, &first) && write_record(out, &again);
    if (ok)
        return out;
    kn_fail_system("cannot write the log %s: %m", path);
    fclose(out);
    return NULL;
}

bool events_step(FILE *out, int64_t step, const log_value *value, int count)
{
    bytes event = event_at(step), summary = { .n = 0 };
    for (int i = 0; i < count; i++) {
        const log_value *v = &value[i];
        const float number = (float)v->value;
        bytes one = { .n = 0 };
        if (!isfinite(v->value) || strcmp(v->name, "step") == 0)
            continue;
        put_bytes(&one, 1, v->name, strlen(v->name));
        put_key(&one, 2, I32);
        put_raw(&one, &number, sizeof number);
        put_bytes(&summary, 1, one.at, one.n);
    }
    put_bytes(&event, 5, summary.at, summary.n);
    return write_record(out, &event);
}
