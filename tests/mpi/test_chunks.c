/* test_chunks.c - calls that are taken apart give the bits of whole ones.  Started by mpirun at
 * several sizes; verdicts are agreed before they are asserted (together.h). */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#include "oproj/mpi.h"
#include "support/data.h"
#include "support/expect.h"
#include "support/together.h"

enum { MOST = 20, ADAPTER_RANK = 3 };

static oproj_comm *comm;
static int32_t size, rank;

static const oproj_reduce modes[] = {OPROJ_REDUCE_ALL, OPROJ_REDUCE_SCATTER, OPROJ_REDUCE_VENDOR};
static const int32_t counts[] = {0, 1, 9, MOST};
static const int32_t chunks[] = {1, 3, 1000};
enum {
  MODES = sizeof modes / sizeof modes[0],
  COUNTS = sizeof counts / sizeof counts[0],
  CHUNKS = sizeof chunks / sizeof chunks[0]
};

/* ---- layers -------------------------------------------------------------------------------- */

/* What a layer may have besides its weights. */
typedef enum extra { PLAIN, ADAPTER, OWN_OUT, EXTRAS } extra;

typedef struct open_layer {
  oproj_ctx *ctx;
  oproj_layer *layer;
  int32_t outs, out_tokens; /* calls of its own WO_B, and their tokens */
} open_layer;

static oproj_config config_of(const oproj_dims *dims, oproj_reduce reduce, int64_t chunk_tokens) {
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = MOST;
  config.split = dims->groups % size == 0 ? OPROJ_SPLIT_EVEN : OPROJ_SPLIT_UNEVEN;
  config.reduce = reduce;
  config.chunk_tokens = chunk_tokens;
  return config;
}

static void add_adapter(const open_layer *open) {
  const oproj_dims *d = oproj_ctx_dims(open->ctx);
  const oproj_shard *shard = oproj_ctx_shard(open->ctx);
  int64_t groups = shard->group_end - shard->group_begin;
  int64_t cols = (int64_t)d->heads / d->groups * d->head_dim;
  int64_t a_count = groups * ADAPTER_RANK * cols, b_count = groups * d->lora_rank * ADAPTER_RANK;
  uint16_t *a = malloc((size_t)a_count * sizeof *a), *b = malloc((size_t)b_count * sizeof *b);
  for (int64_t i = 0; i < a_count; i++)
    a[i] = 0x3C00 | (uint16_t)(data_hash(7, (uint64_t)i) & 0x80FF);
  for (int64_t i = 0; i < b_count; i++)
    b[i] = 0x3C00 | (uint16_t)(data_hash(8, (uint64_t)i) & 0x80FF);
  EXPECT_OK(
      oproj_layer_set_adapter(open->layer, &(oproj_adapter){.rank = ADAPTER_RANK, .a = a, .b = b}));
  free(a);
  free(b);
}

static oproj_status own_out(void *user, const oproj_quant *z, uint16_t *partial, void *stream) {
  open_layer *open = user;
  open->outs++;
  open->out_tokens += z->tokens;
  return oproj_out_project(open->layer, z, partial, stream);
}

static void open_one(open_layer *open, const data_layer *data, oproj_reduce reduce,
                     int64_t chunk_tokens, extra with) {
  oproj_config config = config_of(&data->dims, reduce, chunk_tokens);
  *open = (open_layer){.outs = 0};
  EXPECT_OK(oproj_ctx_create(&open->ctx, comm, &data->dims, &config));
  data_share share = data_take(data, oproj_ctx_shard(open->ctx));
  EXPECT_OK(oproj_layer_create(&open->layer, open->ctx, &share.wo_a, &share.wo_b));
  data_share_free(&share);
  if (with == ADAPTER) add_adapter(open);
  if (with == OWN_OUT)
    EXPECT_OK(oproj_layer_set_out(open->layer, own_out, open, OPROJ_SCALE_UE8M0_TILE));
}

static void close_one(open_layer *open) {
  oproj_layer_destroy(open->layer);
  oproj_ctx_destroy(open->ctx);
}

/* y of the first `tokens` tokens over poison, with room for MOST; to be freed. */
static uint16_t *project(open_layer *open, const data_layer *data, int32_t tokens) {
  oproj_io io = data_io(data, oproj_ctx_shard(open->ctx));
  size_t bytes = (size_t)MOST * (size_t)data->dims.hidden * sizeof(uint16_t);
  uint16_t *y = malloc(bytes);
  memset(y, 0xAA, bytes);
  io.tokens = tokens;
  io.y = y;
  ALL_OK(oproj_forward(open->layer, &io, NULL));
  return y;
}

static data_layer make(const oproj_dims *tiny, bool exact) {
  oproj_dims dims = *tiny;
  dims.groups = 8; /* enough for every size the test is started with */
  return data_make(&dims, exact, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, MOST);
}

/* ---- the same bits ------------------------------------------------------------------------- */

