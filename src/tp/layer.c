/* layer.c - the top: one layer's weights on one rank, the forward call and its stages.
 *
 * This is where the plan, a backend and the reduction meet; load.c brings weights from files.
 * Every argument is checked here, once; backends trust what they are given. */
#include <stdlib.h>

#include "base/checked.h"
#include "base/error.h"
#include "base/log.h"
#include "tp/ctx.h"

/* ---- weights ------------------------------------------------------------------------------- */

static oproj_status check_matrix(const oproj_dims *dims, const char *name, const oproj_matrix *m,
                                 int64_t rows, int64_t cols) {
  REQUIRE(m && m->data, OPROJ_ERR_INVALID, "%s has no data", name);
  REQUIRE(m->rows == rows && m->cols == cols, OPROJ_ERR_SHAPE,
          "%s is [%lld, %lld]; this rank's share is [%lld, %lld]", name, (long long)m->rows,
          (long long)m->cols, (long long)rows, (long long)cols);
  if (m->dtype == OPROJ_DTYPE_BF16) {
    REQUIRE(!m->scales, OPROJ_ERR_INVALID, "%s is bf16 and must not have scales", name);
    return OPROJ_OK;
  }
  REQUIRE(m->dtype == OPROJ_DTYPE_E4M3, OPROJ_ERR_INVALID, "%s has dtype %d; it is no oproj_dtype",
          name, (int)m->dtype);
  REQUIRE(m->scales, OPROJ_ERR_INVALID, "%s is e4m3 and needs scales", name);
  REQUIRE(m->block == dims->quant_block, OPROJ_ERR_SHAPE,
          "%s has scale blocks of %d; this context quantises by %d", name, m->block,
          dims->quant_block);
  return OPROJ_OK;
}

static oproj_status check_weights(const oproj_ctx *ctx, const oproj_matrix *wo_a,
                                  const oproj_matrix *wo_b) {
  const oproj_dims *d = &ctx->dims;
  int64_t z_cols = ctx->shard.z_end - ctx->shard.z_begin;
  TRY(check_matrix(d, "wo_a", wo_a, z_cols, (int64_t)d->heads / d->groups * d->head_dim));
  return check_matrix(d, "wo_b", wo_b, d->hidden, z_cols);
}

oproj_status oproj_layer_make(oproj_layer **out, oproj_ctx *ctx, const oproj_matrix *wo_a,
                              const oproj_matrix *wo_b) {
  TRY(check_weights(ctx, wo_a, wo_b));
  oproj_layer *layer = calloc(1, sizeof *layer);
  REQUIRE(layer, OPROJ_ERR_NOMEM, "no memory for a layer");
  layer->ctx = ctx;
  layer->wo_a = wo_a->dtype;
  layer->wo_b = wo_b->dtype;
  oproj_status status = ctx->ops->weights_create(&layer->weights, ctx->kernels, wo_a, wo_b);
  if (status != OPROJ_OK) {
    free(layer);
    return status;
  }
  *out = layer;
  return OPROJ_OK;
}

oproj_status oproj_layer_create(oproj_layer **out, oproj_ctx *ctx, const oproj_matrix *wo_a,
                                const oproj_matrix *wo_b) {
  REQUIRE(out && ctx, OPROJ_ERR_INVALID, "out and ctx must not be NULL");
  oproj_layer *layer = NULL;
  oproj_watch_enter(ctx->comm->watch, "load", 0);
  oproj_status status = oproj_comm_agree(ctx->comm, oproj_layer_make(&layer, ctx, wo_a, wo_b));
  if (status == OPROJ_OK)
    *out = layer;
  else
    oproj_layer_destroy(layer);
  return status;
}

void oproj_layer_destroy(oproj_layer *layer) {
  if (!layer) return;
  layer->ctx->ops->weights_destroy(layer->weights);
  free(layer);
}

