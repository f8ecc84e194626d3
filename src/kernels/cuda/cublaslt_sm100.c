/* cublaslt_sm100.c - block scales for cuBLASLt on SM100 and SM103, where it knows blocks of 32
 * alone: powers of two, and only those, become their tiles without loss, from blocks of 128 too.
 * Activation scales are powers of two by definition; a layer whose weight scales are not stays
 * with our own kernels. */
#include "base/checked.h"
#include "base/error.h"
#include "base/layout.h"
#include "kernels/cuda/cublaslt.h"

static int64_t scale_count(const oproj_matrix *m) {
  return oproj_base_ceil_div(m->rows, m->block) * oproj_base_ceil_div(m->cols, m->block);
}

static int exact(const oproj_matrix *m) {
  for (int64_t i = 0; i < scale_count(m); i++)
    if (oproj_ue8m0_exact(m->scales[i]) < 0) return 0;
  return 1;
}

enum { BLOCK = 32, WORD = BLOCK * OPROJ_TILE_COLUMNS }; /* values of K */

static size_t tile_bytes(int32_t groups, int64_t rows, int64_t cols) {
  return (size_t)oproj_layout_bytes(OPROJ_SCALE_UE8M0_TILE, groups, rows, cols / BLOCK);
}

static oproj_status allocate(uint32_t **out, size_t bytes) {
  void *memory;
  CUDA_TRY(cudaMalloc(&memory, bytes));
  *out = memory;
  return OPROJ_OK;
}

oproj_status cuda_lt_sm100_open(oproj_kernels *k) {
  int32_t tokens = k->config.max_tokens, groups = k->config.groups;
  TRY(allocate(&k->work.xq_tiles, tile_bytes(groups, tokens, k->group_cols)));
  return allocate(&k->work.zq_tiles, tile_bytes(1, tokens, k->z_cols));
}

static oproj_status tile_weights(const oproj_kernels *k, const oproj_matrix *m, uint32_t *tiles) {
  cuda_tiles p = {.scales = m->scales,
                  .groups = 1,
                  .rows = (int32_t)m->rows,
                  .words = (int32_t)(m->cols / WORD),
                  .rows_per_scale = m->block,
                  .columns_per_scale = m->block / BLOCK,
                  .row_stride = m->cols / m->block,
                  .column_stride = 1,
                  .tiles = tiles};
  CUDA_TRY(cuda_launch_tiles(&p, k->upload));
  CUDA_TRY(cudaStreamSynchronize(k->upload));
  return OPROJ_OK;
}

oproj_status cuda_lt_sm100_make(const oproj_kernels *k, const oproj_matrix *m,
                                const oproj_matrix *host, uint32_t **tiles) {
  if (!k->lt || k->capability == 90 || m->dtype != OPROJ_DTYPE_E4M3 || !exact(host))
    return OPROJ_OK;
  TRY(allocate(tiles, tile_bytes(1, m->rows, m->cols)));
  return tile_weights(k, m, *tiles);
}

oproj_status cuda_lt_sm100_check(const uint32_t *tiles, const oproj_matrix *host,
                                 const char *name) {
  REQUIRE(!tiles || exact(host), OPROJ_ERR_UNSUPPORTED,
          "%s came with scales that are powers of two; they can only be replaced by such", name);
  return OPROJ_OK;
}

oproj_status cuda_lt_sm100_renew(const oproj_kernels *k, const oproj_matrix *m, uint32_t *tiles) {
  return tiles ? tile_weights(k, m, tiles) : OPROJ_OK;
}

oproj_status cuda_lt_sm100_activation(const oproj_quant *q, int32_t block, uint32_t *tiles,
                                      cudaStream_t stream) {
  int64_t aligned = oproj_layout_aligned_tokens(q->tokens);
  cuda_tiles p = {.scales = q->scales,
                  .groups = q->groups,
                  .rows = q->tokens,
                  .words = q->cols / WORD,
                  .rows_per_scale = 1,
                  .columns_per_scale = block / BLOCK,
                  .row_stride = 1,
                  .column_stride = aligned,
                  .group_stride = aligned * (q->cols / block),
                  .tiles = tiles};
  CUDA_TRY(cuda_launch_tiles(&p, stream));
  return OPROJ_OK;
}