static void check_chunks(const data_layer *data, oproj_reduce mode, int32_t chunk, extra with,
                         uint16_t *const wanted[COUNTS]) {
  open_layer open;
  open_one(&open, data, mode, chunk, with);
  size_t bytes = (size_t)MOST * (size_t)data->dims.hidden * sizeof(uint16_t);
  for (int i = 0; i < COUNTS; i++) {
    open.outs = open.out_tokens = 0;
    uint16_t *y = project(&open, data, counts[i]);
    ALL_ASSERT(memcmp(y, wanted[i], bytes) == 0, "mode %d, %d tokens by %d, with %d: y differs",
               (int)mode, counts[i], chunk, (int)with);
    int32_t rows = counts[i], height = chunk; /* what is cut, and by what */
    if (mode == OPROJ_REDUCE_SCATTER) {
      rows = (rows + size - 1) / size;
      height = (height + size - 1) / size;
    }
    bool cut = size > 1 && rows > height;
    ALL_ASSERT(with != OWN_OUT || (open.out_tokens == counts[i] && (open.outs > 1) == cut),
               "%d tokens by %d: %d calls of WO_B for %d tokens", counts[i], chunk, open.outs,
               open.out_tokens);
    free(y);
  }
  close_one(&open);
}

/* Random values, whose sums hang on every order.  MPI's own sum may take another for each count, so
 * it gets exact ones. */
START_TEST(chunks_have_the_bits_of_whole_calls) {
  extra with = _i < EXTRAS ? (extra)_i : PLAIN;
  for (int m = 0; m < MODES; m++) {
    data_layer data = make(_i < EXTRAS ? &data_tiny_v4 : &data_tiny_v41,
                           modes[m] == OPROJ_REDUCE_VENDOR && with != ADAPTER);
    if (modes[m] != OPROJ_REDUCE_VENDOR || with != ADAPTER) {
      open_layer whole;
      uint16_t *wanted[COUNTS];
      open_one(&whole, &data, modes[m], 0, with);
      for (int i = 0; i < COUNTS; i++) wanted[i] = project(&whole, &data, counts[i]);
      for (int c = 0; c < CHUNKS; c++) check_chunks(&data, modes[m], chunks[c], with, wanted);
      for (int i = 0; i < COUNTS; i++) free(wanted[i]);
      close_one(&whole);
    }
    data_free(&data);
  }
}
END_TEST

/* ---- failing together ---------------------------------------------------------------------- */

START_TEST(bad_input_in_the_last_chunk_is_refused_on_all) {
  data_layer data = make(&data_tiny_v4, true);
  open_layer open;
  open_one(&open, &data, OPROJ_REDUCE_ALL, 8, PLAIN);
  oproj_io io = data_io(&data, oproj_ctx_shard(open.ctx));
  uint16_t *y = malloc((size_t)MOST * (size_t)data.dims.hidden * sizeof *y);
  int64_t good = data.positions[MOST - 1];
  io.y = y;
  if (rank == size - 1) data.positions[MOST - 1] = 1 << 20;
  oproj_status status = oproj_forward(open.layer, &io, NULL);
  int right = status == OPROJ_ERR_INVALID && strstr(oproj_last_error(), "positions[19] is 1048576");
  ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
  data.positions[MOST - 1] = good;
  ALL_OK(oproj_forward(open.layer, &io, NULL));
  free(y);
  close_one(&open);
  data_free(&data);
}
END_TEST

static oproj_status fail_in_second(void *user, const oproj_quant *z, uint16_t *partial,
                                   void *stream) {
  open_layer *open = user;
  if (++open->outs == 2) return oproj_fail(OPROJ_ERR_DEVICE, "the second chunk failed");
  return oproj_out_project(open->layer, z, partial, stream);
}

START_TEST(a_chunk_that_fails_on_one_rank_fails_on_all) {
  if (size == 1) return; /* one rank alone computes whole calls */
  data_layer data = make(&data_tiny_v4, true);
  open_layer open;
  open_one(&open, &data, OPROJ_REDUCE_SCATTER, 8, OWN_OUT);
  if (rank == 1) EXPECT_OK(oproj_layer_set_out(open.layer, fail_in_second, &open, OPROJ_SCALE_F32));
  oproj_io io = data_io(&data, oproj_ctx_shard(open.ctx));
  uint16_t *y = malloc((size_t)MOST * (size_t)data.dims.hidden * sizeof *y);
  io.y = y;
  oproj_status status = oproj_forward(open.layer, &io, NULL);
  int right = status == OPROJ_ERR_DEVICE && strstr(oproj_last_error(), "the second chunk failed");
  ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
  ALL_OK(oproj_forward(open.layer, &io, NULL));
  free(y);
  close_one(&open);
  data_free(&data);
}
END_TEST

START_TEST(sizes_that_are_none_are_refused) {
  static const int64_t wrong[] = {-1, INT64_C(1) << 31};
  oproj_dims dims = data_tiny_v4;
  dims.groups = 8;
  for (int i = 0; i < 2; i++) {
    oproj_ctx *ctx = NULL;
    oproj_config config = config_of(&dims, OPROJ_REDUCE_ALL, wrong[i]);
    oproj_status status = oproj_ctx_create(&ctx, comm, &dims, &config);
    ALL_ASSERT(status == OPROJ_ERR_INVALID && strstr(oproj_last_error(), "chunk_tokens is "),
               "status %d: %s", (int)status, oproj_last_error());
  }
}
END_TEST

static Suite *chunks_suite(void) {
  Suite *suite = suite_create("chunks");
  TCase *tc = tcase_create("chunks");
  tcase_add_loop_test(tc, chunks_have_the_bits_of_whole_calls, 0, EXTRAS + 1);
  tcase_add_test(tc, bad_input_in_the_last_chunk_is_refused_on_all);
  tcase_add_test(tc, a_chunk_that_fails_on_one_rank_fails_on_all);
  tcase_add_test(tc, sizes_that_are_none_are_refused);
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
  int failed = together_run(chunks_suite(), rank);
  oproj_comm_destroy(comm);
  MPI_Finalize();
  return failed;
}
