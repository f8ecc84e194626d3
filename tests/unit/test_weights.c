/* test_weights.c - hand-made checkpoints: which files and names are taken, what is refused, and
 * that a slice is exactly the rectangle of the file that it stands for. */
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "base/num.h"
#include "oproj/checkpoint.h"
#include "support/checkpoints.h"
#include "support/expect.h"

static char *dir;
static small_layer layers[SMALL_LAYERS];
static oproj_checkpoint *checkpoint;
static oproj_layer_info info;

static void setup(void) {
  dir = files_make_dir();
  checkpoint = NULL;
}

static void teardown(void) {
  oproj_checkpoint_close(checkpoint);
  files_remove(dir);
}

static void reopen(void) {
  oproj_checkpoint_close(checkpoint);
  EXPECT_OK(oproj_checkpoint_open(&checkpoint, dir));
}

static oproj_shard shard_of(oproj_split split, int size, int rank) {
  oproj_shard shard;
  EXPECT_OK(oproj_plan_shard(&oproj_checkpoint_model(checkpoint)->dims, split, size, rank, &shard));
  return shard;
}

static oproj_status read_all(int layer) {
  oproj_slices slices;
  oproj_shard shard = shard_of(OPROJ_SPLIT_EVEN, 1, 0);
  oproj_status status = oproj_checkpoint_read(checkpoint, layer, &shard, &slices);
  oproj_slices_free(&slices);
  return status;
}

/* One layer from the given tensors, under a config of the small model. */
static void write_tensors(const files_tensor *tensors, int count) {
  files_write_text(dir, "config.json", small_config);
  files_write_tensors(dir, "model.safetensors", tensors, count, 0);
  reopen();
}

/* ---- slices -------------------------------------------------------------------------------- */

static void expect_slice(const small_layer *layer, const oproj_shard *shard,
                         const oproj_slices *slices) {
  int z = shard->z_end - shard->z_begin, blocks = z / SMALL_BLOCK;
  const oproj_matrix *a = &slices->wo_a, *b = &slices->wo_b;
  ck_assert(a->dtype == OPROJ_DTYPE_E4M3 && a->rows == z && a->cols == SMALL_D && a->block == 128);
  ck_assert(b->dtype == OPROJ_DTYPE_E4M3 && b->rows == SMALL_HIDDEN && b->cols == z &&
            b->block == 128);
  ck_assert_mem_eq(a->data, layer->a + shard->z_begin * SMALL_D, (size_t)(z * SMALL_D));
  for (int row = 0; row < SMALL_HIDDEN; row++)
    ck_assert_mem_eq((const uint8_t *)b->data + row * z, layer->b + row * SMALL_Z + shard->z_begin,
                     (size_t)z);
  for (int i = 0; i < blocks; i++) {
    int at = shard->z_begin / SMALL_BLOCK + i;
    ck_assert_float_eq(a->scales[i], ldexpf(1, layer->a_scale[at] - 127));
    for (int row = 0; row < 2; row++)
      ck_assert_float_eq(b->scales[row * blocks + i],
                         ldexpf(1, layer->b_scale[row * 3 + at] - 127));
  }
}

START_TEST(slices_of_every_rank) {
  small_write(dir, layers);
  reopen();
  for (int layer = 0; layer < SMALL_LAYERS; layer++)
    for (int size = 1; size <= SMALL_GROUPS; size++)
      for (int rank = 0; rank < size; rank++) {
        oproj_slices slices;
        int64_t bytes;
        oproj_shard shard = shard_of(OPROJ_SPLIT_UNEVEN, size, rank);
        int z = shard.z_end - shard.z_begin;
        EXPECT_OK(oproj_checkpoint_read(checkpoint, layer, &shard, &slices));
        expect_slice(&layers[layer], &shard, &slices);
        oproj_slices_free(&slices);
        oproj_slices_free(&slices);
        EXPECT_OK(oproj_checkpoint_layer_bytes(checkpoint, layer, &shard, &bytes));
        ck_assert_int_eq(bytes, z * (SMALL_D + SMALL_HIDDEN) + z / SMALL_BLOCK * 3);
      }
}
END_TEST

