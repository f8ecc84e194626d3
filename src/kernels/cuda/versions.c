/* versions.c - which CUDA libraries this build uses and which driver it found. */
#include <cublasLt.h>
#include <stdio.h>

#include "kernels/cuda/cuda.h"

const char *oproj_kernels_cuda_versions(char *text, size_t bytes) {
  int runtime = 0, driver = 0;
  size_t blas = cublasLtGetVersion();
  /* Neither needs a device; without a driver its version reads 0. */
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  snprintf(text, bytes, "CUDA runtime %d.%d, driver %d.%d, cuBLASLt %zu.%zu.%zu", runtime / 1000,
           runtime % 1000 / 10, driver / 1000, driver % 1000 / 10, blas / 10000, blas / 100 % 100,
           blas % 100);
  return text;
}
