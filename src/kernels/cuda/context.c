/* context.c - one context's device, workspace and plain memory.
 *
 * A position outside the table is found on the device.  It makes its token NaN and is reported as
 * ERR_INVALID by a later call: the first stage that starts, or buffer_read that ends, after the
 * device wrote it down.  That call says so once; a stage that reports enqueues nothing. */
#include <stdlib.h>

#include "base/environment.h"
#include "base/error.h"
#include "base/layout.h"
#include "base/log.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/sm90_decode.h"
#include "kernels/cuda/sm90_join.h"
#include "kernels/cuda/sm90_prefill.h"

enum { FIRST_CAPABILITY = 80 };

oproj_status cuda_fail(cudaError_t error, const char *call) {
  (void)cudaGetLastError(); /* clears it, unless the device is lost */
  return oproj_fail(error == cudaErrorMemoryAllocation ? OPROJ_ERR_NOMEM : OPROJ_ERR_DEVICE,
                    "%s: %s", call, cudaGetErrorString(error));
}

/* ---- devices ------------------------------------------------------------------------------- */

static cudaError_t device_capability(int device, int32_t *out) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  *out = major * 10 + minor;
  return error;
}

const char *cuda_why_unusable(void) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (error == cudaErrorInsufficientDriver)
    return "this machine has no NVIDIA driver, or one older than this build's CUDA";
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
    return "this machine has no CUDA device";
  if (error != cudaSuccess) return cudaGetErrorString(error);
  for (int device = 0; device < count; device++) {
    int32_t capability;
    if (device_capability(device, &capability) == cudaSuccess && capability >= FIRST_CAPABILITY)
      return NULL;
  }
  return "no CUDA device here has compute capability 8.0 or newer";
}

/* ---- state --------------------------------------------------------------------------------- */

static void free_workspace(cuda_workspace *w) {
  cudaFree(w->x);
  cudaFree(w->xq.codes);
  cudaFree(w->xq.scales);
  cudaFree(w->z);
  cudaFree(w->zq.codes);
  cudaFree(w->zq.scales);
  cudaFree(w->xq_tiles);
  cudaFree(w->zq_tiles);
  cudaFree(w->delta);
  for (int i = 0; i < CUDA_RANK_CLASSES; i++) cudaFree(w->down[i]);
}

void cuda_close(oproj_kernels *k) {
  if (!k) return;
  cudaSetDevice(k->device);
  cuda_lt_close(k);
  sm90_decode_close(k);
  free_workspace(&k->work);
  cudaFree(k->claim);
  if (k->fault) cudaFreeHost(k->fault);
  if (k->upload) cudaStreamDestroy(k->upload);
  cuda_close_beside(k);
  free(k);
}

static oproj_status choose_device(oproj_kernels *k, int32_t wanted) {
  int count = 0;
  CUDA_TRY(cudaGetDeviceCount(&count));
  REQUIRE(wanted >= -1 && wanted < count, OPROJ_ERR_INVALID,
          "device is %d; this process sees %d CUDA devices, numbered from 0", wanted, count);
  k->device = wanted;
  if (wanted == -1) CUDA_TRY(cudaGetDevice(&k->device));
  CUDA_TRY(device_capability(k->device, &k->capability));
  REQUIRE(k->capability >= FIRST_CAPABILITY, OPROJ_ERR_UNSUPPORTED,
          "device %d has compute capability %d.%d; 8.0 or newer is needed", k->device,
          k->capability / 10, k->capability % 10);
  CUDA_TRY(cudaSetDevice(k->device));
  return OPROJ_OK;
}

/* Room for the largest of the three layouts. */
static size_t any_scale_bytes(int32_t groups, int32_t tokens, int64_t columns) {
  int64_t f32 = oproj_layout_bytes(OPROJ_SCALE_F32, groups, tokens, columns);
  int64_t tile = oproj_layout_bytes(OPROJ_SCALE_UE8M0_TILE, groups, tokens, columns);
  return (size_t)(f32 > tile ? f32 : tile); /* packed is never larger than f32 and tile */
}

static oproj_status allocate(void **out, size_t bytes) {
  CUDA_TRY(cudaMalloc(out, bytes));
  return OPROJ_OK;
}

static oproj_status open_workspace(oproj_kernels *k) {
  /* A context for zero tokens still has buffers, so that no pointer is NULL. */
  int32_t tokens = k->config.max_tokens > 0 ? k->config.max_tokens : 1;
  int32_t groups = k->config.groups, block = k->config.dims.quant_block;
  size_t rows = (size_t)tokens + CUDA_LT_SLACK, hidden = (size_t)k->config.dims.hidden;
  size_t input = ((size_t)groups * (size_t)tokens + CUDA_LT_SLACK) * (size_t)k->group_cols;
  size_t z = rows * (size_t)k->z_cols, x = input > rows * hidden ? input : rows * hidden;
  cuda_workspace *w = &k->work;
  TRY(allocate((void **)&w->x, x * sizeof *w->x));
  TRY(allocate((void **)&w->xq.codes, input));
  TRY(allocate(&w->xq.scales, any_scale_bytes(groups, tokens, k->group_cols / block)));
  TRY(allocate((void **)&w->z, z * sizeof *w->z));
  /* cuBLASLt's kernels store through the copy engine, which initcheck does not follow. */
  CUDA_TRY(cudaMemsetAsync(w->z, 0, z * sizeof *w->z, k->upload));
  CUDA_TRY(cudaStreamSynchronize(k->upload));
  TRY(allocate((void **)&w->zq.codes, z));
  return allocate(&w->zq.scales, any_scale_bytes(1, tokens, k->z_cols / block));
}

