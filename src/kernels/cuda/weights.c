/* weights.c - a layer's weights and adapter in device memory.
 *
 * e4m3 codes and f32 scales lie as the caller's matrices do, bf16 likewise: no kernel needs another
 * order.  On SM90 blocks of 32 are joined in place, where they can be (sm90_join.h).  Copies go
 * through the context's own stream and are complete on return, so that any stream may use them
 * next. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/sm90_decode.h"
#include "kernels/cuda/sm90_join.h"

static oproj_status upload(oproj_kernels *k, void *to, const void *from, size_t bytes) {
  if (bytes == 0) return OPROJ_OK;
  CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, k->upload));
  CUDA_TRY(cudaStreamSynchronize(k->upload));
  return OPROJ_OK;
}

/* ---- matrices ------------------------------------------------------------------------------ */

static oproj_status copy_values(oproj_kernels *k, const oproj_matrix *to,
                                const oproj_matrix *from) {
  TRY(upload(k, (void *)to->data, from->data, oproj_kernels_data_bytes(from)));
  return upload(k, (void *)to->scales, from->scales, oproj_kernels_scale_bytes(from));
}

static oproj_status copy_matrix(oproj_kernels *k, oproj_matrix *to, const oproj_matrix *from) {
  void *data = NULL, *scales = NULL;
  *to = *from;
  to->data = NULL;
  to->scales = NULL;
  CUDA_TRY(cudaMalloc(&data, oproj_kernels_data_bytes(from)));
  to->data = data;
  if (oproj_kernels_scale_bytes(from))
    CUDA_TRY(cudaMalloc(&scales, oproj_kernels_scale_bytes(from)));
  to->scales = scales;
  return copy_values(k, to, from);
}

static void adapter_clear(cuda_adapter *adapter) {
  cudaFree(adapter->a);
  cudaFree(adapter->b);
  *adapter = (cuda_adapter){0};
}

void cuda_weights_destroy(oproj_kernels_weights *w) {
  if (!w) return;
  cudaSetDevice(w->kernels->device);
  cudaFree((void *)w->wo_a.data);
  cudaFree((void *)w->wo_a.scales);
  cudaFree((void *)w->wo_b.data);
  cudaFree((void *)w->wo_b.scales);
  cudaFree(w->wo_a_joined);
  cudaFree(w->wo_b_joined);
  cudaFree(w->wo_a_tiles);
  cudaFree(w->wo_b_tiles);
  adapter_clear(&w->adapter);
  free(w);
}

static oproj_status describe_to_sm90(oproj_kernels_weights *w) {
  const oproj_matrix *a = &w->wo_a, *b = &w->wo_b;
  if (sm90_takes_groups(w))
    TRY(sm90_describe_weights(&w->wo_a_map, a->data, a->rows, a->cols, SM90_TILE_ROWS));
  if (sm90_takes_out(w))
    TRY(sm90_describe_weights(&w->wo_b_map, b->data, b->rows, b->cols, SM90_TILE_ROWS));
  if (w->kernels->decode && b->dtype == OPROJ_DTYPE_E4M3)
    TRY(sm90_describe_weights(&w->wo_b_decode_map, b->data, b->rows, b->cols,
                              w->kernels->decode->shape.out_rows));
  return OPROJ_OK;
}

oproj_status cuda_weights_create(oproj_kernels_weights **out, oproj_kernels *k,
                                 const oproj_matrix *wo_a, const oproj_matrix *wo_b) {
  CUDA_TRY(cudaSetDevice(k->device));
  oproj_kernels_weights *w = aligned_alloc(_Alignof(oproj_kernels_weights), sizeof *w);
  REQUIRE(w, OPROJ_ERR_NOMEM, "no memory for a layer");
  memset(w, 0, sizeof *w);
  w->kernels = k;
  oproj_status status = OPROJ_OK;
  TRY_GOTO(copy_matrix(k, &w->wo_a, wo_a), status, out);
  TRY_GOTO(copy_matrix(k, &w->wo_b, wo_b), status, out);
  TRY_GOTO(describe_to_sm90(w), status, out);
  /* The input is quantised head by head. */
  if (sm90_takes_groups(w) && k->config.dims.head_dim % SM90_JOINED_BLOCK == 0)
    TRY_GOTO(sm90_join_make(k, &w->wo_a, wo_a, "wo_a", &w->wo_a_joined), status, out);
  if (sm90_takes_out(w))
    TRY_GOTO(sm90_join_make(k, &w->wo_b, wo_b, "wo_b", &w->wo_b_joined), status, out);
  TRY_GOTO(cuda_lt_sm100_make(k, &w->wo_a, wo_a, &w->wo_a_tiles), status, out);
  TRY_GOTO(cuda_lt_sm100_make(k, &w->wo_b, wo_b, &w->wo_b_tiles), status, out);
  TRY_GOTO(cuda_lt_warm(w), status, out);
  TRY_GOTO(cuda_warm(w), status, out);
  *out = w;
  return OPROJ_OK;
out:
  cuda_weights_destroy(w);
  return status;
}

