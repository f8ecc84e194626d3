/* data.h - layers and inputs for tests, in memory, made without the library's own synth.
 *
 * Two kinds.  Exact: small integers, quarter-turn angles and power-of-two scales, every sum exact
 * in f32 and bf16, so that results must be bit-equal however the work is dealt out.  Random: values
 * of the size a model has, for which results have a tolerance. */
#ifndef TESTS_SUPPORT_DATA_H
#define TESTS_SUPPORT_DATA_H

#include <stdbool.h>
#include <stdint.h>

#include "oproj.h"

/* A pseudo-random word of a position in a stream. */
uint64_t data_hash(uint64_t stream, uint64_t position);

/* Uniform in [-1, 1). */
double data_uniform(uint64_t stream, uint64_t position);

extern const oproj_dims
    data_tiny_v4; /* hidden 576 (a ragged last block), 16 heads, 4 groups, r 256 */
extern const oproj_dims data_tiny_v41; /* the same in blocks of 32, r 160, hidden 80 */

/* One whole layer with an input for it. */
typedef struct data_layer {
  oproj_dims dims;
  oproj_matrix wo_a, wo_b; /* [groups * lora_rank, D], [hidden, groups * lora_rank] */
  int32_t tokens;
  uint16_t *attn_out; /* bf16 [tokens, heads, head_dim] */
  int64_t *positions; /* [tokens] */
  float *cos_sin;     /* [cos_sin_rows, rope_dim] */
  int64_t cos_sin_rows;
} data_layer;

data_layer data_make(const oproj_dims *dims, bool exact, oproj_dtype wo_a, oproj_dtype wo_b,
                     int32_t tokens);
void data_free(data_layer *layer);

/* Gives the weights scales that are powers of two, up to `binades` apart (their codes stay), and
 * makes blocks of the input half as different: short sums lose more, the fewer values matter. */
void data_spread(data_layer *layer, int binades);

/* A rank's rows of WO-A and columns of WO-B, as copies. */
typedef struct data_share {
  oproj_matrix wo_a, wo_b;
} data_share;

data_share data_take(const data_layer *layer, const oproj_shard *shard);
void data_share_free(data_share *share);

/* The rank's view of the whole input: its heads by strides, y to be filled in. */
oproj_io data_io(const data_layer *layer, const oproj_shard *shard);

/* The relative Frobenius error of bf16 values. */
double data_error(const uint16_t *got, const double *want, int64_t count);

#endif /* TESTS_SUPPORT_DATA_H */
