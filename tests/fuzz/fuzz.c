/* tests/fuzz/fuzz.c: runs a target and checks the claims of fuzz.h. */
#include "tests/fuzz/fuzz.h"
#include "kernels/memory.h"
#include "tensor/tensor_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>

static fuzz_target *first;
static char folder[200], path[400];

void fuzz_register(fuzz_target *t)
{
    t->next = first;
    first = t;
}

const fuzz_target *fuzz_targets(void)
{
    return first;
}

void fuzz_fail(const char *cond, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "fuzz: %s: ", cond);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    abort();
}

/* ---- files ----------------------------------------------------------------------------------- */

const char *fuzz_folder(void)
{
    const char *base = getenv("TMPDIR");
    if (folder[0])
        return folder;
    snprintf(folder, sizeof folder, "%s/knap-fuzz-XXXXXX", base ? base : "/tmp");
    FUZZ_CHECK(mkdtemp(folder), "%s: %s", folder, strerror(errno));
    return folder;
}

bool fuzz_try_file(const char *name, const void *data, size_t size)
{
    snprintf(path, sizeof path, "%s/%s", fuzz_folder(), name);
    for (char *p = path + strlen(folder) + 1; (p = strchr(p, '/')); *p++ = '/') {
        *p = '\0';
        mkdir(path, 0777);
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return false;
    for (size_t at = 0; at < size;) {
        ssize_t n = write(fd, (const char *)data + at, size - at);
        FUZZ_CHECK(n > 0, "%s: %s", path, strerror(errno));
        at += (size_t)n;
    }
    close(fd);
    return true;
}

const char *fuzz_file(const char *name, const void *data, size_t size)
{
    FUZZ_CHECK(fuzz_try_file(name, data, size), "%s: %s", path, strerror(errno));
    return path;
}

void fuzz_tensors(fuzz_kept *kept, bool (*save)(const char *folder))
{
    enum { MOST = 1 << 16 };
    if (!kept->bytes) {
        FUZZ_CHECK(save(fuzz_folder()), "%s", kn_error());
        snprintf(path, sizeof path, "%s/model.safetensors", folder);
        FILE *f = fopen(path, "rb");
        kept->bytes = malloc(MOST);
        FUZZ_CHECK(f && kept->bytes);
        kept->size = fread(kept->bytes, 1, MOST, f);
        fclose(f);
    }
    fuzz_file("model.safetensors", kept->bytes, kept->size);
}

static int remove_one(const char *name, const struct stat *st, int kind, struct FTW *at)
{
    return remove(name);
}

static void remove_folder(void)
{
    if (folder[0])
        nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    folder[0] = '\0';
}

/* ---- inputs ---------------------------------------------------------------------------------- */

fuzz_input fuzz_part(fuzz_input *rest, char end)
{
    const uint8_t *at = rest->size ? memchr(rest->data, end, rest->size) : NULL;
    fuzz_input part = { rest->data, at ? (size_t)(at - rest->data) : rest->size };
    size_t used = part.size + (at ? 1 : 0);
    *rest = (fuzz_input){ rest->size ? rest->data + used : rest->data, rest->size - used };
    return part;
}

const char *fuzz_word(fuzz_input *rest, char end, char *room, size_t size)
{
    fuzz_input part = fuzz_part(rest, end);
    size_t n = part.size < size ? part.size : size - 1;
    if (n)
        memcpy(room, part.data, n);
    room[n] = '\0';
    return room;
}

uint8_t fuzz_byte(fuzz_input *rest)
{
    if (rest->size == 0)
        return 0;
    rest->size--;
    return *rest->data++;
}

/* ---- memory: every block of the process, where a sanitizer counts them ----------------------- */

int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void *, size_t),
                                              void (*)(const volatile void *))
    __attribute__((weak));
size_t __sanitizer_get_allocated_size(const volatile void *) __attribute__((weak));

static atomic_llong live, peak;

static void taken(const volatile void *p, size_t size)
{
    long long now = atomic_fetch_add(&live, (long long)size) + (long long)size, most = peak;
    while (now > most && !atomic_compare_exchange_weak(&peak, &most, now))
        ;
}

static void given(const volatile void *p)
{
    if (p)
        atomic_fetch_sub(&live, (long long)__sanitizer_get_allocated_size(p));
}

__attribute__((constructor)) static void count_memory(void)
{
    setenv("KNAP_POOL", "0", 1); /* the bytes of tensors come from the C library, one by one */
    if (__sanitizer_install_malloc_and_free_hooks && __sanitizer_get_allocated_size)
        __sanitizer_install_malloc_and_free_hooks(taken, given);
}

/* ---- one run --------------------------------------------------------------------------------- */

