/* rig.c - see rig.h. */
#include "rig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const rig_model_names[] = {"v4-pro", "v4-flash", "v4.1-flash", "tiny", NULL};

static const oproj_dims models[] = {{7168, 128, 512, 64, 16, 1024, 128},
                                    {4096, 64, 512, 64, 8, 1024, 128},
                                    {5120, 64, 512, 64, 8, 1024, 32},
                                    {512, 16, 512, 64, 4, 256, 128}};

/* ---- the context --------------------------------------------------------------------------- */

/* One of N ranks is a model with an Nth of the groups and heads, alone. */
static oproj_status share_dims(const bench_args *args, oproj_dims *out) {
  *out = models[args->model];
  if (out->groups % args->share != 0)
    return oproj_fail(OPROJ_ERR_INVALID, "--share %lld does not divide the %d groups of %s",
                      (long long)args->share, out->groups, rig_model_names[args->model]);
  out->groups /= (int32_t)args->share;
  out->heads /= (int32_t)args->share;
  return OPROJ_OK;
}

static bool wants_cuda(const bench_args *args) {
  if (args->backend == ARGS_BACKEND_AUTO) return oproj_backend_missing("cuda") == NULL;
  return args->backend == ARGS_BACKEND_CUDA;
}

static oproj_status choose_device(bench_rig *rig) {
  if (!wants_cuda(rig->args)) return OPROJ_OK;
  const char *why = oproj_backend_missing("cuda");
  if (why) return oproj_fail(OPROJ_ERR_UNSUPPORTED, "backend cuda: %s", why);
  return device_open(&rig->device, oproj_comm_device(rig->job->comm));
}

static void note_share(bench_rig *rig) {
  const oproj_shard *s = oproj_ctx_shard(rig->ctx);
  rig->groups = s->group_end - s->group_begin;
  rig->heads = s->head_end - s->head_begin;
  rig->z_cols = s->z_end - s->z_begin;
  rig->group_cols = rig->dims.heads / rig->dims.groups * rig->dims.head_dim;
}

/* The largest size that the run will reach, so that memory is not asked for in vain. */
static int32_t largest_tokens(const bench_args *args) {
  int64_t tokens = args->begin;
  while (tokens * args->factor <= args->end) tokens *= args->factor;
  return (int32_t)tokens;
}

oproj_config rig_config(const bench_rig *rig, oproj_reduce reduce) {
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = rig->device ? "cuda" : "ref";
  /* Among ranks the placement comes to the same GPU and puts this rank near it. */
  config.device = rig->device && rig->job->size == 1 ? device_describe(rig->device)->ordinal : -1;
  config.max_tokens = rig->max_tokens;
  config.reduce = reduce;
  config.chunk_tokens = rig->args->chunk;
  config.path = (oproj_path)rig->args->path;
  return config;
}

oproj_status rig_open(bench_rig *rig, const bench_args *args, job_state *job,
                      const oproj_dims *dims, bool reduces) {
  *rig =
      (bench_rig){.args = args, .job = job, .max_tokens = largest_tokens(args), .reduces = reduces};
  oproj_status status = OPROJ_OK;
  if (dims)
    rig->dims = *dims;
  else
    status = share_dims(args, &rig->dims);
  if (status == OPROJ_OK) status = choose_device(rig);
  status = oproj_comm_agree(job->comm, status);
  if (status != OPROJ_OK) return status;
  oproj_config config = rig_config(rig, reduces ? (oproj_reduce)args->reduce : OPROJ_REDUCE_NONE);
  status = oproj_ctx_create(&rig->ctx, job->comm, &rig->dims, &config);
  if (status == OPROJ_OK) note_share(rig);
  return status;
}

static bool sums_by_nccl(const bench_rig *rig) {
  return rig->reduces && strcmp(oproj_comm_name(rig->job->comm), "nccl") == 0;
}

bool rig_enqueues(const bench_rig *rig) {
  return rig->device && (!rig->reduces || rig->job->size == 1 || sums_by_nccl(rig));
}

