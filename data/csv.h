/* data/csv.h: tables of numbers in text files (RFC 4180, with any separator) as tensors.
 *
 *   kn_csv houses;
 *   kn_csv_read("houses.csv", &houses, .target = "price", .ignore = "id,street");
 *   kn_loader *data = kn_tensor_loader(world, .field = { houses.x, houses.y }, .batch = 64, ...);
 */
#ifndef KNAP_DATA_CSV_H
#define KNAP_DATA_CSV_H

#include "kernels/types.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kn_csv_header {
    KN_CSV_HEADER_AUTO = 0, /* the first line is one if none of its fields is a number */
    KN_CSV_HEADER,
    KN_CSV_NO_HEADER
} kn_csv_header;

typedef struct kn_csv_read_options {
    KN_BEGIN_OPTIONS;
    /* Columns by name or number, separated by commas: 1 is the first column, -1 the last. */
    const char *target; /* those of y, in this order; NULL: none */
    const char *ignore; /* left out; they may hold any text */
    kn_csv_header header;
    char separator;    /* default ','; ' ' stands for a run of blanks */
    bool fill_missing; /* missing values become .fill (NAN: kn_isnan finds them); else an error */
    double fill;
    kn_dtype dtype, target_dtype; /* of x and y: f32 (default), f64, i64, i32 */
} kn_csv_read_options;

typedef struct kn_csv {
    kn_tensor *x; /* [rows, inputs]: the columns that are neither targets nor left out */
    kn_tensor *y; /* [rows] of one target, [rows, targets] of several; NULL: none */
    int64_t rows, inputs, targets;
    char **name; /* [inputs + targets], of the columns of x, then y; without a header "column 3" */
} kn_csv;

/* Reads a file whole. A line has as many fields as the first; empty lines don't count; a field may
 * be quoted ("1.5"), and one in quotes may go over lines. Lines end in LF or CRLF, the last one
 * perhaps in nothing. A number is a decimal with or without exponent, whatever the locale. Missing
 * is an empty field, "?", or, in any case, NA, N/A, NaN, null. Every error names file, line and
 * column: another text, a number that the dtype can't hold, a line with more or fewer fields, an
 * unknown column. False with an error, and out is zeroed. kn_csv_free frees the tensors. */
#define kn_csv_read(path, out, ...)                                                                \
    kn_csv_read_(path, out, KN_OPTIONS(kn_csv_read_options, __VA_ARGS__))
KN_API bool kn_csv_read_(const char *path, kn_csv *out, kn_csv_read_options o);
KN_API void kn_csv_free(kn_csv *table); /* fine on NULL and on a zeroed one */

#ifdef __cplusplus
}
#endif
#endif
