/* test_cuda_tokens.c - every path at every token count: z and y against double precision, exact
 * data against the reference backend bit by bit, quantised z in every layout, and the quantiser at
 * the most tokens there are. */
#include <math.h>
#include <stdlib.h>

#include "base/layout.h"
#include "gpu/cuda_rig.h"
#include "gpu/cuda_run.h"

/* What rounding costs, and what short sums of tensor cores may add (relative, Frobenius). */
static const double STAGE_ERROR = 2e-3, CHAIN_ERROR = 2.5e-3, FAST_CHAIN_ERROR = 4e-3;
/* Codes of z that may differ from those of the exact z. */
static const double CODE_SHARE = 2e-3, FAST_CODE_SHARE = 1.5e-2;

/* A step of one code weighs more where there are few of them. */
static double chain_error(const oproj_path_choice *choice, int32_t tokens) {
  double most = choice->exact ? CHAIN_ERROR : FAST_CHAIN_ERROR;
  return tokens > 0 ? most * (1.0 + 1.0 / sqrt((double)tokens)) : most;
}

/* The recipes, and the one in blocks of 32 with scales that are powers of two: SM90 joins blocks
 * whose scales lie up to 6 binades apart (sm90_join.h), but not those 7 apart. */
enum { RANDOM_ROWS = RUN_RECIPES + 2 };

static data_layer make_random(int row, int32_t tokens) {
  static const int binades[RANDOM_ROWS] = {0, 0, 6, 7};
  const oproj_dims *dims = &run_recipes[row < RUN_RECIPES ? row : RUN_RECIPES - 1];
  data_layer data = data_make(dims, false, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, tokens);
  if (binades[row] > 0) data_spread(&data, binades[row]);
  return data;
}

static data_layer make(const oproj_dims *dims, bool exact, int32_t tokens) {
  return data_make(dims, exact, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, tokens);
}

/* ---- the chain in double precision --------------------------------------------------------- */

/* Of all tokens of a batch: a token's values do not hang on how many there are. */
typedef struct chain {
  double *z, *y;
  oproj_quant zq; /* of the exact z, rounded to bf16; OPROJ_SCALE_F32 */
} chain;

static oproj_quant make_quant(oproj_scale_layout layout, int32_t groups, int32_t tokens,
                              int32_t cols, int32_t block) {
  return (oproj_quant){
      .codes = malloc((size_t)groups * (size_t)tokens * (size_t)cols),
      .scales = calloc(oproj_scale_bytes(layout, groups, tokens, cols, block) + 1, 1),
      .layout = layout,
      .groups = groups,
      .tokens = tokens,
      .cols = cols};
}

static void free_quant(oproj_quant *q) {
  free(q->codes);
  free(q->scales);
}

static chain evaluate(const data_layer *data) {
  const oproj_dims *d = &data->dims;
  int32_t tokens = data->tokens, z_cols = d->groups * d->lora_rank;
  run ref = run_open("ref", OPROJ_PATH_AUTO, tokens, data, 1);
  batch b = batch_open(&ref, data, 0, tokens, 0);
  oproj_quant xq =
      make_quant(OPROJ_SCALE_F32, d->groups, tokens, (int32_t)data->wo_a.cols, d->quant_block);
  chain c = {.zq = make_quant(OPROJ_SCALE_F32, 1, tokens, z_cols, d->quant_block)};
  EXPECT_OK(oproj_input_quantize(ref.ctx, &b.io, &xq, NULL));
  double *x = quant_in_double(&xq, d->quant_block);
  c.z = product_in_double(&data->wo_a, d->groups, tokens, x);
  size_t count = (size_t)tokens * (size_t)z_cols;
  uint16_t *z = malloc(count * sizeof *z);
  for (size_t i = 0; i < count; i++) z[i] = oproj_bf16_from_f32((float)c.z[i]);
  EXPECT_OK(oproj_z_quantize(ref.ctx, tokens, z, &c.zq, NULL));
  double *z_quantised = quant_in_double(&c.zq, d->quant_block);
  c.y = product_in_double(&data->wo_b, 1, tokens, z_quantised);
  free(z_quantised);
  free(z);
  free(x);
  free_quant(&xq);
  batch_close(&ref, &b);
  run_close(&ref);
  return c;
}

