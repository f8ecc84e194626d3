/* test_chunk.c - calls taken apart: which tokens a chunk has, how many chunks a call gets, and what
 * of them runs beside what, on streams that only keep time. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "support/data.h"
#include "support/expect.h"
#include "support/ranks.h"
#include "tp/chunk.h"
#include "tp/ctx.h"

static oproj_chunk_call call_of(int32_t ranks, oproj_reduce reduce, int32_t tokens) {
  return (oproj_chunk_call){
      .dims = data_tiny_v4, .ranks = ranks, .reduce = reduce, .tokens = tokens};
}

/* ---- which tokens -------------------------------------------------------------------------- */

static int32_t token_of(const oproj_kernels_part *part, int32_t i) {
  return part->begin + i / part->strip * part->stride + i % part->strip;
}

/* Every token is in one chunk, once, and partials of chunks lie one behind the other. */
static void check_tokens(const oproj_chunk_call *call, int32_t chunk_tokens) {
  char *seen = calloc((size_t)call->tokens + 1, 1);
  int32_t before = 0, count = oproj_chunk_count(call, chunk_tokens);
  for (int32_t c = 0; c < count; c++) {
    oproj_chunk chunk = oproj_chunk_at(call, chunk_tokens, c);
    ck_assert_int_eq(chunk.before, before);
    ck_assert_int_eq(chunk.part.call_tokens, call->tokens);
    ck_assert(chunk.part.strip >= 1 && (chunk.part.tokens > 0 || call->tokens == 0));
    ck_assert((c == 0) == (chunk.part.begin == 0));
    for (int32_t i = 0; i < chunk.part.tokens; i++) {
      int32_t token = token_of(&chunk.part, i);
      ck_assert(token >= 0 && token < call->tokens && !seen[token]++);
    }
    before += chunk.part.tokens;
  }
  ck_assert_int_eq(before, call->tokens);
  free(seen);
}

/* Under REDUCE_SCATTER the rows that a chunk's own plan gives a rank are the next ones of its. */
static void check_rows(const oproj_chunk_call *call, int32_t chunk_tokens) {
  for (int32_t rank = 0; rank < call->ranks; rank++) {
    int32_t begin, end, rows = 0;
    oproj_plan_rows(call->tokens, call->ranks, rank, &begin, &end);
    for (int32_t c = 0; c < oproj_chunk_count(call, chunk_tokens); c++) {
      oproj_chunk chunk = oproj_chunk_at(call, chunk_tokens, c);
      int32_t first, last;
      oproj_plan_rows(chunk.part.tokens, call->ranks, rank, &first, &last);
      ck_assert(first == last || chunk.y_row == rows);
      for (int32_t i = first; i < last; i++)
        ck_assert_int_eq(token_of(&chunk.part, i), begin + rows++);
    }
    ck_assert_int_eq(rows, end - begin);
  }
}

START_TEST(chunks_hold_every_token_once) {
  for (int32_t ranks = 2; ranks <= 9; ranks++) {
    for (int32_t tokens = 0; tokens <= 40; tokens++) {
      for (int32_t chunk_tokens = 1; chunk_tokens <= 45; chunk_tokens++) {
        oproj_chunk_call all = call_of(ranks, OPROJ_REDUCE_ALL, tokens);
        oproj_chunk_call scatter = call_of(ranks, OPROJ_REDUCE_SCATTER, tokens);
        check_tokens(&all, chunk_tokens);
        check_tokens(&scatter, chunk_tokens);
        check_rows(&scatter, chunk_tokens);
      }
    }
  }
}
END_TEST

/* A chunk that holds all is the whole call, in every mode. */
START_TEST(one_chunk_is_the_whole_call) {
  for (int mode = OPROJ_REDUCE_ALL; mode <= OPROJ_REDUCE_VENDOR; mode++) {
    for (int32_t tokens = 0; tokens < 300; tokens += 7) {
      oproj_chunk_call call = call_of(4, (oproj_reduce)mode, tokens);
      int32_t all = tokens > 0 ? tokens : 1;
      ck_assert_int_eq(oproj_chunk_count(&call, all), 1);
      oproj_chunk chunk = oproj_chunk_at(&call, all, 0);
      oproj_kernels_part whole = oproj_kernels_whole(tokens);
      ck_assert(memcmp(&chunk.part, &whole, sizeof whole) == 0);
      ck_assert(chunk.before == 0 && chunk.y_row == 0);
    }
  }
}
END_TEST

