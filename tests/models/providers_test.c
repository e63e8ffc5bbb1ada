/* tests/models/providers_test.c: which kernels of a step the CPU's reference runs. It is right and
 * slow, so a step and an evaluation of each bundled model in each dtype and memory order leave it
 * small things alone: kernels that touch few bytes, whatever the size of the model. */
#include "kernels/kernels.h"
#include "tests/kn_test.h"
#include "tests/models/real_steps.h"

#include <string.h>

enum { SMALL = 256 /* bytes */ };

/* Without oneDNN the reference has the only convolution. */
static bool allowed(const kn_trace_event *e)
{
    const bool only = strcmp(kn_cpu_libraries(), "none") == 0 && strncmp(e->what, "conv", 4) == 0;
    return strcmp(e->provider, "reference") != 0 || e->bytes <= SMALL || only;
}

static void check_step(real_options o)
{
    kn_trace_event *events = NULL;
    o.device = KN_CPU;
    real_steps *s = real_steps_begin(o);
    KN_CHECK(s && real_steps_train(s), "%s", real_model_name(o.model));
    kn_trace_start(20000);
    KN_CHECK(real_steps_train(s) && real_steps_evaluate(s));
    const size_t count = kn_trace_stop(&events);
    KN_CHECK(count > 50, "%zu events", count);
    for (size_t i = 0; i < count; i++)
        KN_CHECK(allowed(&events[i]),
                 "%s, %s, %s images, optimizer %d: the reference runs %s of %.0f bytes; give the "
                 "case a vector kernel",
                 real_model_name(o.model), o.dtype ? kn_dtype_name(o.dtype) : "f32",
                 o.channels_last ? "channels-last" : "row-major", o.optimizer, events[i].what,
                 events[i].bytes);
    kn_host_free(events);
    real_steps_end(s);
}

KN_TEST(providers, the_reference_runs_small_things_alone)
{
    static const kn_dtype dtypes[] = { KN_DTYPE_DEFAULT, KN_BF16, KN_F16 };
    for (int m = 0, i = 0; m < REAL_MODELS; m++)
        for (int t = 0; t < 3; t++)
            for (int last = 0; last < (real_model_sees(m) ? 2 : 1); last++, i++)
                check_step((real_options){ .model = m,
                                           .dtype = dtypes[t],
                                           .optimizer = (i + m) % REAL_OPTIMIZERS,
                                           .channels_last = last,
                                           .mixed = i % 5 == 4,
                                           .recompute = i % 7 == 6 });
}