void rig_close(bench_rig *rig) {
  for (int32_t i = 0; i < rig->layer_count; i++) oproj_layer_destroy(rig->layers[i]);
  free(rig->layers);
  oproj_buffer_destroy(rig->ctx, rig->attn_out);
  oproj_buffer_destroy(rig->ctx, rig->positions);
  oproj_buffer_destroy(rig->ctx, rig->cos_sin);
  oproj_buffer_destroy(rig->ctx, rig->z);
  oproj_buffer_destroy(rig->ctx, rig->y);
  oproj_ctx_destroy(rig->ctx);
  device_close(rig->device);
  data_destroy(rig->data);
}

/* ---- sizes --------------------------------------------------------------------------------- */

static int64_t blocks(int64_t n, int32_t block) {
  return (n + block - 1) / block;
}

double rig_matrix_bytes(int64_t rows, int64_t cols, int32_t block) {
  return (double)rows * (double)cols +
         (double)(blocks(rows, block) * blocks(cols, block)) * sizeof(float);
}

double rig_wo_a_bytes(const bench_rig *rig) {
  return rig_matrix_bytes(rig->z_cols, rig->group_cols, rig->dims.quant_block);
}

double rig_wo_b_bytes(const bench_rig *rig) {
  return rig_matrix_bytes(rig->dims.hidden, rig->z_cols, rig->dims.quant_block);
}

double rig_input_bytes(const bench_rig *rig, int32_t tokens) {
  double per_token = 2.0 * rig->heads * rig->dims.head_dim + sizeof(int64_t) +
                     (double)rig->dims.rope_dim * sizeof(float);
  return tokens * per_token;
}

double rig_link_bytes(const bench_rig *rig, int32_t tokens) {
  if (!sums_by_nccl(rig)) return 0.0;
  double ranks = rig->job->size, times = rig->args->reduce == OPROJ_REDUCE_SCATTER ? 1.0 : 2.0;
  return times * (ranks - 1.0) / ranks * 2.0 * tokens * rig->dims.hidden;
}

/* ---- layers -------------------------------------------------------------------------------- */

void rig_matrices(const bench_rig *rig, int32_t index, oproj_matrix *wo_a, oproj_matrix *wo_b) {
  int32_t block = rig->dims.quant_block, seed = 2 * index;
  *wo_a = data_matrix(rig->data, seed, rig->z_cols, rig->group_cols, block);
  *wo_b = data_matrix(rig->data, seed + 1, rig->dims.hidden, rig->z_cols, block);
}

static int32_t layers_wanted(const bench_rig *rig, int touches) {
  if (rig->args->warm || !rig->device) return 1;
  double bytes = (touches & RIG_WO_A ? rig_wo_a_bytes(rig) : 0.0) +
                 (touches & RIG_WO_B ? rig_wo_b_bytes(rig) : 0.0);
  double count = ceil(RIG_COLD_BYTES / bytes);
  if (count > DATA_SEEDS / 2) count = DATA_SEEDS / 2; /* tiny models stay in the cache */
  return count < RIG_LAYERS_LEAST ? RIG_LAYERS_LEAST : (int32_t)count;
}

static oproj_status make_weights(bench_rig *rig, int32_t count) {
  int32_t block = rig->dims.quant_block;
  int64_t a = (int64_t)rig->z_cols * rig->group_cols, b = (int64_t)rig->dims.hidden * rig->z_cols;
  int64_t a_blocks = blocks(rig->z_cols, block) * blocks(rig->group_cols, block);
  int64_t b_blocks = blocks(rig->dims.hidden, block) * blocks(rig->z_cols, block);
  rig->layers = calloc((size_t)count, sizeof *rig->layers);
  if (!rig->layers) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d layers", count);
  return data_create(&rig->data, a > b ? a : b, a_blocks > b_blocks ? a_blocks : b_blocks);
}

oproj_status rig_make_layers(bench_rig *rig, int touches) {
  int32_t count = layers_wanted(rig, touches);
  oproj_status status = oproj_comm_agree(rig->job->comm, make_weights(rig, count));
  while (status == OPROJ_OK && rig->layer_count < count) {
    oproj_matrix wo_a, wo_b;
    rig_matrices(rig, rig->layer_count, &wo_a, &wo_b);
    status = oproj_layer_create(&rig->layers[rig->layer_count], rig->ctx, &wo_a, &wo_b);
    if (status == OPROJ_OK) rig->layer_count++;
  }
  return status;
}

/* ---- inputs and outputs -------------------------------------------------------------------- */

