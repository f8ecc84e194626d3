/* test_num.c - number formats and the block quantiser against their definitions. */
#include <math.h>

#include "base/num.h"
#include "support/data.h"
#include "support/expect.h"

/* The value an e4m3 code stands for, from the format's definition. */
static double e4m3_defined(int code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  double magnitude = exponent ? (1.0 + mantissa / 8.0) * ldexp(1.0, exponent - 7)
                              : mantissa / 8.0 * ldexp(1.0, -6);
  return code & 0x80 ? -magnitude : magnitude;
}

START_TEST(e4m3_decodes_every_code) {
  for (int code = 0; code < 256; code++) {
    float value = oproj_e4m3_to_f32((uint8_t)code);
    if ((code & 0x7F) == 0x7F) {
      ck_assert_msg(isnan(value), "code %02x", code);
    } else {
      ck_assert_msg(value == (float)e4m3_defined(code), "code %02x is %g", code, value);
      ck_assert_int_eq(signbit(value) != 0, code >> 7);
      ck_assert_uint_eq(oproj_e4m3_from_f32(value), (unsigned)code);
    }
  }
}
END_TEST

/* Around the midpoint of every two neighbours: below goes down, above goes up, the tie goes to the
 * even code. */
START_TEST(e4m3_rounds_to_nearest_even) {
  for (int code = 0; code < 0x7E; code++) {
    float low = (float)e4m3_defined(code), high = (float)e4m3_defined(code + 1);
    float middle = (low + high) / 2.0f; /* exact: one more bit than a code */
    unsigned even = (unsigned)(code & 1 ? code + 1 : code);
    ck_assert_uint_eq(oproj_e4m3_from_f32(middle), even);
    ck_assert_uint_eq(oproj_e4m3_from_f32(nextafterf(middle, 0.0f)), (unsigned)code);
    ck_assert_uint_eq(oproj_e4m3_from_f32(nextafterf(middle, 1e9f)), (unsigned)code + 1);
    ck_assert_uint_eq(oproj_e4m3_from_f32(-middle), even | 0x80u);
  }
}
END_TEST

START_TEST(e4m3_clamps_and_keeps_signs) {
  ck_assert_uint_eq(oproj_e4m3_from_f32(448.0f), 0x7E);
  ck_assert_uint_eq(oproj_e4m3_from_f32(1e30f), 0x7E);
  ck_assert_uint_eq(oproj_e4m3_from_f32(-INFINITY), 0xFE);
  ck_assert_uint_eq(oproj_e4m3_from_f32(0.0f), 0x00);
  ck_assert_uint_eq(oproj_e4m3_from_f32(-0.0f), 0x80);
  ck_assert_uint_eq(oproj_e4m3_from_f32(-1e-30f), 0x80);
  ck_assert_uint_eq(oproj_e4m3_from_f32(NAN), 0x7F);
  ck_assert_uint_eq(oproj_e4m3_from_f32(-NAN), 0x7F);
}
END_TEST

START_TEST(bf16_round_trips_and_rounds) {
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    float value = oproj_bf16_to_f32((uint16_t)bits);
    unsigned back = oproj_bf16_from_f32(value);
    ck_assert_uint_eq(back, isnan(value) ? OPROJ_BF16_NAN : bits);
  }
  ck_assert_uint_eq(oproj_bf16_from_f32(oproj_num_from_bits(0x3F808000)), 0x3F80); /* tie, even */
  ck_assert_uint_eq(oproj_bf16_from_f32(oproj_num_from_bits(0x3F818000)), 0x3F82); /* tie, odd */
  ck_assert_uint_eq(oproj_bf16_from_f32(oproj_num_from_bits(0x3F808001)), 0x3F81);
  ck_assert_uint_eq(oproj_bf16_from_f32(oproj_num_from_bits(0x7F7FFFFF)), 0x7F80); /* overflows */
}
END_TEST

START_TEST(ue8m0_round_trips) {
  for (int byte = 0; byte < 255; byte++) {
    float value = oproj_ue8m0_to_f32((uint8_t)byte);
    ck_assert_msg(value == ldexpf(1.0f, byte - 127), "byte %d", byte);
    ck_assert_int_eq(oproj_ue8m0_exact(value), byte);
  }
  ck_assert(isnan(oproj_ue8m0_to_f32(255)));
  const float others[] = {0.0f, -1.0f, 3.0f, 1.0000001f, INFINITY, NAN, 1e-45f};
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
    ck_assert_int_eq(oproj_ue8m0_exact(others[i]), -1);
}
END_TEST

