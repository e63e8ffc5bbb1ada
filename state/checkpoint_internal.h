/* state/checkpoint_internal.h (private): shared by saving, opening and loading a checkpoint. */
#ifndef KNAP_STATE_CHECKPOINT_INTERNAL_H
#define KNAP_STATE_CHECKPOINT_INTERNAL_H

#include "state/checkpoint.h"
#include "state/entries.h"
#include "state/folder_internal.h"
#include "state/pieces.h"

/* A file of the program's own. */
typedef struct kn_own_file {
    char *name;
    void *data;
    size_t size;
} kn_own_file;

struct kn_checkpoint {
    char *dir;     /* of the checkpoint */
    kn_comm *comm; /* borrowed */
    json_t *state;
    bool first_form;
    kn_listing passed;     /* rank 0's: newer ones of the folder, which aren't whole */
    char id[KN_FOLDER_ID]; /* of the save; "" in files older than it */
    int64_t step;
    int64_t buffer_ranks;         /* ranks with buffers of their own among the optimizer's */
    char *config, *record;        /* JSON text */
    kn_pieces *model, *optimizer; /* NULL: none was saved, or it has no state */
    bool has_optimizer;           /* one was saved */
    kn_own_file *file;
    int files;
};

/* Lists the model, and with optim its state; *models of the entries are the model's. The caller
 * ends e, after an error too. */
bool kn_checkpoint_entries(kn_entries *e, int *models, void *module, kn_comm *comm,
                           const kn_optim *optim, const kn_ema *ema);
/* True where averages of module, or none, go with an optimizer; else an error. */
bool kn_checkpoint_ema(const kn_ema *ema, void *module, bool optim, const char *what);
/* Whether name may be that of a program's own file: nothing that leaves the folder, or stands for
 * something else there. */
bool kn_checkpoint_file_name(const char *name);

/* checkpoint_read.c: reads the checkpoint in c->dir, all but its tensors' bytes, on this rank. */
bool kn_checkpoint_read(kn_checkpoint *c);
/* Reads this rank's share of the tensors' bytes, about equal, and compares their checksums. */
bool kn_checkpoint_check(const kn_checkpoint *c);
void kn_checkpoint_clear(kn_checkpoint *c); /* what kn_checkpoint_read made */

#endif
