/* tests/kernels/store_test.c: memory in a file: content, reuse, holes, the ledger, lifetime, full
 * disks and other errors. */
#include "kernels/context.h"
#include "kernels/store.h"
#include "tensor/tensor_internal.h"
#include "tests/failing.h"
#include "tests/kn_test.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

static char *folder(void)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/knap-store-test-XXXXXX");
    KN_CHECK(mkdtemp(path) != NULL);
    return path;
}

/* Bytes on disk of the one open file of a store in dir; -1 if there is none. */
static int64_t disk_bytes(const char *dir)
{
    int64_t bytes = -1;
    DIR *d = opendir("/proc/self/fd");
    for (struct dirent *e; d && (e = readdir(d));) {
        char link[300], target[512];
        struct stat st;
        snprintf(link, sizeof link, "/proc/self/fd/%s", e->d_name);
        ssize_t n = readlink(link, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        if (strncmp(target, dir, strlen(dir)) == 0 && stat(link, &st) == 0)
            bytes = (int64_t)st.st_blocks * 512;
    }
    closedir(d);
    return bytes;
}

static bool empty_folder(const char *dir)
{
    return rmdir(dir) == 0;
}

KN_TEST(store, bytes_keep_their_values)
{
    enum { N = 40 };
    char *dir = folder();
    kn_memory *m = kn_store_open(dir);
    KN_CHECK_OK();
    KN_CHECK(kn_memory_is_store(m) && !kn_memory_is_store(kn_device_memory(KN_CPU)) &&
             !kn_memory_is_store(NULL));
    unsigned char *p[N] = { 0 };
    size_t size[N];
    uint64_t x = 88172645463325252u;
    for (int round = 0; round < 20; round++)
        for (int i = 0; i < N; i++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            if (p[i]) {
                KN_CHECK(p[i][0] == i && p[i][size[i] / 2] == i && p[i][size[i] - 1] == i);
                kn_store_done(p[i], size[i]);
                kn_store_ahead(p[i], size[i]);
                KN_CHECK(p[i][0] == i && p[i][size[i] / 2] == i && p[i][size[i] - 1] == i);
                if (x % 3 == 0)
                    continue;
                kn_give(m, p[i], size[i], KN_MEM_STORE);
            }
            size[i] = x % 200000 + 1;
            p[i] = kn_take(m, size[i], KN_MEM_STORE);
            KN_CHECK(p[i] && (uintptr_t)p[i] % KN_ALIGN == 0);
            memset(p[i], i, size[i]);
        }
    for (int i = 0; i < N; i++)
        kn_give(m, p[i], size[i], KN_MEM_STORE);
    KN_CHECK(kn_ledger_read().live[KN_MEM_STORE] == 0);
    KN_CHECK(disk_bytes(dir) < (int64_t)(17 * MIB), "%lld bytes kept", (long long)disk_bytes(dir));
    kn_store_close(m);
    KN_CHECK(disk_bytes(dir) == -1, "the file is closed");
    KN_CHECK(empty_folder(dir), "the file has no name");
    KN_CHECK_OK();
}

KN_TEST(store, freed_ranges_are_used_again)
{
    char *dir = folder();
    kn_memory *m = kn_store_open(dir);
    char *a = kn_take(m, 24 * MIB, KN_MEM_STORE), *b = kn_take(m, 4 * MIB, KN_MEM_STORE);
    KN_CHECK(a && b);
    for (size_t i = 0; i < 24 * MIB; i += 4096)
        a[i] = 1;
    memset(b, 2, 4 * MIB);
    KN_CHECK(disk_bytes(dir) >= (int64_t)(28 * MIB));
    kn_give(m, a, 24 * MIB, KN_MEM_STORE);
    int64_t left = disk_bytes(dir);
    KN_CHECK(left < (int64_t)(5 * MIB), "%lld bytes after most was given back", (long long)left);
    char *c = kn_take(m, MIB, KN_MEM_STORE), *d = kn_take(m, 3 * MIB, KN_MEM_STORE);
    KN_CHECK(c && d && b[0] == 2 && b[4 * MIB - 1] == 2);
    KN_CHECK(c[0] == 0 && d[3 * MIB - 1] == 0, "a hole reads as zeros");
    KN_CHECK(disk_bytes(dir) < (int64_t)(9 * MIB));
    memset(d, 3, 3 * MIB);
    kn_give(m, d, 3 * MIB, KN_MEM_STORE);
    KN_CHECK(disk_bytes(dir) >= (int64_t)(8 * MIB), "a little is kept for the next");
    d = kn_take(m, 3 * MIB, KN_MEM_STORE);
    KN_CHECK(d && d[0] == 3 && disk_bytes(dir) < (int64_t)(9 * MIB), "which gets it");
    kn_give(m, b, 4 * MIB, KN_MEM_STORE);
    kn_give(m, c, MIB, KN_MEM_STORE);
    kn_give(m, d, 3 * MIB, KN_MEM_STORE);
    kn_store_close(m);
    KN_CHECK(empty_folder(dir));
}

KN_TEST(store, counts_in_no_total_and_against_no_limit)
{
    char *dir = folder();
    kn_memory *m = kn_store_open(dir);
    kn_ledger before = kn_ledger_read();
    kn_context_get()->memory_limit = before.live_total + (int64_t)MIB;
    kn_storage *s = kn_storage_create(m, 3 * MIB, KN_MEM_STORE, "state");
    KN_CHECK(s && s->device == KN_CPU);
    kn_ledger now = kn_ledger_read();
    KN_CHECK(now.live[KN_MEM_STORE] == (int64_t)(3 * MIB));
    KN_CHECK(now.live_total == before.live_total && now.peak_total == before.peak_total);
    KN_CHECK(strcmp(kn_mem_name(KN_MEM_STORE), "offloaded") == 0);
    KN_CHECK(!kn_take(kn_device_memory(KN_CPU), 3 * MIB, KN_MEM_PARAM), "memory is limited");
    KN_CHECK_ERROR("out of memory");
    memset(s->data, 5, 3 * MIB);
    kn_storage_release(s);
    KN_CHECK(kn_ledger_read().live[KN_MEM_STORE] == 0 && kn_storage_retake(s));
    kn_storage_unref(s);
    kn_context_get()->memory_limit = 0;
    kn_store_close(m);
    KN_CHECK(empty_folder(dir));
    KN_CHECK_OK();
}

KN_TEST(store, lives_as_long_as_its_bytes)
{
    char *dir = folder();
    kn_memory *m = kn_store_open(dir);
    kn_storage *s = kn_storage_create(m, MIB, KN_MEM_STORE, NULL);
    kn_store_close(m);
    ((char *)s->data)[MIB - 1] = 7;
    kn_store_done(s->data, MIB);
    KN_CHECK(((char *)s->data)[MIB - 1] == 7 && disk_bytes(dir) >= (int64_t)MIB);
    REFUSED(kn_take(m, 1, KN_MEM_STORE), "after it was closed");
    kn_storage_unref(s);
    KN_CHECK(disk_bytes(dir) == -1);
    kn_store_close(NULL);
    KN_CHECK(empty_folder(dir));
}

KN_TEST(store, other_memory_is_left_alone)
{
    char stack[100] = { 3 };
    kn_store_ahead(stack, sizeof stack);
    kn_store_done(stack, sizeof stack);
    kn_store_ahead(NULL, 0);
    KN_CHECK(stack[0] == 3 && kn_ok());
}

/* Item i has two arrays of arg[i] bytes together. */
static int two_arrays(const void *arg, int i, kn_span *span)
{
    size_t bytes = ((const size_t *)arg)[i];
    span[0] = (kn_span){ arg, bytes / 2 };
    span[1] = (kn_span){ arg, bytes - bytes / 2 };
    return 2;
}

KN_TEST(store, a_walk_takes_each_item_once_and_a_window_at_a_time)
{
    const size_t w = KN_STORE_WINDOW, bytes[] = { w / 2, w / 2, 1, 2 * w, 0, w, 1, w / 4, w };
    const int ends[] = { 2, 3, 4, 6, 8 }, first = 0, last = 8, items = 9;
    kn_store_walk walk = { two_arrays, bytes, first, first, last, items };
    for (int i = 0, begin = first; i < 5; begin = ends[i++]) {
        KN_CHECK(kn_store_next(&walk));
        KN_CHECK(walk.begin == begin && walk.end == ends[i], "window %d: [%d, %d)", i, walk.begin,
                 walk.end);
    }
    KN_CHECK(!kn_store_next(&walk));
    walk = (kn_store_walk){ two_arrays, bytes, 3, 3, 3, items };
    KN_CHECK(!kn_store_next(&walk), "nothing to walk over");
    KN_CHECK_OK();
}

KN_TEST(store, errors_are_sentences)
{
    REFUSED(kn_store_open("/no/such/folder"), "there is no folder '/no/such/folder'");
    REFUSED(kn_store_open(NULL), "no folder");
    REFUSED(kn_store_open("/proc/self/status"), "no folder");
    REFUSED(kn_store_open("/proc"), "no file can be made in '/proc'");
    char *dir = folder();
    kn_memory *m = kn_store_open(dir);
    REFUSED(kn_take(m, (size_t)1 << 55, KN_MEM_STORE), "no disk has them");
    /* a limit on the file size acts like a full disk */
    struct rlimit old, small;
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = 2 * MIB;
    setrlimit(RLIMIT_FSIZE, &small);
    char *a = kn_take(m, MIB, KN_MEM_STORE);
    KN_CHECK(a);
    memset(a, 1, MIB);
    REFUSED(kn_take(m, 4 * MIB, KN_MEM_STORE), "can't grow by 4194304 bytes");
    KN_CHECK(kn_ledger_read().live[KN_MEM_STORE] == (int64_t)MIB);
    char *b = kn_take(m, MIB / 2, KN_MEM_STORE);
    KN_CHECK(b && a[MIB - 1] == 1, "what fits still fits: %s", kn_error());
    setrlimit(RLIMIT_FSIZE, &old);
    kn_give(m, a, MIB, KN_MEM_STORE);
    kn_give(m, b, MIB / 2, KN_MEM_STORE);
    kn_store_close(m);
    KN_CHECK(empty_folder(dir));
}

static bool take_and_give(kn_memory *m, size_t bytes)
{
    void *p = kn_take(m, bytes, KN_MEM_STORE);
    if (p)
        kn_give(m, p, bytes, KN_MEM_STORE);
    return p != NULL;
}

static bool use_a_store(const char *dir)
{
    kn_memory *m = kn_store_open(dir);
    const bool ok = m && take_and_give(m, 3 * MIB) && take_and_give(m, MIB);
    kn_store_close(m);
    return ok;
}

KN_TEST(store, every_allocation_failing_is_an_error)
{
    char *dir = folder();
    int64_t live = kn_ledger_read().live[KN_MEM_HOST];
    for (int64_t n = 1, done = 0; !done; n++) {
        done = WITH_FAILING(n, use_a_store(dir));
        KN_CHECK(kn_ledger_read().live[KN_MEM_HOST] == live, "allocation %lld leaks", (long long)n);
        KN_CHECK(kn_ledger_read().live[KN_MEM_STORE] == 0 && n < 20);
    }
    KN_CHECK(empty_folder(dir));
}
