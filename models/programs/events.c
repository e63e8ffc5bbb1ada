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

/* Little-endian. */
static void put_fixed(bytes *b, uint64_t v, int size)
{
    for (int i = 0; i < size; i++)
        b->at[b->n++] = (unsigned char)(v >> (8 * i));
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
    memcpy(b->at + b->n, data, size);
    b->n += size;
}

static void put_double(bytes *b, int field, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    put_key(b, field, I64);
    put_fixed(b, bits, 8);
}

static void put_float(bytes *b, int field, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    put_key(b, field, I32);
    put_fixed(b, bits, 4);
}

/* ---- records --------------------------------------------------------------------------------- */

/* CRC-32C (Castagnoli), rotated and shifted so that a checksum of checksums isn't trivial. */
static uint32_t checksum(const unsigned char *at, size_t n)
{
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
    bytes head = { .n = 0 }, tail = { .n = 0 };
    put_fixed(&head, event->n, 8);
    put_fixed(&head, checksum(head.at, 8), 4);
    put_fixed(&tail, checksum(event->at, event->n), 4);
    return fwrite(head.at, head.n, 1, out) == 1 && fwrite(event->at, event->n, 1, out) == 1 &&
           fwrite(tail.at, tail.n, 1, out) == 1 && fflush(out) == 0;
}

static bytes event_at(int64_t step)
{
    struct timespec now;
    bytes b = { .n = 0 };
    clock_gettime(CLOCK_REALTIME, &now);
    put_double(&b, 1, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
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
        bytes one = { .n = 0 };
        if (!isfinite(v->value) || strcmp(v->name, "step") == 0)
            continue;
        put_bytes(&one, 1, v->name, strlen(v->name));
        put_float(&one, 2, (float)v->value);
        put_bytes(&summary, 1, one.at, one.n);
    }
    put_bytes(&event, 5, summary.at, summary.n);
    return write_record(out, &event);
}