START_TEST(layer_facts) {
  small_write(dir, layers);
  reopen();
  ck_assert_int_eq(oproj_checkpoint_split_size(checkpoint), 0);
  ck_assert_int_eq(oproj_checkpoint_split_kind(checkpoint), OPROJ_SPLIT_EVEN);
  ck_assert_int_eq(oproj_checkpoint_model(checkpoint)->draft_layers, 0);
  EXPECT_OK(oproj_checkpoint_layer(checkpoint, 1, &info));
  ck_assert_str_eq(info.name, "layers.1");
  ck_assert_int_eq(info.compress_ratio, 4);
  ck_assert_int_ne(info.compressed, 0);
  ck_assert_str_eq(info.wo_a_tensor, "layers.1.attn.wo_a.weight");
  ck_assert_str_eq(info.wo_b_scale_dtype, "F8_E8M0");
  EXPECT_FAIL(oproj_checkpoint_layer(checkpoint, 2, &info), OPROJ_ERR_INVALID, "layers 0 to 1");
  EXPECT_FAIL(oproj_checkpoint_layer(checkpoint, -1, &info), OPROJ_ERR_INVALID, "layer -1");
}
END_TEST

START_TEST(foreign_shards) {
  oproj_slices slices;
  int64_t bytes;
  small_write(dir, layers);
  reopen();
  oproj_shard shard = shard_of(OPROJ_SPLIT_EVEN, 3, 1);
  shard.z_begin += 1;
  EXPECT_FAIL(oproj_checkpoint_read(checkpoint, 0, &shard, &slices), OPROJ_ERR_INVALID,
              "z columns");
  EXPECT_FAIL(oproj_checkpoint_layer_bytes(checkpoint, 0, &shard, &bytes), OPROJ_ERR_INVALID,
              "z columns");
  shard = shard_of(OPROJ_SPLIT_EVEN, 3, 1);
  shard.rank = 3;
  EXPECT_FAIL(oproj_checkpoint_read(checkpoint, 0, &shard, &slices), OPROJ_ERR_INVALID, "rank 3");
}
END_TEST

/* ---- names --------------------------------------------------------------------------------- */

static const struct {
  const char *a, *b, *suffix, *label;
} forms[] = {
    {"layers.0.attn.wo_a", "layers.0.attn.wo_b", ".scale", "layers.0"},
    {"layers.1.attn.wo_a", "layers.1.attn.wo_b", ".weight_scale", "layers.1"},
    {"model.layers.1.self_attn.o_a_proj", "model.layers.1.self_attn.o_b_proj", ".weight_scale_inv",
     "layers.1"},
    {"model.layers.1.attn.wo_a", "model.layers.1.attn.wo_b", ".weight_scale_inv", "layers.1"},
    {"model.layers.1.attn.wo_a", "model.layers.1.attn.wo_b", ".weight_scale", "layers.1"},
    {"mtp.0.attn.wo_a", "mtp.0.attn.wo_b", ".scale", "mtp.0"},
    {"mtp.2.attn.wo_a", "mtp.2.attn.wo_b", ".scale", "mtp.2"},
    {"model.mtp.1.attn.wo_a", "model.mtp.1.attn.wo_b", ".weight_scale", "mtp.1"},
    {"layers.2.attn.wo_a", "layers.2.attn.wo_b", ".scale", "mtp.0"},
    {"model.layers.3.self_attn.o_a_proj", "model.layers.3.self_attn.o_b_proj", ".weight_scale_inv",
     "mtp.1"},
    {"model.layers.2.attn.wo_a", "model.layers.2.attn.wo_b", ".weight_scale", "mtp.0"},
};

START_TEST(every_form_of_names) {
  char names[SMALL_TENSORS][128];
  files_tensor tensors[SMALL_TENSORS];
  int draft = strncmp(forms[_i].label, "mtp.", 4) == 0 ? forms[_i].label[4] - '0' + 1 : 0;
  int layer = draft ? SMALL_LAYERS + draft - 1 : forms[_i].label[7] - '0';
  small_fill(&layers[0], 3);
  small_tensors(&layers[0], forms[_i].a, forms[_i].b, forms[_i].suffix, names, tensors);
  write_tensors(tensors, SMALL_TENSORS);
  ck_assert_int_eq(oproj_checkpoint_model(checkpoint)->draft_layers, draft);
  EXPECT_OK(oproj_checkpoint_layer(checkpoint, layer, &info));
  ck_assert_str_eq(info.name, forms[_i].label);
  ck_assert_str_eq(info.wo_a_tensor, names[0]);
  if (draft) ck_assert_int_eq(info.compressed, 0);
  EXPECT_OK(read_all(layer));
}
END_TEST

