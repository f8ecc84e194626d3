/* ctx.c - one rank's context: checked plan, backend, workspace, and the reduction over ranks. */
#include "tp/ctx.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/error.h"
#include "base/layout.h"
#include "base/log.h"
#include "tp/place.h"

/* Fields that an older, smaller struct lacks keep their defaults. */
static oproj_status read_config(const oproj_config *config, oproj_config *out) {
  oproj_config full = OPROJ_CONFIG_INIT;
  REQUIRE(config && config->struct_size >= sizeof config->struct_size &&
              config->struct_size <= sizeof full,
          OPROJ_ERR_INVALID, "config must come from OPROJ_CONFIG_INIT");
  memcpy(&full, config, config->struct_size);
  REQUIRE(full.max_tokens >= 0, OPROJ_ERR_INVALID, "max_tokens is %d; it must not be negative",
          full.max_tokens);
  REQUIRE(full.reduce >= OPROJ_REDUCE_ALL && full.reduce <= OPROJ_REDUCE_NONE, OPROJ_ERR_INVALID,
          "reduce is %d; it is no oproj_reduce", (int)full.reduce);
  REQUIRE(full.path >= OPROJ_PATH_AUTO && full.path <= OPROJ_PATH_DECODE, OPROJ_ERR_INVALID,
          "path is %d; it is no oproj_path", (int)full.path);
  REQUIRE(full.chunk_tokens >= 0 && full.chunk_tokens <= INT32_MAX, OPROJ_ERR_INVALID,
          "chunk_tokens is %lld; it must be 0 to %d", (long long)full.chunk_tokens, INT32_MAX);
  *out = full;
  return OPROJ_OK;
}

/* What must be readable before it can be compared. */
static oproj_status read_request(const oproj_dims *dims, const oproj_config *config,
                                 oproj_config *full) {
  REQUIRE(dims, OPROJ_ERR_INVALID, "dims must not be NULL");
  return read_config(config, full);
}

/* Everything else that can be refused before anything is allocated. */
static oproj_status check_request(const oproj_comm *comm, const oproj_dims *dims,
                                  const oproj_config *full, oproj_shard *shard,
                                  const oproj_kernels_ops **ops) {
  TRY(oproj_plan_shard(dims, full->split, comm->size, comm->rank, shard));
  REQUIRE((int64_t)full->max_tokens * dims->hidden <= INT_MAX, OPROJ_ERR_INVALID,
          "max_tokens %d x hidden %d exceeds 2^31 - 1", full->max_tokens, dims->hidden);
  return oproj_kernels_find(full->backend, ops);
}

int oproj_ctx_sums(const oproj_ctx *ctx) {
  return ctx->comm->size > 1 && ctx->reduce != OPROJ_REDUCE_NONE;
}

static int sums_on_device(const oproj_ctx *ctx) {
  return oproj_ctx_sums(ctx) && !ctx->ops->host && ctx->comm->ops->reduce_device;
}

static oproj_status bind_near(int32_t device) {
  oproj_kernels_device found;
  TRY(oproj_kernels_cuda_device(device, &found));
  oproj_place_bind(found.bus_id);
  return OPROJ_OK;
}

oproj_status oproj_place_rank(const oproj_comm *comm) {
  REQUIRE(comm, OPROJ_ERR_INVALID, "comm must not be NULL");
  int32_t device = oproj_comm_device(comm);
  if (device < 0) {
    oproj_place_unbind(comm->local_rank, comm->local_size);
    return OPROJ_OK;
  }
  oproj_place_unbind(0, 1);
  return bind_near(device);
}

/* -1 leaves one rank alone on its thread's current device. */
static oproj_status choose_device(const oproj_comm *comm, int32_t asked, int32_t *out) {
  REQUIRE(comm->device < 0 || asked == -1 || asked == comm->device, OPROJ_ERR_INVALID,
          "device is %d; the communicator's GPU is %d", asked, comm->device);
  *out = asked;
  if (asked != -1 || (comm->size == 1 && comm->device < 0)) return OPROJ_OK;
  *out = oproj_comm_device(comm);
  return bind_near(*out);
}

static oproj_status allocate_partial(oproj_ctx *ctx) {
  size_t bytes = (size_t)ctx->max_tokens * (size_t)ctx->dims.hidden * sizeof *ctx->partial;
  void *partial;
  TRY(ctx->ops->buffer_create(ctx->kernels, bytes, &partial));
  ctx->partial = partial;
  return ctx->ops->host ? OPROJ_OK : ctx->ops->host_create(ctx->kernels, bytes, &ctx->host_partial);
}

