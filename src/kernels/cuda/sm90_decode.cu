/* sm90_decode.cu - the variants of sm90_decode.cuh's kernel, and their launch. */
#include "kernels/cuda/sm90_decode.cuh"

namespace {

using sm90::decode::decode_kernel;
using sm90::decode::THREADS;

/* The variant for a number of tokens and a block size. */
void (*variant_of(const sm90_decode &p))(sm90_decode) {
  if (p.input.tokens <= 8)
    return p.input.block == 128 ? decode_kernel<8, 128> : decode_kernel<8, 32>;
  return p.input.block == 128 ? decode_kernel<16, 128> : decode_kernel<16, 32>;
}

}  // namespace

extern "C" size_t sm90_decode_shared_bytes(const sm90_decode *p) {
  int tokens = p->input.tokens <= 8 ? 8 : OPROJ_KERNELS_DECODE_TOKENS;
  return static_cast<size_t>(sm90::decode::shared_layout(*p, tokens, p->input.block).bytes);
}

extern "C" cudaError_t sm90_decode_capacity(int32_t *blocks) {
  void (*kernel)(sm90_decode) = decode_kernel<16, 32>; /* the one with the most registers */
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
  void (*kernel)(sm90_decode) = variant_of(*p);
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
