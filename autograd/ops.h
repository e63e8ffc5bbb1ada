/* autograd/ops.h (private): helpers that the files of operations share.
 *
 * Once an error stands, operations take NULL and give NULL without a word. So what is made of
 * operations hands on their results as they are, and looks for NULL only before it reads a shape,
 * and where a tensor may be absent. */
#ifndef KNAP_AUTOGRAD_OPS_H
#define KNAP_AUTOGRAD_OPS_H

#include "autograd/autograd_internal.h"

/* Launches a kernel on the compute stream of t's device. */
#define KN_RUN(t, kernel, ...) KN_LAUNCH(kn_compute_stream(kn_device_of(t)), kernel, __VA_ARGS__)

/* Shape and dtype of t, row-major. */
kn_spec kn_spec_like(const kn_tensor *t);
/* The shape rule of y in x's shape, dtype and order, x the first input. */
bool kn_shape_of_input(kn_op_call *c);
/* An operation of one tensor that is linear in it, where f does both ways: see kn_op.map. */
bool kn_map_forward(kn_op_call *c);
bool kn_map_backward(kn_op_grad *g);
#define KN_MAP(f) .map = (f), .forward = kn_map_forward, .backward = kn_map_backward
/* v[n], or a number, with ndim dims, its elements along dim. NULL for NULL. */
kn_tensor *kn_along(kn_tensor *v, int ndim, int dim);
/* A new tensor of t's shape, dtype, device and order. */
kn_tensor *kn_empty_as(const kn_tensor *t);
/* As kn_grad_out, but in the memory order of like: where that isn't row-major, as a leaf's place
 * is, a new tensor for a leaf, too. So a kernel sees one order, and gives the same bits, if x is a
 * leaf (in a recompute it is) and if not. */
kn_tensor *kn_grad_as(kn_op_grad *g, int i, const kn_tensor *like);
/* The same with the memory order of input i. */
kn_tensor *kn_grad_in_order(kn_op_grad *g, int i);
/* Elements [begin, end) of a dim: the attributes of a kn_slice. */
typedef struct kn_slice_attr {
    int dim;
    int64_t begin, end;
} kn_slice_attr;
/* parts.c. Where the gradient of input i lies in that of a larger tensor, of which the input is a
 * part by kn_chunk, kn_split or kn_slice, and any kn_view, kn_permute or kn_transpose: a tensor
 * with that part's strides, borrowed, to write to and hand on as din[i], so that nothing is copied
 * later. NULL if there is no such place; then make a tensor. */
kn_tensor *kn_grad_part(kn_op_grad *g, int i);
/* In the backward of a kn_split or kn_slice: the gradient of its input in which its parts lie, or
 * will lie once they are copied; NULL: there is none yet. */
kn_tensor *kn_grad_whole(kn_op_grad *g);
bool kn_grad_in_place(const kn_op_grad *g, int i); /* dout[i] lies in it already */
/* Of a slice: its gradient lies there now, and isn't passed on. */
void kn_grad_came(kn_op_grad *g);
/* t in the memory order of like, which has as many dims: itself, or a copy. */
kn_tensor *kn_in_order_of(kn_tensor *t, const kn_tensor *like);
/* x with a batch of one in front where it lacks the first of so many dims (an image without a
 * batch); and the result without that dim again, where alone says so. NULL for NULL. */
kn_tensor *kn_as_batch(kn_tensor *x, int dims);
kn_tensor *kn_of_batch(kn_tensor *y, bool alone);
/* A number has dims 0 and -1, as in torch: operations along a dim take it as a row [1]. */
bool kn_is_number(const kn_tensor *x);
kn_tensor *kn_row_of(kn_tensor *x); /* others as they are */
kn_tensor *kn_number_of(kn_tensor *row);
/* Reads an option for n dims into out: each if any of its values isn't 0, else all for each if it
 * isn't 0, else otherwise. */
void kn_by_dim(int64_t *out, int n, int64_t all, const int64_t *each, int64_t otherwise);
/* Of an option .same of a convolution with weight w, over its last n dims: pad becomes the one that
 * keeps the size; the result is x, with a zero more at its end where the sides' pads differ. */
kn_tensor *kn_pad_same(const char *op, kn_tensor *x, const kn_tensor *w, int n,
                       const int64_t *stride, int64_t *pad, const int64_t *dilation);
/* A convolution: kn_conv2d, kn_conv1d, or with .transposed kn_conv_transpose2d, _1d. */
typedef struct kn_conv_attr {
    int dims; /* 2: images; 1: sequences, whose numbers are those of columns */
    bool transposed, same;
    int64_t stride[2], pad[2], dilation[2], output_pad[2], groups;
    const kn_tensor *shown; /* x as it was given, for messages; only while the call is made */
} kn_conv_attr;
kn_tensor *kn_convolve(kn_tensor *x, kn_tensor *w, kn_tensor *bias, const kn_conv_attr *a);
/* As kn_by_dim; the rows of a sequence have otherwise. */
void kn_conv_numbers(int64_t out[2], int dims, int64_t both, const int64_t each[2],
                     int64_t otherwise);
/* For backward functions that end in a product: if input i is y = f(x), f an operation whose
 * derivative a product's epilogue may apply (kn_matmul_args.x), and nothing sees the gradient of y
 * but f's backward, then x and f's kind: din[i] has to be the gradient of x, in y's shape and
 * dtype, and f's backward hands it on as it is. NULL: din[i] is the gradient of y. */
kn_tensor *kn_grad_through(kn_op_grad *g, int i, kn_unary *kind);
/* y of a kind without numbers. */
kn_tensor *kn_unary_of(kn_tensor *x, kn_unary kind);
/* (x - mean) / sqrt(variance + eps) over the n dims, or without the mean, in x's wide dtype, made
 * of operations. */
