/* tests/gpu/emulator/emulate_check.cc: checks every access of the emulated kernels and ends the
 * program at the first whose result on a GPU might differ; emulate.h lists the faults.
 *
 * The kernels are compiled with -fsanitize=thread and -fsanitize=undefined, which makes the
 * compiler call functions before each access and at undefined arithmetic; this file defines these
 * functions instead of a sanitizer's library. For each word of memory a cell stores its last writer
 * and two readers since, with the number of barriers that they had passed. Two accesses of one
 * block are ordered if a barrier of the block lies between, or one of the warp where both are of
 * one warp (a shuffle doesn't order memory); two accesses of different blocks of a launch are never
 * ordered; launches are. */
#include "tests/gpu/emulator/emulate_check.h"
#include "tests/gpu/emulator/emulate.h"

#include <dlfcn.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC optimize("omit-frame-pointer") /* the compiler calls this at each access */

kn_emulated_thread kn_emulated_now;

void kn_emulated_stop(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fflush(stdout);
    fprintf(stderr, "emulated kernel %s: ", kn_emulated_now.kernel ? kn_emulated_now.kernel : "?");
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    abort();
}

namespace
{
/* ---- what is where --------------------------------------------------------------------------- */

struct range {
    const char *begin, *end;
    uint32_t born; /* the number of the block after which it was taken; 0: initialised */
};

enum { ALLOWED = 512 };
range allowed[ALLOWED], special[KN_EMULATED_SLOTS];
range *last = allowed; /* of the allowed ones, the last that was accessed */
int allowed_count;
range shared; /* KN_SHARED variables: this thread's segment of the library that this file is in */

int find_shared(struct dl_phdr_info *info, size_t, void *)
{
    bool here = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) &h = info->dlpi_phdr[i];
        const char *begin = (const char *)info->dlpi_addr + h.p_vaddr;
        here |= h.p_type == PT_LOAD && (const char *)&shared >= begin &&
                (const char *)&shared < begin + h.p_memsz;
    }
    for (int i = 0; here && i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_TLS && info->dlpi_tls_data) {
            shared.begin = (const char *)info->dlpi_tls_data;
            shared.end = shared.begin + info->dlpi_phdr[i].p_memsz;
        }
    return here;
}

bool inside(const range &r, const char *p, size_t bytes)
{
    return p >= r.begin && p + bytes <= r.end;
}

bool in_dynamic(const char *p)
{
    const char *begin = (const char *)kn_emulated_dynamic;
    return p >= begin && p < begin + KN_EMULATED_DYNAMIC;
}

/* ---- cells ----------------------------------------------------------------------------------- */

struct stamp {
    uint32_t block, warp_round;
    uint16_t block_round;
    uint16_t thread : 10, bytes : 4, atomic : 1; /* bytes: a mask */
};

struct cell {
    stamp write, read[2];
    uint32_t wrote; /* the number of the block that wrote first since `born` */
    uint8_t set;    /* which bytes were written */
};

enum { WORDS = 1024, PAGES = 1 << 16 }; /* words a page */
struct page {
    uintptr_t number;
    cell *cells;
};
page pages[PAGES]; /* open addressing */

cell *cell_of(const char *word)
{
    uintptr_t number = (uintptr_t)word / (4 * WORDS);
    static page *last = pages;
    for (size_t i = number * 0x9e3779b97f4a7c15u >> 48; last->number != number || !last->cells;) {
        page *p = &pages[i % PAGES];
        if (!p->cells) {
            *p = { number, (cell *)calloc(WORDS, sizeof(cell)) };
            if (!p->cells)
                kn_emulated_stop("out of memory for what is known of the kernel's accesses");
        }
        if (p->number == number)
            last = p;
        i++;
    }
    return &last->cells[(uintptr_t)word / 4 % WORDS];
}

/* ---- races ----------------------------------------------------------------------------------- */

/* True if another thread accessed these bytes at s with no barrier since. since: the first block
 * that counts. */
