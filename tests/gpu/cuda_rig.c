/* cuda_rig.c - see cuda_rig.h. */
#include "gpu/cuda_rig.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/checked.h"
#include "base/layout.h"
#include "support/expect.h"

enum { GUARD = 256, POISON = 0xA5 };

static void *must_alloc(size_t bytes) {
  void *memory = malloc(bytes ? bytes : 1);
  ck_assert_ptr_nonnull(memory);
  memset(memory, POISON, bytes);
  return memory;
}

/* ---- data ---------------------------------------------------------------------------------- */

uint64_t hash(uint64_t stream, uint64_t index) {
  uint64_t x = (stream + 1) * UINT64_C(0x9E3779B97F4A7C15) + index * UINT64_C(0xD1342543DE82EF95);
  x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
  return x ^ (x >> 31);
}

float unit(uint64_t stream, uint64_t index) {
  return (float)((double)(hash(stream, index) >> 40) / (1 << 23) - 1.0);
}

static float small_integer(uint64_t stream, uint64_t index) {
  return (float)(hash(stream, index) % 3) - 1.0f;
}

/* An attention output: each run of 32 has its own magnitude, one in 16 is zero. */
static uint16_t attention_value(data_kind kind, uint64_t index) {
  if (kind == DATA_EXACT) return oproj_bf16_from_f32(small_integer(1, index));
  uint64_t run = hash(2, index / 32);
  if (run % 16 == 0) return index % 2 ? 0x8000u : 0;
  return oproj_bf16_from_f32(ldexpf(unit(3, index), (int)(run >> 8 & 31) - 16));
}

double *bf16_in_double(const uint16_t *values, size_t count) {
  double *out = malloc(count * sizeof *out + 1);
  for (size_t i = 0; i < count; i++) out[i] = (double)oproj_bf16_to_f32(values[i]);
  return out;
}

int test_is_short(void) {
  const char *value = getenv("OPROJ_TEST_SHORT");
  return value && strcmp(value, "1") == 0;
}

static const int32_t all_counts[] = {0,  1,  2,  3,  4,   5,   6,   7,   8,   9,
                                     10, 11, 12, 13, 14,  15,  16,  17,  31,  32,
                                     33, 63, 64, 65, 127, 128, 129, 255, 512, 8192};
static const int32_t few_counts[] = {0, 1, 8, 9, 17, 33, 129};
enum {
  ALL_COUNTS = sizeof all_counts / sizeof all_counts[0],
  FEW_COUNTS = sizeof few_counts / sizeof few_counts[0]
};

int token_counts(void) {
  return test_is_short() ? FEW_COUNTS : ALL_COUNTS;
}

int32_t token_count(int i) {
  return test_is_short() ? few_counts[i] : all_counts[i];
}

int32_t most_tokens(void) {
  return token_count(token_counts() - 1);
}

/* One comparison first: an assertion for each of millions of values takes seconds. */
void expect_same(const char *what, const uint16_t *found, const uint16_t *wanted, size_t count) {
  if (memcmp(found, wanted, count * sizeof *found) == 0) return;
  for (size_t i = 0; i < count; i++)
    ck_assert_msg(found[i] == wanted[i], "%s[%zu of %zu] is %g, wanted %g", what, i, count,
                  (double)oproj_bf16_to_f32(found[i]), (double)oproj_bf16_to_f32(wanted[i]));
}

void expect_close(const char *what, const uint16_t *found, const double *wanted, size_t count) {
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < count; i++) {
    double difference = (double)oproj_bf16_to_f32(found[i]) - wanted[i];
    error += difference * difference;
    norm += wanted[i] * wanted[i];
  }
  double relative = sqrt(error / (norm > 0.0 ? norm : 1.0));
  ck_assert_msg(relative <= 2e-3, "%s: relative error %g over %zu values", what, relative, count);
}

int run_gpu_suite(Suite *suite, TCase *tests) {
  enum { SKIPPED = 77 };
  const char *why = "", *required = getenv("OPROJ_REQUIRE_GPU");
  tcase_set_timeout(tests, 0);
  suite_add_tcase(suite, tests);
  if (oproj_kernels_cuda(&why)) return run_unforked_suite(suite);
  fprintf(stderr, "no GPU to test on: %s\n", why);
  srunner_free(srunner_create(suite));
  return required && strcmp(required, "1") == 0 ? EXIT_FAILURE : SKIPPED;
}

/* ---- the model ----------------------------------------------------------------------------- */

