/* oproj.h - tensor-parallel attention output projection of DeepSeek-V4 and V4.1.
 *
 *   x   = R(-pos[t]) attn_out[t, h, :]         inverse RoPE on the last rope_dim of each head
 *   z_j = x[t, heads of group j] . WO_A[j]^T   one projection per head group, lora_rank wide
 *   y   = concat_j(z_j) . WO_B^T               back to the model's width
 *
 * Both activations are quantised to FP8 (e4m3) with one power-of-two scale per block of quant_block
 * values when the weight they meet is FP8.  Groups are dealt to ranks in contiguous runs, so a rank
 * holds whole row blocks of WO_A and the matching columns of WO_B, and the only traffic between
 * ranks is one sum at the end.
 *
 * Conventions.  Shapes are row-major, slowest axis first.  Sizes count elements unless the name
 * ends in _bytes.  Ranges are [begin, end).  "bf16" is a uint16_t holding the upper half of a
 * float, "e4m3" a uint8_t (OCP FP8, no infinities), "ue8m0" a uint8_t e meaning 2^(e-127), 255 =
 * NaN. Data pointers of the hot calls belong to the context's device: host memory for the backend
 * "ref", device memory for "cuda".  Calls marked COLLECTIVE must be made by every rank of the
 * communicator, in the same order.  No call prints to stdout, exits or aborts.
 *
 * Errors.  Every fallible call returns an oproj_status: 0 is success, negatives are errors, and
 * oproj_last_error() then holds one sentence with the names and values involved.
 *
 * Threads.  Distinct contexts may be used from distinct threads.  One context, with its layers, is
 * used by one thread at a time. */
#ifndef OPROJ_H
#define OPROJ_H

#include <stddef.h>
#include <stdint.h>

#define OPROJ_VERSION_MAJOR 0
#define OPROJ_VERSION_MINOR 1
#define OPROJ_VERSION_PATCH 0

#ifndef OPROJ_API
#define OPROJ_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status -------------------------------------------------------------------------------- */

#define OPROJ_STATUS_MAP(X)                                         \
  X(OK, 0, "success")                                               \
  X(ERR_INVALID, -1, "invalid argument")                            \
  X(ERR_NOMEM, -2, "out of memory")                                 \
  X(ERR_SHAPE, -3, "dimensions do not fit this plan or checkpoint") \
  X(ERR_UNSUPPORTED, -4, "not supported by this build or device")   \
  X(ERR_IO, -5, "file unreadable or malformed")                     \
  X(ERR_DEVICE, -6, "device runtime failure")                       \
  X(ERR_COMM, -7, "communicator failure")                           \
  X(ERR_PEER, -8, "another rank failed")

typedef enum oproj_status {
#define OPROJ_STATUS_ENUM(name, value, text) OPROJ_##name = value,
  OPROJ_STATUS_MAP(OPROJ_STATUS_ENUM)
#undef OPROJ_STATUS_ENUM
} oproj_status;

/* major*10000 + minor*100 + patch of the library that runs, to compare with the macros above. */
OPROJ_API unsigned oproj_version(void);

/* The general meaning of a status, "unknown status" for a value that is none.  Static storage. */
OPROJ_API const char *oproj_status_string(oproj_status status);

/* This thread's last failure in one sentence; "" before the first.  Valid until the thread's next
 * failing call. */
OPROJ_API const char *oproj_last_error(void);

/* Records a sentence (printf's format, up to 1023 bytes) as this thread's last error and returns
 * `status`: for a caller's own failures inside an oproj_out_fn or before oproj_comm_agree. */
