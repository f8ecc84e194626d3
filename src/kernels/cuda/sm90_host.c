/* sm90_host.c - what a product on SM90 looks like to its kernel: tensor maps, tile, split, ring. */
#include "base/error.h"
#include "kernels/cuda/sm90.h"
#include "kernels/cuda/sm90_join.h"
#include "kernels/cuda/sm90_prefill.h"

enum {
  LOAD_VALUES = 8, /* bf16 values of a 16-byte load */
  LARGE_TILE = 128,
  WIDE_SPLIT = 1 /* of a tile of SM90_MAX_TOKENS: clusters of 2 */
};

/* ---- tensor maps --------------------------------------------------------------------------- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's encoder, without linking the driver. */
static oproj_status find_encoder(encode_fn *out) {
  enum { SINCE = 12000 };
  void *address = NULL;
  enum cudaDriverEntryPointQueryResult found;
  CUDA_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, SINCE,
                                            cudaEnableDefault, &found));
  REQUIRE(found == cudaDriverEntryPointSuccess && address, OPROJ_ERR_UNSUPPORTED,
          "this driver has no cuTensorMapEncodeTiled");
  *out = (encode_fn)address;
  return OPROJ_OK;
}

oproj_status sm90_describe(CUtensorMap *out, const void *data, int64_t depth, int64_t rows,
                           int64_t cols, uint32_t box_rows) {
  encode_fn encoder = NULL;
  TRY(find_encoder(&encoder));
  cuuint64_t extents[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)depth};
  cuuint64_t strides[2] = {(cuuint64_t)cols, (cuuint64_t)(rows * cols)};
  cuuint32_t box[3] = {SM90_TILE_COLS, box_rows, 1}, steps[3] = {1, 1, 1};
  CUresult result =
      encoder(out, CU_TENSOR_MAP_DATA_TYPE_UINT8, depth > 0 ? 3 : 2, (void *)data, extents, strides,
              box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
              CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  REQUIRE(result == CUDA_SUCCESS, OPROJ_ERR_DEVICE,
          "cuTensorMapEncodeTiled refused [%lld, %lld, %lld] with error %d", (long long)depth,
          (long long)rows, (long long)cols, (int)result);
  return OPROJ_OK;
}

oproj_status sm90_describe_weights(CUtensorMap *out, const void *data, int64_t rows, int64_t cols,
                                   int32_t box_rows) {
  return sm90_describe(out, data, 0, rows, cols, (uint32_t)box_rows);
}

/* ---- what fits ----------------------------------------------------------------------------- */

/* Slots come in pairs. */
static int takes_cols(int64_t cols) {
  return cols % (2 * SM90_TILE_COLS) == 0;
}

static int may_serve(const oproj_kernels *k) {
  oproj_path path = k->config.path;
  return k->capability == 90 && !k->no_native && path != OPROJ_PATH_PORTABLE;
}

int sm90_takes_groups(const oproj_kernels_weights *w) {
  const oproj_kernels *k = w->kernels;
  return may_serve(k) && w->wo_a.dtype == OPROJ_DTYPE_E4M3 && takes_cols(k->group_cols) &&
         k->config.dims.lora_rank % SM90_TILE_ROWS == 0;
}

int sm90_takes_out(const oproj_kernels_weights *w) {
  const oproj_kernels *k = w->kernels;
  return may_serve(k) && w->wo_b.dtype == OPROJ_DTYPE_E4M3 && takes_cols(k->z_cols) &&
         k->config.dims.hidden % 4 == 0;
}

int sm90_loads_input(const cuda_input *input) {
  return (uintptr_t)input->attn_out % 16 == 0 && input->token_stride % LOAD_VALUES == 0 &&
         input->head_stride % LOAD_VALUES == 0;
}

/* ---- shape of a launch --------------------------------------------------------------------- */

static int32_t row_tiles(const sm90_product *p) {
  return (p->rows + SM90_TILE_ROWS - 1) / SM90_TILE_ROWS;
}

