/* test_cuda_large.c - large batches, around every token count at which another kernel, or another
 * shape of one, takes over: against ref and double precision, with the bytes behind the result,
 * CUDA graphs and input that is not finite.  Other GPUs run the same tests on what they have.
 *
 * Two models, in both recipes: one has rows enough in WO_B, the last tile ragged, the other in
 * WO_A, for SM90's kernel for many tokens to begin right behind 128 of them. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/layout.h"
#include "base/num.h"
#include "gpu/cuda_rig.h"
#include "kernels/cuda/cublaslt.h"
#include "support/expect.h"

enum { MOST_TOKENS = 1539, BF16_NAN = 0x7FC0 };

static const int32_t large_counts[] = {65,  100, 127, 128, 129,  257,
                                       500, 767, 768, 769, 1300, MOST_TOKENS};
enum { LARGE_COUNTS = sizeof large_counts / sizeof large_counts[0] };

static const oproj_kernels_out own_out;

enum { MODELS = 4 };

static rig large_rig(int model) {
  int32_t block = model < 2 ? 128 : 32;
  return model % 2 == 0 ? rig_open(4416, 1, 512, 2, 256, block, MOST_TOKENS)
                        : rig_open(512, 1, 512, 2, 2304, block, MOST_TOKENS);
}

/* partial of one call, in host memory; reading it checks what lies behind its last row. */
static uint16_t *forward(const rig *r, const layer *l, const oproj_io *io) {
  device_buffer partial = device_make(r, (size_t)io->tokens * (size_t)r->config.dims.hidden * 2);
  EXPECT_OK(rig_forward(r->ops, l->cuda, io, &own_out, partial.at, NULL));
  uint16_t *values = device_read(r, &partial);
  device_free(r, &partial);
  return values;
}

/* ---- what cuBLASLt serves ------------------------------------------------------------------ */

/* On SM90 WO_B with any weight scales, in blocks of 32 with such as are joined; on SM100 and SM103
 * both products with powers of two. */
