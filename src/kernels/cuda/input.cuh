/* input.cuh - what the kernels that quantise share: bad positions, and the codes of values.
 *
 * A lane holds 8 consecutive values (16 bytes of bf16), so a quantisation block is 16 lanes (128)
 * or 4 lanes (32) and its maximum takes 4 or 2 shuffles. */
#ifndef OPROJ_KERNELS_CUDA_INPUT_CUH
#define OPROJ_KERNELS_CUDA_INPUT_CUH

#include "kernels/cuda/device.cuh"

namespace {

constexpr int LANE_VALUES = 8;
/* Of the heads that some kernels are written for. */
constexpr int HEAD_DIM = OPROJ_KERNELS_HEAD_DIM, ROPE_DIM = OPROJ_KERNELS_ROPE_DIM;

/* ---- positions ----------------------------------------------------------------------------- */

/* Records a bad position unless an earlier one still waits for the host (see cuda_fault). */
__device__ inline void raise_fault(const cuda_input &p, int32_t token, int64_t position) {
  volatile cuda_fault *fault = p.fault;
  uint32_t seen = fault->seen;
  if (atomicCAS(p.claim, seen, seen + 1) != seen) return;
  fault->token = token;
  fault->position = position;
  fault->rows = p.cos_sin_rows;
  __threadfence_system();
  fault->raised = seen + 1;
}

/* Records that blocks of a launch waited in vain for one another. */
__device__ inline void raise_stall(const cuda_input &p) {
  volatile cuda_fault *fault = p.fault;
  fault->stalled = 1;
  __threadfence_system();
}

/* Which of the call's tokens the i-th is. */
__device__ __forceinline__ int32_t token_of(const cuda_input &p, int32_t i) {
  if (i < p.strip) return p.begin + i;
  int32_t strip = i / p.strip;
  return p.begin + strip * p.stride + (i - strip * p.strip);
}

/* The table row of a token of the call, or NULL where its position lies outside the table. */
__device__ __forceinline__ const float *table_row(const cuda_input &p, int32_t token,
                                                  bool reports) {
  int64_t position = p.positions_i32 ? static_cast<const int32_t *>(p.positions)[token]
                                     : static_cast<const int64_t *>(p.positions)[token];
  if (position >= 0 && position < p.cos_sin_rows) return p.cos_sin + position * p.rope_dim;
  if (reports) raise_fault(p, token, position);
  return nullptr;
}

/* ---- a lane's values ----------------------------------------------------------------------- */

__device__ __forceinline__ void unpack_values(const uint4 &raw, float (&values)[LANE_VALUES]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 pair = floats_of_bf16s(words[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

/* Turns back four pairs. */
__device__ __forceinline__ void unrotate_values(float (&values)[LANE_VALUES], const float4 &cos,
                                                const float4 &sin) {
  const float c[4] = {cos.x, cos.y, cos.z, cos.w}, s[4] = {sin.x, sin.y, sin.z, sin.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    oproj_num_unrotate(values[2 * i], values[2 * i + 1], c[i], s[i], &values[2 * i],
                       &values[2 * i + 1]);
}

/* ---- quantisation -------------------------------------------------------------------------- */

/* Four values over a block's scale, as codes, the first in the low byte: oproj_quant_code of each,
 * by the conversion instruction, which rounds, saturates and treats NaN as num.h does. */
__device__ __forceinline__ uint32_t codes_of_values(float a, float b, float c, float d,
                                                    uint8_t exponent) {
  uint32_t inverse_bits =
      exponent == OPROJ_UE8M0_NAN ? 0x7FC00000u : static_cast<uint32_t>(254 - exponent) << 23;
  float inverse = oproj_num_from_bits(inverse_bits);
  uint32_t low = __nv_cvt_float2_to_fp8x2(
      make_float2(oproj_num_mul(a, inverse), oproj_num_mul(b, inverse)), __NV_SATFINITE, __NV_E4M3);
  uint32_t high = __nv_cvt_float2_to_fp8x2(
      make_float2(oproj_num_mul(c, inverse), oproj_num_mul(d, inverse)), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

/* Codes of a lane's values; `lanes` consecutive lanes make a block.  Every lane of the warp must
 * call, one without values with zeros.  Returns the block's exponent. */
__device__ __forceinline__ uint8_t quantize_values(const float (&values)[LANE_VALUES], int lanes,
                                                   uint2 *codes) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < LANE_VALUES; i++) amax = oproj_quant_amax(amax, values[i]);
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    amax = oproj_quant_amax(amax, __shfl_xor_sync(ALL_LANES, amax, offset));
  uint8_t exponent = oproj_quant_exponent(amax);
  *codes = make_uint2(codes_of_values(values[0], values[1], values[2], values[3], exponent),
                      codes_of_values(values[4], values[5], values[6], values[7], exponent));
  return exponent;
}

/* Four codes times 2^-down, rounded. */
__device__ __forceinline__ uint32_t lower_codes(uint32_t codes, int down) {
  constexpr int MOST = 24; /* by which the largest code is long gone */
  __half2 factor = __float2half2_rn(
      oproj_num_from_bits(static_cast<uint32_t>(127 - (down < MOST ? down : MOST)) << 23));
  uint32_t lowered = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    __half2_raw pair =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> 16 * i), __NV_E4M3);
    __nv_fp8x2_storage_t two =
        __nv_cvt_halfraw2_to_fp8x2(__hmul2(__half2(pair), factor), __NV_SATFINITE, __NV_E4M3);
    lowered |= static_cast<uint32_t>(two) << 16 * i;
  }
  return lowered;
}

constexpr int JOINED_LANES = 16, SINGLE_LANES = JOINED_LANES / 4; /* of a block */

/* quantize_values by blocks of 32, then joined in fours (sm90_join.h).  Returns the joined block's
 * exponent. */
__device__ __forceinline__ uint8_t quantize_joined(const float (&values)[LANE_VALUES],
                                                   uint2 *codes) {
  int own = quantize_values(values, SINGLE_LANES, codes), joined = own;
#pragma unroll
  for (int offset = SINGLE_LANES; offset < JOINED_LANES; offset *= 2)
    joined = max(joined, __shfl_xor_sync(ALL_LANES, joined, offset));
  if (joined > own)
    *codes = make_uint2(lower_codes(codes->x, joined - own), lower_codes(codes->y, joined - own));
  return static_cast<uint8_t>(joined);
}

}  // namespace

#endif /* OPROJ_KERNELS_CUDA_INPUT_CUH */