/* ---- how many ------------------------------------------------------------------------------ */

static const oproj_dims flash = {4096, 64, 512, 64, 8, 1024, 128};
static const oproj_dims pro = {7168, 128, 512, 64, 16, 1024, 128};

/* Links that cost nothing but time in proportion, and a GPU as simple. */
static const oproj_chunk_rates plain = {.flop_per_us = 1e6,
                                        .link_bytes_per_us = 0.5e3,
                                        .memory_bytes_per_us = INFINITY,
                                        .multiprocessors = 100,
                                        .spare = 20};

START_TEST(estimates_follow_the_streams) {
  /* 2 ranks, 2 groups, 1 held: 2 * 128 * (512 + 256) flop a token; 512 bytes a token each way. */
  oproj_chunk_call call = {.dims = {256, 2, 512, 64, 2, 128, 128},
                           .ranks = 2,
                           .reduce = OPROJ_REDUCE_SCATTER,
                           .tokens = 4000};
  double chain = 2.0 * 128 * 768 / 1e6, tail = 128 * chain, link = 256 / 0.5e3;
  double whole = 4000 * chain + tail + 4000 * link;
  ck_assert_double_eq_tol(oproj_chunk_estimate(&call, &plain, 4000), whole, 1e-6);
  /* Sums of 1000 tokens take longer than chains, so they follow one another without a gap. */
  double four = 1000 * chain + tail + 4000 * link;
  ck_assert(1000 * link > 1.25 * (1000 * chain + tail));
  ck_assert_double_eq_tol(oproj_chunk_estimate(&call, &plain, 1000), four, 1e-6);
  /* Links ten times as fast: chains follow one another, a fifth of the GPU left to the sums. */
  oproj_chunk_rates quick = plain;
  quick.link_bytes_per_us *= 10;
  four = (1 + 3 * 1.25) * (1000 * chain + tail) + 1000 * link / 10;
  ck_assert_double_eq_tol(oproj_chunk_estimate(&call, &quick, 1000), four, 1e-6);
}
END_TEST

static const struct {
  const oproj_dims *dims;
  int32_t ranks;
  oproj_reduce reduce;
  int32_t tokens, chunk;
} choices[] = {
    /* Few tokens, and two ranks, whose chain is long beside the sum, run whole. */
    {&pro, 8, OPROJ_REDUCE_ALL, 0, 0},
    {&pro, 8, OPROJ_REDUCE_ALL, 1, 1},
    {&pro, 8, OPROJ_REDUCE_ALL, 2047, 2047},
    {&flash, 8, OPROJ_REDUCE_ALL, 2048, 2048},
    {&pro, 2, OPROJ_REDUCE_ALL, 65536, 65536},
    {&flash, 2, OPROJ_REDUCE_SCATTER, 8192, 8192},
    /* The more ranks, the longer the sum beside the chain. */
    {&pro, 8, OPROJ_REDUCE_ALL, 2048, 1024},
    {&pro, 8, OPROJ_REDUCE_ALL, 4096, 1408},
    {&pro, 8, OPROJ_REDUCE_ALL, 8192, 2048},
    {&pro, 8, OPROJ_REDUCE_VENDOR, 8192, 2048},
    {&pro, 4, OPROJ_REDUCE_ALL, 8192, 2816},
    {&flash, 8, OPROJ_REDUCE_ALL, 8192, 2816},
    {&flash, 4, OPROJ_REDUCE_ALL, 8192, 2816},
    /* Half the bytes over the links. */
    {&pro, 8, OPROJ_REDUCE_SCATTER, 8192, 2816},
    {&pro, 4, OPROJ_REDUCE_SCATTER, 8192, 8192},
    {&flash, 8, OPROJ_REDUCE_SCATTER, 8192, 2048},
};

START_TEST(choices_of_the_model) {
  oproj_chunk_call call = {.dims = *choices[_i].dims,
                           .ranks = choices[_i].ranks,
                           .reduce = choices[_i].reduce,
                           .tokens = choices[_i].tokens};
  ck_assert_int_eq(oproj_chunk_choose(&call, &oproj_chunk_h200), choices[_i].chunk);
}
END_TEST

