/* tests/fuzz/checkpoint_fuzz.c: a checkpoint's state.json beside files of tensors that are sound:
 * opening, options, configurations, loading. */
#include "tests/fuzz/fuzz.h"
#include "models/record.h"
#include "models/family.h"
#include "models/programs/gpt_settings.h"
#include "models/vision.h"
#include "nn/layers.h"
#include "state/pieces.h"
#include "tensor/checksum.h"

/* A file of a part, of tensors of [2, 2] and [2] by turns; what state.json says of it. */
static void make_file(const char *part, const char *const *name, int count, char *told, size_t room)
{
    static const float zeros[4];
    char path[400];
    kn_piece piece[4];
    for (int i = 0; i < count; i++)
        piece[i] = i % 2 ? (kn_piece){ name[i], KN_F32, 1, { 2 }, { 0, 2, 1, 2, 0 } }
                         : (kn_piece){ name[i], KN_F32, 2, { 2, 2 }, { 0, 4, 1, 4, 0 } };
    snprintf(path, sizeof path, "%s/x", part);
    fuzz_file(path, "", 0); /* makes the folder */
    snprintf(path, sizeof path, "%s/%s", fuzz_folder(), part);
    kn_pieces_writer *w = kn_pieces_create(path, 0, "f", NULL, piece, count);
    for (int i = 0; i < count; i++)
        FUZZ_CHECK(w && kn_pieces_append(w, zeros, i % 2 ? 8 : 16), "%s", kn_error());
    FUZZ_CHECK(kn_pieces_commit(w), "%s", kn_error());
    kn_pieces *p = kn_pieces_open(path);
    FUZZ_CHECK(p && kn_pieces_files(p) == 1, "%s", kn_error());
    const kn_piece_file *file = kn_pieces_file(p, 0);
    snprintf(told, room, "{\"name\": \"%s/%s\", \"bytes\": %lld, \"checksum\": \"%016llx\"}", part,
             file->name, (long long)file->bytes, (unsigned long long)file->checksum);
    kn_pieces_close(p);
}

/* A linear layer's tensors, AdamW's state and a tokenizer; the members of state.json that say so
 * come into text[room]. */
static void write_files(char *text, size_t room)
{
    static const char *const model[] = { "weight", "bias" }, *const optim[] = {
        "weight.exp_avg", "bias.exp_avg", "weight.exp_avg_sq", "bias.exp_avg_sq"
    };
    static const char tokenizer[] = "{\"model\": {\"vocab\": {\"a\": 0}, \"merges\": []}}";
    const size_t bytes = sizeof tokenizer - 1;
    char of_model[200], of_optim[200];
    make_file("model", model, 2, of_model, sizeof of_model);
    make_file("optimizer", optim, 4, of_optim, sizeof of_optim);
    fuzz_file("tokenizer.json", tokenizer, bytes);
    snprintf(text, room,
             "{\"version\": 3, \"id\": \"f\", \"number\": 1, \"files\": [%s, %s], \"own_files\": "
             "[{\"name\": \"tokenizer.json\", \"bytes\": %zu, \"checksum\": \"%016llx\"}], ",
             of_model, of_optim, bytes, (unsigned long long)kn_checksum_of(tokenizer, bytes));
}

/* The members of state.json that write_files doesn't give, up to the last brace, or with the first
 * brace all of them; under a checksum that fits. */
static void write_state(const uint8_t *data, size_t size)
{
    static const char sum[] = ",\n \"checksum\": \"";
    char sound[1200];
    write_files(sound, sizeof sound);
    while (size > 0 && data[size - 1] != '}')
        size--;
    size -= size > 0;
    const size_t before = size > 0 && *data == '{' ? 0 : strlen(sound), room = before + size + 64;
    char *text = malloc(room);
    FUZZ_CHECK(text);
    memcpy(text, sound, before);
    if (size > 0)
        memcpy(text + before, data, size);
    size += before;
    memcpy(text + size, sum, sizeof sum);
    size += sizeof sum - 1;
    size += (size_t)snprintf(text + size, room - size, "%016llx\"\n}\n",
                             (unsigned long long)kn_checksum_of(text, size));
    fuzz_file("state.json", text, size);
    free(text);
}

/* Objects of each rank. */
static void read_own(const kn_checkpoint *c)
{
    for (int r = 0; r < 3 && r < kn_checkpoint_own_ranks(c); r++) {
        kn_state *s = kn_checkpoint_own(c, r);
        kn_clear_error();
        if (s)
            kn_state_get(s, .random = true);
        kn_clear_error();
        kn_state_free(s);
    }
}

static void load(const kn_checkpoint *c)
{
    kn_linear l = { 0 };
    kn_optim *o = NULL;
    kn_scaler *scaler = NULL;
    if (kn_linear_init(&l, NULL, "", 2, 2) && (o = kn_adamw(&l, .lr = 1)) &&
        (scaler = kn_scaler_new(&l)))
        kn_checkpoint_load(c, &l, .optim = o, .scaler = scaler);
    kn_clear_error();
    const kn_named_optim gen = { "gen", o };
    if (o)
        kn_checkpoint_load(c, &l, .optims = &gen, .optim_count = 1, .not_strict = true);
    kn_clear_error();
    kn_checkpoint_load(c, &l);
    kn_clear_error();
    kn_scaler_free(scaler);
    kn_optim_free(o);
    kn_module_free(&l);
}

KN_FUZZ(checkpoint, .factor = 800, .extra = 4 << 20)
{
    write_state(data, size);
    kn_checkpoint *c = kn_checkpoint_open(fuzz_folder(), NULL);
    if (c) {
        gpt_settings s = { 0 };
        kn_options *o = gpt_settings_begin(&s.run) ? kn_options_create(s.run.table, &s) : NULL;
        kn_model_config language, vision;
        kn_vision_input in = { 0 };
        FUZZ_CHECK(o, "%s", kn_error());
        kn_checkpoint_options(c, o);
        kn_clear_error();
        kn_config_saved(c, KN_LANGUAGE_MODELS, &language, NULL);
        kn_clear_error();
        kn_vision_config_saved(c, &vision, &in);
        kn_host_free(in.label);
        kn_clear_error();
        kn_tokenizer_free(kn_checkpoint_tokenizer(c));
        kn_clear_error();
        load(c);
        read_own(c);
        kn_options_free(o);
    }
    kn_checkpoint_free(c);
}