START_TEST(cublaslt_serves_large_batches) {
  int powers = _i % 2, block = _i < 2 ? 128 : 32, joined = block == 32;
  rig r = rig_open(512, 4, 512, 2, 256, block, MOST_TOKENS);
  layer l = layer_open(&r, OPROJ_DTYPE_E4M3, powers ? DATA_EXACT : DATA_RANDOM, 40);
  int32_t capability = r.ops->capability(r.cuda);
  int sm90 = capability == 90, sm100 = capability == 100 || capability == 103;
  int takes = (sm90 && (powers || !joined)) || (sm100 && powers);
  ck_assert_int_eq(r.cuda->lt != NULL, sm90 || sm100);
  for (int i = 0; i < LARGE_COUNTS; i++) {
    oproj_quant x = r.cuda->work.xq, z = r.cuda->work.zq;
    x.layout = z.layout = OPROJ_SCALE_F32;
    x.tokens = z.tokens = large_counts[i];
    x.groups = r.config.groups;
    oproj_kernels_part whole = oproj_kernels_whole(large_counts[i]);
    const uint16_t *aligned = r.cuda->work.x;
    int large = large_counts[i] >= CUDA_LT_TOKENS;
    ck_assert_int_eq(cuda_lt_takes_groups(l.cuda, &whole, &x, r.cuda->work.z),
                     large && sm100 && powers);
    ck_assert_int_eq(cuda_lt_takes_out(l.cuda, &whole, &z, joined, aligned), large && takes);
    /* A result that is not aligned is staged. */
    ck_assert_int_eq(cuda_lt_takes_out(l.cuda, &whole, &z, joined, aligned + 4), large && takes);
    if (joined && sm90) ck_assert_int_eq(cuda_lt_takes_out(l.cuda, &whole, &z, 0, aligned), 0);
    /* A caller's buffer has no slack. */
    z.codes = r.cuda->work.xq.codes;
    large = large && large_counts[i] % CUDA_LT_MULTIPLE == 0;
    ck_assert_int_eq(cuda_lt_takes_out(l.cuda, &whole, &z, joined, aligned), large && takes);
  }
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

/* The scales of SM100's tensor cores, made by a kernel that any GPU runs: of weights (_i < 2) and
 * of activations, in blocks of 128 and of 32. */
START_TEST(tiles_hold_the_exponents_of_scales) {
  enum { ROWS = 200, WORDS = 3, GROUPS = 2, COLUMNS = WORDS * OPROJ_TILE_COLUMNS };
  int32_t block = _i % 2 ? 32 : 128, per_scale = block / 32, columns = COLUMNS / per_scale;
  bool weights = _i < 2;
  int32_t groups = weights ? 1 : GROUPS, scale_rows = weights ? (ROWS + block - 1) / block : ROWS;
  rig r = small_rig(128);
  size_t count = (size_t)groups * (size_t)scale_rows * (size_t)columns;
  size_t bytes = (size_t)oproj_layout_bytes(OPROJ_SCALE_UE8M0_TILE, groups, ROWS, COLUMNS);
  float *scales = malloc(count * sizeof *scales);
  uint8_t *wanted = calloc(bytes, 1);
  for (size_t i = 0; i < count; i++) scales[i] = ldexpf(1.0f, (int)(i * 37 % 200) - 100);
  device_buffer from = device_copy(&r, scales, count * sizeof *scales), to = device_make(&r, bytes);
  cuda_tiles p = {.scales = from.at,
                  .groups = groups,
                  .rows = ROWS,
                  .words = WORDS,
                  .rows_per_scale = weights ? block : 1,
                  .columns_per_scale = per_scale,
                  .row_stride = weights ? columns : 1,
                  .column_stride = weights ? 1 : ROWS,
                  .group_stride = (int64_t)ROWS * columns,
                  .tiles = to.at};
  ck_assert_int_eq(cuda_launch_tiles(&p, NULL), cudaSuccess);
  for (int64_t g = 0; g < groups; g++) {
    for (int64_t row = 0; row < ROWS; row++) {
      for (int64_t column = 0; column < COLUMNS; column++) {
        int64_t c = column / per_scale;
        float scale = weights ? scales[row / block * columns + c]
                              : scales[g * ROWS * columns + c * ROWS + row];
        oproj_layout_store(wanted, OPROJ_SCALE_UE8M0_TILE, g, row, column, ROWS, COLUMNS,
                           (uint8_t)oproj_ue8m0_exact(scale));
      }
    }
  }
  void *found = device_read(&r, &to);
  ck_assert_mem_eq(found, wanted, bytes);
  free(found);
  free(wanted);
  free(scales);
  device_free(&r, &from);
  device_free(&r, &to);
  rig_close(&r);
}
END_TEST

/* ---- values -------------------------------------------------------------------------------- */

/* Takes the quantised z of a call home. */
typedef struct witness {
  const rig *r;
  quant *zq;
} witness;

static oproj_status take_z(void *user, const oproj_quant *z, uint16_t *partial, void *stream) {
  const witness *w = user;
  (void)partial;
  EXPECT_OK(
      w->r->ops->buffer_read(w->r->cuda, w->zq->host.codes, z->codes, w->zq->code_bytes, stream));
  return w->r->ops->buffer_read(w->r->cuda, w->zq->host.scales, z->scales, w->zq->scale_bytes,
                                stream);
}

/* Codes and scales of z, padding included. */
static void expect_same_z(const rig *r, const layer *l, const input *in) {
  quant found = quant_open(r, OPROJ_SCALE_F32, 1, in->host.tokens, r->z_cols);
  quant wanted = quant_open(r, OPROJ_SCALE_F32, 1, in->host.tokens, r->z_cols);
  witness w = {r, &found};
  oproj_kernels_out out = {.fn = take_z, .user = &w, .layout = OPROJ_SCALE_F32};
  uint16_t *z = malloc((size_t)in->host.tokens * (size_t)r->z_cols * sizeof *z);
  EXPECT_OK(rig_forward(r->ops, l->cuda, &in->device, &out, NULL, NULL));
  EXPECT_OK(oproj_kernels_ref.group_forward(l->ref, &in->host, z, NULL));
  EXPECT_OK(oproj_kernels_ref.z_quantize(r->ref, in->host.tokens, z, &wanted.host, NULL));
  ck_assert_int_eq(memcmp(found.host.codes, wanted.host.codes, wanted.code_bytes), 0);
  ck_assert_int_eq(memcmp(found.host.scales, wanted.host.scales, wanted.scale_bytes), 0);
  free(z);
  quant_close(r, &found);
  quant_close(r, &wanted);
}

START_TEST(exact_data_is_bit_equal) {
  rig r = large_rig(_i);
  layer l = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_EXACT, 42);
  for (int i = 0; i < LARGE_COUNTS; i++) {
    input in = input_open(&r, large_counts[i], 0, OPROJ_POSITION_I64, DATA_EXACT);
    size_t count = (size_t)large_counts[i] * (size_t)r.config.dims.hidden;
    uint16_t *wanted = malloc(count * sizeof *wanted);
    EXPECT_OK(rig_forward(&oproj_kernels_ref, l.ref, &in.host, &own_out, wanted, NULL));
    uint16_t *found = forward(&r, &l, &in.device);
    expect_same("exact partial", found, wanted, count);
    expect_same_z(&r, &l, &in);
    free(found);
    free(wanted);
    input_close(&r, &in);
  }
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

/* One group of an odd number of 128 rows: the last tile of two parts is half empty. */
START_TEST(rows_end_within_a_tile) {
  rig r = rig_open(128, 1, 512, 1, 640, 128, 3400);
  layer l = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_EXACT, 46);
  input in = input_open(&r, 3400, 0, OPROJ_POSITION_I64, DATA_EXACT);
  expect_same_z(&r, &l, &in);
  input_close(&r, &in);
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

/* e4m3 has 3 bits behind the point: rounding to it costs about 2.6 %. */
static void expect_rounded(const char *what, const double *found, const double *wanted,
                           size_t count) {
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < count; i++) {
    error += (found[i] - wanted[i]) * (found[i] - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  double relative = sqrt(error / norm);
  ck_assert_msg(relative <= 4e-2, "%s: relative error %g over %zu values", what, relative, count);
}

static void check_random(const rig *r, const layer *l, int32_t tokens) {
  int32_t block = r->config.dims.quant_block;
  size_t rows = (size_t)tokens, z_count = rows * (size_t)r->z_cols;
  input in = input_open(r, tokens, 8, OPROJ_POSITION_I32, DATA_RANDOM);
  quant xq = quant_open(r, OPROJ_SCALE_F32, r->config.groups, tokens, r->group_cols);
  quant zq = quant_open(r, OPROJ_SCALE_F32, 1, tokens, r->z_cols);
  witness w = {r, &zq};
  oproj_kernels_out out = {.fn = take_z, .user = &w, .layout = OPROJ_SCALE_F32};

  EXPECT_OK(oproj_kernels_ref.input_quantize(r->ref, &in.host, &xq.host, NULL));
  EXPECT_OK(rig_forward(r->ops, l->cuda, &in.device, &out, NULL, NULL));
  double *x = quant_in_double(&xq.host, block), *z = quant_in_double(&zq.host, block);
  double *wanted_z = product_in_double(&l->wo_a, r->config.groups, tokens, x);
  expect_rounded("z", z, wanted_z, z_count);

  uint16_t *partial = forward(r, l, &in.device);
  double *wanted_partial = product_in_double(&l->wo_b, 1, tokens, z);
  expect_close("partial", partial, wanted_partial, rows * (size_t)r->config.dims.hidden);

  quant_push(r, &xq);
  device_buffer z_device = device_make(r, z_count * sizeof(uint16_t));
  EXPECT_OK(r->ops->group_project(l->cuda, &xq.device, z_device.at, NULL));
  uint16_t *z_alone = device_read(r, &z_device);
  expect_close("z of the stage alone", z_alone, wanted_z, z_count);

  device_free(r, &z_device);
  free(z_alone);
  free(partial);
  free(wanted_partial);
  free(wanted_z);
  free(x);
  free(z);
  quant_close(r, &zq);
  quant_close(r, &xq);
  input_close(r, &in);
}

START_TEST(products_match_double) {
  static const int32_t counts[] = {127, 129};
  rig r = large_rig(_i);
  layer l = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_RANDOM, 44);
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) check_random(&r, &l, counts[i]);
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

/* Where contexts time algorithms, whichever each of them keeps: sums have one order. */
START_TEST(contexts_agree_bit_by_bit) {
  enum { CONTEXTS = 3, TOKENS = 1300 };
  uint16_t *first = NULL;
  for (int i = 0; i < CONTEXTS; i++) {
    rig r = large_rig(_i);
    layer l = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_RANDOM, 46);
    input in = input_open(&r, TOKENS, 0, OPROJ_POSITION_I64, DATA_RANDOM);
    uint16_t *found = forward(&r, &l, &in.device);
    if (first) {
      expect_same("partial", found, first, TOKENS * (size_t)r.config.dims.hidden);
      free(found);
    } else {
      first = found;
    }
    input_close(&r, &in);
    layer_close(&r, &l);
    rig_close(&r);
  }
  free(first);
}
END_TEST

