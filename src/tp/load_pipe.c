/* load_pipe.c - the two threads of a load: one reads this rank's bytes ahead of the exchange, one
 * stores complete layers behind it.  Counters that only grow say how far each has come; whoever
 * moves one wakes the others. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "tp/load.h"

/* One read; also the multiple of the file's bytes at which reads of more than this break. */
enum { READ_BYTES = 16 << 20 };

/* ---- moving on ------------------------------------------------------------------------------ */

/* Waits, with the lock held, until the condition holds or the load ends; false when it ends. */
#define WAIT_UNTIL(pipe, condition)                                     \
  do {                                                                  \
    while (!(condition) && !(pipe)->stop && (pipe)->status == OPROJ_OK) \
      pthread_cond_wait(&(pipe)->moved, &(pipe)->lock);                 \
  } while (0)

static bool goes_on(const oproj_load_pipe *pipe) {
  return !pipe->stop && pipe->status == OPROJ_OK;
}

static void unlock_moved(oproj_load_pipe *pipe) {
  pthread_cond_broadcast(&pipe->moved);
  pthread_mutex_unlock(&pipe->lock);
}

/* A thread's failure ends the load; its sentence is kept for the caller's thread. */
static void fail(oproj_load_pipe *pipe, oproj_status status) {
  pthread_mutex_lock(&pipe->lock);
  if (pipe->status == OPROJ_OK) {
    pipe->status = status;
    strncpy(pipe->sentence, oproj_last_error(), sizeof pipe->sentence - 1);
  }
  unlock_moved(pipe);
}

static uint8_t *slot_of(const oproj_load_pipe *pipe, int32_t index) {
  return pipe->slots[index % pipe->plan->slots];
}

static bool slot_is_free(const oproj_load_pipe *pipe, int32_t index) {
  return index < pipe->layers_stored + pipe->plan->slots;
}

/* ---- the reading thread --------------------------------------------------------------------- */

static oproj_status read_counted(oproj_load_pipe *pipe, const oproj_weights_source *from,
                                 int64_t begin, int64_t bytes, uint8_t *to) {
  TRY(oproj_tensors_read(from->file, from->tensor, begin, bytes, to));
  pthread_mutex_lock(&pipe->lock);
  pipe->read_bytes += bytes;
  bool go = goes_on(pipe);
  pthread_mutex_unlock(&pipe->lock);
  REQUIRE(go, OPROJ_ERR_PEER, "the load was stopped");
  return OPROJ_OK;
}

static oproj_status read_own(oproj_load_pipe *pipe, const oproj_load_part *part, uint8_t *slot) {
  const oproj_weights_source *from = &part->source;
  int64_t done = 0;
  while (done < from->bytes) {
    int64_t offset = from->tensor->offset + from->begin + done;
    int64_t bytes = READ_BYTES - offset % READ_BYTES;
    if (bytes > from->bytes - done) bytes = from->bytes - done;
    TRY(read_counted(pipe, from, from->begin + done, bytes, slot + part->at + done));
    done += bytes;
  }
  return OPROJ_OK;
}

static oproj_status read_round(oproj_load_pipe *pipe, const oproj_load_part *part, int32_t round) {
  int64_t begin, end;
  oproj_load_rows(part, pipe->plan->size, round, pipe->plan->rank, &begin, &end);
  if (begin == end) return OPROJ_OK;
  pthread_mutex_lock(&pipe->lock);
  WAIT_UNTIL(pipe, pipe->chunks_read - pipe->chunks_taken < OPROJ_LOAD_CHUNKS);
  bool go = goes_on(pipe);
  pthread_mutex_unlock(&pipe->lock);
  REQUIRE(go, OPROJ_ERR_PEER, "the load was stopped");
  TRY(read_counted(pipe, &part->source, begin * part->row_bytes, (end - begin) * part->row_bytes,
                   pipe->chunks[pipe->chunks_read % OPROJ_LOAD_CHUNKS]));
  pthread_mutex_lock(&pipe->lock);
  pipe->chunks_read++;
  unlock_moved(pipe);
  return OPROJ_OK;
}

