/* load.c - the public calls that load layers, and the caller's thread in a load: it exchanges
 * what the ranks have read, and agrees with them at every step, so that one rank's failure ends
 * the load on all of them.
 *
 * A load of one rank alone, of split sets and of whole checkpoints on many ranks is the same:
 * only what is dealt (load.h) differs. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "tp/load.h"

typedef struct load {
  oproj_ctx *ctx;
  oproj_load_config config;
  oproj_load_plan plan;
  oproj_load_pipe pipe;
  oproj_shard *shards;     /* [size]: all ranks' */
  int32_t *sent, *arrived; /* [size]: bytes to and from each rank in a round */
  uint8_t *packed;         /* [plan.chunk_bytes]: columns on their way, in rank order */
  oproj_status mine;       /* this rank's failure, waiting for the next agreement */
  int64_t done_bytes, received_bytes;
} load;

/* ---- a round -------------------------------------------------------------------------------- */

/* Bytes of one row of the tensor that belong to a rank, and where they begin. */
static int64_t columns_of(const load *l, const oproj_load_part *part, int matrix, int which,
                          int32_t rank, int64_t *begin) {
  const oproj_dims *dims = &oproj_checkpoint_model(l->plan.checkpoint)->dims;
  const oproj_shard *shard = &l->shards[rank];
  const oproj_weights_region region = oproj_weights_region_of(
      dims, (oproj_weights_matrix)matrix, (oproj_weights_part)which, shard->z_begin, shard->z_end);
  *begin = region.col_begin * part->source.element_bytes;
  return (region.col_end - region.col_begin) * part->source.element_bytes;
}

/* Brings every rank's columns of the rows together. */
static void pack(load *l, const oproj_load_part *part, int matrix, int which, int64_t rows,
                 const uint8_t *chunk) {
  uint8_t *to = l->packed;
  for (int32_t rank = 0; rank < l->plan.size; rank++) {
    int64_t begin, bytes = columns_of(l, part, matrix, which, rank, &begin);
    l->sent[rank] = (int32_t)(rows * bytes);
    for (int64_t row = 0; row < rows; row++, to += bytes)
      memcpy(to, chunk + row * part->row_bytes + begin, (size_t)bytes);
  }
}

/* COLLECTIVE. The rows of a round are consecutive, so what arrives in rank order is in its
 * place. */
static oproj_status exchange(load *l, const oproj_load_part *part, int matrix, int which,
                             int32_t round, uint8_t *slot) {
  const oproj_comm *comm = l->ctx->comm;
  int64_t first = 0, begin, end, unused;
  int64_t bytes = columns_of(l, part, matrix, which, l->plan.rank, &unused);
  for (int32_t rank = 0; rank < l->plan.size; rank++) {
    oproj_load_rows(part, l->plan.size, round, rank, &begin, &end);
    if (rank == 0) first = begin;
    l->arrived[rank] = (int32_t)((end - begin) * bytes);
    if (rank != l->plan.rank) l->received_bytes += l->arrived[rank];
  }
  return comm->ops->exchange(l->ctx->comm, l->packed, l->sent, slot + part->at + first * bytes,
                             l->arrived);
}

static void progress(load *l, int64_t bytes) {
  l->done_bytes += bytes;
  if (l->config.progress &&
      l->config.progress(l->config.user, l->done_bytes, l->plan.total_bytes) != 0)
    l->mine = oproj_fail(OPROJ_ERR_INVALID,
                         "stopped by the caller after %" PRId64 " of %" PRId64 " bytes",
                         l->done_bytes, l->plan.total_bytes);
}

static oproj_status agree(load *l) {
  return oproj_comm_agree(l->ctx->comm, l->mine);
}

/* COLLECTIVE. */
static oproj_status run_round(load *l, const oproj_load_part *part, int matrix, int which,
                              int32_t round, uint8_t *slot) {
  int64_t begin, end, last;
  const uint8_t *chunk = NULL;
  oproj_load_rows(part, l->plan.size, round, l->plan.rank, &begin, &end);
  if (l->mine == OPROJ_OK && begin < end) l->mine = oproj_load_pipe_chunk(&l->pipe, &chunk);
  TRY(agree(l));
  pack(l, part, matrix, which, end - begin, chunk);
  if (chunk) oproj_load_pipe_take(&l->pipe);
  TRY(exchange(l, part, matrix, which, round, slot));
  oproj_load_rows(part, l->plan.size, round, 0, &begin, &end);
  oproj_load_rows(part, l->plan.size, round, l->plan.size - 1, &end, &last);
  progress(l, (last - begin) * part->row_bytes);
  return OPROJ_OK;
}

