/* oproj/mpi.h - an oproj_comm over an MPI communicator. */
#ifndef OPROJ_MPI_H
#define OPROJ_MPI_H

#include <mpi.h>

#include "oproj.h"

#ifdef __cplusplus
extern "C" {
#endif

/* COLLECTIVE over `mpi`, an intracommunicator.  Duplicates it, so oproj's messages meet no other
 * traffic; MPI must stay initialised until oproj_comm_destroy.  The reduction is deterministic:
 * bf16 partials, summed in f32 in rank order.  ERR_COMM when MPI is not initialised or a call
 * fails; ERR_PEER when the ranks have not all come within oproj_deadline.
 *
 * Its watch over the ranks connects them to rank 0: through a nameless local socket on one host,
 * through a TCP port of rank 0 over several.  Where that fails a warning says so, and a wait of the
 * deadline alone ends a call. */
OPROJ_API oproj_status oproj_comm_mpi(oproj_comm **out, MPI_Comm mpi);

#ifdef __cplusplus
}
#endif
#endif /* OPROJ_MPI_H */
