/* test_path.c - the choice of a path, by capability. */
#include "kernels/kernels.h"
#include "support/expect.h"

static oproj_path_query flash_query(int32_t sm, int32_t tokens) {
  return (oproj_path_query){.sm = sm,
                            .tokens = tokens,
                            .dims = {4096, 64, 512, 64, 8, 1024, 128},
                            .groups = 8,
                            .wo_a = OPROJ_DTYPE_E4M3,
                            .wo_b = OPROJ_DTYPE_E4M3};
}

/* Of one capability at one token count, in blocks of 128 and of 32. */
static const struct {
  int32_t sm, tokens, block;
  const char *name; /* NULL: unsupported */
  const char *reason;
} by_capability[] = {{0, 1, 128, "reference", "plain C on the host"},
                     {75, 1, 128, NULL, "capability 7.5 is too old; 8.0 or newer"},
                     {80, 1, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {80, 8192, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {80, 8192, 32, "portable", "FP8 kernels of this version are SM90's"},
                     {89, 1, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {89, 8192, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {90, 0, 128, "decode-fast", "one launch"},
                     {90, 1, 128, "decode-fast", "one launch"},
                     {90, 8, 32, "decode-fast", "one launch"},
                     {90, 8, 128, "decode-fast", "one launch"},
                     {90, 9, 128, "grouped-fast", "a quantiser of its own"},
                     {90, 32, 32, "grouped-fast", "a quantiser of its own"},
                     {90, 33, 128, "grouped-fast", "fewer than 768 tokens"},
                     {90, 767, 128, "grouped-fast", "fewer than 768 tokens"},
                     {90, 768, 128, "library-fast", "cuBLASLt"},
                     {90, 65536, 128, "library-fast", "cuBLASLt"},
                     {90, 65536, 32, "library-fast", "cuBLASLt"},
                     {100, 1, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {100, 1, 32, "portable", "FP8 kernels of this version are SM90's"},
                     {100, 767, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {100, 768, 128, "library-fast", "cuBLASLt"},
                     {100, 8192, 32, "library-fast", "cuBLASLt"},
                     {103, 767, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {103, 768, 128, "library-fast", "cuBLASLt"},
                     {110, 8192, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {120, 1, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {120, 8192, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {121, 1, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {121, 8192, 32, "portable", "FP8 kernels of this version are SM90's"},
                     {999, 1, 128, "portable", "FP8 kernels of this version are SM90's"},
                     {999, 8192, 128, "portable", "FP8 kernels of this version are SM90's"}};

START_TEST(choice_by_capability) {
  for (size_t i = 0; i < sizeof by_capability / sizeof by_capability[0]; i++) {
    oproj_path_query query = flash_query(by_capability[i].sm, by_capability[i].tokens);
    const char *name = by_capability[i].name, *reason = by_capability[i].reason;
    oproj_path_choice choice;
    query.dims.quant_block = by_capability[i].block;
    oproj_status status = oproj_path_choose(&query, &choice);
    if (name) {
      ck_assert_int_eq(status, OPROJ_OK);
      ck_assert_msg(strcmp(choice.name, name) == 0, "%d, %d tokens: %s, wanted %s", query.sm,
                    query.tokens, choice.name, name);
      ck_assert_msg(strstr(choice.reason, reason), "%d, %d tokens: \"%s\" does not say \"%s\"",
                    query.sm, query.tokens, choice.reason, reason);
      ck_assert_int_eq(choice.exact, strstr(choice.name, "fast") == NULL);
    } else {
      EXPECT_FAIL(status, OPROJ_ERR_UNSUPPORTED, reason);
    }
  }
}
END_TEST

START_TEST(choice_by_layer) {
  oproj_path_choice choice;
#define CHOSEN(change, wanted, words)                    \
  do {                                                   \
    oproj_path_query query = flash_query(90, 1024);      \
    change;                                              \
    EXPECT_OK(oproj_path_choose(&query, &choice));       \
    ck_assert_str_eq(choice.name, wanted);               \
    ck_assert_ptr_nonnull(strstr(choice.reason, words)); \
  } while (0)
  CHOSEN(query.dims.quant_block = 32, "library-fast", "cuBLASLt");
  CHOSEN((query.dims.quant_block = 32, query.unjoined = 1), "grouped-fast", "cannot be joined");
  CHOSEN(query.unjoined = 1, "library-fast", "cuBLASLt");
  CHOSEN(query.wo_a = OPROJ_DTYPE_BF16, "portable", "WO_A is bf16");
  CHOSEN(query.wo_b = OPROJ_DTYPE_BF16, "portable", "WO_B is bf16");
  CHOSEN(query.own_out = 1, "grouped-fast", "caller's");
  CHOSEN((query.wo_b = OPROJ_DTYPE_BF16, query.own_out = 1), "grouped-fast", "caller's");
  CHOSEN((query.sm = 100, query.wo_b = OPROJ_DTYPE_BF16, query.own_out = 1), "library-fast",
         "cuBLASLt");
  CHOSEN(query.has_adapter = 1, "grouped-fast", "adapter");
  CHOSEN(query.dims.hidden = 576, "grouped-fast", "no multiples of cuBLASLt's blocks");
  CHOSEN(query.dims.hidden = 577, "portable", "hidden none of 4");
  CHOSEN((query.dims.lora_rank = 160, query.dims.quant_block = 32), "portable", "o_lora_rank");
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
  query.forced = OPROJ_PATH_DECODE;
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_UNSUPPORTED,
              "more tokens than one launch takes");
  query.tokens = 16;
  EXPECT_OK(oproj_path_choose(&query, &choice));
  ck_assert_str_eq(choice.name, "decode-fast");
  query.resident = 63;
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_UNSUPPORTED, "WO_A has more rows");
  query.forced = OPROJ_PATH_LIBRARY;
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_UNSUPPORTED, "fewer than 768");
  query.forced = OPROJ_PATH_PORTABLE;
  EXPECT_OK(oproj_path_choose(&query, &choice));
  ck_assert_int_eq(choice.path, OPROJ_PATH_PORTABLE);
  query.sm = 0;
  EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_UNSUPPORTED, "needs a GPU");
  query = flash_query(90, 1);
  query.no_native = 1;
  EXPECT_OK(oproj_path_choose(&query, &choice));
  ck_assert_str_eq(choice.name, "portable");
  ck_assert_str_eq(choice.reason, "this build has no machine code for this GPU");
}
END_TEST

/* What is forced where the device lacks it is refused, and says what it lacks. */
START_TEST(forced_by_capability) {
  static const int32_t all[] = {80, 89, 90, 100, 103, 120, 121, 999};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    int32_t sm = all[i], library = sm == 90 || sm == 100 || sm == 103;
    oproj_path_choice choice;
    oproj_path_query query = flash_query(sm, 1);
    for (int path = OPROJ_PATH_GROUPED; path <= OPROJ_PATH_DECODE; path++) {
      if (path == OPROJ_PATH_LIBRARY) continue;
      query.forced = (oproj_path)path;
      oproj_status status = oproj_path_choose(&query, &choice);
      if (sm == 90)
        ck_assert_int_eq(status, OPROJ_OK);
      else
        EXPECT_FAIL(status, OPROJ_ERR_UNSUPPORTED, "SM90's");
    }
    query.forced = OPROJ_PATH_PORTABLE;
    EXPECT_OK(oproj_path_choose(&query, &choice));
    query.forced = OPROJ_PATH_REFERENCE;
    EXPECT_FAIL(oproj_path_choose(&query, &choice), OPROJ_ERR_UNSUPPORTED, "a GPU was chosen");
    query.forced = OPROJ_PATH_LIBRARY;
    query.tokens = 8192;
    oproj_status status = oproj_path_choose(&query, &choice);
    if (library)
      ck_assert_int_eq(status, OPROJ_OK);
    else
      EXPECT_FAIL(status, OPROJ_ERR_UNSUPPORTED, "cuBLASLt has block-scaled FP8 on SM90 and SM100");
  }
}
END_TEST

/* The shares of released models on an H200, as the decode kernel deals them out. */
static const struct {
  int32_t hidden, groups;                                            /* held */
  int32_t blocks, tiles, split, out_rows, window, tokens, tokens_32; /* in blocks of 128, of 32 */
} shares[] = {{7168, 16, 128, 128, 1, 56, 4, 4, 4}, {7168, 8, 128, 64, 2, 56, 3, 8, 8},
              {7168, 4, 128, 32, 4, 56, 3, 16, 8},  {7168, 2, 128, 16, 8, 56, 2, 16, 8},
              {7168, 1, 128, 8, 16, 56, 2, 32, 16}, {4096, 8, 128, 64, 2, 32, 3, 8, 8},
              {4096, 4, 128, 32, 4, 32, 3, 16, 8},  {4096, 2, 128, 16, 8, 32, 2, 16, 8},
              {4096, 1, 128, 8, 16, 32, 2, 32, 16}, {5120, 8, 128, 64, 2, 40, 3, 8, 8},
              {5120, 1, 128, 8, 16, 40, 2, 32, 16}};

START_TEST(decode_shares) {
  for (size_t i = 0; i < sizeof shares / sizeof shares[0]; i++) {
    oproj_dims dims = {shares[i].hidden, 128, 512, 64, 16, 1024, 128};
    oproj_kernels_decode found;
    ck_assert_ptr_null(oproj_kernels_decode_shape(&dims, shares[i].groups, 132, &found));
    ck_assert_int_eq(found.blocks, shares[i].blocks);
    ck_assert_int_eq(found.tiles, shares[i].tiles);
    ck_assert_int_eq(found.split, shares[i].split);
    ck_assert_int_eq(1 << found.log2_split, found.split);
    ck_assert_int_eq(found.out_rows, shares[i].out_rows);
    ck_assert_int_eq(found.window, shares[i].window);
    ck_assert_int_eq(found.tokens, shares[i].tokens);
    dims.quant_block = 32;
    ck_assert_ptr_null(oproj_kernels_decode_shape(&dims, shares[i].groups, 132, &found));
    ck_assert_int_eq(found.tokens, shares[i].tokens_32);
  }
}
END_TEST

/* Whatever it deals out covers all rows and all of K, with no more blocks than there are. */
START_TEST(decode_covers_everything) {
  for (int32_t resident = 1; resident <= 160; resident++)
    for (int32_t groups = 1; groups <= 16; groups++)
      for (int32_t hidden = 8; hidden <= 8192; hidden += 1016) {
        oproj_dims dims = {hidden, 64, 512, 64, 16, 512, 32};
        oproj_kernels_decode s;
        if (oproj_kernels_decode_shape(&dims, groups, resident, &s)) {
          ck_assert_int_eq(s.blocks, 0);
          continue;
        }
        ck_assert_int_le(s.blocks, resident);
        ck_assert_int_le(s.tiles * s.split, s.blocks);
        ck_assert_int_eq(s.tiles * 128, groups * 512);
        ck_assert_int_eq(4 * 512 % (s.split * 256), 0);
        ck_assert_int_ge(s.blocks * s.out_rows, hidden);
        ck_assert_int_eq(s.out_rows % 8, 0);
        ck_assert_int_le(s.out_rows, 64);
      }
}
END_TEST

START_TEST(decode_refusals) {
  oproj_kernels_decode found;
#define REFUSED(change, groups, resident, words)                                              \
  do {                                                                                        \
    oproj_dims dims = {7168, 128, 512, 64, 16, 1024, 128};                                    \
    change;                                                                                   \
    const char *why = oproj_kernels_decode_shape(&dims, groups, resident, &found);            \
    ck_assert_msg(why &&strstr(why, words), "%s does not say %s", why ? why : "NULL", words); \
  } while (0)
  REFUSED(dims.head_dim = 256, 16, 132, "448 + 64");
  REFUSED(dims.lora_rank = 1000, 16, 132, "o_lora_rank");
  REFUSED(dims.lora_rank = 128, 1, 132, "512 columns");
  REFUSED(dims.hidden = 7164, 16, 132, "hidden");
  REFUSED((void)0, 16, 127, "WO_A has more rows");
  REFUSED(dims.hidden = 16384, 16, 132, "WO_B has more rows");
#undef REFUSED
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
  tcase_add_test(tc, decode_shares);
  tcase_add_test(tc, decode_covers_everything);
  tcase_add_test(tc, decode_refusals);
  tcase_add_test(tc, choice_by_capability);
  tcase_add_test(tc, choice_by_layer);
  tcase_add_test(tc, forced_paths);
  tcase_add_test(tc, forced_by_capability);
  tcase_add_test(tc, bad_queries);
  tcase_add_test(tc, backends_say_why_not);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
