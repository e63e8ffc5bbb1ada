/* tests/gpu/cuda_refusals_test.c: what NVIDIA's libraries may refuse, and what is said of it. A
 * cuDNN that doesn't take plans made for a device's description gets them made for a handle
 * (fake_cudnn.c computes nothing, and counts the plans that ran). */
#include "knap.h"
#include "kernels/cuda/runtime/runtime.h"
#include "kernels/kernels_internal.h"
#include "tests/gpu/fake_cuda/fake.h"
#include "tests/kn_test.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

/* Attention of bf16, forward, `times` times: the plans that ran, 100 x by description + by handle;
 * -1: an error. */
static int attend(int times)
{
    enum { B = 1, H = 2, T = 16, D = 64 };
    kn_stream *s = kn_compute_stream(KN_CUDA);
    kn_memory *m = kn_device_memory(KN_CUDA);
    int64_t shape[] = { B, H, T, D };
    kn_array x[4], lse = kn_array_make(kn_take(m, B * H * T * 4, KN_MEM_DATA), KN_F32, 3, shape);
    for (int i = 0; i < 4; i++)
        x[i] = kn_array_make(kn_take(m, B * H * T * D * 2, KN_MEM_DATA), KN_BF16, 4, shape);
    kn_attention_args a = {
        .o = x[0], .lse = lse, .q = x[1], .k = x[2], .v = x[3], .scale = 0.125, .causal = true
    };
    for (int i = 0; i < times; i++)
        if (!KN_LAUNCH(s, KN_K_ATTENTION, a))
            return -1;
    void *library = dlopen(kn_cudnn_library.soname, RTLD_NOW | RTLD_NOLOAD);
    const int *ran = library ? dlsym(library, "fake_cudnn_ran") : NULL;
    return ran ? 100 * ran[0] + ran[1] : -1;
}

/* A product of bf16: 0 where Knap's kernel has computed it; -1: an error. */
static int multiply(int times)
{
    kn_memory *m = kn_device_memory(KN_CUDA);
    int64_t shape[] = { 16, 16 };
    kn_array x[3];
    for (int i = 0; i < 3; i++)
        x[i] = kn_array_make(kn_take(m, 512, KN_MEM_DATA), KN_BF16, 2, shape);
    kn_matmul_args a = { .dst = x[0], .a = x[1], .b = x[2] };
    for (int i = 0; i < times; i++)
        if (!KN_LAUNCH(kn_compute_stream(KN_CUDA), KN_K_MATMUL, a))
            return -1;
    return 0;
}

static const char *beside(const char *name)
{
    static char path[2][4200];
    static int n;
    char self[4000] = "";
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    char *slash = length > 0 ? strrchr(self, '/') : NULL;
    KN_CHECK(slash);
    *slash = 0;
    snprintf(path[n % 2], sizeof path[0], "%s/%s", self, name);
    return path[n++ % 2];
}

/* In a process of its own, for a process opens a library once; three times, said once. */
KN_TEST(cuda_refusals, go_on_another_way_and_say_so)
{
    static const struct {
        const char *variable, *value;
        int (*run)(int times), ran;
        const char *says;
        kn_cuda_part part;
    } cases[] = {
        { "FAKE_CUDNN", "", attend, 300, NULL, { "libfake_cublaslt.so" } }, /* beside it */
        { "FAKE_CUDNN", "", attend, 300, NULL, { "libflint.so.", true, true } },
        { "FAKE_CUDNN",
          "all",
          attend,
          0,
          "can't be loaded: libflint.so.13: ",
          { "libflint.so.", true, true } },
        { "FAKE_CUDNN", "", attend, 0, NULL, { "libflint.so.", true, false } },
        { "FAKE_CUDNN", "plans", attend, 3, "refuses plans made for a device's description" },
        { "FAKE_CUDNN", "runs", attend, 3, "refuses plans made for a device's description" },
        { "FAKE_CUDNN", "all", attend, 0, "cuDNN has no plan for attention (by the fake)" },
        { "FAKE_HEURISTIC", "0 0 0", multiply, 0, "no algorithm for a product of bf16, 16 x 16" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[2000];
        int status = 0;
        FILE *said = tmpfile();
        KN_CHECK(said);
        pid_t child = fork();
        if (child == 0) {
            dup2(fileno(said), STDERR_FILENO);
            setenv(cases[i].variable, cases[i].value, 1);
            kn_cudnn_library.soname = beside("libfake_cudnn.so");
            memset(kn_cudnn_library.part, 0, sizeof kn_cudnn_library.part);
            kn_cudnn_library.part[0] = cases[i].part;
            kn_cublaslt_library.soname = beside("libfake_cublaslt.so");
            kn_providers_only(cases[i].run == attend ? "cudnn,cuda" : "cublaslt,cuda");
            int ran = cases[i].run(3);
            fprintf(stderr, "ran %d %s\n", ran, kn_ok() ? "" : kn_error());
            fflush(stderr);
            _exit(ran == cases[i].ran && kn_ok() ? 0 : 1);
        }
        KN_CHECK(child > 0 && waitpid(child, &status, 0) == child);
        rewind(said);
        text[fread(text, 1, sizeof text - 1, said)] = 0;
        fclose(said);
        const char *line = strstr(text, "knap: ");
        KN_CHECK(status == 0 && !line == !cases[i].says &&
                     (!line || (strstr(line, cases[i].says) && !strstr(line + 1, "knap: "))),
                 "%s=%s: %s", cases[i].variable, cases[i].value, text);
    }
}
