/* bench/args.h: options of the benchmarks: "--name value", and "--name" alone. */
#ifndef KNAP_BENCH_ARGS_H
#define KNAP_BENCH_ARGS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The character behind "[name" in the usage: ' ' where the option takes a value, ']' where it
 * doesn't, 0 where there is no such option. */
static inline char args_kind(const char *usage, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = usage; (at = strstr(at, "[--")); at++)
        if (strncmp(at + 1, name, n) == 0 && (at[1 + n] == ' ' || at[1 + n] == ']'))
            return at[1 + n];
    return 0;
}

/* The first thing in main. usage: a sentence, then all options as "[--batch N]" or "[--graph]".
 * Ends the program at --help, which prints it, and at an option that it doesn't have, a value that
 * is missing, or more words than `words` besides options. */
static inline void args_begin(int argc, char **argv, const char *usage, int words)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *wrong = NULL;
        bool option = strncmp(name, "--", 2) == 0;
        char kind = option ? args_kind(usage, name) : 0;
        if (strcmp(name, "--help") == 0) {
            printf("%s\n", usage);
            exit(0);
        }
        if (option ? !kind : words-- <= 0)
            wrong = option ? "there is no such option" : "a word that belongs to no option";
        else if (kind == ' ' && (++i == argc || strncmp(argv[i], "--", 2) == 0))
            wrong = "its value is missing";
        if (wrong) {
            fprintf(stderr, "%s: %s: %s\n%s\n", argv[0], name, wrong, usage);
            exit(2);
        }
    }
}

/* The value behind name, or otherwise. */
static inline const char *word(int argc, char **argv, const char *name, const char *otherwise)
{
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return argv[i + 1];
    return otherwise;
}

static inline double real(int argc, char **argv, const char *name, double otherwise)
{
    const char *text = word(argc, argv, name, NULL);
    char *end = NULL;
    double value = text ? strtod(text, &end) : otherwise;
    if (text && (end == text || *end)) {
        fprintf(stderr, "%s: %s %s: the value must be a number\n", argv[0], name, text);
        exit(2);
    }
    return value;
}

static inline int64_t number(int argc, char **argv, const char *name, int64_t otherwise)
{
    double value = real(argc, argv, name, (double)otherwise);
    if (value < -1e15 || value > 1e15 || value != (double)(int64_t)value) {
        fprintf(stderr, "%s: %s %s: the value must be a whole number\n", argv[0], name,
                word(argc, argv, name, ""));
        exit(2);
    }
    return (int64_t)value;
}

/* Two ranks, where neither an option nor a launcher says how many, nor this is one of them. */
static inline void two_ranks(int argc, char **argv)
{
    if (!word(argc, argv, "--ranks", NULL) && !getenv("WORLD_SIZE") && !getenv("KNAP_RANK"))
        setenv("KNAP_RANKS", "2", 0);
}

static inline bool flag(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return false;
}

#endif
