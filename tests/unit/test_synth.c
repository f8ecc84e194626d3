/* test_synth.c - made-up checkpoints load under every name and scale dtype, are what the released
 * models are, and keep the promise of `exact`. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/num.h"
#include "oproj/checkpoint.h"
#include "oproj/safetensors.h"
#include "support/expect.h"
#include "support/files.h"
#include "weights/weights.h"

static char *dir;
static oproj_checkpoint *checkpoint;

static void setup(void) {
  dir = files_make_dir();
  checkpoint = NULL;
}

static void teardown(void) {
  oproj_checkpoint_close(checkpoint);
  files_remove(dir);
}

static void make(const oproj_synth *synth, const char *name) {
  oproj_checkpoint_close(checkpoint);
  EXPECT_OK(oproj_checkpoint_synth(synth, files_path(dir, name), NULL, NULL));
  EXPECT_OK(oproj_checkpoint_open(&checkpoint, files_path(dir, name)));
}

static oproj_slices read_whole(int32_t layer) {
  oproj_slices slices;
  oproj_shard shard;
  EXPECT_OK(
      oproj_plan_shard(&oproj_checkpoint_model(checkpoint)->dims, OPROJ_SPLIT_EVEN, 1, 0, &shard));
  EXPECT_OK(oproj_checkpoint_read(checkpoint, layer, &shard, &slices));
  return slices;
}

static float element(const oproj_matrix *matrix, int64_t row, int64_t col) {
  float code = oproj_e4m3_to_f32(((const uint8_t *)matrix->data)[row * matrix->cols + col]);
  int64_t blocks = (matrix->cols + matrix->block - 1) / matrix->block;
  return code * matrix->scales[row / matrix->block * blocks + col / matrix->block];
}

/* ---- forms --------------------------------------------------------------------------------- */

START_TEST(every_name_and_scale_dtype) {
  static const char *const dtypes[] = {"F8_E8M0", "U8", "F32"};
  for (int names = 0; names < 2; names++)
    for (int scale = 0; scale < 3; scale++)
      for (int files = 1; files <= 4; files += 3) {
        char name[64];
        oproj_layer_info info;
        oproj_synth synth = OPROJ_SYNTH_INIT;
        synth.names = (oproj_tensor_names)names;
        synth.scale_dtype = (oproj_scale_dtype)scale;
        synth.files = files;
        snprintf(name, sizeof name, "%d-%d-%d", names, scale, files);
        make(&synth, name);
        const oproj_model *model = oproj_checkpoint_model(checkpoint);
        ck_assert_int_eq(model->layers, 3);
        ck_assert_int_eq(model->draft_layers, 1);
        ck_assert_int_eq(files_count(files_path(dir, name)), files == 1 ? 2 : 6);
        for (int32_t layer = 0; layer < 4; layer++) {
          EXPECT_OK(oproj_checkpoint_layer(checkpoint, layer, &info));
          ck_assert_int_eq(info.compressed, layer == 1 || layer == 2);
          ck_assert_str_eq(info.wo_a_scale_dtype, dtypes[scale]);
          ck_assert_str_eq(info.wo_b_scale_dtype, dtypes[scale]);
        }
        ck_assert_str_eq(info.name, "mtp.0");
        ck_assert_str_eq(info.wo_a_tensor, names ? "model.layers.3.self_attn.o_a_proj.weight"
                                                 : "mtp.0.attn.wo_a.weight");
        oproj_slices slices = read_whole(3);
        for (int64_t i = 0; i < slices.wo_a.rows / 128 * slices.wo_a.cols / 128; i++)
          ck_assert_int_eq(oproj_ue8m0_exact(slices.wo_a.scales[i]) < 0, scale == 2);
        oproj_slices_free(&slices);
      }
}
END_TEST

static const struct {
  const char *model;
  oproj_dims dims;
  const char *type;
  int32_t layers;
  int32_t first, even, odd, late; /* ratios of layers 0 and 1, and of those behind them; V4.1's even
                                     and odd ones are 2 up to layer 19, then `late` */
} released[] = {
    {"v4-flash", {4096, 64, 512, 64, 8, 1024, 128}, "deepseek_v4", 43, 0, 4, 128, 0},
    {"v4-pro", {7168, 128, 512, 64, 16, 1024, 128}, "deepseek_v4", 61, 128, 4, 128, 0},
    {"v4.1-flash", {5120, 64, 512, 64, 8, 1024, 32}, "deepseek_v41", 40, 0, 2, 2, 1},
};

/* Looks at config.json, which is written first, and stops before gigabytes follow. */
static int look_at_config(void *user, int64_t done, int64_t total) {
  oproj_weights_config *config = user;
  char name[64];
  snprintf(name, sizeof name, "made.tmp-%ld/config.json", (long)getpid());
  EXPECT_OK(oproj_weights_config_read(files_path(dir, name), config));
  ck_assert_int_lt(done, total);
  return 1;
}

