/* layer.c - the top: one layer's weights on one rank, the forward call and its stages.
 *
 * This is where the plan, a backend and the reduction meet; load.c brings weights from files.
 * Every argument is checked here, once; backends trust what they are given. */
#include <stdlib.h>

#include "base/checked.h"
#include "base/error.h"
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
  ctx->ops->describe(ctx->kernels, &query);
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

/* *sent: this rank's part of the sum is on its way to the others already. */
static oproj_status forward_here(oproj_layer *layer, const oproj_io *io, uint16_t *partial,
                                 int *sent, void *stream) {
  const oproj_ctx *ctx = layer->ctx;
  oproj_io checked;
  oproj_kernels_out out = layer->out;
  TRY(check_input(ctx, io, &checked));
  if (ctx->end && ctx->ops->can_push && ctx->ops->can_push(layer->weights, &checked, &out, partial))
    out.sink = ctx->comm->ops->sink(ctx->end, ctx->reduce, io->tokens);
  oproj_kernels_part whole = oproj_kernels_whole(io->tokens);
  TRY(ctx->ops->forward(layer->weights, &checked, &whole, &out, partial, stream));
  *sent = out.sink != NULL;
  return OPROJ_OK;
}

/* Whether this rank receives no row of y, so that y may be NULL. */
static int receives_nothing(const oproj_ctx *ctx, int32_t tokens) {
  int32_t begin = 0, end = tokens;
  if (ctx->reduce == OPROJ_REDUCE_SCATTER)
    oproj_plan_rows(tokens, ctx->comm->size, ctx->comm->rank, &begin, &end);
  return begin == end;
}

oproj_status oproj_forward(oproj_layer *layer, const oproj_io *io, void *stream) {
  REQUIRE(layer && io, OPROJ_ERR_INVALID, "layer and io must not be NULL");
  oproj_ctx *ctx = layer->ctx;
  oproj_watch_enter(ctx->comm->watch, "forward", ctx->ops->host); /* the host may be any slow */
  uint16_t *partial = oproj_ctx_sums(ctx) ? ctx->partial : io->y;
  oproj_status status = OPROJ_OK;
  int sent = 0;
  if (io->tokens >= 0 && !receives_nothing(ctx, io->tokens))
    status = check_pointer("y", io->y, io->tokens);
  if (status == OPROJ_OK) status = forward_here(layer, io, partial, &sent, stream);
  oproj_watch_enter(ctx->comm->watch, "forward", 0);
  return oproj_ctx_reduce(ctx, status, io->tokens, partial, io->y, sent, stream);
}

/* ---- the stages ---------------------------------------------------------------------------- */

oproj_status oproj_input_quantize(oproj_ctx *ctx, const oproj_io *io, const oproj_quant *out,
                                  void *stream) {
  REQUIRE(ctx, OPROJ_ERR_INVALID, "ctx must not be NULL");
  oproj_io checked;
  TRY(check_input(ctx, io, &checked));
  TRY(check_quant(ctx, "out", out, groups_held(ctx), group_cols(ctx)));
  REQUIRE(out->tokens == io->tokens, OPROJ_ERR_SHAPE, "out has %d tokens; io has %d", out->tokens,
          io->tokens);
  return ctx->ops->input_quantize(ctx->kernels, &checked, out, stream);
}

oproj_status oproj_input_rotate(oproj_ctx *ctx, const oproj_io *io, uint16_t *x, void *stream) {
  REQUIRE(ctx, OPROJ_ERR_INVALID, "ctx must not be NULL");
  oproj_io checked;
  TRY(check_input(ctx, io, &checked));
  TRY(check_pointer("x", x, io->tokens));
  return ctx->ops->input_rotate(ctx->kernels, &checked, x, stream);
}

oproj_status oproj_group_forward(oproj_layer *layer, const oproj_io *io, uint16_t *z,
                                 void *stream) {
  REQUIRE(layer, OPROJ_ERR_INVALID, "layer must not be NULL");
  oproj_io checked;
  TRY(check_input(layer->ctx, io, &checked));
  TRY(check_pointer("z", z, io->tokens));
  return layer->ctx->ops->group_forward(layer->weights, &checked, z, stream);
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
  return ctx->ops->group_project(layer->weights, x, z, stream);
}

oproj_status oproj_z_quantize(oproj_ctx *ctx, int32_t tokens, const uint16_t *z,
                              const oproj_quant *out, void *stream) {
  REQUIRE(ctx, OPROJ_ERR_INVALID, "ctx must not be NULL");
  TRY(check_quant(ctx, "out", out, 1, z_cols(ctx)));
  REQUIRE(out->tokens == tokens, OPROJ_ERR_SHAPE, "out has %d tokens; z has %d", out->tokens,
          tokens);
  TRY(check_pointer("z", z, tokens));
  return ctx->ops->z_quantize(ctx->kernels, tokens, z, out, stream);
}

oproj_status oproj_out_forward(oproj_layer *layer, int32_t tokens, const uint16_t *z,
                               uint16_t *partial, void *stream) {
  REQUIRE(layer, OPROJ_ERR_INVALID, "layer must not be NULL");
  TRY(check_tokens(layer->ctx, tokens));
  TRY(check_pointer("z", z, tokens));
  TRY(check_pointer("partial", partial, tokens));
  return layer->ctx->ops->out_forward(layer->weights, tokens, z, partial, stream);
}

oproj_status oproj_out_project(oproj_layer *layer, const oproj_quant *z, uint16_t *partial,
                               void *stream) {
  REQUIRE(layer, OPROJ_ERR_INVALID, "layer must not be NULL");
  REQUIRE(layer->wo_b == OPROJ_DTYPE_E4M3, OPROJ_ERR_UNSUPPORTED,
          "wo_b is bf16: it takes no quantised input");
  TRY(check_quant(layer->ctx, "z", z, 1, z_cols(layer->ctx)));
  TRY(check_pointer("partial", partial, z->tokens));
  return layer->ctx->ops->out_project(layer->weights, z, partial, stream);
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
