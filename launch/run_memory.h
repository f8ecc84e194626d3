/* run_memory.h - what `oproj run` holds in memory, told before it does. */
#ifndef OPROJ_LAUNCH_RUN_MEMORY_H
#define OPROJ_LAUNCH_RUN_MEMORY_H

#include <stdbool.h>

#include "oproj/checkpoint.h"

/* Bytes that a run of `ranks` ranks, all on this machine, holds for each token; weights come on
 * top.  An upper bound: ranks on other machines, and what a CUDA backend keeps on its devices, are
 * counted too. */
int64_t run_memory_per_token(const oproj_model *model, int32_t ranks, bool check);

/* How many of `layers` layers to hold at a time, at least one: as many as half of this machine's
 * memory holds of all ranks' shares, whose bytes these are on average. */
int32_t run_memory_layers(int32_t layers, int64_t layer_bytes);

#endif /* OPROJ_LAUNCH_RUN_MEMORY_H */
