/* run_check.c - the double-precision evaluation of a layer.
 *
 * The input's codes come from the library's quantiser, which the golden vectors pin down byte for
 * byte.  Both products are evaluated here, in double, by code that shares nothing with any backend;
 * z is rounded to bf16 and quantised between them, as the layer is defined. */
#include "run_check.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

struct run_check {
  const oproj_checkpoint *checkpoint;
  const oproj_model *model;
  const run_input *input;
  int32_t ranks;
  bool pairwise; /* partials were added two by two in bf16 (OPROJ_REDUCE_VENDOR) */
  oproj_comm *alone;
  oproj_ctx *ctx;       /* one rank, reference backend */
  oproj_layer *layer;   /* of the layer under check */
  oproj_slices weights; /* whole matrices */
  int32_t z_cols, group_cols;
  uint16_t *x;        /* bf16 [groups, tokens, group_cols] */
  oproj_quant xq, zq; /* f32 scales */
  double *z64, *y64;  /* [tokens, z_cols], [tokens, hidden] */
  uint16_t *z, *y1;
};

/* ---- number formats, written down once more ------------------------------------------------- */

static double bf16_value(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

static double e4m3_value(uint8_t code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  double magnitude = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
  if ((code & 0x7F) == 0x7F) magnitude = NAN;
  return code & 0x80 ? -magnitude : magnitude;
}

static uint16_t bf16_nearest(double value) {
  if (isnan(value)) return 0x7FC0;
  /* bf16 keeps 8 significant bits: round the double to that many, ties to even. */
  int exponent;
  frexp(value, &exponent);
  int unit = exponent - 8 > -133 ? exponent - 8 : -133; /* subnormals count multiples of 2^-133 */
  float rounded = (float)ldexp(nearbyint(ldexp(value, -unit)), unit);
  uint32_t word;
  memcpy(&word, &rounded, sizeof word);
  return (uint16_t)(word >> 16);
}

/* ---- products in double --------------------------------------------------------------------- */

/* One operand: values [rows, cols] with optional scales per (row block, column block). */
typedef struct operand {
  oproj_dtype dtype;
  const void *values;
  int64_t cols;
  const float *scales;
  int64_t scale_row, scale_col; /* strides of a block row and of a block column */
  int64_t row_block, col_block;
} operand;

static void decode_row(const operand *m, const double table[256], int64_t row, double *out) {
  if (m->dtype == OPROJ_DTYPE_BF16) {
    const uint16_t *values = (const uint16_t *)m->values + row * m->cols;
    for (int64_t k = 0; k < m->cols; k++) out[k] = bf16_value(values[k]);
    return;
  }
  const uint8_t *codes = (const uint8_t *)m->values + row * m->cols;
  const float *scales = m->scales + row / m->row_block * m->scale_row;
  for (int64_t begin = 0; begin < m->cols; begin += m->col_block) {
    double scale = scales[begin / m->col_block * m->scale_col];
    int64_t end = begin + m->col_block < m->cols ? begin + m->col_block : m->cols;
    for (int64_t k = begin; k < end; k++) out[k] = table[codes[k]] * scale;
  }
}

/* OpenMP's number of threads, but no more than the CPUs: a team of thousands ends the process. */
static int team(void) {
  int threads = omp_get_max_threads(), cpus = omp_get_num_procs();
  return threads < cpus ? threads : cpus;
}

/* out[t * stride + row] = a[t] . w[row], a decoded [tokens, cols]. */
static oproj_status multiply(const operand *a, int32_t tokens, const operand *w, int64_t first_row,
                             int64_t rows, double *out, int64_t stride) {
  double table[256];
  for (int code = 0; code < 256; code++) table[code] = e4m3_value((uint8_t)code);
  double *activations = malloc((size_t)tokens * (size_t)a->cols * sizeof *activations + 1);
  if (!activations) return oproj_fail(OPROJ_ERR_NOMEM, "no memory to check %d tokens", tokens);
  for (int32_t t = 0; t < tokens; t++) decode_row(a, table, t, activations + t * a->cols);

  int failed = 0;
#pragma omp parallel reduction(| : failed) num_threads(team())
  {
    double *weights = malloc((size_t)w->cols * sizeof *weights);
    failed |= !weights;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      if (!weights) continue;
      decode_row(w, table, first_row + row, weights);
      for (int32_t t = 0; t < tokens; t++) {
        const double *activation = activations + t * a->cols;
        double sum = 0.0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < w->cols; k++) sum += activation[k] * weights[k];
        out[t * stride + row] = sum;
      }
    }
    free(weights);
  }
  free(activations);
  return failed ? oproj_fail(OPROJ_ERR_NOMEM, "no memory to check a layer") : OPROJ_OK;
}

