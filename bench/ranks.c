/* ranks.c - see ranks.h. */
#include "ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oproj/mpi.h"

/* PMI_RANK or SLURM_PROCID alone may linger in an interactive allocation: only what is set for the
 * processes of one launch counts. */
static bool launched(void) {
  return getenv("OMPI_COMM_WORLD_RANK") || getenv("PMIX_NAMESPACE") || getenv("PMI_SIZE") ||
         (getenv("SLURM_STEP_ID") && getenv("SLURM_NTASKS"));
}

oproj_status ranks_open(bench_ranks *r) {
  *r = (bench_ranks){.size = 1};
  if (!launched()) return oproj_comm_self(&r->comm);
  int provided;
  if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
    return oproj_fail(OPROJ_ERR_COMM, "MPI_Init_thread failed");
  r->mpi = true;
  oproj_status status = oproj_comm_mpi(&r->comm, MPI_COMM_WORLD);
  if (status != OPROJ_OK) return status;
  r->rank = oproj_comm_rank(r->comm);
  r->size = oproj_comm_size(r->comm);
  MPI_Comm host;
  int local = 0;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, r->rank, MPI_INFO_NULL, &host);
  MPI_Comm_rank(host, &local);
  MPI_Comm_free(&host);
  r->local = local;
  return OPROJ_OK;
}

void ranks_close(bench_ranks *r) {
  oproj_comm_destroy(r->comm);
  if (r->mpi) MPI_Finalize();
}

void ranks_barrier(const bench_ranks *r) {
  if (r->mpi) MPI_Barrier(MPI_COMM_WORLD);
}

double ranks_max(const bench_ranks *r, double mine) {
  double most = mine;
  if (r->mpi) MPI_Allreduce(&mine, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return most;
}

int64_t ranks_sum(const bench_ranks *r, int64_t mine) {
  int64_t sum = mine;
  if (r->mpi) MPI_Allreduce(&mine, &sum, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
  return sum;
}

void ranks_sum_values(const bench_ranks *r, float *values, int64_t count) {
  if (r->mpi) MPI_Allreduce(MPI_IN_PLACE, values, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

void ranks_describe(const bench_ranks *r, char *text, size_t bytes) {
  snprintf(text, bytes, "no MPI");
  if (!r->mpi) return;
  char name[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(name, &length);
  name[strcspn(name, ",\n")] = '\0';
  snprintf(text, bytes, "%s", name);
}
