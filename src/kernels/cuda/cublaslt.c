/* cublaslt.c - see cublaslt.h.
 *
 * In cuBLASLt's column-major words a product is D[rows, T] = W[cols, rows]^T . X[cols, T]: W is its
 * A, the activation its B.  Nothing here allocates or decides by time after the first layer was
 * made: a call builds its descriptors on the stack and runs the algorithm kept for its power of
 * two, and so do its parts. */
#include "kernels/cuda/cublaslt.h"

#include <cublasLt.h>
#include <stdlib.h>

#include "base/checked.h"
#include "base/error.h"
#include "base/log.h"

enum {
  BLOCK = 128,
  COLS_MULTIPLE = 4 * BLOCK, /* cuBLASLt pads a row of weight scales to fours */
  ALIGNMENT = 256,           /* bytes: what its heuristics assume of every matrix */
  SCALE_ALIGNMENT = 16,
  CLASSES = 32, /* token counts up to 2^0, 2^1 .. 2^31 */
  CANDIDATES = 8,
  TIMED_RUNS = 3
};

static const size_t SCRATCH_BYTES = (size_t)32 << 20;

typedef enum lt_product { LT_GROUP, LT_OUT, LT_PRODUCTS } lt_product;

typedef struct lt_choice {
  int usable;
  cublasLtMatmulAlgo_t algo;
} lt_choice;

struct cuda_lt {
  cublasLtHandle_t handle;
  void *scratch;
  int32_t multiprocessors;
  int warm[LT_PRODUCTS];
  lt_choice choices[LT_PRODUCTS][CLASSES];
};

/* One product, its operands less the scales (the descriptor has those). */
typedef struct lt_call {
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t w_layout, x_layout, out_layout;
  const void *w, *x;
  void *out;
} lt_call;

/* ---- errors -------------------------------------------------------------------------------- */

/* The one border where a cuBLASLt error becomes an oproj_status. */
static oproj_status lt_fail(cublasStatus_t error, const char *call) {
  return oproj_fail(error == CUBLAS_STATUS_ALLOC_FAILED ? OPROJ_ERR_NOMEM : OPROJ_ERR_DEVICE,
                    "%s: %s", call, cublasLtGetStatusString(error));
}

