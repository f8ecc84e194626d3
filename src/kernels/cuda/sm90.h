/* sm90.h - between the host code and the kernels of SM90: one block-scaled product on the FP8
 * tensor cores, with what may be fused in front of it and behind it.
 *
 *   sm90_ptx.cuh       the instructions
 *   sm90_project.cuh   the kernel, with its block (sm90_project_block.cuh) and, fused in front of
 *                      it, the input's quantiser (sm90_project_input.cuh)
 *   sm90_write.cuh     what becomes of the sums
 *   sm90_project.cu    its variants and their launch
 *   sm90_host.c        tensor maps, what fits, splits
 *   sm90_prefill.*     the same product for many tokens: a kernel of its own
 *   sm90_join.*        blocks of 32 joined, so that V4.1 multiplies as V4 does */
#ifndef OPROJ_KERNELS_CUDA_SM90_H
#define OPROJ_KERNELS_CUDA_SM90_H

#include <cuda.h>

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  SM90_TILE_ROWS = 128,          /* weight rows of a block */
  SM90_TILE_COLS = 128,          /* values of K of a ring slot: 128 bytes, the swizzle's row */
  SM90_MAX_TOKENS = 192,         /* tokens of a block */
  SM90_MOST_SPLIT = 4,           /* blocks of a cluster that share a tile's K */
  SM90_SHARED_BYTES = 227 * 1024 /* a block's limit */
};

/* out[t, row] = bf16( sum over blocks b of (sum_k a[t,k] w[row,k]) * (a_scale[t,b] *
 * w_scale[row,b]) )
 *
 * `rows` weight rows in tiles of 128 that read the activation group row / rows_per_group.  The
 * value goes to `out`, to quantised z (zq.codes), or both. */
typedef struct sm90_product {
  CUtensorMap weights;     /* e4m3 [rows, cols], boxes of 128 x 128 */
  CUtensorMap activations; /* e4m3 [groups, tokens, cols], boxes of 1 x step_tokens x 128; unused
                              where fused */
  int32_t tokens, rows, cols, rows_per_group;
  int32_t call_tokens;   /* of the call that `tokens` are a part of: tiles and splits are chosen for
                            them, so that its sums are added in the same order */
  int32_t spare;         /* multiprocessors that are left to others; sm90_prefill's alone */
  int32_t block;         /* of values with one scale: 32 or 128 */
  int32_t tile_tokens;   /* that a block has room for: 8, 16, 32, 64, 128 or 192 ... */
  int32_t step_tokens;   /* ... and takes: a multiple of 4 */
  int32_t split;         /* blocks of a cluster that share a tile's K: 1, 2 or 4 */
  int32_t stages;        /* ring slots; even, and all of them or 4 and more where fused */
  int32_t window;        /* of them, whose weights may be on their way; 1 to stages */
  const float *w_scales; /* [ceil(rows/block), cols/block] */
  const float *a_scales; /* OPROJ_SCALE_F32; unused where fused */
  int32_t fused;         /* the input is quantised here: `input` says from what */
  cuda_input input;
  const float *addend; /* f32 [tokens, rows], or NULL */
  oproj_quant zq;      /* codes NULL: not wanted.  Padding of the scales is written where the
                            layout is OPROJ_SCALE_F32 */
  uint16_t *out;       /* bf16 [tokens, out_stride]; NULL: not wanted */
  int64_t out_stride;
  int32_t early;             /* successors may start at once instead of at the end */
  int32_t z_block, z_joined; /* of zq, as cuda_input's */
  int32_t dependent;         /* launch while the kernel before still runs */
} sm90_product;

/* ---- host side (sm90_host.c) --------------------------------------------------------------- */

/* Describes codes [depth, rows, cols] (depth 0: [rows, cols]) in device memory to the copy engine,
 * in boxes of 1 x box_rows x 128, in the 128-byte swizzle.  What lies outside reads as zero. */
oproj_status sm90_describe(CUtensorMap *out, const void *data, int64_t depth, int64_t rows,
                           int64_t cols, uint32_t box_rows);

/* Describes e4m3 weights [rows, cols] likewise, in boxes of box_rows x 128. */
oproj_status sm90_describe_weights(CUtensorMap *out, const void *data, int64_t rows, int64_t cols,
                                   int32_t box_rows);

/* Tokens that each tile takes where it has room for `most`: all tiles as many, to a multiple of 4.
 * (A copy fills rows that do not exist four times slower than it copies others.) */
int32_t sm90_step_tokens(int32_t tokens, int32_t most);

/* Whether the kernel takes these weights; what it cannot take runs on the portable kernels. */
int sm90_takes_groups(const oproj_kernels_weights *weights);
int sm90_takes_out(const oproj_kernels_weights *weights);

/* Whether heads can be loaded 16 bytes at a time. */
int sm90_loads_input(const cuda_input *input);

/* What WO_A leaves behind. */
typedef struct sm90_result {
  const float *addend; /* f32 [tokens, z cols] to add before rounding, or NULL */
  oproj_quant zq;      /* quantised z in any layout; codes NULL: not wanted ... */
  int joined;          /* ... with its blocks of 32 joined, OPROJ_SCALE_F32 alone */
  uint16_t *z;         /* z itself; NULL: not wanted */
} sm90_result;

/* WO_A from a quantised input (OPROJ_SCALE_F32; joined: its blocks of 32 are, as the weights') or,
 * where x is NULL, from `input` itself. */
oproj_status sm90_project_groups(const oproj_kernels_weights *weights,
                                 const oproj_kernels_part *part, const oproj_quant *x, int joined,
                                 const cuda_input *input, const sm90_result *result,
                                 cudaStream_t stream);

/* WO_B from a quantised z, likewise. */
oproj_status sm90_project_out(const oproj_kernels_weights *weights, const oproj_kernels_part *part,
                              const oproj_quant *zq, int joined, uint16_t *partial, int early,
                              cudaStream_t stream);

/* ---- device side (sm90_project.cu) --------------------------------------------------------- */

/* Launches a kernel that needs what the others do, and waits for it.  *no_native is nonzero in a
 * build whose code for the current device lacks SM90's own instructions, or that has none. */
cudaError_t sm90_probe(int32_t *no_native);

/* How many blocks of clusters of 1, 2 and 4 the current device holds at once. */
cudaError_t sm90_query_capacity(int32_t capacity[CUDA_CLUSTER_SIZES]);

/* Loads the code of every variant for such blocks of the product and of z: which ones a call takes
 * depends on what else serves it, so that a warm-up over token counts may miss some. */
cudaError_t sm90_project_load(int32_t block, int32_t z_block);

/* Bytes of shared memory that a block of this product takes with `stages` ring slots. */
size_t sm90_shared_bytes(const sm90_product *product);

cudaError_t sm90_launch_project(const sm90_product *product, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* OPROJ_KERNELS_CUDA_SM90_H */