/* Whatever it chooses is a multiple of a tile, no smaller than fills the GPU, and pays. */
START_TEST(choices_pay) {
  const oproj_dims *dims[] = {&flash, &pro};
  for (int d = 0; d < 2; d++) {
    for (int32_t ranks = 2; ranks <= 8; ranks++) {
      for (int32_t tokens = 1; tokens < 70000; tokens += 1 + tokens / 5) {
        oproj_chunk_call call = {
            .dims = *dims[d], .ranks = ranks, .reduce = OPROJ_REDUCE_ALL, .tokens = tokens};
        int32_t chunk = oproj_chunk_choose(&call, &oproj_chunk_h200);
        if (chunk == tokens) continue;
        ck_assert(chunk % 128 == 0 && chunk >= 1024 && chunk < tokens);
        ck_assert(oproj_chunk_count(&call, chunk) <= 8);
        ck_assert(oproj_chunk_estimate(&call, &oproj_chunk_h200, chunk) <
                  0.97 * oproj_chunk_estimate(&call, &oproj_chunk_h200, tokens));
      }
    }
  }
}
END_TEST

/* ---- what runs beside what ----------------------------------------------------------------- */

/* Two streams and the host, which only keep time: each holds when what was enqueued on it ends.
 * Values are the reference backend's, who knows no streams.  Everything writes down what it does:
 * "F2" a chain of 2 tokens, "S2" their sum, "<" a fork, ">" a join, "R" the host's read, "*" in
 * front of what is enqueued on the second stream. */
typedef struct clockwork {
  double host, main, beside;
  double chain_us, sum_us; /* of a token */
  int32_t fails_at;        /* the chain that fails, counted from 1 */
  bool shares; /* sums take a part of the device, which chains behind the first must leave */
  int32_t chains;
  size_t nans; /* in the shares that came to a sum */
  char log[256];
} clockwork;

static clockwork works;
static int main_stream, beside_stream; /* their addresses are the streams */

static void note(const void *stream, const char *what, int32_t tokens) {
  size_t used = strlen(works.log);
  snprintf(works.log + used, sizeof works.log - used, "%s%s", stream == &beside_stream ? "*" : "",
           what);
  used = strlen(works.log);
  if (tokens >= 0) snprintf(works.log + used, sizeof works.log - used, "%d", tokens);
}

static double *clock_of(const void *stream) {
  return stream == &beside_stream ? &works.beside : &works.main;
}

/* Work is enqueued by now, and begins when all that lies before it on its stream has ended. */
static void run_on(const void *stream, double us) {
  double *at = clock_of(stream);
  *at = fmax(*at, works.host) + us;
}

static oproj_status timed_forward(oproj_kernels_weights *weights, const oproj_io *io,
                                  const oproj_kernels_part *part, const oproj_kernels_out *out,
                                  uint16_t *partial, void *stream) {
  note(stream, "F", part->tokens);
  ck_assert_int_eq(part->spare > 0, works.shares && part->begin > 0);
  if (++works.chains == works.fails_at) return oproj_fail(OPROJ_ERR_DEVICE, "a chain failed");
  run_on(stream, part->tokens * works.chain_us);
  return oproj_kernels_ref.forward(weights, io, part, out, partial, NULL);
}

static oproj_status timed_fork(oproj_kernels *kernels, void *stream, void **beside) {
  (void)kernels;
  note(stream, "<", -1);
  works.beside = fmax(works.beside, *clock_of(stream));
  *beside = &beside_stream;
  return OPROJ_OK;
}

static oproj_status timed_join(oproj_kernels *kernels, void *stream) {
  (void)kernels;
  note(stream, ">", -1);
  *clock_of(stream) = fmax(*clock_of(stream), works.beside);
  return OPROJ_OK;
}

static oproj_status timed_read(oproj_kernels *kernels, void *to, const void *from, size_t bytes,
                               void *stream) {
  note(stream, "R", -1);
  works.host = fmax(works.host, *clock_of(stream));
  return oproj_kernels_ref.buffer_read(kernels, to, from, bytes, stream);
}