oproj_status oproj_layer_check(const oproj_layer *layer, const oproj_matrix *wo_a,
                               const oproj_matrix *wo_b) {
  TRY(check_weights(layer->ctx, wo_a, wo_b));
  REQUIRE(wo_a->dtype == layer->wo_a && wo_b->dtype == layer->wo_b, OPROJ_ERR_SHAPE,
          "the new weights have other dtypes than the layer");
  return layer->ctx->ops->weights_check(layer->weights, wo_a, wo_b);
}

oproj_status oproj_layer_replace(oproj_layer *layer, const oproj_matrix *wo_a,
                                 const oproj_matrix *wo_b) {
  REQUIRE(layer, OPROJ_ERR_INVALID, "layer must not be NULL");
  oproj_ctx *ctx = layer->ctx;
  oproj_watch_enter(ctx->comm->watch, "load", 0);
  TRY(oproj_comm_agree(ctx->comm, oproj_layer_check(layer, wo_a, wo_b)));
  return oproj_comm_agree(ctx->comm, ctx->ops->weights_replace(layer->weights, wo_a, wo_b));
}

oproj_status oproj_layer_set_adapter(oproj_layer *layer, const oproj_adapter *adapter) {
  enum { MAX_RANK = 1024 };
  REQUIRE(layer, OPROJ_ERR_INVALID, "layer must not be NULL");
  if (adapter) {
    REQUIRE(adapter->rank >= 1 && adapter->rank <= MAX_RANK, OPROJ_ERR_INVALID,
            "adapter rank is %d; it must be in [1, %d]", adapter->rank, MAX_RANK);
    REQUIRE(adapter->a && adapter->b, OPROJ_ERR_INVALID, "adapter a and b must not be NULL");
  }
  TRY(layer->ctx->ops->adapter_set(layer->weights, adapter));
  layer->has_adapter = adapter != NULL;
  return OPROJ_OK;
}

oproj_status oproj_layer_set_out(oproj_layer *layer, oproj_out_fn fn, void *user,
                                 oproj_scale_layout layout) {
  REQUIRE(layer, OPROJ_ERR_INVALID, "layer must not be NULL");
  REQUIRE(layout >= OPROJ_SCALE_F32 && layout <= OPROJ_SCALE_UE8M0_TILE, OPROJ_ERR_INVALID,
          "layout is %d; it is no oproj_scale_layout", (int)layout);
  layer->out = (oproj_kernels_out){.fn = fn, .user = user, .layout = layout};
  return OPROJ_OK;
}

oproj_status oproj_layer_path(const oproj_layer *layer, int32_t tokens, oproj_path_choice *out) {
  REQUIRE(layer, OPROJ_ERR_INVALID, "layer must not be NULL");
  const oproj_ctx *ctx = layer->ctx;
  oproj_path_query query = {.tokens = tokens,
                            .dims = ctx->dims,
                            .groups = ctx->shard.group_end - ctx->shard.group_begin,
                            .wo_a = layer->wo_a,
                            .wo_b = layer->wo_b,
                            .has_adapter = layer->has_adapter,
                            .own_out = layer->out.fn != NULL,
                            .forced = ctx->path};
  ctx->ops->describe(layer->weights, &query);
  return oproj_path_choose(&query, out);
}

/* ---- argument checks of the hot calls ------------------------------------------------------ */

static int32_t heads_held(const oproj_ctx *ctx) {
  return ctx->shard.head_end - ctx->shard.head_begin;
}

static int32_t groups_held(const oproj_ctx *ctx) {
  return ctx->shard.group_end - ctx->shard.group_begin;
}

static int32_t group_cols(const oproj_ctx *ctx) {
  return ctx->dims.heads / ctx->dims.groups * ctx->dims.head_dim;
}

static int32_t z_cols(const oproj_ctx *ctx) {
  return ctx->shard.z_end - ctx->shard.z_begin;
}

