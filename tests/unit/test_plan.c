/* test_plan.c - ownership: complete, disjoint, contiguous; illegal sizes refused by name. */
#include "support/data.h"
#include "support/expect.h"

static const oproj_dims flash = {4096, 64, 512, 64, 8, 1024, 128};
static const oproj_dims pro = {7168, 128, 512, 64, 16, 1024, 128};
static const oproj_dims odd = {640, 24, 512, 64, 6, 384, 128};

/* Shares follow each other without gap or overlap and carry whole groups. */
static void check_cover(const oproj_dims *d, oproj_split split, int32_t size) {
  int32_t group = 0;
  for (int32_t rank = 0; rank < size; rank++) {
    oproj_shard s;
    EXPECT_OK(oproj_plan_shard(d, split, size, rank, &s));
    ck_assert_int_eq(s.rank, rank);
    ck_assert_int_eq(s.size, size);
    ck_assert_int_eq(s.group_begin, group);
    ck_assert_int_gt(s.group_end, s.group_begin);
    ck_assert_int_eq(s.head_begin, s.group_begin * (d->heads / d->groups));
    ck_assert_int_eq(s.head_end, s.group_end * (d->heads / d->groups));
    ck_assert_int_eq(s.z_begin, s.group_begin * d->lora_rank);
    ck_assert_int_eq(s.z_end, s.group_end * d->lora_rank);
    group = s.group_end;
  }
  ck_assert_int_eq(group, d->groups);
}

START_TEST(even_plans_cover) {
  const oproj_dims *all[] = {&flash, &pro, &odd};
  for (size_t i = 0; i < 3; i++)
    for (int32_t n = 1; n <= all[i]->groups; n++)
      if (all[i]->groups % n == 0) check_cover(all[i], OPROJ_SPLIT_EVEN, n);
}
END_TEST

START_TEST(uneven_plans_cover) {
  for (int32_t n = 1; n <= 16; n++) check_cover(&pro, OPROJ_SPLIT_UNEVEN, n);
  const int32_t ends[] = {3, 6, 8};
  for (int32_t rank = 0; rank < 3; rank++) {
    oproj_shard s;
    EXPECT_OK(oproj_plan_shard(&flash, OPROJ_SPLIT_UNEVEN, 3, rank, &s));
    ck_assert_int_eq(s.group_end, ends[rank]);
  }
}
END_TEST

START_TEST(illegal_sizes_are_named) {
  oproj_shard s;
  const int32_t sizes[] = {-1, 0, 3, 5, 7, 9, 16, 1000};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
    EXPECT_FAIL(oproj_plan_shard(&flash, OPROJ_SPLIT_EVEN, sizes[i], 0, &s), OPROJ_ERR_SHAPE,
                "legal sizes are 1, 2, 4, 8");
  EXPECT_FAIL(oproj_plan_shard(&flash, OPROJ_SPLIT_UNEVEN, 9, 0, &s), OPROJ_ERR_SHAPE,
              "legal sizes are 1 to 8");
  EXPECT_FAIL(oproj_plan_shard(&flash, OPROJ_SPLIT_UNEVEN, 0, 0, &s), OPROJ_ERR_SHAPE, "1 to 8");
  EXPECT_FAIL(oproj_plan_shard(&odd, OPROJ_SPLIT_EVEN, 4, 0, &s), OPROJ_ERR_SHAPE, "1, 2, 3, 6");
  EXPECT_FAIL(oproj_plan_shard(&flash, OPROJ_SPLIT_EVEN, 2, 2, &s), OPROJ_ERR_INVALID, "[0, 2)");
  EXPECT_FAIL(oproj_plan_shard(&flash, OPROJ_SPLIT_EVEN, 2, -1, &s), OPROJ_ERR_INVALID, "[0, 2)");
}
END_TEST

START_TEST(dims_are_checked) {
  oproj_shard s;
  const struct {
    oproj_dims dims;
    const char *words;
  } cases[] = {
      {{0, 64, 512, 64, 8, 1024, 128}, "hidden is 0"},
      {{4096, -64, 512, 64, 8, 1024, 128}, "heads is -64"},
      {{4096, 64, 512, 64, 7, 1024, 128}, "7 groups"},
      {{4096, 64, 512, 63, 8, 1024, 128}, "rope_dim is 63"},
      {{4096, 64, 512, 514, 8, 1024, 128}, "rope_dim is 514"},
      {{4096, 64, 512, 64, 8, 1024, 64}, "quant_block is 64"},
      {{4096, 64, 500, 64, 8, 1024, 128}, "head_dim is 500"},
      {{4096, 64, 512, 64, 8, 1000, 128}, "lora_rank is 1000"},
      {{4096, 1 << 24, 512, 64, 8, 1024, 128}, "2^31"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    EXPECT_FAIL(oproj_plan_shard(&cases[i].dims, OPROJ_SPLIT_EVEN, 1, 0, &s), OPROJ_ERR_INVALID,
                cases[i].words);
}
END_TEST

START_TEST(rows_cover) {
  for (int32_t tokens = 0; tokens < 40; tokens++) {
    for (int32_t size = 1; size <= 9; size++) {
      int32_t next = 0, begin, end;
      for (int32_t rank = 0; rank < size; rank++) {
        oproj_plan_rows(tokens, size, rank, &begin, &end);
        ck_assert_int_eq(begin, next);
        ck_assert_int_le(end - begin, (tokens + size - 1) / size);
        next = end;
      }
      ck_assert_int_eq(next, tokens);
    }
  }
}
END_TEST

int main(void) {
  Suite *suite = suite_create("plan");
  TCase *tc = tcase_create("plan");
  tcase_add_test(tc, even_plans_cover);
  tcase_add_test(tc, uneven_plans_cover);
  tcase_add_test(tc, illegal_sizes_are_named);
  tcase_add_test(tc, dims_are_checked);
  tcase_add_test(tc, rows_cover);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