static oproj_status read_part(oproj_load_pipe *pipe, const oproj_load_part *part, uint8_t *slot) {
  if (!part->source.tensor) return OPROJ_OK;
  if (part->rounds == 0) return read_own(pipe, part, slot);
  for (int32_t round = 0; round < part->rounds; round++) TRY(read_round(pipe, part, round));
  return OPROJ_OK;
}

static oproj_status read_layer(oproj_load_pipe *pipe, int32_t index) {
  uint8_t *slot;
  TRY(oproj_load_pipe_slot(pipe, index, &slot));
  for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++)
    for (int part = 0; part < OPROJ_WEIGHTS_PARTS; part++)
      TRY(read_part(pipe, &pipe->plan->layers[index].matrix[matrix].part[part], slot));
  pthread_mutex_lock(&pipe->lock);
  pipe->layers_read++;
  unlock_moved(pipe);
  return OPROJ_OK;
}

static void *read_all(void *argument) {
  oproj_load_pipe *pipe = argument;
  oproj_status status = OPROJ_OK;
  for (int32_t index = 0; index < pipe->plan->count && status == OPROJ_OK; index++)
    status = read_layer(pipe, index);
  if (status != OPROJ_OK) fail(pipe, status);
  return NULL;
}

/* ---- the storing thread --------------------------------------------------------------------- */

/* Checks what was read and describes it as a matrix inside the slot. */
static oproj_status finish_matrix(const oproj_load_pipe *pipe, const oproj_load_matrix *from,
                                  uint8_t *slot, oproj_matrix *out) {
  const oproj_load_part *weight = &from->part[OPROJ_WEIGHTS_WEIGHT];
  const oproj_load_part *scale = &from->part[OPROJ_WEIGHTS_SCALE];
  const oproj_load_plan *plan = pipe->plan;
  const oproj_weights_region *region = &weight->source.region;
  TRY(oproj_weights_source_verify(plan->checkpoint, &weight->source, plan->rank,
                                  slot + weight->at));
  *out = (oproj_matrix){.dtype = scale->source.tensor ? OPROJ_DTYPE_E4M3 : OPROJ_DTYPE_BF16,
                        .rows = region->row_end - region->row_begin,
                        .cols = region->col_end - region->col_begin,
                        .data = slot + weight->at};
  if (!scale->source.tensor) return OPROJ_OK;
  float *scales = (float *)(void *)(slot + from->scales_at);
  TRY(oproj_weights_source_verify(plan->checkpoint, &scale->source, plan->rank, slot + scale->at));
  TRY(oproj_weights_widen(oproj_tensors_path(scale->source.file), scale->source.tensor,
                          &scale->source.region, slot + scale->at, scales));
  out->scales = scales;
  out->block = oproj_checkpoint_model(plan->checkpoint)->dims.quant_block;
  return OPROJ_OK;
}

static oproj_status store_layer(oproj_load_pipe *pipe, int32_t index) {
  const oproj_load_matrix *from = pipe->plan->layers[index].matrix;
  oproj_matrix wo_a, wo_b;
  TRY(finish_matrix(pipe, &from[OPROJ_WEIGHTS_A], slot_of(pipe, index), &wo_a));
  TRY(finish_matrix(pipe, &from[OPROJ_WEIGHTS_B], slot_of(pipe, index), &wo_b));
  return pipe->store(pipe->user, index, &wo_a, &wo_b);
}

static void *store_all(void *argument) {
  oproj_load_pipe *pipe = argument;
  for (int32_t index = 0; index < pipe->plan->count; index++) {
    pthread_mutex_lock(&pipe->lock);
    WAIT_UNTIL(pipe, pipe->layers_ready > index);
    bool go = goes_on(pipe);
    pthread_mutex_unlock(&pipe->lock);
    if (!go) break;
    oproj_status status = store_layer(pipe, index);
    if (status != OPROJ_OK) {
      fail(pipe, status);
      break;
    }
    pthread_mutex_lock(&pipe->lock);
    pipe->layers_stored++;
    unlock_moved(pipe);
  }
  return NULL;
}

/* ---- for the caller's thread ---------------------------------------------------------------- */

/* With the lock held, which it gives back: the threads' failure as this thread's own. */
static oproj_status leave(oproj_load_pipe *pipe) {
  oproj_status status = pipe->status;
  if (status != OPROJ_OK)
    status = oproj_fail(status, "%s", pipe->sentence);
  else if (pipe->stop)
    status = oproj_fail(OPROJ_ERR_PEER, "the load was stopped");
  pthread_mutex_unlock(&pipe->lock);
  return status;
}

