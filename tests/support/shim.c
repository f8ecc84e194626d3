/* shim.c - see shim.h. */
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

#define SHIM_API __attribute__((visibility("default")))

SHIM_API shim_state shim;

__attribute__((constructor)) static void read_environment(void) {
  const char *latency = getenv("SHIM_LATENCY_US"), *least = getenv("SHIM_LATENCY_LEAST");
  if (latency) shim.latency_us = atoi(latency);
  if (least) shim.latency_least = atoll(least);
}

static int is_due(int every, int64_t call) {
  return every > 0 && call % every == 0;
}

SHIM_API ssize_t pread(int file, void *to, size_t bytes, off_t offset) {
  static ssize_t (*real)(int, void *, size_t, off_t);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pread");
  int64_t call = ++shim.calls;
  if (shim.before) shim.before(call);
  if (shim.latency_us > 0 && (int64_t)bytes >= shim.latency_least)
    usleep((useconds_t)shim.latency_us);
  if (call == shim.eio_call || is_due(shim.eintr_every, call)) {
    errno = call == shim.eio_call ? EIO : EINTR;
    return -1;
  }
  if (is_due(shim.short_every, call) && bytes > 3) bytes /= 3;
  ssize_t got = real(file, to, bytes, offset);
  if (got > 0) shim.bytes += got;
  return got;
}
