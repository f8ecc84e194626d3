/* comm_nccl_absent.c - the NCCL communicator in builds without CUDA. */
#include <stdio.h>

#include "base/error.h"
#include "oproj/cuda.h"
#include "tp/comm.h"

static oproj_status refuse(void) {
  return oproj_fail(OPROJ_ERR_UNSUPPORTED, "this build has no NCCL communicator");
}

oproj_status oproj_comm_nccl(oproj_comm **out, MPI_Comm mpi, int32_t device) {
  (void)out;
  (void)mpi;
  (void)device;
  return refuse();
}

oproj_status oproj_comm_nccl_adopt(oproj_comm **out, MPI_Comm mpi, struct ncclComm *nccl) {
  (void)out;
  (void)mpi;
  (void)nccl;
  return refuse();
}

const char *oproj_comm_nccl_version(char *text, size_t bytes) {
  snprintf(text, bytes, "no NCCL");
  return text;
}
