/* kernels/choices.h (private): which of several ways to compute the same is the fastest here. It
 * was timed once, in a run with KNAP_TUNE=1, and stands in a file that later runs read:
 * KNAP_TUNED, else knap/tuned.txt in $XDG_CACHE_HOME, else ~/.cache/knap/tuned.txt.
 *
 *   1b0c47e9a5d2f368 cuBLASLt 13.1.0, NVIDIA H200, ..., m 768, n 65536, ... = algorithm 0a00..
 *
 * A line is a choice: a checksum of what follows, a key (what is computed, on what, with which
 * version), and a value, both of printable ASCII. The last line with a key counts. Anything else in
 * the file is left out, so a file that is cut, damaged or made by hand costs speed at most. A line
 * is added by one write at the file's end: several processes may add to one file.
 *
 * Another choice gives other bits. So the file is read once a process, only a run of one rank times
 * and adds, and ranks compare what they read (fsdp/check.c). */
#ifndef KNAP_KERNELS_CHOICES_H
#define KNAP_KERNELS_CHOICES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KN_CHOICE_KEY   640               /* room for a key or a value, with the 0 behind it */
#define KN_CHOICES_MOST ((size_t)4 << 20) /* bytes of a file; a larger one isn't read */

/* KNAP_TUNE=1: choices that aren't known are timed now. An error in a run of several ranks. */
bool kn_tuning(void);
/* Copies the value kept for key; false: there is none. */
bool kn_choice_find(const char *key, char value[KN_CHOICE_KEY]);
/* Keeps a value for key in this process and adds it to the file; kn_choices_tell says where that
 * failed. */
void kn_choice_keep(const char *key, const char *value);
/* How many keys begin so. */
int64_t kn_choices_of(const char *machine);
/* A hash of the lines that count, one for each key, whatever their order; 0: there are none. */
uint64_t kn_choices_hash(void);
/* One sentence about the file: its path, whether it is there, what was left out, what couldn't be
 * written. Returns text. */
const char *kn_choices_tell(char *text, size_t size);
/* How many choices whose keys begin with machine are known, and the sentence about the file: "24
 * timed before: FILE", or "timed when first met, 24 so far: FILE" (KNAP_TUNE=1); where there are
 * none `none`, a colon and that sentence, or NULL if that is NULL. Valid until the thread's next
 * call. */
const char *kn_choices_said(const char *machine, const char *none);

/* Tests: forgets what was read and which file it was. */
void kn_choices_forget(void);

#endif
