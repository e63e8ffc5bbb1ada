/* state/saving.c: the files of one save, and the thread that writes them. */
#include "state/saving.h"

#include "kernels/error.h"
#include "kernels/kernels.h"
#include "state/copy.h"
#include "tensor/whole_file.h"
#include "tensor/json.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PORTION ((size_t)1 << 20) /* bytes that are checked and then written, from the caches */
#define POLITE  5                 /* nice levels below the threads of the rank */

const char *const kn_part_name[KN_PARTS] = { "model", "optimizer" };

/* ---- what this rank writes ------------------------------------------------------------------- */

static bool list_part(kn_saving_part *p, const kn_entry *list, int count)
{
    size_t room = (size_t)count + 1;
    p->tensors = count;
    p->piece = kn_host_calloc(room, sizeof *p->piece);
    p->entry = kn_host_calloc(room, sizeof *p->entry);
    p->finite = kn_host_calloc(room, sizeof *p->finite);
    if (!p->piece || !p->entry || !p->finite)
        return false;
    for (int i = 0; i < count; i++) {
        if (!list[i].saver)
            continue;
        kn_piece *to = &p->piece[p->count];
        const char *name = kn_host_strdup(list[i].name); /* a thread may write after list's end */
        if (!name)
            return false;
        *to = (kn_piece){ name, list[i].dtype, list[i].ndim, .part = list[i].part };
        memcpy(to->shape, list[i].shape, sizeof to->shape);
        p->finite[p->count] = list[i].kind != KN_ENTRY_BUFFER;
        p->entry[p->count++] = &list[i];
    }
    return true;
}

/* Groups of ranks have names of their own, which the others' lists lack. */
static bool count_names(kn_saving *s, const kn_entries *all, int models)
{
    int64_t n[KN_PARTS] = { 0 };
    bool groups = false;
    for (int i = 0; i < all->count; i++) {
        const kn_entry *e = &all->list[i];
        groups = groups || e->plain;
        n[i < models ? KN_PART_MODEL : KN_PART_OPTIMIZER] +=
            (e->plain ? e->bucket->unit->rank : s->rank) == 0;
    }
    if (!groups)
        return true;
    bool ok = kn_hosts_sum(all->comm, n, KN_PARTS, "tensors of a checkpoint");
    for (int k = 0; k < KN_PARTS; k++)
        s->part[k].tensors = (int)n[k];
    return ok;
}

bool kn_saving_list(kn_saving *s, const kn_entries *all, int models)
{
    return list_part(&s->part[KN_PART_MODEL], all->list, models) &&
           list_part(&s->part[KN_PART_OPTIMIZER], all->list + models, all->count - models) &&
           count_names(s, all, models);
}

static size_t piece_bytes(const kn_piece *p)
{
    return (size_t)kn_interval_numel(p->part) * kn_dtype_size(p->dtype);
}

/* ---- the copy -------------------------------------------------------------------------------- */

static bool copy_entry(const kn_entry *e, char *to)
{
    const void *from = kn_entry_data(e);
    if (!from)
        return kn_entry_read(e, to);
    kn_copy_past_caches(to, from, kn_entry_part_bytes(e));
    return true;
}

static bool take_room(kn_saving *s)
{
    kn_device d = KN_CPU;
    for (int k = 0; k < KN_PARTS; k++)
        for (int i = 0; i < s->part[k].count; i++) {
            s->bytes += KN_ALIGNED(piece_bytes(&s->part[k].piece[i]));
            if (kn_device_of(s->part[k].entry[i]->tensor) == KN_CUDA)
                d = KN_CUDA;
        }
    s->memory = kn_pinned_memory(d);
    s->copy = s->memory ? kn_take(s->memory, s->bytes, KN_MEM_CHECKPOINT) : NULL;
    return s->copy != NULL;
}

bool kn_saving_copy(kn_saving *s)
{
    bool ok = take_room(s);
    char *at = s->copy;
    for (int k = 0; k < KN_PARTS; k++) {
        kn_saving_part *p = &s->part[k];
        for (int i = 0; ok && i < p->count; i++) {
            ok = copy_entry(p->entry[i], at);
            at += KN_ALIGNED(piece_bytes(&p->piece[i]));
        }
        kn_host_free(p->entry);
        p->entry = NULL;
    }
    return ok && kn_ok();
}

