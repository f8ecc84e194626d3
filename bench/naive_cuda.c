/* naive_cuda.c - see naive.h.
 *
 * cuBLASLt thinks in columns: a row-major [rows, cols] is its column-major cols x rows, so that
 * out [T, N] = X [T, K] . W [N, K]^T is D (N x T) = W (K x N, transposed) . X (K x T). */
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>

#include "naive.h"
#include "try_cuda.h"

#define BLAS_TRY(call)                                                                       \
  do {                                                                                       \
    cublasStatus_t error_ = (call);                                                          \
    if (error_ != CUBLAS_STATUS_SUCCESS)                                                     \
      return oproj_fail(OPROJ_ERR_DEVICE, "%s: %s", #call, cublasLtGetStatusString(error_)); \
  } while (0)

enum { WORKSPACE = 64 << 20, CANDIDATES = 8, TRIALS = 10 };

/* One product for every group, of one size. */
typedef struct product {
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t w, x, out;
  cublasLtMatmulAlgo_t algo;
} product;

struct bench_naive {
  bench_rig *rig;
  cublasLtHandle_t blas;
  void *workspace;
  int32_t layers;
  uint16_t **wo_a, **wo_b; /* bf16, on the device */
  uint16_t *x, *z;         /* bf16 [groups, T, group_cols], [T, z_cols] */
  product group, dense;
  oproj_ctx *summing; /* its reduction is the vendor's; NULL: one rank's part alone */
};

/* ---- weights ------------------------------------------------------------------------------- */

/* Exact: a code has 4 significant bits and scales are powers of two. */
static void dequantise(const oproj_matrix *m, uint16_t *out) {
  float values[256];
  for (int code = 0; code < 256; code++) values[code] = data_from_e4m3((uint8_t)code);
  const uint8_t *codes = m->data;
  int64_t across = (m->cols + m->block - 1) / m->block;
#pragma omp parallel for
  for (int64_t r = 0; r < m->rows; r++)
    for (int64_t c = 0; c < m->cols; c++)
      out[r * m->cols + c] = data_to_bf16(values[codes[r * m->cols + c]] *
                                          m->scales[r / m->block * across + c / m->block]);
}

static oproj_status upload(const oproj_matrix *m, uint16_t *staging, uint16_t **out) {
  size_t bytes = (size_t)(m->rows * m->cols) * sizeof *staging;
  void *to = NULL;
  dequantise(m, staging);
  CUDA_TRY(cudaMalloc(&to, bytes));
  *out = to;
  CUDA_TRY(cudaMemcpy(to, staging, bytes, cudaMemcpyHostToDevice));
  return OPROJ_OK;
}

static oproj_status upload_all(bench_naive *n) {
  oproj_matrix a, b;
  rig_matrices(n->rig, 0, &a, &b);
  int64_t most = a.rows * a.cols > b.rows * b.cols ? a.rows * a.cols : b.rows * b.cols;
  uint16_t *staging = malloc((size_t)most * sizeof *staging);
  oproj_status status = staging ? OPROJ_OK : oproj_fail(OPROJ_ERR_NOMEM, "no memory for weights");
  for (int32_t i = 0; i < n->layers && status == OPROJ_OK; i++) {
    rig_matrices(n->rig, i, &a, &b);
    status = upload(&a, staging, &n->wo_a[i]);
    if (status == OPROJ_OK) status = upload(&b, staging, &n->wo_b[i]);
  }
  free(staging);
  /* A copy from pageable memory may return before it has arrived, and the calls' stream does not
   * wait for the one that copies. */
  if (status == OPROJ_OK) CUDA_TRY(cudaDeviceSynchronize());
  return status;
}

static oproj_status allocate(bench_naive *n) {
  const bench_rig *rig = n->rig;
  size_t tokens = (size_t)rig->max_tokens;
  void *x = NULL, *z = NULL;
  n->wo_a = calloc((size_t)n->layers, sizeof *n->wo_a);
  n->wo_b = calloc((size_t)n->layers, sizeof *n->wo_b);
  if (!n->wo_a || !n->wo_b) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for weights");
  BLAS_TRY(cublasLtCreate(&n->blas));
  CUDA_TRY(cudaMalloc(&n->workspace, WORKSPACE));
  CUDA_TRY(cudaMalloc(&x, (size_t)rig->groups * tokens * (size_t)rig->group_cols * sizeof *n->x));
  n->x = x;
  CUDA_TRY(cudaMalloc(&z, tokens * (size_t)rig->z_cols * sizeof *n->z));
  n->z = z;
  return upload_all(n);
}

static oproj_status open_summing(bench_naive *n) {
  const bench_rig *rig = n->rig;
  oproj_config config = rig_config(rig, OPROJ_REDUCE_VENDOR);
  return oproj_ctx_create(&n->summing, rig->job->comm, &rig->dims, &config);
}

oproj_status naive_create(bench_naive **out, bench_rig *rig) {
  bench_naive *n = calloc(1, sizeof *n);
  if (!n) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for the naive composition");
  double bytes = 2.0 * rig->z_cols * ((double)rig->group_cols + rig->dims.hidden);
  double cold = fmax(ceil(RIG_COLD_BYTES / bytes), RIG_LAYERS_LEAST);
  n->rig = rig;
  n->layers = cold < rig->layer_count ? (int32_t)cold : rig->layer_count;
  oproj_status status = rig->reduces ? open_summing(n) : OPROJ_OK;
  if (status == OPROJ_OK) status = allocate(n);
  *out = n;
  return status;
}

/* ---- products ------------------------------------------------------------------------------ */

static void product_release(product *p) {
  if (p->w) cublasLtMatrixLayoutDestroy(p->w);
  if (p->x) cublasLtMatrixLayoutDestroy(p->x);
  if (p->out) cublasLtMatrixLayoutDestroy(p->out);
  if (p->desc) cublasLtMatmulDescDestroy(p->desc);
  *p = (product){0};
}

static oproj_status make_layout(cublasLtMatrixLayout_t *out, int64_t rows, int64_t cols, int64_t ld,
                                int32_t batch, int64_t stride) {
  BLAS_TRY(cublasLtMatrixLayoutCreate(out, CUDA_R_16BF, (uint64_t)rows, (uint64_t)cols, ld));
  BLAS_TRY(cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch,
                                            sizeof batch));
  BLAS_TRY(cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                            &stride, sizeof stride));
  return OPROJ_OK;
}

