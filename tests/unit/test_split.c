/* test_split.c - a split set serves the slices of its source, bit for bit, and refuses everything
 * that is not what was written. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "oproj/checkpoint.h"
#include "oproj/safetensors.h"
#include "support/checkpoints.h"
#include "support/expect.h"

static char *dir;
static small_layer layers[SMALL_LAYERS];
static oproj_checkpoint *source, *set;

static void setup(void) {
  dir = files_make_dir();
  char whole[4096];
  snprintf(whole, sizeof whole, "%s/whole", dir);
  oproj_synth synth = OPROJ_SYNTH_INIT;
  synth.layers = 2;
  EXPECT_OK(oproj_checkpoint_synth(&synth, whole, NULL, NULL));
  EXPECT_OK(oproj_checkpoint_open(&source, whole));
  set = NULL;
}

static void teardown(void) {
  oproj_checkpoint_close(source);
  oproj_checkpoint_close(set);
  files_remove(dir);
}

static oproj_status open_set(const char *name) {
  oproj_checkpoint_close(set);
  return oproj_checkpoint_open(&set, files_path(dir, name));
}

static void split_as(const char *name, oproj_split kind, int32_t size) {
  EXPECT_OK(oproj_checkpoint_split(source, files_path(dir, name), kind, size, NULL, NULL));
  EXPECT_OK(open_set(name));
}

static oproj_shard shard_of(oproj_split kind, int32_t size, int32_t rank) {
  oproj_shard shard;
  EXPECT_OK(oproj_plan_shard(&oproj_checkpoint_model(source)->dims, kind, size, rank, &shard));
  return shard;
}

static oproj_status read_rank(oproj_split kind, int32_t size, int32_t rank) {
  oproj_slices slices;
  oproj_shard shard = shard_of(kind, size, rank);
  oproj_status status = oproj_checkpoint_read(set, 0, &shard, &slices);
  oproj_slices_free(&slices);
  return status;
}

static void expect_same(const oproj_matrix *a, const oproj_matrix *b) {
  ck_assert(a->dtype == b->dtype && a->rows == b->rows && a->cols == b->cols &&
            a->block == b->block);
  size_t element = a->dtype == OPROJ_DTYPE_BF16 ? 2 : 1;
  ck_assert_mem_eq(a->data, b->data, (size_t)(a->rows * a->cols) * element);
  ck_assert_int_eq(a->scales == NULL, b->scales == NULL);
  if (a->scales) {
    int64_t rows = (a->rows + a->block - 1) / a->block, cols = (a->cols + a->block - 1) / a->block;
    ck_assert_mem_eq(a->scales, b->scales, (size_t)(rows * cols) * sizeof(float));
  }
}

static void expect_same_ranks(oproj_split kind, int32_t size) {
  const oproj_model *a = oproj_checkpoint_model(source), *b = oproj_checkpoint_model(set);
  ck_assert_int_eq(oproj_checkpoint_split_size(set), size);
  ck_assert_int_eq(oproj_checkpoint_split_kind(set), kind);
  ck_assert_mem_eq(&a->dims, &b->dims, sizeof a->dims);
  ck_assert_int_eq(a->draft_layers, b->draft_layers);
  for (int32_t layer = 0; layer < a->layers + a->draft_layers; layer++) {
    oproj_layer_info one, two;
    EXPECT_OK(oproj_checkpoint_layer(source, layer, &one));
    EXPECT_OK(oproj_checkpoint_layer(set, layer, &two));
    ck_assert_str_eq(one.name, two.name);
    ck_assert_str_eq(one.wo_a_scale_dtype, two.wo_a_scale_dtype);
    for (int32_t rank = 0; rank < size; rank++) {
      oproj_shard shard = shard_of(kind, size, rank);
      oproj_slices whole, part;
      int64_t bytes, part_bytes;
      EXPECT_OK(oproj_checkpoint_read(source, layer, &shard, &whole));
      EXPECT_OK(oproj_checkpoint_read(set, layer, &shard, &part));
      expect_same(&whole.wo_a, &part.wo_a);
      expect_same(&whole.wo_b, &part.wo_b);
      EXPECT_OK(oproj_checkpoint_layer_bytes(source, layer, &shard, &bytes));
      EXPECT_OK(oproj_checkpoint_layer_bytes(set, layer, &shard, &part_bytes));
      ck_assert_int_eq(bytes, part_bytes);
      oproj_slices_free(&whole);
      oproj_slices_free(&part);
    }
  }
}

START_TEST(same_slices) {
  split_as("four", OPROJ_SPLIT_EVEN, 4);
  expect_same_ranks(OPROJ_SPLIT_EVEN, 4);
  ck_assert_int_eq(files_count(files_path(dir, "four")), 6);
  split_as("one", OPROJ_SPLIT_EVEN, 1);
  expect_same_ranks(OPROJ_SPLIT_EVEN, 1);
  split_as("three", OPROJ_SPLIT_UNEVEN, 3);
  expect_same_ranks(OPROJ_SPLIT_UNEVEN, 3);
}
END_TEST

/* Hand-made: an odd width, a bf16 draft WO_A, names of two forms, and a layer that is not there. */
START_TEST(mixed_source) {
  char names[SMALL_TENSORS][128];
  files_tensor tensors[SMALL_TENSORS];
  static uint16_t wide[SMALL_Z * SMALL_D];
  for (int i = 0; i < SMALL_Z * SMALL_D; i++) wide[i] = (uint16_t)i;
  small_fill(&layers[0], 1);
  small_tensors(&layers[0], "layers.2.attn.wo_a", "model.mtp.0.attn.wo_b", ".weight_scale", names,
                tensors);
  tensors[1] = (files_tensor){names[0], "BF16", SMALL_Z, SMALL_D, wide};
  char *small = files_make_dir();
  files_write_text(small, "config.json", small_config);
  files_write_tensors(small, "m.safetensors", tensors + 1, 3, 1);
  oproj_checkpoint_close(source);
  EXPECT_OK(oproj_checkpoint_open(&source, small));
  split_as("two", OPROJ_SPLIT_UNEVEN, 2);
  oproj_layer_info info;
  EXPECT_OK(oproj_checkpoint_layer(set, 2, &info));
  ck_assert_str_eq(info.wo_a_tensor, "mtp.0.attn.wo_a.weight");
  ck_assert_int_eq(info.wo_a, OPROJ_DTYPE_BF16);
  EXPECT_FAIL(oproj_checkpoint_layer(set, 0, &info), OPROJ_ERR_SHAPE, "layers.0.attn.wo_a.weight");
  for (int rank = 0; rank < 2; rank++) {
    oproj_slices whole, part;
    oproj_shard shard = shard_of(OPROJ_SPLIT_UNEVEN, 2, rank);
    EXPECT_OK(oproj_checkpoint_read(source, 2, &shard, &whole));
    EXPECT_OK(oproj_checkpoint_read(set, 2, &shard, &part));
    expect_same(&whole.wo_a, &part.wo_a);
    expect_same(&whole.wo_b, &part.wo_b);
    oproj_slices_free(&whole);
    oproj_slices_free(&part);
  }
  files_remove(small);
}
END_TEST