kn_tensor *kn_normed(kn_tensor *x, int n, const int64_t *dims, double eps, bool rms);
/* Whether op is y = f(x) of a kind whose derivative some provider applies in a product's epilogue:
 * its kind. */
bool kn_unary_of_epilogue(const kn_op *op, kn_unary *kind);
/* A tensor of values that the caller made on the host, which it frees; NULL for NULL. */
kn_tensor *kn_of_host(kn_dtype dtype, kn_device device, void *values, int ndim,
                      const int64_t *shape);
/* A scalar of t's dtype and device; NULL for NULL. */
kn_tensor *kn_number_like(const kn_tensor *t, double value);
/* t's array, or the absent one where t is NULL. */
kn_array kn_array_or_none(const kn_tensor *t);
/* The dtype of statistics and losses of floats: f64 of f64, else f32. */
kn_dtype kn_wide_dtype(kn_dtype t);
kn_tensor *kn_wide(kn_tensor *x); /* in that dtype; NULL for NULL */
/* x is good (kn_check) and its dtype a float, or of those with arithmetic; else an error of op. */
bool kn_takes(const char *op, const kn_tensor *x, bool floats);
/* The index of dim of t, where a negative one counts from the end; -1 with an error of op where t
 * isn't good (kn_check) or dim is out of range. */
int kn_dim(const char *op, const kn_tensor *t, int dim);
/* The n sizes given, with one of -1 filled in so that they make count elements; false where they
 * don't, with an error of op for a size that can't be, the i-th "where" i. */
bool kn_sizes_of(const char *op, const char *where, int64_t count, int n, const int64_t *given,
                 int64_t *sizes);
/* The set of the n dims listed (bit d: dim d), as kn_sum takes them; false with an error where t
 * isn't good or one is out of range. */
bool kn_dims(const char *op, const kn_tensor *t, int n, const int64_t *list, uint32_t *dims);
/* din[i] [C]: the sum of dy[N,C], or of an image's [N,C,H,W], over all but C. */
bool kn_grad_bias(kn_op_grad *g, int i, kn_array dy);
/* dst = a b, on the device of on. */
bool kn_product(const kn_tensor *on, kn_array dst, kn_array a, kn_array b);
/* As kn_grad_into, with zeros where nothing is added up yet, and din[i] too; as kn_grad_out, with
 * zeros. */
kn_tensor *kn_grad_sum(kn_op_grad *g, int i);
kn_tensor *kn_grad_zeros(kn_op_grad *g, int i);
/* The product of the sizes of dims, a set (bit d: dim d). */
static inline double kn_count_of(int ndim, const int64_t *shape, uint32_t dims)
{
    double n = 1;
    for (int d = 0; d < ndim; d++)
        n *= dims >> d & 1 ? (double)shape[d] : 1;
    return n;
}
/* Indices are i64 or i32; false with an error of op. */
bool kn_indices_are_whole(const char *op, const kn_tensor *index);
/* src has x's dtype and a slice of x's shape along dim for each element of index[n]; else an error
 * of op. */
bool kn_slices_fit(const char *op, const kn_tensor *x, int dim, const kn_tensor *index,
                   const kn_tensor *src);
/* All elements of t, which is contiguous, in one dim. */
kn_array kn_flat(const kn_tensor *t);
/* Elements [begin, begin + size) along dim of t's array. */
kn_array kn_part(const kn_tensor *t, int dim, int64_t begin, int64_t size);
/* How many of n each of at most `most` groups takes (ops_shape.c). */
int kn_group_of(int n, int most);
/* [..., C], which is contiguous, as [rows, C]; [1, 1] for a scalar. */
kn_array kn_rows_of(const kn_tensor *t);
/* a with its last two dims exchanged. */
kn_array kn_transposed(kn_array a);
/* v, what of op, is n numbers of x's dtype or f32, or NULL; else an error. */
bool kn_vector_fits(const char *op, const char *what, const kn_tensor *v, int64_t n,
                    const kn_tensor *x);
/* The eps of a norm: 1e-5 for 0; false with an error where it can't be. */
bool kn_eps_of(const char *op, double given, double *eps);
/* Whether x, weight and bias (or NULL) are those of a kn_linear; false with an error of op. */
bool kn_linear_fits(const char *op, const kn_tensor *x, const kn_tensor *w, const kn_tensor *bias,
                    bool in_out);
/* kn_unfold whose windows take one element in dilation; errors name op. */
kn_tensor *kn_windows(const char *op, kn_tensor *x, int dim, int64_t size, int64_t step,
                      int64_t dilation);
/* Mean over counted rows, their count, and log sum exp of each row; only the first has a
 * gradient. */
bool kn_fused_cross_entropy(kn_tensor *logits, kn_tensor *targets, int64_t ignore_index,
                            double smoothing, kn_tensor *out[3]);

/* The shape rule of batch norm for x, weight, bias, the running ones and what is added: outputs y,
 * mean, rstd. */
bool kn_batch_norm_shape(kn_op_call *c, bool training);
/* kn_batch_norm in training, of these six, over the batches of all ranks of comm. */
struct kn_comm;
kn_tensor *kn_sync_batch_norm_apply(kn_tensor *const in[6], double eps, double momentum, bool relu,
                                    struct kn_comm *comm);

/* Checks the numbers of a rotary embedding, and that there are none without one (rope false); fills
 * in *s's defaults. who begins the error. */
bool kn_rope_check(const char *who, bool rope, double base, kn_rope_scaling *s);

/* ops_elementwise.c: the order of the operand that is as large as the result; NULL: row-major. */
const int *kn_order_of_both(const kn_spec *s, const kn_tensor *a, const kn_tensor *b);

#endif