static oproj_status open_fault(oproj_kernels *k) {
  void *host, *device;
  CUDA_TRY(cudaHostAlloc(&host, sizeof *k->fault, cudaHostAllocMapped));
  k->fault = host;
  *k->fault = (cuda_fault){0};
  CUDA_TRY(cudaHostGetDevicePointer(&device, host, 0));
  k->fault_device = device;
  TRY(allocate((void **)&k->claim, sizeof *k->claim));
  CUDA_TRY(cudaMemsetAsync(k->claim, 0, sizeof *k->claim, k->upload));
  CUDA_TRY(cudaStreamSynchronize(k->upload));
  return OPROJ_OK;
}

static oproj_status load_products(const oproj_kernels *k, int32_t block) {
  int32_t z_block = k->config.dims.quant_block;
  CUDA_TRY(sm90_project_load(block, z_block));
  if (k->config.max_tokens > SM90_PREFILL_TOKENS) CUDA_TRY(sm90_prefill_load(block, z_block));
  return OPROJ_OK;
}

static oproj_status open_on_device(oproj_kernels *k) {
  k->dependent = k->capability >= 90 && oproj_base_word(OPROJ_ENVIRONMENT_PDL);
  if (k->capability == 90) CUDA_TRY(sm90_probe(&k->no_native));
  if (k->capability == 90 && !k->no_native) {
    CUDA_TRY(sm90_query_capacity(k->sm90_capacity));
    TRY(load_products(k, k->config.dims.quant_block));
    if (k->config.dims.quant_block == SM90_SINGLE_BLOCK) TRY(load_products(k, SM90_JOINED_BLOCK));
  }
  CUDA_TRY(cudaStreamCreateWithFlags(&k->upload, cudaStreamNonBlocking));
  TRY(cuda_open_beside(k));
  TRY(open_fault(k));
  TRY(open_workspace(k));
  TRY(sm90_decode_open(k));
  return cuda_lt_open(k);
}

oproj_status cuda_open(oproj_kernels **out, const oproj_kernels_config *config) {
  oproj_kernels *k = calloc(1, sizeof *k);
  REQUIRE(k, OPROJ_ERR_NOMEM, "no memory for a context");
  k->config = *config;
  k->group_cols = oproj_kernels_group_cols(config);
  k->z_cols = oproj_kernels_z_cols(config);
  oproj_status status = choose_device(k, config->device);
  if (status != OPROJ_OK) {
    free(k);
    return status;
  }
  status = open_on_device(k);
  if (status != OPROJ_OK) {
    cuda_close(k);
    return oproj_base_fail_in(status, "device %d, %d tokens", k->device, config->max_tokens);
  }
  oproj_base_log(OPROJ_LOG_INFO, "CUDA device %d, compute capability %d.%d", k->device,
                 k->capability / 10, k->capability % 10);
  *out = k;
  return OPROJ_OK;
}

/* ---- entering a stage ---------------------------------------------------------------------- */

static oproj_status report_fault(oproj_kernels *k) {
  REQUIRE(!__atomic_load_n(&k->fault->stalled, __ATOMIC_ACQUIRE), OPROJ_ERR_DEVICE,
          "blocks of the decode kernel waited in vain for one another: another kernel that waits "
          "held the device; this context must be created anew");
  uint32_t lost = __atomic_load_n(&k->fault->lost_rank, __ATOMIC_ACQUIRE);
  REQUIRE(!lost, OPROJ_ERR_COMM, "rank %u did not send its part of a sum in time", lost - 1);
  uint32_t raised = __atomic_load_n(&k->fault->raised, __ATOMIC_ACQUIRE);
  if (raised == k->fault->seen) return OPROJ_OK;
  cuda_fault found = *k->fault;
  __atomic_store_n(&k->fault->seen, raised, __ATOMIC_RELEASE); /* frees the record */
  return oproj_fail(
      OPROJ_ERR_INVALID,
      "positions[%d] of an earlier call is %lld; the cos_sin table has rows 0 to %lld", found.token,
      (long long)found.position, (long long)found.rows - 1);
}

oproj_status cuda_enter(oproj_kernels *k) {
  CUDA_TRY(cudaSetDevice(k->device));
  return report_fault(k);
}

/* ---- memory -------------------------------------------------------------------------------- */

oproj_status cuda_buffer_create(oproj_kernels *k, size_t bytes, void **out) {
  CUDA_TRY(cudaSetDevice(k->device));
  return allocate(out, bytes ? bytes : 1);
}

void cuda_buffer_destroy(oproj_kernels *k, void *buffer) {
  cudaSetDevice(k->device);
  cudaFree(buffer);
}

oproj_status cuda_buffer_write(oproj_kernels *k, void *to, const void *from_host, size_t bytes,
                               void *stream) {
  CUDA_TRY(cudaSetDevice(k->device));
  if (bytes) CUDA_TRY(cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, stream));
  CUDA_TRY(cudaStreamSynchronize(stream));
  return OPROJ_OK;
}

/* Everything before it on the stream has run, so a bad position there is reported here; the bytes
 * have arrived all the same. */
oproj_status cuda_buffer_read(oproj_kernels *k, void *to_host, const void *from, size_t bytes,
                              void *stream) {
  CUDA_TRY(cudaSetDevice(k->device));
  if (bytes) CUDA_TRY(cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, stream));
  CUDA_TRY(cudaStreamSynchronize(stream));
  return report_fault(k);
}

int32_t cuda_capability(const oproj_kernels *k) {
  return k->capability;
}

void cuda_describe(const oproj_kernels_weights *w, oproj_path_query *query) {
  const oproj_kernels *k = w->kernels;
  query->unjoined = k->config.dims.quant_block == SM90_SINGLE_BLOCK && !w->wo_b_joined;
  query->sm = k->capability;
  query->resident = k->sm90_capacity[0];
  query->no_native = k->no_native;
}