START_TEST(foreign_shards) {
  split_as("two", OPROJ_SPLIT_EVEN, 2);
  EXPECT_FAIL(read_rank(OPROJ_SPLIT_EVEN, 4, 1), OPROJ_ERR_SHAPE, "split for 2 ranks (even)");
  split_as("three", OPROJ_SPLIT_UNEVEN, 3);
  oproj_slices slices;
  oproj_shard shard = shard_of(OPROJ_SPLIT_UNEVEN, 3, 0);
  shard.rank = 2;
  EXPECT_FAIL(oproj_checkpoint_read(set, 0, &shard, &slices), OPROJ_ERR_SHAPE,
              "rank 2 holds z columns [768, 1024); [0, 512) were asked for");
}
END_TEST

/* ---- damage -------------------------------------------------------------------------------- */

static const char rank1[] = "set/rank-00001-of-00002.safetensors";

START_TEST(flipped_bits) {
  split_as("set", OPROJ_SPLIT_EVEN, 2);
  const char *name = "layers.0.attn.wo_b.scale";
  oproj_tensors_file *file;
  EXPECT_OK(oproj_tensors_open(&file, files_path(dir, rank1)));
  long offset = oproj_tensors_find(file, name)->offset;
  oproj_tensors_close(file);
  files_flip(dir, rank1, offset + 3);
  EXPECT_OK(open_set("set"));
  EXPECT_OK(read_rank(OPROJ_SPLIT_EVEN, 2, 0));
  EXPECT_FAIL(read_rank(OPROJ_SPLIT_EVEN, 2, 1), OPROJ_ERR_IO, name);
  ck_assert_ptr_nonnull(strstr(oproj_last_error(), "checksum"));
}
END_TEST

/* Its one file has all tensors of a whole checkpoint, and nothing that vouches for them. */
START_TEST(set_without_manifest) {
  split_as("set", OPROJ_SPLIT_EVEN, 1);
  ck_assert_int_eq(unlink(files_path(dir, "set/oproj-split.json")), 0);
  EXPECT_FAIL(open_set("set"), OPROJ_ERR_IO, "manifest is missing");
}
END_TEST