static oproj_status check_tokens(const oproj_ctx *ctx, int32_t tokens) {
  REQUIRE(tokens >= 0 && tokens <= ctx->max_tokens, OPROJ_ERR_INVALID,
          "tokens is %d; this context takes 0 to %d", tokens, ctx->max_tokens);
  return OPROJ_OK;
}

/* Heads of one token must not overlap: a stride shorter than what it steps over is a mistake. */
static oproj_status check_strides(const oproj_ctx *ctx, const oproj_io *io) {
  int32_t head_dim = ctx->dims.head_dim;
  int64_t token_span = (heads_held(ctx) - 1) * io->head_stride + head_dim;
  REQUIRE(io->head_stride >= head_dim && io->head_stride <= INT64_C(1) << 40, OPROJ_ERR_INVALID,
          "head_stride is %lld; a head has %d values", (long long)io->head_stride, head_dim);
  REQUIRE(io->token_stride >= token_span, OPROJ_ERR_INVALID,
          "token_stride is %lld; %d heads span %lld values", (long long)io->token_stride,
          heads_held(ctx), (long long)token_span);
  return OPROJ_OK;
}

/* Checks all but y; `out` is io with its default strides filled in. */
static oproj_status check_input(const oproj_ctx *ctx, const oproj_io *io, oproj_io *out) {
  REQUIRE(io, OPROJ_ERR_INVALID, "io must not be NULL");
  TRY(check_tokens(ctx, io->tokens));
  *out = *io;
  if (out->head_stride == 0) out->head_stride = ctx->dims.head_dim;
  if (out->token_stride == 0) out->token_stride = heads_held(ctx) * out->head_stride;
  TRY(check_strides(ctx, out));
  REQUIRE(io->position_type == OPROJ_POSITION_I64 || io->position_type == OPROJ_POSITION_I32,
          OPROJ_ERR_INVALID, "position_type is %d; it is no oproj_position_type",
          (int)io->position_type);
  REQUIRE(io->cos_sin_width == ctx->dims.rope_dim, OPROJ_ERR_INVALID,
          "cos_sin has %d columns; the rotary dimension is %d", io->cos_sin_width,
          ctx->dims.rope_dim);
  REQUIRE(io->cos_sin_rows >= 0, OPROJ_ERR_INVALID, "cos_sin_rows is %lld",
          (long long)io->cos_sin_rows);
  REQUIRE(io->tokens == 0 || (io->attn_out && io->positions && io->cos_sin), OPROJ_ERR_INVALID,
          "attn_out, positions and cos_sin must not be NULL");
  return OPROJ_OK;
}

static oproj_status check_quant(const oproj_ctx *ctx, const char *name, const oproj_quant *q,
                                int32_t groups, int32_t cols) {
  REQUIRE(q, OPROJ_ERR_INVALID, "%s must not be NULL", name);
  TRY(check_tokens(ctx, q->tokens));
  REQUIRE(q->groups == groups && q->cols == cols, OPROJ_ERR_SHAPE,
          "%s has %d groups of %d columns; this rank has %d of %d", name, q->groups, q->cols,
          groups, cols);
  REQUIRE(q->layout >= OPROJ_SCALE_F32 && q->layout <= OPROJ_SCALE_UE8M0_TILE, OPROJ_ERR_INVALID,
          "%s has layout %d; it is no oproj_scale_layout", name, (int)q->layout);
  REQUIRE(q->tokens == 0 || (q->codes && q->scales), OPROJ_ERR_INVALID,
          "%s codes and scales must not be NULL", name);
  return OPROJ_OK;
}

static oproj_status check_pointer(const char *name, const void *pointer, int32_t tokens) {
  REQUIRE(tokens == 0 || pointer, OPROJ_ERR_INVALID, "%s must not be NULL", name);
  return OPROJ_OK;
}

/* ---- the hot call -------------------------------------------------------------------------- */