/* The share of this rank alone: all of it, or its rows. */
static void copy_share(const oproj_comm *comm, oproj_reduce mode, int32_t tokens, int32_t hidden,
                       const uint16_t *partial, uint16_t *y) {
  int32_t begin = 0, end = tokens;
  for (int64_t i = 0; i < (int64_t)tokens * hidden; i++)
    works.nans += (partial[i] & 0x7FFF) > 0x7F80;
  if (mode == OPROJ_REDUCE_SCATTER) oproj_plan_rows(tokens, comm->size, comm->rank, &begin, &end);
  memmove(y, partial + (int64_t)begin * hidden, (size_t)(end - begin) * (size_t)hidden * sizeof *y);
}

static oproj_status timed_reduce_device(oproj_comm *comm, oproj_comm_end *end, oproj_reduce mode,
                                        int32_t tokens, const uint16_t *partial, uint16_t *y,
                                        int sent, void *stream) {
  (void)end, (void)sent;
  note(stream, "S", tokens);
  run_on(stream, tokens * works.sum_us);
  copy_share(comm, mode, tokens, data_tiny_v4.hidden, partial, y);
  return OPROJ_OK;
}

static oproj_status timed_reduce(oproj_comm *comm, oproj_reduce mode, int32_t tokens,
                                 int32_t hidden, const uint16_t *partial, uint16_t *y) {
  note(NULL, "S", tokens);
  works.host += tokens * works.sum_us;
  copy_share(comm, mode, tokens, hidden, partial, y);
  return OPROJ_OK;
}

/* Rank 0 of 2, its context turned into one of a device: with sums on it, or through the host. */
typedef struct bench {
  data_layer data;
  oproj_kernels_ops ops;
  oproj_comm_ops comm_ops;
  oproj_comm *comm;
  oproj_ctx *ctx;
  oproj_layer *layer;
  oproj_comm_end end;
} bench;

static void open_bench(bench *b, int32_t tokens, oproj_reduce reduce, int32_t chunk_tokens,
                       bool on_device) {
  *b = (bench){.data = data_make(&data_tiny_v4, false, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, tokens),
               .comm = ranks_comm(0, 2)};
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = tokens;
  config.reduce = reduce;
  config.chunk_tokens = chunk_tokens;
  b->comm_ops = *b->comm->ops;
  b->comm_ops.reduce = timed_reduce;
  b->comm_ops.reduce_device = timed_reduce_device;
  b->comm->ops = &b->comm_ops;
  EXPECT_OK(oproj_ctx_create(&b->ctx, b->comm, &b->data.dims, &config));
  data_share share = data_take(&b->data, oproj_ctx_shard(b->ctx));
  EXPECT_OK(oproj_layer_create(&b->layer, b->ctx, &share.wo_a, &share.wo_b));
  data_share_free(&share);
  b->ops = oproj_kernels_ref;
  b->ops.host = 0;
  b->ops.forward = timed_forward;
  b->ops.fork = timed_fork;
  b->ops.join = timed_join;
  b->ops.buffer_read = timed_read;
  b->ctx->ops = &b->ops;
  b->end.partial = b->ctx->partial;
  if (on_device)
    b->ctx->end = &b->end;
  else
    b->ctx->host_partial = malloc((size_t)tokens * (size_t)b->data.dims.hidden * 2);
  works = (clockwork){.chain_us = 3.0, .sum_us = 2.0, .shares = on_device};
}

static void close_bench(bench *b) {
  b->ctx->ops = &oproj_kernels_ref;
  b->ctx->end = NULL;
  oproj_layer_destroy(b->layer);
  oproj_ctx_destroy(b->ctx);
  oproj_comm_destroy(b->comm);
  data_free(&b->data);
}

static oproj_status forward(bench *b, uint16_t *y) {
  oproj_io io = data_io(&b->data, oproj_ctx_shard(b->ctx));
  io.y = y;
  return oproj_forward(b->layer, &io, &main_stream);
}

static size_t values_of(int32_t tokens) {
  return (size_t)tokens * (size_t)data_tiny_v4.hidden;
}

/* y of the whole call, to be freed; 0xAAAA where nothing is written. */
static uint16_t *forward_whole(int32_t tokens, oproj_reduce reduce) {
  bench b;
  uint16_t *y = malloc(values_of(tokens) * sizeof *y);
  memset(y, 0xAA, values_of(tokens) * sizeof *y);
  open_bench(&b, tokens, reduce, 0, true);
  EXPECT_OK(forward(&b, y));
  close_bench(&b);
  return y;
}

