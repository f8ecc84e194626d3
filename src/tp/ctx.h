/* ctx.h - inside tp: what a context and a layer hold. */
#ifndef OPROJ_TP_CTX_H
#define OPROJ_TP_CTX_H

#include "kernels/kernels.h"
#include "oproj.h"
#include "tp/chunk.h"
#include "tp/comm.h"

struct oproj_ctx {
  oproj_comm *comm; /* borrowed */
  oproj_dims dims;
  oproj_shard shard;
  oproj_split split;
  oproj_reduce reduce;
  oproj_path path;      /* forced, or AUTO */
  int32_t chunk_tokens; /* forced, or 0 */
  int32_t chunks_logged;
  int32_t max_tokens;
  const oproj_kernels_ops *ops;
  oproj_kernels *kernels;

  /* Where shares are summed: bf16 [max_tokens, hidden] on the device, this rank's share of y.  It
   * is the communicator's (`end`) where that sums on the device.  Else, where the device's memory
   * is not the host's, host_partial stages it. */
  uint16_t *partial;
  oproj_comm_end *end;
  void *host_partial;
};

/* COLLECTIVE.  What was asked for must be the same on all ranks (less the device), and so must the
 * versions and switches it will meet; then, with backends open, what they found. */
oproj_status oproj_ctx_compare_requests(oproj_comm *comm, const oproj_dims *dims,
                                        const oproj_config *config);
oproj_status oproj_ctx_compare_devices(oproj_ctx *ctx);

/* COLLECTIVE.  The switches alone, for what starts before a context does. */
oproj_status oproj_ctx_compare_switches(oproj_comm *comm);

/* Whether a forward call ends in a sum over ranks. */
int oproj_ctx_sums(const oproj_ctx *ctx);

/* Tokens of a chunk of such a call, >= 1; the same on all ranks. */
int32_t oproj_ctx_chunk_tokens(const oproj_ctx *ctx, const oproj_chunk_call *call);

/* COLLECTIVE.  Arguments already checked; `partial` and `y` are device memory.  `mine` is how the
 * call went on this rank so far: a rank that failed takes part all the same, so that it strands
 * nobody.  Where the host takes part in the sum, all ranks return the failure; where it does not,
 * this rank returns its own and the others receive NaN. */
oproj_status oproj_ctx_reduce(oproj_ctx *ctx, oproj_status mine, int32_t tokens,
                              const uint16_t *partial, uint16_t *y, int sent, void *stream);

struct oproj_layer {
  oproj_ctx *ctx; /* borrowed */
  oproj_kernels_weights *weights;
  oproj_dtype wo_a, wo_b;
  int32_t has_adapter;
  oproj_kernels_out out;
};

/* Rank-local: checks matrices against the context and copies them into a new layer. */
oproj_status oproj_layer_make(oproj_layer **out, oproj_ctx *ctx, const oproj_matrix *wo_a,
                              const oproj_matrix *wo_b);

/* Rank-local: whether matrices can take the place of a layer's. */
oproj_status oproj_layer_check(const oproj_layer *layer, const oproj_matrix *wo_a,
                               const oproj_matrix *wo_b);

#endif /* OPROJ_TP_CTX_H */