static operand weight_operand(const oproj_matrix *m) {
  int64_t block = m->block ? m->block : 1;
  return (operand){m->dtype, m->data, m->cols, m->scales, (m->cols + block - 1) / block,
                   1,        block,   block};
}

/* A quantised activation's group, with the scales of OPROJ_SCALE_F32. */
static operand activation_operand(const oproj_quant *q, int32_t group, int32_t block) {
  int64_t aligned = (q->tokens + 3) / 4 * 4, columns = q->cols / block;
  return (operand){OPROJ_DTYPE_E4M3,
                   q->codes + (int64_t)group * q->tokens * q->cols,
                   q->cols,
                   (const float *)q->scales + group * columns * aligned,
                   1,
                   aligned,
                   1,
                   block};
}

/* ---- the layer in double -------------------------------------------------------------------- */

static oproj_status evaluate_groups(run_check *c, const oproj_io *io) {
  const oproj_dims *d = &c->model->dims;
  operand w = weight_operand(&c->weights.wo_a);
  int quantised = c->weights.wo_a.dtype == OPROJ_DTYPE_E4M3;
  oproj_status status = quantised ? oproj_input_quantize(c->ctx, io, &c->xq, NULL)
                                  : oproj_input_rotate(c->ctx, io, c->x, NULL);
  for (int32_t group = 0; group < d->groups && status == OPROJ_OK; group++) {
    operand a = quantised ? activation_operand(&c->xq, group, d->quant_block)
                          : (operand){.dtype = OPROJ_DTYPE_BF16,
                                      .values = c->x + (int64_t)group * io->tokens * c->group_cols,
                                      .cols = c->group_cols};
    int64_t first = (int64_t)group * d->lora_rank;
    status = multiply(&a, io->tokens, &w, first, d->lora_rank, c->z64 + first, c->z_cols);
  }
  return status;
}

static oproj_status evaluate_out(run_check *c) {
  const oproj_dims *d = &c->model->dims;
  int32_t tokens = c->input->tokens;
  for (int64_t i = 0; i < (int64_t)tokens * c->z_cols; i++) c->z[i] = bf16_nearest(c->z64[i]);
  operand w = weight_operand(&c->weights.wo_b);
  operand a = {.dtype = OPROJ_DTYPE_BF16, .values = c->z, .cols = c->z_cols};
  if (c->weights.wo_b.dtype == OPROJ_DTYPE_E4M3) {
    oproj_status status = oproj_z_quantize(c->ctx, tokens, c->z, &c->zq, NULL);
    if (status != OPROJ_OK) return status;
    a = activation_operand(&c->zq, 0, d->quant_block);
  }
  return multiply(&a, tokens, &w, 0, d->hidden, c->y64, d->hidden);
}

/* ---- comparison ----------------------------------------------------------------------------- */

static bool is_finite_token(const run_check *c, int32_t token) {
  int64_t width = (int64_t)c->model->dims.heads * c->model->dims.head_dim;
  const uint16_t *values = c->input->attn_out + token * width;
  for (int64_t i = 0; i < width; i++)
    if (!isfinite(bf16_value(values[i]))) return false;
  return true;
}

typedef struct sums {
  double error, norm, one_error, one_norm;
} sums;

static void compare_token(const run_check *c, int32_t token, const uint16_t *y, sums *s,
                          run_check_result *r) {
  int64_t begin = (int64_t)token * c->model->dims.hidden, end = begin + c->model->dims.hidden;
  bool finite = is_finite_token(c, token);
  for (int64_t i = begin; i < end; i++) {
    double got = bf16_value(y[i]), want = c->y64[i], one = bf16_value(c->y1[i]);
    r->one_rank_differs += y[i] != c->y1[i];
    r->nan_differs += isnan(got) != isnan(want);
    if (!isfinite(got) || !isfinite(want)) {
      r->not_finite += finite;
      continue;
    }
    r->compared++;
    s->error += (got - want) * (got - want);
    s->norm += want * want;
    s->one_error += (got - one) * (got - one);
    s->one_norm += one * one;
  }
}

/* One rank rounds y to bf16 once and lies within 2.5e-3 of double precision where sums are f32,
 * within 4e-3 where the tensor core's short sums take part.  Several round their partials too,
 * which alone is 2.35e-3 on average; added pairwise in bf16 they are rounded once more per rank. */
