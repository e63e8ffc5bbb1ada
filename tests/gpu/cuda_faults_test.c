/* tests/gpu/cuda_faults_test.c: each fault of a kernel ends the program with the emulator's
 * message, in every order of threads and blocks (emulator/faulty_kernels.cc,
 * tests/gpu/emulator/emulate.h). */
#include "kernels/kernels.h"
#include "tests/gpu/emulator/emulated.h"
#include "tests/kn_test.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

kn_status emulated_fault(int i, void *out);
kn_status emulated_refused(int i, void *out);

/* Returns the output of a child process that runs fault i in an order. */
static void fault(int i, const char *order, char *text, size_t size)
{
    static float out[64]; /* the only memory that the kernel may access */
    int to[2];
    KN_CHECK(pipe(to) == 0, "no pipe");
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(to[1], 2);
        setenv("KN_EMULATE_ORDER", order, 1);
        emulated_allow(out, sizeof out);
        emulated_fault(i, out);
        _exit(0);
    }
    close(to[1]);
    ssize_t n, have = 0;
    while ((n = read(to[0], text + have, size - 1 - (size_t)have)) > 0)
        have += n;
    text[have] = 0;
    close(to[0]);
    int status = 0;
    KN_CHECK(waitpid(child, &status, 0) == child, "no child");
    KN_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "fault %d, %s: status %x: %s", i,
             order, (unsigned)status, text);
}

KN_TEST(cuda_faults, end_the_program)
{
    static const char *const sentences[] = {
        "shared memory that",           /* no barrier at all */
        "shared memory that",           /* none before writing again */
        "shared memory that",           /* a shuffle instead of a __syncwarp */
        "shared memory that",           /* a __syncwarp instead of a __syncthreads */
        "global memory that thread",    /* of another block */
        "global memory that thread",    /* plain beside atomic */
        "shared memory that nobody",    /* one too far */
        "shared memory that nobody",    /* dynamic */
        "of dynamic shared memory",     /* beyond it */
        "outside of the call's arrays", /* beyond an array */
        "scratch that nobody",          /* not written */
        "outside of the call's arrays", /* the scratch before the last */
        "aligned",                      /* 16 bytes at a float */
        "takes no part",                /* a lane that has left */
        "takes no part",                /* a lane beyond the block */
        "two different",                /* shuffles */
        "two different",                /* barriers */
        "index outside",                /* of a thread's own array */
        "float outside",                /* of an int */
        "more than a block has",        /* dynamic and other shared memory */
    };
    static const char *const orders[] = { "ascending", "descending", "12345" };
    char text[2048];
    for (int i = 0; i < (int)(sizeof sentences / sizeof *sentences); i++)
        for (int k = 0; k < 3; k++) {
            fault(i, orders[k], text, sizeof text);
            KN_CHECK(strstr(text, sentences[i]), "fault %d, %s: not '%s': %s", i, orders[k],
                     sentences[i], text);
        }
}

KN_TEST(cuda_faults, launches_that_some_gpu_refuses)
{
    float out[64];
    for (int i = 0; i < 5; i++) {
        KN_CHECK(emulated_refused(i, out) == KN_FAILED, "launch %d", i);
        KN_CHECK_ERROR("not every GPU launches");
    }
}
