/* run_input.c - reads this rank's heads of an input file, or makes them up. */
#include "run_input.h"

#include <stdlib.h>
#include <string.h>

#include "oproj/safetensors.h"

void run_input_free(run_input *input) {
  free(input->attn_out);
  free(input->positions);
  free(input->cos_sin);
  *input = (run_input){0};
}

/* The tensor `name` of that dtype and shape; extents of -1 fit anything.  NULL sets the last error. */
static const oproj_tensor *find_tensor(const oproj_tensors_file *file, const char *name,
                                       const char *dtype, int32_t dimensions,
                                       const int64_t *shape) {
  const char *path = oproj_tensors_path(file);
  const oproj_tensor *tensor = oproj_tensors_find(file, name);
  if (!tensor) {
    oproj_fail(OPROJ_ERR_IO, "%s has no tensor %s", path, name);
    return NULL;
  }
  if (strcmp(tensor->dtype, dtype) != 0) {
    oproj_fail(OPROJ_ERR_SHAPE, "%s in %s is %s; it must be %s", name, path, tensor->dtype, dtype);
    return NULL;
  }
  if (tensor->dimensions != dimensions) {
    oproj_fail(OPROJ_ERR_SHAPE, "%s in %s has %d dimensions; it must have %d", name, path,
               tensor->dimensions, dimensions);
    return NULL;
  }
  for (int32_t i = 0; i < dimensions; i++) {
    if (shape[i] < 0 || tensor->shape[i] == shape[i]) continue;
    oproj_fail(OPROJ_ERR_SHAPE, "%s in %s has %lld as dimension %d; it must have %lld", name, path,
               (long long)tensor->shape[i], i, (long long)shape[i]);
    return NULL;
  }
  return tensor;
}

/* `count` positions of `width` bytes each, widened to 64 bits. */
static void widen_positions(const void *raw, size_t width, int32_t count, int64_t *out) {
  for (int32_t t = 0; t < count; t++)
    out[t] = width == 4 ? ((const int32_t *)raw)[t] : ((const int64_t *)raw)[t];
}

static oproj_status read_positions(const oproj_tensors_file *file, run_input *out) {
  const oproj_tensor *any = oproj_tensors_find(file, "positions");
  const char *dtype = any && strcmp(any->dtype, "I32") == 0 ? "I32" : "I64";
  size_t width = strcmp(dtype, "I32") == 0 ? 4 : 8;
  const oproj_tensor *tensor = find_tensor(file, "positions", dtype, 1, (int64_t[]){out->tokens});
  if (!tensor) return OPROJ_ERR_SHAPE;
  void *raw = malloc((size_t)tensor->bytes + 1);
  out->positions = malloc((size_t)out->tokens * sizeof *out->positions + 1);
  oproj_status status =
      raw && out->positions
          ? oproj_tensors_read(file, tensor, 0, tensor->bytes, raw)
          : oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d positions", out->tokens);
  if (status == OPROJ_OK) widen_positions(raw, width, out->tokens, out->positions);
  free(raw);
  return status;
}

static oproj_status check_positions(const oproj_model *model, const run_input *input) {
  int64_t rows = input->cos_sin && input->cos_sin_rows < model->max_position ? input->cos_sin_rows
                                                                             : model->max_position;
  for (int32_t t = 0; t < input->tokens; t++)
    if (input->positions[t] < 0 || input->positions[t] >= rows)
      return oproj_fail(OPROJ_ERR_INVALID, "positions[%d] is %lld; it must be in [0, %lld)", t,
                        (long long)input->positions[t], (long long)rows);
  return OPROJ_OK;
}

