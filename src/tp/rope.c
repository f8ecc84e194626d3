/* rope.c - rotary tables: frequencies (YaRN included) and the cos/sin rows made of them. */
#include <math.h>

#include "base/error.h"
#include "base/num.h"
#include "tp/place.h"

enum { WORTH_A_TEAM = 4096 }; /* rows from which starting threads pays */

static const double PI = 3.14159265358979323846;

/* The dimension index at which a wave of the original context turns `turns` times (YaRN). */
static double turning_dim(const oproj_rope *rope, int32_t rope_dim, double turns) {
  return rope_dim * log((double)rope->original_max_position / (turns * 2.0 * PI)) /
         (2.0 * log(rope->theta));
}

static float inverse_frequency(const oproj_rope *rope, int32_t rope_dim, int32_t i) {
  double frequency = pow(rope->theta, -2.0 * i / rope_dim);
  if (rope->factor <= 1.0) return (float)frequency;
  double low = floor(turning_dim(rope, rope_dim, rope->beta_fast));
  double high = ceil(turning_dim(rope, rope_dim, rope->beta_slow));
  low = fmax(low, 0.0);
  high = fmin(high, rope_dim - 1.0);
  if (high == low) high += 0.001; /* a ramp of no width is a step */
  double kept = 1.0 - fmin(fmax((i - low) / (high - low), 0.0), 1.0);
  return (float)(frequency / rope->factor * (1.0 - kept) + frequency * kept);
}

oproj_status oproj_rope_table(const oproj_rope *rope, int32_t rope_dim, int64_t begin, int64_t end,
                              float *out) {
  REQUIRE(rope && out, OPROJ_ERR_INVALID, "rope and out must not be NULL");
  REQUIRE(rope_dim > 0 && rope_dim % 2 == 0, OPROJ_ERR_INVALID,
          "rope_dim is %d; it must be positive and even", rope_dim);
  REQUIRE(begin >= 0 && begin <= end, OPROJ_ERR_INVALID,
          "rows [%lld, %lld) are no range of positions", (long long)begin, (long long)end);
  REQUIRE(rope->theta > 1.0, OPROJ_ERR_INVALID, "theta is %g; it must exceed 1", rope->theta);
  REQUIRE(rope->factor <= 1.0 || rope->original_max_position > 0, OPROJ_ERR_INVALID,
          "YaRN needs original_max_position; it is %lld", (long long)rope->original_max_position);

  int32_t half = rope_dim / 2, threads = end - begin < WORTH_A_TEAM ? 1 : oproj_place_team();
  for (int32_t i = 0; i < half; i++) {
    float frequency = inverse_frequency(rope, rope_dim, i);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t position = begin; position < end; position++) {
      double angle = oproj_num_mul((float)position, frequency);
      float *row = out + (position - begin) * rope_dim;
      row[i] = (float)cos(angle);
      row[half + i] = (float)sin(angle);
    }
  }
  return OPROJ_OK;
}
