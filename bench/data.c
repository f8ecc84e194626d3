/* data.c - see data.h. */
#include "data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CODE_STEP = 4112, SCALE_STEP = 5 }; /* from one seed's first code and scale to the next's */

struct bench_data {
  uint8_t *codes;
  float *scales;
};

/* A pseudo-random word of a place in a stream: no state, so threads may fill in any order. */
static uint64_t word(uint64_t seed, uint64_t at) {
  uint64_t x = (seed + 1) * UINT64_C(0x9E3779B97F4A7C15) + at * UINT64_C(0xD1342543DE82EF95);
  x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
  return x ^ (x >> 31);
}

oproj_status data_create(bench_data **out, int64_t bytes, int64_t blocks) {
  /* Exponents 4 to 7 of e4m3, any sign and mantissa: neither zero nor NaN. */
  const uint64_t keep = UINT64_C(0x9F9F9F9F9F9F9F9F), set = UINT64_C(0x2020202020202020);
  int64_t words = (bytes + (int64_t)DATA_SEEDS * CODE_STEP) / 8 + 1;
  int64_t scales = blocks + (int64_t)DATA_SEEDS * SCALE_STEP;
  bench_data *d = calloc(1, sizeof *d);
  if (d) {
    d->codes = malloc((size_t)words * 8);
    d->scales = malloc((size_t)scales * sizeof *d->scales);
  }
  if (!d || !d->codes || !d->scales) {
    data_destroy(d);
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for %lld bytes of random weights",
                      (long long)bytes);
  }
#pragma omp parallel for
  for (int64_t i = 0; i < words; i++) {
    uint64_t w = (word(1, (uint64_t)i) & keep) | set;
    memcpy(d->codes + i * 8, &w, 8);
  }
  for (int64_t i = 0; i < scales; i++)
    d->scales[i] = ldexpf(1.0f, (int)(word(2, (uint64_t)i) % 4) - 6);
  *out = d;
  return OPROJ_OK;
}

void data_destroy(bench_data *data) {
  if (!data) return;
  free(data->codes);
  free(data->scales);
  free(data);
}

oproj_matrix data_matrix(const bench_data *data, int32_t seed, int64_t rows, int64_t cols,
                         int32_t block) {
  int64_t at = seed % DATA_SEEDS;
  return (oproj_matrix){.dtype = OPROJ_DTYPE_E4M3,
                        .rows = rows,
                        .cols = cols,
                        .data = data->codes + at * CODE_STEP,
                        .scales = data->scales + at * SCALE_STEP,
                        .block = block};
}

void data_bf16(uint64_t seed, int64_t count, uint16_t *out) {
#pragma omp parallel for
  for (int64_t i = 0; i < count / 4 + 1; i++) {
    uint64_t w =
        (word(seed, (uint64_t)i) & UINT64_C(0x81FF81FF81FF81FF)) | UINT64_C(0x3E003E003E003E00);
    int64_t left = count - i * 4;
    memcpy(out + i * 4, &w, (size_t)(left < 4 ? left : 4) * sizeof *out);
  }
}

void data_positions(uint64_t seed, int64_t count, int64_t limit, int64_t *out) {
  for (int64_t i = 0; i < count; i++) out[i] = (int64_t)(word(seed, (uint64_t)i) % (uint64_t)limit);
}

float data_from_bf16(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}

float data_from_e4m3(uint8_t code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  float size =
      exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
  return code & 0x80 ? -size : size;
}

uint16_t data_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}
