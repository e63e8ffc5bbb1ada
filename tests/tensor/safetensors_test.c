/* tests/tensor/safetensors_test.c: reads files written by hand from the published format; compares
 * files of Knap byte by byte; interrupts saves. */
#include "tensor/safetensors.h"
#include "tensor/tensor_internal.h"
#include "tests/tensor/temp.h"
#include <sys/stat.h>

KN_TEST(safetensors, reads_golden)
{
    OWNED_TEMP temp at = temp_begin();
    char file[4096];
    float data[7] = { 1, 2, 3, 4, 5, 6, -0.5f };
    const char *header =
        "{\"__metadata__\":{\"format\":\"pt\",\"é\":\"\\u00fc\"},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[24,28]},"
        "\"a\":{\"data_offsets\":[0,24],\"shape\":[2,3],\"dtype\":\"F32\"},"
        "\"none\":{\"dtype\":\"I64\",\"shape\":[0,7],\"data_offsets\":[28,28]}}    ";
    temp_write(&at, file, temp_compose(file, header, data, sizeof data));
    kn_scope scope = kn_scope_begin();
    kn_safetensors *f = kn_safetensors_open(at.path);
    KN_CHECK(f != NULL);
    KN_CHECK(kn_safetensors_count(f) == 3);
    KN_CHECK(strcmp(kn_safetensors_name(f, 0), "a") == 0 &&
             strcmp(kn_safetensors_name(f, 1), "b") == 0);
    KN_CHECK(!kn_safetensors_name(f, 3) && !kn_safetensors_name(f, -1));
    KN_CHECK(kn_safetensors_has(f, "none") && !kn_safetensors_has(f, "c"));
    KN_CHECK(!kn_safetensors_has(f, "__metadata__"));
    KN_CHECK(strcmp(kn_safetensors_meta(f, "format"), "pt") == 0);
    KN_CHECK(strcmp(kn_safetensors_meta(f, "é"), "ü") == 0 && !kn_safetensors_meta(f, "x"));
    kn_tensor *a = kn_safetensors_get(f, "a"), *b = kn_safetensors_get(f, "b");
    kn_tensor *none = kn_safetensors_get(f, "none");
    KN_CHECK_OK();
    KN_CHECK(kn_dtype_of(none) == KN_I64 && kn_numel(none) == 0 && kn_size(none, 1) == 7);
    REFUSED(kn_safetensors_get(f, "c"), "no tensor \"c\" among its 3");
    kn_safetensors_close(f);
    KN_CHECK(kn_item(b) == -0.5 && kn_ndim(b) == 0 && strcmp(kn_name(a), "a") == 0);
    float got[6];
    KN_CHECK(kn_to_host(a, got, sizeof got) && memcmp(got, data, sizeof got) == 0);
    KN_CHECK(kn_fill_(a, 7) && kn_item(b) == -0.5);
    kn_scope_end(scope);
}

