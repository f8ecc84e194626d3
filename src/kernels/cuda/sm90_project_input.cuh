/* sm90_project_input.cuh - the input, rotated and quantised straight into the ring of
 * sm90_project.cuh's kernel: warps 9 to 12 where it is FUSED. */
#ifndef OPROJ_KERNELS_CUDA_SM90_PROJECT_INPUT_CUH
#define OPROJ_KERNELS_CUDA_SM90_PROJECT_INPUT_CUH

#include "kernels/cuda/input.cuh"
#include "kernels/cuda/sm90_project_block.cuh"
#include "kernels/cuda/sm90_ptx.cuh"

namespace sm90 {

template <int N, int BLOCK, bool JOINED>
struct Quantizers {
  /* A warp takes every fourth slot, all its tokens: two rows of 16 lanes at a time. */
  static constexpr int ROW_LANES = SM90_TILE_COLS / LANE_VALUES, PASS_ROWS = WARP / ROW_LANES;
  static constexpr int PASSES = N / PASS_ROWS;

  static __device__ void load_cos_sin(const sm90_product &p, const Block &b, int thread) {
    float *table = reinterpret_cast<float *>(b.memory + b.at.cos_sin);
    for (int i = thread; i < N * ROPE_DIM; i += QUANTIZE_THREADS) {
      int row = i / ROPE_DIM, token = b.first_token + row;
      if (token >= p.tokens) continue;
      bool reports = blockIdx.x == 0 && i % ROPE_DIM == 0;
      const float *from = table_row(p.input, token, reports);
      table[i] = from ? __ldg(from + i % ROPE_DIM) : oproj_num_from_bits(0x7FC00000u);
    }
  }

  static __device__ __forceinline__ void load_rows(const sm90_product &p, const Block &b, int i,
                                                   int lane, uint4 (&raw)[PASSES]) {
    int slot_in_group = b.first_slot + i;
    int head = b.group * p.input.heads_per_group + slot_in_group / SLOTS_PER_HEAD;
    int begin = slot_in_group % SLOTS_PER_HEAD * SM90_TILE_COLS + lane % ROW_LANES * LANE_VALUES;
    const uint16_t *from = p.input.attn_out + head * p.input.head_stride + begin;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      int64_t token = b.first_token + pass * PASS_ROWS + lane / ROW_LANES;
      raw[pass] = make_uint4(0, 0, 0, 0);
      if (token < p.tokens)
        raw[pass] = __ldg(reinterpret_cast<const uint4 *>(from + token * p.input.token_stride));
    }
  }

  /* The cosines and sines of a lane's 4 pairs in the rotated half of a head's last slot. */
  static __device__ __forceinline__ const float4 *table_of(const Block &b, int row, int lane) {
    const float *table = reinterpret_cast<const float *>(b.memory + b.at.cos_sin) + row * ROPE_DIM;
    return reinterpret_cast<const float4 *>(table + (lane - ROW_LANES / 2) * LANE_VALUES / 2);
  }

  static __device__ __forceinline__ void quantize_slot(const sm90_product &p, const Block &b, int i,
                                                       int slot, int lane,
                                                       const uint4 (&raw)[PASSES]) {
    constexpr int BLOCK_LANES = BLOCK / LANE_VALUES;
    int column = lane % ROW_LANES;
    bool rotated =
        (b.first_slot + i) % SLOTS_PER_HEAD == SLOTS_PER_HEAD - 1 && column >= ROW_LANES / 2;
    uint8_t *codes = b.memory + slot * b.at.slot_bytes + WEIGHT_BYTES;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      int row = pass * PASS_ROWS + lane / ROW_LANES;
      bool live = b.first_token + row < p.tokens;
      float values[LANE_VALUES];
      unpack_values(raw[pass], values);
      if (rotated && live) {
        const float4 *table = table_of(b, row, column);
        unrotate_values(values, table[0], table[ROPE_DIM / 2 / 4]);
      }
      uint2 packed;
      uint8_t exponent =
          JOINED ? quantize_joined(values, &packed) : quantize_values(values, BLOCK_LANES, &packed);
      /* The swizzle exchanges the row's 16-byte chunks by its number. */
      int chunk = (column / 2) ^ (row % 8);
      *reinterpret_cast<uint2 *>(codes + row * SM90_TILE_COLS + chunk * 16 + column % 2 * 8) =
          packed;
      if (column % BLOCK_LANES == 0)
        a_scales<N, BLOCK>(b, slot)[column / BLOCK_LANES * N + row] =
            live ? oproj_ue8m0_to_f32(exponent) : 0.0f;
    }
  }

  /* Slots of a warp whose loads are in flight: a load takes as long as two or three slots of
   * weights. */
  static constexpr int DEPTH = N <= 16 ? 2 : 1;

  static __device__ void run(const sm90_product &p, const Block &b, int warp, int lane) {
    wait_for_predecessors();
    uint4 raw[DEPTH][PASSES];
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
      if (warp + d * QUANTIZE_WARPS < b.slots)
        load_rows(p, b, warp + d * QUANTIZE_WARPS, lane, raw[d]);
    load_cos_sin(p, b, warp * WARP + lane);
    named_barrier(QUANTIZERS_MEET, QUANTIZE_THREADS);
    for (int first = warp; first < b.slots; first += DEPTH * QUANTIZE_WARPS) {
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        int i = first + d * QUANTIZE_WARPS, slot = i % p.stages, round = i / p.stages;
        if (i >= b.slots) break;
        if (round > 0) barrier_wait(b.empty(slot), (round - 1) & 1);
        quantize_slot(p, b, i, slot, lane, raw[d]);
        int next = i + DEPTH * QUANTIZE_WARPS;
        if (next < b.slots) load_rows(p, b, next, lane, raw[d]);
        fence_for_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(b.live(slot));
      }
    }
  }
};

}  // namespace sm90

#endif /* OPROJ_KERNELS_CUDA_SM90_PROJECT_INPUT_CUH */
