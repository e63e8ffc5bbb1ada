/* tests/gpu/cuda_tuned_test.c: algorithms of matrix products that are timed once and kept
 * (kernels/cuda/cublaslt/choose.c, tuned.c), over fake CUDA and a cuBLASLt whose algorithms take
 * the times that a test gives them and have bits of their own (fake_cublaslt.c). */
#include "knap.h"
#include "kernels/choices.h"
#include "kernels/context.h"
#include "kernels/cuda/cublaslt/tuned.h"
#include "kernels/cuda/runtime/runtime.h"
#include "tests/gpu/fake_cuda/fake.h"
#include "tests/kn_test.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { M = 3, N = 5, K = 24, GAP = 4, ROW = N + GAP, NUMBERS = M * ROW };

/* What a process had. */
typedef struct result {
    float d[NUMBERS];
    char tells[600], error[300], calls[4000];
    int waits;
    bool ok;
} result;

static result *of; /* shared with the process */
static char folder[64], file[128], calls[128];

static void begin(void)
{
    strcpy(folder, "/tmp/knap-tuned-XXXXXX");
    KN_CHECK(mkdtemp(folder) != NULL);
    snprintf(file, sizeof file, "%s/tuned", folder);
    snprintf(calls, sizeof calls, "%s/calls", folder);
    setenv("KNAP_TUNED", file, 1);
    setenv("FAKE_CALLS", calls, 1);
    of = mmap(NULL, sizeof *of, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    KN_CHECK(of != MAP_FAILED);
}

static void end(void)
{
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    KN_CHECK(system(command) == 0);
    KN_CHECK_OK();
}

/* Bits depend on the order of the terms. */
static float value(int i, int many)
{
    return (float)(i * 7919 % 97 - 48) * (many ? 1.37f : 0.0113f) + 1e-3f / (float)(i + 1);
}

typedef struct call {
    int k;
    bool add, twice, recorded, shifted; /* shifted: the operands lie at odd places */
} call;

static float *array(int n, int kind)
{
    float *x = kn_take(kn_device_memory(KN_CUDA), sizeof(float) * (size_t)(n + 1), KN_MEM_DATA);
    for (int i = 0; x && i <= n; i++)
        x[i] = value(i, kind);
    return x;
}

static bool launch(const call *c, float *a, float *b, float *d)
{
    int64_t da[] = { M, c->k }, db[] = { c->k, N }, dd[] = { M, N };
    kn_matmul_args x = { .a = kn_array_make(a + c->shifted, KN_F32, 2, da),
                         .b = kn_array_make(b, KN_F32, 2, db),
                         .dst = kn_array_make(d, KN_F32, 2, dd),
                         .add = c->add };
    x.dst.stride[0] = ROW;
    return KN_LAUNCH(kn_compute_stream(KN_CUDA), KN_K_MATMUL, x);
}

static void compute(const call *c)
{
    float *a = array(M * K, 1), *b = array(K * N, 0), *d = array(NUMBERS, 1);
    of->waits = -fake.waits;
    if (c->recorded)
        kn_graph_begin(KN_CUDA);
    of->ok = launch(c, a, b, d) && (!c->twice || launch(c, a, b, d));
    if (c->recorded)
        kn_graph_free(kn_graph_end());
    of->waits += fake.waits;
    memcpy(of->d, d, sizeof of->d);
    snprintf(of->tells, sizeof of->tells, "%s", kn_cuda_choices() ? kn_cuda_choices() : "");
    snprintf(of->error, sizeof of->error, "%s", kn_error() ? kn_error() : "");
}

static void read_calls(void)
{
    FILE *f = fopen(calls, "r");
    size_t n = f ? fread(of->calls, 1, sizeof of->calls - 1, f) : 0;
    of->calls[n] = 0;
    if (f)
        fclose(f);
    unlink(calls);
}

/* A process of its own computes c: *of is what it had. False where the fake library isn't built. */
static bool process(bool tune, const char *algorithms, call c)
{
    char path[4200], self[4000] = "";
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    char *slash = n > 0 ? strrchr(self, '/') : NULL;
    snprintf(path, sizeof path, "%.*s/libfake_cublaslt.so", (int)(slash - self), self);
    if (access(path, R_OK) != 0)
        return false;
    c.k = c.k ? c.k : K;
    memset(of, 0, sizeof *of);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        setenv("KNAP_TUNE", tune ? "1" : "0", 1);
        setenv("FAKE_ALGORITHMS", algorithms, 1);
        fake_begin();
        kn_cublaslt_library.soname = path;
        kn_providers_only("cublaslt,cuda");
        compute(&c);
        _exit(0);
    }
    int status = -1;
    KN_CHECK(waitpid(child, &status, 0) == child && status == 0, "status %d", status);
    read_calls();
    return true;
}