#define LT_TRY(call)                                                          \
  do {                                                                        \
    cublasStatus_t lt_error_ = (call);                                        \
    if (lt_error_ != CUBLAS_STATUS_SUCCESS) return lt_fail(lt_error_, #call); \
  } while (0)

/* ---- describing a product ------------------------------------------------------------------ */

static int32_t padded_tokens(int32_t tokens) {
  return (tokens + CUDA_LT_SLACK) / CUDA_LT_MULTIPLE * CUDA_LT_MULTIPLE;
}

static int on_sm90(const oproj_kernels *k) {
  return k->capability == 90;
}

static int class_of(int32_t tokens) {
  int order = 0;
  while (((int64_t)1 << order) < tokens) order++;
  return order;
}

static oproj_status set_scales(lt_call *call, const void *w_scales, const void *x_scales) {
  LT_TRY(cublasLtMatmulDescSetAttribute(&call->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                                        &w_scales, sizeof w_scales));
  LT_TRY(cublasLtMatmulDescSetAttribute(&call->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
                                        &x_scales, sizeof x_scales));
  return OPROJ_OK;
}

static oproj_status describe(lt_call *call, int sm90, int32_t rows, int32_t cols, int32_t tokens,
                             int32_t out_stride) {
  const cublasOperation_t transposed = CUBLAS_OP_T;
  const cublasLtMatmulMatrixScale_t w_mode = sm90 ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                                                  : CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0,
                                    x_mode = sm90 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                                  : CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
  uint64_t m = (uint64_t)rows, k = (uint64_t)cols, n = (uint64_t)padded_tokens(tokens);
  LT_TRY(cublasLtMatmulDescInit(&call->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  LT_TRY(cublasLtMatmulDescSetAttribute(&call->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                        sizeof transposed));
  LT_TRY(cublasLtMatmulDescSetAttribute(&call->desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &w_mode,
                                        sizeof w_mode));
  LT_TRY(cublasLtMatmulDescSetAttribute(&call->desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &x_mode,
                                        sizeof x_mode));
  LT_TRY(cublasLtMatrixLayoutInit(&call->w_layout, CUDA_R_8F_E4M3, k, m, cols));
  LT_TRY(cublasLtMatrixLayoutInit(&call->x_layout, CUDA_R_8F_E4M3, k, n, cols));
  LT_TRY(cublasLtMatrixLayoutInit(&call->out_layout, CUDA_R_16BF, m, n, out_stride));
  return OPROJ_OK;
}

/* Its blocks stay until all is done: without this, a sum that runs beside it would keep the last of
 * them waiting. */
static oproj_status leave_room(lt_call *call, const cuda_lt *lt, const oproj_kernels_part *part) {
  int32_t target = lt->multiprocessors - part->spare;
  if (part->spare > 0 && target > 0)
    LT_TRY(cublasLtMatmulDescSetAttribute(&call->desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET,
                                          &target, sizeof target));
  return OPROJ_OK;
}

/* WO_A of one group: not on SM90. */
static oproj_status describe_group(lt_call *call, const oproj_kernels_weights *w, int32_t group,
                                   const oproj_quant *x, uint16_t *z) {
  const oproj_kernels *k = w->kernels;
  int32_t rows = k->config.dims.lora_rank, cols = k->group_cols, blocks = cols / BLOCK;
  TRY(describe(call, 0, rows, cols, x->tokens, k->z_cols));
  call->w = (const uint8_t *)w->wo_a.data + (int64_t)group * rows * cols;
  call->x = x->codes + (int64_t)group * x->tokens * cols;
  call->out = z + (int64_t)group * rows;
  return set_scales(
      call, w->wo_a_tiles + (int64_t)group * rows * blocks,
      k->work.xq_tiles + (int64_t)group * blocks * oproj_base_ceil_div(x->tokens, BLOCK) * BLOCK);
}

static oproj_status describe_out(lt_call *call, const oproj_kernels_weights *w,
                                 const oproj_quant *zq, uint16_t *partial) {
  const oproj_kernels *k = w->kernels;
  int32_t hidden = k->config.dims.hidden;
  int sm90 = on_sm90(k);
  TRY(describe(call, sm90, hidden, k->z_cols, zq->tokens, hidden));
  call->w = w->wo_b.data;
  call->x = zq->codes;
  call->out = partial;
  if (!sm90) return set_scales(call, w->wo_b_tiles, k->work.zq_tiles);
  return set_scales(call, w->wo_b_joined ? w->wo_b_joined : w->wo_b.scales, zq->scales);
}

static cublasStatus_t lt_matmul(const cuda_lt *lt, lt_call *call, const cublasLtMatmulAlgo_t *algo,
                                cudaStream_t stream) {
  const float one = 1.0f, zero = 0.0f;
  return cublasLtMatmul(lt->handle, &call->desc, &one, call->w, &call->w_layout, call->x,
                        &call->x_layout, &zero, call->out, &call->out_layout, call->out,
                        &call->out_layout, algo, lt->scratch, SCRATCH_BYTES, stream);
}

/* ---- the context's share ------------------------------------------------------------------- */

static int serves(const oproj_kernels *k) {
  const oproj_dims *dims = &k->config.dims;
  int known = on_sm90(k) || k->capability == 100 || k->capability == 103;
  return known && dims->lora_rank % BLOCK == 0 && dims->hidden % BLOCK == 0 &&
         k->group_cols % COLS_MULTIPLE == 0 && k->z_cols % COLS_MULTIPLE == 0 &&
         k->config.max_tokens >= CUDA_LT_TOKENS;
}

oproj_status cuda_lt_open(oproj_kernels *k) {
  if (!serves(k)) return OPROJ_OK;
  k->lt = calloc(1, sizeof *k->lt);
  REQUIRE(k->lt, OPROJ_ERR_NOMEM, "no memory for cuBLASLt's choices");
  CUDA_TRY(
      cudaDeviceGetAttribute(&k->lt->multiprocessors, cudaDevAttrMultiProcessorCount, k->device));
  LT_TRY(cublasLtCreate(&k->lt->handle));
  CUDA_TRY(cudaMalloc(&k->lt->scratch, SCRATCH_BYTES));
  return on_sm90(k) ? OPROJ_OK : cuda_lt_sm100_open(k);
}

void cuda_lt_close(oproj_kernels *k) {
  if (!k->lt) return;
  cudaFree(k->lt->scratch);
  if (k->lt->handle) cublasLtDestroy(k->lt->handle);
  free(k->lt);
  k->lt = NULL;
}

/* Whether the weights of a product are e4m3 with scales that cuBLASLt can read on this device.  On
 * SM90 it serves WO_B alone: our own WO_A is as fast and quantises z as well. */
static int has_scales(const oproj_kernels_weights *w, lt_product product) {
  if (on_sm90(w->kernels))
    return product == LT_OUT && w->wo_b.dtype == OPROJ_DTYPE_E4M3 &&
           (w->wo_b.block == BLOCK || w->wo_b_joined);
  return product == LT_GROUP ? w->wo_a_tiles != NULL : w->wo_b_tiles != NULL;
}

/* ---- choosing algorithms ------------------------------------------------------------------- */

typedef struct stopwatch {
  cudaEvent_t begin, end;
  cudaStream_t stream;
} stopwatch;

static void stopwatch_close(stopwatch *s) {
  if (s->begin) cudaEventDestroy(s->begin);
  if (s->end) cudaEventDestroy(s->end);
}

static oproj_status stopwatch_open(stopwatch *s, cudaStream_t stream) {
  s->stream = stream;
  CUDA_TRY(cudaEventCreate(&s->begin));
  CUDA_TRY(cudaEventCreate(&s->end));
  return OPROJ_OK;
}

/* Milliseconds of one run, or -1 where cuBLASLt refuses the algorithm.  The first run is not timed:
 * it loads the kernel, which must not happen while a graph is captured. */
static oproj_status time_algo(const cuda_lt *lt, lt_call *call, const cublasLtMatmulAlgo_t *algo,
                              const stopwatch *s, float *milliseconds) {
  *milliseconds = -1.0f;
  if (lt_matmul(lt, call, algo, s->stream) != CUBLAS_STATUS_SUCCESS) return OPROJ_OK;
  CUDA_TRY(cudaEventRecord(s->begin, s->stream));
  for (int i = 0; i < TIMED_RUNS; i++) LT_TRY(lt_matmul(lt, call, algo, s->stream));
  CUDA_TRY(cudaEventRecord(s->end, s->stream));
  CUDA_TRY(cudaEventSynchronize(s->end));
  CUDA_TRY(cudaEventElapsedTime(milliseconds, s->begin, s->end));
  *milliseconds /= TIMED_RUNS;
  return OPROJ_OK;
}

/* Algorithms that split K are not asked for: which one is fastest may change from run to run, the
 * order of sums must not. */
static oproj_status ask(const cuda_lt *lt, lt_call *call,
                        cublasLtMatmulHeuristicResult_t found[CANDIDATES], int *count) {
  const uint32_t whole_sums = CUBLASLT_REDUCTION_SCHEME_NONE;
  cublasLtMatmulPreferenceOpaque_t preference;
  *count = 0;
  LT_TRY(cublasLtMatmulPreferenceInit(&preference));
  LT_TRY(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                              &SCRATCH_BYTES, sizeof SCRATCH_BYTES));
  LT_TRY(cublasLtMatmulPreferenceSetAttribute(
      &preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &whole_sums, sizeof whole_sums));
  cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      lt->handle, &call->desc, &call->w_layout, &call->x_layout, &call->out_layout,
      &call->out_layout, &preference, CANDIDATES, found, count);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) LT_TRY(status); /* else our own kernel stays */
  return OPROJ_OK;
}

