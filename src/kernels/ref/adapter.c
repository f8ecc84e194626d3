/* adapter.c - LoRA on WO_A: per group, from the bf16 rotated input, both products in f32. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/num.h"
#include "kernels/ref/ref.h"

void ref_adapter_clear(ref_adapter *adapter) {
  free(adapter->a);
  free(adapter->b);
  *adapter = (ref_adapter){0};
}

oproj_status ref_adapter_set(oproj_kernels_weights *weights, const oproj_adapter *adapter) {
  if (!adapter) {
    ref_adapter_clear(&weights->adapter);
    return OPROJ_OK;
  }
  const oproj_kernels *k = weights->kernels;
  size_t a_values = (size_t)k->config.groups * (size_t)adapter->rank * (size_t)k->group_cols;
  size_t b_values = (size_t)k->z_cols * (size_t)adapter->rank;
  ref_adapter copy = {.rank = adapter->rank,
                      .a = malloc(a_values * sizeof *copy.a),
                      .b = malloc(b_values * sizeof *copy.b)};
  if (!copy.a || !copy.b) {
    ref_adapter_clear(&copy);
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for an adapter of rank %d", adapter->rank);
  }
  memcpy(copy.a, adapter->a, a_values * sizeof *copy.a);
  memcpy(copy.b, adapter->b, b_values * sizeof *copy.b);
  ref_adapter_clear(&weights->adapter);
  weights->adapter = copy;
  return OPROJ_OK;
}

static float dot(const uint16_t *a, const uint16_t *b, int32_t count) {
  float sum = 0.0f;
  for (int32_t i = 0; i < count; i++) sum += oproj_bf16_to_f32(a[i]) * oproj_bf16_to_f32(b[i]);
  return sum;
}

oproj_status ref_adapter_delta(const oproj_kernels_weights *weights, int32_t group, int32_t tokens,
                               const uint16_t *x, float *delta) {
  const oproj_kernels *k = weights->kernels;
  int32_t rank = weights->adapter.rank, lora_rank = k->config.dims.lora_rank, cols = k->group_cols;
  const uint16_t *a = weights->adapter.a + (int64_t)group * rank * cols;
  const uint16_t *b = weights->adapter.b + (int64_t)group * lora_rank * rank;
  const uint16_t *rows = x + (int64_t)group * tokens * cols;
  float *down = malloc((size_t)tokens * (size_t)rank * sizeof *down); /* x_j . A_j^T */
  REQUIRE(down, OPROJ_ERR_NOMEM, "no memory for %d x %d adapter values", tokens, rank);

#pragma omp parallel for schedule(static) num_threads(k->config.threads)
  for (int32_t t = 0; t < tokens; t++) {
    for (int32_t i = 0; i < rank; i++)
      down[(int64_t)t * rank + i] = dot(rows + (int64_t)t * cols, a + (int64_t)i * cols, cols);
    for (int32_t row = 0; row < lora_rank; row++) {
      float sum = 0.0f;
      for (int32_t i = 0; i < rank; i++)
        sum += down[(int64_t)t * rank + i] * oproj_bf16_to_f32(b[(int64_t)row * rank + i]);
      delta[(int64_t)t * lora_rank + row] = sum;
    }
  }
  free(down);
  return OPROJ_OK;
}
