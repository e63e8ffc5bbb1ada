/* autograd/rows.h (private): tables whose gradients stay rows (rows.c; over ranks rows_ranks.c).
 *
 * A backward notes (numbers, gradients) of each use of the table. Once the last use has come, equal
 * numbers are added up in their order, and the sums join those of earlier backwards. */
#ifndef KNAP_AUTOGRAD_ROWS_H
#define KNAP_AUTOGRAD_ROWS_H

#include "autograd/autograd_internal.h"
#include "comm/comm.h"

/* Numbers of rows, i64 [U], and what belongs to each, [U, C]. */
typedef struct kn_row_list {
    kn_tensor *ids, *values;
} kn_row_list;

/* Of a leaf that keeps rows (kn_leaf.rows). */
typedef struct kn_rows {
    kn_row_list sum;  /* of all backwards; numbers rise, each once; owned; NULL: nothing came */
    kn_row_list *use; /* of the running backward, in their order; owned */
    int uses;
    int64_t room;
    bool padded; /* a use has numbers that don't count: that of the row behind the last */
    /* By fsdp: this rank has the rows from `first` on in shard, 1-d, owned; each rank `each` of
     * them, the last ones fewer. NULL: the leaf itself is whole. */
    kn_tensor *shard;
    int64_t first, each, all; /* all: rows of the table */
    int ranks;                /* that share the table */
    kn_comm *comm;            /* theirs; NULL where there is one, or none yet */
} kn_rows;

kn_rows *kn_table_of(const kn_tensor *w); /* NULL: w isn't a leaf that keeps rows */
/* ops_index.c. *padding: the row that .padding_idx = given means, or -1; false with an error. */
bool kn_padding_row(const char *op, const kn_tensor *w, int64_t given, int64_t *padding);
bool kn_rows_any(const kn_leaf *leaf); /* it keeps rows, and some came */
void kn_rows_drop(kn_leaf *leaf);      /* what came */
void kn_rows_free(kn_leaf *leaf);
/* y[n, C] = rows of w at ids[n]. Collective where w lies on several ranks. */
bool kn_rows_pick(kn_tensor *w, kn_tensor *ids, kn_tensor *y);
/* The running backward brings the leaf dy[n, C] for rows ids[n]; number `padding` doesn't count. */
bool kn_rows_note(kn_leaf *leaf, kn_tensor *ids, kn_tensor *dy, int64_t padding);
/* The last of them has come. *any: there are some, on any rank. Collective as above. */
bool kn_rows_complete(kn_leaf *leaf, bool *any);
void kn_rows_failed(kn_leaf *leaf); /* the backward failed */

/* to[n, C] = from[N, C] at ids[n], of any dtypes. */
bool kn_pick(kn_tensor *to, kn_array from, kn_tensor *ids);

/* rows_ranks.c. Where numbers go to: those from bound[r] on, of rising ones, to rank r; asked[s]:
 * so many come from rank s. */
typedef struct kn_routes {
    const kn_rows *rows;
    int64_t *bound, *asked; /* [ranks + 1], [ranks] */
    int64_t most;           /* numbers that any rank has for another */
    int64_t come;           /* to this one */
} kn_routes;
/* what: of the table w is to go, so that ranks that are at something else don't match. */
bool kn_routes_find(kn_routes *x, const kn_tensor *w, const char *what, kn_tensor *ids,
                    int64_t count);
void kn_routes_free(kn_routes *x);
/* Elements [U, ...] of list go to the owners of their rows; those that came, by rank. And the other
 * way. NULL with an error. Collective. */
kn_tensor *kn_routes_send(const kn_routes *x, kn_tensor *list);
kn_tensor *kn_routes_answer(const kn_routes *x, kn_tensor *list);

#endif
