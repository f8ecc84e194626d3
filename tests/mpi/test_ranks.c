/* test_ranks.c - what several MPI ranks do together.  Started by mpirun at several sizes.
 *
 * Verdicts are agreed before they are asserted, so that every rank leaves a test together: a rank
 * that failed alone would strand its peers in the next collective call. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/num.h"
#include "oproj/checkpoint.h"
#include "oproj/mpi.h"
#include "support/data.h"
#include "support/expect.h"
#include "support/together.h"

static oproj_comm *comm;
static int32_t size, rank;

/* Groups enough for every size the test is started with. */
static oproj_dims dims_for_ranks(const oproj_dims *tiny) {
  oproj_dims dims = *tiny;
  dims.groups = 8;
  return dims;
}

static oproj_split split_for(const oproj_dims *dims) {
  return dims->groups % size == 0 ? OPROJ_SPLIT_EVEN : OPROJ_SPLIT_UNEVEN;
}

typedef struct open_layer {
  oproj_ctx *ctx;
  oproj_layer *layer;
} open_layer;

static open_layer open_share(oproj_comm *over, const data_layer *data, oproj_split split,
                             oproj_reduce reduce) {
  open_layer open = {0};
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = data->tokens;
  config.split = split;
  config.reduce = reduce;
  EXPECT_OK(oproj_ctx_create(&open.ctx, over, &data->dims, &config));
  data_share share = data_take(data, oproj_ctx_shard(open.ctx));
  EXPECT_OK(oproj_layer_create(&open.layer, open.ctx, &share.wo_a, &share.wo_b));
  data_share_free(&share);
  return open;
}

static void close_share(open_layer *open) {
  oproj_layer_destroy(open->layer);
  oproj_ctx_destroy(open->ctx);
}

/* y of the whole layer on one rank alone. */
static uint16_t *project_alone(const data_layer *data) {
  oproj_comm *self;
  EXPECT_OK(oproj_comm_self(&self));
  open_layer open = open_share(self, data, OPROJ_SPLIT_EVEN, OPROJ_REDUCE_ALL);
  oproj_io io = data_io(data, oproj_ctx_shard(open.ctx));
  uint16_t *y = malloc((size_t)data->tokens * (size_t)data->dims.hidden * sizeof *y + 1);
  io.y = y;
  EXPECT_OK(oproj_forward(open.layer, &io, NULL));
  close_share(&open);
  oproj_comm_destroy(self);
  return y;
}

/* ---- sums ---------------------------------------------------------------------------------- */

START_TEST(exact_data_equals_one_rank) {
  oproj_dims dims = dims_for_ranks(_i ? &data_tiny_v41 : &data_tiny_v4);
  const oproj_reduce modes[] = {OPROJ_REDUCE_ALL, OPROJ_REDUCE_VENDOR, OPROJ_REDUCE_SCATTER};
  data_layer data = data_make(&dims, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, 13);
  uint16_t *want = project_alone(&data);
  size_t values = (size_t)(13 * dims.hidden);
  for (size_t m = 0; m < 3; m++) {
    open_layer open = open_share(comm, &data, split_for(&dims), modes[m]);
    oproj_io io = data_io(&data, oproj_ctx_shard(open.ctx));
    uint16_t *y = malloc(values * sizeof *y);
    memset(y, 0xAA, values * sizeof *y);
    io.y = y;
    ALL_OK(oproj_forward(open.layer, &io, NULL));
    int32_t begin = 0, end = 13;
    if (modes[m] == OPROJ_REDUCE_SCATTER) oproj_plan_rows(13, size, rank, &begin, &end);
    size_t mine = (size_t)((end - begin) * dims.hidden);
    ALL_ASSERT(memcmp(y, want + begin * dims.hidden, mine * sizeof *y) == 0,
               "mode %d: y differs from one rank's", (int)modes[m]);
    ALL_ASSERT(mine == values || y[mine] == 0xAAAA, "mode %d: more than this rank's rows written",
               (int)modes[m]);
    free(y);
    close_share(&open);
  }
  free(want);
  data_free(&data);
}
END_TEST

