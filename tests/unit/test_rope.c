/* test_rope.c - rotary tables against the formulae, in long double. */
#include <math.h>

#include "support/expect.h"

static const oproj_rope plain = {10000.0, 1.0, 32.0, 1.0, 65536};
static const oproj_rope compressed = {160000.0, 16.0, 32.0, 1.0, 65536};

/* low = 15 and high = 25 are the numbers that SPEC gives for the released models. */
static double frequency(int i, double theta, int yarn) {
  double f = pow(theta, -2.0 * i / 64.0);
  if (!yarn || i <= 15) return f;
  if (i >= 25) return f / 16.0;
  double ramp = (i - 15) / 10.0;
  return f / 16.0 * ramp + f * (1.0 - ramp);
}

static void check_rows(const oproj_rope *rope, double theta, int yarn, int64_t begin, int64_t end) {
  float table[8 * 64];
  EXPECT_OK(oproj_rope_table(rope, 64, begin, end, table));
  for (int64_t p = begin; p < end; p++) {
    for (int i = 0; i < 32; i++) {
      float angle = (float)p * (float)frequency(i, theta, yarn);
      const float *row = table + (p - begin) * 64;
      ck_assert_msg(row[i] == (float)cos((double)angle), "cos of position %lld, pair %d",
                    (long long)p, i);
      ck_assert_msg(row[32 + i] == (float)sin((double)angle), "sin of position %lld, pair %d",
                    (long long)p, i);
    }
  }
}

START_TEST(plain_tables) {
  check_rows(&plain, 10000.0, 0, 0, 8);
  check_rows(&plain, 10000.0, 0, 1048570, 1048576);
}
END_TEST

START_TEST(compressed_tables_use_yarn) {
  check_rows(&compressed, 160000.0, 1, 0, 8);
  check_rows(&compressed, 160000.0, 1, 131071, 131075);
}
END_TEST

START_TEST(position_zero_is_no_turn) {
  float row[64];
  EXPECT_OK(oproj_rope_table(&compressed, 64, 0, 1, row));
  for (int i = 0; i < 32; i++) ck_assert(row[i] == 1.0f && row[32 + i] == 0.0f);
}
END_TEST

START_TEST(bad_requests) {
  float row[64];
  oproj_rope rope = plain;
  EXPECT_OK(oproj_rope_table(&plain, 64, 5, 5, row));
  EXPECT_FAIL(oproj_rope_table(&plain, 63, 0, 1, row), OPROJ_ERR_INVALID, "rope_dim is 63");
  EXPECT_FAIL(oproj_rope_table(&plain, 64, -1, 1, row), OPROJ_ERR_INVALID, "[-1, 1)");
  EXPECT_FAIL(oproj_rope_table(&plain, 64, 2, 1, row), OPROJ_ERR_INVALID, "[2, 1)");
  EXPECT_FAIL(oproj_rope_table(NULL, 64, 0, 1, row), OPROJ_ERR_INVALID, "NULL");
  rope.theta = 0.0;
  EXPECT_FAIL(oproj_rope_table(&rope, 64, 0, 1, row), OPROJ_ERR_INVALID, "theta");
  rope = compressed;
  rope.original_max_position = 0;
  EXPECT_FAIL(oproj_rope_table(&rope, 64, 0, 1, row), OPROJ_ERR_INVALID, "YaRN");
}
END_TEST

int main(void) {
  Suite *suite = suite_create("rope");
  TCase *tc = tcase_create("rope");
  tcase_add_test(tc, plain_tables);
  tcase_add_test(tc, compressed_tables_use_yarn);
  tcase_add_test(tc, position_zero_is_no_turn);
  tcase_add_test(tc, bad_requests);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
