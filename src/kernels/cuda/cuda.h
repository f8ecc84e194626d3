/* cuda.h - inside the CUDA backend: its state, and the launchers that its host code calls.
 *
 *   backend.c         the stages, their chain and the table
 *   context.c         device, workspace, bad positions, plain memory
 *   weights.c         upload of weights and adapters
 *   ranks.c           what several ranks need of a GPU: its name, pinned memory, their sum
 *   reduce.cu         that sum's kernel
 *   push.cu           that sum where ranks write to one another's memory
 *   pulse.c, pulse.cu counts of what the device waits for, to be seen while it hangs
 *   versions.c        which CUDA this is
 *   range.h           the stages' names for profilers
 *   input.cu          inverse RoPE, block quantisation, of the input and of z
 *   project.cu        both projections for many tokens: tensor cores, f32 sums
 *   project_small.cu  the same for up to CUDA_SMALL_TOKENS tokens: bound by the weights' bytes
 *   adapter.cu        the low-rank addition to WO_A
 *   sm90.h, sm90_*    SM90's own kernels for both projections: few tokens, on request with the
 *                     input's quantiser fused in front; many tokens (sm90_prefill*)
 *   sm90_decode*      SM90: the whole chain of a few tokens in one launch
 *   sm90_join*        SM90: blocks of 32 joined to such of 128
 *   cublaslt*         projections of large batches, in blocks of 128, through cuBLASLt
 *   device.cuh        what the kernels share
 *   input.cuh         bad positions and block quantisation, for the kernels that need them
 *
 * A launcher takes one POD that carries every shape and pointer (device memory), enqueues on the
 * stream and returns the launch's error.  It neither allocates, copies nor synchronises, so that
 * all of them can be captured in a CUDA graph. */
#ifndef OPROJ_KERNELS_CUDA_H
#define OPROJ_KERNELS_CUDA_H

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors -------------------------------------------------------------------------------- */

/* The one border where a CUDA error becomes an oproj_status: ERR_NOMEM for a failed allocation,
 * ERR_DEVICE for the rest, the sentence being the call and CUDA's text. */
oproj_status cuda_fail(cudaError_t error, const char *call);

