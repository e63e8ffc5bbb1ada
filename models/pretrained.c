/* models/pretrained.c: image models in folders and files that others read and write. */
#include "data/data.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/pretrained_internal.h"
#include "state/checkpoint_internal.h"
#include "tensor/checksum.h"
#include "tensor/whole_file.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char MODEL[] = "model.safetensors", CONFIG[] = "config.json",
                  CONFIG_NEW[] = "config.json.new";

/* ---- saving ---------------------------------------------------------------------------------- */

static bool is_there(const char *dir, const char *name)
{
    return kn_is_there(kn_path_of(dir, name, "").text);
}

/* Is dir/name the configuration of an export? */
static bool is_own(const char *dir, const char *name)
{
    json_t *j =
        is_there(dir, name) ? kn_pretrained_config_read(kn_path_of(dir, name, "").text) : NULL;
    const bool own = json_object_get(j, "knap") != NULL;
    json_decref(j);
    if (!kn_error_number()) /* else it can't be read just now */
        kn_clear_error();
    return own;
}

bool kn_pretrained_may_save(const char *dir)
{
    int failed, tries = 0;
    if (!kn_ok() || !kn_folder_outside(dir))
        return false;
    if (KN_AGAIN(mkdir(dir, 0777)) != 0 && errno != EEXIST)
        return kn_fail_system("cannot make the folder %s: %m", dir);
    while ((failed = access(dir, W_OK | X_OK)) != 0 && kn_try_again(&tries, false))
        ;
    if (failed)
        return kn_fail_system("cannot write into %s: %m; choose another folder", dir);
    if (kn_run_folder_has_checkpoint(dir))
        return kn_fail("%s holds the checkpoint of a run; export into another folder", dir);
    if (is_own(dir, is_there(dir, CONFIG) ? CONFIG : CONFIG_NEW))
        return true;
    const char *other = is_there(dir, CONFIG) ? CONFIG : is_there(dir, MODEL) ? MODEL : NULL;
    return kn_ok() &&
           (!other ||
            kn_fail("%s holds a %s that Knap didn't export; choose another folder", dir, other));
}

/* dir/name.new becomes dir/name. */
static bool rename_new(const char *dir, const char *name)
{
    const kn_path from = kn_path_of(dir, name, ".new"), to = kn_path_of(dir, name, "");
    return KN_AGAIN(rename(from.text, to.text)) == 0 ||
           kn_fail_system("cannot rename %s: %m", from.text);
}

static void remove_new(const char *dir, const char *name)
{
    (void)KN_AGAIN(unlink(kn_path_of(dir, name, ".new").text));
}

/* A reader never finds a model with the configuration of another: the old one goes first, the new
 * one comes last. What lies between is no model for anyone, and config.json.new tells the next
 * export that it may replace it. */
static bool remove_config(const char *dir)
{
    const kn_path path = kn_path_of(dir, CONFIG, "");
    return KN_AGAIN(unlink(path.text)) == 0 || errno == ENOENT ||
           kn_fail_system("cannot remove %s: %m", path.text);
}

static bool rename_both(const char *dir)
{
    return kn_sync_folder(dir) && rename_new(dir, MODEL) && kn_sync_folder(dir) &&
           rename_new(dir, CONFIG) && kn_sync_folder(dir);
}

static bool write_config(const char *dir, const char *text)
{
    return text &&
           kn_file_write(kn_path_of(dir, CONFIG_NEW, "").text, (const void *const[]){ text, "\n" },
                         (const size_t[]){ strlen(text), 1 }, 2);
}

static bool save_both(const char *dir, void *module, const kn_model_tensors *t, const char *config,
                      const kn_pretrained_save_options *o)
{
    const bool first = kn_rank(o->comm) == 0;
    bool ok =
        kn_model_write(t, module, o->ema, o->comm, o->dtype, kn_path_of(dir, MODEL, ".new").text);
    const bool begun = ok && first && write_config(dir, config) && remove_config(dir);
    ok = ok && (!first || (begun && rename_both(dir)));
    if (!ok && first)
        remove_new(dir, MODEL);
    if (!begun && first)
        remove_new(dir, CONFIG);
    return ok;
}