/* Calls of a device are cut by multiples of 128. */
static const struct {
  oproj_reduce reduce;
  int32_t tokens, chunk;
  bool on_device;
  const char *log;
  double us;
} orders[] = {
    /* One chunk: a chain and a sum on the caller's stream. */
    {OPROJ_REDUCE_ALL, 300, 0, true, "F300S300", 300 * 5},
    {OPROJ_REDUCE_ALL, 128, 1, true, "F128S128", 128 * 5},
    {OPROJ_REDUCE_ALL, 300, 300, true, "F300S300", 300 * 5},
    {OPROJ_REDUCE_ALL, 300, 0, false, "F300RS300", 300 * 5},
    /* Sums hide behind chains but for the last. */
    {OPROJ_REDUCE_ALL, 300, 100, true, "F128<F128*S128<F44*S128>S44",
     128 * 2 * 3 + 128 * 2 + 44 * 2},
    {OPROJ_REDUCE_SCATTER, 300, 128, true, "F128<F128*S128<F44*S128>S44",
     128 * 2 * 3 + 128 * 2 + 44 * 2},
    {OPROJ_REDUCE_ALL, 384, 128, true, "F128<F128*S128<F128*S128>S128", 128 * (3 * 3 + 2)},
    /* The host waits for a sum when the next chain is on its way. */
    {OPROJ_REDUCE_ALL, 384, 128, false, "F128<F128*RS128<F128*RS128>RS128", 128 * (3 * 3 + 2)},
};

START_TEST(sums_run_beside_chains) {
  bench b;
  int32_t tokens = orders[_i].tokens;
  uint16_t *want = forward_whole(tokens, orders[_i].reduce);
  uint16_t *y = malloc(values_of(tokens) * sizeof *y);
  memset(y, 0xAA, values_of(tokens) * sizeof *y);
  open_bench(&b, tokens, orders[_i].reduce, orders[_i].chunk, orders[_i].on_device);
  EXPECT_OK(forward(&b, y));
  ck_assert_str_eq(works.log, orders[_i].log);
  ck_assert_double_eq_tol(fmax(works.main, works.host), orders[_i].us, 1e-6);
  ck_assert(memcmp(y, want, values_of(tokens) * sizeof *y) == 0);
  close_bench(&b);
  free(want);
  free(y);
}
END_TEST

/* The others wait for this rank's share of every chunk: from the chain that failed on it is NaN. */
START_TEST(a_failed_rank_joins_every_sum) {
  bench b;
  uint16_t *y = malloc(values_of(384) * sizeof *y);
  for (int32_t failing = 1; failing <= 3; failing++) {
    open_bench(&b, 384, OPROJ_REDUCE_ALL, 128, true);
    works.fails_at = failing;
    EXPECT_FAIL(forward(&b, y), OPROJ_ERR_DEVICE, "a chain failed");
    ck_assert_uint_eq(works.nans, values_of(128 * (4 - failing)));
    int sums = 0;
    for (const char *at = works.log; (at = strstr(at, "S128")) != NULL; at++) sums++;
    ck_assert_int_eq(sums, 3);
    close_bench(&b);
  }
  open_bench(&b, 384, OPROJ_REDUCE_ALL, 128, true);
  EXPECT_FAIL(forward(&b, NULL), OPROJ_ERR_INVALID, "y must not be NULL");
  ck_assert_uint_eq(works.nans, values_of(384));
  close_bench(&b);
  /* Through the host all ranks agree to stop. */
  open_bench(&b, 384, OPROJ_REDUCE_ALL, 128, false);
  works.fails_at = 2;
  EXPECT_FAIL(forward(&b, y), OPROJ_ERR_DEVICE, "a chain failed");
  ck_assert_str_eq(works.log, "F128<F128*RS128<");
  close_bench(&b);
  free(y);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("chunk");
  TCase *tc = tcase_create("chunk");
  tcase_set_timeout(tc, 120);
  tcase_add_test(tc, chunks_hold_every_token_once);
  tcase_add_test(tc, one_chunk_is_the_whole_call);
  tcase_add_test(tc, estimates_follow_the_streams);
  tcase_add_loop_test(tc, choices_of_the_model, 0, sizeof choices / sizeof choices[0]);
  tcase_add_test(tc, choices_pay);
  tcase_add_loop_test(tc, sums_run_beside_chains, 0, sizeof orders / sizeof orders[0]);
  tcase_add_test(tc, a_failed_rank_joins_every_sum);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