void kn_saving_give(kn_saving *s)
{
    if (s->copy)
        kn_give(s->memory, s->copy, s->bytes, KN_MEM_CHECKPOINT);
    s->copy = NULL;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Element k of a part, as its number in the whole. */
static int64_t in_whole(kn_interval i, int64_t k)
{
    return i.start + (i.blocks > 1 ? k / i.count * i.stride + k % i.count : k);
}

/* A diverged run must not replace its last good checkpoint. at: of data in the part. */
static bool check_finite(const kn_piece *p, const void *data, size_t at, size_t bytes)
{
    const size_t size = kn_dtype_size(p->dtype);
    const int64_t count = (int64_t)(bytes / size);
    const uint32_t *w = data;
    const uint16_t *h = data;
    const uint64_t *d = data;
    const uint32_t half = p->dtype == KN_BF16 ? 0x7f80 : 0x7c00;
    int64_t bad = -1;
    for (int64_t i = 0; p->dtype == KN_F32 && i < count && bad < 0; i++)
        bad = (w[i] & 0x7f800000) == 0x7f800000 ? i : -1;
    for (int64_t i = 0; (p->dtype == KN_BF16 || p->dtype == KN_F16) && i < count && bad < 0; i++)
        bad = (h[i] & half) == half ? i : -1;
    for (int64_t i = 0; p->dtype == KN_F64 && i < count && bad < 0; i++)
        bad = (d[i] & 0x7ff0000000000000) == 0x7ff0000000000000 ? i : -1;
    return bad < 0 || kn_fail("checkpoint: element %lld of %s is not finite: the run has diverged; "
                              "nothing is saved; the checkpoint saved before stays",
                              (long long)in_whole(p->part, (int64_t)(at / size) + bad), p->name);
}

static bool write_piece(kn_saving *s, kn_pieces_writer *w, const kn_piece *p, const char *data,
                        bool finite)
{
    const size_t bytes = piece_bytes(p);
    bool ok = true;
    for (size_t at = 0, n; ok && at < bytes; at += n) {
        n = bytes - at < PORTION ? bytes - at : PORTION;
        if (atomic_load(&s->stop))
            return kn_fail("checkpoint: the save was given up");
        ok = (!finite || check_finite(p, data + at, at, n)) && kn_pieces_append(w, data + at, n);
    }
    return ok;
}

/* From the module: where its bytes don't lie in memory of the host, through memory for one part. */
static bool write_entry(kn_saving *s, kn_pieces_writer *w, const kn_saving_part *p, int i)
{
    const kn_piece *piece = &p->piece[i];
    const void *data = kn_entry_data(p->entry[i]);
    if (data || piece_bytes(piece) == 0)
        return write_piece(s, w, piece, data, p->finite[i]);
    char *host = kn_ok() ? kn_host_alloc(piece_bytes(piece)) : NULL;
    bool ok =
        host && kn_entry_read(p->entry[i], host) && write_piece(s, w, piece, host, p->finite[i]);
    kn_host_free(host);
    return ok;
}

/* *at: in the copy. A failure is an error that stands. */
static void write_pieces(kn_saving *s, kn_pieces_writer *w, const kn_saving_part *p, size_t *at)
{
    bool ok = true;
    for (int i = 0; ok && i < p->count; i++) {
        ok = p->entry ? write_entry(s, w, p, i)
                      : write_piece(s, w, &p->piece[i], s->copy + *at, p->finite[i]);
        *at += KN_ALIGNED(piece_bytes(&p->piece[i]));
    }
}

static bool write_part(kn_saving *s, int which, size_t *at)
{
    const kn_saving_part *p = &s->part[which];
    if (p->count == 0)
        return true;
    const kn_path dir = kn_path_of(s->place.path.text, kn_part_name[which], "");
    kn_pieces_writer *w = kn_pieces_create(dir.text, s->rank, s->id, NULL, p->piece, p->count);
    if (w)
        write_pieces(s, w, p, at);
    return kn_pieces_commit(w) && kn_sync_folder(dir.text);
}

bool kn_saving_write(kn_saving *s)
{
    size_t at = 0; /* in the copy */
    return write_part(s, KN_PART_MODEL, &at) && write_part(s, KN_PART_OPTIMIZER, &at);
}

/* ---- the commit ------------------------------------------------------------------------------ */

json_t *kn_saved_file(const char *folder, const char *name, int64_t bytes, uint64_t checksum)
{
    char path[192], sum[17];
    snprintf(path, sizeof path, "%s%s%s", folder, *folder ? "/" : "", name);
    snprintf(sum, sizeof sum, "%016llx", (unsigned long long)checksum);
    return json_pack("{s:s, s:I, s:s}", "name", path, "bytes", (json_int_t)bytes, "checksum", sum);
}

json_t *kn_saved_files(kn_pieces *const part[KN_PARTS])
{
    json_t *list = json_array();
    bool ok = list != NULL;
    for (int k = 0; k < KN_PARTS; k++)
        for (int i = 0; ok && part[k] && i < kn_pieces_files(part[k]); i++) {
            const kn_piece_file *f = kn_pieces_file(part[k], i);
            ok = json_array_append_new(
                     list, kn_saved_file(kn_part_name[k], f->name, f->bytes, f->checksum)) == 0;
        }
    if (ok)
        return list;
    json_decref(list);
    kn_fail_memory("the checkpoint's list of files");
    return NULL;
}

/* Opens a part as it lies on the disk: together its files hold every tensor of the list, each
 * element once, under this save's id. *p is NULL where the list has none. */
static bool open_part(const kn_saving *s, int which, kn_pieces **p)
{
    const int tensors = s->part[which].tensors;
    const kn_path dir = kn_path_of(s->place.path.text, kn_part_name[which], "");
    if (tensors == 0)
        return kn_folder_remove_empty(dir.text);
    if (!(*p = kn_pieces_open(dir.text)))
        return false;
    return (kn_pieces_count(*p) == tensors && strcmp(kn_pieces_id(*p), s->id) == 0) ||
           kn_fail("checkpoint: %s holds %d tensors of save %s, not %d of save %s: ranks see "
                   "different files there",
                   dir.text, kn_pieces_count(*p), kn_pieces_id(*p), tensors, s->id);
}

bool kn_saving_commit(kn_saving *s)
{
    kn_pieces *part[KN_PARTS] = { NULL };
    bool ok = true;
    for (int k = 0; ok && k < KN_PARTS; k++)
        ok = open_part(s, k, &part[k]);
    json_t *files = ok ? kn_saved_files(part) : NULL;
    for (int k = 0; k < KN_PARTS; k++)
        kn_pieces_close(part[k]);
    char *text = files && json_object_set_new(s->state, "files", files) == 0
                     ? kn_json_text(s->state, JSON_INDENT(1), "a checkpoint's " KN_STATE_FILE)
                     : NULL;
    if (files && !text && kn_ok())
        kn_fail_memory("the checkpoint's %s", KN_STATE_FILE);
    ok = text && kn_folder_commit(s->folder, &s->place, text);
    kn_host_free(text);
    return ok;
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* It has a context of its own, so that its errors are the save's and not the rank's. */
static void *thread_main(void *arg)
{
    kn_saving *s = arg;
    kn_attempt a;
    kn_set_threads(1);
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), getpriority(PRIO_PROCESS, 0) + POLITE);
    kn_attempt_begin(&a);
    kn_context_get()->fault.disk_full = s->disk_full;
    bool ok = s->run(s);
    ok = kn_attempt_end(&a, s->error) && ok;
    atomic_store(&s->result, ok ? KN_SAVE_WRITTEN : KN_SAVE_FAILED);
    kn_context_end();
    return NULL;
}