/* One element of every dtype the format lists, all at odd offsets, so that most are unaligned. */
KN_TEST(safetensors, every_dtype)
{
    static const struct {
        const char *name;
        kn_dtype dtype;
        uint8_t bytes[8];
        double value;
    } all[] = {
        { "BOOL", KN_BOOL, { 1 }, 1 },
        { "U8", KN_U8, { 200 }, 200 },
        { "I8", KN_I8, { 0xfe }, -2 },
        { "F8_E5M2", KN_F8_E5M2, { 0xc0 }, -2 },
        { "F8_E4M3", KN_F8_E4M3, { 0x3c }, 1.5 },
        { "I16", KN_I16, { 0xfe, 0xff }, -2 },
        { "U16", KN_U16, { 0xfe, 0xff }, 65534 },
        { "F16", KN_F16, { 0x00, 0xc1 }, -2.5 },
        { "BF16", KN_BF16, { 0x20, 0xc0 }, -2.5 },
        { "I32", KN_I32, { 0xfe, 0xff, 0xff, 0xff }, -2 },
        { "U32", KN_U32, { 0xfe, 0xff, 0xff, 0xff }, 4294967294.0 },
        { "F32", KN_F32, { 0, 0, 0x20, 0xc0 }, -2.5 },
        { "F64", KN_F64, { 0, 0, 0, 0, 0, 0, 0x04, 0xc0 }, -2.5 },
        { "I64", KN_I64, { 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff }, -2 },
        { "U64", KN_U64, { 0, 0, 0, 0, 0, 0, 0, 0x80 }, 0x1p63 },
    };
    enum { N = sizeof all / sizeof *all };
    KN_CHECK(N == KN_DTYPE_COUNT - 1);
    OWNED_TEMP temp at = temp_begin();
    for (int shift = 0; shift < 8; shift++) {
        char file[8192], header[4096] = "{", data[256] = "";
        size_t n = 0, h = 1;
        n += (size_t)shift;
        h += (size_t)sprintf(header + h,
                             "\"pad\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[0,%d]}",
                             shift, shift);
        for (int i = 0; i < N; i++) {
            size_t size = kn_dtype_size(all[i].dtype);
            h += (size_t)sprintf(
                header + h, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[1],\"data_offsets\":[%zu,%zu]}",
                all[i].name, all[i].name, n, n + size);
            memcpy(data + n, all[i].bytes, size);
            n += size;
        }
        strcpy(header + h, "}");
        temp_write(&at, file, temp_compose(file, header, data, n));
        kn_safetensors *f = kn_safetensors_open(at.path);
        KN_CHECK(f != NULL);
        for (int i = 0; i < N; i++) {
            kn_tensor *t = kn_safetensors_get(f, all[i].name);
            KN_CHECK(t && kn_dtype_of(t) == all[i].dtype);
            KN_CHECK((uintptr_t)kn_data(t) % kn_dtype_size(all[i].dtype) == 0);
            KN_CHECK(kn_item(t) == all[i].value, "%s is %g", all[i].name, kn_item(t));
        }
        kn_safetensors_close(f);
    }
    KN_CHECK_OK();
}

KN_TEST(safetensors, writes_golden)
{
    OWNED_TEMP temp at = temp_begin();
    uint16_t w[4] = { 0x3f80, 0x4000, 0x4040, 0x4080 };
    int64_t step = 7;
    kn_safetensors_entry e[] = {
        { .name = "h.0.w", .dtype = KN_BF16, .ndim = 2, .shape = { 2, 2 }, .data = w },
        { .name = "st\"ep", .dtype = KN_I64, .ndim = 0, .data = &step },
        { .name = "none", .dtype = KN_F32, .ndim = 1, .shape = { 0 } },
    };
    kn_safetensors_pair meta[] = { { "format", "pt" }, { "line", "a\nb" } };
    KN_CHECK(kn_safetensors_save(at.path, e, 3, meta, 2));
    const char *text = "{\"__metadata__\":{\"format\":\"pt\",\"line\":\"a\\nb\"},"
                       "\"h.0.w\":{\"dtype\":\"BF16\",\"shape\":[2,2],\"data_offsets\":[0,8]},"
                       "\"st\\\"ep\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[8,16]},"
                       "\"none\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[16,16]}}";
    size_t size, n = strlen(text);
    char *b = temp_read(&at, &size);
    size_t header = (8 + n + 63) / 64 * 64 - 8;
    KN_CHECK(size == 8 + header + 16, "%zu bytes", size);
    KN_CHECK((uint8_t)b[0] == (header & 0xff) && (uint8_t)b[1] == header >> 8 && b[2] == 0 &&
             b[7] == 0);
    KN_CHECK(memcmp(b + 8, text, n) == 0, "header: %.*s", (int)header, b + 8);
    for (size_t i = n; i < header; i++)
        KN_CHECK(b[8 + i] == ' ');
    KN_CHECK(memcmp(b + 8 + header, w, 8) == 0 && memcmp(b + 16 + header, &step, 8) == 0);
    free(b);

    kn_safetensors *f = kn_safetensors_open(at.path);
    KN_CHECK(f != NULL);
    KN_CHECK(kn_item(kn_safetensors_get(f, "st\"ep")) == 7);
    kn_array a;
    KN_CHECK(kn_safetensors_describe(f, "h.0.w", &a) && a.dtype == KN_BF16 && a.ndim == 2 &&
             a.shape[0] == 2 && a.shape[1] == 2);
    KN_CHECK(strcmp(kn_safetensors_meta(f, "line"), "a\nb") == 0);
    kn_safetensors_close(f);
    KN_CHECK(kn_safetensors_save(at.path, NULL, 0, NULL, 0));
    f = kn_safetensors_open(at.path);
    KN_CHECK(f && kn_safetensors_count(f) == 0);
    kn_safetensors_close(f);
}