OPROJ_API oproj_status oproj_fail(oproj_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- environment ---------------------------------------------------------------------------- */

/* Whether oproj's own variables hold legal values (launch/env.sh lists them).  The library warns of
 * one that does not and goes on as if it were not set; this is for programs that refuse it.
 * ERR_INVALID: a sentence about the first such variable; *name, unless NULL, is its name. */
OPROJ_API oproj_status oproj_environment_check(const char **name);

/* The variables there are whose names begin like oproj's and are none of them, "OPROJ_LOGS,
 * OPROJ_X", cut to `bytes`; "" for none. */
OPROJ_API void oproj_environment_unknown(char *names, size_t bytes);

/* ---- the model's dimensions and the plan: pure functions ----------------------------------- */

/* Must hold: all positive; groups divides heads; rope_dim even and <= head_dim; quant_block 32 or
 * 128, dividing head_dim and lora_rank. */
typedef struct oproj_dims {
  int32_t hidden;      /* model width: 4096 in V4-Flash */
  int32_t heads;       /* attention heads over all ranks: 64 */
  int32_t head_dim;    /* 512, of which the last rope_dim are rotated */
  int32_t rope_dim;    /* 64 */
  int32_t groups;      /* output groups: 8 */
  int32_t lora_rank;   /* rows of WO_A per group: 1024 */
  int32_t quant_block; /* 128 (V4) or 32 (V4.1): square in weights, 1 x block in activations */
} oproj_dims;

/* One rank's share: whole groups, with their heads, their rows of WO_A and columns of WO_B. */
typedef struct oproj_shard {
  int32_t rank, size;             /* 0 <= rank < size */
  int32_t group_begin, group_end; /* groups held */
  int32_t head_begin, head_end;   /* heads held: the groups' heads */
  int32_t z_begin, z_end;         /* columns of z held = rows of WO_A = columns of WO_B */
} oproj_shard;

typedef enum oproj_split {
  OPROJ_SPLIT_EVEN,  /* groups must divide by size */
  OPROJ_SPLIT_UNEVEN /* as even as it goes, larger shares first: 8 over 3 = 3, 3, 2 */
} oproj_split;

/* The share of `rank` among `size`.  Touches no device, file or network.
 * ERR_INVALID: dims break a rule above, or rank is not in [0, size).
 * ERR_SHAPE: size is not legal; the sentence names the legal ones. */
OPROJ_API oproj_status oproj_plan_shard(const oproj_dims *dims, oproj_split split, int32_t size,
                                        int32_t rank, oproj_shard *out);

/* Rows of y that `rank` keeps under OPROJ_REDUCE_SCATTER: chunks of ceil(tokens/size), the last
 * ones short or empty. */
OPROJ_API void oproj_plan_rows(int32_t tokens, int32_t size, int32_t rank, int32_t *begin,
                               int32_t *end);

/* ---- rotary tables ------------------------------------------------------------------------- */

/* How one kind of layer turns positions into angles.  `factor` <= 1 means no YaRN. */
typedef struct oproj_rope {
  double theta;                  /* 10000 for plain layers, 160000 for compressed ones */
  double factor;                 /* YaRN: 16 for compressed layers */
  double beta_fast;              /* 32 */
  double beta_slow;              /* 1 */
  int64_t original_max_position; /* 65536 */
} oproj_rope;

/* Fills rows [begin, end) of a table: out is host f32 [end-begin, rope_dim], row p-begin holding
 * cos(p f_i) for i < rope_dim/2, then sin(p f_i).  Frequencies are evaluated in double and rounded
 * once to f32; the angle is their f32 product with the position; cos and sin are evaluated in
 * double on that angle and rounded once. */
OPROJ_API oproj_status oproj_rope_table(const oproj_rope *rope, int32_t rope_dim, int64_t begin,
                                        int64_t end, float *out);

/* ---- who takes part ------------------------------------------------------------------------ */

typedef struct oproj_comm oproj_comm;

/* One rank alone.  oproj/mpi.h makes one from an MPI communicator. */
OPROJ_API oproj_status oproj_comm_self(oproj_comm **out);
/* COLLECTIVE, unless a rank was lost.  NULL is allowed, here and below. */
OPROJ_API void oproj_comm_destroy(oproj_comm *comm);

OPROJ_API int32_t oproj_comm_rank(const oproj_comm *comm);
OPROJ_API int32_t oproj_comm_size(const oproj_comm *comm);
OPROJ_API const char *oproj_comm_name(const oproj_comm *comm); /* "self", "mpi" or "nccl" */

/* The GPU that a context of backend "cuda" over `comm` takes where its config.device is -1: the
 * communicator's own, or one for each rank of a host in order, round robin where ranks outnumber
 * GPUs.  -1 without a GPU.  (A context of one rank alone stays on its thread's current device.) */
OPROJ_API int32_t oproj_comm_device(const oproj_comm *comm);

/* COLLECTIVE.  Every rank brings its own status; every rank leaves with the status of the lowest
 * rank that failed (or OK), and its sentence, prefixed "rank K: " on the other ranks, as last
 * error. Call it where one rank alone may have failed, before the next collective call. */
OPROJ_API oproj_status oproj_comm_agree(oproj_comm *comm, oproj_status mine);

/* Something that ranks must have in common, in words. */
typedef struct oproj_fact {
  const char *name, *value; /* compared and shown up to 127 bytes */
} oproj_fact;

/* COLLECTIVE.  ERR_INVALID on every rank, with one sentence that names the first fact that is not
 * the same on all of them, its values and who has which.  oproj_ctx_create compares its own
 * arguments, versions and environment like this; a caller adds what his ranks must share besides.
 * All ranks bring the same names in the same order; up to 64. */
OPROJ_API oproj_status oproj_comm_same(oproj_comm *comm, const oproj_fact *facts, int32_t count);

/* ---- losing a rank -------------------------------------------------------------------------- */
/* A communicator of several ranks watches them from a thread of its own.  A rank is lost when its
 * process ends, when it has been silent for the deadline (stopped, or its host cut off), when
 * others have waited for it as long in a collective call, or their GPUs in a sum that its own has
 * not begun, or when its GPU has been as long in a sum that all have begun; replays of a captured
 * forward are watched, too.  Computing on the host and reading files, inside a call, may take as
 * long as it takes.  After a loss every call that needs the other ranks fails on all of them,
 * those under way included, with ERR_PEER and one sentence that names the rank and where it was.
 * What these calls were given may be freed; the communicator serves no more and is to be destroyed,
 * and with all processes alive (a rank that was only late) a new one can be made.  Open MPI 4 ends
 * the job when a process dies, so that nobody is left to make one. */

/* The deadline of new communicators, in seconds: OPROJ_DEADLINE in the environment, else 30; 0
 * means none.  It also ends the making of a communicator whose ranks do not all come. */
OPROJ_API double oproj_deadline(void);

/* Changes it; a negative number or NaN does not.  To be called alike by all ranks. */
OPROJ_API void oproj_comm_set_deadline(oproj_comm *comm, double seconds);

/* Where this rank is, up to 47 bytes, for the sentence that others get if they lose it: "layers.7"
 * gives "rank 3 was lost in forward of layers.7" once it is in oproj_forward.  `patient` nonzero:
 * until the next note it may keep others waiting as long as its process lives. */
OPROJ_API void oproj_comm_note(oproj_comm *comm, const char *note, int32_t patient);

/* `fn` is called once when a rank is lost, on a thread of oproj's, for programs that wait elsewhere
 * than in oproj's calls; it may end the process but must not call oproj.  NULL takes it back. */
typedef void (*oproj_loss_fn)(void *user, int32_t rank, const char *sentence);
OPROJ_API void oproj_comm_on_loss(oproj_comm *comm, oproj_loss_fn fn, void *user);

/* ERR_PEER once a rank was lost. */
OPROJ_API oproj_status oproj_comm_check(const oproj_comm *comm);

/* ---- context: one rank's device, workspace and share --------------------------------------- */

typedef struct oproj_ctx oproj_ctx;

typedef enum oproj_reduce {
  OPROJ_REDUCE_ALL,     /* every rank gets y [tokens, hidden]: bf16 partials, summed in f32 in rank
                           order, rounded once; the same bits on every rank, run after run */
  OPROJ_REDUCE_SCATTER, /* as ALL, but rank r gets only the rows of oproj_plan_rows */
  OPROJ_REDUCE_VENDOR,  /* the communicator library's own bf16 sum; order is the library's */
  OPROJ_REDUCE_NONE     /* y is this rank's partial sum, for callers that reduce themselves */
} oproj_reduce;

/* How a context computes; see "which path runs" below. */
typedef enum oproj_path {
  OPROJ_PATH_AUTO,      /* in oproj_config: the fastest that serves */
  OPROJ_PATH_REFERENCE, /* plain C on the host */
  OPROJ_PATH_PORTABLE,  /* one kernel per stage on any GPU from compute capability 8.0 on */
  OPROJ_PATH_GROUPED,   /* SM90's own FP8 kernels; z is quantised where it is made */
  OPROJ_PATH_FUSED,     /* the same with the input quantised inside WO_A: up to 32 tokens */
  OPROJ_PATH_LIBRARY,   /* cuBLASLt's FP8 products, large batches: on SM90 WO_B alone */
  OPROJ_PATH_DECODE     /* SM90: the whole chain in one launch, up to 16 or 32 tokens */
} oproj_path;

typedef struct oproj_config {
  size_t struct_size;  /* set by OPROJ_CONFIG_INIT; fields past a smaller one take their defaults */
  const char *backend; /* "cuda", "ref", or NULL for the best one this machine can run */
  int32_t device;      /* device ordinal on this host; -1 lets the placement choose */
  int32_t max_tokens;  /* most tokens of one call; sizes the workspace, once */
  oproj_split split;
  oproj_reduce reduce;
  oproj_path path; /* forces one, for tests and measurements; calls it cannot serve are refused */
  int64_t chunk_tokens; /* calls of more tokens are taken apart into chunks of so many, each summed
                           over the ranks while the next is computed; a GPU's are rounded up to
                           multiples of 128.  0: a model of the GPUs and their links decides, and
                           calls whose sum goes through the host stay whole.  y has the same bits
                           in all cases (not under OPROJ_REDUCE_VENDOR) */
} oproj_config;
#define OPROJ_CONFIG_INIT \
  { sizeof(oproj_config), NULL, -1, 0, OPROJ_SPLIT_EVEN, OPROJ_REDUCE_ALL, OPROJ_PATH_AUTO, 0 }

/* COLLECTIVE.  Compares what ranks must have in common (oproj_comm_same): dims, config less its
 * device, versions, path thresholds, GPU capability, and the environment that changes results or
 * what ranks do together.  Checks the plan before anything is allocated, then creates the
 * workspace.  Borrows comm, which must outlive the context.  Either every rank gets a context or
 * every rank gets the same error. */
OPROJ_API oproj_status oproj_ctx_create(oproj_ctx **out, oproj_comm *comm, const oproj_dims *dims,
                                        const oproj_config *config);
/* COLLECTIVE where the communicator sums in device memory, unless a rank was lost. */
OPROJ_API void oproj_ctx_destroy(oproj_ctx *ctx);

OPROJ_API const oproj_dims *oproj_ctx_dims(const oproj_ctx *ctx);
OPROJ_API const oproj_shard *oproj_ctx_shard(const oproj_ctx *ctx);
OPROJ_API const char *oproj_ctx_backend(const oproj_ctx *ctx); /* "ref" or "cuda" */

/* Why the backend `name` ("cuda" or "ref") cannot run here, in words; NULL when it can. */
OPROJ_API const char *oproj_backend_missing(const char *name);

/* Binds the calling process and its new memory as making a context does: near the rank's GPU;
 * without one, to its share of the host where Open MPI bound it to one core.  OPROJ_BIND=0 forbids
 * it. */
OPROJ_API oproj_status oproj_place_rank(const oproj_comm *comm);

/* What of this host the calling process may use, in words: its CPUs and NUMA nodes. */
OPROJ_API oproj_status oproj_place_describe(char *text, size_t bytes);

/* GPUs that this process sees; each in words: name, compute capability, memory, PCI bus id and NUMA
 * node.  ERR_INVALID: no such device. */
OPROJ_API int32_t oproj_device_count(void);
OPROJ_API oproj_status oproj_device_describe(int32_t device, char *text, size_t bytes);

/* A GPU's compute capability, major*10 + minor; 0 for an ordinal that is none. */
OPROJ_API int32_t oproj_device_capability(int32_t device);

/* The GPU libraries of this build and the driver found, in words, cut to `bytes`. */
OPROJ_API void oproj_versions_describe(char *text, size_t bytes);

/* Plain memory of the context's device, for programs without an allocator of their own.  Copies are
 * ordered on `stream` and complete on return. */
OPROJ_API oproj_status oproj_buffer_create(oproj_ctx *ctx, size_t bytes, void **out);
OPROJ_API void oproj_buffer_destroy(oproj_ctx *ctx, void *buffer);
OPROJ_API oproj_status oproj_buffer_write(oproj_ctx *ctx, void *to, const void *from_host,
                                          size_t bytes, void *stream);
OPROJ_API oproj_status oproj_buffer_read(oproj_ctx *ctx, void *to_host, const void *from,
                                         size_t bytes, void *stream);

/* ---- weights ------------------------------------------------------------------------------- */

typedef enum oproj_dtype { OPROJ_DTYPE_BF16, OPROJ_DTYPE_E4M3 } oproj_dtype;

/* A weight matrix in host memory: row-major, contiguous, with its block scales. */
typedef struct oproj_matrix {
  oproj_dtype dtype;
  int64_t rows, cols;
  const void *data;    /* bf16 or e4m3 [rows, cols] */
  const float *scales; /* e4m3: f32 [ceil(rows/block), ceil(cols/block)], any finite value;
                          bf16: NULL */
  int32_t block;       /* e4m3: equals dims.quant_block; bf16: 0 */
} oproj_matrix;

typedef struct oproj_layer oproj_layer; /* one layer's weights on this rank */

/* COLLECTIVE.  Copies this rank's slices to the device: wo_a [z_end-z_begin, hpg*head_dim], wo_b
 * [hidden, z_end-z_begin] (hpg = heads/groups).  The matrices may be freed afterwards.
 * oproj/checkpoint.h loads them from files. */
OPROJ_API oproj_status oproj_layer_create(oproj_layer **out, oproj_ctx *ctx,
                                          const oproj_matrix *wo_a, const oproj_matrix *wo_b);
OPROJ_API void oproj_layer_destroy(oproj_layer *layer);

/* COLLECTIVE.  New values in the same device memory; shapes and dtypes must not change.  No forward
 * call of this layer may be in flight.  On error the old values keep serving.  ERR_UNSUPPORTED also
 * where captured graphs take scales to be what the new ones are not: in blocks of 32 on SM90 as
 * oproj_path_query's unjoined says, in blocks of 128 on SM100 and SM103 powers of two. */
OPROJ_API oproj_status oproj_layer_replace(oproj_layer *layer, const oproj_matrix *wo_a,
                                           const oproj_matrix *wo_b);

/* A low-rank addition to WO_A, one per group and never across groups:
 *   z_j += (x_j . A_j^T) . B_j^T,  x the bf16 inverse-rotated input.
 * Both products are accumulated in f32 and added before z is rounded to bf16; the base projection
 * keeps its quantised input, so on one path (oproj_path_choose) a zero adapter changes no bit. */
typedef struct oproj_adapter {
  int32_t rank;      /* 1 <= rank <= 1024 */
  const uint16_t *a; /* host bf16 [groups held, rank, hpg*head_dim] */
  const uint16_t *b; /* host bf16 [groups held, lora_rank, rank], any alpha/rank factor folded in */
} oproj_adapter;

/* Copies and installs an adapter, replacing the former one; NULL removes it.  Rank-local. */
OPROJ_API oproj_status oproj_layer_set_adapter(oproj_layer *layer, const oproj_adapter *adapter);

/* ---- quantised activations ----------------------------------------------------------------- */

/* How block scales lie in memory.  T is the token count, Tal = T rounded up to 4, S = ceil(K/block)
 * the scale columns per group; rows T..Tal-1 and unused bytes are zero. */
typedef enum oproj_scale_layout {
  OPROJ_SCALE_F32,          /* f32 [groups, S, Tal]: the scale itself, tokens contiguous */
  OPROJ_SCALE_UE8M0_PACKED, /* i32 [groups, ceil(S/4), Tal]: byte b of word i = ue8m0 of block
                               4i+b, little-endian */
  OPROJ_SCALE_UE8M0_TILE /* 128x4 tiles per group: u8 [groups, ceil(T/128), ceil(S/4), 512], scale
                               (t, s) at byte (t%32)*16 + (t%128/32)*4 + s%4 of tile
                               (t/128, s/4); padding rows are zero */
} oproj_scale_layout;

/* Codes and scales of one activation.  The input of WO_A has the rank's groups and cols =
 * hpg*head_dim; z has one group and cols = z_end-z_begin.  The backend "cuda" wants both aligned to
 * 16 bytes. */
typedef struct oproj_quant {
  uint8_t *codes; /* e4m3 [groups, tokens, cols] */
  void *scales;   /* as `layout` says */
  oproj_scale_layout layout;
  int32_t groups, tokens, cols;
} oproj_quant;

/* Bytes that the scales of such an activation take. */
OPROJ_API size_t oproj_scale_bytes(oproj_scale_layout layout, int32_t groups, int32_t tokens,
                                   int32_t cols, int32_t quant_block);

/* Replaces WO_B of a layer by the caller's own projection: fn enqueues partial = z . WO_B^T (bf16
 * [z->tokens, hidden], this rank's columns) on `stream`.  z has the layout asked for here.  A call
 * that is taken apart (oproj_config.chunk_tokens) calls fn once for each chunk. */
typedef oproj_status (*oproj_out_fn)(void *user, const oproj_quant *z, uint16_t *partial,
                                     void *stream);
OPROJ_API oproj_status oproj_layer_set_out(oproj_layer *layer, oproj_out_fn fn, void *user,
                                           oproj_scale_layout layout);

/* ---- the hot call -------------------------------------------------------------------------- */

typedef enum oproj_position_type { OPROJ_POSITION_I64, OPROJ_POSITION_I32 } oproj_position_type;

/* A flag of oproj_io: the last kernel lets its successor on the stream start loading weights before
 * y is complete.  Ignored where nothing gains. */
enum { OPROJ_EARLY_TRIGGER = 1 };

/* What one call reads and writes.  Zero-initialise, then fill. */
typedef struct oproj_io {
  int32_t tokens;           /* T: 0 <= T <= config.max_tokens */
  const uint16_t *attn_out; /* in  bf16 [T, heads held, head_dim] by the strides below: this rank's
                                   live heads; what lies between them is never read */
  int64_t token_stride;     /*     elements; 0 = heads held * head_dim */
  int64_t head_stride;      /*     elements; 0 = head_dim */
  const void *positions;    /* in  i64 or i32 [T], each in [0, cos_sin_rows) */
  oproj_position_type position_type;
  const float *cos_sin; /* in  f32 [cos_sin_rows, cos_sin_width]: cos, then sin */
  int64_t cos_sin_rows;
  int32_t cos_sin_width; /*     must equal rope_dim */
  uint16_t *y;           /* out bf16 [T, hidden]; under REDUCE_SCATTER this rank's rows of it */
  uint32_t flags;        /* OPROJ_EARLY_TRIGGER */
} oproj_io;

/* COLLECTIVE.  The whole layer.  With "cuda" it enqueues on `stream` (a cudaStream_t), large calls
 * of several ranks also on a stream of the context's that `stream` then waits for, and returns: no
 * allocation, no host synchronisation, safe to capture in a CUDA graph.  (Where ranks sum over MPI
 * the host takes part: then it waits, and cannot be captured.)  With "ref" stream is NULL and y is
 * complete on return.
 * A token whose input holds a NaN or an infinity gets NaN in all of y; no other token changes.
 * ERR_INVALID: a field of io is out of its range, or ranks that sum over MPI call with different
 * counts of tokens (over NCCL that is not noticed: such a sum hangs).  So is a position outside the
 * table, which "cuda" can only find once it runs: the token's y is NaN, and a later call of this
 * context that finds the report (oproj_buffer_read after the call does) returns the error, once,
 * undone.
 * Calls of one context must be ordered among themselves, on one stream or by events.  On
 * OPROJ_PATH_DECODE a call's blocks wait for one another, all resident: calls of two contexts that
 * run at the same time on one GPU may keep each other from that.  They then give up after about two
 * seconds: y is NaN, and ERR_DEVICE comes from the next call and from every later one of that
 * context.  Order such calls, or force another path for one of the contexts. */
OPROJ_API oproj_status oproj_forward(oproj_layer *layer, const oproj_io *io, void *stream);

/* ---- the stages alone, for engines that bring their own neighbours ------------------------- */
/* All rank-local but the last.  Each reads `io` as oproj_forward does, less y. */

/* Inverse RoPE and block quantisation.  out->groups/tokens/cols are checked, codes and scales
 * written, padding of the scales included. */
OPROJ_API oproj_status oproj_input_quantize(oproj_ctx *ctx, const oproj_io *io,
                                            const oproj_quant *out, void *stream);

/* Inverse RoPE alone: x is bf16 [groups held, T, hpg*head_dim]. */
OPROJ_API oproj_status oproj_input_rotate(oproj_ctx *ctx, const oproj_io *io, uint16_t *x,
                                          void *stream);

/* WO_A from the attention output: z is bf16 [T, z_end-z_begin]. */
OPROJ_API oproj_status oproj_group_forward(oproj_layer *layer, const oproj_io *io, uint16_t *z,
                                           void *stream);

/* WO_A from a quantised input; the layer's WO_A must be e4m3 and carry no adapter. */
OPROJ_API oproj_status oproj_group_project(oproj_layer *layer, const oproj_quant *x, uint16_t *z,
                                           void *stream);

/* Quantisation of z for WO_B. */
OPROJ_API oproj_status oproj_z_quantize(oproj_ctx *ctx, int32_t tokens, const uint16_t *z,
                                        const oproj_quant *out, void *stream);

/* WO_B from z (quantised inside where WO_B is e4m3), or from ready codes and scales.  partial is
 * bf16 [T, hidden], this rank's share of the sum. */
OPROJ_API oproj_status oproj_out_forward(oproj_layer *layer, int32_t tokens, const uint16_t *z,
                                         uint16_t *partial, void *stream);
OPROJ_API oproj_status oproj_out_project(oproj_layer *layer, const oproj_quant *z,
                                         uint16_t *partial, void *stream);

/* COLLECTIVE.  The reduction over ranks in the context's mode; y as in oproj_io.  partial and y may
 * be the same buffer. */
OPROJ_API oproj_status oproj_partial_reduce(oproj_ctx *ctx, int32_t tokens, const uint16_t *partial,
                                            uint16_t *y, void *stream);

/* ---- which path runs ----------------------------------------------------------------------- */

typedef struct oproj_path_query {
  int32_t sm; /* compute capability, major*10 + minor; 0 = no GPU */
  int32_t tokens;
  oproj_dims dims;
  int32_t groups; /* held by this rank */
  oproj_dtype wo_a, wo_b;
  int32_t has_adapter; /* an adapter needs the bf16 input beside the quantised one */
  int32_t own_out;     /* nonzero: WO_B is the caller's (oproj_layer_set_out) */
  oproj_path forced;   /* OPROJ_PATH_AUTO: none */
  int32_t resident;    /* whole-multiprocessor blocks that the GPU holds at once; 0: an H200's */
  int32_t no_native;   /* nonzero: a probe found no machine code for the GPU in this build */
  int32_t unjoined;    /* nonzero: WO_B has blocks of 32 that SM90 cannot join to such of 128, by
                          scales that are no powers of two or lie too far apart */
} oproj_path_query;

typedef struct oproj_path_choice {
  oproj_path path;
  const char *name;   /* static: "reference", "portable", "grouped-fast", ... */
  const char *reason; /* static: why this path and no other */
  int32_t exact;      /* nonzero: sums are f32 throughout, y within 2.5e-3 of double precision; else
                         the tensor core's short sums take part, within 4e-3 */
} oproj_path_choice;

/* Pure: the one decision of which path a call takes.  ERR_UNSUPPORTED, with the reason, where no
 * path can serve it. */
OPROJ_API oproj_status oproj_path_choose(const oproj_path_query *query, oproj_path_choice *out);

/* The same for a layer of a context as it stands. */
OPROJ_API oproj_status oproj_layer_path(const oproj_layer *layer, int32_t tokens,
                                        oproj_path_choice *out);

#ifdef __cplusplus
}
#endif
#endif /* OPROJ_H */
