/* sm90_join_host.c - which weights have their blocks joined. */
#include "kernels/cuda/sm90_join.h"

#include "base/checked.h"
#include "base/error.h"
#include "base/log.h"
#include "base/num.h"

enum { SIDE = SM90_JOINED_BLOCK / SM90_SINGLE_BLOCK };

/* The largest exponent of the scales of 128 x 128 values, whose first block is given; -1 where one
 * is no power of two, or they lie further apart than SM90_JOIN_SPREAD. */
static int joined_exponent(const oproj_matrix *m, int64_t row, int64_t column) {
  int64_t rows = oproj_base_ceil_div(m->rows, m->block), columns = m->cols / m->block;
  int least = OPROJ_UE8M0_NAN, most = 0;
  for (int64_t r = row; r < row + SIDE && r < rows; r++) {
    for (int64_t c = column; c < column + SIDE; c++) {
      int exponent = oproj_ue8m0_exact(m->scales[r * columns + c]);
      if (exponent < 0) return -1;
      if (exponent < least) least = exponent;
      if (exponent > most) most = exponent;
    }
  }
  return most - least <= SM90_JOIN_SPREAD ? most : -1;
}

/* Of the 32 codes of a row in a block: the largest magnitude, and how many leave e4m3's normal
 * values when they move down. */
static void look_at_block(const uint8_t *codes, int down, int *largest, int *low) {
  int normal = (down + 1) << 3; /* the code of 2^(down - 6) */
  int most = 0, count = 0;
  for (int i = 0; i < SM90_SINGLE_BLOCK; i++) {
    int size = codes[i] & 0x7F;
    most = size > most ? size : most;
    count += size > 0 && size < normal;
  }
  *largest = most;
  *low = down > 0 ? count : 0;
}

/* A code that leaves the normal values loses 2^-10 of the joined scale at most. */
static int joins_row(const oproj_matrix *m, int64_t row) {
  int64_t columns = m->cols / m->block, block_row = row / m->block;
  const uint8_t *codes = (const uint8_t *)m->data + row * m->cols;
  const float *scales = m->scales + block_row * columns;
  double lost = 0.0, largest = 0.0; /* the sum of squares, in 2^-20; the magnitude */
  for (int64_t column = 0, joined = 0; column < columns; column++) {
    if (column % SIDE == 0) joined = joined_exponent(m, block_row / SIDE * SIDE, column);
    if (joined < 0) return 0;
    double scale = (double)oproj_ue8m0_to_f32((uint8_t)joined);
    int code, low, down = (int)joined - oproj_ue8m0_exact(scales[column]);
    look_at_block(codes + column * m->block, down, &code, &low);
    double value = (double)(scales[column] * oproj_e4m3_to_f32((uint8_t)code));
    largest = value > largest ? value : largest;
    lost += low * scale * scale;
  }
  return lost <= largest * largest;
}

static int joins(const oproj_kernels *k, const oproj_matrix *m) {
  int all = 1;
#pragma omp parallel for num_threads(k->config.threads) reduction(&& : all)
  for (int64_t row = 0; row < m->rows; row++) all = all && joins_row(m, row);
  return all;
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
  if (!joins(k, host)) {
    oproj_base_log(OPROJ_LOG_INFO, "%s multiplies in blocks of 32, which takes longer: %s", name,
                   "their scales are no powers of two, or too far apart");
    return OPROJ_OK;
  }
  int64_t rows = oproj_base_ceil_div(m->rows, SM90_JOINED_BLOCK);
  void *memory;
  CUDA_TRY(cudaMalloc(&memory, (size_t)(rows * (m->cols / SM90_JOINED_BLOCK)) * sizeof **joined));
  *joined = memory;
  return join(k, m, *joined);
}

oproj_status sm90_join_check(const oproj_kernels *k, const float *joined, const oproj_matrix *host,
                             const char *name) {
  REQUIRE(!joined || joins(k, host), OPROJ_ERR_UNSUPPORTED,
          "%s came with scales that are powers of two and lie close; they can only be replaced by "
          "such",
          name);
  return OPROJ_OK;
}

oproj_status sm90_join_renew(const oproj_kernels *k, const oproj_matrix *m, float *joined) {
  return joined ? join(k, m, joined) : OPROJ_OK;
}
