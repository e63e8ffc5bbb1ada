/* models/programs/stop.h: requests to stop a program well (Ctrl-C, SIGTERM, SIGHUP, SIGUSR2,
 * SIGPWR, SIGXCPU, or its own), and to save and go on (SIGUSR1). */
#ifndef KNAP_MODELS_PROGRAMS_STOP_H
#define KNAP_MODELS_PROGRAMS_STOP_H

#include <stdbool.h>

/* From here on the first SIGINT, SIGTERM, SIGHUP, SIGUSR2, SIGPWR or SIGXCPU is a request to stop,
 * reported on stderr if reports. A further signal but SIGXCPU ends the program at once if it comes
 * at least a second later: launchers send the same signal to a process and to its group, so repeats
 * within that second don't count. Signals that are ignored at the start stay ignored. Writing to a
 * closed pipe or beyond a limit of the file size becomes an error of the write. */
void stop_listen(bool reports);
bool stop_requested(void);
void stop_request(void);

/* From here on SIGUSR1 is a request to save. Call it first: the signal would end the program. */
void save_listen(void);
/* Whether there was one since the last call. */
bool save_requested(void);

#endif
