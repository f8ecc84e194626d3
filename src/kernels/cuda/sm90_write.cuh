/* sm90_write.cuh - what becomes of a token's sums: z rounded and quantised, or a row of bf16.
 *
 * Products of many tokens leave a token's values of 128 columns with four neighbouring threads:
 * thread t of the warp has columns 8j + t%4*2 and the one after.  The four exchange words so that
 * each of them writes 16 bytes; nothing goes through shared memory.  Where sums meet there, a warp
 * takes a row.  Product is sm90_product or sm90_prefill. */
#ifndef OPROJ_KERNELS_CUDA_SM90_WRITE_CUH
#define OPROJ_KERNELS_CUDA_SM90_WRITE_CUH

#include <cuda_bf16.h>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/input.cuh"

namespace sm90 {

constexpr int WRITE_COLS = 128;
constexpr int WRITE_PAIRS = WRITE_COLS / 8; /* of neighbouring columns, of a thread */

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
template <int BLOCK, typename Product>
__device__ __forceinline__ void write_codes(const Product &p, int64_t token, int64_t column,
                                            int lane, const uint32_t (&pairs)[WRITE_PAIRS]) {
  constexpr int BLOCKS = WRITE_COLS / BLOCK, SPAN = WRITE_PAIRS / BLOCKS;
  uint8_t exponents[BLOCKS];
  if (column >= p.rows) return; /* a tile's second part may lie behind the last row */
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    uint32_t amax = 0; /* of either half */
#pragma unroll
    for (int j = b * SPAN; j < (b + 1) * SPAN; j++) amax = __vmaxu2(amax, magnitudes(pairs[j]));
    amax = __vmaxu2(amax, __shfl_xor_sync(ALL_LANES, amax, 1));
    amax = __vmaxu2(amax, __shfl_xor_sync(ALL_LANES, amax, 2));
    exponents[b] = oproj_quant_exponent(oproj_num_from_bits(max(amax << 16, amax & 0xFFFF0000u)));
  }
  int joined = 0; /* exponent of all blocks together */
  if (BLOCK < WRITE_COLS && p.z_joined)
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) joined = max(joined, exponents[b]);
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
      if (BLOCK < WRITE_COLS && joined > exponents[j / SPAN])
        words[i] = lower_codes(words[i], joined - exponents[j / SPAN]);
    }
    exchange_words(words, lane);
    uint4 packed = make_uint4(
        __byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
        __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
    if (live) *reinterpret_cast<uint4 *>(to + half * 64) = packed;
  }
  bool single = BLOCK == WRITE_COLS || p.z_joined; /* one scale for all columns */
  if (single && mine > 0) return;                  /* else each of the four writes one */
  uint8_t exponent = exponents[0];
#pragma unroll
  for (int b = 1; b < BLOCKS; b++)
    if (b == mine) exponent = exponents[b];
  if (BLOCK < WRITE_COLS && p.z_joined) exponent = joined;
  int64_t width = single ? WRITE_COLS : BLOCK, at = column / width + mine, columns = p.rows / width;
  if (live)
    oproj_layout_store(p.zq.scales, p.zq.layout, 0, token, at, p.tokens, columns, exponent);
  else if (p.zq.layout == OPROJ_SCALE_F32 && token < oproj_layout_aligned_tokens(p.tokens))
    static_cast<float *>(p.zq.scales)[oproj_layout_f32(0, token, at, p.tokens, columns)] = 0.0f;
}

/* ---- rows of bf16 -------------------------------------------------------------------------- */

/* The conversion's NaN becomes num.h's. */
__device__ __forceinline__ void settle_nans(uint32_t (&pairs)[WRITE_PAIRS]) {
  constexpr uint32_t FOUND = 0x7FFFu;
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < WRITE_PAIRS; j++) most = __vmaxu2(most, magnitudes(pairs[j]));
  if ((most & FOUND) != FOUND && most >> 16 != FOUND) return;
#pragma unroll
  for (int j = 0; j < WRITE_PAIRS; j++) {
    uint32_t low = pairs[j] & 0xFFFFu, high = pairs[j] >> 16;
    if ((low & FOUND) == FOUND) low = OPROJ_BF16_NAN;
    if ((high & FOUND) == FOUND) high = OPROJ_BF16_NAN;
    pairs[j] = low | high << 16;
  }
}

/* 8 columns of a row, of which `left` exist. */
__device__ __forceinline__ void store_columns(uint16_t *to, int left, bool wide,
                                              const uint32_t (&words)[4]) {
  if (wide) {
    if (left > 0)
      *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < left) to[i] = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
}

template <typename Product>
__device__ __forceinline__ void write_row(const Product &p, int64_t token, int64_t column, int lane,
                                          uint32_t (&pairs)[WRITE_PAIRS]) {
  int first = lane % 4 * 8, left = p.rows - static_cast<int>(column);
  bool wide =
      reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && p.out_stride % 8 == 0 && p.rows % 8 == 0;
  if (token >= p.tokens) left = 0;
  uint16_t *to = p.out + token * p.out_stride + column + first;
  settle_nans(pairs);
#pragma unroll
  for (int j = 0; j < WRITE_PAIRS; j += 4) { /* 32 columns at a time */
    uint32_t words[4] = {pairs[j], pairs[j + 1], pairs[j + 2], pairs[j + 3]};
    exchange_words(words, lane);
    store_columns(to + 8 * j, left - first - 8 * j, wide, words);
  }
}

/* ---- a token ------------------------------------------------------------------------------- */

