/* The files of shards from outside: their names and bytes, damage, what strangers may write there,
 * files of other programs, and a writer that fails. */
#include "state/merge.h"
#include "tests/failing.h"
#include "tests/state/place.h"
#include <signal.h>
#include <sys/resource.h>

/* ---- two ranks' files ------------------------------------------------------------------------ */

static const float values[12] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 };

/* "w" of [3, 4] cut after element 5, "n" whole on rank 1. */
static bool write_rank(int rank, const char *id)
{
    kn_piece piece[2] = { { "w", KN_F32, 2, { 3, 4 }, { 0, 5, 1, 5, 0 } },
                          { "n", KN_I64, 0, { 0 }, { 0, 1, 1, 1, 0 } } };
    int64_t n = 7;
    if (rank)
        piece[0].part = (kn_interval){ 5, 7, 1, 7, 0 };
    kn_pieces_writer *w = kn_pieces_create(temp_folder, rank, id, NULL, piece, rank ? 2 : 1);
    if (!w)
        return false;
    kn_pieces_append(w, rank ? values + 5 : values, rank ? 28 : 20);
    if (rank)
        kn_pieces_append(w, &n, 8);
    return kn_pieces_commit(w);
}

static void write_both(void)
{
    KN_CHECK(write_rank(0, "c0ffee") && write_rank(1, "c0ffee"));
}

static void holds(const char *name, const char *header, const void *data, size_t bytes)
{
    uint64_t at;
    char *text = place_header(name, &at), got[64];
    KN_CHECK(strcmp(text, header) == 0, "%s holds\n%s\n, not\n%s", name, text, header);
    KN_CHECK(at % 64 == 0);
    FILE *f = fopen(temp_path(name), "rb");
    KN_CHECK(f && fseek(f, (long)at, SEEK_SET) == 0 && fread(got, 1, sizeof got, f) == bytes);
    KN_CHECK(memcmp(got, data, bytes) == 0);
    fclose(f);
    free(text);
}

#define INFO(parts)                                                                                \
    "{\"__metadata__\":{\"format\":\"pt\",\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":\"{" parts \
    "}\",\"KNAP_XXH3\":\"{"
#define SUMS(sums) sums "}\",\"KNAP_ID\":\"c0ffee\"},"
#define W(at)      "\\\"w\\\":{\\\"saved_offsets\\\":[" at "],\\\"global_shape\\\":[3,4]}"
#define N          "\\\"n\\\":{\\\"saved_offsets\\\":[],\\\"global_shape\\\":[]}"
#define W_IS(shape, bytes)                                                                         \
    "\"w\":{\"dtype\":\"F32\",\"shape\":[" shape "],\"data_offsets\":[0," #bytes "]}"

