/* tests/tensor/safetensors_hostile_test.c: corrupt headers. Each file must give an error or be
 * readable to its last byte; never a crash. */
#include "tensor/safetensors.h"
#include "tensor/tensor_internal.h"
#include "tests/tensor/temp.h"
#include <malloc.h>

/* Opens and reads everything. 1: read, 0: refused with an error that names the file (cleared). */
static int try_file(const temp *at)
{
    int64_t live = kn_live_tensors();
    kn_scope scope = kn_scope_begin();
    kn_safetensors *f = kn_safetensors_open(at->path);
    if (!f) {
        KN_CHECK(!kn_ok() && strstr(kn_error(), at->path), "%s",
                 kn_error() ? kn_error() : "silent");
        kn_clear_error();
    }
    for (int i = 0; f && i < kn_safetensors_count(f); i++) {
        const char *name = kn_safetensors_name(f, i);
        KN_CHECK(kn_safetensors_has(f, name));
        kn_tensor *t = kn_safetensors_get(f, name);
        KN_CHECK(t != NULL);
        size_t bytes = (size_t)kn_numel(t) * kn_dtype_size(kn_dtype_of(t));
        OWNED_BYTES void *copy = malloc(bytes + 1);
        KN_CHECK(kn_to_host(t, copy, bytes));
    }
    kn_safetensors_close(f);
    kn_scope_end(scope);
    KN_CHECK(kn_live_tensors() == live);
    KN_CHECK_OK();
    return f != NULL;
}

static const char small_header[] =
    "{\"__metadata__\":{\"a\":\"b\"},\"x\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,"
    "8]},"
    "\"y\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[8,11]}}";
static const char small_data[11] = "0123456789";

KN_TEST(safetensors_hostile, truncated)
{
    OWNED_TEMP temp at = temp_begin();
    char file[1024];
    size_t size = temp_compose(file, small_header, small_data, sizeof small_data);
    temp_write(&at, file, size);
    KN_CHECK(try_file(&at) == 1);
    for (size_t n = 0; n < size; n++) {
        temp_write(&at, file, n);
        KN_CHECK(try_file(&at) == 0, "%zu of %zu bytes were accepted", n, size);
    }
    file[size] = 0;
    temp_write(&at, file, size + 1);
    KN_CHECK(try_file(&at) == 0, "a byte too much was accepted");
}

/* Every byte of the file takes 24 other values: bit flips and random ones. */
KN_TEST(safetensors_hostile, mutated)
{
    OWNED_TEMP temp at = temp_begin();
    char file[1024];
    size_t size = temp_compose(file, small_header, small_data, sizeof small_data);
    uint64_t random = 12345;
    int read = 0, refused = 0;
    for (size_t i = 0; i < size; i++) {
        char old = file[i];
        for (int k = 0; k < 24; k++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            file[i] = k < 8 ? (char)(old ^ 1 << k) : (char)(random >> 56);
            temp_write(&at, file, size);
            try_file(&at) ? read++ : refused++;
        }
        file[i] = old;
    }
    KN_CHECK(read > 100 && refused > 1000, "%d read, %d refused", read, refused);
}

/* Pieces of headers put together at random: structures that changed bytes alone rarely produce. */
KN_TEST(safetensors_hostile, shuffled)
{
    static const char *const piece[] = {
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"x\"",
        "0",
        "-1",
        "8",
        "1e3",
        "null",
        "9223372036854775807",
        "\"F32\"",
        "\"\"",
        "true",
        "\"dtype\"",
        "\"shape\"",
        "\"data_offsets\"",
        "\"__metadata__\"",
        "\"y\"",
        "\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}",
    };
    OWNED_TEMP temp at = temp_begin();
    char file[4096], header[2048];
    uint64_t random = 99;
    for (int round = 0; round < 2000; round++) {
        strcpy(header, "{");
        for (int i = 0; i < 12; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            strcat(header, piece[(random >> 33) % (sizeof piece / sizeof *piece)]);
        }
        strcat(header, round % 2 ? "}" : "");
        temp_write(&at, file, temp_compose(file, header, small_data, 8));
        try_file(&at);
    }
}

#define X(dtype, shape, offsets)                                                                   \
    "{\"x\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
