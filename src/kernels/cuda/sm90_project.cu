/* sm90_project.cu - the variants of sm90_project.cuh's kernel, and their launch. */
#include "kernels/cuda/sm90_project.cuh"

namespace {

using sm90::Project;
using sm90::project_kernel;

template <int N, int BLOCK, int Z_BLOCK, bool FUSED>
cudaError_t launch_variant(const sm90_product &p, cudaStream_t stream) {
  void (*kernel)(sm90_product) = project_kernel<N, BLOCK, Z_BLOCK, FUSED>;
  size_t shared = sm90_shared_bytes(&p);
  cudaError_t error = allow_shared_memory(kernel, SM90_SHARED_BYTES);
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute attributes[2];
  attributes[0] = dependent_launch(p.dependent);
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(p.split), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ceil_div(p.rows, static_cast<int>(SM90_TILE_ROWS)) * p.split,
                        ceil_div(p.tokens, p.step_tokens));
  config.blockDim = dim3(Project<N, BLOCK, Z_BLOCK, FUSED>::THREADS);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <int N>
cudaError_t launch_tokens(const sm90_product &p, cudaStream_t stream) {
  if (p.block == 32) return launch_variant<N, 32, 32, false>(p, stream);
  return p.z_block == 32 ? launch_variant<N, 128, 32, false>(p, stream)
                         : launch_variant<N, 128, 128, false>(p, stream);
}

template <int N>
cudaError_t launch_fused(const sm90_product &p, cudaStream_t stream) {
  if (p.block == 32) return launch_variant<N, 32, 32, true>(p, stream);
  return p.z_block == 32 ? launch_variant<N, 128, 32, true>(p, stream)
                         : launch_variant<N, 128, 128, true>(p, stream);
}

template <int N, int BLOCK, int Z_BLOCK, bool FUSED>
cudaError_t load_variant() {
  return allow_shared_memory(project_kernel<N, BLOCK, Z_BLOCK, FUSED>, SM90_SHARED_BYTES);
}

template <int BLOCK, int Z_BLOCK>
cudaError_t load_block() {
  cudaError_t (*const loads[])() = {
      load_variant<8, BLOCK, Z_BLOCK, false>,   load_variant<16, BLOCK, Z_BLOCK, false>,
      load_variant<32, BLOCK, Z_BLOCK, false>,  load_variant<64, BLOCK, Z_BLOCK, false>,
      load_variant<128, BLOCK, Z_BLOCK, false>, load_variant<192, BLOCK, Z_BLOCK, false>,
      load_variant<8, BLOCK, Z_BLOCK, true>,    load_variant<16, BLOCK, Z_BLOCK, true>,
      load_variant<32, BLOCK, Z_BLOCK, true>};
  for (auto load : loads) {
    cudaError_t error = load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

/* Code for another target, or made from PTX without SM90's own features, has an empty body. */
__global__ void probe_kernel(int *found) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  *found = 1;
#endif
}

}  // namespace

extern "C" cudaError_t sm90_probe(int32_t *no_native) {
  int *found, host = 0;
  cudaError_t error = cudaMalloc(&found, sizeof *found);
  if (error != cudaSuccess) return error;
  error = cudaMemset(found, 0, sizeof *found);
  if (error == cudaSuccess) {
    probe_kernel<<<1, 1>>>(found);
    error = cudaGetLastError();
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
      error = cudaSuccess; /* then nothing was found */
  }
  if (error == cudaSuccess) error = cudaMemcpy(&host, found, sizeof host, cudaMemcpyDeviceToHost);
  cudaFree(found);
  *no_native = !host;
  return error;
}

extern "C" cudaError_t sm90_query_capacity(int32_t capacity[CUDA_CLUSTER_SIZES]) {
  void (*kernel)(sm90_product) =
      project_kernel<32, 128, 128, false>; /* one of many: all fill a block */
  cudaError_t error = allow_shared_memory(kernel, SM90_SHARED_BYTES);
  for (int i = 0; i < CUDA_CLUSTER_SIZES && error == cudaSuccess; i++) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {1u << i, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1 << i);
    config.blockDim = dim3(Project<32, 128, 128, false>::THREADS);
    config.dynamicSmemBytes = SM90_SHARED_BYTES;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    capacity[i] = clusters << i;
  }
  return error;
}

extern "C" cudaError_t sm90_project_load(int32_t block, int32_t z_block) {
  return block == 32     ? load_block<32, 32>()
         : z_block == 32 ? load_block<128, 32>()
                         : load_block<128, 128>();
}

extern "C" size_t sm90_shared_bytes(const sm90_product *p) {
  int slots = p->cols / SM90_TILE_COLS / p->split;
  return sm90::shared_layout(p->tile_tokens, p->block, p->stages, slots, p->fused != 0).bytes;
}

extern "C" cudaError_t sm90_launch_project(const sm90_product *p, cudaStream_t stream) {
  if (p->tokens == 0) return cudaSuccess;
  switch (p->tile_tokens) {
    case 8:
      return p->fused ? launch_fused<8>(*p, stream) : launch_tokens<8>(*p, stream);
    case 16:
      return p->fused ? launch_fused<16>(*p, stream) : launch_tokens<16>(*p, stream);
    case 32:
      return p->fused ? launch_fused<32>(*p, stream) : launch_tokens<32>(*p, stream);
    case 64:
      return p->fused ? cudaErrorInvalidValue : launch_tokens<64>(*p, stream);
    case 128:
      return p->fused ? cudaErrorInvalidValue : launch_tokens<128>(*p, stream);
    case 192:
      return p->fused ? cudaErrorInvalidValue : launch_tokens<192>(*p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}