rig rig_open(int32_t hidden, int32_t heads_per_group, int32_t head_dim, int32_t groups,
             int32_t lora_rank, int32_t block, int32_t max_tokens) {
  rig r = {.config = {.dims = {.hidden = hidden,
                               .heads = heads_per_group * (groups + 1),
                               .head_dim = head_dim,
                               .rope_dim = 64,
                               .groups = groups + 1,
                               .lora_rank = lora_rank,
                               .quant_block = block},
                      .groups = groups,
                      .device = -1,
                      .max_tokens = max_tokens,
                      .threads = 8}};
  const char *why = "";
  r.ops = oproj_kernels_cuda(&why);
  ck_assert_msg(r.ops != NULL, "no cuda backend: %s", why);
  r.heads = heads_per_group * groups;
  r.group_cols = oproj_kernels_group_cols(&r.config);
  r.z_cols = oproj_kernels_z_cols(&r.config);
  EXPECT_OK(r.ops->open(&r.cuda, &r.config));
  EXPECT_OK(oproj_kernels_ref.open(&r.ref, &r.config));
  return r;
}

/* hidden is no multiple of a row block; 3 groups make 3 scale columns of z and so a word that is
 * not full. */
rig small_rig(int32_t block) {
  return rig_open(330, 2, 512, 3, 128, block, most_tokens());
}

void rig_close(rig *r) {
  r->ops->close(r->cuda);
  oproj_kernels_ref.close(r->ref);
}

static oproj_matrix make_matrix(oproj_dtype dtype, int64_t rows, int64_t cols, int32_t block,
                                data_kind kind, uint64_t seed) {
  oproj_matrix m = {.dtype = dtype, .rows = rows, .cols = cols};
  int64_t count = rows * cols;
  uint16_t *values = must_alloc((size_t)count * sizeof *values);
  uint8_t *codes = (uint8_t *)values;
  m.data = values;
  for (int64_t i = 0; i < count; i++) {
    float value = kind == DATA_EXACT ? small_integer(seed, (uint64_t)i) : unit(seed, (uint64_t)i);
    if (dtype == OPROJ_DTYPE_BF16)
      values[i] = oproj_bf16_from_f32(value);
    else
      codes[i] = oproj_e4m3_from_f32(kind == DATA_EXACT ? value : 448.0f * value);
  }
  if (dtype == OPROJ_DTYPE_BF16) return m;
  m.block = block;
  int64_t scale_count = oproj_base_ceil_div(rows, block) * oproj_base_ceil_div(cols, block);
  float *scales = must_alloc((size_t)scale_count * sizeof *scales);
  for (int64_t i = 0; i < scale_count; i++)
    scales[i] = kind == DATA_EXACT ? 1.0f : 0.003f + 0.001f * unit(seed + 100, (uint64_t)i);
  m.scales = scales;
  return m;
}

layer layer_open(const rig *r, oproj_dtype dtype, data_kind kind, uint64_t seed) {
  int32_t block = r->config.dims.quant_block;
  layer l = {.wo_a = make_matrix(dtype, r->z_cols, r->group_cols, block, kind, seed),
             .wo_b = make_matrix(dtype, r->config.dims.hidden, r->z_cols, block, kind, seed + 1)};
  EXPECT_OK(r->ops->weights_create(&l.cuda, r->cuda, &l.wo_a, &l.wo_b));
  EXPECT_OK(oproj_kernels_ref.weights_create(&l.ref, r->ref, &l.wo_a, &l.wo_b));
  return l;
}

void layer_close(const rig *r, layer *l) {
  r->ops->weights_destroy(l->cuda);
  oproj_kernels_ref.weights_destroy(l->ref);
  free((void *)l->wo_a.data);
  free((void *)l->wo_a.scales);
  free((void *)l->wo_b.data);
  free((void *)l->wo_b.scales);
}

oproj_status rig_forward(const oproj_kernels_ops *ops, oproj_kernels_weights *weights,
                         const oproj_io *io, const oproj_kernels_out *out, uint16_t *partial,
                         void *stream) {
  oproj_kernels_part whole = oproj_kernels_whole(io->tokens);
  return ops->forward(weights, io, &whole, out, partial, stream);
}

double weight_at(const oproj_matrix *m, int64_t row, int64_t col) {
  int64_t at = row * m->cols + col;
  if (m->dtype == OPROJ_DTYPE_BF16) return oproj_bf16_to_f32(((const uint16_t *)m->data)[at]);
  int64_t blocks = oproj_base_ceil_div(m->cols, m->block);
  return (double)oproj_e4m3_to_f32(((const uint8_t *)m->data)[at]) *
         (double)m->scales[row / m->block * blocks + col / m->block];
}

