/* chunk.h - inside tp: how a call's tokens are taken apart, so that the sum over ranks of one chunk
 * runs while the next is computed.  Pure functions; all ranks must come to the same chunks. */
#ifndef OPROJ_TP_CHUNK_H
#define OPROJ_TP_CHUNK_H

#include "kernels/kernels.h"
#include "oproj.h"

/* What a call's chunks hang on. */
typedef struct oproj_chunk_call {
  oproj_dims dims;
  int32_t ranks;
  oproj_reduce reduce;
  int32_t tokens;
} oproj_chunk_call;

/* One chunk.  Under REDUCE_SCATTER it is a strip of every rank's rows, one behind the other, so
 * that all ranks receive in every chunk; its own oproj_plan_rows are these strips.  Else it is a
 * run of tokens. */
typedef struct oproj_chunk {
  oproj_kernels_part part;
  int32_t before; /* tokens of the chunks before it */
  int32_t y_row;  /* where its sum begins in this rank's y */
} oproj_chunk;

/* At least 1, and 1 where chunk_tokens (>= 1) are all.  Under REDUCE_SCATTER chunk_tokens are
 * rounded up to as many rows of each rank. */
int32_t oproj_chunk_count(const oproj_chunk_call *call, int32_t chunk_tokens);

/* 0 <= index < count. */
oproj_chunk oproj_chunk_at(const oproj_chunk_call *call, int32_t chunk_tokens, int32_t index);

/* What the choice is made by: figures of one GPU and its links. */
typedef struct oproj_chunk_rates {
  double flop_per_us;         /* of a rank's chain */
  double link_bytes_per_us;   /* sums move, from each GPU to the others */
  double memory_bytes_per_us; /* read and written */
  double chain_us;            /* to begin and end a chunk's kernels */
  double step_us;             /* to begin and end one exchange between the ranks, or a sum */
  int32_t multiprocessors;    /* of a GPU ... */
  int32_t spare;              /* ... and what of them is left to sums */
} oproj_chunk_rates;

extern const oproj_chunk_rates oproj_chunk_h200;

/* Microseconds from a call's begin to the end of its last sum. */
double oproj_chunk_estimate(const oproj_chunk_call *call, const oproj_chunk_rates *rates,
                            int32_t chunk_tokens);

/* Tokens of a chunk; the call's own where taking it apart does not pay. */
int32_t oproj_chunk_choose(const oproj_chunk_call *call, const oproj_chunk_rates *rates);

#endif /* OPROJ_TP_CHUNK_H */
