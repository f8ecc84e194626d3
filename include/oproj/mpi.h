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
 * fails. */
OPROJ_API oproj_status oproj_comm_mpi(oproj_comm **out, MPI_Comm mpi);

#ifdef __cplusplus
}
#endif
#endif /* OPROJ_MPI_H */
