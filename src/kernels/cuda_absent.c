/* cuda_absent.c - the CUDA backend and its devices in builds without them. */
#include <stdio.h>

#include "base/error.h"
#include "kernels/kernels.h"

static oproj_status refuse(void) {
  return oproj_fail(OPROJ_ERR_UNSUPPORTED, "this build has no CUDA");
}

const oproj_kernels_ops *oproj_kernels_cuda(const char **why) {
  *why = "this build has no CUDA";
  return NULL;
}

int32_t oproj_kernels_cuda_count(void) {
  return 0;
}

oproj_status oproj_kernels_cuda_device(int32_t ordinal, oproj_kernels_device *out) {
  (void)ordinal;
  (void)out;
  return refuse();
}

oproj_status oproj_kernels_cuda_use(int32_t ordinal) {
  (void)ordinal;
  return refuse();
}

const char *oproj_kernels_cuda_versions(char *text, size_t bytes) {
  snprintf(text, bytes, "no CUDA");
  return text;
}
