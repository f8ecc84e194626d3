/* job.h - one run of the program over all ranks: start, agree, report, end.
 *
 * Exit codes: 0 ok, 1 a check failed, 2 usage, 3 input refused, 4 run-time failure. */
#ifndef OPROJ_LAUNCH_JOB_H
#define OPROJ_LAUNCH_JOB_H

#include <stdbool.h>

#include "oproj.h"

enum { JOB_OK = 0, JOB_CHECK_FAILED = 1, JOB_REFUSED = 3, JOB_FAILED = 4 };

/* This process's rank as its launcher (mpirun, srun) has set it in the environment; -1 when it was
 * started alone. */
int job_launched_rank(void);

typedef struct job_state {
  oproj_comm *comm; /* MPI where a launcher started us, else one rank alone */
  int32_t rank, size;
  bool mpi;
} job_state;

/* COLLECTIVE.  Starts MPI if a launcher is there. */
oproj_status job_start(job_state *job);

/* COLLECTIVE.  Prints the sentence of a failure (all ranks hold the same status) once, ends MPI and
 * returns the exit code: the status's own, or `code` on success. */
int job_finish(job_state *job, oproj_status status, int code);

/* Prints the last error as the program does and returns its exit code. */
int job_fail(oproj_status status);

/* COLLECTIVE.  The largest of all ranks' values, on every rank. */
double job_max(const job_state *job, double mine);

/* COLLECTIVE.  Rank 0 receives everybody's text, [size][bytes]; others leave `all` untouched. */
void job_gather_text(const job_state *job, const char *mine, char *all, int bytes);

/* COLLECTIVE.  Rank 0 receives y [tokens, hidden] from the rows that each rank holds under
 * OPROJ_REDUCE_SCATTER; host memory. */
void job_gather_rows(const job_state *job, int32_t tokens, int32_t hidden, const uint16_t *rows,
                     uint16_t *y);

#endif /* OPROJ_LAUNCH_JOB_H */