START_TEST(mixed_sets) {
  oproj_synth synth = OPROJ_SYNTH_INIT;
  synth.layers = 2;
  synth.seed = 99;
  split_as("set", OPROJ_SPLIT_EVEN, 2);
  EXPECT_OK(oproj_checkpoint_synth(&synth, files_path(dir, "whole2"), NULL, NULL));
  oproj_checkpoint_close(source);
  EXPECT_OK(oproj_checkpoint_open(&source, files_path(dir, "whole2")));
  split_as("set2", OPROJ_SPLIT_EVEN, 2);
  const char *other = "set2/rank-00001-of-00002.safetensors";
  ck_assert_int_eq(rename(files_path(dir, other), files_path(dir, rank1)), 0);
  EXPECT_FAIL(open_set("set"), OPROJ_ERR_IO, "belongs to the split set");
  /* A rank's file under another rank's name. */
  ck_assert_int_eq(
      rename(files_path(dir, "set/rank-00000-of-00002.safetensors"), files_path(dir, rank1)), 0);
  EXPECT_FAIL(open_set("set"), OPROJ_ERR_IO, "holds rank 0; rank 1 is wanted");
}
END_TEST

START_TEST(missing_rank_file) {
  split_as("set", OPROJ_SPLIT_EVEN, 2);
  ck_assert_int_eq(unlink(files_path(dir, rank1)), 0);
  EXPECT_OK(open_set("set"));
  EXPECT_OK(read_rank(OPROJ_SPLIT_EVEN, 2, 0));
  EXPECT_FAIL(read_rank(OPROJ_SPLIT_EVEN, 2, 1), OPROJ_ERR_IO, "the file of rank 1 is missing");
}
END_TEST

static const struct {
  const char *file, *from, *to, *words;
} changes[] = {
    {"config.json", "1048576", "1048577", "one of them was changed"},
    {"oproj-split.json", "oproj-split", "other", "format is \"other\""},
    {"oproj-split.json", "\"version\": 1", "\"version\": 2", "version is 2"},
    {"oproj-split.json", "\"size\": 2", "\"size\": 0", "size is 0"},
    {"oproj-split.json", "\"size\": 2", "\"size\": 3", "3"},
    {"oproj-split.json", "\"size\": 2", "\"size\": 4", "ranks has 2 entries"},
    {"oproj-split.json", "\"even\"", "\"odd\"", "split is \"odd\""},
    {"oproj-split.json", "\"even\"", "\"uneven\"", "one of them was changed"},
    {"oproj-split.json", "\"identity\": \"", "\"identity\": \"0", "identity is \"0"},
    {"oproj-split.json", "F8_E8M0", "F8", "dtype F8"},
    {"oproj-split.json", "F8_E8M0", "U8", "one of them was changed"},
    {"oproj-split.json", "1024", "-1024", "two positive integers"},
    {"oproj-split.json", "\"checksums\"", "\"sums\"", "checksums is missing"},
    {"oproj-split.json", "rank-00000", "../rank-00000", "is wanted"},
    {"oproj-split.json", "\"ranks\"", "\"r\"", "ranks is missing"},
    {"oproj-split.json", "\"tensors\"", "\"t\"", "tensors is missing"},
    {"oproj-split.json", "{", "{{", "JSON"},
};

START_TEST(changed_text) {
  char folder[4096];
  split_as("set", OPROJ_SPLIT_EVEN, 2);
  snprintf(folder, sizeof folder, "%s/set", dir);
  files_replace(folder, changes[_i].file, changes[_i].from, changes[_i].to);
  oproj_status status = open_set("set");
  EXPECT_FAIL(status, strstr(changes[_i].to, ": 3") ? OPROJ_ERR_SHAPE : OPROJ_ERR_IO,
              changes[_i].words);
}
END_TEST

/* ---- writing ------------------------------------------------------------------------------- */

static int stop_half(void *user, int64_t done, int64_t total) {
  ++*(int *)user;
  return done > total / 2;
}

START_TEST(stopped_leaves_nothing) {
  int calls = 0;
  EXPECT_FAIL(oproj_checkpoint_split(source, files_path(dir, "set"), OPROJ_SPLIT_EVEN, 2, stop_half,
                                     &calls),
              OPROJ_ERR_INVALID, "stopped by the caller");
  ck_assert_int_gt(calls, 2);
  ck_assert_int_eq(files_count(dir), 1);
}
END_TEST