/* The files that scripts/peers dcp shows to PyTorch, here word for word. */
KN_TEST(pieces_files, files_are_those_of_the_convention)
{
    char third[20] = { 0 };
    memcpy(third, values + 5, 12);
    third[12] = 7;
    place_begin();
    write_both();
    KN_CHECK(place_files() == 4);
    holds("shard-00001-model-00001-of-00002.safetensors",
          INFO(W("0,0")) SUMS("\\\"w\\\":\\\"0aee2086d517557e\\\"") W_IS("1,4", 16) "}", values,
          16);
    holds("shard-00001-model-00002-of-00002.safetensors",
          INFO(W("1,0")) SUMS("\\\"w\\\":\\\"ba0313677c896551\\\"") W_IS("1,1", 4) "}", values + 4,
          4);
    holds("shard-00002-model-00001-of-00002.safetensors",
          INFO(W("1,1") "," N)
              SUMS("\\\"w\\\":\\\"670af6786522468b\\\",\\\"n\\\":\\\"81671e58d6b596af\\\"") W_IS(
                  "1,3", 12) ",\"n\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[12,20]}}",
          third, 20);
    holds("shard-00002-model-00002-of-00002.safetensors",
          INFO(W("2,0")) SUMS("\\\"w\\\":\\\"4cd842368f6fff4f\\\"") W_IS("1,4", 16) "}", values + 8,
          16);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void opening_says(const char *text)
{
    KN_CHECK(kn_pieces_open(temp_folder) == NULL, "it opened, and should say: %s", text);
    KN_CHECK(strstr(kn_error(), text), "\"%s\" doesn't say \"%s\"", kn_error(), text);
    kn_clear_error();
}

static void change_byte(const char *name, long at, int whence)
{
    FILE *f = fopen(temp_path(name), "r+b");
    KN_CHECK(f && fseek(f, at, whence) == 0);
    int c = fgetc(f);
    KN_CHECK(fseek(f, -1, SEEK_CUR) == 0 && fputc(c ^ 4, f) >= 0 && fclose(f) == 0);
}

KN_TEST(pieces_files, damage_is_found)
{
    float got[12];
    uint64_t data;
    place_begin();
    write_both();
    change_byte("shard-00001-model-00001-of-00002.safetensors", -1, SEEK_END); /* of w[0][3] */
    kn_pieces *p = kn_pieces_open(temp_folder);
    int w = kn_pieces_find(p, "w");
    KN_CHECK(!kn_pieces_verify(p, w, NULL, NULL) && strstr(kn_error(), "shard-00001-model-00001"));
    KN_CHECK(strstr(kn_error(), "\"w\"") && strstr(kn_error(), "damaged"));
    kn_clear_error();
    KN_CHECK(!kn_pieces_read(p, w, (kn_interval){ 0, 12, 1, 12, 0 }, got));
    kn_clear_error();
    KN_CHECK(kn_pieces_read(p, w, (kn_interval){ 4, 8, 1, 8, 0 }, got) && got[7] == 11);
    free(place_header("shard-00002-model-00001-of-00002.safetensors", &data));
    KN_CHECK(truncate(temp_path("shard-00002-model-00001-of-00002.safetensors"), (off_t)data + 8) ==
             0);
    KN_CHECK(!kn_pieces_read(p, w, (kn_interval){ 5, 3, 1, 3, 0 }, got));
    KN_CHECK(strstr(kn_error(), "was cut to"));
    kn_clear_error();
    kn_pieces_close(p);
    opening_says("the file is truncated");
}

KN_TEST(pieces_files, a_missing_a_second_and_a_foreign_file_are_found)
{
    place_begin();
    opening_says("no file in this folder ends in .safetensors");
    write_both();
    unlink(temp_path("shard-00002-model-00002-of-00002.safetensors"));
    opening_says("\"w\": no file holds its element [2, 0]"); /* its last row */
    clear_folder("");
    write_both();
    KN_CHECK(link(temp_path("shard-00001-model-00002-of-00002.safetensors"),
                  temp_path("again.safetensors")) == 0);
    opening_says("\"w\": its element [1, 0] lies in two files, again.safetensors and shard-00001");
    clear_folder("");
    KN_CHECK(write_rank(0, "c0ffee") && write_rank(1, "7ea"));
    opening_says("aren't of one checkpoint: their ids are \"c0ffee\" and \"7ea\"");
}

/* A file with one tensor "w" of 4 bytes a number, and metadata, as a stranger may write it. */
static void stranger(const char *name, const char *shape, const char *metadata)
{
    char header[4096];
    static const char data[4000];
    int64_t bytes = 4;
    for (const char *c = shape; c; c = strchr(c, ','), c += c != NULL)
        bytes *= *c ? atoi(c) : 1;
    snprintf(header, sizeof header,
             "{\"__metadata__\":{%s},\"w\":{\"dtype\":\"F32\",\"shape\":[%s],"
             "\"data_offsets\":[0,%lld]}}",
             metadata, shape, (long long)bytes);
    place_put(name, header, data, (size_t)bytes);
}

static void refuses(const char *metadata, const char *text)
{
    stranger("a.safetensors", "2,3", metadata);
    opening_says(text);
}

#define PART(text)  "\"DCP_SHARDING_INFO\":\"{\\\"w\\\":{" text "}}\""
#define AT(offsets) "\\\"saved_offsets\\\":" offsets

KN_TEST(pieces_files, metadata_of_strangers_is_checked)
{
    place_begin();
    refuses("\"DCP_SHARDING_INFO\":\"{\"", "bad metadata DCP_SHARDING_INFO");
    refuses("\"DCP_SHARDING_INFO\":\"[]\"", "DCP_SHARDING_INFO is no object");
    refuses("\"DCP_SHARDING_INFO\":\"{}\"", "no list of 2 saved_offsets");
    refuses(PART(AT("[1]")), "no list of 2 saved_offsets");
    refuses(PART(AT("[1,-1]")), "no list of 2 saved_offsets");
    refuses(PART(AT("[1,1.5]")), "no list of 2 saved_offsets");
    refuses(PART(AT("[0,9223372036854775806]")), "ends beyond any size");
    refuses(PART(AT("[4611686018427387904,0]")), "too many elements");
    refuses(PART(AT("[1,0]")), "no file holds its element [0, 0]");
    refuses(PART(AT("[1000000000000,1000]")), "no file holds its element [0, 0]");
    refuses(PART(AT("[0,0]") ",\\\"global_shape\\\":[2]"), "global_shape is no list");
    refuses(PART(AT("[0,0]") ",\\\"global_shape\\\":[2,2]"), "beyond its shape in dim 1");
    refuses(PART(AT("[0,0]") ",\\\"global_shape\\\":[9000000000,9000000000]"), "too many elements");
    refuses("\"KNAP_XXH3\":\"{\\\"w\\\":\\\"12\\\"}\"", "isn't 16 digits");
    refuses("\"KNAP_XXH3\":\"{\\\"w\\\":\\\"-123456789012345\\\"}\"", "isn't 16 digits");
    refuses("\"KNAP_ID\":\"0123456789012345678901234567890123456789\"", "1 to 32 are allowed");
    refuses("\"KNAP_ID\":\"\"", "1 to 32 are allowed");
    stranger("a.safetensors", "2,3", PART(AT("[0,0]")));
    stranger("b.safetensors", "6", PART(AT("[0]")));
    opening_says("different numbers of dims");
    stranger("b.safetensors", "2,3", PART(AT("[2,0]") ",\\\"global_shape\\\":[4,3]"));
    opening_says("different whole shapes");
    stranger("b.safetensors", "2,3", PART(AT("[2,0]")));
    kn_pieces *p = kn_pieces_open(temp_folder);
    KN_CHECK(p && kn_pieces_tensor(p, 0)->shape[0] == 4 && !kn_pieces_has_sums(p, 0));
    kn_pieces_close(p);
}

/* ---- files of other programs ----------------------------------------------------------------- */

static void index_says(const char *map, const char *text)
{
    put_text("model.safetensors.index.json", map);
    opening_says(text);
}

KN_TEST(pieces_files, an_index_names_the_files)
{
    place_begin();
    stranger("model-00001-of-00001.safetensors", "2,3", "\"format\":\"pt\"");
    stranger("consolidated.safetensors", "2,3", "\"format\":\"pt\""); /* the same once more */
    opening_says("lies in two files");
    index_says("{\"weight_map\":{\"w\":\"consolidated\\u0000\"}}", "index.json: ");
    index_says("{}", "no weight_map");
    index_says("{\"weight_map\":[]}", "no weight_map");
    index_says("{\"weight_map\":{\"w\":3}}", "no name of a file in this folder");
    index_says("{\"weight_map\":{\"w\":\"../a.safetensors\"}}", "no name of a file in this folder");
    index_says("{\"weight_map\":{\"w\":\"none.safetensors\"}}", "cannot open");
    index_says("{\"weight_map\":{\"v\":\"consolidated.safetensors\"}}", "isn't in the file");
    put_text("model.safetensors.index.json",
             "{\"metadata\":{},\"weight_map\":{\"w\":\"model-00001-of-00001.safetensors\"}}");
    kn_pieces *p = kn_pieces_open(temp_folder);
    KN_CHECK(p && kn_pieces_files(p) == 1 && kn_pieces_count(p) == 1);
    KN_CHECK(strcmp(kn_pieces_id(p), "") == 0);
    kn_pieces_close(p);
    p = kn_pieces_open(temp_path("consolidated.safetensors"));
    KN_CHECK(p && kn_pieces_count(p) == 1 && kn_pieces_tensor(p, 0)->shape[1] == 3);
    kn_pieces_close(p);
}

/* More than are kept open; each row in a file of its own. */
KN_TEST(pieces_files, hundreds_of_files)
{
    float row[3];
    char name[64], part[200];
    place_begin();
    for (int i = 0; i < 300; i++) {
        snprintf(name, sizeof name, "%03d.safetensors", i);
        snprintf(part, sizeof part, PART(AT("[%d,0]")), i);
        stranger(name, "1,3", part);
    }
    kn_pieces *p = kn_pieces_open(temp_folder);
    KN_CHECK(p && kn_pieces_tensor(p, 0)->shape[0] == 300);
    for (int i = 0; i < 300; i++)
        KN_CHECK(kn_pieces_read(p, 0, (kn_interval){ 3 * i, 3, 1, 3, 0 }, row));
    stranger("003.safetensors", "1,3", PART(AT("[3,0]"))); /* closed meanwhile, and another now */
    KN_CHECK(!kn_pieces_read(p, 0, (kn_interval){ 9, 3, 1, 3, 0 }, row));
    KN_CHECK(strstr(kn_error(), "003.safetensors: the file was replaced"));
    kn_clear_error();
    kn_pieces_close(p);
}

/* A file of holes: 5 GiB, none of them on the disk. */
KN_TEST(pieces_files, places_beyond_4_gib)
{
    const char *header = "{\"big\":{\"dtype\":\"U8\",\"shape\":[5,1073741824],"
                         "\"data_offsets\":[0,5368709120]}}";
    unsigned char got[4] = { 1, 1, 1, 1 };
    place_begin();
    place_put("a.safetensors", header, "", 0);
    int64_t data = 8 + (int64_t)strlen(header);
    int fd = open(temp_path("a.safetensors"), O_WRONLY);
    if (ftruncate(fd, data + 5368709120) != 0)
        KN_SKIP("this file system has no files of 5 GiB");
    KN_CHECK(pwrite(fd, "ab", 2, data + 5368709118) == 2 && pwrite(fd, "c", 1, data) == 1);
    close(fd);
    kn_pieces *p = kn_pieces_open(temp_folder);
    KN_CHECK(p && kn_pieces_read(p, 0, (kn_interval){ 5368709116, 4, 1, 4, 0 }, got));
    KN_CHECK(memcmp(got, "\0\0ab", 4) == 0);
    KN_CHECK(kn_pieces_read(p, 0, (kn_interval){ 0, 1, 4, 1073741824, 0 }, got)); /* a column */
    KN_CHECK(memcmp(got, "c\0\0\0", 4) == 0);
    kn_pieces_close(p);
}

/* ---- a writer that fails --------------------------------------------------------------------- */

KN_TEST(pieces_files, a_failed_writer_leaves_nothing)
{
    kn_piece piece = { "w", KN_F32, 2, { 3, 4 }, { 0, 5, 1, 5, 0 } };
    place_begin();
    kn_pieces_writer *w = kn_pieces_create(temp_folder, 0, "1", NULL, &piece, 1);
    KN_CHECK(w && kn_pieces_append(w, values, 16) && !kn_pieces_commit(w));
    KN_CHECK(strstr(kn_error(), "00002-of-00002.safetensors: 0 of 4 bytes"));
    kn_clear_error();
    KN_CHECK(place_files() == 0);
    w = kn_pieces_create(temp_folder, 0, "1", NULL, &piece, 1);
    KN_CHECK(w && !kn_pieces_append(w, values, 24) && strstr(kn_error(), "4 bytes more"));
    kn_pieces_abandon(w);
    kn_clear_error();
    KN_CHECK(place_files() == 0);
    put_text("shard-00001-model-00002-of-00002.safetensors", "mine");
    KN_CHECK(!kn_pieces_create(temp_folder, 0, "1", NULL, &piece, 1));
    KN_CHECK(strstr(kn_error(), "is there already"));
    kn_clear_error();
    KN_CHECK(place_files() == 1, "the file that was there is still there, alone");
}

KN_TEST(pieces_files, a_full_disk_is_an_error)
{
    static char big[3 << 20];
    kn_piece piece = { "w", KN_U8, 1, { sizeof big }, { 0, sizeof big, 1, sizeof big, 0 } };
    struct rlimit most = { 2 << 20, 2 << 20 };
    place_begin();
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &most);
    kn_pieces_writer *w = kn_pieces_create(temp_folder, 0, "1", NULL, &piece, 1);
    KN_CHECK(w && !kn_pieces_append(w, big, sizeof big));
    KN_CHECK(strstr(kn_error(), "cannot write") && strstr(kn_error(), "File too large"));
    kn_pieces_abandon(w);
    kn_clear_error();
}

