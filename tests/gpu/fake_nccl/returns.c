/* tests/gpu/fake_nccl/returns.c: what each function of NCCL returns, and who does its work, as
 * NCCL's sources have it, which isn't always what its documentation says. A row holds from its
 * version on, until a later row of the same function; read in the releases from 2.18.5 to 2.30.7.
 * Places are files below src/ of the release that follows "at". */
#include "tests/gpu/fake_nccl/inside.h"

static const struct row {
    function f;
    int since; /* NCCL's version */
    /* on a communicator that doesn't block */
    doer by;
    int returns; /* STATE: what ncclCommGetAsyncError would say now */
    const char *place;
} rows[] = {
    /* The new communicator's state: in progress. */
    { INIT, 21400, THREAD, STATE, "init.cc:1729 at 2.18.5, init.cc:2310 at 2.29.2" },
    /* Success, while a thread makes the child: until then *newcomm is NULL, and the parent's state
     * says that it is in progress (NVIDIA/nccl#1472). */
    { SPLIT, 21800, THREAD, SUCCESS,
      "init.cc:2035 at 2.18.5, init.cc:2239 at 2.23.4, init.cc:3004 at 2.29.2" },
    /* In progress as long as a graph lives that has a collective of the communicator
     * (commDestroySync). */
    { FINALIZE, 21400, THREAD, STATE,
      "init.cc:1833 and 1756 at 2.18.5, init.cc:2814 and 2751 at 2.30.7" },
    /* Waited for in every mode: since 2.22 destroyFlag makes its group a blocking one. */
    { DESTROY, 21400, CALLER, SUCCESS, "init.cc:1947 at 2.18.5, group.cc:51 at 2.22.3" },
    /* Up to 2.22 a thread works only where ranks have to connect first, for sends and receives;
     * then for all. */
    { COLLECTIVE, 21400, CALLER, STATE, "group.cc:384 at 2.18.5, enqueue.cc:1597 at 2.18.5" },
    { COLLECTIVE, 22300, THREAD, STATE, "group.cc:540 at 2.23.4, enqueue.cc:3017 at 2.29.2" },
    { GROUP, 21400, CONNECTING, STATE, "group.cc:384 and 403 at 2.18.5" },
    { GROUP, 22300, THREAD, STATE, "group.cc:540 and 563 at 2.23.4, group.cc:776 at 2.29.2" },
    /* A send or a receive outside a group opens one itself; up to 2.23 it returns the state before
     * that group was launched: success (NVIDIA/nccl#1495). */
    { LETTER, 21400, CONNECTING, SUCCESS, "collectives/sendrecv.cc:34 at 2.18.5" },
    { LETTER, 22300, THREAD, SUCCESS, "collectives.cc:220 at 2.23.4" },
    { LETTER, 22400, THREAD, STATE, "collectives.cc:209 at 2.24.3" },
    /* Never in progress; doesn't look whether the communicator is (NVIDIA/nccl#1734). */
    { REGISTER, 21900, CALLER, SUCCESS,
      "init.cc:2172 at 2.19.3, register/register.cc:117 at 2.29.2" },
    { DEREGISTER, 21900, CALLER, SUCCESS, "register/register.cc:165 at 2.29.2" },
};

static const struct row *row_of(function f)
{
    const struct row *found = NULL;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].f == f && rows[i].since <= fake_nccl_state.version)
            found = &rows[i];
    must(found != NULL, "a function that this version of NCCL doesn't have");
    return found;
}

/* What is at work on c is done by the caller, now, or by a thread, which c's state tells. */
int fake_nccl_answer(function f, comm *c, bool connects)
{
    const struct row *row = row_of(f);
    bool thread = !c->blocking && (row->by == THREAD || (row->by == CONNECTING && connects));
    c->state = IN_PROGRESS;
    fake_nccl_state.threads += thread;
    c->polls = thread && fake_nccl_state.busy_us == 0 ? fake_nccl_state.polls : 0;
    c->ready = thread ? fake_nccl_seconds() + 1e-6 * fake_nccl_state.busy_us : 0;
    while (!thread && !fake_nccl_work(c))
        usleep(20);
    return row->returns == STATE || c->blocking ? c->state : row->returns;
}