#define PROCESS(...)                                                                               \
    do {                                                                                           \
        if (!process(__VA_ARGS__))                                                                 \
            KN_SKIP("libfake_cublaslt.so is not built");                                           \
        KN_CHECK(of->ok && !*of->error, "%s", of->error);                                          \
    } while (0)

static int count(const char *word)
{
    int n = 0;
    for (const char *at = of->calls; (at = strstr(at, word)); at++)
        n++;
    return n;
}

/* Is *of the product in the order of this algorithm's terms? Nothing else of d has changed. */
static bool computed_by(int algorithm, call c)
{
    float want[NUMBERS];
    int k = c.k ? c.k : K;
    for (int i = 0; i < NUMBERS; i++)
        want[i] = value(i, 1);
    for (int times = 0; times <= c.twice; times++)
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) {
                float sum = 0;
                for (int l = 0; l < k; l++) {
                    int at = (l + algorithm) % k;
                    sum += value(at * N + j, 0) * value(c.shifted + i * k + at, 1);
                }
                want[i * ROW + j] = c.add ? sum + want[i * ROW + j] : sum;
            }
    return memcmp(want, of->d, sizeof want) == 0;
}

static const call plain;

/* ---- timing and keeping ---------------------------------------------------------------------- */

KN_TEST(cuda_tuned, the_fastest_is_kept_for_later_processes)
{
    begin();
    PROCESS(false, "5 3 2 4", plain);
    KN_CHECK(computed_by(0, plain) && count("heuristic 1") == 1 && count("run") == 1);
    KN_CHECK(strstr(of->tells, "chosen by heuristics, none was timed before"), "%s", of->tells);
    PROCESS(true, "5 3 2 4", plain);
    KN_CHECK(computed_by(2, plain) && !computed_by(0, plain), "%s", of->calls);
    KN_CHECK(count("run 0") == 8 && count("run 1") == 8 && count("run 2") == 9 &&
             count("run 3") == 8);
    KN_CHECK(strstr(of->tells, "timed when first met, 1 so far: "), "%s", of->tells);
    PROCESS(false, "5 3 2 4", plain);
    KN_CHECK(computed_by(2, plain) && strcmp(of->calls, "check 2\nrun 2\n") == 0, "%s", of->calls);
    KN_CHECK(of->waits == 0 && strstr(of->tells, "1 timed before: "), "%s", of->tells);
    PROCESS(true, "5 3 2 4", plain);
    KN_CHECK(strcmp(of->calls, "check 2\nrun 2\n") == 0, "it is known: %s", of->calls);
    setenv("KNAP_TUNED", "none", 1);
    PROCESS(false, "5 3 2 4", plain);
    KN_CHECK(computed_by(0, plain));
    end();
}

/* One in a hundred is noise: the bits stay. */
KN_TEST(cuda_tuned, the_first_stays_where_no_other_is_faster)
{
    begin();
    PROCESS(true, "4 3.97 5", plain);
    KN_CHECK(computed_by(0, plain));
    PROCESS(false, "4 3.97 5", plain);
    KN_CHECK(strcmp(of->calls, "check 0\nrun 0\n") == 0, "%s", of->calls);
    end();
}

KN_TEST(cuda_tuned, what_does_not_run_is_not_chosen)
{
    begin();
    PROCESS(true, "6 -1 -2 4 -2", plain);
    KN_CHECK(computed_by(3, plain) && count("run 1") == 0 && count("run 2") == 1, "%s", of->calls);
    end();
}

