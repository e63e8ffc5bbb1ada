/* fsdp/access.c: whole parameters in host memory. */
#include "fsdp/schedule.h"

static const kn_param *param_at(void *root, int index, const char *what)
{
    const kn_param *p;
    int n = kn_params(root, &p);
    if (index >= 0 && index < n)
        return &p[index];
    if (kn_ok())
        kn_fail("%s: parameter number %d doesn't exist; the module has %d", what, index, n);
    return NULL;
}

/* This rank's part of p, which lies in b or, without a bucket, whole in its own tensor. */
static kn_interval own_part(const kn_param *p, const kn_bucket *b)
{
    return b ? b->param[p->index].part : kn_interval_whole(p->numel);
}

static bool fits(const kn_param *p, kn_interval part, kn_tensor *shard, const void *host,
                 const char *what)
{
    if (!kn_check(shard, what))
        return false;
    if (!host && p->numel > 0)
        return kn_fail("%s: the host memory for '%s' is NULL; pass room for its %lld elements",
                       what, p->name, (long long)p->numel);
    if (kn_numel(shard) == kn_interval_numel(part))
        return true;
    return kn_fail("%s: %lld elements were given for this rank's part of '%s', which has %lld",
                   what, (long long)kn_numel(shard), p->name, (long long)kn_interval_numel(part));
}

/* The ranks that hold the parts answer in turn, those of the first replica: rank s has shard s. */
bool kn_bucket_gather_param(kn_bucket *b, int index, int64_t row, kn_tensor *shard, void *host)
{
    size_t size = kn_dtype_size(shard->dtype);
    kn_unit *u = b->unit;
    bool ok = kn_bucket_sync_transfers(b);
    for (int s = 0; s < b->shards && ok; s++) {
        kn_interval i = kn_interval_of_rows(kn_layout_part(&b->layout, index, s), row);
        size_t bytes = (size_t)kn_interval_numel(i) * size;
        if (bytes == 0)
            continue;
        bool straight = i.blocks == 1; /* the part is one run of the parameter */
        char *at = straight ? (char *)host + (size_t)i.start * size : kn_host_alloc(bytes);
        ok = at != NULL;
        if (ok && u->rank == s)
            ok = kn_to_host(shard, at, bytes);
        ok = ok && kn_hosts_broadcast(u->comm, at, bytes, s, b->param[index].name);
        if (!straight) {
            if (ok)
                kn_interval_paste(i, host, at, size);
            kn_host_free(at);
        }
    }
    return ok && kn_ok();
}

static bool read_part(const kn_param *p, kn_tensor *shard, void *host, const char *what)
{
    kn_bucket *b = p ? kn_bucket_of(p) : NULL;
    if (!p || !fits(p, own_part(p, b), shard, host, what))
        return false;
    if (b && b->shards > 1)
        return kn_bucket_gather_param(b, p->index, 1, shard, host);
    return p->numel == 0 || kn_to_host(shard, host, (size_t)p->numel * kn_dtype_size(shard->dtype));
}

bool kn_shard_read(void *root, int index, kn_tensor *shard, void *host)
{
    const kn_param *p = kn_ok() ? param_at(root, index, "kn_shard_read") : NULL;
    return read_part(p, shard, host, "kn_shard_read");
}

void kn_bucket_written(kn_bucket *b, int index)
{
    b->full->part[index].version++;
    if (b->full != b->master)
        b->master->version++;
}

bool kn_bucket_drop_gathered(kn_bucket *b, int index)
{
    if (b->full == b->master)
        return true;
    if (index < 0)
        b->full->version++;
    else
        b->full->part[index].version++;
    return b->residency == KN_SHARDED ||
           kn_unit_reshard(b->unit, KN_WHY("a parameter was written"));
}

static bool write_part(const kn_param *p, kn_tensor *shard, const void *host, const char *what)
{
    kn_bucket *b = p ? kn_bucket_of(p) : NULL;
    kn_interval part = p ? own_part(p, b) : (kn_interval){ 0 };
    if (!p || !fits(p, part, shard, host, what))
        return false;
    bool master =
        b && shard->storage == b->master; /* all ranks say the same of an empty part, too */
    if (master && !kn_unit_closed(b->unit, p->name, what))
        return false;
    if (master && !kn_bucket_sync_transfers(b)) /* a gather may read what is written now */
        return false;
    if (kn_numel(shard) == 0)
        return !master || kn_bucket_drop_gathered(b, p->index);
    const size_t size = kn_dtype_size(shard->dtype);
    char *cut = part.blocks > 1 ? kn_host_alloc((size_t)kn_interval_numel(part) * size) : NULL;
    if (cut)
        kn_interval_cut(part, cut, host, size);
    const char *run = cut ? cut : (const char *)host + (size_t)part.start * size;
    bool ok = kn_ok() && kn_from_host(shard, run);
    kn_host_free(cut);
    kn_written(shard);
    return ok && (!master || kn_bucket_drop_gathered(b, p->index));
}

bool kn_shard_write(void *root, int index, kn_tensor *shard, const void *host)
{
    const kn_param *p = kn_ok() ? param_at(root, index, "kn_shard_write") : NULL;
    return write_part(p, shard, host, "kn_shard_write");
}

bool kn_param_read(void *root, int index, void *host)
{
    const kn_param *p = kn_ok() ? param_at(root, index, "kn_param_read") : NULL;
    return p && read_part(p, p->master, host, "kn_param_read");
}

bool kn_param_write(void *root, int index, const void *host)
{
    const kn_param *p = kn_ok() ? param_at(root, index, "kn_param_write") : NULL;
    const kn_bucket *b = p ? kn_bucket_of(p) : NULL;
    return p && (!b || kn_unit_closed(b->unit, p->name, "kn_param_write")) &&
           write_part(p, p->master, host, "kn_param_write");
}
