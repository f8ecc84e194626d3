/* ranks.h - MPI's start and end, and the little that ranks tell each other here. */
#ifndef OPROJ_BENCH_RANKS_H
#define OPROJ_BENCH_RANKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "oproj.h"

typedef struct bench_ranks {
  oproj_comm *comm;
  int32_t rank, size;
  int32_t local; /* this rank's number on its host */
  bool mpi;
} bench_ranks;

/* COLLECTIVE where a launcher (mpirun, srun) has started us; one rank alone otherwise. */
oproj_status ranks_open(bench_ranks *ranks);
void ranks_close(bench_ranks *ranks);

/* COLLECTIVE. */
void ranks_barrier(const bench_ranks *ranks);
double ranks_max(const bench_ranks *ranks, double mine);
int64_t ranks_sum(const bench_ranks *ranks, int64_t mine);
void ranks_sum_values(const bench_ranks *ranks, float *values, int64_t count); /* < 2^31 */

/* The MPI library's name and version, or "no MPI". */
void ranks_describe(const bench_ranks *ranks, char *text, size_t bytes);

#endif /* OPROJ_BENCH_RANKS_H */
