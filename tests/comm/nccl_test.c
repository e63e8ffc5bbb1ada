/* tests/comm/nccl_test.c: the parts of NCCL that need no GPU: the library opens, its functions are
 * found, this build knows the configuration of its version, and its absence is an error message.
 * Collectives themselves: device_test.c on a GPU. */
#include "comm/nccl/nccl.h"
#include "tests/comm/comm_test.h"

#include <sys/wait.h>

KN_TEST(nccl, opens_and_says_its_version)
{
    const char *version = kn_nccl_version();
    int major = 0, minor = 0;
    if (!version)
        return; /* no NCCL on this machine */
    KN_CHECK(sscanf(version, "%d.%d", &major, &minor) == 2 && major == 2 && minor >= 14, "%s",
             version);
    KN_CHECK(kn_nccl() && kn_ok());
    const nccl_functions *f = kn_nccl();
    if (minor >= 19)
        KN_CHECK(f->split && f->mem_alloc && f->mem_free && f->enroll && f->dismiss);
}

/* Ids are made without a GPU, and no two are equal. */
KN_TEST(nccl, gives_unique_ids)
{
    nccl_id a = { { 0 } }, b = { { 0 } };
    if (!kn_nccl_version())
        return;
    KN_CHECK(kn_nccl()->unique_id(&a) == NCCL_SUCCESS && kn_nccl()->unique_id(&b) == NCCL_SUCCESS);
    KN_CHECK(memcmp(&a, &b, sizeof a) != 0);
    KN_CHECK(strlen(kn_nccl()->error_string(NCCL_IN_PROGRESS)) > 0);
}

KN_TEST(nccl, a_missing_library_is_one_sentence)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        setenv("KNAP_NCCL", "/no/such/libnccl.so", 1);
        bool said = !kn_nccl() && kn_error() && strstr(kn_error(), "KNAP_COMM=local");
        _exit(said && !kn_nccl_version() ? 0 : 1);
    }
    int status = 1;
    KN_CHECK(waitpid(child, &status, 0) == child && status == 0, "status %x", (unsigned)status);
}
