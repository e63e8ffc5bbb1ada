/* tests/fuzz/state_fuzz.c: the readers of state/: files of shards and their index. */
#include "tests/fuzz/fuzz.h"
#include "state/merge.h"

/* A header and its data, "{...}\n\n....", with the length that .safetensors begins with. */
static void write_shard(const char *name, const uint8_t *data, size_t size)
{
    const uint8_t *cut = size ? memmem(data, size, "\n\n", 2) : NULL;
    size_t header = cut ? (size_t)(cut - data) : size, rest = cut ? size - header - 2 : 0;
    uint8_t *file = malloc(8 + size);
    FUZZ_CHECK(file);
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)((uint64_t)header >> (8 * i));
    if (header)
        memcpy(file + 8, data, header);
    if (rest)
        memcpy(file + 8 + header, cut + 2, rest);
    fuzz_try_file(name, file, 8 + header + rest);
    free(file);
}

static void read_tensor(kn_pieces *p, int i, size_t most)
{
    const kn_piece *t = kn_pieces_tensor(p, i);
    int64_t numel = 1, size = (int64_t)kn_dtype_size(t->dtype);
    for (int d = 0; d < t->ndim; d++)
        numel *= t->shape[d];
    FUZZ_CHECK(numel >= 0 && numel * size <= (int64_t)most, "%lld elements", (long long)numel);
    FUZZ_CHECK(kn_pieces_find(p, t->name) == i, "%s", t->name);
    char *to = malloc((size_t)(numel * size) + 1);
    FUZZ_CHECK(to);
    kn_pieces_read(p, i, t->part, to);
    kn_clear_error();
    if (numel > 2) {
        kn_pieces_read(p, i, (kn_interval){ 1, numel - 2, 1, numel - 2, 0 }, to);
        kn_clear_error();
    }
    free(to);
    kn_pieces_verify(p, i, NULL, NULL);
    kn_clear_error();
}

/* Files "name\n{header}\n\ndata", with "||" between them; an index is "name\ntext". */
KN_FUZZ(pieces, .factor = 1000, .extra = 8 << 20)
{
    fuzz_input rest = { data, size };
    char name[64], out[300];
    for (int files = 0; rest.size && files < 20; files++) {
        fuzz_word(&rest, '\n', name, sizeof name);
        const uint8_t *end = rest.size ? memmem(rest.data, rest.size, "||", 2) : NULL;
        size_t n = end ? (size_t)(end - rest.data) : rest.size;
        if (!*name || strchr(name, '/') || name[0] == '.')
            continue;
        if (strstr(name, ".json"))
            fuzz_try_file(name, rest.data, n);
        else
            write_shard(name, rest.data, n);
        rest = (fuzz_input){ end ? end + 2 : rest.data, end ? rest.size - n - 2 : 0 };
    }
    kn_pieces *p = kn_pieces_open(fuzz_folder());
    for (int i = 0; p && i < kn_pieces_count(p); i++)
        read_tensor(p, i, size);
    fuzz_file("merged/x", "", 0);
    snprintf(out, sizeof out, "%s/merged", fuzz_folder());
    if (p)
        kn_pieces_merge(p, out, size % 2 ? 16 : 0, NULL, NULL, NULL);
    kn_pieces_close(p);
}