static void free_chain(chain *c) {
  free(c->z);
  free(c->y);
  free_quant(&c->zq);
}

/* ---- every path, every count --------------------------------------------------------------- */

static void expect_error(const char *what, const run_path *path, int32_t tokens,
                         const uint16_t *found, const double *wanted, size_t count, double most) {
  if (count == 0) return;
  double error = data_error(found, wanted, (int64_t)count);
  ck_assert_msg(error <= most, "%s, %s, %d tokens: relative error %g, at most %g allowed", what,
                path->name, tokens, error, most);
}

/* Memory of one context's stages. */
typedef struct stages {
  uint16_t *z, *partial;
  oproj_quant zq;
} stages;

static stages open_stages(const run *r, const data_layer *data) {
  const oproj_dims *d = &data->dims;
  size_t tokens = (size_t)data->tokens;
  stages s = {.zq = {.layout = OPROJ_SCALE_F32, .groups = 1, .cols = d->groups * d->lora_rank}};
  void *memory;
  EXPECT_OK(oproj_buffer_create(r->ctx, tokens * (size_t)s.zq.cols * 2, &memory));
  s.z = memory;
  EXPECT_OK(oproj_buffer_create(r->ctx, tokens * (size_t)d->hidden * 2, &memory));
  s.partial = memory;
  EXPECT_OK(oproj_buffer_create(r->ctx, tokens * (size_t)s.zq.cols, &memory));
  s.zq.codes = memory;
  EXPECT_OK(oproj_buffer_create(
      r->ctx, oproj_scale_bytes(OPROJ_SCALE_F32, 1, data->tokens, s.zq.cols, d->quant_block),
      &s.zq.scales));
  return s;
}

static void close_stages(const run *r, stages *s) {
  oproj_buffer_destroy(r->ctx, s->z);
  oproj_buffer_destroy(r->ctx, s->partial);
  oproj_buffer_destroy(r->ctx, s->zq.codes);
  oproj_buffer_destroy(r->ctx, s->zq.scales);
}

static uint16_t *read_values(const run *r, const void *from, size_t count) {
  uint16_t *values = malloc(count * sizeof *values + 1);
  EXPECT_OK(oproj_buffer_read(r->ctx, values, from, count * sizeof *values, NULL));
  return values;
}

/* The first `tokens` rows of the exact codes and scales, as that many tokens store them. */
static void push_exact_z(const run *r, const oproj_quant *all, oproj_quant *to, int32_t tokens,
                         int32_t block) {
  oproj_quant few = make_quant(OPROJ_SCALE_F32, 1, tokens, all->cols, block);
  int32_t columns = all->cols / block;
  float *scales = few.scales;
  const float *from = all->scales;
  for (int32_t s = 0; s < columns; s++)
    for (int32_t t = 0; t < tokens; t++)
      scales[oproj_layout_f32(0, t, s, tokens, columns)] =
          from[oproj_layout_f32(0, t, s, all->tokens, columns)];
  to->tokens = tokens;
  EXPECT_OK(
      oproj_buffer_write(r->ctx, to->codes, all->codes, (size_t)tokens * (size_t)all->cols, NULL));
  EXPECT_OK(oproj_buffer_write(r->ctx, to->scales, few.scales,
                               oproj_scale_bytes(OPROJ_SCALE_F32, 1, tokens, all->cols, block),
                               NULL));
  free_quant(&few);
}

static void check_count(const run *r, const run_path *path, const data_layer *data, batch *b,
                        stages *s, const chain *c, int32_t tokens) {
  const oproj_dims *d = &data->dims;
  size_t z_count = (size_t)tokens * (size_t)s->zq.cols;
  oproj_path_choice choice;
  EXPECT_OK(oproj_layer_path(r->layers[0], tokens, &choice));
  ck_assert_msg(path->path == OPROJ_PATH_AUTO || choice.path == path->path, "%s is not forced",
                path->name);
  batch_set_tokens(b, data, tokens);

  EXPECT_OK(oproj_group_forward(r->layers[0], &b->io, s->z, NULL));
  uint16_t *z = read_values(r, s->z, z_count);
  expect_error("z", path, tokens, z, c->z, z_count, STAGE_ERROR);
  push_exact_z(r, &c->zq, &s->zq, tokens, d->quant_block);
  EXPECT_OK(oproj_out_project(r->layers[0], &s->zq, s->partial, NULL));
  uint16_t *partial = read_values(r, s->partial, b->y_count);
  expect_error("y from codes", path, tokens, partial, c->y, b->y_count, STAGE_ERROR);
  uint16_t *y = run_forward(r, 0, b);
  expect_error("y", path, tokens, y, c->y, b->y_count, chain_error(&choice, tokens));
  free(y);
  free(partial);
  free(z);
}

