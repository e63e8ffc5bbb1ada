/* comm/values.h (private): small things that ranks tell each other, on the host, and over when the
 * function returns. With one rank, or a NULL communicator in a program that is no rank, there is
 * nothing to tell. False with an error. */
#ifndef KNAP_COMM_VALUES_H
#define KNAP_COMM_VALUES_H

#include "comm/comm.h"

/* Every rank gets root's bytes; the sums; the maxima. */
bool kn_hosts_broadcast(kn_comm *c, void *data, size_t bytes, int root, const char *label);
bool kn_hosts_sum(kn_comm *c, int64_t *data, int64_t count, const char *label);
bool kn_hosts_max(kn_comm *c, float *data, int64_t count, const char *label);

/* Begins what may take a rank as long as its disk does. Until all ranks come to it, without an
 * error, the timeout holds; then it is suspended. The end resumes it and says whether all ranks
 * went well. */
bool kn_hosts_begin_slow(kn_comm *c);
bool kn_hosts_end_slow(kn_comm *c, bool ok);

#endif
