/* test_golden.c - the reference backend against vectors made by other people's GPU kernels
 * (tests/data/golden/README.md): codes and scales byte for byte, z and y to within
 * bf16 rounding. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/num.h"
#include "oproj/safetensors.h"
#include "support/data.h"
#include "support/expect.h"

enum { TOKENS = 5, GROUPS = 2, COLS = 4096, RANK = 256, HIDDEN = 512, ALIGNED = 8 };

static const oproj_dims dims = {HIDDEN, 16, 512, 64, GROUPS, RANK, 128};

static oproj_comm *comm;
static oproj_ctx *ctx;

static void setup(void) {
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = TOKENS;
  EXPECT_OK(oproj_comm_self(&comm));
  EXPECT_OK(oproj_ctx_create(&ctx, comm, &dims, &config));
}

/* What a test loads or makes lives until its end. */
static void *kept[64];
static int kept_count;

static void *keep(void *memory) {
  ck_assert(memory && kept_count < 64);
  return kept[kept_count++] = memory;
}

static void teardown(void) {
  while (kept_count > 0) free(kept[--kept_count]);
  oproj_ctx_destroy(ctx);
  oproj_comm_destroy(comm);
}

static void *load(const char *file_name, const char *tensor_name, int64_t bytes) {
  char path[1024];
  oproj_tensors_file *file;
  snprintf(path, sizeof path, "%s/golden/%s.safetensors", OPROJ_TEST_DATA, file_name);
  EXPECT_OK(oproj_tensors_open(&file, path));
  const oproj_tensor *tensor = oproj_tensors_find(file, tensor_name);
  ck_assert_msg(tensor != NULL, "%s has no %s", path, tensor_name);
  ck_assert_int_eq(tensor->bytes, bytes);
  void *data = keep(malloc((size_t)bytes));
  EXPECT_OK(oproj_tensors_read(file, tensor, 0, bytes, data));
  oproj_tensors_close(file);
  return data;
}

static void check_bytes(const char *file, const char *tensor, const void *got, size_t bytes) {
  uint8_t *want = load(file, tensor, (int64_t)bytes);
  for (size_t i = 0; i < bytes; i++)
    ck_assert_msg(((const uint8_t *)got)[i] == want[i], "%s of %s: byte %zu is %02x, wanted %02x",
                  tensor, file, i, ((const uint8_t *)got)[i], want[i]);
}

/* The rows that the large positions use stand alone in their file: positions become row numbers. */
static oproj_io golden_io(const char *file) {
  static const int64_t row_numbers[TOKENS] = {0, 1, 2, 3, 4};
  int whole_table = strcmp(file, "edges") == 0;
  int64_t rows = whole_table ? 1024 : TOKENS;
  return (oproj_io){
      .tokens = TOKENS,
      .attn_out = load(file, "o", TOKENS * 16 * 512 * 2),
      .positions = whole_table ? load(file, "positions", TOKENS * 8) : row_numbers,
      .cos_sin = load(file, whole_table ? "cos_sin_cache" : "cos_sin_rows", rows * 64 * 4),
      .token_stride = 16 * 512,
      .head_stride = 512,
      .cos_sin_rows = rows,
      .cos_sin_width = 64};
}

static const char *const files[] = {"edges", "largepos_full"};

START_TEST(codes_and_scales) {
  const char *file = files[_i];
  oproj_io io = golden_io(file);
  uint8_t *codes = keep(malloc(GROUPS * TOKENS * COLS));
  uint8_t *scales = keep(malloc(GROUPS * 32 * ALIGNED * 4));
  memset(scales, 0xAA, GROUPS * 32 * ALIGNED * 4);
  oproj_quant out = {codes, scales, OPROJ_SCALE_F32, GROUPS, TOKENS, COLS};
  EXPECT_OK(oproj_input_quantize(ctx, &io, &out, NULL));
  check_bytes(file, "o_fp8_gtd", codes, GROUPS * TOKENS * COLS);
  check_bytes(file, "o_scale_f32_storage", scales, GROUPS * 32 * ALIGNED * 4);

  memset(scales, 0xAA, GROUPS * 8 * ALIGNED * 4);
  out.layout = OPROJ_SCALE_UE8M0_PACKED;
  EXPECT_OK(oproj_input_quantize(ctx, &io, &out, NULL));
  check_bytes(file, "o_fp8_gtd", codes, GROUPS * TOKENS * COLS);
  check_bytes(file, "o_scale_ue8m0_storage", scales, GROUPS * 8 * ALIGNED * 4);
}
END_TEST

