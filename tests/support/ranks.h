/* ranks.h - several ranks inside one process, without MPI: contexts of a made-up communicator,
 * whose partial sums the test adds itself. */
#ifndef TESTS_SUPPORT_RANKS_H
#define TESTS_SUPPORT_RANKS_H

#include "oproj.h"
#include "support/data.h"

/* A communicator that says it is rank `rank` of `size` and agrees with itself.  Reductions are the
 * identity, as under OPROJ_REDUCE_NONE. */
oproj_comm *ranks_comm(int32_t rank, int32_t size);

/* One rank with its share of a layer, on the reference backend. */
typedef struct ranks_one {
  oproj_comm *comm;
  oproj_ctx *ctx;
  oproj_layer *layer;
} ranks_one;

ranks_one ranks_open(const data_layer *data, oproj_split split, int32_t size, int32_t rank);
void ranks_close(ranks_one *rank);

/* y of `size` ranks: bf16 partials, summed in f32 in rank order, rounded once.  bf16 [T, hidden],
 * freed by the caller. */
uint16_t *ranks_forward(const data_layer *data, oproj_split split, int32_t size);

#endif /* TESTS_SUPPORT_RANKS_H */
