/* run_load.h - the layers of `oproj run`: loaded in one pass, or where this machine's memory does
 * not hold all of them in several. */
#ifndef OPROJ_LAUNCH_RUN_LOAD_H
#define OPROJ_LAUNCH_RUN_LOAD_H

#include "job/job.h"
#include "oproj/checkpoint.h"

typedef struct run_load {
  job_state *job;
  const oproj_checkpoint *checkpoint;
  oproj_ctx *ctx;
  int32_t end;          /* of the run: no layer from here on is loaded */
  int64_t memory_bytes; /* of oproj_load_config */

  int32_t held_begin, held_end; /* layers in memory */
  oproj_layer **held;
  int64_t needed_bytes, read_bytes, moved_bytes; /* of all ranks and passes */
  double seconds;
} run_load;

/* COLLECTIVE.  The layer of that number; loads it, with as many of the next ones as fit, in the
 * place of those held so far.  Rank 0 shows progress and prints a summary of each pass. */
oproj_status run_load_layer(run_load *load, int32_t index, oproj_layer **out);

void run_load_free(run_load *load); /* before its context; a zeroed one is allowed */

#endif /* OPROJ_LAUNCH_RUN_LOAD_H */
