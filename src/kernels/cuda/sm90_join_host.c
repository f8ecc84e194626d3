/* sm90_join_host.c - which weights have their blocks joined. */
#include "kernels/cuda/sm90_join.h"

#include "base/checked.h"
#include "base/error.h"
#include "base/log.h"
#include "base/num.h"

/* The exponents of 128 x 128 values lie within SM90_JOIN_SPREAD. */
static int joins_tile(const oproj_matrix *m, int64_t row, int64_t column) {
  enum { SIDE = SM90_JOINED_BLOCK / SM90_SINGLE_BLOCK };
  int64_t rows = oproj_base_ceil_div(m->rows, m->block), columns = m->cols / m->block;
  int least = OPROJ_UE8M0_NAN, most = 0;
  for (int64_t r = row; r < row + SIDE && r < rows; r++) {
    for (int64_t c = column; c < column + SIDE; c++) {
      int exponent = oproj_ue8m0_exact(m->scales[r * columns + c]);
      if (exponent < 0) return 0;
      if (exponent < least) least = exponent;
      if (exponent > most) most = exponent;
    }
  }
  return most - least <= SM90_JOIN_SPREAD;
}

static int joins(const oproj_matrix *m) {
  if (m->dtype != OPROJ_DTYPE_E4M3 || m->block != SM90_SINGLE_BLOCK ||
      m->cols % SM90_JOINED_BLOCK != 0)
    return 0;
  for (int64_t row = 0; row < m->rows; row += SM90_JOINED_BLOCK)
    for (int64_t col = 0; col < m->cols; col += SM90_JOINED_BLOCK)
      if (!joins_tile(m, row / m->block, col / m->block)) return 0;
  return 1;
}

static oproj_status join(const oproj_kernels *k, const oproj_matrix *m, float *joined) {
  sm90_join p = {.rows = (int32_t)m->rows,
                 .cols = (int32_t)m->cols,
                 .codes = (uint8_t *)m->data,
                 .scales = (float *)m->scales,
                 .joined = joined};
  CUDA_TRY(sm90_launch_join(&p, k->upload));
  CUDA_TRY(cudaStreamSynchronize(k->upload));
  return OPROJ_OK;
}

oproj_status sm90_join_make(const oproj_kernels *k, const oproj_matrix *m, const oproj_matrix *host,
                            const char *name, float **joined) {
  if (m->block != SM90_SINGLE_BLOCK) return OPROJ_OK;
  if (!joins(host)) {
    oproj_base_log(OPROJ_LOG_INFO,
                   "%s: scales that are no powers of two, or further than 2^%d apart, multiply in "
                   "blocks of 32, which takes longer",
                   name, SM90_JOIN_SPREAD);
    return OPROJ_OK;
  }
  int64_t rows = oproj_base_ceil_div(m->rows, SM90_JOINED_BLOCK);
  void *memory;
  CUDA_TRY(cudaMalloc(&memory, (size_t)(rows * (m->cols / SM90_JOINED_BLOCK)) * sizeof **joined));
  *joined = memory;
  return join(k, m, *joined);
}

oproj_status sm90_join_check(const float *joined, const oproj_matrix *host, const char *name) {
  REQUIRE(!joined || joins(host), OPROJ_ERR_UNSUPPORTED,
          "%s came with scales that are powers of two and lie close; they can only be replaced by "
          "such",
          name);
  return OPROJ_OK;
}

oproj_status sm90_join_renew(const oproj_kernels *k, const oproj_matrix *m, float *joined) {
  return joined ? join(k, m, joined) : OPROJ_OK;
}
