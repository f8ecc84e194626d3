/* test_cuda_chain.c - the whole chain of the cuda backend: exact data against ref, adapters, a
 * caller's own WO_B, input that is not finite or out of range, CUDA graphs. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/layout.h"
#include "gpu/cuda_rig.h"
#include "support/expect.h"

enum { BF16_NAN = 0x7FC0 };

/* ---- the chain ----------------------------------------------------------------------------- */

static const oproj_kernels_out own_out;

/* partial of one call, in host memory. */
static uint16_t *forward(const rig *r, const layer *l, const oproj_io *io,
                         const oproj_kernels_out *out) {
  device_buffer partial = device_make(r, (size_t)io->tokens * (size_t)r->config.dims.hidden * 2);
  EXPECT_OK(rig_forward(r->ops, l->cuda, io, out, partial.at, NULL));
  uint16_t *values = device_read(r, &partial);
  device_free(r, &partial);
  return values;
}

static void check_exact(const rig *r, oproj_dtype dtype, int32_t tokens) {
  layer l = layer_open(r, dtype, DATA_EXACT, 26);
  input in = input_open(r, tokens, 0, OPROJ_POSITION_I64, DATA_EXACT);
  size_t count = (size_t)tokens * (size_t)r->config.dims.hidden;
  uint16_t *wanted = malloc(count * sizeof *wanted + 1);
  EXPECT_OK(rig_forward(&oproj_kernels_ref, l.ref, &in.host, &own_out, wanted, NULL));
  uint16_t *found = forward(r, &l, &in.device, &own_out);
  expect_same("exact partial", found, wanted, count);
  free(found);
  free(wanted);
  input_close(r, &in);
  layer_close(r, &l);
}

START_TEST(exact_data_is_bit_equal) {
  rig r = small_rig(_i ? 128 : 32);
  for (int i = 0; i < token_counts(); i++) {
    check_exact(&r, OPROJ_DTYPE_E4M3, token_count(i));
    check_exact(&r, OPROJ_DTYPE_BF16, token_count(i));
  }
  rig_close(&r);
  r = rig_open(4096, 8, 512, 2, 1024, _i ? 128 : 32, 17);
  check_exact(&r, OPROJ_DTYPE_E4M3, 4);
  check_exact(&r, OPROJ_DTYPE_E4M3, 17);
  rig_close(&r);
  r = rig_open(512, 8, _i ? 128 : 96, 2, 256, _i ? 128 : 32, 129); /* heads of three blocks */
  check_exact(&r, OPROJ_DTYPE_E4M3, 5);
  check_exact(&r, OPROJ_DTYPE_E4M3, 129);
  rig_close(&r);
}
END_TEST

typedef struct callers_out {
  const rig *r;
  oproj_kernels_weights *weights;
  int calls;
} callers_out;

static oproj_status project_for_caller(void *user, const oproj_quant *z, uint16_t *partial,
                                       void *stream) {
  callers_out *own = user;
  own->calls++;
  return own->r->ops->out_project(own->weights, z, partial, stream);
}

START_TEST(callers_projection_gets_quantised_z) {
  rig r = small_rig(128);
  layer l = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_RANDOM, 28);
  input in = input_open(&r, 5, 0, OPROJ_POSITION_I64, DATA_RANDOM);
  uint16_t *wanted = forward(&r, &l, &in.device, &own_out);
  callers_out own = {&r, l.cuda, 0};
  for (int layout = 0; layout < LAYOUTS; layout++) {
    oproj_kernels_out out = {
        .fn = project_for_caller, .user = &own, .layout = (oproj_scale_layout)layout};
    uint16_t *found = forward(&r, &l, &in.device, &out);
    expect_same("partial", found, wanted, 5 * (size_t)r.config.dims.hidden);
    free(found);
  }
  ck_assert_int_eq(own.calls, LAYOUTS);
  free(wanted);
  input_close(&r, &in);
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