typedef struct things {
    int64_t tensors, bytes, metadata;
    int descriptor; /* the lowest that is free */
} things;

static things count_things(void)
{
    kn_ledger l = kn_ledger_read();
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    close(fd);
#ifdef KN_DEBUG
    const int64_t metadata = 0; /* the handles of dead tensors stay */
#else
    const int64_t metadata = l.live[KN_MEM_HOST];
#endif
    return (things){ kn_live_tensors(), l.live_total, metadata, fd };
}

/* Text for a terminal: no control characters, those of C1 included. */
static void check_error(const fuzz_target *t)
{
    const char *text = kn_error();
    FUZZ_CHECK(text && strlen(text) > 10, "%s: an error without a sentence", t->name);
    for (const unsigned char *p = (const unsigned char *)text; *p; p++)
        FUZZ_CHECK(*p >= 0x20 && *p != 0x7f && !(*p == 0xc2 && p[1] >= 0x80 && p[1] <= 0x9f),
                   "%s: the error has the character %02x: %s", t->name, *p, text);
}

static void run_once(const fuzz_target *t, const uint8_t *data, size_t size)
{
    kn_scope scope = kn_scope_begin();
    t->run(data, size);
    kn_scope_end(scope);
    if (!kn_ok())
        check_error(t);
    kn_clear_error();
    remove_folder();
}

/* One run, and what it kept. Things that are made at first use and stay are kept once: a leak is
 * what every run keeps. */
static things kept(const fuzz_target *t, const uint8_t *data, size_t size)
{
    things least = { INT64_MAX, INT64_MAX, INT64_MAX, INT32_MAX };
    for (int i = 0; i < 3; i++) {
        things before = count_things();
        run_once(t, data, size);
        things after = count_things();
        things now = { after.tensors - before.tensors, after.bytes - before.bytes,
                       after.metadata - before.metadata, after.descriptor - before.descriptor };
        least.tensors = now.tensors < least.tensors ? now.tensors : least.tensors;
        least.bytes = now.bytes < least.bytes ? now.bytes : least.bytes;
        least.metadata = now.metadata < least.metadata ? now.metadata : least.metadata;
        least.descriptor = now.descriptor < least.descriptor ? now.descriptor : least.descriptor;
        if (least.tensors <= 0 && least.bytes <= 0 && least.metadata <= 0 && least.descriptor <= 0)
            break;
    }
    return least;
}

void fuzz_once(const fuzz_target *t, const uint8_t *data, size_t size)
{
    static const fuzz_target *warm;
    if (warm != t) {
        kn_set_threads(1);
        run_once(t, (const uint8_t *)"", 0);
        run_once(t, data, size);
        warm = t;
    }
    long long base = atomic_load(&live);
    atomic_store(&peak, base);
    things k = kept(t, data, size);
    long long most = atomic_load(&peak) - base;
    FUZZ_CHECK(most <= (long long)(t->factor * size + t->extra),
               "%s: %lld bytes of memory for an input of %zu", t->name, most, size);
    FUZZ_CHECK(k.tensors <= 0 && k.bytes <= 0 && k.metadata <= 0,
               "%s: %lld tensors, %lld of their bytes and %lld others leak", t->name,
               (long long)k.tensors, (long long)k.bytes, (long long)k.metadata);
    FUZZ_CHECK(k.descriptor <= 0, "%s: a descriptor stays open", t->name);
}

/* ---- the corpus ------------------------------------------------------------------------------ */

#ifdef KN_FUZZ_CORPUS
static void replay_file(const fuzz_target *t, const char *name)
{
    FILE *f = fopen(name, "rb");
    struct stat st;
    KN_CHECK(f && fstat(fileno(f), &st) == 0, "%s", name);
    size_t size = (size_t)st.st_size;
    uint8_t *data = malloc(size ? size : 1); /* as large as the file: reading beyond is seen */
    KN_CHECK(data && fread(data, 1, size, f) == size, "%s", name);
    fclose(f);
    fprintf(stderr, "%s\n", name); /* shown if the case fails */
    fuzz_once(t, data, size);
    free(data);
}

void fuzz_replay(const fuzz_target *t)
{
    char at[600];
    int files = 0;
    snprintf(at, sizeof at, KN_FUZZ_CORPUS "/%s", t->name);
    DIR *d = opendir(at);
    KN_CHECK(d, "there is no folder %s with inputs", at);
    for (struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.') {
            snprintf(at, sizeof at, KN_FUZZ_CORPUS "/%s/%s", t->name, e->d_name);
            replay_file(t, at);
            files++;
        }
    closedir(d);
    KN_CHECK(files > 0, "%s has no inputs", t->name);
}
#endif
