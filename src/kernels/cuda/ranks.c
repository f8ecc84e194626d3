/* ranks.c - what several ranks need of a GPU: which one it is, pinned memory to meet in on the
 * host, and the sum of their shares. */
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/log.h"
#include "kernels/cuda/cuda.h"

/* ---- devices ------------------------------------------------------------------------------- */

int32_t oproj_kernels_cuda_count(void) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  return error == cudaSuccess ? count : 0;
}

oproj_status oproj_kernels_cuda_device(int32_t ordinal, oproj_kernels_device *out) {
  int32_t count = oproj_kernels_cuda_count();
  REQUIRE(ordinal >= 0 && ordinal < count, OPROJ_ERR_INVALID,
          "device is %d; this process sees %d CUDA devices, numbered from 0", ordinal, count);
  struct cudaDeviceProp properties;
  *out = (oproj_kernels_device){0};
  CUDA_TRY(cudaGetDeviceProperties(&properties, ordinal));
  CUDA_TRY(cudaDeviceGetPCIBusId(out->bus_id, sizeof out->bus_id, ordinal));
  size_t used = (size_t)snprintf(out->uuid, sizeof out->uuid, "GPU-");
  for (size_t i = 0; i < sizeof properties.uuid.bytes; i++)
    used += (size_t)snprintf(out->uuid + used, sizeof out->uuid - used, "%02x",
                             (unsigned char)properties.uuid.bytes[i]);
  snprintf(out->name, sizeof out->name, "%.120s", properties.name);
  out->capability = properties.major * 10 + properties.minor;
  out->bytes = properties.totalGlobalMem;
  return OPROJ_OK;
}

oproj_status oproj_kernels_cuda_use(int32_t ordinal) {
  CUDA_TRY(cudaSetDevice(ordinal));
  return OPROJ_OK;
}

/* ---- pinned memory ------------------------------------------------------------------------- */

/* Pages that cannot be pinned (a low limit on locked memory) still serve, slower. */
oproj_status cuda_host_create(oproj_kernels *k, size_t bytes, void **out) {
  CUDA_TRY(cudaSetDevice(k->device));
  if (cudaMallocHost(out, bytes ? bytes : 1) == cudaSuccess) return OPROJ_OK;
  (void)cudaGetLastError();
  oproj_base_log(OPROJ_LOG_WARN, "%zu bytes of host memory cannot be pinned", bytes);
  *out = malloc(bytes ? bytes : 1);
  REQUIRE(*out, OPROJ_ERR_NOMEM, "no host memory for %zu bytes", bytes);
  return OPROJ_OK;
}

void cuda_host_destroy(oproj_kernels *k, void *memory) {
  struct cudaPointerAttributes attributes = {.type = cudaMemoryTypeUnregistered};
  if (!memory) return;
  cudaSetDevice(k->device);
  cudaPointerGetAttributes(&attributes, memory);
  if (attributes.type == cudaMemoryTypeHost)
    cudaFreeHost(memory);
  else
    free(memory);
}

/* ---- sums ---------------------------------------------------------------------------------- */

oproj_status cuda_sum_ranks(oproj_kernels *k, const uint16_t *parts, int32_t n, int64_t count,
                            uint16_t *out, void *stream) {
  CUDA_TRY(cudaSetDevice(k->device));
  if (count == 0) return OPROJ_OK;
  if (n == 1) {
    CUDA_TRY(
        cudaMemcpyAsync(out, parts, (size_t)count * sizeof *out, cudaMemcpyDeviceToDevice, stream));
    return OPROJ_OK;
  }
  cuda_sum sum = {.parts = parts, .n = n, .count = count, .out = out};
  CUDA_TRY(cuda_launch_sum(&sum, stream));
  return OPROJ_OK;
}

oproj_status cuda_make_nan(oproj_kernels *k, uint16_t *values, int64_t count, void *stream) {
  CUDA_TRY(cudaSetDevice(k->device));
  /* All bits set is a bf16 NaN. */
  if (count > 0) CUDA_TRY(cudaMemsetAsync(values, 0xFF, (size_t)count * sizeof *values, stream));
  return OPROJ_OK;
}
