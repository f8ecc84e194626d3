/* check.c - see check.h. */
#include "check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* How many tokens are checked, and which token the `at`-th of them is. */
static int32_t check_rows(int32_t tokens) {
  return tokens < CHECK_ROWS ? tokens : CHECK_ROWS;
}

static int32_t check_row(int32_t tokens, int32_t at) {
  int32_t rows = check_rows(tokens);
  return rows < 2 ? 0 : (int32_t)((int64_t)at * (tokens - 1) / (rows - 1));
}

static int64_t check_count(const uint16_t *got, const uint16_t *want, int64_t count,
                           double tolerance) {
  double squares = 0.0;
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; i++) {
    double value = (double)data_from_bf16(want[i]);
    squares += value * value;
  }
  double base = tolerance * sqrt(squares / (double)count);
  for (int64_t i = 0; i < count; i++) {
    double value = (double)data_from_bf16(want[i]);
    double off = fabs((double)data_from_bf16(got[i]) - value);
    if (!(off <= fabs(value) / 128 + base)) wrong++; /* NaN is wrong too */
  }
  return wrong;
}

/* ---- the reference ------------------------------------------------------------------------- */

/* This rank's share as a model of its own, on the host, with layer `layer` where that is not -1. */
typedef struct reference {
  oproj_comm *comm;
  oproj_ctx *ctx;
  oproj_layer *layer;
  uint16_t *in, *want, *got; /* of the checked tokens */
  uint8_t *codes, *got_codes;
  float *scales, *all_scales;
  int64_t positions[CHECK_ROWS];
  float *cos_sin;
} reference;

static void close_reference(reference *ref) {
  oproj_layer_destroy(ref->layer);
  oproj_ctx_destroy(ref->ctx);
  oproj_comm_destroy(ref->comm);
  free(ref->in);
  free(ref->want);
  free(ref->got);
  free(ref->codes);
  free(ref->got_codes);
  free(ref->scales);
  free(ref->all_scales);
  free(ref->cos_sin);
}

static oproj_status open_reference(const bench_rig *rig, int32_t layer, reference *ref) {
  oproj_dims dims = rig->dims;
  dims.groups = rig->groups;
  dims.heads = rig->heads;
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = CHECK_ROWS;
  config.reduce = OPROJ_REDUCE_NONE;
  oproj_status status = oproj_comm_self(&ref->comm);
  if (status == OPROJ_OK) status = oproj_ctx_create(&ref->ctx, ref->comm, &dims, &config);
  if (status != OPROJ_OK || layer < 0) return status;
  oproj_matrix wo_a, wo_b;
  rig_matrices(rig, layer, &wo_a, &wo_b);
  return oproj_layer_create(&ref->layer, ref->ctx, &wo_a, &wo_b);
}

/* Row check_row(at) of a device matrix [tokens, bytes] becomes row `at` of a host matrix. */
static oproj_status fetch_rows(const bench_rig *rig, int32_t tokens, const void *from, size_t bytes,
                               void *to) {
  oproj_status status = OPROJ_OK;
  for (int32_t at = 0; at < check_rows(tokens) && status == OPROJ_OK; at++)
    status = oproj_buffer_read(rig->ctx, (char *)to + (size_t)at * bytes,
                               (const char *)from + (size_t)check_row(tokens, at) * bytes, bytes,
                               device_stream(rig->device));
  return status;
}

