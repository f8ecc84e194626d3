# The CUDA backend, relative to src/.
set(OPROJ_CUDA_SOURCES
    kernels/cuda/adapter.cu
    kernels/cuda/backend.c
    kernels/cuda/context.c
    kernels/cuda/cublaslt.c
    kernels/cuda/cublaslt_sm100.c
    kernels/cuda/cublaslt_tiles.cu
    kernels/cuda/input.cu
    kernels/cuda/project.cu
    kernels/cuda/project_small.cu
    kernels/cuda/ranks.c
    kernels/cuda/reduce.cu
    kernels/cuda/sm90_host.c
    kernels/cuda/sm90_project.cu
    kernels/cuda/versions.c
    kernels/cuda/weights.c)
