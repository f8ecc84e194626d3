/* together.h - assertions that all ranks of MPI_COMM_WORLD make together.
 *
 * A rank that left a test alone would strand its peers in the next collective call, so verdicts are
 * gathered first.  MPI does that, not oproj_comm_agree: a test must not lean on what it tests. */
#ifndef TESTS_SUPPORT_TOGETHER_H
#define TESTS_SUPPORT_TOGETHER_H

#include <check.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oproj.h"

/* Nonzero on every rank when it is on all of them. */
static inline int together_all(int mine) {
  int all = 0;
  MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return all;
}

/* The rank that failed says why. */
#define ALL_ASSERT(condition, ...)                                                   \
  do {                                                                               \
    int together_mine_ = (condition) ? 1 : 0;                                        \
    if (!together_mine_) {                                                           \
      fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                \
      fprintf(stderr, __VA_ARGS__);                                                  \
      fputc('\n', stderr);                                                           \
    }                                                                                \
    ck_assert_msg(together_all(together_mine_), "on some rank not: %s", #condition); \
  } while (0)

#define ALL_OK(call) ALL_ASSERT((call) == OPROJ_OK, "%s: %s", #call, oproj_last_error())

/* Runs a suite on all ranks, in this process: neither MPI nor CUDA survives a fork.  Rank 0
 * reports; nonzero: a test failed. */
static inline int together_run(Suite *suite, int rank) {
  SRunner *runner = srunner_create(suite);
  srunner_set_fork_status(runner, CK_NOFORK);
  srunner_run_all(runner, rank == 0 ? CK_NORMAL : CK_SILENT);
  int failed = srunner_ntests_failed(runner) != 0;
  srunner_free(runner);
  return failed;
}

/* 0 where this host has so many GPUs; else the exit status of a test that wants them, said by rank
 * 0: skipped, or failed where OPROJ_REQUIRE_GPU=1. */
static inline int together_lack_of_gpus(int rank, int wanted) {
  enum { SKIPPED = 77 };
  const char *required = getenv("OPROJ_REQUIRE_GPU"), *missing = oproj_backend_missing("cuda");
  if (!missing && oproj_device_count() >= wanted) return 0;
  if (rank == 0)
    fprintf(stderr, "not enough GPUs: %d, wanted %d%s%s\n", oproj_device_count(), wanted,
            missing ? ": " : "", missing ? missing : "");
  return required && strcmp(required, "1") == 0 ? EXIT_FAILURE : SKIPPED;
}

#endif /* TESTS_SUPPORT_TOGETHER_H */