bool kn_saving_start(kn_saving *s, bool (*run)(kn_saving *s))
{
    sigset_t all, before;
    s->run = run;
    atomic_store(&s->result, KN_SAVE_RUNNING);
    sigfillset(&all); /* Ctrl-C belongs to the main thread */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = pthread_create(&s->thread, NULL, thread_main, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    s->threaded = error == 0;
    if (error == 0)
        return true;
    snprintf(s->error, sizeof s->error, "checkpoint: no thread could be started: %s",
             strerror(error));
    atomic_store(&s->result, KN_SAVE_FAILED);
    return false;
}

void kn_saving_join(kn_saving *s)
{
    if (s->threaded)
        pthread_join(s->thread, NULL);
    s->threaded = false;
}

static void free_part(kn_saving_part *p)
{
    for (int i = 0; i < p->count; i++)
        kn_host_free((void *)p->piece[i].name);
    kn_host_free(p->piece);
    kn_host_free(p->entry);
    kn_host_free(p->finite);
}

void kn_saving_free(kn_saving *s, bool committed)
{
    if (!s)
        return;
    atomic_store(&s->stop, true);
    kn_saving_join(s);
    if (s->rank == 0 && !committed)
        kn_folder_abandon(&s->place);
    for (int k = 0; k < KN_PARTS; k++)
        free_part(&s->part[k]);
    kn_saving_give(s);
    json_decref(s->state);
    kn_host_free(s);
}
