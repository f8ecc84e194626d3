/* test_layer.c - the layer on the reference backend through the public API: ranks, dtypes, strides,
 * stages, adapters, a caller's WO-B, non-finite input, refusals. */
#include <math.h>
#include <stdlib.h>

#include "base/num.h"
#include "support/expect.h"
#include "support/ranks.h"

static const oproj_dims *const recipes[] = {&data_tiny_v4, &data_tiny_v41};
static const oproj_dtype E4M3 = OPROJ_DTYPE_E4M3, BF16 = OPROJ_DTYPE_BF16;

static size_t y_values(const data_layer *data) {
  return (size_t)data->tokens * (size_t)data->dims.hidden;
}

static void check_same(const uint16_t *a, const uint16_t *b, size_t count, const char *what) {
  for (size_t i = 0; i < count; i++)
    ck_assert_msg(a[i] == b[i], "%s: element %zu is %04x, wanted %04x", what, i, a[i], b[i]);
}

/* ---- the layer in double, written from the formulae ---------------------------------------- */

static double *decode(const oproj_matrix *m) {
  double *values = malloc((size_t)(m->rows * m->cols) * sizeof *values);
  for (int64_t i = 0; i < m->rows * m->cols; i++) {
    int64_t row = i / m->cols, col = i % m->cols;
    if (m->dtype == OPROJ_DTYPE_BF16) {
      values[i] = oproj_bf16_to_f32(((const uint16_t *)m->data)[i]);
      continue;
    }
    int64_t block_cols = (m->cols + m->block - 1) / m->block;
    values[i] = (double)oproj_e4m3_to_f32(((const uint8_t *)m->data)[i]) *
                m->scales[row / m->block * block_cols + col / m->block];
  }
  return values;
}

