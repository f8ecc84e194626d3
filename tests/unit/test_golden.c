/* test_golden.c - a backend against vectors made by other people's GPU kernels
 * (tests/data/golden/README.md): codes and scales byte for byte, z and y to within
 * bf16 rounding.  Started as `test_golden ref` or `test_golden cuda`; the latter goes through every
 * path that serves the vectors' shape. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/num.h"
#include "oproj/safetensors.h"
#include "support/data.h"
#include "support/expect.h"

enum { TOKENS = 5, GROUPS = 2, COLS = 4096, RANK = 256, HIDDEN = 512, ALIGNED = 8, SKIPPED = 77 };

static const oproj_dims dims = {HIDDEN, 16, 512, 64, GROUPS, RANK, 128};

static const char *backend;
static oproj_comm *comm;
static oproj_ctx *ctx;

static void open_ctx(oproj_path path) {
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = backend;
  config.max_tokens = TOKENS;
  config.path = path;
  EXPECT_OK(oproj_ctx_create(&ctx, comm, &dims, &config));
}

static void setup(void) {
  EXPECT_OK(oproj_comm_self(&comm));
  open_ctx(OPROJ_PATH_AUTO);
}

/* What a test loads or makes lives as long as its context. */
static void *kept[64], *buffers[32];
static int kept_count, buffer_count;

static void *keep(void *memory) {
  ck_assert(memory && kept_count < 64);
  return kept[kept_count++] = memory;
}

static void close_ctx(void) {
  while (kept_count > 0) free(kept[--kept_count]);
  while (buffer_count > 0) oproj_buffer_destroy(ctx, buffers[--buffer_count]);
  oproj_ctx_destroy(ctx);
}

static void teardown(void) {
  close_ctx();
  oproj_comm_destroy(comm);
}

/* ---- memory of the backend ------------------------------------------------------------------ */

/* `bytes` of it, poisoned. */
static void *buffer(size_t bytes) {
  void *memory, *poison = keep(malloc(bytes));
  ck_assert_int_lt(buffer_count, 32);
  memset(poison, 0xAA, bytes);
  EXPECT_OK(oproj_buffer_create(ctx, bytes, &memory));
  EXPECT_OK(oproj_buffer_write(ctx, memory, poison, bytes, NULL));
  return buffers[buffer_count++] = memory;
}

static void *upload(const void *from, size_t bytes) {
  void *memory = buffer(bytes);
  EXPECT_OK(oproj_buffer_write(ctx, memory, from, bytes, NULL));
  return memory;
}

static void *download(const void *from, size_t bytes) {
  void *to = keep(malloc(bytes));
  EXPECT_OK(oproj_buffer_read(ctx, to, from, bytes, NULL));
  return to;
}

/* ---- vectors -------------------------------------------------------------------------------- */

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

static void check_bytes(const char *file, const char *tensor, const void *memory, size_t bytes) {
  uint8_t *want = load(file, tensor, (int64_t)bytes), *got = download(memory, bytes);
  for (size_t i = 0; i < bytes; i++)
    ck_assert_msg(got[i] == want[i], "%s of %s: byte %zu is %02x, wanted %02x", tensor, file, i,
                  got[i], want[i]);
}

/* The rows that the large positions use stand alone in their file: positions become row numbers. */
static oproj_io golden_io(const char *file) {
  static const int64_t row_numbers[TOKENS] = {0, 1, 2, 3, 4};
  int whole_table = strcmp(file, "edges") == 0;
  int64_t rows = whole_table ? 1024 : TOKENS, values = TOKENS * 16 * 512;
  const void *positions = whole_table ? load(file, "positions", TOKENS * 8) : row_numbers;
  const void *table = load(file, whole_table ? "cos_sin_cache" : "cos_sin_rows", rows * 64 * 4);
  return (oproj_io){.tokens = TOKENS,
                    .attn_out = upload(load(file, "o", values * 2), (size_t)values * 2),
                    .positions = upload(positions, TOKENS * 8),
                    .cos_sin = upload(table, (size_t)rows * 64 * 4),
                    .token_stride = 16 * 512,
                    .head_stride = 512,
                    .cos_sin_rows = rows,
                    .cos_sin_width = 64};
}

static const char *const files[] = {"edges", "largepos_full"};

START_TEST(codes_and_scales) {
  const char *file = files[_i];
  oproj_io io = golden_io(file);
  static const struct {
    oproj_scale_layout layout;
    const char *tensor;
    size_t scale_bytes;
  } cases[] = {{OPROJ_SCALE_F32, "o_scale_f32_storage", GROUPS * 32 * ALIGNED * 4},
               {OPROJ_SCALE_UE8M0_PACKED, "o_scale_ue8m0_storage", GROUPS * 8 * ALIGNED * 4}};
  for (int i = 0; i < 2; i++) {
    oproj_quant out = {.codes = buffer(GROUPS * TOKENS * COLS),
                       .scales = buffer(cases[i].scale_bytes),
                       .layout = cases[i].layout,
                       .groups = GROUPS,
                       .tokens = TOKENS,
                       .cols = COLS};
    EXPECT_OK(oproj_input_quantize(ctx, &io, &out, NULL));
    check_bytes(file, "o_fp8_gtd", out.codes, GROUPS * TOKENS * COLS);
    check_bytes(file, cases[i].tensor, out.scales, cases[i].scale_bytes);
  }
}
END_TEST

