/* test_cuda_paths.c - the paths of one GPU against each other: fused and unfused, replayed and
 * eager, with and without early trigger, over poison. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/layout.h"
#include "gpu/cuda_rig.h"
#include "gpu/cuda_run.h"
#include "kernels/cuda/sm90_decode.h"
#include "tp/ctx.h"

static data_layer make(const oproj_dims *dims, bool exact, int32_t tokens) {
  return data_make(dims, exact, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, tokens);
}

/* The quantiser in front of WO_A or inside it: the same codes, multiplied in the same order. */
START_TEST(fused_equals_grouped) {
  if (!run_has(OPROJ_PATH_FUSED)) return;
  data_layer data = make(&run_recipes[_i], false, 33);
  run fused = run_open("cuda", OPROJ_PATH_FUSED, data.tokens, &data, 1);
  run grouped = run_open("cuda", OPROJ_PATH_GROUPED, data.tokens, &data, 1);
  batch a = batch_open(&fused, &data, 0, data.tokens, 0);
  batch b = batch_open(&grouped, &data, 0, data.tokens, 0);
  for (int32_t tokens = 1; tokens <= 32; tokens++) {
    batch_set_tokens(&a, &data, tokens);
    batch_set_tokens(&b, &data, tokens);
    uint16_t *found = run_forward(&fused, 0, &a), *wanted = run_forward(&grouped, 0, &b);
    expect_same("fused y", found, wanted, a.y_count);
    free(found);
    free(wanted);
  }
  batch_set_tokens(&a, &data, 33);
  EXPECT_FAIL(oproj_forward(fused.layers[0], &a.io, NULL), OPROJ_ERR_UNSUPPORTED,
              "more than 32 tokens");
  batch_close(&fused, &a);
  batch_close(&grouped, &b);
  run_close(&fused);
  run_close(&grouped);
  data_free(&data);
}
END_TEST

/* ---- bad positions ------------------------------------------------------------------------- */

/* Its token is NaN, the others are as they were, and the call that comes next says so, once. */
START_TEST(bad_position_on_every_path) {
  enum { TOKENS = 8, BAD = 2 };
  data_layer data = make(&run_recipes[_i], false, TOKENS);
  for (int p = 0; p < RUN_PATHS; p++) {
    if (!run_serves(&run_paths[p], &data.dims, TOKENS)) continue;
    run r = run_open("cuda", run_paths[p].path, TOKENS, &data, 1);
    batch b = batch_open(&r, &data, 0, TOKENS, 0);
    uint16_t *wanted = run_forward(&r, 0, &b), *found = malloc(b.y_count * sizeof *found);
    int64_t bad = data.cos_sin_rows;
    EXPECT_OK(oproj_buffer_write(r.ctx, (int64_t *)b.positions + BAD, &bad, sizeof bad, NULL));
    EXPECT_OK(oproj_forward(r.layers[0], &b.io, NULL));
    EXPECT_FAIL(oproj_buffer_read(r.ctx, found, b.io.y, b.y_count * sizeof *found, NULL),
                OPROJ_ERR_INVALID, "positions[2] of an earlier call");
    EXPECT_OK(oproj_buffer_read(r.ctx, found, b.io.y, b.y_count * sizeof *found, NULL));
    for (size_t i = 0; i < b.y_count; i++) {
      bool in_bad = i / (size_t)data.dims.hidden == BAD;
      ck_assert_msg(in_bad ? (found[i] & 0x7FFF) > 0x7F80 : found[i] == wanted[i],
                    "%s: y[%zu] is %04x", run_paths[p].name, i, found[i]);
    }
    free(wanted);
    free(found);
    batch_close(&r, &b);
    run_close(&r);
  }
  data_free(&data);
}
END_TEST

/* A launch that gave up waiting for its own blocks, as its memory says: NaN, and an error that
 * stays, instead of a wait. */