/* Two matches for one tensor: other forms, other suffixes, the same name in two files. */
START_TEST(doubles_are_refused) {
  char names[2 * SMALL_TENSORS][128];
  files_tensor tensors[2 * SMALL_TENSORS];
  small_fill(&layers[0], 1);
  small_tensors(&layers[0], "layers.0.attn.wo_a", "layers.0.attn.wo_b", ".scale", names, tensors);
  small_tensors(&layers[0], "model.layers.0.self_attn.o_a_proj",
                "model.layers.0.self_attn.o_b_proj", ".weight_scale_inv", names + 4, tensors + 4);
  write_tensors(tensors, 8);
  EXPECT_FAIL(oproj_checkpoint_layer(checkpoint, 0, &info), OPROJ_ERR_SHAPE, names[0]);
  ck_assert_ptr_nonnull(strstr(oproj_last_error(), names[4]));

  tensors[4] = tensors[1];
  tensors[4].name = "layers.0.attn.wo_a.weight_scale_inv";
  write_tensors(tensors, 5);
  EXPECT_FAIL(oproj_checkpoint_layer(checkpoint, 0, &info), OPROJ_ERR_SHAPE, "wo_a.scale");

  small_tensors(&layers[0], "mtp.0.attn.wo_a", "mtp.0.attn.wo_b", ".scale", names, tensors);
  small_tensors(&layers[0], "layers.2.attn.wo_a", "mtp.1.attn.wo_b", ".scale", names + 4,
                tensors + 4);
  write_tensors(tensors, 8);
  EXPECT_FAIL(oproj_checkpoint_layer(checkpoint, 2, &info), OPROJ_ERR_SHAPE, names[4]);

  files_write_tensors(dir, "model.safetensors", tensors, 4, 0);
  files_write_tensors(dir, "second.safetensors", tensors, 1, 0);
  reopen();
  EXPECT_FAIL(oproj_checkpoint_layer(checkpoint, 2, &info), OPROJ_ERR_SHAPE, "second.safetensors");
}
END_TEST

START_TEST(layers_beyond_config) {
  files_tensor tensor = {"layers.66.attn.wo_a.weight", "U8", 1, 1, "x"};
  files_write_text(dir, "config.json", small_config);
  files_write_tensors(dir, "model.safetensors", &tensor, 1, 0);
  EXPECT_FAIL(oproj_checkpoint_open(&checkpoint, dir), OPROJ_ERR_SHAPE, "layers.66.attn.wo_a");
  tensor.name = "layers.066.attn.wo_a.weight"; /* no name in use */
  files_write_tensors(dir, "model.safetensors", &tensor, 1, 0);
  EXPECT_OK(oproj_checkpoint_open(&checkpoint, dir));
}
END_TEST

/* ---- dtypes and shapes --------------------------------------------------------------------- */

START_TEST(tensor_refusals) {
  char names[SMALL_TENSORS][128];
  files_tensor good[SMALL_TENSORS], bad[SMALL_TENSORS];
  small_fill(&layers[0], 1);
  small_tensors(&layers[0], "layers.0.attn.wo_a", "layers.0.attn.wo_b", ".scale", names, good);

  write_tensors(good, 3);
  EXPECT_FAIL(read_all(0), OPROJ_ERR_IO, "layers.0.attn.wo_b.weight is F8_E4M3 and has no scale");
  write_tensors(good, 2);
  EXPECT_FAIL(read_all(0), OPROJ_ERR_SHAPE, "WO_B is missing: no tensor layers.0.attn.wo_b.weight");
  EXPECT_FAIL(read_all(1), OPROJ_ERR_SHAPE, "WO_A is missing: no tensor layers.1.attn.wo_a.weight");

  memcpy(bad, good, sizeof bad);
  bad[0].rows /= 2, bad[0].cols *= 2;
  write_tensors(bad, 4);
  EXPECT_FAIL(read_all(0), OPROJ_ERR_SHAPE, "is [192, 256]; config.json wants [384, 128]");

  memcpy(bad, good, sizeof bad);
  bad[3].rows = 1, bad[3].cols = 6;
  write_tensors(bad, 4);
  EXPECT_FAIL(read_all(0), OPROJ_ERR_SHAPE, "wo_b.scale is [1, 6]; config.json wants [2, 3]");

  memcpy(bad, good, sizeof bad);
  bad[0].dtype = "F8_E5M2";
  write_tensors(bad, 4);
  EXPECT_FAIL(read_all(0), OPROJ_ERR_SHAPE, "F8_E5M2; F8_E4M3 or BF16 is wanted");

  memcpy(bad, good, sizeof bad);
  bad[1].dtype = "I8";
  write_tensors(bad, 4);
  EXPECT_FAIL(read_all(0), OPROJ_ERR_SHAPE, "wo_a.scale is I8");

  memcpy(bad, good, sizeof bad);
  static uint16_t wide[SMALL_Z * SMALL_D];
  bad[0].dtype = "BF16", bad[0].data = wide;
  write_tensors(bad, 4);
  EXPECT_FAIL(read_all(0), OPROJ_ERR_IO, "is BF16, and yet there is a scale");
}
END_TEST

