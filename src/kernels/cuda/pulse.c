/* pulse.c - counts of what the device has begun and ended, kept by the device itself, so that
 * replayed graphs count, and shown in host memory, so that a host thread can look while the device
 * hangs: it makes no call of CUDA. */
#include <stdlib.h>

#include "base/error.h"
#include "kernels/cuda/cuda.h"

enum { BEGUN, ENDED, WORDS };

struct oproj_kernels_pulse {
  uint64_t *counts;       /* [WORDS], device memory */
  uint64_t *shown;        /* [WORDS], pinned host memory ... */
  uint64_t *shown_device; /* ... and the device's address of it */
};

static oproj_status allocate(oproj_kernels_pulse *p) {
  void *memory;
  CUDA_TRY(cudaHostAlloc(&memory, WORDS * sizeof *p->shown, cudaHostAllocMapped));
  p->shown = memory;
  for (int i = 0; i < WORDS; i++) p->shown[i] = 0;
  CUDA_TRY(cudaHostGetDevicePointer(&memory, p->shown, 0));
  p->shown_device = memory;
  CUDA_TRY(cudaMalloc(&memory, WORDS * sizeof *p->counts));
  p->counts = memory;
  CUDA_TRY(cudaMemset(p->counts, 0, WORDS * sizeof *p->counts));
  CUDA_TRY(cudaDeviceSynchronize());
  return OPROJ_OK;
}

oproj_status cuda_pulse_create(oproj_kernels *k, oproj_kernels_pulse **out) {
  CUDA_TRY(cudaSetDevice(k->device));
  oproj_kernels_pulse *p = calloc(1, sizeof *p);
  REQUIRE(p, OPROJ_ERR_NOMEM, "no memory for a device's counts");
  oproj_status status = allocate(p);
  if (status == OPROJ_OK)
    *out = p;
  else
    cuda_pulse_destroy(k, p);
  return status;
}

void cuda_pulse_destroy(oproj_kernels *k, oproj_kernels_pulse *p) {
  if (!p) return;
  cudaSetDevice(k->device);
  cudaFree(p->counts);
  if (p->shown) cudaFreeHost(p->shown);
  free(p);
}

void cuda_pulse_read(const oproj_kernels_pulse *p, uint64_t *begun, uint64_t *ended) {
  *ended = __atomic_load_n(&p->shown[ENDED], __ATOMIC_ACQUIRE); /* first: never more than begun */
  *begun = __atomic_load_n(&p->shown[BEGUN], __ATOMIC_ACQUIRE);
}

static cuda_beat describe(const oproj_kernels_pulse *p, int word) {
  return (cuda_beat){.count = p->counts + word, .shown = p->shown_device + word};
}

cuda_beat cuda_describe_end(const oproj_kernels_pulse *p) {
  return p ? describe(p, ENDED) : (cuda_beat){0};
}

oproj_status cuda_pulse_begin(oproj_kernels *k, oproj_kernels_pulse *p, void *stream) {
  CUDA_TRY(cudaSetDevice(k->device));
  cuda_beat b = describe(p, BEGUN);
  b.dependent = k->dependent;
  CUDA_TRY(cuda_launch_beat(&b, stream));
  return OPROJ_OK;
}

/* After all that was begun: not early, as beginnings are. */
oproj_status cuda_pulse_end(oproj_kernels *k, oproj_kernels_pulse *p, void *stream) {
  CUDA_TRY(cudaSetDevice(k->device));
  cuda_beat b = describe(p, ENDED);
  CUDA_TRY(cuda_launch_beat(&b, stream));
  return OPROJ_OK;
}