bool meets(const stamp &s, const stamp &now, uint32_t since)
{
    if (s.block < since || !(s.bytes & now.bytes) || (s.atomic && now.atomic))
        return false;
    if (s.block != now.block)
        return true;
    if (s.thread == now.thread || s.block_round != now.block_round)
        return false;
    return s.thread / 32 != now.thread / 32 || s.warp_round == now.warp_round;
}

/* The kernel's code address, for addr2line. */
void place(const void *pc, char *text, size_t size)
{
    Dl_info info;
    snprintf(text, size, "?");
    if (dladdr(pc, &info) && info.dli_fname)
        snprintf(text, size, "addr2line -e %s %#zx", info.dli_fname,
                 (size_t)((const char *)pc - 1 - (const char *)info.dli_fbase));
}

[[noreturn]] void race(const stamp &s, const stamp &now, bool writes, const char *before,
                       bool is_shared, const void *pc)
{
    char at[512];
    place(pc, at, sizeof at);
    uint32_t first = kn_emulated_now.launch;
    kn_emulated_stop(
        "thread %d of block %u %s %s memory that thread %d of block %u %s, with no barrier "
        "between (%s)",
        now.thread, now.block - first, writes ? "writes" : "reads", is_shared ? "shared" : "global",
        s.thread, s.block - first, before, at);
}

void remember_read(cell *c, const stamp &now)
{
    stamp &a = c->read[0], &b = c->read[1];
    if (a.thread != now.thread || a.block != now.block) {
        /* Keeps readers of two warps rather than two of one: barriers of one warp don't order the
         * other. */
        bool keep = b.block == now.block && b.block_round == now.block_round &&
                    b.thread / 32 != now.thread / 32 && a.thread / 32 == now.thread / 32;
        if (!keep)
            b = a;
    }
    a = now;
}

void access_word(const char *word, int bytes, bool writes, bool is_shared, uint32_t born,
                 const void *pc)
{
    const kn_emulated_thread &t = kn_emulated_now;
    cell *c = cell_of(word);
    stamp now = { t.block, t.warp_round, t.block_round, t.thread, (uint16_t)bytes, t.atomic };
    uint32_t since = is_shared ? t.block : t.launch;
    if (meets(c->write, now, since))
        race(c->write, now, writes, "wrote", is_shared, pc);
    for (int i = 0; i < 2 && writes; i++)
        if (meets(c->read[i], now, since))
            race(c->read[i], now, writes, "read", is_shared, pc);
    if (c->wrote < born)
        c->set = 0;
    if (writes) {
        if (is_shared && !c->set && !in_dynamic(word))
            kn_emulated_now.fixed += 4;
        c->write = now;
        c->set |= (uint8_t)bytes;
        c->wrote = now.block;
    } else {
        remember_read(c, now);
        if (born && (c->set & bytes) != bytes) {
            char at[512];
            place(pc, at, sizeof at);
            kn_emulated_stop("thread %d of block %u reads %s that nobody has written (%s)",
                             now.thread, now.block - t.launch,
                             is_shared ? "shared memory" : "scratch", at);
        }
    }
}

/* The number of accesses of a launch that are checked for races. Later ones are checked for bounds
 * and for writes of scratch only. */
enum { LOOKED_AT = 1 << 17 };
int left;

/* ---- every access ---------------------------------------------------------------------------- */

[[noreturn]] void outside(const char *p, size_t bytes, bool writes, const void *pc)
{
    char at[512];
    const range *near = nullptr;
    place(pc, at, sizeof at);
    for (int i = 0; i < allowed_count; i++)
        if (!near || llabs(p - allowed[i].end) < llabs(p - near->end))
            near = &allowed[i];
    kn_emulated_stop(
        "thread %d of block %u %s %zu bytes at %p, outside of the call's arrays and scratch; the "
        "nearest array ends %td bytes before (%s)",
        kn_emulated_now.thread, kn_emulated_now.block - kn_emulated_now.launch,
        writes ? "writes" : "reads", bytes, (const void *)p, near ? p - near->end : (ptrdiff_t)0,
        at);
}

