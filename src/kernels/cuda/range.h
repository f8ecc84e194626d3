/* range.h - names what the host enqueues, for profilers: one range of NVTX around each stage.
 * Without a profiler a range is a test of a pointer. */
#ifndef OPROJ_KERNELS_CUDA_RANGE_H
#define OPROJ_KERNELS_CUDA_RANGE_H

#include <nvtx3/nvToolsExt.h>

#include "oproj.h"

static inline oproj_status cuda_range_end(oproj_status status) {
  nvtxRangePop();
  return status;
}

/* The status of `call`, which is made within the range. */
#define CUDA_IN_RANGE(name, call) (nvtxRangePushA("oproj " name), cuda_range_end(call))

#endif /* OPROJ_KERNELS_CUDA_RANGE_H */