static oproj_status allocate(oproj_ctx *ctx, const oproj_config *config) {
  /* Before anything starts threads.  A rank with a GPU goes on to the CPUs near that. */
  if (ctx->ops->host)
    oproj_place_unbind(ctx->comm->local_rank, ctx->comm->local_size);
  else
    oproj_place_unbind(0, 1);
  oproj_kernels_config kernels = {.dims = ctx->dims,
                                  .groups = ctx->shard.group_end - ctx->shard.group_begin,
                                  .device = -1,
                                  .max_tokens = ctx->max_tokens,
                                  .path = config->path,
                                  .threads = oproj_place_threads(ctx->comm->local_size)};
  if (!ctx->ops->host) TRY(choose_device(ctx->comm, config->device, &kernels.device));
  TRY(ctx->ops->open(&ctx->kernels, &kernels));
  return oproj_ctx_sums(ctx) && !sums_on_device(ctx) ? allocate_partial(ctx) : OPROJ_OK;
}

/* COLLECTIVE, with one status on all ranks. */
static oproj_status attach(oproj_ctx *ctx) {
  oproj_comm_site site = {.ops = ctx->ops,
                          .kernels = ctx->kernels,
                          .max_tokens = ctx->max_tokens,
                          .hidden = ctx->dims.hidden};
  TRY(ctx->comm->ops->attach(ctx->comm, &site, &ctx->end));
  ctx->partial = ctx->end->partial;
  return OPROJ_OK;
}

oproj_status oproj_ctx_create(oproj_ctx **out, oproj_comm *comm, const oproj_dims *dims,
                              const oproj_config *config) {
  REQUIRE(out && comm, OPROJ_ERR_INVALID, "out and comm must not be NULL");
  oproj_config full = OPROJ_CONFIG_INIT;
  oproj_shard shard = {0};
  const oproj_kernels_ops *ops = NULL;
  oproj_watch_enter(comm->watch, "set-up", 0);
  TRY(oproj_comm_agree(comm, read_request(dims, config, &full)));
  TRY(oproj_ctx_compare_requests(comm, dims, &full));
  TRY(oproj_comm_agree(comm, check_request(comm, dims, &full, &shard, &ops)));

  oproj_ctx *ctx = calloc(1, sizeof *ctx);
  oproj_status status = OPROJ_OK;
  if (ctx) {
    ctx->comm = comm;
    ctx->dims = *dims;
    ctx->shard = shard;
    ctx->split = full.split;
    ctx->reduce = full.reduce;
    ctx->path = full.path;
    ctx->chunk_tokens = (int32_t)full.chunk_tokens;
    ctx->max_tokens = full.max_tokens;
    ctx->ops = ops;
    status = allocate(ctx, &full);
  } else {
    status = oproj_fail(OPROJ_ERR_NOMEM, "no memory for a context");
  }
  status = oproj_comm_agree(comm, status);
  if (status == OPROJ_OK) status = oproj_ctx_compare_devices(ctx);
  if (status == OPROJ_OK && sums_on_device(ctx)) status = attach(ctx);
  if (status != OPROJ_OK) {
    oproj_ctx_destroy(ctx);
    return status;
  }
  oproj_base_log(OPROJ_LOG_INFO, "backend %s, groups [%d, %d) of %d, %s reduction", ops->name,
                 shard.group_begin, shard.group_end, dims->groups, comm->ops->name);
  *out = ctx;
  return OPROJ_OK;
}

void oproj_ctx_destroy(oproj_ctx *ctx) {
  if (!ctx) return;
  if (ctx->kernels) {
    ctx->ops->host_destroy(ctx->kernels, ctx->host_partial);
    if (ctx->end)
      ctx->comm->ops->detach(ctx->comm, ctx->end); /* frees through the backend: before its end */
    else
      ctx->ops->buffer_destroy(ctx->kernels, ctx->partial);
    ctx->ops->close(ctx->kernels);
  }
  free(ctx);
}

const oproj_dims *oproj_ctx_dims(const oproj_ctx *ctx) {
  return &ctx->dims;
}

const oproj_shard *oproj_ctx_shard(const oproj_ctx *ctx) {
  return &ctx->shard;
}

const char *oproj_ctx_backend(const oproj_ctx *ctx) {
  return ctx->ops->name;
}

/* ---- memory -------------------------------------------------------------------------------- */

oproj_status oproj_buffer_create(oproj_ctx *ctx, size_t bytes, void **out) {
  REQUIRE(ctx && out, OPROJ_ERR_INVALID, "ctx and out must not be NULL");
  return ctx->ops->buffer_create(ctx->kernels, bytes, out);
}

void oproj_buffer_destroy(oproj_ctx *ctx, void *buffer) {
  if (ctx && buffer) ctx->ops->buffer_destroy(ctx->kernels, buffer);
}

oproj_status oproj_buffer_write(oproj_ctx *ctx, void *to, const void *from_host, size_t bytes,
                                void *stream) {
  REQUIRE(ctx && (bytes == 0 || (to && from_host)), OPROJ_ERR_INVALID,
          "ctx, to and from_host must not be NULL");
  return ctx->ops->buffer_write(ctx->kernels, to, from_host, bytes, stream);
}