static double tolerance_of(const run_check *c, bool exact_path) {
  if (c->ranks == 1) return exact_path ? 2.5e-3 : 4e-3;
  double tolerance = exact_path ? 3e-3 : 4.5e-3;
  return c->pairwise ? tolerance * sqrt(c->ranks / 2.0) : tolerance;
}

/* A token with finite input must have finite results, so that where there is one something has been
 * compared or not_finite tells that nothing could be. */
static void compare(const run_check *c, bool exact_path, const uint16_t *y, run_check_result *r) {
  sums s = {0};
  *r = (run_check_result){.tolerance = tolerance_of(c, exact_path)};
  for (int32_t t = 0; t < c->input->tokens; t++) compare_token(c, t, y, &s, r);
  r->error = s.norm > 0.0 ? sqrt(s.error / s.norm) : sqrt(s.error);
  r->one_rank_error = s.one_norm > 0.0 ? sqrt(s.one_error / s.one_norm) : sqrt(s.one_error);
  bool near = r->error <= r->tolerance && r->one_rank_error <= 2.0 * r->tolerance;
  bool equal = r->error == 0.0 && r->one_rank_differs == 0;
  r->passed = r->nan_differs == 0 && r->not_finite == 0 && (c->model->exact ? equal : near);
}

/* ---- weights of all ranks ------------------------------------------------------------------- */

static void place_matrix(oproj_matrix *whole, const oproj_matrix *part, int64_t row, int64_t col) {
  size_t width = part->dtype == OPROJ_DTYPE_BF16 ? 2 : 1;
  for (int64_t r = 0; r < part->rows; r++)
    memcpy((char *)whole->data + (size_t)((row + r) * whole->cols + col) * width,
           (const char *)part->data + (size_t)(r * part->cols) * width, (size_t)part->cols * width);
  if (!part->scales) return;
  int64_t block = part->block, whole_cols = (whole->cols + block - 1) / block;
  int64_t rows = (part->rows + block - 1) / block, cols = (part->cols + block - 1) / block;
  for (int64_t r = 0; r < rows; r++)
    memcpy((float *)whole->scales + (row / block + r) * whole_cols + col / block,
           part->scales + r * cols, (size_t)cols * sizeof(float));
}

static oproj_status allocate_matrix(oproj_matrix *whole, const oproj_matrix *part, int64_t rows,
                                    int64_t cols) {
  *whole = *part;
  whole->rows = rows;
  whole->cols = cols;
  int64_t block = part->block ? part->block : 1;
  whole->data = malloc((size_t)(rows * cols) * (part->dtype == OPROJ_DTYPE_BF16 ? 2 : 1));
  whole->scales = NULL;
  if (part->scales)
    whole->scales = malloc((size_t)(((rows + block - 1) / block) * ((cols + block - 1) / block)) *
                           sizeof(float));
  if (!whole->data || (part->scales && !whole->scales))
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a whole layer");
  return OPROJ_OK;
}

/* The whole layer, put together from a split checkpoint's parts. */
static oproj_status join_parts(const run_check *c, int32_t layer, oproj_slices *whole) {
  const oproj_dims *d = &c->model->dims;
  int32_t size = oproj_checkpoint_split_size(c->checkpoint);
  oproj_status status = OPROJ_OK;
  for (int32_t rank = 0; rank < size && status == OPROJ_OK; rank++) {
    oproj_shard shard;
    oproj_slices part = {0};
    status = oproj_plan_shard(d, oproj_checkpoint_split_kind(c->checkpoint), size, rank, &shard);
    if (status == OPROJ_OK) status = oproj_checkpoint_read(c->checkpoint, layer, &shard, &part);
    if (status == OPROJ_OK && rank == 0) {
      status = allocate_matrix(&whole->wo_a, &part.wo_a, c->z_cols, c->group_cols);
      if (status == OPROJ_OK)
        status = allocate_matrix(&whole->wo_b, &part.wo_b, d->hidden, c->z_cols);
    }
    if (status == OPROJ_OK) {
      place_matrix(&whole->wo_a, &part.wo_a, shard.z_begin, 0);
      place_matrix(&whole->wo_b, &part.wo_b, 0, shard.z_begin);
    }
    oproj_slices_free(&part);
  }
  return status;
}

