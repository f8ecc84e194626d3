/* slices.c - owns how a shard's part of a layer gets from the files into memory. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/num.h"
#include "weights/safetensors.h"
#include "weights/weights.h"

/* Columns are read as whole rows of the tensor, this many bytes at a time: long reads suit disks
 * and network file systems better than short ones with gaps. */
enum { CHUNK_BYTES = 8 << 20 };

oproj_status oproj_weights_read_region(const oproj_weights_found *found,
                                       const oproj_weights_region *region, void *out) {
  const oproj_tensor *tensor = found->tensor;
  int64_t element = oproj_weights_dtype_bits(tensor->dtype) / 8;
  int64_t row_bytes = region->cols * element;
  int64_t part_bytes = (region->col_end - region->col_begin) * element;
  int64_t begin = region->row_begin * row_bytes;
  int64_t rows = region->row_end - region->row_begin;
  if (part_bytes == row_bytes)
    return oproj_tensors_read(found->file, tensor, begin, rows * row_bytes, out);
  int64_t chunk_rows = row_bytes < CHUNK_BYTES ? CHUNK_BYTES / row_bytes : 1;
  if (chunk_rows > rows) chunk_rows = rows;
  uint8_t *chunk = malloc((size_t)(chunk_rows * row_bytes));
  REQUIRE(chunk, OPROJ_ERR_NOMEM, "tensor %s: no memory to read %" PRId64 " rows", tensor->name,
          chunk_rows);
  oproj_status status = OPROJ_OK;
  uint8_t *to = out;
  for (int64_t row = 0; row < rows && status == OPROJ_OK; row += chunk_rows) {
    int64_t count = rows - row < chunk_rows ? rows - row : chunk_rows;
    status =
        oproj_tensors_read(found->file, tensor, begin + row * row_bytes, count * row_bytes, chunk);
    for (int64_t i = 0; i < count && status == OPROJ_OK; i++, to += part_bytes)
      memcpy(to, chunk + i * row_bytes + region->col_begin * element, (size_t)part_bytes);
  }
  free(chunk);
  return status;
}

static oproj_status read_split(const oproj_checkpoint *checkpoint, const oproj_tensor *tensor,
                               const oproj_weights_region *region, int32_t rank, void *out) {
  oproj_weights_found part;
  TRY(oproj_weights_split_find(checkpoint, rank, tensor, region, &part));
  TRY(oproj_tensors_read(part.file, part.tensor, 0, part.tensor->bytes, out));
  return oproj_weights_split_verify(checkpoint, rank, part.tensor, out);
}

/* One tensor's part, allocated here, as stored. */
static oproj_status read_part(const oproj_checkpoint *checkpoint, const oproj_weights_found *found,
                              const oproj_weights_region *region, int32_t rank, void **out) {
  const oproj_tensor *tensor = found->tensor;
  int64_t count = (region->row_end - region->row_begin) * (region->col_end - region->col_begin);
  int64_t bytes = count * (oproj_weights_dtype_bits(tensor->dtype) / 8);
  void *data = malloc((size_t)bytes);
  REQUIRE(data, OPROJ_ERR_NOMEM, "tensor %s: no memory for %" PRId64 " bytes", tensor->name, bytes);
  oproj_status status = checkpoint->split ? read_split(checkpoint, tensor, region, rank, data)
                                          : oproj_weights_read_region(found, region, data);
  if (status == OPROJ_OK)
    *out = data;
  else
    free(data);
  return status;
}

/* Every dtype of scales widens to f32 without rounding. */
static float widen(const char *dtype, const void *stored, int64_t index) {
  if (strcmp(dtype, "F32") == 0) return ((const float *)stored)[index];
  if (strcmp(dtype, "BF16") == 0) return oproj_bf16_to_f32(((const uint16_t *)stored)[index]);
  return oproj_ue8m0_to_f32(((const uint8_t *)stored)[index]);
}

oproj_status oproj_weights_widen(const char *path, const oproj_tensor *tensor,
                                 const oproj_weights_region *region, const void *stored,
                                 float *out) {
  int64_t cols = region->col_end - region->col_begin;
  int64_t count = (region->row_end - region->row_begin) * cols;
  for (int64_t i = 0; i < count; i++) {
    out[i] = widen(tensor->dtype, stored, i);
    REQUIRE(oproj_num_is_finite(out[i]), OPROJ_ERR_IO,
            "%s: scale %s: block [%" PRId64 ", %" PRId64 "] is %s; scales must be finite", path,
            tensor->name, region->row_begin + i / cols, region->col_begin + i % cols,
            out[i] > 0 || out[i] < 0 ? "infinite" : "NaN");
  }
  return OPROJ_OK;
}

