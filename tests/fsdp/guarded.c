/* tests/fsdp/guarded.c: see guarded.h. */
#include "tests/fsdp/guarded.h"
#include "kernels/kernels_internal.h"
#include "tests/kn_test.h"

#include <sys/mman.h>

#define ROOM ((size_t)256 << 20)

static char *room;
static size_t used;
static int open_calls;
static kn_device_table device;

static void let(bool in)
{
    open_calls += in ? 1 : -1;
    if (open_calls == (in ? 1 : 0))
        mprotect(room, ROOM, in ? PROT_READ | PROT_WRITE : PROT_NONE);
}

static bool lies_there(const void *p)
{
    return !p || ((const char *)p >= room && (const char *)p < room + ROOM);
}

static void *room_take(kn_memory *self, size_t bytes)
{
    size_t size = (bytes + KN_ALIGN) / KN_ALIGN * KN_ALIGN;
    if (used + size > ROOM)
        return NULL;
    used += size;
    return room + used - size;
}

static void room_give(kn_memory *self, void *p, size_t bytes)
{
    (void)bytes; /* never reused, so a later access shows in the values */
}

static kn_memory memory = {
    .name = "guarded", .device = GUARDED, .take = room_take, .give = room_give
};

static bool device_open(void)
{
    return true;
}

static kn_memory *device_memory(void)
{
    return &memory;
}

static void device_trim(void)
{
}

static kn_stream *device_stream(const char *name, kn_stream_kind kind)
{
    kn_stream *s = kn_cpu_table.stream_create(name, KN_STREAM_INLINE);
    if (s) {
        s->table = &device;
        s->device = GUARDED;
    }
    return s;
}

static kn_event *device_event(void)
{
    kn_event *e = kn_cpu_table.event_create();
    if (e)
        e->table = &device;
    return e;
}

static bool given_there(kn_kernel k, const void *args)
{
    const kn_opt_step *adam = args; /* kn_adamw_args begins with it */
    const kn_clip_args *clip = args;
    const kn_loss_scale_args *scaling = args;
    const kn_sqsum_args *squares = args;
    const kn_sum_n_args *sum = args;
    bool ok = true;
    for (int i = 0; i < kn_kernel_arrays(k); i++)
        ok = ok && (lies_there(((const kn_array *)args)[i].data) ||
                    kn_array_numel((const kn_array *)args + i) == 0);
    if (k == KN_K_ADAMW) {
        ok = lies_there(adam->lr) && lies_there(adam->grad_scale) && lies_there(adam->skip);
        for (int i = 0; ok && i < adam->pieces; i++)
            ok = adam->piece[i].count == 0 ||
                 (lies_there(adam->piece[i].param) && lies_there(adam->piece[i].grad) &&
                  lies_there(adam->piece[i].m) && lies_there(adam->piece[i].v));
    }
    if (k == KN_K_CLIP)
        ok = lies_there(clip->limbs) && lies_there(clip->absmax) && lies_there(clip->norm) &&
             lies_there(clip->coef);
    if (k == KN_K_LOSS_SCALE)
        ok = lies_there(scaling->state) && lies_there(scaling->step) &&
             lies_there(scaling->absmax) && lies_there(scaling->loss_scale);
    if (k == KN_K_SQSUM)
        ok = lies_there(squares->absmax) && lies_there(squares->out);
    if (k == KN_K_SUM_N)
        ok = lies_there(sum->dst) && lies_there(sum->acc) && lies_there(sum->src[0]);
    return ok || kn_fail("%s: the device was given memory of the host's", kn_kernel_name(k));
}

static bool device_launch(kn_stream *s, kn_kernel k, const void *args, size_t size)
{
    if (!given_there(k, args))
        return false;
    let(true);
    bool ok = kn_cpu_table.launch(s, k, args, size);
    let(false);
    return ok;
}

static bool device_transfer(kn_stream *s, void *dst, const void *src, size_t bytes, kn_way way,
                            bool held)
{
    if (lies_there(dst) == (way == KN_TO_HOST) || lies_there(src) == (way == KN_TO_DEVICE))
        return kn_fail("kn_transfer: the wrong way");
    let(true);
    memmove(dst, src, bytes);
    let(false);
    return true;
}

void guarded_begin(void)
{
    if (!room)
        room = mmap(NULL, ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    KN_CHECK(room != MAP_FAILED);
    used = 0;
    device = kn_cpu_table;
    device.device = GUARDED;
    device.name = "guarded";
    device.open = device_open;
    device.memory = device_memory;
    device.trim = device_trim;
    device.stream_create = device_stream;
    device.event_create = device_event;
    device.launch = device_launch;
    device.transfer = device_transfer;
    KN_CHECK(kn_device_register(&device) == GUARDED);
}

void guarded_end(void)
{
    kn_device_unregister(GUARDED);
}
