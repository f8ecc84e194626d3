/* data.h - made-up weights and activations, fast: one buffer of random bytes serves every matrix,
 * each from its own offset.
 *
 * Values are never zero and their bits look random, because a GPU's power, and with it its clock,
 * depends on the bits that toggle. */
#ifndef OPROJ_BENCH_DATA_H
#define OPROJ_BENCH_DATA_H

#include <stdint.h>

#include "oproj.h"

typedef struct bench_data bench_data;

/* Serves matrices of up to `bytes` codes and `blocks` scales. */
oproj_status data_create(bench_data **out, int64_t bytes, int64_t blocks);
void data_destroy(bench_data *data);

/* The e4m3 matrix number `seed`: codes of magnitude 1/8 to 1.875, scales 2^-6 to 2^-3.  Borrowed.
 * Two numbers less than DATA_SEEDS apart give different matrices. */
enum { DATA_SEEDS = 4096 };
oproj_matrix data_matrix(const bench_data *data, int32_t seed, int64_t rows, int64_t cols,
                         int32_t block);

/* bf16 values of either sign and magnitude 1/8 to 2. */
void data_bf16(uint64_t seed, int64_t count, uint16_t *out);

/* Whole numbers in [0, limit). */
void data_positions(uint64_t seed, int64_t count, int64_t limit, int64_t *out);

float data_from_bf16(uint16_t value);
float data_from_e4m3(uint8_t code);
uint16_t data_to_bf16(float value); /* to nearest, ties to even */

#endif /* OPROJ_BENCH_DATA_H */