/* What SM90 joins, cuBLASLt takes. */
static void expect_joined(int row, const run *r, int32_t tokens) {
  oproj_path_choice choice;
  EXPECT_OK(oproj_layer_path(r->layers[0], tokens, &choice));
  if (oproj_device_capability(0) == 90 && tokens >= 768)
    ck_assert_int_eq(choice.path == OPROJ_PATH_LIBRARY, row == 0 || row == RUN_RECIPES);
}

START_TEST(values_match_double) {
  data_layer data = make_random(_i, most_tokens());
  chain c = evaluate(&data);
  for (int p = 0; p < RUN_PATHS; p++) {
    if (!run_serves(&run_paths[p], &data.dims, run_paths[p].least)) continue;
    run r = run_open("cuda", run_paths[p].path, data.tokens, &data, 1);
    batch b = batch_open(&r, &data, 0, data.tokens, 8);
    stages s = open_stages(&r, &data);
    if (run_paths[p].path == OPROJ_PATH_AUTO) expect_joined(_i, &r, most_tokens());
    for (int i = 0; i < token_counts(); i++)
      if (run_serves(&run_paths[p], &data.dims, token_count(i)))
        check_count(&r, &run_paths[p], &data, &b, &s, &c, token_count(i));
    close_stages(&r, &s);
    batch_close(&r, &b);
    run_close(&r);
  }
  free_chain(&c);
  data_free(&data);
}
END_TEST

/* The library begins where most of the counts end, so it has some of its own. */
START_TEST(exact_data_equals_ref) {
  static const int32_t more[] = {768, 1001, 1024};
  data_layer data = make(&run_recipes[_i], true, most_tokens() > 1024 ? most_tokens() : 1024);
  run ref = run_open("ref", OPROJ_PATH_AUTO, data.tokens, &data, 1);
  batch whole = batch_open(&ref, &data, 0, data.tokens, 0);
  uint16_t *wanted = run_forward(&ref, 0, &whole);
  for (int p = 0; p < RUN_PATHS; p++) {
    if (!run_serves(&run_paths[p], &data.dims, run_paths[p].least)) continue;
    run r = run_open("cuda", run_paths[p].path, data.tokens, &data, 1);
    batch b = batch_open(&r, &data, 0, data.tokens, 8);
    for (int i = 0; i < token_counts() + 3; i++) {
      int32_t tokens = i < 3 ? more[i] : token_count(i - 3);
      if (!run_serves(&run_paths[p], &data.dims, tokens)) continue;
      batch_set_tokens(&b, &data, tokens);
      uint16_t *y = run_forward(&r, 0, &b);
      expect_same(run_paths[p].name, y, wanted, b.y_count);
      free(y);
    }
    batch_close(&r, &b);
    run_close(&r);
  }
  free(wanted);
  batch_close(&ref, &whole);
  run_close(&ref);
  data_free(&data);
}
END_TEST

/* ---- values that are no numbers ------------------------------------------------------------- */

/* Writes one head of one token of the batch. */
static void put_head(const run *r, const batch *b, const data_layer *data, int32_t token,
                     int32_t head, const uint16_t *values) {
  uint16_t *to = (uint16_t *)b->io.attn_out + token * b->io.token_stride + head * b->io.head_stride;
  EXPECT_OK(oproj_buffer_write(r->ctx, to, values, (size_t)data->dims.head_dim * 2, NULL));
}

