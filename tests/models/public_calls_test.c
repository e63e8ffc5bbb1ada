/* tests/models/public_calls_test.c: every public function of every installed header, called with
 * NULL and zeros. It must not crash, with or without an error standing; a new error must name the
 * line of the call and print no "(null)"; a standing error must stay. public_calls.py generates the
 * calls from the headers, so none is missing. Each runs in a child process. */
#undef KN_BUILDING
#include "knap.h"
#include "tests/kn_test.h"
#include "tests/models/owned.h"
#include "tests/models/temp.h"
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct public_call {
    const char *name;
    int (*call)(void); /* returns its line */
    bool placed;       /* has a macro in places.h */
} public_call;

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wnonnull"
#include "public_calls.inc"
#pragma GCC diagnostic pop

enum { COUNT = sizeof calls / sizeof calls[0] };

/* The error, if any, is of this line, or of none where the function has no place. */
static bool names_the_line(const public_call *c, int line)
{
    char want[64];
    const char *error = kn_error(), *at = error ? strstr(error, "public_calls") : NULL;
    snprintf(want, sizeof want, "public_calls.inc:%d", line);
    if (!error || !c->placed)
        return !at;
    return (at && strncmp(at, want, strlen(want)) == 0 && !at[strlen(want)]);
}

/* A message has a word for everything that isn't there. */
static bool has_its_words(void)
{
    const char *error = kn_error();
    return !error || !(strstr(error, "(null)") || strstr(error, "\"\""));
}

static bool tells_its_line(const public_call *c)
{
    kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2)); /* a call on another line, which succeeds */
    const int line = c->call();
    if (names_the_line(c, line) && has_its_words())
        return true;
    fprintf(stderr, "%s: %s\n", c->name, kn_error());
    return false;
}

static bool keeps_the_first_cause(const public_call *c)
{
    kn_fail("the first cause");
    c->call();
    return (kn_error() && strncmp(kn_error(), "the first cause at ", 19) == 0) ||
           strcmp(c->name, "kn_clear_error") == 0 || strcmp(c->name, "kn_finish") == 0;
}

static int in_child(const public_call *c)
{
    int quiet = open("/dev/null", O_RDWR);
    dup2(quiet, 0);
    dup2(quiet, 1);
    alarm(250);
    if (!tells_its_line(c))
        return 2;
    kn_clear_error();
    return keeps_the_first_cause(c) ? 0 : 3;
}

KN_TEST(public_calls, take_nothing_and_tell_their_own_line)
{
    int bad = 0;
    KN_CHECK(COUNT > 700, "%d calls were found in the headers", COUNT);
    fflush(NULL);
    for (int i = 0; i < COUNT; i++) {
        int status = 0;
        pid_t child = fork();
        if (child == 0)
            _exit(in_child(&calls[i]));
        waitpid(child, &status, 0);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
            continue;
        bad++;
        fprintf(stderr, "%s (call %d): %s %d\n", calls[i].name, i,
                WIFSIGNALED(status) ? "signal" : "status",
                WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    }
    KN_CHECK(bad == 0, "%d of %d calls", bad, COUNT);
}

/* ---- nested calls, calls of the user's functions, calls without a macro ---------------------- */

#define FAILS(call)                                                                                \
    do {                                                                                           \
        char want[64];                                                                             \
        (void)(call);                                                                              \
        snprintf(want, sizeof want, "public_calls_test.c:%d", __LINE__);                           \
        KN_CHECK(kn_error() && strstr(kn_error(), want), "%s", want);                              \
        kn_clear_error();                                                                          \
    } while (0)

#define FAILS_FOR_NULL(call)                                                                       \
    do {                                                                                           \
        (void)(call);                                                                              \
        KN_CHECK(kn_error() && strstr(kn_error(), "NULL"), "%s", #call);                           \
        kn_clear_error();                                                                          \
    } while (0)

static int inner_line;
static kn_tensor *failing_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    kn_tensor *y = kn_exp(x);
    inner_line = __LINE__ + 1;
    return kn_matmul(y, y);
}

static kn_tensor *wrong_forward(kn_module *self, kn_tensor *x)
{
    kn_exp(x);
    (void)self;
    return NULL; /* an error of the call, not of the line above */
}

KN_TEST(public_calls, the_place_is_that_of_the_call)
{
    kn_tensor *a = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 3));
    FAILS(kn_add(kn_exp(a), NULL));
    FAILS(kn_matmul(kn_neg(a), kn_exp(kn_neg(a))));
    FAILS(kn_sum(a, 1, (int64_t[]){ 7 }, false));
    kn_module m = { 0 }, w = { 0 };
    kn_linear l = { 0 };
    FAILS(kn_linear_init(&l, NULL, NULL, 0, 3));
    FAILS(kn_adamw(&m, .lr = 1));
    KN_CHECK(kn_module_init(&m, failing_forward) && kn_module_init(&w, wrong_forward));
    FAILS(kn_call(&w, a));
    FAILS(kn_fsdp_wrap(&m, NULL, .max_gathers = -1));
    char want[64];
    KN_CHECK(!kn_call(&m, a));
    snprintf(want, sizeof want, "public_calls_test.c:%d", inner_line);
    KN_CHECK(strstr(kn_error(), want), "%s, not %s", kn_error(), want);
    kn_clear_error();
    KN_CHECK(!(kn_matmul)(a, a) && !strstr(kn_error(), ".c:"), "none: %s", kn_error());
    kn_clear_error();
    kn_module_free(&m);
    kn_module_free(&w);
}

