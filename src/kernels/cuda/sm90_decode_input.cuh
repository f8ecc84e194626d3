/* sm90_decode_input.cuh - the input of a block's part of WO_A, rotated and quantised into shared
 * memory by all of its warps but the copying one. */
#ifndef OPROJ_KERNELS_CUDA_SM90_DECODE_INPUT_CUH
#define OPROJ_KERNELS_CUDA_SM90_DECODE_INPUT_CUH

#include "kernels/cuda/input.cuh"
#include "kernels/cuda/sm90_decode_block.cuh"
#include "kernels/cuda/sm90_ptx.cuh"

namespace sm90 {
namespace decode {

constexpr int SLOTS_PER_HEAD = HEAD_DIM / TILE;

/* ALIGNED: heads and table take 16-byte loads. */
template <int N, int BLOCK, bool ALIGNED>
struct Quantizers {
  /* 16 lanes take 128 values of one token, a row, and DEPTH rows at a time: so the loads of 60 rows
   * of a block set out before the first is quantised. */
  static constexpr int ROW_LANES = TILE / LANE_VALUES, ROWS = QUANTIZE_WARPS * WARP / ROW_LANES;
  static constexpr int DEPTH = 2;

  struct Row {
    uint4 raw;
    float4 cos, sin;
    int slot, token; /* slot -1: none */
    bool rotated;
  };

  static __device__ __forceinline__ Row find_row(const sm90_decode &p, const Block &b, int row,
                                                 int column) {
    Row r;
    r.slot = row / p.input.tokens;
    r.token = row - r.slot * p.input.tokens;
    if (r.slot >= b.a_slots) r.slot = -1;
    int slot_of_head = (b.first_slot + r.slot) % SLOTS_PER_HEAD;
    r.rotated = r.slot >= 0 && slot_of_head * TILE + column * LANE_VALUES >= HEAD_DIM - ROPE_DIM;
    return r;
  }

  static __device__ __forceinline__ float4 load_floats(const float *from) {
    if constexpr (ALIGNED)
      return __ldg(reinterpret_cast<const float4 *>(from));
    else
      return make_float4(__ldg(from), __ldg(from + 1), __ldg(from + 2), __ldg(from + 3));
  }

  static __device__ __forceinline__ uint32_t load_pair(const uint16_t *from) {
    return __ldg(from) | static_cast<uint32_t>(__ldg(from + 1)) << 16;
  }

  static __device__ __forceinline__ uint4 load_lane(const uint16_t *from) {
    if constexpr (ALIGNED)
      return __ldg(reinterpret_cast<const uint4 *>(from));
    else
      return make_uint4(load_pair(from), load_pair(from + 2), load_pair(from + 4),
                        load_pair(from + 6));
  }

  static __device__ __forceinline__ void load_angles(const sm90_decode &p, int column, Row *r) {
    if (!r->rotated) return;
    int pair = (column * LANE_VALUES - (TILE - ROPE_DIM)) / 2;
    const float *table = table_row(p.input, r->token, false);
    float nan = oproj_num_from_bits(0x7FC00000u);
    r->cos = r->sin = make_float4(nan, nan, nan, nan);
    if (!table) return;
    r->cos = load_floats(table + pair);
    r->sin = load_floats(table + ROPE_DIM / 2 + pair);
  }

  static __device__ __forceinline__ void load_values(const sm90_decode &p, const Block &b,
                                                     int group, int column, Row *r) {
    const cuda_input &in = p.input;
    r->raw = make_uint4(0, 0, 0, 0);
    if (r->slot < 0) return;
    int slot = b.first_slot + r->slot, head = group * in.heads_per_group + slot / SLOTS_PER_HEAD;
    r->raw = load_lane(in.attn_out + r->token * in.token_stride + head * in.head_stride +
                       slot % SLOTS_PER_HEAD * TILE + column * LANE_VALUES);
  }

  static __device__ __forceinline__ void quantize_row(const Block &b, const Row &r, int column) {
    constexpr int BLOCK_LANES = BLOCK / LANE_VALUES;
    float values[LANE_VALUES];
    uint2 packed;
    unpack_values(r.raw, values);
    if (r.rotated) unrotate_values(values, r.cos, r.sin);
    uint8_t exponent = quantize_values(values, BLOCK_LANES, &packed);
    if (r.slot < 0) return;
    /* The swizzle exchanges a row's 16-byte chunks by its number. */
    int chunk = (column / 2) ^ (r.token % 8);
    uint8_t *codes = b.memory + b.at.codes + r.slot * code_bytes(N) + r.token * TILE;
    *reinterpret_cast<uint2 *>(codes + chunk * 16 + column % 2 * 8) = packed;
    if (column % BLOCK_LANES == 0)
      b.floats(b.at.x_scales)[(r.slot * N + r.token) * SCALE_PITCH + column / BLOCK_LANES] =
          oproj_ue8m0_to_f32(exponent);
  }

  static __device__ void run(const sm90_decode &p, const Block &b, int worker, int lane) {
    int column = lane % ROW_LANES, rows = b.a_slots * p.input.tokens;
    int group = b.tile / p.tiles_per_group;
#pragma unroll 1
    for (int first = worker * (WARP / ROW_LANES); first < rows; first += DEPTH * ROWS) {
      Row r[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        r[d] = find_row(p, b, first + d * ROWS + lane / ROW_LANES, column);
        load_values(p, b, group, column, &r[d]);
        load_angles(p, column, &r[d]);
      }
#pragma unroll
      for (int d = 0; d < DEPTH; d++)
        if (first + d * ROWS < rows) quantize_row(b, r[d], column);
    }
    fence_for_async_proxy();
  }
};

/* One block looks at all positions: reporting while they quantise would be in the way. */
__device__ inline void report_positions(const cuda_input &in, int lane) {
  if (blockIdx.x == 0 && lane < in.tokens) table_row(in, lane, true);
}

}  // namespace decode
}  // namespace sm90

#endif /* OPROJ_KERNELS_CUDA_SM90_DECODE_INPUT_CUH */
