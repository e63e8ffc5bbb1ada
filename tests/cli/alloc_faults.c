/* tests/cli/alloc_faults.c: loaded before a program's libraries (LD_PRELOAD), lets one allocation fail.
 *
 *   ALLOC_AT      which one, from 1; 0 (default): none
 *   ALLOC_MORE    with 1, all that follow fail, too
 *   ALLOC_RANK    only in the process of this rank, or in the "launcher" of ranks; else in every process
 *   ALLOC_COUNT   a file to write the number of allocations to at the end
 *   ALLOC_NOT     "BEGIN-END BEGIN-END ...", hexadecimal: code of the program that isn't counted, as
 *                 its symbols say: a library that is linked into it
 *
 * Counted are those of the program itself, of the C library and of the readers of JSON, pictures and
 * compressed files. Others end a program that has no memory in ways of their own (oneDNN, OpenMP), and
 * aren't touched. With KNAP_POOL=0 the bytes of tensors are among them. */
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

typedef struct code {
    uintptr_t begin, end;
} code;
static code range[64], left_out[64];
static int ranges, leaves_out;
static long long fail_at;
static bool fail_more, counting;
static atomic_llong count;

static bool is_ours(const char *name)
{
    static const char *const part[] = { "libc.so", "libjansson", "libpng",   "libjpeg",
                                        "libz.so", "libxxhash",  "libcrypt", "libknap" };
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        if (strstr(name, part[i]))
            return true;
    return !*name; /* the program */
}

/* The code of a library inside of the program, which is loaded at base. */
static void leave_out(uintptr_t base)
{
    const char *text = getenv("ALLOC_NOT");
    for (char *end; text && *text && leaves_out < 64; text = end + strspn(end, " ")) {
        code *c = &left_out[leaves_out++];
        c->begin = base + strtoul(text, &end, 16);
        c->end = base + strtoul(end + (*end == '-'), &end, 16);
    }
}

static bool within(uintptr_t at, const code *c, int n)
{
    bool yes = false;
    for (int i = 0; !yes && i < n; i++)
        yes = at >= c[i].begin && at < c[i].end;
    return yes;
}

static int enter(struct dl_phdr_info *o, size_t size, void *arg)
{
    (void)size, (void)arg;
    if (!*o->dlpi_name)
        leave_out(o->dlpi_addr);
    for (int i = 0; i < o->dlpi_phnum && is_ours(o->dlpi_name) && ranges < 64; i++)
        if (o->dlpi_phdr[i].p_type == PT_LOAD && (o->dlpi_phdr[i].p_flags & PF_X)) {
            range[ranges].begin = o->dlpi_addr + o->dlpi_phdr[i].p_vaddr;
            range[ranges].end = range[ranges].begin + o->dlpi_phdr[i].p_memsz;
            ranges++;
        }
    return 0;
}

static void begin(void) __attribute__((constructor));
static void begin(void)
{
    const char *at = getenv("ALLOC_AT"), *rank = getenv("KNAP_RANK"),
               *wanted = getenv("ALLOC_RANK");
    const char *more = getenv("ALLOC_MORE");
    counting = !wanted || strcmp(rank ? rank : "launcher", wanted) == 0;
    fail_at = at ? atoll(at) : 0;
    fail_more = more && atoi(more);
    dl_iterate_phdr(enter, NULL);
}

static void end(void) __attribute__((destructor));
static void end(void)
{
    const char *path = getenv("ALLOC_COUNT");
    char line[32];
    int n = snprintf(line, sizeof line, "%lld\n", atomic_load(&count));
    if (!path || !counting)
        return;
    long fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    syscall(SYS_write, fd, line, (size_t)n);
    syscall(SYS_close, fd);
}

/* This allocation, whose caller's address is from, shall fail. */
static bool due(const void *from)
{
    const uintptr_t at = (uintptr_t)from;
    if (!counting || !within(at, range, ranges) || within(at, left_out, leaves_out))
        return false;
    long long n = atomic_fetch_add(&count, 1) + 1;
    if (!fail_at || (fail_more ? n < fail_at : n != fail_at))
        return false;
    errno = ENOMEM;
    return true;
}

#pragma GCC visibility push(default) /* these replace the C library's */

#define DUE() due(__builtin_return_address(0))

void *malloc(size_t size)
{
    return DUE() ? NULL : __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    return DUE() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t size)
{
    return size > 0 && DUE() ? NULL : __libc_realloc(p, size);
}

void *memalign(size_t align, size_t size)
{
    return DUE() ? NULL : __libc_memalign(align, size);
}

void *aligned_alloc(size_t align, size_t size)
{
    return DUE() ? NULL : __libc_memalign(align, size);
}

int posix_memalign(void **p, size_t align, size_t size)
{
    *p = DUE() ? NULL : __libc_memalign(align, size);
    return *p ? 0 : ENOMEM;
}