/* The kind of memory, and its `born`. */
uint32_t classify(const char *p, size_t bytes, bool writes, bool *is_shared, const void *pc)
{
    kn_emulated_thread &t = kn_emulated_now;
    const range dynamic = { (const char *)kn_emulated_dynamic,
                            (const char *)kn_emulated_dynamic + t.dynamic, 0 };
    if (inside(shared, p, bytes) || inside(dynamic, p, bytes)) {
        *is_shared = true;
        return t.block;
    }
    if (in_dynamic(p))
        kn_emulated_stop("thread %d %s %zu bytes at %td of %zu bytes of dynamic shared memory",
                         t.thread, writes ? "writes" : "reads", bytes, p - dynamic.begin,
                         t.dynamic);
    for (int i = 0; i < KN_EMULATED_SLOTS; i++)
        if (inside(special[i], p, bytes))
            return special[i].born;
    if (allowed_count == 0 || inside(*last, p, bytes))
        return 0;
    for (int i = 0; i < allowed_count; i++)
        if (inside(allowed[i], p, bytes)) {
            last = &allowed[i];
            return 0;
        }
    outside(p, bytes, writes, pc);
}

/* Describes the place and the earlier access. */
void look_closely(const char *p, size_t bytes, bool writes, const void *pc)
{
    bool is_shared = false;
    uint32_t born = classify(p, bytes, writes, &is_shared, pc);
    if (left > 0)
        left--;
    else if (is_shared || !born)
        return;
    for (const char *end = p + bytes; p < end;) {
        const char *word = p - (uintptr_t)p % 4, *stop = word + 4 < end ? word + 4 : end;
        int mask = (1 << (stop - word)) - (1 << (p - word));
        access_word(word, mask, writes, is_shared, born, pc);
        p = stop;
    }
}

bool on_stack(const void *p, int which)
{
    const auto &s = kn_emulated_now.stack[which];
    return (size_t)((const char *)p - s.begin) < s.bytes;
}

__attribute__((noinline)) void watch(const void *at, size_t bytes, size_t aligned, bool writes,
                                     const void *pc)
{
    const char *p = (const char *)at;
    const bool is_aligned = ((uintptr_t)p & (aligned - 1)) == 0;
    if (left <= 0 && is_aligned && (inside(shared, p, bytes) || inside(*last, p, bytes)))
        return;
    if ((p >= (char *)kn_emulated_index && p < (char *)(kn_emulated_index + 4)) || on_stack(p, 1) ||
        bytes == 0)
        return;
    if (!is_aligned)
        kn_emulated_stop("thread %d %s %zu bytes at %p, which isn't aligned", kn_emulated_now.thread,
                         writes ? "writes" : "reads", bytes, at);
    look_closely(p, bytes, writes, pc);
}

inline void access(const void *at, size_t bytes, size_t aligned, bool writes, const void *pc)
{
    if (kn_emulated_now.looks && !on_stack(at, 0))
        watch(at, bytes, aligned, writes, pc);
}
} // namespace

void kn_emulated_begin(void)
{
    left = LOOKED_AT;
    kn_emulated_now.watched = allowed_count > 0;
    if (kn_emulated_now.watched)
        dl_iterate_phdr(find_shared, nullptr);
}

void kn_emulated_memory(int slot, const void *p, size_t bytes, bool unwritten)
{
    const char *begin = (const char *)p;
    special[slot] = { begin, begin + bytes, unwritten ? kn_emulated_now.block + 1 : 0 };
}

void kn_emulated_atomic(bool begins)
{
    kn_emulated_now.atomic = begins;
}

void emulated_allow(const void *p, size_t bytes)
{
    if (allowed_count == ALLOWED)
        kn_emulated_stop("more than %d arrays in a call", ALLOWED);
    allowed[allowed_count++] = { (const char *)p, (const char *)p + bytes, 0 };
}

