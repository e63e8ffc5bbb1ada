/* tests/gpu/nvidia_libraries.c: opens one of NVIDIA's libraries as Knap does, needs no GPU, and
 * says what Knap makes of it (scripts/peers libraries runs it for several versions).
 *
 *   nvidia_libraries nccl|cublaslt|cudnn PATH
 *   nvidia_libraries soname nccl|cublaslt|cudnn     the name by which this build opens it */
#include "comm/comm_internal.h"
#include "comm/nccl/nccl.h"

#include <stdio.h>
#include <string.h>

static bool is_there(const kn_cuda_symbol *s)
{
    void *at;
    memcpy(&at, s->to, sizeof at);
    return at != NULL;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        kn_cuda_library *library;
    } all[] = { { "nccl", &kn_nccl_library },
                { "cublaslt", &kn_cublaslt_library },
                { "cudnn", &kn_cudnn_library } };
    kn_cuda_library *l = NULL;
    char text[32];
    const bool ask = argc == 3 && strcmp(argv[1], "soname") == 0;
    for (int i = 0; argc == 3 && i < 3; i++)
        l = strcmp(argv[ask ? 2 : 1], all[i].name) == 0 ? all[i].library : l;
    if (!l) {
        fprintf(stderr, "usage: nvidia_libraries nccl|cublaslt|cudnn PATH, or soname NAME\n");
        return 2;
    }
    if (ask) {
        printf("%s\n", l->soname);
        return 0;
    }
    l->soname = argv[2];
    l->variable = NULL;
    const bool there = kn_cuda_library_open(l);
    const char *version =
        l == &kn_nccl_library && there ? kn_nccl_version() : kn_cuda_version_text(l->version, text);
    if (!there) {
        printf("%s %s is refused: %s\n", l->name, version, l->lack);
        return 1;
    }
    printf("%s %s is taken: %d functions", l->name, version, l->count);
    for (int i = 0, n = 0; i < l->count; i++)
        if (!is_there(&l->symbols[i]))
            printf("%s%s", n++ ? ", " : ", without ", l->symbols[i].name);
    printf("\n");
    return 0;
}