static oproj_status read_scales(const oproj_checkpoint *checkpoint,
                                const oproj_weights_found *found, oproj_weights_matrix matrix,
                                const oproj_shard *shard, float **out) {
  oproj_weights_region region = oproj_weights_region_of(
      &checkpoint->config.model.dims, matrix, OPROJ_WEIGHTS_SCALE, shard->z_begin, shard->z_end);
  void *stored = NULL;
  float *scales = NULL;
  oproj_status status;
  TRY_GOTO(read_part(checkpoint, found, &region, shard->rank, &stored), status, out);
  int64_t count = (region.row_end - region.row_begin) * (region.col_end - region.col_begin);
  scales = malloc((size_t)count * sizeof *scales);
  REQUIRE_GOTO(scales, status, out, OPROJ_ERR_NOMEM, "scale %s: no memory for %" PRId64 " floats",
               found->tensor->name, count);
  const char *path = found->file ? oproj_tensors_path(found->file) : checkpoint->dir;
  TRY_GOTO(oproj_weights_widen(path, found->tensor, &region, stored, scales), status, out);
  *out = scales;
  scales = NULL;
out:
  free(scales);
  free(stored);
  return status;
}

static oproj_status read_matrix(const oproj_checkpoint *checkpoint, int32_t layer,
                                oproj_weights_matrix matrix, const oproj_shard *shard,
                                oproj_matrix *out) {
  const oproj_dims *dims = &checkpoint->config.model.dims;
  oproj_weights_matrix_info info;
  TRY(oproj_weights_matrix_find(checkpoint, layer, matrix, &info));
  oproj_weights_region region =
      oproj_weights_region_of(dims, matrix, OPROJ_WEIGHTS_WEIGHT, shard->z_begin, shard->z_end);
  void *data;
  TRY(read_part(checkpoint, &info.weight, &region, shard->rank, &data));
  *out = (oproj_matrix){.dtype = info.dtype,
                        .rows = region.row_end - region.row_begin,
                        .cols = region.col_end - region.col_begin,
                        .data = data};
  if (!info.scale.tensor) return OPROJ_OK;
  out->block = dims->quant_block;
  float *scales;
  TRY(read_scales(checkpoint, &info.scale, matrix, shard, &scales));
  out->scales = scales;
  return OPROJ_OK;
}

oproj_status oproj_checkpoint_read(const oproj_checkpoint *checkpoint, int32_t layer,
                                   const oproj_shard *shard, oproj_slices *out) {
  memset(out, 0, sizeof *out);
  oproj_status status;
  TRY_GOTO(oproj_weights_check_shard(checkpoint, shard), status, out);
  TRY_GOTO(read_matrix(checkpoint, layer, OPROJ_WEIGHTS_A, shard, &out->wo_a), status, out);
  TRY_GOTO(read_matrix(checkpoint, layer, OPROJ_WEIGHTS_B, shard, &out->wo_b), status, out);
out:
  if (status != OPROJ_OK) oproj_slices_free(out);
  return status;
}

oproj_status oproj_checkpoint_check_scales(const oproj_checkpoint *checkpoint, int32_t layer,
                                           const oproj_shard *shard) {
  TRY(oproj_weights_check_shard(checkpoint, shard));
  for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++) {
    oproj_weights_matrix_info info;
    float *scales;
    TRY(oproj_weights_matrix_find(checkpoint, layer, (oproj_weights_matrix)matrix, &info));
    if (!info.scale.tensor) continue;
    TRY(read_scales(checkpoint, &info.scale, (oproj_weights_matrix)matrix, shard, &scales));
    free(scales);
  }
  return OPROJ_OK;
}

/* The matrices are const for their readers; here is where their memory came from. */
static void free_matrix(oproj_matrix *matrix) {
  free((void *)(uintptr_t)matrix->data);
  free((void *)(uintptr_t)matrix->scales);
}

void oproj_slices_free(oproj_slices *slices) {
  if (!slices) return;
  free_matrix(&slices->wo_a);
  free_matrix(&slices->wo_b);
  memset(slices, 0, sizeof *slices);
}
