/* data/idx_file.h: files in the idx format of the MNIST database, gzipped or plain: big-endian 0,
 * 0, a byte for the type (8 u8, 9 i8, 11 i16, 12 i32, 13 f32, 14 f64), the number of dims, their
 * sizes as u32, the elements. */
#ifndef KNAP_DATA_IDX_FILE_H
#define KNAP_DATA_IDX_FILE_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The array of an idx file on the CPU, as large as its header says. Errors: no such file, damaged,
 * cut short, more bytes than elements. */
KN_API kn_tensor *kn_idx_read(const char *path);

#ifdef __cplusplus
}
#endif
#endif