/* Of the whole call. */
static int32_t token_tiles(const sm90_product *p, int32_t tile) {
  return (p->call_tokens + tile - 1) / tile;
}

int32_t sm90_step_tokens(int32_t tokens, int32_t most) {
  int32_t tiles = (tokens + most - 1) / most;
  return tiles > 0 ? ((tokens + tiles - 1) / tiles + 3) / 4 * 4 : 4;
}

/* Blocks that share a tile's K: as many, up to 2^most, as the device holds at once in clusters of
 * that size.  A cluster that has to wait for a second round costs more than a split gains. */
static int32_t split_of(const oproj_kernels *k, const sm90_product *p, int32_t tile, int most) {
  int32_t blocks = row_tiles(p) * token_tiles(p, tile), split = 1;
  for (int i = 1; i <= most; i++)
    if (blocks << i <= k->sm90_capacity[i] && takes_cols(p->cols >> i)) split = 1 << i;
  return split;
}

/* Whether one tile of all tokens, a half longer than one of 128, ends so much before two of 128 (in
 * two rounds, where the device does not hold them all) that its longer end does not matter. */
static int takes_all_tokens(const oproj_kernels *k, const sm90_product *p, int most_split) {
  enum { GAIN = 8 }; /* slots; measured on an H200: bench/README.md */
  int32_t slots = p->cols / SM90_TILE_COLS, rounds = 2 * row_tiles(p) > k->sm90_capacity[0] ? 2 : 1;
  if (p->call_tokens <= LARGE_TILE || p->call_tokens > SM90_MAX_TOKENS || p->fused) return 0;
  if (row_tiles(p) > k->sm90_capacity[0]) return 0;
  return rounds * slots / split_of(k, p, LARGE_TILE, most_split) -
             3 * slots / (2 * split_of(k, p, SM90_MAX_TOKENS, WIDE_SPLIT)) >=
         GAIN;
}

/* The smallest tile that holds all tokens, up to 128.  Two of 64 serve better than one of 128 where
 * the device holds them all at once and K is short: weights then come from the L2 cache a second
 * time, and the end of a block, which grows with its tokens, weighs less.  (Measured on an H200:
 * bench/README.md.) */
static int32_t tile_of(const oproj_kernels *k, const sm90_product *p, int most_split) {
  enum { SHORT_SLOTS = 32 };
  int32_t tile = 8;
  while (tile < p->call_tokens && tile < LARGE_TILE) tile *= 2;
  if (tile < LARGE_TILE || row_tiles(p) * token_tiles(p, 64) > k->sm90_capacity[0]) return tile;
  int32_t slots = p->cols / SM90_TILE_COLS / split_of(k, p, tile, most_split);
  return slots < SHORT_SLOTS ? 64 : tile;
}

/* The ring of a fused product is filled by four warps in turn: with fewer than four slots one might
 * be a round ahead of another. */
static oproj_status choose_shape(const oproj_kernels *k, sm90_product *p, int wide,
                                 int most_split) {
  enum { WINDOW = 4 }; /* 64 KB a block keep the memory busy */
  int32_t fewest = p->fused ? 4 : 2;
  p->tile_tokens = wide ? SM90_MAX_TOKENS : tile_of(k, p, most_split);
  p->step_tokens = sm90_step_tokens(p->tokens, p->tile_tokens);
  p->split = split_of(k, p, p->tile_tokens, wide ? WIDE_SPLIT : most_split);
  p->stages = p->cols / SM90_TILE_COLS / p->split;
  while (p->stages > fewest && sm90_shared_bytes(p) > SM90_SHARED_BYTES) p->stages -= 2;
  REQUIRE(sm90_shared_bytes(p) <= SM90_SHARED_BYTES, OPROJ_ERR_UNSUPPORTED,
          "%d columns leave no room for a ring of their weights", p->cols);
  p->window = p->stages < WINDOW ? p->stages : WINDOW;
  return OPROJ_OK;
}