START_TEST(released_ratios) {
  oproj_synth synth = OPROJ_SYNTH_INIT;
  oproj_weights_config config;
  synth.model = released[_i].model;
  EXPECT_FAIL(oproj_checkpoint_synth(&synth, files_path(dir, "made"), look_at_config, &config),
              OPROJ_ERR_INVALID, "stopped");
  ck_assert_int_eq(config.model.layers, released[_i].layers);
  for (int i = 0; i < config.model.layers; i++) {
    int32_t wanted = i < 2 ? released[_i].first : i % 2 == 0 ? released[_i].even : released[_i].odd;
    if (released[_i].late && i >= 20) wanted = released[_i].late;
    ck_assert_int_eq(config.compress_ratio[i], wanted);
  }
  oproj_weights_config_free(&config);
}
END_TEST

/* Dimensions and shapes, on one layer of each. */
START_TEST(released_models) {
  oproj_synth synth = OPROJ_SYNTH_INIT;
  oproj_layer_info info;
  synth.model = released[_i].model;
  synth.layers = 1;
  synth.draft_layers = 0;
  make(&synth, "made");
  const oproj_model *model = oproj_checkpoint_model(checkpoint);
  ck_assert_mem_eq(&model->dims, &released[_i].dims, sizeof model->dims);
  ck_assert_str_eq(model->model_type, released[_i].type);
  ck_assert_int_eq(model->max_position, 1048576);
  ck_assert_double_eq(model->plain.theta, 10000);
  ck_assert_double_eq(model->plain.factor, 1);
  ck_assert_double_eq(model->compressed.theta, 160000);
  ck_assert_double_eq(model->compressed.factor, 16);
  ck_assert_int_eq(model->compressed.original_max_position, 65536);
  EXPECT_OK(oproj_checkpoint_layer(checkpoint, 0, &info));
  ck_assert_int_eq(info.compress_ratio, released[_i].first);
}
END_TEST

static int stop_now(void *user, int64_t done, int64_t total) {
  *(int64_t *)user = total;
  return done > 0;
}

START_TEST(stopped_leaves_nothing) {
  oproj_synth synth = OPROJ_SYNTH_INIT;
  int64_t total = 0;
  EXPECT_FAIL(oproj_checkpoint_synth(&synth, files_path(dir, "made"), stop_now, &total),
              OPROJ_ERR_INVALID, "stopped by the caller");
  ck_assert_int_gt(total, 4 * (1024 * 2048 + 512 * 1024));
  ck_assert_int_eq(files_count(dir), 0);
}
END_TEST

START_TEST(refusals) {
  oproj_synth synth = OPROJ_SYNTH_INIT;
  const char *path = files_path(dir, "made");
  EXPECT_FAIL(oproj_checkpoint_synth(&synth, dir, NULL, NULL), OPROJ_ERR_INVALID, "exists");
  EXPECT_FAIL(oproj_checkpoint_synth(&synth, "", NULL, NULL), OPROJ_ERR_INVALID, "empty");
  EXPECT_FAIL(oproj_checkpoint_synth(&synth, files_path(dir, "no/made"), NULL, NULL), OPROJ_ERR_IO,
              "cannot be made");
  synth.model = "v5";
  EXPECT_FAIL(oproj_checkpoint_synth(&synth, path, NULL, NULL), OPROJ_ERR_INVALID, "\"v5\"");
  synth.model = "tiny";
  synth.layers = 0;
  EXPECT_FAIL(oproj_checkpoint_synth(&synth, path, NULL, NULL), OPROJ_ERR_INVALID, "0 layers");
  synth.layers = -1;
  synth.draft_layers = 65;
  EXPECT_FAIL(oproj_checkpoint_synth(&synth, path, NULL, NULL), OPROJ_ERR_INVALID, "65 draft");
  synth.draft_layers = -1;
  synth.files = 5;
  EXPECT_FAIL(oproj_checkpoint_synth(&synth, path, NULL, NULL), OPROJ_ERR_INVALID, "5 files");
  ck_assert_int_eq(files_count(dir), 0);
}
END_TEST

/* ---- values -------------------------------------------------------------------------------- */

