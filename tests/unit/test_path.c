/* test_path.c - the choice of a path, by capability. */
#include "support/expect.h"

static oproj_path_query flash_query(int32_t sm, int32_t tokens) {
  return (oproj_path_query){.sm = sm,
                            .tokens = tokens,
                            .dims = {4096, 64, 512, 64, 8, 1024, 128},
                            .groups = 8,
                            .wo_a = OPROJ_DTYPE_E4M3,
                            .wo_b = OPROJ_DTYPE_E4M3};
}

START_TEST(choice_by_capability) {
  const struct {
    int32_t sm, tokens;
    const char *name; /* NULL: unsupported */
  } cases[] = {{0, 1, "reference"},        {75, 1, NULL},
               {80, 1, "portable"},        {80, 8192, "portable"},
               {89, 1, "portable"},        {90, 0, "grouped-fast"},
               {90, 1, "grouped-fast"},    {90, 767, "grouped-fast"},
               {90, 768, "library-fast"},  {90, 65536, "library-fast"},
               {100, 1, "portable"},       {100, 768, "library-fast"},
               {103, 768, "library-fast"}, {120, 8192, "portable"},
               {121, 1, "portable"},       {999, 1, "portable"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    oproj_path_query query = flash_query(cases[i].sm, cases[i].tokens);
    oproj_path_choice choice;
    oproj_status status = oproj_path_choose(&query, &choice);
    if (cases[i].name) {
      ck_assert_int_eq(status, OPROJ_OK);
      ck_assert_str_eq(choice.name, cases[i].name);
      ck_assert_uint_gt(strlen(choice.reason), 0);
      ck_assert_int_eq(choice.exact, strstr(choice.name, "fast") == NULL);
    } else {
      EXPECT_FAIL(status, OPROJ_ERR_UNSUPPORTED, "8.0 or newer");
    }
  }
}
END_TEST

START_TEST(choice_by_layer) {
  oproj_path_choice choice;
#define CHOSEN(change, wanted)                      \
  do {                                              \
    oproj_path_query query = flash_query(90, 1024); \
    change;                                         \
    EXPECT_OK(oproj_path_choose(&query, &choice));  \
    ck_assert_str_eq(choice.name, wanted);          \
  } while (0)
  CHOSEN(query.dims.quant_block = 32, "grouped-fast");
  CHOSEN(query.wo_a = OPROJ_DTYPE_BF16, "portable");
  CHOSEN(query.wo_b = OPROJ_DTYPE_BF16, "portable");
  CHOSEN((query.wo_b = OPROJ_DTYPE_BF16, query.own_out = 1), "library-fast");
  CHOSEN(query.has_adapter = 1, "grouped-fast");
  CHOSEN(query.dims.hidden = 576, "grouped-fast");
  CHOSEN(query.dims.hidden = 577, "portable");
  CHOSEN((query.dims.lora_rank = 160, query.dims.quant_block = 32), "portable");
#undef CHOSEN
}
END_TEST

START_TEST(forced_paths) {
  oproj_path_choice choice;
  oproj_path_query query = flash_query(90, 32);
  query.forced = OPROJ_PATH_FUSED;
  EXPECT_OK(oproj_path_choose(&query, &choice));
  ck_assert_str_eq(choice.name, "fused-fast");
  query.tokens = 33;
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_UNSUPPORTED, "more than 32 tokens");
  query.forced = OPROJ_PATH_LIBRARY;
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_UNSUPPORTED, "fewer than 768");
  query.forced = OPROJ_PATH_PORTABLE;
  EXPECT_OK(oproj_path_choose(&query, &choice));
  ck_assert_int_eq(choice.path, OPROJ_PATH_PORTABLE);
  query.sm = 0;
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_UNSUPPORTED, "needs a GPU");
}
END_TEST

START_TEST(bad_queries) {
  oproj_path_choice choice;
  oproj_path_query query = flash_query(90, -1);
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_INVALID, "tokens is -1");
  query = (oproj_path_query){.tokens = 1};
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_INVALID, "dims");
  query = flash_query(90, 1);
  query.forced = (oproj_path)17;
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_INVALID, "forced is 17");
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
  tcase_add_test(tc, choice_by_layer);
  tcase_add_test(tc, forced_paths);
  tcase_add_test(tc, bad_queries);
  tcase_add_test(tc, backends_say_why_not);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
