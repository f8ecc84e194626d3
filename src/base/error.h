/* error.h - how a function fails: set this thread's sentence, return the status.
 *
 *   REQUIRE(tokens >= 0, OPROJ_ERR_INVALID, "tokens is %d; it must not be negative", tokens);
 *   TRY(open_file(...));                      pass a failure on as it is
 *   TRY_GOTO(read_header(...), status, out);  the same, where something must be released first
 *
 * The sentence names the tensor, rank or field, the value found and the value wanted; it ends
 * without a full stop or newline, so that callers can frame it. */
#ifndef OPROJ_BASE_ERROR_H
#define OPROJ_BASE_ERROR_H

#include "oproj.h"

/* Puts "prefix: " before the sentence recorded last; returns `status`. */
oproj_status oproj_base_fail_in(oproj_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#define REQUIRE(condition, status, ...)                       \
  do {                                                        \
    if (!(condition)) return oproj_fail(status, __VA_ARGS__); \
  } while (0)

#define TRY(expression)                              \
  do {                                               \
    oproj_status try_status_ = (expression);         \
    if (try_status_ != OPROJ_OK) return try_status_; \
  } while (0)

#define TRY_GOTO(expression, status_variable, label) \
  do {                                               \
    (status_variable) = (expression);                \
    if ((status_variable) != OPROJ_OK) goto label;   \
  } while (0)

#define REQUIRE_GOTO(condition, status_variable, label, code, ...) \
  do {                                                             \
    if (!(condition)) {                                            \
      (status_variable) = oproj_fail(code, __VA_ARGS__);           \
      goto label;                                                  \
    }                                                              \
  } while (0)

#endif /* OPROJ_BASE_ERROR_H */