void emulated_allow_all(void)
{
    allowed_count = 0;
    last = allowed;
    *last = {};
}

/* ---- what the compiler calls ----------------------------------------------------------------- */

extern "C" {
#define HERE __builtin_return_address(0)
#define ACCESS(n, alignment)                                                                       \
    void __tsan_read##n(void *p)                                                                   \
    {                                                                                              \
        access(p, n, alignment, false, HERE);                                                      \
    }                                                                                              \
    void __tsan_write##n(void *p)                                                                  \
    {                                                                                              \
        access(p, n, alignment, true, HERE);                                                       \
    }                                                                                              \
    void __tsan_unaligned_read##n(void *p)                                                         \
    {                                                                                              \
        access(p, n, 1, false, HERE);                                                              \
    }                                                                                              \
    void __tsan_unaligned_write##n(void *p)                                                        \
    {                                                                                              \
        access(p, n, 1, true, HERE);                                                               \
    }
ACCESS(1, 1)
ACCESS(2, 2)
ACCESS(4, 4)
ACCESS(8, 8)
ACCESS(16, 8) /* also types aligned to 8; UBSan checks the alignment by type */
void __tsan_read_range(void *p, size_t bytes)
{
    access(p, bytes, 1, false, HERE);
}
void __tsan_write_range(void *p, size_t bytes)
{
    access(p, bytes, 1, true, HERE);
}
void *__tsan_memcpy(void *to, const void *from, size_t bytes)
{
    access(from, bytes, 1, false, HERE);
    access(to, bytes, 1, true, HERE);
    return memcpy(to, from, bytes);
}
void *__tsan_memset(void *to, int c, size_t bytes)
{
    access(to, bytes, 1, true, HERE);
    return memset(to, c, bytes);
}
void __tsan_init(void)
{
}
void __tsan_func_entry(void *)
{
}
void __tsan_func_exit(void)
{
}
void __tsan_vptr_update(void **, void *)
{
}
void __tsan_vptr_read(void **)
{
}

/* The argument of each is a struct that begins with the source location. */
struct source {
    const char *file;
    uint32_t line, column;
};
#define UNDEFINED(name, what)                                                                      \
    void __ubsan_handle_##name##_abort(const struct source *s, ...)                                \
    {                                                                                              \
        kn_emulated_stop("%s:%u:%u: %s", s->file, s->line, s->column, what);                       \
    }
UNDEFINED(type_mismatch_v1, "an address that is NULL or not aligned for its type")
UNDEFINED(alignment_assumption, "an address that is not aligned as assumed")
UNDEFINED(out_of_bounds, "an index outside of its array")
UNDEFINED(shift_out_of_bounds, "a shift by as many bits as the type has, or a negative one")
UNDEFINED(add_overflow, "a signed addition overflows")
UNDEFINED(sub_overflow, "a signed subtraction overflows")
UNDEFINED(mul_overflow, "a signed multiplication overflows")
UNDEFINED(negate_overflow, "a negation overflows")
UNDEFINED(divrem_overflow, "a division by zero, or one that overflows")
UNDEFINED(float_cast_overflow, "a float outside of the integer type it is converted to")
UNDEFINED(pointer_overflow, "an offset that overflows the address")
UNDEFINED(load_invalid_value, "a bool or enum with a value that the type doesn't have")
UNDEFINED(nonnull_arg, "NULL where an address is needed")
UNDEFINED(vla_bound_not_positive, "an array of no elements")
void __ubsan_handle_builtin_unreachable(const struct source *s)
{
    kn_emulated_stop("%s:%u:%u: a place that can't be reached", s->file, s->line, s->column);
}
void __ubsan_handle_missing_return(const struct source *s)
{
    kn_emulated_stop("%s:%u:%u: a function without its result", s->file, s->line, s->column);
}
}
