/* tests/kernels/choose_test.c: who computes an f32 product of the CPU, oneDNN or the vector overlay
 * (kernels/cpu/choose.c): a choice that was timed, a line of the file. Each case has
 * kinds of products of its own: an answer lasts as long as the process. */
#include "kernels/choices.h"
#include "kernels/device.h"
#include "kernels/kernels.h"
#include "kernels/memory.h"
#include "kernels/trace.h"
#include "tests/kn_test.h"

#include <sys/stat.h>

static char folder[64], path[96];

static void begin(bool tuning)
{
    strcpy(folder, "/tmp/knap-choose-XXXXXX");
    KN_CHECK(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/tuned.txt", folder);
    setenv("KNAP_TUNED", path, 1);
    setenv("KNAP_TUNE", tuning ? "1" : "0", 1);
    kn_choices_forget();
}

static void end(void)
{
    setenv("KNAP_TUNE", "0", 1);
    setenv("KNAP_TUNED", "none", 1);
    kn_choices_forget();
    unlink(path);
    KN_CHECK(rmdir(folder) == 0);
    KN_CHECK_OK();
}

static bool has_onednn(void)
{
    const kn_provider *list[KN_MAX_PROVIDERS];
    const int n = kn_providers(KN_CPU, list);
    return n == 3;
}

/* A line of the file without its checksum; NULL: there is none. */
static const char *line_of_file(int number)
{
    static char line[2 * KN_CHOICE_KEY];
    FILE *f = fopen(path, "r");
    bool there = f != NULL;
    while (there && number >= 0 && (there = fgets(line, sizeof line, f) != NULL))
        number -= *line != '\n';
    if (f)
        fclose(f);
    line[strcspn(line, "\n")] = 0;
    return there ? line + 17 : NULL;
}

typedef struct product {
    int64_t batch, M, N, K;
    bool a_columns, b_columns, add, bias, gaps; /* gaps: between a's elements */
} product;

static kn_array matrix(int64_t batch, int64_t rows, int64_t columns, bool by_columns)
{
    kn_array x = kn_array_make(NULL, KN_F32, 3, (int64_t[]){ batch, rows, columns });
    if (by_columns)
        x.stride[1] = 1, x.stride[2] = rows;
    x.data = calloc((size_t)(batch * rows * columns), 4);
    KN_CHECK(x.data != NULL);
    for (int64_t i = 0; i < batch * rows * columns; i++)
        ((float *)x.data)[i] = (float)(i * 7919 % 1000) / 500 - 1;
    return x;
}

/* Runs it; says who computed it, the result is in *dst. */
static const char *provider_of(product p, kn_array *dst)
{
    static char name[16];
    kn_matmul_args x = {
        .dst = matrix(p.batch, p.M, p.N, false),
        .a = matrix(p.batch, p.M, p.K << p.gaps, p.a_columns),
        .b = matrix(p.batch, p.K, p.N, p.b_columns),
        .add = p.add,
    };
    if (p.gaps)
        x.a.shape[2] = p.K, x.a.stride[2] = 2;
    if (p.bias) {
        x.bias = matrix(1, 1, p.N, false);
        x.bias.ndim = 1, x.bias.shape[0] = p.N, x.bias.stride[0] = 1;
    }
    kn_trace_event *events = NULL;
    kn_trace_start(4);
    KN_CHECK(kn_launch(kn_compute_stream(KN_CPU), KN_K_MATMUL, &x, sizeof x));
    KN_CHECK(kn_trace_stop(&events) == 1);
    snprintf(name, sizeof name, "%s", events->provider);
    kn_host_free(events);
    free(x.a.data);
    free(x.b.data);
    free(x.bias.data);
    *dst = x.dst;
    return name;
}

static bool is_by(product p, const char *provider)
{
    kn_array dst;
    const bool is = strcmp(provider_of(p, &dst), provider) == 0;
    free(dst.data);
    return is;
}

/* The product has the bits that it has where `provider` is the only one. */
static bool has_bits_of(product p, const char *provider)
{
    char only[32];
    kn_array found, want;
    snprintf(only, sizeof only, "%s,reference", provider);
    provider_of(p, &found);
    kn_providers_only(only);
    KN_CHECK(is_by(p, provider));
    provider_of(p, &want);
    kn_providers_only(NULL);
    const bool same = memcmp(found.data, want.data, (size_t)(p.M * p.N) * sizeof(float)) == 0;
    free(found.data);
    free(want.data);
    return same;
}

KN_TEST(choose, a_kind_is_timed_once)
{
    if (!has_onednn())
        return;
    begin(true);
    KN_CHECK(strstr(kn_cpu_choices(), "timed when first met, 0 so far: "), "%s", kn_cpu_choices());
    const product p = { 1, 40, 70, 130, .add = true, .bias = true };
    kn_array first, again;
    provider_of(p, &first);
    const char *line = line_of_file(0), *value = line ? strstr(line, " = ") : NULL;
    KN_CHECK(value && strncmp(line, "CPU ", 4) == 0 && strstr(line, kn_cpu_isa()) &&
                 strstr(line, kn_cpu_libraries()) &&
                 strstr(line, ", f32 product, a by rows, b by rows, n from 64, k from 128 = "),
             "%s", line ? line : "no line");
    const char *chosen = strcmp(value, " = oneDNN") == 0 ? "onednn" : kn_cpu_isa();
    KN_CHECK(strcmp(value, " = oneDNN") == 0 || strcmp(value, " = own") == 0, "%s", value);
    KN_CHECK(strcmp(provider_of(p, &again), chosen) == 0 && has_bits_of(p, chosen));
    KN_CHECK(memcmp(first.data, again.data, (size_t)(p.M * p.N) * sizeof(float)) == 0,
             "timing adds nothing to dst");
    free(first.data);
    free(again.data);
    KN_CHECK(is_by((product){ 1, 300, 127, 255 }, chosen), "the same kind");
    KN_CHECK(line_of_file(1) == NULL, "%s", line_of_file(1));
    KN_CHECK(is_by((product){ 1, 40, 63, 130 }, kn_cpu_isa()), "few columns");
    KN_CHECK(is_by((product){ 1, 40, 70, 63 }, kn_cpu_isa()), "short sums");
    KN_CHECK(is_by((product){ 1, 4, 70, 130 }, kn_cpu_isa()), "few rows");
    KN_CHECK(is_by((product){ 2, 40, 70, 130 }, kn_cpu_isa()), "two products");
    KN_CHECK(line_of_file(1) == NULL, "%s", line_of_file(1));
    is_by((product){ 1, 40, 70, 130, .a_columns = true }, "");
    is_by((product){ 1, 40, 70, 130, .b_columns = true }, "");
    is_by((product){ 1, 40, 128, 130 }, "");
    is_by((product){ 1, 40, 70, 256 }, "");
    KN_CHECK(line_of_file(4) && !line_of_file(5), "each is a kind of its own");
    KN_CHECK(strstr(kn_cpu_choices(), "timed when first met, 5 so far: "), "%s", kn_cpu_choices());
    end();
}

KN_TEST(choose, what_onednn_declines_decides_nothing)
{
    if (!has_onednn())
        return;
    begin(true);
    const product p = { 1, 40, 70, 520 };
    const product declined = { 1, 40, 70, 520, .gaps = true };
    KN_CHECK(is_by(declined, kn_cpu_isa()) && line_of_file(0) == NULL, "%s", line_of_file(0));
    is_by(p, "");
    is_by((product){ 1, 40, 70, 520, .a_columns = true }, "");
    KN_CHECK(line_of_file(1) && !line_of_file(2), "both are timed");
    KN_CHECK(is_by(declined, kn_cpu_isa()) && line_of_file(2) == NULL);
    end();
}

/* How a key of the file begins: of the line that a run has timed. */
static void key_begins(char begins[KN_CHOICE_KEY])
{
    begin(true);
    is_by((product){ 1, 8, 64, 4096 }, "");
    const char *line = line_of_file(0), *stop = line ? strstr(line, ", n from ") : NULL;
    KN_CHECK(stop != NULL);
    snprintf(begins, KN_CHOICE_KEY, "%.*s", (int)(stop - line), line);
    end();
}

KN_TEST(choose, a_line_decides)
{
    static const struct {
        const char *value;
        int64_t N;
    } list[] = { { "oneDNN", 256 }, { "own", 512 }, { "onednn", 1024 }, { "own ", 2048 } };
    char key[2 * KN_CHOICE_KEY], begins[KN_CHOICE_KEY];
    if (!has_onednn())
        return;
    key_begins(begins);
    begin(false);
    KN_CHECK(kn_cpu_choices() == NULL);
    KN_CHECK(is_by((product){ 1, 33, 4096, 64 }, kn_cpu_isa()), "the overlay is asked first");
    KN_CHECK(access(path, F_OK) != 0, "a run that isn't told to keeps nothing");
    for (int i = 0; i < 4; i++) {
        snprintf(key, sizeof key, "%s, n from %lld, k from 64", begins, (long long)list[i].N);
        kn_choice_keep(key, list[i].value);
    }
    for (int i = 0; i < 4; i++) {
        const char *want = i == 0 ? "onednn" : kn_cpu_isa();
        for (int form = 0; form < 4; form++) {
            const product p = { 1,  33 + form,       list[i].N + form,
                                65, .add = form & 1, .bias = form & 2 };
            KN_CHECK(is_by(p, want) && has_bits_of(p, want), "'%s', form %d", list[i].value, form);
        }
    }
    KN_CHECK(strstr(kn_cpu_choices(), "4 timed before: "), "%s", kn_cpu_choices());
    kn_set_f32_products(KN_PRODUCTS_BF16);
    const char *fast = kn_f32_products(KN_CPU) ? kn_cpu_isa() : "onednn";
    KN_CHECK(is_by((product){ 1, 33, 256, 65 }, fast), "a line is for exact products");
    kn_set_f32_products(KN_PRODUCTS_EXACT);
    kn_providers_only("reference");
    KN_CHECK(is_by((product){ 1, 33, 256, 65 }, "reference"));
    char both[32];
    snprintf(both, sizeof both, "%s,reference", kn_cpu_isa());
    kn_providers_only(both);
    KN_CHECK(is_by((product){ 1, 33, 256, 65 }, kn_cpu_isa()), "whose provider isn't there");
    kn_providers_only(NULL);
    end();
}
