/* tests/fuzz/fuzz.h: programs that read anything. A target is a function that gives bytes from
 * outside to one reader. It runs in two forms:
 *
 *   scripts/fuzz            libFuzzer makes up inputs, with AddressSanitizer and UBSan
 *   test_fuzz               each file of the target's corpus, tests/fuzz/<target>/, once
 *
 * Whatever the bytes, a reader must end, leave at most an error of printable text, give back all
 * tensors, bytes and descriptors, and take no more memory than factor times the input's bytes, plus
 * extra.
 *
 *   KN_FUZZ(csv, .factor = 64, .extra = 1 << 20) { ... data[size] ... }
 */
#ifndef KNAP_TESTS_FUZZ_FUZZ_H
#define KNAP_TESTS_FUZZ_FUZZ_H

#include "tests/kn_test.h"

#include <stddef.h>

typedef struct fuzz_target {
    const char *name;
    void (*run)(const uint8_t *data, size_t size);
    size_t factor, extra; /* bytes of memory: factor * size + extra */
    struct fuzz_target *next;
} fuzz_target;

void fuzz_register(fuzz_target *t);
const fuzz_target *fuzz_targets(void);
/* Runs the target once and checks the claims above; a breach ends the program by abort(). */
void fuzz_once(const fuzz_target *t, const uint8_t *data, size_t size);
/* Runs the target on each file of its corpus; a test's failure if it has none. */
void fuzz_replay(const fuzz_target *t);
/* Aborts with a message unless the condition holds. */
#define FUZZ_CHECK(cond, ...)                                                                      \
    do {                                                                                           \
        if (!(cond))                                                                               \
            fuzz_fail(#cond, "" __VA_ARGS__);                                                      \
    } while (0)
_Noreturn void fuzz_fail(const char *cond, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- files that hold the input --------------------------------------------------------------- */

/* A fresh folder, removed with all that is in it after the run. */
const char *fuzz_folder(void);
/* Writes model.safetensors there, which save makes once in the life of a program: kept has it. */
typedef struct fuzz_kept {
    uint8_t *bytes;
    size_t size;
} fuzz_kept;
void fuzz_tensors(fuzz_kept *kept, bool (*save)(const char *folder));
/* Writes the file folder/name; name may have folders. Its path, valid until the next call. */
const char *fuzz_file(const char *name, const void *data, size_t size);
/* The same for a name from the input: false where no such file can be. */
bool fuzz_try_file(const char *name, const void *data, size_t size);

/* ---- inputs of several parts ----------------------------------------------------------------- */

typedef struct fuzz_input {
    const uint8_t *data;
    size_t size;
} fuzz_input;

/* Cuts off the bytes up to the next end (all, if there is none), without it. */
fuzz_input fuzz_part(fuzz_input *rest, char end);
/* The same as a string, into room; what has no room is left out. */
const char *fuzz_word(fuzz_input *rest, char end, char *room, size_t size);
/* The next byte; 0 at the end. */
uint8_t fuzz_byte(fuzz_input *rest);

#ifdef KN_LIBFUZZER
#define FUZZ_CASE(name_)
#else
#define FUZZ_CASE(name_)                                                                           \
    KN_TEST(fuzz, name_)                                                                           \
    {                                                                                              \
        fuzz_replay(&target_##name_);                                                              \
    }
#endif

#define KN_FUZZ(name_, ...)                                                                        \
    static void run_##name_(const uint8_t *data, size_t size);                                     \
    static fuzz_target target_##name_ = { .name = #name_, .run = run_##name_, __VA_ARGS__ };       \
    __attribute__((constructor)) static void fuzz_##name_##_enter(void)                            \
    {                                                                                              \
        fuzz_register(&target_##name_);                                                            \
    }                                                                                              \
    FUZZ_CASE(name_)                                                                               \
    static void run_##name_(const uint8_t *data, size_t size)

#endif
