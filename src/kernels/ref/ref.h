/* ref.h - inside the reference backend: its state and the steps that its files share.
 *
 *   backend.c   state, weights, the chain of steps
 *   input.c     inverse RoPE, block quantisation, of the input and of z
 *   project.c   both projections: one block-scaled matrix product
 *   adapter.c   the low-rank addition to WO_A */
#ifndef OPROJ_KERNELS_REF_H
#define OPROJ_KERNELS_REF_H

#include "kernels/kernels.h"

/* Buffers between the stages, for max_tokens. */
typedef struct ref_workspace {
  uint16_t *x;    /* bf16 [groups, T, D]: rotated input, for bf16 WO_A and adapters */
  oproj_quant xq; /* quantised input, OPROJ_SCALE_F32 */
  uint16_t *z;    /* bf16 [T, z cols] */
  oproj_quant zq; /* quantised z, in whatever layout a call asks for */
} ref_workspace;

struct oproj_kernels {
  oproj_kernels_config config;
  int32_t group_cols, z_cols; /* D and the z columns held */
  ref_workspace work;
};

typedef struct ref_adapter {
  int32_t rank;
  uint16_t *a; /* bf16 [groups, rank, D] */
  uint16_t *b; /* bf16 [groups, lora_rank, rank] */
} ref_adapter;

struct oproj_kernels_weights {
  oproj_kernels *kernels;
  oproj_matrix wo_a, wo_b; /* own copies */
  ref_adapter adapter;     /* rank 0 = none */
};

/* ---- input.c ------------------------------------------------------------------------------- */

/* ERR_INVALID for the first position outside the table. */
oproj_status ref_check_positions(const oproj_io *io);
void ref_input_quantize(const oproj_kernels *kernels, const oproj_io *io,
                        const oproj_kernels_part *part, const oproj_quant *out);
void ref_input_rotate(const oproj_kernels *kernels, const oproj_io *io,
                      const oproj_kernels_part *part, uint16_t *x);
void ref_z_quantize(const oproj_kernels *kernels, int32_t tokens, const uint16_t *z,
                    const oproj_quant *out);

/* ---- project.c ----------------------------------------------------------------------------- */

/* out[t, row] = bf16( sum over blocks b of (sum_k a[t,k] w[row,k]) * (a_scale[t,b] *
 * w_scale[row,b])
 *                     + addend[t, row] ),  all in f32.
 * Activation and weight are both e4m3 with scales or both bf16 without. */
typedef struct ref_product {
  int32_t tokens, rows, cols;
  oproj_dtype dtype;
  const void *a;              /* [tokens, cols] */
  const oproj_quant *a_quant; /* e4m3: where the scales are ... */
  int32_t a_group;            /* ... and of which group */
  const void *w;              /* [rows, cols] */
  const float *w_scales;      /* e4m3: [ceil(rows/block), ceil(cols/block)] */
  int32_t block;              /* e4m3: quantisation block */
  const float *addend;        /* f32 [tokens, rows] or NULL */
  uint16_t *out;              /* bf16, token t at out + t * out_stride */
  int64_t out_stride;
  int32_t threads;
} ref_product;

oproj_status ref_project(const ref_product *product);

/* ---- adapter.c ----------------------------------------------------------------------------- */

oproj_status ref_adapter_set(oproj_kernels_weights *weights, const oproj_adapter *adapter);
void ref_adapter_clear(ref_adapter *adapter);

/* delta[t, i] = (x_j . A_j^T) . B_j^T of group `group`: f32 [tokens, lora_rank]. */
oproj_status ref_adapter_delta(const oproj_kernels_weights *weights, int32_t group, int32_t tokens,
                               const uint16_t *x, float *delta);

#endif /* OPROJ_KERNELS_REF_H */
