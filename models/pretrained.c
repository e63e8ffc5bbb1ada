/* models/pretrained.c: image models in folders and files that others read and write. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/pretrained_internal.h"
#include "state/checkpoint_internal.h"
#include "tensor/checksum.h"
#include "tensor/files.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* ---- saving ---------------------------------------------------------------------------------- */

bool kn_vision_save(const char *dir, void *module, const kn_model_config *c,
                    const kn_vision_input *in, kn_pretrained_save_options o)
{
    char *text = kn_pretrained_config_text(c, in);
    const kn_model_saving how = { "kn_pretrained_save", text, NULL, o.comm, o.ema, o.dtype };
    const bool ok = kn_model_save(dir, module, c, how);
    kn_host_free(text);
    return ok;
}

/* The images that the options describe; in->label is the caller's to free. */
static bool input_of(const kn_pretrained_save_options *o, const kn_model_config *c,
                     kn_vision_input *in)
{
    bool given = false;
    for (int i = 0; i < 3; i++)
        given |= o->mean[i] != 0 || o->std[i] != 0;
    *in = kn_vision_input_of(c);
    const int64_t side = in->side;
    in->side = 224;
    kn_vision_input_guess(in, false); /* ImageNet's */
    in->side = o->side ? o->side : side;
    in->crop_pct = o->crop_pct == 0 ? 1 : o->crop_pct;
    in->bicubic = o->bicubic;
    if (given) {
        memcpy(in->mean, o->mean, sizeof in->mean);
        memcpy(in->std, o->std, sizeof in->std);
    }
    if (!kn_vision_input_check(in, c, "kn_pretrained_save"))
        return false;
    in->label = o->labels ? kn_host_calloc((size_t)in->classes, sizeof *in->label) : NULL;
    for (int64_t i = 0; in->label && i < in->classes; i++)
        kn_vision_label(in->label[i], o->labels[i] ? o->labels[i] : "");
    return !o->labels || in->label;
}

bool kn_pretrained_save_(const char *dir, void *module, kn_pretrained_save_options o)
{
    kn_vision_input in = { 0 };
    if (!kn_given_path(dir, "kn_pretrained_save", "the folder") ||
        !kn_given(module, "kn_pretrained_save", "the module"))
        return false;
    if (!o.resnet == !o.vit)
        return kn_fail("kn_pretrained_save: give one of .resnet and .vit, the module's sizes");
    kn_model_config c =
        o.resnet ? kn_config_of(&kn_resnet_family, o.resnet) : kn_config_of(&kn_vit_family, o.vit);
    bool ok = kn_family_check(c.family, c.of) && input_of(&o, &c, &in) &&
              kn_vision_save(dir, module, &c, &in, o);
    kn_host_free(in.label);
    return ok;
}

/* ---- opening --------------------------------------------------------------------------------- */

struct kn_pretrained {
    char path[sizeof(kn_path)]; /* of the tensors, for errors */
    kn_comm *comm;              /* borrowed */
    kn_checkpoint *checkpoint;  /* NULL: none */
    kn_pieces *own, *file;      /* file: own, or the checkpoint's */
    kn_model_config config;
    kn_vision_input input;
};

static bool open_checkpoint(kn_pretrained *p, const char *dir, const char *model)
{
    p->checkpoint = kn_checkpoint_open(dir, p->comm);
    if (!p->checkpoint || !kn_vision_config_saved(p->checkpoint, &p->config, &p->input))
        return false;
    snprintf(p->path, sizeof p->path, "%s", p->checkpoint->dir);
    p->file = p->checkpoint->part[KN_PART_MODEL];
    const kn_preset *preset = kn_config_preset(&p->config);
    return !model || (preset && strcmp(preset->name, model) == 0) ||
           kn_fail("%s holds a %s, not a %s; leave the name out", dir,
                   preset ? preset->name : p->config.family->type, model);
}

static bool open_tensors(kn_pretrained *p, const char *path)
{
    snprintf(p->path, sizeof p->path, "%s", path);
    p->file = p->own = kn_pieces_open(path);
    return p->own != NULL;
}

static bool open_file(kn_pretrained *p, const char *path, const char *model)
{
    char choices[KN_CHOICES];
    if (!model)
        return kn_fail("%s: a file of tensors doesn't say which model it is; name it (.model, "
                       "--model): %s",
                       path, kn_family_choices(KN_IMAGE_MODELS, choices));
    return open_tensors(p, path) &&
           kn_pretrained_config_model(NULL, NULL, model, p->file, p->path, &p->config, &p->input);
}

/* An export takes the configuration away before it replaces the tensors. So these belong together
 * if the configuration is still the file that it was before. */
static bool open_folder(kn_pretrained *p, const char *dir, const char *model)
{
    const kn_path config = kn_path_of(dir, KN_CONFIG_FILE, "");
    struct stat before, now;
    if (kn_look(config.text, &before) < 0)
        return false;
    json_t *j = kn_model_json(config.text);
    bool ok =
        j && open_tensors(p, kn_path_of(dir, KN_MODEL_FILE, "").text) &&
        kn_pretrained_config_model(j, config.text, model, p->file, p->path, &p->config, &p->input);
    json_decref(j);
    if (!ok)
        return false;
    const int there = kn_look(config.text, &now);
    return there >= 0 &&
           ((there > 0 && kn_same_file(&before, &now)) ||
            kn_fail("%s: the model was replaced while it was opened; open it again", dir));
}

