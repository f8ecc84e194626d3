/* cuda_rig.h - one model, opened on the cuda backend and on ref, with data for both.
 *
 * Data comes from a counter hash, so a failure repeats.  Device buffers lie between guards of
 * poison and start as poison; every read checks the guards. */
#ifndef TESTS_GPU_CUDA_RIG_H
#define TESTS_GPU_CUDA_RIG_H

#include <check.h>

#include "kernels/kernels.h"

/* ---- data ---------------------------------------------------------------------------------- */

typedef enum data_kind {
  DATA_RANDOM, /* magnitudes that vary by block, zero blocks, negative zeros */
  DATA_EXACT   /* -1, 0, 1, quarter turns, scales 1: every sum is exact in f32 */
} data_kind;

uint64_t hash(uint64_t stream, uint64_t index);
float unit(uint64_t stream, uint64_t index); /* in [-1, 1) */

enum { LAYOUTS = OPROJ_SCALE_UE8M0_TILE + 1 };

/* Nonzero under OPROJ_TEST_SHORT=1: for sanitizers, which take a hundred times as long. */
int test_is_short(void);

/* The token counts to test, ascending: 0, every edge of a tile, large batches; few of them where
 * the test is short. */
int token_counts(void);
int32_t token_count(int i); /* 0 <= i < token_counts() */
int32_t most_tokens(void);  /* the last of them */

double *bf16_in_double(const uint16_t *values, size_t count); /* to be freed */

/* Fail the test: bits differ; relative error (Frobenius) above 2e-3. */
void expect_same(const char *what, const uint16_t *found, const uint16_t *wanted, size_t count);
void expect_close(const char *what, const uint16_t *found, const double *wanted, size_t count);

/* The program's exit code: 77 where no GPU can run the tests, unless OPROJ_REQUIRE_GPU=1. */
int run_gpu_suite(Suite *suite, TCase *tests);

/* ---- the model ----------------------------------------------------------------------------- */

typedef struct rig {
  const oproj_kernels_ops *ops; /* of the cuda backend */
  oproj_kernels_config config;
  oproj_kernels *cuda, *ref;
  int32_t heads, group_cols, z_cols;
} rig;

/* groups is what this rank holds; the model has one more, so that none of them is a power of two
 * by accident. */
rig rig_open(int32_t hidden, int32_t heads_per_group, int32_t head_dim, int32_t groups,
             int32_t lora_rank, int32_t block, int32_t max_tokens);
rig small_rig(int32_t block); /* hidden 330, 3 groups of 2 heads, r 128 */
void rig_close(rig *r);

typedef struct layer {
  oproj_matrix wo_a, wo_b; /* host memory, owned */
  oproj_kernels_weights *cuda, *ref;
} layer;

layer layer_open(const rig *r, oproj_dtype dtype, data_kind kind, uint64_t seed);
void layer_close(const rig *r, layer *l);

/* The chain of a whole call on either backend. */
oproj_status rig_forward(const oproj_kernels_ops *ops, oproj_kernels_weights *weights,
                         const oproj_io *io, const oproj_kernels_out *out, uint16_t *partial,
                         void *stream);

/* A weight element in double, scale included. */
double weight_at(const oproj_matrix *m, int64_t row, int64_t col);

/* out[t, group's rows] = a[group, t, :] . w, in double; rows of w are dealt to groups evenly.  To
 * be freed. */
double *product_in_double(const oproj_matrix *w, int32_t groups, int32_t tokens, const double *a);

/* ---- device memory ------------------------------------------------------------------------- */

typedef struct device_buffer {
  char *base;
  void *at;
  size_t bytes;
} device_buffer;

device_buffer device_make(const rig *r, size_t bytes);
device_buffer device_copy(const rig *r, const void *from_host, size_t bytes);
/* Host memory, to be freed.  Fails the test where a guard changed. */
void *device_read(const rig *r, const device_buffer *buffer);
void device_free(const rig *r, device_buffer *buffer);
int is_poison(const void *bytes, size_t count);

/* ---- input --------------------------------------------------------------------------------- */

enum { TABLE_ROWS = 37 };

typedef struct input {
  oproj_io host, device; /* the same call on either side */
  uint16_t *attn_out;    /* host memory, owned */
  int32_t *positions32;
  int64_t *positions64;
  float *cos_sin;
  device_buffer attn_out_device, positions_device, cos_sin_device;
} input;

/* `pad` elements of NaN after each head and as many after each token. */
input input_open(const rig *r, int32_t tokens, int32_t pad, oproj_position_type type,
                 data_kind kind);
/* Element of a head, to be changed; then push. */
uint16_t *input_at(input *in, int32_t token, int32_t head, int32_t dim);
void input_set_position(input *in, int32_t token, int64_t position);
void input_push(const rig *r, input *in);
void input_close(const rig *r, input *in);

/* Codes and scales on the device and in host memory. */
typedef struct quant {
  oproj_quant host, device;
  device_buffer codes, scales;
  size_t code_bytes, scale_bytes;
} quant;

quant quant_open(const rig *r, oproj_scale_layout layout, int32_t groups, int32_t tokens,
                 int32_t cols);
void quant_expect_equal(const rig *r, const quant *q);
void quant_push(const rig *r, const quant *q); /* host to device */
void quant_close(const rig *r, quant *q);

/* Codes times scales, of host memory; to be freed. */
double *quant_in_double(const oproj_quant *q, int32_t block);

#endif /* TESTS_GPU_CUDA_RIG_H */