oproj_status oproj_load_pipe_slot(oproj_load_pipe *pipe, int32_t index, uint8_t **slot) {
  pthread_mutex_lock(&pipe->lock);
  WAIT_UNTIL(pipe, slot_is_free(pipe, index));
  *slot = slot_of(pipe, index);
  return leave(pipe);
}

oproj_status oproj_load_pipe_chunk(oproj_load_pipe *pipe, const uint8_t **chunk) {
  pthread_mutex_lock(&pipe->lock);
  WAIT_UNTIL(pipe, pipe->chunks_read > pipe->chunks_taken);
  *chunk = pipe->chunks[pipe->chunks_taken % OPROJ_LOAD_CHUNKS];
  return leave(pipe);
}

oproj_status oproj_load_pipe_read(oproj_load_pipe *pipe, int32_t index) {
  pthread_mutex_lock(&pipe->lock);
  WAIT_UNTIL(pipe, pipe->layers_read > index);
  return leave(pipe);
}

oproj_status oproj_load_pipe_stored(oproj_load_pipe *pipe) {
  pthread_mutex_lock(&pipe->lock);
  WAIT_UNTIL(pipe, pipe->layers_stored == pipe->plan->count);
  return leave(pipe);
}

void oproj_load_pipe_take(oproj_load_pipe *pipe) {
  pthread_mutex_lock(&pipe->lock);
  pipe->chunks_taken++;
  unlock_moved(pipe);
}

void oproj_load_pipe_ready(oproj_load_pipe *pipe) {
  pthread_mutex_lock(&pipe->lock);
  pipe->layers_ready++;
  unlock_moved(pipe);
}

/* ---- life ----------------------------------------------------------------------------------- */

static oproj_status allocate(oproj_load_pipe *pipe) {
  const oproj_load_plan *plan = pipe->plan;
  const oproj_ctx *ctx = pipe->ctx;
  for (int32_t i = 0; i < plan->slots; i++) {
    void *slot;
    TRY(ctx->ops->host_create(ctx->kernels, (size_t)plan->layer_bytes, &slot));
    pipe->slots[i] = slot;
  }
  for (int i = 0; i < OPROJ_LOAD_CHUNKS && plan->chunk_bytes > 0; i++) {
    pipe->chunks[i] = malloc((size_t)plan->chunk_bytes);
    REQUIRE(pipe->chunks[i], OPROJ_ERR_NOMEM, "no memory for reads of %d bytes", plan->chunk_bytes);
  }
  return OPROJ_OK;
}

oproj_status oproj_load_pipe_open(oproj_load_pipe *pipe, const oproj_load_plan *plan,
                                  const oproj_ctx *ctx, oproj_load_store_fn store, void *user) {
  *pipe = (oproj_load_pipe){.plan = plan, .ctx = ctx, .store = store, .user = user};
  pthread_mutex_init(&pipe->lock, NULL);
  pthread_cond_init(&pipe->moved, NULL);
  TRY(allocate(pipe));
  /* Signals are the caller's: his handlers run on his thread. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pipe->reads = pthread_create(&pipe->reader, NULL, read_all, pipe) == 0;
  pipe->stores = pipe->reads && pthread_create(&pipe->storer, NULL, store_all, pipe) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  REQUIRE(pipe->stores, OPROJ_ERR_NOMEM, "no thread can be started to load");
  return OPROJ_OK;
}

void oproj_load_pipe_close(oproj_load_pipe *pipe) {
  if (!pipe->plan) return;
  pthread_mutex_lock(&pipe->lock);
  pipe->stop = true;
  unlock_moved(pipe);
  if (pipe->reads) pthread_join(pipe->reader, NULL);
  if (pipe->stores) pthread_join(pipe->storer, NULL);
  pthread_cond_destroy(&pipe->moved);
  pthread_mutex_destroy(&pipe->lock);
  for (int i = 0; i < OPROJ_LOAD_CHUNKS; i++) free(pipe->chunks[i]);
  for (int i = 0; i < 2; i++) pipe->ctx->ops->host_destroy(pipe->ctx->kernels, pipe->slots[i]);
}
