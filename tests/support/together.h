/* together.h - assertions that all ranks of MPI_COMM_WORLD make together.
 *
 * A rank that left a test alone would strand its peers in the next collective call, so verdicts are
 * gathered first.  MPI does that, not oproj_comm_agree: a test must not lean on what it tests. */
#ifndef TESTS_SUPPORT_TOGETHER_H
#define TESTS_SUPPORT_TOGETHER_H

#include <check.h>
#include <mpi.h>
#include <stdio.h>

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

#endif /* TESTS_SUPPORT_TOGETHER_H */