START_TEST(decode_that_stalled_stays_so) {
  enum { TOKENS = 5 };
  data_layer data = make(&run_recipes[_i], false, TOKENS);
  if (run_has(OPROJ_PATH_DECODE)) {
    run r = run_open("cuda", OPROJ_PATH_DECODE, TOKENS, &data, 1);
    batch b = batch_open(&r, &data, 0, TOKENS, 0);
    uint16_t *found = run_forward(&r, 0, &b);
    uint32_t stalled = 1;
    decode_control *control = r.ctx->kernels->decode->exchange.control;
    EXPECT_OK(oproj_buffer_write(r.ctx, &control->stalled, &stalled, sizeof stalled, NULL));
    EXPECT_OK(oproj_forward(r.layers[0], &b.io, NULL));
    for (int round = 0; round < 2; round++)
      EXPECT_FAIL(oproj_buffer_read(r.ctx, found, b.io.y, b.y_count * sizeof *found, NULL),
                  OPROJ_ERR_DEVICE, "waited in vain");
    EXPECT_FAIL(oproj_forward(r.layers[0], &b.io, NULL), OPROJ_ERR_DEVICE, "created anew");
    for (size_t i = 0; i < b.y_count; i++) ck_assert_int_gt(found[i] & 0x7FFF, 0x7F80);
    free(found);
    batch_close(&r, &b);
    run_close(&r);
  }
  data_free(&data);
}
END_TEST

/* ---- what must not matter ------------------------------------------------------------------ */

/* NaN behind heads, behind tokens, in rows from `tokens` on and all over the workspace, against a
 * dense input of so many tokens and a workspace as it was left; and where input and y are aligned
 * to. */
START_TEST(padding_changes_nothing) {
  static const int32_t pads[] = {8, 3}; /* loads of 16 bytes, and single ones */
  static const int32_t counts[] = {1, 5, 17, 32, 33, 130, 769, 770, 771};
  data_layer data = make(&run_recipes[_i], false, 800);
  for (int p = 0; p < RUN_PATHS; p++) {
    if (!run_has(run_paths[p].path)) continue;
    run r = run_open("cuda", run_paths[p].path, data.tokens, &data, 1);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
      if (!run_serves(&run_paths[p], &data.dims, counts[i])) continue;
      batch dense = batch_open(&r, &data, 0, counts[i], 0);
      uint16_t *wanted = run_forward(&r, 0, &dense);
      for (int j = 0; j < 2; j++) {
        batch padded = batch_open(&r, &data, 0, counts[i], pads[j]);
        padded.io.y = (uint16_t *)padded.io.y - pads[j] % 8;
        run_poison_workspace(&r, NULL);
        uint16_t *found = run_forward(&r, 0, &padded);
        expect_same(run_paths[p].name, found, wanted, dense.y_count);
        free(found);
        batch_close(&r, &padded);
      }
      free(wanted);
      batch_close(&r, &dense);
    }
    run_close(&r);
  }
  data_free(&data);
}
END_TEST

/* The scales of a quantised activation, on the device, padding 0 or 0xFF. */
static void *scales_with_padding(const run *r, const oproj_quant *in_f32, oproj_scale_layout layout,
                                 int padding, int32_t block) {
  int32_t columns = in_f32->cols / block;
  size_t bytes = oproj_scale_bytes(layout, in_f32->groups, in_f32->tokens, in_f32->cols, block);
  uint8_t *scales = malloc(bytes);
  void *memory;
  memset(scales, padding, bytes);
  for (int32_t g = 0; g < in_f32->groups; g++)
    for (int32_t t = 0; t < in_f32->tokens; t++)
      for (int32_t s = 0; s < columns; s++) {
        int64_t at = oproj_layout_f32(g, t, s, in_f32->tokens, columns);
        uint32_t bits;
        memcpy(&bits, (const float *)in_f32->scales + at, sizeof bits);
        oproj_layout_store(scales, layout, g, t, s, in_f32->tokens, columns, (uint8_t)(bits >> 23));
      }
  EXPECT_OK(oproj_buffer_create(r->ctx, bytes, &memory));
  EXPECT_OK(oproj_buffer_write(r->ctx, memory, scales, bytes, NULL));
  free(scales);
  return memory;
}