#define CUDA_TRY(call)                                                    \
  do {                                                                    \
    cudaError_t cuda_error_ = (call);                                     \
    if (cuda_error_ != cudaSuccess) return cuda_fail(cuda_error_, #call); \
  } while (0)

/* A position outside the table, found by a kernel.  Lies in pinned host memory that the device
 * writes, so that the host sees it without synchronising.  raised != seen means one is waiting to
 * be reported; the host then sets seen = raised.  `claim`, in device memory, lets one thread win:
 * it equals `seen` while the record is free.  Neither side needs an atomic across PCIe. */
typedef struct cuda_fault {
  uint32_t raised;  /* device writes, last */
  uint32_t seen;    /* host writes */
  uint32_t stalled; /* device writes: blocks of a launch waited in vain for one another */
  int32_t token;
  int64_t position, rows;
  uint32_t lost_rank; /* device writes: 1 + the rank whose part of a sum did not come */
} cuda_fault;

/* ---- input.cu ------------------------------------------------------------------------------ */

typedef struct cuda_input {
  int32_t tokens, heads, heads_per_group, head_dim, rope_dim;
  int32_t begin, strip, stride; /* which of the call's tokens these are: oproj_kernels_part */
  int32_t block;                /* of quantisation: 32 or 128 */
  int32_t joined;               /* blocks of 32 in fours: sm90_join.h; OPROJ_SCALE_F32 alone */
  const uint16_t *attn_out;     /* the call's: bf16, token t and head h at t * token_stride +
                                   h * head_stride */
  int64_t token_stride, head_stride;
  const void *positions; /* the call's: i64, or i32 where positions_i32 */
  int32_t positions_i32;
  const float *cos_sin; /* f32 [cos_sin_rows, rope_dim] */
  int64_t cos_sin_rows;
  cuda_fault *fault; /* device address */
  uint32_t *claim;
  int32_t dependent; /* launch while the kernel before still runs; capability 9.0 or newer */
  uint8_t *codes;    /* quantize: e4m3 [groups, tokens, D], 16-byte aligned ... */
  void *scales;      /* ... and scales, as `layout` says */
  oproj_scale_layout layout;
  uint16_t *x; /* rotate: bf16 [groups, tokens, D], 16-byte aligned */
} cuda_input;

cudaError_t cuda_launch_input_quantize(const cuda_input *input, cudaStream_t stream);
cudaError_t cuda_launch_input_rotate(const cuda_input *input, cudaStream_t stream);

typedef struct cuda_z {
  int32_t tokens, cols;
  int32_t block, joined; /* as cuda_input's */
  const uint16_t *z;     /* bf16 [tokens, cols], 16-byte aligned */
  uint8_t *codes;        /* e4m3 [tokens, cols], 16-byte aligned */
  void *scales;
  oproj_scale_layout layout;
} cuda_z;

cudaError_t cuda_launch_z_quantize(const cuda_z *z, cudaStream_t stream);

/* ---- project.cu, project_small.cu ---------------------------------------------------------- */

/* For every group g and each of its rows:
 *   out[t, g*rows + row] = bf16( sum over blocks b of (sum_k a[g,t,k] w[g*rows + row, k])
 *                                    * (a_scale[g,t,b] * w_scale[g*rows + row, b])
 *                                + addend[t, g*rows + row] ),  sums in f32.
 * Activation and weight are both e4m3 with scales or both bf16 without. */
typedef struct cuda_product {
  int32_t groups, tokens, rows, cols; /* rows per group; cols a multiple of 32 */
  int32_t call_tokens;                /* of the call that `tokens` are a part of */
  oproj_dtype dtype;
  int32_t block;        /* e4m3: 32 or 128, dividing cols and, where groups > 1, rows */
  const void *a;        /* [groups, tokens, cols], 16-byte aligned */
  const void *a_scales; /* e4m3: as `layout` says */
  oproj_scale_layout layout;
  const void *w;         /* [groups * rows, cols], 16-byte aligned */
  const float *w_scales; /* e4m3: [ceil(groups * rows / block), cols / block] */
  const float *addend;   /* f32, indexed as out; or NULL */
  uint16_t *out;
  int64_t out_stride; /* elements between tokens */
} cuda_product;

enum { CUDA_SMALL_TOKENS = 8 }; /* up to here a warp's lanes can each end with one output */

/* Chooses between the two kernels, by call_tokens. */
cudaError_t cuda_launch_project(const cuda_product *product, cudaStream_t stream);
cudaError_t cuda_launch_project_small(const cuda_product *product, cudaStream_t stream);

/* ---- adapter.cu ---------------------------------------------------------------------------- */

/* delta[t, g*rows + row] = sum_i (sum_k x[g,t,k] a[g,i,k]) * b[g,row,i], both sums in f32. */
typedef struct cuda_lora {
  int32_t groups, tokens, rank, rows, cols;
  const uint16_t *x; /* bf16 [groups, tokens, cols], 16-byte aligned */
  const uint16_t *a; /* bf16 [groups, rank, cols], 16-byte aligned */
  const uint16_t *b; /* bf16 [groups, rows, rank] */
  float *down;       /* f32 [groups, tokens, rank]: the inner sums, scratch */
  float *delta;      /* f32 [tokens, groups * rows] */
} cuda_lora;

cudaError_t cuda_launch_lora(const cuda_lora *lora, cudaStream_t stream);

/* ---- state --------------------------------------------------------------------------------- */

enum { CUDA_CLUSTER_SIZES = 3 }; /* 1, 2, 4 blocks */

enum { CUDA_RANK_CLASSES = 11 }; /* adapter ranks 1, 2, 4 .. 1024 */

/* Buffers between the stages, for max_tokens; their addresses never change, so captured graphs stay
 * valid as long as the context.  Behind codes and z lie CUDA_LT_SLACK more rows (cublaslt.h). */
typedef struct cuda_workspace {
  uint16_t *x;    /* bf16 [groups, T, D]; at least [T + CUDA_LT_SLACK, hidden] */
  oproj_quant xq; /* quantised input, OPROJ_SCALE_F32 */
  uint16_t *z;    /* bf16 [T, z cols] */
  oproj_quant zq; /* quantised z, in whatever layout a call asks for */

  /* SM100 and SM103: the scales of xq and zq for cuBLASLt. */
  uint32_t *xq_tiles, *zq_tiles;

  /* Made by the first adapter (of its rank class), shared by all layers, kept until close. */
  float *delta;
  float *down[CUDA_RANK_CLASSES];
} cuda_workspace;

typedef struct cuda_lt cuda_lt; /* cublaslt.c: a handle and its choices */

struct oproj_kernels {
  oproj_kernels_config config;
  int32_t group_cols, z_cols; /* D and the z columns held */
  int device;
  int32_t capability;    /* major*10 + minor */
  int32_t no_native;     /* nonzero: no kernel of sm90* runs here */
  int32_t dependent;     /* kernels may start while others run: capability 9.0, and OPROJ_PDL */
  uint32_t paths_logged; /* by bit */
  int32_t sm90_capacity[CUDA_CLUSTER_SIZES]; /* SM90: blocks held at once in clusters of 1, 2, 4 */
  cudaStream_t upload;                       /* for weights; joins no other stream */
  cudaStream_t beside;                       /* for sums that run beside a call's stream */
  cudaEvent_t forked, joined;
  cuda_workspace work;
  struct sm90_decode_state *decode; /* NULL where its kernel cannot serve */
  cuda_lt *lt;                      /* NULL where cuBLASLt cannot serve */
  uint32_t warm;                    /* a bit for each kind of layer that cuda_warm has run */
  cuda_fault *fault;                /* host address ... */
  cuda_fault *fault_device;         /* ... and the device's for the same memory */
  uint32_t *claim;
};

typedef struct cuda_adapter {
  int32_t rank; /* 0 = none */
  uint16_t *a, *b;
  float *down; /* borrowed from the workspace */
} cuda_adapter;

struct oproj_kernels_weights {
  oproj_kernels *kernels;
  oproj_matrix wo_a, wo_b; /* data and scales in device memory, owned */
  /* SM90 only: the copy engine's view of e4m3 data; of WO_B by blocks of the decode kernel too. */
  CUtensorMap wo_a_map, wo_b_map, wo_b_decode_map;
  /* SM90, blocks of 32: the scales of blocks joined in fours (sm90_join.h); NULL where not. */
  float *wo_a_joined, *wo_b_joined;
  /* SM100 and SM103: their scales for cuBLASLt; NULL where not all are powers of two. */
  uint32_t *wo_a_tiles, *wo_b_tiles;
  cuda_adapter adapter;
};

/* ---- context.c ----------------------------------------------------------------------------- */

/* NULL where some device of this machine can serve, else why none can.  Static storage. */
const char *cuda_why_unusable(void);

/* config->device is an ordinal, or -1 for the thread's current device. */
oproj_status cuda_open(oproj_kernels **out, const oproj_kernels_config *config);
void cuda_close(oproj_kernels *kernels);
int32_t cuda_capability(const oproj_kernels *kernels);
void cuda_describe(const oproj_kernels_weights *weights, oproj_path_query *query);

/* What every stage begins with: makes the device current, and fails with ERR_INVALID where an
 * earlier call met a bad position that nothing has reported yet. */
oproj_status cuda_enter(oproj_kernels *kernels);

/* Read and write synchronise the stream; read reports bad positions as cuda_enter does, after the
 * bytes have arrived. */
oproj_status cuda_buffer_create(oproj_kernels *kernels, size_t bytes, void **out);
void cuda_buffer_destroy(oproj_kernels *kernels, void *buffer);
oproj_status cuda_buffer_write(oproj_kernels *kernels, void *to, const void *from_host,
                               size_t bytes, void *stream);
oproj_status cuda_buffer_read(oproj_kernels *kernels, void *to_host, const void *from, size_t bytes,
                              void *stream);

/* ---- backend.c ----------------------------------------------------------------------------- */

/* Runs once what calls of such a layer may dispatch: dtypes as they are, blocks joined or not, with
 * or without an adapter.  A kernel's first launch loads its code, which takes device memory and
 * time that a call must not.  Does nothing for a kind of layer that the context has warmed up
 * before.  Waits for the device and overwrites the workspace. */
oproj_status cuda_warm(const oproj_kernels_weights *weights);

/* ---- weights.c ----------------------------------------------------------------------------- */

oproj_status cuda_weights_create(oproj_kernels_weights **out, oproj_kernels *kernels,
                                 const oproj_matrix *wo_a, const oproj_matrix *wo_b);
oproj_status cuda_weights_check(const oproj_kernels_weights *weights, const oproj_matrix *wo_a,
                                const oproj_matrix *wo_b);
oproj_status cuda_weights_replace(oproj_kernels_weights *weights, const oproj_matrix *wo_a,
                                  const oproj_matrix *wo_b);
void cuda_weights_destroy(oproj_kernels_weights *weights);

/* Makes new device copies, so graphs captured with the former adapter must be captured again. */
oproj_status cuda_adapter_set(oproj_kernels_weights *weights, const oproj_adapter *adapter);

/* ---- pulse.c, pulse.cu ---------------------------------------------------------------------- */

/* count++, and shown = count; a count of NULL is none. */
typedef struct cuda_beat {
  uint64_t *count;   /* device memory */
  uint64_t *shown;   /* the device's address of host memory */
  int32_t dependent; /* launch while the kernel before still runs; capability 9.0 or newer */
} cuda_beat;

cudaError_t cuda_launch_beat(const cuda_beat *beat, cudaStream_t stream);

/* What a kernel needs to end the work that `pulse` (NULL: none) has begun. */
cuda_beat cuda_describe_end(const oproj_kernels_pulse *pulse);

oproj_status cuda_pulse_create(oproj_kernels *kernels, oproj_kernels_pulse **out);
void cuda_pulse_destroy(oproj_kernels *kernels, oproj_kernels_pulse *pulse);
oproj_status cuda_pulse_begin(oproj_kernels *kernels, oproj_kernels_pulse *pulse, void *stream);
oproj_status cuda_pulse_end(oproj_kernels *kernels, oproj_kernels_pulse *pulse, void *stream);
void cuda_pulse_read(const oproj_kernels_pulse *pulse, uint64_t *begun, uint64_t *ended);

/* ---- ranks.c, reduce.cu --------------------------------------------------------------------- */

/* The second stream, as kernels.h describes fork and join. */
oproj_status cuda_open_beside(oproj_kernels *kernels);
void cuda_close_beside(oproj_kernels *kernels);
oproj_status cuda_fork(oproj_kernels *kernels, void *stream, void **beside);
oproj_status cuda_join(oproj_kernels *kernels, void *stream);

/* out[i] = bf16(sum over n of parts[n * count + i]), f32 sums in the order of n, n >= 2. */
typedef struct cuda_sum {
  const uint16_t *parts;
  int32_t n;
  int64_t count;
  uint16_t *out;
  cuda_beat waited; /* for the parts: has ended when the kernel starts */
} cuda_sum;

cudaError_t cuda_launch_sum(const cuda_sum *sum, cudaStream_t stream);

/* ---- ranks.c, push.cu ---------------------------------------------------------------------- */

/* The head of a mailbox, of which only its owner knows; the words follow at CUDA_PUSH_HEAD. */
typedef struct cuda_push_control {
  uint32_t sums;     /* that have ended: the last one's number */
  uint32_t arrivals; /* of blocks, at their end */
  uint32_t lost;     /* a rank was waited for in vain: every later sum is NaN */
} cuda_push_control;

enum { CUDA_PUSH_HEAD = 256 };

/* out[i] = bf16(sum over ranks of partial[i]), f32 sums in rank order; out may be partial. */
typedef struct cuda_push {
  const uint16_t *partial;
  uint16_t *out;
  int64_t count;
  int32_t n, rank;
  int64_t words;                                 /* of a sender in an epoch, even */
  uint64_t *mailboxes[OPROJ_KERNELS_PUSH_RANKS]; /* words by rank, as mapped here */
  cuda_push_control *control;                    /* this rank's */
  cuda_fault *fault;
  uint64_t patience_ns;
  int32_t whole;     /* count is a multiple of 4, partial and out aligned to 8 bytes */
  int32_t sent;      /* the kernel before has pushed this rank's part */
  int32_t dependent; /* launch while the kernel before still runs; capability 9.0 or newer */
} cuda_push;

cudaError_t cuda_launch_push(const cuda_push *push, cudaStream_t stream);

/* What a kernel of this context needs to push; the caller fills in partial, out and count. */
cuda_push cuda_describe_push(const oproj_kernels *kernels, const oproj_kernels_push *push);

/* As kernels.h describes these members of the table. */
size_t cuda_mailbox_bytes(int32_t size, int64_t capacity);
oproj_status cuda_mailbox_create(oproj_kernels *kernels, size_t bytes, void **out,
                                 oproj_kernels_handle *handle);
void cuda_mailbox_destroy(oproj_kernels *kernels, void *mailbox);
oproj_status cuda_mailbox_open(oproj_kernels *kernels, const oproj_kernels_handle *handle,
                               void **out);
void cuda_mailbox_close(oproj_kernels *kernels, void *mailbox);
oproj_status cuda_sum_pushed(oproj_kernels *kernels, const oproj_kernels_push *push, int64_t count,
                             const uint16_t *partial, uint16_t *out, int sent, void *stream);
oproj_status cuda_host_create(oproj_kernels *kernels, size_t bytes, void **out);
void cuda_host_destroy(oproj_kernels *kernels, void *memory);
oproj_status cuda_sum_ranks(oproj_kernels *kernels, const uint16_t *parts, int32_t n, int64_t count,
                            uint16_t *out, oproj_kernels_pulse *waited, void *stream);
oproj_status cuda_make_nan(oproj_kernels *kernels, uint16_t *values, int64_t count, void *stream);

#ifdef __cplusplus
}
#endif
#endif /* OPROJ_KERNELS_CUDA_H */
