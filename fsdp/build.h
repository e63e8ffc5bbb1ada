/* fsdp/build.h (private): how modules become a unit (claims.c, build.c, begin.c). */
#ifndef KNAP_FSDP_BUILD_H
#define KNAP_FSDP_BUILD_H

#include "fsdp/alike.h"
#include "fsdp/unit.h"

typedef struct kn_claim {
    kn_module_impl *module;
    int index;
    kn_dtype param_dtype; /* it computes in */
    kn_bucket *bucket;    /* that takes it over, as parameter `at` */
    int at;
} kn_claim;
typedef struct kn_claims {
    kn_claim *list, *ignored; /* ignored: named by the options; marked once the unit is complete */
    int count, ignores;
    int64_t room, ignored_room;
    int64_t elements;
} kn_claims;

/* Buffers of u's modules, and of those below outside other units, move to u's device, get rank 0's
 * values with .sync_from_rank0 (collective), and .buffer_dtype. Ignored ones stay as they are. */
bool kn_unit_begin_buffers(kn_unit *u);
/* Whether the parameter t was filled, read or written. */
bool kn_has_values(const kn_tensor *t);
/* This rank's parts of the claimed parameters, whose buckets are there, get their values.
 * Collective with .sync_from_rank0. */
bool kn_unit_begin_params(kn_unit *u, const kn_claims *c);

/* tables.c, where b->rows is. Behind kn_bucket_take_param's other work: */
void kn_bucket_take_table(kn_bucket *b);
void kn_bucket_leave_table(const kn_bucket_param *p);
/* A table exchanges rows over comm from now on; NULL: no longer. */
void kn_bucket_give_ranks(kn_bucket *b, kn_comm *comm);
/* build.c: makes one unit of modules, of what they and the modules below hold and no unit
 * claimed. */
bool kn_claims_collect(kn_claims *c, kn_module_impl *const *module, int modules,
                       const kn_fsdp_wrap_options *o);
void kn_claims_free(kn_claims *c);
bool kn_unit_build(kn_module_impl *const *module, int modules, kn_comm *comm,
                   const kn_fsdp_wrap_options *o);
/* tree.c: the smallest communicator that those of all units at and below m are, or were made from
 * by kn_comm_split; NULL: there is no unit, or each rank has its own. */
kn_comm *kn_ranks_around(kn_module_impl *m);
/* Whether the ranks of comm and of all units in m's tree are in one communicator, over which norms
 * can go; else false with a sentence. */
bool kn_ranks_join(kn_module_impl *m, kn_comm *comm);
/* Norms of root's tree go over the ranks around it. */
void kn_root_joins_ranks(kn_root *root);
/* undo.c: notes what a kn_fsdp_wrap of modules changes, which must stay until its end. NULL with an
 * error. */
typedef struct kn_undo kn_undo;
kn_undo *kn_undo_begin(kn_module_impl *const *module, int modules);
/* The wrap is over; not done: the tree is as it was. NULL is fine. */
void kn_undo_end(kn_undo *u, bool done);
/* options.c: adds the options that all ranks of comm must give alike. */
bool kn_alike_options(kn_alike *a, const kn_fsdp_wrap_options *o, kn_comm *comm);
/* The ranks of comm give the same number for a setter's (what) argument name. */
bool kn_numbers_agree(double number, kn_comm *comm, const char *what, const char *name);
/* The ranks of comm have the same units at and below the modules, which functions of the user
 * made. */
bool kn_units_agree(kn_module_impl *const *module, int n, kn_comm *comm);
/* check.c: before a wrap of the modules changes anything: the ranks of comm give the same options,
 * have the same parameters to claim, and hold the same values of them, unless rank 0's become
 * everyone's. Else false with a sentence that names the first difference, on all ranks. Collective,
 * in one message. */
bool kn_wrap_agrees(kn_module_impl *const *module, int n, const kn_fsdp_wrap_options *o,
                    kn_comm *comm);
/* classes.c: each name of the options' lists of classes is the class of a module of m's tree; else
 * false with a sentence. */
bool kn_classes_known(const kn_fsdp_wrap_options *o, kn_module_impl *m);
/* Modules at and below m recompute where the options say so. */
bool kn_choose_recompute(const kn_fsdp_wrap_options *o, kn_module_impl *m);
/* claims.c: "a, b" names name. NULL names nothing. */
bool kn_listed(const char *list, const char *name);
/* .ignored_modules lists m, or a module around it. */
bool kn_ignores_module(const kn_fsdp_wrap_options *o, const kn_module_impl *m);

#endif