/* What is added to is added to once, and in the same bits later. */
KN_TEST(cuda_tuned, sums_are_added_once)
{
    const call add = { .add = true }, twice = { .add = true, .twice = true };
    begin();
    PROCESS(true, "6 5 4", add);
    KN_CHECK(computed_by(2, add));
    PROCESS(false, "6 5 4", add);
    KN_CHECK(computed_by(2, add));
    unlink(file);
    PROCESS(true, "6 5 4", twice);
    KN_CHECK(computed_by(2, twice) && count("heuristic") == 2, "timed once: %s", of->calls);
    end();
}

/* While a step is recorded nothing is timed, and nothing is kept. */
KN_TEST(cuda_tuned, recorded_launches_are_not_timed)
{
    begin();
    PROCESS(true, "6 5 4", ((call){ .recorded = true, .twice = true }));
    KN_CHECK(count("run 0") == 2 && count("heuristic 1") == 1 && count("\n") == 3, "%s", of->calls);
    struct stat st;
    KN_CHECK(stat(file, &st) == 0 && st.st_size == 0);
    end();
}

/* ---- of another product, GPU, library -------------------------------------------------------- */

KN_TEST(cuda_tuned, choices_are_for_one_product_on_one_machine)
{
    begin();
    PROCESS(true, "6 5 4", plain);
    PROCESS(false, "6 5 4", ((call){ .k = K - 1 }));
    KN_CHECK(computed_by(0, ((call){ .k = K - 1 })) && count("check") == 0);
    PROCESS(false, "6 5 4", ((call){ .shifted = true }));
    KN_CHECK(computed_by(0, ((call){ .shifted = true })) && count("check") == 0);
    setenv("FAKE_VERSION", "130101", 1);
    PROCESS(false, "6 5 4", plain);
    KN_CHECK(computed_by(0, plain) && count("check") == 0);
    unsetenv("FAKE_VERSION");
    setenv("KNAP_CUDA_SM_TARGET", "100", 1);
    PROCESS(false, "6 5 4", plain);
    KN_CHECK(computed_by(0, plain) && count("check") == 0);
    unsetenv("KNAP_CUDA_SM_TARGET");
    fake.name = "Another GPU";
    PROCESS(false, "6 5 4", plain);
    KN_CHECK(computed_by(0, plain) && count("check") == 0);
    fake.name = "Pretended GPU";
    PROCESS(false, "6 5 4", plain);
    KN_CHECK(computed_by(2, plain));
    end();
}

/* Its library has the last word, and a run that times then times again. */
KN_TEST(cuda_tuned, refused_choices_are_made_again)
{
    begin();
    PROCESS(true, "6 5 4", plain);
    setenv("FAKE_REFUSES", "1", 1);
    PROCESS(false, "6 5 4", plain);
    KN_CHECK(computed_by(0, plain) && count("check 2") == 1 && count("heuristic 1") == 1);
    unsetenv("FAKE_REFUSES");
    PROCESS(true, "6 5", plain);
    KN_CHECK(computed_by(1, plain) && count("heuristic") == 2, "%s", of->calls);
    PROCESS(false, "6 5 4", plain);
    KN_CHECK(computed_by(1, plain), "the last one counts");
    end();
}

/* Nothing sums up in an order that varies, neither of the file (the library takes it) nor of the
 * heuristics (which ought to leave it out). */
KN_TEST(cuda_tuned, sums_in_any_order_are_never_chosen)
{
    begin();
    PROCESS(true, "6 5 4", plain);
    const struct {
        const char *schemes;
        int algorithm;
    } list[] = { { "0 0 0", 2 }, { "0 0 1", 0 }, { "0 0 2", 2 }, { "0 0 3", 0 },
                 { "0 0 4", 2 }, { "0 0 8", 0 }, { "1 1 0", 2 } };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        setenv("FAKE_SCHEMES", list[i].schemes, 1);
        PROCESS(false, "6 5 4", plain);
        KN_CHECK(computed_by(list[i].algorithm, plain), "%s: %s", list[i].schemes, of->calls);
    }
    unlink(file);
    setenv("FAKE_SCHEMES", "0 0 1", 1);
    PROCESS(true, "6 5 4", plain);
    KN_CHECK(computed_by(1, plain) && count("run 2") == 0, "%s", of->calls);
    unsetenv("FAKE_SCHEMES");
    end();
}

