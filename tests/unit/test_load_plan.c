/* test_load_plan.c - who reads what, without reading: every byte of the files is read by one rank,
 * and every byte of every rank's memory written once. */
#include <stdio.h>
#include <stdlib.h>

#include "support/checkpoints.h"
#include "support/expect.h"
#include "tp/load.h"

static char *dir;
static oproj_checkpoint *checkpoint;
static const int32_t all[WIDE_LAYERS] = {0, 1, 2, 3, 4};

static void setup(void) {
  dir = files_make_dir();
  wide_write(dir, 1);
  EXPECT_OK(oproj_checkpoint_open(&checkpoint, dir));
}

static void teardown(void) {
  oproj_checkpoint_close(checkpoint);
  files_remove(dir);
}

static oproj_shard shard_of(int32_t size, int32_t rank) {
  oproj_shard shard;
  const oproj_dims *dims = &oproj_checkpoint_model(checkpoint)->dims;
  oproj_split split = dims->groups % size == 0 ? OPROJ_SPLIT_EVEN : OPROJ_SPLIT_UNEVEN;
  EXPECT_OK(oproj_plan_shard(dims, split, size, rank, &shard));
  return shard;
}

static oproj_load_plan plan_of(int32_t size, int32_t rank, int64_t memory_bytes) {
  oproj_load_plan plan;
  oproj_shard shard = shard_of(size, rank);
  EXPECT_OK(oproj_load_plan_make(&plan, checkpoint, &shard, all, WIDE_LAYERS, memory_bytes));
  return plan;
}

static void mark(uint8_t *marks, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) marks[i]++;
}

static void expect_all(const uint8_t *marks, int64_t bytes, int wanted, const char *what) {
  int64_t i = 0;
  while (i < bytes && marks[i] == wanted) i++;
  ck_assert_msg(i == bytes, "%s: byte %ld not %d times", what, (long)i, wanted);
}

/* Follows one part through all rounds: what a rank reads, and what lands in its memory. */
static void follow(const oproj_load_part *part, const oproj_load_plan *plan, uint8_t *file,
                   uint8_t *memory) {
  const oproj_weights_source *from = &part->source;
  if (part->rounds == 0) {
    mark(file, from->begin, from->begin + from->bytes);
    mark(memory, part->at, part->at + from->bytes);
    return;
  }
  int64_t mine = from->bytes / from->region.rows;
  for (int32_t round = 0; round < part->rounds; round++)
    for (int32_t rank = 0; rank < plan->size; rank++) {
      int64_t begin, end;
      oproj_load_rows(part, plan->size, round, rank, &begin, &end);
      ck_assert_int_le((end - begin) * part->row_bytes, plan->chunk_bytes);
      mark(memory, part->at + begin * mine, part->at + end * mine);
      if (rank == plan->rank) mark(file, begin * part->row_bytes, end * part->row_bytes);
    }
}

static const int32_t sizes[] = {1, 2, 3, 4, 5, 7, 8};

/* One part of one layer, on all ranks. */
static void check_part(oproj_load_plan *plans, int32_t size, int32_t layer, int matrix, int which) {
  const oproj_load_part *first = &plans[0].layers[layer].matrix[matrix].part[which];
  if (!first->source.tensor) return;
  int64_t whole = first->source.region.rows * first->row_bytes;
  uint8_t *file = calloc((size_t)whole, 1);
  for (int32_t rank = 0; rank < size; rank++) {
    const oproj_load_part *part = &plans[rank].layers[layer].matrix[matrix].part[which];
    uint8_t *memory = calloc((size_t)plans[rank].layer_bytes, 1);
    ck_assert_int_eq(part->rounds, first->rounds);
    follow(part, &plans[rank], file, memory);
    expect_all(memory + part->at, part->source.bytes, 1, "memory");
    memset(memory + part->at, 0, (size_t)part->source.bytes);
    expect_all(memory, plans[rank].layer_bytes, 0, "memory outside the part");
    free(memory);
  }
  expect_all(file, whole, 1, "file");
  free(file);
}