/* The token is all NaN, or where `zeros` all zeros of either sign; all others are as they were. */
static void expect_strange(const char *what, int32_t tokens, int32_t token, int32_t hidden,
                           bool zeros, const uint16_t *found, const uint16_t *clean) {
  for (int32_t t = 0; t < tokens; t++) {
    const uint16_t *row = found + (size_t)t * (size_t)hidden;
    if (t != token) {
      expect_same(what, row, clean + (size_t)t * (size_t)hidden, (size_t)hidden);
      continue;
    }
    for (int32_t i = 0; i < hidden; i++)
      ck_assert_msg(zeros ? (row[i] & 0x7FFF) == 0 : (row[i] & 0x7FFF) > 0x7F80,
                    "%s, %d tokens: y[%d] of the token is 0x%x", what, tokens, i, row[i]);
  }
}

static void check_strange(const run *r, const char *name, const data_layer *data, batch *b,
                          int32_t tokens) {
  static const uint16_t strange[] = {0x7FC0, 0xFFFF, 0x7F81, 0x7F80, 0xFF80, 0x8000};
  int32_t token = tokens / 2, heads = data->dims.heads, width = data->dims.head_dim;
  size_t whole = (size_t)heads * (size_t)width;
  uint16_t *values = malloc(whole * sizeof *values);
  const uint16_t *own = data->attn_out + (size_t)token * whole;
  batch_set_tokens(b, data, tokens);
  uint16_t *clean = run_forward(r, 0, b);
  for (size_t s = 0; s < sizeof strange / sizeof strange[0]; s++) {
    bool zeros = strange[s] == 0x8000; /* all of the token; else one value */
    for (size_t i = 0; i < whole; i++)
      values[i] = zeros || i == whole / 2 + s ? strange[s] : own[i];
    for (int32_t h = 0; h < heads; h++) put_head(r, b, data, token, h, values + h * width);
    uint16_t *found = run_forward(r, 0, b);
    expect_strange(name, tokens, token, data->dims.hidden, zeros, found, clean);
    free(found);
  }
  for (int32_t h = 0; h < heads; h++) put_head(r, b, data, token, h, own + h * width);
  free(clean);
  free(values);
}

START_TEST(strange_values_stay_in_their_token) {
  static const int32_t counts[] = {1, 8, 17, 32, 33, 129, 769};
  data_layer data = make_random(_i, 769);
  for (int p = 0; p < RUN_PATHS; p++) {
    if (!run_serves(&run_paths[p], &data.dims, run_paths[p].least)) continue;
    run r = run_open("cuda", run_paths[p].path, data.tokens, &data, 1);
    batch b = batch_open(&r, &data, 0, data.tokens, 8);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
      if (run_serves(&run_paths[p], &data.dims, counts[i]))
        check_strange(&r, run_paths[p].name, &data, &b, counts[i]);
    batch_close(&r, &b);
    run_close(&r);
  }
  data_free(&data);
}
END_TEST

/* ---- quantised z, as a caller's WO_B receives it ------------------------------------------- */

typedef struct taken_z {
  const run *r;
  int32_t block;
  uint8_t *codes, *scales;
  size_t scale_bytes;
} taken_z;

static oproj_status take_z(void *user, const oproj_quant *z, uint16_t *partial, void *stream) {
  taken_z *taken = user;
  size_t code_bytes = (size_t)z->tokens * (size_t)z->cols;
  (void)partial;
  taken->scale_bytes = oproj_scale_bytes(z->layout, z->groups, z->tokens, z->cols, taken->block);
  taken->codes = malloc(code_bytes + 1);
  taken->scales = malloc(taken->scale_bytes + 1);
  EXPECT_OK(oproj_buffer_read(taken->r->ctx, taken->codes, z->codes, code_bytes, stream));
  return oproj_buffer_read(taken->r->ctx, taken->scales, z->scales, taken->scale_bytes, stream);
}

static taken_z quantised_z(const run *r, const batch *b, oproj_scale_layout layout, int32_t block) {
  taken_z taken = {.r = r, .block = block};
  run_poison_workspace(r, NULL);
  EXPECT_OK(oproj_layer_set_out(r->layers[0], take_z, &taken, layout));
  EXPECT_OK(oproj_forward(r->layers[0], &b->io, NULL));
  return taken;
}