/* ---- a load --------------------------------------------------------------------------------- */

/* COLLECTIVE. */
static oproj_status run_layer(load *l, int32_t index) {
  const oproj_load_layer *layer = &l->plan.layers[index];
  int64_t before = l->done_bytes;
  uint8_t *slot = NULL;
  if (l->mine == OPROJ_OK) l->mine = oproj_load_pipe_slot(&l->pipe, index, &slot);
  for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++)
    for (int which = 0; which < OPROJ_WEIGHTS_PARTS; which++) {
      const oproj_load_part *part = &layer->matrix[matrix].part[which];
      for (int32_t round = 0; round < part->rounds; round++)
        TRY(run_round(l, part, matrix, which, round, slot));
    }
  if (l->mine == OPROJ_OK) l->mine = oproj_load_pipe_read(&l->pipe, index);
  TRY(agree(l));
  oproj_load_pipe_ready(&l->pipe);
  progress(l, layer->total_bytes - (l->done_bytes - before));
  return OPROJ_OK;
}

/* No file may have changed its size while it was read. */
static oproj_status check_files(const load *l) {
  for (int32_t k = 0; k < l->plan.count; k++)
    for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++)
      for (int which = 0; which < OPROJ_WEIGHTS_PARTS; which++) {
        const oproj_weights_source *source = &l->plan.layers[k].matrix[matrix].part[which].source;
        if (source->tensor) TRY(oproj_weights_check_size(source->file));
      }
  return OPROJ_OK;
}

/* COLLECTIVE.  Refuses ranks that want different things, whose exchanges would not meet, before it
 * deals: rows of one rank's plan need not fit another's chunks. */
static oproj_status agree_on_plan(load *l) {
  const oproj_comm *comm = l->ctx->comm;
  int32_t chunk, mark = oproj_load_plan_mark(&l->plan), low, high;
  TRY(comm->ops->min_i32(l->ctx->comm, mark, &low));
  TRY(comm->ops->min_i32(l->ctx->comm, -mark, &high));
  REQUIRE(low == -high, OPROJ_ERR_INVALID,
          "the ranks load different layers, or from different checkpoints");
  TRY(comm->ops->min_i32(l->ctx->comm, l->plan.chunk_bytes, &chunk));
  oproj_load_plan_deal(&l->plan, chunk);
  return OPROJ_OK;
}

static oproj_status read_config(const oproj_load_config *config, oproj_load_config *out) {
  oproj_load_config full = OPROJ_LOAD_CONFIG_INIT;
  if (config) {
    REQUIRE(config->struct_size >= sizeof config->struct_size && config->struct_size <= sizeof full,
            OPROJ_ERR_INVALID, "config must come from OPROJ_LOAD_CONFIG_INIT");
    memcpy(&full, config, config->struct_size);
  }
  *out = full;
  return OPROJ_OK;
}

static oproj_status make_plan(load *l, const oproj_checkpoint *checkpoint, const int32_t *layers,
                              int32_t count, const oproj_load_config *config) {
  const oproj_ctx *ctx = l->ctx;
  int32_t size = ctx->comm->size;
  TRY(read_config(config, &l->config));
  TRY(oproj_load_plan_make(&l->plan, checkpoint, &ctx->shard, layers, count,
                           l->config.memory_bytes));
  l->shards = calloc((size_t)size, sizeof *l->shards);
  l->sent = calloc((size_t)size * 2, sizeof *l->sent);
  REQUIRE(l->shards && l->sent, OPROJ_ERR_NOMEM, "no memory to load on %d ranks", size);
  l->arrived = l->sent + size;
  for (int32_t rank = 0; rank < size; rank++)
    TRY(oproj_plan_shard(&ctx->dims, ctx->split, size, rank, &l->shards[rank]));
  return OPROJ_OK;
}

static oproj_status open_pipe(load *l, oproj_load_store_fn store, void *user) {
  if (l->plan.chunk_bytes > 0) {
    l->packed = malloc((size_t)l->plan.chunk_bytes);
    REQUIRE(l->packed, OPROJ_ERR_NOMEM, "no memory to send %d bytes", l->plan.chunk_bytes);
  }
  return oproj_load_pipe_open(&l->pipe, &l->plan, l->ctx, store, user);
}

