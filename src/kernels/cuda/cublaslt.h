/* cublaslt.h - projections of large batches through cuBLASLt: WO_B on SM90, in blocks of 128, to
 * which V4.1's of 32 are joined (sm90_join.h); both products on SM100 and SM103.
 *
 * On SM90 cuBLASLt takes weight scales (the joined ones) and OPROJ_SCALE_F32 as they lie, but
 * counts tokens in fours.  The rows that pad a count read whatever follows the codes, times a scale
 * of zero, and land behind the last row of the result: only buffers with slack may serve counts
 * that are no multiple of four.  The workspace has it; a caller's buffer is never written past its
 * last row.
 *
 *   cublaslt.c         eligibility, choice of algorithms, the calls
 *   cublaslt_sm100.c   the scales as SM100 and SM103 want them ...
 *   cublaslt_tiles.cu  ... and the kernel that makes them */
#ifndef OPROJ_KERNELS_CUDA_CUBLASLT_H
#define OPROJ_KERNELS_CUDA_CUBLASLT_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CUDA_LT_TOKENS = OPROJ_KERNELS_LIBRARY_TOKENS,
  CUDA_LT_MULTIPLE = 4,
  CUDA_LT_SLACK = CUDA_LT_MULTIPLE - 1 /* rows behind the codes, z and x of the workspace */
};

/* Leaves k->lt NULL where cuBLASLt cannot serve this context. */
oproj_status cuda_lt_open(oproj_kernels *k);
void cuda_lt_close(oproj_kernels *k);

/* For every power of two of tokens: asks for algorithms, times them on these weights and keeps the
 * fastest, for all layers of the context.  Does nothing but the first time, and where cuBLASLt
 * cannot serve these weights.  Overwrites the workspace. */
oproj_status cuda_lt_warm(const oproj_kernels_weights *weights);

/* Whether cuBLASLt takes this very call; enqueues nothing.  What it refuses, our own kernels do. */
int cuda_lt_takes_groups(const oproj_kernels_weights *weights, const oproj_kernels_part *part,
                         const oproj_quant *x, const uint16_t *z);
int cuda_lt_takes_out(const oproj_kernels_weights *weights, const oproj_kernels_part *part,
                      const oproj_quant *zq, int joined, const uint16_t *partial);

/* WO_A, group by group, and WO_B, for calls that the functions above said yes to. */
oproj_status cuda_lt_project_groups(const oproj_kernels_weights *weights,
                                    const oproj_kernels_part *part, const oproj_quant *x,
                                    uint16_t *z, cudaStream_t stream);
oproj_status cuda_lt_project_out(const oproj_kernels_weights *weights,
                                 const oproj_kernels_part *part, const oproj_quant *zq,
                                 uint16_t *partial, cudaStream_t stream);

/* ---- cublaslt_sm100.c, cublaslt_tiles.cu --------------------------------------------------- */

/* tiles[group][row][column] = the exponent of scales[group * group_stride + row / rows_per_scale *
 * row_stride + column / columns_per_scale * column_stride], in OPROJ_SCALE_UE8M0_TILE; rows that
 * pad a tile are zero. */
typedef struct cuda_tiles {
  const float *scales;         /* powers of two, or NaN */
  int32_t groups, rows, words; /* a word: four columns, 128 values */
  int32_t rows_per_scale;      /* 1, 32 or 128 */
  int32_t columns_per_scale;   /* 1 (blocks of 32) or 4 (of 128) */
  int64_t row_stride, column_stride, group_stride;
  uint32_t *tiles;
} cuda_tiles;

cudaError_t cuda_launch_tiles(const cuda_tiles *tiles, cudaStream_t stream);

/* Room for the tiles of both activations. */
oproj_status cuda_lt_sm100_open(oproj_kernels *k);

/* Tiles for a weight matrix; *tiles stays NULL where cuBLASLt needs none or cannot serve.  `host`
 * is what the matrix was copied from. */
oproj_status cuda_lt_sm100_make(const oproj_kernels *k, const oproj_matrix *matrix,
                                const oproj_matrix *host, uint32_t **tiles);
/* New values: first whether they fit, then their tiles in the same memory. */
oproj_status cuda_lt_sm100_check(const uint32_t *tiles, const oproj_matrix *host, const char *name);
oproj_status cuda_lt_sm100_renew(const oproj_kernels *k, const oproj_matrix *matrix,
                                 uint32_t *tiles);

/* Tiles of an activation that is quantised as OPROJ_SCALE_F32. */
oproj_status cuda_lt_sm100_activation(const oproj_quant *q, int32_t block, uint32_t *tiles,
                                      cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* OPROJ_KERNELS_CUDA_CUBLASLT_H */
