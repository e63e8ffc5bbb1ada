/* tests/fuzz/choices_fuzz.c: the file of choices (kernels/choices.h), and what is read from its
 * values. */
#include "tests/fuzz/fuzz.h"
#include "kernels/choices.h"
#ifdef KN_HAVE_CUDA
#include "kernels/cuda/cublaslt/tuned.h"
#endif

static void read_value(const char *value)
{
    for (const char *c = value; *c; c++)
        FUZZ_CHECK(*c >= 0x20 && *c < 0x7f, "byte %d", *c);
#ifdef KN_HAVE_CUDA
    kn_tuned t;
    FUZZ_CHECK(!kn_tuned_read(value, &t) || (t.first_us >= 0 && t.best_us >= 0));
#endif
}

/* A whole file; then its first line, "key = value" behind a sum, as a line that was kept: no input
 * has the sums of lines that it changes. */
KN_FUZZ(choices, .factor = 8, .extra = 1 << 20)
{
    fuzz_input rest = { data, size };
    char value[KN_CHOICE_KEY], key[2 * KN_CHOICE_KEY], text[5000];
    setenv("KNAP_TUNED", fuzz_file("tuned", data, size), 1);
    setenv("KNAP_TUNE", size % 2 ? "1" : "0", 1);
    kn_choices_forget();
    int64_t lines = kn_choices_of("");
    FUZZ_CHECK(lines <= (int64_t)size && (lines > 0) == (kn_choices_hash() != 0));
    if (kn_choice_find("gpu, m 1", value))
        read_value(value);
    fuzz_word(&rest, '\n', key, sizeof key);
    char *equals = strstr(key, " = ");
    if (equals && equals - key >= 17) {
        *equals = 0;
        kn_choice_keep(key + 17, equals + 3);
        if (kn_choice_find(key + 17, value)) {
            FUZZ_CHECK(strcmp(value, equals + 3) == 0 || lines > 0, "%s", value);
            read_value(value);
        }
    }
    kn_choices_tell(text, sizeof text);
    kn_choices_forget();
}
