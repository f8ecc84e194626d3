/* try_cuda.h - the one place where bench/ turns a CUDA error into an oproj_status. */
#ifndef OPROJ_BENCH_TRY_CUDA_H
#define OPROJ_BENCH_TRY_CUDA_H

#include "oproj.h"

#define CUDA_TRY(call)                                                                            \
  do {                                                                                            \
    cudaError_t error_ = (call);                                                                  \
    if (error_ != cudaSuccess)                                                                    \
      return oproj_fail(error_ == cudaErrorMemoryAllocation ? OPROJ_ERR_NOMEM : OPROJ_ERR_DEVICE, \
                        "%s: %s", #call, cudaGetErrorString(error_));                             \
  } while (0)

#endif /* OPROJ_BENCH_TRY_CUDA_H */
