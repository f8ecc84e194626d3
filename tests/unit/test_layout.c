/* test_layout.c - scale layouts: sizes, places, no two scales in one place, padding left alone. */
#include <stdlib.h>
#include <string.h>

#include "base/layout.h"
#include "support/expect.h"

START_TEST(places_written_by_hand) {
  /* 5 tokens (aligned 8), 6 columns: group 1, token 3, column 5. */
  ck_assert_int_eq(oproj_layout_f32(1, 3, 5, 5, 6), (1 * 6 + 5) * 8 + 3);
  ck_assert_int_eq(oproj_layout_packed(1, 3, 5, 5, 6), ((1 * 2 + 1) * 8 + 3) * 4 + 1);
  /* 128x4 tiles: token 200 is row 72 of the second tile row, column 6 lies in the second tile. */
  ck_assert_int_eq(oproj_layout_tile(0, 200, 6, 300, 8),
                   (1 * 2 + 1) * 512 + (72 % 32) * 16 + 2 * 4 + 2);
  ck_assert_int_eq(oproj_layout_tile(0, 0, 0, 1, 1), 0);
}
END_TEST

START_TEST(sizes) {
  ck_assert_uint_eq(oproj_scale_bytes(OPROJ_SCALE_F32, 2, 5, 4096, 128), 2 * 32 * 8 * 4);
  ck_assert_uint_eq(oproj_scale_bytes(OPROJ_SCALE_UE8M0_PACKED, 2, 5, 4096, 128), 2 * 8 * 8 * 4);
  ck_assert_uint_eq(oproj_scale_bytes(OPROJ_SCALE_UE8M0_PACKED, 1, 1, 384, 128), 1 * 1 * 4 * 4);
  ck_assert_uint_eq(oproj_scale_bytes(OPROJ_SCALE_UE8M0_TILE, 1, 129, 160, 32), 2 * 2 * 512);
  ck_assert_uint_eq(oproj_scale_bytes(OPROJ_SCALE_F32, 4, 0, 4096, 128), 0);
}
END_TEST

/* Every scale survives the writing of all others, inside the buffer, and padding stays zero. */
START_TEST(stores_come_back) {
  const int32_t token_counts[] = {1, 3, 4, 5, 127, 128, 129};
  const oproj_scale_layout layouts[] = {OPROJ_SCALE_F32, OPROJ_SCALE_UE8M0_PACKED,
                                        OPROJ_SCALE_UE8M0_TILE};
  for (size_t l = 0; l < 3; l++) {
    for (size_t n = 0; n < sizeof token_counts / sizeof token_counts[0]; n++) {
      int32_t groups = 3, tokens = token_counts[n], columns = 6;
      size_t bytes = (size_t)oproj_layout_bytes(layouts[l], groups, tokens, columns);
      uint8_t *scales = calloc(bytes, 1);
      for (int32_t g = 0; g < groups; g++)
        for (int32_t t = 0; t < tokens; t++)
          for (int32_t c = 0; c < columns; c++)
            oproj_layout_store(scales, layouts[l], g, t, c, tokens, columns,
                               (uint8_t)(1 + (g * 89 + t * 7 + c) % 254));
      for (int32_t g = 0; g < groups; g++)
        for (int32_t t = 0; t < tokens; t++)
          for (int32_t c = 0; c < columns; c++)
            ck_assert(oproj_layout_load(scales, layouts[l], g, t, c, tokens, columns) ==
                      oproj_ue8m0_to_f32((uint8_t)(1 + (g * 89 + t * 7 + c) % 254)));
      size_t written = 0, unit = layouts[l] == OPROJ_SCALE_F32 ? 4 : 1;
      for (size_t i = 0; i < bytes; i += unit) {
        uint32_t word = 0;
        memcpy(&word, scales + i, unit);
        written += word != 0;
      }
      ck_assert_uint_eq(written, (size_t)groups * (size_t)tokens * (size_t)columns);
      free(scales);
    }
  }
}
END_TEST

int main(void) {
  Suite *suite = suite_create("layout");
  TCase *tc = tcase_create("layout");
  tcase_add_test(tc, places_written_by_hand);
  tcase_add_test(tc, sizes);
  tcase_add_test(tc, stores_come_back);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