double *product_in_double(const oproj_matrix *w, int32_t groups, int32_t tokens, const double *a) {
  int64_t rows = w->rows / groups, cols = w->cols;
  double *out = calloc((size_t)(tokens * w->rows) + 1, sizeof *out);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < w->rows; i++) {
    double *row = malloc((size_t)cols * sizeof *row);
    for (int64_t k = 0; k < cols; k++) row[k] = weight_at(w, i, k);
    for (int64_t t = 0; t < tokens; t++) {
      const double *values = a + (i / rows * tokens + t) * cols;
      double sum = 0.0;
      for (int64_t k = 0; k < cols; k++) sum += values[k] * row[k];
      out[t * w->rows + i] = sum;
    }
    free(row);
  }
  return out;
}

/* ---- device memory ------------------------------------------------------------------------- */

int is_poison(const void *bytes, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (((const uint8_t *)bytes)[i] != POISON) return 0;
  return 1;
}

device_buffer device_make(const rig *r, size_t bytes) {
  size_t all = bytes + 2 * GUARD;
  void *base;
  EXPECT_OK(r->ops->buffer_create(r->cuda, all, &base));
  void *poison = must_alloc(all);
  EXPECT_OK(r->ops->buffer_write(r->cuda, base, poison, all, NULL));
  free(poison);
  return (device_buffer){.base = base, .at = (char *)base + GUARD, .bytes = bytes};
}

device_buffer device_copy(const rig *r, const void *from_host, size_t bytes) {
  device_buffer buffer = device_make(r, bytes);
  EXPECT_OK(r->ops->buffer_write(r->cuda, buffer.at, from_host, bytes, NULL));
  return buffer;
}

void *device_read(const rig *r, const device_buffer *buffer) {
  size_t all = buffer->bytes + 2 * GUARD;
  char *bytes = must_alloc(all);
  EXPECT_OK(r->ops->buffer_read(r->cuda, bytes, buffer->base, all, NULL));
  ck_assert_msg(is_poison(bytes, GUARD), "bytes before the buffer changed");
  ck_assert_msg(is_poison(bytes + GUARD + buffer->bytes, GUARD), "bytes after the buffer changed");
  memmove(bytes, bytes + GUARD, buffer->bytes);
  return bytes;
}

void device_free(const rig *r, device_buffer *buffer) {
  r->ops->buffer_destroy(r->cuda, buffer->base);
}

/* ---- input --------------------------------------------------------------------------------- */

static void fill_table(float *cos_sin, data_kind kind) {
  static const float quarter[] = {1.0f, 0.0f, -1.0f, 0.0f};
  for (int row = 0; row < TABLE_ROWS; row++) {
    for (int i = 0; i < 32; i++) {
      uint64_t index = (uint64_t)(row * 32 + i), turn = hash(4, index) % 4;
      double angle = 3.2 * (double)unit(5, index);
      float *pair = cos_sin + row * 64 + i;
      pair[0] = kind == DATA_EXACT ? quarter[turn] : (float)cos(angle);
      pair[32] = kind == DATA_EXACT ? quarter[(turn + 3) % 4] : (float)sin(angle);
    }
  }
}

static size_t attention_count(const input *in) {
  return (size_t)(in->host.tokens * in->host.token_stride);
}

input input_open(const rig *r, int32_t tokens, int32_t pad, oproj_position_type type,
                 data_kind kind) {
  int32_t head_dim = r->config.dims.head_dim;
  input in = {.host = {.tokens = tokens,
                       .head_stride = head_dim + pad,
                       .token_stride = (int64_t)r->heads * (head_dim + pad) + pad,
                       .position_type = type,
                       .cos_sin_rows = TABLE_ROWS,
                       .cos_sin_width = 64}};
  size_t count = attention_count(&in), live = (size_t)(tokens > 0 ? tokens : 1);
  in.attn_out = must_alloc(count * sizeof *in.attn_out);
  in.positions32 = must_alloc(live * sizeof *in.positions32);
  in.positions64 = must_alloc(live * sizeof *in.positions64);
  in.cos_sin = must_alloc(TABLE_ROWS * 64 * sizeof *in.cos_sin);
  for (size_t i = 0; i < count; i++) in.attn_out[i] = 0x7FFFu;
  in.host.attn_out = in.attn_out;
#pragma omp parallel for schedule(static)
  for (int32_t t = 0; t < tokens; t++) {
    input_set_position(&in, t, (int64_t)(hash(6, (uint64_t)t) % TABLE_ROWS));
    for (int32_t h = 0; h < r->heads; h++)
      for (int32_t d = 0; d < head_dim; d++)
        *input_at(&in, t, h, d) =
            attention_value(kind, (uint64_t)(((int64_t)t * r->heads + h) * head_dim + d));
  }
  fill_table(in.cos_sin, kind);
  in.host.cos_sin = in.cos_sin;
  in.host.positions = type == OPROJ_POSITION_I32 ? (void *)in.positions32 : in.positions64;
  in.attn_out_device = device_make(r, count * sizeof *in.attn_out);
  in.positions_device = device_make(r, live * sizeof *in.positions64);
  in.cos_sin_device = device_copy(r, in.cos_sin, TABLE_ROWS * 64 * sizeof *in.cos_sin);
  in.device = in.host;
  in.device.attn_out = in.attn_out_device.at;
  in.device.positions = in.positions_device.at;
  in.device.cos_sin = in.cos_sin_device.at;
  input_push(r, &in);
  return in;
}