/* COLLECTIVE.  Reads all layers, handing each complete one to `store`. */
static oproj_status run_all(load *l, const oproj_checkpoint *checkpoint, const int32_t *layers,
                            int32_t count, const oproj_load_config *config,
                            oproj_load_store_fn store, void *user) {
  oproj_comm *comm = l->ctx->comm;
  TRY(oproj_comm_agree(comm, make_plan(l, checkpoint, layers, count, config)));
  TRY(agree_on_plan(l));
  TRY(oproj_comm_agree(comm, open_pipe(l, store, user)));
  progress(l, 0);
  for (int32_t index = 0; index < count; index++) TRY(run_layer(l, index));
  if (l->mine == OPROJ_OK) l->mine = oproj_load_pipe_stored(&l->pipe);
  if (l->mine == OPROJ_OK) l->mine = check_files(l);
  return agree(l);
}

/* COLLECTIVE.  As run_all; peers wait for this rank however long, but only in here. */
static oproj_status run(load *l, const oproj_checkpoint *checkpoint, const int32_t *layers,
                        int32_t count, const oproj_load_config *config, oproj_load_store_fn store,
                        void *user) {
  oproj_watch *watch = l->ctx->comm->watch;
  oproj_watch_enter(watch, "load", 1); /* storage may be any slow */
  oproj_status status = run_all(l, checkpoint, layers, count, config, store, user);
  oproj_watch_enter(watch, "load", 0);
  return status;
}

static void release(load *l) {
  oproj_load_pipe_close(&l->pipe);
  oproj_load_plan_free(&l->plan);
  free(l->packed);
  free(l->sent);
  free(l->shards);
}

/* ---- the public calls ----------------------------------------------------------------------- */

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

typedef struct made_layers {
  oproj_ctx *ctx;
  oproj_layer **layers;
} made_layers;

static oproj_status make_layer(void *user, int32_t index, const oproj_matrix *wo_a,
                               const oproj_matrix *wo_b) {
  const made_layers *made = user;
  return oproj_layer_make(&made->layers[index], made->ctx, wo_a, wo_b);
}

oproj_status oproj_layers_load(oproj_layer **out, oproj_ctx *ctx,
                               const oproj_checkpoint *checkpoint, const int32_t *layers,
                               int32_t count, const oproj_load_config *config,
                               oproj_load_report *report) {
  REQUIRE(ctx && checkpoint && count >= 0 && (count == 0 || (out && layers)), OPROJ_ERR_INVALID,
          "out, ctx, checkpoint and layers must not be NULL, nor count negative");
  double begin = now();
  load l = {.ctx = ctx};
  for (int32_t i = 0; i < count; i++) out[i] = NULL;
  made_layers made = {.ctx = ctx, .layers = out};
  oproj_status status = run(&l, checkpoint, layers, count, config, make_layer, &made);
  release(&l); /* the threads have ended: what they counted and made stands still */
  if (report)
    *report = (oproj_load_report){.needed_bytes = l.plan.needed_bytes,
                                  .read_bytes = l.pipe.read_bytes,
                                  .received_bytes = l.received_bytes,
                                  .seconds = now() - begin};
  for (int32_t i = 0; i < count && status != OPROJ_OK; i++) {
    oproj_layer_destroy(out[i]);
    out[i] = NULL;
  }
  return status;
}

oproj_status oproj_layer_load(oproj_layer **out, oproj_ctx *ctx, const oproj_checkpoint *checkpoint,
                              int32_t index) {
  REQUIRE(out, OPROJ_ERR_INVALID, "out, ctx and checkpoint must not be NULL");
  return oproj_layers_load(out, ctx, checkpoint, &index, 1, NULL, NULL);
}

/* New values, checked but not taken yet; they lie in the load's memory. */
typedef struct replacement {
  oproj_layer *layer;
  oproj_matrix wo_a, wo_b;
} replacement;

static oproj_status keep_matrices(void *user, int32_t index, const oproj_matrix *wo_a,
                                  const oproj_matrix *wo_b) {
  replacement *fresh = user;
  (void)index;
  fresh->wo_a = *wo_a;
  fresh->wo_b = *wo_b;
  return oproj_layer_check(fresh->layer, wo_a, wo_b);
}

oproj_status oproj_layer_reload(oproj_layer *layer, const oproj_checkpoint *checkpoint,
                                int32_t index) {
  REQUIRE(layer && checkpoint, OPROJ_ERR_INVALID, "layer and checkpoint must not be NULL");
  load l = {.ctx = layer->ctx};
  replacement fresh = {.layer = layer};
  oproj_status status = run(&l, checkpoint, &index, 1, NULL, keep_matrices, &fresh);
  /* Every rank has all of it, and knows that the others have: only now is anything overwritten. */
  if (status == OPROJ_OK)
    status = oproj_comm_agree(
        l.ctx->comm, l.ctx->ops->weights_replace(layer->weights, &fresh.wo_a, &fresh.wo_b));
  release(&l);
  return status;
}