START_TEST(refusals) {
  const char *path = files_path(dir, "set");
  EXPECT_FAIL(oproj_checkpoint_split(source, dir, OPROJ_SPLIT_EVEN, 2, NULL, NULL),
              OPROJ_ERR_INVALID, "exists");
  EXPECT_FAIL(oproj_checkpoint_split(source, path, OPROJ_SPLIT_EVEN, 3, NULL, NULL),
              OPROJ_ERR_SHAPE, "3");
  EXPECT_FAIL(oproj_checkpoint_split(source, path, OPROJ_SPLIT_UNEVEN, 5, NULL, NULL),
              OPROJ_ERR_SHAPE, "5");
  split_as("two", OPROJ_SPLIT_EVEN, 2);
  EXPECT_FAIL(oproj_checkpoint_split(set, path, OPROJ_SPLIT_EVEN, 2, NULL, NULL), OPROJ_ERR_INVALID,
              "is split already");
  /* The source is damaged below the header: nothing must appear. */
  ck_assert_int_eq(truncate(files_path(dir, "whole/model.safetensors"), 100000), 0);
  EXPECT_FAIL(
      oproj_checkpoint_split(source, files_path(dir, "set"), OPROJ_SPLIT_EVEN, 2, NULL, NULL),
      OPROJ_ERR_IO, "more are needed");
  ck_assert_int_eq(files_count(dir), 2);
}
END_TEST

/* ---- digests -------------------------------------------------------------------------------- */

static uint64_t digest_of(const char *name) {
  uint64_t digest = 0;
  EXPECT_OK(open_set(name));
  EXPECT_OK(oproj_checkpoint_digest(set, &digest));
  return digest;
}

static void make(const char *name, uint64_t seed, oproj_tensor_names names) {
  oproj_synth synth = OPROJ_SYNTH_INIT;
  synth.layers = 2;
  synth.seed = seed;
  synth.names = names;
  EXPECT_OK(oproj_checkpoint_synth(&synth, files_path(dir, name), NULL, NULL));
}

/* Flips a bit in the middle of a tensor. */
static void change(const char *name, const char *tensor) {
  char path[4096];
  oproj_tensors_file *file;
  snprintf(path, sizeof path, "%s/%s/model.safetensors", dir, name);
  EXPECT_OK(oproj_tensors_open(&file, path));
  const oproj_tensor *t = oproj_tensors_find(file, tensor);
  ck_assert_ptr_nonnull(t);
  long at = (long)(t->offset + t->bytes / 2);
  oproj_tensors_close(file);
  FILE *raw = fopen(path, "r+b");
  ck_assert_ptr_nonnull(raw);
  ck_assert_int_eq(fseek(raw, at, SEEK_SET), 0);
  int byte = fgetc(raw);
  ck_assert_int_eq(fseek(raw, at, SEEK_SET), 0);
  ck_assert_int_ne(fputc(byte ^ 1, raw), EOF);
  ck_assert_int_eq(fclose(raw), 0);
}

START_TEST(digests_tell_checkpoints_apart) {
  make("copy", 0, OPROJ_NAMES_RELEASE);
  make("seed", 1, OPROJ_NAMES_RELEASE);
  make("hf", 0, OPROJ_NAMES_HF);
  uint64_t whole = digest_of("whole");
  ck_assert_uint_eq(digest_of("copy"), whole);
  ck_assert_uint_ne(digest_of("seed"), whole);
  ck_assert_uint_ne(digest_of("hf"), whole);
  oproj_layer_info info;
  EXPECT_OK(oproj_checkpoint_layer(source, 1, &info));
  change("copy", info.wo_b_tensor);
  ck_assert_uint_ne(digest_of("copy"), whole);
  change("copy", info.wo_b_tensor);
  ck_assert_uint_eq(digest_of("copy"), whole);
  split_as("two", OPROJ_SPLIT_EVEN, 2);
  split_as("again", OPROJ_SPLIT_EVEN, 2);
  split_as("four", OPROJ_SPLIT_EVEN, 4);
  ck_assert_uint_eq(digest_of("two"), digest_of("again"));
  ck_assert_uint_ne(digest_of("two"), digest_of("four"));
  ck_assert_uint_ne(digest_of("two"), whole);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("split");
  TCase *cases = tcase_create("all");
  tcase_add_checked_fixture(cases, setup, teardown);
  tcase_set_timeout(cases, 60);
  tcase_add_test(cases, same_slices);
  tcase_add_test(cases, mixed_source);
  tcase_add_test(cases, foreign_shards);
  tcase_add_test(cases, flipped_bits);
  tcase_add_test(cases, set_without_manifest);
  tcase_add_test(cases, mixed_sets);
  tcase_add_test(cases, missing_rank_file);
  tcase_add_loop_test(cases, changed_text, 0, sizeof changes / sizeof changes[0]);
  tcase_add_test(cases, stopped_leaves_nothing);
  tcase_add_test(cases, refusals);
  tcase_add_test(cases, digests_tell_checkpoints_apart);
  suite_add_tcase(suite, cases);
  return run_suite(suite);
}