START_TEST(rotated_bf16) {
  const char *file = files[_i];
  oproj_io io = golden_io(file);
  uint16_t *x = keep(malloc(GROUPS * TOKENS * COLS * sizeof *x));
  EXPECT_OK(oproj_input_rotate(ctx, &io, x, NULL));
  check_bytes(file, "o_rot_bf16_gtd", x, GROUPS * TOKENS * COLS * sizeof *x);
}
END_TEST

/* Weight codes as the vectors' README defines them. */
static uint8_t *weight_codes(uint64_t seed, int64_t count) {
  uint8_t *codes = keep(malloc((size_t)count));
  for (int64_t i = 0; i < count; i++) {
    uint64_t m = (seed + (uint64_t)i + 1) * UINT64_C(0x9E3779B97F4A7C15);
    m = (m ^ m >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    m = (m ^ m >> 27) * UINT64_C(0x94D049BB133111EB);
    m ^= m >> 31;
    codes[i] = (uint8_t)((m >> 5 & 1) << 7 | (4 + (m >> 3 & 3)) << 3 | (m & 7));
  }
  return codes;
}

/* Values that come from tensor cores: nearly all within one bf16 unit of ours; sums near zero,
 * whose own unit is tiny, within a thousandth of the typical size. */
static void check_near(const char *name, const uint16_t *got, const uint16_t *want,
                       const double *exact, int64_t count) {
  double square = 0.0;
  for (int64_t i = 0; i < count; i++) square += exact[i] * exact[i];
  double typical = sqrt(square / (double)count);
  int64_t within = 0;
  for (int64_t i = 0; i < count; i++) {
    double a = oproj_bf16_to_f32(got[i]), b = oproj_bf16_to_f32(want[i]);
    double unit = ldexp(1.0, ilogb(fmax(fabs(a), fabs(b))) - 7), off = fabs(a - b);
    within += off <= unit;
    ck_assert_msg(off <= unit + typical / 1024.0, "%s[%lld] is %g, wanted %g", name, (long long)i,
                  a, b);
  }
  ck_assert_msg(within >= count * 98 / 100, "%s: only %lld of %lld within one unit", name,
                (long long)within, (long long)count);
  ck_assert_double_le(data_error(got, exact, count), 1.7e-3);
}

START_TEST(whole_layer) {
  const char *file = files[1];
  oproj_io io = golden_io(file);
  oproj_matrix wo_a = {OPROJ_DTYPE_E4M3,
                       GROUPS * RANK,
                       COLS,
                       weight_codes(1000, GROUPS * RANK * COLS),
                       load(file, "wo_a_scale", 2 * 2 * 32 * 4),
                       128};
  oproj_matrix wo_b = {OPROJ_DTYPE_E4M3,
                       HIDDEN,
                       GROUPS * RANK,
                       load(file, "wo_b", HIDDEN * GROUPS * RANK),
                       load(file, "wo_b_scale", 64),
                       128};
  uint8_t *same = weight_codes(2000, HIDDEN * GROUPS * RANK);
  ck_assert_mem_eq(same, wo_b.data, HIDDEN * GROUPS * RANK);

  oproj_layer *layer;
  EXPECT_OK(oproj_layer_create(&layer, ctx, &wo_a, &wo_b));
  uint16_t z[TOKENS * GROUPS * RANK], y[TOKENS * HIDDEN];
  EXPECT_OK(oproj_group_forward(layer, &io, z, NULL));
  check_near("z", z, load(file, "z", sizeof z), load(file, "z_ref_f64", TOKENS * GROUPS * RANK * 8),
             TOKENS * GROUPS * RANK);

  /* From the recorded z on, so that its last bits are not ours. */
  uint16_t *golden_z = load(file, "z", sizeof z);
  uint8_t codes[TOKENS * GROUPS * RANK];
  float scales[4 * ALIGNED];
  oproj_quant zq = {codes, scales, OPROJ_SCALE_F32, 1, TOKENS, GROUPS * RANK};
  EXPECT_OK(oproj_z_quantize(ctx, TOKENS, golden_z, &zq, NULL));
  check_bytes(file, "zq", codes, sizeof codes);
  check_bytes(file, "zs_storage", scales, sizeof scales);
  EXPECT_OK(oproj_out_project(layer, &zq, y, NULL));
  check_near("y", y, load(file, "y", sizeof y), load(file, "y_ref_f64", TOKENS * HIDDEN * 8),
             TOKENS * HIDDEN);
  oproj_layer_destroy(layer);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("golden");
  TCase *tc = tcase_create("golden");
  tcase_add_checked_fixture(tc, setup, teardown);
  tcase_add_loop_test(tc, codes_and_scales, 0, 2);
  tcase_add_loop_test(tc, rotated_bf16, 0, 2);
  tcase_add_test(tc, whole_layer);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