/* Not a word of the file reaches cuBLASLt but an algorithm whose line is whole. */
KN_TEST(cuda_tuned, values_are_read_strictly)
{
    char value[KN_CHOICE_KEY], bad[KN_CHOICE_KEY];
    kn_tuned t = { .first_us = 40.1, .best_us = 38 }, again;
    for (int i = 0; i < 64; i++)
        t.algorithm[i] = (unsigned char)(i * 37 + 5);
    kn_tuned_write(&t, value);
    KN_CHECK(kn_tuned_read(value, &again) && memcmp(&t, &again, sizeof t) == 0, "%s", value);
    for (size_t n = 0; n < strlen(value); n++) {
        snprintf(bad, sizeof bad, "%.*s", (int)n, value);
        KN_CHECK(!kn_tuned_read(bad, &again), "%s", bad);
        for (const char *c = " -+.,xG0\n\"\177"; *c; c++) {
            strcpy(bad, value);
            bad[n] = *c;
            bool same = bad[n] == value[n] || (*c == '0' && n >= 10); /* another number */
            KN_CHECK(same || !kn_tuned_read(bad, &again), "%s", bad);
        }
    }
    t = (kn_tuned){ .parts = true, .first_us = 1e6 };
    kn_tuned_write(&t, value);
    KN_CHECK(strcmp(value, "parts, first 1000000.0 us, best 0.0 us") == 0);
    KN_CHECK(kn_tuned_read(value, &again) && again.parts);
    const char *never[] = { "",
                            "parts",
                            "parts, first nan us, best 1.0 us",
                            "algorithm",
                            "parts, first 1.0 us, best inf us",
                            "parts, first -1.0 us, best 1.0 us",
                            "parts, first 1.0 us, best 1.0 us ",
                            "parts, first 1e3 us, best 1.0 us" };
    for (size_t i = 0; i < sizeof never / sizeof *never; i++)
        KN_CHECK(!kn_tuned_read(never[i], &again), "%s", never[i]);
}

/* ---- where the file can't be written --------------------------------------------------------- */

KN_TEST(cuda_tuned, without_a_place_to_write_one_sentence_says_so)
{
    begin();
    char none[200];
    snprintf(none, sizeof none, "%s/none/tuned", folder);
    setenv("KNAP_TUNED", none, 1);
    PROCESS(true, "6 5 4", plain);
    KN_CHECK(computed_by(2, plain) &&
                 strstr(of->tells, "/none/tuned can't be written: No such file"),
             "%s", of->tells);
    setenv("KNAP_TUNED", folder, 1);
    PROCESS(true, "6 5 4", plain);
    KN_CHECK(computed_by(2, plain) && strstr(of->tells, "isn't used: it is no file"), "%s",
             of->tells);
    end();
}

/* A line that says "parts": another provider takes the product. */
KN_TEST(cuda_tuned, parts_decline)
{
    begin();
    PROCESS(true, "6 5 4", plain);
    char line[1500], key[KN_CHOICE_KEY];
    FILE *f = fopen(file, "r");
    KN_CHECK(f && fgets(line, sizeof line, f) && fgets(line, sizeof line, f) && fclose(f) == 0);
    char *equals = strstr(line, " = ");
    KN_CHECK(equals && equals - line - 17 < KN_CHOICE_KEY, "%s", line);
    snprintf(key, sizeof key, "%.*s", (int)(equals - line - 17), line + 17);
    kn_choices_forget();
    kn_choice_keep(key, "parts, first 2.0 us, best 1.0 us");
    PROCESS(false, "6 5 4", plain);
    KN_CHECK(!*of->calls, "%s", of->calls);
    end();
}
