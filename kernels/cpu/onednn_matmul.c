/* kernels/cpu/onednn_matmul.c: matrix products through oneDNN.
 *
 * oneDNN cuts K by the number of threads it may use, so its results depend on it. Here dst is cut
 * into tiles by its shape alone, and each tile is a product of one thread; any provider gives the
 * same bits. choose.c says which products come here before the vector overlay sees them.
 *
 * A bias goes in as f32: oneDNN 3 has no fast product with an f16 bias and dst. */
#include "kernels/convert.h"
#include "kernels/cpu/onednn.h"

enum {
    TILE_ROWS = 128, /* of dst; multiples of every kernel's own tile */
    TILE_COLUMNS = 256,
};

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* ---- one tile's product as a primitive ------------------------------------------------------ */

/* c[M, N] = a[M, K] b[K, N] + bias[N], or c += that. Compared as bytes: unused parts are 0. */
typedef struct tile_key {
    int64_t M, N, K, am, ak, bk, bn, cm, cn;
    int64_t t, ct, bias, add; /* bias: whether there is one */
} tile_key;

typedef struct tile {
    kn_onednn_item item;
    tile_key key;
    dnnl_primitive_t primitive; /* NULL: oneDNN has no kernel for it worth calling */
    size_t scratch;             /* bytes */
    dnnl_memory_desc_t a, b, c, bias, scratch_desc;
} tile;

static bool matrix_desc(dnnl_memory_desc_t *md, int64_t rows, int64_t columns, int64_t t,
                        int64_t sr, int64_t sc)
{
    const int64_t dims[2] = { rows, columns }, strides[2] = { sr, sc };
    return kn_onednn_desc(md, 2, dims, strides, (kn_dtype)t);
}

static bool tile_descs(tile *t)
{
    const tile_key *k = &t->key;
    return matrix_desc(&t->a, k->M, k->K, k->t, k->am, k->ak) &&
           matrix_desc(&t->b, k->K, k->N, k->t, k->bk, k->bn) &&
           matrix_desc(&t->c, k->M, k->N, k->ct, k->cm, k->cn) &&
           (!k->bias || matrix_desc(&t->bias, 1, k->N, KN_F32, k->N, 1));
}

/* Makes the primitive, or leaves NULL if oneDNN has none. */
static void tile_make_primitive(tile *t)
{
    dnnl_primitive_desc_t pd = NULL;
    dnnl_primitive_attr_t attr = kn_onednn_attr();
    if (attr && (!t->key.add || kn_onednn_attr_add(attr)) && tile_descs(t) &&
        kn_onednn_matmul_desc(&pd, &t->a, &t->b, t->key.bias ? &t->bias : NULL, &t->c, attr) &&
        kn_onednn_worth_calling(pd))
        kn_onednn_make(&t->primitive, &t->scratch_desc, &t->scratch, pd);
    if (pd)
        dnnl_primitive_desc_destroy(pd);
    if (attr)
        dnnl_primitive_attr_destroy(attr);
}

static void tile_destroy(kn_onednn_item *item)
{
    tile *t = (tile *)item;
    dnnl_memory_desc_t *const all[] = { &t->a, &t->b, &t->c, &t->bias, &t->scratch_desc };
    if (t->primitive)
        dnnl_primitive_destroy(t->primitive);
    for (int i = 0; i < 5; i++)
        kn_onednn_desc_free(all[i]);
    kn_host_free(t);
}

static kn_onednn_item *tile_make(const void *key)
{
    tile *t = kn_host_calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->key = *(const tile_key *)key;
    t->item = (kn_onednn_item){ .key = &t->key, .size = sizeof t->key, .destroy = tile_destroy };
    tile_make_primitive(t);
    return &t->item;
}

/* The tile for key; NULL: out of memory. Give it back with kn_onednn_release. */
static tile *tile_get(const tile_key *key)
{
    return (tile *)kn_onednn_get(key, sizeof *key, tile_make);
}

