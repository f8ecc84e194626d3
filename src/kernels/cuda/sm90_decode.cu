/* sm90_decode.cu - the variants of sm90_decode.cuh's kernel, and their launch. */
#include "kernels/cuda/sm90_decode.cuh"

namespace {

using sm90::decode::decode_kernel;
using sm90::decode::THREADS;

/* Columns of the instruction that holds so many tokens. */
int columns_of(int tokens) {
  return tokens <= 8 ? 8 : tokens <= 16 ? 16 : 32;
}

template <int BLOCK>
void (*variant_of(int columns))(sm90_decode) {
  return columns == 8    ? decode_kernel<8, BLOCK>
         : columns == 16 ? decode_kernel<16, BLOCK>
                         : decode_kernel<32, BLOCK>;
}

}  // namespace

extern "C" size_t sm90_decode_shared_bytes(const sm90_decode *p) {
  int columns = columns_of(p->input.tokens);
  return static_cast<size_t>(sm90::decode::shared_layout(*p, columns, p->input.block).bytes);
}

extern "C" cudaError_t sm90_decode_capacity(int32_t *blocks) {
  void (*kernel)(sm90_decode) = decode_kernel<32, 32>; /* the one with the most registers */
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

extern "C" cudaError_t sm90_launch_decode(const sm90_decode *p, cudaStream_t stream) {
  int columns = columns_of(p->input.tokens);
  void (*kernel)(sm90_decode) =
      p->input.block == 128 ? variant_of<128>(columns) : variant_of<32>(columns);
  size_t shared = sm90_decode_shared_bytes(p);
  cudaError_t error = allow_shared_memory(kernel, SM90_SHARED_BYTES);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = dependent_launch();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p->shape.blocks);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, *p);
}
