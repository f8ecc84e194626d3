/* data.c - values from a counter hash: the same on every machine, in any order. */
#include "support/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/num.h"

const oproj_dims data_tiny_v4 = {.hidden = 576,
                                 .heads = 16,
                                 .head_dim = 512,
                                 .rope_dim = 64,
                                 .groups = 4,
                                 .lora_rank = 256,
                                 .quant_block = 128};
const oproj_dims data_tiny_v41 = {.hidden = 80,
                                  .heads = 16,
                                  .head_dim = 512,
                                  .rope_dim = 64,
                                  .groups = 4,
                                  .lora_rank = 160,
                                  .quant_block = 32};

enum { STREAM_WO_A = 1, STREAM_WO_B, STREAM_INPUT, STREAM_POSITION, SCALE_STREAM = 100 };

uint64_t data_hash(uint64_t stream, uint64_t position) {
  uint64_t word = (stream << 48 ^ position) + UINT64_C(0x9E3779B97F4A7C15);
  word = (word ^ word >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  word = (word ^ word >> 27) * UINT64_C(0x94D049BB133111EB);
  return word ^ word >> 31;
}

double data_uniform(uint64_t stream, uint64_t position) {
  return (double)(data_hash(stream, position) >> 11) * 0x1p-52 - 1.0;
}

/* ---- weights ------------------------------------------------------------------------------- */

static int64_t blocks_of(int64_t extent, int32_t block) {
  return (extent + block - 1) / block;
}

/* Exact matrices hold `nonzeros` values of +-1 per row, one in each equal part of the row; in e4m3
 * the block's scale is 2^s and the code 2^-s, so that a lost scale changes the value. */
static int scale_shift(int stream, int64_t block) {
  return (int)(data_hash((uint64_t)stream + SCALE_STREAM, (uint64_t)block) % 7) - 3;
}

static double exact_value(int stream, int64_t row, int64_t col, int64_t cols, int nonzeros) {
  int64_t part = cols / nonzeros, which = col / part;
  uint64_t word = data_hash((uint64_t)stream, (uint64_t)(row * nonzeros + which));
  bool here = (word >> 8) % (uint64_t)part == (uint64_t)(col % part);
  if (which >= nonzeros || !here) return 0.0;
  return word & 1 ? 1.0 : -1.0;
}

static oproj_matrix make_matrix(int stream, bool exact, oproj_dtype dtype, int64_t rows,
                                int64_t cols, int32_t block, int nonzeros) {
  oproj_matrix m = {.dtype = dtype, .rows = rows, .cols = cols};
  int64_t block_cols = blocks_of(cols, block);
  double size = 1.0 / sqrt((double)cols); /* keeps products of the size of their input */
  uint8_t *codes = calloc((size_t)(rows * cols), dtype == OPROJ_DTYPE_BF16 ? 2 : 1);
  float *scales = calloc((size_t)(blocks_of(rows, block) * block_cols), sizeof *scales);
  for (int64_t b = 0; b < blocks_of(rows, block) * block_cols; b++)
    scales[b] =
        exact
            ? ldexpf(1.0f, scale_shift(stream, b))
            : (float)(size / 64.0 * (1.5 + 0.5 * data_uniform((uint64_t)stream + 50, (uint64_t)b)));
  for (int64_t i = 0; i < rows * cols; i++) {
    int64_t row = i / cols, col = i % cols;
    float scale = scales[row / block * block_cols + col / block];
    double value = exact ? exact_value(stream, row, col, cols, nonzeros)
                         : 1.7 * size * data_uniform((uint64_t)stream, (uint64_t)i);
    if (dtype == OPROJ_DTYPE_BF16)
      ((uint16_t *)(void *)codes)[i] = oproj_bf16_from_f32((float)value);
    else
      codes[i] = oproj_e4m3_from_f32((float)(value / scale));
  }
  m.data = codes;
  if (dtype == OPROJ_DTYPE_E4M3) {
    m.scales = scales;
    m.block = block;
  } else {
    free(scales);
  }
  return m;
}

/* ---- input --------------------------------------------------------------------------------- */

/* Exact: quarter turns, position p turning pair i by (p + i) quarters. */
static void fill_table(data_layer *layer, bool exact) {
  static const float quarter_cos[] = {1, 0, -1, 0};
  int32_t half = layer->dims.rope_dim / 2;
  for (int64_t p = 0; p < layer->cos_sin_rows; p++) {
    for (int32_t i = 0; i < half; i++) {
      double angle = (double)p * pow(10000.0, -(double)i / half);
      float *row = layer->cos_sin + p * layer->dims.rope_dim;
      row[i] = exact ? quarter_cos[(p + i) % 4] : (float)cos(angle);
      row[half + i] = exact ? quarter_cos[(p + i + 3) % 4] : (float)sin(angle);
    }
  }
}

data_layer data_make(const oproj_dims *dims, bool exact, oproj_dtype wo_a, oproj_dtype wo_b,
                     int32_t tokens) {
  int64_t z_cols = (int64_t)dims->groups * dims->lora_rank;
  int64_t group_cols = (int64_t)dims->heads / dims->groups * dims->head_dim;
  int64_t values = (int64_t)tokens * dims->heads * dims->head_dim;
  data_layer layer = {.dims = *dims, .tokens = tokens, .cos_sin_rows = 128};
  layer.wo_a = make_matrix(STREAM_WO_A, exact, wo_a, z_cols, group_cols, dims->quant_block, 8);
  layer.wo_b = make_matrix(STREAM_WO_B, exact, wo_b, dims->hidden, z_cols, dims->quant_block, 16);
  layer.attn_out = calloc((size_t)values + 1, sizeof *layer.attn_out);
  layer.positions = calloc((size_t)tokens + 1, sizeof *layer.positions);
  layer.cos_sin = calloc((size_t)(layer.cos_sin_rows * dims->rope_dim), sizeof *layer.cos_sin);
  for (int64_t i = 0; i < values; i++) {
    uint64_t word = data_hash(STREAM_INPUT, (uint64_t)i);
    layer.attn_out[i] =
        oproj_bf16_from_f32(exact ? (float)((int)(word % 5) - 2)
                                  : (float)(2.0 * data_uniform(STREAM_INPUT, (uint64_t)i)));
  }
  for (int32_t t = 0; t < tokens; t++)
    layer.positions[t] =
        (int64_t)(data_hash(STREAM_POSITION, (uint64_t)t) % (uint64_t)layer.cos_sin_rows);
  fill_table(&layer, exact);
  return layer;
}

/* Rows of blocks differ by one half of `binades`, blocks of a row by the other. */
static void spread_scales(const oproj_matrix *m, int binades) {
  int64_t columns = blocks_of(m->cols, m->block), count = blocks_of(m->rows, m->block) * columns;
  float *scales = (float *)m->scales, most = exp2f(ceilf(log2f(scales[0])));
  int rows = binades / 2, rest = binades - rows;
  for (int64_t i = 0; i < count; i++) {
    uint64_t row = data_hash(SCALE_STREAM, (uint64_t)(i / columns));
    uint64_t block = data_hash(SCALE_STREAM + 1, (uint64_t)i);
    int down = (int)(row % (uint64_t)(rows + 1)) + (int)(block % (uint64_t)(rest + 1));
    scales[i] = ldexpf(most, -down);
  }
}

static void spread_input(data_layer *layer, int binades) {
  int64_t block = layer->dims.quant_block;
  int64_t count = (int64_t)layer->tokens * layer->dims.heads * layer->dims.head_dim / block;
  for (int64_t i = 0; i < count; i++) {
    int down = (int)(data_hash(SCALE_STREAM + 2, (uint64_t)i) % (uint64_t)(binades + 1));
    uint16_t *values = layer->attn_out + i * block;
    for (int64_t k = 0; k < block; k++)
      values[k] = oproj_bf16_from_f32(ldexpf(oproj_bf16_to_f32(values[k]), -down));
  }
}

void data_spread(data_layer *layer, int binades) {
  spread_scales(&layer->wo_a, binades);
  spread_scales(&layer->wo_b, binades);
  spread_input(layer, binades / 2);
}

void data_free(data_layer *layer) {
  free((void *)layer->wo_a.data);
  free((void *)layer->wo_a.scales);
  free((void *)layer->wo_b.data);
  free((void *)layer->wo_b.scales);
  free(layer->attn_out);
  free(layer->positions);
  free(layer->cos_sin);
}

/* ---- shares -------------------------------------------------------------------------------- */

static oproj_matrix cut(const oproj_matrix *m, int64_t row_begin, int64_t row_end,
                        int64_t col_begin, int64_t col_end) {
  size_t width = m->dtype == OPROJ_DTYPE_BF16 ? 2 : 1;
  oproj_matrix out = *m;
  out.rows = row_end - row_begin;
  out.cols = col_end - col_begin;
  char *data = malloc((size_t)(out.rows * out.cols) * width + 1);
  for (int64_t r = 0; r < out.rows; r++)
    memcpy(data + (size_t)(r * out.cols) * width,
           (const char *)m->data + (size_t)((row_begin + r) * m->cols + col_begin) * width,
           (size_t)out.cols * width);
  out.data = data;
  if (!m->scales) return out;
  int64_t whole = blocks_of(m->cols, m->block), rows = blocks_of(out.rows, m->block),
          cols = blocks_of(out.cols, m->block);
  float *scales = malloc((size_t)(rows * cols) * sizeof *scales);
  for (int64_t r = 0; r < rows; r++)
    memcpy(scales + r * cols, m->scales + (row_begin / m->block + r) * whole + col_begin / m->block,
           (size_t)cols * sizeof *scales);
  out.scales = scales;
  return out;
}

data_share data_take(const data_layer *layer, const oproj_shard *shard) {
  return (data_share){.wo_a = cut(&layer->wo_a, shard->z_begin, shard->z_end, 0, layer->wo_a.cols),
                      .wo_b = cut(&layer->wo_b, 0, layer->wo_b.rows, shard->z_begin, shard->z_end)};
}

void data_share_free(data_share *share) {
  free((void *)share->wo_a.data);
  free((void *)share->wo_a.scales);
  free((void *)share->wo_b.data);
  free((void *)share->wo_b.scales);
}

oproj_io data_io(const data_layer *layer, const oproj_shard *shard) {
  const oproj_dims *d = &layer->dims;
  return (oproj_io){.tokens = layer->tokens,
                    .attn_out = layer->attn_out + (int64_t)shard->head_begin * d->head_dim,
                    .token_stride = (int64_t)d->heads * d->head_dim,
                    .head_stride = d->head_dim,
                    .positions = layer->positions,
                    .cos_sin = layer->cos_sin,
                    .cos_sin_rows = layer->cos_sin_rows,
                    .cos_sin_width = d->rope_dim};
}

double data_error(const uint16_t *got, const double *want, int64_t count) {
  double error = 0.0, norm = 0.0;
  for (int64_t i = 0; i < count; i++) {
    double difference = (double)oproj_bf16_to_f32(got[i]) - want[i];
    error += difference * difference;
    norm += want[i] * want[i];
  }
  return sqrt(error / norm);
}