KN_TEST(safetensors, streams)
{
    OWNED_TEMP temp at = temp_begin();
    enum { N = 100000 };
    static uint8_t data[N], got[N];
    for (int i = 0; i < N; i++)
        data[i] = (uint8_t)(i * 7 + i / 256);
    kn_safetensors_entry e = { .name = "x", .dtype = KN_U8, .ndim = 1, .shape = { N } };
    kn_safetensors_writer *w = kn_safetensors_create(at.path, &e, 1, NULL, 0);
    KN_CHECK(w != NULL && temp_files(&at) == 1);
    for (size_t i = 0, n = 1; i < N; i += n, n = n * 3 + 1) {
        n = n < N - i ? n : N - i;
        KN_CHECK(kn_safetensors_append(w, data + i, n));
    }
    KN_CHECK(kn_safetensors_commit(w) && temp_files(&at) == 1);
    kn_safetensors *f = kn_safetensors_open(at.path);
    KN_CHECK(kn_to_host(kn_safetensors_get(f, "x"), got, N) && memcmp(data, got, N) == 0);
    kn_safetensors_close(f);
    struct stat st;
    mode_t mask = umask(022);
    umask(mask);
    KN_CHECK(stat(at.path, &st) == 0 && (st.st_mode & 0777) == (0666 & ~mask));
}

/* A file truncated after it was opened gives an error, not a signal. */
KN_TEST(safetensors, cut_while_open)
{
    OWNED_TEMP temp at = temp_begin();
    static float x[5000];
    kn_safetensors_entry e = {
        .name = "x", .dtype = KN_F32, .ndim = 1, .shape = { 5000 }, .data = x
    };
    KN_CHECK(kn_safetensors_save(at.path, &e, 1, NULL, 0));
    kn_safetensors *f = kn_safetensors_open(at.path);
    KN_CHECK(f && truncate(at.path, 5000) == 0);
    REFUSED(kn_safetensors_get(f, "x"), "was cut to 5000 bytes");
    kn_safetensors_close(f);
}

/* The FIFO has no writer: opening it must not block. The alarm ends a program that does. */
KN_TEST(safetensors, refuses_what_is_no_file)
{
    OWNED_TEMP temp at = temp_begin();
    KN_CHECK(mkfifo(at.path, 0600) == 0);
    alarm(250);
    KN_CHECK(!kn_safetensors_open(at.path));
    alarm(0);
    KN_CHECK_ERROR("not a regular file");
    struct stat st; /* what is written doesn't take its place, either */
    REFUSED(kn_safetensors_save(at.path, NULL, 0, NULL, 0), "a device or a pipe");
    KN_CHECK(stat(at.path, &st) == 0 && S_ISFIFO(st.st_mode));
    REFUSED(kn_safetensors_open(at.folder), "not a regular file");
}

