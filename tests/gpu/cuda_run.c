/* cuda_run.c - see cuda_run.h. */
#include "gpu/cuda_run.h"

#include <stdlib.h>

#include "base/num.h"
#include "gpu/cuda_rig.h"
#include "kernels/cuda/cuda.h"
#include "tp/ctx.h"

enum { GUARD = 64, SPARE_ROWS = 4, POISON = 0xA5, NAN_VALUE = 0x7FFF };

const oproj_dims run_recipes[RUN_RECIPES] = {{640, 8, 512, 64, 2, 256, 128},
                                             {640, 8, 512, 64, 2, 256, 32}};

const run_path run_paths[RUN_PATHS] = {{OPROJ_PATH_AUTO, "auto", 0, 1 << 20, 0},
                                       {OPROJ_PATH_PORTABLE, "portable", 0, 1 << 20, 0},
                                       {OPROJ_PATH_GROUPED, "grouped", 0, 1 << 20, 0},
                                       {OPROJ_PATH_FUSED, "fused", 0, 32, 0},
                                       {OPROJ_PATH_DECODE, "decode", 0, 32, 0},
                                       {OPROJ_PATH_LIBRARY, "library", 768, 1 << 20, 128}};

int run_has(oproj_path path) {
  int32_t capability = oproj_device_capability(0);
  if (path == OPROJ_PATH_AUTO || path == OPROJ_PATH_PORTABLE || capability == 90) return 1;
  return path == OPROJ_PATH_LIBRARY && (capability == 100 || capability == 103);
}

int run_serves(const run_path *path, const oproj_dims *dims, int32_t tokens) {
  return run_has(path->path) && tokens >= path->least && tokens <= path->most &&
         (path->block == 0 || path->block == dims->quant_block);
}

run run_open(const char *backend, oproj_path path, int32_t max_tokens, const data_layer *data,
             int layers) {
  run r = {.layer_count = layers};
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = backend;
  config.max_tokens = max_tokens;
  config.path = path;
  EXPECT_OK(oproj_comm_self(&r.comm));
  EXPECT_OK(oproj_ctx_create(&r.ctx, r.comm, &data->dims, &config));
  for (int i = 0; i < layers; i++)
    EXPECT_OK(oproj_layer_create(&r.layers[i], r.ctx, &data[i].wo_a, &data[i].wo_b));
  return r;
}

void run_close(run *r) {
  for (int i = 0; i < r->layer_count; i++) oproj_layer_destroy(r->layers[i]);
  oproj_ctx_destroy(r->ctx);
  oproj_comm_destroy(r->comm);
}

/* ---- batches ------------------------------------------------------------------------------- */

static void *upload(const run *r, const void *from, size_t bytes) {
  void *to;
  EXPECT_OK(oproj_buffer_create(r->ctx, bytes, &to));
  EXPECT_OK(oproj_buffer_write(r->ctx, to, from, bytes, NULL));
  return to;
}

static void *upload_padded(const run *r, const data_layer *data, int32_t first,
                           const oproj_io *io) {
  const oproj_dims *d = &data->dims;
  int64_t count = (io->tokens + SPARE_ROWS) * io->token_stride;
  uint16_t *values = malloc((size_t)count * sizeof *values);
  for (int64_t i = 0; i < count; i++) values[i] = NAN_VALUE;
  for (int64_t t = 0; t < io->tokens; t++)
    for (int64_t h = 0; h < d->heads; h++)
      memcpy(values + t * io->token_stride + h * io->head_stride,
             data->attn_out + ((first + t) * d->heads + h) * d->head_dim,
             (size_t)d->head_dim * sizeof *values);
  void *memory = upload(r, values, (size_t)count * sizeof *values);
  free(values);
  return memory;
}

