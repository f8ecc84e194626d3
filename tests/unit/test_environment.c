/* test_environment.c - oproj's own variables: what they may hold, and which there are. */
#include <stdlib.h>

#include "base/environment.h"
#include "support/expect.h"

static const char *const names[OPROJ_ENVIRONMENT_COUNT] = {
    "OPROJ_BIND", "OPROJ_DEADLINE", "OPROJ_LOG", "OPROJ_PDL", "OPROJ_PUSH", "OPROJ_TERMINAL"};

static void clear(void) {
  for (int i = 0; i < OPROJ_ENVIRONMENT_COUNT; i++) unsetenv(names[i]);
}

START_TEST(what_is_not_set_has_its_default) {
  static const int words[] = {1, -1, 1, 1, 0, 0};
  clear();
  EXPECT_OK(oproj_environment_check(NULL));
  for (int i = 0; i < OPROJ_ENVIRONMENT_COUNT; i++)
    if (i != OPROJ_ENVIRONMENT_DEADLINE)
      ck_assert_int_eq(oproj_base_word((oproj_base_variable)i), words[i]);
  ck_assert(oproj_base_seconds(OPROJ_ENVIRONMENT_DEADLINE) == 30);
}
END_TEST

START_TEST(legal_values_are_read) {
  clear();
  setenv("OPROJ_BIND", "0", 1);
  setenv("OPROJ_DEADLINE", "2.5", 1);
  setenv("OPROJ_LOG", "debug", 1);
  setenv("OPROJ_PDL", "0", 1);
  setenv("OPROJ_PUSH", "1", 1);
  EXPECT_OK(oproj_environment_check(NULL));
  ck_assert_int_eq(oproj_base_word(OPROJ_ENVIRONMENT_BIND), 0);
  ck_assert_int_eq(oproj_base_word(OPROJ_ENVIRONMENT_LOG), 3);
  ck_assert_int_eq(oproj_base_word(OPROJ_ENVIRONMENT_PDL), 0);
  ck_assert_int_eq(oproj_base_word(OPROJ_ENVIRONMENT_PUSH), 1);
  ck_assert(oproj_base_seconds(OPROJ_ENVIRONMENT_DEADLINE) == 2.5);
  clear();
}
END_TEST

START_TEST(other_values_are_named_and_read_as_the_default) {
  static const struct {
    const char *name, *value, *words;
  } cases[] = {{"OPROJ_BIND", "yes", "OPROJ_BIND is \"yes\"; it must be 0 or 1"},
               {"OPROJ_DEADLINE", "-1", "OPROJ_DEADLINE is \"-1\"; it must be seconds"},
               {"OPROJ_DEADLINE", "nan", "OPROJ_DEADLINE is \"nan\""},
               {"OPROJ_DEADLINE", "3 s", "OPROJ_DEADLINE is \"3 s\""},
               {"OPROJ_LOG", "", "OPROJ_LOG is \"\"; it must be error, warn, info or debug"},
               {"OPROJ_PUSH", "2", "OPROJ_PUSH is \"2\"; it must be 0 or 1"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const char *name = NULL;
    clear();
    setenv(cases[i].name, cases[i].value, 1);
    EXPECT_FAIL(oproj_environment_check(&name), OPROJ_ERR_INVALID, cases[i].words);
    ck_assert_str_eq(name, cases[i].name);
    ck_assert(oproj_base_seconds(OPROJ_ENVIRONMENT_DEADLINE) == 30);
    ck_assert_int_eq(oproj_base_word(OPROJ_ENVIRONMENT_BIND), 1);
    ck_assert_int_eq(oproj_base_word(OPROJ_ENVIRONMENT_LOG), 1);
    ck_assert_int_eq(oproj_base_word(OPROJ_ENVIRONMENT_PUSH), 0);
  }
  clear();
}
END_TEST

START_TEST(unknown_names_are_listed) {
  char text[64], little[8];
  clearenv();
  setenv("OPROJ_LOG", "warn", 1);
  setenv("OPROJ_JOBS", "4", 1);
  setenv("OPROJ_TEST_SHORT", "1", 1);
  setenv("MY_OPROJ_X", "1", 1);
  oproj_environment_unknown(text, sizeof text);
  ck_assert_str_eq(text, "");
  setenv("OPROJ_LOGS", "1", 1);
  setenv("OPROJ_LO", "1", 1);
  oproj_environment_unknown(text, sizeof text);
  ck_assert_uint_eq(strlen(text), strlen("OPROJ_LOGS, OPROJ_LO"));
  ck_assert_ptr_nonnull(strstr(text, "OPROJ_LOGS"));
  oproj_environment_unknown(little, sizeof little);
  ck_assert_uint_eq(strlen(little), sizeof little - 1);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("environment");
  TCase *tc = tcase_create("environment");
  tcase_add_test(tc, what_is_not_set_has_its_default);
  tcase_add_test(tc, legal_values_are_read);
  tcase_add_test(tc, other_values_are_named_and_read_as_the_default);
  tcase_add_test(tc, unknown_names_are_listed);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