/* ---- input that is not finite -------------------------------------------------------------- */

/* Token 0 of the second group is what the padding of the first one reads. */
START_TEST(nan_stays_in_its_token) {
  rig r = large_rig(_i);
  layer l = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_RANDOM, 48);
  size_t hidden = (size_t)r.config.dims.hidden;
  for (int i = 0; i < LARGE_COUNTS; i++) {
    int32_t tokens = large_counts[i], bad[] = {0, 3, tokens - 1};
    input in = input_open(&r, tokens, 0, OPROJ_POSITION_I64, DATA_RANDOM);
    uint16_t *clean = forward(&r, &l, &in.device);
    for (int j = 0; j < 3; j++) {
      *input_at(&in, bad[j], j % r.heads, 500) = j ? 0x7FC0u : 0xFF80u;
      for (size_t c = 0; c < hidden; c++) clean[(size_t)bad[j] * hidden + c] = BF16_NAN;
    }
    input_push(&r, &in);
    uint16_t *found = forward(&r, &l, &in.device);
    for (size_t c = 0; c < (size_t)tokens * hidden; c++)
      if ((found[c] & 0x7FFFu) > 0x7F80u) found[c] = BF16_NAN; /* a NaN's payload is free */
    expect_same("partial", found, clean, (size_t)tokens * hidden);
    free(clean);
    free(found);
    input_close(&r, &in);
  }
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

