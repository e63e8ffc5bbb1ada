/* comm/comm.h: collectives among ranks. An interface with back ends: self (one rank), local
 * (processes, or threads in tests, over shared memory), mpi (ranks on several hosts, where libknap
 * is built with it), tcp (the same without MPI); NCCL plugs in the same way. Uses kernels/ only:
 * raw pointers, dtypes, streams.
 *
 * The contract: ranks make the same calls in the same order, counted over all communicators that
 * hold the same ranks, on all streams. Every call carries a rolling hash of its number,
 * communicator, kind, label, dtypes, count and root; at the first difference every rank gets an
 * error that names two ranks and the call of each, before anything hangs. It costs about 50 ns a
 * call. Calls launched by a stream's own functions are compared but not counted. A rank that
 * doesn't come within the timeout (kn_comm_set_timeout) is named as well.
 *
 * A collective is launched on a stream and returns at once where the stream is a worker; on an
 * inline stream it runs to its end. Buffers must stay valid and unchanged until the stream is past
 * the call; when it is past it on this rank, every rank has finished reading this rank's buffers.
 * Two collectives of one communicator never run at the same time; use kn_comm_dup to overlap.
 *
 * Reductions add in rank order, starting from the accumulator where there is one:
 *     ((acc + rank 0) + rank 1) + ...      in f32, rounded once (KN_K_SUM_N)
 * so the result is the same bits for every number of ranks that adds the same terms, and for every
 * back end: over MPI too, terms are exchanged and added here.
 *
 * On a stream of a GPU the buffers are that GPU's: collectives go to NCCL, or through the host with
 * KNAP_COMM=local; NCCL adds f32 in an order of its own unless kn_cuda_deterministic is on.
 *
 * Errors: a rank whose error stands poisons its communicators; waits of the others end at once with
 * an error that repeats the first cause and its rank. */
#ifndef KNAP_FSDP_COMM_H
#define KNAP_FSDP_COMM_H

#include "kernels/memory.h"
#include "kernels/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_comm kn_comm;

/* Of a communicator that has ended: an error, and the answer for NULL. */
KN_API int kn_rank(const kn_comm *c);                 /* NULL: 0 */
KN_API int kn_comm_size(const kn_comm *c);            /* NULL: 1 */
KN_API const char *kn_comm_backend(const kn_comm *c); /* "self", "local", "mpi", "tcp" */

/* Memory that collectives can use without a staging copy (shared among the ranks of this host, or
 * registered). Works with kn_take; borrowed from the communicator. Any other memory works too,
 * staged through KN_MEM_COMM buffers. */
KN_API kn_memory *kn_comm_memory(kn_comm *c);
/* The same for buffers on device. For a GPU it is memory registered with NCCL, where all ranks of
 * the world can register some (unless KNAP_REGISTER=0), else plain memory of the device;
 * collective, over all ranks of kn_world. NULL with an error. */
KN_API kn_memory *kn_comm_memory_on(kn_comm *c, kn_device device);

/* label names the caller in traces and errors ("transformer.h.3"); borrowed, may be NULL; it must
 * live until the stream is past the call. Ranks that give one call different labels (or one of them
 * none) are out of step: an error. */

/* dst[size * count] = concatenation of every rank's src[count]; src may be dst + rank * count. */
KN_API bool kn_all_gather(kn_comm *c, void *dst, const void *src, int64_t count, kn_dtype dtype,
                          kn_stream *s, const char *label);

/* dst[count] (dst_dtype) = acc + sum over ranks in order of their src[rank_of_caller * count ...]
 * (src has size * count elements of src_dtype). acc: dst_dtype, may be NULL or dst itself. */
KN_API bool kn_reduce_scatter(kn_comm *c, void *dst, const void *acc, const void *src,
                              int64_t count, kn_dtype dst_dtype, kn_dtype src_dtype, kn_stream *s,
                              const char *label);

/* dst[count] = acc + sum over ranks in order of src[count], on every rank. acc may be NULL, dst, or
 * equal on all ranks; dst may be src when the dtypes agree. */
KN_API bool kn_all_reduce(kn_comm *c, void *dst, const void *acc, const void *src, int64_t count,
                          kn_dtype dst_dtype, kn_dtype src_dtype, kn_stream *s, const char *label);

/* dst[size * count]: block r is the block of count elements that rank r has for this one, its
 * src[rank_of_caller * count ...]. dst and src don't overlap. */
KN_API bool kn_all_to_all(kn_comm *c, void *dst, const void *src, int64_t count, kn_dtype dtype,
                          kn_stream *s, const char *label);

/* One of several buffers that a collective moves together: fields as the arguments of the functions
 * above; a gather has no acc, and dst_dtype is src_dtype. */
