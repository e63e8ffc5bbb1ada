/* tests/kernels/trace_test.c: the trace keeps the last events, those of worker threads too, and is
 * written as JSON that Chrome reads. */
#include "kernels/trace.h"
#include "kernels/kernels_internal.h"
#include "tests/kn_test.h"

#include <unistd.h>

KN_TEST(trace, keeps_the_last)
{
    kn_trace_event *events = NULL;
    KN_CHECK(!kn_tracing() && kn_trace_stop(&events) == 0 && !events);
    kn_trace_start(4);
    KN_CHECK(kn_tracing());
    for (int i = 0; i < 10; i++) {
        char what[16];
        snprintf(what, sizeof what, "job %d", i);
        kn_trace_add(what, "test", NULL, i, i + 0.5, 100 * i, 10 * i);
    }
    KN_CHECK(kn_trace_stop(&events) == 4 && !kn_tracing());
    KN_CHECK(strcmp(events[0].what, "job 6") == 0 && strcmp(events[3].what, "job 9") == 0);
    KN_CHECK(strcmp(events[3].provider, "test") == 0 && strcmp(events[3].stream, "host") == 0);
    KN_CHECK(events[3].begin == 9 && events[3].end == 9.5 && events[3].flops == 900);
    kn_host_free(events);
    kn_trace_start(0);
    KN_CHECK_ERROR("capacity of 0");
}

KN_TEST(trace, of_a_worker)
{
    float a[64] = { 1 }, b[64];
    OWNED_HOST kn_trace_event *events = NULL;
    kn_stream *s = kn_stream_create(KN_CPU, "gather", KN_STREAM_WORKER);
    kn_trace_start(16);
    const int64_t n = 64;
    kn_copy_args args = { .dst = kn_array_make(b, KN_F32, 1, &n),
                          .src = kn_array_make(a, KN_F32, 1, &n) };
    kn_launch(s, KN_K_COPY, &args, sizeof args);
    kn_stream_destroy(s);
    KN_CHECK(kn_trace_stop(&events) == 1);
    KN_CHECK(strcmp(events[0].what, "copy") == 0 && strcmp(events[0].stream, "gather") == 0);
    KN_CHECK(events[0].end >= events[0].begin && events[0].bytes == 512, "%g", events[0].bytes);
}

KN_TEST(trace, chrome_json)
{
    char path[64], text[4096] = "";
    snprintf(path, sizeof path, "/tmp/knap_trace_%d.json", (int)getpid());
    kn_trace_start(8);
    kn_trace_add("say \"hi\"\\\n", "avx2", kn_compute_stream(KN_CPU), 1.5, 1.75, 3, 4);
    kn_trace_add("plain", "avx2", NULL, 2, 3, 0, 0);
    KN_CHECK(kn_trace_write(path));
    FILE *f = fopen(path, "r");
    KN_CHECK(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    unlink(path);
    KN_CHECK(n > 0 && strncmp(text, "{\"displayTimeUnit\"", 18) == 0 && strstr(text, "\n]}\n"));
    KN_CHECK(strstr(text, "{\"name\":\"say \\\"hi\\\"\\\\\\u000a\",\"cat\":\"avx2\",\"ph\":\"X\","
                          "\"pid\":0,\"tid\":0,\"ts\":1500000.000,\"dur\":250000.000,"),
             "%s", text);
    KN_CHECK(strstr(text, "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":1,"
                          "\"args\":{\"name\":\"host\"}}"),
             "%s", text);
    kn_trace_stop(NULL);
    REFUSED(kn_trace_write("/nonexistent/trace.json"), "/nonexistent/trace.json");
}
