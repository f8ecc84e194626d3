/* safetensors.h - what the reader and the writer of include/oproj/safetensors.h share.
 *
 *   safetensors.c         reading
 *   safetensors_write.c   writing */
#ifndef OPROJ_WEIGHTS_SAFETENSORS_H
#define OPROJ_WEIGHTS_SAFETENSORS_H

#include <stdbool.h>

#include "oproj/safetensors.h"

/* Bits of one element, 0 for a word that is no dtype of the format. */
int oproj_weights_dtype_bits(const char *dtype);

/* Bytes of all elements; false when the number overflows or is not whole.  The dtype must be known
 * and the shape not negative. */
bool oproj_weights_tensor_bytes(const oproj_tensor *tensor, int64_t *out);

/* What oproj_tensors_open says of a file with these bytes. */
oproj_status oproj_weights_tensors_check(const char *path, const uint8_t *image, size_t bytes);

/* Of an open file, its length word included. */
int64_t oproj_weights_header_bytes(const oproj_tensors_file *file);

#endif /* OPROJ_WEIGHTS_SAFETENSORS_H */