static oproj_status run_product(const bench_naive *n, const product *p, const uint16_t *w,
                                const uint16_t *x, uint16_t *out, cudaStream_t stream) {
  const float one = 1.0f, zero = 0.0f;
  BLAS_TRY(cublasLtMatmul(n->blas, p->desc, &one, w, p->w, x, p->x, &zero, out, p->out, out, p->out,
                          &p->algo, n->workspace, WORKSPACE, stream));
  return OPROJ_OK;
}

/* Which matrices a product multiplies, for all layers. */
typedef struct operands {
  uint16_t *const *w;
  const uint16_t *x;
  uint16_t *out;
} operands;

static oproj_status time_algo(const bench_naive *n, const product *p, const operands *of,
                              const cudaEvent_t *events, float *ms) {
  cudaStream_t stream = device_stream(n->rig->device);
  for (int i = -1; i < TRIALS; i++) { /* the first run loads the kernel */
    if (i == 0) CUDA_TRY(cudaEventRecord(events[0], stream));
    oproj_status status = run_product(n, p, of->w[(i + 1) % n->layers], of->x, of->out, stream);
    if (status != OPROJ_OK) return status;
  }
  CUDA_TRY(cudaEventRecord(events[1], stream));
  CUDA_TRY(cudaStreamSynchronize(stream));
  CUDA_TRY(cudaEventElapsedTime(ms, events[0], events[1]));
  return OPROJ_OK;
}

