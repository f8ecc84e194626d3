/* source.h - where a shard's part of a layer lies in the files, for a loader that schedules its own
 * reads (tp): it reads with oproj_tensors_read, and has the bytes verified and the scales widened
 * here. */
#ifndef OPROJ_WEIGHTS_SOURCE_H
#define OPROJ_WEIGHTS_SOURCE_H

#include <stdbool.h>

#include "oproj/checkpoint.h"
#include "oproj/safetensors.h"
#include "weights/names.h"

/* A rectangle of a tensor, in the tensor's own elements (blocks, for scales). */
typedef struct oproj_weights_region {
  int64_t rows, cols; /* the whole tensor */
  int64_t row_begin, row_end, col_begin, col_end;
} oproj_weights_region;

/* What z columns [z_begin, z_end), multiples of quant_block, need of one tensor. */
oproj_weights_region oproj_weights_region_of(const oproj_dims *dims, oproj_weights_matrix matrix,
                                             oproj_weights_part part, int64_t z_begin,
                                             int64_t z_end);

/* Where a shard's part of one tensor comes from.  Of a split set `tensor` is the rank's own, all of
 * it; of a whole checkpoint it is the whole one, of which the region is wanted. */
typedef struct oproj_weights_source {
  const oproj_tensors_file *file;
  const oproj_tensor *tensor;  /* of `file`; NULL: no such part (a bf16 weight has no scale) */
  oproj_weights_region region; /* the shard's, in elements of the whole tensor */
  int64_t element_bytes;
  int64_t bytes; /* of the shard's part, as stored */
  bool in_one;   /* the part lies in one piece, from byte `begin` of the tensor on; else its rows
                    are spread over whole rows of the tensor */
  int64_t begin;
} oproj_weights_source;

/* Errors as oproj_checkpoint_read, less those of what the bytes hold. */
oproj_status oproj_weights_source_of(const oproj_checkpoint *checkpoint, int32_t layer,
                                     oproj_weights_matrix matrix, oproj_weights_part part,
                                     const oproj_shard *shard, oproj_weights_source *out);

/* Holds the bytes of a source to the checksum of a split set; a whole checkpoint has none. */
oproj_status oproj_weights_source_verify(const oproj_checkpoint *checkpoint,
                                         const oproj_weights_source *source, int32_t rank,
                                         const void *stored);

/* safetensors.c: ERR_IO when an open file no longer has the size that its header was held to. */
oproj_status oproj_weights_check_size(const oproj_tensors_file *file);

/* slices.c: a region's scales, as stored, as f32.  ERR_IO, naming `path`: one of them is NaN or
 * infinite. */
oproj_status oproj_weights_widen(const char *path, const oproj_tensor *tensor,
                                 const oproj_weights_region *region, const void *stored,
                                 float *out);

#endif /* OPROJ_WEIGHTS_SOURCE_H */