#define XY(x, y)                                                                                   \
    "{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" x                                   \
    "},\"y\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" y "}}"

/* All with 8 bytes of data. */
KN_TEST(safetensors_hostile, lies)
{
    static const struct {
        const char *header, *says; /* says NULL: fine */
    } all[] = {
        { X("\"F32\"", "[2]", "[0,8]"), NULL },
        { XY("[0,4]", "[4,8]"), NULL },
        { XY("[4,8]", "[0,4]"), NULL },
        { X("\"F32\"", "[2]", "[0,8]") " \n\t ", NULL },
        { "{\"x\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8],\"more\":1}}", NULL },
        { XY("[0,4]", "[3,7]"), "overlapping" },
        { XY("[0,4]", "[0,4]"), "overlapping" },
        { XY("[0,4]", "[5,9]"), "truncated" },
        { "{\"x\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
          "\"y\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
          "hole" },
        { X("\"U8\"", "[7]", "[1,8]"), "hole" },
        { X("\"U8\"", "[7]", "[0,7]"), "follow the header" },
        { "{}", "follow the header" },
        { X("\"F32\"", "[3]", "[0,8]"), "need 12 bytes" },
        { X("\"F32\"", "[1]", "[0,8]"), "need 4 bytes" },
        { X("\"F32\"", "[2]", "[8,0]"), "begin <= end" },
        { X("\"F32\"", "[2]", "[-8,0]"), "begin <= end" },
        { X("\"F32\"", "[2]", "[0,8,8]"), "begin <= end" },
        { X("\"F32\"", "[2]", "[0]"), "begin <= end" },
        { X("\"F32\"", "[2]", "8"), "begin <= end" },
        { X("\"F32\"", "[2]", "[0,8.0]"), "begin <= end" },
        { X("\"F32\"", "[2]", "[\"0\",8]"), "begin <= end" },
        { X("\"F32\"", "[2]", "[0,9223372036854775807]"), "truncated" },
        { X("\"F32\"", "[2]", "[0,18446744073709551616]"), "bad header" },
        { X("\"F32\"", "[-2]", "[0,8]"), "integers >= 0" },
        { X("\"F32\"", "[2.0]", "[0,8]"), "integers >= 0" },
        { X("\"F32\"", "[null]", "[0,8]"), "integers >= 0" },
        { X("\"F32\"", "2", "[0,8]"), "needs dtype, shape" },
        { X("\"F32\"", "[4611686018427387906]", "[0,8]"), "too many elements" },
        { X("\"F32\"", "[4294967296,4294967296]", "[0,8]"), "too many elements" },
        { X("\"F32\"", "[0,9223372036854775807,9223372036854775807]", "[0,0]"), "too many" },
        { X("\"F32\"", "[1,1,1,1,1,1,1,1,2]", "[0,8]"), "9 dims" },
        { X("\"F32\"", "[1,1,1,1,1,1,1,2]", "[0,8]"), NULL },
        { X("\"f32\"", "[2]", "[0,8]"), "dtype \"f32\"; supported are" },
        { X("\"F4\"", "[16]", "[0,8]"), "supported are BOOL, U8" },
        { X("7", "[2]", "[0,8]"), "needs dtype" },
        { "{\"x\":[]}", "needs dtype" },
        { "{\"x\":{}}", "needs dtype" },
        { "{\"x\":null}", "needs dtype" },
        { "{\"__metadata__\":7}", "not an object" },
        { "{\"__metadata__\":{\"k\":1}}", "not a string" },
        { "{\"__metadata__\":{\"k\":{}}}", "not a string" },
        { "{\"x\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[8],\"data_offsets\":[0,8]}}",
          "duplicate" },
        { "{\"x\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},"
          "\"x\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}",
          "duplicate" },
        { "[]", "begin with '{'" },
        { " {}", "begin with '{'" },
        { "", "begin with '{'" },
        { "{} x", "bad header: more than an object at byte 3" },
        { "{", "no name at byte 1" },
        { "{,}", "no name at byte 1" },
        { "{\"x\"}", "no ':' at byte 4" },
        { "{\"x\":}", "bad header" },
        { "{\"x\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},}",
          "no name at byte 53" },
        { "{\"x\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}", "no '}' at byte 52" },
        { "{\"__metadata__\":{},\"__metadata__\":{}}", "duplicate" },
        { "{ \n\"\\u00e9\\\"\" :\t{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]} } ",
          NULL },
        { "{\"\xff\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}", "bad header" },
        { "{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}", "bad header" },
    };
    OWNED_TEMP temp at = temp_begin();
    char file[4096];
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        temp_write(&at, file, temp_compose(file, all[i].header, small_data, 8));
        kn_safetensors *f = kn_safetensors_open(at.path);
        KN_CHECK((f != NULL) == (all[i].says == NULL), "%s: %s", all[i].header,
                 f ? "accepted" : kn_error());
        kn_safetensors_close(f);
        if (all[i].says)
            KN_CHECK_ERROR(all[i].says);
        KN_CHECK(try_file(&at) == (all[i].says == NULL));
    }
}

