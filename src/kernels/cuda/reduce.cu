/* reduce.cu - the sum over ranks: bf16 [n, count] -> bf16 [count].
 *
 * The parts are added in f32 in their order, from the first, and rounded once, so the bits depend
 * neither on the grid nor on which rank adds.  Grid: x over elements, a block takes THREADS runs of
 * 8 elements; the wide kernel reads 16 bytes of every part per thread, the narrow one serves counts
 * and addresses that do not allow it.  Bound: bytes, 2 (n + 1) count. */
#include "kernels/cuda/pulse.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int RUN = 8; /* bf16 in 16 bytes */

__device__ __forceinline__ void add_words(const uint4 &part, float (&sums)[RUN]) {
  uint32_t words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    uint16_t half = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    sums[i] = oproj_num_add(sums[i], oproj_bf16_to_f32(half));
  }
}

__device__ __forceinline__ uint32_t round_two(float low, float high) {
  return oproj_bf16_from_f32(low) | static_cast<uint32_t>(oproj_bf16_from_f32(high)) << 16;
}

__device__ __forceinline__ void end_wait(const cuda_sum &p) {
  if (p.waited.count && blockIdx.x == 0 && threadIdx.x == 0) beat(p.waited);
}

/* -0 is what leaves every first addend as it is, -0 included. */
__global__ void __launch_bounds__(THREADS) sum_wide_kernel(cuda_sum p) {
  int64_t run = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  int64_t runs = p.count / RUN;
  end_wait(p);
  if (run >= runs) return;
  const uint4 *parts = reinterpret_cast<const uint4 *>(p.parts) + run;
  float sums[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++) sums[i] = -0.0f;
#pragma unroll 4
  for (int32_t n = 0; n < p.n; n++) add_words(parts[n * runs], sums);
  reinterpret_cast<uint4 *>(p.out)[run] =
      make_uint4(round_two(sums[0], sums[1]), round_two(sums[2], sums[3]),
                 round_two(sums[4], sums[5]), round_two(sums[6], sums[7]));
}

__global__ void __launch_bounds__(THREADS) sum_narrow_kernel(cuda_sum p) {
  int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS * RUN + threadIdx.x;
  end_wait(p);
  for (int r = 0; r < RUN; r++) {
    int64_t i = first + r * THREADS;
    if (i >= p.count) return;
    float sum = -0.0f;
    for (int32_t n = 0; n < p.n; n++)
      sum = oproj_num_add(sum, oproj_bf16_to_f32(p.parts[n * p.count + i]));
    p.out[i] = oproj_bf16_from_f32(sum);
  }
}

}  // namespace

extern "C" cudaError_t cuda_launch_sum(const cuda_sum *sum, cudaStream_t stream) {
  if (sum->count == 0) return cudaSuccess;
  dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(sum->count, THREADS * RUN)));
  uintptr_t addresses =
      reinterpret_cast<uintptr_t>(sum->parts) | reinterpret_cast<uintptr_t>(sum->out);
  bool wide = addresses % sizeof(uint4) == 0 && sum->count % RUN == 0;
  return launch(wide ? sum_wide_kernel : sum_narrow_kernel, grid, THREADS, *sum, stream);
}