batch batch_open(const run *r, const data_layer *data, int32_t first, int32_t tokens, int32_t pad) {
  const oproj_dims *d = &data->dims;
  int32_t head_stride = d->head_dim + pad;
  batch b = {.io = {.tokens = tokens,
                    .head_stride = head_stride,
                    .token_stride = (int64_t)d->heads * head_stride + pad,
                    .cos_sin_rows = data->cos_sin_rows,
                    .cos_sin_width = d->rope_dim}};
  b.attn_out = upload_padded(r, data, first, &b.io);
  b.positions = upload(r, data->positions + first, (size_t)tokens * sizeof *data->positions);
  b.cos_sin =
      upload(r, data->cos_sin, (size_t)(data->cos_sin_rows * d->rope_dim) * sizeof *data->cos_sin);
  b.y_count = (size_t)tokens * (size_t)d->hidden;
  EXPECT_OK(oproj_buffer_create(r->ctx, (b.y_count + 2 * GUARD) * sizeof *b.io.y, &b.y_base));
  b.io.attn_out = b.attn_out;
  b.io.positions = b.positions;
  b.io.cos_sin = b.cos_sin;
  b.io.y = (uint16_t *)b.y_base + GUARD;
  return b;
}

void batch_close(const run *r, batch *b) {
  oproj_buffer_destroy(r->ctx, b->attn_out);
  oproj_buffer_destroy(r->ctx, b->positions);
  oproj_buffer_destroy(r->ctx, b->cos_sin);
  oproj_buffer_destroy(r->ctx, b->y_base);
}

void batch_set_tokens(batch *b, const data_layer *data, int32_t tokens) {
  b->io.tokens = tokens;
  b->y_count = (size_t)tokens * (size_t)data->dims.hidden;
}

uint16_t *run_forward(const run *r, int which, const batch *b) {
  size_t bytes = (b->y_count + 2 * GUARD) * sizeof(uint16_t);
  size_t before = (size_t)((uint16_t *)b->io.y - (uint16_t *)b->y_base), after = 2 * GUARD - before;
  uint16_t *y = malloc(bytes);
  memset(y, POISON, bytes);
  EXPECT_OK(oproj_buffer_write(r->ctx, b->y_base, y, bytes, NULL));
  EXPECT_OK(oproj_forward(r->layers[which], &b->io, NULL));
  EXPECT_OK(oproj_buffer_read(r->ctx, y, b->y_base, bytes, NULL));
  ck_assert_msg(is_poison(y, before * sizeof *y), "bytes before y changed");
  ck_assert_msg(is_poison(y + before + b->y_count, after * sizeof *y), "bytes after y changed");
  memmove(y, y + before, b->y_count * sizeof *y);
  return y;
}

/* ---- the workspace ------------------------------------------------------------------------- */

void run_poison_workspace(const run *r, cudaStream_t stream) {
  const oproj_kernels *k = r->ctx->kernels;
  const oproj_kernels_config *c = &k->config;
  size_t tokens = (size_t)c->max_tokens, z = tokens * (size_t)k->z_cols;
  size_t x = tokens * (size_t)c->groups * (size_t)k->group_cols;
  int32_t block = c->dims.quant_block;
  CUDA_OK(cudaMemsetAsync(k->work.x, 0xFF, x * sizeof *k->work.x, stream));
  CUDA_OK(cudaMemsetAsync(k->work.xq.codes, 0xFF, x, stream));
  CUDA_OK(cudaMemsetAsync(
      k->work.xq.scales, 0xFF,
      oproj_scale_bytes(OPROJ_SCALE_F32, c->groups, c->max_tokens, k->group_cols, block), stream));
  CUDA_OK(cudaMemsetAsync(k->work.z, 0xFF, z * sizeof *k->work.z, stream));
  CUDA_OK(cudaMemsetAsync(k->work.zq.codes, 0xFF, z, stream));
  for (int layout = 0; layout <= OPROJ_SCALE_UE8M0_TILE; layout++)
    CUDA_OK(cudaMemsetAsync(
        k->work.zq.scales, 0xFF,
        oproj_scale_bytes((oproj_scale_layout)layout, 1, c->max_tokens, k->z_cols, block), stream));
}
