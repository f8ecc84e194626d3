/* sm90_prefill_write.cuh - what becomes of a tile's sums: z rounded and quantised, or rows of bf16.
 *
 * A warp holds 16 tokens by 128 weight rows, as the products leave them: thread t has tokens t/4
 * and t/4 + 8, of each the columns 8j + t%4*2 and the one after.  The four threads of a token
 * exchange words so that each of them writes 16 bytes; nothing goes through shared memory. */
#ifndef OPROJ_KERNELS_CUDA_SM90_PREFILL_WRITE_CUH
#define OPROJ_KERNELS_CUDA_SM90_PREFILL_WRITE_CUH

#include <cuda_bf16.h>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/input.cuh"
#include "kernels/cuda/sm90_prefill.h"

namespace sm90::prefill {

constexpr int TILE_TOKENS = SM90_PREFILL_TOKENS, PART_ROWS = SM90_PREFILL_ROWS;
constexpr int PART_SUMS = PART_ROWS / 2;  /* of a thread, for a part */
constexpr int PART_PAIRS = PART_ROWS / 8; /* of neighbouring columns, per token */

/* words[i] of thread s becomes words[s] of thread i, among four neighbouring threads. */
__device__ __forceinline__ void exchange_words(uint32_t (&words)[4], int lane) {
  bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t got = __shfl_xor_sync(ALL_LANES, odd ? words[i] : words[i + 1], 1);
    words[i] = odd ? got : words[i];
    words[i + 1] = odd ? words[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t got = __shfl_xor_sync(ALL_LANES, upper ? words[i] : words[i + 2], 2);
    words[i] = upper ? got : words[i];
    words[i + 2] = upper ? words[i + 2] : got;
  }
}

/* Two values rounded to bf16, the first in the low half. */
__device__ __forceinline__ uint32_t rounded_pair(float first, float second) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

/* Magnitudes of both halves; they compare as integers, NaN the largest. */
__device__ __forceinline__ uint32_t magnitudes(uint32_t pair) {
  return pair & 0x7FFF7FFFu;
}

/* ---- codes of z ---------------------------------------------------------------------------- */

/* Quantises the 128 values of one token; pairs[j] is bf16, columns 8j + lane%4*2 and the next. */
template <int BLOCK>
__device__ __forceinline__ void write_codes(const sm90_prefill &p, int64_t token, int64_t column,
                                            int lane, const uint32_t (&pairs)[PART_PAIRS]) {
  constexpr int BLOCKS = PART_ROWS / BLOCK, SPAN = PART_PAIRS / BLOCKS;
  uint8_t exponents[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    uint32_t amax = 0; /* of either half */
#pragma unroll
    for (int j = b * SPAN; j < (b + 1) * SPAN; j++) amax = __vmaxu2(amax, magnitudes(pairs[j]));
    amax = __vmaxu2(amax, __shfl_xor_sync(ALL_LANES, amax, 1));
    amax = __vmaxu2(amax, __shfl_xor_sync(ALL_LANES, amax, 2));
    exponents[b] = oproj_quant_exponent(oproj_num_from_bits(max(amax << 16, amax & 0xFFFF0000u)));
  }
  bool live = token < p.tokens;
  int mine = lane % 4;
  uint8_t *to = p.zq.codes + token * p.rows + column + mine * 16;
#pragma unroll
  for (int half = 0; half < 2; half++) { /* 64 columns at a time */
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int j = half * 8 + i * 2;
      float2 a = floats_of_bf16s(pairs[j]), c = floats_of_bf16s(pairs[j + 1]);
      words[i] = codes_of_values(a.x, a.y, c.x, c.y, exponents[j / SPAN]);
    }
    exchange_words(words, lane);
    uint4 packed = make_uint4(
        __byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
        __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
    if (live) *reinterpret_cast<uint4 *>(to + half * 64) = packed;
  }
  if (mine >= BLOCKS) return; /* each of the four writes one block's scale */
  uint8_t exponent = exponents[0];
#pragma unroll
  for (int b = 1; b < BLOCKS; b++)
    if (b == mine) exponent = exponents[b];
  int64_t at = column / BLOCK + mine, columns = p.rows / BLOCK;
  if (live)
    oproj_layout_store(p.zq.scales, p.zq.layout, 0, token, at, p.tokens, columns, exponent);
  else if (p.zq.layout == OPROJ_SCALE_F32 && token < oproj_layout_aligned_tokens(p.tokens))
    static_cast<float *>(p.zq.scales)[oproj_layout_f32(0, token, at, p.tokens, columns)] = 0.0f;
}

/* ---- rows of bf16 -------------------------------------------------------------------------- */

/* The conversion's NaN becomes num.h's. */
__device__ __forceinline__ void settle_nans(uint32_t (&pairs)[PART_PAIRS]) {
  constexpr uint32_t FOUND = 0x7FFFu;
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < PART_PAIRS; j++) most = __vmaxu2(most, magnitudes(pairs[j]));
  if ((most & FOUND) != FOUND && most >> 16 != FOUND) return;
#pragma unroll
  for (int j = 0; j < PART_PAIRS; j++) {
    uint32_t low = pairs[j] & 0xFFFFu, high = pairs[j] >> 16;
    if ((low & FOUND) == FOUND) low = OPROJ_BF16_NAN;
    if ((high & FOUND) == FOUND) high = OPROJ_BF16_NAN;
    pairs[j] = low | high << 16;
  }
}

