/* bench/args.h: options of the benchmarks: "--name value", and "--name" alone. */
#ifndef KNAP_BENCH_ARGS_H
#define KNAP_BENCH_ARGS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The value behind name, or otherwise. */
static inline const char *word(int argc, char **argv, const char *name, const char *otherwise)
{
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return argv[i + 1];
    return otherwise;
}

static inline int64_t number(int argc, char **argv, const char *name, int64_t otherwise)
{
    const char *text = word(argc, argv, name, NULL);
    return text ? strtoll(text, NULL, 10) : otherwise;
}

static inline bool flag(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return false;
}

#endif
