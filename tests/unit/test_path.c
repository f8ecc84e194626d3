/* test_path.c - the choice of a path, by capability. */
#include "support/expect.h"

START_TEST(choice_by_capability) {
  const struct {
    int32_t sm;
    oproj_status status;
    const char *name;
  } cases[] = {
      {0, OPROJ_OK, "reference"},  {75, OPROJ_ERR_UNSUPPORTED, NULL}, {80, OPROJ_OK, "portable"},
      {89, OPROJ_OK, "portable"},  {90, OPROJ_OK, "portable"},        {100, OPROJ_OK, "portable"},
      {103, OPROJ_OK, "portable"}, {120, OPROJ_OK, "portable"},       {121, OPROJ_OK, "portable"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    oproj_path_query query = {.sm = cases[i].sm, .tokens = 1, .quant_block = 128};
    oproj_path_choice choice;
    ck_assert_int_eq(oproj_path_choose(&query, &choice), cases[i].status);
    if (cases[i].name) {
      ck_assert_str_eq(choice.name, cases[i].name);
      ck_assert_uint_gt(strlen(choice.reason), 0);
    } else {
      ck_assert_ptr_nonnull(strstr(oproj_last_error(), "8.0 or newer"));
    }
  }
}
END_TEST

START_TEST(bad_queries) {
  oproj_path_choice choice;
  oproj_path_query query = {.tokens = -1, .quant_block = 128};
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_INVALID, "tokens is -1");
  query = (oproj_path_query){.quant_block = 64};
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_INVALID, "quant_block is 64");
  EXPECT_FAIL(oproj_path_choose(NULL, &choice), OPROJ_ERR_INVALID, "NULL");
}
END_TEST

START_TEST(backends_say_why_not) {
  ck_assert_ptr_null(oproj_backend_missing("ref"));
  ck_assert_ptr_nonnull(oproj_backend_missing("tpu"));
}
END_TEST

int main(void) {
  Suite *suite = suite_create("path");
  TCase *tc = tcase_create("path");
  tcase_add_test(tc, choice_by_capability);
  tcase_add_test(tc, bad_queries);
  tcase_add_test(tc, backends_say_why_not);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