/* ---- graphs -------------------------------------------------------------------------------- */

START_TEST(graph_replays_as_eager) {
  rig r = large_rig(_i % MODELS);
  int32_t tokens = large_counts[_i / MODELS];
  size_t count = (size_t)tokens * (size_t)r.config.dims.hidden;
  layer l = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_RANDOM, 50);
  input in = input_open(&r, tokens, 0, OPROJ_POSITION_I64, DATA_RANDOM);
  device_buffer partial = device_make(&r, count * sizeof(uint16_t));
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;

  /* Captured before anything ran, as an engine may. */
  ck_assert_int_eq(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ck_assert_int_eq(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_OK(rig_forward(r.ops, l.cuda, &in.device, &own_out, partial.at, stream));
  ck_assert_int_eq(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ck_assert_int_eq(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  uint16_t *wanted = forward(&r, &l, &in.device);
  for (int round = 0; round < 3; round++) {
    ck_assert_int_eq(cudaGraphLaunch(replay, stream), cudaSuccess);
    ck_assert_int_eq(cudaStreamSynchronize(stream), cudaSuccess);
    uint16_t *found = device_read(&r, &partial);
    expect_same("replayed partial", found, wanted, count);
    free(found);
  }
  ck_assert_int_eq(cudaGraphExecDestroy(replay), cudaSuccess);
  ck_assert_int_eq(cudaGraphDestroy(graph), cudaSuccess);
  ck_assert_int_eq(cudaStreamDestroy(stream), cudaSuccess);
  free(wanted);
  device_free(&r, &partial);
  input_close(&r, &in);
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("cuda_large");
  TCase *tests = tcase_create("large");
  tcase_add_loop_test(tests, cublaslt_serves_large_batches, 0, 4);
  tcase_add_loop_test(tests, tiles_hold_the_exponents_of_scales, 0, 4);
  tcase_add_loop_test(tests, exact_data_is_bit_equal, 0, MODELS);
  tcase_add_test(tests, rows_end_within_a_tile);
  tcase_add_loop_test(tests, products_match_double, 0, MODELS);
  tcase_add_loop_test(tests, contexts_agree_bit_by_bit, 0, MODELS);
  tcase_add_loop_test(tests, nan_stays_in_its_token, 0, MODELS);
  tcase_add_loop_test(tests, graph_replays_as_eager, 0, LARGE_COUNTS * MODELS);
  return run_gpu_suite(suite, tests);
}
