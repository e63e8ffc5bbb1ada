/* tests/state/operations.h: the library's operations on folders, which a test sees and makes fail.
 * Within test_state its opens, renames, removals, links, folders and looks are the functions of
 * operations.c. */
#ifndef KNAP_TESTS_STATE_OPERATIONS_H
#define KNAP_TESTS_STATE_OPERATIONS_H

/* Called before each one, with the C library's name of it: the error number that it fails with; 0:
 * it runs. NULL: all run. Of the calling process, on any thread. */
extern int (*operation_hook)(const char *name);

#endif
