/* models/programs/stop.h: a request to stop a program well: Ctrl-C, SIGTERM, SIGHUP, or its own. */
#ifndef KNAP_MODELS_PROGRAMS_STOP_H
#define KNAP_MODELS_PROGRAMS_STOP_H

#include <stdbool.h>

/* From here on the first SIGINT, SIGTERM or SIGHUP is a request, said on stderr where speaks; one
 * that comes a second later or more ends the program at once (launchers send the same signal to a
 * process and to its group, so repeats within that second don't count). Signals that are ignored at
 * the start stay so. Writing to a closed pipe or beyond a limit of the file size becomes an error
 * of the write. */
void stop_listen(bool speaks);
bool stop_asked(void);
void stop_ask(void);

#endif
