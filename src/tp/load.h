/* load.h - inside tp: how layers get from a checkpoint's files to their ranks.
 *
 *   load.c        the public calls, and this rank's way through a load
 *   load_plan.c   who reads which bytes, and how much memory that takes: no reads, no messages
 *   load_pipe.c   two threads beside the caller's: one reads ahead, one stores finished layers
 *
 * Rows of WO_A lie in one piece in the files, and so does every part of a split set: each rank
 * reads its own, straight to where they belong. The columns of WO_B do not (at 8 ranks 2 KB of
 * each row), so its rows are dealt over the ranks in rounds: in a round each rank reads a run of
 * whole rows, and then every rank hands every other its columns of them. Each byte is thus read
 * once in the whole job, in reads of megabytes.
 *
 * While one round is exchanged the next is read, and the layer before is stored. MPI is called
 * by the caller's thread alone. */
#ifndef OPROJ_TP_LOAD_H
#define OPROJ_TP_LOAD_H

#include <pthread.h>

#include "oproj/checkpoint.h"
#include "tp/ctx.h"
#include "weights/source.h"

/* ---- the plan (load_plan.c) ----------------------------------------------------------------- */

/* One tensor's part of one layer on this rank. */
typedef struct oproj_load_part {
  oproj_weights_source source;
  int64_t at;        /* of the part in the layer's memory, as stored */
  int32_t rounds;    /* 0: this rank reads its own; else the tensor's rows are dealt */
  int64_t rows_each; /* dealt: rows that a rank reads in one round */
  int64_t row_bytes; /* dealt: of a whole row of the tensor */
} oproj_load_part;

typedef struct oproj_load_matrix {
  oproj_load_part part[OPROJ_WEIGHTS_PARTS];
  int64_t scales_at; /* of the scales as f32 in the layer's memory */
} oproj_load_matrix;

typedef struct oproj_load_layer {
  oproj_load_matrix matrix[OPROJ_WEIGHTS_MATRICES];
  int64_t total_bytes; /* all ranks' parts, as stored */
} oproj_load_layer;

typedef struct oproj_load_plan {
  const oproj_checkpoint *checkpoint;
  int32_t rank, size;
  oproj_load_layer *layers;
  int32_t count;
  int64_t layer_bytes;  /* memory for the largest layer */
  int32_t slots;        /* layers in memory at a time: 1 or 2 */
  int32_t chunk_bytes;  /* most that a rank reads in one round; 0: nothing is dealt */
  int64_t needed_bytes; /* this rank's parts, as stored */
  int64_t total_bytes;  /* all ranks' */
} oproj_load_plan;

enum { OPROJ_LOAD_CHUNKS = 2 }; /* read ahead; one more is packed to be sent */

/* Finds and checks what `shard` needs of the layers, and fits it into memory_bytes: ERR_INVALID,
 * naming the least, where it does not.  What is dealt has no rounds yet. */
oproj_status oproj_load_plan_make(oproj_load_plan *plan, const oproj_checkpoint *checkpoint,
                                  const oproj_shard *shard, const int32_t *layers, int32_t count,
                                  int64_t memory_bytes);

/* Equal on ranks whose plans belong together, by the tensors' names and shapes; never negative. */
int32_t oproj_load_plan_mark(const oproj_load_plan *plan);

/* Deals rows in rounds for chunks of that size, the least that ranks of one mark have. */
void oproj_load_plan_deal(oproj_load_plan *plan, int32_t chunk_bytes);

void oproj_load_plan_free(oproj_load_plan *plan); /* a zeroed one is allowed */

/* Rows of the tensor that `rank` reads in a round of a dealt part; may be none. */
void oproj_load_rows(const oproj_load_part *part, int32_t size, int32_t round, int32_t rank,
                     int64_t *begin, int64_t *end);

/* ---- the threads (load_pipe.c) -------------------------------------------------------------- */

/* Takes layer number `index` of the plan; its matrices live in its slot, until that is used
 * again. */
typedef oproj_status (*oproj_load_store_fn)(void *user, int32_t index, const oproj_matrix *wo_a,
                                            const oproj_matrix *wo_b);

typedef struct oproj_load_pipe {
  const oproj_load_plan *plan;
  const oproj_ctx *ctx;
  oproj_load_store_fn store; /* called by the storing thread */
  void *user;

  uint8_t *slots[2]; /* [plan->layer_bytes] each: layer k lies in slot k % plan->slots */
  uint8_t *chunks[OPROJ_LOAD_CHUNKS];

  pthread_t reader, storer;
  bool reads, stores; /* the threads run */
  pthread_mutex_t lock;
  pthread_cond_t moved; /* any of what follows */
  int64_t chunks_read, chunks_taken;
  int32_t layers_read;   /* this rank's reads of them are done */
  int32_t layers_ready;  /* complete in their slots */
  int32_t layers_stored; /* their slots are free again */
  int64_t read_bytes;
  bool stop;
  oproj_status status; /* the threads' first failure, and its sentence */
  char sentence[1024];
} oproj_load_pipe;

/* Allocates and starts the threads; a pipe that failed to open must be closed all the same. */
oproj_status oproj_load_pipe_open(oproj_load_pipe *pipe, const oproj_load_plan *plan,
                                  const oproj_ctx *ctx, oproj_load_store_fn store, void *user);

/* Each waits, and fails as soon as one of the threads has. The slot of a layer is free; the next
 * chunk has been read; this rank's reads of a layer are done; all layers are stored. */
oproj_status oproj_load_pipe_slot(oproj_load_pipe *pipe, int32_t index, uint8_t **slot);
oproj_status oproj_load_pipe_chunk(oproj_load_pipe *pipe, const uint8_t **chunk);
oproj_status oproj_load_pipe_read(oproj_load_pipe *pipe, int32_t index);
oproj_status oproj_load_pipe_stored(oproj_load_pipe *pipe);

void oproj_load_pipe_take(oproj_load_pipe *pipe);  /* the chunk may be overwritten */
void oproj_load_pipe_ready(oproj_load_pipe *pipe); /* the next layer is complete in its slot */

/* Stops the threads where they are, waits for them and frees; a zeroed pipe is allowed. */
void oproj_load_pipe_close(oproj_load_pipe *pipe);

#endif /* OPROJ_TP_LOAD_H */