/* Partials of every size and sign: the sum is f32 in rank order, rounded once, the same on all
 * ranks. */
START_TEST(sums_are_in_rank_order) {
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  int32_t tokens = 700; /* more than one piece of the exchange */
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = tokens;
  config.split = split_for(&dims);
  for (int scatter = 0; scatter < 2; scatter++) {
    oproj_ctx *ctx;
    config.reduce = scatter ? OPROJ_REDUCE_SCATTER : OPROJ_REDUCE_ALL;
    ALL_OK(oproj_ctx_create(&ctx, comm, &dims, &config));
    size_t values = (size_t)tokens * (size_t)dims.hidden;
    uint16_t *partial = malloc(values * sizeof *partial), *y = malloc(values * sizeof *y);
    for (size_t i = 0; i < values; i++)
      partial[i] = oproj_bf16_from_f32((float)(data_uniform(70 + (uint64_t)rank, i) * 1000.0));
    ALL_OK(oproj_partial_reduce(ctx, tokens, partial, y, NULL));
    ALL_OK(oproj_partial_reduce(ctx, tokens, partial, partial, NULL)); /* in place */
    int32_t begin = 0, end = tokens;
    if (scatter) oproj_plan_rows(tokens, size, rank, &begin, &end);
    size_t first = (size_t)begin * (size_t)dims.hidden, wrong = 0;
    size_t mine = (size_t)(end - begin) * (size_t)dims.hidden;
    for (size_t i = 0; i < mine; i++) {
      float sum = 0.0f;
      for (int32_t r = 0; r < size; r++)
        sum += oproj_bf16_to_f32(
            oproj_bf16_from_f32((float)(data_uniform(70 + (uint64_t)r, first + i) * 1000.0)));
      wrong += y[i] != oproj_bf16_from_f32(sum) || partial[i] != y[i];
    }
    ALL_ASSERT(wrong == 0, "%zu elements are not the sum in rank order", wrong);
    free(partial);
    free(y);
    oproj_ctx_destroy(ctx);
  }
}
END_TEST

/* The last rank calls with fewer tokens: all are told so, and go on. */
START_TEST(unequal_counts_are_refused_on_all) {
  enum { TOKENS = 4 };
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = TOKENS;
  config.split = split_for(&dims);
  oproj_ctx *ctx;
  if (size == 1) return;
  ALL_OK(oproj_ctx_create(&ctx, comm, &dims, &config));
  uint16_t *y = calloc((size_t)TOKENS * (size_t)dims.hidden, sizeof *y);
  int32_t tokens = rank == size - 1 ? TOKENS - 1 : TOKENS;
  oproj_status status = oproj_partial_reduce(ctx, tokens, y, y, NULL);
  ALL_ASSERT(status == OPROJ_ERR_INVALID && strstr(oproj_last_error(), "ranks sum 3 to 4 tokens"),
             "status %d: %s", (int)status, oproj_last_error());
  ALL_OK(oproj_partial_reduce(ctx, TOKENS, y, y, NULL));
  free(y);
  oproj_ctx_destroy(ctx);
}
END_TEST

