/* cuda_absent.c - the CUDA backend in builds without it. */
#include "kernels/kernels.h"

const oproj_kernels_ops *oproj_kernels_cuda(const char **why) {
  *why = "this build has no CUDA";
  return NULL;
}