static bool save(const char *dir, void *module, const kn_model_config *c, const char *config,
                 const kn_model_file *file, const kn_pretrained_save_options *o)
{
    kn_model_tensors t = { 0 };
    bool ok =
        kn_model_tensors_make(&t, module) && kn_model_is(&t, c, "the configuration gives") &&
        (!c->family->export_more || c->family->export_more(&t, c->of)) &&
        (file ? file->save(file, dir, module, &t, o->comm) : save_both(dir, module, &t, config, o));
    kn_model_tensors_free(&t);
    return ok;
}

bool kn_model_save(const char *dir, void *module, const kn_model_config *c, const char *config,
                   const kn_model_file *file, const char *caller, kn_pretrained_save_options o)
{
    o.comm = o.comm ? o.comm : kn_world();
    o.dtype = o.dtype ? o.dtype : KN_F32;
    if (o.dtype != KN_F32 && o.dtype != KN_BF16 && o.dtype != KN_F16 && o.dtype != KN_F64)
        kn_fail("%s: .dtype is %s, should be f32, bf16, f16 or f64", caller,
                kn_dtype_name(o.dtype));
    else if (o.ema && kn_ema_module(o.ema) != (kn_module *)module)
        kn_fail("%s: .ema was made for another module", caller);
    else if (kn_rank(o.comm) == 0 && kn_pretrained_may_save(dir) && file)
        file->may_save(file, dir);
    if (!kn_agree(o.comm, kn_ok()))
        return false;
    kn_comm_suspend_timeout(o.comm); /* while rank 0 writes */
    bool ok = kn_agree(o.comm, save(dir, module, c, config, file, &o));
    kn_comm_resume_timeout(o.comm);
    return ok;
}

bool kn_vision_save(const char *dir, void *module, const kn_model_config *c,
                    const kn_vision_input *in, kn_pretrained_save_options o)
{
    char *text = kn_pretrained_config_text(c, in);
    bool ok = kn_model_save(dir, module, c, text, NULL, "kn_pretrained_save", o);
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
    kn_model_config c = { 0 };
    kn_vision_input in = { 0 };
    if (!kn_given_path(dir, "kn_pretrained_save", "the folder") ||
        !kn_given(module, "kn_pretrained_save", "the module"))
        return false;
    if (!o.resnet == !o.vit)
        return kn_fail("kn_pretrained_save: give one of .resnet and .vit, the module's sizes");
    c.family = o.resnet ? &kn_resnet_family : &kn_vit_family;
    memcpy(c.of, o.resnet ? (const void *)o.resnet : o.vit, c.family->size);
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
    const kn_path config = kn_path_of(dir, CONFIG, "");
    struct stat before, now;
    if (kn_look(config.text, &before) < 0)
        return false;
    json_t *j = kn_pretrained_config_read(config.text);
    bool ok =
        j && open_tensors(p, kn_path_of(dir, MODEL, "").text) &&
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
    if (!is_there(dir, MODEL))
        kn_fail("%s holds no model: there is neither a state.json nor a %s%s", dir, MODEL,
                is_there(dir, "pytorch_model.bin")
                    ? "; write its pytorch_model.bin again by safetensors.torch.save_file"
                    : "");
    else if (is_there(dir, CONFIG))
        return FOLDER;
    else if (is_there(dir, CONFIG_NEW))
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
           : is == BARE_TENSORS ? open_file(p, kn_path_of(path, MODEL, "").text, model)
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
    return kn_given(p, function, "the model") && p->config.family == f ? p->config.of : NULL;
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
    if (!kn_agree(p->comm, kn_ok()))
        return false;
    kn_comm_suspend_timeout(p->comm); /* a rank may read from a slower disk than the others */
    bool ok = kn_model_load(&p->config, module, p->file, p->path, o.new_head, p->comm);
    kn_comm_resume_timeout(p->comm);
    return ok;
}
