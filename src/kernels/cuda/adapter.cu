/* adapter.cu - LoRA on WO_A: per group, from the bf16 rotated input, both products in f32.
 *
 *   lora_down_kernel  x [groups, T, cols] x a [groups, rank, cols]  ->  down f32 [groups, T, rank]
 *   lora_up_kernel    down x b [groups, rows, rank]  ->  delta f32 [T, groups * rows]
 *
 * Grid of both: x over tiles of 8 tokens, y over blocks of 8 rows of a or b (a warp each), z over
 * groups.  A warp's lanes split the inner dimension and keep one sum per token.
 * Bound: bytes of a, b and of x read again from cache; ranks are small. */
#include "kernels/cuda/device.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int TOKENS = 8;
constexpr int VALUES = 8; /* bf16 in 16 bytes */

__device__ __forceinline__ void widen(const uint4 &from, float (&to)[VALUES]) {
  uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < VALUES / 2; i++) {
    float2 two = floats_of_bf16s(words[i]);
    to[2 * i] = two.x;
    to[2 * i + 1] = two.y;
  }
}

/* Lane t returns the warp's sum of sums[t]; lanes from TOKENS on return zero. */
__device__ __forceinline__ float sum_of_lane(const float (&sums)[TOKENS], int lane) {
  float mine = 0.0f;
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    float sum = warp_sum(sums[t]);
    if (lane == t) mine = sum;
  }
  return mine;
}

/* Tokens past the last one read the last one's values and are not stored. */
__global__ void __launch_bounds__(THREADS) lora_down_kernel(cuda_lora p) {
  int lane = threadIdx.x % WARP;
  int32_t group = blockIdx.z, first = blockIdx.x * TOKENS;
  int32_t row = blockIdx.y * WARPS + threadIdx.x / WARP;
  if (row >= p.rank) return;
  const uint16_t *a = p.a + (static_cast<int64_t>(group) * p.rank + row) * p.cols;
  const uint16_t *x = p.x + static_cast<int64_t>(group) * p.tokens * p.cols;

  float sums[TOKENS] = {};
  for (int32_t k = lane * VALUES; k < p.cols; k += WARP * VALUES) {
    float weights[VALUES];
    widen(__ldg(reinterpret_cast<const uint4 *>(a + k)), weights);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      int64_t token = min(first + t, p.tokens - 1);
      float values[VALUES];
      widen(__ldg(reinterpret_cast<const uint4 *>(x + token * p.cols + k)), values);
#pragma unroll
      for (int i = 0; i < VALUES; i++) sums[t] += values[i] * weights[i];
    }
  }
  float sum = sum_of_lane(sums, lane);
  int64_t token = first + lane;
  if (lane < TOKENS && token < p.tokens)
    p.down[(static_cast<int64_t>(group) * p.tokens + token) * p.rank + row] = sum;
}

/* b has any rank, so its rows have no alignment: scalar loads. */
__global__ void __launch_bounds__(THREADS) lora_up_kernel(cuda_lora p) {
  int lane = threadIdx.x % WARP;
  int32_t group = blockIdx.z, first = blockIdx.x * TOKENS;
  int32_t row = blockIdx.y * WARPS + threadIdx.x / WARP;
  if (row >= p.rows) return;
  int64_t group_row = static_cast<int64_t>(group) * p.rows + row;
  const uint16_t *b = p.b + group_row * p.rank;
  const float *down = p.down + static_cast<int64_t>(group) * p.tokens * p.rank;

  float sums[TOKENS] = {};
  for (int32_t i = lane; i < p.rank; i += WARP) {
    float weight = oproj_bf16_to_f32(__ldg(b + i));
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      int64_t token = min(first + t, p.tokens - 1);
      sums[t] += down[token * p.rank + i] * weight;
    }
  }
  float sum = sum_of_lane(sums, lane);
  int64_t token = first + lane;
  if (lane < TOKENS && token < p.tokens) p.delta[token * p.groups * p.rows + group_row] = sum;
}

}  // namespace

extern "C" cudaError_t cuda_launch_lora(const cuda_lora *lora, cudaStream_t stream) {
  const cuda_lora &p = *lora;
  if (p.tokens == 0) return cudaSuccess;
  unsigned tiles = ceil_div(p.tokens, TOKENS);
  cudaError_t error =
      launch(lora_down_kernel, dim3(tiles, ceil_div(p.rank, WARPS), p.groups), THREADS, p, stream);
  if (error != cudaSuccess) return error;
  return launch(lora_up_kernel, dim3(tiles, ceil_div(p.rows, WARPS), p.groups), THREADS, p, stream);
}