/* One product of a caller's codes: z of WO_A, or y of WO_B; in host memory. */
static uint16_t *product(const run *r, int of_z, const oproj_quant *q, size_t count) {
  uint16_t *values = malloc(count * sizeof *values);
  void *out;
  EXPECT_OK(oproj_buffer_create(r->ctx, count * sizeof *values, &out));
  EXPECT_OK(of_z ? oproj_out_project(r->layers[0], q, out, NULL)
                 : oproj_group_project(r->layers[0], q, out, NULL));
  EXPECT_OK(oproj_buffer_read(r->ctx, values, out, count * sizeof *values, NULL));
  oproj_buffer_destroy(r->ctx, out);
  return values;
}

/* Codes of any value but NaN, scales 2^-4 to 2^3. */
static oproj_quant make_codes(const run *r, int32_t groups, int32_t tokens, int32_t cols,
                              int32_t block) {
  size_t count = (size_t)groups * (size_t)tokens * (size_t)cols;
  size_t bytes = oproj_scale_bytes(OPROJ_SCALE_F32, groups, tokens, cols, block);
  uint8_t *codes = malloc(count);
  float *scales = malloc(bytes);
  for (size_t i = 0; i < count; i++) codes[i] = (uint8_t)(data_hash(60, i) % 0x7F);
  for (size_t i = 0; i < bytes / sizeof *scales; i++)
    scales[i] = oproj_ue8m0_to_f32((uint8_t)(123 + data_hash(61, i) % 8));
  oproj_quant q = {.scales = scales, .groups = groups, .tokens = tokens, .cols = cols};
  void *memory;
  EXPECT_OK(oproj_buffer_create(r->ctx, count, &memory));
  EXPECT_OK(oproj_buffer_write(r->ctx, memory, codes, count, NULL));
  q.codes = memory;
  free(codes);
  return q;
}

static void check_scale_padding(const run *r, const run_path *path, const oproj_dims *d, int of_z,
                                int32_t tokens) {
  int32_t groups = of_z ? 1 : d->groups, cols = of_z ? d->groups * d->lora_rank : 4 * d->head_dim;
  size_t count = (size_t)tokens * (size_t)(of_z ? d->hidden : d->groups * d->lora_rank);
  oproj_quant q = make_codes(r, groups, tokens, cols, d->quant_block);
  for (int layout = 0; layout < LAYOUTS; layout++) {
    uint16_t *values[2];
    for (int nan = 0; nan < 2; nan++) {
      oproj_quant call = q;
      call.layout = (oproj_scale_layout)layout;
      call.scales = scales_with_padding(r, &q, call.layout, nan ? 0xFF : 0, d->quant_block);
      values[nan] = product(r, of_z, &call, count);
      oproj_buffer_destroy(r->ctx, call.scales);
    }
    expect_same(path->name, values[1], values[0], count);
    free(values[0]);
    free(values[1]);
  }
  oproj_buffer_destroy(r->ctx, q.codes);
  free(q.scales);
}

START_TEST(scale_padding_changes_nothing) {
  static const int32_t counts[] = {1, 7, 9, 33, 65, 129, 770, 1001};
  data_layer data = make(&run_recipes[_i], false, 1);
  for (int p = 0; p < RUN_PATHS; p++) {
    if (!run_has(run_paths[p].path)) continue;
    run r = run_open("cuda", run_paths[p].path, 1001, &data, 1);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
      for (int of_z = 0; of_z < 2; of_z++)
        check_scale_padding(&r, &run_paths[p], &data.dims, of_z, counts[i]);
    run_close(&r);
  }
  data_free(&data);
}
END_TEST

/* ---- 10^5 replays -------------------------------------------------------------------------- */

/* Two batches in turn through two layers that share the workspace: a kernel that started too early
 * would mix them, one that left something unwritten would leave NaN. */
enum { CALLS = 4, SLOTS = 8 };

typedef struct rounds {
  run r;
  batch batches[CALLS];
  uint16_t *wanted[CALLS];
  uint16_t *y;    /* of all calls, one behind the other, on the device */
  uint16_t *host; /* [SLOTS] times as many, pinned */
  size_t y_count;
  cudaStream_t stream;
} rounds;

