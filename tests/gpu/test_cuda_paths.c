/* test_cuda_paths.c - the paths of one GPU against each other and against the reference backend,
 * through the public API: each forced in turn. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/num.h"
#include "support/data.h"
#include "support/expect.h"

enum { SKIPPED = 77, MOST_TOKENS = 1024 };

/* Dimensions that every path takes, in both recipes. */
static const oproj_dims recipes[] = {{640, 16, 512, 64, 2, 256, 128},
                                     {640, 16, 512, 64, 2, 256, 32}};

#define CUDA_OK(call) ck_assert_msg((call) == cudaSuccess, "%s failed", #call)

typedef struct run {
  oproj_comm *comm;
  oproj_ctx *ctx;
  oproj_layer *layer;
  void *attn_out, *positions, *cos_sin, *y;
} run;

static void *upload(oproj_ctx *ctx, const void *from, size_t bytes) {
  void *to;
  EXPECT_OK(oproj_buffer_create(ctx, bytes, &to));
  EXPECT_OK(oproj_buffer_write(ctx, to, from, bytes, NULL));
  return to;
}

static run open_run(const data_layer *data, const char *backend, oproj_path path) {
  run r = {0};
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = backend;
  config.max_tokens = MOST_TOKENS;
  config.path = path;
  EXPECT_OK(oproj_comm_self(&r.comm));
  EXPECT_OK(oproj_ctx_create(&r.ctx, r.comm, &data->dims, &config));
  EXPECT_OK(oproj_layer_create(&r.layer, r.ctx, &data->wo_a, &data->wo_b));
  const oproj_dims *d = &data->dims;
  size_t tokens = (size_t)data->tokens;
  r.attn_out = upload(r.ctx, data->attn_out, tokens * (size_t)(d->heads * d->head_dim) * 2);
  r.positions = upload(r.ctx, data->positions, tokens * sizeof *data->positions);
  r.cos_sin =
      upload(r.ctx, data->cos_sin, (size_t)(data->cos_sin_rows * d->rope_dim) * sizeof(float));
  EXPECT_OK(oproj_buffer_create(r.ctx, tokens * (size_t)d->hidden * 2, &r.y));
  return r;
}

static void close_run(run *r) {
  oproj_buffer_destroy(r->ctx, r->attn_out);
  oproj_buffer_destroy(r->ctx, r->positions);
  oproj_buffer_destroy(r->ctx, r->cos_sin);
  oproj_buffer_destroy(r->ctx, r->y);
  oproj_layer_destroy(r->layer);
  oproj_ctx_destroy(r->ctx);
  oproj_comm_destroy(r->comm);
}

static oproj_io io_of(const run *r, const data_layer *data, int32_t tokens) {
  return (oproj_io){.tokens = tokens,
                    .attn_out = r->attn_out,
                    .positions = r->positions,
                    .cos_sin = r->cos_sin,
                    .cos_sin_rows = data->cos_sin_rows,
                    .cos_sin_width = data->dims.rope_dim,
                    .y = r->y,
                    .flags = OPROJ_EARLY_TRIGGER};
}

/* y of the first `tokens` tokens, over a poisoned buffer; in host memory, freed by the caller. */
static uint16_t *forward(const run *r, const data_layer *data, int32_t tokens) {
  size_t bytes = (size_t)tokens * (size_t)data->dims.hidden * sizeof(uint16_t);
  uint16_t *y = malloc(bytes + 1);
  memset(y, 0xAA, bytes);
  EXPECT_OK(oproj_buffer_write(r->ctx, r->y, y, bytes, NULL));
  oproj_io io = io_of(r, data, tokens);
  EXPECT_OK(oproj_forward(r->layer, &io, NULL));
  EXPECT_OK(oproj_buffer_read(r->ctx, y, r->y, bytes, NULL));
  return y;
}

static void check_same(const uint16_t *got, const uint16_t *want, size_t count, const char *what,
                       int32_t tokens) {
  for (size_t i = 0; i < count; i++)
    ck_assert_msg(got[i] == want[i], "%s, %d tokens: y[%zu] is %04x, wanted %04x", what, tokens, i,
                  got[i], want[i]);
}

static data_layer make(const oproj_dims *dims, bool exact, int32_t tokens) {
  return data_make(dims, exact, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, tokens);
}

/* The quantiser in front of WO_A or inside it: the same codes, multiplied in the same order. */
START_TEST(fused_equals_grouped) {
  data_layer data = make(&recipes[_i], false, 32);
  run fused = open_run(&data, "cuda", OPROJ_PATH_FUSED);
  run grouped = open_run(&data, "cuda", OPROJ_PATH_GROUPED);
  for (int32_t tokens = 1; tokens <= 32; tokens++) {
    uint16_t *a = forward(&fused, &data, tokens), *b = forward(&grouped, &data, tokens);
    check_same(a, b, (size_t)(tokens * data.dims.hidden), "fused", tokens);
    free(a);
    free(b);
  }
  oproj_io io = io_of(&fused, &data, 33);
  EXPECT_FAIL(oproj_forward(fused.layer, &io, NULL), OPROJ_ERR_UNSUPPORTED, "more than 32 tokens");
  close_run(&fused);
  close_run(&grouped);
  data_free(&data);
}
END_TEST