/* The same scales in another layout, every byte of padding zero. */
static void expect_scales(const run_path *path, const taken_z *found, oproj_scale_layout layout,
                          const taken_z *in_f32, int32_t tokens, int32_t columns) {
  uint8_t *wanted = calloc(found->scale_bytes + 1, 1);
  for (int32_t t = 0; t < tokens; t++)
    for (int32_t s = 0; s < columns; s++) {
      float scale = oproj_layout_load(in_f32->scales, OPROJ_SCALE_F32, 0, t, s, tokens, columns);
      ck_assert_msg(scale > 0.0f, "%s, %d tokens: scale %d of token %d is %g", path->name, tokens,
                    s, t, (double)scale);
      oproj_layout_store(wanted, layout, 0, t, s, tokens, columns, (uint8_t)(ilogbf(scale) + 127));
    }
  ck_assert_msg(memcmp(found->scales, wanted, found->scale_bytes) == 0,
                "%s, %d tokens, layout %d: the scales of z, or their padding, are wrong",
                path->name, tokens, (int)layout);
  free(wanted);
}

static void check_quantised_z(const run *r, const run_path *path, const data_layer *data,
                              const batch *b, const chain *c) {
  int32_t block = data->dims.quant_block, cols = c->zq.cols, tokens = b->io.tokens;
  size_t code_bytes = (size_t)tokens * (size_t)cols, differing = 0;
  oproj_path_choice choice;
  EXPECT_OK(oproj_layer_path(r->layers[0], tokens, &choice));
  taken_z first = quantised_z(r, b, OPROJ_SCALE_F32, block);
  for (size_t i = 0; i < code_bytes; i++) differing += first.codes[i] != c->zq.codes[i];
  double share = (double)differing / (double)code_bytes;
  ck_assert_msg(tokens < 32 || share <= (choice.exact ? CODE_SHARE : FAST_CODE_SHARE),
                "%s, %d tokens: %g of the codes of z differ from those of the exact z", path->name,
                tokens, share);
  for (int layout = 0; layout <= OPROJ_SCALE_UE8M0_TILE; layout++) {
    taken_z taken = quantised_z(r, b, (oproj_scale_layout)layout, block);
    ck_assert_msg(memcmp(taken.codes, first.codes, code_bytes) == 0,
                  "%s, %d tokens, layout %d: other codes than in f32", path->name, tokens, layout);
    expect_scales(path, &taken, (oproj_scale_layout)layout, &first, tokens, cols / block);
    free(taken.codes);
    free(taken.scales);
  }
  free(first.codes);
  free(first.scales);
}

START_TEST(quantised_z_in_every_layout) {
  static const int32_t counts[] = {1, 5, 8, 17, 32, 33, 129, 769, 770};
  data_layer data = make_random(_i, 770);
  chain c = evaluate(&data);
  for (int p = 0; p < RUN_PATHS; p++) {
    if (run_paths[p].path == OPROJ_PATH_DECODE) continue; /* WO_B is part of it */
    if (!run_serves(&run_paths[p], &data.dims, run_paths[p].least)) continue;
    run r = run_open("cuda", run_paths[p].path, data.tokens, &data, 1);
    batch b = batch_open(&r, &data, 0, data.tokens, 8);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
      if (!run_serves(&run_paths[p], &data.dims, counts[i])) continue;
      batch_set_tokens(&b, &data, counts[i]);
      check_quantised_z(&r, &run_paths[p], &data, &b, &c);
    }
    batch_close(&r, &b);
    run_close(&r);
  }
  free_chain(&c);
  data_free(&data);
}
END_TEST

/* ---- the most tokens ----------------------------------------------------------------------- */

enum {
  MOST = 65536,
  PERIOD = 60, /* tokens that are repeated; no power of two, so that a wrapped offset shows */
  SAMPLES = 40
};

/* V4-Pro's heads: 2^32 values.  Heads and tokens are padded. */
static const oproj_dims many_heads = {128, 128, 512, 64, 16, 128, 128};

/* Repeats the first `period` bytes over the rest of the buffer. */
static void repeat(void *memory, size_t period, size_t bytes) {
  for (size_t done = period; done < bytes; done *= 2)
    CUDA_OK(cudaMemcpy((char *)memory + done, memory, done < bytes - done ? done : bytes - done,
                       cudaMemcpyDeviceToDevice));
}