static oproj_status choose(const cuda_lt *lt, lt_call *call, const stopwatch *s, const char *name,
                           int32_t tokens, lt_choice *choice) {
  cublasLtMatmulHeuristicResult_t found[CANDIDATES];
  int count = 0, chosen = -1;
  float first = 0.0f, best = 0.0f;
  TRY(ask(lt, call, found, &count));
  for (int i = 0; i < count; i++) {
    float milliseconds;
    if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
    TRY(time_algo(lt, call, &found[i].algo, s, &milliseconds));
    if (i == 0) first = milliseconds;
    if (milliseconds < 0.0f || (chosen >= 0 && milliseconds >= best)) continue;
    chosen = i;
    best = milliseconds;
  }
  choice->usable = chosen >= 0;
  if (choice->usable) choice->algo = found[chosen].algo;
  oproj_base_log(OPROJ_LOG_DEBUG,
                 "cuBLASLt, %s, %d tokens: candidate %d of %d, %.1f us (the first %.1f)", name,
                 tokens, chosen + 1, count, 1000.0 * (double)best, 1000.0 * (double)first);
  return OPROJ_OK;
}

static oproj_status describe_either(lt_call *call, const oproj_kernels_weights *w,
                                    lt_product product, int32_t tokens) {
  const oproj_kernels *k = w->kernels;
  oproj_quant q = product == LT_GROUP ? k->work.xq : k->work.zq;
  q.tokens = tokens;
  return product == LT_GROUP ? describe_group(call, w, 0, &q, k->work.z)
                             : describe_out(call, w, &q, k->work.x);
}