START_TEST(exact_data_equals_the_reference) {
  static const struct {
    oproj_path path;
    const char *name;
    int32_t tokens[8]; /* ends with 0 */
  } cases[] = {{OPROJ_PATH_PORTABLE, "portable", {1, 8, 9, 65, 1024}},
               {OPROJ_PATH_FUSED, "fused", {1, 7, 8, 9, 16, 17, 32}},
               {OPROJ_PATH_DECODE, "decode", {1, 2, 7, 8, 9, 15, 16}},
               {OPROJ_PATH_GROUPED, "grouped", {1, 16, 33, 64, 65, 127, 1024}},
               {OPROJ_PATH_LIBRARY, "library", {768, 1001, 1024}}};
  data_layer data = make(&recipes[_i], true, MOST_TOKENS);
  run ref = open_run(&data, "ref", OPROJ_PATH_AUTO);
  uint16_t *want = forward(&ref, &data, MOST_TOKENS);
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    if (cases[c].path == OPROJ_PATH_LIBRARY && data.dims.quant_block == 32) continue;
    run r = open_run(&data, "cuda", cases[c].path);
    for (const int32_t *tokens = cases[c].tokens; *tokens > 0; tokens++) {
      uint16_t *y = forward(&r, &data, *tokens);
      check_same(y, want, (size_t)(*tokens * data.dims.hidden), cases[c].name, *tokens);
      free(y);
    }
    close_run(&r);
  }
  free(want);
  close_run(&ref);
  data_free(&data);
}
END_TEST

/* Two batches in turn, in one graph of dependent launches, over and over: the workspace is shared,
 * so a kernel that started too early would mix them. */
START_TEST(replays_do_not_drift) {
  enum { REPLAYS = 50000, CHECK_EVERY = 5000, FIRST = 5, SECOND = 40 };
  data_layer data = make(&recipes[_i % 2], false, SECOND);
  run r = open_run(&data, "cuda", _i < 2 ? OPROJ_PATH_AUTO : OPROJ_PATH_FUSED);
  int32_t second = _i < 2 ? SECOND : 32;
  uint16_t *want_first = forward(&r, &data, FIRST), *want_second = forward(&r, &data, second);
  size_t hidden = (size_t)data.dims.hidden;
  void *other;
  EXPECT_OK(oproj_buffer_create(r.ctx, (size_t)second * hidden * 2, &other));

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  oproj_io a = io_of(&r, &data, FIRST), b = io_of(&r, &data, second);
  b.y = other;
  CUDA_OK(cudaStreamCreate(&stream));
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT_OK(oproj_forward(r.layer, &a, stream));
  EXPECT_OK(oproj_forward(r.layer, &b, stream));
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  uint16_t *y = malloc((size_t)second * hidden * 2);
  for (int replay = 1; replay <= REPLAYS; replay++) {
    if (replay % CHECK_EVERY == 0) {
      CUDA_OK(cudaMemsetAsync(a.y, 0xAA, FIRST * hidden * 2, stream));
      CUDA_OK(cudaMemsetAsync(b.y, 0xAA, (size_t)second * hidden * 2, stream));
    }
    CUDA_OK(cudaGraphLaunch(exec, stream));
    if (replay % CHECK_EVERY != 0) continue;
    EXPECT_OK(oproj_buffer_read(r.ctx, y, a.y, FIRST * hidden * 2, stream));
    check_same(y, want_first, FIRST * hidden, "first batch", FIRST);
    EXPECT_OK(oproj_buffer_read(r.ctx, y, b.y, (size_t)second * hidden * 2, stream));
    check_same(y, want_second, (size_t)second * hidden, "second batch", second);
  }
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaStreamDestroy(stream));
  oproj_buffer_destroy(r.ctx, other);
  free(y);
  free(want_first);
  free(want_second);
  close_run(&r);
  data_free(&data);
}
END_TEST

int main(void) {
  const char *missing = oproj_backend_missing("cuda");
  int capability = 0, device = 0;
  if (!missing) cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device);
  if (missing || capability != 9) {
    fprintf(stderr, "no SM90 here%s%s\n", missing ? ": " : "", missing ? missing : "");
    return getenv("OPROJ_REQUIRE_GPU") ? 1 : SKIPPED;
  }
  Suite *suite = suite_create("cuda_paths");
  TCase *tc = tcase_create("paths");
  tcase_set_timeout(tc, 300);
  tcase_add_loop_test(tc, fused_equals_grouped, 0, 2);
  tcase_add_loop_test(tc, exact_data_equals_the_reference, 0, 2);
  tcase_add_loop_test(tc, replays_do_not_drift, 0, 4);
  suite_add_tcase(suite, tc);
  SRunner *runner = srunner_create(suite);
  srunner_set_fork_status(runner, CK_NOFORK); /* a CUDA context does not survive a fork */
  srunner_run_all(runner, CK_NORMAL);
  int failed = srunner_ntests_failed(runner) != 0;
  srunner_free(runner);
  return failed;
}
