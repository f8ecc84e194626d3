/* checked.h - size arithmetic that says when it overflows, for numbers that come from files. */
#ifndef OPROJ_BASE_CHECKED_H
#define OPROJ_BASE_CHECKED_H

#include <stdbool.h>
#include <stdint.h>

/* false when the result does not fit; *out is then unspecified. */
static inline bool oproj_base_mul_i64(int64_t a, int64_t b, int64_t *out) {
  return !__builtin_mul_overflow(a, b, out);
}

static inline bool oproj_base_add_i64(int64_t a, int64_t b, int64_t *out) {
  return !__builtin_add_overflow(a, b, out);
}

static inline int64_t oproj_base_ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b != 0);
}

#endif /* OPROJ_BASE_CHECKED_H */