uint16_t *input_at(input *in, int32_t token, int32_t head, int32_t dim) {
  return in->attn_out + token * in->host.token_stride + head * in->host.head_stride + dim;
}

void input_set_position(input *in, int32_t token, int64_t position) {
  in->positions32[token] = (int32_t)position;
  in->positions64[token] = position;
}

void input_push(const rig *r, input *in) {
  size_t tokens = (size_t)in->host.tokens;
  size_t element = in->host.position_type == OPROJ_POSITION_I32 ? 4 : 8;
  EXPECT_OK(r->ops->buffer_write(r->cuda, in->attn_out_device.at, in->attn_out,
                                 attention_count(in) * sizeof *in->attn_out, NULL));
  EXPECT_OK(r->ops->buffer_write(r->cuda, in->positions_device.at, in->host.positions,
                                 tokens * element, NULL));
}

void input_close(const rig *r, input *in) {
  device_free(r, &in->attn_out_device);
  device_free(r, &in->positions_device);
  device_free(r, &in->cos_sin_device);
  free(in->attn_out);
  free(in->positions32);
  free(in->positions64);
  free(in->cos_sin);
}

/* ---- codes and scales ---------------------------------------------------------------------- */

quant quant_open(const rig *r, oproj_scale_layout layout, int32_t groups, int32_t tokens,
                 int32_t cols) {
  quant q = {.host = {.layout = layout, .groups = groups, .tokens = tokens, .cols = cols}};
  q.code_bytes = (size_t)groups * (size_t)tokens * (size_t)cols;
  q.scale_bytes = oproj_scale_bytes(layout, groups, tokens, cols, r->config.dims.quant_block);
  q.codes = device_make(r, q.code_bytes);
  q.scales = device_make(r, q.scale_bytes);
  q.device = q.host;
  q.device.codes = q.codes.at;
  q.device.scales = q.scales.at;
  q.host.codes = must_alloc(q.code_bytes);
  q.host.scales = must_alloc(q.scale_bytes);
  return q;
}

static void expect_bytes(const char *what, const uint8_t *found, const uint8_t *wanted,
                         size_t count) {
  if (memcmp(found, wanted, count) == 0) return;
  for (size_t i = 0; i < count; i++)
    ck_assert_msg(found[i] == wanted[i], "%s[%zu of %zu] is 0x%02x, wanted 0x%02x", what, i, count,
                  found[i], wanted[i]);
}

void quant_expect_equal(const rig *r, const quant *q) {
  uint8_t *codes = device_read(r, &q->codes), *scales = device_read(r, &q->scales);
  expect_bytes("codes", codes, q->host.codes, q->code_bytes);
  expect_bytes("scales", scales, q->host.scales, q->scale_bytes);
  free(codes);
  free(scales);
}

void quant_push(const rig *r, const quant *q) {
  EXPECT_OK(r->ops->buffer_write(r->cuda, q->device.codes, q->host.codes, q->code_bytes, NULL));
  EXPECT_OK(r->ops->buffer_write(r->cuda, q->device.scales, q->host.scales, q->scale_bytes, NULL));
}

void quant_close(const rig *r, quant *q) {
  device_free(r, &q->codes);
  device_free(r, &q->scales);
  free(q->host.codes);
  free(q->host.scales);
}

double *quant_in_double(const oproj_quant *q, int32_t block) {
  int32_t columns = q->cols / block;
  double *out = malloc((size_t)q->groups * (size_t)q->tokens * (size_t)q->cols * sizeof *out + 1);
  for (int32_t g = 0; g < q->groups; g++)
    for (int32_t t = 0; t < q->tokens; t++)
      for (int32_t k = 0; k < q->cols; k++) {
        int64_t at = ((int64_t)g * q->tokens + t) * q->cols + k;
        float scale = oproj_layout_load(q->scales, q->layout, g, t, k / block, q->tokens, columns);
        out[at] = (double)oproj_e4m3_to_f32(q->codes[at]) * (double)scale;
      }
  return out;
}
