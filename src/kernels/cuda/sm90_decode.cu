/* sm90_decode.cu - the variants of sm90_decode.cuh's kernel, and their launch. */
#include "kernels/cuda/sm90_decode.cuh"

namespace {

using sm90::decode::decode_kernel;
using sm90::decode::THREADS;

using Kernel = void (*)(sm90_decode);

/* Columns of the instruction that holds so many tokens. */
int columns_of(int tokens) {
  return tokens <= 8 ? 8 : tokens <= 16 ? 16 : 32;
}

template <int BLOCK, bool ALIGNED>
Kernel variant_of(int columns) {
  return columns == 8    ? decode_kernel<8, BLOCK, ALIGNED>
         : columns == 16 ? decode_kernel<16, BLOCK, ALIGNED>
                         : decode_kernel<32, BLOCK, ALIGNED>;
}

Kernel find_kernel(int block, int columns, bool aligned) {
  if (block == 128)
    return aligned ? variant_of<128, true>(columns) : variant_of<128, false>(columns);
  return aligned ? variant_of<32, true>(columns) : variant_of<32, false>(columns);
}

}  // namespace

extern "C" size_t sm90_decode_shared_bytes(const sm90_decode *p) {
  int columns = columns_of(p->input.tokens);
  return static_cast<size_t>(sm90::decode::shared_layout(*p, columns, p->input.block).bytes);
}

extern "C" cudaError_t sm90_decode_load(int32_t block) {
  for (int columns = 8; columns <= 32; columns *= 2)
    for (int aligned = 0; aligned < 2; aligned++) {
      cudaError_t error =
          allow_shared_memory(find_kernel(block, columns, aligned != 0), SM90_SHARED_BYTES);
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

extern "C" cudaError_t sm90_decode_capacity(int32_t *blocks) {
  Kernel kernel = decode_kernel<32, 32, true>; /* the one with the most registers */
  int device = 0, multiprocessors = 0, each = 0;
  cudaError_t error = allow_shared_memory(kernel, SM90_SHARED_BYTES);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, THREADS, SM90_SHARED_BYTES);
  *blocks = each * multiprocessors;
  return error;
}

extern "C" cudaError_t sm90_launch_decode(const sm90_decode *p, int32_t aligned,
                                          cudaStream_t stream) {
  Kernel kernel = find_kernel(p->input.block, columns_of(p->input.tokens), aligned != 0);
  size_t shared = sm90_decode_shared_bytes(p);
  cudaLaunchAttribute attribute = dependent_launch(p->input.dependent);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p->shape.blocks);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, *p);
}
