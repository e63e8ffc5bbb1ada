/* state/checkpoint_internal.h (private): shared by saving, opening and loading a checkpoint. */
#ifndef KNAP_STATE_CHECKPOINT_INTERNAL_H
#define KNAP_STATE_CHECKPOINT_INTERNAL_H

#include "state/checkpoint.h"
#include "state/load_internal.h"
#include "state/folder_internal.h"
#include "state/pieces.h"
#include "state/saving.h"

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
    kn_listing passed;     /* rank 0's: newer ones of the folder, which aren't whole */
    char id[KN_FOLDER_ID]; /* of the save; "": another program's */
    int64_t step;
    int64_t buffer_ranks;      /* ranks with buffers of their own among the optimizer's */
    char *config, *record;     /* JSON text */
    kn_pieces *part[KN_PARTS]; /* NULL: none was saved, or it has no state */
    kn_state *names[KN_PARTS]; /* what they have, and the optimizers' numbers */
    bool has_optimizer;        /* one was saved */
    kn_own_file *file;
    int files;
};

/* ---- checkpoint_state.c ---------------------------------------------------------------------- */

/* True where optim, which may be NULL, and the optims were made for module or for modules below it,
 * and have names; else an error. */
bool kn_checkpoint_optims(const kn_optim *optim, const kn_named_optim *optims, int count,
                          void *module);
/* Lists what a save with these options holds; *models of the entries are the model's; *ranks have
 * buffers of their own. The caller ends e, after an error too. Collective. */
bool kn_checkpoint_list(kn_entries *e, int *models, int *ranks, void *module, kn_comm *comm,
                        const kn_checkpoint_save_options *o);
/* Makes s->state on rank 0. Collective. */
bool kn_checkpoint_state(kn_saving *s, const kn_checkpoint_save_options *o, const kn_entries *e,
                         int ranks);
/* text as a JSON object; NULL with an error. */
json_t *kn_checkpoint_object(const char *text, const char *field);
/* True where averages of module, or none, go with an optimizer; else an error. */
bool kn_checkpoint_ema(const kn_ema *ema, void *module, bool optim, const char *what);
/* Whether name is one to most letters, digits, '_', '-' and '.'. */
bool kn_checkpoint_is_plain(const char *name, size_t most);
/* Whether name may be that of a program's own file: nothing that leaves the folder, or stands for
 * something else there. */
bool kn_checkpoint_file_name(const char *name);

/* checkpoint_read.c: reads the checkpoint in c->dir, all but its tensors' bytes, on this rank. */
bool kn_checkpoint_read(kn_checkpoint *c);
/* The same of files of tensors without a state.json: a model, of step 0. */
bool kn_checkpoint_read_foreign(kn_checkpoint *c);
/* Reads this rank's share of the tensors' bytes, about equal, and compares their checksums. */
bool kn_checkpoint_check(const kn_checkpoint *c);
void kn_checkpoint_clear(kn_checkpoint *c); /* all but c->comm and c->passed, which are kept */

#endif
