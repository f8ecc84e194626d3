/* oproj/cuda.h - an oproj_comm whose sums stay on the GPUs, through NCCL.
 *
 * Needs neither CUDA's nor NCCL's headers, and compiles against a build without them too: its calls
 * then fail with ERR_UNSUPPORTED. */
#ifndef OPROJ_CUDA_H
#define OPROJ_CUDA_H

#include "oproj/mpi.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ncclComm; /* ncclComm_t is a pointer to it */

/* COLLECTIVE over `mpi`.  One GPU per rank; `device` is this rank's, -1 deals the GPUs of a host to
 * its ranks in order.  Setup and agreement go through MPI (a duplicate of `mpi`, as with
 * oproj_comm_mpi), sums through NCCL.  A context over it uses this GPU; with backend "cuda" its
 * forward and reduction enqueue on the stream, without host synchronisation, and a CUDA graph may
 * capture them.  A rank whose forward call fails still joins the sum, so that nobody waits: it
 * returns its error and the other ranks get NaN.
 * ERR_UNSUPPORTED: no NCCL in this build, a rank without a GPU, or two ranks on one GPU (the
 * sentence names them).  ERR_INVALID: a `device` that this process does not see.  ERR_COMM: NCCL
 * failed, or its ranks did not meet within oproj_deadline; what it had begun by then stays behind
 * until the process ends.
 *
 * When a rank is lost ("losing a rank" in oproj.h) NCCL's communicator is aborted, which ends the
 * kernels that wait for that rank: the host's wait for its stream returns, y is worth nothing, and
 * oproj_buffer_read and the next forward fail with ERR_PEER.  Graphs that captured such calls are
 * to be destroyed before oproj_comm_destroy. */
OPROJ_API oproj_status oproj_comm_nccl(oproj_comm **out, MPI_Comm mpi, int32_t device);

/* COLLECTIVE over `mpi`.  The same over a caller's own communicator (an ncclComm_t, blocking).  It
 * must hold the ranks of `mpi` in their order and outlive the result; the caller still destroys it,
 * makes no call of his own beside those made here, as NCCL asks, and aborts it when a rank is lost
 * (oproj_comm_on_loss).  ERR_INVALID: rank or size differ. */
OPROJ_API oproj_status oproj_comm_nccl_adopt(oproj_comm **out, MPI_Comm mpi, struct ncclComm *nccl);

#ifdef __cplusplus
}
#endif
#endif /* OPROJ_CUDA_H */