static uint16_t *random_bf16(uint64_t seed, size_t count, float magnitude) {
  uint16_t *values = malloc(count * sizeof *values);
  for (size_t i = 0; i < count; i++) values[i] = oproj_bf16_from_f32(magnitude * unit(seed, i));
  return values;
}

static uint16_t *group_forward(const rig *r, const layer *l, const oproj_io *io) {
  device_buffer z = device_make(r, (size_t)io->tokens * (size_t)r->z_cols * 2);
  EXPECT_OK(r->ops->group_forward(l->cuda, io, z.at, NULL));
  uint16_t *values = device_read(r, &z);
  device_free(r, &z);
  return values;
}

START_TEST(adapter_adds_its_share) {
  static const int32_t ranks[] = {1, 16, 37};
  rig r = small_rig(128);
  int32_t rank = ranks[_i], tokens = _i == 1 ? 33 : 5;
  size_t z_count = (size_t)tokens * (size_t)r.z_cols, b_count = (size_t)(r.z_cols * rank);
  layer l = layer_open(&r, _i == 2 ? OPROJ_DTYPE_BF16 : OPROJ_DTYPE_E4M3, DATA_RANDOM, 30);
  input in = input_open(&r, tokens, 0, OPROJ_POSITION_I64, DATA_RANDOM);
  uint16_t *a = random_bf16(31, (size_t)(r.config.groups * rank * r.group_cols), 0.5f);
  uint16_t *b = random_bf16(32, b_count, 0.5f), *zero = calloc(b_count, sizeof *zero);
  uint16_t *bare = group_forward(&r, &l, &in.device);

  EXPECT_OK(r.ops->adapter_set(l.cuda, &(oproj_adapter){rank, a, zero}));
  uint16_t *unchanged = group_forward(&r, &l, &in.device);
  expect_same("z with a zero adapter", unchanged, bare, z_count);

  uint16_t *wanted = malloc(z_count * sizeof *wanted);
  EXPECT_OK(r.ops->adapter_set(l.cuda, &(oproj_adapter){rank, a, b}));
  EXPECT_OK(oproj_kernels_ref.adapter_set(l.ref, &(oproj_adapter){rank, a, b}));
  EXPECT_OK(oproj_kernels_ref.group_forward(l.ref, &in.host, wanted, NULL));
  uint16_t *found = group_forward(&r, &l, &in.device);
  double *wanted_double = bf16_in_double(wanted, z_count);
  ck_assert_mem_ne(found, bare, z_count * sizeof *found);
  expect_close("z with an adapter", found, wanted_double, z_count);

  EXPECT_OK(r.ops->adapter_set(l.cuda, NULL));
  uint16_t *removed = group_forward(&r, &l, &in.device);
  expect_same("z after removal", removed, bare, z_count);
  uint16_t *owned[] = {a, b, zero, bare, unchanged, wanted, found, removed};
  for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++) free(owned[i]);
  free(wanted_double);
  input_close(&r, &in);
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

/* ---- bad input ----------------------------------------------------------------------------- */

