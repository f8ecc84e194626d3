/* sm90_decode.h - between the host code and the kernel that takes a few tokens through the whole
 * chain in one launch: inverse RoPE, quantisation, WO_A, quantisation of z, WO_B.
 *
 *   sm90_exchange.cuh          how blocks of one launch hand values to one another
 *   sm90_decode.cuh            the kernel: who does what when; its parts are
 *   sm90_decode_block.cuh        a block: its share, its shared memory
 *   sm90_decode_input.cuh        the input, rotated and quantised
 *   sm90_decode_products.cuh     slots of weights -> sums
 *   sm90_decode_z.cuh            sums of WO_A -> z, from block to block
 *   sm90_decode.cu             its variants and their launch
 *   sm90_decode_host.c         its exchange memory, rings and arguments
 *
 * How the work shares out to blocks: kernels/decode.c. */
#ifndef OPROJ_KERNELS_CUDA_SM90_DECODE_H
#define OPROJ_KERNELS_CUDA_SM90_DECODE_H

#include "kernels/cuda/sm90.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Words of z in the exchange, per token and 128 columns: the codes, then a scale for every 32. */
enum { DECODE_Z_WORDS = 32 + 4 };

/* What the blocks of a launch share in device memory.  Launches alternate between two copies
 * ("epochs") of z and partials; a copy is full of DECODE_EMPTY while nobody uses it. */
#define DECODE_EMPTY 0xFFFFFFFFu

typedef struct decode_control { /* read as 4 words */
  uint32_t arrivals;            /* of blocks that know their epoch, over two launches */
  uint32_t used[2];             /* tokens that the last launch of each epoch left behind */
  uint32_t stalled;             /* a launch gave up: every later one does so at once */
} decode_control;

typedef struct decode_exchange {
  decode_control *control;
  uint32_t *z[2];     /* [z cols / 128][tokens][DECODE_Z_WORDS] */
  float *partials[2]; /* f32 [WO_A's blocks][tokens][128]; unused without a split */
} decode_exchange;

/* What a block reads before its predecessors have ended comes first, side by side, and what follows
 * from it is computed instead of passed: each line of the constant cache that a new block touches
 * costs it more than arithmetic does. */
typedef struct sm90_decode {
  oproj_kernels_decode shape;
  int32_t group_cols, z_cols, hidden, tiles_per_group;
  int32_t stages, z_stages; /* slots of the weights' ring and of z's */
  int32_t early;            /* the successor may start at once */
  const float *wo_a_scales; /* [z cols / block, group cols / block] */
  const float *wo_b_scales; /* [ceil(hidden / block), z cols / block] */
  cuda_input input;         /* tokens 1 to OPROJ_KERNELS_DECODE_TOKENS */
  decode_exchange exchange;
  uint16_t *partial; /* bf16 [tokens, hidden] */
  cuda_push sink;    /* n > 1: partial is pushed to the other ranks as well */
  CUtensorMap wo_a;  /* e4m3 [z cols, group cols], boxes of 128 x 128 */
  CUtensorMap wo_b;  /* e4m3 [hidden, z cols], boxes of out_rows x 128 */
} sm90_decode;

/* ---- host side (sm90_decode_host.c) -------------------------------------------------------- */

/* What a context keeps for it. */
typedef struct sm90_decode_state {
  oproj_kernels_decode shape;
  decode_exchange exchange;
} sm90_decode_state;

/* NULL on other devices, or where the context's path is another. */
oproj_status sm90_decode_open(oproj_kernels *kernels);
void sm90_decode_close(oproj_kernels *kernels);

/* Whether it takes so many tokens. */
int sm90_decode_takes(const oproj_kernels_weights *weights, int32_t tokens);

oproj_status sm90_decode_forward(const oproj_kernels_weights *weights, const cuda_input *input,
                                 uint16_t *partial, const oproj_kernels_push *sink, int early,
                                 cudaStream_t stream);

/* ---- device side (sm90_decode.cu) ---------------------------------------------------------- */

/* Bytes of shared memory of a block. */
size_t sm90_decode_shared_bytes(const sm90_decode *decode);

/* Blocks of the current device that fit at once with that much shared memory each. */
cudaError_t sm90_decode_capacity(int32_t *blocks);

/* Loads the code of every variant for such blocks: a warm-up over token counts sees only input
 * that is aligned. */
cudaError_t sm90_decode_load(int32_t block);

/* `aligned` nonzero: heads and table in 16-byte pieces, partial in 4-byte ones. */
cudaError_t sm90_launch_decode(const sm90_decode *decode, int32_t aligned, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* OPROJ_KERNELS_CUDA_SM90_DECODE_H */
