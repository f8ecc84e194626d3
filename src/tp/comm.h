/* comm.h - the contract between a context and the ranks it works with.
 *
 *   comm_self.c   one rank alone
 *   comm_mpi.c    ranks of an MPI communicator, data in host memory */
#ifndef OPROJ_TP_COMM_H
#define OPROJ_TP_COMM_H

#include <stddef.h>

#include "oproj.h"

typedef struct oproj_comm_ops {
  const char *name;

  /* COLLECTIVE.  root's bytes on every rank. */
  oproj_status (*broadcast)(oproj_comm *comm, int32_t root, void *data, size_t bytes);

  /* COLLECTIVE.  The smallest value over ranks. */
  oproj_status (*min_i32)(oproj_comm *comm, int32_t mine, int32_t *out);

  /* COLLECTIVE.  Sums bf16 [tokens, hidden] partials in host memory, as mode says (oproj.h); `y`
   * may be `partial`. */
  oproj_status (*reduce)(oproj_comm *comm, oproj_reduce mode, int32_t tokens, int32_t hidden,
                         const uint16_t *partial, uint16_t *y);

  void (*destroy)(oproj_comm *comm);
} oproj_comm_ops;

/* The head of every communicator; each kind appends its own fields. */
struct oproj_comm {
  const oproj_comm_ops *ops;
  int32_t rank, size;
  int32_t local_size; /* ranks on this host */
};

#endif /* OPROJ_TP_COMM_H */