/* x NULL: the input is quantised in the product. */
static oproj_status run(const oproj_kernels *k, sm90_product *p, const oproj_quant *x,
                        const void *weights, int most_split, cudaStream_t stream) {
  int wide = takes_all_tokens(k, p, most_split);
  if (!wide && sm90_prefill_takes(k, p)) return sm90_prefill_project(k, p, x, weights, stream);
  TRY(choose_shape(k, p, wide, most_split));
  if (p->tokens == 0) return OPROJ_OK;
  if (x)
    TRY(sm90_describe(&p->activations, x->codes, x->groups, x->tokens, x->cols,
                      (uint32_t)p->step_tokens));
  CUDA_TRY(sm90_launch_project(p, stream));
  return OPROJ_OK;
}

/* Layouts with more padding than the kernel writes are cleared first. */
static oproj_status clear_scales(const oproj_kernels *k, const oproj_quant *zq,
                                 cudaStream_t stream) {
  if (!zq->codes || zq->layout == OPROJ_SCALE_F32 || zq->tokens == 0) return OPROJ_OK;
  size_t bytes =
      oproj_scale_bytes(zq->layout, zq->groups, zq->tokens, zq->cols, k->config.dims.quant_block);
  CUDA_TRY(cudaMemsetAsync(zq->scales, 0, bytes, stream));
  return OPROJ_OK;
}

oproj_status sm90_project_groups(const oproj_kernels_weights *w, const oproj_kernels_part *part,
                                 const oproj_quant *x, int joined, const cuda_input *input,
                                 const sm90_result *result, cudaStream_t stream) {
  enum { MOST_SPLIT = 2 }; /* clusters of 4 */
  const oproj_kernels *k = w->kernels;
  sm90_product p = {.weights = w->wo_a_map,
                    .tokens = part->tokens,
                    .call_tokens = part->call_tokens,
                    .spare = part->spare,
                    .rows = k->z_cols,
                    .cols = k->group_cols,
                    .rows_per_group = k->config.dims.lora_rank,
                    .block = joined ? SM90_JOINED_BLOCK : k->config.dims.quant_block,
                    .w_scales = joined ? w->wo_a_joined : w->wo_a.scales,
                    .addend = result->addend,
                    .z_block = k->config.dims.quant_block,
                    .z_joined = result->joined,
                    .dependent = k->dependent,
                    .zq = result->zq,
                    .out = result->z,
                    .out_stride = k->z_cols,
                    .early = 1};
  if (x) {
    p.a_scales = x->scales;
  } else {
    p.fused = 1;
    p.input = *input;
  }
  TRY(clear_scales(k, &result->zq, stream));
  return run(k, &p, x, w->wo_a.data, MOST_SPLIT, stream);
}

oproj_status sm90_project_out(const oproj_kernels_weights *w, const oproj_kernels_part *part,
                              const oproj_quant *zq, int joined, uint16_t *partial, int early,
                              cudaStream_t stream) {
  enum { MOST_SPLIT = 1 }; /* clusters of 2 */
  const oproj_kernels *k = w->kernels;
  sm90_product p = {.weights = w->wo_b_map,
                    .tokens = part->tokens,
                    .call_tokens = part->call_tokens,
                    .spare = part->spare,
                    .rows = k->config.dims.hidden,
                    .cols = k->z_cols,
                    .rows_per_group = k->config.dims.hidden,
                    .block = joined ? SM90_JOINED_BLOCK : k->config.dims.quant_block,
                    .w_scales = joined ? w->wo_b_joined : w->wo_b.scales,
                    .a_scales = zq->scales,
                    .out = partial,
                    .out_stride = k->config.dims.hidden,
                    .early = early,
                    .dependent = k->dependent};
  return run(k, &p, zq, w->wo_b.data, MOST_SPLIT, stream);
}