typedef struct kn_comm_piece {
    void *dst;
    const void *acc, *src;
    int64_t count;
    kn_dtype dst_dtype, src_dtype;
} kn_comm_piece;
/* n pieces in one collective: one rendezvous and one message to each rank, whatever n. The results
 * are those of n calls. The list is copied; all ranks give one of the same length. More than
 * KN_COMM_PIECES take several collectives. */
#define KN_COMM_PIECES 32
KN_API bool kn_all_gather_pieces(kn_comm *c, const kn_comm_piece *piece, int n, kn_stream *s,
                                 const char *label);
KN_API bool kn_reduce_scatter_pieces(kn_comm *c, const kn_comm_piece *piece, int n, kn_stream *s,
                                     const char *label);
KN_API bool kn_all_reduce_pieces(kn_comm *c, const kn_comm_piece *piece, int n, kn_stream *s,
                                 const char *label);

/* Integer and maximum reductions of a few scalars (i64 sum, f32 max; NaN wins), in place. */
KN_API bool kn_all_reduce_i64(kn_comm *c, int64_t *data, int64_t count, kn_stream *s,
                              const char *label);
KN_API bool kn_all_reduce_max(kn_comm *c, float *data, int64_t count, kn_stream *s,
                              const char *label);

/* Every rank's data becomes root's. bytes, any content. */
KN_API bool kn_broadcast(kn_comm *c, void *data, int64_t bytes, int root, kn_stream *s,
                         const char *label);

/* A number over all ranks: its sum, added in rank order in f64, so the same bits on all, or that
 * sum by their number. NULL: kn_world(), every rank (one, where kn_init was not called).
 * Collective, and over when it returns. NaN with an error. */
KN_API double kn_sum_over_ranks(kn_comm *c, double x);
KN_API double kn_mean_over_ranks(kn_comm *c, double x);

/* Bytes of which root alone knows how many there are: a text, a table. Root gives data and *size;
 * on every rank *size becomes their number. Returns a copy, with a 0 byte behind it, so that a text
 * is a string; the caller owns it (kn_host_free). c as above. Collective, and over when it returns.
 * NULL with an error. */
KN_API void *kn_broadcast_bytes(kn_comm *c, const void *data, size_t *size, int root);

/* Returns on the stream once every rank has come here. */
KN_API bool kn_barrier(kn_comm *c, kn_stream *s, const char *label);

/* True if cond is true on all ranks and no error stands on any; false also where waiting failed. */
KN_API bool kn_agree(kn_comm *c, bool cond);

/* A communicator over the same ranks that can run beside c. Collective. Freed with its world. */
KN_API kn_comm *kn_comm_dup(kn_comm *c, const char *name);
/* Ranks with equal color form a group, ordered by key, then rank; color < 0: NULL without error.
 * Collective over c. */
KN_API kn_comm *kn_comm_split(kn_comm *c, int color, int key, const char *name);

/* How many ranks of c each machine holds, those of a machine one after another: as the launcher
 * says (LOCAL_WORLD_SIZE, LOCAL_RANK), else all of them where they share memory; 0: nobody knows,
 * or, with an error, ranks say different things, a number that doesn't divide theirs, or another
 * order. Collective. */
KN_API int kn_comm_ranks_a_machine(kn_comm *c);

/* Makes every rank's present and future waits fail with this message. Never blocks. */
KN_API void kn_comm_poison(kn_comm *c, const char *message);

/* How long a collective of c waits for a rank, and one of the communicators that were or will be
 * made from c, unless they were given a time of their own. After that time it is an error that
 * names the waiting rank, the missing one, the call, and the last call of the missing rank. 0: that
 * of the communicator that c was made from; of the world: .timeout_s of kn_init, else KNAP_TIMEOUT,
 * else 60. */
KN_API void kn_comm_set_timeout(kn_comm *c, double seconds);
/* c's own or inherited time; infinity where c is NULL, or timeouts are suspended. */
KN_API double kn_comm_get_timeout(const kn_comm *c);
/* From suspend to resume no collective of this rank times out, in any communicator of c's world;
 * dead ranks are still noticed. For what one rank does while the others wait. Each suspend needs
 * its resume. NULL is fine. */
KN_API void kn_comm_suspend_timeout(kn_comm *c);
KN_API void kn_comm_resume_timeout(kn_comm *c);

/* "2.28.9": of the NCCL that collectives on GPUs use; "none" without NCCL. */
KN_API const char *kn_comm_nccl_version(void);
/* Sentence i, from 0, on work of c's ranks that NCCL could do faster, and why it doesn't here;
 * NULL: there are no more. Memory is known once a module is wrapped. c may be NULL. */
KN_API const char *kn_comm_nccl_lacks(const kn_comm *c, int i);

/* Test hook: each collective of c waits (sleeps) latency_s + bytes / bytes_per_s before it ends. */
KN_API void kn_comm_slow(kn_comm *c, double latency_s, double bytes_per_s);