START_TEST(partials_are_left_alone_without_reduction) {
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  data_layer data = data_make(&dims, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, 2);
  open_layer open = open_share(comm, &data, split_for(&dims), OPROJ_REDUCE_NONE);
  oproj_io io = data_io(&data, oproj_ctx_shard(open.ctx));
  size_t values = (size_t)(2 * dims.hidden);
  uint16_t *partial = malloc(values * sizeof *partial);
  float *mine = malloc(values * sizeof *mine), *sum = malloc(values * sizeof *sum);
  io.y = partial;
  ALL_OK(oproj_forward(open.layer, &io, NULL));
  for (size_t i = 0; i < values; i++) mine[i] = oproj_bf16_to_f32(partial[i]);
  MPI_Allreduce(mine, sum, (int)values, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  uint16_t *want = project_alone(&data);
  size_t wrong = 0;
  for (size_t i = 0; i < values; i++) wrong += sum[i] != oproj_bf16_to_f32(want[i]);
  ALL_ASSERT(wrong == 0, "%zu partial sums do not add up", wrong);
  free(want);
  free(partial);
  free(mine);
  free(sum);
  close_share(&open);
  data_free(&data);
}
END_TEST

/* ---- failing together ---------------------------------------------------------------------- */

START_TEST(one_failure_is_everybodys) {
  for (int32_t bad = 0; bad < size; bad++) {
    oproj_status mine = OPROJ_OK;
    if (rank >= bad) mine = oproj_fail(OPROJ_ERR_SHAPE, "rank %d is unhappy", rank);
    oproj_status status = oproj_comm_agree(comm, mine);
    char words[64];
    snprintf(words, sizeof words, "rank %d is unhappy", bad);
    int right = status == OPROJ_ERR_SHAPE && strstr(oproj_last_error(), words) != NULL;
    ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
  }
  ALL_OK(oproj_comm_agree(comm, OPROJ_OK));
}
END_TEST

START_TEST(bad_input_on_one_rank_is_refused_on_all) {
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  data_layer data = data_make(&dims, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, 2);
  open_layer open = open_share(comm, &data, split_for(&dims), OPROJ_REDUCE_ALL);
  oproj_io io = data_io(&data, oproj_ctx_shard(open.ctx));
  uint16_t *y = malloc((size_t)(2 * dims.hidden) * sizeof *y);
  io.y = y;
  if (rank == size - 1) data.positions[1] = 1 << 20;
  oproj_status status = oproj_forward(open.layer, &io, NULL);
  int right = status == OPROJ_ERR_INVALID && strstr(oproj_last_error(), "positions[1] is 1048576");
  ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
  free(y);
  close_share(&open);
  data_free(&data);
}
END_TEST

START_TEST(illegal_sizes_are_refused_on_all) {
  oproj_dims dims = data_tiny_v4;
  dims.groups = 1;
  oproj_ctx *ctx = NULL;
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  oproj_status status = oproj_ctx_create(&ctx, comm, &dims, &config);
  int right = size == 1 ? status == OPROJ_OK : status == OPROJ_ERR_SHAPE && !ctx;
  ALL_ASSERT(right, "status %d", (int)status);
  oproj_ctx_destroy(ctx);

  /* Weights that fit on all ranks but one. */
  dims = dims_for_ranks(&data_tiny_v4);
  data_layer data = data_make(&dims, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, 1);
  open_layer open = open_share(comm, &data, split_for(&dims), OPROJ_REDUCE_ALL);
  data_share share = data_take(&data, oproj_ctx_shard(open.ctx));
  if (rank == 0) share.wo_b.rows--;
  oproj_layer *layer = NULL;
  status = oproj_layer_create(&layer, open.ctx, &share.wo_a, &share.wo_b);
  ALL_ASSERT(status == OPROJ_ERR_SHAPE && !layer, "status %d", (int)status);
  data_share_free(&share);
  close_share(&open);
  data_free(&data);
}
END_TEST

/* ---- what ranks must have in common --------------------------------------------------------- */

static oproj_status create_with(const oproj_dims *dims, const oproj_config *config) {
  oproj_ctx *ctx = NULL;
  oproj_status status = oproj_ctx_create(&ctx, comm, dims, config);
  oproj_ctx_destroy(ctx);
  return status;
}

/* The last rank is started with another value of one field: every rank says the same about it. */
START_TEST(ranks_that_differ_are_refused_by_name) {
  static const char *const names[] = {"max_tokens", "reduce",     "path",
                                      "hidden",     "OPROJ_BIND", "chunk_tokens"};
  if (size == 1) return;
  for (int field = 0; field < 6; field++) {
    oproj_dims dims = dims_for_ranks(&data_tiny_v4);
    oproj_config config = OPROJ_CONFIG_INIT;
    config.backend = "ref";
    config.split = split_for(&dims);
    config.max_tokens = 64;
    bool other = rank == size - 1;
    if (field == 0 && other) config.max_tokens = 32;
    if (field == 1 && other) config.reduce = OPROJ_REDUCE_VENDOR;
    if (field == 2 && other) config.path = OPROJ_PATH_REFERENCE;
    if (field == 3 && other) dims.hidden *= 2;
    if (field == 4 && other) setenv("OPROJ_BIND", "0", 1);
    if (field == 5 && other) config.chunk_tokens = 8;
    oproj_status status = create_with(&dims, &config);
    if (field == 4) unsetenv("OPROJ_BIND");
    char words[64], begin[64];
    snprintf(begin, sizeof begin, "%s must be the same on all ranks", names[field]);
    snprintf(words, sizeof words, "on rank %d", size - 1);
    int right = status == OPROJ_ERR_INVALID &&
                strncmp(oproj_last_error(), begin, strlen(begin)) == 0 &&
                strstr(oproj_last_error(), words);
    ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
  }
}
END_TEST

/* ---- from a checkpoint --------------------------------------------------------------------- */

/* y of layer 0 on one rank alone, for the whole input that this rank's `io` is a part of. */
static uint16_t *project_checkpoint_alone(const oproj_checkpoint *checkpoint,
                                          const oproj_io *part) {
  const oproj_model *model = oproj_checkpoint_model(checkpoint);
  const oproj_dims *d = &model->dims;
  oproj_comm *self;
  oproj_ctx *ctx;
  oproj_layer *layer;
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = part->tokens;
  EXPECT_OK(oproj_comm_self(&self));
  EXPECT_OK(oproj_ctx_create(&ctx, self, d, &config));
  EXPECT_OK(oproj_layer_load(&layer, ctx, checkpoint, 0));
  size_t tokens = (size_t)part->tokens;
  uint16_t *attn_out = malloc(tokens * (size_t)(d->heads * d->head_dim) * sizeof *attn_out);
  uint16_t *y = malloc(tokens * (size_t)d->hidden * sizeof *y);
  oproj_synth_input(d, 5, 1, part->tokens, 0, d->heads, attn_out);
  oproj_io io = *part;
  io.attn_out = attn_out;
  io.y = y;
  EXPECT_OK(oproj_forward(layer, &io, NULL));
  free(attn_out);
  oproj_layer_destroy(layer);
  oproj_ctx_destroy(ctx);
  oproj_comm_destroy(self);
  return y;
}

START_TEST(checkpoints_load_by_shares) {
  char dir[128], split_dir[160];
  snprintf(dir, sizeof dir, "%s/oproj-ranks-%ld", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp",
           (long)getpid());
  MPI_Bcast(dir, sizeof dir, MPI_CHAR, 0, MPI_COMM_WORLD);
  snprintf(split_dir, sizeof split_dir, "%s-split", dir);
  oproj_synth synth = OPROJ_SYNTH_INIT;
  synth.model = "v4-flash";
  synth.layers = 1;
  synth.draft_layers = 0;
  synth.exact = 1;
  oproj_checkpoint *whole = NULL, *split = NULL;
  oproj_split kind = 8 % size == 0 ? OPROJ_SPLIT_EVEN : OPROJ_SPLIT_UNEVEN;
  ALL_OK(rank == 0 ? oproj_checkpoint_synth(&synth, dir, NULL, NULL) : OPROJ_OK);
  ALL_OK(oproj_checkpoint_open(&whole, dir));
  ALL_OK(rank == 0 ? oproj_checkpoint_split(whole, split_dir, kind, size, NULL, NULL) : OPROJ_OK);
  ALL_OK(oproj_checkpoint_open(&split, split_dir));

  const oproj_model *model = oproj_checkpoint_model(whole);
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = 3;
  config.split = kind;
  oproj_ctx *ctx;
  oproj_layer *from_whole, *from_split;
  ALL_OK(oproj_ctx_create(&ctx, comm, &model->dims, &config));
  ALL_OK(oproj_layer_load(&from_whole, ctx, whole, 0));
  ALL_OK(oproj_layer_load(&from_split, ctx, split, 0));
  ALL_OK(oproj_layer_reload(from_split, whole, 0));
  oproj_layer *none = NULL;
  oproj_status status = oproj_layer_load(&none, ctx, whole, 9);
  ALL_ASSERT(status == OPROJ_ERR_INVALID && !none, "status %d", (int)status);

  const oproj_shard *shard = oproj_ctx_shard(ctx);
  size_t values = (size_t)(3 * model->dims.hidden);
  uint16_t *attn_out = malloc((size_t)(3 * 64 * 512) * sizeof *attn_out);
  uint16_t *y = malloc(values * sizeof *y), *y_split = malloc(values * sizeof *y);
  int64_t positions[3] = {0, 0, 0};
  float cos_sin[64];
  EXPECT_OK(oproj_rope_table(&model->plain, 64, 0, 1, cos_sin));
  oproj_synth_input(&model->dims, 5, 1, 3, shard->head_begin, shard->head_end, attn_out);
  oproj_io io = {.tokens = 3,
                 .attn_out = attn_out,
                 .positions = positions,
                 .cos_sin = cos_sin,
                 .cos_sin_rows = 1,
                 .cos_sin_width = 64,
                 .y = y};
  ALL_OK(oproj_forward(from_whole, &io, NULL));
  io.y = y_split;
  ALL_OK(oproj_forward(from_split, &io, NULL));
  ALL_ASSERT(memcmp(y, y_split, values * sizeof *y) == 0, "split and whole differ");
  uint16_t *want = project_checkpoint_alone(whole, &io);
  ALL_ASSERT(memcmp(y, want, values * sizeof *y) == 0, "y differs from one rank's");
  free(want);

  oproj_layer_destroy(from_whole);
  oproj_layer_destroy(from_split);
  oproj_ctx_destroy(ctx);
  oproj_checkpoint_close(whole);
  oproj_checkpoint_close(split);
  free(attn_out);
  free(y);
  free(y_split);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) {
    char command[512];
    snprintf(command, sizeof command, "rm -rf '%s' '%s'", dir, split_dir);
    ck_assert_int_eq(system(command), 0);
  }
}
END_TEST