static oproj_status upload(bench_rig *rig, const void *from, size_t bytes, void **to) {
  oproj_status status = oproj_buffer_create(rig->ctx, bytes, to);
  if (status == OPROJ_OK)
    status = oproj_buffer_write(rig->ctx, *to, from, bytes, device_stream(rig->device));
  return status;
}

oproj_status rig_random_buffer(bench_rig *rig, uint64_t seed, int64_t count, uint16_t **out) {
  uint16_t *host = malloc((size_t)count * sizeof *host);
  if (!host) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for %lld values", (long long)count);
  data_bf16(seed, count, host);
  void *buffer = NULL;
  oproj_status status = upload(rig, host, (size_t)count * sizeof *host, &buffer);
  *out = buffer;
  free(host);
  return status;
}

static oproj_status make_positions(bench_rig *rig) {
  size_t bytes = (size_t)rig->max_tokens * sizeof *rig->positions;
  int64_t *host = malloc(bytes);
  if (!host) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for positions");
  data_positions(3, rig->max_tokens, RIG_ROPE_ROWS, host);
  void *buffer = NULL;
  oproj_status status = upload(rig, host, bytes, &buffer);
  rig->positions = buffer;
  free(host);
  return status;
}

static oproj_status make_table(bench_rig *rig) {
  const oproj_rope rope = {160000.0, 16.0, 32.0, 1.0, 65536};
  size_t bytes = (size_t)RIG_ROPE_ROWS * (size_t)rig->dims.rope_dim * sizeof *rig->cos_sin;
  float *host = malloc(bytes);
  if (!host) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a rotary table");
  void *buffer = NULL;
  oproj_status status = oproj_rope_table(&rope, rig->dims.rope_dim, 0, RIG_ROPE_ROWS, host);
  if (status == OPROJ_OK) status = upload(rig, host, bytes, &buffer);
  rig->cos_sin = buffer;
  free(host);
  return status;
}

oproj_status rig_make_inputs(bench_rig *rig) {
  enum { INPUTS = 4 };
  const int64_t most = INT64_C(1) << 29; /* 1 GiB; beyond it an input evicts itself */
  int64_t one = (int64_t)rig->max_tokens * rig->heads * rig->dims.head_dim;
  int64_t inputs = most / one < 1 ? 1 : most / one < INPUTS ? most / one : INPUTS;
  rig->attn_elements = one * inputs;
  oproj_status status =
      rig_random_buffer(rig, 4 + (uint64_t)rig->job->rank, rig->attn_elements, &rig->attn_out);
  if (status == OPROJ_OK) status = make_positions(rig);
  return status == OPROJ_OK ? make_table(rig) : status;
}

oproj_status rig_make_outputs(bench_rig *rig) {
  void *y = NULL;
  size_t y_bytes = (size_t)rig->max_tokens * (size_t)rig->dims.hidden * sizeof *rig->y;
  oproj_status status = rig_random_buffer(rig, 5, (int64_t)rig->max_tokens * rig->z_cols, &rig->z);
  if (status == OPROJ_OK) status = oproj_buffer_create(rig->ctx, y_bytes, &y);
  rig->y = y;
  return status;
}

oproj_layer *rig_layer(const bench_rig *rig, int32_t call) {
  return rig->layers[call % rig->layer_count];
}

oproj_io rig_io(const bench_rig *rig, int32_t tokens, int32_t call) {
  enum { MOST = 16 };
  int64_t one = (int64_t)tokens * rig->heads * rig->dims.head_dim;
  int64_t inputs = rig->attn_elements / one < MOST ? rig->attn_elements / one : MOST;
  return (oproj_io){.tokens = tokens,
                    .attn_out = rig->attn_out + call % inputs * one,
                    .positions = rig->positions,
                    .position_type = OPROJ_POSITION_I64,
                    .cos_sin = rig->cos_sin,
                    .cos_sin_rows = RIG_ROPE_ROWS,
                    .cos_sin_width = rig->dims.rope_dim,
                    .y = rig->y,
                    .flags = OPROJ_EARLY_TRIGGER};
}

oproj_status rig_poison(bench_rig *rig, void *buffer, size_t bytes) {
  void *host = malloc(bytes);
  if (!host) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for %zu bytes", bytes);
  memset(host, 0xFF, bytes);
  oproj_status status =
      oproj_buffer_write(rig->ctx, buffer, host, bytes, device_stream(rig->device));
  free(host);
  return status;
}