/* After any failure of a save the old file stays and no other is left. */
KN_TEST(safetensors, keeps_old_file)
{
    OWNED_TEMP temp at = temp_begin();
    float x[4] = { 1, 2, 3, 4 };
    kn_safetensors_entry e = { .name = "x", .dtype = KN_F32, .ndim = 1, .shape = { 4 }, .data = x };
    KN_CHECK(kn_safetensors_save(at.path, &e, 1, NULL, 0));
    for (int way = 0; way < 5; way++) {
        kn_safetensors_writer *w = kn_safetensors_create(at.path, &e, 1, NULL, 0);
        KN_CHECK(w && temp_files(&at) == 2);
        switch (way) {
        case 0:
            kn_safetensors_abandon(w);
            break;
        case 1:
            KN_CHECK(kn_safetensors_append(w, x, 15) && !kn_safetensors_commit(w));
            KN_CHECK_ERROR("15 of 16 bytes");
            break;
        case 2:
            KN_CHECK(!kn_safetensors_append(w, x, 17) && !kn_safetensors_commit(w));
            KN_CHECK_ERROR("1 bytes more");
            break;
        case 3:
            kn_fail("something else");
            KN_CHECK(!kn_safetensors_append(w, x, 16) && !kn_safetensors_commit(w));
            KN_CHECK_ERROR("something else");
            break;
        default:
            KN_CHECK(!kn_safetensors_append(w, NULL, 16) && !kn_safetensors_commit(w));
            KN_CHECK_ERROR("without data");
        }
        KN_CHECK(temp_files(&at) == 1, "way %d leaves a file", way);
        kn_safetensors *f = kn_safetensors_open(at.path);
        KN_CHECK(f && kn_safetensors_count(f) == 1);
        kn_safetensors_close(f);
    }
    REFUSED(kn_safetensors_commit(NULL), "without a writer");
    kn_safetensors_abandon(NULL);
}

KN_TEST(safetensors, save_refuses)
{
    OWNED_TEMP temp at = temp_begin();
    float x = 1;
    kn_safetensors_entry good = { .name = "x", .dtype = KN_F32, .data = &x };
    struct {
        kn_safetensors_entry e[2];
        kn_safetensors_pair meta[2];
        int metas;
        const char *says;
    } bad[] = {
        { { good, good }, { { 0 } }, 0, "two tensors are named \"x\"" },
        { { good, { .name = "__metadata__", .dtype = KN_F32 } }, { { 0 } }, 0, "reserved" },
        { { good, { .name = NULL, .dtype = KN_F32 } }, { { 0 } }, 0, "no name" },
        { { good, { .name = "y" } }, { { 0 } }, 0, "not a dtype" },
        { { good, { .name = "y", .dtype = KN_F32, .ndim = 9 } }, { { 0 } }, 0, "9 dims" },
        { { good, { .name = "y", .dtype = KN_F32, .ndim = 1, .shape = { -1 } } },
          { { 0 } },
          0,
          "negative" },
        { { good, { .name = "y", .dtype = KN_F32, .ndim = 2, .shape = { INT64_MAX, 2 } } },
          { { 0 } },
          0,
          "too many" },
        { { good, { .name = "y", .dtype = KN_U8, .ndim = 1, .shape = { INT64_MAX } } },
          { { 0 } },
          0,
          "too many" },
        { { good, { .name = "\xff", .dtype = KN_F32 } }, { { 0 } }, 0, "UTF-8" },
        { { good, { .name = "y", .dtype = KN_F32, .data = NULL } }, { { 0 } }, 0, "without data" },
        { { good, { .name = "y", .dtype = KN_F32, .data = &x } }, { { "k", "\xff" } }, 1, "UTF-8" },
        { { good, { .name = "y", .dtype = KN_F32, .data = &x } },
          { { "k", "v" }, { "k", "w" } },
          2,
          "twice" },
        { { good, { .name = "y", .dtype = KN_F32, .data = &x } }, { { "k", NULL } }, 1, "lacks" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        KN_CHECK(!kn_safetensors_save(at.path, bad[i].e, 2, bad[i].meta, bad[i].metas), "case %zu",
                 i);
        KN_CHECK_ERROR(bad[i].says);
        KN_CHECK(temp_files(&at) == 0);
    }
    REFUSED(kn_safetensors_save("/no/such/folder/x", &good, 1, NULL, 0), "/no/such/folder/x");
}