/* One pointer is NULL, the others are valid. */
KN_TEST(public_calls, one_null_beside_valid_arguments)
{
    kn_tensor *t = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 3));
    kn_module m = { 0 };
    kn_tokenizer *chars = kn_tokenizer_create("char", "abc", 3);
    kn_text *text = kn_text_encode(chars, "abcabcabcabcabcabcabcabcabcabc", 30);
    int64_t ids[8] = { 0 };
    char bytes[8];
    kn_module_init(&m, wrong_forward);
    KN_CHECK_OK();
    FAILS_FOR_NULL(kn_print(NULL, t));
    FAILS_FOR_NULL(kn_module_print(NULL, &m));
    FAILS_FOR_NULL(kn_apply_modules(&m, NULL, NULL));
    FAILS_FOR_NULL(kn_safetensors_save(temp_path("null"), NULL, 1, NULL, 0));
    FAILS_FOR_NULL(kn_safetensors_save(temp_path("null"), NULL, 0, NULL, 1));
    FAILS_FOR_NULL(kn_file_write(temp_path("null"), NULL, (size_t[]){ 1 }, 1));
    FAILS_FOR_NULL(kn_file_write(temp_path("null"), (const void *[]){ "a" }, NULL, 1));
    FAILS_FOR_NULL(kn_gpt_preset("gpt2", NULL));
    FAILS_FOR_NULL(kn_llama_preset("llama3-8b", NULL));
    FAILS_FOR_NULL(kn_tokenizer_create("char", NULL, 3));
    FAILS_FOR_NULL(kn_tokenizer_create("byte", NULL, 3));
    FAILS_FOR_NULL(kn_tokenizer_encode(chars, NULL, 3, ids, KN_I64));
    FAILS_FOR_NULL(kn_tokenizer_encode(chars, "abc", 3, NULL, KN_I64));
    FAILS_FOR_NULL(kn_tokenizer_decode(chars, NULL, 3, bytes, sizeof bytes));
    FAILS_FOR_NULL(kn_tokenizer_decode(chars, ids, 3, NULL, sizeof bytes));
    FAILS_FOR_NULL(kn_text_batch(text, KN_TRAIN, 1, 0, 2, 2, NULL, ids));
    FAILS_FOR_NULL(kn_text_batch(text, KN_TRAIN, 1, 0, 2, 2, ids, NULL));
    FAILS_FOR_NULL(kn_text_open(__FILE__, "char", NULL));
    kn_text_free(text), kn_tokenizer_free(chars), kn_module_free(&m);
}

