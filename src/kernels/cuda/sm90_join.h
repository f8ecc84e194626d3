/* sm90_join.h - V4.1's blocks of 32 joined in fours, so that its products take V4's time.
 *
 * Sums leave SM90's tensor cores once per scale, and with blocks of 32 taking them out costs as
 * much as the product itself.  Scales are powers of two: where four blocks that lie side by side
 * take the largest one of theirs, codes of the others only move down by as many binades,
 *
 *   code * 2^e = (code * 2^(e - most)) * 2^most,
 *
 * which e4m3 holds exactly down to 2^-6, and below that to half a step of 2^-9: no value is off by
 * more than 2^-10 of the joined scale, as V4's smallest values are by their format.  (Where a
 * block's neighbour holds values 2^10 times its own, that is 1e-3 of it, the more the further
 * they are apart.)  Weights are joined when they are loaded, 128 x 128, if their scales lie close
 * and no row loses more than 2^-10 of its largest value; the input and z by those who quantise
 * them, after they have the codes and scales that the format prescribes.
 *
 *   sm90_join_host.c   which weights
 *   sm90_join.cu       the kernel that moves their codes
 *   input.cuh          the input's and z's */
#ifndef OPROJ_KERNELS_CUDA_SM90_JOIN_H
#define OPROJ_KERNELS_CUDA_SM90_JOIN_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  SM90_SINGLE_BLOCK = 32,
  SM90_JOINED_BLOCK = 128,
  SM90_JOIN_SPREAD = 6 /* binades between the scales of blocks that are joined, at most */
};

/* ---- sm90_join_host.c ---------------------------------------------------------------------- */

/* Joins a matrix in device memory, whose scales become equal in fours of rows and columns; *joined
 * gets them as f32 [ceil(rows/128), cols/128].  It stays NULL, and the matrix as it is, where its
 * blocks are not of 32, a scale is no power of two, 128 x 128 values have scales further apart
 * than SM90_JOIN_SPREAD, or a row would lose too much.  `host` is what the matrix was copied
 * from. */
oproj_status sm90_join_make(const oproj_kernels *k, const oproj_matrix *matrix,
                            const oproj_matrix *host, const char *name, float **joined);

/* New values: first whether they fit, then join them in the same memory. */
oproj_status sm90_join_check(const oproj_kernels *k, const float *joined, const oproj_matrix *host,
                             const char *name);
oproj_status sm90_join_renew(const oproj_kernels *k, const oproj_matrix *matrix, float *joined);

/* ---- sm90_join.cu -------------------------------------------------------------------------- */

typedef struct sm90_join {
  int32_t rows, cols; /* cols a multiple of 128 */
  uint8_t *codes;     /* e4m3 [rows, cols], 16-byte aligned */
  float *scales;      /* [ceil(rows/32), cols/32]; those that are joined become equal */
  float *joined;      /* [ceil(rows/128), cols/128] */
} sm90_join;

cudaError_t sm90_launch_join(const sm90_join *join, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* OPROJ_KERNELS_CUDA_SM90_JOIN_H */