/* A world whose other ranks don't exist, for schedules on meta streams: a collective takes
 * latency_s + bytes / bytes_per_s of virtual time (bytes read and written on a rank). This rank is
 * 0. On the host's streams the others say what this one says: what they send is that, and sums of
 * i64 are a multiple of it; reductions of floats do nothing to the bytes. Freed with
 * kn_comm_simulated_free, after the modules that were wrapped with it. */
KN_API kn_comm *kn_comm_simulated(int ranks, double latency_s, double bytes_per_s);
/* A communicator of size of them (kn_comm_split cannot reach the others). Freed with its world. */
KN_API kn_comm *kn_comm_simulated_part(kn_comm *c, int size, const char *name);
KN_API void kn_comm_simulated_free(kn_comm *world);

/* ---- becoming a rank ------------------------------------------------------------------------- */

/* Makes this program one of N ranks and returns its world communicator (never NULL: size 1 by
 * default). Removes its own options from argv:
 *   --ranks N      re-execute this program N times under a supervisor, over inherited shared memory
 *   --threads T    OpenMP threads of each rank (default max(1, cores / ranks on this host))
 *   --fault TEXT   a rank fails: "rank 1: kill at collective 17 of step 3" (docs/failures.md); a
 *                  fault that never comes is an error of kn_finish
 * KNAP_RANKS=N does the same as --ranks, KNAP_FAULT as --fault. Pins each rank to its own cores
 * where they suffice. The supervisor process never returns from this call: it watches the ranks
 * through pidfds, ends all within 2 seconds when one dies, prints which and why unless that rank
 * has, and exits with the first failing status.
 *
 * Ranks that another launcher starts are recognised by its variables:
 *   torchrun    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK, LOCAL_WORLD_SIZE where
 *               set: ranks of one host find each other by address and port (over a Unix socket that
 *               is named after them) and share memory; those of several hosts meet over TCP, at one
 *               of the 8 ports after MASTER_PORT
 *   mpirun      OMPI_COMM_WORLD_RANK and _SIZE, or PMI_RANK and PMI_SIZE: over MPI; where libknap
 *               is built without it, as above if all ranks are on this host
 *   srun        SLURM_PROCID, SLURM_STEP_NUM_TASKS, inside a step: over MPI with --mpi=pmix or
 *               pmi2, else as above if the step has one node
 * KNAP_RENDEZVOUS=tcp:HOST:PORT (of rank 0) or file:/PATH (which rank 0 writes): ranks of any of
 * these meet there and talk over TCP; KNAP_JOB=name where several jobs share a place. TCP is for
 * trusted networks; a random KNAP_JOB, the same on all ranks, is the secret that identifies them.
 * Half or contradictory settings are an error that names the variables. OMP_NUM_THREADS is kept.
 *
 * Standard input, output and error that are closed become /dev/null: a file that the program opens
 * would get their place, and what is printed.
 *
 * A program that crashes later (SIGSEGV, SIGBUS, SIGFPE, SIGABRT) prints the error that stands
 * first, unless it has a handler of its own by now.
 *
 * Call it first in main, before threads exist. Bad values are an error that stands (kn_finish
 * prints it). argc and argv may be NULL. */
typedef struct kn_init_options {
    KN_BEGIN_OPTIONS;
    /* The world's kn_comm_set_timeout, and how long ranks wait for each other to start; 0:
     * KNAP_TIMEOUT, else 60. */
    double timeout_s;
    /* Of tensors on GPUs: "nccl", or "local": through the host; NULL: KNAP_COMM, else nccl.
     * Copied. */
    const char *comm;
} kn_init_options;
KN_API kn_comm *kn_init_(int *argc, char ***argv, kn_init_options o);
#define kn_init(argc, argv, ...) kn_init_(argc, argv, KN_OPTIONS(kn_init_options, __VA_ARGS__))
KN_API kn_comm *kn_world(void); /* the world of kn_init; NULL before */
/* A communicator of this rank alone, in any world. Lives as long as the thread's context. NULL with
 * an error if memory runs out. */
KN_API kn_comm *kn_comm_self(void);

/* Ends this rank: flushes standard output, which may fail, prints the error that stands to stderr
 * ("knap: rank 1: ..."; the others, where a launcher may keep a log for each: "knap: rank 0 ends:
 * rank 1 failed: ..."), destroys the world, frees the context.
 * Returns the process's exit status: 0 or 1; over MPI an error ends the job here (MPI_Abort). */
KN_API int kn_finish(void);

/* For tests: runs fn(world, arg) on n ranks and returns the number of ranks that returned non-zero
 * or died; messages of failed ranks go to stderr. Processes: forks; refused with an error when this
 * process already has a second thread. Threads: each rank a thread with a context of its own. */
typedef int (*kn_rank_fn)(kn_comm *world, void *arg);
KN_API int kn_spawn(int n, kn_rank_fn fn, void *arg);
KN_API int kn_spawn_threads(int n, kn_rank_fn fn, void *arg);

#ifdef __cplusplus
}
#endif
#endif
