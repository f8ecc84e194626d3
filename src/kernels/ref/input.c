/* input.c - inverse RoPE and block quantisation, element by element as the formulae read.
 *
 *   attn_out [T, heads, head_dim]  ->  x [groups, T, D] in bf16, or codes of that shape with scales
 *   z        [T, z cols]           ->  codes of that shape with scales, one group */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/error.h"
#include "base/layout.h"
#include "base/num.h"
#include "kernels/ref/ref.h"

enum { MAX_BLOCK = 128 };

static int64_t position_of(const oproj_io *io, int32_t token) {
  return io->position_type == OPROJ_POSITION_I32 ? ((const int32_t *)io->positions)[token]
                                                 : ((const int64_t *)io->positions)[token];
}

oproj_status ref_check_positions(const oproj_io *io) {
  for (int32_t t = 0; t < io->tokens; t++) {
    int64_t position = position_of(io, t);
    REQUIRE(position >= 0 && position < io->cos_sin_rows, OPROJ_ERR_INVALID,
            "positions[%d] is %lld; the cos_sin table has rows 0 to %lld", t, (long long)position,
            (long long)io->cos_sin_rows - 1);
  }
  return OPROJ_OK;
}

/* `count` values of one head from dimension `begin` on, turned back where they are rotated.  begin
 * and the first rotated dimension are even, so pairs are never cut. */
static void rotated_values(const oproj_dims *dims, const uint16_t *head, const float *cos_sin_row,
                           int32_t begin, int32_t count, float *out) {
  int32_t rope_begin = dims->head_dim - dims->rope_dim, half = dims->rope_dim / 2;
  for (int32_t i = 0; i < count; i += 2) {
    float x0 = oproj_num_input(head[begin + i]), x1 = oproj_num_input(head[begin + i + 1]);
    int32_t pair = (begin + i - rope_begin) / 2;
    if (begin + i < rope_begin) {
      out[i] = x0;
      out[i + 1] = x1;
    } else {
      oproj_num_unrotate(x0, x1, cos_sin_row[pair], cos_sin_row[half + pair], &out[i], &out[i + 1]);
    }
  }
}

/* Codes of one block; returns the exponent of its scale. */
static uint8_t quantize_block(const float *values, int32_t count, uint8_t *codes) {
  float amax = 0.0f;
  for (int32_t i = 0; i < count; i++) amax = oproj_quant_amax(amax, values[i]);
  uint8_t exponent = oproj_quant_exponent(amax);
  for (int32_t i = 0; i < count; i++) codes[i] = oproj_quant_code(values[i], exponent);
  return exponent;
}

/* Padding rows and bytes of every layout are zero. */
static void clear_scales(const oproj_quant *q, int32_t block) {
  int64_t bytes =
      oproj_layout_bytes(q->layout, q->groups, q->tokens, oproj_base_ceil_div(q->cols, block));
  if (bytes > 0) memset(q->scales, 0, (size_t)bytes);
}

/* One head of one token: where it is read, which table row turns it, where its values go. */
typedef struct head_view {
  const uint16_t *values;
  const float *cos_sin_row;
  int32_t group;
  int32_t column; /* of the head's first value in [0, D) */
} head_view;

/* Of the part's i-th token. */
static head_view view_head(const oproj_kernels *k, const oproj_io *io,
                           const oproj_kernels_part *part, int32_t i, int32_t head) {
  int32_t heads_per_group = k->group_cols / k->config.dims.head_dim;
  int32_t token = part->begin + i / part->strip * part->stride + i % part->strip;
  return (head_view){
      .values = io->attn_out + token * io->token_stride + head * io->head_stride,
      .cos_sin_row = io->cos_sin + position_of(io, token) * io->cos_sin_width,
      .group = head / heads_per_group,
      .column = head % heads_per_group * k->config.dims.head_dim,
  };
}

void ref_input_quantize(const oproj_kernels *k, const oproj_io *io, const oproj_kernels_part *part,
                        const oproj_quant *out) {
  const oproj_dims *dims = &k->config.dims;
  int32_t heads = k->config.groups * (k->group_cols / dims->head_dim), block = dims->quant_block;
  clear_scales(out, block);
#pragma omp parallel for collapse(2) schedule(static) num_threads(k->config.threads)
  for (int32_t t = 0; t < part->tokens; t++) {
    for (int32_t h = 0; h < heads; h++) {
      head_view head = view_head(k, io, part, t, h);
      uint8_t *codes =
          out->codes + ((int64_t)head.group * out->tokens + t) * out->cols + head.column;
      for (int32_t i = 0; i < dims->head_dim; i += block) {
        float values[MAX_BLOCK];
        rotated_values(dims, head.values, head.cos_sin_row, i, block, values);
        uint8_t exponent = quantize_block(values, block, codes + i);
        oproj_layout_store(out->scales, out->layout, head.group, t, (head.column + i) / block,
                           out->tokens, out->cols / block, exponent);
      }
    }
  }
}

void ref_input_rotate(const oproj_kernels *k, const oproj_io *io, const oproj_kernels_part *part,
                      uint16_t *x) {
  const oproj_dims *dims = &k->config.dims;
  int32_t heads = k->config.groups * (k->group_cols / dims->head_dim), block = dims->quant_block;
#pragma omp parallel for collapse(2) schedule(static) num_threads(k->config.threads)
  for (int32_t t = 0; t < part->tokens; t++) {
    for (int32_t h = 0; h < heads; h++) {
      head_view head = view_head(k, io, part, t, h);
      uint16_t *row = x + ((int64_t)head.group * part->tokens + t) * k->group_cols + head.column;
      for (int32_t i = 0; i < dims->head_dim; i += block) {
        float values[MAX_BLOCK];
        rotated_values(dims, head.values, head.cos_sin_row, i, block, values);
        for (int32_t j = 0; j < block; j++) row[i + j] = oproj_bf16_from_f32(values[j]);
      }
    }
  }
}

void ref_z_quantize(const oproj_kernels *k, int32_t tokens, const uint16_t *z,
                    const oproj_quant *out) {
  int32_t block = k->config.dims.quant_block;
  clear_scales(out, block);
#pragma omp parallel for schedule(static) num_threads(k->config.threads)
  for (int32_t t = 0; t < tokens; t++) {
    const uint16_t *row = z + (int64_t)t * k->z_cols;
    uint8_t *codes = out->codes + (int64_t)t * k->z_cols;
    for (int32_t i = 0; i < k->z_cols; i += block) {
      float values[MAX_BLOCK];
      for (int32_t j = 0; j < block; j++) values[j] = oproj_bf16_to_f32(row[i + j]);
      uint8_t exponent = quantize_block(values, block, codes + i);
      oproj_layout_store(out->scales, out->layout, 0, t, i / block, tokens, k->z_cols / block,
                         exponent);
    }
  }
}