__device__ __forceinline__ void write_row(const sm90_prefill &p, int64_t token, int64_t column,
                                          int lane, uint32_t (&pairs)[PART_PAIRS]) {
  int first = lane % 4 * 8, left = p.rows - static_cast<int>(column);
  if (token >= p.tokens) left = 0;
  uint16_t *to = p.out + token * p.out_stride + column + first;
  settle_nans(pairs);
#pragma unroll
  for (int j = 0; j < PART_PAIRS; j += 4) { /* 32 columns at a time */
    uint32_t words[4] = {pairs[j], pairs[j + 1], pairs[j + 2], pairs[j + 3]};
    exchange_words(words, lane);
    if (first + 8 * j < left)
      *reinterpret_cast<uint4 *>(to + 8 * j) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

/* ---- a part -------------------------------------------------------------------------------- */

/* `high`: to the second of the thread's tokens. */
__device__ __forceinline__ void add_more(const sm90_prefill &p, int64_t token, int64_t column,
                                         int lane, int high, float (&sums)[PART_SUMS]) {
  if (token >= p.tokens) return;
#pragma unroll
  for (int j = 0; j < PART_PAIRS; j++) {
    int64_t at = column + 8 * j + lane % 4 * 2;
    if (at >= p.rows) continue;
    float2 more = *reinterpret_cast<const float2 *>(p.addend + token * p.rows + at);
    sums[4 * j + 2 * high] += more.x;
    sums[4 * j + 2 * high + 1] += more.y;
  }
}

/* The sums of the thread's tokens, `token` and the eighth after it, and of the 128 columns from
 * `column` on. */
template <int BLOCK>
__device__ __forceinline__ void write_part(const sm90_prefill &p, int64_t token, int64_t column,
                                           int lane, float (&sums)[PART_SUMS]) {
#pragma unroll
  for (int high = 0; high < 2; high++, token += 8) {
    if (p.addend) add_more(p, token, column, lane, high, sums);
    uint32_t pairs[PART_PAIRS];
#pragma unroll
    for (int j = 0; j < PART_PAIRS; j++)
      pairs[j] = rounded_pair(sums[4 * j + 2 * high], sums[4 * j + 2 * high + 1]);
    if (p.zq.codes)
      write_codes<BLOCK>(p, token, column, lane, pairs);
    else
      write_row(p, token, column, lane, pairs);
  }
}

}  // namespace sm90::prefill

#endif /* OPROJ_KERNELS_CUDA_SM90_PREFILL_WRITE_CUH */