oproj_status cuda_weights_check(const oproj_kernels_weights *w, const oproj_matrix *wo_a,
                                const oproj_matrix *wo_b) {
  TRY(sm90_join_check(w->kernels, w->wo_a_joined, wo_a, "wo_a"));
  TRY(sm90_join_check(w->kernels, w->wo_b_joined, wo_b, "wo_b"));
  TRY(cuda_lt_sm100_check(w->wo_a_tiles, wo_a, "wo_a"));
  return cuda_lt_sm100_check(w->wo_b_tiles, wo_b, "wo_b");
}

oproj_status cuda_weights_replace(oproj_kernels_weights *w, const oproj_matrix *wo_a,
                                  const oproj_matrix *wo_b) {
  CUDA_TRY(cudaSetDevice(w->kernels->device));
  TRY(copy_values(w->kernels, &w->wo_a, wo_a));
  TRY(copy_values(w->kernels, &w->wo_b, wo_b));
  TRY(sm90_join_renew(w->kernels, &w->wo_a, w->wo_a_joined));
  TRY(sm90_join_renew(w->kernels, &w->wo_b, w->wo_b_joined));
  TRY(cuda_lt_sm100_renew(w->kernels, &w->wo_a, w->wo_a_tiles));
  return cuda_lt_sm100_renew(w->kernels, &w->wo_b, w->wo_b_tiles);
}

/* ---- adapter ------------------------------------------------------------------------------- */

/* The scratch of an adapter belongs to the context: one layer uses it at a time.  Ranks are rounded
 * up to powers of two, so that a larger one never moves the buffer under a captured graph. */
static oproj_status adapter_scratch(oproj_kernels *k, int32_t rank, float **down) {
  cuda_workspace *work = &k->work;
  size_t tokens = k->config.max_tokens > 0 ? (size_t)k->config.max_tokens : 1;
  int order = 0;
  while ((1 << order) < rank) order++;
  REQUIRE(order < CUDA_RANK_CLASSES, OPROJ_ERR_INVALID, "adapter rank is %d; it must be at most %d",
          rank, 1 << (CUDA_RANK_CLASSES - 1));
  void *buffer;
  if (!work->delta) {
    CUDA_TRY(cudaMalloc(&buffer, tokens * (size_t)k->z_cols * sizeof *work->delta));
    work->delta = buffer;
  }
  if (!work->down[order]) {
    size_t values = (size_t)k->config.groups * tokens << order;
    CUDA_TRY(cudaMalloc(&buffer, values * sizeof *work->down[order]));
    work->down[order] = buffer;
  }
  *down = work->down[order];
  return OPROJ_OK;
}

static oproj_status copy_adapter(oproj_kernels *k, const oproj_adapter *from, cuda_adapter *to) {
  size_t rank = (size_t)from->rank;
  size_t a_bytes = (size_t)k->config.groups * rank * (size_t)k->group_cols * sizeof *to->a;
  size_t b_bytes = (size_t)k->z_cols * rank * sizeof *to->b;
  void *buffer;
  TRY(adapter_scratch(k, from->rank, &to->down));
  CUDA_TRY(cudaMalloc(&buffer, a_bytes));
  to->a = buffer;
  CUDA_TRY(cudaMalloc(&buffer, b_bytes));
  to->b = buffer;
  TRY(upload(k, to->a, from->a, a_bytes));
  TRY(upload(k, to->b, from->b, b_bytes));
  to->rank = from->rank;
  return OPROJ_OK;
}

oproj_status cuda_adapter_set(oproj_kernels_weights *w, const oproj_adapter *adapter) {
  CUDA_TRY(cudaSetDevice(w->kernels->device));
  cuda_adapter fresh = {0};
  if (adapter) {
    oproj_status status = copy_adapter(w->kernels, adapter, &fresh);
    if (status != OPROJ_OK) {
      adapter_clear(&fresh);
      return status;
    }
  }
  cuda_adapter former = w->adapter;
  w->adapter = fresh;
  oproj_status status = cuda_warm(w);
  if (status != OPROJ_OK) w->adapter = former;
  adapter_clear(status == OPROJ_OK ? &former : &fresh);
  return status;
}