/* ---- a product as tiles --------------------------------------------------------------------- */

typedef struct product {
    tile_key key; /* of the whole product */
    char *c;
    const char *a, *b;
    const void *bias; /* [N] of bias_t; NULL: none */
    kn_dtype bias_t;
    const float *wide; /* bias as f32 */
    int ndim;          /* of the batch */
    int64_t count, shape[KN_MAX_DIMS], sa[KN_MAX_DIMS], sb[KN_MAX_DIMS], sc[KN_MAX_DIMS];
    int64_t down, across; /* tiles of one product */
    tile *tile[2][2];     /* [last row of tiles][last column of tiles] */
    size_t scratch;
} product;

static void *element(const void *p, int64_t t, int64_t i)
{
    return (char *)(uintptr_t)p + i * (int64_t)kn_dtype_size((kn_dtype)t);
}

static bool tile_run(const tile *t, dnnl_stream_t stream, const void *a, const void *b, void *c,
                     const void *bias, void *scratch)
{
    dnnl_exec_arg_t arg[5];
    int n = 0;
    bool good = kn_onednn_arg(&arg[n++], DNNL_ARG_SRC, &t->a, (void *)(uintptr_t)a) &&
                kn_onednn_arg(&arg[n++], DNNL_ARG_WEIGHTS, &t->b, (void *)(uintptr_t)b) &&
                kn_onednn_arg(&arg[n++], DNNL_ARG_DST, &t->c, c);
    if (good && t->key.bias)
        good = kn_onednn_arg(&arg[n++], DNNL_ARG_BIAS, &t->bias, (void *)(uintptr_t)bias);
    if (good && t->scratch)
        good = kn_onednn_arg(&arg[n++], DNNL_ARG_SCRATCHPAD, &t->scratch_desc, scratch);
    return kn_onednn_execute(t->primitive, stream, n, arg, good);
}

/* Tile number i of the whole batch. */
static bool product_tile(const void *ctx, int64_t i, dnnl_stream_t stream, void *scratch)
{
    const product *p = ctx;
    const tile_key *k = &p->key;
    const int64_t row = i / p->across % p->down, column = i % p->across;
    const int64_t m = row * TILE_ROWS, n = column * TILE_COLUMNS;
    int64_t a = m * k->am, b = n * k->bn, c = m * k->cm + n * k->cn, rest = i / p->across / p->down;
    for (int d = p->ndim - 1; d >= 0; d--) {
        const int64_t at = rest % p->shape[d];
        rest /= p->shape[d];
        a += at * p->sa[d];
        b += at * p->sb[d];
        c += at * p->sc[d];
    }
    const tile *t = p->tile[row == p->down - 1][column == p->across - 1];
    return tile_run(t, stream, element(p->a, k->t, a), element(p->b, k->t, b),
                    element(p->c, k->ct, c), k->bias ? p->wide + n : NULL, scratch);
}

/* Where bias is narrow, its values as f32 in room [N]. */
static void bias_widen(product *p, float *room)
{
    const uint16_t *narrow = p->bias;
    p->wide = p->bias;
    if (!p->bias || p->bias_t == KN_F32)
        return;
    for (int64_t i = 0; i < p->key.N; i++)
        room[i] = p->bias_t == KN_BF16 ? kn_bf16_to_f32(narrow[i]) : kn_f16_to_f32(narrow[i]);
    p->wide = room;
}