START_TEST(values_depend_on_place_alone) {
  oproj_synth synth = OPROJ_SYNTH_INIT;
  synth.seed = 7;
  make(&synth, "one");
  oproj_slices one = read_whole(2);
  synth.files = 2;
  synth.draft_layers = 2;
  synth.names = OPROJ_NAMES_HF;
  make(&synth, "two");
  oproj_slices two = read_whole(2), other = read_whole(1);
  size_t bytes = (size_t)(one.wo_a.rows * one.wo_a.cols);
  ck_assert_mem_eq(one.wo_a.data, two.wo_a.data, bytes);
  ck_assert_mem_eq(one.wo_b.scales, two.wo_b.scales, 4 * 8 * sizeof(float));
  ck_assert_mem_ne(one.wo_a.data, other.wo_a.data, bytes);
  oproj_slices_free(&other);
  oproj_slices_free(&two);
  synth.seed = 8;
  make(&synth, "three");
  two = read_whole(2);
  ck_assert_mem_ne(one.wo_a.data, two.wo_a.data, bytes);
  oproj_slices_free(&one);
  oproj_slices_free(&two);
}
END_TEST

/* Rows made alone are the rows made together. */
START_TEST(rows_in_any_order) {
  const oproj_dims dims = {512, 16, 512, 64, 4, 256, 128};
  for (int exact = 0; exact < 2; exact++) {
    oproj_weights_fill fill = {5, OPROJ_WEIGHTS_B, &dims, exact, OPROJ_SCALE_DTYPE_U8};
    uint8_t *all = malloc(512 * 1024), row[1024];
    oproj_weights_fill_codes(&fill, 0, 512, all);
    oproj_weights_fill_codes(&fill, 77, 78, row);
    ck_assert_mem_eq(all + 77 * 1024, row, 1024);
    free(all);
  }
}
END_TEST

/* Sums of squares of a row near 1, no NaN, both signs. */
START_TEST(random_is_of_order_one) {
  oproj_synth synth = OPROJ_SYNTH_INIT;
  make(&synth, "made");
  oproj_slices slices = read_whole(0);
  const oproj_matrix *both[] = {&slices.wo_a, &slices.wo_b};
  for (int m = 0; m < 2; m++) {
    double squares = 0, sum = 0;
    for (int64_t row = 0; row < both[m]->rows; row++)
      for (int64_t col = 0; col < both[m]->cols; col++) {
        double value = element(both[m], row, col);
        ck_assert(isfinite(value));
        squares += value * value;
        sum += value;
      }
    double length = sqrt(squares / (double)both[m]->rows);
    ck_assert_msg(length > 0.5 && length < 3, "rows of length %g", length);
    ck_assert(fabs(sum) < 6 * sqrt(squares));
  }
  oproj_slices_free(&slices);
}
END_TEST

START_TEST(input_is_normal_or_small_integers) {
  const oproj_dims dims = {512, 16, 512, 64, 4, 256, 128};
  enum { TOKENS = 4, COUNT = TOKENS * 16 * 512 };
  static uint16_t all[COUNT], part[TOKENS * 4 * 512];
  double sum = 0, squares = 0;
  oproj_synth_input(&dims, 3, 0, TOKENS, 0, 16, all);
  oproj_synth_input(&dims, 3, 0, TOKENS, 4, 8, part);
  for (int token = 0; token < TOKENS; token++)
    ck_assert_mem_eq(part + token * 4 * 512, all + (token * 16 + 4) * 512, 4 * 512 * 2);
  for (int i = 0; i < COUNT; i++) {
    double value = oproj_bf16_to_f32(all[i]);
    sum += value;
    squares += value * value;
  }
  ck_assert(fabs(sum / COUNT) < 0.03 && fabs(squares / COUNT - 1) < 0.03);
  oproj_synth_input(&dims, 3, 1, TOKENS, 0, 16, all);
  int seen[5] = {0};
  for (int i = 0; i < COUNT; i++) {
    float value = oproj_bf16_to_f32(all[i]);
    ck_assert(value == truncf(value) && fabsf(value) <= 2);
    seen[(int)value + 2]++;
  }
  for (int i = 0; i < 5; i++) ck_assert_int_gt(seen[i], COUNT / 6);
}
END_TEST

/* ---- exact --------------------------------------------------------------------------------- */

static void expect_unit_rows(const oproj_matrix *matrix, int entries, int64_t stratum) {
  int other_scales = 0;
  for (int64_t row = 0; row < matrix->rows; row++) {
    int found = 0;
    int64_t last = -1;
    for (int64_t col = 0; col < matrix->cols; col++) {
      float value = element(matrix, row, col);
      if (value == 0) continue;
      ck_assert(fabsf(value) == 1);
      ck_assert_int_gt(col / stratum, last);
      last = col / stratum;
      found++;
      float code = oproj_e4m3_to_f32(((const uint8_t *)matrix->data)[row * matrix->cols + col]);
      other_scales += fabsf(code) != 1;
    }
    ck_assert_int_eq(found, entries);
  }
  ck_assert_int_gt(other_scales, matrix->rows); /* scales that are not 1 are common */
}

