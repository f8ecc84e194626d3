/* push.cuh - what kernels that push to other ranks' mailboxes share (push.cu). */
#ifndef OPROJ_KERNELS_CUDA_PUSH_CUH
#define OPROJ_KERNELS_CUDA_PUSH_CUH

#include "kernels/cuda/device.cuh"

namespace {

/* Where a sender's words of a sum begin in a mailbox. */
__device__ __forceinline__ int64_t mailbox_offset(const cuda_push &p, uint32_t number, int sender) {
  return (static_cast<int64_t>(number % 2) * p.n + sender) * p.words;
}

/* Memory that nobody has written to holds number 0, so that number is left out; its neighbour of
 * the same parity takes its place.  Numbers come round after 2^32 sums: by then only a word that no
 * sum was long enough to write in all that time could hold the one that is waited for. */
__device__ __forceinline__ uint32_t next_sum(uint32_t last) {
  return last + 1 != 0 ? last + 1 : 2;
}

/* Pushes elements 2*pair and 2*pair + 1 of this rank's part of the sum to all other ranks. */
__device__ __forceinline__ void push_pair(const cuda_push &p, uint32_t number, int64_t pair,
                                          uint32_t two_bf16s) {
  uint64_t word = static_cast<uint64_t>(number) << 32 | two_bf16s;
  for (int s = 1; s < p.n; s++) {
    int to = p.rank + s < p.n ? p.rank + s : p.rank + s - p.n;
    asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(
                     p.mailboxes[to] + mailbox_offset(p, number, p.rank) + pair),
                 "l"(word)
                 : "memory");
  }
}

}  // namespace

#endif /* OPROJ_KERNELS_CUDA_PUSH_CUH */