static oproj_status read_table(const oproj_tensors_file *file, const oproj_model *model,
                               run_input *out) {
  if (!oproj_tensors_find(file, "cos_sin")) return OPROJ_OK;
  const oproj_tensor *tensor =
      find_tensor(file, "cos_sin", "F32", 2, (int64_t[]){-1, model->dims.rope_dim});
  if (!tensor) return OPROJ_ERR_SHAPE;
  out->cos_sin = malloc((size_t)tensor->bytes + 1);
  if (!out->cos_sin)
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a cos_sin table of %lld bytes",
                      (long long)tensor->bytes);
  out->cos_sin_rows = tensor->shape[0];
  return oproj_tensors_read(file, tensor, 0, tensor->bytes, out->cos_sin);
}

/* The shard's heads are contiguous within each token. */
static oproj_status read_heads(const oproj_tensors_file *file, const oproj_tensor *tensor,
                               const oproj_model *model, const oproj_shard *shard, run_input *out) {
  int64_t row = (int64_t)model->dims.heads * model->dims.head_dim;
  int64_t begin = (int64_t)shard->head_begin * model->dims.head_dim;
  int64_t held = (int64_t)(shard->head_end - shard->head_begin) * model->dims.head_dim;
  out->attn_out = malloc((size_t)(out->tokens * held) * sizeof *out->attn_out + 1);
  if (!out->attn_out)
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d tokens of input", out->tokens);
  oproj_status status = OPROJ_OK;
  for (int32_t t = 0; t < out->tokens && status == OPROJ_OK; t++)
    status =
        oproj_tensors_read(file, tensor, (t * row + begin) * 2, held * 2, out->attn_out + t * held);
  return status;
}

static oproj_status read_file(const oproj_tensors_file *file, const oproj_model *model,
                              const oproj_shard *shard, int32_t tokens, run_input *out) {
  const oproj_dims *d = &model->dims;
  const oproj_tensor *attn_out =
      find_tensor(file, "attn_out", "BF16", 3, (int64_t[]){tokens, d->heads, d->head_dim});
  if (!attn_out) return OPROJ_ERR_SHAPE;
  if (attn_out->shape[0] * d->hidden > INT32_MAX)
    return oproj_fail(OPROJ_ERR_INVALID, "%lld tokens x hidden %d exceed 2^31 - 1",
                      (long long)attn_out->shape[0], d->hidden);
  out->tokens = (int32_t)attn_out->shape[0];
  oproj_status status = read_positions(file, out);
  if (status == OPROJ_OK) status = read_table(file, model, out);
  if (status == OPROJ_OK) status = check_positions(model, out);
  if (status == OPROJ_OK) status = read_heads(file, attn_out, model, shard, out);
  return status;
}

oproj_status run_input_read(const char *path, const oproj_model *model, const oproj_shard *shard,
                            int32_t tokens, run_input *out) {
  *out = (run_input){0};
  oproj_tensors_file *file = NULL;
  oproj_status status = oproj_tensors_open(&file, path);
  if (status == OPROJ_OK) status = read_file(file, model, shard, tokens, out);
  oproj_tensors_close(file);
  if (status != OPROJ_OK) run_input_free(out);
  return status;
}

oproj_status run_input_make(const oproj_model *model, const oproj_shard *shard, uint64_t seed,
                            int32_t tokens, run_input *out) {
  const oproj_dims *d = &model->dims;
  *out = (run_input){.tokens = tokens};
  size_t values =
      (size_t)tokens * (size_t)(shard->head_end - shard->head_begin) * (size_t)d->head_dim;
  out->attn_out = malloc(values * sizeof *out->attn_out + 1);
  out->positions = calloc((size_t)tokens + 1, sizeof *out->positions);
  if (!out->attn_out || !out->positions) {
    run_input_free(out);
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d tokens of input", tokens);
  }
  oproj_synth_input(d, seed, model->exact, tokens, shard->head_begin, shard->head_end,
                    out->attn_out);
  if (!model->exact)
    for (int32_t t = 0; t < tokens; t++) out->positions[t] = t;
  oproj_status status = check_positions(model, out);
  if (status != OPROJ_OK) run_input_free(out);
  return status;
}
