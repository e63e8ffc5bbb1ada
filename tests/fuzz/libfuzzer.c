/* tests/fuzz/libfuzzer.c: the targets as one program of libFuzzer's: KNAP_FUZZ names the target;
 * "list" prints all names. scripts/fuzz runs it. */
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const fuzz_target *target;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    const char *name = getenv("KNAP_FUZZ");
    for (const fuzz_target *t = fuzz_targets(); t; t = t->next) {
        if (name && strcmp(t->name, name) == 0)
            target = t;
        if (name && strcmp(name, "list") == 0)
            puts(t->name);
    }
    if (name && strcmp(name, "list") == 0)
        exit(0);
    if (!target) {
        fprintf(stderr, "KNAP_FUZZ must name a target, or be list\n");
        exit(1);
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_once(target, data, size);
    return 0;
}
