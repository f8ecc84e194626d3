/* pulse.cu - counts a piece of work where no other kernel can: one thread.
 *
 * It counts before it waits for the kernel in front of it, so that its store crosses the bus while
 * that one ends. */
#include "kernels/cuda/pulse.cuh"

namespace {

__global__ void beat_kernel(cuda_beat b) {
  beat(b);
  wait_for_predecessors();
}

}  // namespace

extern "C" cudaError_t cuda_launch_beat(const cuda_beat *b, cudaStream_t stream) {
  return launch(beat_kernel, dim3(1), 1, *b, stream, b->dependent != 0);
}