/* Whether this rank receives no row of y, so that y may be NULL. */
static int receives_nothing(const oproj_ctx *ctx, int32_t tokens) {
  int32_t begin = 0, end = tokens;
  if (ctx->reduce == OPROJ_REDUCE_SCATTER)
    oproj_plan_rows(tokens, ctx->comm->size, ctx->comm->rank, &begin, &end);
  return begin == end;
}

/* A call under way, and which of its chunks is in hand. */
typedef struct hot_call {
  oproj_layer *layer;
  oproj_io io; /* checked, strides filled in */
  oproj_chunk_call shape;
  int32_t chunk_tokens, count;
  int sent; /* this rank's part of the sum is on its way to the others already */
  void *stream;
} hot_call;

static oproj_status check_call(const oproj_ctx *ctx, const oproj_io *io, oproj_io *out) {
  if (io->tokens >= 0 && !receives_nothing(ctx, io->tokens))
    TRY(check_pointer("y", io->y, io->tokens));
  return check_input(ctx, io, out);
}

/* The first chunk has the GPU to itself, and all of them where sums are made elsewhere. */
static oproj_chunk find_chunk(const hot_call *c, int32_t index) {
  oproj_chunk chunk = oproj_chunk_at(&c->shape, c->chunk_tokens, index);
  if (index > 0 && c->layer->ctx->end) chunk.part.spare = oproj_chunk_h200.spare;
  return chunk;
}

static uint16_t *partial_of(const hot_call *c, const oproj_chunk *chunk) {
  const oproj_ctx *ctx = c->layer->ctx;
  if (!oproj_ctx_sums(ctx)) return c->io.y;
  return ctx->partial + (int64_t)chunk->before * ctx->dims.hidden;
}

/* Enqueues the chain of a chunk. */
static oproj_status project(hot_call *c, int32_t index) {
  const oproj_ctx *ctx = c->layer->ctx;
  oproj_kernels_weights *weights = c->layer->weights;
  oproj_kernels_out out = c->layer->out;
  oproj_chunk chunk = find_chunk(c, index);
  uint16_t *partial = partial_of(c, &chunk);
  oproj_watch_enter(ctx->comm->watch, "forward", ctx->ops->host); /* the host may be any slow */
  if (c->count == 1 && ctx->end && ctx->ops->can_push &&
      ctx->ops->can_push(weights, c->io.tokens, &out))
    out.sink = ctx->comm->ops->sink(ctx->end, ctx->reduce, c->io.tokens);
  TRY(ctx->ops->forward(weights, &c->io, &chunk.part, &out, partial, c->stream));
  c->sent = out.sink != NULL;
  return OPROJ_OK;
}

/* Sums a chunk; `mine` is how this rank's share of it came out. */
static oproj_status reduce(hot_call *c, int32_t index, oproj_status mine, void *stream) {
  oproj_ctx *ctx = c->layer->ctx;
  oproj_chunk chunk = find_chunk(c, index);
  uint16_t *y = c->io.y ? c->io.y + (int64_t)chunk.y_row * ctx->dims.hidden : NULL;
  oproj_watch_enter(ctx->comm->watch, "forward", 0);
  return oproj_ctx_reduce(ctx, mine, chunk.part.tokens, partial_of(c, &chunk), y, c->sent, stream);
}

/* The sum of every chunk but the last runs beside the chain of the next, which is enqueued first:
 * the host may have to wait for a sum.  The last one waits for the others and runs on the caller's
 * stream, so that one chunk is a chain and a sum on that stream alone.
 *
 * Where no host takes part in the sums, the others cannot know that a rank has failed: it goes on
 * with them to the last chunk. */
static oproj_status run_chunks(hot_call *c, oproj_status status) {
  oproj_ctx *ctx = c->layer->ctx;
  if (status == OPROJ_OK) status = project(c, 0);
  for (int32_t i = 0; i < c->count - 1; i++) {
    void *beside = c->stream;
    oproj_status forked = ctx->ops->fork(ctx->kernels, c->stream, &beside);
    if (status == OPROJ_OK) status = forked;
    oproj_status next = status == OPROJ_OK ? project(c, i + 1) : status;
    status = reduce(c, i, status, beside);
    if (status != OPROJ_OK && !ctx->end) return status;
    if (status == OPROJ_OK) status = next;
  }
  oproj_status joined = c->count > 1 ? ctx->ops->join(ctx->kernels, c->stream) : OPROJ_OK;
  if (status == OPROJ_OK) status = joined;
  return reduce(c, c->count - 1, status, c->stream);
}

