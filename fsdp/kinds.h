/* fsdp/kinds.h (private): the strategies and the layouts, a row each. From the rows follow names,
 * meshes, choices of programs and the functions that cut; the entries of kn_strategy and
 * kn_layout_kind (fsdp.h) say what each is. */
#ifndef KNAP_FSDP_KINDS_H
#define KNAP_FSDP_KINDS_H

#include "fsdp/fsdp.h"

/* The mesh that a strategy asks for: one shard group of all ranks; a group of each machine's ranks,
 * unless .mesh says how many; each rank alone. In this order: the largest groups first. */
typedef enum kn_mesh_of { KN_MESH_OF_ALL, KN_MESH_OF_MACHINES, KN_MESH_OF_ONE } kn_mesh_of;

/* KN_..., name, its mesh, whether parameters stay gathered from forward to backward. */
#define KN_STRATEGIES(ROW)                                                                         \
    ROW(FULL_SHARD, "full_shard", KN_MESH_OF_ALL, false)                                           \
    ROW(SHARD_GRAD_OP, "shard_grad_op", KN_MESH_OF_ALL, true)                                      \
    ROW(NO_SHARD, "no_shard", KN_MESH_OF_ONE, false)                                               \
    ROW(HYBRID_SHARD, "hybrid_shard", KN_MESH_OF_MACHINES, false)                                  \
    ROW(HYBRID_SHARD_GRAD_OP, "hybrid_shard_grad_op", KN_MESH_OF_MACHINES, true)

/* KN_LAYOUT_..., name, the name that people read, the function of layout.c that cuts. */
#define KN_LAYOUTS(ROW)                                                                            \
    ROW(FLAT, "flat", "flat", make_flat)                                                           \
    ROW(PER_PARAM, "per_param", "per parameter", make_per_param)                                   \
    ROW(RAGGED, "ragged", "ragged", make_ragged)

/* "a|b|c" of the rows' names. */
#define KN_KIND_CHOICE(id, name, ...) "|" name
#define KN_KIND_CHOICES(rows)         (&(rows(KN_KIND_CHOICE))[1])

typedef struct kn_strategy_row {
    const char *name;
    kn_mesh_of mesh;
    bool keeps;
} kn_strategy_row;
const char *kn_layout_name(kn_layout_kind kind); /* the one that people read; layout.c */
extern const kn_strategy_row kn_strategies[KN_STRATEGY_COUNT]; /* mesh.c */

#endif