static const int call_layer[CALLS] = {0, 1, 1, 0};

/* y of a context of its own, eager, without a trigger. */
static uint16_t *alone(oproj_path path, const data_layer *data, int32_t first, int32_t tokens,
                       int32_t max_tokens) {
  run r = run_open("cuda", path, max_tokens, data, 1);
  batch b = batch_open(&r, data, first, tokens, 0);
  uint16_t *y = run_forward(&r, 0, &b);
  batch_close(&r, &b);
  run_close(&r);
  return y;
}

/* How kernels follow one another. */
typedef struct manner {
  const char *name;
  int dependent;
  uint32_t flags;
} manner;

static const manner ways[] = {
    {"in turn", 0, 0}, {"dependent", 1, 0}, {"early", 1, OPROJ_EARLY_TRIGGER}};
enum { WAYS = sizeof ways / sizeof ways[0] };

/* Calls 0 and 2 take `few` tokens, 1 and 3 `many`, of other inputs each. */
static rounds open_rounds(oproj_path path, const data_layer data[2], int32_t few, int32_t many,
                          const manner *way) {
  setenv("OPROJ_PDL", way->dependent ? "1" : "0", 1);
  rounds s = {.r = run_open("cuda", path, many, data, 2)};
  unsetenv("OPROJ_PDL");
  void *memory;
  for (int i = 0; i < CALLS; i++) {
    int32_t tokens = i % 2 ? many : few, first = i * 3;
    s.batches[i] = batch_open(&s.r, &data[0], first, tokens, 8);
    s.batches[i].io.flags = way->flags;
    data_layer call = data[0];
    call.wo_a = data[call_layer[i]].wo_a;
    call.wo_b = data[call_layer[i]].wo_b;
    s.wanted[i] = alone(path, &call, first, tokens, many);
    s.y_count += s.batches[i].y_count;
  }
  EXPECT_OK(oproj_buffer_create(s.r.ctx, s.y_count * sizeof *s.y, &memory));
  s.y = memory;
  CUDA_OK(cudaMallocHost(&memory, SLOTS * s.y_count * sizeof *s.host));
  s.host = memory;
  CUDA_OK(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
  uint16_t *y = s.y;
  for (int i = 0; i < CALLS; i++) {
    s.batches[i].io.y = y;
    y += s.batches[i].y_count;
  }
  return s;
}

static void close_rounds(rounds *s) {
  CUDA_OK(cudaStreamDestroy(s->stream));
  CUDA_OK(cudaFreeHost(s->host));
  oproj_buffer_destroy(s->r.ctx, s->y);
  for (int i = 0; i < CALLS; i++) {
    free(s->wanted[i]);
    batch_close(&s->r, &s->batches[i]);
  }
  run_close(&s->r);
}

static void enqueue_round(const rounds *s) {
  run_poison_workspace(&s->r, s->stream);
  CUDA_OK(cudaMemsetAsync(s->y, 0xAA, s->y_count * sizeof *s->y, s->stream));
  for (int i = 0; i < CALLS; i++)
    EXPECT_OK(oproj_forward(s->r.layers[call_layer[i]], &s->batches[i].io, s->stream));
}

/* `count` rounds, each of them looked at: through two graphs in turn, or eager where there are
 * none. */
static void run_rounds(const rounds *s, const cudaGraphExec_t *graphs, int count,
                       const char *what) {
  for (int done = 0; done < count;) {
    int slots = count - done < SLOTS ? count - done : SLOTS;
    for (int slot = 0; slot < slots; slot++) {
      if (graphs)
        CUDA_OK(cudaGraphLaunch(graphs[slot % 2], s->stream));
      else
        enqueue_round(s);
      CUDA_OK(cudaMemcpyAsync(s->host + (size_t)slot * s->y_count, s->y, s->y_count * sizeof *s->y,
                              cudaMemcpyDeviceToHost, s->stream));
    }
    CUDA_OK(cudaStreamSynchronize(s->stream));
    for (int slot = 0; slot < slots; slot++) {
      const uint16_t *y = s->host + (size_t)slot * s->y_count;
      for (int i = 0; i < CALLS; i++) {
        if (memcmp(y, s->wanted[i], s->batches[i].y_count * sizeof *y) != 0) {
          char words[128];
          snprintf(words, sizeof words, "%s, round %d, call %d: y", what, done + slot, i);
          expect_same(words, y, s->wanted[i], s->batches[i].y_count);
        }
        y += s->batches[i].y_count;
      }
    }
    done += slots;
  }
}

/* 10^5 replays and more in all, or as many times that as the environment asks for. */
static const struct {
  oproj_path path;
  const char *name;
  int32_t few, many, block, replays;
} replayed[] = {{OPROJ_PATH_GROUPED, "grouped", 5, 40, 128, 12500},
                {OPROJ_PATH_GROUPED, "grouped", 5, 40, 32, 12500},
                {OPROJ_PATH_FUSED, "fused", 3, 32, 128, 12500},
                {OPROJ_PATH_FUSED, "fused", 3, 32, 32, 12500},
                {OPROJ_PATH_DECODE, "decode", 3, 32, 128, 12500},
                {OPROJ_PATH_DECODE, "decode", 3, 32, 32, 12500},
                {OPROJ_PATH_GROUPED, "grouped", 65, 130, 128, 500},
                {OPROJ_PATH_GROUPED, "grouped", 65, 130, 32, 500},
                {OPROJ_PATH_PORTABLE, "portable", 5, 40, 128, 500},
                {OPROJ_PATH_PORTABLE, "portable", 5, 40, 32, 500},
                {OPROJ_PATH_LIBRARY, "library", 770, 1001, 128, 500}};
enum { REPLAYED = sizeof replayed / sizeof replayed[0] };

static int replays_of(int row) {
  const char *times = getenv("OPROJ_TEST_REPLAYS");
  return replayed[row].replays * (times ? atoi(times) : 1);
}

START_TEST(replays_do_not_drift) {
  enum { EAGER = 200, SHORT_ROUNDS = 4 };
  int row = _i / WAYS;
  const manner *way = &ways[_i % WAYS];
  if (!run_has(replayed[row].path)) return;
  int32_t many = replayed[row].many;
  int replays = test_is_short() ? SHORT_ROUNDS : replays_of(row);
  oproj_dims dims = run_recipes[0];
  dims.quant_block = replayed[row].block;
  data_layer data[2] = {make(&dims, false, many + 3 * CALLS), make(&dims, true, 1)};
  rounds s = open_rounds(replayed[row].path, data, replayed[row].few, many, way);
  char what[64];

  snprintf(what, sizeof what, "%s, eager, %s", replayed[row].name, way->name);
  run_rounds(&s, NULL, test_is_short() ? SHORT_ROUNDS : EAGER, what);

  cudaGraphExec_t graphs[2];
  for (int i = 0; i < 2; i++) {
    cudaGraph_t graph;
    CUDA_OK(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeThreadLocal));
    enqueue_round(&s);
    CUDA_OK(cudaStreamEndCapture(s.stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&graphs[i], graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
  }
  snprintf(what, sizeof what, "%s, replayed, %s", replayed[row].name, way->name);
  run_rounds(&s, graphs, replays, what);
  for (int i = 0; i < 2; i++) CUDA_OK(cudaGraphExecDestroy(graphs[i]));
  close_rounds(&s);
  data_free(&data[0]);
  data_free(&data[1]);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("cuda_paths");
  TCase *tests = tcase_create("paths");
  tcase_add_loop_test(tests, bad_position_on_every_path, 0, RUN_RECIPES);
  tcase_add_loop_test(tests, decode_that_stalled_stays_so, 0, RUN_RECIPES);
  tcase_add_loop_test(tests, fused_equals_grouped, 0, RUN_RECIPES);
  tcase_add_loop_test(tests, padding_changes_nothing, 0, RUN_RECIPES);
  tcase_add_loop_test(tests, scale_padding_changes_nothing, 0, RUN_RECIPES);
  tcase_add_loop_test(tests, replays_do_not_drift, 0, WAYS * REPLAYED);
  return run_gpu_suite(suite, tests);
}