#define FAILS_FOR_EMPTY(call)                                                                      \
    do {                                                                                           \
        (void)(call);                                                                              \
        KN_CHECK(kn_error() && strstr(kn_error(), " is empty"), "%s", #call);                      \
        KN_CHECK(strncmp(kn_error(), #call, strcspn(#call, "(")) == 0, "%s: %s", #call,            \
                 kn_error());                                                                      \
        kn_clear_error();                                                                          \
    } while (0)

/* The error names the function that the program called. */
KN_TEST(public_calls, an_empty_path)
{
    kn_module m = { 0 };
    kn_csv csv;
    kn_images images;
    kn_mapped map;
    kn_tokenizer *chars = kn_tokenizer_create("char", "abc", 3), *made = NULL;
    kn_text *text = kn_text_encode(chars, "abcabcabcabc", 12);
    kn_tensor *t = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1, 1, 2, 3));
    kn_module_init(&m, wrong_forward);
    KN_CHECK_OK();
    FAILS_FOR_EMPTY(kn_checkpoint_save("", &m));
    FAILS_FOR_EMPTY(kn_checkpoint_open("", NULL));
    FAILS_FOR_EMPTY(kn_checkpoint_open_checked("", NULL));
    FAILS_FOR_EMPTY(kn_safetensors_save("", NULL, 0, NULL, 0));
    FAILS_FOR_EMPTY(kn_safetensors_create("", NULL, 0, NULL, 0));
    FAILS_FOR_EMPTY(kn_safetensors_open(""));
    FAILS_FOR_EMPTY(kn_trace_write(""));
    FAILS_FOR_EMPTY(kn_image_save("", t));
    FAILS_FOR_EMPTY(kn_tokenizer_save(chars, ""));
    FAILS_FOR_EMPTY(kn_tokenizer_load(""));
    FAILS_FOR_EMPTY(kn_text_save(text, ""));
    FAILS_FOR_EMPTY(kn_text_open("", "char", &made));
    FAILS_FOR_EMPTY(kn_text_map(""));
    FAILS_FOR_EMPTY(kn_csv_read("", &csv));
    FAILS_FOR_EMPTY(kn_images_read("", "train", &images));
    FAILS_FOR_EMPTY(kn_idx_read(""));
    FAILS_FOR_EMPTY(kn_data_find(""));
    FAILS_FOR_EMPTY(kn_file_map("", "file", &map));
    FAILS_FOR_EMPTY(kn_file_write("", NULL, NULL, 0));
    FAILS_FOR_EMPTY(kn_run_folder_claim(""));
    kn_text_free(text), kn_tokenizer_free(chars), kn_module_free(&m);
}

#define FAILS_BY_NAME(call)                                                                        \
    do {                                                                                           \
        (void)(call);                                                                              \
        KN_CHECK(kn_error() && strncmp(kn_error(), #call, strcspn(#call, "(")) == 0, "%s", #call); \
        kn_clear_error();                                                                          \
    } while (0)

KN_TEST(public_calls, functions_that_share_code_tell_their_own_name)
{
    kn_linear l = { 0 };
    float room[8] = { 0 };
    KN_CHECK(kn_linear_init(&l, NULL, NULL, 2, 2) && kn_materialize(&l, KN_CPU, 1));
    kn_tensor *wrong = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(7));
    FAILS_BY_NAME(kn_param_read(&l, 9, room));
    FAILS_BY_NAME(kn_param_read(&l, 0, NULL));
    FAILS_BY_NAME(kn_param_write(&l, -1, room));
    FAILS_BY_NAME(kn_param_write(&l, 0, NULL));
    FAILS_BY_NAME(kn_shard_read(&l, 9, wrong, room));
    FAILS_BY_NAME(kn_shard_read(&l, 0, wrong, room));
    FAILS_BY_NAME(kn_shard_write(&l, 9, wrong, room));
    FAILS_BY_NAME(kn_shard_write(&l, 0, wrong, room));
    kn_module_free(&l);
    REFUSED(kn_zeros(0, (kn_device)99, KN_SHAPE(2)),
            "no device has the number 99; supported: cpu, meta, cuda");
    KN_CHECK(kn_zeros(0, 0, KN_SHAPE(2)), "f32 on the CPU: %s", kn_error());
}

/* ---- literals of a call ---------------------------------------------------------------------- */

static void count_one(kn_tensor *t, void *arg)
{
    (void)t;
    ++*(int *)arg;
}

/* A function may keep a pointer to a literal of its caller: that lasts as long as the block of the
 * call. */
KN_TEST(public_calls, literals_that_are_kept_last)
{
    struct fields {
        int64_t steps;
    } *fields = NULL;
    kn_tensor *t = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(2)), true);
    int *times = NULL;
    kn_on_accumulated(t, count_one, times = &(int){ 0 });
    OWNED_OPTIONS kn_options *o = kn_options_create(
        (kn_option[]){ { "steps", KN_OPTION_INT, offsetof(struct fields, steps), "7", "how many" },
                       { 0 } },
        fields = &(struct fields){ 0 });
    kn_array a = kn_array_make((float[]){ 3, 4 }, KN_F32, 1, (int64_t[]){ 2 });
    KN_CHECK_OK();
    kn_backward(kn_sum(t, 0, NULL, false));
    KN_CHECK(kn_options_set(o, "steps", "8") && fields->steps == 8);
    KN_CHECK(*times == 1 && ((float *)a.data)[1] == 4);
}
