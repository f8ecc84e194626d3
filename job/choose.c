/* choose.c - owns the choice between NCCL and MPI for the sums over ranks. */
#include "job/choose.h"

#include <string.h>

#include "oproj/cuda.h"

const char *const choose_comms[] = {"auto", "mpi", "nccl", NULL};
const char *const choose_reduces[] = {"all", "scatter", "vendor", "none", NULL};

static oproj_status use_nccl(oproj_comm **comm) {
  oproj_comm *made;
  if (strcmp(oproj_comm_name(*comm), "self") == 0)
    return oproj_fail(OPROJ_ERR_UNSUPPORTED,
                      "NCCL joins ranks that a launcher has started; this is one process alone");
  oproj_status status = oproj_comm_nccl(&made, MPI_COMM_WORLD, -1);
  if (status != OPROJ_OK) return status;
  oproj_comm_destroy(*comm);
  *comm = made;
  return OPROJ_OK;
}

oproj_status choose_comm(oproj_comm **comm, int choice, bool on_host) {
  if (choice == CHOOSE_COMM_NCCL)
    return on_host ? oproj_fail(OPROJ_ERR_UNSUPPORTED, "--comm nccl needs --backend cuda")
                   : use_nccl(comm);
  if (choice == CHOOSE_COMM_MPI || on_host || oproj_comm_size(*comm) == 1) return OPROJ_OK;
  oproj_status status = use_nccl(comm);
  return status == OPROJ_ERR_UNSUPPORTED ? OPROJ_OK : status;
}
