/* test_cuda_backend.c - the stages of the cuda backend: codes and scales byte for byte against ref,
 * products against double precision computed from the same codes. */
#include <stdlib.h>

#include "base/layout.h"
#include "gpu/cuda_rig.h"
#include "support/expect.h"

/* ---- input and z, byte for byte ------------------------------------------------------------ */

static void check_input(const rig *r, int32_t tokens, int32_t pad, oproj_position_type type) {
  input in = input_open(r, tokens, pad, type, DATA_RANDOM);
  if (tokens > 2) { /* one token that is not finite, one block at the largest magnitude */
    *input_at(&in, 1, 0, 0) = 0xFF80u;
    *input_at(&in, 1, r->heads - 1, 511 % r->config.dims.head_dim) = 0x7F81u;
    *input_at(&in, 2, 0, 1) = 0x7F7Fu;
    input_push(r, &in);
  }
  for (int layout = 0; layout < LAYOUTS; layout++) {
    quant q = quant_open(r, (oproj_scale_layout)layout, r->config.groups, tokens, r->group_cols);
    EXPECT_OK(oproj_kernels_ref.input_quantize(r->ref, &in.host, &q.host, NULL));
    EXPECT_OK(r->ops->input_quantize(r->cuda, &in.device, &q.device, NULL));
    quant_expect_equal(r, &q);
    quant_close(r, &q);
  }
  size_t count = (size_t)tokens * (size_t)r->heads * (size_t)r->config.dims.head_dim;
  uint16_t *wanted = malloc(count * sizeof *wanted + 1);
  device_buffer x = device_make(r, count * sizeof *wanted);
  EXPECT_OK(oproj_kernels_ref.input_rotate(r->ref, &in.host, wanted, NULL));
  EXPECT_OK(r->ops->input_rotate(r->cuda, &in.device, x.at, NULL));
  uint16_t *found = device_read(r, &x);
  expect_same("x", found, wanted, count);
  free(found);
  free(wanted);
  device_free(r, &x);
  input_close(r, &in);
}

START_TEST(input_matches_ref) {
  int32_t block = _i ? 128 : 32;
  rig r = small_rig(block);
  for (int i = 0; i < token_counts(); i++) {
    check_input(&r, token_count(i), 0, OPROJ_POSITION_I64);
    check_input(&r, token_count(i), 8, OPROJ_POSITION_I32);
    check_input(&r, token_count(i), 3, OPROJ_POSITION_I64);
  }
  rig_close(&r);
  r = rig_open(64, 1, 128, 3, 128, block, 9); /* heads shorter than a warp's strip */
  check_input(&r, 9, 0, OPROJ_POSITION_I32);
  rig_close(&r);
}
END_TEST

START_TEST(z_matches_ref) {
  rig r = small_rig(_i ? 128 : 32);
  for (int i = 0; i < token_counts() * LAYOUTS; i++) {
    int32_t tokens = token_count(i / LAYOUTS);
    size_t count = (size_t)tokens * (size_t)r.z_cols;
    uint16_t *z = malloc(count * sizeof *z + 1);
    for (size_t j = 0; j < count; j++)
      z[j] = hash(7, j / 40) % 9 ? oproj_bf16_from_f32(unit(8, j)) : (uint16_t)hash(9, j);
    device_buffer z_device = device_copy(&r, z, count * sizeof *z);
    quant q = quant_open(&r, (oproj_scale_layout)(i % LAYOUTS), 1, tokens, r.z_cols);
    EXPECT_OK(oproj_kernels_ref.z_quantize(r.ref, tokens, z, &q.host, NULL));
    EXPECT_OK(r.ops->z_quantize(r.cuda, tokens, z_device.at, &q.device, NULL));
    quant_expect_equal(&r, &q);
    quant_close(&r, &q);
    device_free(&r, &z_device);
    free(z);
  }
  rig_close(&r);
}
END_TEST

/* ---- products against double precision ----------------------------------------------------- */

static void expect_product(const rig *r, const char *what, const device_buffer *found,
                           const oproj_matrix *w, int32_t groups, int32_t tokens, const double *a) {
  double *wanted = product_in_double(w, groups, tokens, a);
  uint16_t *values = device_read(r, found);
  expect_close(what, values, wanted, (size_t)(tokens * w->rows));
  free(values);
  free(wanted);
}