static oproj_status read_whole(run_check *c, int32_t layer) {
  oproj_slices_free(&c->weights);
  if (oproj_checkpoint_split_size(c->checkpoint) > 0) return join_parts(c, layer, &c->weights);
  return oproj_checkpoint_read(c->checkpoint, layer, oproj_ctx_shard(c->ctx), &c->weights);
}

/* ---- life ----------------------------------------------------------------------------------- */

void run_check_destroy(run_check *c) {
  if (!c) return;
  oproj_slices_free(&c->weights);
  oproj_layer_destroy(c->layer);
  oproj_ctx_destroy(c->ctx);
  oproj_comm_destroy(c->alone);
  free(c->x);
  free(c->xq.codes);
  free(c->xq.scales);
  free(c->zq.codes);
  free(c->zq.scales);
  free(c->z64);
  free(c->y64);
  free(c->z);
  free(c->y1);
  free(c);
}

static oproj_status allocate(run_check *c) {
  const oproj_dims *d = &c->model->dims;
  int32_t tokens = c->input->tokens, block = d->quant_block;
  c->z_cols = d->groups * d->lora_rank;
  c->group_cols = d->heads / d->groups * d->head_dim;
  size_t inputs = (size_t)tokens * (size_t)d->heads * (size_t)d->head_dim;
  size_t z = (size_t)tokens * (size_t)c->z_cols, y = (size_t)tokens * (size_t)d->hidden;
  c->x = malloc(inputs * sizeof *c->x + 1);
  c->xq = (oproj_quant){
      malloc(inputs + 1),
      malloc(oproj_scale_bytes(OPROJ_SCALE_F32, d->groups, tokens, c->group_cols, block) + 1),
      OPROJ_SCALE_F32,
      d->groups,
      tokens,
      c->group_cols};
  c->zq = (oproj_quant){
      malloc(z + 1),   malloc(oproj_scale_bytes(OPROJ_SCALE_F32, 1, tokens, c->z_cols, block) + 1),
      OPROJ_SCALE_F32, 1,
      tokens,          c->z_cols};
  c->z64 = malloc(z * sizeof *c->z64 + 1);
  c->y64 = malloc(y * sizeof *c->y64 + 1);
  c->z = malloc(z * sizeof *c->z + 1);
  c->y1 = malloc(y * sizeof *c->y1 + 1);
  int complete = c->x && c->xq.codes && c->xq.scales && c->zq.codes && c->zq.scales && c->z64 &&
                 c->y64 && c->z && c->y1;
  return complete ? OPROJ_OK : oproj_fail(OPROJ_ERR_NOMEM, "no memory to check %d tokens", tokens);
}

oproj_status run_check_create(run_check **out, const oproj_checkpoint *checkpoint, int32_t ranks,
                              oproj_reduce reduce, const run_input *whole) {
  run_check *c = calloc(1, sizeof *c);
  if (!c) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a check");
  c->checkpoint = checkpoint;
  c->model = oproj_checkpoint_model(checkpoint);
  c->input = whole;
  c->ranks = ranks;
  c->pairwise = reduce == OPROJ_REDUCE_VENDOR;
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = whole->tokens;
  oproj_status status = oproj_comm_self(&c->alone);
  if (status == OPROJ_OK) status = oproj_ctx_create(&c->ctx, c->alone, &c->model->dims, &config);
  if (status == OPROJ_OK) status = allocate(c);
  if (status != OPROJ_OK) {
    run_check_destroy(c);
    return status;
  }
  *out = c;
  return OPROJ_OK;
}

oproj_status run_check_layer(run_check *c, int32_t layer, bool exact_path, const float *cos_sin,
                             int64_t cos_sin_rows, const uint16_t *y, run_check_result *out) {
  oproj_io io = {.tokens = c->input->tokens,
                 .attn_out = c->input->attn_out,
                 .positions = c->input->rows,
                 .cos_sin = cos_sin,
                 .cos_sin_rows = cos_sin_rows,
                 .cos_sin_width = c->model->dims.rope_dim,
                 .y = c->y1};
  oproj_layer_destroy(c->layer);
  c->layer = NULL;
  oproj_status status = read_whole(c, layer);
  if (status == OPROJ_OK)
    status = oproj_layer_create(&c->layer, c->ctx, &c->weights.wo_a, &c->weights.wo_b);
  if (status == OPROJ_OK) status = oproj_forward(c->layer, &io, NULL);
  if (status == OPROJ_OK) status = evaluate_groups(c, &io);
  if (status == OPROJ_OK) status = evaluate_out(c);
  if (status == OPROJ_OK) compare(c, exact_path, y, out);
  return status;
}
