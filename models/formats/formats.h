/* models/formats/formats.h (private): language models in one file each, of other programs and for
 * them. A format is a reader and a writer over the table of a family (models/family.h), which says
 * how parameters and keys are called there. A model of several files is transformers'
 * (models/imported.c, models/exported.c). */
#ifndef KNAP_MODELS_FORMATS_FORMATS_H
#define KNAP_MODELS_FORMATS_FORMATS_H

#include "models/family.h"
#include "models/model_tensors.h"
#include "models/tokenizer.h"

/* What a reader finds. */
typedef struct kn_found {
    kn_model_config config;
    kn_pieces *tensors; /* by the names that the module here gives them; a reference */
    int64_t end[2];     /* ids that end a text */
    int ends;
} kn_found;

/* What a writer writes: a header, then tensors, one behind the other. */
typedef struct kn_file_plan {
    char *header; /* for kn_host_free */
    int64_t size;
    struct kn_planned {
        kn_dtype dtype;
        kn_piece_form form;
        int64_t zeros; /* bytes behind it */
    } * tensor;        /* [count] of the module's tensors, for kn_host_free */
    int *order;        /* [count] their numbers in the file's order; NULL: as the module has them */
} kn_file_plan;

/* A model on its way to a file. */
typedef struct kn_file_writer {
    const struct kn_file_format *format;
    const kn_model_config *config;
    const kn_tokenizer *tokenizer; /* NULL: none */
    int64_t begin;                 /* the id that begins a text; -1: none is known */
    const int64_t *ends;           /* [end_count]: ids that end one */
    int end_count;
    const char *jinja; /* the template of its conversations; NULL: none */
    const kn_ema *ema; /* NULL: the module's own values */
    kn_dtype dtype;    /* of the floats that the format doesn't fix */
} kn_file_writer;

typedef struct kn_file_format {
    const char *name, *file;  /* of --format; in its folder */
    const char *magic, *mark; /* the file's first bytes; what tells that Knap wrote it, */
    int64_t mark_at;          /* and where */
    /* Names and shapes of all tensors are compared before memory is taken by them. */
    bool (*open)(const char *path, kn_found *f);
    kn_tokenizer *(*tokenizer)(const char *path);
    /* The template of its conversations, for kn_host_free; NULL: it has none, or with an error. The
     * format may have no such function. */
    char *(*jinja)(const char *path);
    /* p is zeros, and the caller frees it. */
    bool (*plan)(kn_file_plan *p, const kn_file_writer *w, const kn_model_tensors *t);
} kn_file_format;

extern const kn_file_format kn_gguf_format, kn_llmc_format;

/* Format number i, from 0 (kn_export_format - 1); NULL: there is none. */
const kn_file_format *kn_file_format_at(int i);
/* That of the file at path, or in the folder at path[4096], which then becomes the file's. NULL
 * with an error only where the path can't be looked at, or the file is none of these. */
const kn_file_format *kn_file_format_of(char *path);
/* The row of a family's table for a module's tensor, and its name in GGUF; NULL: there is none. */
const kn_tensor_name *kn_tensor_name_of(const kn_family *f, const char *name, char gguf[256]);
/* A name with number in the place of '*'; whether there is one. */
bool kn_tensor_name_at(char out[256], const char *pattern, int64_t number);
/* For kn_model_save: whether the file may be written in dir, on the rank that writes, else an
 * error; and its writing, whole or not at all: collective, rank 0 of comm writes. */
bool kn_file_may_save(const kn_file_writer *w, const char *dir);
bool kn_file_save(const kn_file_writer *w, const char *dir, void *module, const kn_model_tensors *t,
                  kn_comm *comm);

#endif
