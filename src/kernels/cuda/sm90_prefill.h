/* sm90_prefill.h - between the host code and SM90's kernel for many tokens: one block-scaled
 * product, persistent, with z quantised behind it.
 *
 *   sm90_prefill.cuh         the kernel: copies and products
 *   sm90_write.cuh           its end: rounding, codes of z, rows of the output
 *   sm90_prefill.cu          its variants and their launch
 *   sm90_prefill_host.c      which calls it takes, and in what shape */
#ifndef OPROJ_KERNELS_CUDA_SM90_PREFILL_H
#define OPROJ_KERNELS_CUDA_SM90_PREFILL_H

#include "kernels/cuda/sm90.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  SM90_PREFILL_TOKENS = 128, /* of a tile: two warpgroups of 64 */
  SM90_PREFILL_ROWS = 128    /* weight rows of a part: one of V4's quantisation blocks of z */
};

/* sm90_product's formula.  A tile is up to SM90_PREFILL_TOKENS tokens by `parts` parts of rows; the
 * two blocks of a pair take neighbouring tokens and the same rows.  Tiles are dealt to the blocks
 * of the grid in bands: all tokens of `band` row tiles, then the next ones. */
typedef struct sm90_prefill {
  CUtensorMap weights;     /* e4m3 [rows, cols], boxes of (parts * 128, halved by a pair) x 128 */
  CUtensorMap activations; /* e4m3 [groups, tokens, cols], boxes of 1 x step_tokens x 128 */
  int32_t tokens, rows, cols, rows_per_group;
  int32_t step_tokens; /* of a tile: a multiple of 4 */
  int32_t block;       /* of values with one scale: 32 or 128 */
  int32_t parts;       /* 1 or 2 */
  int32_t paired;      /* blocks come in clusters of two that share each copy of weights */
  int32_t stages;      /* ring slots */
  int32_t row_tiles, token_tiles, band;
  int32_t blocks; /* of the grid; a multiple of 2 where paired */
  const float *w_scales;
  const float *a_scales; /* OPROJ_SCALE_F32 */
  const float *addend;   /* f32 [tokens, rows], added to `out`; or NULL */
  oproj_quant zq;        /* where the value goes: quantised (codes not NULL) ... */
  uint16_t *out;         /* ... and rounded, bf16 [tokens, out_stride] (not NULL) */
  int64_t out_stride;
  int32_t early;             /* successors may start at once instead of at the end */
  int32_t z_block, z_joined; /* of zq, as cuda_input's */
  int32_t dependent;         /* launch while the kernel before still runs */
} sm90_prefill;

/* ---- host side (sm90_prefill_host.c) -------------------------------------------------------- */

/* Whether this kernel, and not sm90_project.cuh's, should compute a product. */
int sm90_prefill_takes(const oproj_kernels *k, const sm90_product *p);

/* A product that it takes.  Of p, what describes the other kernel's launch is not read. */
oproj_status sm90_prefill_project(const oproj_kernels *k, const sm90_product *p,
                                  const oproj_quant *activations, const void *weights,
                                  cudaStream_t stream);

/* ---- device side (sm90_prefill.cu) --------------------------------------------------------- */

/* Bytes of shared memory of a block with `stages` ring slots. */
size_t sm90_prefill_shared_bytes(const sm90_prefill *p);

/* Loads the code of every variant for such blocks of the product and of z: which one a call takes
 * is no matter of powers of two, so that a warm-up over token counts may miss some. */
cudaError_t sm90_prefill_load(int32_t block, int32_t z_block);

cudaError_t sm90_launch_prefill(const sm90_prefill *p, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* OPROJ_KERNELS_CUDA_SM90_PREFILL_H */
