/* tests/fsdp/forward_prefetch_test.c: where forward gathers the next unit early unasked. The device
 * is a stand-in (stand_in.h). Rank functions return a status and never assert. */
#include "tests/fsdp/net.h"
#include "tests/fsdp/stand_in.h"

typedef struct job {
    kn_device device;
    kn_backward_prefetch backward;
    bool early; /* expected: fc2 is gathered while fc1 computes */
} job;

static void hear(const kn_fsdp_event *e, void *line)
{
    size_t n = strlen(line);
    snprintf((char *)line + n, 1024 - n, "%s %s, ", kn_fsdp_event_name(e->kind), e->unit);
}

static bool backward(net *m)
{
    int64_t ids[NET_BATCH] = { 3, 1, 4, 1, 5 };
    IN_SCOPE;
    kn_tensor *y = kn_call(m, kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(NET_BATCH)));
    return kn_backward(mean_square(y));
}

static void second_forward(kn_comm *world, void *arg)
{
    const job *j = arg;
    char line[1024] = "";
    NET(m);
    KN_CHECK(kn_fsdp_wrap(&m, world, .wrap_class = "linear", .device = j->device,
                          .backward_prefetch = j->backward, .seed = NET_SEED));
    KN_CHECK(backward(&m) && kn_fsdp_on_event(&m, hear, line), "the first");
    kn_zero_grad(&m);
    KN_CHECK(backward(&m), "the second");
    const char *next = strstr(line, "gather fc2"), *end = strstr(line, "release fc1");
    KN_CHECK(next && end, "%s", line);
    KN_CHECK((next < end) == j->early, "%s", line);
}

/* Units that gave up memory for time, by .backward_prefetch, keep it. */
KN_TEST(forward_prefetch, is_on_where_streams_run_beside_the_host)
{
    static const job jobs[] = { { STAND_IN, KN_PREFETCH_DEFAULT, true },
                                { STAND_IN, KN_PREFETCH_PRE, true },
                                { STAND_IN, KN_PREFETCH_POST, false },
                                { STAND_IN, KN_PREFETCH_NONE, false },
                                { KN_CPU, KN_PREFETCH_DEFAULT, false } };
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        job j = jobs[i];
        KN_CHECK(on_stand_in((stand_in){ .inline_streams = true }, 2, second_forward, &j) == 0,
                 "job %d", (int)i);
    }
}