START_TEST(rotated_bf16) {
  const char *file = files[_i];
  oproj_io io = golden_io(file);
  uint16_t *x = buffer(GROUPS * TOKENS * COLS * sizeof *x);
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

/* Rounding to bf16 alone makes 1.65e-3; short sums of tensor cores may add to it. */
static double most_error;

/* Values that come from tensor cores: nearly all within one bf16 unit of ours; sums near zero,
 * whose own unit is tiny, within a thousandth of the typical size. */
static void check_near(const char *name, const void *memory, const uint16_t *want,
                       const double *exact, int64_t count) {
  const uint16_t *got = download(memory, (size_t)count * sizeof *got);
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
  ck_assert_double_le(data_error(got, exact, count), most_error);
}

static void check_layer(oproj_path path) {
  const char *file = files[1];
  oproj_path_choice choice;
  close_ctx();
  open_ctx(path);
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
  EXPECT_OK(oproj_layer_path(layer, TOKENS, &choice));
  ck_assert(path == OPROJ_PATH_AUTO || choice.path == path);
  most_error = choice.exact ? 1.7e-3 : 2e-3;
  uint16_t *z = buffer(TOKENS * GROUPS * RANK * 2), *y = buffer(TOKENS * HIDDEN * 2);
  EXPECT_OK(oproj_group_forward(layer, &io, z, NULL));
  const double *exact_z = load(file, "z_ref_f64", TOKENS * GROUPS * RANK * 8);
  const double *exact_y = load(file, "y_ref_f64", TOKENS * HIDDEN * 8);
  uint16_t *golden_z = load(file, "z", TOKENS * GROUPS * RANK * 2);
  check_near("z", z, golden_z, exact_z, TOKENS * GROUPS * RANK);

  /* From the recorded z on, so that its last bits are not ours. */
  oproj_quant zq = {.codes = buffer(TOKENS * GROUPS * RANK),
                    .scales = buffer(4 * ALIGNED * sizeof(float)),
                    .layout = OPROJ_SCALE_F32,
                    .groups = 1,
                    .tokens = TOKENS,
                    .cols = GROUPS * RANK};
  EXPECT_OK(oproj_z_quantize(ctx, TOKENS, upload(golden_z, TOKENS * GROUPS * RANK * 2), &zq, NULL));
  check_bytes(file, "zq", zq.codes, TOKENS * GROUPS * RANK);
  check_bytes(file, "zs_storage", zq.scales, 4 * ALIGNED * sizeof(float));
  EXPECT_OK(oproj_out_project(layer, &zq, y, NULL));
  check_near("y", y, load(file, "y", TOKENS * HIDDEN * 2), exact_y, TOKENS * HIDDEN);

  /* The chain in one call: codes of z may step where its last bits differ. */
  io.y = buffer(TOKENS * HIDDEN * 2);
  EXPECT_OK(oproj_forward(layer, &io, NULL));
  const uint16_t *chain = download(io.y, TOKENS * HIDDEN * 2);
  ck_assert_double_le(data_error(chain, exact_y, TOKENS * HIDDEN), choice.exact ? 2.5e-3 : 4e-3);
  oproj_layer_destroy(layer);
}

/* Whether this backend's device serves the vectors' shape on a path of SM90. */
static int serves(oproj_path path) {
  oproj_path_choice choice;
  oproj_path_query query = {.sm = oproj_device_capability(0),
                            .tokens = TOKENS,
                            .dims = dims,
                            .groups = GROUPS,
                            .wo_a = OPROJ_DTYPE_E4M3,
                            .wo_b = OPROJ_DTYPE_E4M3,
                            .forced = path};
  return oproj_path_choose(&query, &choice) == OPROJ_OK;
}

START_TEST(whole_layer) {
  static const oproj_path forced[] = {OPROJ_PATH_PORTABLE, OPROJ_PATH_GROUPED, OPROJ_PATH_FUSED};
  check_layer(OPROJ_PATH_AUTO);
  if (strcmp(backend, "cuda") != 0) return;
  for (int i = 0; i < 3; i++)
    if (forced[i] == OPROJ_PATH_PORTABLE || serves(forced[i])) check_layer(forced[i]);
}
END_TEST

int main(int argc, char **argv) {
  backend = argc == 2 ? argv[1] : "ref";
  const char *missing = oproj_backend_missing(backend), *required = getenv("OPROJ_REQUIRE_GPU");
  if (missing) {
    fprintf(stderr, "no backend %s: %s\n", backend, missing);
    return required && strcmp(required, "1") == 0 ? EXIT_FAILURE : SKIPPED;
  }
  Suite *suite = suite_create("golden");
  TCase *tc = tcase_create("golden");
  tcase_add_checked_fixture(tc, setup, teardown);
  tcase_add_loop_test(tc, codes_and_scales, 0, 2);
  tcase_add_loop_test(tc, rotated_bf16, 0, 2);
  tcase_add_test(tc, whole_layer);
  suite_add_tcase(suite, tc);
  return strcmp(backend, "cuda") == 0 ? run_unforked_suite(suite) : run_suite(suite);
}
