/* sm90_decode_block.cuh - a block of sm90_decode.cuh's kernel: its warps, what lies where in its
 * shared memory, what each role needs to know of its share, and which sums a thread holds. */
#ifndef OPROJ_KERNELS_CUDA_SM90_DECODE_BLOCK_CUH
#define OPROJ_KERNELS_CUDA_SM90_DECODE_BLOCK_CUH

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/sm90_decode.h"
#include "kernels/cuda/sm90_ptx.cuh"

namespace sm90 {
namespace decode {

constexpr int MATH_WARPS = 8, COPY_WARP = MATH_WARPS, FIRST_HELP_WARP = COPY_WARP + 1;
constexpr int HELP_WARPS = 7; /* 16 warps leave 128 registers to each thread */
constexpr int THREADS = (FIRST_HELP_WARP + HELP_WARPS) * WARP;
constexpr int MATH_THREADS = MATH_WARPS * WARP;
constexpr int QUANTIZE_WARPS = MATH_WARPS + HELP_WARPS; /* all but the copying one */
constexpr int QUANTIZE_THREADS = QUANTIZE_WARPS * WARP;
constexpr int TILE = OPROJ_KERNELS_DECODE_TILE; /* rows of WO_A, values of K: of a slot */
constexpr int SLOT_BYTES = TILE * TILE, HALF_SLOT = SLOT_BYTES / 2;
constexpr int K_STEP = 32;           /* values of K of one instruction */
constexpr int STEPS = TILE / K_STEP; /* instructions per 128 values of K */
constexpr int SCALE_PITCH = 4;       /* f32 activation scales per token and slot */
constexpr int TILE_PITCH = TILE + 4,
              OUT_PITCH = OPROJ_KERNELS_DECODE_OUT_ROWS + 4; /* floats: no bank twice */
constexpr int ALL_READY = 1, MATH_MEETS = 2;                 /* named barriers */

/* Of 128 values of K: scales of a token or of a row, and bytes of so many tokens' codes. */
__host__ __device__ constexpr int scales_per_slot(int block) {
  return TILE / block;
}
__host__ __device__ constexpr int code_bytes(int tokens) {
  return tokens * TILE;
}

/* Where things lie in a block's shared memory, offsets in bytes, N being 8, 16 or 32 tokens. */
struct Shared {
  int codes;           /* input: [slots of WO_A][N][TILE], swizzled */
  int z, z_slot_bytes; /* ring: [z_stages]: codes [2][N][TILE], scales f32 [2][N][SCALE_PITCH] */
  int x_scales;        /* f32 [slots of WO_A][N][SCALE_PITCH] */
  int a_scales;        /* f32 [row blocks of the tile][slots of WO_A * scales per slot] */
  int b_scales;        /* f32 [row blocks that out_rows rows may touch][z cols / block] */
  int sums;            /* f32 [N][TILE_PITCH] or [2][N][OUT_PITCH] */
  int full, empty;     /* barriers of the weights' ring, which begins at 0 */
  int z_full, z_empty; /* ... and of z's */
  int bytes;           /* in all, with room to align the ring to the swizzle's 1024 */
};

__host__ __device__ __forceinline__ Shared shared_layout(const sm90_decode &p, int n, int block) {
  Shared s = {};
  int slots = (p.group_cols / TILE) >> p.shape.log2_split, per_slot = scales_per_slot(block);
  int row_blocks = (p.shape.out_rows + block - 8 + block - 1) / block; /* from a multiple of 8 on */
  int tile_sums = n * TILE_PITCH, out_sums = 2 * n * OUT_PITCH;
  s.codes = p.stages * SLOT_BYTES;
  s.z = s.codes + slots * code_bytes(n);
  s.z_slot_bytes = ceil_div(2 * (code_bytes(n) + n * SCALE_PITCH * 4), 1024) * 1024;
  s.x_scales = s.z + p.z_stages * s.z_slot_bytes;
  s.a_scales = s.x_scales + slots * n * SCALE_PITCH * 4;
  s.b_scales = s.a_scales + ceil_div(per_slot * slots * per_slot * 4, 16) * 16;
  s.sums = s.b_scales + ceil_div(row_blocks * (p.z_cols / block) * 4, 16) * 16;
  s.full = s.sums + (tile_sums > out_sums ? tile_sums : out_sums) * 4;
  s.empty = s.full + p.stages * 8;
  s.z_full = s.empty + p.stages * 8;
  s.z_empty = s.z_full + p.z_stages * 8;
  s.bytes = s.z_empty + p.z_stages * 8 + 1024;
  return s;
}

/* What every role needs to know of its block. */
struct Block {
  uint32_t base;   /* of shared memory */
  uint8_t *memory; /* the same, generic */
  Shared at;
  int tile, part, first_slot; /* of WO_A; first_slot within the group */
  int a_slots, b_slots;       /* of the ring: 0 where the block takes nothing of that matrix */
  int first_row, rows;        /* of WO_B */

  __device__ __forceinline__ uint32_t slot(int i) const {
    return base + i * SLOT_BYTES;
  }
  __device__ __forceinline__ uint32_t full(int i) const {
    return base + at.full + i * 8;
  }
  __device__ __forceinline__ uint32_t empty(int i) const {
    return base + at.empty + i * 8;
  }
  __device__ __forceinline__ uint32_t z_full(int i) const {
    return base + at.z_full + i * 8;
  }
  __device__ __forceinline__ uint32_t z_empty(int i) const {
    return base + at.z_empty + i * 8;
  }
  __device__ __forceinline__ float *floats(int offset) const {
    return reinterpret_cast<float *>(memory + offset);
  }
};

template <int N, int BLOCK>
__device__ __forceinline__ Block describe_block(const sm90_decode &p, uint8_t *memory) {
  int tile = blockIdx.x >> p.shape.log2_split, part = blockIdx.x & (p.shape.split - 1);
  int a_slots = (p.group_cols / TILE) >> p.shape.log2_split;
  int first_row = blockIdx.x * p.shape.out_rows, left = p.hidden - first_row;
  return {.base = shared_address(memory),
          .memory = memory,
          .at = shared_layout(p, N, BLOCK),
          .tile = tile,
          .part = part,
          .first_slot = part * a_slots,
          .a_slots = tile < p.shape.tiles ? a_slots : 0,
          .b_slots = left > 0 ? p.z_cols / (2 * TILE) : 0,
          .first_row = first_row,
          .rows = left < p.shape.out_rows ? left : p.shape.out_rows};
}

/* What a thread holds of its warpgroup's 64 rows x N tokens: row warp % 4 * 16 + lane / 4 and the
 * one 8 below, of tokens 8j + lane % 4 * 2 (+ 1). */
template <int N>
using Sums = float[N / 2];

/* put(token, sum of the row, sum of the row 8 below), whichever way they go on. */
template <int N, typename Put>
__device__ __forceinline__ void for_each_sum(int lane, const Sums<N> &total, Put put) {
#pragma unroll
  for (int j = 0; j < N / 8; j++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      put(8 * j + lane % 4 * 2 + e, total[4 * j + e], total[4 * j + 2 + e]);
}

}  // namespace decode
}  // namespace sm90

#endif /* OPROJ_KERNELS_CUDA_SM90_DECODE_BLOCK_CUH */
