/* sm90_project_block.cuh - a block of sm90_project.cuh's kernel: what lies where in its shared
 * memory, and what each of its warps needs to know of it. */
#ifndef OPROJ_KERNELS_CUDA_SM90_PROJECT_BLOCK_CUH
#define OPROJ_KERNELS_CUDA_SM90_PROJECT_BLOCK_CUH

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/input.cuh"
#include "kernels/cuda/sm90.h"

namespace sm90 {

constexpr int MATH_MEETS = 1, QUANTIZERS_MEET = 2; /* named barriers */
constexpr int QUANTIZE_WARPS = 4, QUANTIZE_THREADS = QUANTIZE_WARPS * WARP;
constexpr int K_STEP = 32;                     /* values of K of one instruction */
constexpr int STEPS = SM90_TILE_COLS / K_STEP; /* instructions per slot */
constexpr int WEIGHT_BYTES = SM90_TILE_ROWS * SM90_TILE_COLS;
constexpr int SLOTS_PER_HEAD = HEAD_DIM / SM90_TILE_COLS; /* FUSED takes such heads alone */

/* Scales of one token in one slot. */
__host__ __device__ constexpr int scales_per_slot(int block) {
  return SM90_TILE_COLS / block;
}

/* Tokens from which on they are the instruction's rows. */
constexpr int ROW_TOKENS = 64;

/* Floats per token while sums meet: no bank twice, whichever way they are written. */
__host__ __device__ constexpr int sum_pitch(int tokens) {
  return SM90_TILE_ROWS + (tokens < ROW_TOKENS ? 4 : 8);
}

/* Bytes that warpgroups which took turns exchange in front of the sums. */
__host__ __device__ constexpr int exchange_bytes(int tokens) {
  return tokens == ROW_TOKENS ? ROW_TOKENS * SM90_TILE_ROWS * 4 : 0;
}

/* Where things lie in a block's shared memory; offsets in bytes. */
struct Shared {
  int slot_bytes;        /* weights, then codes */
  int a_scales;          /* f32 [stages][scales per slot][N] */
  int w_scales;          /* f32 [row blocks of the tile][scales of the part of K] */
  int cos_sin;           /* FUSED: f32 [N][ROPE_DIM] */
  int full, live, empty; /* barriers [stages]: weights and activations have landed, both are read */
  int bytes;
};

__host__ __device__ inline Shared shared_layout(int tokens, int block, int stages, int slots,
                                                bool fused) {
  Shared s = {};
  s.slot_bytes = WEIGHT_BYTES + tokens * SM90_TILE_COLS;
  int ring = stages * s.slot_bytes;
  int sums = exchange_bytes(tokens) + tokens * sum_pitch(tokens) * 4; /* over the drained ring */
  s.a_scales = ring > sums ? ring : sums;
  s.w_scales = s.a_scales + stages * scales_per_slot(block) * tokens * 4;
  int row_blocks = SM90_TILE_ROWS / block;
  s.cos_sin = s.w_scales + ceil_div(row_blocks * slots * scales_per_slot(block) * 4, 16) * 16;
  s.full = s.cos_sin + (fused ? tokens * ROPE_DIM * 4 : 0);
  s.live = s.full + stages * 8;
  s.empty = s.live + stages * 8;
  s.bytes = s.empty + stages * 8 + 1024; /* room to align the ring to the swizzle's 1024 */
  return s;
}

/* What every role needs to know of its block. */
struct Block {
  uint32_t base;   /* of the ring */
  uint8_t *memory; /* the same, generic */
  Shared at;
  int tile, part, group;
  int first_slot, slots;   /* of K */
  int first_token, tokens; /* whose scales exist in memory: a multiple of 4 */

  __device__ __forceinline__ uint32_t slot(int i) const {
    return base + i * at.slot_bytes;
  }
  __device__ __forceinline__ uint32_t full(int i) const {
    return base + at.full + i * 8;
  }
  __device__ __forceinline__ uint32_t live(int i) const {
    return base + at.live + i * 8;
  }
  __device__ __forceinline__ uint32_t empty(int i) const {
    return base + at.empty + i * 8;
  }
};

/* Of the activations in a slot: f32 [scales per slot][N]. */
template <int N, int BLOCK>
__device__ __forceinline__ float *a_scales(const Block &b, int slot) {
  return reinterpret_cast<float *>(b.memory + b.at.a_scales) + slot * scales_per_slot(BLOCK) * N;
}

}  // namespace sm90

#endif /* OPROJ_KERNELS_CUDA_SM90_PROJECT_BLOCK_CUH */