static int32_t sample(int i) {
  static const int32_t edges[] = {0, 1, MOST / 2 - 1, MOST / 2, MOST - 2, MOST - 1};
  enum { EDGES = sizeof edges / sizeof edges[0] };
  return i < EDGES ? edges[i] : (int32_t)(data_hash(90, (uint64_t)i) % MOST);
}

typedef struct many {
  run cuda, ref;
  data_layer data;    /* of PERIOD tokens */
  batch pattern;      /* the same on ref */
  oproj_io io;        /* of MOST tokens */
  int64_t *positions; /* [MOST], in host memory */
  void *attn_out, *positions64, *positions32, *cos_sin;
} many;

static many open_many(void) {
  many m = {.data = make(&many_heads, false, PERIOD)};
  m.cuda = run_open("cuda", OPROJ_PATH_AUTO, MOST, &m.data, 1);
  m.ref = run_open("ref", OPROJ_PATH_AUTO, 1, &m.data, 1);
  m.pattern = batch_open(&m.ref, &m.data, 0, PERIOD, 8);
  m.io = m.pattern.io;
  m.io.tokens = MOST;
  size_t row_bytes = (size_t)m.io.token_stride * sizeof(uint16_t);
  EXPECT_OK(oproj_buffer_create(m.cuda.ctx, MOST * row_bytes, &m.attn_out));
  EXPECT_OK(
      oproj_buffer_write(m.cuda.ctx, m.attn_out, m.pattern.attn_out, PERIOD * row_bytes, NULL));
  repeat(m.attn_out, PERIOD * row_bytes, MOST * row_bytes);
  m.positions = malloc(MOST * sizeof *m.positions);
  int32_t *narrow = malloc(MOST * sizeof *narrow);
  for (size_t t = 0; t < MOST; t++)
    narrow[t] =
        (int32_t)(m.positions[t] = (int64_t)(data_hash(91, t) % (uint64_t)m.data.cos_sin_rows));
  EXPECT_OK(oproj_buffer_create(m.cuda.ctx, MOST * sizeof *narrow, &m.positions32));
  EXPECT_OK(oproj_buffer_write(m.cuda.ctx, m.positions32, narrow, MOST * sizeof *narrow, NULL));
  EXPECT_OK(oproj_buffer_create(m.cuda.ctx, MOST * sizeof *m.positions, &m.positions64));
  EXPECT_OK(
      oproj_buffer_write(m.cuda.ctx, m.positions64, m.positions, MOST * sizeof *m.positions, NULL));
  size_t table_bytes = (size_t)m.data.cos_sin_rows * 64 * sizeof(float);
  EXPECT_OK(oproj_buffer_create(m.cuda.ctx, table_bytes, &m.cos_sin));
  EXPECT_OK(oproj_buffer_write(m.cuda.ctx, m.cos_sin, m.data.cos_sin, table_bytes, NULL));
  m.io.attn_out = m.attn_out;
  m.io.cos_sin = m.cos_sin;
  free(narrow);
  return m;
}

static void close_many(many *m) {
  void *owned[] = {m->attn_out, m->positions32, m->positions64, m->cos_sin};
  for (int i = 0; i < 4; i++) oproj_buffer_destroy(m->cuda.ctx, owned[i]);
  free(m->positions);
  batch_close(&m->ref, &m->pattern);
  run_close(&m->cuda);
  run_close(&m->ref);
  data_free(&m->data);
}

/* The call of one of the tokens, on ref. */
static oproj_io one_token(const many *m, int32_t token) {
  oproj_io io = m->pattern.io;
  io.tokens = 1;
  io.attn_out += token % PERIOD * io.token_stride;
  io.positions = m->positions + token;
  return io;
}