START_TEST(bf16_weight_beside_fp8) {
  char names[SMALL_TENSORS][128];
  files_tensor tensors[SMALL_TENSORS];
  static uint16_t wide[SMALL_Z * SMALL_D];
  oproj_slices slices;
  for (int i = 0; i < SMALL_Z * SMALL_D; i++) wide[i] = (uint16_t)i;
  small_fill(&layers[0], 1);
  small_tensors(&layers[0], "mtp.0.attn.wo_a", "mtp.0.attn.wo_b", ".scale", names, tensors);
  tensors[1] = (files_tensor){names[0], "BF16", SMALL_Z, SMALL_D, wide};
  write_tensors(tensors + 1, 3);
  EXPECT_OK(oproj_checkpoint_layer(checkpoint, 2, &info));
  ck_assert_int_eq(info.wo_a, OPROJ_DTYPE_BF16);
  ck_assert_int_eq(info.wo_b, OPROJ_DTYPE_E4M3);
  ck_assert_str_eq(info.wo_a_scale_dtype, "");
  oproj_shard shard = shard_of(OPROJ_SPLIT_EVEN, 3, 2);
  EXPECT_OK(oproj_checkpoint_read(checkpoint, 2, &shard, &slices));
  ck_assert_mem_eq(slices.wo_a.data, wide + 256 * SMALL_D, 128 * SMALL_D * 2);
  ck_assert_ptr_null(slices.wo_a.scales);
  ck_assert_int_eq(slices.wo_a.block, 0);
  oproj_slices_free(&slices);
}
END_TEST

/* Scales of every dtype, exactly as stored; NaN and infinity by name and place. */
START_TEST(scale_dtypes) {
  char names[SMALL_TENSORS][128];
  files_tensor tensors[SMALL_TENSORS];
  float f32[] = {0.1f, -3.7e-20f, 0.0f};
  uint16_t bf16[] = {0x3F81, 0x0001, 0x8000};
  uint8_t e8m0[] = {0, 254, 127};
  oproj_slices slices;
  small_fill(&layers[0], 1);
  small_tensors(&layers[0], "layers.0.attn.wo_a", "layers.0.attn.wo_b", ".scale", names, tensors);
  const struct {
    const char *dtype;
    const void *data;
    float wanted[3];
  } kinds[] = {
      {"F32", f32, {0.1f, -3.7e-20f, 0.0f}},
      {"BF16", bf16, {oproj_bf16_to_f32(0x3F81), oproj_bf16_to_f32(1), -0.0f}},
      {"F8_E8M0", e8m0, {0x1p-127f, 0x1p127f, 1.0f}},
      {"U8", e8m0, {0x1p-127f, 0x1p127f, 1.0f}},
  };
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    tensors[1].dtype = kinds[i].dtype;
    tensors[1].data = kinds[i].data;
    write_tensors(tensors, 4);
    EXPECT_OK(oproj_checkpoint_layer(checkpoint, 0, &info));
    ck_assert_str_eq(info.wo_a_scale_dtype, kinds[i].dtype);
    oproj_shard shard = shard_of(OPROJ_SPLIT_EVEN, 1, 0);
    EXPECT_OK(oproj_checkpoint_read(checkpoint, 0, &shard, &slices));
    ck_assert_mem_eq(slices.wo_a.scales, kinds[i].wanted, sizeof kinds[i].wanted);
    oproj_slices_free(&slices);
  }
  e8m0[2] = 255;
  write_tensors(tensors, 4);
  EXPECT_FAIL(read_all(0), OPROJ_ERR_IO,
              "safetensors: scale layers.0.attn.wo_a.scale: block [2, 0] is NaN");
  f32[1] = INFINITY;
  tensors[1].dtype = "F32", tensors[1].data = f32;
  write_tensors(tensors, 4);
  EXPECT_FAIL(read_all(0), OPROJ_ERR_IO, "wo_a.scale: block [1, 0] is infinite");
  oproj_shard shard = shard_of(OPROJ_SPLIT_EVEN, 1, 0);
  EXPECT_FAIL(oproj_checkpoint_check_scales(checkpoint, 0, &shard), OPROJ_ERR_IO,
              "wo_a.scale: block [1, 0] is infinite");
  /* Blocks are counted over the whole tensor, also in a slice. */
  shard = shard_of(OPROJ_SPLIT_EVEN, 3, 1);
  EXPECT_FAIL(oproj_checkpoint_read(checkpoint, 0, &shard, &slices), OPROJ_ERR_IO, "block [1, 0]");
  EXPECT_FAIL(oproj_checkpoint_check_scales(checkpoint, 0, &shard), OPROJ_ERR_IO, "block [1, 0]");
  shard = shard_of(OPROJ_SPLIT_EVEN, 3, 2);
  EXPECT_OK(oproj_checkpoint_read(checkpoint, 0, &shard, &slices));
  EXPECT_OK(oproj_checkpoint_check_scales(checkpoint, 0, &shard));
  oproj_slices_free(&slices);
}
END_TEST