static bool writes(void *arg)
{
    (void)arg;
    return write_rank(1, "1");
}

static void no_file_is_left(void *arg)
{
    KN_CHECK(place_files() == *(int *)arg);
}

KN_TEST(pieces_files, every_allocation_of_a_writer_may_fail)
{
    int files = 0;
    place_begin();
    each_allocation_fails(writes, no_file_is_left, &files, 10);
    KN_CHECK(place_files() == 2);
}

static bool reads(void *arg)
{
    kn_pieces *p = kn_pieces_open(temp_folder);
    bool ok = p &&
              kn_pieces_read(p, kn_pieces_find(p, "w"), (kn_interval){ 0, 12, 1, 12, 0 }, arg) &&
              kn_pieces_verify(p, 1, NULL, NULL);
    kn_pieces_close(p);
    return ok;
}

KN_TEST(pieces_files, every_allocation_of_a_reader_may_fail)
{
    float got[12];
    place_begin();
    write_both();
    each_allocation_fails(reads, NULL, got, 10);
    KN_CHECK(memcmp(got, values, sizeof got) == 0);
}

static bool merges(void *p)
{
    return kn_pieces_merge(p, temp_path("out"), 8, NULL, NULL, NULL);
}

static void the_folder_is_empty(void *p)
{
    (void)p;
    KN_CHECK(rmdir(temp_path("out")) == 0 && mkdir(temp_path("out"), 0777) == 0);
}

KN_TEST(pieces_files, every_allocation_of_a_merge_may_fail)
{
    float got[12];
    place_begin();
    write_both();
    KN_CHECK(mkdir(temp_path("out"), 0777) == 0);
    kn_pieces *p = kn_pieces_open(temp_folder);
    each_allocation_fails(merges, the_folder_is_empty, p, 10);
    kn_pieces_close(p);
    p = kn_pieces_open(temp_path("out"));
    KN_CHECK(p && kn_pieces_files(p) == 2 && kn_pieces_has_sums(p, 1));
    KN_CHECK(kn_pieces_read(p, kn_pieces_find(p, "w"), (kn_interval){ 0, 12, 1, 12, 0 }, got) &&
             memcmp(got, values, sizeof got) == 0);
    kn_pieces_close(p);
}