/* The smallest power of two that is at least fl32(amax * fl32(1/448)). */
START_TEST(block_scale_is_the_next_power_of_two) {
  for (uint64_t i = 0; i < 200000; i++) {
    float amax = oproj_num_from_bits((uint32_t)data_hash(7, i) & 0x7FFFFFFFu);
    if (!isfinite(amax)) continue;
    float raw = (amax > 1e-10f ? amax : 1e-10f) * (float)(1.0 / 448.0);
    double scale = oproj_ue8m0_to_f32(oproj_quant_exponent(amax));
    ck_assert_msg(scale >= raw && scale / 2.0 < raw, "amax %a: scale %a for %a", amax, scale, raw);
  }
  ck_assert_uint_eq(oproj_quant_exponent(0.0f), 85); /* 2^-42 */
  ck_assert_uint_eq(oproj_quant_exponent(448.0f), 127 + (448.0f * (float)(1.0 / 448.0) > 1.0f));
  ck_assert_uint_eq(oproj_quant_exponent(INFINITY), OPROJ_UE8M0_NAN);
  ck_assert_uint_eq(oproj_quant_exponent(NAN), OPROJ_UE8M0_NAN);
}
END_TEST

START_TEST(codes_are_values_over_the_scale) {
  for (uint64_t i = 0; i < 100000; i++) {
    float value = (float)(data_uniform(8, i) * ldexp(1.0, (int)(data_hash(9, i) % 60) - 30));
    uint8_t exponent = oproj_quant_exponent(fabsf(value) * 1.5f);
    float divided = value / oproj_ue8m0_to_f32(exponent);
    ck_assert_uint_eq(oproj_quant_code(value, exponent), oproj_e4m3_from_f32(divided));
  }
  ck_assert_uint_eq(oproj_quant_code(1.0f, OPROJ_UE8M0_NAN), OPROJ_E4M3_NAN);
}
END_TEST

START_TEST(amax_lets_nan_and_infinity_stick) {
  ck_assert(oproj_quant_amax(1.0f, -3.0f) == 3.0f);
  ck_assert(oproj_quant_amax(4.0f, -3.0f) == 4.0f);
  ck_assert(!isfinite(oproj_quant_amax(oproj_quant_amax(0.0f, NAN), 5.0f)));
  ck_assert(!isfinite(oproj_quant_amax(oproj_quant_amax(0.0f, -INFINITY), 5.0f)));
}
END_TEST

START_TEST(rotation_rounds_each_product) {
  /* Values for which a fused multiply-add gives another result. */
  int differ = 0;
  for (uint64_t i = 0; i < 1000; i++) {
    float x0 = (float)data_uniform(1, i), x1 = (float)data_uniform(2, i);
    float c = (float)data_uniform(3, i), s = (float)data_uniform(4, i), y0, y1;
    oproj_num_unrotate(x0, x1, c, s, &y0, &y1);
    volatile float a = x0 * c, b = x1 * s, d = x1 * c, e = x0 * s;
    volatile float sum = a + b, difference = d - e;
    ck_assert(y0 == sum && y1 == difference);
    differ += fmaf(x0, c, b) != sum;
  }
  ck_assert_int_gt(differ, 0);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("num");
  TCase *tc = tcase_create("num");
  tcase_add_test(tc, e4m3_decodes_every_code);
  tcase_add_test(tc, e4m3_rounds_to_nearest_even);
  tcase_add_test(tc, e4m3_clamps_and_keeps_signs);
  tcase_add_test(tc, bf16_round_trips_and_rounds);
  tcase_add_test(tc, ue8m0_round_trips);
  tcase_add_test(tc, block_scale_is_the_next_power_of_two);
  tcase_add_test(tc, codes_are_values_over_the_scale);
  tcase_add_test(tc, amax_lets_nan_and_infinity_stick);
  tcase_add_test(tc, rotation_rounds_each_product);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