oproj_status oproj_buffer_read(oproj_ctx *ctx, void *to_host, const void *from, size_t bytes,
                               void *stream) {
  REQUIRE(ctx && (bytes == 0 || (to_host && from)), OPROJ_ERR_INVALID,
          "ctx, to_host and from must not be NULL");
  TRY(ctx->ops->buffer_read(ctx->kernels, to_host, from, bytes, stream));
  return ctx->end ? oproj_comm_check(ctx->comm) : OPROJ_OK; /* a sum without a rank is none */
}

size_t oproj_scale_bytes(oproj_scale_layout layout, int32_t groups, int32_t tokens, int32_t cols,
                         int32_t quant_block) {
  int64_t bytes =
      oproj_layout_bytes(layout, groups, tokens, oproj_base_ceil_div(cols, quant_block));
  return bytes > 0 ? (size_t)bytes : 0;
}

/* ---- the reduction ------------------------------------------------------------------------- */

/* A sum in host memory has no figures to choose by, and the host nothing that runs beside it. */
int32_t oproj_ctx_chunk_tokens(const oproj_ctx *ctx, const oproj_chunk_call *call) {
  enum { MULTIPLE = OPROJ_KERNELS_PART_TOKENS };
  if (call->tokens < 1) return 1;
  if (!oproj_ctx_sums(ctx) || call->tokens > ctx->max_tokens) return call->tokens;
  if (ctx->chunk_tokens == 0)
    return ctx->end ? oproj_chunk_choose(call, &oproj_chunk_h200) : call->tokens;
  if (ctx->ops->host) return ctx->chunk_tokens;
  int64_t whole = oproj_base_ceil_div(ctx->chunk_tokens, MULTIPLE) * MULTIPLE;
  return whole < call->tokens ? (int32_t)whole : call->tokens;
}

/* Elements of y that this rank receives. */
static size_t reduced_elements(const oproj_ctx *ctx, int32_t tokens) {
  int32_t begin = 0, end = tokens;
  if (ctx->reduce == OPROJ_REDUCE_SCATTER)
    oproj_plan_rows(tokens, ctx->comm->size, ctx->comm->rank, &begin, &end);
  return (size_t)(end - begin) * (size_t)ctx->dims.hidden;
}

/* Nobody waits for the host: a failed rank's share is NaN, and its own y is left alone. */
static oproj_status reduce_on_device(oproj_ctx *ctx, oproj_status mine, int32_t tokens,
                                     const uint16_t *partial, uint16_t *y, int sent, void *stream) {
  const oproj_comm_ops *comm = ctx->comm->ops;
  TRY(oproj_comm_check(ctx->comm));
  if (mine == OPROJ_OK) {
    if (tokens == 0) return OPROJ_OK;
    return comm->reduce_device(ctx->comm, ctx->end, ctx->reduce, tokens, partial, y, sent, stream);
  }
  if (tokens <= 0 || tokens > ctx->max_tokens) return mine; /* what peers do is unknown */
  uint16_t *own = ctx->partial;
  oproj_status status =
      ctx->ops->make_nan(ctx->kernels, own, (int64_t)tokens * ctx->dims.hidden, stream);
  if (status == OPROJ_OK)
    status = comm->reduce_device(ctx->comm, ctx->end, ctx->reduce, tokens, own, own, 0, stream);
  return status == OPROJ_OK ? mine : status;
}

static oproj_status reduce_staged(oproj_ctx *ctx, oproj_status mine, int32_t tokens,
                                  const uint16_t *partial, uint16_t *y, void *stream) {
  size_t partial_bytes = (size_t)tokens * (size_t)ctx->dims.hidden * sizeof *partial;
  uint16_t *staged = ctx->host_partial;
  if (mine == OPROJ_OK)
    mine = ctx->ops->buffer_read(ctx->kernels, staged, partial, partial_bytes, stream);
  TRY(oproj_comm_agree(ctx->comm, mine));
  TRY(ctx->comm->ops->reduce(ctx->comm, ctx->reduce, tokens, ctx->dims.hidden, staged, staged));
  return ctx->ops->buffer_write(ctx->kernels, y, staged, reduced_elements(ctx, tokens) * sizeof *y,
                                stream);
}

oproj_status oproj_ctx_reduce(oproj_ctx *ctx, oproj_status mine, int32_t tokens,
                              const uint16_t *partial, uint16_t *y, int sent, void *stream) {
  if (!oproj_ctx_sums(ctx)) {
    if (mine != OPROJ_OK || y == partial) return mine;
    return ctx->ops->sum_ranks(ctx->kernels, partial, 1, (int64_t)tokens * ctx->dims.hidden, y,
                               NULL, stream);
  }
  if (ctx->end) return reduce_on_device(ctx, mine, tokens, partial, y, sent, stream);
  if (!ctx->ops->host) return reduce_staged(ctx, mine, tokens, partial, y, stream);
  TRY(oproj_comm_agree(ctx->comm, mine));
  return ctx->comm->ops->reduce(ctx->comm, ctx->reduce, tokens, ctx->dims.hidden, partial, y);
}
