/* run_input.h - what `oproj run` projects: read from a safetensors file, or made up. */
#ifndef OPROJ_LAUNCH_RUN_INPUT_H
#define OPROJ_LAUNCH_RUN_INPUT_H

#include "oproj/checkpoint.h"

/* One rank's input in host memory. */
typedef struct run_input {
  int32_t tokens;
  uint16_t *attn_out; /* bf16 [tokens, heads held, head_dim] */
  int64_t *positions; /* [tokens], each in [0, max_position) */
  float *cos_sin;     /* f32 [cos_sin_rows, rope_dim]: the file's own table; NULL: none */
  int64_t cos_sin_rows;
  int64_t *rows;     /* [tokens]: each token's row of run_input_table */
  int64_t *distinct; /* [distinct_count]: the positions in use, ascending; at least one */
  int64_t distinct_count;
} run_input;

/* Reads attn_out BF16 [T, heads, head_dim], positions I64 or I32 [T] and, if there, cos_sin F32
 * [rows, rope_dim], the table to use instead of the model's.  tokens -1 takes the file's T,
 * anything else must equal it.  More tokens than this machine's memory holds at token_bytes each
 * (run_memory.h) are refused (ERR_INVALID) before anything is allocated for them. */
oproj_status run_input_read(const char *path, const oproj_model *model, const oproj_shard *shard,
                            int32_t tokens, int64_t token_bytes, run_input *out);

/* Makes up `tokens` tokens at positions 0, 1, 2, ..; all at position 0 for a model made with exact,
 * where the rotation must not round. */
oproj_status run_input_make(const oproj_model *model, const oproj_shard *shard, uint64_t seed,
                            int32_t tokens, int64_t token_bytes, run_input *out);

/* The rotary table for these tokens, f32 [*rows, rope_dim] in malloc'ed memory: the file's own as
 * it is, else `rope` with one row per distinct position, since a table up to the largest may be
 * 256 MB for one token. */
oproj_status run_input_table(const run_input *input, const oproj_rope *rope, int32_t rope_dim,
                             float **table, int64_t *rows);

void run_input_free(run_input *input); /* a zeroed or freed one is allowed */

#endif /* OPROJ_LAUNCH_RUN_INPUT_H */
