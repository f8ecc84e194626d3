/* sm90_decode_z.cuh - z on its way through sm90_decode.cuh's kernel, from block to block: sums of
 * WO_A become z, quantised, in the exchange, and from there every block receives all of it.
 *
 * Where a tile is split its blocks first exchange their parts of its sums. */
#ifndef OPROJ_KERNELS_CUDA_SM90_DECODE_Z_CUH
#define OPROJ_KERNELS_CUDA_SM90_DECODE_Z_CUH

#include "kernels/cuda/input.cuh"
#include "kernels/cuda/sm90_decode_block.cuh"
#include "kernels/cuda/sm90_exchange.cuh"
#include "kernels/cuda/sm90_ptx.cuh"

namespace sm90 {
namespace decode {

template <int N, int BLOCK>
struct ZExchange {
  /* ---- sums of WO_A become z --------------------------------------------------------------- */

  static __device__ void send_partials(const sm90_decode &p, int epoch, int warp, int lane,
                                       const Sums<N> &total) {
    int tokens = p.input.tokens, row = warp * 16 + lane / 4;
    float *to = p.exchange.partials[epoch] + static_cast<int64_t>(blockIdx.x) * tokens * TILE + row;
    for_each_sum<N>(lane, total, [&](int token, float low, float high) {
      if (token >= tokens) return;
      send_word(to + token * TILE, as_sent(low));
      send_word(to + token * TILE + 8, as_sent(high));
    });
  }

  /* Rounds and quantises a token's 128 sums of a tile, 4 to a lane, and sends them to everyone. */
  static __device__ __forceinline__ void send_z(const sm90_decode &p, const Block &b, int epoch,
                                                int token, float4 sum, int lane) {
    constexpr int BLOCK_LANES = BLOCK / 4, LANES_PER_SCALE = K_STEP / 4;
    float v[4] = {sum.x, sum.y, sum.z, sum.w}, amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[i] = oproj_bf16_to_f32(oproj_bf16_from_f32(v[i]));
      amax = oproj_quant_amax(amax, v[i]);
    }
#pragma unroll
    for (int offset = BLOCK_LANES / 2; offset > 0; offset /= 2)
      amax = oproj_quant_amax(amax, __shfl_xor_sync(ALL_LANES, amax, offset));
    uint8_t exponent = oproj_quant_exponent(amax);
    uint32_t *to = p.exchange.z[epoch] +
                   (static_cast<int64_t>(b.tile) * p.input.tokens + token) * DECODE_Z_WORDS;
    send_word(to + lane, codes_of_values(v[0], v[1], v[2], v[3], exponent));
    if (lane % LANES_PER_SCALE == 0)
      send_word(to + WARP + lane / LANES_PER_SCALE, oproj_num_bits(oproj_ue8m0_to_f32(exponent)));
  }

  /* Without a split the tile's sums meet in shared memory. */
  static __device__ void finish_own_tile(const sm90_decode &p, const Block &b, int epoch, int warp,
                                         int lane, const Sums<N> &total) {
    float *sums = b.floats(b.at.sums);
    int row = warp * 16 + lane / 4;
    for_each_sum<N>(lane, total, [&](int token, float low, float high) {
      sums[token * TILE_PITCH + row] = low;
      sums[token * TILE_PITCH + row + 8] = high;
    });
    named_barrier(MATH_MEETS, MATH_THREADS);
    for (int token = warp; token < p.input.tokens; token += MATH_WARPS)
      send_z(p, b, epoch, token,
             *reinterpret_cast<const float4 *>(sums + token * TILE_PITCH + lane * 4), lane);
  }

