/* job.c - MPI's start and end, who speaks, and what the process returns. */
#include "job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oproj/mpi.h"

int job_launched_rank(void) {
  static const char *const variables[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK",
                                          "SLURM_PROCID"};
  for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
    const char *rank = getenv(variables[i]);
    if (rank) return atoi(rank);
  }
  return -1;
}

oproj_status job_start(job_state *job) {
  *job = (job_state){.size = 1};
  if (job_launched_rank() < 0) return oproj_comm_self(&job->comm);
  job->mpi = true;
  int provided;
  if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
    return OPROJ_ERR_COMM;
  oproj_status status = oproj_comm_mpi(&job->comm, MPI_COMM_WORLD);
  if (status != OPROJ_OK) return status;
  job->rank = oproj_comm_rank(job->comm);
  job->size = oproj_comm_size(job->comm);
  return OPROJ_OK;
}

static int exit_code(oproj_status status) {
  switch (status) {
    case OPROJ_OK:
      return JOB_OK;
    case OPROJ_ERR_INVALID:
    case OPROJ_ERR_SHAPE:
    case OPROJ_ERR_UNSUPPORTED:
    case OPROJ_ERR_IO:
      return JOB_REFUSED;
    case OPROJ_ERR_NOMEM:
    case OPROJ_ERR_DEVICE:
    case OPROJ_ERR_COMM:
    case OPROJ_ERR_PEER:
      return JOB_FAILED;
  }
  return JOB_FAILED;
}

int job_fail(oproj_status status) {
  const char *sentence = oproj_last_error();
  fprintf(stderr, "oproj: %s\n", *sentence ? sentence : oproj_status_string(status));
  return exit_code(status);
}

int job_finish(job_state *job, oproj_status status, int code) {
  if (status != OPROJ_OK) code = job->rank == 0 ? job_fail(status) : exit_code(status);
  fflush(stdout);
  oproj_comm_destroy(job->comm);
  if (job->mpi) MPI_Finalize();
  return code;
}

double job_max(const job_state *job, double mine) {
  double most = mine;
  if (job->mpi) MPI_Allreduce(&mine, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return most;
}

void job_gather_text(const job_state *job, const char *mine, char *all, int bytes) {
  if (job->mpi)
    MPI_Gather(mine, bytes, MPI_CHAR, all, bytes, MPI_CHAR, 0, MPI_COMM_WORLD);
  else
    memcpy(all, mine, (size_t)bytes);
}

void job_gather_rows(const job_state *job, int32_t tokens, int32_t hidden, const uint16_t *rows,
                     uint16_t *y) {
  if (!job->mpi) {
    memcpy(y, rows, (size_t)tokens * (size_t)hidden * sizeof *y);
    return;
  }
  MPI_Datatype row;
  MPI_Type_contiguous(hidden, MPI_UINT16_T, &row);
  MPI_Type_commit(&row);
  int32_t begin, end;
  oproj_plan_rows(tokens, job->size, job->rank, &begin, &end);
  if (job->rank == 0) {
    memcpy(y, rows, (size_t)(end - begin) * (size_t)hidden * sizeof *y);
    for (int32_t from = 1; from < job->size; from++) {
      oproj_plan_rows(tokens, job->size, from, &begin, &end);
      MPI_Recv(y + (int64_t)begin * hidden, end - begin, row, from, 0, MPI_COMM_WORLD,
               MPI_STATUS_IGNORE);
    }
  } else {
    MPI_Send(rows, end - begin, row, 0, 0, MPI_COMM_WORLD);
  }
  MPI_Type_free(&row);
}