/* A shard's own scales, before anything of it is loaded or written. */
START_TEST(scales_of_a_shard) {
  char names[SMALL_TENSORS][128], parts[64];
  files_tensor tensors[SMALL_TENSORS];
  uint8_t b_scale[] = {127, 127, 127, 127, 127, 255};
  small_fill(&layers[0], 1);
  small_tensors(&layers[0], "layers.0.attn.wo_a", "layers.0.attn.wo_b", ".scale", names, tensors);
  tensors[3].data = b_scale;
  write_tensors(tensors, 4);
  for (int rank = 0; rank < 3; rank++) {
    oproj_shard shard = shard_of(OPROJ_SPLIT_EVEN, 3, rank);
    oproj_status status = oproj_checkpoint_check_scales(checkpoint, 0, &shard);
    ck_assert_int_eq(status, rank < 2 ? OPROJ_OK : OPROJ_ERR_IO);
  }
  ck_assert_ptr_nonnull(strstr(oproj_last_error(), "wo_b.scale: block [1, 2] is NaN"));
  snprintf(parts, sizeof parts, "%s-parts", dir);
  EXPECT_FAIL(oproj_checkpoint_split(checkpoint, parts, OPROJ_SPLIT_EVEN, 3, NULL, NULL),
              OPROJ_ERR_IO, "wo_b.scale: block [1, 2] is NaN");
  ck_assert_int_ne(access(parts, F_OK), 0);

  oproj_shard shard = shard_of(OPROJ_SPLIT_EVEN, 3, 1);
  EXPECT_FAIL(oproj_checkpoint_check_scales(checkpoint, 1, &shard), OPROJ_ERR_SHAPE,
              "WO_A is missing");
  EXPECT_FAIL(oproj_checkpoint_check_scales(checkpoint, 2, &shard), OPROJ_ERR_INVALID, "layer 2");
  shard.z_begin += 1;
  EXPECT_FAIL(oproj_checkpoint_check_scales(checkpoint, 0, &shard), OPROJ_ERR_INVALID, "z columns");
}
END_TEST

/* ---- index --------------------------------------------------------------------------------- */

static void write_index(const char *map) {
  char text[2048];
  snprintf(text, sizeof text, "{\"weight_map\": {%s}}", map);
  files_write_text(dir, "model.safetensors.index.json", text);
}

#define LISTED(layer, file)                                                          \
  "\"layers." layer ".attn.wo_a.weight\": \"" file "\", \"layers." layer             \
  ".attn.wo_a.scale\": \"" file "\", \"layers." layer ".attn.wo_b.weight\": \"" file \
  "\", \"layers." layer ".attn.wo_b.scale\": \"" file "\""