/* The checked tokens' input, for the reference to read. */
static oproj_status fetch_input(const bench_rig *rig, int32_t tokens, int32_t call, reference *ref,
                                oproj_io *out) {
  size_t row = (size_t)rig->heads * (size_t)rig->dims.head_dim * sizeof(uint16_t);
  size_t table = (size_t)RIG_ROPE_ROWS * (size_t)rig->dims.rope_dim * sizeof(float);
  oproj_io io = rig_io(rig, tokens, call);
  ref->in = malloc(row * CHECK_ROWS);
  ref->cos_sin = malloc(table);
  if (!ref->in || !ref->cos_sin) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a check");
  oproj_status status = fetch_rows(rig, tokens, io.attn_out, row, ref->in);
  if (status == OPROJ_OK)
    status = fetch_rows(rig, tokens, io.positions, sizeof *ref->positions, ref->positions);
  if (status == OPROJ_OK)
    status =
        oproj_buffer_read(rig->ctx, ref->cos_sin, io.cos_sin, table, device_stream(rig->device));
  *out = io;
  out->tokens = check_rows(tokens);
  out->attn_out = ref->in;
  out->positions = ref->positions;
  out->cos_sin = ref->cos_sin;
  out->y = ref->want;
  return status;
}

/* ---- values -------------------------------------------------------------------------------- */

static oproj_status compute(const bench_rig *rig, check_stage stage, int32_t tokens, int32_t call,
                            reference *ref) {
  oproj_io io;
  oproj_status status;
  if (stage == CHECK_WO_B) {
    size_t row = (size_t)rig->z_cols * sizeof *rig->z;
    ref->in = malloc(row * CHECK_ROWS);
    if (!ref->in) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a check");
    status = fetch_rows(rig, tokens, rig->z, row, ref->in);
    if (status != OPROJ_OK) return status;
    return oproj_out_forward(ref->layer, check_rows(tokens), ref->in, ref->want, NULL);
  }
  status = fetch_input(rig, tokens, call, ref, &io);
  if (status != OPROJ_OK) return status;
  if (stage == CHECK_WO_A) return oproj_group_forward(ref->layer, &io, ref->want, NULL);
  return oproj_forward(ref->layer, &io, NULL);
}

/* Every rank's reference, summed. */
static oproj_status sum_references(const bench_rig *rig, oproj_status mine, uint16_t *want,
                                   int64_t count) {
  float *sum = malloc((size_t)count * sizeof *sum);
  if (mine == OPROJ_OK && !sum) mine = oproj_fail(OPROJ_ERR_NOMEM, "no memory for a check");
  oproj_status status = oproj_comm_agree(rig->job->comm, mine);
  if (status == OPROJ_OK) {
    for (int64_t i = 0; i < count; i++) sum[i] = data_from_bf16(want[i]);
    job_sum_values(rig->job, sum, count);
    for (int64_t i = 0; i < count; i++) want[i] = data_to_bf16(sum[i]);
  }
  free(sum);
  return status;
}

/* The *held checked tokens that this rank has of `result`, and the reference's beside them. */
static oproj_status fetch_result(const bench_rig *rig, int32_t tokens, const uint16_t *result,
                                 int32_t cols, reference *ref, int32_t *held) {
  size_t row = (size_t)cols * sizeof *result;
  int32_t begin = 0, end = tokens;
  oproj_status status = OPROJ_OK;
  if (rig->reduces && rig->args->reduce == OPROJ_REDUCE_SCATTER)
    oproj_plan_rows(tokens, rig->job->size, rig->job->rank, &begin, &end);
  *held = 0;
  for (int32_t at = 0; at < check_rows(tokens) && status == OPROJ_OK; at++) {
    int32_t token = check_row(tokens, at);
    if (token < begin || token >= end) continue;
    memmove(ref->want + *held * (int64_t)cols, ref->want + at * (int64_t)cols, row);
    status = oproj_buffer_read(rig->ctx, ref->got + *held * (int64_t)cols,
                               result + (token - begin) * (int64_t)cols, row,
                               device_stream(rig->device));
    ++*held;
  }
  return status;
}

