/* kernels.h - the contract of this folder: what a backend does for one rank.
 *
 * A backend knows one rank's dimensions, its weights and its stages.  It knows no ranks, files or
 * communicators.  Callers (tp/layer.c) have checked every argument against dims and shard before a
 * backend sees it; what only a backend can check (positions, device limits) it checks itself.
 *
 *   ref/           plain C on the host: the oracle, and the default where there is no GPU
 *   cuda/          NVIDIA GPUs; cuda_absent.c stands in for it in builds without CUDA */
#ifndef OPROJ_KERNELS_H
#define OPROJ_KERNELS_H

#include "oproj.h"

typedef struct oproj_kernels oproj_kernels;                 /* one context's backend state */
typedef struct oproj_kernels_weights oproj_kernels_weights; /* one layer's weights on it */

/* From here cuBLASLt serves: on SM90, where it was measured (bench/README.md), for WO_B. */
enum { OPROJ_KERNELS_LIBRARY_TOKENS = 768 };

/* Heads of the released models: 448 values and 64 that are rotated.  Some kernels are written for
 * them alone. */
enum { OPROJ_KERNELS_HEAD_DIM = 512, OPROJ_KERNELS_ROPE_DIM = 64 };

/* What one rank computes. */
typedef struct oproj_kernels_config {
  oproj_dims dims;
  int32_t groups; /* groups held */
  int32_t device; /* ordinal; ignored by ref */
  int32_t max_tokens;
  oproj_path path; /* forced, or AUTO */
  int32_t threads; /* host threads */
} oproj_kernels_config;

/* Sizes that follow from a config, named once. */
static inline int32_t oproj_kernels_group_cols(const oproj_kernels_config *c) { /* D, K of WO_A */
  return c->dims.heads / c->dims.groups * c->dims.head_dim;
}
static inline int32_t oproj_kernels_z_cols(const oproj_kernels_config *c) { /* K of WO_B here */
  return c->groups * c->dims.lora_rank;
}

/* Bytes of a matrix's values and of its scales. */
static inline size_t oproj_kernels_data_bytes(const oproj_matrix *m) {
  return (size_t)(m->rows * m->cols) * (m->dtype == OPROJ_DTYPE_BF16 ? 2 : 1);
}
static inline size_t oproj_kernels_scale_bytes(const oproj_matrix *m) {
  if (m->dtype == OPROJ_DTYPE_BF16) return 0;
  int64_t row_blocks = (m->rows + m->block - 1) / m->block;
  return (size_t)(row_blocks * ((m->cols + m->block - 1) / m->block)) * sizeof(float);
}

/* The tokens of a call that one forward computes: its i-th is the call's token
 *   begin + i / strip * stride + i % strip.
 * What is computed of a token hangs neither on which part it is in nor on its place there: kernels
 * are chosen for call_tokens. */
typedef struct oproj_kernels_part {
  int32_t call_tokens;          /* of the whole call */
  int32_t begin, strip, stride; /* strip >= 1 */
  int32_t tokens;               /* of the part */
  int32_t spare; /* multiprocessors that its large products leave to a sum that runs beside them */
} oproj_kernels_part;

/* On a GPU calls of up to so many tokens are never taken apart. */
enum { OPROJ_KERNELS_PART_TOKENS = 128 };

static inline oproj_kernels_part oproj_kernels_whole(int32_t tokens) {
  oproj_kernels_part part = {tokens, 0, tokens > 0 ? tokens : 1, 0, tokens, 0};
  return part;
}

typedef struct oproj_kernels_push oproj_kernels_push; /* below: sums over ranks of one host */

/* WO_B replaced by the caller's projection; fn == NULL means ours. */
typedef struct oproj_kernels_out {
  oproj_out_fn fn;
  void *user;
  oproj_scale_layout layout;
  const oproj_kernels_push *sink; /* not NULL: where forward is to push partial's tiles as they are
                                     finished, for a sum_pushed of `sent` values that follows */
} oproj_kernels_out;

/* Sums over ranks of one host whose devices write to one another's memory (cuda/push.cu). */
enum { OPROJ_KERNELS_PUSH_RANKS = 16 };

/* Counts of work that waits for other devices, which the device keeps as it begins and ends each,
 * replays of a graph included (cuda/pulse.c). */
typedef struct oproj_kernels_pulse oproj_kernels_pulse;

typedef struct oproj_kernels_handle { /* of a mailbox, for another process of this host */
  char bytes[64];
} oproj_kernels_handle;

struct oproj_kernels_push {
  int32_t size, rank;
  int64_t capacity;                          /* elements of the largest sum */
  void *mailboxes[OPROJ_KERNELS_PUSH_RANKS]; /* by rank: this rank's own and the opened ones */
  int64_t patience_ms; /* for another rank's part; then the sum is NaN and later calls fail */
};

/* Every entry that takes a stream enqueues there and returns, or (ref) has finished on return.
 * Data pointers are the backend's memory; matrices and adapters are host memory. */
