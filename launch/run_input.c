/* run_input.c - reads this rank's heads of an input file, or makes them up. */
#include "run_input.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "oproj/safetensors.h"

void run_input_free(run_input *input) {
  free(input->attn_out);
  free(input->positions);
  free(input->cos_sin);
  free(input->rows);
  free(input->distinct);
  *input = (run_input){0};
}

/* The tensor `name` of that dtype and shape; extents of -1 fit anything.  NULL: see last error. */
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

/* `path` is the file with the input's own table, where it has one. */
static oproj_status check_positions(const char *path, const oproj_model *model,
                                    const run_input *input) {
  for (int32_t t = 0; t < input->tokens; t++) {
    long long position = (long long)input->positions[t];
    if (position < 0 || position >= model->max_position)
      return oproj_fail(OPROJ_ERR_INVALID, "positions[%d] is %lld; it must be in [0, %lld)", t,
                        position, (long long)model->max_position);
    if (input->cos_sin && position >= input->cos_sin_rows)
      return oproj_fail(OPROJ_ERR_INVALID, "positions[%d] is %lld; cos_sin in %s has %lld rows", t,
                        position, path, (long long)input->cos_sin_rows);
  }
  return OPROJ_OK;
}

/* What no memory could hold is refused as input, before anything is allocated for it. */
static oproj_status check_size(const oproj_model *model, int64_t tokens, int64_t token_bytes) {
  const oproj_dims *d = &model->dims;
  if (tokens * d->hidden > INT32_MAX)
    return oproj_fail(OPROJ_ERR_INVALID, "%lld tokens x hidden %d exceed 2^31 - 1",
                      (long long)tokens, d->hidden);
  int64_t memory = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  if (memory > 0 && tokens > memory / token_bytes)
    return oproj_fail(OPROJ_ERR_INVALID,
                      "%lld tokens take %.1f GB of inputs, workspaces and results on all ranks; "
                      "this machine has %.1f GB",
                      (long long)tokens, (double)tokens * (double)token_bytes / 1e9,
                      (double)memory / 1e9);
  return OPROJ_OK;
}

/* ---- rows of the rotary table --------------------------------------------------------------- */

static int ascending(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

/* Fills distinct and rows.  No tokens still get a table of one row. */
static oproj_status map_rows(run_input *input) {
  size_t tokens = (size_t)input->tokens, bytes = tokens * sizeof *input->rows;
  int64_t count = 0;
  input->rows = malloc(bytes + 1);
  input->distinct = calloc(tokens + 1, sizeof *input->distinct);
  if (!input->rows || !input->distinct)
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d positions", input->tokens);
  memcpy(input->rows, input->positions, bytes);
  memcpy(input->distinct, input->positions, bytes);
  qsort(input->distinct, tokens, sizeof *input->distinct, ascending);
  for (size_t i = 0; i < tokens; i++)
    if (count == 0 || input->distinct[count - 1] != input->distinct[i])
      input->distinct[count++] = input->distinct[i];
  input->distinct_count = count > 0 ? count : 1;
  if (input->cos_sin) return OPROJ_OK; /* its own table has a row for every position */
  for (size_t t = 0; t < tokens; t++) {
    const int64_t *found = bsearch(&input->positions[t], input->distinct, (size_t)count,
                                   sizeof *input->distinct, ascending);
    input->rows[t] = found - input->distinct;
  }
  return OPROJ_OK;
}

oproj_status run_input_table(const run_input *input, const oproj_rope *rope, int32_t rope_dim,
                             float **table, int64_t *rows) {
  *rows = input->cos_sin ? input->cos_sin_rows : input->distinct_count;
  size_t bytes = (size_t)*rows * (size_t)rope_dim * sizeof **table;
  *table = malloc(bytes + 1);
  if (!*table)
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a table of %lld positions", (long long)*rows);
  oproj_status status = OPROJ_OK;
  if (input->cos_sin) {
    memcpy(*table, input->cos_sin, bytes);
    return status;
  }
  /* Positions that follow each other are filled at once. */
  for (int64_t begin = 0, end; begin < *rows && status == OPROJ_OK; begin = end) {
    int64_t first = input->distinct[begin];
    for (end = begin + 1; end < *rows && input->distinct[end] == first + end - begin;) end++;
    status =
        oproj_rope_table(rope, rope_dim, first, first + end - begin, *table + begin * rope_dim);
  }
  return status;
}

/* ---- from a file ---------------------------------------------------------------------------- */

static oproj_status read_table(const oproj_tensors_file *file, const oproj_model *model,
                               run_input *out) {
  if (!oproj_tensors_find(file, "cos_sin")) return OPROJ_OK;
  const oproj_tensor *tensor =
      find_tensor(file, "cos_sin", "F32", 2, (int64_t[]){-1, model->dims.rope_dim});
  if (!tensor) return OPROJ_ERR_SHAPE;
  if (tensor->shape[0] > model->max_position)
    return oproj_fail(OPROJ_ERR_SHAPE, "cos_sin in %s has %lld rows; the model has %lld positions",
                      oproj_tensors_path(file), (long long)tensor->shape[0],
                      (long long)model->max_position);
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
                              const oproj_shard *shard, int32_t tokens, int64_t token_bytes,
                              run_input *out) {
  const oproj_dims *d = &model->dims;
  const oproj_tensor *attn_out =
      find_tensor(file, "attn_out", "BF16", 3, (int64_t[]){tokens, d->heads, d->head_dim});
  if (!attn_out) return OPROJ_ERR_SHAPE;
  oproj_status status = check_size(model, attn_out->shape[0], token_bytes);
  if (status != OPROJ_OK) return status;
  out->tokens = (int32_t)attn_out->shape[0];
  status = read_positions(file, out);
  if (status == OPROJ_OK) status = read_table(file, model, out);
  if (status == OPROJ_OK) status = check_positions(oproj_tensors_path(file), model, out);
  if (status == OPROJ_OK) status = map_rows(out);
  if (status == OPROJ_OK) status = read_heads(file, attn_out, model, shard, out);
  return status;
}

oproj_status run_input_read(const char *path, const oproj_model *model, const oproj_shard *shard,
                            int32_t tokens, int64_t token_bytes, run_input *out) {
  *out = (run_input){0};
  oproj_tensors_file *file = NULL;
  oproj_status status = oproj_tensors_open(&file, path);
  if (status == OPROJ_OK) status = read_file(file, model, shard, tokens, token_bytes, out);
  oproj_tensors_close(file);
  if (status != OPROJ_OK) run_input_free(out);
  return status;
}

/* ---- made up -------------------------------------------------------------------------------- */

oproj_status run_input_make(const oproj_model *model, const oproj_shard *shard, uint64_t seed,
                            int32_t tokens, int64_t token_bytes, run_input *out) {
  const oproj_dims *d = &model->dims;
  *out = (run_input){.tokens = tokens};
  oproj_status status = check_size(model, tokens, token_bytes);
  if (status != OPROJ_OK) return status;
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
  status = check_positions("", model, out);
  if (status == OPROJ_OK) status = map_rows(out);
  if (status != OPROJ_OK) run_input_free(out);
  return status;
}
