/* pulse.cuh - how a kernel counts a piece of work for the host to see (pulse.c). */
#ifndef OPROJ_KERNELS_CUDA_PULSE_CUH
#define OPROJ_KERNELS_CUDA_PULSE_CUH

#include "kernels/cuda/device.cuh"

namespace {

/* By one thread.  Kernels that count in the same word follow one another on a stream. */
__device__ __forceinline__ void beat(const cuda_beat &b) {
  uint64_t count = *b.count + 1;
  *b.count = count;
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(b.shown), "l"(count) : "memory");
}

}  // namespace

#endif /* OPROJ_KERNELS_CUDA_PULSE_CUH */