typedef struct oproj_kernels_ops {
  const char *name;

  oproj_status (*open)(oproj_kernels **out, const oproj_kernels_config *config);
  void (*close)(oproj_kernels *kernels);

  /* wo_a [groups held * lora_rank, D], wo_b [hidden, z cols].  create may be called by another
   * thread than the context's, while that makes no call.  replace keeps every address; check, of
   * shapes and dtypes that fit, says whether it can. */
  oproj_status (*weights_create)(oproj_kernels_weights **out, oproj_kernels *kernels,
                                 const oproj_matrix *wo_a, const oproj_matrix *wo_b);
  oproj_status (*weights_check)(const oproj_kernels_weights *weights, const oproj_matrix *wo_a,
                                const oproj_matrix *wo_b);
  oproj_status (*weights_replace)(oproj_kernels_weights *weights, const oproj_matrix *wo_a,
                                  const oproj_matrix *wo_b);
  void (*weights_destroy)(oproj_kernels_weights *weights);
  oproj_status (*adapter_set)(oproj_kernels_weights *weights, const oproj_adapter *adapter);

  /* The stages, as oproj.h describes the public calls of these names. */
  oproj_status (*input_quantize)(oproj_kernels *kernels, const oproj_io *io, const oproj_quant *out,
                                 void *stream);
  oproj_status (*input_rotate)(oproj_kernels *kernels, const oproj_io *io, uint16_t *x,
                               void *stream);
  oproj_status (*group_forward)(oproj_kernels_weights *weights, const oproj_io *io, uint16_t *z,
                                void *stream);
  oproj_status (*group_project)(oproj_kernels_weights *weights, const oproj_quant *x, uint16_t *z,
                                void *stream);
  oproj_status (*z_quantize)(oproj_kernels *kernels, int32_t tokens, const uint16_t *z,
                             const oproj_quant *out, void *stream);
  oproj_status (*out_forward)(oproj_kernels_weights *weights, int32_t tokens, const uint16_t *z,
                              uint16_t *partial, void *stream);
  oproj_status (*out_project)(oproj_kernels_weights *weights, const oproj_quant *z,
                              uint16_t *partial, void *stream);

  /* The chain of one rank for a part of the call `io`: partial is bf16 [part->tokens, hidden]. */
  oproj_status (*forward)(oproj_kernels_weights *weights, const oproj_io *io,
                          const oproj_kernels_part *part, const oproj_kernels_out *out,
                          uint16_t *partial, void *stream);

  /* The context's second stream, for sums that run beside `stream`: fork makes it wait for what
   * `stream` holds by now, join makes `stream` wait for it.  A graph that captures `stream` holds
   * both.  On the host there is but one, and both do nothing. */
  oproj_status (*fork)(oproj_kernels *kernels, void *stream, void **beside);
  oproj_status (*join)(oproj_kernels *kernels, void *stream);

  /* As the public calls of these names. */
  oproj_status (*buffer_create)(oproj_kernels *kernels, size_t bytes, void **out);
  void (*buffer_destroy)(oproj_kernels *kernels, void *buffer);
  oproj_status (*buffer_write)(oproj_kernels *kernels, void *to, const void *from_host,
                               size_t bytes, void *stream);
  oproj_status (*buffer_read)(oproj_kernels *kernels, void *to_host, const void *from, size_t bytes,
                              void *stream);

  /* Host memory that copies to and from the device move through fastest. */
  oproj_status (*host_create)(oproj_kernels *kernels, size_t bytes, void **out);
  void (*host_destroy)(oproj_kernels *kernels, void *memory); /* NULL is allowed */

  /* out[i] = bf16(parts[0][i] + parts[1][i] + ..), added in f32 in that order and rounded once; one
   * part is copied bit for bit.  parts is bf16 [n, count]; out must not overlap it.  `waited` is
   * NULL, or counts as ended what brought the parts: n >= 2 and count > 0 then. */
  oproj_status (*sum_ranks)(oproj_kernels *kernels, const uint16_t *parts, int32_t n, int64_t count,
                            uint16_t *out, oproj_kernels_pulse *waited, void *stream);

  /* The stream counts a piece of work as begun when it comes to pulse_begin, from SM90 on a little
   * earlier, and as ended when it comes to pulse_end, or to a sum_ranks that does it.  One stream
   * at a time uses a pulse.  pulse_read is for any thread at any time.  NULL, all five, on the
   * host. */
  oproj_status (*pulse_create)(oproj_kernels *kernels, oproj_kernels_pulse **out);
  void (*pulse_destroy)(oproj_kernels *kernels, oproj_kernels_pulse *pulse); /* NULL is allowed */
  oproj_status (*pulse_begin)(oproj_kernels *kernels, oproj_kernels_pulse *pulse, void *stream);
  oproj_status (*pulse_end)(oproj_kernels *kernels, oproj_kernels_pulse *pulse, void *stream);
  void (*pulse_read)(const oproj_kernels_pulse *pulse, uint64_t *begun, uint64_t *ended);

  /* Memory that other processes of this host may open and write to, zeroed.  mailbox_bytes says how
   * much a sum over `size` ranks of up to `capacity` elements needs.  NULL, all seven, where
   * there is no such memory. */
  size_t (*mailbox_bytes)(int32_t size, int64_t capacity);
  oproj_status (*mailbox_create)(oproj_kernels *kernels, size_t bytes, void **out,
                                 oproj_kernels_handle *handle);
  void (*mailbox_destroy)(oproj_kernels *kernels, void *mailbox); /* NULL is allowed */
  oproj_status (*mailbox_open)(oproj_kernels *kernels, const oproj_kernels_handle *handle,
                               void **out);
  void (*mailbox_close)(oproj_kernels *kernels, void *mailbox); /* NULL is allowed */

  /* Whether a whole call of so many tokens can push what it finishes. */
  int (*can_push)(const oproj_kernels_weights *weights, int32_t tokens,
                  const oproj_kernels_out *out);

  /* As sum_ranks, the parts being every rank's `partial`, each pushed to all mailboxes: here, or
   * where `sent`, by the forward before, which must have been of as many elements.  All ranks
   * must call it in the same order with the same count.  out may be partial.  A rank that does not
   * is reported as ERR_COMM by a later call on this context, as bad positions are. */
  oproj_status (*sum_pushed)(oproj_kernels *kernels, const oproj_kernels_push *push, int64_t count,
                             const uint16_t *partial, uint16_t *out, int sent, void *stream);

  /* Makes bf16 [count] NaN: the share of a rank that could not compute it. */
  oproj_status (*make_nan)(oproj_kernels *kernels, uint16_t *values, int64_t count, void *stream);

  /* Nonzero when buffers are host memory and every call has finished on return. */
  int host;

  /* The compute capability; 0 on the host. */
  int32_t (*capability)(const oproj_kernels *kernels);

  /* Fills in what oproj_path_choose asks of the device and of the weights' scales: sm, resident,
   * no_native, unjoined. */
  void (*describe)(const oproj_kernels_weights *weights, oproj_path_query *query);
} oproj_kernels_ops;

