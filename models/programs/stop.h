/* models/programs/stop.h: a request to stop a program well: Ctrl-C, SIGTERM, SIGHUP, or its own. */
#ifndef KNAP_MODELS_PROGRAMS_STOP_H
#define KNAP_MODELS_PROGRAMS_STOP_H

#include <stdbool.h>

/* From here on the first SIGINT, SIGTERM or SIGHUP is a request to stop, reported on stderr if
 * reports. A further signal ends the program at once if it comes at least a second later: launchers
 * send the same signal to a process and to its group, so repeats within that second don't count.
 * Signals that are ignored at the start stay ignored. Writing to a closed pipe or beyond a limit of
 * the file size becomes an error of the write. */
void stop_listen(bool reports);
bool stop_requested(void);
void stop_request(void);

#endif