START_TEST(index_rules) {
  small_write(dir, layers);
  /* Files without tensors of ours need not be there. */
  write_index(LISTED("0", "model.safetensors") ", " LISTED(
      "1", "model.safetensors") ", \"embed.weight\": \"absent.safetensors\"");
  reopen();
  EXPECT_OK(read_all(0));
  EXPECT_OK(read_all(1));

  oproj_checkpoint *none;
  write_index(LISTED("0", "model.safetensors"));
  EXPECT_FAIL(oproj_checkpoint_open(&none, dir), OPROJ_ERR_IO,
              "does not list tensor layers.1.attn.wo_a.scale, which model.safetensors holds");

  write_index(LISTED("0", "absent.safetensors"));
  EXPECT_FAIL(oproj_checkpoint_open(&none, dir), OPROJ_ERR_IO, "absent.safetensors");
  ck_assert_ptr_null(none);

  write_index(LISTED("0", "model.safetensors") ", \"layers.1.attn.wo_a.weight_scale_inv\": "
                                               "\"model.safetensors\"");
  EXPECT_FAIL(oproj_checkpoint_open(&none, dir), OPROJ_ERR_IO,
              "layers.1.attn.wo_a.weight_scale_inv is listed");

  static const char *const foreign[] = {"../m.safetensors", "/m", "..", "", "a/b"};
  for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++) {
    char map[256];
    snprintf(map, sizeof map, "\"embed.weight\": \"%s\"", foreign[i]);
    write_index(map);
    EXPECT_FAIL(oproj_checkpoint_open(&none, dir), OPROJ_ERR_IO, "plain name");
  }
  write_index("\"embed.weight\": 1");
  EXPECT_FAIL(oproj_checkpoint_open(&none, dir), OPROJ_ERR_IO, "weight_map.embed.weight");
  files_write_text(dir, "model.safetensors.index.json", "{}");
  EXPECT_FAIL(oproj_checkpoint_open(&none, dir), OPROJ_ERR_IO, "weight_map is missing");
  files_write_text(dir, "model.safetensors.index.json", "{\"weight_map\": []}");
  EXPECT_FAIL(oproj_checkpoint_open(&none, dir), OPROJ_ERR_IO, "weight_map is not an object");
}
END_TEST

START_TEST(folders_without_files) {
  EXPECT_FAIL(oproj_checkpoint_open(&checkpoint, dir), OPROJ_ERR_IO, "config.json");
  files_write_text(dir, "config.json", small_config);
  EXPECT_FAIL(oproj_checkpoint_open(&checkpoint, dir), OPROJ_ERR_IO, "no *.safetensors file");
  EXPECT_FAIL(oproj_checkpoint_open(&checkpoint, NULL), OPROJ_ERR_INVALID, "NULL");
  oproj_checkpoint_close(NULL);
}
END_TEST

START_TEST(file_cut_after_open) {
  small_write(dir, layers);
  reopen();
  ck_assert_int_eq(truncate(files_path(dir, "model.safetensors"), 4096), 0);
  EXPECT_FAIL(read_all(1), OPROJ_ERR_IO, "more are needed");
  oproj_checkpoint *none;
  EXPECT_FAIL(oproj_checkpoint_open(&none, dir), OPROJ_ERR_IO, "not inside");
}
END_TEST

int main(void) {
  Suite *suite = suite_create("weights");
  TCase *cases = tcase_create("all");
  tcase_add_checked_fixture(cases, setup, teardown);
  tcase_add_test(cases, slices_of_every_rank);
  tcase_add_test(cases, layer_facts);
  tcase_add_test(cases, foreign_shards);
  tcase_add_loop_test(cases, every_form_of_names, 0, sizeof forms / sizeof forms[0]);
  tcase_add_test(cases, doubles_are_refused);
  tcase_add_test(cases, layers_beyond_config);
  tcase_add_test(cases, tensor_refusals);
  tcase_add_test(cases, bf16_weight_beside_fp8);
  tcase_add_test(cases, scale_dtypes);
  tcase_add_test(cases, scales_of_a_shard);
  tcase_add_test(cases, index_rules);
  tcase_add_test(cases, folders_without_files);
  tcase_add_test(cases, file_cut_after_open);
  suite_add_tcase(suite, cases);
  return run_suite(suite);
}