static bool product_run(product *p)
{
    const tile_key *k = &p->key;
    const double flops = 2.0 * (double)p->count * (double)k->M * (double)k->N * (double)k->K;
    const int64_t tiles = p->count * p->down * p->across;
    const int64_t threads = MIN(kn_onednn_threads(flops), tiles);
    const size_t each = KN_ALIGNED(p->scratch);
    const size_t wide =
        p->bias && p->bias_t != KN_F32 ? KN_ALIGNED((size_t)k->N * sizeof(float)) : 0;
    const size_t bytes = wide + each * (size_t)threads;
    char *scratch = kn_take(kn_device_memory(KN_CPU), bytes, KN_MEM_WORKSPACE);
    if (!scratch)
        return false;
    bias_widen(p, (float *)(void *)scratch);
    bool good = kn_onednn_each(threads, tiles, product_tile, p, scratch + wide, each);
    kn_give(kn_device_memory(KN_CPU), scratch, bytes, KN_MEM_WORKSPACE);
    return good || kn_fail("matmul: oneDNN could not run a product that it accepted");
}

/* ---- the entry ------------------------------------------------------------------------------ */

/* A size-1 dim may carry any stride; oneDNN needs one that fits a dense matrix. */
static void plain_strides(int64_t rows, int64_t columns, int64_t *sr, int64_t *sc)
{
    if (columns == 1 && *sr != 1)
        *sc = 1;
    if (rows == 1 && *sc == 1)
        *sr = columns;
    else if (rows == 1 && columns > 1)
        *sr = 1;
}

/* Rows or columns are dense and don't overlap. */
static bool plain(int64_t rows, int64_t columns, int64_t sr, int64_t sc)
{
    return (sc == 1 && sr >= columns) || (sr == 1 && sc >= rows);
}

static bool shapes_fit(const kn_matmul_args *x)
{
    const int n = x->dst.ndim;
    bool fit = n >= 2 && x->a.ndim == n && x->b.ndim == n;
    for (int d = 0; fit && d < n - 2; d++)
        fit = x->a.shape[d] == x->dst.shape[d] && x->b.shape[d] == x->dst.shape[d];
    return fit && x->a.shape[n - 2] == x->dst.shape[n - 2] &&
           x->b.shape[n - 1] == x->dst.shape[n - 1] && x->a.shape[n - 1] == x->b.shape[n - 2] &&
           (!x->bias.data || (x->bias.ndim == 1 && x->bias.shape[0] == x->dst.shape[n - 1] &&
                              (x->bias.stride[0] == 1 || x->bias.shape[0] == 1)));
}

static bool dtypes_fit(const kn_matmul_args *x)
{
    const kn_dtype t = x->a.dtype, ct = x->dst.dtype, bt = x->bias.dtype;
    return (t == KN_F32 || t == KN_BF16 || t == KN_F16) && x->b.dtype == t &&
           (ct == t || ct == KN_F32) && (!x->bias.data || bt == t || bt == KN_F32);
}

static bool product_make(product *p, const kn_matmul_args *x)
{
    const int r = x->dst.ndim - 2, c = r + 1;
    *p = (product){ .c = x->dst.data, .a = x->a.data, .b = x->b.data, .bias = x->bias.data };
    tile_key *k = &p->key;
    k->M = x->dst.shape[r], k->N = x->dst.shape[c], k->K = x->a.shape[c];
    k->am = x->a.stride[r], k->ak = x->a.stride[c];
    k->bk = x->b.stride[r], k->bn = x->b.stride[c];
    k->cm = x->dst.stride[r], k->cn = x->dst.stride[c];
    k->t = x->a.dtype, k->ct = x->dst.dtype, k->bias = p->bias != NULL, k->add = x->add;
    p->bias_t = x->bias.dtype;
    plain_strides(k->M, k->K, &k->am, &k->ak);
    plain_strides(k->K, k->N, &k->bk, &k->bn);
    plain_strides(k->M, k->N, &k->cm, &k->cn);
    p->count = 1;
    bool rows = true; /* leading dims that continue a's and dst's rows and share b become rows */
    for (int d = r - 1; d >= 0; d--) {
        const int64_t n = x->dst.shape[d], sa = x->a.stride[d], sc = x->dst.stride[d];
        rows = rows && x->b.stride[d] == 0 && sa == k->am * k->M && sc == k->cm * k->M;
        if (rows) {
            k->M *= n;
        } else if (n != 1) {
            p->shape[p->ndim] = n, p->sa[p->ndim] = sa, p->sb[p->ndim] = x->b.stride[d];
            p->sc[p->ndim++] = sc;
            p->count *= n;
        }
    }
    p->down = (k->M + TILE_ROWS - 1) / TILE_ROWS;
    p->across = (k->N + TILE_COLUMNS - 1) / TILE_COLUMNS;
    return plain(k->M, k->K, k->am, k->ak) && plain(k->K, k->N, k->bk, k->bn) &&
           plain(k->M, k->N, k->cm, k->cn);
}