extern const oproj_kernels_ops oproj_kernels_ref;

/* The CUDA backend's table, or NULL where this build or this machine has none; *why then says
 * why. */
const oproj_kernels_ops *oproj_kernels_cuda(const char **why);

/* ---- CUDA devices, as numbered in this process ---------------------------------------------- */

typedef struct oproj_kernels_device {
  char name[128];
  char bus_id[32];    /* PCI, "0000:1b:00.0" */
  char uuid[40];      /* "GPU-1b2c..": no two devices or parts of one have the same */
  int32_t capability; /* major*10 + minor */
  size_t bytes;       /* of its memory */
} oproj_kernels_device;

int32_t oproj_kernels_cuda_count(void); /* 0 without CUDA, a driver or a device */

/* ERR_INVALID: no such device; ERR_UNSUPPORTED in builds without CUDA. */
oproj_status oproj_kernels_cuda_device(int32_t ordinal, oproj_kernels_device *out);

/* Makes it the calling thread's current device. */
oproj_status oproj_kernels_cuda_use(int32_t ordinal);

/* "CUDA runtime 13.0, driver 13.0, cuBLASLt 13.1.0" into text, cut to `bytes`; returns text.  "no
 * CUDA" in builds without it. */
const char *oproj_kernels_cuda_versions(char *text, size_t bytes);

/* ---- the kernel that takes a few tokens through the whole chain in one launch ---------------- */

enum {
  OPROJ_KERNELS_DECODE_TILE = 128,   /* rows of WO_A of a block, values of K of a slot */
  OPROJ_KERNELS_DECODE_TOKENS = 32,  /* most tokens of a launch */
  OPROJ_KERNELS_DECODE_SPLIT = 16,   /* most blocks that share a tile of WO_A */
  OPROJ_KERNELS_DECODE_OUT_ROWS = 64 /* most rows of WO_B of a block: an instruction's */
};

/* Who does what in it (decode.c). */
typedef struct oproj_kernels_decode {
  int32_t blocks;            /* all of them must be resident at once */
  int32_t tiles;             /* WO_A: of 128 rows */
  int32_t split, log2_split; /* blocks that share a tile's K */
  int32_t out_rows;          /* WO_B: rows of a block, a multiple of 8 */
  int32_t window; /* slots of weights, 16 KB each, that a block has on their way at a time */
  int32_t most;   /* tokens that a launch can take */
  int32_t tokens; /* up to so many it is faster than a launch for each stage */
} oproj_kernels_decode;

/* For a rank that holds `groups`, on a device that holds `resident` such blocks at once.  NULL, or
 * why the kernel cannot serve (out is then all zero); static storage. */
const char *oproj_kernels_decode_shape(const oproj_dims *dims, int32_t groups, int32_t resident,
                                       oproj_kernels_decode *out);

/* ---- choice --------------------------------------------------------------------------------- */

/* The backend called `name`, or the best one for NULL.  ERR_UNSUPPORTED names what there is. */
oproj_status oproj_kernels_find(const char *name, const oproj_kernels_ops **out);

#endif /* OPROJ_KERNELS_H */
