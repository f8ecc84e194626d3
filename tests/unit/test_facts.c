/* test_facts.c - what ranks must have in common: packing, and the sentence about what differs. */
#include <stdlib.h>
#include <string.h>

#include "support/expect.h"
#include "tp/facts.h"

/* One sheet per value of the fact "max_tokens", between two that agree. */
static const char *judge(int32_t size, const char *const *values) {
  char *sheets = calloc((size_t)size, OPROJ_FACTS_SHEET);
  for (int32_t r = 0; r < size; r++) {
    const oproj_fact facts[] = {{"hidden", "4096"}, {"max_tokens", values[r]}, {"path", ""}};
    EXPECT_OK(oproj_facts_pack(facts, 3, sheets + (size_t)r * OPROJ_FACTS_SHEET));
  }
  oproj_status status = oproj_facts_judge(sheets, size);
  free(sheets);
  if (status == OPROJ_OK) return "same";
  ck_assert_int_eq(status, OPROJ_ERR_INVALID);
  return oproj_last_error();
}

START_TEST(equal_facts_pass) {
  const char *const values[] = {"64", "64", "64"};
  ck_assert_str_eq(judge(3, values), "same");
  ck_assert_str_eq(judge(1, values), "same");
  char none[2 * OPROJ_FACTS_SHEET];
  EXPECT_OK(oproj_facts_pack(NULL, 0, none));
  EXPECT_OK(oproj_facts_pack(NULL, 0, none + OPROJ_FACTS_SHEET));
  EXPECT_OK(oproj_facts_judge(none, 2));
}
END_TEST

START_TEST(differences_name_field_values_and_ranks) {
  const char *const one[] = {"64", "64", "32", "64", "64"};
  ck_assert_str_eq(judge(5, one),
                   "max_tokens must be the same on all ranks; it is 64 on ranks 0, 1, 3, 4, 32 on "
                   "rank 2");
  const char *const runs[] = {"1", "1", "1", ""};
  ck_assert_str_eq(judge(4, runs),
                   "max_tokens must be the same on all ranks; it is 1 on ranks 0 to 2, nothing on "
                   "rank 3");
  const char *const many[] = {"1", "2", "3", "4", "5", "6"};
  ck_assert_ptr_nonnull(strstr(judge(6, many), "4 on rank 3, and others"));
}
END_TEST

START_TEST(other_lists_are_named) {
  char sheets[2 * OPROJ_FACTS_SHEET];
  const oproj_fact two[] = {{"hidden", "4096"}, {"heads", "64"}};
  EXPECT_OK(oproj_facts_pack(two, 2, sheets));
  EXPECT_OK(oproj_facts_pack(two, 1, sheets + OPROJ_FACTS_SHEET));
  ck_assert_int_eq(oproj_facts_judge(sheets, 2), OPROJ_ERR_INVALID);
  ck_assert_str_eq(oproj_last_error(),
                   "what is compared must be the same on all ranks; it is heads on rank 0, nothing "
                   "on rank 1");
}
END_TEST

/* Values are cut, so that no fact pushes others out of the sentence. */
START_TEST(long_facts_are_cut_and_bad_ones_refused) {
  char sheet[OPROJ_FACTS_SHEET], long_value[400];
  memset(long_value, 'x', sizeof long_value - 1);
  long_value[sizeof long_value - 1] = '\0';
  oproj_fact many[OPROJ_FACTS_MOST + 1];
  for (int i = 0; i <= OPROJ_FACTS_MOST; i++) many[i] = (oproj_fact){"name", long_value};
  EXPECT_OK(oproj_facts_pack(many, 1, sheet));
  ck_assert_uint_eq(strlen(sheet + strlen("name") + 1), OPROJ_FACTS_TEXT - 1);
  EXPECT_FAIL(oproj_facts_pack(many, OPROJ_FACTS_MOST, sheet), OPROJ_ERR_INVALID, "exceed");
  EXPECT_FAIL(oproj_facts_pack(many, OPROJ_FACTS_MOST + 1, sheet), OPROJ_ERR_INVALID, "0 to 64");
  many[0].value = NULL;
  EXPECT_FAIL(oproj_facts_pack(many, 1, sheet), OPROJ_ERR_INVALID, "fact 0");
}
END_TEST

int main(void) {
  Suite *suite = suite_create("facts");
  TCase *tc = tcase_create("facts");
  tcase_add_test(tc, equal_facts_pass);
  tcase_add_test(tc, differences_name_field_values_and_ranks);
  tcase_add_test(tc, other_lists_are_named);
  tcase_add_test(tc, long_facts_are_cut_and_bad_ones_refused);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
