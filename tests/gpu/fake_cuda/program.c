/* tests/gpu/fake_cuda/program.c: makes a program of Knap run on the fake GPU of fake.c, with the
 * emulated kernels. FAKE_PROVIDERS names the providers that may run, instead of these alone. At
 * its end it writes the number of the host's waits to the file FAKE_WAITS. */
#include "tests/gpu/fake_cuda/fake.h"
#include "kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>

__attribute__((constructor)) static void begin(void)
{
    const char *late = getenv("FAKE_LATE"), *providers = getenv("FAKE_PROVIDERS");
    fake_begin();
    if (providers)
        kn_providers_only(providers);
    fake.late = late ? atoi(late) : 0;
}

__attribute__((destructor)) static void end(void)
{
    const char *path = getenv("FAKE_WAITS");
    FILE *f = path ? fopen(path, "w") : NULL;
    if (!f)
        return;
    fprintf(f, "%d %d\n", fake.waits, fake.pageable);
    fclose(f);
}