static void check_codes(const many *m, oproj_scale_layout layout) {
  enum { GROUPS = 16, COLS = 4096, COLUMNS = COLS / 128 };
  size_t scale_bytes = oproj_scale_bytes(layout, GROUPS, MOST, COLS, 128);
  oproj_quant out = {.layout = layout, .groups = GROUPS, .tokens = MOST, .cols = COLS};
  oproj_quant one = make_quant(OPROJ_SCALE_F32, GROUPS, 1, COLS, 128);
  uint8_t *found = malloc(COLS), *scales = malloc(scale_bytes);
  void *memory;
  EXPECT_OK(oproj_buffer_create(m->cuda.ctx, (size_t)GROUPS * MOST * COLS, &memory));
  out.codes = memory;
  EXPECT_OK(oproj_buffer_create(m->cuda.ctx, scale_bytes, &out.scales));
  EXPECT_OK(oproj_input_quantize(m->cuda.ctx, &m->io, &out, NULL));
  EXPECT_OK(oproj_buffer_read(m->cuda.ctx, scales, out.scales, scale_bytes, NULL));
  for (int i = 0; i < SAMPLES; i++) {
    int32_t t = sample(i);
    oproj_io io = one_token(m, t);
    EXPECT_OK(oproj_input_quantize(m->ref.ctx, &io, &one, NULL));
    for (int64_t g = 0; g < GROUPS; g++) {
      EXPECT_OK(
          oproj_buffer_read(m->cuda.ctx, found, out.codes + (g * MOST + t) * COLS, COLS, NULL));
      ck_assert_msg(memcmp(found, one.codes + g * COLS, COLS) == 0,
                    "codes of token %d, group %lld differ", t, (long long)g);
      for (int64_t s = 0; s < COLUMNS; s++)
        ck_assert_float_eq(oproj_layout_load(scales, layout, g, t, s, MOST, COLUMNS),
                           oproj_layout_load(one.scales, OPROJ_SCALE_F32, g, 0, s, 1, COLUMNS));
    }
  }
  oproj_buffer_destroy(m->cuda.ctx, out.codes);
  oproj_buffer_destroy(m->cuda.ctx, out.scales);
  free(scales);
  free(found);
  free_quant(&one);
}

static void check_rotated(const many *m) {
  enum { GROUPS = 16, COLS = 4096 };
  uint16_t *wanted = malloc(GROUPS * COLS * sizeof *wanted), *found = malloc(COLS * sizeof *found);
  void *x;
  EXPECT_OK(oproj_buffer_create(m->cuda.ctx, (size_t)GROUPS * MOST * COLS * 2, &x));
  EXPECT_OK(oproj_input_rotate(m->cuda.ctx, &m->io, x, NULL));
  for (int i = 0; i < SAMPLES; i++) {
    int32_t t = sample(i);
    oproj_io io = one_token(m, t);
    EXPECT_OK(oproj_input_rotate(m->ref.ctx, &io, wanted, NULL));
    for (int64_t g = 0; g < GROUPS; g++) {
      EXPECT_OK(oproj_buffer_read(m->cuda.ctx, found, (uint16_t *)x + (g * MOST + t) * COLS,
                                  COLS * sizeof *found, NULL));
      expect_same("x", found, wanted + g * COLS, COLS);
    }
  }
  oproj_buffer_destroy(m->cuda.ctx, x);
  free(found);
  free(wanted);
}

/* Offsets beyond 2^32 elements, in reading and writing. */
START_TEST(quantiser_takes_65536_tokens) {
  enum { GIB = 40 };
  size_t free_bytes = 0, all_bytes = 0;
  CUDA_OK(cudaMemGetInfo(&free_bytes, &all_bytes));
  if (test_is_short() || free_bytes >> 30 < GIB) return;
  many m = open_many();
  m.io.positions = m.positions64;
  check_codes(&m, OPROJ_SCALE_F32);
  check_codes(&m, OPROJ_SCALE_UE8M0_TILE);
  m.io.positions = m.positions32;
  m.io.position_type = OPROJ_POSITION_I32;
  check_codes(&m, OPROJ_SCALE_UE8M0_PACKED);
  check_rotated(&m);
  close_many(&m);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("cuda_tokens");
  TCase *tests = tcase_create("tokens");
  tcase_add_loop_test(tests, values_match_double, 0, RANDOM_ROWS);
  tcase_add_loop_test(tests, exact_data_equals_ref, 0, RUN_RECIPES);
  tcase_add_loop_test(tests, strange_values_stay_in_their_token, 0, RANDOM_ROWS);
  tcase_add_loop_test(tests, quantised_z_in_every_layout, 0, RANDOM_ROWS);
  tcase_add_test(tests, quantiser_takes_65536_tokens);
  return run_gpu_suite(suite, tests);
}
