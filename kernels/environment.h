/* kernels/environment.h (private): variables of the environment, each checked: an invalid value is
 * an error that lists the valid ones. A variable that isn't set, or is empty, leaves the value as
 * it is. docs/architecture.md lists them. */
#ifndef KNAP_KERNELS_ENVIRONMENT_H
#define KNAP_KERNELS_ENVIRONMENT_H

#include <stdbool.h>
#include <stdint.h>

/* Bytes: digits with K, M, G or T behind them for powers of 1024 ("4G", also "4g", "4GB", "4GiB"),
 * or alone. False for anything else, and for values beyond int64_t. */
bool kn_parse_size(const char *text, int64_t *bytes);

/* Digits and nothing else, from least to most; else false, and *value stays. */
bool kn_parse_number(const char *text, int64_t least, int64_t most, int64_t *value);

bool kn_env_size(const char *name, int64_t *bytes);
bool kn_env_number(const char *name, int64_t least, int64_t most, int64_t *value);
bool kn_env_switch(const char *name, bool *on); /* 1 or 0 */

#endif
