/* expect.h - assertions on oproj_status: a call succeeds, or fails with words that say why. */
#ifndef TESTS_SUPPORT_EXPECT_H
#define TESTS_SUPPORT_EXPECT_H

#include <check.h>
#include <string.h>

#include "oproj.h"

#define EXPECT_OK(call)                                                             \
  do {                                                                              \
    oproj_status expect_status_ = (call);                                           \
    ck_assert_msg(expect_status_ == OPROJ_OK, "%s: %s", #call, oproj_last_error()); \
  } while (0)

/* The sentence must hold `words`. */
#define EXPECT_FAIL(call, wanted, words)                                                     \
  do {                                                                                       \
    oproj_status expect_status_ = (call);                                                    \
    ck_assert_msg(expect_status_ == (wanted), "%s: status %d, wanted %d: %s", #call,         \
                  (int)expect_status_, (int)(wanted), oproj_last_error());                   \
    ck_assert_msg(strstr(oproj_last_error(), (words)) != NULL, "\"%s\" does not say \"%s\"", \
                  oproj_last_error(), (words));                                              \
  } while (0)

static inline int run_suite_as(Suite *suite, enum fork_status fork_status) {
  SRunner *runner = srunner_create(suite);
  srunner_set_fork_status(runner, fork_status);
  srunner_run_all(runner, CK_NORMAL);
  int failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed != 0;
}

/* Runs a suite as the program's main; OPROJ's tests of files fork for each case. */
static inline int run_suite(Suite *suite) {
  return run_suite_as(suite, CK_FORK_GETENV);
}

/* For what does not survive a fork: MPI, a CUDA context. */
static inline int run_unforked_suite(Suite *suite) {
  return run_suite_as(suite, CK_NOFORK);
}

#endif /* TESTS_SUPPORT_EXPECT_H */