START_TEST(exact_rows) {
  oproj_synth synth = OPROJ_SYNTH_INIT;
  synth.exact = 1;
  for (int f32 = 0; f32 < 2; f32++) {
    synth.scale_dtype = f32 ? OPROJ_SCALE_DTYPE_F32 : OPROJ_SCALE_DTYPE_E8M0;
    make(&synth, f32 ? "f32" : "e8m0");
    ck_assert_int_ne(oproj_checkpoint_model(checkpoint)->exact, 0);
    oproj_slices slices = read_whole(1);
    expect_unit_rows(&slices.wo_a, 8, 2048 / 8);   /* two per head of 512 */
    expect_unit_rows(&slices.wo_b, 16, 1024 / 16); /* four per group of 256 */
    for (int64_t i = 0; i < 8 * 16; i++)
      ck_assert(slices.wo_a.scales[i] >= 0.125f && slices.wo_a.scales[i] <= 8 &&
                oproj_ue8m0_exact(slices.wo_a.scales[i]) >= 0);
    oproj_slices_free(&slices);
  }
}
END_TEST

static int is_bf16(double value) {
  return value == oproj_bf16_to_f32(oproj_bf16_from_f32((float)value));
}

/* Whether quantising the block as a layer does gives every value back. */
static int survives(const double *block, int count) {
  float amax = 0;
  for (int i = 0; i < count; i++) amax = oproj_quant_amax(amax, (float)block[i]);
  uint8_t exponent = oproj_quant_exponent(amax);
  for (int i = 0; i < count; i++)
    if (oproj_e4m3_to_f32(oproj_quant_code((float)block[i], exponent)) *
            oproj_ue8m0_to_f32(exponent) !=
        block[i])
      return 0;
  return 1;
}

/* The claim itself, for tokens at position 0: z, its quantised form, every group's partial of y and
 * every running sum over groups are exact. */
START_TEST(exact_claim) {
  enum { TOKENS = 3, HEADS = 16, D = 2048, R = 256, Z = 1024, N = 512, GROUPS = 4 };
  static uint16_t input[TOKENS * HEADS * 512];
  static double z[Z], x[D];
  oproj_synth synth = OPROJ_SYNTH_INIT;
  synth.exact = 1;
  make(&synth, "made");
  const oproj_dims *dims = &oproj_checkpoint_model(checkpoint)->dims;
  oproj_synth_input(dims, 1, 1, TOKENS, 0, HEADS, input);
  oproj_slices slices = read_whole(2);
  int nonzero = 0;
  for (int token = 0; token < TOKENS; token++) {
    for (int group = 0; group < GROUPS; group++) {
      for (int i = 0; i < D; i++)
        x[i] = oproj_bf16_to_f32(input[token * HEADS * 512 + group * D + i]);
      for (int i = 0; i < D; i += 128) ck_assert(survives(x + i, 128));
      for (int row = group * R; row < (group + 1) * R; row++) {
        z[row] = 0;
        for (int i = 0; i < D; i++) z[row] += x[i] * element(&slices.wo_a, row, i);
        ck_assert(fabs(z[row]) <= 16 && is_bf16(z[row]));
      }
    }
    for (int i = 0; i < Z; i += 128) ck_assert(survives(z + i, 128));
    for (int row = 0; row < N; row++) {
      double y = 0;
      for (int group = 0; group < GROUPS; group++) {
        double partial = 0;
        for (int i = group * R; i < (group + 1) * R; i++)
          partial += z[i] * element(&slices.wo_b, row, i);
        y += partial;
        ck_assert(is_bf16(partial) && is_bf16(y) && fabs(y) <= 256);
        nonzero += partial != 0;
      }
    }
  }
  ck_assert_int_gt(nonzero, TOKENS * N * GROUPS * 3 / 4); /* a lost group shows */
  oproj_slices_free(&slices);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("synth");
  TCase *cases = tcase_create("all");
  tcase_add_checked_fixture(cases, setup, teardown);
  tcase_set_timeout(cases, 60);
  tcase_add_test(cases, every_name_and_scale_dtype);
  tcase_add_loop_test(cases, released_ratios, 0, sizeof released / sizeof released[0]);
  tcase_add_loop_test(cases, released_models, 0, sizeof released / sizeof released[0]);
  tcase_add_test(cases, stopped_leaves_nothing);
  tcase_add_test(cases, refusals);
  tcase_add_test(cases, values_depend_on_place_alone);
  tcase_add_test(cases, rows_in_any_order);
  tcase_add_test(cases, random_is_of_order_one);
  tcase_add_test(cases, input_is_normal_or_small_integers);
  tcase_add_test(cases, exact_rows);
  tcase_add_test(cases, exact_claim);
  suite_add_tcase(suite, cases);
  return run_suite(suite);
}