/* Constant codes and scales, so that a choice does not hang on what the workspace last held. */
static oproj_status fill(const oproj_kernels *k, lt_product product, int32_t tokens) {
  enum { CODE = 0x35, SCALE_BYTE = 0x3C };
  const oproj_quant *q = product == LT_GROUP ? &k->work.xq : &k->work.zq;
  size_t cols = (size_t)(product == LT_GROUP ? k->group_cols : k->z_cols);
  int32_t block = k->config.dims.quant_block;
  size_t values = (size_t)padded_tokens(tokens) * cols;
  CUDA_TRY(cudaMemsetAsync(q->codes, CODE, values, k->upload));
  CUDA_TRY(
      cudaMemsetAsync(q->scales, SCALE_BYTE, values / (size_t)block * sizeof(float), k->upload));
  return OPROJ_OK;
}

static oproj_status choose_all(const oproj_kernels_weights *w, lt_product product,
                               const stopwatch *s) {
  const oproj_kernels *k = w->kernels;
  int32_t most = k->config.max_tokens;
  TRY(fill(k, product, most));
  for (int order = class_of(CUDA_LT_TOKENS); order <= class_of(most); order++) {
    int64_t tokens = (int64_t)1 << order;
    if (tokens > most) tokens = most;
    lt_call call;
    TRY(describe_either(&call, w, product, (int32_t)tokens));
    TRY(choose(k->lt, &call, s, product == LT_GROUP ? "WO_A" : "WO_B", (int32_t)tokens,
               &k->lt->choices[product][order]));
  }
  k->lt->warm[product] = 1;
  return OPROJ_OK;
}

oproj_status cuda_lt_warm(const oproj_kernels_weights *w) {
  const oproj_kernels *k = w->kernels;
  for (int product = 0; product < LT_PRODUCTS; product++) {
    if (!k->lt || k->lt->warm[product] || !has_scales(w, (lt_product)product)) continue;
    stopwatch s = {0};
    CUDA_TRY(cudaDeviceSynchronize()); /* calls of other layers may still use the workspace */
    oproj_status status = stopwatch_open(&s, k->upload);
    if (status == OPROJ_OK) status = choose_all(w, (lt_product)product, &s);
    stopwatch_close(&s);
    TRY(status);
  }
  return OPROJ_OK;
}

/* ---- serving a call ------------------------------------------------------------------------ */

static int in_range(const oproj_kernels *k, const oproj_kernels_part *part, const oproj_quant *q) {
  oproj_path path = k->config.path;
  return k->lt && (path == OPROJ_PATH_AUTO || path == OPROJ_PATH_LIBRARY) &&
         q->layout == OPROJ_SCALE_F32 && part->call_tokens >= CUDA_LT_TOKENS &&
         part->call_tokens <= k->config.max_tokens && (uintptr_t)q->codes % ALIGNMENT == 0 &&
         (uintptr_t)q->scales % SCALE_ALIGNMENT == 0;
}

static const lt_choice *choice_of(const oproj_kernels *k, lt_product product, int32_t tokens) {
  return &k->lt->choices[product][class_of(tokens)];
}

