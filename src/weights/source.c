/* source.c - owns where a shard's part of a tensor lies in the files: for a loader that
 * schedules its own reads.  slices.c reads by itself. */
#include "base/error.h"
#include "weights/safetensors.h"
#include "weights/weights.h"

/* All of a rank's own tensor in a split set. */
static oproj_status in_split(const oproj_checkpoint *checkpoint, const oproj_shard *shard,
                             const oproj_tensor *whole, oproj_weights_source *out) {
  oproj_weights_found part;
  TRY(oproj_weights_split_find(checkpoint, shard->rank, whole, &out->region, &part));
  out->file = part.file;
  out->tensor = part.tensor;
  out->in_one = true;
  return OPROJ_OK;
}

oproj_status oproj_weights_source_of(const oproj_checkpoint *checkpoint, int32_t layer,
                                     oproj_weights_matrix matrix, oproj_weights_part part,
                                     const oproj_shard *shard, oproj_weights_source *out) {
  oproj_weights_matrix_info info;
  *out = (oproj_weights_source){0};
  TRY(oproj_weights_check_shard(checkpoint, shard));
  TRY(oproj_weights_matrix_find(checkpoint, layer, matrix, &info));
  const oproj_weights_found *found = part == OPROJ_WEIGHTS_WEIGHT ? &info.weight : &info.scale;
  if (!found->tensor) return OPROJ_OK;
  const oproj_weights_region region = oproj_weights_region_of(
      &checkpoint->config.model.dims, matrix, part, shard->z_begin, shard->z_end);
  int64_t cols = region.col_end - region.col_begin;
  out->region = region;
  out->element_bytes = oproj_weights_dtype_bits(found->tensor->dtype) / 8;
  out->bytes = (region.row_end - region.row_begin) * cols * out->element_bytes;
  if (checkpoint->split) return in_split(checkpoint, shard, found->tensor, out);
  out->file = found->file;
  out->tensor = found->tensor;
  out->in_one = cols == region.cols;
  if (out->in_one) out->begin = region.row_begin * cols * out->element_bytes;
  return OPROJ_OK;
}

oproj_status oproj_weights_source_verify(const oproj_checkpoint *checkpoint,
                                         const oproj_weights_source *source, int32_t rank,
                                         const void *stored) {
  if (!checkpoint->split) return OPROJ_OK;
  return oproj_weights_split_verify(checkpoint, rank, source->tensor, stored);
}
