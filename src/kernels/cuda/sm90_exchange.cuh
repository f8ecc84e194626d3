/* sm90_exchange.cuh - how the blocks of one launch hand values to one another through the L2 cache.
 *
 * A word is its own flag: the receiver polls it until it no longer reads DECODE_EMPTY, so a hop
 * costs one trip through the cache and no fence.  No value may look empty: senders pass f32 sums
 * through `as_sent`, and codes of the conversion instruction never hold 0xFF.
 *
 * Launches alternate between two epochs.  While one is in use the other is emptied, by the launch
 * itself; the next launch touches either only after all of this one has ended.  All blocks must be
 * resident, else a receiver would wait for a sender that never starts: polls are bounded, and a
 * launch that gave up says so in `stalled`. */
#ifndef OPROJ_KERNELS_CUDA_SM90_EXCHANGE_CUH
#define OPROJ_KERNELS_CUDA_SM90_EXCHANGE_CUH

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/sm90_decode.h"

namespace sm90 {

/* Polls before a receiver gives up: about two seconds. */
constexpr int PATIENCE = 1 << 21;
constexpr int LOOK_AROUND = 256; /* polls between looks at whether another block gave up */

__device__ __forceinline__ uint32_t load_word(const uint32_t *from) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_words(const void *from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void send_word(void *to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

/* A sum's bits, a NaN that looks empty replaced by another NaN. */
__device__ __forceinline__ uint32_t as_sent(float sum) {
  uint32_t bits = oproj_num_bits(sum);
  return bits == DECODE_EMPTY ? 0x7FC00000u : bits;
}

__device__ __forceinline__ bool has_arrived(const uint4 &v) {
  return v.x != DECODE_EMPTY && v.y != DECODE_EMPTY && v.z != DECODE_EMPTY && v.w != DECODE_EMPTY;
}

/* `value`, computed from a load, is ready here: what computes it waits for the load, and the
 * compiler moves neither across this, nor this across a barrier. */
__device__ __forceinline__ void wait_for_value(int *value) {
  asm volatile("" : "+r"(*value)::"memory");
}

/* A decode_control as 4 words, read after the predecessors have ended: its epoch for this launch,
 * the tokens left behind in one, and whether a launch stalled.  Blocks of this launch may have been
 * counted already, the reader's own has not: the count stays below the next launch's.  So the words
 * must have arrived before the barrier after which it is counted. */
__device__ __forceinline__ int epoch_of(const uint4 &control) {
  int epoch = control.x >= gridDim.x;
  wait_for_value(&epoch);
  return epoch;
}

__device__ __forceinline__ uint32_t tokens_left(const uint4 &control, int epoch) {
  return epoch ? control.z : control.y;
}

__device__ __forceinline__ bool has_stalled(const uint4 &control) {
  return control.w != 0;
}

/* By one thread of each block, once all of its warps know the epoch. */
__device__ __forceinline__ void count_block(decode_control *control) {
  atomicInc(&control->arrivals, 2 * gridDim.x - 1);
}

/* Empties `count` groups of 4 words. */
__device__ __forceinline__ void empty_words(void *words, int count, int worker, int workers) {
  uint4 *to = static_cast<uint4 *>(words);
#pragma unroll 1
  for (int i = worker; i < count; i += workers)
    to[i] = make_uint4(DECODE_EMPTY, DECODE_EMPTY, DECODE_EMPTY, DECODE_EMPTY);
}

/* Loads COUNT groups of 4 words, `stride` groups apart, those of bits in `wanted`, until all have
 * arrived in all lanes of the warp.  False: gave up, or another block did. */
template <int COUNT>
__device__ __forceinline__ bool receive(decode_control *control, const uint4 *from, int stride,
                                        uint32_t wanted, uint4 (&v)[COUNT]) {
  for (int tries = 0; tries < PATIENCE; tries++) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (wanted >> i & 1) v[i] = load_words(from + i * stride);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if ((wanted >> i & 1) && has_arrived(v[i])) wanted &= ~(1u << i);
    if (__all_sync(ALL_LANES, wanted == 0)) return true;
    if (tries % LOOK_AROUND == LOOK_AROUND - 1 && load_word(&control->stalled)) return false;
  }
  send_word(&control->stalled, 1);
  return false;
}

}  // namespace sm90

#endif /* OPROJ_KERNELS_CUDA_SM90_EXCHANGE_CUH */