/* An algorithm was found for the largest count of its class; this asks about the very one. */
static int runs(const oproj_kernels *k, lt_product product, lt_call *call,
                const oproj_kernels_part *part) {
  const lt_choice *choice = choice_of(k, product, part->call_tokens);
  cublasLtMatmulHeuristicResult_t result;
  return choice->usable &&
         cublasLtMatmulAlgoCheck(k->lt->handle, &call->desc, &call->w_layout, &call->x_layout,
                                 &call->out_layout, &call->out_layout, &choice->algo,
                                 &result) == CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= SCRATCH_BYTES;
}

/* A result that cannot be written where it is wanted: rows that pad the count would land behind it,
 * or it is not aligned. */
static int is_staged(const oproj_quant *zq, const uint16_t *partial) {
  return zq->tokens % CUDA_LT_MULTIPLE != 0 || (uintptr_t)partial % ALIGNMENT != 0;
}

int cuda_lt_takes_groups(const oproj_kernels_weights *w, const oproj_kernels_part *part,
                         const oproj_quant *x, const uint16_t *z) {
  const oproj_kernels *k = w->kernels;
  lt_call call;
  int slack = x->codes == k->work.xq.codes && z == k->work.z;
  return in_range(k, part, x) && (slack || x->tokens % CUDA_LT_MULTIPLE == 0) &&
         (uintptr_t)z % ALIGNMENT == 0 && has_scales(w, LT_GROUP) &&
         describe_group(&call, w, 0, x, (uint16_t *)z) == OPROJ_OK &&
         runs(k, LT_GROUP, &call, part);
}

int cuda_lt_takes_out(const oproj_kernels_weights *w, const oproj_kernels_part *part,
                      const oproj_quant *zq, int joined, const uint16_t *partial) {
  const oproj_kernels *k = w->kernels;
  lt_call call;
  int slack = zq->codes == k->work.zq.codes,
      blocks = joined || w->wo_b.block == BLOCK || !on_sm90(k);
  return in_range(k, part, zq) && blocks && (slack || zq->tokens % CUDA_LT_MULTIPLE == 0) &&
         has_scales(w, LT_OUT) && describe_out(&call, w, zq, (uint16_t *)partial) == OPROJ_OK &&
         runs(k, LT_OUT, &call, part);
}

oproj_status cuda_lt_project_groups(const oproj_kernels_weights *w, const oproj_kernels_part *part,
                                    const oproj_quant *x, uint16_t *z, cudaStream_t stream) {
  const oproj_kernels *k = w->kernels;
  const lt_choice *choice = choice_of(k, LT_GROUP, part->call_tokens);
  TRY(cuda_lt_sm100_activation(x, k->config.dims.quant_block, k->work.xq_tiles, stream));
  for (int32_t group = 0; group < k->config.groups; group++) {
    lt_call call;
    TRY(describe_group(&call, w, group, x, z));
    TRY(leave_room(&call, k->lt, part));
    LT_TRY(lt_matmul(k->lt, &call, &choice->algo, stream));
  }
  return OPROJ_OK;
}

oproj_status cuda_lt_project_out(const oproj_kernels_weights *w, const oproj_kernels_part *part,
                                 const oproj_quant *zq, uint16_t *partial, cudaStream_t stream) {
  const oproj_kernels *k = w->kernels;
  int staged = is_staged(zq, partial);
  uint16_t *out = staged ? k->work.x : partial; /* x is spent once z exists */
  size_t bytes = (size_t)zq->tokens * (size_t)k->config.dims.hidden * sizeof *out;
  lt_call call;
  if (!on_sm90(k))
    TRY(cuda_lt_sm100_activation(zq, k->config.dims.quant_block, k->work.zq_tiles, stream));
  TRY(describe_out(&call, w, zq, out));
  TRY(leave_room(&call, k->lt, part));
  LT_TRY(lt_matmul(k->lt, &call, &choice_of(k, LT_OUT, part->call_tokens)->algo, stream));
  if (staged) CUDA_TRY(cudaMemcpyAsync(partial, out, bytes, cudaMemcpyDeviceToDevice, stream));
  return OPROJ_OK;
}
