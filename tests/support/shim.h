/* shim.h - storage that misbehaves.  A shared library that stands between a program and the C
 * library's pread: tests link it in front of that, or LD_PRELOAD it into the program.
 *
 * Preloaded, SHIM_LATENCY_US and SHIM_LATENCY_LEAST in the environment set those fields. */
#ifndef TESTS_SUPPORT_SHIM_H
#define TESTS_SUPPORT_SHIM_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct shim_state {
  /* What to do; zeros: nothing. */
  int latency_us; /* before each call of at least latency_least bytes */
  int64_t latency_least;
  int short_every;  /* each such call reads a third of what was asked for, at least a byte */
  int eintr_every;  /* each such call fails with EINTR */
  int64_t eio_call; /* the call of that number, counted from 1, fails with EIO */
  void (*before)(int64_t call); /* called at each call; NULL: nothing */

  /* What was done; may be reset. */
  _Atomic int64_t calls, bytes;
} shim_state;

extern shim_state shim;

#endif /* TESTS_SUPPORT_SHIM_H */
