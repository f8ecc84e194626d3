/* sm90_prefill.cu - the variants of sm90_prefill.cuh's kernel, and their launch. */
#include "kernels/cuda/sm90_prefill.cuh"

namespace {

using sm90::prefill::prefill_kernel;

template <int BLOCK, int Z_BLOCK, int PARTS, bool PAIRED>
cudaError_t launch_variant(const sm90_prefill &p, cudaStream_t stream) {
  void (*kernel)(sm90_prefill) = prefill_kernel<BLOCK, Z_BLOCK, PARTS, PAIRED>;
  size_t shared = sm90_prefill_shared_bytes(&p);
  cudaError_t error = allow_shared_memory(kernel, SM90_SHARED_BYTES);
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute attributes[2];
  attributes[0] = dependent_launch(p.dependent);
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {PAIRED ? 2u : 1u, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.blocks);
  config.blockDim = dim3(sm90::prefill::THREADS);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <int BLOCK, int Z_BLOCK>
cudaError_t launch_block(const sm90_prefill &p, cudaStream_t stream) {
  if (p.parts == 1) return launch_variant<BLOCK, Z_BLOCK, 1, false>(p, stream);
  if (p.paired) return launch_variant<BLOCK, Z_BLOCK, 2, true>(p, stream);
  return launch_variant<BLOCK, Z_BLOCK, 2, false>(p, stream);
}

template <int BLOCK, int Z_BLOCK>
cudaError_t load_block() {
  void (*const kernels[])(sm90_prefill) = {prefill_kernel<BLOCK, Z_BLOCK, 1, false>,
                                           prefill_kernel<BLOCK, Z_BLOCK, 2, false>,
                                           prefill_kernel<BLOCK, Z_BLOCK, 2, true>};
  for (auto kernel : kernels) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

extern "C" size_t sm90_prefill_shared_bytes(const sm90_prefill *p) {
  return sm90::prefill::shared_layout(p->parts, p->block, p->stages, p->cols).bytes;
}

extern "C" cudaError_t sm90_prefill_load(int32_t block, int32_t z_block) {
  return block == 32     ? load_block<32, 32>()
         : z_block == 32 ? load_block<128, 32>()
                         : load_block<128, 128>();
}

extern "C" cudaError_t sm90_launch_prefill(const sm90_prefill *p, cudaStream_t stream) {
  if (p->block == 32) return launch_block<32, 32>(*p, stream);
  return p->z_block == 32 ? launch_block<128, 32>(*p, stream) : launch_block<128, 128>(*p, stream);
}