/* Finds the up to four primitives: inner tiles, last row, last column, corner. */
static kn_status product_tiles(product *p)
{
    const int threads = kn_onednn_threads_one();
    kn_status status = KN_DONE;
    for (int i = 0; i < 4 && status == KN_DONE; i++) {
        const int last_row = i / 2, last_column = i % 2;
        if ((!last_row && p->down == 1) || (!last_column && p->across == 1))
            continue;
        tile_key k = p->key;
        k.M = last_row ? k.M - (p->down - 1) * TILE_ROWS : TILE_ROWS;
        k.N = last_column ? k.N - (p->across - 1) * TILE_COLUMNS : TILE_COLUMNS;
        tile *t = p->tile[last_row][last_column] = tile_get(&k);
        if (!t)
            status = KN_FAILED;
        else if (!t->primitive)
            status = KN_DECLINED;
        else if (t->scratch > p->scratch)
            p->scratch = t->scratch;
    }
    kn_onednn_threads_restore(threads);
    return status;
}

static void product_release(product *p)
{
    for (int i = 0; i < 4; i++)
        if (p->tile[i / 2][i % 2])
            kn_onednn_release(&p->tile[i / 2][i % 2]->item);
}

/* Plans the product, whose sums have terms; release it in any case. */
static kn_status product_plan(product *p, const kn_matmul_args *x)
{
    *p = (product){ 0 };
    if (!kn_onednn_engine() || !shapes_fit(x) || !dtypes_fit(x) || x->a.shape[x->a.ndim - 1] == 0 ||
        !product_make(p, x))
        return KN_DECLINED;
    return product_tiles(p);
}

kn_status kn_onednn_matmul(const void *args)
{
    const kn_matmul_args *x = args;
    product p;
    if (shapes_fit(x) && dtypes_fit(x) && kn_array_numel(&x->dst) == 0)
        return KN_DONE;
    kn_status status = product_plan(&p, x);
    if (status == KN_DONE)
        status = product_run(&p) ? KN_DONE : KN_FAILED;
    product_release(&p);
    return status;
}

/* ---- queries of other files ------------------------------------------------------------------ */

static bool fast[KN_DTYPE_COUNT];
static pthread_once_t fast_once = PTHREAD_ONCE_INIT;

/* oneDNN offers bf16 and f16 products only where the CPU has instructions for them. */
static void fast_find(void)
{
    static const kn_dtype types[] = { KN_BF16, KN_F16 };
    const int threads = kn_onednn_threads_one();
    for (int i = 0; kn_onednn_engine() && i < 2; i++) {
        const tile_key key = { .M = 64,
                               .N = 64,
                               .K = 64,
                               .am = 64,
                               .ak = 1,
                               .bk = 64,
                               .bn = 1,
                               .cm = 64,
                               .cn = 1,
                               .t = types[i],
                               .ct = types[i] };
        tile *t = tile_get(&key);
        if (t) {
            fast[types[i]] = t->primitive != NULL;
            kn_onednn_release(&t->item);
        }
    }
    kn_onednn_threads_restore(threads);
}

bool kn_onednn_fast(kn_dtype t)
{
    pthread_once(&fast_once, fast_find);
    return fast[t];
}
