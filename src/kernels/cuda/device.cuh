/* device.cuh - what the kernels share: launching, 16-byte loads, widening of codes, warp sums. */
#ifndef OPROJ_KERNELS_CUDA_DEVICE_CUH
#define OPROJ_KERNELS_CUDA_DEVICE_CUH

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "base/layout.h"
#include "base/num.h"
#include "kernels/cuda/cuda.h"

namespace {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xFFFFFFFFu;

/* ---- launching ----------------------------------------------------------------------------- */

/* From SM90 on a kernel launched with `dependent` may start while the one before it on the stream
 * still runs: it must call wait_for_predecessors before it touches memory that others write, and
 * may let its own successor start early. */
__device__ __forceinline__ void wait_for_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_successors_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline cudaLaunchAttribute dependent_launch(int32_t allowed) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = allowed;
  return attribute;
}

/* A launch that returns its own error instead of whatever cudaGetLastError holds. */
template <typename Pod>
cudaError_t launch(void (*kernel)(Pod), dim3 grid, int threads, const Pod &pod, cudaStream_t stream,
                   bool dependent = false) {
  cudaLaunchAttribute attribute = dependent_launch(1);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, pod);
}

/* The limit belongs to the kernel, not to a launch: a lower one would also hold for launches that a
 * graph has captured before.  So `bytes` is the device's limit, for every launch alike. */
template <typename Pod>
cudaError_t allow_shared_memory(void (*kernel)(Pod), int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

/* ---- numbers ------------------------------------------------------------------------------- */

template <typename Integer>
__host__ __device__ constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

/* Two e4m3 codes (the low byte first) as two halves.  Every e4m3 value is a half, so this is exact,
 * and NaN gives NaN: the same values as oproj_e4m3_to_f32, in one instruction from SM89 on. */
__device__ __forceinline__ uint32_t halves_of_codes(uint32_t two_codes) {
  __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two_codes), __NV_E4M3);
  return static_cast<uint32_t>(halves.x) | (static_cast<uint32_t>(halves.y) << 16);
}

__device__ __forceinline__ float2 floats_of_halves(uint32_t two_halves) {
  __half2_raw raw;
  raw.x = static_cast<unsigned short>(two_halves & 0xFFFFu);
  raw.y = static_cast<unsigned short>(two_halves >> 16);
  return __half22float2(__half2(raw));
}

__device__ __forceinline__ float2 floats_of_bf16s(uint32_t two_bf16s) {
  return make_float2(oproj_num_from_bits(two_bf16s << 16),
                     oproj_num_from_bits(two_bf16s & 0xFFFF0000u));
}

/* 16 codes as 16 halves. */
__device__ __forceinline__ void widen_codes(const uint4 &codes, uint4 &low, uint4 &high) {
  low = make_uint4(halves_of_codes(codes.x & 0xFFFFu), halves_of_codes(codes.x >> 16),
                   halves_of_codes(codes.y & 0xFFFFu), halves_of_codes(codes.y >> 16));
  high = make_uint4(halves_of_codes(codes.z & 0xFFFFu), halves_of_codes(codes.z >> 16),
                    halves_of_codes(codes.w & 0xFFFFu), halves_of_codes(codes.w >> 16));
}

/* The sum over the warp, the same bits in every lane. */
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(ALL_LANES, value, offset);
  return value;
}

}  // namespace

#endif /* OPROJ_KERNELS_CUDA_DEVICE_CUH */