static void check_fp8_products(const rig *r, const layer *l, int32_t tokens,
                               oproj_scale_layout layout) {
  int32_t block = r->config.dims.quant_block, hidden = r->config.dims.hidden;
  input in = input_open(r, tokens, 0, OPROJ_POSITION_I64, DATA_RANDOM);
  quant xq = quant_open(r, layout, r->config.groups, tokens, r->group_cols);
  quant zq = quant_open(r, layout, 1, tokens, r->z_cols);
  device_buffer z = device_make(r, (size_t)tokens * (size_t)r->z_cols * 2);
  device_buffer partial = device_make(r, (size_t)tokens * (size_t)hidden * 2);

  EXPECT_OK(oproj_kernels_ref.input_quantize(r->ref, &in.host, &xq.host, NULL));
  quant_push(r, &xq);
  EXPECT_OK(r->ops->group_project(l->cuda, &xq.device, z.at, NULL));
  double *x = quant_in_double(&xq.host, block);
  expect_product(r, "z", &z, &l->wo_a, r->config.groups, tokens, x);

  uint16_t *z_host = device_read(r, &z);
  EXPECT_OK(oproj_kernels_ref.z_quantize(r->ref, tokens, z_host, &zq.host, NULL));
  quant_push(r, &zq);
  EXPECT_OK(r->ops->out_project(l->cuda, &zq.device, partial.at, NULL));
  double *z_double = quant_in_double(&zq.host, block);
  expect_product(r, "partial from codes", &partial, &l->wo_b, 1, tokens, z_double);
  EXPECT_OK(r->ops->out_forward(l->cuda, tokens, z.at, partial.at, NULL));
  expect_product(r, "partial from z", &partial, &l->wo_b, 1, tokens, z_double);

  free(x);
  free(z_double);
  free(z_host);
  device_free(r, &z);
  device_free(r, &partial);
  quant_close(r, &xq);
  quant_close(r, &zq);
  input_close(r, &in);
}

START_TEST(fp8_products_match_double) {
  rig r = small_rig(_i ? 128 : 32);
  layer l = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_RANDOM, 20);
  for (int i = 0; i < token_counts(); i++)
    check_fp8_products(&r, &l, token_count(i), (oproj_scale_layout)(i % LAYOUTS));
  layer_close(&r, &l);
  rig_close(&r);
  r = rig_open(4096, 8, 512, 2, 1024, _i ? 128 : 32, 17); /* V4-Flash at n = 4 */
  l = layer_open(&r, OPROJ_DTYPE_E4M3, DATA_RANDOM, 22);
  check_fp8_products(&r, &l, 1, OPROJ_SCALE_F32);
  check_fp8_products(&r, &l, 17, OPROJ_SCALE_UE8M0_PACKED);
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

START_TEST(bf16_products_match_double) {
  rig r = small_rig(128);
  layer l = layer_open(&r, OPROJ_DTYPE_BF16, DATA_RANDOM, 24);
  for (int i = 0; i < token_counts(); i++) {
    int32_t tokens = token_count(i);
    size_t x_count = (size_t)tokens * (size_t)r.heads * 512;
    size_t z_count = (size_t)tokens * (size_t)r.z_cols;
    input in = input_open(&r, tokens, 3, OPROJ_POSITION_I32, DATA_RANDOM);
    uint16_t *x = malloc(x_count * sizeof *x + 1);
    device_buffer z = device_make(&r, z_count * 2);
    device_buffer partial = device_make(&r, (size_t)(tokens * r.config.dims.hidden) * 2);
    EXPECT_OK(oproj_kernels_ref.input_rotate(r.ref, &in.host, x, NULL));
    EXPECT_OK(r.ops->group_forward(l.cuda, &in.device, z.at, NULL));
    double *x_double = bf16_in_double(x, x_count);
    expect_product(&r, "z", &z, &l.wo_a, r.config.groups, tokens, x_double);
    EXPECT_OK(r.ops->out_forward(l.cuda, tokens, z.at, partial.at, NULL));
    uint16_t *z_host = device_read(&r, &z);
    double *z_double = bf16_in_double(z_host, z_count);
    expect_product(&r, "partial", &partial, &l.wo_b, 1, tokens, z_double);
    free(x);
    free(x_double);
    free(z_host);
    free(z_double);
    device_free(&r, &z);
    device_free(&r, &partial);
    input_close(&r, &in);
  }
  layer_close(&r, &l);
  rig_close(&r);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("cuda_backend");
  TCase *tests = tcase_create("stages");
  tcase_add_loop_test(tests, input_matches_ref, 0, 2);
  tcase_add_loop_test(tests, z_matches_ref, 0, 2);
  tcase_add_loop_test(tests, fp8_products_match_double, 0, 2);
  tcase_add_test(tests, bf16_products_match_double);
  return run_gpu_suite(suite, tests);
}
