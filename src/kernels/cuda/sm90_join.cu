/* sm90_join.cu - joins the blocks of a weight matrix; a block of threads takes 128 x 128 values. */
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/input.cuh"
#include "kernels/cuda/sm90_join.h"

namespace {

constexpr int THREADS = 256, JOINED = SM90_JOINED_BLOCK, SINGLE = SM90_SINGLE_BLOCK;
constexpr int SIDE = JOINED / SINGLE; /* blocks of a side */
constexpr int CHUNK = 16;             /* codes of a load */

__device__ __forceinline__ int exponent_of(float power_of_two) {
  return static_cast<int>(oproj_num_bits(power_of_two) >> 23);
}

__global__ void __launch_bounds__(THREADS) join_kernel(sm90_join p) {
  __shared__ float scales[SIDE * SIDE];
  int columns = p.cols / SINGLE, all_rows = ceil_div(p.rows, SINGLE), thread = threadIdx.x;
  int block_row = blockIdx.y * SIDE + thread / SIDE,
      block_column = blockIdx.x * SIDE + thread % SIDE;
  bool owns = thread < SIDE * SIDE && block_row < all_rows;
  float *scale = p.scales + static_cast<int64_t>(block_row) * columns + block_column;
  if (thread < SIDE * SIDE) scales[thread] = owns ? *scale : 0.0f;
  __syncthreads();
  float most = 0.0f;
  for (float one : scales) most = fmaxf(most, one);
  if (owns) *scale = most;
  if (thread == 0) p.joined[blockIdx.y * gridDim.x + blockIdx.x] = most;

  for (int i = thread; i < JOINED * JOINED / CHUNK; i += THREADS) {
    int row = i / (JOINED / CHUNK), column = i % (JOINED / CHUNK) * CHUNK;
    int64_t y = static_cast<int64_t>(blockIdx.y) * JOINED + row;
    int down = exponent_of(most) - exponent_of(scales[row / SINGLE * SIDE + column / SINGLE]);
    if (y >= p.rows || down == 0) continue;
    uint4 *at = reinterpret_cast<uint4 *>(p.codes + y * p.cols + blockIdx.x * JOINED + column);
    uint4 codes = *at;
    *at = make_uint4(lower_codes(codes.x, down), lower_codes(codes.y, down),
                     lower_codes(codes.z, down), lower_codes(codes.w, down));
  }
}

}  // namespace

extern "C" cudaError_t sm90_launch_join(const sm90_join *join, cudaStream_t stream) {
  dim3 grid(join->cols / JOINED, ceil_div(join->rows, JOINED));
  join_kernel<<<grid, THREADS, 0, stream>>>(*join);
  return cudaGetLastError();
}
