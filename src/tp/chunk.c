/* chunk.c - owns which tokens a chunk has, and how many chunks a call pays for. */
#include "tp/chunk.h"

#include "base/checked.h"

enum {
  MOST_CHUNKS = 8,
  LEAST_TOKENS = 1024,                  /* below, tiles of a chunk fill the GPU badly */
  MULTIPLE = OPROJ_KERNELS_PART_TOKENS, /* a tile's tokens */
  TAIL_TOKENS = MULTIPLE                /* what a last round of tiles that is half full costs */
};

static const double LEAST_GAIN = 0.03;

/* One H200 of several.
 *   flop_per_us    900 TFLOP/s: V4-Pro's whole chain, its quantiser included, from 2048 tokens on
 *                  (bench/baselines; WO_B alone makes 1200)
 *   link           NCCL sums 117 MB over two GPUs in 407 us, of 397 GB/s that a copy makes
 *   memory         a copy on the device
 *   chain_us       three launches in a row, the last of which nothing follows
 *   step_us        NCCL's smallest all-reduce
 *   spare          an exchange between ranks takes up to 32 blocks, each alone on its
 *                  multiprocessor */
const oproj_chunk_rates oproj_chunk_h200 = {.flop_per_us = 900e6,
                                            .link_bytes_per_us = 288e3,
                                            .memory_bytes_per_us = 4280e3,
                                            .chain_us = 10.0,
                                            .step_us = 7.0,
                                            .multiprocessors = 132,
                                            .spare = 32};

/* ---- which tokens -------------------------------------------------------------------------- */

static int32_t least(int32_t a, int32_t b) {
  return a < b ? a : b;
}

/* What the chunks divide: all tokens, or the rows of the first rank, which has the most. */
static int32_t divided(const oproj_chunk_call *call) {
  int32_t begin, end = call->tokens;
  if (call->reduce == OPROJ_REDUCE_SCATTER)
    oproj_plan_rows(call->tokens, call->ranks, 0, &begin, &end);
  return end;
}

/* A chunk's part of that. */
static int32_t height(const oproj_chunk_call *call, int32_t chunk_tokens) {
  if (call->reduce != OPROJ_REDUCE_SCATTER) return chunk_tokens;
  return (int32_t)oproj_base_ceil_div(chunk_tokens, call->ranks);
}

int32_t oproj_chunk_count(const oproj_chunk_call *call, int32_t chunk_tokens) {
  int64_t count = oproj_base_ceil_div(divided(call), height(call, chunk_tokens));
  return count > 1 ? (int32_t)count : 1;
}

/* Tokens among the first `rows` rows of each rank. */
static int32_t tokens_above(const oproj_chunk_call *call, int32_t rows) {
  int32_t sum = 0, begin, end;
  for (int32_t r = 0; r < call->ranks; r++) {
    oproj_plan_rows(call->tokens, call->ranks, r, &begin, &end);
    sum += least(end - begin, rows);
  }
  return sum;
}

oproj_chunk oproj_chunk_at(const oproj_chunk_call *call, int32_t chunk_tokens, int32_t index) {
  int32_t all = divided(call), begin = index * height(call, chunk_tokens);
  int32_t end = least(all - begin, height(call, chunk_tokens)) + begin;
  oproj_chunk chunk = {.part = oproj_kernels_whole(call->tokens), .before = begin, .y_row = begin};
  if (oproj_chunk_count(call, chunk_tokens) == 1) return chunk;
  chunk.part.begin = begin;
  chunk.part.strip = end - begin;
  chunk.part.tokens = end - begin;
  if (call->reduce != OPROJ_REDUCE_SCATTER) return chunk;
  chunk.part.stride = all;
  chunk.before = tokens_above(call, begin);
  chunk.part.tokens = tokens_above(call, end) - chunk.before;
  return chunk;
}

/* ---- how many ------------------------------------------------------------------------------ */

static double chain_us(const oproj_chunk_call *call, const oproj_chunk_rates *rates,
                       int32_t tokens) {
  const oproj_dims *d = &call->dims;
  double groups = (double)oproj_base_ceil_div(d->groups, call->ranks);
  double group_cols = (double)d->heads / d->groups * d->head_dim;
  double flop_per_token = 2.0 * groups * d->lora_rank * (group_cols + d->hidden);
  return rates->chain_us + (tokens + TAIL_TOKENS) * flop_per_token / rates->flop_per_us;
}

static double sum_us(const oproj_chunk_call *call, const oproj_chunk_rates *rates, int32_t tokens) {
  double bytes = 2.0 * tokens * call->dims.hidden, ranks = call->ranks;
  double trips = call->reduce == OPROJ_REDUCE_SCATTER ? 1.0 : 2.0;
  return (trips + 1.0) * rates->step_us +
         trips * bytes * (ranks - 1.0) / ranks / rates->link_bytes_per_us +
         bytes * (ranks + 1.0) / ranks / rates->memory_bytes_per_us;
}

/* Chunks behind the first are computed on what the sums leave of the GPU. */
double oproj_chunk_estimate(const oproj_chunk_call *call, const oproj_chunk_rates *rates,
                            int32_t chunk_tokens) {
  double slower = (double)rates->multiprocessors / (rates->multiprocessors - rates->spare);
  double computed = 0.0, summed = 0.0;
  int32_t count = oproj_chunk_count(call, chunk_tokens);
  for (int32_t i = 0; i < count; i++) {
    int32_t tokens = oproj_chunk_at(call, chunk_tokens, i).part.tokens;
    computed += chain_us(call, rates, tokens) * (i > 0 ? slower : 1.0);
    summed = (summed > computed ? summed : computed) + sum_us(call, rates, tokens);
  }
  return summed;
}

int32_t oproj_chunk_choose(const oproj_chunk_call *call, const oproj_chunk_rates *rates) {
  int32_t chosen = call->tokens;
  if (call->tokens < 2 * LEAST_TOKENS) return chosen;
  double best = oproj_chunk_estimate(call, rates, chosen) * (1.0 - LEAST_GAIN);
  for (int32_t count = 2; count <= MOST_CHUNKS; count++) {
    int64_t even = oproj_base_ceil_div(call->tokens, count);
    int32_t tokens = (int32_t)(oproj_base_ceil_div(even, MULTIPLE) * MULTIPLE);
    if (tokens < LEAST_TOKENS) break;
    double estimate = oproj_chunk_estimate(call, rates, tokens);
    if (estimate >= best) continue;
    best = estimate;
    chosen = tokens;
  }
  return chosen;
}