static Suite *agreement_suite(void) {
  Suite *suite = suite_create("agreement");
  TCase *tc = tcase_create("agreement");
  tcase_add_test(tc, one_failure_is_everybodys);
  suite_add_tcase(suite, tc);
  return suite;
}

static Suite *ranks_suite(void) {
  Suite *suite = suite_create("ranks");
  TCase *tc = tcase_create("ranks");
  tcase_add_loop_test(tc, exact_data_equals_one_rank, 0, 2);
  tcase_add_test(tc, sums_are_in_rank_order);
  tcase_add_test(tc, unequal_counts_are_refused_on_all);
  tcase_add_test(tc, partials_are_left_alone_without_reduction);
  tcase_add_test(tc, bad_input_on_one_rank_is_refused_on_all);
  tcase_add_test(tc, illegal_sizes_are_refused_on_all);
  tcase_add_test(tc, ranks_that_differ_are_refused_by_name);
  tcase_add_test(tc, checkpoints_load_by_shares);
  suite_add_tcase(suite, tc);
  return suite;
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  if (oproj_comm_mpi(&comm, MPI_COMM_WORLD) != OPROJ_OK) {
    fprintf(stderr, "%s\n", oproj_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  size = oproj_comm_size(comm);
  rank = oproj_comm_rank(comm);
  /* Ranks that do not agree would hang in the tests of what follows a failure. */
  int failed = together_run(agreement_suite(), rank) || together_run(ranks_suite(), rank);
  oproj_comm_destroy(comm);
  MPI_Finalize();
  return failed;
}