/* The first call of a context that is taken apart. */
static void log_chunks(const hot_call *c) {
  oproj_ctx *ctx = c->layer->ctx;
  if (c->count == 1 || ctx->chunks_logged) return;
  ctx->chunks_logged = 1;
  oproj_base_log(OPROJ_LOG_INFO, "%d tokens: %d chunks of up to %d, each summed beside the next",
                 c->io.tokens, c->count, find_chunk(c, 0).part.tokens);
}

oproj_status oproj_forward(oproj_layer *layer, const oproj_io *io, void *stream) {
  REQUIRE(layer && io, OPROJ_ERR_INVALID, "layer and io must not be NULL");
  oproj_ctx *ctx = layer->ctx;
  hot_call c = {.layer = layer, .io = *io, .stream = stream};
  oproj_watch_enter(ctx->comm->watch, "forward", ctx->ops->host);
  oproj_status status = check_call(ctx, io, &c.io);
  c.shape = (oproj_chunk_call){
      .dims = ctx->dims, .ranks = ctx->comm->size, .reduce = ctx->reduce, .tokens = io->tokens};
  c.chunk_tokens = oproj_ctx_chunk_tokens(ctx, &c.shape);
  c.count = oproj_chunk_count(&c.shape, c.chunk_tokens);
  log_chunks(&c);
  return run_chunks(&c, status);
}

/* ---- the stages ---------------------------------------------------------------------------- */

/* Peers wait for a stage on the host however slow it is; on a device it only enqueues. */
static void begin_stage(const oproj_ctx *ctx, const char *stage) {
  if (ctx->ops->host) oproj_watch_enter(ctx->comm->watch, stage, 1);
}

static oproj_status end_stage(const oproj_ctx *ctx, const char *stage, oproj_status status) {
  if (ctx->ops->host) oproj_watch_enter(ctx->comm->watch, stage, 0);
  return status;
}

#define STAGE(ctx, stage, call) (begin_stage(ctx, stage), end_stage(ctx, stage, (call)))

oproj_status oproj_input_quantize(oproj_ctx *ctx, const oproj_io *io, const oproj_quant *out,
                                  void *stream) {
  REQUIRE(ctx, OPROJ_ERR_INVALID, "ctx must not be NULL");
  oproj_io checked;
  TRY(check_input(ctx, io, &checked));
  TRY(check_quant(ctx, "out", out, groups_held(ctx), group_cols(ctx)));
  REQUIRE(out->tokens == io->tokens, OPROJ_ERR_SHAPE, "out has %d tokens; io has %d", out->tokens,
          io->tokens);
  return STAGE(ctx, "input", ctx->ops->input_quantize(ctx->kernels, &checked, out, stream));
}

oproj_status oproj_input_rotate(oproj_ctx *ctx, const oproj_io *io, uint16_t *x, void *stream) {
  REQUIRE(ctx, OPROJ_ERR_INVALID, "ctx must not be NULL");
  oproj_io checked;
  TRY(check_input(ctx, io, &checked));
  TRY(check_pointer("x", x, io->tokens));
  return STAGE(ctx, "input", ctx->ops->input_rotate(ctx->kernels, &checked, x, stream));
}

oproj_status oproj_group_forward(oproj_layer *layer, const oproj_io *io, uint16_t *z,
                                 void *stream) {
  REQUIRE(layer, OPROJ_ERR_INVALID, "layer must not be NULL");
  const oproj_ctx *ctx = layer->ctx;
  oproj_io checked;
  TRY(check_input(ctx, io, &checked));
  TRY(check_pointer("z", z, io->tokens));
  return STAGE(ctx, "WO_A", ctx->ops->group_forward(layer->weights, &checked, z, stream));
}

