/* Shards in files: what ranks of one layout write, ranks of any other read; the files are those of
 * the convention byte for byte; what isn't whole is refused in a sentence. */
#include "fsdp/layout.h"
#include "state/pieces.h"
#include "tests/state/place.h"

#define TENSORS 6

/* ---- what is saved --------------------------------------------------------------------------- */

typedef struct model {
    int64_t shape[TENSORS][KN_MAX_DIMS];
    kn_layout_param param[TENSORS];
    char *bytes[TENSORS]; /* of the whole */
} model;

static const char *const names[TENSORS] = { "h.0.w", "bias", "conv", "scalar", "none", "\xc3\xa9" };
static const kn_dtype dtypes[TENSORS] = { KN_F32, KN_BF16, KN_F32, KN_I64, KN_F32, KN_U8 };

static int64_t numel_of(const kn_layout_param *p)
{
    int64_t n = 1;
    for (int d = 0; d < p->ndim; d++)
        n *= p->shape[d];
    return n;
}

static void make_model(model *m)
{
    const int ndim[TENSORS] = { 2, 1, 4, 0, 3, 2 };
    const int64_t shape[TENSORS][4] = { { 13, 7 }, { 11 },      { 4, 3, 2, 5 },
                                        { 0 },     { 3, 0, 2 }, { 8, 4 } };
    for (int i = 0; i < TENSORS; i++) {
        memcpy(m->shape[i], shape[i], sizeof shape[i]);
        m->param[i] = (kn_layout_param){ ndim[i], m->shape[i], i == 5 ? 1 : 0 };
        size_t bytes = (size_t)numel_of(&m->param[i]) * kn_dtype_size(dtypes[i]);
        m->bytes[i] = malloc(bytes + 1);
        for (size_t b = 0; b < bytes; b++)
            m->bytes[i][b] = (char)(b * 31 + b / 7 + (size_t)i * 5);
    }
}

static void free_model(model *m)
{
    for (int i = 0; i < TENSORS; i++)
        free(m->bytes[i]);
}

static int64_t part_bytes(const kn_piece *p)
{
    return kn_interval_numel(p->part) * (int64_t)kn_dtype_size(p->dtype);
}

/* The pieces of a rank; rank 0 takes the tensor without elements. */
static int make_pieces(const model *m, const kn_layout *l, int rank, kn_piece piece[TENSORS])
{
    int n = 0;
    for (int i = 0; i < TENSORS; i++) {
        if (l->numel[i] == 0 && rank > 0)
            continue;
        piece[n] =
            (kn_piece){ names[i], dtypes[i], m->param[i].ndim, { 0 }, kn_layout_part(l, i, rank) };
        memcpy(piece[n].shape, m->shape[i], sizeof piece[n].shape);
        n++;
    }
    return n;
}

/* Writes one rank's files, its bytes in portions that end anywhere. */
static bool write_rank(const model *m, const kn_layout *l, int rank, size_t portion)
{
    kn_piece piece[TENSORS];
    int n = make_pieces(m, l, rank, piece);
    kn_pieces_writer *w = kn_pieces_create(temp_folder, rank, "0123456789abcdef", NULL, piece, n);
    for (int i = 0; i < TENSORS && w; i++) {
        kn_interval part = kn_layout_part(l, i, rank);
        size_t size = kn_dtype_size(dtypes[i]), bytes = (size_t)kn_interval_numel(part) * size;
        OWNED_BYTES char *data = malloc(bytes + 1);
        kn_interval_cut(part, data, m->bytes[i], size);
        for (size_t at = 0; at < bytes; at += portion)
            kn_pieces_append(w, data + at, bytes - at < portion ? bytes - at : portion);
    }
    return w && kn_pieces_commit(w);
}

static void write_all(const model *m, const kn_layout *l)
{
    for (int r = 0; r < l->shards; r++)
        KN_CHECK(write_rank(m, l, r, 37));
}

/* Every rank of layout l reads its parts. */
static void read_all(const model *m, const kn_layout *l)
{
    kn_pieces *p = kn_pieces_open(temp_folder);
    KN_CHECK(p != NULL);
    KN_CHECK(kn_pieces_count(p) == TENSORS && strcmp(kn_pieces_id(p), "0123456789abcdef") == 0);
    for (int r = 0; r < l->shards; r++)
        for (int i = 0; i < TENSORS; i++) {
            int t = kn_pieces_find(p, names[i]);
            KN_CHECK(t >= 0 && kn_pieces_tensor(p, t)->dtype == dtypes[i]);
            KN_CHECK(kn_pieces_tensor(p, t)->ndim == m->param[i].ndim &&
                     memcmp(kn_pieces_tensor(p, t)->shape, m->shape[i], sizeof m->shape[i]) == 0);
            kn_piece piece = { names[i], dtypes[i], 0, { 0 }, kn_layout_part(l, i, r) };
            size_t bytes = (size_t)part_bytes(&piece);
            OWNED_BYTES char *got = malloc(bytes + 1), *want = malloc(bytes + 1);
            kn_interval_cut(piece.part, want, m->bytes[i], kn_dtype_size(dtypes[i]));
            KN_CHECK(kn_pieces_read(p, t, piece.part, got));
            KN_CHECK(memcmp(got, want, bytes) == 0, "%s of rank %d differs", names[i], r);
        }
    for (int t = 0; t < TENSORS; t++)
        KN_CHECK(kn_pieces_has_sums(p, t) && kn_pieces_verify(p, t, NULL, NULL));
    kn_pieces_close(p);
}

/* ---- the tests ------------------------------------------------------------------------------- */

/* Ranks of all layouts read the shards that ranks of one layout wrote. */
static void check_files_of(const model *m, kn_layout_kind kind, int shards)
{
    kn_layout l;
    KN_CHECK(kn_layout_make(&l, kind, m->param, TENSORS, shards));
    write_all(m, &l);
    kn_layout_free(&l);
    for (int to = 1; to < KN_LAYOUT_COUNT; to++)
        for (int readers = 1; readers <= 4; readers *= 2) {
            KN_CHECK(kn_layout_make(&l, (kn_layout_kind)to, m->param, TENSORS, readers));
            read_all(m, &l);
            kn_layout_free(&l);
        }
    clear_folder("");
}

KN_TEST(pieces, any_layout_reads_what_any_other_wrote)
{
    model m = { 0 };
    make_model(&m);
    place_begin();
    check_files_of(&m, KN_LAYOUT_FLAT, 1);
    check_files_of(&m, KN_LAYOUT_FLAT, 4);
    check_files_of(&m, KN_LAYOUT_RAGGED, 2);
    check_files_of(&m, KN_LAYOUT_PER_PARAM, 2);
    free_model(&m);
}