  /* With a split its blocks share out the tokens; each adds the parts in order of K. */
  static __device__ bool finish_split_tile(const sm90_decode &p, const Block &b, int epoch,
                                           int helper, int lane) {
    constexpr int PARTS = 8; /* on their way at a time: the largest split takes two rounds */
    int tokens = p.input.tokens, split = p.shape.split, stride = tokens * TILE / 4;
    const uint4 *tile = reinterpret_cast<const uint4 *>(p.exchange.partials[epoch]) +
                        static_cast<int64_t>(b.tile) * split * stride + lane;
    for (int token = b.part + split * helper; token < tokens; token += split * HELP_WARPS) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int part = 0; part < split; part += PARTS) {
        uint4 v[PARTS];
        int count = split - part < PARTS ? split - part : PARTS;
        if (!receive<PARTS>(p.exchange.control, tile + part * stride + token * (TILE / 4), stride,
                            (1u << count) - 1, v))
          return false;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
          if (i >= count) break;
          sum.x += oproj_num_from_bits(v[i].x);
          sum.y += oproj_num_from_bits(v[i].y);
          sum.z += oproj_num_from_bits(v[i].z);
          sum.w += oproj_num_from_bits(v[i].w);
        }
      }
      send_z(p, b, epoch, token, sum, lane);
    }
    return true;
  }

  /* ---- z reaches every block --------------------------------------------------------------- */

  /* z of a slot, 256 columns, is contiguous in the exchange: per 128 columns and token 8 pieces of
   * codes and one of scales, 16 bytes each. */
  static constexpr int PIECES = DECODE_Z_WORDS / 4;
  static constexpr int PASSES = ceil_div(2 * N * PIECES, WARP); /* 5, 9 or 18 */
  static constexpr int AT_ONCE = PASSES <= 9 ? PASSES : 6; /* of them on their way: 5, 9 or 6 */

  static __device__ void receive_z(const sm90_decode &p, const Block &b, int epoch, int helper,
                                   int lane, bool stalled) {
    int tokens = p.input.tokens, pieces = 2 * tokens * PIECES, to[PASSES];
    uint32_t wanted = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      int i = pass * WARP + lane, row = i / PIECES, piece = i % PIECES;
      int half = row >= tokens, token = row - half * tokens;
      to[pass] = piece < 8 ? half * code_bytes(N) + token * TILE + (piece ^ (token % 8)) * 16
                           : 2 * code_bytes(N) + (half * N + token) * SCALE_PITCH * 4;
      if (i < pieces) wanted |= 1u << pass;
    }
    const uint4 *from = reinterpret_cast<const uint4 *>(p.exchange.z[epoch]) + lane;
    uint32_t nan = 0x7FC00000u;
    for (int i = helper; i < b.b_slots; i += HELP_WARPS) {
      int slot = i % p.z_stages, round = i / p.z_stages;
      uint8_t *z = b.memory + b.at.z + slot * b.at.z_slot_bytes;
#pragma unroll
      for (int first = 0; first < PASSES; first += AT_ONCE) {
        uint32_t part = wanted >> first & ((1u << AT_ONCE) - 1);
        uint4 v[AT_ONCE];
        if (!stalled)
          stalled = !receive<AT_ONCE>(p.exchange.control, from + i * pieces + first * WARP, WARP,
                                      part, v);
        if (first == 0 && round > 0) barrier_wait(b.z_empty(slot), (round - 1) & 1);
#pragma unroll
        for (int pass = 0; pass < AT_ONCE; pass++)
          if (part >> pass & 1)
            *reinterpret_cast<uint4 *>(z + to[first + pass]) =
                stalled ? make_uint4(nan, nan, nan, nan) : v[pass];
      }
      fence_for_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(b.z_full(slot));
    }
    if (stalled && lane == 0) raise_stall(p.input);
  }

  /* ---- the next launch's copy -------------------------------------------------------------- */

  static __device__ void empty_other_epoch(const sm90_decode &p, int epoch, const uint4 &control,
                                           int worker) {
    int other = epoch ^ 1;
    uint32_t used = tokens_left(control, other);
    if (p.shape.split > 1)
      empty_words(p.exchange.partials[other] + static_cast<int64_t>(blockIdx.x) * used * TILE,
                  blockIdx.x < p.shape.tiles * p.shape.split ? used * TILE / 4 : 0, worker,
                  HELP_WARPS * WARP);
    empty_words(p.exchange.z[other], p.z_cols / TILE * used * (DECODE_Z_WORDS / 4),
                blockIdx.x * HELP_WARPS * WARP + worker, gridDim.x * HELP_WARPS * WARP);
    if (blockIdx.x == 0 && worker == 0) send_word(&p.exchange.control->used[epoch], p.input.tokens);
  }
};

}  // namespace decode
}  // namespace sm90

#endif /* OPROJ_KERNELS_CUDA_SM90_DECODE_Z_CUH */