static oproj_status choose(const bench_naive *n, product *p, const operands *of,
                           const cudaEvent_t *events, cublasLtMatmulPreference_t preference) {
  cublasLtMatmulHeuristicResult_t offered[CANDIDATES];
  size_t workspace = WORKSPACE;
  int count = 0, best = 0;
  float least = INFINITY, ms = 0.0f;
  BLAS_TRY(cublasLtMatmulPreferenceSetAttribute(
      preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
  BLAS_TRY(cublasLtMatmulAlgoGetHeuristic(n->blas, p->desc, p->w, p->x, p->out, p->out, preference,
                                          CANDIDATES, offered, &count));
  if (count == 0) return oproj_fail(OPROJ_ERR_DEVICE, "cuBLASLt offers no BF16 algorithm");
  for (int i = 0; i < count; i++) {
    p->algo = offered[i].algo;
    oproj_status status = time_algo(n, p, of, events, &ms);
    if (status != OPROJ_OK) return status;
    if (ms < least) {
      least = ms;
      best = i;
    }
  }
  p->algo = offered[best].algo;
  return OPROJ_OK;
}

static oproj_status choose_timed(const bench_naive *n, product *p, const operands *of) {
  cudaEvent_t events[2] = {NULL, NULL};
  cublasLtMatmulPreference_t preference = NULL;
  oproj_status status = OPROJ_OK;
  if (cublasLtMatmulPreferenceCreate(&preference) != CUBLAS_STATUS_SUCCESS ||
      cudaEventCreate(&events[0]) != cudaSuccess || cudaEventCreate(&events[1]) != cudaSuccess)
    status = oproj_fail(OPROJ_ERR_DEVICE, "no events to time cuBLASLt's algorithms with");
  if (status == OPROJ_OK) status = choose(n, p, of, events, preference);
  if (preference) cublasLtMatmulPreferenceDestroy(preference);
  for (int i = 0; i < 2; i++)
    if (events[i]) cudaEventDestroy(events[i]);
  return status;
}

/* out [T, ld_out], `rows` columns per batch side by side, = X [batch, T, cols] . W^T. */
static oproj_status make_product(product *p, int32_t batch, int64_t tokens, int64_t rows,
                                 int64_t cols, int64_t ld_out) {
  const cublasOperation_t transposed = CUBLAS_OP_T;
  BLAS_TRY(cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  BLAS_TRY(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                          sizeof transposed));
  oproj_status status = make_layout(&p->w, cols, rows, cols, batch, rows * cols);
  if (status == OPROJ_OK) status = make_layout(&p->x, cols, tokens, cols, batch, tokens * cols);
  if (status == OPROJ_OK) status = make_layout(&p->out, rows, tokens, ld_out, batch, rows);
  return status;
}

oproj_status naive_prepare(bench_naive *n, int32_t tokens) {
  const bench_rig *rig = n->rig;
  const operands group = {n->wo_a, n->x, n->z}, dense = {n->wo_b, n->z, rig->y};
  oproj_io io = rig_io(rig, tokens, 0);
  product_release(&n->group);
  product_release(&n->dense);
  oproj_status status = oproj_input_rotate(rig->ctx, &io, n->x, device_stream(rig->device));
  if (status == OPROJ_OK)
    status = make_product(&n->group, rig->groups, tokens, rig->z_cols / rig->groups,
                          rig->group_cols, rig->z_cols);
  if (status == OPROJ_OK)
    status = make_product(&n->dense, 1, tokens, rig->dims.hidden, rig->z_cols, rig->dims.hidden);
  if (status == OPROJ_OK) status = choose_timed(n, &n->group, &group);
  return status == OPROJ_OK ? choose_timed(n, &n->dense, &dense) : status;
}

/* ---- calls --------------------------------------------------------------------------------- */

int32_t naive_layers(const bench_naive *n) {
  return n->layers;
}

oproj_status naive_call(bench_naive *n, int32_t tokens, int32_t call, void *stream) {
  oproj_io io = rig_io(n->rig, tokens, call);
  int32_t layer = call % n->layers;
  oproj_status status = oproj_input_rotate(n->rig->ctx, &io, n->x, stream);
  if (status == OPROJ_OK) status = run_product(n, &n->group, n->wo_a[layer], n->x, n->z, stream);
  if (status == OPROJ_OK)
    status = run_product(n, &n->dense, n->wo_b[layer], n->z, n->rig->y, stream);
  if (status == OPROJ_OK && n->summing)
    status = oproj_partial_reduce(n->summing, tokens, n->rig->y, n->rig->y, stream);
  return status;
}

void naive_destroy(bench_naive *n) {
  if (!n) return;
  product_release(&n->group);
  product_release(&n->dense);
  for (int32_t i = 0; i < n->layers; i++) {
    if (n->wo_a) cudaFree(n->wo_a[i]);
    if (n->wo_b) cudaFree(n->wo_b[i]);
  }
  free(n->wo_a);
  free(n->wo_b);
  cudaFree(n->x);
  cudaFree(n->z);
  cudaFree(n->workspace);
  if (n->blas) cublasLtDestroy(n->blas);
  oproj_ctx_destroy(n->summing);
  free(n);
}
