/* num.h - the number formats and the block quantiser, one definition for every backend.
 *
 * Plain C11 that nvcc also takes as device code.  Products and sums go through oproj_num_mul/add,
 * so that no compiler contracts them to an FMA: with that, host and device give the same bits.
 *
 *   bf16    upper half of an f32; round to nearest even
 *   e4m3    sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN, no infinities,
 *           largest 448, smallest subnormal 2^-9
 *   ue8m0   e means 2^(e-127); 255 is NaN */
#ifndef OPROJ_BASE_NUM_H
#define OPROJ_BASE_NUM_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define OPROJ_NUM_FN static __host__ __device__ __forceinline__
#else
#define OPROJ_NUM_FN static inline
#endif

#define OPROJ_E4M3_MAX 448.0f
#define OPROJ_E4M3_NAN 0x7Fu
#define OPROJ_UE8M0_NAN 255u
#define OPROJ_BF16_NAN 0x7FC0u

/* ---- bits ---------------------------------------------------------------------------------- */

OPROJ_NUM_FN uint32_t oproj_num_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

OPROJ_NUM_FN float oproj_num_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

OPROJ_NUM_FN int oproj_num_is_finite(float value) {
  return (oproj_num_bits(value) & 0x7F800000u) != 0x7F800000u;
}

OPROJ_NUM_FN float oproj_num_abs(float value) {
  return oproj_num_from_bits(oproj_num_bits(value) & 0x7FFFFFFFu);
}

/* Host code is compiled with -ffp-contract=off. */
OPROJ_NUM_FN float oproj_num_mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

OPROJ_NUM_FN float oproj_num_add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

/* ---- bf16 ---------------------------------------------------------------------------------- */

OPROJ_NUM_FN float oproj_bf16_to_f32(uint16_t bf16) {
  return oproj_num_from_bits((uint32_t)bf16 << 16);
}

/* NaN becomes the one OPROJ_BF16_NAN, whatever its sign and payload. */
OPROJ_NUM_FN uint16_t oproj_bf16_from_f32(float value) {
  uint32_t bits = oproj_num_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return OPROJ_BF16_NAN;
  bits += 0x7FFFu + ((bits >> 16) & 1u);
  return (uint16_t)(bits >> 16);
}

/* ---- e4m3 ---------------------------------------------------------------------------------- */

OPROJ_NUM_FN float oproj_e4m3_to_f32(uint8_t code) {
  uint32_t sign = (uint32_t)(code & 0x80u) << 24;
  uint32_t exponent = (code >> 3) & 15u, mantissa = code & 7u;
  if ((code & 0x7Fu) == OPROJ_E4M3_NAN) return oproj_num_from_bits(0x7FC00000u);
  if (exponent == 0) { /* mantissa * 2^-9, exact */
    float magnitude = (float)mantissa * 0.001953125f;
    return oproj_num_from_bits(oproj_num_bits(magnitude) | sign);
  }
  return oproj_num_from_bits(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

/* Round to nearest even after clamping to [-448, 448]; signs of zeros kept; NaN gives 0x7F. */
OPROJ_NUM_FN uint8_t oproj_e4m3_from_f32(float value) {
  uint32_t bits = oproj_num_bits(value);
  uint32_t sign = (bits >> 24) & 0x80u;
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return OPROJ_E4M3_NAN;
  if (magnitude >= 0x43E00000u) return (uint8_t)(sign | 0x7Eu); /* 448 and above */
  if (magnitude < 0x3C800000u) {
    /* Below 2^-6 codes count multiples of 2^-9.  Adding 2^14 puts the unit of the f32 sum at 2^-9,
     * so the addition itself rounds to nearest even and leaves the count in the mantissa. */
    float sum = oproj_num_add(oproj_num_from_bits(magnitude), 16384.0f);
    return (uint8_t)(sign | (oproj_num_bits(sum) - 0x46800000u));
  }
  magnitude += 0x7FFFFu + ((magnitude >> 20) & 1u);
  return (uint8_t)(sign | ((magnitude >> 20) - (120u << 3)));
}

/* ---- ue8m0 --------------------------------------------------------------------------------- */

/* Byte 0 is 2^-127, an f32 subnormal; 255 is NaN. */
OPROJ_NUM_FN float oproj_ue8m0_to_f32(uint8_t exponent) {
  if (exponent == OPROJ_UE8M0_NAN) return oproj_num_from_bits(0x7FC00000u);
  if (exponent == 0) return oproj_num_from_bits(0x00400000u);
  return oproj_num_from_bits((uint32_t)exponent << 23);
}

/* The byte of a scale that is a power of two in [2^-127, 2^127]; -1 for any other value. */
OPROJ_NUM_FN int oproj_ue8m0_exact(float scale) {
  uint32_t bits = oproj_num_bits(scale);
  if (bits == 0x00400000u) return 0;
  if ((bits & 0x807FFFFFu) != 0 || bits == 0 || bits == 0x7F800000u) return -1;
  return (int)(bits >> 23);
}

/* ---- rotation and block quantisation (SPEC: RoPE, activation quantisation)
 * ----------------------- */

/* An input element as the layer sees it: an infinity counts as a NaN, so that the token that
 * carries it ends as NaN whatever it meets. */
OPROJ_NUM_FN float oproj_num_input(uint16_t bf16) {
  float value = oproj_bf16_to_f32(bf16);
  return oproj_num_is_finite(value) ? value : oproj_num_from_bits(0x7FC00000u);
}

/* Turns the pair (x0, x1) back by the angle of cos, sin: two rounded products and one rounded sum
 * each. */
OPROJ_NUM_FN void oproj_num_unrotate(float x0, float x1, float cos, float sin, float *y0,
                                     float *y1) {
  *y0 = oproj_num_add(oproj_num_mul(x0, cos), oproj_num_mul(x1, sin));
  *y1 = oproj_num_add(oproj_num_mul(x1, cos), -oproj_num_mul(x0, sin));
}

/* The scale of a block whose largest magnitude is amax: 2^ceil(log2(max(amax, 1e-10) / 448)), read
 * off the exponent bits, as a ue8m0 byte.  NaN or infinity gives OPROJ_UE8M0_NAN. */
OPROJ_NUM_FN uint8_t oproj_quant_exponent(float amax) {
  if (!oproj_num_is_finite(amax)) return OPROJ_UE8M0_NAN;
  float raw = oproj_num_mul(amax > 1e-10f ? amax : 1e-10f, 1.0f / 448.0f);
  uint32_t bits = oproj_num_bits(raw); /* normal: raw >= 2^-43 */
  return (uint8_t)((bits >> 23) + ((bits & 0x7FFFFFu) != 0));
}

/* The code of one value of a block with that scale.  Dividing by a power of two is a product with
 * its inverse, exact.  In a block with a NaN scale every code is NaN. */
OPROJ_NUM_FN uint8_t oproj_quant_code(float value, uint8_t exponent) {
  if (exponent == OPROJ_UE8M0_NAN) return OPROJ_E4M3_NAN;
  float inverse = oproj_num_from_bits((254u - exponent) << 23);
  return oproj_e4m3_from_f32(oproj_num_mul(value, inverse));
}

/* The running maximum of magnitudes, with NaN and infinity sticking: bits of magnitudes compare as
 * integers, and those of non-finite values are the largest. */
OPROJ_NUM_FN float oproj_quant_amax(float amax, float value) {
  uint32_t a = oproj_num_bits(amax), b = oproj_num_bits(value) & 0x7FFFFFFFu;
  return oproj_num_from_bits(a > b ? a : b);
}

#endif /* OPROJ_BASE_NUM_H */