oproj_status check_values(bench_rig *rig, check_stage stage, int32_t tokens, int32_t call,
                          int32_t layer, const uint16_t *result, int64_t *wrong) {
  int32_t cols = stage == CHECK_WO_A ? rig->z_cols : rig->dims.hidden;
  size_t row = (size_t)cols * sizeof *result;
  int32_t held = 0;
  reference ref = {0};
  ref.want = malloc(row * CHECK_ROWS);
  ref.got = malloc(row * CHECK_ROWS);
  oproj_status status = ref.want && ref.got ? open_reference(rig, layer, &ref)
                                            : oproj_fail(OPROJ_ERR_NOMEM, "no memory for a check");
  if (status == OPROJ_OK) status = compute(rig, stage, tokens, call, &ref);
  if (rig->reduces)
    status = sum_references(rig, status, ref.want, (int64_t)check_rows(tokens) * cols);
  if (status == OPROJ_OK) status = fetch_result(rig, tokens, result, cols, &ref, &held);
  if (status == OPROJ_OK)
    *wrong =
        check_count(ref.got, ref.want, (int64_t)held * cols, stage == CHECK_NAIVE ? 0.5 : 0.05);
  close_reference(&ref);
  return status;
}

/* ---- codes and scales ---------------------------------------------------------------------- */

static size_t scale_bytes(const bench_rig *rig, int32_t tokens) {
  return oproj_scale_bytes(OPROJ_SCALE_F32, rig->groups, tokens, rig->group_cols,
                           rig->dims.quant_block);
}

static oproj_status quantize(const bench_rig *rig, int32_t tokens, int32_t call,
                             const oproj_quant *result, reference *ref) {
  int32_t rows = check_rows(tokens);
  size_t code_bytes = (size_t)rig->groups * CHECK_ROWS * (size_t)rig->group_cols;
  oproj_io io;
  ref->codes = malloc(code_bytes);
  ref->got_codes = malloc(code_bytes);
  ref->scales = malloc(scale_bytes(rig, rows));
  ref->all_scales = malloc(scale_bytes(rig, tokens));
  if (!ref->codes || !ref->got_codes || !ref->scales || !ref->all_scales)
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a check");
  oproj_status status = open_reference(rig, -1, ref);
  if (status == OPROJ_OK) status = fetch_input(rig, tokens, call, ref, &io);
  oproj_quant out = {.codes = ref->codes,
                     .scales = ref->scales,
                     .layout = OPROJ_SCALE_F32,
                     .groups = rig->groups,
                     .tokens = rows,
                     .cols = rig->group_cols};
  if (status == OPROJ_OK) status = oproj_input_quantize(ref->ctx, &io, &out, NULL);
  size_t cols = (size_t)rig->group_cols;
  for (int32_t g = 0; g < rig->groups && status == OPROJ_OK; g++)
    status = fetch_rows(rig, tokens, result->codes + (size_t)g * (size_t)tokens * cols, cols,
                        ref->got_codes + (size_t)g * (size_t)rows * cols);
  if (status == OPROJ_OK)
    status = oproj_buffer_read(rig->ctx, ref->all_scales, result->scales, scale_bytes(rig, tokens),
                               device_stream(rig->device));
  return status;
}

static int64_t count_quantized(const bench_rig *rig, int32_t tokens, const reference *ref) {
  int32_t rows = check_rows(tokens), block = rig->dims.quant_block;
  int64_t columns = (int64_t)rig->groups * ((rig->group_cols + block - 1) / block);
  int64_t codes = (int64_t)rig->groups * rows * rig->group_cols, wrong = 0;
  int64_t all_stride = (tokens + 3) / 4 * 4, stride = (rows + 3) / 4 * 4;
  for (int64_t i = 0; i < codes; i++) wrong += ref->codes[i] != ref->got_codes[i];
  for (int64_t c = 0; c < columns; c++)
    for (int32_t at = 0; at < rows; at++)
      wrong += memcmp(&ref->scales[c * stride + at],
                      &ref->all_scales[c * all_stride + check_row(tokens, at)], sizeof(float)) != 0;
  return wrong;
}

oproj_status check_quantized(bench_rig *rig, int32_t tokens, int32_t call,
                             const oproj_quant *result, int64_t *wrong) {
  reference ref = {0};
  oproj_status status = quantize(rig, tokens, call, result, &ref);
  if (status == OPROJ_OK) *wrong = count_quantized(rig, tokens, &ref);
  close_reference(&ref);
  return status;
}
