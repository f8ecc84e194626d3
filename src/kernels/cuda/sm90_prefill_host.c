/* sm90_prefill_host.c - which products the kernel for many tokens takes, and in what shape.
 *
 * Its blocks take tiles in rounds, all of about the same time, so the last round should be full.
 * Figures: bench/README.md. */
#include "kernels/cuda/sm90_prefill.h"

#include "base/error.h"

enum {
  MOST_STAGES = 12,
  FEWEST_STAGES = 2,
  BAND_ROWS =
      2048 /* weight rows that blocks at work share: with as many tokens they fill a round */
};

static int32_t ceil_div(int32_t a, int32_t b) {
  return (a + b - 1) / b;
}

/* Blocks of the grid at most, a multiple of 2 where paired. */
static int32_t most_blocks(const oproj_kernels *k, const sm90_product *p, int paired) {
  int32_t cluster = paired ? 2 : 1, left = k->sm90_capacity[paired] - p->spare;
  return left < cluster ? cluster : left / cluster * cluster;
}

/* Rounds of a shape, in units of a tile of one part. */
static int32_t cost(const oproj_kernels *k, const sm90_product *p, int32_t parts, int paired) {
  int32_t rows = ceil_div(p->rows, parts * SM90_PREFILL_ROWS);
  int32_t tokens = ceil_div(p->tokens, SM90_PREFILL_TOKENS);
  if (paired) tokens = (tokens + 1) / 2 * 2;
  return ceil_div(rows * tokens, most_blocks(k, p, paired)) * parts;
}

/* Two parts share each copy of activations, which leaves more power for the tensor cores: for that
 * they may lose a fifth to rounding up.  With blocks of 32 one part multiplies and adds at once and
 * two pay only in long calls.  Pairs load less still, but start and end later. */
static void choose_tile(const oproj_kernels *k, const sm90_product *p, sm90_prefill *out) {
  enum { LONG_COST = 16, PAIRED_COLS = 4096 };
  int32_t single = cost(k, p, 1, 0), apart = cost(k, p, 2, 0), paired = cost(k, p, 2, 1);
  out->parts = 1;
  out->paired = 0;
  if (p->rows > p->rows_per_group && p->rows_per_group % (2 * SM90_PREFILL_ROWS) != 0) return;
  if (apart * 10 > single * 12 || (p->block < 128 && apart < LONG_COST)) return;
  out->parts = 2;
  out->stages = FEWEST_STAGES;
  if (sm90_prefill_shared_bytes(out) > SM90_SHARED_BYTES) {
    out->parts = 1;
    return;
  }
  out->paired = paired > 2 && paired <= apart && p->cols >= PAIRED_COLS;
}

static void choose_shape(const oproj_kernels *k, const sm90_product *p, sm90_prefill *out) {
  choose_tile(k, p, out);
  int32_t rows = out->parts * SM90_PREFILL_ROWS, cluster = out->paired ? 2 : 1;
  out->row_tiles = ceil_div(p->rows, rows);
  out->token_tiles = ceil_div(p->tokens, SM90_PREFILL_TOKENS);
  out->step_tokens = sm90_step_tokens(p->tokens, SM90_PREFILL_TOKENS);
  out->band = BAND_ROWS / rows;
  int32_t tiles = out->row_tiles * ceil_div(out->token_tiles, cluster);
  int32_t most = most_blocks(k, p, out->paired) / cluster;
  out->blocks = (tiles < most ? tiles : most) * cluster;
  out->stages = MOST_STAGES;
  while (out->stages > FEWEST_STAGES && sm90_prefill_shared_bytes(out) > SM90_SHARED_BYTES)
    out->stages--;
}

/* The other kernel splits a product finer, and so is better for as long as tiles of this one would
 * leave half of the device idle.  It adds in another order, so the whole call decides. */
int sm90_prefill_takes(const oproj_kernels *k, const sm90_product *p) {
  int32_t tokens = p->call_tokens;
  int32_t tiles = ceil_div(p->rows, SM90_PREFILL_ROWS) * ceil_div(tokens, SM90_PREFILL_TOKENS);
  return tokens > SM90_PREFILL_TOKENS && 2 * tiles > k->sm90_capacity[0] && !p->fused;
}

oproj_status sm90_prefill_project(const oproj_kernels *k, const sm90_product *p,
                                  const oproj_quant *activations, const void *weights,
                                  cudaStream_t stream) {
  sm90_prefill call = {.tokens = p->tokens,
                       .rows = p->rows,
                       .cols = p->cols,
                       .rows_per_group = p->rows_per_group,
                       .block = p->block,
                       .w_scales = p->w_scales,
                       .a_scales = p->a_scales,
                       .addend = p->addend,
                       .z_block = p->z_block,
                       .z_joined = p->z_joined,
                       .dependent = p->dependent,
                       .zq = p->zq,
                       .out = p->out,
                       .out_stride = p->out_stride,
                       .early = p->early};
  choose_shape(k, p, &call);
  uint32_t box_rows = (uint32_t)(call.parts * SM90_PREFILL_ROWS) / (call.paired ? 2 : 1);
  TRY(sm90_describe(&call.weights, weights, 0, p->rows, p->cols, box_rows));
  TRY(sm90_describe(&call.activations, activations->codes, activations->groups, activations->tokens,
                    activations->cols, (uint32_t)call.step_tokens));
  CUDA_TRY(sm90_launch_prefill(&call, stream));
  return OPROJ_OK;
}