KN_TEST(safetensors_hostile, lengths)
{
    static const uint64_t length[] = { 0, 1, 3, 100000000, 100000001, INT64_MAX, UINT64_MAX };
    temp at = temp_begin();
    for (size_t i = 0; i < sizeof length / sizeof *length; i++) {
        char file[10] = "........{}";
        memcpy(file, &length[i], 8);
        temp_write(&at, file, sizeof file);
        KN_CHECK(try_file(&at) == 0, "length %llu", (unsigned long long)length[i]);
    }
    uint64_t two = 2, three = 3;
    char file[10] = "........{}";
    memcpy(file, &two, 8);
    temp_write(&at, file, sizeof file);
    KN_CHECK(try_file(&at) == 1);
    memcpy(file, &three, 8);
    temp_write(&at, file, sizeof file);
    REFUSED(kn_safetensors_open(at.path), "truncated: the header has 3 bytes, the file only 2");
    temp_end(&at);

    REFUSED(kn_safetensors_open("/no/such/file"), "/no/such/file: cannot open");
    REFUSED(kn_safetensors_open("/tmp"), "not a regular file");
}

/* 60,000 brackets: refused by depth, not by the end of the stack. */
KN_TEST(safetensors_hostile, deep)
{
    static char file[65536], header[60001];
    OWNED_TEMP temp at = temp_begin();
    for (int kind = 0; kind < 2; kind++) {
        if (kind == 0) {
            memset(header, '[', sizeof header - 1);
            memcpy(header, "{\"x\":", 5);
        } else {
            for (size_t i = 0; i + 5 < sizeof header; i += 5)
                memcpy(header + i, "{\"x\":", 5);
        }
        header[sizeof header - 1] = '\0';
        temp_write(&at, file, temp_compose(file, header, "", 0));
        KN_CHECK(try_file(&at) == 0);
    }
}

/* A header costs a few times its bytes, however many tensors it names. */
KN_TEST(safetensors_hostile, many)
{
    enum { COUNT = 100000 };
    char *file = malloc(COUNT * 64 + 64), *header = malloc(COUNT * 64 + 64), name[16];
    size_t n = 0;
    for (int i = 0; i < COUNT; i++)
        n += (size_t)sprintf(header + n,
                             "%c\"%d\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}",
                             i ? ',' : '{', (int)(i * 7919LL % COUNT));
    strcpy(header + n, "}");
    temp at = temp_begin();
    temp_write(&at, file, temp_compose(file, header, "", 0));
    const struct mallinfo2 before = mallinfo2();
    kn_safetensors *f = kn_safetensors_open(at.path);
    KN_CHECK(kn_safetensors_count(f) == COUNT);
    const struct mallinfo2 after = mallinfo2();
    const size_t bytes = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd;
    KN_CHECK(bytes < 5 * n, "%zu bytes for a header of %zu", bytes, n);
    for (int i = 0; i < COUNT; i++) {
        sprintf(name, "%d", i);
        KN_CHECK(kn_safetensors_has(f, name));
    }
    KN_CHECK(!kn_safetensors_has(f, "100000") && !kn_safetensors_has(f, ""));
    KN_CHECK(strcmp(kn_safetensors_name(f, 3), "23757") == 0, "the order of the header is lost");
    kn_safetensors_close(f);
    temp_end(&at);
    free(file);
    free(header);
}
