/* ranks.c - what several ranks need of a GPU: which one it is, memory to meet in (pinned, or on the
 * devices themselves), a stream to sum on beside what is computed, and the sum of their shares. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* ---- the second stream --------------------------------------------------------------------- */

/* Its blocks are placed first where both streams have some to place: a sum waits for other ranks'
 * too, and what it delays here it would delay on all of them. */
oproj_status cuda_open_beside(oproj_kernels *k) {
  int least, greatest;
  CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CUDA_TRY(cudaStreamCreateWithPriority(&k->beside, cudaStreamNonBlocking, greatest));
  CUDA_TRY(cudaEventCreateWithFlags(&k->forked, cudaEventDisableTiming));
  CUDA_TRY(cudaEventCreateWithFlags(&k->joined, cudaEventDisableTiming));
  return OPROJ_OK;
}

void cuda_close_beside(oproj_kernels *k) {
  if (k->joined) cudaEventDestroy(k->joined);
  if (k->forked) cudaEventDestroy(k->forked);
  if (k->beside) cudaStreamDestroy(k->beside);
}

/* A wait is for what the event recorded last, so that one event serves any number of forks. */
oproj_status cuda_fork(oproj_kernels *k, void *stream, void **beside) {
  CUDA_TRY(cudaSetDevice(k->device));
  CUDA_TRY(cudaEventRecord(k->forked, stream));
  CUDA_TRY(cudaStreamWaitEvent(k->beside, k->forked, 0));
  *beside = k->beside;
  return OPROJ_OK;
}

oproj_status cuda_join(oproj_kernels *k, void *stream) {
  CUDA_TRY(cudaSetDevice(k->device));
  CUDA_TRY(cudaEventRecord(k->joined, k->beside));
  CUDA_TRY(cudaStreamWaitEvent(stream, k->joined, 0));
  return OPROJ_OK;
}

/* ---- sums ---------------------------------------------------------------------------------- */

oproj_status cuda_sum_ranks(oproj_kernels *k, const uint16_t *parts, int32_t n, int64_t count,
                            uint16_t *out, oproj_kernels_pulse *waited, void *stream) {
  CUDA_TRY(cudaSetDevice(k->device));
  if (count == 0) return OPROJ_OK;
  if (n == 1) {
    CUDA_TRY(
        cudaMemcpyAsync(out, parts, (size_t)count * sizeof *out, cudaMemcpyDeviceToDevice, stream));
    return OPROJ_OK;
  }
  cuda_sum sum = {
      .parts = parts, .n = n, .count = count, .out = out, .waited = cuda_describe_end(waited)};
  CUDA_TRY(cuda_launch_sum(&sum, stream));
  return OPROJ_OK;
}

/* ---- mailboxes ----------------------------------------------------------------------------- */

enum { RUN = 4 }; /* elements of a 16-byte store, two words */

static int64_t words_of(int64_t capacity) {
  return (capacity + RUN - 1) / RUN * 2;
}

size_t cuda_mailbox_bytes(int32_t size, int64_t capacity) {
  return CUDA_PUSH_HEAD + 2 * (size_t)size * (size_t)words_of(capacity) * sizeof(uint64_t);
}

oproj_status cuda_mailbox_create(oproj_kernels *k, size_t bytes, void **out,
                                 oproj_kernels_handle *handle) {
  cudaIpcMemHandle_t found;
  _Static_assert(sizeof found == sizeof handle->bytes, "a handle holds CUDA's");
  CUDA_TRY(cudaSetDevice(k->device));
  CUDA_TRY(cudaMalloc(out, bytes));
  CUDA_TRY(cudaMemset(*out, 0, bytes));
  CUDA_TRY(cudaDeviceSynchronize());
  CUDA_TRY(cudaIpcGetMemHandle(&found, *out));
  memcpy(handle->bytes, &found, sizeof found);
  return OPROJ_OK;
}

void cuda_mailbox_destroy(oproj_kernels *k, void *mailbox) {
  cudaSetDevice(k->device);
  cudaFree(mailbox);
}

oproj_status cuda_mailbox_open(oproj_kernels *k, const oproj_kernels_handle *handle, void **out) {
  cudaIpcMemHandle_t wanted;
  memcpy(&wanted, handle->bytes, sizeof wanted);
  CUDA_TRY(cudaSetDevice(k->device));
  CUDA_TRY(cudaIpcOpenMemHandle(out, wanted, cudaIpcMemLazyEnablePeerAccess));
  return OPROJ_OK;
}

void cuda_mailbox_close(oproj_kernels *k, void *mailbox) {
  if (!mailbox) return;
  cudaSetDevice(k->device);
  cudaIpcCloseMemHandle(mailbox);
}

cuda_push cuda_describe_push(const oproj_kernels *k, const oproj_kernels_push *push) {
  cuda_push p = {.n = push->size,
                 .rank = push->rank,
                 .words = words_of(push->capacity),
                 .control = push->mailboxes[push->rank],
                 .fault = k->fault_device,
                 .patience_ns = (uint64_t)push->patience_ms * 1000000,
                 .dependent = k->dependent};
  for (int32_t r = 0; r < push->size; r++)
    p.mailboxes[r] = (uint64_t *)((char *)push->mailboxes[r] + CUDA_PUSH_HEAD);
  return p;
}

oproj_status cuda_sum_pushed(oproj_kernels *k, const oproj_kernels_push *push, int64_t count,
                             const uint16_t *partial, uint16_t *out, int sent, void *stream) {
  CUDA_TRY(cudaSetDevice(k->device));
  cuda_push p = cuda_describe_push(k, push);
  p.partial = partial;
  p.out = out;
  p.count = count;
  p.whole = count % RUN == 0 && ((uintptr_t)partial | (uintptr_t)out) % 8 == 0;
  p.sent = sent;
  CUDA_TRY(cuda_launch_push(&p, stream));
  return OPROJ_OK;
}

/* ---- lost shares --------------------------------------------------------------------------- */

oproj_status cuda_make_nan(oproj_kernels *k, uint16_t *values, int64_t count, void *stream) {
  CUDA_TRY(cudaSetDevice(k->device));
  /* All bits set is a bf16 NaN. */
  if (count > 0) CUDA_TRY(cudaMemsetAsync(values, 0xFF, (size_t)count * sizeof *values, stream));
  return OPROJ_OK;
}