/* All ranks opened one model: each looks for itself, and an export may come in between. */
static bool same_model(kn_pretrained *p, const char *path)
{
    uint64_t sum = 0, first;
    kn_checksum c;
    char *text = kn_pretrained_config_text(&p->config, &p->input);
    const bool seen = text && kn_pieces_glance(p->file, &sum);
    kn_checksum_begin(&c);
    if (text)
        kn_checksum_add(&c, text, strlen(text));
    first = sum ^= kn_checksum_end(&c);
    kn_host_free(text);
    return kn_agree(p->comm, seen) &&
           kn_hosts_broadcast(p->comm, &first, sizeof first, 0, "the model") &&
           kn_agree(p->comm, first == sum || kn_fail("%s: rank 0 opened another model there than "
                                                     "rank %d; if an export replaced it meanwhile, "
                                                     "open it again",
                                                     path, kn_rank(p->comm)));
}

/* What a path is. */
typedef enum kind {
    NOTHING = 0, /* with an error */
    CHECKPOINT,
    FOLDER,       /* with a configuration */
    BARE_TENSORS, /* a folder with tensors alone */
    TENSORS
} kind;

static kind kind_of_folder(const char *dir)
{
    if (!kn_is_in(dir, KN_MODEL_FILE))
        kn_fail("%s holds no model: there is neither a state.json nor a %s%s", dir, KN_MODEL_FILE,
                kn_is_in(dir, "pytorch_model.bin")
                    ? "; write its pytorch_model.bin again by safetensors.torch.save_file"
                    : "");
    else if (kn_is_in(dir, KN_CONFIG_FILE))
        return FOLDER;
    else if (kn_is_in(dir, KN_CONFIG_FILE ".new"))
        kn_fail("%s: an export into this folder didn't end; export again", dir);
    return kn_ok() ? BARE_TENSORS : NOTHING;
}

static kind kind_of(const char *path)
{
    struct stat st;
    if (kn_run_folder_has_checkpoint(path))
        return CHECKPOINT;
    const int there = kn_ok() ? kn_look(path, &st) : -1;
    if (there == 0)
        kn_fail("cannot open %s: No such file or directory", path);
    return there <= 0 ? NOTHING : S_ISDIR(st.st_mode) ? kind_of_folder(path) : TENSORS;
}

/* Rank 0 says what path is, since a run may change it meanwhile. */
static bool open_any(kn_pretrained *p, const char *path, const char *model)
{
    int32_t is = kn_rank(p->comm) == 0 ? (int32_t)kind_of(path) : 0;
    if (!kn_agree(p->comm, kn_ok()) ||
        !kn_hosts_broadcast(p->comm, &is, sizeof is, 0, "the model's kind"))
        return false;
    return is == CHECKPOINT     ? open_checkpoint(p, path, model)
           : is == FOLDER       ? open_folder(p, path, model)
           : is == BARE_TENSORS ? open_file(p, kn_path_of(path, KN_MODEL_FILE, "").text, model)
                                : open_file(p, path, model);
}

kn_pretrained *kn_pretrained_open_(const char *path, kn_pretrained_open_options o)
{
    if (!kn_given_path(path, "kn_pretrained_open", "the path"))
        return NULL;
    kn_pretrained *p = kn_host_calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->comm = o.comm ? o.comm : kn_world();
    bool ok = kn_agree(p->comm, open_any(p, path, o.model));
    if (ok && (kn_comm_size(p->comm) == 1 || same_model(p, path)))
        return p;
    kn_pretrained_free(p);
    return NULL;
}

void kn_pretrained_free(kn_pretrained *p)
{
    if (!p)
        return;
    kn_pieces_close(p->own);
    kn_checkpoint_free(p->checkpoint);
    kn_host_free(p->input.label);
    kn_host_free(p);
}

/* ---- what is there --------------------------------------------------------------------------- */

static const void *config_if(const kn_pretrained *p, const char *function, const kn_family *f)
{
    return kn_given(p, function, "the model") && kn_family_makes(p->config.family, f) ? p->config.of
                                                                                      : NULL;
}

const kn_resnet_config *kn_pretrained_resnet(const kn_pretrained *p)
{
    return config_if(p, "kn_pretrained_resnet", &kn_resnet_family);
}

const kn_vit_config *kn_pretrained_vit(const kn_pretrained *p)
{
    return config_if(p, "kn_pretrained_vit", &kn_vit_family);
}

kn_augment kn_pretrained_augment(const kn_pretrained *p)
{
    return kn_given(p, "kn_pretrained_augment", "the model") ? kn_vision_augment(&p->input)
                                                             : (kn_augment){ 0 };
}

const char *kn_pretrained_label(const kn_pretrained *p, int64_t c)
{
    if (!kn_given(p, "kn_pretrained_label", "the model"))
        return NULL;
    if (c < 0 || c >= p->input.classes)
        return kn_fail_null("kn_pretrained_label: there is no class %lld; the model has %lld",
                            (long long)c, (long long)p->input.classes);
    return p->input.label ? p->input.label[c] : NULL;
}

const kn_model_config *kn_pretrained_config(const kn_pretrained *p)
{
    return &p->config;
}

const kn_vision_input *kn_pretrained_input(const kn_pretrained *p)
{
    return &p->input;
}

/* ---- loading --------------------------------------------------------------------------------- */

bool kn_pretrained_load_(kn_pretrained *p, void *module, kn_pretrained_load_options o)
{
    if (!kn_given(p, "kn_pretrained_load", "the model") ||
        !kn_given(module, "kn_pretrained_load", "the module"))
        return false;
    if (!kn_hosts_begin_slow(p->comm))
        return false;
    bool ok = kn_model_load(&p->config, module, p->file, p->path, o.new_head, p->comm);
    kn_comm_resume_timeout(p->comm);
    return ok;
}