static double dot(const double *a, const double *b, int32_t count) {
  double sum = 0.0;
  for (int32_t i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

/* One activation block as the matrix sees it: quantised values, or bf16 ones. */
static void as_seen(const float *values, int32_t count, bool quantised, double *out) {
  float amax = 0.0f;
  for (int32_t i = 0; i < count; i++) amax = fmaxf(amax, fabsf(values[i]));
  double scale = exp2(ceil(log2((double)(fmaxf(amax, 1e-10f) * (1.0f / 448.0f)))));
  for (int32_t i = 0; i < count; i++)
    out[i] = quantised ? oproj_e4m3_to_f32(oproj_e4m3_from_f32((float)(values[i] / scale))) * scale
                       : (double)oproj_bf16_to_f32(oproj_bf16_from_f32(values[i]));
}

static void unrotate(const data_layer *data, int32_t token, int32_t head, float *out) {
  const oproj_dims *d = &data->dims;
  const uint16_t *in = data->attn_out + ((int64_t)token * d->heads + head) * d->head_dim;
  const float *row = data->cos_sin + data->positions[token] * d->rope_dim;
  for (int32_t i = 0; i < d->head_dim; i++) out[i] = oproj_bf16_to_f32(in[i]);
  float *rope = out + d->head_dim - d->rope_dim;
  for (int32_t i = 0; i < d->rope_dim / 2; i++) {
    float c = row[i], s = row[d->rope_dim / 2 + i], a = rope[2 * i], b = rope[2 * i + 1];
    rope[2 * i] = a * c + b * s;
    rope[2 * i + 1] = b * c - a * s;
  }
}

static double *evaluate(const data_layer *data) {
  const oproj_dims *d = &data->dims;
  int32_t block = d->quant_block, cols = (int32_t)data->wo_a.cols,
          z_cols = (int32_t)data->wo_a.rows;
  double *x = malloc((size_t)cols * sizeof *x), *z = malloc((size_t)z_cols * sizeof *z);
  double *y = malloc(y_values(data) * sizeof *y);
  double *wo_a = decode(&data->wo_a), *wo_b = decode(&data->wo_b);
  float *head = malloc((size_t)d->head_dim * sizeof *head);
  for (int32_t t = 0; t < data->tokens; t++) {
    for (int32_t row = 0; row < z_cols; row++) {
      int32_t group = row / d->lora_rank, per_group = d->heads / d->groups;
      if (row % d->lora_rank == 0)
        for (int32_t h = 0; h < per_group; h++) {
          unrotate(data, t, group * per_group + h, head);
          for (int32_t i = 0; i < d->head_dim; i += block)
            as_seen(head + i, block, data->wo_a.dtype == E4M3, x + h * d->head_dim + i);
        }
      float rounded = (float)dot(x, wo_a + (int64_t)row * cols, cols);
      z[row] = oproj_bf16_to_f32(oproj_bf16_from_f32(rounded));
    }
    for (int32_t i = 0; i < z_cols; i += block) {
      float values[128];
      for (int32_t j = 0; j < block; j++) values[j] = (float)z[i + j];
      as_seen(values, block, data->wo_b.dtype == E4M3, z + i);
    }
    for (int32_t row = 0; row < d->hidden; row++)
      y[(int64_t)t * d->hidden + row] = dot(z, wo_b + (int64_t)row * z_cols, z_cols);
  }
  free(head);
  free(wo_a);
  free(wo_b);
  free(z);
  free(x);
  return y;
}

/* ---- values -------------------------------------------------------------------------------- */

static const struct {
  oproj_dtype wo_a, wo_b;
} dtypes[] = {{OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3},
              {OPROJ_DTYPE_BF16, OPROJ_DTYPE_E4M3},
              {OPROJ_DTYPE_E4M3, OPROJ_DTYPE_BF16},
              {OPROJ_DTYPE_BF16, OPROJ_DTYPE_BF16}};

START_TEST(random_data_is_near_double) {
  data_layer data = data_make(recipes[_i / 4], false, dtypes[_i % 4].wo_a, dtypes[_i % 4].wo_b, 3);
  double *want = evaluate(&data);
  uint16_t *y = ranks_forward(&data, OPROJ_SPLIT_EVEN, 1);
  double error = data_error(y, want, (int64_t)y_values(&data));
  ck_assert_msg(error <= 2.5e-3 && error > 1e-4, "error is %g", error);
  free(y);
  free(want);
  data_free(&data);
}
END_TEST

START_TEST(exact_data_is_equal_at_every_size) {
  data_layer data = data_make(recipes[_i / 4], true, dtypes[_i % 4].wo_a, dtypes[_i % 4].wo_b, 5);
  double *want = evaluate(&data);
  const struct {
    oproj_split split;
    int32_t size;
  } plans[] = {
      {OPROJ_SPLIT_EVEN, 1}, {OPROJ_SPLIT_EVEN, 2}, {OPROJ_SPLIT_EVEN, 4}, {OPROJ_SPLIT_UNEVEN, 3}};
  int64_t nonzero = 0;
  for (size_t p = 0; p < sizeof plans / sizeof plans[0]; p++) {
    uint16_t *y = ranks_forward(&data, plans[p].split, plans[p].size);
    for (size_t i = 0; i < y_values(&data); i++) {
      ck_assert_msg(oproj_bf16_to_f32(y[i]) == want[i], "n = %d: y[%zu] is %g, wanted %g",
                    plans[p].size, i, oproj_bf16_to_f32(y[i]), want[i]);
      nonzero += want[i] != 0.0;
    }
    free(y);
  }
  ck_assert_int_gt(nonzero, (int64_t)y_values(&data)); /* the data says something */
  free(want);
  data_free(&data);
}
END_TEST

START_TEST(no_tokens) {
  data_layer data = data_make(&data_tiny_v4, false, E4M3, E4M3, 0);
  free(ranks_forward(&data, OPROJ_SPLIT_EVEN, 2));
  data_free(&data);
}
END_TEST

/* Padded head buffers whose padding is NaN, and positions of both widths, change nothing. */
START_TEST(strides_and_position_types) {
  data_layer data = data_make(recipes[_i], false, E4M3, E4M3, 5);
  uint16_t *want = ranks_forward(&data, OPROJ_SPLIT_EVEN, 1);
  int64_t head_stride = 512 + 8, token_stride = 19 * head_stride + 24;
  uint16_t *padded = malloc((size_t)(5 * token_stride) * sizeof *padded);
  for (int64_t i = 0; i < 5 * token_stride; i++) padded[i] = 0x7FFF;
  for (int32_t t = 0; t < 5; t++)
    for (int32_t h = 0; h < 16; h++)
      memcpy(padded + t * token_stride + h * head_stride, data.attn_out + (t * 16 + h) * 512, 1024);
  int32_t positions[5];
  for (int32_t t = 0; t < 5; t++) positions[t] = (int32_t)data.positions[t];

  ranks_one one = ranks_open(&data, OPROJ_SPLIT_EVEN, 1, 0);
  oproj_io io = data_io(&data, oproj_ctx_shard(one.ctx));
  uint16_t *y = malloc(y_values(&data) * sizeof *y);
  io.attn_out = padded;
  io.token_stride = token_stride;
  io.head_stride = head_stride;
  io.positions = positions;
  io.position_type = OPROJ_POSITION_I32;
  io.y = y;
  EXPECT_OK(oproj_forward(one.layer, &io, NULL));
  check_same(y, want, y_values(&data), "padded");
  ranks_close(&one);
  free(padded);
  free(y);
  free(want);
  data_free(&data);
}
END_TEST

/* A token with a NaN or an infinity is NaN throughout; the others keep their bits. */
START_TEST(non_finite_input_stays_in_its_token) {
  static const uint16_t bad_values[] = {0x7FC0, 0xFFFF, 0x7F80, 0xFF80};
  const int32_t bad_places[] = {3, 450, 511, 16 * 512 - 1};
  data_layer data = data_make(recipes[_i / 4], false, dtypes[_i % 4].wo_a, dtypes[_i % 4].wo_b, 4);
  uint16_t *want = ranks_forward(&data, OPROJ_SPLIT_EVEN, 1);
  for (size_t v = 0; v < 4; v++) {
    uint16_t *place = data.attn_out + 2 * 16 * 512 + bad_places[v], kept = *place;
    *place = bad_values[v];
    uint16_t *y = ranks_forward(&data, OPROJ_SPLIT_EVEN, 2);
    uint16_t *y_one = ranks_forward(&data, OPROJ_SPLIT_EVEN, 1);
    *place = kept;
    for (size_t i = 0; i < y_values(&data); i++) {
      if (i / (size_t)data.dims.hidden == 2)
        ck_assert_msg(isnan(oproj_bf16_to_f32(y[i])) && isnan(oproj_bf16_to_f32(y_one[i])),
                      "y[%zu] of the token is not NaN", i);
      else
        ck_assert_msg(y_one[i] == want[i], "y[%zu] of another token changed", i);
    }
    free(y);
    free(y_one);
  }
  free(want);
  data_free(&data);
}
END_TEST

/* ---- stages -------------------------------------------------------------------------------- */

static oproj_quant make_quant(oproj_scale_layout layout, int32_t groups, int32_t tokens,
                              int32_t cols, int32_t block) {
  size_t codes = (size_t)groups * (size_t)tokens * (size_t)cols;
  return (oproj_quant){
      malloc(codes), malloc(oproj_scale_bytes(layout, groups, tokens, cols, block)),
      layout,        groups,
      tokens,        cols};
}

static void free_quant(oproj_quant *q) {
  free(q->codes);
  free(q->scales);
}

/* The stages called one by one, in any scale layout, give the bits of the whole. */
START_TEST(stages_make_the_whole) {
  data_layer data = data_make(recipes[_i], false, E4M3, E4M3, 5);
  uint16_t *want = ranks_forward(&data, OPROJ_SPLIT_EVEN, 1);
  ranks_one one = ranks_open(&data, OPROJ_SPLIT_EVEN, 1, 0);
  int32_t z_cols = (int32_t)data.wo_a.rows, block = data.dims.quant_block;
  oproj_io io = data_io(&data, oproj_ctx_shard(one.ctx));
  uint16_t *z = malloc((size_t)(5 * z_cols) * sizeof *z),
           *z_again = malloc((size_t)(5 * z_cols) * 2);
  uint16_t *y = malloc(y_values(&data) * sizeof *y);
  EXPECT_OK(oproj_group_forward(one.layer, &io, z_again, NULL));
  for (oproj_scale_layout layout = OPROJ_SCALE_F32; layout <= OPROJ_SCALE_UE8M0_TILE; layout++) {
    oproj_quant xq = make_quant(layout, data.dims.groups, 5, (int32_t)data.wo_a.cols, block);
    oproj_quant zq = make_quant(layout, 1, 5, z_cols, block);
    EXPECT_OK(oproj_input_quantize(one.ctx, &io, &xq, NULL));
    EXPECT_OK(oproj_group_project(one.layer, &xq, z, NULL));
    check_same(z, z_again, (size_t)(5 * z_cols), "z");
    EXPECT_OK(oproj_z_quantize(one.ctx, 5, z, &zq, NULL));
    EXPECT_OK(oproj_out_project(one.layer, &zq, y, NULL));
    check_same(y, want, y_values(&data), "y by quantised z");
    free_quant(&xq);
    free_quant(&zq);
  }
  EXPECT_OK(oproj_out_forward(one.layer, 5, z, y, NULL));
  check_same(y, want, y_values(&data), "y by z");
  uint16_t *reduced = calloc(y_values(&data), sizeof *reduced);
  EXPECT_OK(oproj_partial_reduce(one.ctx, 5, y, reduced, NULL));
  check_same(reduced, want, y_values(&data), "reduced");
  free(reduced);
  free(z);
  free(z_again);
  free(y);
  free(want);
  ranks_close(&one);
  data_free(&data);
}
END_TEST

/* ---- a caller's WO-B ----------------------------------------------------------------------- */

typedef struct own_out {
  oproj_layer *ours; /* lends its WO-B */
  oproj_scale_layout layout;
  int calls;
} own_out;

static oproj_status project_by_ours(void *user, const oproj_quant *z, uint16_t *partial,
                                    void *stream) {
  own_out *own = user;
  own->calls++;
  ck_assert_int_eq(z->layout, own->layout);
  return oproj_out_project(own->ours, z, partial, stream);
}

static oproj_status refuse(void *user, const oproj_quant *z, uint16_t *partial, void *stream) {
  (void)user, (void)z, (void)partial, (void)stream;
  return oproj_fail(OPROJ_ERR_DEVICE, "my projection of %d tokens failed", 5);
}

START_TEST(callers_own_out_projection) {
  data_layer data = data_make(recipes[_i], false, E4M3, E4M3, 5);
  uint16_t *want = ranks_forward(&data, OPROJ_SPLIT_EVEN, 1);
  ranks_one one = ranks_open(&data, OPROJ_SPLIT_EVEN, 1, 0),
            other = ranks_open(&data, OPROJ_SPLIT_EVEN, 1, 0);
  oproj_io io = data_io(&data, oproj_ctx_shard(one.ctx));
  uint16_t *y = malloc(y_values(&data) * sizeof *y);
  io.y = y;
  for (oproj_scale_layout layout = OPROJ_SCALE_F32; layout <= OPROJ_SCALE_UE8M0_TILE; layout++) {
    own_out own = {.ours = other.layer, .layout = layout};
    EXPECT_OK(oproj_layer_set_out(one.layer, project_by_ours, &own, layout));
    memset(y, 0, y_values(&data) * sizeof *y);
    EXPECT_OK(oproj_forward(one.layer, &io, NULL));
    ck_assert_int_eq(own.calls, 1);
    check_same(y, want, y_values(&data), "y by the caller's projection");
  }
  EXPECT_OK(oproj_layer_set_out(one.layer, refuse, NULL, OPROJ_SCALE_F32));
  EXPECT_FAIL(oproj_forward(one.layer, &io, NULL), OPROJ_ERR_DEVICE, "my projection of 5 tokens");
  EXPECT_OK(oproj_layer_set_out(one.layer, NULL, NULL, OPROJ_SCALE_F32));
  EXPECT_OK(oproj_forward(one.layer, &io, NULL));
  check_same(y, want, y_values(&data), "y by ours again");
  EXPECT_FAIL(oproj_layer_set_out(one.layer, refuse, NULL, (oproj_scale_layout)7),
              OPROJ_ERR_INVALID, "layout is 7");
  free(y);
  free(want);
  ranks_close(&one);
  ranks_close(&other);
  data_free(&data);
}
END_TEST

/* ---- adapters ------------------------------------------------------------------------------ */

enum { ADAPTER_RANK = 4 };

/* a and b hold values only in the groups named by the masks. */
static oproj_adapter make_adapter(const oproj_dims *d, int32_t groups_held, unsigned a_groups,
                                  unsigned b_groups) {
  int32_t cols = d->heads / d->groups * d->head_dim;
  size_t a_count = (size_t)(groups_held * ADAPTER_RANK * cols);
  size_t b_count = (size_t)(groups_held * d->lora_rank * ADAPTER_RANK);
  uint16_t *a = calloc(a_count, sizeof *a), *b = calloc(b_count, sizeof *b);
  for (size_t i = 0; i < a_count; i++)
    if (a_groups >> i / (size_t)(ADAPTER_RANK * cols) & 1)
      a[i] = oproj_bf16_from_f32((float)data_uniform(60, i) * 0.02f);
  for (size_t i = 0; i < b_count; i++)
    if (b_groups >> i / (size_t)(d->lora_rank * ADAPTER_RANK) & 1)
      b[i] = oproj_bf16_from_f32((float)data_uniform(61, i));
  return (oproj_adapter){ADAPTER_RANK, a, b};
}

static void free_adapter(oproj_adapter *adapter) {
  free((void *)adapter->a);
  free((void *)adapter->b);
}

START_TEST(adapters_stay_in_their_group) {
  data_layer data = data_make(recipes[_i], false, _i ? BF16 : E4M3, E4M3, 3);
  const oproj_dims *d = &data.dims;
  int32_t cols = (int32_t)data.wo_a.cols, z_cols = (int32_t)data.wo_a.rows;
  ranks_one one = ranks_open(&data, OPROJ_SPLIT_EVEN, 1, 0);
  oproj_io io = data_io(&data, oproj_ctx_shard(one.ctx));
  size_t z_count = (size_t)(3 * z_cols);
  uint16_t *base = malloc(z_count * 2), *z = malloc(z_count * 2);
  uint16_t *x = malloc((size_t)(d->groups * 3 * cols) * 2);
  EXPECT_OK(oproj_group_forward(one.layer, &io, base, NULL));
  EXPECT_OK(oproj_input_rotate(one.ctx, &io, x, NULL));

  /* A in group 0 meets B in group 1: nothing happens. */
  oproj_adapter crossed = make_adapter(d, d->groups, 1u << 0, 1u << 1);
  EXPECT_OK(oproj_layer_set_adapter(one.layer, &crossed));
  EXPECT_OK(oproj_group_forward(one.layer, &io, z, NULL));
  check_same(z, base, z_count, "z with a crossed adapter");
  free_adapter(&crossed);

  /* Both in group 2: its columns move by the formula, the others not at all. */
  oproj_adapter adapter = make_adapter(d, d->groups, 1u << 2, 1u << 2);
  EXPECT_OK(oproj_layer_set_adapter(one.layer, &adapter));
  EXPECT_OK(oproj_group_forward(one.layer, &io, z, NULL));
  for (int32_t t = 0; t < 3; t++) {
    double down[ADAPTER_RANK] = {0};
    for (int32_t i = 0; i < ADAPTER_RANK; i++)
      for (int32_t k = 0; k < cols; k++)
        down[i] += (double)oproj_bf16_to_f32(x[(2 * 3 + t) * cols + k]) *
                   oproj_bf16_to_f32(adapter.a[(2 * ADAPTER_RANK + i) * cols + k]);
    for (int32_t c = 0; c < z_cols; c++) {
      double before = oproj_bf16_to_f32(base[t * z_cols + c]);
      double after = oproj_bf16_to_f32(z[t * z_cols + c]), delta = 0.0;
      if (c / d->lora_rank == 2)
        for (int32_t i = 0; i < ADAPTER_RANK; i++)
          delta += down[i] * oproj_bf16_to_f32(adapter.b[c * ADAPTER_RANK + i]);
      double slack = delta == 0.0 ? 0.0 : (fabs(before) + fabs(after)) / 128.0;
      ck_assert_msg(fabs(after - before - delta) <= slack, "token %d, column %d: %g + %g is %g", t,
                    c, before, delta, after);
    }
  }
  EXPECT_OK(oproj_layer_set_adapter(one.layer, NULL));
  EXPECT_OK(oproj_group_forward(one.layer, &io, z, NULL));
  check_same(z, base, z_count, "z after the adapter");
  adapter.rank = 0;
  EXPECT_FAIL(oproj_layer_set_adapter(one.layer, &adapter), OPROJ_ERR_INVALID, "rank is 0");
  free_adapter(&adapter);
  free(base);
  free(z);
  free(x);
  ranks_close(&one);
  data_free(&data);
}
END_TEST

/* ---- replacing weights --------------------------------------------------------------------- */

START_TEST(replaced_weights_serve) {
  data_layer first = data_make(&data_tiny_v4, false, E4M3, E4M3, 2);
  data_layer second = data_make(&data_tiny_v4, true, E4M3, E4M3, 2);
  memcpy(second.attn_out, first.attn_out, 2 * 16 * 512 * sizeof *first.attn_out);
  memcpy(second.cos_sin, first.cos_sin, (size_t)(first.cos_sin_rows * 64) * sizeof(float));
  uint16_t *want = ranks_forward(&second, OPROJ_SPLIT_EVEN, 1);
  ranks_one one = ranks_open(&first, OPROJ_SPLIT_EVEN, 1, 0);
  oproj_io io = data_io(&first, oproj_ctx_shard(one.ctx));
  uint16_t *y = malloc(y_values(&first) * sizeof *y);
  io.y = y;
  EXPECT_OK(oproj_layer_replace(one.layer, &second.wo_a, &second.wo_b));
  EXPECT_OK(oproj_forward(one.layer, &io, NULL));
  check_same(y, want, y_values(&first), "y of the new weights");

  data_layer other = data_make(&data_tiny_v4, false, BF16, E4M3, 2);
  EXPECT_FAIL(oproj_layer_replace(one.layer, &other.wo_a, &other.wo_b), OPROJ_ERR_SHAPE, "dtypes");
  EXPECT_OK(oproj_forward(one.layer, &io, NULL));
  check_same(y, want, y_values(&first), "y after a refused replacement");
  free(y);
  free(want);
  ranks_close(&one);
  data_free(&first);
  data_free(&second);
  data_free(&other);
}
END_TEST

/* ---- refusals ------------------------------------------------------------------------------ */

START_TEST(bad_calls) {
  data_layer data = data_make(&data_tiny_v4, false, E4M3, E4M3, 4);
  ranks_one one = ranks_open(&data, OPROJ_SPLIT_EVEN, 1, 0);
  uint16_t *y = calloc(y_values(&data), sizeof *y);
  oproj_io good = data_io(&data, oproj_ctx_shard(one.ctx)), io;
  good.y = y;
  EXPECT_OK(oproj_forward(one.layer, &good, NULL));
#define REFUSED(field, value, words)                                            \
  do {                                                                          \
    io = good;                                                                  \
    io.field = value;                                                           \
    EXPECT_FAIL(oproj_forward(one.layer, &io, NULL), OPROJ_ERR_INVALID, words); \
  } while (0)
  REFUSED(tokens, -1, "tokens is -1");
  REFUSED(tokens, 5, "takes 0 to 4");
  REFUSED(attn_out, NULL, "must not be NULL");
  REFUSED(positions, NULL, "must not be NULL");
  REFUSED(cos_sin, NULL, "must not be NULL");
  REFUSED(y, NULL, "y must not be NULL");
  REFUSED(head_stride, 511, "head_stride is 511");
  REFUSED(token_stride, 16 * 512 - 1, "token_stride is 8191");
  REFUSED(position_type, (oproj_position_type)2, "position_type is 2");
  REFUSED(cos_sin_width, 128, "cos_sin has 128 columns");
  REFUSED(cos_sin_rows, -1, "cos_sin_rows is -1");
#undef REFUSED
  for (int64_t bad = -1; bad <= data.cos_sin_rows; bad += data.cos_sin_rows + 1) {
    int64_t kept = data.positions[3];
    data.positions[3] = bad;
    EXPECT_FAIL(oproj_forward(one.layer, &good, NULL), OPROJ_ERR_INVALID, "positions[3]");
    data.positions[3] = kept;
  }
  oproj_quant q = {(uint8_t *)y, y, OPROJ_SCALE_F32, 4, 4, 2048};
  q.groups = 3;
  EXPECT_FAIL(oproj_input_quantize(one.ctx, &good, &q, NULL), OPROJ_ERR_SHAPE, "3 groups");
  q.groups = 4;
  q.tokens = 3;
  EXPECT_FAIL(oproj_input_quantize(one.ctx, &good, &q, NULL), OPROJ_ERR_SHAPE, "3 tokens");
  EXPECT_FAIL(oproj_out_forward(one.layer, 1, NULL, y, NULL), OPROJ_ERR_INVALID, "z must not");
  free(y);
  ranks_close(&one);
  data_free(&data);
}
END_TEST

START_TEST(bad_weights_and_configs) {
  data_layer data = data_make(&data_tiny_v4, false, E4M3, E4M3, 1);
  ranks_one one = ranks_open(&data, OPROJ_SPLIT_EVEN, 1, 0);
  oproj_layer *layer;
  oproj_matrix bad = data.wo_a;
  bad.rows--;
  EXPECT_FAIL(oproj_layer_create(&layer, one.ctx, &bad, &data.wo_b), OPROJ_ERR_SHAPE,
              "wo_a is [1023, ");
  bad = data.wo_b;
  bad.scales = NULL;
  EXPECT_FAIL(oproj_layer_create(&layer, one.ctx, &data.wo_a, &bad), OPROJ_ERR_INVALID,
              "needs scales");
  bad = data.wo_b;
  bad.block = 32;
  EXPECT_FAIL(oproj_layer_create(&layer, one.ctx, &data.wo_a, &bad), OPROJ_ERR_SHAPE,
              "blocks of 32");
  bad = data.wo_b;
  bad.dtype = OPROJ_DTYPE_BF16;
  EXPECT_FAIL(oproj_layer_create(&layer, one.ctx, &data.wo_a, &bad), OPROJ_ERR_INVALID,
              "must not have scales");

  oproj_ctx *ctx;
  oproj_comm *self;
  EXPECT_OK(oproj_comm_self(&self));
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "tpu";
  EXPECT_FAIL(oproj_ctx_create(&ctx, self, &data.dims, &config), OPROJ_ERR_INVALID, "\"tpu\"");
  config.backend = "ref";
  config.max_tokens = -1;
  EXPECT_FAIL(oproj_ctx_create(&ctx, self, &data.dims, &config), OPROJ_ERR_INVALID, "max_tokens");
  config.max_tokens = INT32_MAX;
  EXPECT_FAIL(oproj_ctx_create(&ctx, self, &data.dims, &config), OPROJ_ERR_INVALID, "2^31");
  config.struct_size = 0;
  EXPECT_FAIL(oproj_ctx_create(&ctx, self, &data.dims, &config), OPROJ_ERR_INVALID,
              "OPROJ_CONFIG_INIT");
  oproj_comm_destroy(self);
  self = ranks_comm(0, 3);
  config = (oproj_config)OPROJ_CONFIG_INIT;
  EXPECT_FAIL(oproj_ctx_create(&ctx, self, &data.dims, &config), OPROJ_ERR_SHAPE,
              "legal sizes are 1, 2, 4");
  oproj_comm_destroy(self);
  ranks_close(&one);
  data_free(&data);
}
END_TEST

START_TEST(words_for_every_status) {
  for (int status = -8; status <= 0; status++)
    ck_assert_str_ne(oproj_status_string((oproj_status)status), "unknown status");
  ck_assert_str_eq(oproj_status_string((oproj_status)-99), "unknown status");
  ck_assert_int_eq(oproj_fail(OPROJ_ERR_IO, "%s %d", "seven", 7), OPROJ_ERR_IO);
  ck_assert_str_eq(oproj_last_error(), "seven 7");
  ck_assert_uint_eq(oproj_version(),
                    OPROJ_VERSION_MAJOR * 10000 + OPROJ_VERSION_MINOR * 100 + OPROJ_VERSION_PATCH);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("layer");
  TCase *tc = tcase_create("layer");
  tcase_set_timeout(tc, 120);
  tcase_add_loop_test(tc, random_data_is_near_double, 0, 8);
  tcase_add_loop_test(tc, exact_data_is_equal_at_every_size, 0, 8);
  tcase_add_test(tc, no_tokens);
  tcase_add_loop_test(tc, strides_and_position_types, 0, 2);
  tcase_add_loop_test(tc, non_finite_input_stays_in_its_token, 0, 8);
  tcase_add_loop_test(tc, stages_make_the_whole, 0, 2);
  tcase_add_loop_test(tc, callers_own_out_projection, 0, 2);
  tcase_add_loop_test(tc, adapters_stay_in_their_group, 0, 2);
  tcase_add_test(tc, replaced_weights_serve);
  tcase_add_test(tc, bad_calls);
  tcase_add_test(tc, bad_weights_and_configs);
  tcase_add_test(tc, words_for_every_status);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
