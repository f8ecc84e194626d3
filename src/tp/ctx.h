/* ctx.h - inside tp: what a context and a layer hold. */
#ifndef OPROJ_TP_CTX_H
#define OPROJ_TP_CTX_H

#include "kernels/kernels.h"
#include "oproj.h"
#include "tp/comm.h"

struct oproj_ctx {
  oproj_comm *comm; /* borrowed */
  oproj_dims dims;
  oproj_shard shard;
  oproj_reduce reduce;
  int32_t max_tokens;
  const oproj_kernels_ops *ops;
  oproj_kernels *kernels;
  uint16_t *partial;      /* bf16 [max_tokens, hidden] on the device: this rank's share of y */
  uint16_t *host_partial; /* the same in host memory, where the device's is not; else NULL */
};

/* COLLECTIVE.  Arguments already checked; `partial` and `y` are device memory. */
oproj_status oproj_ctx_reduce(oproj_ctx *ctx, int32_t tokens, const uint16_t *partial, uint16_t *y,
                              void *stream);

struct oproj_layer {
  oproj_ctx *ctx; /* borrowed */
  oproj_kernels_weights *weights;
  oproj_dtype wo_a, wo_b;
  int32_t has_adapter;
  oproj_kernels_out out;
};

#endif /* OPROJ_TP_CTX_H */