oproj_status oproj_group_project(oproj_layer *layer, const oproj_quant *x, uint16_t *z,
                                 void *stream) {
  REQUIRE(layer, OPROJ_ERR_INVALID, "layer must not be NULL");
  oproj_ctx *ctx = layer->ctx;
  REQUIRE(layer->wo_a == OPROJ_DTYPE_E4M3, OPROJ_ERR_UNSUPPORTED,
          "wo_a is bf16: it takes no quantised input");
  REQUIRE(!layer->has_adapter, OPROJ_ERR_UNSUPPORTED,
          "wo_a carries an adapter, which needs the bf16 input");
  TRY(check_quant(ctx, "x", x, groups_held(ctx), group_cols(ctx)));
  TRY(check_pointer("z", z, x->tokens));
  return STAGE(ctx, "WO_A", ctx->ops->group_project(layer->weights, x, z, stream));
}

oproj_status oproj_z_quantize(oproj_ctx *ctx, int32_t tokens, const uint16_t *z,
                              const oproj_quant *out, void *stream) {
  REQUIRE(ctx, OPROJ_ERR_INVALID, "ctx must not be NULL");
  TRY(check_quant(ctx, "out", out, 1, z_cols(ctx)));
  REQUIRE(out->tokens == tokens, OPROJ_ERR_SHAPE, "out has %d tokens; z has %d", out->tokens,
          tokens);
  TRY(check_pointer("z", z, tokens));
  return STAGE(ctx, "z", ctx->ops->z_quantize(ctx->kernels, tokens, z, out, stream));
}

oproj_status oproj_out_forward(oproj_layer *layer, int32_t tokens, const uint16_t *z,
                               uint16_t *partial, void *stream) {
  REQUIRE(layer, OPROJ_ERR_INVALID, "layer must not be NULL");
  const oproj_ctx *ctx = layer->ctx;
  TRY(check_tokens(ctx, tokens));
  TRY(check_pointer("z", z, tokens));
  TRY(check_pointer("partial", partial, tokens));
  return STAGE(ctx, "WO_B", ctx->ops->out_forward(layer->weights, tokens, z, partial, stream));
}

oproj_status oproj_out_project(oproj_layer *layer, const oproj_quant *z, uint16_t *partial,
                               void *stream) {
  REQUIRE(layer, OPROJ_ERR_INVALID, "layer must not be NULL");
  REQUIRE(layer->wo_b == OPROJ_DTYPE_E4M3, OPROJ_ERR_UNSUPPORTED,
          "wo_b is bf16: it takes no quantised input");
  const oproj_ctx *ctx = layer->ctx;
  TRY(check_quant(ctx, "z", z, 1, z_cols(ctx)));
  TRY(check_pointer("partial", partial, z->tokens));
  return STAGE(ctx, "WO_B", ctx->ops->out_project(layer->weights, z, partial, stream));
}

static oproj_status check_reduction(const oproj_ctx *ctx, int32_t tokens, const uint16_t *partial,
                                    const uint16_t *y) {
  TRY(check_tokens(ctx, tokens));
  TRY(check_pointer("partial", partial, tokens));
  return receives_nothing(ctx, tokens) ? OPROJ_OK : check_pointer("y", y, tokens);
}

oproj_status oproj_partial_reduce(oproj_ctx *ctx, int32_t tokens, const uint16_t *partial,
                                  uint16_t *y, void *stream) {
  REQUIRE(ctx, OPROJ_ERR_INVALID, "ctx must not be NULL");
  oproj_watch_enter(ctx->comm->watch, "reduction", 0);
  oproj_status status = check_reduction(ctx, tokens, partial, y);
  return oproj_ctx_reduce(ctx, status, tokens, partial, y, 0, stream);
}