START_TEST(each_byte_once) {
  const int32_t chunks[] = {4096, 5000, 20000, 1 << 20};
  int32_t size = sizes[_i];
  for (size_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++) {
    oproj_load_plan plans[8];
    int64_t needed = 0;
    for (int32_t rank = 0; rank < size; rank++) {
      plans[rank] = plan_of(size, rank, 1 << 30);
      ck_assert_int_eq(oproj_load_plan_mark(&plans[rank]), oproj_load_plan_mark(&plans[0]));
      oproj_load_plan_deal(&plans[rank], chunks[c]);
      needed += plans[rank].needed_bytes;
    }
    ck_assert_int_eq(needed, plans[0].total_bytes);
    for (int32_t layer = 0; layer < WIDE_LAYERS; layer++)
      for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++)
        for (int which = 0; which < OPROJ_WEIGHTS_PARTS; which++)
          check_part(plans, size, layer, matrix, which);
    for (int32_t rank = 0; rank < size; rank++) oproj_load_plan_free(&plans[rank]);
  }
}
END_TEST

/* What is planned never exceeds what is allowed, down to the least that is named. */
START_TEST(memory_is_bounded) {
  int32_t size = sizes[_i];
  oproj_shard shard = shard_of(size, 0);
  oproj_load_plan plan = plan_of(size, 0, 1 << 30);
  int64_t least = plan.layer_bytes + (size == 1 ? 0 : 3 * WIDE_Z);
  ck_assert_int_eq(plan.slots, 2);
  oproj_load_plan_free(&plan);
  for (int64_t memory = least; memory < 3 * least; memory += 1000) {
    plan = plan_of(size, 0, memory);
    int64_t used = plan.slots * plan.layer_bytes + 3 * (int64_t)plan.chunk_bytes;
    ck_assert_msg(used <= memory, "%ld of %ld bytes", (long)used, (long)memory);
    oproj_load_plan_free(&plan);
  }
  char words[64];
  snprintf(words, sizeof words, "at least %ld bytes", (long)least);
  EXPECT_FAIL(oproj_load_plan_make(&plan, checkpoint, &shard, all, WIDE_LAYERS, least - 1),
              OPROJ_ERR_INVALID, words);
  oproj_load_plan_free(&plan);
}
END_TEST

/* Reads of large tensors are dealt evenly; those of small ones are not cut to crumbs. */
START_TEST(reads_are_large) {
  const int64_t rows = 7168, row_bytes = 16384;
  oproj_load_plan plan = plan_of(8, 0, 1 << 30);
  oproj_load_part *part = &plan.layers[0].matrix[OPROJ_WEIGHTS_B].part[OPROJ_WEIGHTS_WEIGHT];
  oproj_load_plan_deal(&plan, 8 << 20);
  ck_assert_int_eq(part->rounds, 1);
  ck_assert_int_eq(part->rows_each, WIDE_HIDDEN);
  part->source.region.rows = rows; /* as in V4-Pro */
  part->row_bytes = row_bytes;
  oproj_load_plan_deal(&plan, 8 << 20);
  ck_assert_int_eq(part->rounds, 2);
  ck_assert_int_eq(part->rows_each, rows / 16);
  oproj_load_plan_free(&plan);
}
END_TEST

int main(void) {
  const int count = sizeof sizes / sizeof sizes[0];
  Suite *suite = suite_create("load_plan");
  TCase *cases = tcase_create("all");
  tcase_add_checked_fixture(cases, setup, teardown);
  tcase_add_loop_test(cases, each_byte_once, 0, count);
  tcase_add_loop_test(cases, memory_is_bounded, 0, count);
  tcase_add_test(cases, reads_are_large);
  suite_add_tcase(suite, cases);
  return run_suite(suite);
}