template <typename Product>
__device__ __forceinline__ void add_more(const Product &p, int64_t token, int64_t column, int lane,
                                         float2 (&values)[WRITE_PAIRS]) {
  if (token >= p.tokens) return;
#pragma unroll
  for (int j = 0; j < WRITE_PAIRS; j++) {
    int64_t at = column + 8 * j + lane % 4 * 2;
    if (at >= p.rows) continue;
    float2 more = *reinterpret_cast<const float2 *>(p.addend + token * p.rows + at);
    values[j].x += more.x;
    values[j].y += more.y;
  }
}

/* A token's sums of the 128 columns from `column` on, all lanes of the warp taking part: rounded,
 * and quantised (p.zq) in blocks of BLOCK, written (p.out), or both. */
template <int BLOCK, typename Product>
__device__ __forceinline__ void write_token(const Product &p, int64_t token, int64_t column,
                                            int lane, float2 (&values)[WRITE_PAIRS]) {
  uint32_t pairs[WRITE_PAIRS];
  if (p.addend) add_more(p, token, column, lane, values);
#pragma unroll
  for (int j = 0; j < WRITE_PAIRS; j++) pairs[j] = rounded_pair(values[j].x, values[j].y);
  if (p.zq.codes) write_codes<BLOCK>(p, token, column, lane, pairs);
  if (p.out) write_row(p, token, column, lane, pairs);
}

/* ---- the same of sums that lie in rows: 4 columns to a lane, 128 to a warp ------------------ */

__device__ __forceinline__ void add_to(float4 *sum, const float4 &more) {
  *sum = make_float4(sum->x + more.x, sum->y + more.y, sum->z + more.z, sum->w + more.w);
}

/* The codes of a lane's 4 columns and, by the first lane of a block, its scale. */
template <int BLOCK, typename Product>
__device__ __forceinline__ void write_column_codes(const Product &p, int64_t token, int64_t column,
                                                   int lane, uint32_t codes, int exponent) {
  int width = BLOCK < WRITE_COLS && p.z_joined ? WRITE_COLS : BLOCK; /* of columns with one scale */
  int64_t at = column / width, columns = p.rows / width;
  bool leads = column % width == 0;
  if (token < p.tokens) {
    *reinterpret_cast<uint32_t *>(p.zq.codes + token * p.rows + column) = codes;
    if (leads)
      oproj_layout_store(p.zq.scales, p.zq.layout, 0, token, at, p.tokens, columns, exponent);
  } else if (leads && p.zq.layout == OPROJ_SCALE_F32 &&
             token < oproj_layout_aligned_tokens(p.tokens)) {
    static_cast<float *>(p.zq.scales)[oproj_layout_f32(0, token, at, p.tokens, columns)] = 0.0f;
  }
}

/* Quantises a row of 128 values, 4 to a lane. */
template <int BLOCK, typename Product>
__device__ __forceinline__ void quantize_columns(const Product &p, int64_t token, int64_t column,
                                                 int lane, float4 sum) {
  float amax = oproj_quant_amax(oproj_quant_amax(0.0f, sum.x), sum.y);
  amax = oproj_quant_amax(oproj_quant_amax(amax, sum.z), sum.w);
#pragma unroll
  for (int offset = BLOCK / 8; offset > 0; offset /= 2)
    amax = oproj_quant_amax(amax, __shfl_xor_sync(ALL_LANES, amax, offset));
  int own = oproj_quant_exponent(amax), exponent = own;
  uint32_t codes = codes_of_values(sum.x, sum.y, sum.z, sum.w, own);
  if (BLOCK < WRITE_COLS && p.z_joined) {
    exponent = __reduce_max_sync(ALL_LANES, own);
    if (exponent > own) codes = lower_codes(codes, exponent - own);
  }
  write_column_codes<BLOCK>(p, token, column, lane, codes, exponent);
}

/* Rounds a lane's 4 rows to bf16, in place, and writes them where they are wanted. */
template <typename Product>
__device__ __forceinline__ void round_and_write(const Product &p, int64_t token, int64_t column,
                                                float4 *sum) {
  bool live = token < p.tokens && column < p.rows;
  bool wide = reinterpret_cast<uintptr_t>(p.out) % 8 == 0 && p.out_stride % 4 == 0;
  if (p.addend && live) {
    float4 more = *reinterpret_cast<const float4 *>(p.addend + token * p.rows + column);
    add_to(sum, more);
  }
  const uint16_t rounded[4] = {oproj_bf16_from_f32(sum->x), oproj_bf16_from_f32(sum->y),
                               oproj_bf16_from_f32(sum->z), oproj_bf16_from_f32(sum->w)};
  if (p.out && live) {
    uint16_t *to = p.out + token * p.out_stride + column;
    uint2 packed;
    memcpy(&packed, rounded, sizeof packed);
    if (wide)
      *reinterpret_cast<uint2 *>(to) = packed;
    else
      for (int i = 0; i < 4; i++) to[i] = rounded[i];
  }
  *sum = make_float4(oproj_bf16_to_f32(rounded[0]), oproj_bf16_to_f32(rounded[1]),
                     oproj_bf16_to_f32(rounded[2]), oproj_bf16_to_f32(rounded[3]));
}

/* A lane's 4 columns of a token, from `column` on: rounded, quantised and written as write_token
 * does. */
template <int BLOCK, typename Product>
__device__ __forceinline__ void write_columns(const Product &p, int64_t token, int64_t column,
                                              int lane, float4 sum) {
  round_and_write(p, token, column, &sum);
  if (p.zq.codes) quantize_columns<BLOCK>(p, token, column, lane, sum);
}

}  // namespace sm90

#endif /* OPROJ_KERNELS_CUDA_SM90_WRITE_CUH */