START_TEST(nan_stays_in_its_token) {
  static const uint16_t bad[] = {0x7FC0u, 0xFF80u};
  rig r = small_rig(_i % 2 ? 128 : 32);
  oproj_dtype dtype = _i / 2 ? OPROJ_DTYPE_BF16 : OPROJ_DTYPE_E4M3;
  size_t hidden = (size_t)r.config.dims.hidden;
  layer l = layer_open(&r, dtype, DATA_RANDOM, 34);
  for (int32_t tokens = 8; tokens <= 17; tokens += 9) {
    for (int which = 0; which < 2; which++) {
      input in = input_open(&r, tokens, 0, OPROJ_POSITION_I64, DATA_RANDOM);
      uint16_t *clean = forward(&r, &l, &in.device, &own_out);
      *input_at(&in, 3, 1, 500) = bad[which];
      input_push(&r, &in);
      uint16_t *found = forward(&r, &l, &in.device, &own_out);
      for (size_t i = 0; i < hidden; i++) clean[3 * hidden + i] = BF16_NAN;
      expect_same("partial", found, clean, (size_t)tokens * hidden);
      free(clean);
      free(found);
      input_close(&r, &in);
    }
  }
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

START_TEST(bad_position_is_reported) {
  rig r = small_rig(128);
  oproj_position_type type = _i % 2 ? OPROJ_POSITION_I32 : OPROJ_POSITION_I64;
  int64_t position = _i / 2 ? TABLE_ROWS : -1;
  char words[64];
  snprintf(words, sizeof words, "positions[2] of an earlier call is %lld", (long long)position);
  input in = input_open(&r, 5, 0, type, DATA_RANDOM);
  quant q = quant_open(&r, OPROJ_SCALE_UE8M0_PACKED, r.config.groups, 5, r.group_cols);
  EXPECT_OK(oproj_kernels_ref.input_quantize(r.ref, &in.host, &q.host, NULL));
  input_set_position(&in, 2, position);
  input_push(&r, &in);
  for (int round = 0; round < 2; round++) { /* the record serves more than once */
    EXPECT_OK(r.ops->input_quantize(r.cuda, &in.device, &q.device, NULL));
    ck_assert_int_eq(cudaStreamSynchronize(NULL), cudaSuccess);
    EXPECT_FAIL(r.ops->input_quantize(r.cuda, &in.device, &q.device, NULL), OPROJ_ERR_INVALID,
                words);
  }
  /* Reported: nothing waits.  The token is NaN, the others are as they were. */
  size_t cols = (size_t)r.group_cols;
  for (size_t g = 0; g < (size_t)r.config.groups; g++) {
    memset(q.host.codes + (g * 5 + 2) * cols, OPROJ_E4M3_NAN, cols);
    for (int32_t s = 0; s < r.group_cols / 128; s++)
      oproj_layout_store(q.host.scales, q.host.layout, (int64_t)g, 2, s, 5, r.group_cols / 128,
                         OPROJ_UE8M0_NAN);
  }
  quant_expect_equal(&r, &q);

  uint16_t word;
  device_buffer x = device_make(&r, (size_t)(5 * r.heads * 512) * sizeof word);
  EXPECT_OK(r.ops->input_rotate(r.cuda, &in.device, x.at, NULL));
  EXPECT_FAIL(r.ops->buffer_read(r.cuda, &word, (uint16_t *)x.at + 2 * cols, sizeof word, NULL),
              OPROJ_ERR_INVALID, words);
  ck_assert_uint_eq(word, BF16_NAN);
  device_free(&r, &x);
  quant_close(&r, &q);
  input_close(&r, &in);
  rig_close(&r);
}
END_TEST

START_TEST(refusals_say_why) {
  rig r = small_rig(128);
  oproj_kernels *none = NULL;
  oproj_kernels_config far = r.config;
  far.device = 9999;
  EXPECT_FAIL(r.ops->open(&none, &far), OPROJ_ERR_INVALID, "device is 9999");
  ck_assert_int_ge(r.ops->capability(r.cuda), 80);
  input in = input_open(&r, 2, 0, OPROJ_POSITION_I64, DATA_RANDOM);
  quant q = quant_open(&r, OPROJ_SCALE_F32, r.config.groups, 2, r.group_cols);
  q.device.codes += 1;
  EXPECT_FAIL(r.ops->input_quantize(r.cuda, &in.device, &q.device, NULL), OPROJ_ERR_INVALID,
              "aligned");
  q.device.codes -= 1;
  quant_close(&r, &q);
  input_close(&r, &in);
  rig_close(&r);
}
END_TEST

/* ---- graphs -------------------------------------------------------------------------------- */

START_TEST(graph_replays_as_eager) {
  rig r = small_rig(_i % 2 ? 128 : 32);
  int32_t tokens = _i / 2 ? 33 : 4;
  size_t count = (size_t)tokens * (size_t)r.config.dims.hidden, bytes = count * 2;
  layer l = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_RANDOM, 36);
  layer other = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_RANDOM, 38);
  input in = input_open(&r, tokens, 0, OPROJ_POSITION_I64, DATA_RANDOM);
  uint16_t *first = forward(&r, &l, &in.device, &own_out);
  uint16_t *second = forward(&r, &other, &in.device, &own_out);
  ck_assert_mem_ne(first, second, bytes);

  device_buffer partial = device_make(&r, bytes);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ck_assert_int_eq(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ck_assert_int_eq(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_OK(rig_forward(r.ops, l.cuda, &in.device, &own_out, partial.at, stream));
  ck_assert_int_eq(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ck_assert_int_eq(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  for (int round = 0; round < 3; round++) {
    if (round == 2) EXPECT_OK(r.ops->weights_replace(l.cuda, &other.wo_a, &other.wo_b));
    ck_assert_int_eq(cudaGraphLaunch(replay, stream), cudaSuccess);
    ck_assert_int_eq(cudaStreamSynchronize(stream), cudaSuccess);
    uint16_t *found = device_read(&r, &partial);
    expect_same("replayed partial", found, round == 2 ? second : first, count);
    free(found);
  }
  ck_assert_int_eq(cudaGraphExecDestroy(replay), cudaSuccess);
  ck_assert_int_eq(cudaGraphDestroy(graph), cudaSuccess);
  ck_assert_int_eq(cudaStreamDestroy(stream), cudaSuccess);
  free(first);
  free(second);
  device_free(&r, &partial);
  input_close(&r, &in);
  layer_close(&r, &other);
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

/* Captured graphs multiply by joined scales, so what replaces such weights must have them too. */
START_TEST(joined_weights_keep_their_kind) {
  rig r = small_rig(32);
  layer joined = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_EXACT, 40);
  layer apart = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_RANDOM, 42);
  EXPECT_OK(r.ops->weights_check(apart.cuda, &joined.wo_a, &joined.wo_b));
  EXPECT_OK(r.ops->weights_check(joined.cuda, &joined.wo_a, &joined.wo_b));
  if (r.ops->capability(r.cuda) == 90)
    EXPECT_FAIL(r.ops->weights_check(joined.cuda, &apart.wo_a, &apart.wo_b), OPROJ_ERR_UNSUPPORTED,
                "wo_a came with scales that are powers of two");
  /* A row of the smallest codes, three quarters of a tile's under a scale of 64 beside them. */
  float *scales = (float *)joined.wo_a.scales;
  uint8_t *codes = (uint8_t *)joined.wo_a.data;
  scales[0] = 64.0f;
  EXPECT_OK(r.ops->weights_check(joined.cuda, &joined.wo_a, &joined.wo_b));
  memset(codes, 1, (size_t)joined.wo_a.cols);
  if (r.ops->capability(r.cuda) == 90)
    EXPECT_FAIL(r.ops->weights_check(joined.cuda, &joined.wo_a, &joined.wo_b),
                OPROJ_ERR_UNSUPPORTED, "wo_a came with scales");
  layer_close(&r, &apart);
  layer_close(&r, &joined);
  rig_close(&r);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("cuda_chain");
  TCase *tests = tcase_create("chain");
  tcase_add_loop_test(tests, exact_data_is_bit_equal, 0, 2);
  tcase_add_test(tests, callers_projection_gets_quantised_z);
  tcase_add_loop_test(tests, adapter_adds_its_share, 0, 3);
  tcase_add_loop_test(tests, nan_stays_in_its_token, 0, 4);
  tcase_add_loop_test(tests, bad_position_is_reported, 0, 4);
  tcase_add_test(tests, refusals_say_why);
  tcase_add_loop_test(tests, graph_replays_as_eager, 0, 4);
  tcase_add_test(tests, joined_weights_keep_their_kind);
  return run_gpu_suite(suite, tests);
}
