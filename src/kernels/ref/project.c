/* project.c - the block-scaled matrix product behind both projections.
 *
 * Tokens are taken TILE at a time as f32 columns [cols][TILE], so that the inner loop runs over
 * tokens: it vectorises without reordering any sum, every output is the plain sum in order of k,
 * and a NaN stays in its token's lane.  One weight row is widened once per tile. */
#include <stdbool.h>
#include <stdlib.h>

#include "base/checked.h"
#include "base/error.h"
#include "base/layout.h"
#include "base/num.h"
#include "kernels/ref/ref.h"

enum {
  TILE = 16,       /* tokens: four SSE or two AVX registers */
  BF16_BLOCK = 128 /* summation block of bf16 products, whose scale is 1 */
};

static void widen(oproj_dtype dtype, const float table[256], const void *from, int64_t begin,
                  int32_t count, float *to) {
  if (dtype == OPROJ_DTYPE_E4M3) {
    const uint8_t *codes = (const uint8_t *)from + begin;
    for (int32_t i = 0; i < count; i++) to[i] = table[codes[i]];
  } else {
    const uint16_t *values = (const uint16_t *)from + begin;
    for (int32_t i = 0; i < count; i++) to[i] = oproj_bf16_to_f32(values[i]);
  }
}

/* Tokens [first, first + TILE) as columns; lanes past the last token are zero. */
static void load_tile(const ref_product *p, const float table[256], int32_t block, int32_t first,
                      float (*columns)[TILE], float (*scales)[TILE]) {
  int32_t blocks = (int32_t)oproj_base_ceil_div(p->cols, block);
#pragma omp parallel for schedule(static) num_threads(p->threads)
  for (int32_t b = 0; b < blocks; b++) {
    int32_t begin = b * block, count = p->cols - begin < block ? p->cols - begin : block;
    for (int32_t lane = 0; lane < TILE; lane++) {
      float values[BF16_BLOCK] = {0};
      bool live = first + lane < p->tokens;
      if (live)
        widen(p->dtype, table, p->a, (int64_t)(first + lane) * p->cols + begin, count, values);
      for (int32_t i = 0; i < count; i++) columns[begin + i][lane] = values[i];
      if (p->dtype == OPROJ_DTYPE_E4M3)
        scales[b][lane] = live ? oproj_layout_load(p->a_quant->scales, p->a_quant->layout,
                                                   p->a_group, first + lane, b, p->tokens, blocks)
                               : 0.0f;
    }
  }
}

/* sums[lane] = the products of one weight row with every column of the tile. */
static void row_sums(const ref_product *p, int32_t block, int32_t row, const float *weights,
                     const float (*columns)[TILE], const float (*scales)[TILE], float sums[TILE]) {
  int32_t blocks = (int32_t)oproj_base_ceil_div(p->cols, block);
  for (int32_t lane = 0; lane < TILE; lane++) sums[lane] = 0.0f;
  for (int32_t b = 0; b < blocks; b++) {
    int32_t begin = b * block, end = p->cols - begin < block ? p->cols : begin + block;
    float dot[TILE] = {0};
    for (int32_t k = begin; k < end; k++) {
      float w = weights[k];
#pragma omp simd
      for (int32_t lane = 0; lane < TILE; lane++) dot[lane] += w * columns[k][lane];
    }
    if (p->dtype == OPROJ_DTYPE_E4M3) {
      float w_scale = p->w_scales[(int64_t)(row / block) * blocks + b];
      for (int32_t lane = 0; lane < TILE; lane++)
        sums[lane] += dot[lane] * (scales[b][lane] * w_scale);
    } else {
      for (int32_t lane = 0; lane < TILE; lane++) sums[lane] += dot[lane];
    }
  }
}

static void project_tile(const ref_product *p, const float table[256], int32_t block, int32_t first,
                         const float (*columns)[TILE], const float (*scales)[TILE],
                         float *weight_rows) {
  int32_t live = p->tokens - first < TILE ? p->tokens - first : TILE;
#pragma omp parallel for schedule(static) num_threads(p->threads)
  for (int32_t slice = 0; slice < p->threads; slice++) {
    float *weights = weight_rows + (int64_t)slice * p->cols;
    int32_t begin = (int32_t)((int64_t)p->rows * slice / p->threads);
    int32_t end = (int32_t)((int64_t)p->rows * (slice + 1) / p->threads);
    for (int32_t row = begin; row < end; row++) {
      float sums[TILE];
      widen(p->dtype, table, p->w, (int64_t)row * p->cols, p->cols, weights);
      row_sums(p, block, row, weights, columns, scales, sums);
      for (int32_t lane = 0; lane < live; lane++) {
        int32_t t = first + lane;
        float addend = p->addend ? p->addend[(int64_t)t * p->rows + row] : 0.0f;
        p->out[t * p->out_stride + row] = oproj_bf16_from_f32(sums[lane] + addend);
      }
    }
  }
}

oproj_status ref_project(const ref_product *p) {
  int32_t block = p->dtype == OPROJ_DTYPE_E4M3 ? p->block : BF16_BLOCK;
  int64_t blocks = oproj_base_ceil_div(p->cols, block);
  float(*columns)[TILE] = malloc((size_t)p->cols * sizeof *columns);
  float(*scales)[TILE] = malloc((size_t)blocks * sizeof *scales);
  float *weight_rows = malloc((size_t)p->threads * (size_t)p->cols * sizeof *weight_rows);
  oproj_status status = OPROJ_OK;
  REQUIRE_GOTO(columns && scales && weight_rows, status, out, OPROJ_ERR_NOMEM,
               "no memory for a tile of %d x %d activations", TILE, p->cols);

  float table[256];
  for (int code = 0; code < 256; code++) table[code] = oproj_e4m3_to_f32((uint8_t)code);
  for (int32_t first = 0; first < p->tokens; first += TILE) {
    load_tile(p, table, block, first, columns, scales);
    project_tile(p, table, block, first, (const float(*)[TILE])columns,
                 (const float(*)[TILE])scales, weight_rows);
  }
out:
  free(weight_rows);
  free(scales);
  free(columns);
  return status;
}
